"""Measures asynchrony as a source of drift: accuracy against the staleness of the updates.

    python -m experiments.asynchrony [--updates 200] [--output DIR]
    python -m experiments.asynchrony --draw DIR      only writes the picture and the table again

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

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown

BUFFER, EVERY, SEEDS = 10, 2, (0, 1, 2)  # the accuracy is evaluated after every second update
UPDATES = 50  # the last ones, which are scored
LAST = UPDATES // EVERY
CONCURRENCIES = (10, 20, 60, 210)
DISCOUNTS = ("constant", "polynomial")
LEARNING_RATES = [0.015, 0.05, 0.15]
ALGORITHMS = {  # name -> (factory, other settings of the search)
    "FedAvg": (fd.algorithms.fedavg, {}),
    "SCAFFOLD": (fd.algorithms.scaffold, {}),
    "FedDC": (fd.algorithms.feddc, {"alpha": [0.01, 0.1]}),
}
MODEL = fd.models.mnist_2nn()
scores, show = partial(cells.scores, last=LAST), partial(cells.show, last=LAST)
POINTS = [
    (name, M, discount)
    for M in CONCURRENCIES
    for name in ALGORITHMS
    for discount in DISCOUNTS[: 1 if M == BUFFER else None]
]


@cache
def federation(seed: int) -> fd.FederatedData:
    """MNIST with 300 clients, most of which have two labels."""
    data = fd.datasets.load("mnist", partition=fd.partition.shards(300, 2, seed))
    return replace(data, x_test=data.x_test[::2], y_test=data.y_test[::2])


def simulate(data: fd.FederatedData, point: cells.Cell, lr: float, **settings: float) -> fd.Simulation:
    name, M, discount = point
    clock = fd.clock.asynchronous(M, discount, max_staleness=60)
    local, algorithm = fd.LocalTraining(epochs=1, batch_size=50, lr=lr, clip_norm=10.0), ALGORITHMS[name][0](**settings)
    options = {"cohort_size": BUFFER, "clock": clock, "devices": fd.Devices(speed_spread=0.5)}
    return fd.Simulation(MODEL, data, algorithm, local=local, **options)


def compute(updates: int, *point: Any) -> cells.Entry:
    grid = fd.grid(lr=LEARNING_RATES, **ALGORITHMS[point[0]][1])
    settings = cells.tuned(partial(simulate, cells.held_out(federation), point), grid, updates, LAST, EVERY)
    runs = []
    for seed in SEEDS:
        runs += simulate(federation(seed), point, **settings).sweep(updates, [seed], EVERY, progress=False)
    last = [record for run in runs for record in run.history[-UPDATES:]]
    return {
        "point": point, "settings": settings, "accuracy": [cells.accuracies(run) for run in runs],
        "staleness": float(np.nanmean([record["staleness"] for record in last])),
        "start_distance": float(np.nanmean([record["start_distance"] for record in last])),
        "too_stale": float(np.mean([record["too_stale"] for record in last])),
    }  # fmt: skip


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The table, and a plot of the scores and the distance of the starting models against the staleness."""
    import matplotlib.pyplot as plt

    same = {(name, BUFFER, other): found[name, BUFFER, DISCOUNTS[0]] for name in ALGORITHMS for other in DISCOUNTS}
    found = found | same  # without staleness, the discount changes nothing
    staleness = [
        np.mean([found[name, M, of]["staleness"] for name in ALGORITHMS for of in DISCOUNTS]) for M in CONCURRENCIES
    ]
    rows = [
        [name, discount, *(markdown.interval(scores(found[name, M, discount])) for M in CONCURRENCIES)]
        for name in ALGORITHMS
        for discount in DISCOUNTS
    ]
    text = (
        "# Accuracy against staleness\n\nMean test accuracy (%) over the last 50 updates, with the 95 % confidence "
        "interval over three seeds. The staleness is the mean over the aggregated updates. "
        "`experiments/asynchrony.py` has the setting.\n\n"
        + markdown.table(["algorithm", "discount", *(f"staleness {each:.1f}" for each in staleness)], rows)
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    place = np.arange(len(CONCURRENCIES))
    for i, name in enumerate(ALGORITHMS):
        for j, discount in enumerate(DISCOUNTS):
            look = {"color": f"C{i}", "marker": "o", "markersize": 4, "linestyle": ("-", "--")[j]}
            entries, x = [found[name, M, discount] for M in CONCURRENCIES], place + 0.03 * (2 * i + j - 2.5)
            means, errors, _ = zip(*(fd.statistics.mean(scores(entry)) for entry in entries), strict=True)
            left.errorbar(x, means, errors, capsize=2, label=f"{name}, {discount}", **look)
            right.plot(place[1:], [entry["start_distance"] for entry in entries[1:]], **look)
    left.set(ylabel="Test accuracy, last 50 updates (%)", ylim=(0, 100))
    right.set(ylabel="Distance of its start from the present model", yscale="log")
    left.legend(fontsize=8, loc="lower left")
    for axes in (left, right):
        axes.set_xlabel("Mean staleness of an update")
        axes.set_xticks(place, [f"{each:.0f}" for each in staleness])
        axes.set_xlim(-0.2 if axes is left else 0.8, len(place) - 0.8)
        axes.grid(alpha=0.3)
    return {"asynchrony.md": text, "asynchrony.png": figure}


EXPERIMENT = cells.Experiment("asynchrony", POINTS, compute, show, report, lambda entry: tuple(entry["point"]))

if __name__ == "__main__":
    fd.use_cpu_devices()
    cells.main(EXPERIMENT, __doc__, rounds=200)
