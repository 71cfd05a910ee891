"""Places: which device, group and lane trains a client of the cohort.

A device has G groups of L lanes. It trains the groups one after another, and the L clients of a group side by side. The
shape [D, G, L] has one place per client. An absent client is a placeholder with id N and without examples.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift.devices.mesh import num_teams
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.exchange import back_and_forth
from fedjax_drift.round.sources import absent_like


def at_places(engine: Engine, clients: Client, steps: jax.Array) -> tuple[jax.Array, jax.Array, Client]:
    """Assigns the cohort to the places [D, G, L]. ``steps`` [K] are the local steps of the clients.

    The cohort is sorted by local steps, in descending order, so that the L clients of a group finish together. The
    groups are assigned to the devices 0..D-1, then D-1..0, and so on, so that the devices finish together.

    Returns the position in the cohort of the client at each place, int32 [D, G, L]; whether each place is empty, bool
    [D, G, L]; and the client at each place, [D, G, L]. Empty places have absent clients.
    """
    K, D, L = len(steps), num_teams(engine.mesh), engine.lanes
    places = back_and_forth(D, -(-K // (D * L)), L)
    order, empty = jnp.argsort(-steps, stable=True)[np.minimum(places, K - 1)], jnp.asarray(places >= K)
    none = absent_like(clients, engine.num_clients)
    placed = jax.tree.map(lambda none, a: jnp.where(empty, none, a[order]), none, clients)
    return order, empty, placed


def in_cohort_order(K: int, order: jax.Array, empty: jax.Array, values: jax.Array) -> jax.Array:
    """The inverse of `at_places`, which returns ``order`` and ``empty``: values [D, G, L, ...] at places -> [K, ...],
    in the order of the cohort."""
    places = jnp.where(empty, K, order)
    return jnp.zeros((K, *values.shape[3:]), values.dtype).at[places].set(values, mode="drop")
