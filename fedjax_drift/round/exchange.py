"""Rows cut over the devices: whole clients on one device each, and in a round each client's go where it trains.

    parts     device d has the rows of its clients, one after the other, and padding: together [D * R, ...]
    buffers   in a round each device needs those of the clients dealt to it, at most S rows, one client after the other
    ring      a buffer for device d starts behind it and goes around once; each device adds the rows that it has

A device holds two buffers and sends D - 1, whatever is asked. Rows are moved, never added: they arrive bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
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
from fedjax_drift.devices.mesh import AXIS, put
from fedjax_drift.types import PyTree


def back_and_forth(D: int, G: int, L: int) -> np.ndarray:
    """int [D, G, L]: places in a sorted line for L lanes on D devices; groups of L go to the devices back and forth, so
    that each gets about as much."""
    places = np.arange(G * D * L).reshape(G, D, L)
    places[1::2] = places[1::2, ::-1]
    return places.swapaxes(0, 1)


class Parts(NamedTuple):
    """Which device has which clients' rows."""

    clients: list[np.ndarray]  # of each device the ids of its clients, in order
    offsets: np.ndarray  # int64 [N], client i's first row among all parts, end to end
    rows: int  # R, of one part; the last ones are padding unless the part is the largest


def parts(sizes: np.ndarray, D: int) -> Parts:
    """Deals clients of ``sizes`` [N] rows to D devices, which then differ by at most the largest client's."""
    N = len(sizes)
    order = np.argsort(-sizes, kind="stable")
    places = back_and_forth(D, -(-N // D), 1).reshape(D, -1)
    clients = [np.sort(order[line[line < N]]) for line in places]
    rows = max(int(sizes[ids].sum(dtype=np.int64)) for ids in clients)
    offsets = np.empty(N, np.int64)
    for d, ids in enumerate(clients):
        offsets[ids] = d * rows + np.cumsum(sizes[ids], dtype=np.int64) - sizes[ids]
    return Parts(clients, offsets, rows)


def place_parts(data: FederatedData, mesh: Mesh) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows x, y [D * R, ...] on the devices that have them, offsets and sizes int32 [N] on all.

    Each process reads only its own clients' rows, from memory or from a memory-mapped file.
    """
    D, sizes = mesh.size, data.sizes
    dealt = parts(sizes, D)
    R = dealt.rows

    def placed(array: np.ndarray, converted: Callable[[np.ndarray], np.ndarray]) -> jax.Array:
        rows = source(array)

        def part(index: Any) -> np.ndarray:
            d = (index[0].start or 0) // R
            ids = dealt.clients[d]
            found = converted(cut(rows, data.offsets[ids], sizes[ids], dealt.offsets[ids] - d * R, R))
            return found.astype(jax.dtypes.canonicalize_dtype(found.dtype), copy=False)

        return jax.make_array_from_callback((D * R, *array.shape[1:]), NamedSharding(mesh, P(AXIS)), part)

    offsets, sizes_there = put((dealt.offsets.astype(np.int32), sizes), NamedSharding(mesh, P()))
    return placed(data.x, np.asarray), placed(data.y, integers_as_int32), offsets, sizes_there


def rows_by_rank(sizes: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """int64 [N]: the most rows that the client at each place of a cohort sorted by steps, most first, can have.

    At place p it takes no more steps than p others, so no more than the federation's client at place p; and it has no
    more rows than any client of as many steps.
    """
    _, of_steps = np.unique(steps, return_inverse=True)
    most = np.zeros(of_steps.max() + 1, np.int64)
    np.maximum.at(most, of_steps, sizes)
    return np.sort(most[of_steps])[::-1]


def longest_share(by_rank: np.ndarray, D: int, G: int, L: int) -> int:
    """S: the most rows that one device can be dealt, of a cohort of up to D G L clients."""
    most = np.zeros(D * G * L, np.int64)
    K = min(len(by_rank), len(most))
    most[:K] = by_rank[:K]
    return int(most[back_and_forth(D, G, L)].sum((1, 2)).max())


def local_slice(part: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which places of an array cut over the devices lie in this device's part, and where in it (0 for the others)."""
    at = places - lax.axis_index(AXIS) * len(part)
    here = (at >= 0) & (at < len(part))
    return here, jnp.where(here, at, 0)


def exchange(own: PyTree, sizes: jax.Array, offsets: jax.Array, length: int) -> tuple[PyTree, jax.Array]:
    """On each device of a mesh: the rows of the clients dealt to it, which other devices have.

    Args:
      own: this device's part of the rows, leaves [R, ...].
      sizes, offsets: int32 [D, C], of the clients dealt to each device, alike on all; offsets among all parts.
      length: S, no device is dealt more rows.

    Returns:
      leaves [S, ...], this device's clients' rows one after the other, then zeros; and int32 [D, C], where each
      client's begin in its device's.
    """
    D, me = len(sizes), lax.axis_index(AXIS)
    totals = sizes.sum(1)

    def add(buffer: PyTree, d: jax.Array) -> PyTree:
        """The buffer of device d with those of its rows that this device has."""
        rows = jnp.where(jnp.arange(length) < totals[d], spans(offsets[d], sizes[d], length), -1)

        def leaf(buffer: jax.Array, part: jax.Array) -> jax.Array:
            here, at = local_slice(part, rows)
            return jnp.where(here.reshape(-1, *(1,) * (part.ndim - 1)), part[at], buffer)

        return jax.tree.map(leaf, buffer, own)

    def step(j: jax.Array, buffer: PyTree) -> PyTree:
        onwards = [(d, (d + 1) % D) for d in range(D)]
        return lax.ppermute(add(buffer, (me - 1 - j) % D), AXIS, onwards)

    empty = jax.tree.map(lambda a: jnp.zeros((length, *a.shape[1:]), a.dtype), own)
    return add(lax.fori_loop(0, D - 1, step, empty), me), jnp.cumsum(sizes, 1) - sizes
