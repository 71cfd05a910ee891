"""Tests whether the memory and the time per round stay constant over 2,000 rounds.

    python experiments/benchmarks/endurance.py [--rounds 2000] [--model lenet5]

The algorithm is SCAFFOLD. There are 200 clients with 20 images each, and 20 of them are selected per round. Four cases
run in separate processes:

- `run` with an evaluation every 50 rounds
- `run` with the same evaluations and a checkpoint every 100 rounds
- `run` with the same evaluations and the client states in host memory
- a loop over `round_fn`

The resident memory of the process is measured after each tenth of the rounds. The final memory is compared with that
after the first fifth, because programs are compiled and buffers are allocated in the first fifth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import measure
from workloads import Workload, equal_sizes, tiny

import fedjax_drift as fd

PARTS = 10
KINDS = ("run", "run, checkpoints", "run, host bank", "round_fn")


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for kind in KINDS:
        own = ["--kind", kind, "--rounds", str(arguments.rounds), "--model", arguments.model]
        found = measure.own_process(__file__, own, arguments)
        resident, seconds = found["resident"], found["seconds"]
        note = f"{resident[1] / 2**20:.0f} MiB then"
        grown = resident[-1] / resident[1]
        yield measure.row(f"{kind}: memory at the end / after a fifth", grown, at_most=1.05, note=note)
        slow, first = statistics.median(seconds[-3:]), statistics.median(seconds[1:4])
        note = f"{1e3 * first:.2f} ms then; medians of three tenths"
        yield measure.row(f"{kind}: time per round at the end / at the start", slow / first, at_most=1.05, note=note)


def one(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the resident bytes after each tenth of the rounds, and the seconds per round in each tenth."""
    workload = Workload(arguments.model, equal_sizes(200, 20), 20)
    workload = tiny(workload) if arguments.quick else workload
    bank = "host" if arguments.kind == "run, host bank" else "device"
    sim = measure.simulation(workload, algorithm=fd.algorithms.scaffold(), donate=False, bank=bank)
    each, found = arguments.rounds // PARTS, {"resident": [], "seconds": []}
    clock = time.perf_counter()

    def look(record: dict) -> None:
        nonlocal clock
        if record["round"] % each == 0:
            found["seconds"].append((time.perf_counter() - clock) / each)
            found["resident"].append(resident())
            clock = time.perf_counter()

    state = sim.init(jax.random.key(0))
    if arguments.kind == "round_fn":
        for t in range(1, arguments.rounds + 1):
            state, _ = sim.round_fn(state)
            jax.block_until_ready(state)
            look({"round": t})
        return found
    with tempfile.TemporaryDirectory() as folder:
        saved = (
            fd.Checkpoints(folder, every=max(1, each // 2), seconds=None) if "checkpoints" in arguments.kind else None
        )
        sim.run(state, arguments.rounds, 50, progress=False, checkpoints=saved, on_round=look)
    return found


def resident() -> int:
    """Returns the number of bytes of this process that are resident in memory now (Linux)."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--model", default="lenet5", choices=("lenet5", "mnist_2nn"))
    parser.add_argument("--kind", choices=KINDS, help="internal: run only this case, and print the measurements")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 2 * PARTS
    fd.use_cpu_devices()
    if arguments.kind:
        print(json.dumps(one(arguments)))
    else:
        measure.save("endurance", rows(arguments), arguments)


if __name__ == "__main__":
    main()
