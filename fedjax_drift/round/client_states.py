"""Reads the state of a client before it trains, and stores the new state.

- One device: a state is read and overwritten in place.
- Sharded over the devices: before a group trains, a ring (exchange.py) brings each state to the device that trains its
  client. Afterwards, a ring brings the new states back. A device holds two buffers for one group.
- Replicated on several devices: a state is read in place. The new states are kept until the whole cohort has trained,
  and are then sent to all devices. So the devices do not wait for each other after every group.

In this file, ``place`` is the index of a client's state in `ServerState.clients` (`Client.place`). An absent client has
a place beyond the last state, and nothing is stored there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.devices.mesh import AXIS, num_teams
from fedjax_drift.round.engine import Engine, replicated
from fedjax_drift.round.exchange import collect, deliver, local_slice
from fedjax_drift.types import PyTree


def overwrites(engine: Engine) -> bool:
    """Whether a group's new states are stored before the next group trains (`store`), or all at the end (`scatter`)."""
    return engine.sharded or num_teams(engine.mesh) == 1


def fetch(engine: Engine, states: PyTree, places: jax.Array) -> PyTree:
    """The states of the clients that this device trains next, leaves [L, ...]. Each device calls it.

    An absent client gets the last state, or zeros if the states are sharded.

    states: the states on this device. places: int32 [D, L], those of the clients that all devices train next.
    """
    D, L = places.shape
    empty = jax.tree.map(lambda s: jnp.zeros((L, *s.shape[1:]), s.dtype), states)
    # Branches make a copy of the states that they read. Without a branch, XLA may delay the reading until after
    # `store`, and then copies the states of all clients first.
    if not engine.sharded:
        local = places[0 if num_teams(engine.mesh) == 1 else lax.axis_index(AXIS)]
        always = (local >= 0).any()  # XLA does not know this, so the branch stays
        return lax.cond(always, lambda: jax.tree.map(lambda s: s.at[local].get(mode="clip"), states), lambda: empty)

    def add(buffer: PyTree, d: jax.Array) -> PyTree:
        """The buffer for device d after this device has added the states that it stores."""
        is_here, index = local_slice(engine.state_rows // D, places[d])

        def leaf(buffer: jax.Array, s: jax.Array) -> jax.Array:
            return jnp.where(is_here.reshape(L, *(1,) * (s.ndim - 1)), s[index], buffer)

        return lax.cond(is_here.any(), lambda: jax.tree.map(leaf, buffer, states), lambda: buffer)

    return collect(add, empty, D)


def after_reading(places: jax.Array, old: PyTree, new: PyTree) -> PyTree:
    """``new``, as a function of ``old``: so XLA reads a client's old state before it overwrites it.

    A new state need not depend on the old one (FedVARP, MIFA). XLA may then overwrite first, and copies the states of
    all clients before that, for every client. places, old: as for `fetch`, and what it has returned.
    """
    always = (places >= 0).any()  # XLA does not know this, so the selection stays
    return jax.tree.map(lambda old, new: jnp.where(always, new, old), old, new)


def store(engine: Engine, states: PyTree, places: jax.Array, new: PyTree) -> PyTree:
    """The states on this device after the clients at ``places`` have trained, if `overwrites`. Each device calls it.

    states, places: as for `fetch`. new: the new states of the clients that this device has trained, leaves [L, ...].
    """
    if not engine.sharded:
        return _set(states, places[0], new)

    def stored(states: PyTree, new: PyTree, d: jax.Array) -> PyTree:
        is_here, index = local_slice(engine.state_rows // len(places), places[d])
        return _set(states, jnp.where(is_here, index, engine.state_rows), new)

    return deliver(stored, states, new, len(places))


def scatter(engine: Engine, states: PyTree, places: jax.Array, new: PyTree) -> PyTree:
    """All client states after storing ``new``, leaves [D, G, L, ...], at ``places`` [D, G, L]. Not if `overwrites`."""
    return _set(states, places, replicated(engine, new))


def _set(states: PyTree, places: jax.Array, new: PyTree) -> PyTree:
    """The states after storing ``new`` at ``places``. Places beyond the last state are ignored."""
    return jax.tree.map(lambda s, new: s.at[places].set(new, mode="drop"), states, new)
