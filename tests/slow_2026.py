"""The reference implementation of `slow`, continued: baselines of 2019 to 2026 about flat minima, momentum, fairness,
clusters and meta-learning.

It was written from the equations, like `slow` and `slow_newer`, and has the same notation. F_i is the mean loss over
all examples of client i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
from slow import (
    Federation,
    Gradient,
    Vector,
    corrected,
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
    """Returns the cross-entropy of every example, [B]."""
    return -log_softmax(logits(theta, x))[np.arange(len(y)), y]


def pairs_of_features(h: np.ndarray) -> np.ndarray:
    """Returns the products (z^T z)_jk of all j != k, for standardized features z of a batch h [b, d]."""
    centred = h - h.mean(axis=0)
    z = centred / np.sqrt(1e-8 + (centred**2).sum(axis=0) / (len(h) - 1))
    products = z.T @ z
    return products[~np.eye(len(products), dtype=bool)]


def feddecorr(
    fed: Federation, w: Vector, beta: float = 0.1, scale: str = "code", weighting: str = "examples"
) -> Iterator[Vector]:
    """Shi et al. 2023: the loss CE + beta R, where R is about the correlations of the features in a batch."""

    def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        b = len(x)

        def loss(theta: Vector) -> complex:
            h, scores = tanh_layers(theta, x)
            value = -(one_hot(y, scores.shape[1]) * log_softmax(scores)).sum() / b
            if b == 1:
                return value
            products = pairs_of_features(h)
            R = (products**2).mean() / b if scale == "code" else ((products / (b - 1)) ** 2).mean()
            return value + beta * R

        return derivative(loss, theta)

    for t in range(len(fed.cohorts)):
        w = w + fed.mean_update(t, w, weighting, gradient)
        yield w


def fedgamma(fed: Federation, w: Vector, rho: float = 0.1, server_lr: float = 1.0) -> Iterator[Vector]:
    """Dai et al. 2023: SCAFFOLD, whose gradient is that of a sharpness-aware step."""
    c, c_i = np.zeros_like(w), np.zeros((fed.num_clients, len(w)))
    for t, S in enumerate(fed.cohorts):
        D, dc = [], np.zeros_like(w)
        for i in S:
            D_i = fed.train(t, i, w, plus(sharpness_aware(rho), c - c_i[i])) - w
            new = c_i[i] - c + per_step(D_i, fed.num_steps(i), fed.lr(t))
            dc += new - c_i[i]
            c_i[i] = new
            D.append(D_i)
        w = w + server_lr * fed.mean(S, D)
        c = c + dc / fed.num_clients
        yield w


def mime(
    fed: Federation,
    w: Vector,
    beta: float = 0.9,
    server_lr: float = 1.0,
    damped: bool = False,
    weighting: str = "uniform",
) -> Iterator[Vector]:
    """Karimireddy et al. 2021, with SGD with momentum: the gradients are corrected by c, that of the cohort at w."""
    return mimicking(fed, w, True, beta, server_lr, damped, weighting)


def mimelite(
    fed: Federation,
    w: Vector,
    beta: float = 0.9,
    server_lr: float = 1.0,
    damped: bool = False,
    weighting: str = "uniform",
) -> Iterator[Vector]:
    """Mime without the correction of the gradients."""
    return mimicking(fed, w, False, beta, server_lr, damped, weighting)


def mimicking(
    fed: Federation, w: Vector, correct: bool, beta: float, server_lr: float, damped: bool, weighting: str
) -> Iterator[Vector]:
    m, kappa = np.zeros_like(w), 1 - beta if damped else 1.0
    for t, S in enumerate(fed.cohorts):
        c = fed.mean(S, [mean_gradient(w, *fed.clients[i]) for i in S], weighting)
        D = []
        for i in S:
            theta = w
            for x, y in local_batches(fed, t, i):
                g = mean_gradient(theta, x, y)
                if correct:
                    g = g - mean_gradient(w, x, y) + c
                u = clipped(fed, g) + fed.local.weight_decay * theta
                theta = theta - fed.lr(t) * (beta * m + kappa * u)
            D.append(theta - w)
        w = w + server_lr * fed.mean(S, D, weighting)
        m = beta * m + kappa * c
        yield w


def adabest(fed: Federation, w: Vector, mu: float = 0.02, beta: float = 0.98) -> Iterator[Vector]:
    """Varno et al. 2022: an estimate h_i of the client's bias, which fades by the number of rounds since its last."""
    h: dict[int, Vector] = {}
    last: dict[int, int] = {}
    mean_model = w
    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:
            theta_i = fed.train(t, i, w, corrected(-mu * h.get(i, np.zeros_like(w))))
            h[i] = (h[i] / (t - last[i]) if i in h else 0) + (w - theta_i)
            last[i] = t
            thetas.append(theta_i)
        before, mean_model = mean_model, fed.mean(S, thetas)
        w = mean_model + beta * (mean_model - before)
        yield w


