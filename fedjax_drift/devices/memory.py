"""The memory of a device."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

import jax
from jax.sharding import Mesh

from fedjax_drift.devices import gpus
from fedjax_drift.devices.mesh import is_described
from fedjax_drift.devices.processes import agree, spans_processes

# GiB of a TPU chip that is only described. From the documentation of Cloud TPU.
TPUS = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32}
UNKNOWN = 2**31 - 1  # replaces math.inf when processes send a number of megabytes as an int32


def out_of_memory(error: Exception) -> bool:
    """Whether a program does not fit in the memory of a device."""
    return "RESOURCE_EXHAUSTED" in str(error)


def memory_of(mesh: Mesh) -> float:
    """The memory of one device of the mesh in bytes, or inf if it is unknown.

    On a CPU, the memory of the machine, or of the container, is divided equally among the devices of this process. With
    several processes, all of them get the value of the first process, rounded down to megabytes (2**20 bytes).
    """
    if is_described(mesh):
        kind = mesh.devices.flat[0].device_kind
        return gpus.MEMORY[kind] * gpus.share_of_jax() if kind in gpus.MEMORY else TPUS.get(kind, math.inf) * 2**30
    return _memory_of_first(mesh) if spans_processes(mesh) else _local_memory(mesh)


@cache
def _memory_of_first(mesh: Mesh) -> float:
    (megabytes,), _ = agree(mesh, [int(min(_local_memory(mesh) // 2**20, UNKNOWN))])
    return math.inf if megabytes == UNKNOWN else megabytes * 2.0**20


def _local_memory(mesh: Mesh) -> float:
    """The memory of one of this process's devices in bytes."""
    device: jax.Device = mesh.local_devices[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", math.inf)
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return math.inf
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, container_memory()) / len(mesh.local_devices)


def container_memory(root: Path = Path("/")) -> float:
    """The memory limit of this process's control groups in bytes, or inf without a limit.

    On Linux, containers and SLURM jobs set such limits. root: the root folder. Tests use a different one.
    """
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return math.inf
    limit = math.inf
    for _, controllers, path in groups:
        if controllers == "":  # version 2: one tree for all controllers
            tree, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):  # version 1: a tree for each controller
            tree, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = tree / path.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(tree.parts)]):  # the parents' limits apply too
            try:
                limit = min(limit, int((folder / file).read_text()))
            except (OSError, ValueError):  # no file, or "max"
                continue
    return limit
