"""A slow reference implementation of the algorithms in plain NumPy: small models, float64, one step after another.

It was written from the equations of the papers, independently of the library's code. So the two share no code, and are
unlikely to have the same mistakes. Parameters are one flat vector, so that an algorithm looks like its pseudo-code. An
algorithm is a generator. Its local variables are the server variables and the client states, and it yields the global
model w after every round.

    w       the global model              theta_i  the model of client i after its local training
    D_i     theta_i - w                   n_i      the number of examples of client i
    eta_t   the local learning rate       K_i      the number of local steps of client i
    S       the cohort of the round       N        the number of clients in the federation

The model is multinomial logistic regression, with two exceptions. The model of LfD is a classifier whose logits are
cosines. The model of MOON is a network with two layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

Vector = np.ndarray  # float64 [d]
Gradient = Callable[[Vector, np.ndarray, np.ndarray], Vector]  # (theta, x [B, p], y [B]) -> [d]
Direction = Callable[[Vector], Vector]


@dataclass(frozen=True)
class Local:
    """The local training of a client.

    ``optimizer()`` returns a map from gradients to directions, with a new state. It is used instead of momentum.
    """

    epochs: int = 1
    batch_size: int = 20
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    optimizer: Callable[[], Direction] | None = None


def heavy_ball(momentum: float) -> Direction:
    """Polyak's heavy-ball momentum: u = momentum u + g, with u_0 = 0. Momentum 0 gives plain SGD."""
    u = np.zeros(1)

    def direction(g: Vector) -> Vector:
        nonlocal u
        u = momentum * u + g
        return u

    return direction


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Direction:
    """Adam: algorithm 1 of Kingma & Ba, with bias correction."""
    k, m, v = 0, np.zeros(1), np.zeros(1)

    def direction(g: Vector) -> Vector:
        nonlocal k, m, v
        k += 1
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        return (m / (1 - b1**k)) / (np.sqrt(v / (1 - b2**k)) + eps)

    return direction


def pack(params: dict[str, np.ndarray]) -> Vector:
    """Returns the arrays as one vector, in the alphabetical order of their names."""
    return np.concatenate([np.asarray(params[name], np.float64).ravel() for name in sorted(params)])


def unpack(theta: Vector, like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `pack`: returns arrays with the names and shapes of ``like``."""
    names = sorted(like)
    parts = np.split(theta, np.cumsum([like[name].size for name in names])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


def logits(theta: Vector, x: np.ndarray) -> np.ndarray:
    """Returns the logits of logistic regression, x w + b, [B, C]. theta packs {"b": [C], "w": [p, C]}."""
    b, *w = theta.reshape(x.shape[1] + 1, -1)
    return x @ np.array(w) + b


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis. It is analytic, as `derivative` requires."""
    z = z - z.real.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(z))


def label_gradient(theta: Vector, x: np.ndarray, labels: np.ndarray) -> Vector:
    """Returns the gradient of the mean cross-entropy of a batch with label distributions [B, C].

    It is the mean of (1, x) (softmax - label).
    """
    total = np.zeros_like(theta)
    for row, error in zip(x, softmax(logits(theta, x)) - labels, strict=True):
        total += pack({"b": error, "w": np.outer(row, error)})
    return total / len(x)


def one_hot(y: np.ndarray, num_classes: int) -> np.ndarray:
    return np.eye(num_classes)[y]