def decreasing_steps(fed: Federation, t: int, i: int, w: Vector, g: Gradient, rho: float) -> tuple[Vector, float]:
    """Returns theta_i after steps of the sizes eta_t (1 - (1 - rho) k / K_i), and the sum of these sizes."""
    theta, K, total = w, fed.num_steps(i), 0.0
    for k, (x, y) in enumerate(local_batches(fed, t, i)):
        eta = fed.lr(t) * (1 - (1 - rho) * k / K)
        theta = theta - eta * (clipped(fed, g(theta, x, y)) + fed.local.weight_decay * theta)
        total += eta
    return theta, total


def fedswa(fed: Federation, w: Vector, rho: float = 0.1, alpha: float = 1.5) -> Iterator[Vector]:
    """Liu et al. 2025: steps that decrease within a round; the server moves alpha times the mean update."""
    for t, S in enumerate(fed.cohorts):
        w = w + alpha * fed.mean(S, [decreasing_steps(fed, t, i, w, mean_gradient, rho)[0] - w for i in S])
        yield w


def fedmoswa(fed: Federation, w: Vector, rho: float = 0.1, alpha: float = 1.5, gamma: float = 0.2) -> Iterator[Vector]:
    """FedSWA with control variates c_i, and with m, a moving average of them."""
    m, c = np.zeros_like(w), np.zeros((fed.num_clients, len(w)))
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            theta, total = decreasing_steps(fed, t, i, w, corrected(m - c[i]), rho)
            c[i] += -m - (theta - w) / total
            D.append(theta - w)
        w = w + alpha * fed.mean(S, D)
        m = m + gamma * (fed.mean(S, [c[i] for i in S]) - m)
        yield w


def with_momentum(
    fed: Federation, t: int, i: int, w: Vector, m: Callable[[Vector], Vector], beta: float, nesterov: bool
) -> Vector:
    """Returns theta_i after local training with the heavy ball m(theta), a K_i-th of it at every step."""
    step, theta, K = fed.fresh_step(t), w, fed.num_steps(i)
    for x, y in local_batches(fed, t, i):
        if nesterov:
            theta = theta - beta * m(theta) / K
            theta = step(theta, mean_gradient(theta, x, y), theta)
        else:
            theta = step(theta, mean_gradient(theta, x, y) + beta * m(theta) / (fed.lr(t) * K), theta)
    return theta


def ghbm(
    fed: Federation, w: Vector, tau: int = 10, beta: float = 0.9, nesterov: bool = False, weighting: str = "examples"
) -> Iterator[Vector]:
    """Zaccone et al. 2025: the momentum is the mean change of the global model in the last tau rounds."""
    past = [w]  # w_0, w_1, ...
    for t, S in enumerate(fed.cohorts):
        m = (past[t - tau] - w) / tau if t >= tau else np.zeros_like(w)
        thetas = [with_momentum(fed, t, i, w, lambda theta, m=m: m, beta, nesterov) for i in S]
        w = fed.mean(S, thetas, weighting)
        past.append(w)
        yield w


def localghbm(
    fed: Federation,
    w: Vector,
    tau: float | None = None,
    beta: float = 0.9,
    nesterov: bool = False,
    weighting: str = "examples",
) -> Iterator[Vector]:
    """GHBM with the global model of the client's own last participation."""
    anchor: dict[int, tuple[Vector, int]] = {}
    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:
            old, t_i = anchor.get(i, (w, t - 1))
            m = (old - w) / (tau if tau is not None else t - t_i)
            thetas.append(with_momentum(fed, t, i, w, lambda theta, m=m: m, beta, nesterov))
            anchor[i] = (w, t)
        w = fed.mean(S, thetas, weighting)
        yield w


def fedhbm(
    fed: Federation, w: Vector, tau: float = 10.0, beta: float = 1.0, weighting: str = "examples"
) -> Iterator[Vector]:
    """The momentum of every step points from the local model away from the client's last one."""
    anchor: dict[int, Vector] = {}
    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:
            old = anchor.get(i)

            def m(theta: Vector, old: Vector | None = old) -> Vector:
                return np.zeros_like(theta) if old is None else (old - theta) / tau

            anchor[i] = with_momentum(fed, t, i, w, m, beta, False)
            thetas.append(anchor[i])
        w = fed.mean(S, thetas, weighting)
        yield w


