"""Distances between the data of the clients: between their label distributions, and between their embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift import checks, reprs
from fedjax_drift.data.federated import FederatedData, GivenData
from fedjax_drift.spec import Count, Seed, checked

Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of distributions p [n, C] and q [n, C] or [1, C] -> [n]
CHUNK = 2**16  # the pairs of clients, or the examples, in one step
DIRECTIONS = 50  # on which embeddings are projected


class Distances(NamedTuple):
    """How far the clients' data are from those of the federation, and from each other.

    The arrays [N] have the distance of each client from the federation, that is, from all clients' examples together.
    `fd.personal.summary` summarises one.
    """

    hellinger: np.ndarray  # in [0, 1]
    jensen_shannon: np.ndarray  # in [0, 1]
    total_variation: np.ndarray  # in [0, 1]
    earth_mover: np.ndarray | None  # in the units of `ground`; None without it
    sliced_wasserstein: np.ndarray | None  # in the units of the embedding; None without it
    between: dict[str, float]  # name of a distance of labels -> its mean over pairs of different clients; {} if N = 1

    def __repr__(self) -> str:
        return reprs.fields(self)


@checked
def distances(
    data: GivenData, ground: Any = None, embedding: Any = None, *, pairs: Count = 10_000, seed: Seed = 0
) -> Distances:
    """Computes distances between the clients' training examples.

    With the label distributions p and q, and m = (p + q) / 2:

    - Hellinger: sqrt(1 - sum_c sqrt(p_c q_c))
    - Jensen-Shannon: sqrt((KL(p || m) + KL(q || m)) / 2) with logarithms to base 2. It is a distance; its square is the
      divergence (Endres and Schindelin 2003).
    - total variation: sum_c |p_c - q_c| / 2
    - earth mover's: the smallest cost of turning p into q, if moving a share s from label a to label b costs
      s * ground[a, b] (Zhao et al. 2018, arXiv 1806.00582, use it for clients). It is exact. It has a closed form if
      all labels are equally far from each other or lie on a line. Otherwise each distance is a linear program, which
      takes milliseconds.
    - sliced Wasserstein, for embeddings: the mean over 50 random directions of the Wasserstein-1 distance between the
      projections (Bonneel et al. 2015 use order 2). Each is exact.

    Args:
      data: the federation, with integer labels. An example may have several labels.
      ground: float [C, C], the distance between labels: a metric. Default: no earth mover's distance.
      embedding: features of the training examples: an array [M, F] in the order of ``data.x``, or a function from
        decoded inputs [n, ...] to [n, F], such as ``lambda x: model.features(state.params, x)``. Default: no sliced
        Wasserstein distance.
      pairs: the number of pairs of clients over which the means in ``between`` are, >= 1. If there are more pairs, that
        many are drawn at random.
      seed: of these pairs and of the directions.

    Raises:
      ValueError: the labels are not integers, ``ground`` is no metric, or ``embedding`` is not finite.

    >>> x = np.zeros((2, 1), np.float32)
    >>> data = FederatedData.from_clients([(x, np.array([0, 0])), (x, np.array([0, 1]))])
    >>> distances(data).total_variation
    array([0.25, 0.25])
    >>> distances(data).between["total_variation"]
    0.5
    """
    counts = data.label_counts()
    distance_of: dict[str, Distance] = {of.__name__: of for of in (hellinger, jensen_shannon, total_variation)}
    if ground is not None:
        distance_of["earth_mover"] = earth_mover(checked_ground(ground, counts.shape[1]))
    features = None if embedding is None else embedded(data, embedding)
    rng = np.random.default_rng(seed)
    p, all_clients = counts / counts.sum(1, keepdims=True), counts.sum(0, keepdims=True) / counts.sum()
    first, second = some_pairs(data.num_clients, pairs, rng)
    steps = [slice(start, start + CHUNK // 16) for start in range(0, len(first), CHUNK // 16)]
    between = {
        name: float(np.concatenate([distance(p[first[at]], p[second[at]]) for at in steps]).mean())
        for name, distance in (distance_of.items() if steps else ())
    }
    of_clients: dict[str, Any] = {name: distance(p, all_clients) for name, distance in distance_of.items()}
    sliced = None if features is None else sliced_wasserstein(features, data.sizes, rng)
    return Distances(**{"earth_mover": None, **of_clients}, sliced_wasserstein=sliced, between=between)


def some_pairs(N: int, most: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all pairs of different clients, or of ``most`` pairs that are drawn with replacement."""
    if N * (N - 1) // 2 <= most:
        first, second = np.triu_indices(N, 1)
        return first, second
    first = rng.integers(N, size=most)
    return first, (first + rng.integers(1, N, size=most)) % N


# --- labels -----------------------------------------------------------------------------------------------------------


