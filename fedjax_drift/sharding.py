"""Devices: one mesh axis, "clients", over which cohorts are spread."""

from __future__ import annotations

import math
import os
import platform
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.engine import AXIS


def clients_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over ``devices`` (default: all local ones) with the single axis "clients"."""
    devices = jax.local_devices() if devices is None else list(devices)
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


_launched: list[jax.Array] = []  # one output of the last program that `launch` started


def wait_for_turn(mesh: Mesh) -> None:
    """Waits, on several CPU devices, until the program that `launch` started last has ended.

    There, programs that wait for each other's part of a sum hold threads, and XLA aborts the process once none is left,
    which a loop over a thousand short rounds brings about. An accelerator has a queue for each device.
    """
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        for array in _launched:
            if not array.is_deleted():
                array.block_until_ready()


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
    checks.integer("n", n, 1, 256, f"this process may use {cores} cores")
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
    folder = os.path.expanduser(os.fspath(files.cache_dir() / f"xla-{_processor()}" if path is None else path))
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder


def memory_of(mesh: Mesh) -> float:
    """Bytes that one device of the mesh has; a CPU device has its share of the machine's. inf where unknown."""
    device = mesh.devices.flat[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", math.inf)
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size


def _processor() -> str:
    """What compiled programs must not be mixed up between: a shared home may serve several kinds of machine."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"
