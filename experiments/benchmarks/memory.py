"""Measures the peak memory with K = 10, 100, 1,000 and 3,400 (all) clients per round.

The number of lanes is the same for every K.

    python experiments/benchmarks/memory.py [--lanes 10] [--model lenet5]

The algorithm is FedAvg with 3,400 clients x 20 images. --lanes is the number of clients that are trained side by side
on one device. Each K is measured in a new process, with two results:

- the memory that the compiled round needs in addition to its arguments and results, as the compiler reports it
- the peak memory of the whole process, or of the device if it is an accelerator
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import jax
import measure
from workloads import Workload, equal_sizes, tiny

import fedjax_drift as fd

CLIENTS, ROWS, COHORTS = 3400, 20, (10, 100, 1000, 3400)


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    cohorts = (1, 2) if arguments.quick else COHORTS
    peaks = []
    for K in cohorts:
        own = ["--cohort", str(K), "--lanes", str(arguments.lanes), "--model", arguments.model]
        found = measure.own_process(__file__, own, arguments)
        peaks.append(found["peak"])
        yield measure.row(f"{K:,} a round, beside the round's arguments", found["temporary"] / 2**20, "MiB")
        yield measure.row(f"{K:,} a round, peak of the {found['where']}", found["peak"] / 2**20, "MiB")
    note = f"{arguments.model}, lanes: {arguments.lanes} on each device, where a round has as many clients"
    yield measure.row(f"peak, {cohorts[-1]:,} / {cohorts[0]:,} a round", peaks[-1] / peaks[0], note=note)


def one(arguments: argparse.Namespace) -> dict[str, float | str]:
    """Returns the memory of a process that trains two rounds of K clients, in bytes."""
    workload = Workload(arguments.model, equal_sizes(CLIENTS, ROWS), arguments.cohort)
    workload = tiny(workload)._replace(cohort=arguments.cohort) if arguments.quick else workload
    sim = measure.simulation(workload, lanes=arguments.lanes)
    state = sim.init(jax.random.key(0))
    compiled = sim.executor.programs.lower("round", (), state, sim.setup.arrays, None).compile()  # what round_fn calls
    temporary = compiled.memory_analysis().temp_size_in_bytes
    for _ in range(2):
        state, _ = sim.round_fn(state)
    jax.block_until_ready(state)
    host, device = measure.peak_bytes()
    return {"temporary": temporary, "peak": device or host, "where": "device" if device else "process"}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--lanes", type=int, default=10)
    parser.add_argument("--model", default="lenet5", choices=("lenet5", "emnist_cnn"))
    parser.add_argument("--cohort", type=int, help="internal: measure only this K, and print the measurements")
    arguments = parser.parse_args()
    fd.use_cpu_devices()
    if arguments.cohort:
        print(json.dumps(one(arguments)))
    else:
        measure.save("memory", rows(arguments), arguments)


if __name__ == "__main__":
    main()
