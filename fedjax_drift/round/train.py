"""Training of a cohort. Every device trains its groups one after another, and the L clients of a group side by side.

A device keeps L messages and one running sum, for any size K of the cohort. client_states.py reads and stores the
states of the clients. The random numbers of a client depend only on its id and on the round's key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, tree
from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.local import shuffle
from fedjax_drift.message import decoded
from fedjax_drift.round.arrays import Client, Rows
from fedjax_drift.round.client_states import after_reading, fetch, overwrites, scatter, store
from fedjax_drift.round.engine import Engine, Shared, client_moment, mean_steps, on_each_device, sum_over_devices
from fedjax_drift.round.exchange import exchange, longest_share
from fedjax_drift.round.sources import Receivers, Start, absent_like, examples, functions_of
from fedjax_drift.types import Algorithm, Batch, ClientResult, PyTree, Trained, Work

LANES = "lanes"  # the axis of the clients that train side by side


def over_clients(
    engine: Engine,
    update: Callable[[Shared, Client, PyTree, jax.Array], tuple[PyTree, PyTree, PyTree]],
    shared: Shared,
    placed: Client,
    states: PyTree,
    receivers: Receivers | None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Calls ``update(shared, client, state, longest) -> (added, kept, new_state)`` for each client in ``placed``.

    ``state`` is the client's state, and ``longest`` is the number of examples of the largest client in its group.
    ``new_state`` is () if the states do not change.

    Args:
      placed: [D, G, L].
      states: the states of all clients, `ServerState.clients`; () if ``update`` needs none.
      receivers: of a topology. ``added`` is then a pair, of which the first part is summed for each receiver.

    Returns:
      - The sum of ``added`` over all clients; with ``receivers``, its first part has leaves [R, ...].
      - ``kept`` of each client, leaves [D, G, L, ...].
      - The states of all clients, with the new ones.
    """
    rows_sharded = engine.rows_by_rank is not None

    def one_device(shared: Shared, clients: Client, states: PyTree, everyone: Client) -> tuple:
        """clients: those of this device, [1, G, L]. states: those on this device. everyone: all clients [D, G, L]."""
        if rows_sharded:
            shared, clients = with_own_rows(engine, shared, everyone)

        side_by_side = jax.vmap(update, in_axes=(None, 0, 0, None), axis_name=LANES)

        @partial(jax.jit, inline=True)  # traced once, although it is used twice below
        def train(states: PyTree, clients: Client, places: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
            """The results of one group: [L, ...]. places: those of the clients that all devices train, [D, L]."""
            old, longest = fetch(engine, states, places), clients.size.max()
            if engine.lanes > 1:
                added, kept, new = side_by_side(shared, clients, old, longest)
            else:
                one, of_one = jax.tree.map(lambda a: a[0], (clients, old))
                added, kept, new = jax.tree.map(lambda a: a[None], update(shared, one, of_one, longest))
            # A second pass over the clients, for example of a measure, returns no new states.
            return added, kept, after_reading(places, old, new) if jax.tree.leaves(new) else new

        groups = jax.tree.map(lambda a: a[0], clients), everyone.place.swapaxes(0, 1)  # [G, L] and [G, D, L]
        added, _, new = jax.eval_shape(train, states, *jax.tree.map(lambda a: a[0], groups))
        overwriting = overwrites(engine) and bool(jax.tree.leaves(new))

        def next_group(carry: tuple[PyTree, PyTree], group: tuple[Client, jax.Array]) -> tuple[tuple, tuple]:
            total, updated = carry
            clients, places = group
            added, kept, new = train(updated if overwriting else states, clients, places)
            if overwriting:
                updated, new = store(engine, updated, places, new), ()
            return (add(total, added, clients), updated), (kept, new)

        def add(total: PyTree, added: PyTree, clients: Client) -> PyTree:
            if receivers is None:
                return jax.tree.map(lambda s, a: s + a.sum(0), total, added)
            to = jax.vmap(receivers.route, (0, None))(clients, shared.t)
            each = jax.tree.map(partial(add_to_receivers, *to), total[0], added[0])
            return each, jax.tree.map(lambda s, a: s + a.sum(0), total[1], added[1])

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), added)
        if receivers is not None:
            R = receivers.number
            zeros = jax.tree.map(lambda a: jnp.zeros((R, *a.shape), a.dtype), zeros[0]), zeros[1]
        (total, updated), each = lax.scan(next_group, (zeros, states if overwriting else ()), groups)
        return sum_over_devices(engine, total), jax.tree.map(lambda a: a[None], each), updated

    whole: Any = P()
    part: Any = P(AXIS)
    stored = part if engine.sharded else whole
    rows: Any = Rows(part, part, whole, whole, whole) if rows_sharded else whole
    shared_specs = Shared(*[whole] * len(Shared._fields))._replace(rows=rows)
    specs = (shared_specs, part, stored, whole), (whole, part, stored)
    total, (kept, new), updated = on_each_device(engine, one_device, *specs)(shared, placed, states, placed)
    if jax.tree.leaves(updated):
        return total, kept, updated
    return total, kept, scatter(engine, states, placed.place, new) if jax.tree.leaves(new) else states


