"""Virtual time as a source of drift: which clients report in a round, and with which variables they have started.

The order of events depends on the speeds of the clients, not on what they have learned. So a client trains when it
reports, with what it got when it started, and one program runs the K clients of an update like those of a synchronous
round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.clock import Clock, Devices
from fedjax_drift.recipes import recorded
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.engine import look_up, replicated, round_keys
from fedjax_drift.round.failures import Failures, outcome
from fedjax_drift.round.selection import Selection, draw
from fedjax_drift.round.sources import Cohort, Moment, Outcome, Source, Start
from fedjax_drift.round.speed import seconds
from fedjax_drift.types import Metrics, PyTree, ServerState


class Slots(NamedTuple):
    """The clients in flight, and with ``starts="report"`` those that start in this round, [`Flight.slots`]. An empty
    slot has the id N."""

    id: jax.Array  # int32
    version: jax.Array  # int32, the round in which the client started
    wait: jax.Array  # float, the seconds until it reports; infinite for an empty slot


class VirtualClock(NamedTuple):
    """The state of the clock."""

    time: jax.Array  # float [], seconds since the first round began
    slots: Any = ()  # `Slots`; () if rounds are synchronous
    past: PyTree = ()
    """The server's variables at the beginning of the last R = max_staleness + 1 rounds, leaves [R, ...]. Those of round
    v are at v mod R. () if all clients start with the present ones."""


@recorded
def ticking(failures: Failures | None, devices: Devices) -> Source:
    """The source of synchronous rounds with virtual time."""

    def after(state: VirtualClock, outcome: Outcome, moment: Moment) -> tuple[VirtualClock, Metrics]:
        time = state.time + of_slowest(moment, failures, devices, outcome)
        return VirtualClock(time), {"time": time}

    def init(moment: Moment) -> VirtualClock:
        return VirtualClock(jnp.zeros((), float))

    return Source("clock", init, after=after, kind="clock", title="synchronous")


class Flight(NamedTuple):
    """Asynchronous rounds: the clock, and the values that say when a client reports."""

    clock: Clock
    selection: Selection  # selects the clients that start
    failures: Failures | None  # a straggler does fewer steps
    devices: Devices
    cohort_size: int  # K

    @property
    def slots(self) -> int:
        """The number of clients that train, or will start in this round: M, or with ``starts="report"`` M + K - 1."""
        M = self.clock.concurrency or 0
        return M if self.clock.starts is None else M + self.cohort_size - 1

    @property
    def keeps_past(self) -> bool:
        """Whether clients may have started in an earlier round."""
        return self.slots != self.cohort_size


@recorded
def in_flight(flight: Flight) -> Source:
    """The source of asynchronous rounds. The cohort is the K clients that report next."""
    clock = flight.clock

    def init(moment: Moment) -> VirtualClock:
        state = moment.before
        assert state is not None
        N, M = moment.num_clients, flight.slots
        empty = Slots(jnp.full(M, N, jnp.int32), jnp.zeros(M, jnp.int32), jnp.full(M, jnp.inf, float))
        slots = filled(flight, moment, state, empty, M, None)
        R, past = clock.max_staleness + 1, ()

        def with_first(a: jax.Array) -> jax.Array:
            return jnp.zeros((R, *jnp.shape(a)), jnp.asarray(a).dtype).at[0].set(a)

        if flight.keeps_past:
            past = jax.tree.map(with_first, state.server)
        return VirtualClock(jnp.zeros((), float), slots, past)

    def select(state: VirtualClock, cohort: Cohort, moment: Moment) -> Cohort:
        slot = next_slots(state.slots, moment.cohort_size)
        ids, version = state.slots.id[slot], state.slots.version[slot]
        ids = jnp.where(too_stale(clock, moment.t, version), moment.num_clients, ids)
        clients = look_up(moment.engine, cohort.rows, ids) if cohort.clients is None else cohort.clients
        discount = jax.vmap(clock.discount)((moment.t - version).astype(float))
        if discount.shape != version.shape:
            what = f"discount of the clock {clock.name} must return a scalar"
            checks.refuse(what, f"the shape {[*discount.shape[1:]]}")
        clients = clients._replace(version=version, discount=discount)
        return cohort._replace(clients=clients, selected=clients, drawn=clients.id)

    def receive(state: VirtualClock, start: Start, client: Client, moment: Moment) -> Start:
        v = client.version
        assert v is not None
        server = jax.tree.map(lambda past: past[v % len(past)], state.past)
        _, key = round_keys(moment.run_key, v)
        return Start(server, key, v, moment.engine.local.rate(v))

    def send(
        state: VirtualClock, message: PyTree, weight: jax.Array, client: Client, moment: Moment
    ) -> tuple[PyTree, jax.Array]:
        """The difference from the present model, instead of the one with which the client has started."""
        assert moment.start is not None
        models = moment.start.server.params, moment.server.params
        return jax.tree.map(lambda m, start, w: m + (start - w), message, *models), weight

    def after(state: VirtualClock, outcome: Outcome, moment: Moment) -> tuple[VirtualClock, Metrics]:
        before, after = moment.before, outcome.after
        assert before is not None
        N, M, K, slots = moment.num_clients, flight.slots, flight.cohort_size, state.slots
        slot = next_slots(slots, K)
        wait = slots.wait[slot]
        elapsed = jnp.where(jnp.isfinite(wait), wait, 0).max()  # until the last of these reports
        left = slots._replace(id=slots.id.at[slot].set(N), wait=slots.wait - elapsed)
        if M == K:
            count, free = M, None
        else:
            busy = jnp.zeros(N + 1, bool).at[left.id].set(True)[:N]
            # A rule of availability may have left slots empty.
            count, free = K if flight.selection.rule.available is None else M, ~busy
        past, version = state.past, slots.version[slot]
        if flight.keeps_past:
            past = jax.tree.map(lambda past, a: past.at[after.round % len(past)].set(a), past, after.server)
        time = state.time + elapsed
        reports = slots.id[slot] < N
        info = {
            "time": time,
            "staleness": jnp.where(reports, before.round - version, 0),
            "start_distance": start_distances(flight, state, before.server, version),
            "too_stale": (reports & too_stale(clock, before.round, version)).sum(),
        }
        return VirtualClock(time, filled(flight, moment, after, left, count, free), past), info

    return Source(
        "clock",
        init,
        select,
        receive if flight.keeps_past else None,
        send=send if flight.keeps_past and clock.mixes == "models" else None,
        after=after,
        kind="clock",
        title=clock.name,
    )


def next_slots(slots: Slots, K: int) -> jax.Array:
    """int32 [K]: the slots of the clients that report next, in the order of the slots. Of equals, the first."""
    return jnp.sort(jnp.argsort(slots.wait, stable=True)[:K])


def too_stale(clock: Clock, t: jax.Array, version: jax.Array) -> jax.Array:
    """Whether an update is dropped in round t. version: int32, the round in which its client started."""
    return t - version > clock.max_staleness


def start_distances(flight: Flight, state: VirtualClock, server: Any, version: jax.Array) -> jax.Array:
    """float [K]: ||w_t - w_v||, the distance of the present model from the one with which each client started."""
    if not flight.keeps_past:
        return jnp.zeros(version.shape, float)

    def distance(past: PyTree) -> jax.Array:
        difference = tree.subtract(past.params, server.params)
        return jnp.sqrt(tree.dot(difference, difference))

    # a version at a time: vmap would need the differences of all versions at once
    distances = jax.lax.map(distance, state.past)
    return distances[version % len(distances)]


def filled(
    flight: Flight, moment: Moment, state: ServerState, slots: Slots, count: int, free: jax.Array | None
) -> Slots:
    """The slots, after other clients have started in the empty ones.

    state: that with which they start. count: the number of clients that the participation rule selects. free: bool [N],
    the clients that can start; None: all.
    """
    engine, arrays, N = moment.engine, moment.arrays, moment.num_clients
    assert arrays is not None
    ids, _ = draw(engine, flight.selection, state, arrays, count, free)
    ids = ids[jnp.argsort(ids >= N, stable=True)]  # the unused entries last
    is_empty = slots.id == N
    number = jnp.cumsum(is_empty) - 1  # of the empty slot among those that are empty
    id_ = jnp.where(is_empty, ids.at[number].get(mode="fill", fill_value=N), slots.id)
    size = jnp.where(id_ < N, arrays.sizes[jnp.minimum(id_, N - 1)], 0)
    none, version = jnp.zeros_like(id_), jnp.broadcast_to(state.round, id_.shape)
    clients = Client(id_, size, none, engine.local.num_steps(size), none, version=version)
    if flight.failures is not None:
        _, steps = outcome(engine, flight.failures, state.key, state.round, clients)
        clients = clients._replace(steps=steps)
    wait = jnp.where(id_ < N, seconds(engine, flight.devices, state, clients), jnp.inf)
    wait = jnp.where(is_empty, wait, slots.wait)
    if flight.clock.starts is not None:
        number = jnp.where(is_empty, number - is_empty.sum(), -flight.slots)
        wait = after_reports(wait, number, flight.cohort_size - 1)
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

    # a loop, because the client that starts at one report may itself report before the next one
    return jax.lax.fori_loop(0, count, start_one, (wait, jnp.where(trains, wait, jnp.inf)))[0]


def of_slowest(moment: Moment, failures: Failures | None, devices: Devices, outcome: Outcome) -> jax.Array:
    """float []: the seconds of a synchronous round, which ends with the last report or with the deadline."""
    engine, state, N = moment.engine, moment.before, moment.num_clients
    assert state is not None
    reported = outcome.clients.id < N
    time = seconds(engine, devices, state, outcome.clients)
    slowest = jnp.where(reported, time, 0).max()
    if failures is None or failures.deadline is None:
        return slowest
    expected = moment.cohort_size if engine.over_selects else (outcome.drawn < N).sum()
    return jnp.where(reported.sum() < expected, failures.deadline, slowest)
