"""The mesh of devices and the arrays on it.

The mesh has one axis, "clients". The cohort is sharded over this axis. If several devices train a client together, the
mesh has a second axis, "model", and the devices with the same index on the first axis are a team. Frozen parameters
and client states are sharded over a team. All other arrays are replicated in a team. `put` and `copied` place arrays on
the devices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from fedjax_drift import checks, spec
from fedjax_drift.spec import Count, Fix, checked
from fedjax_drift.types import PyTree

AXIS, MODEL_AXIS = "clients", "model"  # the axis of the teams, and that of the devices of a team
TILE = 128  # the places of the last axis in a tile of a TPU


def _devices(name: str, devices: Any, fix: str) -> list[jax.Device]:
    several = list(devices.flat) if isinstance(devices, np.ndarray) else devices
    if not isinstance(several, Sequence) or not several:
        checks.refuse(f"{name} must be a list of JAX devices", checks.shown(devices), "jax.devices()")
    return [checks.instance(f"each of {name}", device, jax.Device, fix) for device in several]


Devices = Annotated[Sequence[jax.Device], spec.Spec(_devices, "devices"), Fix("jax.devices() lists all devices")]


@checked
def clients_mesh(devices: Devices | None = None, devices_per_client: Count = 1) -> Mesh:
    """Returns a mesh over ``devices`` with the axis "clients".

    Args:
      devices: a sequence of JAX devices. Default: all devices, including those of other processes.
      devices_per_client: the number of devices that train a client together, as in `Placement`. If it is larger than 1,
        the mesh has a second axis of this length, "model".

    Raises:
      ValueError: the number of devices is not a multiple of ``devices_per_client``.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) % devices_per_client:
        checks.refuse(f"devices_per_client must divide the number of devices, {len(devices)}", devices_per_client)
    if devices_per_client == 1:
        return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    shape, axes = (len(devices) // devices_per_client, devices_per_client), (AXIS, MODEL_AXIS)
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2, devices=devices)


def any_device() -> AbstractMesh:
    """A mesh of one abstract device, which stands for any device."""
    return AbstractMesh((1,), (AXIS,), axis_types=(AxisType.Auto,))


def num_teams(mesh: Mesh | AbstractMesh) -> int:
    """D, the length of the axis "clients": the number of teams, which is that of the devices unless teams are larger.

    Elsewhere in this package, "device" means a team.
    """
    return mesh.shape[AXIS]


def team_size(mesh: Mesh) -> int:
    """The number of devices that train a client together."""
    return mesh.shape.get(MODEL_AXIS, 1)


def over_team(shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """How a parameter of this shape is sharded over a team: along the longer one of its last two axes.

    Biases and other arrays with one axis are replicated, as are those whose axes are not multiples of the team's size.
    The leading axes of stacked matrices stay whole, because a loop runs over them.
    """
    size = team_size(mesh)
    axes = [i for i in range(len(shape))[-2:] if shape[i] % size == 0]
    if size == 1 or len(shape) < 2 or not axes:
        return PartitionSpec()
    chosen = max(axes, key=lambda i: (shape[i], i))
    return PartitionSpec(*[MODEL_AXIS if i == chosen else None for i in range(len(shape))])


def use_cpu_devices(n: int | None = None) -> int:
    """Makes JAX use ``n`` CPU devices, and returns n.

    On a CPU, training is fastest with one client per core, each on its own device. Call this function before JAX is
    used. It has no effect on accelerators.

    Args:
      n: number of CPU devices, in 1..256. Default: one per core that this process may use.

    Raises:
      RuntimeError: JAX has already started its backend with another number. Nothing is changed then. A second call with
        the same n has no effect, so a cell of a notebook can be run again.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n = cores if n is None else n
    n = checks.integer("n", n, 1, 256, f"this process may use {cores} cores")
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError as error:
        raise RuntimeError(
            f"use_cpu_devices({n}) must be called before JAX starts its backend: move it to the top of the script, "
            "before any array is made (in a notebook: restart the kernel and run it first)"
        ) from error
    return n


def is_described(mesh: Mesh) -> bool:
    """Whether the devices are only described, so that programs can be compiled for them but not run."""
    return type(mesh.devices.flat[0].client).__name__ == "CompileOnlyPyClient"


def flat(x: np.ndarray, mesh: Mesh) -> np.ndarray:
    """The examples [M, ...] as the devices store them, [M, F]. On a TPU, F is padded to a multiple of 128.

    Then each example lies in one piece in the memory of a TPU. If images were not flattened, a round would first copy
    all of them, with the last axes padded to 128 places.
    """
    M, F = len(x), math.prod(x.shape[1:])
    padding = -F % TILE if mesh.devices.flat[0].platform == "tpu" else 0
    if is_described(mesh):  # only the shape is needed
        return np.broadcast_to(np.zeros((), x.dtype), (M, F + padding))
    x = x.reshape(M, F)
    return np.pad(x, ((0, 0), (0, padding))) if padding else x


def put(tree: PyTree, placement: Any) -> PyTree:
    """Returns the tree with its arrays placed on the devices.

    From a NumPy array or a memory map, a process only reads the shards of its own devices.

    If ``placement`` spans several processes, all of them must call this function. Their values must agree wherever
    their devices store the same shard. The processes do not communicate, unless an array already spans several
    processes and has a different sharding.

    placement: one sharding for all arrays, or a tree of shardings. If their devices are only described, the result has
      the shapes of the arrays.
    """
    if isinstance(placement, Sharding):
        placement = jax.tree.map(lambda _: placement, tree)
    shardings = jax.tree.leaves(placement)
    mesh = shardings[0].mesh if shardings and isinstance(shardings[0], NamedSharding) else None
    if isinstance(mesh, Mesh) and is_described(mesh):
        return shapes(tree, placement)
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(placement)):
        return jax.device_put(tree, placement)
    return jax.tree.map(_put_on_processes, tree, placement)


def shapes(tree: PyTree, placement: PyTree) -> PyTree:
    """The shapes and dtypes that the arrays of a tree have on devices, with the shardings ``placement``."""

    def shape(array: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)

    return jax.tree.map(shape, tree, placement)


def _put_on_processes(array: Any, placement: Sharding) -> jax.Array:
    """One array, placed on the devices of several processes."""
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable:
            return array if array.sharding == placement else jax.jit(lambda a: a, out_shardings=placement)(array)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            words = _put_on_processes(jax.random.key_data(array), placement)
            return jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(array)))
    array = array if isinstance(array, np.ndarray) else np.asarray(array)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.make_array_from_callback(array.shape, placement, lambda part: np.asarray(array[part], dtype))


def copied(tree: PyTree, placement: PyTree) -> PyTree:
    """Returns copies of arrays that already have the shardings ``placement``. A program may donate the copies."""
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(placement)):
        return jax.device_put(tree, placement, may_alias=False)
    return jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=placement)(tree)


def leaf_shardings(shardings: PyTree, tree: PyTree) -> PyTree:
    """The sharding of each leaf of the tree.

    shardings: a prefix of the tree whose leaves are shardings. Each sharding applies to all leaves below it.
    """
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), shardings, tree)
