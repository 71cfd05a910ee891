"""Virtual time, and the clients in flight: those that have started and not yet reported.

seconds      how long a client needs for a round
arrivals     the K clients that report next, and the rounds in which they started
as_started   what a client got when it started
restart      time goes on until the K-th report, and other clients start

The order of events depends on the speeds of the clients, not on what they have learned. So a client trains when it
reports, with what it got when it started, and one program runs the K clients of an update like those of a synchronous
round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.round.engine import Client, Engine, Shared, round_keys
from fedjax_drift.round.traffic import sent_and_received
from fedjax_drift.types import PyTree, ServerState

DEVICE_SPEEDS = 2**32 - 1  # fold_in(state.key, DEVICE_SPEEDS) is the key for the speeds of the clients' devices


class Slots(NamedTuple):
    """The clients in flight, and with ``starts="report"`` those that start in this round, [`Engine.slots`]. An empty
    slot has the id N."""

    id: jax.Array  # int32
    version: jax.Array  # int32, the round in which the client started
    wait: jax.Array  # float, the seconds until it reports; infinite for an empty slot


class VirtualClock(NamedTuple):
    """The field ``clock`` of a `ServerState`."""

    time: jax.Array  # float [], seconds since the first round began
    slots: Any = ()  # `Slots`; () if rounds are synchronous
    past: PyTree = ()
    """The server's variables at the beginning of the last R = max_staleness + 1 rounds, leaves [R, ...]. Those of round
    v are at v mod R. () if all clients start with the present ones."""


class Past(NamedTuple):
    """What `as_started` needs, the same for all clients."""

    servers: PyTree  # `VirtualClock.past`
    key: jax.Array  # that of the state


def keeps_past(engine: Engine) -> bool:
    """Whether clients may have started in an earlier round."""
    return engine.asynchronous and engine.slots != engine.cohort_size


def seconds(engine: Engine, state_key: jax.Array, server: PyTree, clients: Client) -> jax.Array:
    """float [C]: the virtual seconds that each client needs for a round."""
    devices = engine.devices
    assert devices is not None
    up, down = sent_and_received(engine, server)
    key = jax.random.fold_in(state_key, DEVICE_SPEEDS)
    z = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(clients.id)

    def of_clients(value: Any) -> jax.Array:
        value = jnp.asarray(value, float)
        return value.at[clients.id].get(mode="clip") if value.ndim else value

    computing = clients.steps * of_clients(devices.seconds_per_step) * jnp.exp(devices.speed_spread * z)
    return down / of_clients(devices.down) + computing + up / of_clients(devices.up)


def next_slots(engine: Engine, slots: Slots) -> jax.Array:
    """int32 [K]: the slots of the clients that report next, in the order of the slots. Of equals, the first."""
    return jnp.sort(jnp.argsort(slots.wait, stable=True)[: engine.cohort_size])


def arrivals(engine: Engine, state: ServerState) -> tuple[jax.Array, jax.Array]:
    """The ids int32 [K] of the clients that report in this round, and the rounds int32 [K] in which they started.

    The id is N if the update is too stale, or if fewer than K clients are in flight.
    """
    slots = state.clock.slots
    slot = next_slots(engine, slots)
    id_, version = slots.id[slot], slots.version[slot]
    return jnp.where(too_stale(engine, state, version), engine.num_clients, id_), version


def too_stale(engine: Engine, state: ServerState, version: jax.Array) -> jax.Array:
    return state.round - version > engine.clock.max_staleness


def with_start(engine: Engine, state: ServerState, cohort: Client) -> Client:
    """The clients of a round, with the round in which they started and the factor of their updates."""
    if not engine.asynchronous:
        return cohort
    _, version = arrivals(engine, state)
    discount = jax.vmap(engine.clock.discount)((state.round - version).astype(float))
    if discount.shape != version.shape:
        what = f"discount of the clock {engine.clock.name} must return a scalar"
        checks.refuse(what, f"the shape {[*discount.shape[1:]]}")
    return cohort._replace(version=version, discount=discount)


def as_started(engine: Engine, shared: Shared, client: Client) -> Shared:
    """What one client got when it started: the server's variables, the round, its learning rate and its key."""
    if not isinstance(shared.past, Past):
        return shared
    v = client.version
    assert v is not None
    server = jax.tree.map(lambda past: past[v % len(past)], shared.past.servers)
    _, key = round_keys(shared.past.key, v)
    return shared._replace(server=server, key=key, t=v, lr=engine.local.rate(v))


def mixed(engine: Engine, shared: Shared, started: Shared, message: PyTree) -> PyTree:
    """The message of one client. With ``mixes="models"`` it is the difference from the present model."""
    if engine.clock.mixes == "updates" or not isinstance(shared.past, Past):
        return message
    return jax.tree.map(lambda m, start, w: m + (start - w), message, started.server.params, shared.server.params)


def start_distances(engine: Engine, state: ServerState, version: jax.Array) -> jax.Array:
    """float [K]: ||w_t - w_v||, the distance of the present model from the one with which each client started."""
    if not keeps_past(engine):
        return jnp.zeros(version.shape, float)

    def distance(past: PyTree) -> jax.Array:
        difference = tree.subtract(past.params, state.server.params)
        return jnp.sqrt(tree.dot(difference, difference))

    distances = jax.lax.map(distance, state.clock.past)
    return distances[version % len(distances)]
