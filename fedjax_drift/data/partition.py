"""Recipes that deal the rows of a labelled data set to clients.

A recipe is a value; calling it on the labels deals the rows:

    >>> import numpy as np
    >>> recipe = dirichlet(2, alpha=0.3, seed=0)
    >>> recipe
    dirichlet(num_clients=2, alpha=0.3, seed=0, prior='client', size_sigma=0.0, min_size=1)
    >>> [rows.size for rows in recipe(np.array([0, 0, 1, 1, 2, 2]))]
    [3, 3]

Every recipe uses every row exactly once, gives every client at least one row, ends for every
legal input, and depends on its arguments and the data alone. Shapes: M rows, N clients, C distinct
labels.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError

PRIORS = ("client", "class", "global")
ATTEMPTS = 100  # draws of prior="class" before the short clients are topped up


@dataclass(frozen=True, repr=False)
class Partition:
    """A recipe by its name and arguments; `eval(repr(recipe))` gives the same recipe."""

    name: str
    arguments: Mapping[str, Any] = field(hash=False)
    owners: Callable[[np.ndarray, np.ndarray | None], np.ndarray] = field(compare=False)
    """(y [M], writer [M] or None) -> the client of every row, int [M]."""

    @property
    def num_clients(self) -> int | None:
        """N, or None where the data decide."""
        return self.arguments.get("num_clients")

    def __call__(self, y: np.ndarray, writer: np.ndarray | None = None) -> list[np.ndarray]:
        """The row numbers of each client: N arrays, int64, ascending, disjoint; together 0..M-1.

        y: integer labels [M]. writer: integers or strings [M], read by `by_writer` alone.
        Raises ValueError for other shapes or types and for fewer rows than the recipe needs.
        """
        y = checks.array("y", y)
        if y.ndim != 1 or y.dtype.kind not in "iu" or y.size == 0:
            raise ConfigurationError(
                "y must be one-dimensional integer labels, at least one, "
                f"got {y.dtype} of shape {y.shape}: pass one class number per row"
            )
        owner = self.owners(y, writer)
        rows = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        return np.split(rows, np.cumsum(np.bincount(owner))[:-1])

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"


def iid(num_clients: int, seed: int = 0, size_sigma: float = 0.0) -> Partition:
    """Shuffle the rows and cut them into N pieces.

    size_sigma = 0: sizes differ by at most one row. size_sigma > 0: sizes from
    LogNormal(log(M/N), size_sigma), rescaled to sum to M, each at least 1 (FedDyn's and FedDC's
    authors' code; size_sigma is the standard deviation of the logarithm, 0.3 in their experiments).

    Raises ValueError for num_clients < 1, a negative seed or size_sigma; when called, for M < N.
    """
    num_clients, seed = checks.integer("num_clients", num_clients, 1), checks.integer("seed", seed, 0, math.inf)
    size_sigma = checks.nonnegative("size_sigma", size_sigma, "0 gives equal sizes, 0.3 is usual", computed=False)

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        rng = np.random.default_rng(seed)
        sizes = _sizes(rng, y.size, num_clients, size_sigma, min_size=1)
        return rng.permutation(np.repeat(np.arange(num_clients), sizes))

    return Partition("iid", {"num_clients": num_clients, "seed": seed, "size_sigma": size_sigma}, owners)


def dirichlet(
    num_clients: int,
    alpha: float,
    seed: int = 0,
    prior: str = "client",
    size_sigma: float = 0.0,
    min_size: int | None = None,
    capped: bool = True,
) -> Partition:
    """Uneven label mixes; small alpha: few labels per client, large alpha: the same mix for all.

    - prior="client": each client draws its label mix from Dir(alpha 1_C). Until all rows are dealt, a
      random client that is not full takes a row of a class drawn from its mix, drawn again while
      that class is used up (FedDyn's and FedDC's authors' code). Sizes as in `iid`.
    - prior="global": the same with Dir(alpha p), p the label frequencies of the data (Hsu et al.,
      arXiv 1909.06335; FedGVRGM). With C equally frequent labels, alpha here does what alpha/C
      does under "client".
    - prior="class": each class is split over the clients by Dir(alpha 1_N), without the clients that
      already hold M/N rows or more, and all is drawn again until every client has min_size rows
      (MOON's authors' code; LfD). After 100 draws the last one is repaired: one random row
      at a time moves from the then largest client to a client that is short. Sizes vary. With
      capped=False large clients get more all the same (FedEve's authors' library, whose clients
      may be empty: min_size=1 comes nearest).

    min_size: the fewest rows of a client; None is 10 for "class" (MOON's) and 1 otherwise, where it
    matters to log-normal sizes alone: the short ones grow to it at the expense of the largest.

    Raises ValueError for num_clients < 1, alpha not positive and finite, an unknown prior,
    min_size < 1, a negative seed or size_sigma, size_sigma with prior="class"; when called, for
    M < N min_size.
    """
    num_clients, seed = checks.integer("num_clients", num_clients, 1), checks.integer("seed", seed, 0, math.inf)
    size_sigma = checks.nonnegative("size_sigma", size_sigma, "0 gives equal sizes, 0.3 is usual", computed=False)
    checks.choice("prior", prior, PRIORS)
    alpha = checks.positive("alpha", alpha, "0.01 gives a very uneven label mix, 100 an even one", computed=False)
    if prior == "class" and size_sigma > 0:
        raise ConfigurationError(
            f"size_sigma must be 0 with prior='class', got {size_sigma!r}: there the label mixes "
            "decide the sizes; use prior='client' or prior='global' for log-normal sizes"
        )
    default = 10 if prior == "class" else 1
    fewest = default if min_size is None else checks.integer("min_size", min_size, 1)
    arguments = {
        "num_clients": num_clients,
        "alpha": alpha,
        "seed": seed,
        "prior": prior,
        "size_sigma": size_sigma,
        "min_size": fewest,
    }
    capped = checks.flag("capped", capped)
    if not capped:
        if prior != "class":
            raise ConfigurationError(f"capped=False is for prior='class', got prior={prior!r}: sizes are given there")
        arguments["capped"] = False

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        rng = np.random.default_rng(seed)
        classes, class_sizes = np.unique(y, return_counts=True)
        if prior == "class":
            return _split_classes(rng, y, class_sizes, num_clients, alpha, fewest, capped)
        sizes = _sizes(rng, y.size, num_clients, size_sigma, fewest)
        p = class_sizes / y.size if prior == "global" else np.ones(classes.size)
        mixes = _log_gamma(rng, alpha * p, (num_clients, classes.size))
        return _deal(rng, y, class_sizes, sizes, mixes)

    return Partition("dirichlet", arguments, owners)


def shards(num_clients: int, per_client: int, seed: int = 0) -> Partition:
    """Sort by label, cut into N * per_client equal blocks, give each client per_client random ones.

    McMahan et al. (arXiv 1602.05629), 2 blocks; FedADC, 2 to 4. Rows of one label are shuffled
    first; blocks differ by at most one row. A block may straddle labels, so a client can hold more
    than per_client of them.

    Raises ValueError for num_clients or per_client < 1, a negative seed; when called, for
    M < N * per_client.
    """
    num_clients, seed = checks.integer("num_clients", num_clients, 1), checks.integer("seed", seed, 0, math.inf)
    per_client = checks.integer("per_client", per_client, 1)

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        _require_rows(y.size, num_clients, "per_client", per_client)
        rng = np.random.default_rng(seed)
        blocks = num_clients * per_client
        owner_of_block = rng.permutation(np.repeat(np.arange(num_clients), per_client))
        owner = np.empty(y.size, np.int64)
        owner[_by_label(rng, y)] = np.repeat(owner_of_block, _apportion(y.size, np.ones(blocks)))
        return owner

    return Partition("shards", {"num_clients": num_clients, "per_client": per_client, "seed": seed}, owners)


def by_writer() -> Partition:
    """One client per writer, in increasing order of the writer's id: a natural partition.

    Raises ValueError, when called, without writers or unless they are M integers or strings.
    """

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        if writer is None:
            raise ConfigurationError(
                "the data set has no writers: use iid, dirichlet or shards, or pass writer=, one id per row"
            )
        try:
            writer = np.asarray(writer)
        except Exception as error:  # ragged, or somebody else's object
            raise ConfigurationError(f"writer must be one id per row, got {checks.shown(writer)}") from error
        if writer.shape != y.shape or writer.dtype.kind not in "iuUS":
            raise ConfigurationError(
                f"writer must be integers or strings of shape {y.shape}, "
                f"got {writer.dtype} of shape {writer.shape}: pass one id per row"
            )
        return np.unique(writer, return_inverse=True)[1]

    return Partition("by_writer", {}, owners)


def _deal(
    rng: np.random.Generator,
    y: np.ndarray,
    class_sizes: np.ndarray,
    sizes: np.ndarray,
    mixes: np.ndarray,
) -> np.ndarray:
    """Every turn a client that is not full takes a row of a class of its mix (log weights [N, C]).

    All turns draw at once. Up to the first turn that finds its class empty they are what dealing
    one by one gives; the later turns that want this class draw again. At most C passes.
    """
    # Clients on unit-rate Poisson clocks, stopped when full: the next is uniform among the rest.
    wait = rng.standard_exponential(y.size)
    time, first = np.cumsum(wait), np.cumsum(sizes) - sizes
    time -= np.repeat(time[first] - wait[first], sizes)
    turn = np.repeat(np.arange(sizes.size), sizes)[np.argsort(time)]

    left = class_sizes.copy()
    wanted = _draw(rng, mixes, left > 0, turn).astype(np.min_scalar_type(left.size))
    done = 0
    while True:
        ahead = wanted[done:]
        demand = np.bincount(ahead, minlength=left.size)
        over = demand > left
        if not over.any():
            break
        first_too_many = (np.cumsum(demand) - demand + left)[over]
        stop = np.argsort(ahead, kind="stable")[first_too_many].min()
        left -= np.bincount(ahead[:stop], minlength=left.size)
        done += stop
        again = done + np.flatnonzero(left[wanted[done:]] == 0)
        wanted[again] = _draw(rng, mixes, left > 0, turn[again])

    owner = np.empty(y.size, np.int64)
    owner[_by_label(rng, y)] = turn[np.argsort(wanted, kind="stable")]
    return owner


def _draw(rng: np.random.Generator, mixes: np.ndarray, open_: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """A class for every turn, from its client's mix restricted to the open classes [C]."""
    clients, row = np.unique(turn, return_inverse=True)
    weights = np.where(open_, mixes[clients], -np.inf)
    upto = np.cumsum(np.exp(weights - weights.max(axis=1, keepdims=True)), axis=1)
    upto = upto / upto[:, -1:] + np.arange(clients.size)[:, None]
    # One sorted table for all clients. A float32 u keeps row + u < row + 1 in float64.
    u = rng.random(turn.size, dtype=np.float32)
    return np.searchsorted(upto.ravel(), row + u, side="right") - row * open_.size


def _split_classes(
    rng: np.random.Generator,
    y: np.ndarray,
    class_sizes: np.ndarray,
    num_clients: int,
    alpha: float,
    min_size: int,
    capped: bool,
) -> np.ndarray:
    _require_rows(y.size, num_clients, "min_size", min_size)
    for _ in range(ATTEMPTS):
        counts = np.zeros((class_sizes.size, num_clients), np.int64)
        sizes = np.zeros(num_clients, np.int64)
        for c, class_size in enumerate(class_sizes):
            # While rows are left, somebody holds less than M/N: the maximum is finite.
            weights = _log_gamma(rng, alpha, num_clients)
            weights = np.where(sizes * num_clients < y.size, weights, -np.inf) if capped else weights
            # A random offset rounds without favour when there are fewer rows than clients.
            counts[c] = _apportion(class_size, np.exp(weights - weights.max()), rng.random())
            sizes += counts[c]
        if sizes.min() >= min_size:
            break
    owner = np.empty(y.size, np.int64)
    client_of_count = np.tile(np.arange(num_clients), len(counts))
    owner[_by_label(rng, y)] = np.repeat(client_of_count, counts.ravel())

    change = _top_up(sizes, min_size) - sizes  # 0 for all unless the last attempt failed too
    rows = _by_label(rng, owner)
    rank = np.arange(y.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = rows[rank < -change[owner[rows]]]
    owner[moved] = rng.permutation(np.repeat(np.arange(num_clients), np.maximum(change, 0)))
    return owner


def _sizes(rng: np.random.Generator, num_rows: int, num_clients: int, sigma: float, min_size: int) -> np.ndarray:
    """Equal (sigma = 0) or log-normal sizes [N] that sum to num_rows, none below min_size."""
    _require_rows(num_rows, num_clients, "min_size", min_size)
    log_size = sigma * rng.standard_normal(num_clients)
    return _top_up(_apportion(num_rows, np.exp(log_size - log_size.max())), min_size)


def _apportion(total: int, weights: np.ndarray, offset: float = 0.5) -> np.ndarray:
    """Integers that sum to total, each within one of its share; share 0 stays 0."""
    upto = np.cumsum(weights)
    cuts = np.floor(total * (upto / upto[-1]) + offset)
    return np.diff(np.minimum(cuts, total).astype(np.int64), prepend=0)


def _top_up(sizes: np.ndarray, min_size: int) -> np.ndarray:
    """Raise sizes to min_size, each row taken from the largest at that moment."""
    raised = np.maximum(sizes, min_size)
    largest = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for _ in range(int(raised.sum() - sizes.sum())):
        negative_size, client = largest[0]
        heapq.heapreplace(largest, (negative_size + 1, client))
        raised[client] -= 1
    return raised


def _by_label(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """Row numbers sorted by label, in random order within a label."""
    shuffled = rng.permutation(y.size)
    return shuffled[np.argsort(y[shuffled], kind="stable")]


def _log_gamma(rng: np.random.Generator, shape: float | np.ndarray, size: int | tuple[int, ...]) -> np.ndarray:
    """Logarithms of Gamma(shape) draws: a Dirichlet draw before normalisation.

    As logarithms, the ratios of classes survive at any alpha, also once the likely classes are
    gone. Gamma(a) = Gamma(a + 1) U^(1/a) in law.
    """
    shape = np.maximum(shape, 1e-300)  # 1/shape must stay finite
    return np.log(rng.standard_gamma(shape + 1, size)) - rng.standard_exponential(size) / shape


def _require_rows(num_rows: int, num_clients: int, name: str, each: int) -> None:
    if num_clients * each <= num_rows:
        return
    asked = f"num_clients={num_clients}" + (f" with {name}={each}" if each > 1 else "")
    fixes = [f"{name} <= {num_rows // num_clients}"] if num_clients <= num_rows else []
    fixes += [f"num_clients <= {num_rows // each}"] if each <= num_rows else []
    raise ConfigurationError(
        f"{asked} needs at least {num_clients * each} rows, the data set has {num_rows}: "
        f"use {' or '.join(fixes) or 'more data'}"
    )
