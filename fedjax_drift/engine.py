"""One round of federated learning, as one pure function that compiles once.

    state.key -> cohort [K]       uniform without replacement, Bernoulli, or given
    gather    client states [N, ...] -> [K, ...]
    order     the cohort by local steps, longest first; deal it to devices and groups of L lanes
    train     scan over groups: L clients side by side (vmap), as many steps as the longest of THIS group needs
    sum       weight * message added to a running sum, then one psum over the devices
    update    server_update(server, sum / total weight, round)
    scatter   new client states back to [N, ...]

Memory for messages is L of them and one sum, whatever K is. A client's result depends on its id, the round's key and
its own rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import fit, tree
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.local import LocalTraining, shuffle
from fedjax_drift.types import Algorithm, Batch, ClientResult, Model, Params, PyTree, Round, ServerState, Work

AXIS = "clients"  # the one mesh axis


class Rows(NamedTuple):
    """The training set on the devices."""

    x: jax.Array  # [M, ...] as stored: images stay uint8
    y: jax.Array  # [M, ...]
    offsets: jax.Array  # int32 [N], client i's first row
    sizes: jax.Array  # int32 [N]


class TestRows(NamedTuple):
    """The test set, cut into T batches (a multiple of the number of devices); the last ones are padded."""

    x: jax.Array  # [T, B, ...]
    y: jax.Array  # [T, B, ...]
    mask: jax.Array  # bool [T, B], False on padding


class Arrays(NamedTuple):
    """The data set: an argument of the compiled round, never a constant captured by it."""

    rows: Rows
    test: TestRows | None


class Engine(NamedTuple):
    """What a round is compiled from: all static, no arrays."""

    model: Model
    algorithm: Algorithm
    local: LocalTraining
    mesh: Mesh
    lanes: int  # L; 1: clients one after another, no vmap
    cohort_size: int
    bernoulli: bool  # every client with probability cohort_size / N, instead of exactly cohort_size
    drop_nonfinite: bool  # a client whose update is not finite counts as absent
    num_clients: int  # N
    mean_size: float
    max_size: int
    capacity: int  # most clients a sampled cohort may have
    decode: Callable[[jax.Array], jax.Array]  # stored rows -> what the model sees


def init(engine: Engine, key: jax.Array, params: Params | None) -> ServerState:
    """The state before round 0, from ``params`` or else the model's own."""
    init_key, round_key = jax.random.split(key)
    params = engine.model.init(init_key) if params is None else params
    client = engine.algorithm.init_client(params)
    clients = jax.tree.map(lambda c: jnp.broadcast_to(c, (engine.num_clients, *jnp.shape(c))), client)
    server, clients = jax.tree.map(strong, (engine.algorithm.init_server(params), clients))
    return ServerState(jnp.zeros((), jnp.int32), round_key, server, clients)


