"""Reads the state of a client before it trains, and stores the new state.

- One device: a state is read and overwritten in place.
- Sharded over the devices: before a group trains, a ring (exchange.py) brings each state to the device that trains its
  client. Afterwards, a ring brings the new states back. A device holds two buffers for one group.
- Replicated on several devices: a state is read in place. The new states are kept until the whole cohort has trained,
  and are then sent to all devices. So the devices do not wait for each other after every group.

The shape [D, G, L] is D devices, G groups per device, and L clients per group that train side by side. In this file,
``place`` is the index of a client's state in `ServerState.clients` (`Client.place`). An absent client has a place
beyond the last state, and nothing is stored there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.round.engine import Engine, replicated
from fedjax_drift.round.exchange import collect, deliver, local_slice
from fedjax_drift.types import PyTree


def overwrites(engine: Engine) -> bool:
    """Whether a group's new states are stored before the next group trains (`store`), or all at the end (`scatter`)."""
    return engine.sharded or engine.mesh.size == 1


def fetch(engine: Engine, states: PyTree, places: jax.Array) -> PyTree:
    """The states of the clients that this device trains next, leaves [L, ...]. Each device calls it.

    The state of an absent client is arbitrary: that of client 0, or zeros if the states are sharded.

    states: the states on this device. places: int32 [D, L], those of the clients that all devices train next.
    """
    if not jax.tree.leaves(states):
        return states
    D, L = places.shape
    empty = jax.tree.map(lambda s: jnp.zeros((L, *s.shape[1:]), s.dtype), states)

    def add(buffer: PyTree, d: jax.Array) -> PyTree:
        """The buffer for device d after this device has added the states that it stores."""
        is_here, index = _find(engine, states, places[d])

        def leaf(buffer: jax.Array, s: jax.Array) -> jax.Array:
            return jnp.where(is_here.reshape(L, *(1,) * (s.ndim - 1)), s[index], buffer)

        return lax.cond(is_here.any(), lambda: jax.tree.map(leaf, buffer, states), lambda: buffer)

    # The branches make a copy of the states that they read. Without a branch, XLA may delay the reading until after
    # `store`, and then copies the states of all clients first. This is why there is a branch that is always taken.
    if engine.sharded:
        return collect(add, empty, D)
    own = places[0 if engine.mesh.size == 1 else lax.axis_index(AXIS)]
    _, index = _find(engine, states, own)
    return lax.cond((own >= 0).any(), lambda: jax.tree.map(lambda s: s[index], states), lambda: empty)


def store(engine: Engine, states: PyTree, places: jax.Array, new: PyTree) -> PyTree:
    """The states on this device after the clients at ``places`` have trained, if `overwrites`. Each device calls it.

    states, places: as for `fetch`. new: the new states of the clients that this device has trained, leaves [L, ...].
    """

    def stored(states: PyTree, new: PyTree, d: jax.Array | int) -> PyTree:
        is_here, index = _find(engine, states, places[d])
        return jax.tree.map(lambda s, n: s.at[jnp.where(is_here, index, len(s))].set(n, mode="drop"), states, new)

    return deliver(stored, states, new, len(places)) if engine.sharded else stored(states, new, 0)


def scatter(engine: Engine, states: PyTree, places: jax.Array, new: PyTree) -> PyTree:
    """All client states after storing ``new``, leaves [D, G, L, ...], at ``places`` [D, G, L]. Not if `overwrites`."""
    return jax.tree.map(lambda s, new: s.at[places].set(new, mode="drop"), states, replicated(engine, new))


def _find(engine: Engine, states: PyTree, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether this device has the states at ``places`` [L], and their indices on this device, 0 if it does not."""
    some = jax.tree.leaves(states)[0]
    if engine.sharded:
        return local_slice(some, places)
    is_here = places < len(some)
    return is_here, jnp.where(is_here, places, 0)