def towards(teacher: Vector, temperature: float) -> Gradient:
    """Returns the gradient of the mean over a batch of KL(softmax(z_teacher / T) || softmax(z_theta / T))."""

    def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        q, target = (softmax(logits(each, x) / temperature) for each in (theta, teacher))
        return from_logits((q - target) / temperature, x)

    return gradient


def fedgmt(
    fed: Federation,
    w: Vector,
    gamma: float = 1.0,
    temperature: float = 3.0,
    alpha: float = 0.95,
    beta: float = 10.0,
    aggregation: str = "all",
    weighting: str = "uniform",
) -> Iterator[Vector]:
    """Li et al. 2025: distillation from a moving average of the global models, and FedDyn's duals without its pull."""
    h, average = np.zeros((fed.num_clients, len(w))), w
    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:

            def gradient(theta: Vector, x: np.ndarray, y: np.ndarray, i: int = i, teacher: Vector = average) -> Vector:
                distilled = gamma * temperature**2 * towards(teacher, temperature)(theta, x, y)
                return mean_gradient(theta, x, y) + distilled + h[i] / beta

            theta_i = fed.train(t, i, w, gradient)
            h[i] += theta_i - w
            thetas.append(theta_i)
        duals = h if aggregation == "all" else h[list(S)]  # their mean is uniform for every weighting
        w = fed.mean(S, thetas, weighting) + duals.mean(axis=0)
        average = alpha * average + (1 - alpha) * w
        yield w


def fedsol(
    fed: Federation,
    w: Vector,
    rho: float = 1.0,
    temperature: float = 3.0,
    adaptive: bool = True,
    weighting: str = "examples",
) -> Iterator[Vector]:
    """Lee et al. 2024: the gradient at theta + e, where e raises the divergence from the global model.

    With ``adaptive``, the part of e in a row of w, and that in b, is multiplied by the entries of |theta - w| / norm.
    """
    num_classes = len(w) // (fed.clients[0][0].shape[1] + 1)

    def local_gradient(w: Vector) -> Gradient:
        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            if (theta == w).all():
                return mean_gradient(theta, x, y)
            by = e(rho, towards(w, temperature)(theta, x, y))
            if adaptive:
                rows = np.abs(theta - w).reshape(-1, num_classes)  # the first is b, the others are the rows of w
                rows = rows / np.maximum(np.sqrt((rows**2).sum(axis=1, keepdims=True)), 1e-12)
                by = by * rows.ravel()
            return mean_gradient(theta + by, x, y)

        return gradient

    for t in range(len(fed.cohorts)):
        w = w + fed.mean_update(t, w, weighting, local_gradient(w))
        yield w