def round_fn(engine: Engine, state: ServerState, arrays: Arrays, cohort: jax.Array | None) -> tuple[ServerState, dict]:
    """One round: ``(state, arrays, cohort [K] or None) -> (state, info)``. Pure; traced once per cohort length."""
    cohort_key, round_key = jax.random.split(jax.random.fold_in(state.key, state.round))
    ids = sample(engine, cohort_key) if cohort is None else cohort.astype(jnp.int32)  # [K]; N marks an absent client
    ids = jnp.where((ids >= 0) & (ids < engine.num_clients), ids, engine.num_clients)
    present = ids < engine.num_clients
    sizes = rows_of(engine, arrays.rows, ids)
    t = state.round
    lr = jnp.asarray(engine.local.lr * engine.local.lr_decay ** t.astype(float), float)
    round = Round(t, lr, present.sum() / engine.num_clients, engine.num_clients, engine.mean_size)

    order, ragged = deal(engine, sizes)  # [D, G, L], positions in ids
    dealt = jnp.where(ragged, engine.num_clients, ids[order])
    states = jax.tree.map(lambda s: s[dealt], state.clients)

    def train_all(
        server: Any, rows: Rows, round_key: jax.Array, lr: jax.Array, ids: jax.Array, states: PyTree
    ) -> tuple:
        """Trains one device's share, ids [1, G, L]; returns the mean over all devices and what each client made."""

        def update(id: jax.Array, old: PyTree, longest: jax.Array) -> ClientResult:
            work = client_work(engine, rows, round_key, id, longest, lr)
            result = engine.algorithm.client_update(server, old, work)
            message, metrics = jax.tree.map(jnp.asarray, (result.message, dict(result.metrics)))
            weight = jnp.asarray(result.weight, lr.dtype)
            chex.assert_rank([weight, *metrics.values()], 0)
            state = like(result.state, old, f"{engine.algorithm.name}: a client's new state")
            return ClientResult(message, weight, state, metrics)

        def client(id: jax.Array, old: PyTree, longest: jax.Array) -> tuple[ClientResult, jax.Array]:
            result = update(id, old, longest)
            # An absent client has run no step, but its weight, or 0/0 in its message, must not reach the sum.
            counts = id < engine.num_clients
            finite = tree.all_finite((result.message, result.weight, result.state))
            if engine.drop_nonfinite:
                counts &= finite
                result = result._replace(state=select(counts, result.state, old))
            weight = jnp.where(counts, result.weight, 0)
            message = jax.tree.map(lambda m: jnp.where(counts, weight * m, 0), result.message)
            return result._replace(message=message, weight=weight), finite

        def group(total: tuple, lanes: tuple) -> tuple:
            ids, states = lanes
            longest = rows_of(engine, rows, ids).max()
            if engine.lanes == 1:
                alone = client(ids[0], jax.tree.map(lambda a: a[0], states), longest)
                result, finite = jax.tree.map(lambda a: a[None], alone)
            else:
                result, finite = jax.vmap(client, in_axes=(0, 0, None))(ids, states, longest)
            added = jax.tree.map(lambda s, a: s + a.sum(0), total, (result.message, result.weight))
            return added, (result.state, result.weight, result.metrics, finite)

        ids, states = jax.tree.map(lambda a: a[0], (ids, states))  # [G, L, ...]: this device's share
        # Sums are in the weights' precision, the mean in the messages'.
        sent = jax.eval_shape(update, ids[0, 0], jax.tree.map(lambda a: a[0, 0], states), rows.sizes[0]).message
        zeros = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.promote_types(m.dtype, lr.dtype)), sent)
        kept: tuple  # what `group` returns of each client, [G, L, ...]
        total, kept = lax.scan(group, (zeros, jnp.zeros((), lr.dtype)), (ids, states))
        sums, weight = lax.psum(total, AXIS)
        mean = jax.tree.map(lambda s, m: (s / weight).astype(m.dtype), sums, sent)
        return (mean, weight), jax.tree.map(lambda a: a[None], kept)

    (mean, total_weight), (new_states, weights, metrics, finite) = jax.shard_map(
        train_all,
        mesh=engine.mesh,
        in_specs=(P(), P(), P(), P(), P(AXIS), P(AXIS)),
        out_specs=(P(), P(AXIS)),
        check_vma=False,
    )(state.server, arrays.rows, round_key, lr, dealt, states)

    updated = engine.algorithm.server_update(state.server, mean, round)
    updated = like(updated, state.server, f"{engine.algorithm.name}: the updated server")
    server = select(total_weight > 0, updated, state.server)  # nobody answered: the round changes nothing
    if engine.algorithm.observe is not None and arrays.test is not None:
        observed = engine.algorithm.observe(server, evaluate(engine, server.params, arrays.test))
        server = like(observed, server, f"{engine.algorithm.name}: the server after an evaluation")
    clients = jax.tree.map(lambda bank, new: bank.at[dealt].set(new, mode="drop"), state.clients, new_states)

    def undealt(a: jax.Array) -> jax.Array:  # [D, G, L] -> [K], in the cohort's order
        return jnp.zeros(ids.shape, a.dtype).at[jnp.where(ragged, ids.size, order)].set(a, mode="drop")

    steps = jnp.where(ragged, 0, engine.local.steps(sizes)[order])  # [D, G, L]
    info = {
        "cohort": jnp.where(present, ids, -1),
        "size": sizes,
        "weight": undealt(weights),
        "finite": undealt(finite) | ~present,
        "steps": steps.sum(),
        "executed_steps": steps.max(-1).sum() * engine.lanes,
        "lr": lr,
    }
    if clash := info.keys() & metrics.keys():
        raise ValueError(f"{engine.algorithm.name}: a metric needs a name of its own, got {', '.join(sorted(clash))}")
    info |= jax.tree.map(undealt, metrics)
    return ServerState(t + 1, state.key, server, clients), info


def sample(engine: Engine, key: jax.Array) -> jax.Array:
    """int32 [capacity]: the ids of a random cohort; N fills a Bernoulli cohort up."""
    N = engine.num_clients
    if not engine.bernoulli:
        if engine.cohort_size == N:
            return jnp.arange(N, dtype=jnp.int32)
        return jax.random.choice(key, N, (engine.cohort_size,), replace=False).astype(jnp.int32)

    def draw(carry: tuple) -> tuple:
        key, _ = carry
        key, use = jax.random.split(key)
        return key, jax.random.bernoulli(use, engine.cohort_size / N, (N,))

    _, active = lax.while_loop(lambda carry: ~carry[1].any(), draw, draw((key, None)))  # again while nobody is in
    return jnp.nonzero(active, size=engine.capacity, fill_value=N)[0].astype(jnp.int32)


