"""What an almost empty round costs: linear model, 10 clients of 20 rows, one batch each. Milliseconds a round.

`run` sends off many rounds at once; a loop over `round_fn` comes back to Python in each.

python experiments/benchmarks/overhead.py [--rounds 2000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import jax
import measure
import numpy as np

import fedjax_drift as fd


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


def wanted() -> float | None:
    return 0.5 if jax.default_backend() == "cpu" else None


def run_seconds(sim: fd.Simulation, arguments: argparse.Namespace, evaluated: int) -> list[float]:
    """Seconds a round of `run`, its records included."""
    state, _ = sim.run(sim.init(jax.random.key(0)), arguments.rounds, evaluated, progress=False)  # compiles
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
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.repeats = 5, 1
    fd.use_cpu_devices()
    measure.save("overhead", rows(arguments), arguments)


if __name__ == "__main__":
    main()
