"""The drift atlas: how much accuracy an algorithm loses to a source of drift.

    python -m experiments.atlas [--rounds 99] [--output DIR]
    python -m experiments.atlas --draw DIR      only writes the picture and the tables again

Fashion-MNIST with 100 clients of equal sizes, whose label mixes are drawn from Dirichlet(0.5). 10 of them take part in
each of 99 rounds, and train for one epoch with batch size 50. Gradients are clipped to norm 10. This federation is the
reference ("none"). Ten sources of drift are added to it, each alone and at two strengths (`SOURCES`). The models are
softmax regression and the 2NN of McMahan et al. (two hidden layers of 200).

Every cell (model, algorithm, source, strength) is tuned with the same effort: 8 settings, which are those of the
leaderboard for the algorithm, in runs with another seed, in which 10 % of the training examples are held out. The best
one runs with six seeds. A seed has its own partition, cohorts and initial model, the same for all cells. Every third
round is evaluated on half of the test set. The score of a run is its mean accuracy in the last 30 rounds. The loss of
accuracy is the reference's score minus this one, for the same seed.

The results are saved after every cell, and the same command continues. Takes about ten hours of a CPU core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown
from experiments.leaderboard.entrants import ENTRANTS

N, COHORT, ROUNDS, SEEDS = 100, 10, 99, range(6)
EVERY, LAST = 3, 10  # every third round is evaluated, and the last ten evaluations are scored: whole cycles of 5 and 10
CHANGE = 60  # the round of the change of labels
ALGORITHMS = (
    "FedAvg", "FedProx", "FedNova", "FedAvgM", "FedAdam", "FedExP", "FedCM", "FedSAM", "MOON", "SCAFFOLD", "FedDyn",
    "FedDC",
)  # fmt: skip
MODELS = {"linear": fd.models.linear((28, 28, 1), 10), "2NN": fd.models.mnist_2nn()}
P, A = fd.partition, fd.adversaries
MILD = partial(P.dirichlet, N, 0.5)


class Source(NamedTuple):
    """A source of drift at one strength. What it does not name is that of the reference."""

    what: str  # in words, for the page
    partition: Callable[[int], P.Partition] = MILD  # of a seed
    shift: Callable[[int], fd.shift.Shift] | None = None  # of a seed
    options: Callable[[int], dict[str, Any]] = lambda seed: {}  # of `fd.Simulation`, of a seed
    codec: Any = None


def strengths(seed: int, low: float = 0.0) -> np.ndarray:
    """A number for each client, uniformly distributed in [low, 1]."""
    return np.random.default_rng(seed).uniform(low, 1, N)


def turned(degrees: float) -> Source:
    what = f"a client's images are rotated by its own angle, uniform in ±{degrees:g}°"
    return Source(what, shift=lambda seed: fd.shift.rotate(degrees, by=strengths(seed, -1)))


def noisy(sigma: float) -> Source:
    what = f"a client's images have Gaussian noise of its own size, uniform in 0 to {sigma:g} standard deviations"
    return Source(what, shift=lambda seed: fd.shift.gaussian_noise(sigma, by=strengths(seed)))


def changed(pairs: list[tuple[int, int]]) -> Source:
    what = f"{len(pairs)} of five pairs of labels are exchanged in round {CHANGE}, also in the test set"
    return Source(what, shift=lambda seed: fd.shift.permute_labels([CHANGE], pairs))


def cyclic(groups: int) -> Source:
    what = f"{groups} groups of clients with similar labels are available in turn"
    return Source(what, options=lambda seed: {"participation": fd.participation.cyclic(groups, shuffle=False)})


def failing(share: float) -> Source:
    what = f"{share:.0%} of the cohort drop out, and {share:.0%} of the others stop early"
    return Source(what, options=lambda seed: {"failures": fd.Failures(dropout=share, stragglers=share)})


def late(M: int) -> Source:
    what = f"{M} clients train at the same time, so an update is about {M // COHORT - 1} updates old"
    options = {"clock": fd.clock.asynchronous(M, "polynomial"), "devices": fd.Devices(speed_spread=0.5)}
    return Source(what, options=lambda seed: options)


def sparse(fraction: float) -> Source:
    what = f"{fraction:.1%} of the values of a message are sent (top k, with error feedback)"
    return Source(what, codec=fd.compression.top_k(fraction))


def hostile(share: float) -> Source:
    what = f"{share:.0%} of the clients send the negative of their message"
    return Source(what, options=lambda seed: {"sources": [A.share(share, A.sign_flip(), seed=seed)]})


SOURCES: dict[str, dict[str, Source]] = {  # source -> strength
    "none": {"": Source("labels from Dirichlet(0.5), equal sizes")},
    "labels": {
        "weak": Source("labels from Dirichlet(0.1)", partial(P.dirichlet, N, 0.1)),
        "strong": Source("one label per client", partial(P.classes, N, 1)),
    },
    "sizes": {
        word: Source(f"log-normal sizes, sigma = {sigma:g}", partial(P.dirichlet, N, 0.5, size_sigma=sigma))
        for word, sigma in (("weak", 1.0), ("strong", 2.0))
    },
    "rotation": {"weak": turned(30.0), "strong": turned(90.0)},
    "noise": {"weak": noisy(1.0), "strong": noisy(4.0)},
    "label change": {"weak": changed([(0, 6)]), "strong": changed([(0, 6), (1, 7), (2, 8), (3, 9), (4, 5)])},
    "cyclic": {"weak": cyclic(5), "strong": cyclic(10)},
    "failures": {"weak": failing(0.3), "strong": failing(0.7)},
    "late updates": {"weak": late(30), "strong": late(90)},
    "compression": {"weak": sparse(0.01), "strong": sparse(0.001)},
    "adversaries": {"weak": hostile(0.2), "strong": hostile(0.4)},
}
CELLS = [
    (model, algorithm, source, strength)
    for model in MODELS
    for source in SOURCES
    for strength in SOURCES[source]
    for algorithm in ALGORITHMS
    if (model, algorithm) != ("linear", "MOON")  # a linear model has no features to compare
]
scores, show = partial(cells.scores, last=LAST), partial(cells.show, last=LAST)


def by_label(partition: P.Partition) -> Callable[..., list[np.ndarray]]:
    """The same partition, with its clients in the order of their most frequent labels."""

    def sorted_parts(y: np.ndarray, writer: np.ndarray | None = None) -> list[np.ndarray]:
        return sorted(partition(y), key=lambda rows: int(np.bincount(y[rows], minlength=10).argmax()))

    return sorted_parts


@lru_cache(maxsize=len(SEEDS) + 1)  # those of one source
def federation(source: str, strength: str, seed: int) -> fd.FederatedData:
    found = SOURCES[source][strength].partition
    data = fd.datasets.load("fashion_mnist", partition=by_label(found(seed=seed)))
    return replace(data, x_test=data.x_test[::2], y_test=data.y_test[::2])


def simulate(data: fd.FederatedData, seed: int, cell: cells.Cell, lr: float, **settings: float) -> fd.Simulation:
    model, name, source, strength = cell
    of = SOURCES[source][strength]
    algorithm = ENTRANTS[name].factory(**settings)
    if of.codec is not None:
        algorithm = fd.compression.compressed(algorithm, of.codec)
    local = fd.LocalTraining(epochs=1, batch_size=50, lr=lr, clip_norm=10.0)
    data = data if of.shift is None else data.shifted(of.shift(seed), seed=seed)
    return fd.Simulation(MODELS[model], data, algorithm, local=local, cohort_size=COHORT, **of.options(seed))


def compute(rounds: int, *cell: str) -> cells.Entry:
    model, name, source, strength = cell
    build = partial(simulate, cells.held_out(federation, source, strength), cells.TUNING_SEED, cell)
    settings = cells.tuned(build, ENTRANTS[name].settings("atlas"), rounds, LAST, EVERY)
    accuracy = []
    for seed in SEEDS:
        sim = simulate(federation(source, strength, seed), seed, cell, **settings)
        (run,) = sim.sweep(rounds, [seed], EVERY, progress=False)
        accuracy.append([round(value, 4) for value in cells.accuracies(run)])
    settings = {key: float(f"{value:.4g}") for key, value in settings.items()}
    return {"cell": cell, "settings": settings, "accuracy": accuracy}


def losses(found: dict[cells.Cell, cells.Entry], cell: cells.Cell) -> np.ndarray:
    """The loss of accuracy of a cell against the reference (percentage points), one for each seed."""
    return scores(found[*cell[:2], "none", ""]) - scores(found[cell])


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The tables, and the losses as a picture."""
    import matplotlib.pyplot as plt

    columns = [(source, strength) for source in SOURCES for strength in SOURCES[source] if strength]
    about = [[source, strength, SOURCES[source][strength].what] for source, strength in [("none", ""), *columns]]
    text = "# Drift atlas\n\nThe loss of accuracy (percentage points) to a source of drift, mean over six seeds. "
    drifts = [cell for cell in found if cell[2] != "none"]
    text += (
        f"* marks losses, and + gains, that are significant (paired t test, Holm over all {len(drifts)} cells, 5 %). "
    )
    text += "`experiments/atlas.py` has the setting.\n\n## Sources\n\n"
    text += markdown.table(["source", "strength", "what"], about)
    p_values = fd.statistics.holm([fd.statistics.mean(losses(found, cell)).p for cell in drifts])
    significant = {cell: p < fd.statistics.SIGNIFICANT for cell, p in zip(drifts, p_values, strict=True)}
    figure, axes = plt.subplots(len(MODELS), 1, figsize=(13, 9.4), layout="constrained")
    for axis, model in zip(axes, MODELS, strict=True):
        names = [name for name in ALGORITHMS if (model, name, "none", "") in found]
        table, rows = np.zeros((len(names), len(columns))), []
        for i, name in enumerate(names):
            row = [name, markdown.interval(scores(found[model, name, "none", ""]), ".1f")]
            for j, (source, strength) in enumerate(columns):
                cell = model, name, source, strength
                table[i, j] = losses(found, cell).mean()
                mark = ("*" if table[i, j] > 0 else "+") if significant[cell] else ""
                row.append(f"{table[i, j]:.1f}{mark}")
                color = "white" if table[i, j] > 30 else "black"
                weight = "bold" if significant[cell] else "normal"
                axis.text(j, i, row[-1], ha="center", va="center", color=color, fontsize=8, fontweight=weight)
            rows.append(row)
        head = ["", "none (accuracy)", *(f"{source}, {strength}" for source, strength in columns)]
        text += f"\n\n## {model}\n\n{markdown.table(head, rows)}"
        image = axis.imshow(table, cmap="YlOrRd", vmin=0, vmax=50, aspect="auto")
        names_of_columns = [f"{source}, {strength}" for source, strength in columns]
        axis.set_xticks(range(len(columns)), names_of_columns, fontsize=8, rotation=30, ha="right")
        accuracies = [f"{name} ({scores(found[model, name, 'none', '']).mean():.1f} %)" for name in names]
        axis.set_yticks(range(len(names)), accuracies, fontsize=9)
        axis.set(title=f"{model}: accuracy without the source in parentheses", ylabel="Algorithm")
    axes[-1].set(xlabel="Source of drift")
    figure.colorbar(image, ax=axes, label="Loss of accuracy (percentage points)", extend="both", shrink=0.6)
    return {"atlas.md": text, "atlas.png": figure}


EXPERIMENT = cells.Experiment("atlas", CELLS, compute, show, report, lambda entry: tuple(entry["cell"]))

if __name__ == "__main__":
    fd.use_cpu_devices()
    fd.use_compilation_cache()
    cells.main(EXPERIMENT, __doc__, rounds=ROUNDS)
