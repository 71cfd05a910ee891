"""Per-client evaluation of the global model and of personal models.

A personal model is that of the algorithm (Ditto, FedPer), otherwise the global model. It can be fine-tuned on the
client's own examples first. `Simulation.evaluate_clients` evaluates the models on each client's own test examples.
`Simulation.evaluate_new` does so for clients that have never taken part, before and after they train.
`summary` computes statistics of the results over the clients, and `plots.fairness` plots their distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.running_statistics import fine_tuned
from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.round.arrays import Client, Rows, TestRows
from fedjax_drift.round.engine import (
    FINE_TUNING,
    Engine,
    Shared,
    initial_client,
    partitionable,
    replicated,
    round_keys,
)
from fedjax_drift.round.evaluate import after, inputs, score_rows
from fedjax_drift.round.places import at_places, in_cohort_order
from fedjax_drift.round.train import client_work, over_clients, server_of
from fedjax_drift.spec import Flag, checked
from fedjax_drift.types import PyTree, ServerState, Work

__all__ = ["summary"]
__dir__ = __all__.copy


CHUNK = 512  # the largest number of clients in one program; it bounds the memory, and the time until Ctrl-C has effect
Score = Callable[[PyTree], dict[str, jax.Array]]  # a model -> the sums of its scores over a client's test examples
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


@checked
def summary(values: Any, higher_is_better: Flag = True) -> dict[str, float]:
    """Computes statistics of a metric over the clients, also how fair it is. All clients have weight 1.

    Args:
      values: float [N], one number per client, for example its accuracy. Values that are not finite are ignored, for
        example the NaN of a client without test examples.
      higher_is_better: True (default) for accuracies, False for losses. Only ``worst_10`` and ``best_10`` depend on it.

    Returns:
      A dict of floats, for the n clients with a finite value x_i:

      - ``clients``: n
      - ``mean``, ``std``, ``variance``: the mean, the standard deviation and the variance, (1/n) sum_i (x_i - mean)^2
      - ``q05``, ``q25``, ``median``, ``q75``, ``q95``: quantiles
      - ``lowest_10``, ``highest_10``: the mean of the lowest 10 % of the values, and the mean of the highest 10 %. Each
        mean is over at least one value.
      - ``worst_10``, ``best_10``: the same two means, for the worst 10 % and the best 10 % of the clients
      - ``jain``: Jain's index (sum_i x_i)^2 / (n sum_i x_i^2), from 1/n (one client has all) to 1 (all are equal)
      - ``gini``: the Gini coefficient sum_ij |x_i - x_j| / (2 n^2 mean), from 0 (all are equal) to 1 - 1/n

      Both indices need values >= 0: they are NaN if a value is negative. If all values are 0, all clients are equal.
      The variance and the worst 10 % are those of Li et al. 2020 (q-FFL, arXiv 1905.10497). Jain's index is from Jain,
      Chiu, Hawe 1984 (arXiv cs/9809099).

    Raises:
      ValueError: no value is finite.

    >>> summary([0.5, 0.9, 1.0, float("nan")])["worst_10"]
    0.5
    """
    finite = np.sort(checks.array("values", values).ravel().astype(float))
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        checks.refuse("values must have a finite value for at least 1 client", "none")
    tenth = -(-finite.size // 10)
    statistics = {"clients": finite.size, "mean": finite.mean(), "std": finite.std(), "variance": finite.var()}
    statistics |= {name: np.quantile(finite, q) for name, q in QUANTILES.items()}
    lowest, highest = finite[:tenth].mean(), finite[-tenth:].mean()
    worst, best = (lowest, highest) if higher_is_better else (highest, lowest)
    statistics |= {"lowest_10": lowest, "highest_10": highest, "worst_10": worst, "best_10": best}
    statistics |= {"jain": _jain(finite), "gini": _gini(finite)}
    return {name: float(value) for name, value in statistics.items()}


def _jain(x: np.ndarray) -> float:
    """Jain's index of ascending values."""
    if x[0] < 0:
        return np.nan
    x = x / (x[-1] or 1.0)  # it does not depend on the scale, and squares of small values would be 0
    return x.sum() ** 2 / (x.size * (x**2).sum()) if x[-1] else 1.0


