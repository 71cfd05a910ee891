"""Devices: one mesh axis, "clients", over which cohorts are spread, and how arrays get there."""

from __future__ import annotations

import math
import os
import platform
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.types import PyTree

AXIS = "clients"  # the one mesh axis


def clients_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over ``devices`` (default: all of them, also those of other processes) with the single axis "clients".

    Raises ValueError for anything else than devices.
    """
    if devices is None:
        devices = jax.devices()
    several = list(devices.flat) if isinstance(devices, np.ndarray) else devices
    if not isinstance(several, Sequence) or not several:
        raise ConfigurationError(f"devices must be one or more of jax.devices(), got {checks.shown(devices)}")
    fix = "jax.devices() lists them"
    devices = [checks.instance("each of devices", device, jax.Device, fix) for device in several]
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def spans_processes(mesh: Mesh) -> bool:
    """Whether some of the mesh's devices belong to other processes."""
    return bool(mesh.is_multi_process)


def leads(mesh: Mesh) -> bool:
    """Whether this process is the one of the mesh that speaks for all: it has the first device."""
    return mesh.devices.flat[0].process_index == jax.process_index()


def put(tree: PyTree, placement: Any) -> PyTree:
    """The tree's arrays where they belong; of NumPy arrays and memory maps a process reads only what its devices hold.

    placement: one sharding, or a tree of them. Where it spans several processes, all of them call this with the same
    values (of those parts that they hold), and nothing is sent: except for an array that spans them already.
    """
    if isinstance(placement, Sharding):
        placement = jax.tree.map(lambda _: placement, tree)
    if all(at.is_fully_addressable for at in jax.tree.leaves(placement)):
        return jax.device_put(tree, placement)
    return jax.tree.map(_put, tree, placement)


def leaf_shardings(shardings: PyTree, tree: PyTree) -> PyTree:
    """The sharding of each leaf of the tree, where ``shardings`` has one for each of its parts."""
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), shardings, tree)


def _put(array: Any, placement: Sharding) -> jax.Array:
    """One array, over several processes."""
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable:
            return array if array.sharding == placement else jax.jit(lambda a: a, out_shardings=placement)(array)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            words = _put(jax.random.key_data(array), placement)
            return jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(array)))
    array = array if isinstance(array, np.ndarray) else np.asarray(array)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.make_array_from_callback(array.shape, placement, lambda part: np.asarray(array[part], dtype))


def copied(tree: PyTree, placement: PyTree) -> PyTree:
    """Copies of the tree's arrays, which are there already, that a program may overwrite."""
    if all(at.is_fully_addressable for at in jax.tree.leaves(placement)):
        return jax.device_put(tree, placement, may_alias=False)
    return jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=placement)(tree)


def agree(mesh: Mesh, led: Sequence[int] = (), asked: Sequence[bool] = ()) -> tuple[Sequence[int], Sequence[bool]]:
    """What all processes of the mesh go by: the first one's numbers ``led``, and what any of them has ``asked`` for.

    For what clocks and signals decide. led: int32. In one process what was given. Over several they exchange a few
    bytes, after the programs before it, so all of them have to call this at the same place.
    """
    if not spans_processes(mesh):
        return led, asked
    mine = np.array([[*led, *asked]], np.int32)
    parts = NamedSharding(mesh, P(AXIS))
    said = jax.make_array_from_callback((mesh.size, mine.size), parts, lambda part: mine)
    everyone: Any = np.asarray(launch(mesh, _gather_to_all(mesh), said))  # [D, ...]
    return everyone[0, : len(led)].tolist(), everyone[:, len(led) :].any(0).tolist()


