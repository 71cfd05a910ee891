"""The reference implementation of `slow`, continued: decorrelated features, flat minima, mimicked and generalised
momentum, meta-learning, fairness, and clusters of clients.

It was written from the equations of the papers, like `slow` and `slow_newer`, and has their notation. There are a few
more symbols:

    start   the model with which a client begins its local training: w, unless an algorithm says otherwise
    F_i     the mean loss over all examples of client i
    b       the number of examples in a batch

A client without examples has the loss 0 and the gradient 0. It makes no steps, and D_i / (K_i eta) is 0.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from slow import (
    Federation,
    Gradient,
    Vector,
    derivative,
    log_softmax,
    logits,
    mean_gradient,
    one_hot,
    softmax,
    tanh_layers,
)
from slow_newer import clipped, e, from_logits, local_batches, per_step, plus, sharpness_aware


def losses(theta: Vector, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the cross-entropy of every example, [b]."""
    scores = logits(theta, x)
    return -(one_hot(y, scores.shape[1]) * log_softmax(scores)).sum(axis=1)


def full_loss(fed: Federation, i: int, theta: Vector) -> float:
    """Returns F_i(theta)."""
    return float(losses(theta, *fed.clients[i]).mean()) if fed.size(i) else 0.0


def full_gradient(fed: Federation, i: int, theta: Vector) -> Vector:
    """Returns the gradient of F_i at theta."""
    return mean_gradient(theta, *fed.clients[i]) if fed.size(i) else np.zeros_like(theta)


def feddecorr(fed, w, beta=0.1, scale="code", weighting="examples"):
    """Shi et al. 2023: the loss is CE + beta R, and R penalises correlations between features. The model is MOON's.

    z are the features of a batch, standardised: (h - mean) / sqrt(1e-8 + variance), with the variance's divisor b - 1.
    R is the mean over all pairs of features j != k of (z'z)_jk^2 / b ("code"), or of (z'z / (b - 1))_jk^2
    ("correlation"). It is 0 if b = 1.
    """

    def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        b = len(x)

        def loss(theta: Vector) -> complex:
            h, scores = tanh_layers(theta, x)
            value = -(one_hot(y, scores.shape[1]) * log_softmax(scores)).sum() / b
            if b == 1:
                return value
            centred = h - h.sum(axis=0) / b
            z = centred / np.sqrt(1e-8 + (centred**2).sum(axis=0) / (b - 1))
            products = z.T @ z
            pairs = ~np.eye(len(products), dtype=bool)
            if scale == "code":
                return value + beta * (products[pairs] ** 2).mean() / b
            return value + beta * ((products[pairs] / (b - 1)) ** 2).mean()

        return derivative(loss, theta)

    for t in range(len(fed.cohorts)):
        w = w + fed.mean_update(t, w, weighting, gradient)
        yield w


def fedgamma(fed, w, rho=0.1, server_lr=1.0):
    """Dai et al. 2023: SCAFFOLD with option II, for the gradient of FedSAM.

    The correction c - c_i is added to the second gradient only.
    """
    c = np.zeros_like(w)
    c_i = [c] * fed.num_clients
    for t, S in enumerate(fed.cohorts):
        D, dc = [], []
        for i in S:
            D_i = fed.train(t, i, w, plus(sharpness_aware(rho), c - c_i[i])) - w
            new = c_i[i] - c + per_step(D_i, fed.num_steps(i), fed.lr(t))
            D.append(D_i)
            dc.append(new - c_i[i])
            c_i[i] = new
        w = w + server_lr * fed.mean(S, D)
        c = c + np.sum(dc, axis=0) / fed.num_clients
        yield w


