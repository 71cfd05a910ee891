"""Stores training examples sharded over the devices, and exchanges them in every round. A row is one example.

- Parts: device d stores all rows of its clients, one client after the other. Every part is padded to R rows, so all
  parts together are [D * R, ...].
- Buffers: in a round, each device needs the rows of the clients that it trains, at most S rows.
- Ring: the buffer for device d starts at device d + 1 and visits all devices. Each device adds the rows that it stores.

A device holds two buffers and sends D - 1 buffers, for any cohort. Rows are copied and never summed, so they are
bitwise identical to the stored rows. Client states use the ring as well (client_states.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.data.reading import cut, source
from fedjax_drift.data.redeal import spans
from fedjax_drift.devices.mesh import AXIS, flat, is_described, num_teams, put
from fedjax_drift.types import PyTree


def back_and_forth(D: int, G: int, L: int) -> np.ndarray:
    """int [D, G, L]: assigns the places 0..D G L - 1 of a sorted list to D devices with G groups of L lanes.

    Groups of L consecutive places go to devices 0..D-1, then D-1..0, and so on, so that all devices get similar shares.
    """
    places = np.arange(G * D * L).reshape(G, D, L)
    places[1::2] = places[1::2, ::-1]
    return places.swapaxes(0, 1)


class Parts(NamedTuple):
    """The device that stores each client's rows."""

    clients: list[np.ndarray]  # for each device, the ids of its clients in ascending order
    offsets: np.ndarray  # int64 [N], index of client i's first row in the concatenation of all parts
    rows: int  # R, number of rows of each part, including padding


