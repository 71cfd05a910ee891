"""The data set on the devices.

Simulations with the same `FederatedData` share the arrays on the devices. These arrays are freed
together with the `FederatedData`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.devices.mesh import AXIS, flat, num_teams, put
from fedjax_drift.round.arrays import Arrays, Rows, TestRows
from fedjax_drift.round.exchange import place_parts

_PLACED: WeakKeyDictionary[FederatedData, dict[tuple, Any]] = WeakKeyDictionary()


def place(
    data: FederatedData, mesh: Mesh, rows_at: str, eval_batch_size: int, shifted: bool, whole_test: bool = False
) -> Arrays:
    """Returns the data set on the devices of the mesh.

    rows_at: where the training examples are kept: "devices" (replicated), "parts" (sharded over the devices) or "host"
      (not placed on the devices, because they are streamed).
    shifted: whether a source of drift changes the examples.
    whole_test: whether the test set is replicated. By default its batches are sharded over the devices.
    """
    placed = _PLACED.setdefault(data.root, {})
    where = (mesh, jax.dtypes.canonicalize_dtype(np.float64))
    rows, sizes = (*where, rows_at), (*where, "sizes")
    test = (*where, eval_batch_size, whole_test, shifted)
    with jax.ensure_compile_time_eval():  # a Simulation made inside jax.jit must not leave tracers here
        if rows not in placed:
            placed[rows] = _place_rows(data, mesh, rows_at)
        if test not in placed:
            placed[test] = place_test(data, mesh, eval_batch_size, whole_test, shifted)
        if sizes not in placed:
            placed[sizes] = put(data.sizes, NamedSharding(mesh, P()))
    return Arrays(placed[rows], placed[test], placed[sizes])


def _place_rows(data: FederatedData, mesh: Mesh, rows_at: str) -> Rows | None:
    if rows_at == "host":
        return None
    if rows_at == "parts":
        return Rows(*place_parts(data, mesh))
    arrays = (flat(data.x, mesh), integers_as_int32(data.y), data.offsets.astype(np.int32), data.sizes)
    return Rows(*put(arrays, NamedSharding(mesh, P())))


def place_test(data: FederatedData, mesh: Mesh, eval_batch_size: int, whole: bool, shifted: bool) -> TestRows | None:
    """Returns the test set on the devices, see `place`."""
    if data.x_test is None or data.y_test is None:
        return None
    M, D = len(data.x_test), 1 if whole else num_teams(mesh)
    B = min(eval_batch_size, -(-M // D))
    T = -(-M // (B * D)) * D
    index = np.arange(T * B).reshape(T, B)
    padded = np.minimum(index, M - 1)
    arrays: tuple[np.ndarray, ...] = (data.x_test[padded], integers_as_int32(data.y_test)[padded], index < M)
    if shifted:
        arrays += (np.full((T, B), data.num_clients, np.int32), padded.astype(np.int32))
    return TestRows(*put(arrays, NamedSharding(mesh, P() if whole else P(AXIS))))
