"""FedEve's Kalman gain if all client updates are pure noise, for the client sizes of its experiments.

    python -m experiments.fedeve_noise [--rounds 400] [--output DIR]

Every client's update Delta_i is drawn from a standard normal distribution, so no client has a direction of its own.
There is neither period drift nor client drift in the sense of the paper's equations (3) and (4). Only the clients'
sizes n_i, the weights of the mean, are those of MNIST's writers with the partitions of tables 1 and 3. The gain is
that of equations (15) and (16) of FedEve (arXiv 2508.14539), in NumPy.

The result: the gain increases with the inequality of the client sizes alone. Dirichlet partitions with a smaller alpha
have less equal sizes, so the order of the gains in the paper's figure 8 appears without any drift. Drift explains the
difference between this gain and the measured one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import fedjax_drift as fd
from experiments.tables.results import write_text

COHORT, DIMENSIONS = 10, 4000
PARTITIONS = {
    "natural": "by_writer",
    "alpha 1": "dirichlet:1:prior=class:min_size=1:capped=false",
    "alpha 0.1": "dirichlet:0.1:prior=class:min_size=1:capped=false",
    "alpha 0.01": "dirichlet:0.01:prior=class:min_size=1:capped=false",
}


def client_sizes(partition: str) -> np.ndarray:
    """n_i of MNIST's 539 writers, or of as many clients of another partition."""
    clients = [] if partition == "by_writer" else ["--clients=539"]
    words = ["--dataset=mnist", f"--partition={partition}", *clients, "--algorithm=fedavg"]
    return fd.parse_run(words).data.sizes


def gains(sizes: np.ndarray, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """G of every round, float [rounds], for updates that are noise."""
    M, s2, history = np.zeros(DIMENSIONS), 0.0, []
    for _ in range(rounds):
        n = sizes[rng.choice(len(sizes), COHORT, replace=False)].astype(float)
        updates = rng.normal(size=(COHORT, DIMENSIONS))
        Delta = n @ updates / n.sum()
        sQ2 = ((M - Delta) ** 2).sum() / (COHORT * DIMENSIONS)  # (16)
        sR2 = ((updates - Delta) ** 2).sum() / (COHORT**2 * DIMENSIONS)  # (16)
        G = (s2 + sQ2) / (s2 + sQ2 + sR2)  # (15c)
        M = M + G * (Delta - M)  # (15d)
        s2 = (1 - G) * (s2 + sQ2)  # (15f)
        history.append(G)
    return np.array(history)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5, help="partitions and noise (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for fedeve_noise.json")
    args = parser.parse_args()
    results = {}
    print(f"{'clients':12} {'median gain':>24} {'effective clients of 10':>24}")
    for name, partition in PARTITIONS.items():
        sizes = client_sizes(partition)
        medians = [
            float(np.median(gains(sizes, args.rounds, np.random.default_rng(s))[20:])) for s in range(args.seeds)
        ]
        rng = np.random.default_rng(0)
        cohorts = sizes[[rng.choice(len(sizes), COHORT, replace=False) for _ in range(2000)]].astype(float)
        effective = float((cohorts.sum(1) ** 2 / (cohorts**2).sum(1)).mean())
        results[name] = {"median_gain": medians, "effective_clients": effective}
        print(f"{name:12} {np.mean(medians):14.2f} ± {np.std(medians, ddof=1):.3f} {effective:24.1f}")
    if args.output:
        write_text(args.output / "fedeve_noise.json", json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
