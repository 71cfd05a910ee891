"""The steps that partitioners are made of: sizes of the clients, and the client of every example.

Shapes: M examples, N clients, C distinct labels.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from fedjax_drift import checks

ATTEMPTS = 100  # of `split_classes` before small clients are filled up
SIZE_RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": np.log,
    "square": lambda i: 2 * np.log(i),
    "exponential": lambda i: i,
}  # the logarithm of the size of client i in 1..N, up to a constant


def assign_by_turns(
    rng: np.random.Generator, y: np.ndarray, class_sizes: np.ndarray, sizes: np.ndarray, mixes: np.ndarray
) -> np.ndarray:
    """Assigns the examples in turns. Returns the client of each example.

    In a turn, a random client that is not full gets one example, whose class is drawn from the label distribution of
    the client (its mix). The mixes are log weights [N, C]. The classes of all turns are drawn in one vectorised pass.
    The draws are valid up to the first turn whose class has no example left. From this turn on, draws of classes
    without examples are repeated, and the next pass checks the draws again. There are at most C passes. The result has
    the same distribution as drawing one turn after another.
    """
    # Each client has a Poisson clock of rate 1, which stops when the client is full. So the next client is uniformly
    # distributed among the clients that are not full.
    wait = rng.standard_exponential(y.size)
    time, first = np.cumsum(wait), np.cumsum(sizes) - sizes
    time -= np.repeat(time[first] - wait[first], sizes)
    turn = np.repeat(np.arange(sizes.size), sizes)[np.argsort(time)]

    remaining = class_sizes.copy()
    drawn = _draw(rng, mixes, remaining > 0, turn).astype(np.min_scalar_type(remaining.size))
    valid = 0
    while True:
        unchecked = drawn[valid:]
        demand = np.bincount(unchecked, minlength=remaining.size)
        over = demand > remaining
        if not over.any():
            break
        first_too_many = (np.cumsum(demand) - demand + remaining)[over]
        stop = np.argsort(unchecked, kind="stable")[first_too_many].min()
        remaining -= np.bincount(unchecked[:stop], minlength=remaining.size)
        valid += stop
        redrawn = valid + np.flatnonzero(remaining[drawn[valid:]] == 0)
        drawn[redrawn] = _draw(rng, mixes, remaining > 0, turn[redrawn])

    owner = np.empty(y.size, np.int64)
    owner[by_label(rng, y)] = turn[np.argsort(drawn, kind="stable")]
    return owner


def _draw(rng: np.random.Generator, mixes: np.ndarray, open_: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Draws a class for every turn from the mix of its client. Only classes with remaining examples (open_ [C]) are
    drawn.
    """
    clients, row = np.unique(turn, return_inverse=True)
    weights = np.where(open_, mixes[clients], -np.inf)
    upto = np.cumsum(np.exp(weights - weights.max(axis=1, keepdims=True)), axis=1)
    upto = upto / upto[:, -1:] + np.arange(clients.size)[:, None]
    # One sorted table for all clients. u is float32, so row + u < row + 1 also holds after rounding to float64.
    u = rng.random(turn.size, dtype=np.float32)
    return np.searchsorted(upto.ravel(), row + u, side="right") - row * open_.size


def split_classes(
    rng: np.random.Generator,
    y: np.ndarray,
    class_sizes: np.ndarray,
    num_clients: int,
    alpha: float,
    min_size: int,
    capped: bool,
) -> np.ndarray:
    require_rows(y.size, num_clients, "min_size", min_size)
    for _ in range(ATTEMPTS):
        counts = np.zeros((class_sizes.size, num_clients), np.int64)
        sizes = np.zeros(num_clients, np.int64)
        for c, class_size in enumerate(class_sizes):
            # As long as examples remain, at least one client has fewer than M/N, so the maximum is finite.
            weights = log_gamma(rng, alpha, num_clients)
            weights = np.where(sizes * num_clients < y.size, weights, -np.inf) if capped else weights
            # The random offset makes rounding fair if a class has fewer examples than there are clients.
            counts[c] = apportion(class_size, np.exp(weights - weights.max()), rng.random())
            sizes += counts[c]
        if sizes.min() >= min_size:
            break
    return assign_counts(rng, y, counts, min_size)


