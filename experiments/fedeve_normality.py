"""Are the two drifts of FedEve normal, as its Kalman filter assumes? (arXiv 2508.14539, assumption 2.2)

    python -m experiments.fedeve_normality [--rounds 50 500] [--output DIR]
    python -m experiments.fedeve_normality --draw DIR      only plots DIR/fedeve_normality.json again

The paper traces one parameter over the rounds (figure 7, `fedeve_figures.py`). The filter has the same variance for all
parameters, so here all of them are compared. The clients are the 539 writers of MNIST, with the settings of table 1:
LeNet-5, one local epoch, batch size 20, learning rate 0.01. FedAvg trains with 10 clients per round. After some rounds,
all clients train from the same global model, which gives all updates Delta_i and their weighted mean Delta. Then

- client drift: Delta_i - Delta, for every client i;
- period drift: Delta_S - Delta, for 539 random cohorts S of 10 clients, with the weighted mean Delta_S.

Equation (16) gives each drift one variance for all d parameters. Each drift is compared with a normal distribution
twice: with one variance for all parameters, and with a variance for each parameter. The excess kurtosis is that of the
values of all parameters together: 0 for a normal distribution, 3 for a Laplace distribution.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_drift as fd
from experiments.tables.results import write_text

COHORT, EDGES = 10, np.linspace(-8, 8, 65)  # edges of the histogram in standard deviations


def keeping_updates() -> fd.Algorithm:
    """FedAvg whose clients store their last update theta_i - w."""
    fedavg = fd.algorithms.fedavg()

    def client_update(server: Any, client: Any, work: fd.Work) -> fd.ClientResult:
        result = fedavg.client_update(server, (), work)
        return result._replace(state=result.message)

    def init_client(params: Any) -> Any:
        return jax.tree.map(jax.numpy.zeros_like, params)

    return fd.Algorithm(fedavg.init_server, init_client, client_update, fedavg.server_update, name="keeping_updates")


def all_updates(sim: fd.Simulation, params: Any, seed: int = 1) -> np.ndarray:
    """The updates Delta_i = w - theta_i of all clients from the same model, float [N, d]."""
    state, _ = sim.round_fn(sim.init(jax.random.key(seed), params=params))
    return -np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(state.clients)], 1)


def drifts(updates: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Client drift and period drift, each float [N, d]."""
    mean = sizes @ updates / sizes.sum()
    cohorts = np.stack([rng.choice(len(sizes), COHORT, replace=False) for _ in sizes])
    weights = np.zeros((len(sizes), len(sizes)), np.float32)
    np.put_along_axis(weights, cohorts, sizes[cohorts] / sizes[cohorts].sum(1, keepdims=True), 1)
    return {"client drift": updates - mean, "period drift": weights @ updates - mean}


def shape_of(values: np.ndarray) -> dict[str, Any]:
    """The density of values with standard deviation 1 in the bins between `EDGES`, and their excess kurtosis."""
    counts, _ = np.histogram(values, EDGES)
    kurtosis = float((values**4).mean(dtype=float) / (values**2).mean(dtype=float) ** 2 - 3)
    return {"density": (counts / values.size / np.diff(EDGES)).tolist(), "excess_kurtosis": round(kurtosis, 2)}


def examine(drift: np.ndarray) -> dict[str, Any]:
    """The shape of a drift, float [N, d], for all parameters together and with a variance for each of them."""
    drift = drift - drift.mean(0)
    deviations = drift.std(0)
    changed = deviations > 0  # no client changes the parameters of a unit that is never active
    standardised = drift[:, changed] / deviations[changed]
    return {"one for all": shape_of(drift / drift.std()), "one per parameter": shape_of(standardised)}


def draw(folder: Path) -> None:
    """Plots the densities beside the normal density, with one panel per drift and round."""
    import matplotlib.pyplot as plt

    results = json.loads((folder / "fedeve_normality.json").read_text())
    middle = (EDGES[1:] + EDGES[:-1]) / 2
    figure, axes = plt.subplots(
        len(results), 2, figsize=(9, 3.2 * len(results)), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for row, (rounds, shapes) in zip(axes, results.items(), strict=True):
        for panel, (drift, by_variance) in zip(row, shapes.items(), strict=True):
            panel.plot(middle, np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi), color="black", label="normal")
            for n, (name, shape) in enumerate(by_variance.items()):
                density = np.where(np.array(shape["density"]) > 0, shape["density"], np.nan)
                label = f"variance: {name} (excess kurtosis {shape['excess_kurtosis']:.0f})"
                panel.plot(middle, density, color=f"C{n}", linestyle=("--", "-.")[n], label=label)
            panel.set(title=f"{drift.capitalize()} after {rounds} rounds", yscale="log", ylim=(1e-6, 100))
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8, loc="upper right")
    figure.supxlabel("Drift of one parameter (standard deviations)")
    figure.supylabel("Density")
    figure.savefig(folder / "fedeve_normality.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds",
        type=int,
        nargs="+",
        default=[50, 500],
        help="the drifts are measured after these rounds (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="folder for fedeve_normality.json and .png (default: no files)")
    parser.add_argument("--draw", type=Path, help="only plot the results in this folder again")
    arguments = parser.parse_args()
    if arguments.draw:
        return draw(arguments.draw)
    fd.use_cpu_devices()
    data = fd.datasets.load("mnist", partition=fd.partition.by_writer(), standardize=True)
    model, local = fd.models.simple_fl_lenet(num_classes=10), fd.LocalTraining(epochs=1, batch_size=20, lr=0.01)
    fedavg = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=COHORT)
    everyone = fd.Simulation(model, data, keeping_updates(), local=local, cohort_size=data.num_clients)
    state, results = fedavg.init(jax.random.key(0)), {}
    for rounds in sorted(set(arguments.rounds)):
        state, _ = fedavg.run(state, rounds - int(state.round), progress=False)
        updates = all_updates(everyone, state.server.params)
        of_round = drifts(updates, data.sizes.astype(np.float32), np.random.default_rng(0))
        results[rounds] = {name: examine(drift) for name, drift in of_round.items()}
        for name, shapes in results[rounds].items():
            figures = ", ".join(
                f"{shape['excess_kurtosis']:.2f} (variance: {variances})" for variances, shape in shapes.items()
            )
            print(f"round {rounds}, {name}: excess kurtosis {figures}", flush=True)
    if arguments.output:
        write_text(arguments.output / "fedeve_normality.json", json.dumps(results, indent=1) + "\n")
        draw(arguments.output)


if __name__ == "__main__":
    main()