def add_to_receivers(to: jax.Array, weights: jax.Array, total: jax.Array, added: jax.Array) -> jax.Array:
    """The sums of the receivers, [R, ...], with what L clients send, [L, ...].

    to, weights: [L, d], the receivers of each client, and the factors of what it sends to them.
    """

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        factor = weights[:, k].astype(added.dtype).reshape(-1, *(1,) * (added.ndim - 1))
        return total.at[to[:, k]].add(factor * added)

    # a receiver at a time: one scatter would need d copies of each message
    return lax.fori_loop(0, to.shape[1], add, total)


def with_own_rows(engine: Engine, shared: Shared, everyone: Client) -> tuple[Shared, Client]:
    """Gets the examples of the clients that this device trains, from the devices that store them.

    everyone: all clients [D, G, L]. Returns ``shared`` with these examples, and the clients of this device, [1, G, L].
    """
    assert engine.rows_by_rank is not None
    D, G, L = everyone.size.shape
    sizes, offsets = (a.reshape(D, G * L) for a in (everyone.size, everyone.offset))
    S = longest_share(engine.rows_by_rank, D, G, L)
    (x, y), begins = exchange((shared.rows.x, shared.rows.y), sizes, offsets, S)
    everyone = everyone._replace(offset=begins.reshape(D, G, L))
    clients = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, lax.axis_index(AXIS), 1), everyone)
    return shared._replace(rows=Rows(x, y)), clients


def started(engine: Engine, shared: Shared, client: Client, survey: bool = False) -> Shared:
    """What one client has started with: ``shared``, unless a source of drift changes it.

    survey: whether it is the first phase of the round.
    """
    for source, receive in functions_of(engine.sources, "receive"):
        at = client_moment(engine, shared, source, client, survey=survey)
        start = receive(shared.sources[source.name], start_of(shared), client, at)
        server = tree.cast_like(start.server, shared.server, f"receive of {source!r}: the variables of the server")
        shared = shared._replace(server=server, key=start.key, t=start.t, lr=start.lr, surveyed=start.surveyed)
    return shared


def start_of(shared: Shared) -> Start:
    """The fields of ``shared`` that sources of drift may change for one client."""
    return Start(shared.server, shared.key, shared.t, shared.lr, shared.surveyed)


def server_of(engine: Engine, shared: Shared, client: Client) -> Any:
    """The variables of the server of one client, with a topology those of its receiver."""
    if engine.receivers is None or shared.sources is None:
        return shared.server
    r = engine.receivers.of(client)
    return jax.tree.map(lambda a: a[r], shared.sources["topology"].each)


