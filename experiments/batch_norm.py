"""What the three kinds of running statistics do to drift and accuracy: the table in docs/models.md.

    python -m experiments.batch_norm [--rounds 60] [--seeds 3] [--output DIR]

Generated digits of 100 writers are dealt to 20 clients by Dirichlet(0.1). A dense network with two hidden layers, each
followed by BatchNorm or GroupNorm, is trained with FedAvg. All values are means over the last ten rounds and the seeds,
with the standard deviation over the seeds. A seed changes the data's partition, the cohorts and the initial model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import fedjax_drift as fd
from experiments.tables.results import write_text

LAST = 10  # rounds that are averaged
OPTIONS: dict[str, tuple[str | None, fd.Algorithm]] = {
    "average": ("average", fd.algorithms.fedavg()),
    "local": ("local", fd.algorithms.fedavg()),
    "local, fedbn": ("local", fd.algorithms.fedbn()),
    "frozen": ("frozen", fd.algorithms.fedavg()),
    "GroupNorm": (None, fd.algorithms.fedavg()),
}


def batch_norm(width: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.BatchNorm(width, momentum=0.9, rngs=rngs)


def group_norm(width: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.GroupNorm(width, num_groups=8, rngs=rngs)


class Network(nnx.Module):
    def __init__(self, norm: Callable[[int, nnx.Rngs], Any], rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(784, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)
        self.norm_1, self.norm_2 = norm(64, rngs), norm(64, rngs)
        self.classifier = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm_1(self.first(x.reshape(len(x), -1))))
        return self.classifier(nnx.relu(self.norm_2(self.second(x))))


def model(statistics: str | None) -> fd.Model:
    norm = group_norm if statistics is None else batch_norm
    return fd.Model.from_nnx(lambda rngs: Network(norm, rngs), (28, 28, 1), statistics=statistics)


def scores(name: str, seed: int, rounds: int) -> list[float]:
    """The norm of an update, its cosine with the mean update, and the accuracies of the global and of own models."""
    data = fd.datasets.load("glyphs", fd.partition.dirichlet(20, 0.1, seed), num_writers=100, num_classes=10)
    statistics, algorithm = OPTIONS[name]
    local = fd.LocalTraining(epochs=5, batch_size=32, lr=0.05)
    data = data.with_client_tests(seed)
    sim = fd.Simulation(model(statistics), data, algorithm, local=local, cohort_size=10, measure="updates")
    state, history = sim.run(sim.init(jax.random.key(seed)), rounds - LAST, eval_every=0, progress=False)
    each = []
    for _ in range(min(LAST, rounds)):
        state, (record,) = sim.run(state, 1, eval_every=0, progress=False)
        accuracy = sim.evaluate_clients(state)
        shared, own = (
            float(np.nansum(accuracy[key] * sim.data.test_sizes) / sim.data.test_sizes.sum())
            for key in ("accuracy", "personal_accuracy" if "personal_accuracy" in accuracy else "accuracy")
        )
        each.append([record["update_norm"][-1], record["update_cosine"][-1], shared, own])
    return np.mean(each, 0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="at least 10 (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    fd.use_cpu_devices()
    table = {}
    print(f"{'':14}{'norm of an update':>20}{'cosine':>18}{'global model':>18}{'own models':>18}")
    for name in OPTIONS:
        values = np.array([scores(name, seed, args.rounds) for seed in range(args.seeds)])
        table[name] = {"mean": values.mean(0).tolist(), "std": values.std(0).tolist()}
        cells = zip(values.mean(0), values.std(0), strict=True)
        print(f"{name:14}" + "".join(f"{mean:12.3f} ± {std:.3f}" for mean, std in cells), flush=True)
    columns = ["update norm", "update cosine", "accuracy of the global model", "accuracy of own models"]
    results = {"rounds": args.rounds, "seeds": args.seeds, "columns": columns, "options": table}
    write_text(args.output / "batch_norm.json", json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
