"""What the global model is worth to each client, before and after the client has fine-tuned it on its own rows.

`Simulation.evaluate_clients` measures it on every client's own test rows, `summary` says how evenly it is spread, and
`plots.fairness` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks
from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import train
from fedjax_drift.round.cohort import deal_out, round_keys, undealt
from fedjax_drift.round.engine import Client, Engine, Rows, Shared, partitionable, replicated
from fedjax_drift.round.evaluate import score_rows
from fedjax_drift.round.train import client_work, over_clients
from fedjax_drift.types import PyTree, ServerState

CHUNK = 512  # clients in one program, so that the copies of their test rows stay few, and Ctrl-C need not wait long
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


def summary(values: Any) -> dict[str, float]:
    """How evenly a federation is served, each client counted once.

    values: one number a client, such as its accuracy, [N]; those without test rows (NaN) are left out. Returns
    ``clients`` (how many are counted), ``mean``, ``std``, the quantiles ``q05``, ``q25``, ``median``, ``q75`` and
    ``q95``, and the means of the lowest and the highest tenth of the clients, at least one, ``lowest_10`` (of
    accuracies: the worst 10 %) and ``highest_10``. Raises ValueError without a single number.

    >>> summary([0.5, 0.9, 1.0, float("nan")])["lowest_10"]
    0.5
    """
    known = np.sort(checks.array("values", values).ravel().astype(float))
    known = known[np.isfinite(known)]
    if not known.size:
        raise ConfigurationError("summary needs the value of at least 1 client, got none that is finite")
    tenth = -(-known.size // 10)
    spread = {"clients": known.size, "mean": known.mean(), "std": known.std()}
    spread |= {name: np.quantile(known, q) for name, q in QUANTILES.items()}
    spread |= {"lowest_10": known[:tenth].mean(), "highest_10": known[-tenth:].mean()}
    return {name: float(value) for name, value in spread.items()}


class OwnTests(NamedTuple):
    """The test rows of some clients, and where each client's are among them."""

    x: np.ndarray | jax.Array  # [R, ...]
    y: np.ndarray | jax.Array  # [R, ...]
    offset: np.ndarray | jax.Array  # int32 [C]
    size: np.ndarray | jax.Array  # int32 [C]


def chunks(data: FederatedData) -> Iterator[tuple[np.ndarray, OwnTests]]:
    """All clients, C at a time, in order, and their test rows, always in the same shapes; ids of N fill the last up."""
    assert data.x_test is not None and data.y_test is not None and data.test_sizes is not None
    N, sizes = data.num_clients, data.test_sizes.astype(np.int64)
    C = min(N, CHUNK)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    starts = list(range(0, N, C))
    R = max(int(ends[min(start + C, N)] - ends[start]) for start in starts)
    for start in starts:
        ids = np.where(start + np.arange(C) < N, start + np.arange(C), N)
        known = np.minimum(ids, N - 1)
        rows = slice(ends[start], ends[min(start + C, N)])
        x, y = np.asarray(data.x_test[rows]), integers_as_int32(np.asarray(data.y_test[rows]))
        x, y = (np.concatenate([a, np.zeros((R - len(a), *a.shape[1:]), a.dtype)]) for a in (x, y))
        offset, size = ends[known] - ends[start], np.where(ids < N, sizes[known], 0)
        yield ids.astype(np.int32), OwnTests(x, y, offset.astype(np.int32), size.astype(np.int32))


@partitionable
def fine_tuned(
    engine: Engine,
    eval_batch_size: int,
    state: ServerState,
    rows: Rows,
    clients: Client,
    tests: OwnTests,
) -> dict[str, jax.Array]:
    """For each client [C] the sums over its test rows of loss and accuracy after it has fine-tuned the global model.

    Fine-tuning is plain local training with ``engine.local`` on the model's own loss, without an algorithm's terms.
    """
    lr = engine.local.rate(state.round)
    key = jax.random.fold_in(round_keys(state.key, state.round)[1], engine.num_clients + 3)  # a round uses N .. N + 2
    shared = Shared(state.params, rows, key, state.round, lr, (), (tests.x, tests.y))
    order, empty, dealt = deal_out(engine, clients, clients.steps)
    place = jnp.where(empty, 0, order)
    test_rows = (tests.offset[place], jnp.where(empty, 0, tests.size[place]))
    B = min(eval_batch_size, len(tests.x))

    def one(shared: Shared, client: Client, test_rows: Any, longest: jax.Array) -> tuple[PyTree, PyTree]:
        theta, _ = train(client_work(engine, shared, client, longest), shared.server)
        (x, y), (offset, size) = shared.extra, test_rows

        def score(row: jax.Array) -> dict[str, jax.Array]:
            return score_rows(engine, engine.model.apply(theta, engine.decode(x[row])), y[row])

        def batch(k: jax.Array, total: dict[str, jax.Array]) -> dict[str, jax.Array]:
            position = k * B + jnp.arange(B)
            scores = score(jnp.where(position < size, offset + position, 0))
            return {name: total[name] + jnp.where(position < size, scores[name], 0).sum() for name in total}

        zero = {name: jnp.zeros((), a.dtype) for name, a in jax.eval_shape(score, jnp.arange(B)).items()}
        return (), lax.fori_loop(0, -(-size // B), batch, zero)

    _, sums = over_clients(engine, one, shared, dealt, test_rows)
    return jax.tree.map(partial(undealt, len(clients.id), order, empty), replicated(engine, sums))
