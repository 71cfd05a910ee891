"""Who averages with whom: one server, a hierarchy of servers, or a graph of clients without a server.

fd.Simulation(..., topology=fd.topology.groups(edge_of_client, every=5))
fd.Simulation(..., topology=fd.topology.graph(fd.topology.ring(100)), cohort_size=100)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.recipes import Recipe, recorded
from fedjax_drift.spec import Count, CountOrZero, Fix, Probability, checked

__all__ = [
    "Topology", "complete", "erdos_renyi", "exponential", "graph", "groups", "one_peer", "ring", "star", "torus",
]  # fmt: skip
__dir__ = __all__.copy


class Topology(NamedTuple):
    """Who averages with whom. `star`, `groups` and `graph` make one.

    Attributes:
      groups: int32 [N], the edge server of each client, 0..R-1. None: there are no edges.
      every: the number of rounds between two averages of the edge servers.
      weights: float [T, N, N], the mixing matrices of the rounds 0..T-1, which are repeated. None: there is no graph.
      name: the name in logs and messages.
      recipe: how it was made.
    """

    groups: np.ndarray | None = None
    every: int = 1
    weights: np.ndarray | None = None
    name: str = "star"
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return f"Topology({self.name})"

    @property
    def is_star(self) -> bool:
        """Whether there is one server, and nothing else."""
        return self.groups is None and self.weights is None

    @property
    def receivers(self) -> int:
        """R, the number of models: 1, the number of edge servers, or the number of clients."""
        if self.groups is not None:
            return int(self.groups.max()) + 1
        return 1 if self.weights is None else self.weights.shape[-1]


@recorded
def star() -> Topology:
    """One server, which averages all clients of a round. The default."""
    return Topology()


def _groups(name: str, value: Any, fix: str) -> np.ndarray:
    array = checks.array(name, value)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or len(array) == 0:
        checks.refuse(f"{name} must be integers [N], the group of each client", checks.shown(value), fix)
    if not np.array_equal(np.unique(array), np.arange(array.max() + 1)):
        got = f"the numbers {np.unique(array)[:8].tolist()}"
        checks.refuse(f"{name} must be the numbers 0..R-1, each for at least one client", got, fix)
    return array.astype(np.int32)


def _mixing(name: str, value: Any, fix: str) -> np.ndarray:
    array = checks.array(name, value)
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[1] != array.shape[2] or 0 in array.shape:
        checks.refuse(
            f"{name} must be numbers [N, N], or [T, N, N] for a matrix that changes", checks.shown(value), fix
        )
    array = array.astype(np.float64)
    if not np.isfinite(array).all() or array.min() < 0:
        checks.refuse(f"{name} must be finite numbers >= 0", f"a smallest one of {array.min():.6g}", fix)
    for axis, what in ((2, "row"), (1, "column")):
        sums = array.sum(axis)
        if (wrong := np.abs(sums - 1)).max() > 1e-6:
            t, i = np.unravel_index(wrong.argmax(), wrong.shape)
            reason = "so that the mean model is kept"
            got = f"{sums[t, i]:.6g} in {what} {i}"
            checks.refuse(f"{name} must be doubly stochastic, each {what} with the sum 1, {reason}", got, fix)
    return array


MOST = 10_000
Size = Annotated[int, spec.integer(1, MOST), Fix("a mixing matrix has N x N numbers")]
Groups = Annotated[np.ndarray, spec.Spec(_groups, "array"), Fix("pass np.arange(N) % 10, for example")]
Mixing = Annotated[np.ndarray, spec.Spec(_mixing, "array"), Fix("pass fd.topology.ring(N), for example")]


@recorded
def groups(of: Groups, every: Count = 1) -> Topology:
    """Hierarchical averaging (Liu, Zhang, Song, Letaief 2020, arXiv 1905.06641): clients, edge servers and a cloud.

    Each edge server runs the algorithm with its own clients, from variables of its own. In a round, it averages the
    clients of the cohort that belong to it. An edge server without such a client keeps its variables. After every
    ``every`` rounds, the cloud averages the variables of the edge servers with the weights of their clients, and all
    edge servers continue with the mean. With the paper's kappa_1 local steps, ``every`` is its kappa_2.

    Args:
      of: int [N], the edge server of each client, 0..R-1.
      every: the number of rounds between two averages of the cloud.
    """
    return Topology(groups=of, every=every, name=f"groups({int(of.max()) + 1}, every={every})")


@recorded
def graph(W: Mixing) -> Topology:
    """Decentralised averaging (D-SGD: Lian et al. 2017, arXiv 1705.09056; Koloskova et al. 2020, arXiv 2003.10422).

    There is no server. Client j trains from its own model x_j to theta_j, and every client averages with its
    neighbours:

        x_i <- sum_j W_ij theta_j

    Models are mixed, not updates, and so are the other variables of the algorithm's server, such as SCAFFOLD's c. All
    clients take part in a round (``cohort_size=N``). The link of a client that does not report is missing in this
    round: its neighbours keep its weight for their own models. Weights of the algorithm, such as n_i, are not used.

    Args:
      W: [N, N], or [T, N, N] for a matrix of round t mod T. Rows and columns have the sum 1. W_ij is the weight of
        client j in the mean of client i.
    """
    return Topology(weights=W, name=f"graph({W.shape[-1]})")


def _metropolis(links: np.ndarray) -> np.ndarray:
    """The Metropolis-Hastings weights of an undirected graph: 1 / (1 + the larger degree) for each link."""
    degrees = links.sum(1)
    W = links / (1 + np.maximum(degrees[:, None], degrees[None]))
    return W + np.diag(1 - W.sum(1))


def _linked(N: int, neighbours: Callable[[np.ndarray], list[np.ndarray]]) -> np.ndarray:
    links, i = np.zeros((N, N)), np.arange(N)
    for j in neighbours(i):
        links[i, j] = links[j, i] = 1
    np.fill_diagonal(links, 0)
    return links


@checked
def ring(N: Size) -> np.ndarray:
    """[N, N]: client i averages with i - 1 and i + 1, each with the weight 1/3."""
    return _metropolis(_linked(N, lambda i: [(i + 1) % N]))


@checked
def torus(rows: Size, columns: Size) -> np.ndarray:
    """[N, N] for N = rows * columns: each client averages with its four neighbours on a grid whose ends meet."""

    checks.integer("rows * columns", rows * columns, 1, MOST, "a mixing matrix has N x N numbers")

    def neighbours(i: np.ndarray) -> list[np.ndarray]:
        r, c = np.divmod(i, columns)
        return [(r + 1) % rows * columns + c, r * columns + (c + 1) % columns]

    return _metropolis(_linked(rows * columns, neighbours))


@checked
def complete(N: Size) -> np.ndarray:
    """[N, N]: everyone averages with everyone, each with the weight 1 / N."""
    return np.full((N, N), 1 / N)


@checked
def erdos_renyi(N: Size, p: Probability, seed: CountOrZero = 0) -> np.ndarray:
    """[N, N]: each pair of clients is linked with probability p. Metropolis-Hastings weights.

    The graph may have several parts, whose models then never meet.
    """
    links = np.triu(np.random.default_rng(seed).random((N, N)) < p, 1)
    return _metropolis((links | links.T).astype(float))


@checked
def exponential(N: Size) -> np.ndarray:
    """[N, N]: client i averages with i + 1, i + 2, i + 4, ... (mod N), all with the same weight. A directed graph."""
    offsets = 2 ** np.arange(int(np.ceil(np.log2(N)))) if N > 1 else np.zeros(0, int)
    return sum((np.roll(np.eye(N), k, 1) for k in offsets), np.eye(N)) / (len(offsets) + 1)


@checked
def one_peer(N: Size) -> np.ndarray:
    """[T, N, N]: in round t, client i averages with i + 2^(t mod T) (mod N), each with the weight 1/2. T = log2 N.

    If N is a power of 2, T rounds without training give the exact mean.
    """
    offsets = 2 ** np.arange(int(np.ceil(np.log2(N)))) if N > 1 else np.zeros(1, int)
    return np.stack([(np.eye(N) + np.roll(np.eye(N), k, 1)) / 2 for k in offsets])


def spectral_gap(W: np.ndarray) -> float:
    """1 - the second largest singular value of a mixing matrix: how fast models reach consensus. 1 for `complete`."""
    values = np.linalg.svd(W - 1 / len(W), compute_uv=False)
    return float(1 - values[0])


def neighbours(weights: np.ndarray) -> tuple[Any, Any]:
    """The receivers of each client, int32 [T, N, d], and the weights of the client there, float [T, N, d].

    weights: [T, N, N]. d: the largest number of receivers of a client. The unused entries have the weight 0.
    """
    d = int((weights > 0).sum(1).max())
    receivers = np.argsort(-weights, axis=1, kind="stable")[:, :d].swapaxes(1, 2)
    return jnp.asarray(receivers, jnp.int32), jnp.asarray(np.take_along_axis(weights.swapaxes(1, 2), receivers, 2))