def parts(sizes: np.ndarray, D: int) -> Parts:
    """Assigns clients with ``sizes`` [N] rows to D devices.

    The total numbers of rows of two devices differ by at most the largest size.
    """
    N = len(sizes)
    order = np.argsort(-sizes, kind="stable")
    places = back_and_forth(D, -(-N // D), 1).reshape(D, -1)
    clients = [np.sort(order[line[line < N]]) for line in places]
    rows = max(int(sizes[ids].sum(dtype=np.int64)) for ids in clients)
    offsets = np.empty(N, np.int64)
    for d, ids in enumerate(clients):
        offsets[ids] = d * rows + np.cumsum(sizes[ids], dtype=np.int64) - sizes[ids]
    return Parts(clients, offsets, rows)


def place_parts(data: FederatedData, mesh: Mesh) -> tuple[Any, Any, Any, Any]:
    """Places the training examples on the devices.

    Returns the rows x [D * R, F] and y [D * R, ...], sharded over the devices; and offsets and sizes, int32 [N],
    replicated. If the devices are only described, the results are shapes.

    Each process reads only the rows that its devices store, from memory or from a memory-mapped file.
    """
    D, sizes = num_teams(mesh), data.sizes
    assigned = parts(sizes, D)
    R = assigned.rows

    def placed(array: np.ndarray, converted: Callable[[np.ndarray], np.ndarray]) -> Any:
        rows, one = source(array), converted(array[:1])
        dtype = jax.dtypes.canonicalize_dtype(one.dtype)

        def part(index: Any) -> np.ndarray:
            d = (index[0].start or 0) // R
            ids = assigned.clients[d]
            of_device = converted(cut(rows, data.offsets[ids], sizes[ids], assigned.offsets[ids] - d * R, R))
            return of_device.astype(dtype, copy=False)

        shape, sharding = (D * R, *one.shape[1:]), NamedSharding(mesh, P(AXIS))
        if is_described(mesh):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return jax.make_array_from_callback(shape, sharding, part)

    offsets, replicated_sizes = put((assigned.offsets.astype(np.int32), sizes), NamedSharding(mesh, P()))
    return placed(data.x, partial(flat, mesh=mesh)), placed(data.y, integers_as_int32), offsets, replicated_sizes


def rows_by_rank(sizes: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """int64 [N]: for each rank p, an upper bound on the rows of the client at rank p of any cohort.

    The rank of a client is its position when the clients are sorted by steps, in descending order. If the client at
    rank p of the whole federation has s steps, the client at rank p of a cohort has at most s steps. So it has at most
    as many rows as the largest client of the federation that has s steps.
    """
    _, of_steps = np.unique(steps, return_inverse=True)
    most = np.zeros(of_steps.max() + 1, np.int64)
    np.maximum.at(most, of_steps, sizes)
    return np.sort(most[of_steps])[::-1]


def longest_share(by_rank: np.ndarray, D: int, G: int, L: int) -> int:
    """S: an upper bound on the rows that one device needs for a cohort of up to D G L clients.

    by_rank: the result of `rows_by_rank`.
    """
    most = np.zeros(D * G * L, np.int64)
    K = min(len(by_rank), len(most))
    most[:K] = by_rank[:K]
    return int(most[back_and_forth(D, G, L)].sum((1, 2)).max())


def local_slice(length: int, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Translates indices of a sharded array to indices of this device's part.

    length: that of a part. places: indices of the whole array. Returns whether each of them lies in the part, bool; and
    its index in the part, 0 if it lies outside.
    """
    index = places - lax.axis_index(AXIS) * length
    is_here = (index >= 0) & (index < length)
    return is_here, jnp.where(is_here, index, 0)


def exchange(stored: PyTree, sizes: jax.Array, offsets: jax.Array, length: int) -> tuple[PyTree, jax.Array]:
    """Sends every device the rows of the clients that it trains. Each device calls this function, in `jax.shard_map`.

    Args:
      stored: the rows that this device stores, leaves [R, ...].
      sizes, offsets: int32 [D, C], the number of rows and the index of the first row of the C clients that each device
        trains. The arrays are the same on all devices. The indices refer to the concatenation of all parts.
      length: S, at least the number of rows that any device needs.

    Returns:
      - The rows of the clients that this device trains, one client after the other, then zeros, leaves [S, ...].
      - The index of each client's first row in the buffer of its device, int32 [D, C].
    """
    totals = sizes.sum(1)

    def add(buffer: PyTree, d: jax.Array) -> PyTree:
        """The buffer for device d after this device has added its rows."""
        rows = jnp.where(jnp.arange(length) < totals[d], spans(offsets[d], sizes[d], length), -1)

        def leaf(buffer: jax.Array, part: jax.Array) -> jax.Array:
            is_here, index = local_slice(len(part), rows)
            return jnp.where(is_here.reshape(-1, *(1,) * (part.ndim - 1)), part[index], buffer)

        return jax.tree.map(leaf, buffer, stored)

    empty = jax.tree.map(lambda a: jnp.zeros((length, *a.shape[1:]), a.dtype), stored)
    return collect(add, empty, len(sizes)), jnp.cumsum(sizes, 1) - sizes


def collect(add: Callable[[PyTree, jax.Array], PyTree], empty: PyTree, D: int) -> PyTree:
    """This device's buffer, after it has visited all D devices.

    ``add(buffer, d)`` returns the buffer for device d after this device has added what it stores. A buffer visits its
    own device last.
    """
    device = lax.axis_index(AXIS)

    def step(j: jax.Array, buffer: PyTree) -> PyTree:
        return _to_next(add(buffer, (device - 1 - j) % D), D)

    return add(lax.fori_loop(0, D - 1, step, empty), device)


def deliver(store: Callable[[PyTree, PyTree, jax.Array], PyTree], stored: PyTree, buffer: PyTree, D: int) -> PyTree:
    """What this device stores, after the buffers of all D devices have visited it.

    ``store(stored, buffer, d)`` returns what this device stores after it has copied its entries from the buffer of
    device d. A buffer visits its own device first.
    """
    device = lax.axis_index(AXIS)

    def step(j: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        stored, buffer = carry
        return store(stored, buffer, (device - j) % D), _to_next(buffer, D)

    stored, last = lax.fori_loop(0, D - 1, step, (stored, buffer))
    return store(stored, last, (device + 1) % D)


def _to_next(buffer: PyTree, D: int) -> PyTree:
    return lax.ppermute(buffer, AXIS, [(d, (d + 1) % D) for d in range(D)])
