"""The virtual clock: its state before round 0, and after each round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift.round.cohort import Assignment, draw, outcome
from fedjax_drift.round.engine import Arrays, Engine, absent, replicated
from fedjax_drift.round.flight import (
    Slots,
    VirtualClock,
    keeps_past,
    next_slots,
    seconds,
    start_distances,
    too_stale,
)
from fedjax_drift.types import PyTree, ServerState


def initial_clock(engine: Engine, state: ServerState, sizes: jax.Array) -> PyTree:
    """The clock before round 0: () if rounds have no virtual time. state: without a clock. sizes: int32 [N]."""
    if engine.devices is None:
        return ()
    time = jnp.zeros((), float)
    if not engine.asynchronous:
        return VirtualClock(time)
    N, M = engine.num_clients, engine.slots
    empty = Slots(jnp.full(M, N, jnp.int32), jnp.zeros(M, jnp.int32), jnp.full(M, jnp.inf, float))
    slots = filled(engine, state, Arrays(None, None, sizes), empty, M, None)
    R, past = engine.clock.max_staleness + 1, ()
    if keeps_past(engine):
        past = jax.tree.map(lambda a: jnp.zeros((R, *jnp.shape(a)), jnp.asarray(a).dtype).at[0].set(a), state.server)
    return VirtualClock(time, slots, past)


def advance(
    engine: Engine, before: ServerState, after: ServerState, arrays: Arrays, assigned: Assignment
) -> tuple[PyTree, dict[str, jax.Array]]:
    """The clock after a round, and the entries of ``info`` about time.

    before, after: the states before and after the round, both with the clock before it.
    """
    clock = before.clock
    if engine.devices is None:
        return (), {}
    if not engine.asynchronous:
        time = clock.time + of_slowest(engine, before, assigned)
        return VirtualClock(time), {"time": time}
    N, M, slots = engine.num_clients, engine.slots, clock.slots
    slot = next_slots(engine, slots)
    wait = slots.wait[slot]
    elapsed = jnp.where(jnp.isfinite(wait), wait, 0).max()  # until the last of these reports
    left = slots._replace(id=slots.id.at[slot].set(N), wait=slots.wait - elapsed)
    if M == engine.cohort_size:
        count, free = M, None
    else:
        busy = jnp.zeros(N + 1, bool).at[left.id].set(True)[:N]
        # A rule of availability may have left slots empty.
        count, free = engine.cohort_size if engine.participation.available is None else M, ~busy
    past, version = clock.past, slots.version[slot]
    if keeps_past(engine):
        past = jax.tree.map(lambda past, a: past.at[after.round % len(past)].set(a), past, after.server)
    time = clock.time + elapsed
    reports = slots.id[slot] < N
    info = {
        "time": time,
        "staleness": jnp.where(reports, before.round - version, 0),
        "start_distance": start_distances(engine, before, version),
        "too_stale": (reports & too_stale(engine, before, version)).sum(),
    }
    return VirtualClock(time, filled(engine, after, arrays, left, count, free), past), info


def filled(
    engine: Engine, state: ServerState, arrays: Arrays, slots: Slots, count: int, free: jax.Array | None
) -> Slots:
    """The slots, after other clients have started in the empty ones.

    state: that with which they start. count: the number of clients that the participation rule selects. free: bool [N],
    the clients that can start; None: all.
    """
    N = engine.num_clients
    ids, _ = draw(engine, state, arrays, count, free)
    ids = ids[jnp.argsort(ids >= N, stable=True)]  # the unused entries last
    is_empty = slots.id == N
    number = jnp.cumsum(is_empty) - 1  # of the empty slot among those that are empty
    id_ = jnp.where(is_empty, ids.at[number].get(mode="fill", fill_value=N), slots.id)
    size = jnp.where(id_ < N, arrays.sizes[jnp.minimum(id_, N - 1)], 0)
    clients = absent(engine)._replace(id=id_, size=size, steps=engine.local.num_steps(size), version=state.round)
    clients = jax.tree.map(lambda a: jnp.broadcast_to(a, id_.shape), clients)
    if engine.failures is not None:
        _, steps = outcome(engine, engine.failures, state, clients)
        clients = clients._replace(steps=steps)
    wait = jnp.where(id_ < N, seconds(engine, state.key, state.server, clients), jnp.inf)
    wait = jnp.where(is_empty, wait, slots.wait)
    if engine.clock.starts is not None:
        wait = after_reports(wait, jnp.where(is_empty, number - is_empty.sum(), -engine.slots), engine.cohort_size - 1)
    return replicated(engine, Slots(id_, jnp.where(is_empty, state.round, slots.version), wait))


def after_reports(wait: jax.Array, number: jax.Array, count: int) -> jax.Array:
    """float [M]: the seconds until each client reports, if ``count`` clients start at the next ``count`` reports.

    wait: float [M], the seconds from its start, or from now for one that trains already. number: int32 [M], -count for
    the client that starts at the next report, ..., -1 for the last one. A client with another number has started.
    """
    trains, needs = number < -count, wait

    def start_one(k: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        wait, reports = carry  # reports: when those that train and have not been replaced report
        report = jnp.argmin(reports)
        time = reports[report]
        starts = number == k - count
        wait = jnp.where(starts, time + needs, wait)
        return wait, jnp.where(starts, wait, reports.at[report].set(jnp.inf))

    return jax.lax.fori_loop(0, count, start_one, (wait, jnp.where(trains, wait, jnp.inf)))[0]


def of_slowest(engine: Engine, state: ServerState, assigned: Assignment) -> jax.Array:
    """float []: the seconds of a synchronous round, which ends with the last report or with the deadline."""
    cohort, N = assigned.cohort, engine.num_clients
    reported = cohort.id < N
    slowest = jnp.where(reported, seconds(engine, state.key, state.server, cohort), 0).max()
    if engine.failures is None or engine.failures.deadline is None:
        return slowest
    expected = engine.cohort_size if engine.over_selects else (assigned.drawn < N).sum()
    return jnp.where(reported.sum() < expected, engine.failures.deadline, slowest)
