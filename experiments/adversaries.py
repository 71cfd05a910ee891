"""Compares robust rules, and algorithms against client drift, when a fifth of the clients lie.

    python experiments/adversaries.py [--rounds 60] [--output DIR]
    python experiments/adversaries.py --draw DIR      only writes the picture and the table again

MNIST with 25 clients whose labels are Dirichlet(0.5), all of equal weight. All take part in every round with five
local steps of 50 examples, and 5 of them are adversaries. The model is the 2NN of McMahan et al. (two hidden layers of
200), with a learning rate of 0.1. Six rules, six attacks and none, FedAvg; and four algorithms with the mean and with
one robust rule. Three seeds, which draw the partition, the adversaries and the run. The score is the mean test accuracy
of the last 10 rounds. Nothing is tuned: the settings of the rules know f = 5. The results are saved after every cell,
and the same command continues. Takes about an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cyclic_participation import half_width

import fedjax_drift as fd

N, HOSTILE, SEEDS, LAST = 25, 5, (1, 2, 3), 10
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
CELLS += [(name, rule, attack) for name in ALGORITHMS for rule in ("mean", "NNM, trimmed mean") for attack in ATTACKS]
CELLS = [*dict.fromkeys(CELLS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path, help="folder for the results (default: no files)")
    parser.add_argument("--draw", type=Path, help="only write the picture and the table of this folder again")
    arguments = parser.parse_args()
    if arguments.draw:
        return report(arguments.draw)
    file = arguments.output / "adversaries.json" if arguments.output else None
    found: list[dict] = json.loads(file.read_text()) if file and file.exists() else []
    done = {(run["algorithm"], run["rule"], run["attack"]) for run in found}
    model, local = fd.models.mnist_2nn(), fd.LocalTraining(steps=5, batch_size=50, lr=0.1)
    parts = [fd.partition.dirichlet(N, 0.5, seed=seed) for seed in SEEDS]
    federations = [fd.datasets.load("mnist", partition=part) for part in parts]
    for name, rule, attack in CELLS:
        if (name, rule, attack) in done:
            continue
        start, accuracy, robustness = time.perf_counter(), [], []
        for seed, data in zip(SEEDS, federations, strict=True):
            hostile = [] if attack == "none" else [A.share(HOSTILE / N, ATTACKS[attack], seed=seed)]
            sim = fd.Simulation(
                model, data, ALGORITHMS[name](), local=local, cohort_size=N, aggregation=RULES[rule], sources=hostile
            )
            (run,) = sim.sweep(arguments.rounds, [seed], 1, progress=False)
            accuracy.append([record["accuracy"] for record in run.history])
            robustness.append(float(np.mean([record.get("robustness", 0.0) for record in run.history])))
        found.append({"algorithm": name, "rule": rule, "attack": attack, "accuracy": accuracy, "moved": robustness})
        scores = [round(float(100 * np.mean(a[-LAST:])), 2) for a in accuracy]
        print(f"{name}, {rule}, {attack}: {scores} %, {time.perf_counter() - start:.0f} s", flush=True)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found) + "\n")
    if arguments.output:
        report(arguments.output)


def report(folder: Path) -> None:
    """Writes the tables, and draws them."""
    import matplotlib.pyplot as plt

    runs = json.loads((folder / "adversaries.json").read_text())
    lasts = {(r["algorithm"], r["rule"], r["attack"]): np.array([a[-LAST:] for a in r["accuracy"]]) for r in runs}
    scores = {key: 100 * last.mean(1) for key, last in lasts.items()}
    of_rules = {rule: [scores["FedAvg", rule, attack] for attack in ATTACKS] for rule in RULES}
    of_algorithms = {
        f"{name}, {rule}": [scores[name, rule, attack] for attack in ATTACKS]
        for rule in ("mean", "NNM, trimmed mean")
        for name in ALGORITHMS
    }
    text = "# Clients that lie\n\nMean test accuracy (%) of the last 10 rounds, with the 95 % confidence interval over "
    text += "three seeds. `experiments/adversaries.py` has the setting.\n"
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    tables = (("FedAvg with six rules", of_rules), ("Four algorithms with two rules", of_algorithms))
    for axis, (title, table) in zip(axes, tables, strict=True):
        text += f"\n## {title}\n\n| | {' | '.join(ATTACKS)} |\n|---|{'---:|' * len(ATTACKS)}\n"
        for row, cells in table.items():
            text += f"| {row} | {' | '.join(f'{c.mean():.1f} ± {half_width(c):.1f}' for c in cells)} |\n"
        values = np.array([[cell.mean() for cell in cells] for cells in table.values()])
        image = axis.imshow(values, cmap="viridis", vmin=10, vmax=100, aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            axis.text(
                j, i, f"{value:.1f}", ha="center", va="center", color="black" if value > 60 else "white", fontsize=8
            )
        axis.set_xticks(range(len(ATTACKS)), [*ATTACKS], rotation=30, ha="right")
        axis.set_yticks(range(len(table)), [*table])
        axis.set(title=title, xlabel="Attack of 5 of 25 clients")
    figure.colorbar(image, ax=axes, label="Test accuracy (%)")
    (folder / "adversaries.md").write_text(text)
    figure.savefig(folder / "adversaries.png", dpi=110)


if __name__ == "__main__":
    main()