def client_work(engine: Engine, shared: Shared, client: Client, longest: jax.Array) -> Work:
    """One client's `Work` in the round. longest: the number of examples of the largest client in its group."""
    data, size = shared.rows, client.size
    of, B = engine.federation, min(engine.local.batch_size, engine.federation.max_size)
    most_batches = -(-of.max_size // B)

    def batch_at(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The inputs and labels [B, ...] of B of the client's examples, which are numbered from 0."""
        rows = client.offset + index
        rows = rows if data.places is None else data.places[rows]
        x = of.decode(data.x[rows][:, : math.prod(of.example)].reshape(B, *of.example))
        return examples(engine.sources, shared.t, engine.owner(client.id), index, x, data.y[rows])

    def batch_of(order: jax.Array, begin: jax.Array, k: jax.Array) -> Batch:
        """Batch k of an epoch, whose examples are ``order[begin:begin + B]``."""
        mask = k * B + jnp.arange(B) < size
        return Batch(*batch_at(jnp.where(mask, lax.dynamic_slice(order, (begin,), (B,)), 0)), mask)

    def epoch(key: jax.Array) -> Callable[[jax.Array], Batch]:
        order = shuffle(key, size, longest, most_batches * B)
        return lambda k: batch_of(order, k * B, k)

    def stream(key_of: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Batch]:
        steps, length = engine.local.steps or 0, most_batches * B
        batches = jnp.maximum(-(-size // B), 1)

        def append(e: jax.Array, orders: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(orders, shuffle(key_of(e), size, longest, length), (e * batches * B,))

        orders = lax.fori_loop(0, -(-client.steps // batches), append, jnp.zeros(steps * B + length, jnp.int32))
        return lambda s: batch_of(orders, s * B, s % batches)

    def label_counts(num_classes: int) -> jax.Array:
        def add(k: jax.Array, counts: jax.Array) -> jax.Array:
            example = k * B + jnp.arange(B)
            labels = jax.nn.one_hot(batch_at(jnp.where(example < size, example, 0))[1], num_classes)
            labels = labels.reshape(B, -1, num_classes).sum(1)  # an example may have several labels
            return counts + jnp.where((example < size)[:, None], labels, 0).sum(0)

        return lax.fori_loop(0, -(-size // B), add, jnp.zeros(num_classes))

    key = jax.random.fold_in(shared.key, client.id)
    return Work(
        t=shared.t,
        size=size,
        q=size / of.mean_size,
        num_batches=-(-size // B),
        num_steps=client.steps,
        mean_steps=mean_steps(engine),
        lr=shared.lr,
        initial_lr=engine.local.initial_lr,
        key=key,
        epochs=engine.local.parts,
        most_batches=most_batches,
        optimizer=engine.local.ascent_of(key),
        epoch=epoch,
        model=engine.model,
        label_counts=label_counts,
        momentum=engine.local.momentum,
        augment=engine.local.augment,
        lanes=None if engine.lanes == 1 else LANES,
        steps=engine.local.steps,
        stream=None if engine.local.steps is None else stream,
        surveyed=shared.surveyed,
    )


def executed_steps(engine: Engine, placed: Client) -> jax.Array:
    """int32 []: the local steps that the devices run for the clients ``placed`` [D, G, L].

    In every epoch, all L clients of a group run as many steps as the client of the group with the most steps in this
    epoch. The unused steps of the other clients are included.
    """
    if engine.local.steps is not None:  # the parts have the same number of steps for all clients
        return placed.steps.max(2).sum() * engine.lanes
    batches = -(-placed.size // min(engine.local.batch_size, engine.federation.max_size))[..., None]
    epochs = jnp.arange(engine.local.epochs)[None, None, None]
    left = placed.steps[..., None] - batches * epochs
    return jnp.clip(left, 0, batches).max(2).sum() * engine.lanes


def update(
    engine: Engine, shared: Shared, client: Client, old: PyTree, work: Work, phase: str = "client_update"
) -> ClientResult:
    """One client's update, with the weight that the sources of drift give it.

    phase: "survey" for the first phase of the round. Raises ConfigurationError unless the algorithm returns a valid
    `ClientResult`.
    """
    algorithm = engine.algorithm
    result = unchecked(engine, shared, client, old, work, phase)
    trained = result.metrics if isinstance(result.metrics, Trained) else None
    metrics: Any = scalars(algorithm, "metrics", trained.metrics if trained else result.metrics)
    metrics = jax.tree.map(jnp.asarray, metrics)
    metrics = replace(trained, metrics=metrics) if trained else metrics
    message, weight = jax.tree.map(jnp.asarray, result.message), jnp.asarray(result.weight, shared.lr.dtype)
    scalars(algorithm, "the weight", {"the weight": weight})
    for _, weigh in functions_of(engine.sources, "weigh"):
        weight = weigh(weight, client)
    state = tree.cast_like(result.state, old, f"{algorithm.name}: a client's new state")
    return ClientResult(message, weight, state, metrics)


def unchecked(
    engine: Engine, shared: Shared, client: Client, old: PyTree, work: Work, phase: str = "client_update"
) -> ClientResult:
    """What a phase of the algorithm returns. Raises ConfigurationError unless it is a `ClientResult`."""
    result = getattr(engine.algorithm, phase)(shared.server, old, work)
    if not isinstance(result, ClientResult):
        fix = "return fd.ClientResult(message, weight, state, metrics)"
        checks.refuse(f"{engine.algorithm.name}: {phase} must return a ClientResult", type(result).__name__, fix)
    return result


def scalars(algorithm: Algorithm, what: str, values: Any) -> dict[str, Any]:
    """Returns the values as a dict. Raises ConfigurationError unless they are a dict of scalars."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        what = f'{algorithm.name}: {what} must be a dict of scalars such as {{"gain": 0.5}}'
        checks.refuse(what, checks.shown(values))
    for name, value in values.items():
        if shape := jnp.shape(value):
            fix = "take its mean"
            checks.refuse(f"{algorithm.name}: {name} must be a scalar", f"{jnp.result_type(value)}{[*shape]}", fix)
    return dict(values)


def check_finite(engine: Engine, client: Client, result: ClientResult) -> tuple[jax.Array, jax.Array]:
    """Returns whether the client is aggregated, bool []; and the index of the first leaf of `checked` that is not
    finite, or -1.

    An absent client is not aggregated, because it has done no steps. Its message may contain NaN from 0/0.
    """
    bad_leaf = tree.first_nonfinite(checked(result))
    present = client.id < engine.num_clients
    return present & (bad_leaf < 0) if engine.drop_nonfinite else present, bad_leaf


def checked(result: ClientResult) -> PyTree:
    """The values of a client's result that must be finite. A loss may be NaN although its gradient is finite."""
    metrics = {name: value for name, value in {**result.metrics}.items() if name == "loss"}
    return {"message": decoded(result.message), "metrics": metrics, "state": result.state, "weight": result.weight}


def finished(engine: Engine, shared: Shared, placed: Client, answered: jax.Array, clients: PyTree) -> PyTree:
    """All client states, after ``finish(server, state)`` of the algorithm for those of the aggregated clients.

    shared: with the new variables of the server. placed, answered: [D, G, L], the clients of the round, and whether a
    client is aggregated.
    """
    finish, none = engine.algorithm.finish, jnp.zeros(0)
    what = f"{engine.algorithm.name}: a client's finished state"
    assert finish is not None

    def one(shared: Shared, client: Client, state: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        return (), (), tree.cast_like(finish(server_of(engine, shared, client), state), state, what)

    none_of = absent_like(placed, engine.num_clients)
    placed = jax.tree.map(lambda a, none: jnp.where(answered, a, none), placed, none_of)
    engine = engine._replace(rows_by_rank=None)  # no examples are needed, so none are exchanged
    return over_clients(engine, one, shared._replace(rows=Rows(none, none)), placed, clients)[2]
