"""Compares algorithms when cohorts really differ: uniform against cyclic participation.

    python -m experiments.cyclic_participation [--rounds 100] [--output DIR]
    python -m experiments.cyclic_participation --draw DIR      only writes the picture and the table again

The results are saved after every algorithm and kind of participation. The same command continues.

The data are MNIST with 100 clients. Clients 0 to 19 share the images of the labels 0 and 1, clients 20 to 39 those of
the labels 2 and 3, and so on; the shares of the two labels of a client are uniformly distributed. There are three kinds
of participation, with 10 clients a round:

- uniform
- cyclic, random groups: one of five random groups is available in each round. The groups have similar labels.
- cyclic, groups by label: the five groups are those that share two labels. So a cohort has two of the ten labels.

The model is 2NN. A client trains for one epoch with batch size 50, and gradients are clipped to norm 10. For every
algorithm, with uniform participation and with groups by label, the learning rate (and alpha of FedDC and FedDyn) is the
one with the best validation accuracy in a run with another seed, in which 10 % of the training examples are held out.
Random groups have the settings of uniform. Then three seeds are run, each with its own partition. The score of a run is
its mean accuracy on half of the test set over the last 50 rounds, which are ten whole cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown

GROUPS, LAST, SEEDS = 5, 50, (0, 1, 2)
RULES = {
    "uniform": fd.participation.uniform(),
    "cyclic, random groups": fd.participation.cyclic(GROUPS),
    "cyclic, groups by label": fd.participation.cyclic(GROUPS, shuffle=False),
}
ALGORITHMS = {  # name -> (factory, other settings of the search)
    "FedAvg": (fd.algorithms.fedavg, {}),
    "FedAvgM": (fd.algorithms.fedavgm, {}),
    "SCAFFOLD": (fd.algorithms.scaffold, {}),
    "FedDC": (fd.algorithms.feddc, {"alpha": [0.01, 0.1]}),
    "FedEve": (fd.algorithms.fedeve, {}),
    "FedDyn": (fd.algorithms.feddyn, {"alpha": [0.01, 0.1]}),
}
LEARNING_RATES = [0.05, 0.15]
MODEL = fd.models.mnist_2nn()
scores, show = partial(cells.scores, last=LAST), partial(cells.show, last=LAST)


@cache
def federation(seed: int) -> fd.FederatedData:
    """MNIST with 100 clients. Clients 20 g to 20 g + 19 have the labels 2 g and 2 g + 1."""
    weights, rng = np.zeros((100, 10)), np.random.default_rng(seed)
    for i in range(100):
        weights[i, 2 * (i // 20) + np.arange(2)] = rng.dirichlet([1, 1])
    data = fd.datasets.load("mnist", partition=fd.partition.distribution(100, weights, seed))
    return replace(data, x_test=data.x_test[::2], y_test=data.y_test[::2])


def simulate(
    data: fd.FederatedData, rule: fd.participation.Participation, factory: Callable, lr: float,
    measure: str | tuple = (), **settings: float,
) -> fd.Simulation:  # fmt: skip
    local = fd.LocalTraining(epochs=1, batch_size=50, lr=lr, clip_norm=10.0)
    return fd.Simulation(
        MODEL, data, factory(**settings), local=local, cohort_size=10, participation=rule, measure=measure
    )


@cache
def tuned(rounds: int, name: str, rule: str) -> dict[str, float]:
    factory, others = ALGORITHMS[name]
    build = partial(simulate, cells.held_out(federation), RULES[rule], factory)
    return cells.tuned(build, fd.grid(lr=LEARNING_RATES, **others), rounds, LAST)


def compute(rounds: int, name: str, rule: str) -> cells.Entry:
    settings = tuned(rounds, name, "uniform" if rule == "cyclic, random groups" else rule)
    runs = []
    for seed in SEEDS:
        sim = simulate(federation(seed), RULES[rule], ALGORITHMS[name][0], measure="gradients", **settings)
        runs += sim.sweep(rounds, [seed], 1, measure_every=50, progress=False)
    return {
        "algorithm": name, "participation": rule, "settings": settings,
        "accuracy": [cells.accuracies(run) for run in runs],
        "period_drift": [[r["period_drift"] for r in run.history if "period_drift" in r] for run in runs],
    }  # fmt: skip


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The table, and a plot of the scores and of the accuracy in the last cycles."""
    import matplotlib.pyplot as plt

    rows = []
    for name in ALGORITHMS:
        entries = [found[name, rule] for rule in RULES]
        of_name = [scores(entry) for entry in entries]
        swings = " / ".join(f"{swing(entry):.1f}" for entry in entries)
        settings = "; ".join(markdown.words(entry["settings"]) for entry in entries)
        rows.append([name, *map(markdown.interval, [*of_name, of_name[0] - of_name[-1]]), swings, settings])
    text = (
        "# Cyclic against uniform participation\n\nMean test accuracy (%) over the last 50 rounds, with the 95 % "
        "confidence interval over three seeds. The swing is the highest minus the lowest accuracy within a cycle of "
        "five rounds, the mean over the last ten cycles, for the three kinds of participation. "
        "`experiments/cyclic_participation.py` has the setting.\n\n"
        + markdown.table(["algorithm", *RULES, "lost by groups", "swing within a cycle", "settings"], rows)
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=(1, 1.3))
    colours, place = ("C7", "C9", "C3"), np.arange(len(ALGORITHMS))
    for i, rule in enumerate(RULES):
        means, errors, _ = zip(*(fd.statistics.mean(scores(found[name, rule])) for name in ALGORITHMS), strict=True)
        left.bar(place + 0.27 * (i - 1), means, 0.25, yerr=errors, label=rule, color=colours[i], capsize=2)
    left.set_xticks(place, ALGORITHMS, rotation=30)
    low = min(scores(entry).mean() for entry in found.values())
    left.set(ylabel="Test accuracy, last 50 rounds (%)", ylim=(max(0, low - 15), 100))
    left.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for i, name in enumerate(ALGORITHMS):
        curve = 100 * np.array(found[name, "cyclic, groups by label"]["accuracy"])[:, -4 * GROUPS :].mean(0)
        right.plot(np.arange(-4 * GROUPS, 0), curve, label=name, color=f"C{i}", marker="o", markersize=3, linewidth=1.2)
    right.set(
        xlabel="Round, before the last", ylabel="Test accuracy (%)", title="Groups by label: the last four cycles"
    )
    right.locator_params(axis="x", integer=True)
    right.legend(fontsize=8, ncols=2, loc="center right", bbox_to_anchor=(1, 0.42))
    return {"cyclic_participation.md": text, "cyclic_participation.png": figure}


def swing(entry: cells.Entry) -> float:
    """The highest minus the lowest accuracy (%) in a cycle, the mean over the last ten cycles of all runs."""
    cycles = np.array([accuracy[-LAST:] for accuracy in entry["accuracy"]]).reshape(-1, GROUPS)
    return 100 * float(np.ptp(cycles, axis=1).mean())


EXPERIMENT = cells.Experiment(
    "cyclic_participation", [(name, rule) for name in ALGORITHMS for rule in RULES], compute, show, report,
    itemgetter("algorithm", "participation"),
)  # fmt: skip

if __name__ == "__main__":
    fd.use_cpu_devices()
    cells.main(EXPERIMENT, __doc__, rounds=100)