def deal(engine: Engine, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which client trains where: positions int32 [D, G, L] in the cohort, and bool [D, G, L] marking empty places.

    The cohort is sorted by local steps, longest first, so that the L lanes of a group finish together; groups are dealt
    to the D devices back and forth, so that the devices do.
    """
    K, D, L = len(sizes), engine.mesh.size, engine.lanes
    G = -(-K // (D * L))
    order = jnp.argsort(-engine.local.steps(sizes), stable=True)
    places = np.arange(G * L * D).reshape(G, D, L)
    places[1::2] = places[1::2, ::-1]
    places = places.swapaxes(0, 1)
    return order[np.minimum(places, K - 1)], jnp.asarray(places >= K)


def rows_of(engine: Engine, data: Rows, ids: jax.Array) -> jax.Array:
    """n_i of the clients; an absent one (id N) has no rows, so it runs no step and has no weight."""
    return jnp.where(ids < engine.num_clients, data.sizes[jnp.minimum(ids, engine.num_clients - 1)], 0)


def client_work(
    engine: Engine, data: Rows, round_key: jax.Array, id: jax.Array, longest: jax.Array, lr: jax.Array
) -> Work:
    """The work of client ``id``; no client that trains beside it has more than ``longest`` rows."""
    size = rows_of(engine, data, id)
    B = min(engine.local.batch_size, engine.max_size)
    length = -(-engine.max_size // B) * B

    def epoch(key: jax.Array) -> Callable[[jax.Array], Batch]:
        order = shuffle(key, size, longest, length)

        def batch(k: jax.Array) -> Batch:
            mask = k * B + jnp.arange(B) < size
            rows = data.offsets[id] + jnp.where(mask, lax.dynamic_slice(order, (k * B,), (B,)), 0)
            return Batch(engine.decode(data.x[rows]), data.y[rows], mask)

        return batch

    return Work(
        size=size,
        num_steps=engine.local.steps(size),
        lr=lr,
        key=jax.random.fold_in(round_key, id),
        epochs=engine.local.epochs,
        optimizer=engine.local.direction(),
        epoch=epoch,
        model=engine.model,
    )


def evaluate_rows(engine: Engine, params: Params, test: TestRows) -> dict[str, jax.Array]:
    """Of every test row its loss and, for classifiers, whether it is classified rightly: [T, B] each."""

    def batch(xy: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        x, y = xy
        logits = engine.model.apply(params, engine.decode(x))
        rows = {"loss": engine.model.loss(logits, y)}
        if jnp.issubdtype(y.dtype, jnp.integer) and logits.ndim == y.ndim + 1 and logits.shape[-1] > 1:
            right = (logits.argmax(-1) == y).astype(rows["loss"].dtype)
            rows["accuracy"] = right.mean(axis=tuple(range(1, right.ndim)))
        return rows

    return jax.shard_map(
        lambda params, xy: lax.map(batch, xy),
        mesh=engine.mesh,
        in_specs=(P(), P(AXIS)),
        out_specs=P(AXIS),
        check_vma=False,
    )(params, (test.x, test.y))


def evaluate(engine: Engine, params: Params, test: TestRows) -> dict[str, jax.Array]:
    """Means over the test set, scalars: {"loss", "accuracy"}."""
    rows = evaluate_rows(engine, params, test)
    means = {}
    for name, values in rows.items():
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        means[name] = jnp.where(test.mask, values, 0).sum() / test.mask.sum()
    return means


_PLACED: WeakKeyDictionary[FederatedData, dict[tuple, Any]] = WeakKeyDictionary()


def place(data: FederatedData, mesh: Mesh, eval_batch_size: int) -> Arrays:
    """The data set on the devices, a copy on each; the test set is cut over them.

    Simulations of the same data share it, for as long as the data live.
    """
    placed = _PLACED.setdefault(data, {})
    rows = (mesh, jax.dtypes.canonicalize_dtype(np.float64))
    test = (*rows, eval_batch_size)
    with jax.ensure_compile_time_eval():  # a Simulation made inside jax.jit must leave no tracer here
        if rows not in placed:
            arrays = (data.x, _labels(data.y), data.offsets, data.sizes)
            placed[rows] = Rows(*jax.device_put(arrays, NamedSharding(mesh, P())))
        if test not in placed:
            placed[test] = _place_test(data, mesh, eval_batch_size)
    return Arrays(placed[rows], placed[test])


def _place_test(data: FederatedData, mesh: Mesh, eval_batch_size: int) -> TestRows | None:
    if data.x_test is None or data.y_test is None:
        return None
    M, D = len(data.x_test), mesh.size
    B = min(eval_batch_size, -(-M // D))
    T = -(-M // (B * D)) * D
    index = np.arange(T * B).reshape(T, B)
    padded = np.minimum(index, M - 1)
    arrays = (data.x_test[padded], _labels(data.y_test)[padded], index < M)
    return TestRows(*jax.device_put(arrays, NamedSharding(mesh, P(AXIS))))


def _labels(y: np.ndarray) -> np.ndarray:
    return y.astype(np.int32) if np.issubdtype(y.dtype, np.integer) else y


def strong(a: Any) -> jax.Array:
    """The array with a dtype that stays: a Python number's is weak, and would change in the first round."""
    a = jnp.asarray(a)
    return a if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else lax.convert_element_type(a, a.dtype)


def like(new: PyTree, old: PyTree, what: str) -> PyTree:
    """new in old's dtypes; ValueError unless it has old's structure and shapes, as the next round needs them."""
    fit.check_like(new, old, f"{what} must have the structure and the shapes of the one before", dtypes=False)
    return jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), new, old)


def select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """new where the scalar condition holds, else old."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)
