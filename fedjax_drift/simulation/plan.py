"""What a round needs on its devices, from the compiled program. The devices need not exist (`devices.described`)."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from typing import NamedTuple

import jax

from fedjax_drift.devices.memory import memory_of
from fedjax_drift.devices.mesh import leaf_shardings, shapes
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.simulation.programs import Programs
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.types import PyTree

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
GIB = 2**30


class Plan(NamedTuple):
    """What one round needs on each device. All sizes are in bytes."""

    devices: str
    """The devices, for example "16 x TPU v5 lite on 4 hosts"."""
    lanes: int
    """L, the number of clients that one device trains side by side."""
    examples: int
    """The examples of the clients, and their sizes."""
    client_states: int
    arguments: int
    """All arguments of the program: the examples, the client states and the server's variables, as the compiler stores
    them (a TPU pads arrays to whole tiles)."""
    results: int
    """The results of the program that do not overwrite its arguments."""
    temporary: int
    """The memory that the program needs while it runs, in addition to its arguments and results."""
    memory: float
    """The memory of one device; inf if it is unknown."""
    collectives: dict[str, int]
    """How often each kind of collective operation occurs in the program."""
    sent: dict[str, int]
    """The bytes that devices exchange in a round, as in `Simulation.communication`."""
    compile_seconds: float

    @property
    def total(self) -> int:
        """The bytes that one device needs."""
        return self.arguments + self.results + self.temporary

    @property
    def fits(self) -> bool:
        """Whether a round fits in the memory of a device."""
        return self.total <= self.memory

    def __str__(self) -> str:
        of = "" if math.isinf(self.memory) else f" of {self.memory / GIB:.1f} GiB"
        rows = {
            "devices": self.devices,
            "lanes": str(self.lanes),
            "examples": _gib(self.examples),
            "client states": _gib(self.client_states),
            "arguments, as stored": _gib(self.arguments),
            "results": _gib(self.results),
            "temporary": _gib(self.temporary),
            "total on each device": f"{_gib(self.total)}{of}: {'fits' if self.fits else 'does not fit'}",
            "collectives": ", ".join(f"{n} {name}" for name, n in self.collectives.items()) or "none",
            **{f"sent, {name}": _gib(n) for name, n in self.sent.items() if n},
            "compiled in": f"{self.compile_seconds:.0f} s",
        }
        return "\n".join(f"{name:22}{text}" for name, text in rows.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.3f} GiB" if size >= GIB / 1000 else f"{size / 2**20:.3f} MiB"


def plan_of(setup: Setup, programs: Programs, sent: dict[str, int]) -> Plan:
    """Compiles the round, and reports what it needs. See `Simulation.plan`."""
    if setup.needs_host:
        what = "the training examples" if setup.streamed else "the client states"
        raise ConfigurationError(
            f"a plan needs {what} on the devices, but they would be kept on the host: use more devices, or "
            f"{'stream=False' if setup.streamed else 'bank=' + repr('sharded')}"
        )
    state = shapes(setup.state, leaf_shardings(setup.shardings, setup.state))
    start = time.perf_counter()
    compiled = programs.lower("donating_round", state, setup.arrays, None).compile()
    seconds = time.perf_counter() - start
    memory, devices = compiled.memory_analysis(), setup.mesh.devices.flat
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text() or "")
    hosts = len({device.process_index for device in devices})
    return Plan(
        devices=f"{len(devices)} x {devices[0].device_kind}" + (f" on {hosts} hosts" if hosts > 1 else ""),
        lanes=setup.engine.lanes,
        examples=_bytes_on_one_device(setup.arrays.rows),
        client_states=_bytes_on_one_device(state.clients),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        memory=memory_of(setup.mesh),
        collectives=dict(Counter(found)),
        sent=sent,
        compile_seconds=seconds,
    )


def _bytes_on_one_device(tree: PyTree) -> int:
    """The bytes of arrays, or of shapes with shardings, on one device, without padding."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