def mimicry(lite, fed, w, beta=0.9, server_lr=1.0, damped=False, weighting="uniform"):
    """Karimireddy et al. 2020b, algorithm 1 for SGD with momentum.

    A local step of Mime is along beta m + (g(theta) - g(w) + c), with m fixed in the round, g(theta) and g(w) on the
    same batch, and c the mean of the full gradients at w. Only g(theta) - g(w) + c is clipped. ``damped`` multiplies
    it, its weight decay, and c in the update of m by 1 - beta. MimeLite has g(theta) only.
    """
    kappa = 1 - beta if damped else 1.0
    m = np.zeros_like(w)
    for t, S in enumerate(fed.cohorts):
        c = fed.mean(S, [full_gradient(fed, i, w) for i in S], weighting)
        D = []
        for i in S:
            theta = w
            for x, y in local_batches(fed, t, i):
                g = mean_gradient(theta, x, y)
                if not lite:
                    g = g - mean_gradient(w, x, y) + c
                g = clipped(fed, g) + fed.local.weight_decay * theta
                theta = theta - fed.lr(t) * (beta * m + kappa * g)
            D.append(theta - w)
        w = w + server_lr * fed.mean(S, D, weighting)
        m = beta * m + kappa * c
        yield w


mime, mimelite = partial(mimicry, False), partial(mimicry, True)


def adabest(fed, w, mu=0.02, beta=0.98):
    """Varno et al. 2022, algorithm 1, with mu outside of h_i."""
    h = np.zeros((fed.num_clients, len(w)))
    last: dict[int, int] = {}  # t_i, the round of the last participation
    wbar = w
    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:
            theta_i = fed.train(t, i, w, plus(mean_gradient, -mu * h[i]))
            h[i] = h[i] / (t - last.get(i, t - 1)) + (w - theta_i)
            last[i] = t
            thetas.append(theta_i)
        wbar_old, wbar = wbar, fed.mean(S, thetas)
        w = wbar + beta * (wbar - wbar_old)
        yield w


def decaying(fed: Federation, t: int, i: int, w: Vector, rho: float, tilt: Vector | float = 0.0) -> Vector:
    """Returns theta_i of FedSWA: the rate of step k is eta_k = eta (1 - (1 - rho) k / K_i). g + tilt is clipped."""
    theta, K = w, fed.num_steps(i)
    for k, (x, y) in enumerate(local_batches(fed, t, i)):
        eta_k = fed.lr(t) * (1 - (1 - rho) * k / K)
        g = clipped(fed, mean_gradient(theta, x, y) + tilt)
        theta = theta - eta_k * (g + fed.local.weight_decay * theta)
    return theta


def fedswa(fed, w, rho=0.1, alpha=1.5):
    """Liu et al. 2025: the local learning rate decays within the round to about rho eta.

    The server moves by alpha times the mean update, w <- w + alpha mean D.
    """
    for t, S in enumerate(fed.cohorts):
        w = w + alpha * fed.mean(S, [decaying(fed, t, i, w, rho) - w for i in S])
        yield w


def fedmoswa(fed, w, rho=0.1, alpha=1.5, gamma=0.2):
    """Liu et al. 2025: FedSWA with the correction m - c_i of the gradients.

    c_i <- c_i - m - D_i / sum_k eta_k and m <- m + gamma (mean c_i - m), as in the paper.
    """
    m = np.zeros_like(w)
    c_i = [m] * fed.num_clients
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            D_i = decaying(fed, t, i, w, rho, m - c_i[i]) - w
            steps = (fed.num_steps(i) * (1 + rho) + (1 - rho)) / 2  # sum_k eta_k / eta
            c_i[i] = c_i[i] - m + per_step(D_i, steps, fed.lr(t))
            D.append(D_i)
        w = w + alpha * fed.mean(S, D)
        m = m + gamma * (fed.mean(S, [c_i[i] for i in S]) - m)
        yield w


def with_momentum(fed: Federation, t: int, i: int, w: Vector, m: Vector, beta: float, nesterov: bool) -> Vector:
    """Returns theta_i of GHBM and LocalGHBM: each step has the share beta m / K_i of the momentum.

    It is a term of the gradient (and is clipped with it), or a move before the gradient is evaluated (``nesterov``).
    """
    step, theta, K = fed.fresh_step(t), w, fed.num_steps(i)
    for x, y in local_batches(fed, t, i):
        if nesterov:
            theta = theta - beta * m / K
            g = mean_gradient(theta, x, y)
        else:
            g = mean_gradient(theta, x, y) + beta * m / (fed.lr(t) * K)
        theta = step(theta, g, theta)
    return theta


