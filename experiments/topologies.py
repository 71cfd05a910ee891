"""Who averages with whom: how fast models reach consensus, and what that does to learning.

    python -m experiments.topologies [--output DIR]

Left: 64 clients make one local step, and then only average. The consensus distance falls at most by the factor
1 - gap in a round, where gap is the spectral gap of the mixing matrix (dashed). Right: 64 clients of the generated data
set "synthetic", whose labels differ, train with FedAvg: the accuracy of the mean model (line), and that of the worst
and the best receiver (band). Takes two minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedjax_drift as fd
from fedjax_drift.topology import spectral_gap

N, ROUNDS, TRAINED, EVERY = 64, 40, 60, 3
T = fd.topology
GRAPHS = {
    "ring": T.ring(N),
    "torus, 8 x 8": T.torus(8, 8),
    "exponential": T.exponential(N),
    "Erdős-Rényi, p = 0.1": T.erdos_renyi(N, 0.1, seed=0),
}
TOPOLOGIES = {
    "one server": T.star(),
    "8 edge servers, every 5 rounds": T.groups(np.arange(N) % 8, every=5),
    **{name: T.graph(W) for name, W in GRAPHS.items() if name in ("ring", "exponential")},
}


def consensus(W: np.ndarray) -> np.ndarray:
    """float [ROUNDS]: the consensus distance, relative to the first one. Clients train in round 0 only."""
    rng = np.random.default_rng(0)
    data = fd.FederatedData.from_clients(
        [(rng.normal(size=(8, 10)).astype("f4"), rng.integers(0, 5, 8)) for _ in range(N)]
    )
    local = fd.LocalTraining(lr=lambda t: jnp.where(t == 0, 1.0, 0.0))
    sim = fd.Simulation(
        fd.models.linear((10,), 5), data, fd.algorithms.fedavg(), local=local, cohort_size=N, topology=T.graph(W)
    )
    state, distances = sim.init(jax.random.key(0)), []
    for _ in range(ROUNDS):
        state, info = sim.round_fn(state)
        distances.append(float(info["consensus_distance"]))
    return np.array(distances) / distances[0]


def learning(topology: T.Topology) -> tuple[np.ndarray, np.ndarray]:
    """The accuracy of the mean model, [E], and that of the receivers, [E, R], after every `EVERY` rounds."""
    data = fd.datasets.load("synthetic", num_clients=N)
    sim = fd.Simulation(
        fd.models.linear((30,), num_classes=5),
        data,
        fd.algorithms.fedavg(weighting="uniform"),
        local=fd.LocalTraining(epochs=10, lr=0.05),
        cohort_size=N,
        topology=topology,
    )
    state, mean, each = sim.init(jax.random.key(0)), [], []
    for t in range(TRAINED):
        state, _ = sim.round_fn(state)
        if (t + 1) % EVERY == 0:
            mean.append(sim.evaluate(state)["accuracy"])
            each.append(sim.evaluate_receivers(state)["accuracy"])
    return np.array(mean), np.array(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures"))
    folder = parser.parse_args().output
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for i, (name, W) in enumerate(GRAPHS.items()):
        left.plot(consensus(W), label=name, color=f"C{i}")
        left.plot((1 - spectral_gap(W)) ** np.arange(ROUNDS), color=f"C{i}", linestyle="--", linewidth=1)
    left.set(
        xlabel="Round", ylabel="Consensus distance, relative to round 0", yscale="log", ylim=(1e-4, 1.5),
        title="Averaging only; dashed: (1 - spectral gap)^t",
    )  # fmt: skip
    left.legend(fontsize=8)
    rounds = np.arange(EVERY, TRAINED + 1, EVERY)
    for i, (name, topology) in enumerate(TOPOLOGIES.items()):
        mean, each = learning(topology)
        right.plot(rounds, 100 * mean, label=name, color=f"C{i + 4}")
        right.fill_between(rounds, 100 * each.min(1), 100 * each.max(1), color=f"C{i + 4}", alpha=0.2, linewidth=0)
        print(f"{name}: mean {100 * mean[-1]:.1f}, receivers {100 * each[-1].min():.1f} to {100 * each[-1].max():.1f}")
    right.set(xlabel="Round", ylabel="Test accuracy (%)", title="FedAvg; bands: worst to best receiver")
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(folder / "topologies.png", dpi=110)


if __name__ == "__main__":
    main()
