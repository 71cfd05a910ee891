"""Compares the plan of a round (`Simulation.plan`) with the memory that rounds use on CPU devices. Linux only.

    python experiments/benchmarks/plan_memory.py [--images 20] [--no-ynnpack]

The model is LeNet-5. All of 3,400 clients take part, with --images images each. Each case runs in a new process. After
a first round, the process measures

- the bytes of all JAX arrays between two rounds, which are the arguments of the program
- by how much the process grows during the second round, which is its temporary memory

The sum is compared with the plan. The memory of Python, XLA and the compiler is in neither of them.

With two devices, the process grows by more than planned: by 40 MiB with one step per client, and by 180 MiB with
five (--images 100). The reason is in XLA's runtime for CPUs. It passes small products and reductions to YNNPACK,
which offers a part of each of them to other threads. All threads are busy with the devices' programs, so these offers
(about 11 kB per step of LeNet-5) stay in a queue until the round ends. With --no-ynnpack, XLA computes them itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import measure
from workloads import Workload, equal_sizes, tiny

import fedjax_drift as fd

CASES: tuple[tuple[fd.Algorithm, int, dict[str, Any]], ...] = (  # (algorithm, devices, options of the simulation)
    (fd.algorithms.fedavg(), 1, {}),
    (fd.algorithms.fedavg(), 2, {}),
    (fd.algorithms.fedavg(), 2, {"shard_data": True}),
    (fd.algorithms.fedavg(), 2, {"lanes": 32}),
    (fd.algorithms.scaffold(), 1, {}),
    (fd.algorithms.scaffold(), 2, {}),
    (fd.algorithms.scaffold(), 2, {"bank": "sharded"}),
    (fd.algorithms.feddc(0.1), 2, {}),
)


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for i, (algorithm, devices, options) in enumerate(CASES[:1] if arguments.quick else CASES):
        own = ["--case", str(i), "--images", str(arguments.images), *["--no-ynnpack"] * arguments.no_ynnpack]
        found = measure.own_process(__file__, own, arguments)
        what = ", ".join([algorithm.name, f"{devices} devices", *(f"{k}={v}" for k, v in options.items())])
        used = found["arrays"] + found["growth"]
        note = (
            f"arrays {found['arrays'] / 2**20:,.0f} MiB, planned {found['arguments'] / 2**20:,.0f}; growth in a round "
            f"{found['growth'] / 2**20:,.0f} MiB, planned {found['temporary'] / 2**20:,.0f}"
        )
        yield measure.row(f"{what}: used / planned", used / found["total"], at_least=0.9, at_most=1.1, note=note)


def one(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the planned and the used bytes of all devices."""
    algorithm, devices, options = CASES[arguments.case]
    if arguments.no_ynnpack:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
    fd.use_cpu_devices(devices)
    workload = Workload("lenet5", equal_sizes(3400, arguments.images), 3400)
    sim = measure.simulation(tiny(workload) if arguments.quick else workload, algorithm=algorithm, **options)
    plan = sim.plan()
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    jax.block_until_ready(state)
    arrays = sum(shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns freed memory to the system, so that the next round needs it again
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the process starts again from its present size
    jax.block_until_ready(sim.round_fn(state))
    planned = {"arguments": plan.arguments, "temporary": plan.temporary + plan.results, "total": plan.total}
    planned = {name: devices * size for name, size in planned.items()}
    return planned | {"arrays": arrays, "growth": _status("VmHWM") - before}


def _status(name: str) -> int:
    """Returns a value of /proc/self/status in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--case", type=int, help="internal: measure only this case, and print the measurements")
    parser.add_argument("--images", type=int, default=20, help="images of a client; 20 are one step (default: 20)")
    parser.add_argument("--no-ynnpack", action="store_true", help="without YNNPACK, see above")
    arguments = parser.parse_args()
    if arguments.case is None:
        measure.save("plan_memory" + "_no_ynnpack" * arguments.no_ynnpack, rows(arguments), arguments)
    else:
        print(json.dumps(one(arguments)))


if __name__ == "__main__":
    main()
