"""The virtual time that a client needs for a round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift.clock import Devices
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.traffic import exchanged, received, sent
from fedjax_drift.types import ServerState

DEVICE_SPEEDS = 2**32 - 1  # fold_in(state.key, DEVICE_SPEEDS) is the key for the speeds of the clients' devices


def seconds(engine: Engine, devices: Devices, state: ServerState, clients: Client) -> jax.Array:
    """float [C]: the virtual seconds that each client needs for the round after this state."""
    client = exchanged(engine, state.server)
    up, down = sent(engine, state, client), received(engine, state, client)
    key = jax.random.fold_in(state.key, DEVICE_SPEEDS)
    z = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(clients.id)

    def of_clients(value: Any) -> jax.Array:
        value = jnp.asarray(value, float)
        return value.at[clients.id].get(mode="clip") if value.ndim else value

    computing = clients.steps * of_clients(devices.seconds_per_step) * jnp.exp(devices.speed_spread * z)
    return down / of_clients(devices.down) + computing + up / of_clients(devices.up)
