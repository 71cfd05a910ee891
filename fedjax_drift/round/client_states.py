"""Reads the client states of a cohort, and stores the new states.

Replicated states are read in place. If the states are sharded over the devices, each state is sent to the device that
trains its client, and the new state is sent back. Both use a ring (exchange.py), so a device holds two buffers with the
states of the clients that it trains, and never those of the whole cohort.

The shape [D, G, L] is D devices, G groups per device, and L clients per group that train side by side. In this file,
``place`` is the index of a client's state in `ServerState.clients` (`Client.place`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fedjax_drift import tree
from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.round.engine import Client, Engine, Shared, on_each_device, replicated
from fedjax_drift.round.exchange import collect, deliver, local_slice
from fedjax_drift.types import PyTree


def gather(engine: Engine, states: PyTree, places: jax.Array) -> PyTree:
    """Sends the sharded states at ``places`` [D, G, L] to the devices that train the clients.

    Returns the states, leaves [D, G, L, ...], sharded over the devices. Replicated states are not copied: the result is
    (), and `state_of` reads a client's state when the client trains.
    """
    if not engine.sharded:
        return ()

    def one_device(states: PyTree, places: jax.Array) -> PyTree:
        """states: the states stored on this device. places: the places of the clients of all devices."""
        D, G, L = places.shape

        def add(buffer: PyTree, d: jax.Array) -> PyTree:
            def leaf(buffer: jax.Array, s: jax.Array) -> jax.Array:
                is_here, index = local_slice(s, places[d])
                return jnp.where(is_here.reshape(G, L, *(1,) * (s.ndim - 1)), s[index], buffer)

            return jax.tree.map(leaf, buffer, states)

        empty = jax.tree.map(lambda s: jnp.zeros((G, L, *s.shape[1:]), s.dtype), states)
        return jax.tree.map(lambda a: a[None], collect(add, empty, D))

    return on_each_device(engine, one_device, (P(AXIS), P()), P(AXIS))(states, places)


def state_of(engine: Engine, shared: Shared, client: Client, gathered: PyTree) -> PyTree:
    """The state of one client: ``gathered`` if the states are sharded, otherwise its row of the replicated states."""
    if engine.sharded:
        return gathered
    return jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, client.place, keepdims=False), shared.states)


def scatter(engine: Engine, states: PyTree, places: jax.Array, new: PyTree) -> PyTree:
    """Returns all client states after storing ``new``, leaves [D, G, L, ...], at ``places`` [D, G, L].

    Places beyond the last state are ignored.
    """
    if not engine.sharded:
        return jax.tree.map(lambda s, new: s.at[places].set(new, mode="drop"), states, replicated(engine, new))

    def one_device(states: PyTree, places: jax.Array, new: PyTree) -> PyTree:
        """states: the states stored on this device. new: those of the clients that this device has trained."""

        def store(states: PyTree, buffer: PyTree, d: jax.Array) -> PyTree:
            def leaf(s: jax.Array, new: jax.Array) -> jax.Array:
                is_here, index = local_slice(s, places[d])
                return s.at[jnp.where(is_here, index, len(s))].set(new, mode="drop")

            return jax.tree.map(leaf, states, buffer)

        return deliver(store, states, jax.tree.map(lambda a: a[0], new), len(places))

    return on_each_device(engine, one_device, (P(AXIS), P(), P(AXIS)), P(AXIS))(states, places, new)


def finish(function: Callable[[Any, PyTree], PyTree], server: Any, answered: jax.Array, states: PyTree) -> PyTree:
    """Replaces the states of the aggregated clients by ``function(server, state)``.

    Returns all states [D, G, L, ...].
    """

    def one(answered: jax.Array, state: PyTree) -> PyTree:
        finished = tree.cast_like(function(server, state), state, "a client's finished state")
        return tree.select(answered, finished, state)

    return jax.vmap(jax.vmap(jax.vmap(one)))(answered, states)
