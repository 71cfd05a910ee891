"""A slow oracle: federated learning of multinomial logistic regression in plain NumPy, float64, one step after another.

Written from the papers' equations and from nothing else, so that it shares no code, and hopefully no mistake, with the
library. Parameters are one flat vector, so that an algorithm reads like its pseudo-code. An algorithm is a generator:
its server variables and client states are its local variables, and it yields the global model w after every round.

    w       the global model              theta_i  client i's model after its local training
    D_i     theta_i - w                   n_i      client i's rows
    eta_t   the local learning rate       K_i      client i's local steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

Vector = np.ndarray  # float64 [d]
Gradient = Callable[[Vector, np.ndarray, np.ndarray], Vector]  # (theta, x [B, p], y [B]) -> [d]
Direction = Callable[[Vector], Vector]


@dataclass(frozen=True)
class Local:
    """How a client trains. ``optimizer()`` is a fresh map from gradients to directions; it replaces momentum."""

    epochs: int = 1
    batch_size: int = 20
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    optimizer: Callable[[], Direction] | None = None


def heavy_ball(momentum: float) -> Direction:
    """u = momentum u + g (Polyak's; u_0 = 0); momentum 0 is plain SGD."""
    u = np.zeros(1)

    def direction(g: Vector) -> Vector:
        nonlocal u
        u = momentum * u + g
        return u

    return direction


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Direction:
    """Kingma & Ba, algorithm 1, with its bias correction."""
    k, m, v = 0, np.zeros(1), np.zeros(1)

    def direction(g: Vector) -> Vector:
        nonlocal k, m, v
        k += 1
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        return (m / (1 - b1**k)) / (np.sqrt(v / (1 - b2**k)) + eps)

    return direction


def pack(params: dict[str, np.ndarray]) -> Vector:
    """{"w": [p, C], "b": [C]} as one vector: w row by row, then b."""
    return np.concatenate([np.asarray(params[name], np.float64).ravel() for name in ("w", "b")])


def unpack(theta: Vector, features: int) -> dict[str, np.ndarray]:
    """The inverse of `pack`: p = features, and d = (p + 1) C."""
    rows = theta.reshape(features + 1, -1)
    return {"w": rows[:features], "b": rows[features]}


def mean_gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
    """Gradient of the rows' mean softmax cross-entropy: the mean of (x, 1) (softmax(x w + b) - onehot(y))."""
    params = unpack(theta, x.shape[1])
    total = np.zeros_like(theta)
    for row, label in zip(x, y, strict=True):
        logits = row @ params["w"] + params["b"]
        p = np.exp(logits - logits.max())
        p /= p.sum()
        p[label] -= 1
        total += pack({"w": np.outer(row, p), "b": p})
    return total / len(x)


@dataclass(frozen=True)
class Federation:
    """The clients, and all the chance of a simulation: who takes part in round t, and in which order rows are read."""

    clients: Sequence[tuple[np.ndarray, np.ndarray]]
    """(x_i [n_i, p], y_i [n_i]) of every client."""
    cohorts: Sequence[Sequence[int]]
    """cohorts[t]: the ids of round t's clients."""
    order: Callable[[int, int, int], np.ndarray]
    """order(t, i, epoch): a permutation of client i's rows."""
    local: Local

    def size(self, i: int) -> int:
        """n_i."""
        return len(self.clients[i][0])

    def lr(self, t: int) -> float:
        """eta_t."""
        return self.local.lr * self.local.lr_decay**t

    def num_steps(self, i: int) -> int:
        """K_i."""
        return self.local.epochs * math.ceil(self.size(i) / self.local.batch_size)

    def train(self, t: int, i: int, start: Vector, gradient: Gradient = mean_gradient) -> Vector:
        """theta_i: client i's local training in round t. ``gradient`` includes the algorithm's correction, if any."""
        local, (x, y) = self.local, self.clients[i]
        direction = local.optimizer() if local.optimizer else heavy_ball(local.momentum)
        theta = start.copy()
        for epoch in range(local.epochs):
            rows = self.order(t, i, epoch)
            assert sorted(rows) == list(range(self.size(i))), "an epoch reads every row of the client once"
            for first in range(0, self.size(i), local.batch_size):
                batch = rows[first : first + local.batch_size]
                g = gradient(theta, x[batch], y[batch])
                norm = math.sqrt((g**2).sum())
                if local.clip_norm is not None and norm > local.clip_norm:
                    g = g * (local.clip_norm / norm)
                g = g + local.weight_decay * theta
                theta = theta - self.lr(t) * direction(g)
        return theta

    def mean(self, cohort: Sequence[int], vectors: Sequence[Vector], weighting: str = "uniform") -> Vector:
        """Mean of one vector per client of the cohort, weighted by n_i ("examples") or alike ("uniform")."""
        weights = [self.size(i) if weighting == "examples" else 1 for i in cohort]
        total = np.zeros_like(vectors[0])
        for weight, vector in zip(weights, vectors, strict=True):
            total += weight * vector
        return total / sum(weights)

    def mean_update(self, t: int, w: Vector, weighting: str, gradient: Gradient = mean_gradient) -> Vector:
        """Mean D_i of round t's cohort, for the algorithms whose clients start at w and keep nothing."""
        cohort = self.cohorts[t]
        return self.mean(cohort, [self.train(t, i, w, gradient) - w for i in cohort], weighting)


def simulate(
    algorithm: Callable[..., Iterator[Vector]],
    params: dict[str, np.ndarray],
    federation: Federation,
    **hyperparameters: float | str | bool,
) -> list[dict[str, np.ndarray]]:
    """The global model after every round."""
    features = len(params["w"])
    return [unpack(w, features) for w in algorithm(federation, pack(params), **hyperparameters)]


def fedavg(fed: Federation, w: Vector, server_lr: float = 1.0, weighting: str = "examples") -> Iterator[Vector]:
    """McMahan et al. 2017, algorithm 1, with a server learning rate."""
    for t in range(len(fed.cohorts)):
        w = w + server_lr * fed.mean_update(t, w, weighting)
        yield w


def fedprox(
    fed: Federation, w: Vector, mu: float, server_lr: float = 1.0, weighting: str = "examples"
) -> Iterator[Vector]:
    """Li et al. 2020: clients minimise F_i(theta) + mu/2 ||theta - w||^2."""
    for t in range(len(fed.cohorts)):

        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray, w: Vector = w) -> Vector:
            return mean_gradient(theta, x, y) + mu * (theta - w)

        w = w + server_lr * fed.mean_update(t, w, weighting, gradient)
        yield w


