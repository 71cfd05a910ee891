"""The reference implementation of `slow`, continued: baselines of research on client drift, 2020 to 2025, and
personalised algorithms.

It was written from the equations of the papers, like `slow`, and has the same notation. There are two more symbols:

    e(rho, u)   rho u / ||u||, the perturbation of the sharpness-aware algorithms
    v_i         the state of client i: its personal model, or a part of it

Personalised algorithms also report the personal models of all clients after each round, in ``fed.info``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from slow import Federation, Gradient, Vector, corrected, heavy_ball, logits, mean_gradient, one_hot, pack, softmax


def e(rho: float, u: Vector) -> Vector:
    """Returns the vector of length rho along u, or 0 if u = 0."""
    norm = np.sqrt((u**2).sum())
    return rho * u / norm if norm > 0 else np.zeros_like(u)


def clipped(fed: Federation, g: Vector) -> Vector:
    """Returns g, scaled down to the clip norm if its norm is larger."""
    norm, limit = np.sqrt((g**2).sum()), fed.local.clip_norm
    return g if limit is None or norm <= limit else g * limit / norm


def per_step(D: Vector, K: float, eta: float) -> Vector:
    """Returns -D / (K eta), the mean gradient of the K steps of the update D. It is 0 for K = 0."""
    return -D / ((K or 1) * eta)


def local_batches(fed: Federation, t: int, i: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields all K_i batches of client i in round t."""
    for epoch in range(fed.local.epochs):
        yield from fed.batches(t, i, epoch)


def from_logits(errors: np.ndarray, x: np.ndarray) -> Vector:
    """Returns the gradient of the mean loss of a batch with respect to the parameters.

    ``errors`` are the gradients of the examples' losses with respect to their logits, [B, C].
    """
    return pack({"b": errors.mean(axis=0), "w": x.T @ errors / len(x)})


def plus(gradient: Gradient, tilt: Vector | float = 0.0, pull: float = 0.0, anchor: Vector | float = 0.0) -> Gradient:
    """Adds the gradient of <tilt, theta> + pull/2 ||theta - anchor||^2. Like `corrected`, but for any gradient."""
    return lambda theta, x, y: gradient(theta, x, y) + tilt + pull * (theta - anchor)


def shifted(by: Vector) -> Gradient:
    """Returns a gradient function that evaluates `mean_gradient` at theta + by."""
    return lambda theta, x, y: mean_gradient(theta + by, x, y)


def sharpness_aware(rho: float, alpha: float = 1.0, normalise: bool = True) -> Gradient:
    """Returns the gradient function (1 - alpha) g1 + alpha g2.

    g1 is the gradient of the batch at theta. g2 is its gradient at theta + e(rho, g1), or at theta + rho g1 if
    ``normalise`` is False.
    """

    def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        g1 = mean_gradient(theta, x, y)
        g2 = mean_gradient(theta + (e(rho, g1) if normalise else rho * g1), x, y)
        return (1 - alpha) * g1 + alpha * g2

    return gradient


def fednova(fed, w, mu=0.0, server_lr=1.0):
    """Wang et al. 2020: updates are divided by a_i, the sum of the coefficients of the gradients in -D_i / eta_t."""
    for t, S in enumerate(fed.cohorts):
        A, d = [], []
        for i in S:
            direction = heavy_ball(fed.local.momentum)
            K = fed.num_steps(i)
            if mu > 0:  # in each later step, the proximal term multiplies a gradient's coefficient by 1 - eta_t mu
                a_i = sum(((1 - fed.lr(t) * mu) ** k for k in range(K)), 0.0)
            else:
                a_i = sum((direction(np.ones(1))[0] for _ in range(K)), 0.0)
            D_i = fed.train(t, i, w, corrected(pull=mu, anchor=w)) - w
            A.append(np.array(float(K) if mu > 0 else a_i))
            d.append(D_i / (a_i or 1))
        w = w + server_lr * fed.mean(S, A, "examples") * fed.mean(S, d, "examples")
        yield w


def client_momentum(g, fed, w, alpha=0.1, server_lr=1.0, steps="cohort"):
    """Xu et al. 2021: the direction of a local step is alpha g + (1 - alpha) Delta, with the gradient function g.

    Delta is the mean direction of the last round. In it, updates are divided by the mean K of the cohort
    (``steps="cohort"``) or by each client's own K ("own").
    """
    Delta = np.zeros_like(w)
    for t, S in enumerate(fed.cohorts):

        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray, Delta: Vector = Delta) -> Vector:
            return alpha * g(theta, x, y) + (1 - alpha) * Delta

        D = [fed.train(t, i, w, gradient) - w for i in S]
        K = [fed.num_steps(i) for i in S]
        w = w + server_lr * fed.mean(S, D)
        if steps == "cohort":
            Delta = per_step(fed.mean(S, D), float(np.mean(K)), fed.lr(t))
        else:
            Delta = fed.mean(S, [per_step(D_i, K_i, fed.lr(t)) for D_i, K_i in zip(D, K, strict=True)])
        yield w