def _gini(x: np.ndarray) -> float:
    """The Gini coefficient of ascending values. In the sum of |x_i - x_j|, value k has the factor 2 (2 k - n - 1)."""
    if x[0] < 0:
        return np.nan
    n = x.size
    return ((2 * np.arange(1, n + 1) - n - 1) * x).sum() / (n * x.sum()) if x[-1] else 0.0


class ClientTests(NamedTuple):
    """The test examples of C clients, one example per row. Client c has ``size[c]`` rows from ``offset[c]`` on."""

    x: np.ndarray | jax.Array  # [R, ...]
    y: np.ndarray | jax.Array  # [R, ...]
    offset: np.ndarray | jax.Array  # int32 [C]
    size: np.ndarray | jax.Array  # int32 [C]


def chunks(data: FederatedData) -> Iterator[tuple[np.ndarray, ClientTests]]:
    """Yields the ids and the test examples of C clients at a time, in the order of the ids.

    All chunks have the same shapes. Test examples are padded with zeros, and the ids of the last chunk with N.
    """
    assert data.x_test is not None and data.y_test is not None and data.test_sizes is not None
    N, sizes = data.num_clients, data.test_sizes.astype(np.int64)
    C = min(N, CHUNK)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    starts = list(range(0, N, C))
    R = max(int(ends[min(start + C, N)] - ends[start]) for start in starts)
    for start in starts:
        ids = np.where(start + np.arange(C) < N, start + np.arange(C), N)
        valid_ids = np.minimum(ids, N - 1)
        rows = slice(ends[start], ends[min(start + C, N)])
        x, y = np.asarray(data.x_test[rows]), integers_as_int32(np.asarray(data.y_test[rows]))
        x, y = (np.concatenate([a, np.zeros((R - len(a), *a.shape[1:]), a.dtype)]) for a in (x, y))
        offset, size = ends[valid_ids] - ends[start], np.where(ids < N, sizes[valid_ids], 0)
        yield ids.astype(np.int32), ClientTests(x, y, offset.astype(np.int32), size.astype(np.int32))


def shared_of(engine: Engine, state: ServerState, rows: Rows) -> Shared:
    """What the clients share outside of a round."""
    key = jax.random.fold_in(round_keys(state.key, state.round)[1], engine.num_clients + FINE_TUNING)
    servers = None if engine.receivers is None else {"topology": state.sources["topology"]}
    return Shared(state.server, rows, key, state.round, engine.local.rate(state.round), sources=servers)


def own_model(engine: Engine, shared: Shared, state: PyTree, work: Work) -> PyTree:
    """The model that one client uses itself. state: of the client."""
    w, algorithm = shared.server.params, engine.algorithm
    if algorithm is None or algorithm.personal is None:
        return w
    theta = algorithm.personal(shared.server, state, work)
    what = f"{algorithm.name}: a personal model must have the structure and the shapes of the parameters"
    tree.check_layout(theta, w, what, dtypes=False)
    return theta