def ghbm(fed, w, tau=10, beta=0.9, nesterov=False, weighting="examples"):
    """Zaccone et al. 2025: the momentum of round t is m = (w_(t - tau) - w_t) / tau. It is 0 for t < tau."""
    past = [w]  # w_0 .. w_t
    for t, S in enumerate(fed.cohorts):
        m = (past[t - tau] - w) / tau if t >= tau else np.zeros_like(w)
        w = w + fed.mean(S, [with_momentum(fed, t, i, w, m, beta, nesterov) - w for i in S], weighting)
        past.append(w)
        yield w


def localghbm(fed, w, tau=None, beta=0.9, nesterov=False, weighting="examples"):
    """Zaccone et al. 2025: m_i = (anchor_i - w) / tau_i. anchor_i is the model of client i's last participation.

    tau_i is the number of rounds since then, or the constant ``tau``. m_i is 0 in the first participation.
    """
    anchors: dict[int, tuple[int, Vector]] = {}
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            m_i = np.zeros_like(w)
            if i in anchors:
                then, anchor = anchors[i]
                m_i = (anchor - w) / (t - then if tau is None else tau)
            D.append(with_momentum(fed, t, i, w, m_i, beta, nesterov) - w)
            anchors[i] = t, w
        w = w + fed.mean(S, D, weighting)
        yield w


def fedhbm(fed, w, tau, beta=1.0, weighting="examples"):
    """Zaccone et al. 2025: m_i = (anchor_i - theta) / tau at every step, and anchor_i is the last theta_i.

    m_i is 0 in the first participation.
    """
    anchors: dict[int, Vector] = {}
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            gradient: Gradient = mean_gradient
            if i in anchors and fed.num_steps(i):  # a pull towards a point, but of negative sign
                gradient = plus(mean_gradient, 0.0, -beta / (tau * fed.lr(t) * fed.num_steps(i)), anchors[i])
            anchors[i] = fed.train(t, i, w, gradient)
            D.append(anchors[i] - w)
        w = w + fed.mean(S, D, weighting)
        yield w


def fedgmt(fed, w, gamma=1.0, temperature=3.0, alpha=0.95, beta=10.0, aggregation="all", weighting="uniform"):
    """Li et al. 2025: distillation from ema, the moving average of the global models, and the dual variables of FedDyn.

    The loss is CE + gamma T^2 KL(p_ema || p_theta) + <h_i, theta> / beta. The new model is mean theta_i + h, with
    weights in the first mean only, or ("cohort") the mean of theta_i + h_i, with weights for theta_i only.
    """
    T = temperature
    h = np.zeros((fed.num_clients, len(w)))
    ema = w

    def local_gradient(ema: Vector) -> Gradient:
        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            z = logits(theta, x)
            distillation = gamma * T * (softmax(z / T) - softmax(logits(ema, x) / T))
            return from_logits(softmax(z) - one_hot(y, z.shape[1]) + distillation, x)

        return gradient

    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:
            theta_i = fed.train(t, i, w, plus(local_gradient(ema), h[i] / beta))
            h[i] += theta_i - w
            thetas.append(theta_i)
        w = fed.mean(S, thetas, weighting) + (h if aggregation == "all" else h[list(S)]).mean(axis=0)
        ema = alpha * ema + (1 - alpha) * w
        yield w