fedcm = partial(client_momentum, mean_gradient)


def mofedsam(fed, w, rho=0.1, **options):
    """Qu et al. 2022, algorithm 2: FedCM with the gradient of FedSAM."""
    return client_momentum(sharpness_aware(rho), fed, w, **options)


def fedsam(fed, w, rho=0.1, server_lr=1.0, weighting="uniform"):
    """Qu et al. 2022, algorithm 1."""
    for t in range(len(fed.cohorts)):
        w = w + server_lr * fed.mean_update(t, w, weighting, sharpness_aware(rho))
        yield w


def fedacg(fed, w, beta=0.002, lam=0.85):
    """Kim et al. 2024: clients start at w + lam m, the point to which the server momentum moves the model.

    A proximal term keeps them near this point.
    """
    m = np.zeros_like(w)
    for t in range(len(fed.cohorts)):
        start = w + lam * m
        m = lam * m + fed.mean_update(t, start, "uniform", corrected(pull=beta, anchor=start))
        w = w + m
        yield w


def fedntd(fed, w, beta=1.0, temperature=1.0, weighting="examples"):
    """Lee et al. 2022: distillation from the global model, restricted to the classes other than the example's label."""

    def local_gradient(w: Vector) -> Gradient:
        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            at_y = one_hot(y, len(theta) // (x.shape[1] + 1))

            def q(theta: Vector) -> np.ndarray:
                return softmax(np.where(at_y > 0, -np.inf, logits(theta, x) / temperature))

            return from_logits(softmax(logits(theta, x)) - at_y + beta * temperature * (q(theta) - q(w)), x)

        return gradient

    for t in range(len(fed.cohorts)):
        w = w + fed.mean_update(t, w, weighting, local_gradient(w))
        yield w


def fedlc(fed, w, tau=1.0, denominator="all", missing="mask", weighting="examples"):
    """Zhang et al. 2022: the logits are reduced by tau n_ic^(-1/4).

    n_ic is the number of examples of client i with label c.
    """

    def local_gradient(i: int) -> Gradient:
        x_i, y_i = fed.clients[i]
        num_classes = len(w) // (x_i.shape[1] + 1)
        counts = np.bincount(y_i, minlength=num_classes)
        margins = np.zeros(num_classes)
        if tau != 0:
            margins = tau * np.maximum(counts, 1e-8) ** -0.25
            if missing == "mask":
                margins[counts == 0] = np.inf

        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            at_y = one_hot(y, num_classes)
            z = logits(theta, x) - margins
            if denominator == "others":
                z = np.where(at_y > 0, -np.inf, z)
            return from_logits(softmax(z) - at_y, x)

        return gradient

    for t, S in enumerate(fed.cohorts):
        w = fed.mean(S, [fed.train(t, i, w, local_gradient(i)) for i in S], weighting)
        yield w


def fedexp(fed, w, eps=0.001, weighting="uniform"):
    """Jhunjhunwala et al. 2023: the server learning rate is larger if the updates differ more."""
    for t, S in enumerate(fed.cohorts):
        D = [fed.train(t, i, w) - w for i in S]
        mean_D = fed.mean(S, D, weighting)
        mean_square = fed.mean(S, [(D_i**2).sum() for D_i in D], weighting)
        eta_g = max(1.0, float(mean_square / (2 * ((mean_D**2).sum() + eps))))
        w = w + eta_g * mean_D
        fed.info.append({"eta_g": eta_g})
        yield w


def fedspeed(fed, w, rho=0.1, lam=0.1, alpha=1.0, normalise=True, aggregation="all"):
    """Sun et al. 2023, with h_i = -ghat_i / lam. lam is 1 / lambda of the paper."""
    h = np.zeros((fed.num_clients, len(w)))
    for t, S in enumerate(fed.cohorts):
        thetas, corrected_thetas = [], []
        for i in S:
            theta_i = fed.train(t, i, w, plus(sharpness_aware(rho, alpha, normalise), 0.0, lam, w - h[i]))
            h[i] += theta_i - w
            thetas.append(theta_i)
            corrected_thetas.append(theta_i + h[i])
        w = fed.mean(S, thetas) + h.mean(axis=0) if aggregation == "all" else fed.mean(S, corrected_thetas)
        yield w


def fedsmoo(fed, w, rho=0.1, alpha=0.1, upload="mu_minus_s"):
    """Sun et al. 2023b: FedDyn with sharpness-aware local steps.

    The clients' perturbations s_i are constrained to a common s, by a second ADMM with dual variables mu_i.
    """
    h, mu = np.zeros((2, fed.num_clients, len(w)))
    s = np.zeros_like(w)
    for t, S in enumerate(fed.cohorts):
        thetas, messages = [], []
        for i in S:
            step, theta, s_i = fed.fresh_step(t), w, np.zeros_like(w)
            for x, y in local_batches(fed, t, i):
                s_i = e(rho, mean_gradient(theta, x, y) - mu[i] - s)
                mu[i] += s_i - s
                g = mean_gradient(theta + s_i, x, y) + alpha * (theta - w + h[i])
                theta = step(theta, g, theta)
            h[i] += theta - w
            thetas.append(theta)
            messages.append(mu[i] - s_i if upload == "mu_minus_s" else mu[i])
        s = e(rho, fed.mean(S, messages))
        w = fed.mean(S, thetas) + h.mean(axis=0)
        yield w


def fedlesam(fed, w, rho=0.1, first="none", old="client", correction="none", feddyn_alpha=0.1):
    """Fan et al. 2024: the perturbation is computed from two global models.

    FedLESAM-S and FedLESAM-D add the corrections of SCAFFOLD and FedDyn.
    """
    received = dict.fromkeys(range(fed.num_clients), w) if first == "initial" else {}  # w_old_i
    w_before = w
    c = np.zeros_like(w)
    c_i = [c] * fed.num_clients
    h = np.zeros((fed.num_clients, len(w)))
    for t, S in enumerate(fed.cohorts):
        thetas, dc = [], []
        for i in S:
            e_i = e(rho, (received.get(i, w) if old == "client" else w_before) - w)
            pull = feddyn_alpha if correction == "feddyn" else 0.0
            theta_i = fed.train(t, i, w, plus(shifted(e_i), c - c_i[i], pull, w - h[i]))
            received[i] = w
            thetas.append(theta_i)
            if correction == "scaffold":
                new = c_i[i] - c + per_step(theta_i - w, fed.num_steps(i), fed.lr(t))
                dc.append(new - c_i[i])
                c_i[i] = new
            if correction == "feddyn":
                h[i] += theta_i - w
        w_before = w
        w = fed.mean(S, thetas) + h.mean(axis=0)
        c = c + np.sum(dc, axis=0) / fed.num_clients
        yield w


def fedadamw(fed, w, alpha=0.5, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.01, blocks="leaf"):
    """Local AdamW. The second moment v starts at the cohort's mean of the last round.

    Each step also adds alpha times the global direction Delta.
    """
    num_classes = len(w) // (fed.clients[0][0].shape[1] + 1)

    def block_mean(v: Vector) -> Vector:
        """Replaces every entry by the mean of its leaf, b or w."""
        if blocks == "none":
            return v
        return np.concatenate([np.full_like(leaf, leaf.mean()) for leaf in np.split(v, [num_classes])])

    Delta, vbar, T = np.zeros_like(w), np.zeros_like(w), 0.0
    for t, S in enumerate(fed.cohorts):
        D, v_means = [], []
        for i in S:
            theta, m, v = w, np.zeros_like(w), vbar
            for k, (x, y) in enumerate(local_batches(fed, t, i), start=1):
                g = clipped(fed, mean_gradient(theta, x, y))
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g**2
                adaptive = (m / (1 - b1**k)) / (np.sqrt(v / (1 - b2 ** (T + k))) + eps)
                theta = theta - fed.lr(t) * (adaptive + alpha * Delta + weight_decay * theta)
            D.append(theta - w)
            v_means.append(block_mean(v))
        K = float(np.mean([fed.num_steps(i) for i in S]))
        w = w + fed.mean(S, D)
        Delta = per_step(fed.mean(S, D), K, fed.lr(t))
        vbar = fed.mean(S, v_means)
        T = T + K
        yield w


def ditto(fed, w, lam=1.0, personal_epochs=None, weighting="examples"):
    """Li et al. 2021b: FedAvg, and a personal model for each client.

    A proximal term keeps the personal model near the global model that the client received.
    """
    epochs = fed.local.epochs if personal_epochs is None else personal_epochs
    personal = replace(fed, local=replace(fed.local, epochs=epochs))
    v = np.tile(w, (fed.num_clients, 1))
    for t, S in enumerate(fed.cohorts):
        for i in S:
            v[i] = personal.train(t, i, v[i], corrected(pull=lam, anchor=w))
        w = w + fed.mean_update(t, w, weighting)
        fed.info.append({"personal": v.copy()})
        yield w


def pfedme(fed, w, lam=15.0, inner_steps=5, inner_lr=0.1, beta=1.0, inner_start="warm", weighting="uniform"):
    """Dinh et al. 2020: x approximately minimises F_i(x) + lam/2 ||x - w_i||^2.

    w_i makes gradient steps on the Moreau envelope of F_i.
    """
    inner = replace(fed, local=replace(fed.local, lr=inner_lr, lr_decay=1.0))
    v = np.tile(w, (fed.num_clients, 1))
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            inner_step, w_i, x = inner.fresh_step(t), w, w
            for batch in local_batches(fed, t, i):
                if inner_start == "local":
                    x = w_i
                for _ in range(inner_steps):
                    x = inner_step(x, corrected(pull=lam, anchor=w_i)(x, *batch), x)
                w_i = w_i - fed.lr(t) * lam * (w_i - x)
            D.append(w_i - w)
            v[i] = x
        w = w + beta * fed.mean(S, D, weighting)
        fed.info.append({"personal": v.copy()})
        yield w


def apfl(fed, w, alpha=0.5, adaptive=False, alpha_every="step", alpha_decay=0.0, weighting="uniform"):
    """Deng et al. 2020: v_i is trained on the loss of the mixture alpha_i v_i + (1 - alpha_i) theta."""
    v = np.tile(w, (fed.num_clients, 1))
    alphas = np.full(fed.num_clients, float(alpha))
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            step, theta = fed.fresh_step(t), w
            for k, (x, y) in enumerate(local_batches(fed, t, i)):
                a = alphas[i]
                new_theta = step(theta, mean_gradient(theta, x, y), theta)
                g = mean_gradient(a * v[i] + (1 - a) * theta, x, y)
                by_v, by_alpha = a * g, (v[i] - theta) @ g
                v[i] = step(v[i], by_v, v[i])
                if adaptive and (alpha_every == "step" or k == 0):
                    alphas[i] = np.clip(a - fed.lr(t) * (by_alpha + alpha_decay * a), 0, 1)
                theta = new_theta
            D.append(theta - w)
        w = w + fed.mean(S, D, weighting)
        shown = {"alpha": alphas.copy()} if adaptive else {}
        fed.info.append(shown | {"personal": alphas[:, None] * v + (1 - alphas[:, None]) * w})
        yield w


def partly_shared(fed, w, base="fedavg", schedule="joint", *, personal, base_epochs=1, new_clients="initial"):
    """FedPer, FedRep, FedBABU and LG-FedAvg: the entries in the mask ``personal`` stay with the client.

    With new_clients="mean", a client that trains for the first time starts with the mean of those of the last cohort.
    """
    E, shared = fed.local.epochs, ~personal
    phases = {  # (epochs, mask of the entries that are trained in them)
        "joint": [(range(E), personal | shared)],
        "alternate": [(range(E - base_epochs), personal), (range(E - base_epochs, E), shared)],
        "frozen": [(range(E), shared)],
    }[schedule]
    shared_epochs = sum(len(epochs) for epochs, trained in phases if (trained & shared).any())
    seen: set[int] = set()
    p = np.tile(w, (fed.num_clients, 1))  # p_i; only the entries in the mask are used
    c = np.zeros_like(w)
    c_i = [c] * fed.num_clients
    for t, S in enumerate(fed.cohorts):
        D, dc = [], []
        for i in S:
            start = theta = np.where(personal, p[i], w)
            for epochs, trained in phases:
                step = fed.fresh_step(t)
                for epoch in epochs:
                    for x, y in fed.batches(t, i, epoch):
                        g = mean_gradient(theta, x, y) + c - c_i[i]
                        theta = step(theta, trained * g, trained * theta)
            p[i] = theta
            D_i = shared * (theta - start)
            D.append(D_i)
            if base == "scaffold":  # K is the number of steps that train shared entries
                K = shared_epochs * fed.num_steps(i) // E
                new = c_i[i] - c + per_step(D_i, K, fed.lr(t))
                dc.append(new - c_i[i])
                c_i[i] = new
        weighting = "examples" if base == "fedavg" else "uniform"
        w = w + fed.mean(S, D, weighting)
        c = c + np.sum(dc, axis=0) / fed.num_clients
        if new_clients == "mean":
            seen |= set(S)
            w = np.where(personal, fed.mean(S, [p[i] for i in S], weighting), w)
            for i in set(range(fed.num_clients)) - seen:
                p[i] = w
        fed.info.append({"personal": np.where(personal, p, w)})
        yield w
