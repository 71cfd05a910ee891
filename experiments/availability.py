"""Compares algorithms for clients that are away, when a client's data say how often it is there.

    python experiments/availability.py [--rounds 400] [--output DIR]
    python experiments/availability.py --draw DIR      only writes the picture and the table again

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
availability. The score is the mean test accuracy over the last 50 rounds, which are ten cycles or two days. Takes about
two hours on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from cyclic_participation import (
    GROUPS,
    LAST,
    SEEDS,
    TUNING_SEED,
    federation,
    half_width,
    score,
    simulate,
    tuned,
)

import fedjax_drift as fd

ALGORITHMS: dict[str, tuple[Callable, dict[str, list[float]]]] = {  # name -> (factory, other settings of the search)
    "FedAvg": (partial(fd.algorithms.fedavg, weighting="uniform"), {}),
    "FedVARP": (fd.algorithms.fedvarp, {}),
    "MIFA": (fd.algorithms.mifa, {}),
    "FedAU": (fd.algorithms.fedau, {}),
    "SCAFFOLD": (fd.algorithms.scaffold, {}),
    "FedDC": (fd.algorithms.feddc, {"alpha": [0.01, 0.1]}),
}
LEARNING_RATES = [0.05, 0.15, 0.45]
N, DAY, NIGHT = 100, 25, 10
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--output", type=Path, help="folder for the results (default: no files)")
    parser.add_argument("--draw", type=Path, help="only write the picture and the table of this folder again")
    arguments = parser.parse_args()
    if arguments.draw:
        return report(arguments.draw)
    fd.use_cpu_devices()
    rounds = arguments.rounds
    validation, federations = federation(TUNING_SEED).with_validation(0.1, 0), [federation(seed) for seed in SEEDS]
    file = arguments.output / "availability.json" if arguments.output else None
    found: list[dict] = json.loads(file.read_text()) if file and file.exists() else []
    done = {(run["algorithm"], run["kind"]) for run in found}
    for kind, rule in KINDS.items():
        for name, (factory, others) in ALGORITHMS.items():
            if (name, kind) in done:
                continue
            start = time.perf_counter()
            build = partial(simulate, validation, rule(TUNING_SEED, rounds), factory)
            settings = tuned(build, fd.grid(lr=LEARNING_RATES, **others), rounds)
            histories = []
            for seed, data in zip(SEEDS, federations, strict=True):
                sim = simulate(data, rule(seed, rounds), factory, **settings)
                (run,) = sim.sweep(rounds, [seed], 1, progress=False)
                histories.append(run.history)
            accuracy = [[record["accuracy"] for record in history] for history in histories]
            found.append({"algorithm": name, "kind": kind, "settings": settings, "accuracy": accuracy})
            scores = [round(100 * score(history), 2) for history in histories]
            print(f"{name}, {kind}: {settings}, {scores} %, {time.perf_counter() - start:.0f} s", flush=True)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found) + "\n")
    if arguments.output:
        report(arguments.output)


def report(folder: Path) -> None:
    """Writes the table, and plots the accuracy over the rounds for each kind of availability."""
    import matplotlib.pyplot as plt

    runs = {(run["algorithm"], run["kind"]): run for run in json.loads((folder / "availability.json").read_text())}
    scores = {key: 100 * np.array([np.mean(a[-LAST:]) for a in run["accuracy"]]) for key, run in runs.items()}
    lines = [f"| algorithm | {' | '.join(KINDS)} | settings |", "|---|" + "---:|" * len(KINDS) + "---|"]
    for name in ALGORITHMS:
        cells = [f"{scores[name, kind].mean():.2f} ± {half_width(scores[name, kind]):.2f}" for kind in KINDS]
        shown = [", ".join(f"{k} {v:g}" for k, v in runs[name, kind]["settings"].items()) for kind in KINDS]
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(shown)} |")
    lines += ["", "The difference from FedAvg with the same seeds:", ""]
    lines += [f"| algorithm | {' | '.join(KINDS)} |", "|---|" + "---:|" * len(KINDS)]
    for name in [*ALGORITHMS][1:]:
        gaps = [scores[name, kind] - scores["FedAvg", kind] for kind in KINDS]
        lines.append(f"| {name} | {' | '.join(f'{gap.mean():+.2f} ± {half_width(gap):.2f}' for gap in gaps)} |")
    (folder / "availability.md").write_text(
        f"# Availability that depends on the data\n\nMean test accuracy (%) over the last {LAST} rounds, with the 95 % "
        "confidence interval over three seeds. `experiments/availability.py` has the setting.\n\n"
        + "\n".join(lines)
        + "\n"
    )
    figure, axes = plt.subplots(1, len(KINDS), figsize=(13, 3.8), layout="constrained", sharey=True)
    for axis, kind in zip(axes, KINDS, strict=True):
        for i, name in enumerate(ALGORITHMS):
            curve = 100 * np.mean(runs[name, kind]["accuracy"], axis=0)
            width = max(1, min(DAY, len(curve) // 4))  # of a moving mean over whole cycles
            smooth = np.convolve(curve, np.ones(width) / width, "valid")
            axis.plot(np.arange(width, len(curve) + 1), smooth, label=name, color=f"C{i}", linewidth=1.3)
        axis.set(title=kind, xlabel="Round")
    axes[0].set(ylabel="Test accuracy (%)")
    axes[-1].legend(fontsize=8, loc="lower right")
    figure.savefig(folder / "availability.png", dpi=110)


if __name__ == "__main__":
    main()
