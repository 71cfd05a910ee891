"""Compares robust rules, and algorithms against client drift, when a fifth of the clients lie.

    python -m experiments.adversaries [--rounds 60] [--output DIR]
    python -m experiments.adversaries --draw DIR      only writes the picture and the table again

MNIST with 25 clients whose labels are Dirichlet(0.5), all of equal weight. All take part in every round with five
local steps of 50 examples, and 5 of them are adversaries. The model is the 2NN of McMahan et al. (two hidden layers of
200), with a learning rate of 0.1. Gradients are clipped to norm 10: without it, SCAFFOLD diverges without any attack.
Six rules, six attacks and none, FedAvg; and four algorithms with the mean and with one robust rule. Three seeds, which
draw the partition, the adversaries and the run. Every second round is evaluated, and the score is the mean accuracy
of the last five evaluations. Nothing is tuned: the settings of the rules know f = 5. The results are saved after every
cell, and the same command continues. Takes one to two hours on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown

N, HOSTILE, SEEDS = 25, 5, (1, 2, 3)
EVERY, LAST = 2, 5  # every second round is evaluated, and the last five evaluations are scored
A, R = fd.adversaries, fd.robust
robust = fd.aggregation.robust
RULES: dict[str, Any] = {
    "mean": fd.aggregation.mean(),
    "median": robust(R.median()),
    "trimmed mean": robust(R.trimmed_mean(HOSTILE)),
    "geometric median": robust(R.geometric_median()),
    "multi-Krum": robust(R.multi_krum(HOSTILE)),
    "NNM, trimmed mean": robust(R.trimmed_mean(HOSTILE), [R.nnm(HOSTILE)]),
}
TWO_RULES = ("mean", "NNM, trimmed mean")
ATTACKS: dict[str, Any] = {
    "none": None,
    "sign flip": A.sign_flip(),
    "IPM": A.ipm(1.5),
    "ALIE": A.alie(-1.5),
    "mimic": A.mimic(0),
    "Gaussian": A.gaussian(1.0),
    "label flip": A.label_flip(classes=10),
}
ALGORITHMS: dict[str, Callable[[], fd.Algorithm]] = {
    "FedAvg": lambda: fd.algorithms.fedavg(weighting="uniform"),
    "SCAFFOLD": lambda: fd.algorithms.scaffold(weighting="uniform"),
    "FedDyn": lambda: fd.algorithms.feddyn(0.01),
    "FedDC": lambda: fd.algorithms.feddc(0.01),
}
CELLS = [("FedAvg", rule, attack) for rule in RULES for attack in ATTACKS]
CELLS += [(name, rule, attack) for name in [*ALGORITHMS][1:] for rule in TWO_RULES for attack in ATTACKS]
scores, show = partial(cells.scores, last=LAST), partial(cells.show, last=LAST)
MODEL, LOCAL = fd.models.mnist_2nn(), fd.LocalTraining(steps=5, batch_size=50, lr=0.1, clip_norm=10.0)


@cache
def federation(seed: int) -> fd.FederatedData:
    return fd.datasets.load("mnist", partition=fd.partition.dirichlet(N, 0.5, seed=seed))


def compute(rounds: int, name: str, rule: str, attack: str) -> cells.Entry:
    accuracy, robustness = [], []
    for seed in SEEDS:
        hostile = [] if attack == "none" else [A.share(HOSTILE / N, ATTACKS[attack], seed=seed)]
        options = {"cohort_size": N, "aggregation": RULES[rule], "sources": hostile}
        sim = fd.Simulation(MODEL, federation(seed), ALGORITHMS[name](), local=LOCAL, **options)
        (run,) = sim.sweep(rounds, [seed], EVERY, progress=False)
        accuracy.append(cells.accuracies(run))
        robustness.append(float(np.mean([record.get("robustness", 0.0) for record in run.history])))
    return {"algorithm": name, "rule": rule, "attack": attack, "accuracy": accuracy, "moved": robustness}


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The tables, and the same as a picture."""
    import matplotlib.pyplot as plt

    of_rules = {rule: [scores(found["FedAvg", rule, attack]) for attack in ATTACKS] for rule in RULES}
    of_algorithms = {
        f"{name}, {rule}": [scores(found[name, rule, attack]) for attack in ATTACKS]
        for rule in TWO_RULES
        for name in ALGORITHMS
    }
    text = f"# Clients that lie\n\nMean test accuracy (%) in the last {EVERY * LAST} rounds, with the 95 % confidence "
    text += "interval over three seeds. `experiments/adversaries.py` has the setting."
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    tables = (("FedAvg with six rules", of_rules), ("Four algorithms with two rules", of_algorithms))
    for axis, (title, rows) in zip(axes, tables, strict=True):
        shown = [[row, *(markdown.interval(values, ".1f") for values in of_row)] for row, of_row in rows.items()]
        text += f"\n\n## {title}\n\n{markdown.table(['', *ATTACKS], shown)}"
        means = np.array([[values.mean() for values in of_row] for of_row in rows.values()])
        image = axis.imshow(means, cmap="viridis", vmin=10, vmax=100, aspect="auto")
        for (i, j), mean in np.ndenumerate(means):
            color = "black" if mean > 60 else "white"
            axis.text(j, i, f"{mean:.1f}", ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(ATTACKS)), [*ATTACKS], rotation=30, ha="right")
        axis.set_yticks(range(len(rows)), [*rows])
        axis.set(title=title, xlabel="Attack of 5 of 25 clients")
    gaps = []
    for row, of_row in of_algorithms.items():
        name, _, rule = row.partition(", ")
        pairs = zip(of_row, of_algorithms[f"FedAvg, {rule}"], strict=True)
        if name != "FedAvg":
            gaps.append([row, *(markdown.interval(ours - fedavg, "+.1f") for ours, fedavg in pairs)])
    text += f"\n\n## Differences from FedAvg with the same rule and seeds\n\n{markdown.table(['', *ATTACKS], gaps)}"
    figure.colorbar(image, ax=axes, label="Test accuracy (%)")
    return {"adversaries.md": text, "adversaries.png": figure}


EXPERIMENT = cells.Experiment("adversaries", CELLS, compute, show, report, itemgetter("algorithm", "rule", "attack"))

if __name__ == "__main__":
    cells.main(EXPERIMENT, __doc__, rounds=60)
