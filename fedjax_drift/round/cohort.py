"""Which clients take part in a round, and which device trains which of them.

draw      K ids: uniform without replacement, Bernoulli, or given by the caller
fail      clients that drop out or answer too late become absent, stragglers get fewer steps
deal      the cohort is sorted by local steps and dealt to devices and groups of L lanes
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift.data.redeal import redeal
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

DEVICE_SPEEDS = 2**32 - 1  # fold_in(state.key, DEVICE_SPEEDS) draws the speed of each client's device; round t uses t


class Plan(NamedTuple):
    """Which device trains which clients in a round, and what they are given."""

    shared: Shared
    drawn: jax.Array  # int32 [K'], the ids drawn or given; N marks an absent client
    held: Client  # [K'], the clients drawn, with the rows dealt to each; a client without rows is absent
    cohort: Client  # [K], the clients that count; those that did not answer are absent
    order: jax.Array  # int32 [D, G, L], positions in the cohort
    empty: jax.Array  # bool [D, G, L], True where nobody trains
    dealt: Client  # [D, G, L]


def plan(engine: Engine, state: ServerState, rows: Rows | None, cohort: jax.Array | Client | None) -> Plan:
    """Draws the round's cohort, unless it is given, and deals it to devices, groups and lanes."""
    if rows is None:
        raise ConfigurationError("a streamed data set needs the host in every round: not inside jax.jit, vmap or scan")
    cohort_key, key = round_keys(state.key, state.round)
    if not isinstance(cohort, Client):
        cohort = look_up(engine, rows, sample(engine, cohort_key) if cohort is None else cohort.astype(jnp.int32))
    drawn = cohort.id
    if engine.redeal is not None:
        rows, cohort = deal_anew(engine, engine.redeal, jax.random.fold_in(key, engine.num_clients), cohort, rows)
    held = cohort
    if engine.failures is not None:
        cohort = fail(engine, engine.failures, state.key, key, cohort)
    lr = engine.local.rate(state.round)
    # Where rows are sharded, the rows that one device can be dealt are bounded by sizes: see `rows_by_rank`.
    steps = cohort.steps if engine.rows_by_rank is None else engine.local.steps(cohort.size)
    order, empty, dealt = deal_out(engine, cohort, steps)
    order, dealt = replicated(engine, (order, dealt))
    states = () if engine.sharded else state.clients
    return Plan(Shared(state.server, rows, key, state.round, lr, states), drawn, held, cohort, order, empty, dealt)


