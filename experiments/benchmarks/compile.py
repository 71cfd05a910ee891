"""Measures the time of the first round of a process, with an empty and with a filled compilation cache.

    python experiments/benchmarks/compile.py [--repeats 3] [--model lenet5]

Every time is measured in a new process. With LeNet-5, there are 50 of 500 clients per round, as in lenet_femnist.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import measure
from workloads import WORKLOADS, Workload, equal_sizes, tiny

import fedjax_drift as fd


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    firsts: dict[str, list[float]] = {"an empty cache": [], "a filled cache": []}
    wholes: dict[str, list[float]] = {name: [] for name in firsts}
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for name in firsts:
                first, whole = process(arguments, cache)
                firsts[name].append(first)
                wholes[name].append(whole)
    lenet = arguments.model == "lenet5"
    for name, times in firsts.items():
        wanted = 5 if lenet and name == "an empty cache" else None
        whole = f"{measure.number(sorted(wholes[name])[len(times) // 2])} s from starting Python to its end"
        yield measure.row(f"{arguments.model}, first round, {name}", times, "s", at_most=wanted, note=whole)


def process(arguments: argparse.Namespace, cache: str) -> tuple[float, float]:
    """Returns the seconds of the first round and of the whole process."""
    quick = ["--quick"] * arguments.quick
    start = time.perf_counter()
    output = measure.run([sys.executable, __file__, "--model", arguments.model, "--cache", cache, *quick])
    return float(output.split()[-1]), time.perf_counter() - start


def first_round(arguments: argparse.Namespace) -> float:
    """Returns the seconds of the first round, including compilation, but without the initialisation of the model."""
    fd.use_compilation_cache(arguments.cache)
    if arguments.model == "lenet5":
        workload = Workload("lenet5", equal_sizes(500, 100), 50, 20)
    else:
        workload = next(w for w in WORKLOADS.values() if w.network == arguments.model)
    sim = measure.simulation(tiny(workload) if arguments.quick else workload)
    state = jax.block_until_ready(sim.init(jax.random.key(0)))
    start = time.perf_counter()
    jax.block_until_ready(sim.round_fn(state))
    return time.perf_counter() - start


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", choices=("lenet5", "emnist_cnn", "cifar_cnn", "resnet18"), default="lenet5")
    parser.add_argument(
        "--cache", help="internal: measure one first round with this cache folder, and print the seconds"
    )
    arguments = parser.parse_args()
    fd.use_cpu_devices()
    if arguments.cache:
        print(first_round(arguments))
        return
    arguments.repeats = 1 if arguments.quick else arguments.repeats
    measure.save("compile", rows(arguments), arguments)


if __name__ == "__main__":
    main()