def fedavgm(
    fed: Federation,
    w: Vector,
    beta: float = 0.9,
    server_lr: float = 1.0,
    damped: bool = False,
    weighting: str = "examples",
) -> Iterator[Vector]:
    """Hsu et al. 2019: heavy ball on the pseudo-gradient -D; damped as in the MOON authors' code."""
    v = np.zeros_like(w)
    for t in range(len(fed.cohorts)):
        pseudo_gradient = -fed.mean_update(t, w, weighting)
        v = beta * v + (1 - beta if damped else 1) * pseudo_gradient
        w = w - server_lr * v
        yield w


def fedopt(
    second_moment: Callable[[Vector, Vector, float], Vector],
    fed: Federation,
    w: Vector,
    server_lr: float,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    weighting: str = "examples",
) -> Iterator[Vector]:
    """Reddi et al. 2021, algorithm 2: no bias correction, m_0 = 0, v_0 = tau^2."""
    m, v = np.zeros_like(w), np.full_like(w, tau**2)
    for t in range(len(fed.cohorts)):
        D = fed.mean_update(t, w, weighting)
        m = b1 * m + (1 - b1) * D
        v = second_moment(v, D, b2)
        w = w + server_lr * m / (np.sqrt(v) + tau)
        yield w


fedadagrad = partial(fedopt, lambda v, D, b2: v + D**2, b1=0.0)
fedyogi = partial(fedopt, lambda v, D, b2: v - (1 - b2) * D**2 * np.sign(v - D**2))
fedadam = partial(fedopt, lambda v, D, b2: b2 * v + (1 - b2) * D**2)
