"""Selects the clients of a round, and assigns them to devices.

sample    selects K ids, uniformly without replacement or by Bernoulli sampling, unless the caller gives them
fail      replaces clients that drop out or report too late by absent clients; stragglers get fewer steps
assign    sorts the cohort by local steps, and assigns the clients to devices and groups

A device has G groups of L lanes. It trains the groups one after another, and the L clients of a group side by side. The
shape [D, G, L] has one place per client. An absent client is a placeholder with id N and without examples.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift.data.redeal import redeal
from fedjax_drift.devices.mesh import num_teams
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.round.engine import (
    Client,
    Engine,
    Redeal,
    Rows,
    Shared,
    absent,
    mean_steps,
    partitionable,
    replicated,
)
from fedjax_drift.round.exchange import back_and_forth
from fedjax_drift.round.failures import Failures
from fedjax_drift.types import ServerState

# fold_in(clients_key, i) is the key of client i in a round, for i < N. fold_in(clients_key, N + n) is the key for other
# random numbers of the round:
REDISTRIBUTION, FAILURES, NOISE, FINE_TUNING = 0, 1, 2, 3  # values of n

# fold_in(state.key, DEVICE_SPEEDS) is the key for the speeds of the clients' devices. Round t uses
# fold_in(state.key, t), and no round has the number DEVICE_SPEEDS.
DEVICE_SPEEDS = 2**32 - 1


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


def assign(engine: Engine, state: ServerState, rows: Rows | None, cohort: jax.Array | Client | None) -> Assignment:
    """Selects the round's cohort, unless it is given, and assigns it to devices, groups and lanes."""
    if rows is None:
        raise ConfigurationError(
            "a round of a streamed data set must be called outside jax.jit, jax.vmap and lax.scan, because the host "
            "sends the examples in every round: use a Python loop, or stream=False"
        )
    cohort_key, key = round_keys(state.key, state.round)
    if not isinstance(cohort, Client):
        cohort = look_up(engine, rows, sample(engine, cohort_key) if cohort is None else cohort.astype(jnp.int32))
    drawn = cohort.id
    if engine.redeal is not None:
        redeal_key = jax.random.fold_in(key, engine.num_clients + REDISTRIBUTION)
        rows, cohort = redistributed(engine, engine.redeal, redeal_key, cohort, rows)
    selected = cohort
    if engine.failures is not None:
        cohort = fail(engine, engine.failures, state.key, key, cohort)
    lr = engine.local.rate(state.round)
    # With sharded examples, stragglers are sorted by their full number of steps, because `rows_by_rank` assumes it.
    steps = cohort.steps if engine.rows_by_rank is None else engine.local.steps(cohort.size)
    order, empty, placed = at_places(engine, cohort, steps)
    order, placed = replicated(engine, (order, placed))
    return Assignment(Shared(state.server, rows, key, state.round, lr), drawn, selected, cohort, order, empty, placed)