def assign_counts(rng: np.random.Generator, y: np.ndarray, counts: np.ndarray, min_size: int) -> np.ndarray:
    """Returns the client of each example, where client i gets counts[c, i] examples of the label that is number c.

    Clients below min_size then get random examples of the clients that are largest.
    """
    num_clients, sizes = counts.shape[1], counts.sum(axis=0)
    owner = np.empty(y.size, np.int64)
    client_of_count = np.tile(np.arange(num_clients), len(counts))
    owner[by_label(rng, y)] = np.repeat(client_of_count, counts.ravel())

    change = top_up(sizes, min_size) - sizes  # all 0, unless a client is too small
    rows = by_label(rng, owner)
    rank = np.arange(y.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = rows[rank < -change[owner[rows]]]
    owner[moved] = rng.permutation(np.repeat(np.arange(num_clients), np.maximum(change, 0)))
    return owner


def client_sizes(
    rng: np.random.Generator,
    num_rows: int,
    num_clients: int,
    sigma: float,
    min_size: int,
    sizes: str | tuple[int, ...] | None = None,
) -> np.ndarray:
    """Returns sizes [N] >= min_size that sum to num_rows.

    They are given, or follow one of the `SIZE_RULES`. With sizes=None they are equal (sigma = 0) or log-normal.
    """
    require_rows(num_rows, num_clients, "min_size", min_size)
    if isinstance(sizes, tuple):
        if (total := sum(sizes)) != num_rows:
            what = f"sizes must sum to {num_rows}, the number of examples"
            checks.refuse(what, total, "every example is used exactly once")
        return np.array(sizes)
    if sizes is None:
        log_size = sigma * rng.standard_normal(num_clients)
    else:
        log_size = SIZE_RULES[sizes](np.arange(1, num_clients + 1))
    return top_up(apportion(num_rows, np.exp(log_size - log_size.max())), min_size)


def apportion(total: int, weights: np.ndarray, offset: float = 0.5) -> np.ndarray:
    """Returns integers that sum to total and differ from total * weights / sum(weights) by at most 1.

    Weight 0 gives 0.
    """
    upto = np.cumsum(weights)
    cuts = np.floor(total * (upto / upto[-1]) + offset)
    return np.diff(np.minimum(cuts, total).astype(np.int64), prepend=0)


def top_up(sizes: np.ndarray, min_size: int) -> np.ndarray:
    """Raises sizes to min_size. Each additional example is taken from the client that is largest at that moment."""
    raised = np.maximum(sizes, min_size)
    largest = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for _ in range(int(raised.sum() - sizes.sum())):
        negative_size, client = largest[0]
        heapq.heapreplace(largest, (negative_size + 1, client))
        raised[client] -= 1
    return raised


def by_label(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """Returns the indices of the examples, sorted by label, in random order within each label."""
    shuffled = rng.permutation(y.size)
    return shuffled[np.argsort(y[shuffled], kind="stable")]


def log_gamma(rng: np.random.Generator, shape: float | np.ndarray, size: int | tuple[int, ...]) -> np.ndarray:
    """Returns logarithms of Gamma(shape) samples, which are a Dirichlet sample before normalisation.

    Logarithms do not underflow. So the ratios of unlikely classes are correct for any alpha, even when no examples of
    the likely classes remain. A Gamma(a) sample is drawn as Gamma(a + 1) U^(1/a), which has the same distribution.
    """
    shape = np.maximum(shape, 1e-300)  # 1/shape must stay finite
    return np.log(rng.standard_gamma(shape + 1, size)) - rng.standard_exponential(size) / shape


def require_rows(num_rows: int, num_clients: int, name: str, each: int) -> None:
    if num_clients * each <= num_rows:
        return
    arguments = f"num_clients={num_clients}" + (f" with {name}={each}" if each > 1 else "")
    fixes = [f"{name} <= {num_rows // num_clients}"] if num_clients <= num_rows else []
    fixes += [f"num_clients <= {num_rows // each}"] if each <= num_rows else []
    what = f"{arguments} needs at least {num_clients * each} examples"
    checks.refuse(what, f"a data set with {num_rows}", f"use {' or '.join(fixes) or 'more data'}")
