"""Measures asynchrony as a source of drift: accuracy against the staleness of the updates.

    python experiments/asynchrony.py [--updates 200] [--output DIR]
    python experiments/asynchrony.py --draw DIR      only writes the picture and the table again

The results are saved after every combination. The same command continues.

The data are MNIST with 300 clients, each with two blocks of the examples sorted by label. The server is updated with
every 10 reports (FedBuff). With M clients in flight, an update is about M / 10 - 1 updates old, and M is 10 to 210. The
speeds of the clients are log-normal with a spread of 0.5, and updates older than 60 are dropped. With the discount
"polynomial", an update with staleness tau is multiplied by (1 + tau)^-1/2.

The model is 2NN. A client trains for one epoch with batch size 50, and gradients are clipped to norm 10. For every
algorithm, concurrency and discount, the learning rate (and alpha of FedDC) is the one with the best validation accuracy
in a run with another seed, in which 10 % of the training examples are held out. Then three seeds are run, each with its
own partition. The score of a run is its mean accuracy on half of the test set over the last 50 updates.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy import stats

import fedjax_drift as fd

BUFFER, LAST, SEEDS, TUNING_SEED = 10, 50, (0, 1, 2), 100
CONCURRENCIES = (10, 20, 60, 210)
DISCOUNTS = ("constant", "polynomial")
LEARNING_RATES = [0.015, 0.05, 0.15]
ALGORITHMS = {  # name -> (factory, other settings of the search)
    "FedAvg": (fd.algorithms.fedavg, {}),
    "SCAFFOLD": (fd.algorithms.scaffold, {}),
    "FedDC": (fd.algorithms.feddc, {"alpha": [0.01, 0.1]}),
}
MODEL = fd.models.mnist_2nn()
Point = tuple[str, int, str]  # algorithm, concurrency, discount
POINTS: list[Point] = [
    (name, M, discount)
    for M in CONCURRENCIES
    for name in ALGORITHMS
    for discount in DISCOUNTS[: 1 if M == BUFFER else None]
]


def federation(seed: int) -> fd.FederatedData:
    """MNIST with 300 clients, most of which have two labels."""
    data = fd.datasets.load("mnist", partition=fd.partition.shards(300, 2, seed))
    return replace(data, x_test=data.x_test[::2], y_test=data.y_test[::2])


def simulate(data: fd.FederatedData, point: Point, lr: float, **settings: float) -> fd.Simulation:
    name, M, discount = point
    clock = fd.clock.asynchronous(M, discount, max_staleness=60)
    local, algorithm = fd.LocalTraining(epochs=1, batch_size=50, lr=lr, clip_norm=10.0), ALGORITHMS[name][0](**settings)
    options = {"cohort_size": BUFFER, "clock": clock, "devices": fd.Devices(speed_spread=0.5)}
    return fd.Simulation(MODEL, data, algorithm, local=local, **options)


def score(history: list[dict]) -> float:
    return float(np.mean([record["accuracy"] for record in history if "accuracy" in record][-LAST // 2 :]))


def tuned(data: fd.FederatedData, point: Point, updates: int) -> dict[str, float]:
    """The settings with the best validation accuracy."""
    settings = fd.grid(lr=LEARNING_RATES, **ALGORITHMS[point[0]][1])
    runs = fd.sweep(partial(simulate, data, point), updates, [TUNING_SEED], settings, 2, progress=False)
    return dict(max(runs, key=lambda run: np.nan_to_num(score(run.history))).setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--output", type=Path, help="folder for the results (default: no files)")
    parser.add_argument("--draw", type=Path, help="only write the picture and the table of this folder again")
    arguments = parser.parse_args()
    if arguments.draw:
        return report(arguments.draw)
    fd.use_cpu_devices()
    validation, federations = federation(TUNING_SEED).with_validation(0.1, 0), [federation(seed) for seed in SEEDS]
    file = arguments.output / "asynchrony.json" if arguments.output else None
    found: list[dict] = json.loads(file.read_text()) if file and file.exists() else []
    done = {tuple(run["point"]) for run in found}
    for point in POINTS:
        if point in done:
            continue
        start = time.perf_counter()
        settings = tuned(validation, point, arguments.updates)
        histories = []
        for seed, data in zip(SEEDS, federations, strict=True):
            (run,) = simulate(data, point, **settings).sweep(arguments.updates, [seed], 2, progress=False)
            histories.append(run.history)
        of_all = [record for history in histories for record in history[-LAST:]]
        found.append({
            "point": point, "settings": settings, "scores": [score(history) for history in histories],
            "accuracy": [[r["accuracy"] for r in history if "accuracy" in r] for history in histories],
            "staleness": float(np.nanmean([record["staleness"] for record in of_all])),
            "start_distance": float(np.nanmean([record["start_distance"] for record in of_all])),
            "too_stale": float(np.mean([record["too_stale"] for record in of_all])),
        })  # fmt: skip
        scores = [round(100 * value, 2) for value in found[-1]["scores"]]
        print(f"{point}: {settings}, {scores} %, {time.perf_counter() - start:.0f} s", flush=True)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found) + "\n")
    if arguments.output:
        report(arguments.output)


def report(folder: Path) -> None:
    """Writes the table, and plots the scores and the distance of the starting models against the staleness."""
    import matplotlib.pyplot as plt

    runs = {tuple(run["point"]): run for run in json.loads((folder / "asynchrony.json").read_text())}
    for (name, M, _), run in [*runs.items()]:
        if M == BUFFER:
            runs |= {(name, M, other): run for other in DISCOUNTS}
    lines = [
        "| algorithm | discount | " + " | ".join(f"staleness {staleness(runs, M):.1f}" for M in CONCURRENCIES) + " |",
        "|---|---|" + "---:|" * len(CONCURRENCIES),
    ]
    for name in ALGORITHMS:
        for discount in DISCOUNTS:
            cells = [100 * np.array(runs[name, M, discount]["scores"]) for M in CONCURRENCIES]
            shown = " | ".join(f"{cell.mean():.2f} ± {half_width(cell):.2f}" for cell in cells)
            lines.append(f"| {name} | {discount} | {shown} |")
    (folder / "asynchrony.md").write_text(
        "# Accuracy against staleness\n\nMean test accuracy (%) over the last 50 updates, with the 95 % confidence "
        "interval over three seeds. The staleness is the mean over the aggregated updates. "
        "`experiments/asynchrony.py` has the setting.\n\n" + "\n".join(lines) + "\n"
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    place = np.arange(len(CONCURRENCIES))
    for i, name in enumerate(ALGORITHMS):
        for j, discount in enumerate(DISCOUNTS):
            look = {"color": f"C{i}", "marker": "o", "markersize": 4, "linestyle": ("-", "--")[j]}
            mine = [runs[name, M, discount] for M in CONCURRENCIES]
            scores, x = [100 * np.array(run["scores"]) for run in mine], place + 0.03 * (2 * i + j - 2.5)
            means, errors = [v.mean() for v in scores], [half_width(v) for v in scores]
            left.errorbar(x, means, errors, capsize=2, label=f"{name}, {discount}", **look)
            right.plot(place[1:], [run["start_distance"] for run in mine[1:]], **look)
    left.set(ylabel="Test accuracy, last 50 updates (%)", ylim=(0, 100))
    right.set(ylabel="Distance of its start from the present model", yscale="log")
    left.legend(fontsize=8, loc="lower left")
    for axes in (left, right):
        axes.set_xlabel("Mean staleness of an update")
        axes.set_xticks(place, [f"{staleness(runs, M):.0f}" for M in CONCURRENCIES])
        axes.set_xlim(-0.2 if axes is left else 0.8, len(place) - 0.8)
        axes.grid(alpha=0.3)
    figure.savefig(folder / "asynchrony.png", dpi=110)


def staleness(runs: dict, M: int) -> float:
    return float(np.mean([run["staleness"] for (_, concurrency, _), run in runs.items() if concurrency == M]))


def half_width(values: np.ndarray) -> float:
    """Half the width of the 95 % confidence interval of the mean."""
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)


if __name__ == "__main__":
    main()