def round_keys(key: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the key for sampling the cohort of round t, and the key of the clients."""
    cohort_key, clients_key = jax.random.split(jax.random.fold_in(key, t))
    return cohort_key, clients_key


@partitionable
def draw(engine: Engine, key: jax.Array, t: jax.Array) -> jax.Array:
    """int32 [capacity]: the ids that round t selects with the key of the state. Unused entries are N."""
    return sample(engine, round_keys(key, t)[0])


def look_up(engine: Engine, rows: Rows, ids: jax.Array) -> Client:
    """The clients with these ids. An id outside 0..N-1 gives an absent client."""
    assert rows.sizes is not None and rows.offsets is not None, "with streamed examples, the caller passes `Client`s"
    N = engine.num_clients
    present = (ids >= 0) & (ids < N)
    known = jnp.clip(ids, 0, N - 1)
    size, place = jnp.where(present, rows.sizes[known], 0), jnp.where(present, ids, engine.state_rows)
    return Client(jnp.where(present, ids, N), size, rows.offsets[known], engine.local.steps(size), place)


def sample(engine: Engine, key: jax.Array) -> jax.Array:
    """int32 [capacity]: the ids of a random cohort. The unused entries of a Bernoulli cohort are N."""
    N = engine.num_clients
    if not engine.bernoulli:
        K = engine.clients_selected
        if K == N:
            return jnp.arange(N, dtype=jnp.int32)
        if N <= 1024 or 2 * K > N:  # `choice` sorts N random numbers
            return jax.random.choice(key, N, (K,), replace=False).astype(jnp.int32)
        return first_distinct(key, N, K)

    def draw(carry: tuple) -> tuple:
        key, _ = carry
        key, use = jax.random.split(key)
        return key, jax.random.bernoulli(use, engine.clients_selected / N, (N,))

    first = draw((key, None))
    if engine.aggregation.noise_multiplier is not None:  # privacy accounting assumes independent draws
        active = first[1]
    else:
        _, active = lax.while_loop(lambda carry: ~carry[1].any(), draw, first)  # until the cohort is not empty
    return jnp.nonzero(active, size=engine.capacity, fill_value=N)[0].astype(jnp.int32)


def first_distinct(key: jax.Array, N: int, K: int) -> jax.Array:
    """int32 [K]: a random sample of K <= N / 2 of the numbers 0..N-1 without replacement, in O(K log K) time.

    Every ordered sample is equally likely. Numbers are sampled with replacement, and repeated numbers are dropped. If
    2 K + 64 numbers contain fewer than K different ones (probability below 1e-9), all numbers are sampled again.
    """

    def attempt(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.randint(key, (2 * K + 64,), 0, N, jnp.int32)
        order = jnp.argsort(drawn, stable=True)
        repeated = jnp.diff(drawn[order], prepend=-1) == 0
        new = jnp.ones(len(drawn), bool).at[order].set(~repeated)
        return drawn[jnp.nonzero(new, size=K, fill_value=0)[0]], new.sum() >= K

    def again(carry: tuple) -> tuple:
        key, _ = carry
        key, use = jax.random.split(key)
        return key, attempt(use)

    return lax.while_loop(lambda carry: ~carry[1][1], again, again((key, None)))[1][0]


def fail(engine: Engine, failures: Failures, state_key: jax.Array, clients_key: jax.Array, cohort: Client) -> Client:
    """The selected clients after failures. Clients that do not report are absent, and stragglers do fewer steps.

    Whether a client drops out or straggles depends only on the round's key, the client's id and its number of steps.
    With over-selection, only the first K clients that report are returned.
    """
    absentee, mean = absent(engine), mean_steps(engine)
    speeds_key = jax.random.fold_in(state_key, DEVICE_SPEEDS)
    key = jax.random.fold_in(clients_key, engine.num_clients + FAILURES)

    def one(client: Client) -> tuple[Client, jax.Array]:
        drops, straggles, part = jax.random.uniform(jax.random.fold_in(key, client.id), (3,))
        K_i = client.steps
        most = jnp.maximum(K_i - 1, jnp.minimum(K_i, 1))  # a client with one step, or without steps, cannot stop early
        some = jnp.minimum(1 + (part * (K_i - 1)).astype(jnp.int32), most)  # 1..K_i - 1, each equally likely
        steps = jnp.where(straggles < failures.stragglers, some, K_i)
        slowness = jnp.exp(failures.speed_spread * jax.random.normal(jax.random.fold_in(speeds_key, client.id)))
        time = steps / mean * slowness
        answers = (drops >= failures.dropout) & (client.id != absentee.id)
        if failures.deadline is not None:
            answers &= time <= failures.deadline
        client = jax.tree.map(lambda a, none: jnp.where(answers, a, none), client._replace(steps=steps), absentee)
        return client, jnp.where(answers, time, jnp.inf)

    cohort, time = jax.vmap(one)(cohort)
    K = engine.cohort_size
    if engine.clients_selected > K and K < len(time):
        first = jnp.sort(jnp.argsort(time, stable=True)[:K])  # the first K that report, in the order of the cohort
        cohort = jax.tree.map(lambda a: a[first], cohort)
    return cohort


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
    cohort = Client(id_, size, M + offset, engine.local.steps(size), place)
    return rows._replace(places=jnp.concatenate([jnp.arange(M, dtype=jnp.int32), places])), cohort


def places_of(engine: Engine, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Assigns the cohort to the places [D, G, L]. ``steps`` [K] are the local steps of the clients.

    The cohort is sorted by local steps, in descending order, so that the L clients of a group finish together. The
    groups are assigned to the devices 0..D-1, then D-1..0, and so on, so that the devices finish together.

    Returns the position in the cohort of the client at each place, int32 [D, G, L]; and whether each place is empty,
    bool [D, G, L].
    """
    K, D, L = len(steps), num_teams(engine.mesh), engine.lanes
    order = jnp.argsort(-steps, stable=True)
    places = back_and_forth(D, -(-K // (D * L)), L)
    return order[np.minimum(places, K - 1)], jnp.asarray(places >= K)


def at_places(engine: Engine, clients: Client, steps: jax.Array) -> tuple[jax.Array, jax.Array, Client]:
    """Returns the results of `places_of`, and the client at each place, [D, G, L]. Empty places have absent clients."""
    order, empty = places_of(engine, steps)
    placed = jax.tree.map(lambda none, a: jnp.where(empty, none, a[order]), absent(engine), clients)
    return order, empty, placed


def in_cohort_order(K: int, order: jax.Array, empty: jax.Array, values: jax.Array) -> jax.Array:
    """The inverse of `places_of`: values [D, G, L, ...] at the places -> [K, ...], in the order of the cohort.

    order, empty: the results of `places_of`.
    """
    places = jnp.where(empty, K, order)
    return jnp.zeros((K, *values.shape[3:]), values.dtype).at[places].set(values, mode="drop")
