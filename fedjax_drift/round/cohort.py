"""Selects the clients of a round, and assigns them to devices.

select    the clients of the round: drawn with the participation rule, unless the caller gives them; or those that
          report next if rounds are asynchronous
fail      replaces clients that drop out or report too late by absent clients; stragglers get fewer steps
assign    selects the clients, lets some of them fail, and assigns the cohort to devices, groups and lanes (places.py)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.data.redeal import redeal
from fedjax_drift.local import full_loss
from fedjax_drift.participation.rule import Clients
from fedjax_drift.round.engine import (
    Arrays,
    Client,
    Engine,
    Redeal,
    Rows,
    Shared,
    absent,
    at_present,
    mean_steps,
    partitionable,
    replicated,
    round_keys,
)
from fedjax_drift.round.failures import Failures
from fedjax_drift.round.flight import DEVICE_SPEEDS, Past, arrivals, keeps_past, seconds, with_start
from fedjax_drift.round.places import at_places, in_cohort_order
from fedjax_drift.round.train import client_work, no_losses, over_clients
from fedjax_drift.types import PyTree, ServerState

# fold_in(clients_key, i) is the key of client i in a round, for i < N. fold_in(clients_key, N + n) is the key for other
# random numbers of the round:
REDISTRIBUTION, FAILURES, NOISE, FINE_TUNING, CURVATURE = 0, 1, 2, 3, 4  # values of n

# fold_in(state.key, PARTICIPATION) is the key for the initial state of the participation rule, fold_in(state.key,
# flight.DEVICE_SPEEDS) that for the speeds. Round t uses fold_in(state.key, t), and no round has these numbers.
PARTICIPATION = 2**32 - 2
AVAILABILITY = 0  # fold_in(cohort_key, AVAILABILITY) decides which clients are available, cohort_key which are selected


class Assignment(NamedTuple):
    """The clients of a round, and the place at which each client trains.

    K' clients are selected, and K of them remain after failures. K' > K only with over-selection.
    """

    shared: Shared
    drawn: jax.Array  # int32 [K'], the selected ids; N marks an absent client
    selected: Client  # [K'], the selected clients, after `redistributed`; absent if a client has no example
    cohort: Client  # [K], the clients after failures; a client that does not report is absent
    order: jax.Array  # int32 [D, G, L], for each place the index in ``cohort`` of the client that trains there
    empty: jax.Array  # bool [D, G, L], True for places without a client
    placed: Client  # [D, G, L], the client at each place


def assign(engine: Engine, state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None) -> Assignment:
    """Selects the round's cohort, unless it is given, and assigns it to devices, groups and lanes."""
    rows = arrays.rows
    if rows is None:
        reason = "because the host sends the examples in every round"
        what = f"a round of a streamed data set must be called outside jax.jit, jax.vmap and lax.scan, {reason}"
        checks.refuse(what, "a traced one", "use a Python loop, or stream=False")
    _, key = round_keys(state.key, state.round)
    if cohort is None:
        cohort = look_up(engine, rows, *select(engine, state, arrays))
    elif not isinstance(cohort, Client):
        cohort = look_up(engine, rows, cohort.astype(jnp.int32))
    cohort = with_start(engine, state, cohort)
    drawn = cohort.id
    if engine.redeal is not None:
        redeal_key = jax.random.fold_in(key, engine.num_clients + REDISTRIBUTION)
        rows, cohort = redistributed(engine, engine.redeal, redeal_key, cohort, rows)
    selected = cohort
    if engine.failures is not None:
        cohort = fail(engine, engine.failures, state, cohort)
    # With sharded examples, clients are sorted by the batches of an epoch, because `rows_by_rank` assumes it.
    steps = cohort.steps if engine.rows_by_rank is None else engine.local.batches(cohort.size)
    order, empty, placed = at_places(engine, cohort, steps)
    order, placed = replicated(engine, (order, placed))
    lr, past = engine.local.rate(state.round), Past(state.clock.past, state.key) if keeps_past(engine) else ()
    shared = Shared(state.server, rows, key, state.round, lr, aggregation=state.aggregation, past=past)
    return Assignment(shared, drawn, selected, cohort, order, empty, placed)