def fedsol(fed, w, rho=1.0, temperature=3.0, adaptive=True, weighting="examples"):
    """Lee et al. 2024: the gradient of CE at theta + e(rho, r), where r is the gradient of KL(p_w || p_theta).

    If ``adaptive``, e is then multiplied by |theta - w|, divided by its norm over the outputs: of every row of the
    weights [p, C], and of the vector b.
    """

    def local_gradient(w: Vector) -> Gradient:
        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            if (theta == w).all():
                return mean_gradient(theta, x, y)
            T = temperature
            r = from_logits((softmax(logits(theta, x) / T) - softmax(logits(w, x) / T)) / T, x)
            perturbation = e(rho, r)
            if adaptive:
                distance = np.abs(theta - w).reshape(x.shape[1] + 1, -1)  # b, and the rows of the weights
                norms = np.sqrt((distance**2).sum(axis=-1, keepdims=True))
                perturbation = perturbation * (distance / np.maximum(norms, 1e-12)).ravel()
            return mean_gradient(theta + perturbation, x, y)

        return gradient

    for t in range(len(fed.cohorts)):
        w = w + fed.mean_update(t, w, weighting, local_gradient(w))
        yield w


def hessian_product(theta: Vector, v: Vector, x: np.ndarray) -> Vector:
    """Returns the product of the Hessian of a batch's mean loss at theta with v. It does not depend on the labels."""
    p, dz = softmax(logits(theta, x)), logits(v, x)
    return from_logits(p * (dz - (p * dz).sum(axis=1, keepdims=True)), x)


INNER, THIRD = 1000, 2000  # the epochs that Per-FedAvg's other two batches are taken from are `epoch` + these numbers


def perfedavg(fed, w, alpha=0.01, variant="hessian_free", delta=0.001, batches="independent", weighting="uniform"):
    """Fallah et al. 2020, algorithm 1, with the approximations of section 5: the loss is F_i(theta - alpha F_i').

    u is a gradient at theta, and v one at theta - alpha u. A step is along v ("first_order"), or along v - alpha H v
    with the Hessian at theta as a central difference of gradients ("hessian_free"). The product is exact if ``delta``
    is None. The batch of v is that of FedAvg. The batches of u and H are from two other orders of the same epoch.
    """
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            step, theta = fed.fresh_step(t), w
            for epoch in range(fed.local.epochs):
                epochs = (epoch, epoch + INNER, epoch + THIRD) if batches == "independent" else (epoch,) * 3
                for outer, inner, third in zip(*(fed.batches(t, i, number) for number in epochs), strict=True):
                    u = mean_gradient(theta, *inner)
                    g = v = mean_gradient(theta - alpha * u, *outer)
                    if variant == "hessian_free":
                        if delta is None:
                            Hv = hessian_product(theta, v, third[0])
                        else:
                            above, below = (mean_gradient(theta + d * v, *third) for d in (delta, -delta))
                            Hv = (above - below) / (2 * delta)
                        g = v - alpha * Hv
                    theta = step(theta, g, theta)
            D.append(theta - w)
        w = w + fed.mean(S, D, weighting)
        personal = [w - alpha * full_gradient(fed, i, w) for i in range(fed.num_clients)]
        fed.info.append({"personal": np.array(personal)})
        yield w


def qfedavg(fed, w, q=1.0, lipschitz=None):
    """Li et al. 2020b, algorithm 2: the objective is the sum of F_i^(q + 1) / (q + 1). F_i is taken at w, plus 1e-10.

    Clients are drawn uniformly, so the objective has no weights p_i.
    """
    for t, S in enumerate(fed.cohorts):
        L = 1 / fed.lr(t) if lipschitz is None else lipschitz
        numerators, denominators = [], []
        for i in S:
            F = full_loss(fed, i, w) + 1e-10
            d = -L * (fed.train(t, i, w) - w)
            numerators.append(F**q * d)
            denominators.append(np.array(q * F ** (q - 1) * (d**2).sum() + L * F**q))
        w = w - fed.mean(S, numerators) / fed.mean(S, denominators)
        yield w


def on_simplex(v: Vector) -> Vector:
    """Returns the point of the probability simplex that is nearest to v, max(v - s, 0) with the s that gives sum 1."""
    u = np.sort(v)[::-1]
    thresholds = (np.cumsum(u) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - thresholds[u > thresholds][-1], 0)


