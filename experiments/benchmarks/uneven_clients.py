"""Measures the ratio of executed to needed local steps if the clients have different numbers of examples.

    python experiments/benchmarks/uneven_clients.py [--rounds 50] [--time]

The numbers of examples are like those of FEMNIST (mean 197, standard deviation 85), and the batch size is 20. L clients
are trained side by side (L lanes). So each client of such a group executes as many steps as the largest client of the
group needs. The cohort is sorted by local steps before it is split into groups, which keeps the ratio low. With L = 1
the ratio is 1. The model is linear with one feature, because the benchmark only counts steps.

With --time, the benchmark measures the time per needed step instead (LeNet-5, ``lanes="auto"``). It compares clients of
different sizes with clients of equal size and about as many steps in total. The rounds of both are interleaved. The
ratio is an upper bound of the speedup that a perfect packing of the steps into lanes could give.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import jax
import measure
import numpy as np
from workloads import Workload, equal_sizes, femnist_sizes

import fedjax_drift as fd

BATCH = 20
CALCULATED = {(10, 1): 1.0, (10, 10): 1.69, (50, 10): 1.18, (100, 10): 1.10, (100, 50): 1.57, (3400, 50): 1.02}


def ratios(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    sizes = femnist_sizes(60 if arguments.quick else 3400)
    x = np.zeros((sizes.sum(), 1), np.float32)
    data = fd.FederatedData(x, np.zeros(len(x), np.int32), sizes)
    for (cohort, lanes), calculated in CALCULATED.items():
        if cohort > len(sizes):
            continue
        model, local = fd.models.linear((1,), 2), fd.LocalTraining(batch_size=BATCH)
        sim = fd.Simulation(
            model, data, fd.algorithms.fedavg(), local=local, cohort_size=cohort, lanes=lanes,
            mesh=fd.clients_mesh(jax.local_devices()[:1]),
        )  # fmt: skip
        state, counted = sim.init(jax.random.key(0)), []
        for _ in range(arguments.rounds if cohort < 3400 else 2):
            state, info = sim.round_fn(state)
            counted.append(int(info["executed_steps"]) / int(info["steps"]))
        note = f"by calculation {calculated}; mean {np.mean(counted):.3f}"
        yield measure.row(f"{cohort:,} a round, lanes: {lanes}", counted, "executed / needed", note=note)


def times(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    accelerated = jax.default_backend() != "cpu"
    network = "mnist_2nn" if arguments.quick else "lenet5"
    for cohort in (2,) if arguments.quick else (10, 100, 3400) if accelerated else (10, 100):
        uneven = Workload(network, femnist_sizes(cohort), cohort, BATCH)
        steps = -(-uneven.sizes // BATCH)
        even = uneven._replace(sizes=equal_sizes(cohort, round(steps.mean()) * BATCH))
        sims = [measure.simulation(workload) for workload in (uneven, even)]
        each = 1 if arguments.quick else max(1, 100 // cohort)
        per_step: list[list[float]] = [[], []]
        for _ in range(1 if arguments.quick else 5):
            for sim, taken, workload in zip(sims, per_step, (uneven, even), strict=True):
                taken += [
                    t / (-(-workload.sizes // BATCH)).sum() for t in measure.round_seconds(sim, 1, warm=1, each=each)
                ]
        turns = [a / b for a, b in zip(*per_step, strict=True)]
        microseconds = " and ".join(f"{1e6 * statistics.median(taken):.1f}" for taken in per_step)
        note = f"lanes: {sims[0].lanes}; {microseconds} us for a needed step"
        yield measure.row(f"time of a step, uneven / equal clients, {cohort:,} a round", turns, note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--time", action="store_true", help="measure time instead of counting")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    if arguments.time:
        fd.use_cpu_devices()
        measure.save("uneven_clients_time", times(arguments), arguments)
    else:
        measure.save("uneven_clients", ratios(arguments), arguments)


if __name__ == "__main__":
    main()
