"""Executed / needed local steps where clients are uneven: FEMNIST-like sizes (mean 197 rows, spread 85), batch 20.

    python experiments/benchmarks/uneven_clients.py [--rounds 50]

Sorting the cohort by local steps before cutting it into groups of lanes is what keeps the ratio low; 1 lane wastes
nothing. No network is trained (a linear model of one feature), so the counts are the engine's own.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

import fedjax_drift as fd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    sizes = np.clip(np.random.default_rng(0).gamma((197 / 85) ** 2, 85**2 / 197, 3400), 19, 470).astype(np.int32)
    rows = np.zeros((sizes.sum(), 1), np.float32)
    data = fd.FederatedData(rows, np.zeros(len(rows), np.int32), sizes)
    print(f"3,400 clients of {sizes.min()} to {sizes.max()} rows, mean {sizes.mean():.0f}, spread {sizes.std():.0f}")
    for cohort_size, lanes in ((10, 1), (10, 10), (50, 10), (100, 10), (100, 50), (3400, 50)):
        model, local = fd.models.linear((1,), 2), fd.LocalTraining(batch_size=20)
        sim = fd.Simulation(
            model, data, fd.algorithms.fedavg(), local=local, cohort_size=cohort_size, lanes=lanes,
            mesh=fd.clients_mesh(jax.local_devices()[:1]),
        )  # fmt: skip
        state, ratios = sim.init(jax.random.key(0)), []
        for _ in range(arguments.rounds if cohort_size < 3400 else 2):
            state, info = sim.round_fn(state)
            ratios.append(int(info["executed_steps"]) / int(info["steps"]))
        spread = f"rounds {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{cohort_size:5} a round, {lanes:3} lanes: {np.mean(ratios):.3f}  ({spread})")


if __name__ == "__main__":
    main()