def first_does(mesh: Mesh, call: Callable[[], Any]) -> None:
    """The first process of the mesh calls ``call()`` once all have come here, and they go on when it has.

    A ValueError or OSError that it raises there is a ValueError in all.
    """
    agree(mesh)
    wrong: Exception | None = None
    if leads(mesh):
        try:
            call()
        except (ValueError, OSError) as error:
            wrong = error
    _, (stopped,) = agree(mesh, asked=[wrong is not None])
    if wrong is not None:
        raise wrong
    if stopped:
        raise ConfigurationError("the first process can't go on: it says why")


@cache
def _gather_to_all(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda parts: parts, out_shardings=NamedSharding(mesh, P()))


_launched: list[jax.Array] = []  # one output of the last program that `launch` started


def wait_for_turn(mesh: Mesh) -> None:
    """Waits, on several CPU devices, until the program that `launch` started last has ended.

    There, programs that wait for each other's part of a sum hold threads, and XLA aborts the process once none is left,
    which a loop over a thousand short rounds brings about. An accelerator has a queue for each device.
    """
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        for array in _launched:
            with suppress(jax.errors.JaxRuntimeError):  # of a program that failed: whoever reads its outputs sees that
                if not array.is_deleted():
                    array.block_until_ready()
        _launched.clear()


def launch(mesh: Mesh, program: Callable, *arguments: Any) -> Any:
    """``program(*arguments)``, in its turn."""
    wait_for_turn(mesh)
    outputs = program(*arguments)
    if not traced((arguments, outputs)):
        _launched[:] = [min(jax.tree.leaves(outputs), key=lambda leaf: leaf.size)]
    return outputs


def traced(tree: Any) -> bool:
    """Whether any leaf is a tracer: of `jax.jit`, `jax.vmap`, ..."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def use_cpu_devices(n: int | None = None) -> int:
    """Gives JAX ``n`` CPU devices, by default one for each core this process may use; returns n.

    On a CPU one client per core trains fastest, each on a device of its own. Call it before JAX computes anything: a
    RuntimeError says so otherwise (nothing is changed then). Without effect on accelerators.
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


def use_compilation_cache(path: str | os.PathLike | None = None) -> str:
    """Keeps compiled programs in a folder, so that a later process starts without compiling them again; returns it.

    path: default a folder in `$FEDJAX_DRIFT_CACHE`, or in ``~/.cache/fedjax_drift``, one for each kind of processor.
    Call it before the first round. Raises OSError if the folder cannot be made.
    """
    chosen = files.cache_dir() / f"xla-{_processor()}" if path is None else checks.path("path", path)
    folder = str(chosen.expanduser())
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder


def memory_of(mesh: Mesh) -> float:
    """Bytes that one device of the mesh has; a CPU device has its share of the machine's. inf where unknown.

    Over several processes it is what the first one finds, rounded down to megabytes.
    """
    return _led_memory(mesh) if spans_processes(mesh) else _local_memory(mesh)


@cache
def _led_memory(mesh: Mesh) -> float:
    (megabytes,), _ = agree(mesh, [int(min(_local_memory(mesh) // 2**20, UNKNOWN))])
    return math.inf if megabytes == UNKNOWN else megabytes * 2.0**20


UNKNOWN = 2**31 - 1  # megabytes


def _local_memory(mesh: Mesh) -> float:
    """Of one of this process's devices."""
    device = mesh.local_devices[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", math.inf)
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return math.inf
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, container_memory()) / len(mesh.local_devices)


def container_memory(root: Path = Path("/")) -> float:
    """Bytes that this process's control groups allow it (Linux: a container, a job of SLURM); inf without a limit."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return math.inf
    limit = math.inf
    for _, controllers, path in groups:
        if controllers == "":  # version 2: one tree
            tree, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):  # version 1: a tree for each controller
            tree, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = tree / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.parts) - len(tree.parts)]):  # a limit above counts, too
            try:
                limit = min(limit, int((folder / file).read_text()))
            except (OSError, ValueError):  # none, or "max"
                continue
    return limit


def _processor() -> str:
    """What compiled programs must not be mixed up between: a shared home may serve several kinds of machine."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"