def perfedavg(
    fed: Federation,
    w: Vector,
    alpha: float = 0.01,
    variant: str = "hessian_free",
    delta: float | None = 1e-3,
    batches: str = "independent",
    weighting: str = "uniform",
) -> Iterator[Vector]:
    """Fallah et al. 2020: the gradient of the loss after one step, from three batches of a client.

    The second and the third shuffle of an epoch have the numbers epoch + 1000 and epoch + 2000.
    """

    def curved(theta: Vector, v: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        """Returns the Hessian of the batch at theta times v."""
        if delta is not None:
            ahead, behind = (mean_gradient(theta + s * delta * v, x, y) for s in (1, -1))
            return (ahead - behind) / (2 * delta)
        p, change = softmax(logits(theta, x)), logits(v, x)
        return from_logits(p * (change - (p * change).sum(axis=1, keepdims=True)), x)

    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            step, theta = fed.fresh_step(t), w
            for epoch in range(fed.local.epochs):
                shuffles = [epoch + (0 if batches == "same" else add) for add in (1000, 0, 2000)]
                for inner, outer, third in zip(*(fed.batches(t, i, number) for number in shuffles), strict=True):
                    g = mean_gradient(theta - alpha * mean_gradient(theta, *inner), *outer)
                    if variant == "hessian_free":
                        g = g - alpha * curved(theta, g, *third)
                    theta = step(theta, g, theta)
            D.append(theta - w)
        w = w + fed.mean(S, D, weighting)
        fed.info.append({"personal": np.array([w - alpha * mean_gradient(w, *client) for client in fed.clients])})
        yield w


def qfedavg(fed: Federation, w: Vector, q: float = 1.0, lipschitz: float | None = None) -> Iterator[Vector]:
    """Li et al. 2020: clients with a large loss have a large weight, and the server normalises their updates."""
    for t, S in enumerate(fed.cohorts):
        L = 1 / fed.lr(t) if lipschitz is None else lipschitz
        total, divisor = np.zeros_like(w), 0.0
        for i in S:
            F = losses(w, *fed.clients[i]).mean() + 1e-10
            d = -L * (fed.train(t, i, w) - w)
            total += F**q * d
            divisor += q * F ** (q - 1) * (d**2).sum() + L * F**q
        w = w - total / divisor
        yield w


def on_simplex(v: np.ndarray) -> np.ndarray:
    """Returns the projection of v on the simplex: max(v - s, 0) for the number s with which it has the sum 1."""
    for s in ((np.sort(v)[-k:].sum() - 1) / k for k in count(len(v), -1)):
        if (projected := np.maximum(v - s, 0)).sum() < 1 + 1e-9:
            return projected
    raise AssertionError


def agnostic(
    fed: Federation,
    w: Vector,
    domains: int = 10,
    domain: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    domain_lr: float = 0.1,
    update: str = "eg",
    window: int = 1,
    scale: str = "client",
    lambda0: Sequence[float] | None = None,
    counts0: Sequence[float] | None = None,
) -> Iterator[Vector]:
    """Mohri et al. 2019 and Ro et al. 2021: the weights lambda of the domains grow with their losses.

    ``fed.info`` has lambda, and the mean of the models after each round.
    """
    weights = np.full(domains, 1 / domains) if lambda0 is None else np.array(lambda0)
    counts = [np.ones(domains) if counts0 is None else np.array(counts0)] * window
    models = []
    for t, S in enumerate(fed.cohorts):
        a = weights / np.maximum(1, np.mean(counts[-window:], axis=0))
        beta, D = [], []
        loss, number = np.zeros((2, domains))
        for i in S:
            x_i, y_i = fed.clients[i]
            d_i = y_i if domain is None else domain(x_i, y_i)
            beta_i = a[d_i].sum()
            np.add.at(loss, d_i, losses(w, x_i, y_i))
            np.add.at(number, d_i, 1)

            def gradient(theta: Vector, x: np.ndarray, y: np.ndarray, a: Vector = a, beta_i: float = beta_i) -> Vector:
                of_rows = a[y if domain is None else domain(x, y)]
                errors = softmax(logits(theta, x)) - one_hot(y, len(theta) // (x.shape[1] + 1))
                total = beta_i if scale == "client" else of_rows.sum()
                return from_logits(of_rows[:, None] * errors, x) * len(x) / (total or 1)

            beta.append(beta_i)
            D.append(fed.train(t, i, w, gradient) - w)
        if sum(beta) > 0:
            w = w + np.average(D, axis=0, weights=beta)
        L = loss / np.maximum(number, 1)
        if update == "eg":
            weights = weights * np.exp(domain_lr * L)
            weights = weights / weights.sum()
        elif update == "projection":
            weights = on_simplex(weights + domain_lr * L)
        counts.append(number)
        models.append(w)
        fed.info.append({"lambda": weights, "average": np.mean(models, axis=0)})
        yield w


def ifca(
    fed: Federation, w: Vector, models: Sequence[Vector], weighting: str = "uniform", server_lr: float = 1.0
) -> Iterator[Vector]:
    """Ghosh et al. 2020: a client trains the model with the lowest loss on its examples. Yields the first model.

    ``fed.info`` has all models, the model of each client, and how many clients of the cohort chose each model.
    """
    w_j = np.array(models)

    def best(i: int) -> int:
        return int(np.argmin([losses(each, *fed.clients[i]).mean() for each in w_j]))

    for t, S in enumerate(fed.cohorts):
        chosen = {i: best(i) for i in S}
        trained = {i: fed.train(t, i, w_j[j]) for i, j in chosen.items()}
        new = w_j.copy()
        for j in range(len(w_j)):
            members = [i for i in S if chosen[i] == j]
            if members:
                new[j] += server_lr * fed.mean(members, [trained[i] - w_j[j] for i in members], weighting)
        counts = np.bincount(list(chosen.values()), minlength=len(w_j))
        w_j = new
        personal = np.array([w_j[best(i)] for i in range(fed.num_clients)])
        fed.info.append({"models": w_j.copy(), "personal": personal, "counts": counts})
        yield w_j[0]


def hypcluster(fed: Federation, w: Vector, models: Sequence[Vector], server_lr: float = 1.0) -> Iterator[Vector]:
    """Mansour et al. 2020: IFCA whose clients have the weights n_i."""
    return ifca(fed, w, models, "examples", server_lr)
