"""The state of a simulation before round 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.round.arrays import Arrays
from fedjax_drift.round.engine import Engine, initial_client, initial_server, moment, partitionable
from fedjax_drift.round.sources import functions_of
from fedjax_drift.types import Params, ServerState


@partitionable
def init(engine: Engine, key: jax.Array, params: Params | None, sizes: jax.Array) -> ServerState:
    """The state before round 0, from ``params`` or, by default, from the model's own initial parameters.

    sizes: int32 [N], the numbers of examples of all clients.
    """
    init_key, round_key = keys_of(key)
    params = engine.model.init(init_key) if params is None else params
    client = initial_client(engine, params)
    clients = jax.tree.map(lambda c: jnp.broadcast_to(c, (engine.state_rows, *jnp.shape(c))), client)
    server, clients = jax.tree.map(tree.strip_weak_type, (initial_server(engine, params), clients))
    state = ServerState(jnp.zeros((), jnp.int32), round_key, server, clients)
    for source, start in functions_of(engine.sources, "init"):
        at = moment(engine, state, Arrays(None, None, sizes), source, round_key)
        of_source = jax.tree.map(tree.strip_weak_type, start(at))
        state = state.with_source(source.name, of_source)
    return state


@partitionable
def keys_of(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key of the initial parameters, and that of the state. key: that of `Simulation.init`."""
    init_key, round_key = jax.random.split(key)
    return init_key, round_key
