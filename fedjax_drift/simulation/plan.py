"""What a round needs on its devices, from the compiled program. The devices need not exist (`devices.described`)."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.devices.described import compiler_options
from fedjax_drift.devices.memory import memory_of, out_of_memory
from fedjax_drift.devices.mesh import leaf_shardings, num_teams, shapes, team_size
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.message import summed
from fedjax_drift.round.exchange import back_and_forth, longest_share
from fedjax_drift.simulation.program_text import collectives, cycles_of_loop
from fedjax_drift.simulation.programs import Programs
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.types import PyTree, ServerState

GIB = 2**30


class TooLargeError(ConfigurationError):
    """The compiler found that a round does not fit in the memory of a device."""


class Plan(NamedTuple):
    """What one round needs on each device. All sizes are in bytes.

    Attributes:
      devices: The devices, for example "16 x TPU v5 lite on 4 hosts".
      lanes: L, the number of clients that one device trains side by side.
      clients: The number of clients that one device trains in a round. More lanes have no use.
      most_lanes: The number of lanes that fit if the temporary memory grows in proportion to L, at most ``clients``.
      examples: The examples of the clients, and their sizes.
      frozen: The parameters of the model that are not trained (`fd.models.lora`).
      arguments: All arguments of the program: the examples, the client states, the frozen parameters and the server's
        variables, as the compiler stores them (a TPU pads arrays to whole tiles).
      results: The results of the program that do not overwrite its arguments.
      temporary: The memory that the program needs while it runs, in addition to its arguments and results.
      memory: The memory of one device; inf if it is unknown.
      collectives: How often each kind of collective operation occurs in the program.
      sent: The bytes that devices exchange in a round, as in `Simulation.device_traffic`.
      steps: The local steps that the busiest device does one after another in a round. With clients of different sizes,
        it is the number for a cohort whose sizes are spread evenly over those of all clients.
      cycles: The cycles of a local step of L clients, as estimated by XLA's compiler for a TPU; 0 for other devices.
        Operations for which the compiler has no estimate do not count.
    """

    devices: str
    lanes: int
    clients: int
    most_lanes: int
    examples: int
    client_states: int
    frozen: int
    arguments: int
    results: int
    temporary: int
    memory: float
    collectives: dict[str, int]
    sent: dict[str, int]
    steps: int
    cycles: int
    compile_seconds: float

    @property
    def total(self) -> int:
        """The bytes that one device needs."""
        return self.arguments + self.results + self.temporary

    @property
    def fits(self) -> bool:
        """Whether a round fits in the memory of a device."""
        return self.total <= self.memory

    def _most(self) -> str:
        if self.most_lanes < self.clients:
            return f"about {self.most_lanes} fit"
        return f"all {self.clients} clients of a device in a round would fit"

    def __str__(self) -> str:
        of = "" if math.isinf(self.memory) else f" of {self.memory / GIB:.1f} GiB"
        rows = {
            "devices": self.devices,
            "lanes": f"{self.lanes}; {self._most()}",
            "examples": _gib(self.examples),
            "client states": _gib(self.client_states),
            **({"frozen parameters": _gib(self.frozen)} if self.frozen else {}),
            "arguments, as stored": _gib(self.arguments),
            "results": _gib(self.results),
            "temporary": _gib(self.temporary),
            "total on each device": f"{_gib(self.total)}{of}: {'fits' if self.fits else 'does not fit'}",
            "collectives": ", ".join(f"{n} {name}" for name, n in self.collectives.items()) or "none",
            **{f"sent, {name}": _gib(n) for name, n in self.sent.items() if n},
            "local steps": f"{self.steps:,} in a round, each of {self.lanes} clients",
        }
        if self.cycles:
            a_round = self.cycles * self.steps
            rows["cycles"] = f"{self.cycles:,} a step, {a_round:.2e} a round (the compiler's estimate)"
        rows["compiled in"] = f"{self.compile_seconds:.0f} s"
        return "\n".join(f"{name:22}{text}" for name, text in rows.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.3f} GiB" if size >= GIB / 10 else f"{size / 2**20:.3f} MiB"


def plan_of(setup: Setup, programs: Programs, sent: dict[str, int]) -> Plan:
    """Compiles the round, and reports what it needs. See `Simulation.plan`."""
    if setup.needs_host:
        what = "the training examples" if setup.streamed else "the client states"
        fix = f"use more devices, or {'stream=False' if setup.streamed else 'bank=' + repr('sharded')}"
        checks.refuse(f"a plan needs {what} on the devices", "a simulation that keeps them on the host", fix)
    start = time.perf_counter()
    try:
        compiled = compiled_round(setup, programs)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        states = "" if setup.engine.sharded else ', bank="sharded"'
        raise TooLargeError(
            f"a round with lanes={setup.engine.lanes} does not fit in the memory of {_devices(setup)} "
            f"({checks.first_line(error).partition(': ')[2]}): use more devices{states} or fewer lanes"
        ) from error
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    lanes, available = setup.engine.lanes, memory_of(setup.mesh)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    left = available - memory.argument_size_in_bytes - results
    per_device = -(-setup.engine.most_clients // num_teams(setup.mesh))
    groups = -(-per_device // lanes)  # XLA removes loops of one iteration
    return Plan(
        devices=_devices(setup),
        lanes=lanes,
        clients=per_device,
        most_lanes=max(0, int(min(per_device, lanes * left / max(1, memory.temp_size_in_bytes)))),
        examples=_bytes_on_one_device(setup.arrays.rows),
        client_states=_bytes_on_one_device(_state(setup).clients),
        frozen=_bytes_on_one_device(programs.frozen),
        arguments=memory.argument_size_in_bytes,
        results=results,
        temporary=memory.temp_size_in_bytes,
        memory=available,
        collectives=collectives(text),
        sent=sent,
        steps=_steps(setup),
        cycles=cycles_of_loop(text, depth=(groups > 1) + (setup.engine.local.parts > 1)),
        compile_seconds=seconds,
    )


def compiled_round(setup: Setup, programs: Programs) -> Any:
    """Compiles the round, for the devices of the setup."""
    lowered = programs.lower("donating_round", (), _state(setup), setup.arrays, None)
    return lowered.compile(compiler_options(setup.mesh))


def _state(setup: Setup) -> ServerState:
    """The shapes of a state, with their shardings."""
    return shapes(setup.state, leaf_shardings(setup.shardings, setup.state))


def _devices(setup: Setup) -> str:
    devices = setup.mesh.devices.flat
    hosts = len({device.process_index for device in devices})
    together = team_size(setup.mesh)
    return (
        f"{len(devices)} x {devices[0].device_kind}"
        + (f" on {hosts} hosts" if hosts > 1 else "")
        + (f", {together} for each client" if together > 1 else "")
    )


def _steps(setup: Setup) -> int:
    """The local steps of the busiest device in a round, for a cohort with typical sizes."""
    engine, steps = setup.engine, np.sort(setup.engine.local.num_steps(setup.data.sizes))[::-1]
    K, D, L = engine.cohort_size, num_teams(engine.mesh), engine.lanes
    cohort = steps[((np.arange(K) + 0.5) * (engine.num_clients / K)).astype(int)]
    placed = np.append(cohort, 0)[np.minimum(back_and_forth(D, -(-K // (D * L)), L), K)]  # as round.places
    return int(placed.max(2).sum(1).max())


def _bytes_on_one_device(tree: PyTree) -> int:
    """The bytes of arrays, or of shapes with shardings, on one device, without padding."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def device_traffic(setup: Setup) -> dict[str, int]:
    """See `Simulation.device_traffic`."""
    e, D = setup.engine, num_teams(setup.mesh)
    G = -(-e.most_clients // (D * e.lanes))
    phases, row = setup.client_results(), e.federation.row
    times = (1 + e.sharded) * (1 + (e.algorithm.finish is not None))
    share = 0 if e.rows_by_rank is None else longest_share(e.rows_by_rank, D, G, e.lanes)
    return {
        "message sum": tree.nbytes(([jax.eval_shape(summed, phase.message) for phase in phases], phases[-1].weight)),
        "client states": times * (D - 1) * G * e.lanes * tree.nbytes(phases[-1].state),
        "rows": (D - 1) * share * tree.nbytes(row),
    }