def round_keys(key: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key that draws the cohort of round t, and the key of its clients.

    Client i uses fold_in(clients_key, i). Beyond the ids, N is for redistributing rows, N + 1 for failures, N + 2 for
    the noise of a private aggregation, and N + 3 for fine-tuning.
    """
    cohort_key, clients_key = jax.random.split(jax.random.fold_in(key, t))
    return cohort_key, clients_key


@partitionable
def draw(engine: Engine, key: jax.Array, t: jax.Array) -> jax.Array:
    """int32 [capacity]: the ids that round t draws from the state's key; N fills empty places."""
    return sample(engine, round_keys(key, t)[0])


def look_up(engine: Engine, rows: Rows, ids: jax.Array) -> Client:
    """The clients with these ids. An id outside 0..N-1 gives an absent client."""
    assert rows.sizes is not None and rows.offsets is not None, "streamed rows come with their clients"
    N = engine.num_clients
    present = (ids >= 0) & (ids < N)
    known = jnp.clip(ids, 0, N - 1)
    size, place = jnp.where(present, rows.sizes[known], 0), jnp.where(present, ids, engine.state_rows)
    return Client(jnp.where(present, ids, N), size, rows.offsets[known], engine.local.steps(size), place)


def sample(engine: Engine, key: jax.Array) -> jax.Array:
    """int32 [capacity]: the ids of a random cohort; N fills the empty places of a Bernoulli cohort."""
    N = engine.num_clients
    if not engine.bernoulli:
        K = engine.clients_asked
        if K == N:
            return jnp.arange(N, dtype=jnp.int32)
        if N <= 1024 or 2 * K > N:  # sorts N words
            return jax.random.choice(key, N, (K,), replace=False).astype(jnp.int32)
        return first_distinct(key, N, K)

    def draw(carry: tuple) -> tuple:
        key, _ = carry
        key, use = jax.random.split(key)
        return key, jax.random.bernoulli(use, engine.clients_asked / N, (N,))

    first = draw((key, None))
    if engine.aggregation.noise_multiplier is not None:  # privacy accounting assumes independent draws
        active = first[1]
    else:
        _, active = lax.while_loop(lambda carry: ~carry[1].any(), draw, first)  # until the cohort is not empty
    return jnp.nonzero(active, size=engine.capacity, fill_value=N)[0].astype(jnp.int32)


def first_distinct(key: jax.Array, N: int, K: int) -> jax.Array:
    """int32 [K]: K <= N / 2 of the numbers 0..N-1 without replacement, in O(K log K) steps.

    Every ordered choice is equally likely. Numbers are drawn with replacement and repetitions are dropped. If 2 K + 64
    draws contain fewer than K different numbers (probability below 1e-9), all are drawn again, which favours no number.
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
    """The clients that answer, with the steps that they do; the others are absent. At most K of them, [min(K', K)].

    Whether a client drops out or straggles depends on the round's key, its id and its own steps only. With
    over-selection the first K answers count.
    """
    nobody, mean = absent(engine), mean_steps(engine)
    speeds_key = jax.random.fold_in(state_key, DEVICE_SPEEDS)
    key = jax.random.fold_in(clients_key, engine.num_clients + 1)

    def one(client: Client) -> tuple[Client, jax.Array]:
        drops, straggles, part = jax.random.uniform(jax.random.fold_in(key, client.id), (3,))
        K_i = client.steps
        most = jnp.maximum(K_i - 1, jnp.minimum(K_i, 1))  # a client of one step, or of none, cannot stop early
        some = jnp.minimum(1 + (part * (K_i - 1)).astype(jnp.int32), most)  # 1..K_i - 1, each equally likely
        steps = jnp.where(straggles < failures.stragglers, some, K_i)
        slowness = jnp.exp(failures.speed_spread * jax.random.normal(jax.random.fold_in(speeds_key, client.id)))
        time = steps / mean * slowness
        answers = (drops >= failures.dropout) & (client.id != nobody.id)
        if failures.deadline is not None:
            answers &= time <= failures.deadline
        client = jax.tree.map(lambda a, none: jnp.where(answers, a, none), client._replace(steps=steps), nobody)
        return client, jnp.where(answers, time, jnp.inf)

    cohort, time = jax.vmap(one)(cohort)
    K = engine.cohort_size
    if engine.clients_asked > K and K < len(time):
        first = jnp.sort(jnp.argsort(time, stable=True)[:K])  # the first K to answer, in the cohort's order
        cohort = jax.tree.map(lambda a: a[first], cohort)
    return cohort


def deal_anew(engine: Engine, redealing: Redeal, key: jax.Array, cohort: Client, rows: Rows) -> tuple[Rows, Client]:
    """Pools the cohort's rows and deals them to its clients anew. A client that gets no row is absent."""
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
    nobody = jnp.array([[engine.num_clients], [engine.state_rows]])
    id_, place = jnp.where(size > 0, jnp.stack([cohort.id, cohort.place]), nobody)
    cohort = Client(id_, size, M + offset, engine.local.steps(size), place)
    return rows._replace(places=jnp.concatenate([jnp.arange(M, dtype=jnp.int32), places])), cohort


def deal(engine: Engine, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions in the cohort, int32 [D, G, L], of the clients that train there; and which places are empty.

    The cohort is sorted by local steps, longest first, so that the L lanes of a group finish together. Groups are dealt
    to the D devices back and forth, so that the devices finish together.
    """
    K, D, L = len(steps), engine.mesh.size, engine.lanes
    order = jnp.argsort(-steps, stable=True)
    places = back_and_forth(D, -(-K // (D * L)), L)
    return order[np.minimum(places, K - 1)], jnp.asarray(places >= K)


def deal_out(engine: Engine, clients: Client, steps: jax.Array) -> tuple[jax.Array, jax.Array, Client]:
    """`deal` by these steps [K], and the clients in their places, [D, G, L]; empty places have absent clients."""
    order, empty = deal(engine, steps)
    dealt = jax.tree.map(lambda none, a: jnp.where(empty, none, a[order]), absent(engine), clients)
    return order, empty, dealt


def undealt(K: int, order: jax.Array, empty: jax.Array, values: jax.Array) -> jax.Array:
    """Values [D, G, L, ...] -> [K, ...], in the order of the cohort that `deal` was given; it gave order and empty."""
    places = jnp.where(empty, K, order)
    return jnp.zeros((K, *values.shape[3:]), values.dtype).at[places].set(values, mode="drop")