def mean_gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
    """Returns the gradient of the mean softmax cross-entropy of a batch."""
    return label_gradient(theta, x, one_hot(y, len(theta) // (x.shape[1] + 1)))


def corrected(tilt: Vector | float = 0.0, pull: float = 0.0, anchor: Vector | float = 0.0) -> Gradient:
    """Returns the gradient of F_i(theta) + <tilt, theta> + pull/2 ||theta - anchor||^2.

    Nearly all drift corrections have this form.
    """
    return lambda theta, x, y: mean_gradient(theta, x, y) + tilt + pull * (theta - anchor)


def derivative(loss: Callable[[Vector], complex], theta: Vector) -> Vector:
    """Returns the gradient of an analytic loss by the complex-step method, which is exact up to rounding errors.

    Component j is Im loss(theta + i h e_j) / h.
    """
    h = 1e-30
    return np.array([loss(theta + 1j * h * e).imag / h for e in np.eye(len(theta))])


def cosine(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns the cosine similarity of vectors along the last axis."""
    return (u * v).sum(axis=-1) / np.sqrt((u * u).sum(axis=-1) * (v * v).sum(axis=-1))


@dataclass(frozen=True)
class Federation:
    """The clients, and all random choices of a simulation.

    The random choices are the cohort of each round and the order in which a client reads its examples.
    """

    clients: Sequence[tuple[np.ndarray, np.ndarray]]
    """(x_i [n_i, p], y_i [n_i]) of every client."""
    cohorts: Sequence[Sequence[int]]
    """cohorts[t]: the ids of the clients in round t."""
    order: Callable[[int, int, int], np.ndarray]
    """order(t, i, epoch): a permutation of client i's examples."""
    local: Local
    test: tuple[np.ndarray, np.ndarray] | None = None
    """(x [M, p], y [M]), required by the algorithms that evaluate every model."""
    info: list[dict[str, Any]] = field(default_factory=list)
    """The values that an algorithm reports besides the model, one dict per round. Empty if it reports none."""

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return len(self.clients)

    def size(self, i: int) -> int:
        """The number of examples of client i, n_i."""
        return len(self.clients[i][0])

    @property
    def mean_size(self) -> float:
        """The mean of n_i over all clients."""
        return sum(map(self.size, range(self.num_clients))) / self.num_clients

    def q(self, i: int, scale_by_size: bool = True) -> float:
        """q_i = N n_i / sum n, or 1 if ``scale_by_size`` is False."""
        return self.size(i) / self.mean_size if scale_by_size else 1.0

    def lr(self, t: int) -> float:
        """The local learning rate of round t, eta_t."""
        return self.local.lr * self.local.lr_decay**t

    def num_steps(self, i: int) -> int:
        """The number of local steps of client i, K_i."""
        return self.local.epochs * math.ceil(self.size(i) / self.local.batch_size)

    def path(self, t: int, i: int, variate_lr: str = "current", variate_steps: str = "own") -> float:
        """Returns K eta. An update divided by -K eta is a mean gradient.

        K is K_i or Kbar, and eta is eta_t or eta_0.
        """
        mean_steps = self.local.epochs * math.ceil(self.mean_size / self.local.batch_size)
        K = {"own": self.num_steps(i), "mean": mean_steps}[variate_steps]
        return K * {"current": self.lr(t), "initial": self.lr(0)}[variate_lr]

    def accuracy(self, theta: Vector) -> float:
        """The accuracy of theta on the test set, in [0, 1]."""
        assert self.test is not None
        x, y = self.test
        return (logits(theta, x).argmax(axis=1) == y).mean()

    def batches(self, t: int, i: int, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the batches of one epoch over client i's examples. The last batch may be short."""
        x, y = self.clients[i]
        rows = self.order(t, i, epoch)
        assert sorted(rows) == list(range(self.size(i))), "an epoch reads every row of the client once"
        for first in range(0, self.size(i), self.local.batch_size):
            batch = rows[first : first + self.local.batch_size]
            yield x[batch], y[batch]

    def fresh_step(self, t: int) -> Callable[[Vector, Vector, Vector], Vector]:
        """Returns a function step(theta, g, point) with a new optimizer state.

        It makes one local step from theta along the gradient g, which was evaluated at ``point``.
        """
        local = self.local
        direction = local.optimizer() if local.optimizer else heavy_ball(local.momentum)

        def step(theta: Vector, g: Vector, point: Vector) -> Vector:
            norm = math.sqrt((g**2).sum())
            if local.clip_norm is not None and norm > local.clip_norm:
                g = g * (local.clip_norm / norm)
            return theta - self.lr(t) * direction(g + local.weight_decay * point)

        return step

    def train(
        self,
        t: int,
        i: int,
        start: Vector,
        gradient: Gradient = mean_gradient,
        ahead: Vector | float = 0.0,
        restart: bool = False,
        shift: Vector | float = 0.0,
    ) -> Vector:
        """Returns theta_i, the model of client i after its local training in round t.

        ``gradient`` includes the correction of the algorithm, if there is one. The gradients are evaluated at
        theta - eta_t ahead. With ``restart``, every step starts at ``start`` instead of theta. Every step ends at
        theta - eta_t shift.
        """
        step, theta = self.fresh_step(t), start
        for epoch in range(self.local.epochs):
            for x, y in self.batches(t, i, epoch):
                point = theta - self.lr(t) * ahead
                theta = step(start if restart else theta, gradient(point, x, y), point) - self.lr(t) * shift
        return theta

    def mean(self, cohort: Sequence[int], vectors: Sequence[Vector], weighting: str = "uniform") -> Vector:
        """Returns the mean of one vector per client of the cohort.

        The weights are n_i ("examples") or equal ("uniform").
        """
        weights = [self.size(i) if weighting == "examples" else 1 for i in cohort]
        total = np.zeros_like(vectors[0])
        for weight, vector in zip(weights, vectors, strict=True):
            total += weight * vector
        return total / sum(weights)

    def mean_update(self, t: int, w: Vector, weighting: str, gradient: Gradient = mean_gradient) -> Vector:
        """Returns the mean of D_i over the cohort of round t, for clients that start at w and keep no state."""
        cohort = self.cohorts[t]
        return self.mean(cohort, [self.train(t, i, w, gradient) - w for i in cohort], weighting)


def simulate(
    algorithm: Callable[..., Iterator[Vector]],
    params: dict[str, np.ndarray],
    federation: Federation,
    **hyperparameters: float | str | bool | tuple[str, ...],
) -> list[dict[str, np.ndarray]]:
    """Returns the global model after every round."""
    return [unpack(w, params) for w in algorithm(federation, pack(params), **hyperparameters)]


def fedavg(fed, w, server_lr=1.0, weighting="examples"):
    """McMahan et al. 2017, algorithm 1, with a server learning rate."""
    for t in range(len(fed.cohorts)):
        w = w + server_lr * fed.mean_update(t, w, weighting)
        yield w


def fedprox(fed, w, mu, server_lr=1.0, weighting="examples"):
    """Li et al. 2020: clients minimise F_i(theta) + mu/2 ||theta - w||^2."""
    for t in range(len(fed.cohorts)):
        w = w + server_lr * fed.mean_update(t, w, weighting, corrected(pull=mu, anchor=w))
        yield w


def fedavgm(fed, w, beta=0.9, server_lr=1.0, damped=False, weighting="examples"):
    """Hsu et al. 2019: heavy-ball momentum on the pseudo-gradient -D. ``damped`` is as in the MOON authors' code."""
    v = np.zeros_like(w)
    for t in range(len(fed.cohorts)):
        pseudo_gradient = -fed.mean_update(t, w, weighting)
        v = beta * v + (1 - beta if damped else 1) * pseudo_gradient
        w = w - server_lr * v
        yield w


def fedopt(second_moment, fed, w, server_lr, b1=0.9, b2=0.99, tau=0.001, weighting="examples", v_0=None):
    """Reddi et al. 2021, algorithm 2, without bias correction, with m_0 = 0 and v_0 = tau^2."""
    m, v = np.zeros_like(w), np.full_like(w, tau**2 if v_0 is None else v_0)
    for t in range(len(fed.cohorts)):
        D = fed.mean_update(t, w, weighting)
        m = b1 * m + (1 - b1) * D
        v = second_moment(v, D, b2)
        w = w + server_lr * m / (np.sqrt(v) + tau)
        yield w


fedadagrad = partial(fedopt, lambda v, D, b2: v + D**2, b1=0.0)
fedyogi = partial(fedopt, lambda v, D, b2: v - (1 - b2) * D**2 * np.sign(v - D**2))
fedadam = partial(fedopt, lambda v, D, b2: b2 * v + (1 - b2) * D**2)


def scaffold(
    fed,
    w,
    server_lr=1.0,
    option="II",
    scale_by_size=False,
    variate_lr="current",
    variate_steps="own",
    weighting="uniform",
    corrects="gradient",
):
    """Karimireddy et al. 2020, algorithm 1. Three of the arguments are options of the FedDC authors' code, and the last
    one is that of NIID-Bench's."""
    c = np.zeros_like(w)
    c_i = [c] * fed.num_clients
    for t, S in enumerate(fed.cohorts):
        D, dc = [], []
        for i in S:
            q = fed.q(i, scale_by_size)
            offset = c / q - c_i[i]
            if corrects == "model":
                D_i = fed.train(t, i, w, shift=offset) - w
            else:
                D_i = fed.train(t, i, w, corrected(offset)) - w
            if option == "I":
                new = mean_gradient(w, *fed.clients[i])
            else:
                new = c_i[i] - c / q - D_i / fed.path(t, i, variate_lr, variate_steps)
            D.append(D_i)
            dc.append(q * (new - c_i[i]))
            c_i[i] = new
        w = w + server_lr * fed.mean(S, D, weighting)
        c = c + np.sum(dc, axis=0) / fed.num_clients
        yield w


def feddyn(fed, w, alpha, scale_by_size=False, weighting="uniform"):
    """Acar et al. 2021, with the variables of the authors' code: h_i is the sum of client i's updates."""
    h = np.zeros((fed.num_clients, len(w)))
    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:
            theta_i = fed.train(t, i, w, corrected(0.0, alpha / fed.q(i, scale_by_size), w - h[i]))
            h[i] += theta_i - w
            thetas.append(theta_i)
        w = fed.mean(S, thetas, weighting) + h.mean(axis=0)
        yield w


def feddc(
    fed,
    w,
    alpha,
    scale_by_size=False,
    variate="scaffold",
    variate_lr="current",
    variate_steps="own",
    aggregation="code",
):
    """Gao et al. 2022, as in the authors' code.

    With ``variate="last_update"``, g_i of equation 4 is the last update of client i. The other two aggregations are
    means of theta_i + h_i with weights n_i: over the cohort, or over all clients with their last values.
    """
    c = np.zeros_like(w)
    c_i = [c] * fed.num_clients
    h = np.zeros((fed.num_clients, len(w)))
    last = np.tile(w, (fed.num_clients, 1))  # theta_i + h_i after the last participation of client i
    for t, S in enumerate(fed.cohorts):
        thetas, dc = [], []
        for i in S:
            q = fed.q(i, scale_by_size)
            theta_i = fed.train(t, i, w, corrected(c / q - c_i[i], alpha / q, w - h[i]))
            D_i = theta_i - w
            mean_gradient_i = -D_i / fed.path(t, i, variate_lr, variate_steps)
            new = {
                "scaffold": c_i[i] - c / q + mean_gradient_i,
                "last_update": mean_gradient_i,
                "none": np.zeros_like(w),
            }[variate]
            h[i] += D_i
            last[i] = theta_i + h[i]
            thetas.append(theta_i)
            dc.append(q * (new - c_i[i]))
            c_i[i] = new
        if aggregation == "code":
            w = fed.mean(S, thetas) + h.mean(axis=0)
        else:
            members = S if aggregation == "cohort" else range(fed.num_clients)
            w = fed.mean(members, [last[i] for i in members], "examples")
        c = c + np.sum(dc, axis=0) / fed.num_clients
        yield w


def slowmo(fed, w, beta, alpha=1.0):
    """Wang et al. 2020, algorithm 1."""
    m = np.zeros_like(w)
    for t in range(len(fed.cohorts)):
        m = beta * m - fed.mean_update(t, w, "uniform") / fed.lr(t)
        w = w - alpha * fed.lr(t) * m
        yield w


def fedadc(fed, w, beta, alpha=1.0, variant="nesterov", gamma=None):
    """Ozfatura et al. 2020, algorithm 3, with K_i instead of H."""
    gamma_beta = 1.0 if gamma is None else gamma * beta
    m = np.zeros_like(w)
    for t, S in enumerate(fed.cohorts):
        D = []
        for i in S:
            mbar = gamma_beta * m / fed.num_steps(i)
            ahead = mbar if variant == "nesterov" else 0.0  # lines 7-9 (red), or lines 10-11 (blue)
            D.append(fed.train(t, i, w, corrected(mbar), ahead) - w)
        Dbar = -fed.mean(S, D) / fed.lr(t)
        m = Dbar + (beta - gamma_beta) * m
        w = w - alpha * fed.lr(t) * m
        yield w


def vrl_sgd(fed, w):
    """Liang et al. 2019, algorithm 1. Delta_i is the paper's name for the control variate."""
    Delta = [np.zeros_like(w)] * fed.num_clients
    for t, S in enumerate(fed.cohorts):
        x = {i: fed.train(t, i, w, corrected(-Delta[i])) for i in S}
        w = fed.mean(S, list(x.values()))
        for i in S:
            Delta[i] = Delta[i] + (w - x[i]) / fed.path(t, i)
        yield w


def fedeve(fed, w, server_lr=1.0, period_variance="paper", centre="weighted"):
    """Shen et al. 2025, equations 15a-15f and 16."""
    M, s2 = np.zeros_like(w), 0.0
    for t, S in enumerate(fed.cohorts):
        predicted = w - server_lr * M  # 15a
        Delta = [predicted - fed.train(t, i, predicted) for i in S]
        Dbar = fed.mean(S, Delta, "examples")
        sQ2 = np.mean((M - Dbar if period_variance == "paper" else Dbar) ** 2) / len(S)  # 16
        middle = Dbar if centre == "weighted" else fed.mean(S, Delta)
        sR2 = sum(np.mean((Delta_k - middle) ** 2) for Delta_k in Delta) / len(S) ** 2  # 16
        predicted_s2 = s2 + sQ2  # 15b
        G = predicted_s2 / (predicted_s2 + sR2)  # 15c
        M = M + G * (Dbar - M)  # 15d
        w = w - server_lr * M  # 15e
        s2 = (1 - G) * predicted_s2  # 15f
        fed.info.append({"gain": G, "period_variance": sQ2, "client_variance": sR2})
        yield w


def trust(accuracies: Sequence[float], window: int) -> float:
    """Returns eps of FedGVR, equation 8: how fast the best accuracy still increases.

    ``accuracies`` are those of w_1 .. w_t.
    """
    t = len(accuracies)
    if t <= window:
        return 1.0
    return min(max((max(accuracies) - max(accuracies[: t - window])) / window, 0.0), 1.0)


def change_factor(fed: Federation, t: int, scale: str, beta: float) -> float:
    """Returns the factor of the mean update in the momentum of FedGM. ``scale`` is the name of the option."""
    return {"participation": len(fed.cohorts[t]) / fed.num_clients, "one": 1.0, "one_minus_beta": 1 - beta}[scale]


def fedgvr(fed, w, mu=0.1, window=5, server_lr=1.0, recursion="printed", literal=()):
    """FedGVRGM without its second phase, which is the server momentum."""
    return fedgvrgm(fed, w, mu, 0.0, window, server_lr, recursion, "one", False, literal)


def fedgm(fed, w, mu=0.1, beta=0.9, server_lr=1.0, scale="participation", literal=()):
    """FedGVRGM without its first phase: momentum of the mean updates, for clients with a proximal term."""
    mw = np.zeros_like(w)
    for t, S in enumerate(fed.cohorts):
        prox = corrected(pull=mu, anchor=w)
        D = fed.mean_update(t, w, "uniform", prox)
        if "momentum" in literal:  # equation 10 as printed: a momentum of parameters
            w_tilde = w + len(S) / fed.num_clients * D
            mw = mw + w_tilde
            w = w_tilde - beta * mw
        else:
            mw = beta * mw + change_factor(fed, t, scale, beta) * D
            w = w + server_lr * mw
        yield w


def fedgvrgm(
    fed,
    w,
    mu=0.1,
    beta=0.9,
    window=5,
    server_lr=1.0,
    recursion="printed",
    scale="participation",
    variate_momentum=True,
    literal=(),
):
    """Wang et al., two-phase gradient adjustment.

    The equations that ``literal`` names are as printed in the paper. In all others, errors of the paper are corrected.
    """
    c = np.zeros_like(w)
    mw, mc = c, c
    c_i = [c] * fed.num_clients
    accuracies: list[float] = []
    for t, S in enumerate(fed.cohorts):
        eps = trust(accuracies, window)
        D, dc = [], []
        for i in S:
            D_i = fed.train(t, i, w, corrected(eps * (c - c_i[i]), mu, w), restart="step" in literal) - w
            per_step = fed.lr(t) / fed.num_steps(i) if "scale" in literal else 1 / fed.path(t, i)
            sign = 1 if "sign" in literal else -1
            new = (eps if recursion == "exact" else 1) * (c_i[i] - c) + sign * per_step * D_i
            D.append(D_i)
            dc.append(new - c_i[i])
            c_i[i] = new
        mw = beta * mw + change_factor(fed, t, scale, beta) * fed.mean(S, D)
        w = w + server_lr * mw
        change = np.sum(dc, axis=0) / fed.num_clients
        mc = beta * mc + (1 - beta) * change if variate_momentum else change
        c = c + mc
        accuracies.append(fed.accuracy(w) * (1 if "accuracy" in literal else 100))
        fed.info.append({"eps": eps})
        yield w


def cosines(theta: Vector, x: np.ndarray) -> np.ndarray:
    """Returns the logits of LfD's model, cos(W_j, x), [B, C]. theta packs {"w": [p, C]}."""
    w = theta.reshape(x.shape[1], -1)
    return cosine(x[:, None, :], w.T[None, :, :])


def lfd(fed, w, temperature=0.1, margin=0.15, label_temperature=1.0, first="none", regularizer=True):
    """Kim & Shin 2023, algorithm 1. f_G is w, and f_P is the client's model at the end of its last participation."""
    previous: dict[int, Vector] = {}

    def local_gradient(f_G: Vector, f_P: Vector | None) -> Gradient:
        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            at_y = one_hot(y, len(theta) // x.shape[1])
            targets = at_y
            if f_P is not None and regularizer:
                targets = at_y + softmax((cosines(f_G, x) - cosines(f_P, x)) / (temperature * label_temperature))

            def loss(theta: Vector) -> complex:
                log_p = log_softmax((cosines(theta, x) - margin * at_y) / temperature)
                return -(targets * log_p).sum() / len(x)

            return derivative(loss, theta)

        return gradient

    for t, S in enumerate(fed.cohorts):
        for i in S:
            f_P = previous.get(i, w if first == "uniform" else None)
            previous[i] = fed.train(t, i, w, local_gradient(w, f_P))
        w = fed.mean(S, [previous[i] for i in S], "examples")
        yield w


HIDDEN = 4  # number of hidden units of MOON's model; their outputs are its features


def tanh_layers(theta: Vector, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """MOON's model. theta packs {"b1", "b2", "w1", "w2"}.

    Returns the features z = tanh(x w1 + b1), [B, HIDDEN], and the logits z w2 + b2, [B, C].
    """
    p = x.shape[1]
    C = (len(theta) - (p + 1) * HIDDEN) // (HIDDEN + 1)
    b1, b2, w1, w2 = np.split(theta, np.cumsum([HIDDEN, C, p * HIDDEN]))
    z = np.tanh(x @ w1.reshape(p, HIDDEN) + b1)
    return z, z @ w2.reshape(HIDDEN, C) + b2


def moon(fed, w, mu=1.0, temperature=0.5, first="none", weighting="examples"):
    """Li et al. 2021, algorithm 1. If a client has no previous model, its loss has no contrastive term.

    With first="initial", the initial model is the first previous model of every client.
    """
    previous: dict[int, Vector] = dict.fromkeys(range(fed.num_clients), w) if first == "initial" else {}

    def local_gradient(w: Vector, w_previous: Vector | None) -> Gradient:
        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            def loss(theta: Vector) -> complex:
                z, scores = tanh_layers(theta, x)
                value = -(one_hot(y, scores.shape[1]) * log_softmax(scores)).sum() / len(x)
                if w_previous is None:
                    return value
                z_global, z_previous = tanh_layers(w, x)[0], tanh_layers(w_previous, x)[0]
                similarities = np.stack([cosine(z, z_global), cosine(z, z_previous)], axis=-1) / temperature
                return value - mu * log_softmax(similarities)[:, 0].mean()

            return derivative(loss, theta)

        return gradient

    for t, S in enumerate(fed.cohorts):
        for i in S:
            previous[i] = fed.train(t, i, w, local_gradient(w, previous.get(i)))
        w = fed.mean(S, [previous[i] for i in S], weighting)
        yield w


def fedreg(fed, w, gamma=0.4, eta_s=0.2, eta_p=0.002, pseudo_steps=10, pseudo_data="ascent"):
    """Xu et al. 2022, as in the authors' code: the newer version ("ascent") or the first version ("descent")."""

    def move(x: np.ndarray, y: np.ndarray, eta: float) -> np.ndarray:
        """Returns x after sign-gradient steps on CE(w; x, y).

        A step of the descent is clipped to the range of the inputs before this step.
        """
        matrix = w.reshape(x.shape[1] + 1, -1)[1:]
        for _ in range(pseudo_steps):
            sign = np.sign((softmax(logits(w, x)) - one_hot(y, matrix.shape[1])) @ matrix.T)
            x = x + eta * sign if pseudo_data == "ascent" else (x - eta * sign).clip(x.min(), x.max())
        return x

    def projection(d: Vector, g: Vector) -> Vector:
        """Returns the component of d along g if <d, g> > 0, otherwise 0."""
        return max(0.0, d @ g / (g @ g)) * g

    for t, S in enumerate(fed.cohorts):
        thetas = []
        for i in S:
            pseudo = []
            for x, y in fed.batches(t, i, epoch=fed.local.epochs):
                x_s = move(x, y, eta_s)
                pseudo.append((x_s, softmax(logits(w, x_s)), move(x, y, eta_p), y))
            step, theta = fed.fresh_step(t), w
            for epoch in range(fed.local.epochs):
                for (x, y), (x_s, y_s, x_p, y_p) in zip(fed.batches(t, i, epoch), pseudo, strict=True):
                    y_1 = gamma * theta + (1 - gamma) * w
                    theta = step(theta, mean_gradient(y_1, x, y), y_1)
                    y_2 = (theta + w) / 2
                    forgotten = projection(theta - w, label_gradient(y_2, x_s, y_s))
                    perturbed = projection(theta - w - forgotten, mean_gradient(y_2, x_p, y_p))
                    theta = theta - forgotten - perturbed
            thetas.append(theta)
        w = fed.mean(S, thetas)
        yield w


def constrained(fed, w, mu, kind="parameter", part="all"):
    """Kim & Shin 2023, section 3, for logistic regression, whose only part is the classifier.

    A penalty keeps the weights or the logits near those of the global model.
    """
    for t in range(len(fed.cohorts)):

        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray, w: Vector = w) -> Vector:
            def distance(theta: Vector) -> complex:
                gap = theta - w if kind == "parameter" else logits(theta, x) - logits(w, x)
                return (gap**2).sum() / (1 if kind == "parameter" else len(x))

            return mean_gradient(theta, x, y) + mu / 2 * derivative(distance, theta)

        w = w + fed.mean_update(t, w, "examples", gradient)
        yield w