def agnostic(
    fed, w, domains, domain=None, domain_lr=0.1, update="eg", window=1, scale="client", lambda0=None, counts0=None
):
    """Ro et al. 2021, algorithm 1, and the projection of Mohri et al. 2019. lam is lambda, the weights of the domains.

    ``domain(x, y)`` is the domain of every row. The default is its label. A row of domain d has the weight
    a_d = lam_d / max(1, n_d), where n_d is the mean of the counts in the last ``window`` rounds. All counts before the
    first round are ``counts0``. A batch is divided by the weight of the client's rows (``scale="client"``) or by its
    own ("batch"). A batch without weight has the gradient 0, and a client without weight does not move. ``lambda0`` is
    not normalised.

    ``fed.info`` has "lambda", after the round's update, and "average", the mean of w_1 .. w_t.
    """
    domain_of = domain or (lambda x, y: y)
    lam = np.full(domains, 1 / domains) if lambda0 is None else np.array(lambda0, np.float64)
    first = np.ones(domains) if counts0 is None else np.array(counts0, np.float64)
    counts, models = [first] * window, []
    for t, S in enumerate(fed.cohorts):
        a = lam / np.maximum(1, np.mean(counts[-window:], axis=0))
        total, weight = np.zeros_like(w), 0.0
        domain_losses, domain_counts = np.zeros((2, domains))
        for i in S:
            x_i, y_i = fed.clients[i]
            for d, loss in zip(domain_of(x_i, y_i), losses(w, x_i, y_i), strict=True):
                domain_losses[d] += loss
                domain_counts[d] += 1
            beta_i = a[domain_of(x_i, y_i)].sum()

            def gradient(theta: Vector, x: np.ndarray, y: np.ndarray, a: Vector = a, beta_i: float = beta_i) -> Vector:
                a_rows = a[domain_of(x, y)]
                divisor = beta_i if scale == "client" else a_rows.sum()
                if divisor == 0:
                    return np.zeros_like(theta)
                errors = softmax(logits(theta, x)) - one_hot(y, len(theta) // (x.shape[1] + 1))
                return from_logits(a_rows[:, None] * errors, x) * len(x) / divisor

            if beta_i > 0:
                total += beta_i * (fed.train(t, i, w, gradient) - w)
                weight += beta_i
        w = w + total / weight if weight > 0 else w
        L = domain_losses / np.maximum(1, domain_counts)
        if update == "eg":
            lam = lam * np.exp(domain_lr * L)
            lam = lam / lam.sum()
        elif update == "projection":
            lam = on_simplex(lam + domain_lr * L)
        counts.append(domain_counts)
        models.append(w)
        fed.info.append({"lambda": lam, "average": np.mean(models, axis=0)})
        yield w


def ifca(fed, w, models, weighting="uniform", server_lr=1.0):
    """Ghosh et al. 2020, algorithm 1 with averages of models: a client trains the model with the lowest F_i.

    Each model moves by the mean update of the clients that chose it. The global model is models[0], and ``w`` is not
    used. After each round ``fed.info`` has all "models", the "personal" model of every client, which is the one with
    the lowest F_i, and "counts", the number of clients in the cohort that trained each model.
    """
    w_j = np.array(models, np.float64)

    def choice(i: int) -> int:
        return int(np.argmin([full_loss(fed, i, model) for model in w_j]))  # the first of equal losses

    for t, S in enumerate(fed.cohorts):
        members: list[list[int]] = [[] for _ in w_j]
        for i in S:
            members[choice(i)].append(i)
        for j, chosen_by in enumerate(members):
            if weighting == "uniform" and chosen_by or any(map(fed.size, chosen_by)):
                D = [fed.train(t, i, w_j[j]) - w_j[j] for i in chosen_by]
                w_j[j] = w_j[j] + server_lr * fed.mean(chosen_by, D, weighting)
        personal = np.array([w_j[choice(i)] for i in range(fed.num_clients)])
        fed.info.append({"models": w_j.copy(), "personal": personal, "counts": np.array(list(map(len, members)))})
        yield w_j[0].copy()


def hypcluster(fed, w, models, server_lr=1.0):
    """Mansour et al. 2020: as `ifca`, with weights n_i. The server's optimizer is SGD."""
    return ifca(fed, w, models, "examples", server_lr)
