"""Measures the overhead of a round, in milliseconds.

    python experiments/benchmarks/overhead.py [--rounds 2000] [--repeats 5]

There are 10 clients with 20 examples each. A client trains a linear model on one batch, so nearly all of the time is
overhead. `run` dispatches many rounds together. A loop over `round_fn` returns to Python in every round.

The benchmark also measures the cost of the check that all updates are finite. Rounds with and without this check are
interleaved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import measure
import numpy as np
from workloads import Workload, equal_sizes, tiny

import fedjax_drift as fd
from fedjax_drift import tree


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    rng, N, n = np.random.default_rng(0), 10, 20
    x, y = rng.normal(size=(N * n, 30)).astype(np.float32), rng.integers(0, 5, N * n)
    data = fd.FederatedData(x, y, np.full(N, n), x[:n], y[:n])
    model, local = fd.models.linear((30,), 5), fd.LocalTraining(batch_size=n)
    meshes = {"all devices": None, "one device": fd.clients_mesh(jax.local_devices()[:1])}
    for where, mesh in meshes.items():
        if mesh is not None and len(jax.local_devices()) == 1:
            continue
        sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=N, mesh=mesh)
        times = measure.round_seconds(sim, arguments.repeats, warm=1, each=arguments.rounds)
        yield measure.row(f"round_fn, {where}", [1e3 * t for t in times], "ms a round")
        for evaluated in (0, 100):
            times = run_seconds(sim, arguments, evaluated)
            what = f"run, {where}" + (f", evaluated every {evaluated} rounds" if evaluated else "")
            yield measure.row(what, [1e3 * t for t in times], "ms a round", at_most=wanted())
    yield from finite_check(arguments)


def finite_check(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for name, workload in {
        "LeNet-5, FedAvg": Workload("lenet5", equal_sizes(500, 100), 50),
        "2NN, SCAFFOLD": Workload("mnist_2nn", equal_sizes(100, 600), 15),
    }.items():
        workload = tiny(workload) if arguments.quick else workload
        algorithm = fd.algorithms.scaffold() if "SCAFFOLD" in name else fd.algorithms.fedavg()
        checked, unchecked = (measure.simulation(workload, algorithm=algorithm) for _ in range(2))
        look = tree.first_nonfinite
        try:
            tree.first_nonfinite = lambda update: jnp.int32(-1)
            unchecked.round_fn(unchecked.init(jax.random.key(0)))  # compiles the round without the check
        finally:
            tree.first_nonfinite = look
        ratios = []
        states = [sim.round_fn(sim.init(jax.random.key(0)))[0] for sim in (checked, unchecked)]
        for _ in range(arguments.turns):
            took = []
            for i, sim in enumerate((checked, unchecked)):
                start = time.perf_counter()
                states[i], _ = sim.round_fn(states[i])
                jax.block_until_ready(states[i])
                took.append(time.perf_counter() - start)
            ratios.append(took[0] / took[1])
        yield measure.row(f"checking that updates are finite: {name}, round with / without", ratios, at_most=1.03)


def wanted() -> float | None:
    return 0.5 if jax.default_backend() == "cpu" else None


def run_seconds(sim: fd.Simulation, arguments: argparse.Namespace, evaluated: int) -> list[float]:
    """Returns the seconds per round of `run`, including its records."""
    state, _ = sim.run(sim.init(jax.random.key(0)), arguments.rounds, evaluated, progress=False)  # compiles the rounds
    times = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        state, history = sim.run(state, arguments.rounds, evaluated, progress=False)
        times.append((time.perf_counter() - start) / arguments.rounds)
        assert len(history) == arguments.rounds
    return times


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=40, help="number of interleaved rounds with and without the check")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.repeats, arguments.turns = 5, 1, 1
    fd.use_cpu_devices()
    measure.save("overhead", rows(arguments), arguments)


if __name__ == "__main__":
    main()