@partitionable
def select(engine: Engine, state: ServerState, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    """The ids int32 [capacity] of a round's clients, and their factors float [capacity], or None without factors.

    Unused entries are N.
    """
    if engine.asynchronous:
        return arrivals(engine, state)[0], None
    return draw(engine, state, arrays, engine.clients_selected)


def draw(
    engine: Engine, state: ServerState, arrays: Arrays, count: int, free: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """What the participation rule selects: ``count`` clients, or as many as it can. See `select`.

    ``arrays.rows`` and the server's variables are only used by a rule that asks for losses. free: bool [N], the clients
    that aren't in flight; None: all.
    """
    rule, N, t = engine.participation, engine.num_clients, state.round
    key, clients_key = round_keys(state.key, t)

    def losses(ids: jax.Array) -> jax.Array:
        assert arrays.rows is not None, "streamed data sets are refused when the simulation is created"
        shared = Shared(state.server, arrays.rows, clients_key, t, engine.local.rate(t))
        return client_losses(engine, shared, look_up(engine, arrays.rows, ids))

    allowed = available(engine, state)
    if free is not None:
        allowed = free if allowed is None else free & allowed
    ids, factor = rule.select(state.participation, key, t, count, Clients(arrays.sizes, losses, allowed))
    if not engine.factors:
        return ids, None
    factor = jnp.ones(ids.shape, float) if factor is None else factor.astype(float)
    return (ids, factor) if rule.distinct else merged(ids, factor, N)


def initial_participation(engine: Engine, key: jax.Array, sizes: jax.Array) -> PyTree:
    """The state of the participation rule before round 0. key: that of the state. sizes: int32 [N]."""
    rule = engine.participation
    state = rule.init(jax.random.fold_in(key, PARTICIPATION), Clients(sizes, no_losses(rule, "init")))
    return jax.tree.map(tree.strip_weak_type, state)


def available(engine: Engine, state: ServerState) -> jax.Array | None:
    """bool [N]: the clients that can be selected in a round. None: the rule makes no difference."""
    if engine.participation.available is None:
        return None
    key, _ = round_keys(state.key, state.round)
    key = jax.random.fold_in(key, AVAILABILITY)  # so that a rule may use its keys directly in both functions
    return engine.participation.available(state.participation, key, state.round, engine.num_clients)


def observe(
    engine: Engine, state: ServerState, assigned: Assignment, answered: jax.Array, loss: jax.Array | None
) -> PyTree:
    """The state of the participation rule after the round.

    answered: bool [K], whether a client is aggregated. loss: float [K], the mean loss over its local steps. None: the
    algorithm does not report it.
    """
    rule, N = engine.participation, engine.num_clients
    if rule.observe is None:
        return state.participation
    losses = jnp.full(N + 1, jnp.nan)
    if loss is not None:
        losses = losses.at[assigned.cohort.id].set(jnp.where(answered, loss, jnp.nan)).at[N].set(jnp.nan)
    what = f"the state of the participation rule {rule.name}"
    return tree.cast_like(
        rule.observe(state.participation, assigned.drawn, losses[assigned.drawn]), state.participation, what
    )


def merged(ids: jax.Array, factor: jax.Array, N: int) -> tuple[jax.Array, jax.Array]:
    """The clients without repetitions. The first entry of a client gets the sum of its factors, the others are N."""
    entry = jnp.arange(len(ids))
    first = jnp.full(N + 1, len(ids)).at[ids].min(entry)
    sums = jnp.zeros(N + 1, factor.dtype).at[ids].add(factor)
    return jnp.where(first[ids] == entry, ids, N), sums[ids]


def client_losses(engine: Engine, shared: Shared, clients: Client) -> jax.Array:
    """float [C]: the mean loss of the global model over the training examples of each client."""

    def one(shared: Shared, client: Client, state: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        return (), full_loss(client_work(engine, shared, client, longest), shared.server.params), ()

    order, empty, placed = at_places(engine, clients, clients.steps)
    order, placed = replicated(engine, (order, placed))
    losses = over_clients(engine, one, shared, placed, ())[1]
    return in_cohort_order(len(clients.id), order, empty, replicated(engine, losses))


def look_up(engine: Engine, rows: Rows, ids: jax.Array, factor: jax.Array | None = None) -> Client:
    """The clients with these ids. An id outside 0..N-1 gives an absent client. factor: default 1."""
    assert rows.sizes is not None and rows.offsets is not None, "with streamed examples, the caller passes `Client`s"
    N = engine.num_clients
    present = (ids >= 0) & (ids < N)
    known = jnp.clip(ids, 0, N - 1)
    size, place = jnp.where(present, rows.sizes[known], 0), jnp.where(present, ids, engine.state_rows)
    if engine.factors and factor is None:
        factor = jnp.ones(ids.shape, float)
    ids, start = jnp.where(present, ids, N), at_present(engine, ids.shape)
    return Client(ids, size, rows.offsets[known], engine.local.num_steps(size), place, factor, **start)


def fail(engine: Engine, failures: Failures, state: ServerState, cohort: Client) -> Client:
    """The selected clients after failures. Clients that do not report are absent, and stragglers do fewer steps.

    With over-selection, only the first K clients that report are returned.
    """
    absentee = absent(engine)
    drops, steps = outcome(engine, failures, state, cohort)
    cohort = cohort._replace(steps=steps)
    time = duration(engine, failures, state, cohort)
    answers = ~drops & (cohort.id != absentee.id)
    if failures.deadline is not None:
        answers &= time <= failures.deadline
    cohort = jax.tree.map(lambda a, none: jnp.where(answers, a, none), cohort, absentee)
    K = engine.cohort_size
    if engine.over_selects and K < len(time):
        time = jnp.where(answers, time, jnp.inf)
        first = jnp.sort(jnp.argsort(time, stable=True)[:K])  # the first K that report, in the order of the cohort
        cohort = jax.tree.map(lambda a: a[first], cohort)
    return cohort


def outcome(engine: Engine, failures: Failures, state: ServerState, clients: Client) -> tuple[jax.Array, jax.Array]:
    """Whether each client drops out, bool [C], and its local steps, int32 [C], which are fewer for a straggler.

    Both depend only on the key of the round in which the client started, its id and its number of steps.
    """

    def one(client: Client) -> tuple[jax.Array, jax.Array]:
        _, clients_key = round_keys(state.key, state.round if client.version is None else client.version)
        key = jax.random.fold_in(clients_key, engine.num_clients + FAILURES)
        drops, straggles, part = jax.random.uniform(jax.random.fold_in(key, client.id), (3,))
        K_i = client.steps
        most = jnp.maximum(K_i - 1, jnp.minimum(K_i, 1))  # a client with one step, or without steps, cannot stop early
        some = jnp.minimum(1 + (part * (K_i - 1)).astype(jnp.int32), most)  # 1..K_i - 1, each equally likely
        return drops < failures.dropout, jnp.where(straggles < failures.stragglers, some, K_i)

    return jax.vmap(one)(clients)


def duration(engine: Engine, failures: Failures, state: ServerState, clients: Client) -> jax.Array:
    """float [C]: how long each client needs for its steps, in seconds with ``devices=``, else in mean clients."""
    if engine.devices is not None:
        return seconds(engine, state.key, state.server, clients)
    key = jax.random.fold_in(state.key, DEVICE_SPEEDS)

    def one(client: Client) -> jax.Array:
        slowness = jnp.exp(failures.speed_spread * jax.random.normal(jax.random.fold_in(key, client.id)))
        return client.steps / mean_steps(engine) * slowness

    return jax.vmap(one)(clients)


def redistributed(engine: Engine, redealing: Redeal, key: jax.Array, cohort: Client, rows: Rows) -> tuple[Rows, Client]:
    """Pools the cohort's examples and redistributes them to its clients. A client that gets no example is absent."""
    M = len(rows.x)
    places, offset, size = redeal(
        key,
        cohort.id,
        cohort.size,
        cohort.offset,
        None if redealing.alpha is None else rows.y,
        alpha=redealing.alpha,
        num_classes=redealing.num_classes,
        most_rows=redealing.most_rows[len(cohort.id) - 1],
    )
    of_absentee = jnp.array([[engine.num_clients], [engine.state_rows]])
    id_, place = jnp.where(size > 0, jnp.stack([cohort.id, cohort.place]), of_absentee)
    cohort = Client(id_, size, M + offset, engine.local.num_steps(size), place, cohort.factor)
    return rows._replace(places=jnp.concatenate([jnp.arange(M, dtype=jnp.int32), places])), cohort
