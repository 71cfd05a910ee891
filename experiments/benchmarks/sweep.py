"""Compares the time of a sweep of eight seeds with eight runs one after another, and with one run.

    python experiments/benchmarks/sweep.py [--seeds 8] [--turns 5]

There are two workloads, with 10 of 100 clients per round:

- a linear model for 500 rounds, with 20 examples of 30 features per client
- 2NN for 40 rounds, with 100 images of 28x28 per client and batch size 50

The times do not include compilation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import jax
import measure
import numpy as np

import fedjax_drift as fd


def linear() -> fd.Simulation:
    rng, N, n = np.random.default_rng(0), 100, 20
    x, y = rng.normal(size=(N * n, 30)).astype(np.float32), rng.integers(0, 5, N * n)
    data, local = fd.FederatedData(x, y, np.full(N, n)), fd.LocalTraining(batch_size=n)
    return fd.Simulation(fd.models.linear((30,), 5), data, fd.algorithms.fedavg(), local=local, cohort_size=10)


def two_layers() -> fd.Simulation:
    rng, N, n = np.random.default_rng(0), 100, 100
    x, y = rng.integers(0, 256, (N * n, 28, 28, 1), np.uint8), rng.integers(0, 10, N * n)
    data, local = fd.FederatedData(x, y, np.full(N, n)), fd.LocalTraining(batch_size=50)
    return fd.Simulation(fd.models.mnist_2nn(), data, fd.algorithms.fedavg(), local=local, cohort_size=10)


WORKLOADS: dict[str, tuple[Callable[[], fd.Simulation], int]] = {"linear": (linear, 500), "2NN": (two_layers, 40)}


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for name in ["linear"] if arguments.quick else list(WORKLOADS):
        make, rounds = WORKLOADS[name]
        yield from compare(name, make(), 2 if arguments.quick else rounds, arguments)


def compare(name: str, sim: fd.Simulation, rounds: int, arguments: argparse.Namespace) -> Iterator[measure.Row]:
    def run(seeds: range) -> None:
        for seed in seeds:
            sim.run(sim.init(jax.random.key(seed)), rounds, 0, progress=False)

    def sweep(seeds: range) -> None:
        sim.sweep(rounds, seeds=seeds, eval_every=0, progress=False)

    many, accelerated = arguments.seeds, jax.default_backend() != "cpu"
    ways = {"one run": (run, 1), "in a row": (run, many), "one sweep": (sweep, many)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(1 + arguments.turns):
        for way, (call, seeds) in ways.items():
            start = time.perf_counter()
            call(range(seeds))
            if turn:  # the first turn is not timed, because it compiles
                times[way].append(time.perf_counter() - start)
    for way, taken in times.items():
        yield measure.row(f"{name}, {rounds} rounds, seeds: {ways[way][1]}, {way}", taken, "s")
    for way, wanted in (("in a row", None if accelerated else 1), ("one run", 3 if accelerated else None)):
        ratios = [a / b for a, b in zip(times["one sweep"], times[way], strict=True)]
        yield measure.row(f"{name}, one sweep / {way}", ratios, at_most=wanted)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.seeds = 1, 3
    fd.use_cpu_devices()
    measure.save("sweep", rows(arguments), arguments)


if __name__ == "__main__":
    main()