def hellinger(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    # Half the squared distance of the roots is 1 - sum_c sqrt(p_c q_c), and exactly 0 for equal distributions.
    return np.sqrt(((np.sqrt(p) - np.sqrt(q)) ** 2).sum(1) / 2)


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    middle = (p + q) / 2

    def divergence(p: np.ndarray) -> np.ndarray:
        return (p * np.log2(np.where(p > 0, p, 1) / np.where(p > 0, middle, 1))).sum(1)

    return np.sqrt(np.clip((divergence(p) + divergence(q)) / 2, 0, 1))


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.abs(p - q).sum(1) / 2


def earth_mover(ground: np.ndarray) -> Distance:
    """The earth mover's distance with a metric between the labels, [C, C]."""
    C = len(ground)
    apart = ground[~np.eye(C, dtype=bool)]
    if not apart.size or np.ptp(apart) == 0:
        return lambda p, q: (apart[0] if apart.size else 0.0) * total_variation(p, q)
    place = ground[ground[0].argmax()]  # the distances from one end, if the labels lie on a line
    if np.allclose(np.abs(place[:, None] - place), ground, rtol=1e-12, atol=0):
        order = np.argsort(place)
        return lambda p, q: np.abs((p - q)[:, order].cumsum(1)[:, :-1]) @ np.diff(place[order])
    return lambda p, q: np.array([transport(gap, ground) for gap in p - q])


def transport(gap: np.ndarray, ground: np.ndarray) -> float:
    """The smallest cost of moving the positive part of ``gap`` [C] to its negative part.

    What two distributions have in common stays where it is, because the ground distance is a metric.
    """
    from scipy.optimize import linprog

    more, less = np.flatnonzero(gap > 0), np.flatnonzero(gap < 0)
    if not more.size or not less.size:
        return 0.0
    # The amounts [more, less] that are moved: all of the excess of each label, and no more than the lack of each label.
    leaves = np.kron(np.eye(more.size), np.ones(less.size))
    arrives = np.kron(np.ones(more.size), np.eye(less.size))
    excess, lack = gap[more], -gap[less]
    lack = lack * (excess.sum() / lack.sum())  # equal up to rounding; now feasible
    solved = linprog(ground[np.ix_(more, less)].ravel(), A_eq=np.vstack([leaves, arrives[:-1]]),
                     b_eq=np.concatenate([excess, lack[:-1]]))  # fmt: skip
    return float(solved.fun)


def checked_ground(ground: Any, C: int) -> np.ndarray:
    """Raises ConfigurationError unless it is a metric on C labels."""
    metric = checks.array("ground", ground).astype(float)
    if metric.shape != (C, C):
        checks.refuse(f"ground must have the shape [{C}, {C}], one distance for each two labels", list(metric.shape))
    symmetric = np.isfinite(metric).all() and (metric == metric.T).all()
    if not symmetric or (metric[~np.eye(C, dtype=bool)] <= 0).any() or np.diag(metric).any():
        what = "ground must be finite and symmetric, with zeros on the diagonal and positive numbers beside it"
        checks.refuse(what, "another matrix", "np.abs(np.subtract.outer(labels, labels)), for example")
    for c in range(C):
        if (metric > (metric[:, c, None] + metric[c]) * (1 + 1e-9)).any():
            got = f"two labels between which a detour over label {c} is shorter"
            checks.refuse("ground must be a metric", got, "use the lengths of shortest paths")
    return metric


# --- embeddings -------------------------------------------------------------------------------------------------------


def embedded(data: FederatedData, embedding: Any) -> np.ndarray:
    """The features of the training examples, float [M, F]. Raises ConfigurationError unless they are finite."""
    M = len(data.x)
    if callable(embedding):
        checks.function("embedding", embedding, "it maps inputs to features", takes=1)
        parts = (slice(start, start + CHUNK // 64) for start in range(0, M, CHUNK // 64))
        rows = [checks.array("embedding(x)", embedding(data.decode(data.x[part]))) for part in parts]
        embedding = np.concatenate(rows)
    features = checks.array("embedding", embedding)
    if features.ndim != 2 or len(features) != M:
        one = f"one row for each of the {M} training examples, or a function that returns one row for each input"
        checks.refuse(f"embedding must be an array [M, F] with {one}", list(features.shape))
    features = features.astype(float)
    if not np.isfinite(features).all():
        checks.refuse("embedding must be finite", "NaN or infinite features", "check the model")
    return features


def sliced_wasserstein(features: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The distance of each client's features from all features, [N]. features: [M, F], grouped by client."""
    directions = rng.normal(size=(DIRECTIONS, features.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.mean([wasserstein(features @ direction, sizes) for direction in directions], 0)


def wasserstein(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The Wasserstein-1 distance of each client's values from all values, [N]. values: [M], grouped by client.

    It is the integral over u in [0, 1] of |Q_i(u) - Q(u)|, with the quantile functions of the client and of all
    values. Q_i is a constant c between a = (j - 1) / n_i and b = j / n_i, for its j-th smallest value c. There Q is at
    most c for u < F(c), with the distribution function F. So with G(u), the integral of Q from 0 to u, the integral
    from a to b has a closed form.
    """
    M, N = len(values), len(sizes)
    values = values - values.mean()  # fewer digits are lost in the differences of G
    owner = np.repeat(np.arange(N), sizes)
    c = values[np.lexsort((values, owner))]
    ordered = np.sort(values)
    a = (np.arange(M) - np.repeat(np.cumsum(sizes) - sizes, sizes)) / sizes[owner]
    b = a + 1 / sizes[owner]
    s = np.clip(np.searchsorted(ordered, c, side="right") / M, a, b)
    knots = np.concatenate([[0], ordered.cumsum()]) / M
    G_a, G_s, G_b = (np.interp(M * u, np.arange(M + 1), knots) for u in (a, s, b))
    below, above = c * (s - a) - (G_s - G_a), (G_b - G_s) - c * (b - s)
    return np.maximum(np.bincount(owner, below + above, N), 0)
