"""Compares algorithms when cohorts really differ: uniform against cyclic participation.

    python experiments/cyclic_participation.py [--rounds 100] [--output DIR]
    python experiments/cyclic_participation.py --draw DIR      only writes the picture and the table again

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

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy import stats

import fedjax_drift as fd

GROUPS, LAST, SEEDS, TUNING_SEED = 5, 50, (0, 1, 2), 100
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


def federation(seed: int) -> fd.FederatedData:
    """MNIST with 100 clients. Clients 20 g to 20 g + 19 have the labels 2 g and 2 g + 1."""
    weights, rng = np.zeros((100, 10)), np.random.default_rng(seed)
    for i in range(100):
        weights[i, 2 * (i // 20) + np.arange(2)] = rng.dirichlet([1, 1])
    data = fd.datasets.load("mnist", partition=fd.partition.distribution(100, weights, seed))
    return replace(data, x_test=data.x_test[::2], y_test=data.y_test[::2])


def simulate(
    data: fd.FederatedData, rule: fd.participation.Participation, factory: Callable, lr: float, measure: str = "none",
    **settings: float,
) -> fd.Simulation:  # fmt: skip
    local = fd.LocalTraining(epochs=1, batch_size=50, lr=lr, clip_norm=10.0)
    options = {"cohort_size": 10, "participation": rule, "measure": () if measure == "none" else measure}
    return fd.Simulation(MODEL, data, factory(**settings), local=local, **options)


def score(history: list[dict]) -> float:
    return float(np.mean([record["accuracy"] for record in history[-LAST:]]))


def tuned(build: Callable[..., fd.Simulation], settings: list[dict], rounds: int) -> dict[str, float]:
    """The settings with the best validation accuracy. build: ``build(**setting) -> simulation``."""
    runs = fd.sweep(build, rounds, [TUNING_SEED], settings, 1, progress=False)
    return dict(max(runs, key=lambda run: np.nan_to_num(score(run.history))).setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path, help="folder for the results (default: no files)")
    parser.add_argument("--draw", type=Path, help="only write the picture and the table of this folder again")
    arguments = parser.parse_args()
    if arguments.draw:
        return report(arguments.draw)
    fd.use_cpu_devices()
    validation, federations = federation(TUNING_SEED).with_validation(0.1, 0), [federation(seed) for seed in SEEDS]
    file = arguments.output / "cyclic_participation.json" if arguments.output else None
    found: list[dict] = json.loads(file.read_text()) if file and file.exists() else []
    settings_of = {(run["algorithm"], run["participation"]): run["settings"] for run in found}
    for name, (factory, others) in ALGORITHMS.items():
        for rule, participation in RULES.items():
            if (name, rule) in settings_of:
                continue
            start = time.perf_counter()
            known = settings_of.get((name, "uniform")) if rule == "cyclic, random groups" else None
            build, grid = partial(simulate, validation, participation, factory), fd.grid(lr=LEARNING_RATES, **others)
            settings = settings_of[name, rule] = known or tuned(build, grid, arguments.rounds)
            histories = []
            for seed, data in zip(SEEDS, federations, strict=True):
                sim = simulate(data, participation, factory, measure="gradients", **settings)
                (run,) = sim.sweep(arguments.rounds, [seed], 1, measure_every=50, progress=False)
                histories.append(run.history)
            found.append({
                "algorithm": name, "participation": rule, "settings": settings,
                "accuracy": [[record["accuracy"] for record in history] for history in histories],
                "period_drift": [[r["period_drift"] for r in h if "period_drift" in r] for h in histories],
            })  # fmt: skip
            scores = [round(100 * score(history), 2) for history in histories]
            print(f"{name}, {rule}: {settings}, {scores} %, {time.perf_counter() - start:.0f} s", flush=True)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found) + "\n")
    if arguments.output:
        report(arguments.output)


def report(folder: Path) -> None:
    """Writes the table, and plots the scores and the accuracy in the last two cycles."""
    import matplotlib.pyplot as plt

    found = json.loads((folder / "cyclic_participation.json").read_text())
    scores = {
        (run["algorithm"], run["participation"]): 100 * np.array([np.mean(a[-LAST:]) for a in run["accuracy"]])
        for run in found
    }
    swings = {
        (run["algorithm"], run["participation"]): 100 * np.mean([swing(a) for a in run["accuracy"]]) for run in found
    }
    lines = [
        f"| algorithm | {' | '.join(RULES)} | lost by groups | swing within a cycle | settings |",
        "|---|" + "---:|" * 5 + "---|",
    ]
    for name in ALGORITHMS:
        cells = [f"{scores[name, rule].mean():.2f} ± {half_width(scores[name, rule]):.2f}" for rule in RULES]
        lost = scores[name, "uniform"] - scores[name, "cyclic, groups by label"]
        cells.append(f"{lost.mean():.2f} ± {half_width(lost):.2f}")
        cells.append(" / ".join(f"{swings[name, rule]:.1f}" for rule in RULES))
        settings = [run["settings"] for run in found if run["algorithm"] == name]
        cells.append("; ".join(", ".join(f"{k} {v:g}" for k, v in each.items()) for each in settings))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    (folder / "cyclic_participation.md").write_text(
        "# Cyclic against uniform participation\n\nMean test accuracy (%) over the last 50 rounds, with the 95 % "
        "confidence interval over three seeds. The swing is the highest minus the lowest accuracy within a cycle of "
        "five rounds, the mean over the last ten cycles, for the three kinds of participation. "
        "`experiments/cyclic_participation.py` has the setting.\n\n" + "\n".join(lines) + "\n"
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=(1, 1.3))
    colours, place = ("C7", "C9", "C3"), np.arange(len(ALGORITHMS))
    for i, rule in enumerate(RULES):
        means = [scores[name, rule].mean() for name in ALGORITHMS]
        errors = [half_width(scores[name, rule]) for name in ALGORITHMS]
        left.bar(place + 0.27 * (i - 1), means, 0.25, yerr=errors, label=rule, color=colours[i], capsize=2)
    left.set_xticks(place, ALGORITHMS, rotation=30)
    low = min(values.mean() for values in scores.values())
    left.set(ylabel="Test accuracy, last 50 rounds (%)", ylim=(max(0, low - 15), 100))
    left.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for i, name in enumerate(ALGORITHMS):
        (run,) = (r for r in found if (r["algorithm"], r["participation"]) == (name, "cyclic, groups by label"))
        curve = 100 * np.array(run["accuracy"])[:, -4 * GROUPS :].mean(0)
        right.plot(np.arange(-4 * GROUPS, 0), curve, label=name, color=f"C{i}", marker="o", markersize=3, linewidth=1.2)
    right.set(
        xlabel="Round, before the last", ylabel="Test accuracy (%)", title="Groups by label: the last four cycles"
    )
    right.locator_params(axis="x", integer=True)
    right.legend(fontsize=8, ncols=2, loc="center right", bbox_to_anchor=(1, 0.42))
    figure.savefig(folder / "cyclic_participation.png", dpi=110)


def swing(accuracy: list[float]) -> float:
    """The mean over the last ten cycles of the highest minus the lowest accuracy in a cycle."""
    cycles = np.array(accuracy[-LAST:]).reshape(-1, GROUPS)
    return float(np.ptp(cycles, axis=1).mean())


def half_width(values: np.ndarray) -> float:
    """Half the width of the 95 % confidence interval of the mean."""
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)


if __name__ == "__main__":
    main()