@partitionable
def personal_models(engine: Engine, state: ServerState, rows: Rows, clients: Client) -> PyTree:
    """The models that C clients use themselves, leaves [C, ...]."""
    order, empty, placed = at_places(engine, clients, clients.steps)

    def one(shared: Shared, client: Client, old: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        shared = shared._replace(server=server_of(engine, shared, client))
        return (), own_model(engine, shared, old, client_work(engine, shared, client, longest)), ()

    _, models, _ = over_clients(engine, one, shared_of(engine, state, rows), placed, state.clients)
    return jax.tree.map(partial(in_cohort_order, len(clients.id), order, empty), replicated(engine, models))


@partitionable
def personal_scores(
    engine: Engine,
    fine_tune: bool,
    eval_batch_size: int,
    state: ServerState,
    rows: Rows,
    clients: Client,
    tests: ClientTests,
) -> dict[str, jax.Array]:
    """Evaluates the personal models of C consecutive clients on their test examples.

    fine_tune: whether each client fine-tunes its model first. This is local training with ``engine.local`` on the
    model's loss, without the terms of the algorithm.

    Returns a dict from each score (loss, accuracy, ...) to its sum over the test examples of each client, [C].
    """

    def own(shared: Shared, client: Client, old: PyTree, longest: jax.Array, score: Score) -> dict[str, jax.Array]:
        work = client_work(engine, shared, client, longest)
        theta = own_model(engine, shared, old, work)
        return score(fine_tuned(work, theta) if fine_tune else theta)

    return scores(engine, eval_batch_size, own, state, rows, clients, tests)


@partitionable
def new_scores(
    engine: Engine, eval_batch_size: int, state: ServerState, rows: Rows, clients: Client, tests: ClientTests
) -> dict[str, jax.Array]:
    """Evaluates the models of C consecutive clients that have never taken part, before and after their local steps.

    Returns a dict from each score to its sums over the test examples of each client, [C, 2].
    """
    algorithm = engine.algorithm

    def both(shared: Shared, client: Client, _: PyTree, longest: jax.Array, score: Score) -> dict[str, jax.Array]:
        first = () if algorithm is None else initial_client(engine, shared.server.params)

        def after(steps: jax.Array) -> dict[str, jax.Array]:
            work = client_work(engine, shared, client._replace(steps=steps), longest)
            return score(adapted(engine, shared, first, work))

        return lax.map(after, jnp.stack([jnp.zeros_like(client.steps), client.steps]))

    return scores(engine, eval_batch_size, both, state, rows, clients, tests)


def adapted(engine: Engine, shared: Shared, first: PyTree, work: Work) -> PyTree:
    """The model of one new client after its local steps. first: its first state."""
    algorithm = engine.algorithm
    if algorithm is None or algorithm.adapt is None:
        return fine_tuned(work, own_model(engine, shared, first, work))
    theta, _ = algorithm.adapt(shared.server, first, work)
    what = f"{algorithm.name}: the model of a new client must have the structure and the shapes of the parameters"
    tree.check_layout(theta, shared.server.params, what, dtypes=False)
    return theta


def scores(
    engine: Engine,
    eval_batch_size: int,
    task: Callable[[Shared, Client, PyTree, jax.Array, Score], dict[str, jax.Array]],
    state: ServerState,
    rows: Rows,
    clients: Client,
    tests: ClientTests,
) -> dict[str, jax.Array]:
    """The scores of C consecutive clients, leaves [C, ...].

    task: ``task(shared, client, state, longest, score)`` returns those of one client. ``score(theta)`` are the sums of
    the scores of a model over the client's test examples.
    """
    shared = shared_of(engine, state, rows)._replace(extra=(tests, clients.id[0]))
    order, empty, placed = at_places(engine, clients, clients.steps)
    B = min(eval_batch_size, len(tests.x))

    def one(shared: Shared, client: Client, state: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        shared = shared._replace(server=server_of(engine, shared, client))
        (x, y, offset, size), first = shared.extra
        present, i = client.id < engine.num_clients, jnp.where(client.id < engine.num_clients, client.id - first, 0)
        offset, size = offset[i], jnp.where(present, size[i], 0)

        def score_batch(theta: PyTree, position: jax.Array) -> dict[str, jax.Array]:
            mask = position < size
            index = jnp.where(mask, position, 0)
            row = offset + index
            rows = after(engine, TestRows(x[row], y[row], mask, jnp.full(B, client.id), index), shared.t)
            own, label = inputs(engine, rows._replace(t=None), rows.t)
            return score_rows(engine, engine.model.with_mask(mask).apply(theta, own), label, mask)

        def score(theta: PyTree) -> dict[str, jax.Array]:
            def batch(k: jax.Array, total: dict[str, jax.Array]) -> dict[str, jax.Array]:
                position = k * B + jnp.arange(B)
                rows = score_batch(theta, position)
                return {name: total[name] + jnp.where(position < size, rows[name], 0).sum() for name in total}

            shapes = jax.eval_shape(score_batch, theta, jnp.arange(B))
            zero = {name: jnp.zeros((), a.dtype) for name, a in shapes.items()}
            return lax.fori_loop(0, -(-size // B), batch, zero)

        return (), task(shared, client, state, longest, score), ()

    _, sums, _ = over_clients(engine, one, shared, placed, state.clients)
    return jax.tree.map(partial(in_cohort_order, len(clients.id), order, empty), replicated(engine, sums))
