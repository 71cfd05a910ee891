"""Compares algorithms for clients that are away, when a client's data say how often it is there.

    python -m experiments.availability [--rounds 250] [--output DIR]
    python -m experiments.availability --draw DIR      only writes the picture and the table again

The results are saved after every algorithm and kind of availability. The same command continues.

The data are those of `cyclic_participation.py`: MNIST with 100 clients in five groups, and the clients of a group share
two labels. A round has 10 of the clients that are available, or all if there are fewer:

- uniform: all clients are always available.
- cyclic: the groups are available in turn, each in every fifth round.
- markov: a client of the groups 0 to 4 is available in 4, 8, 16, 32 and 64 % of the rounds. One that is away comes back
  with probability 0.04 in a round (a Markov chain, as in FedAU's paper).
- trace: days of 25 rounds. A group's nights begin a fifth of a day after those of the group before, and last for 10
  rounds. A client is available at night with its own probability, which is uniformly distributed, and in group 0 it is
  a fifth of that.

Every algorithm has weights 1. For every algorithm and kind, the learning rate (and alpha of FedDC) is the one with the
best validation accuracy in a run with another seed. Then three seeds are run, each with its own partition and its own
availability. Every second round is evaluated, so 25 evaluations in a row are in all rounds of a cycle and of a day. The
score is the mean test accuracy over the last 25, which are ten cycles or two days. Takes about two hours of a CPU core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown
from experiments.cyclic_participation import GROUPS, SEEDS, federation, simulate

ALGORITHMS: dict[str, tuple[Callable, dict[str, list[float]]]] = {  # name -> (factory, other settings of the search)
    "FedAvg": (partial(fd.algorithms.fedavg, weighting="uniform"), {}),
    "FedVARP": (fd.algorithms.fedvarp, {}),
    "MIFA": (fd.algorithms.mifa, {}),
    "FedAU": (fd.algorithms.fedau, {}),
    "SCAFFOLD": (fd.algorithms.scaffold, {}),
    "FedDC": (fd.algorithms.feddc, {"alpha": [0.01, 0.1]}),
}
LEARNING_RATES = [0.05, 0.15, 0.45, 1.35]
N, DAY, NIGHT = 100, 25, 10
EVERY, LAST = 2, 25  # rounds between two evaluations, and the evaluations of the score
scores, show = partial(cells.scores, last=LAST), partial(cells.show, last=LAST)
GROUP = np.arange(N) * GROUPS // N  # of each client


def chains(seed: int, rounds: int) -> np.ndarray:
    """bool [rounds, N]: Markov chains, whose share of available rounds doubles from group to group."""
    rng, share, up = np.random.default_rng(seed), 0.04 * 2.0**GROUP, 0.04
    down = up * (1 / share - 1)
    rows = [rng.random(N) < share]
    for _ in range(rounds - 1):
        rows.append(rows[-1] ^ (rng.random(N) < np.where(rows[-1], down, up)))
    return np.array(rows)


def nights(seed: int, rounds: int) -> np.ndarray:
    """bool [rounds, N]: at night, with a probability of each client, which is small in group 0."""
    rng, t = np.random.default_rng(seed), np.arange(rounds)[:, None]
    is_night = (t - GROUP * DAY // GROUPS) % DAY < NIGHT
    probability = rng.random(N) * np.where(GROUP == 0, 0.2, 1)
    return is_night & (rng.random((rounds, N)) < probability)


KINDS: dict[str, Callable[[int, int], fd.participation.Participation]] = {  # (seed, rounds) -> rule
    "uniform": lambda seed, rounds: fd.participation.uniform(),
    "cyclic": lambda seed, rounds: fd.participation.cyclic(GROUPS, shuffle=False),
    "markov": lambda seed, rounds: fd.participation.trace(chains(seed, rounds)),
    "trace": lambda seed, rounds: fd.participation.trace(nights(seed, rounds)),
}


def compute(rounds: int, name: str, kind: str) -> cells.Entry:
    (factory, others), rule = ALGORITHMS[name], KINDS[kind]
    build = partial(simulate, cells.held_out(federation), rule(cells.TUNING_SEED, rounds), factory)
    settings = cells.tuned(build, fd.grid(lr=LEARNING_RATES, **others), rounds, LAST, EVERY)
    accuracy = []
    for seed in SEEDS:
        sim = simulate(federation(seed), rule(seed, rounds), factory, **settings)
        accuracy += map(cells.accuracies, sim.sweep(rounds, [seed], EVERY, progress=False))
    return {"algorithm": name, "kind": kind, "settings": settings, "accuracy": accuracy}


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The tables, and a plot of the accuracy over the rounds for each kind of availability."""
    import matplotlib.pyplot as plt

    rows, gaps, used = [], [], []
    for name in ALGORITHMS:
        of_name = [scores(found[name, kind]) for kind in KINDS]
        rows.append([name, *map(markdown.interval, of_name)])
        used.append([name, *(markdown.words(found[name, kind]["settings"]) for kind in KINDS)])
        gap = [values - scores(found["FedAvg", kind]) for values, kind in zip(of_name, KINDS, strict=True)]
        gaps.append([name, *(markdown.interval(values, "+.2f") for values in gap)])
    text = (
        "# Availability that depends on the data\n\nMean test accuracy (%) over the last "
        f"{EVERY * LAST} rounds, with the 95 % confidence interval over three seeds. "
        "`experiments/availability.py` has the setting.\n\n## Six algorithms\n\n"
        + markdown.table(["algorithm", *KINDS], rows)
        + "\n\n## Differences from FedAvg with the same seeds\n\n"
        + markdown.table(["algorithm", *KINDS], gaps[1:])
        + "\n\n## Settings\n\n"
        + markdown.table(["algorithm", *KINDS], used)
    )
    figure, axes = plt.subplots(1, len(KINDS), figsize=(13, 3.8), layout="constrained", sharey=True)
    for axis, kind in zip(axes, KINDS, strict=True):
        for i, name in enumerate(ALGORITHMS):
            curve = 100 * np.mean(found[name, kind]["accuracy"], axis=0)
            width = max(1, min(LAST, len(curve) // 4))  # of a moving mean over whole cycles
            smooth = np.convolve(curve, np.ones(width) / width, "valid")
            axis.plot(EVERY * np.arange(width, len(curve) + 1), smooth, label=name, color=f"C{i}", linewidth=1.3)
        axis.set(title=kind, xlabel="Round")
    axes[0].set(ylabel=f"Test accuracy (%), mean over {EVERY * LAST} rounds")
    axes[-1].legend(fontsize=8, loc="lower right")
    return {"availability.md": text, "availability.png": figure}


EXPERIMENT = cells.Experiment(
    "availability", [(name, kind) for kind in KINDS for name in ALGORITHMS], compute, show, report,
    itemgetter("algorithm", "kind"),
)  # fmt: skip

if __name__ == "__main__":
    fd.use_cpu_devices()
    cells.main(EXPERIMENT, __doc__, rounds=250)
