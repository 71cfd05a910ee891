"""Writes the page of the leaderboard and its pictures from the results."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

import fedjax_drift as fd
from experiments import markdown
from experiments.leaderboard import entrants, runner
from experiments.leaderboard.entrants import ENTRANTS, FEDERATIONS

LAST = 3  # the final accuracy is the mean of the last evaluations
BASELINE = "FedAvg"
TEXT = f"""\
# Leaderboard

`python -m experiments.leaderboard run` compares {len(ENTRANTS)} algorithms with the same tuning effort, and
`python -m experiments.leaderboard report` writes this page. The other algorithms of the library are
`constrained` (FedAvg with a penalty on a part of the model), `partly_shared` (the general form of FedPer) and
`fedbn` (the networks have no normalisation layers).

- **Federations.** {entrants.CLIENTS} clients, {entrants.COHORT} of them take part in a round, with {entrants.EPOCHS}
  local epochs of batches of {entrants.BATCH_SIZE} and plain SGD. MNIST and Fashion-MNIST use the 2NN, CIFAR-10 the
  CIFAR CNN. "2 classes": each client has two classes.
- **Tuning.** Every algorithm gets {entrants.SETTINGS} settings. The learning rates are the same for all algorithms,
  except for FedAdamW and pFedMe, whose rates have another scale. The other hyper-parameters are drawn from ranges that
  were written down before any run (`experiments/leaderboard/entrants.py`). An algorithm without hyper-parameters thus
  tries eight learning rates. A setting trains for {entrants.TUNING_ROUNDS} rounds and is scored on
  {runner.VALIDATION:.0%} of each client's training examples, which are held out. The test set chooses nothing.
- **Runs.** The best setting is trained on all training examples for {entrants.ROUNDS} rounds, with five seeds on two
  partitions. Accuracies are means of the last {LAST} evaluations, ± is the half width of the 95 % t interval over the
  five runs. A run has diverged if its model is no longer finite. Its accuracy counts as 0. "vs FedAvg" is the mean
  difference between runs with the same seed and partition. It is bold if it is significant after Holm's correction for
  all algorithms of the table.
- **Costs.** CPU seconds and megabytes are those until the target accuracy is reached, if all runs reach it. CPU seconds
  are those of all cores, without compilation. Compare them only within a table. Outside of MNIST with Dirichlet 0.1,
  do not compare the algorithms from FedDecorr to HypCluster with others, because the machines differ (AMD EPYC and
  Intel Xeon). Megabytes are what all clients of the rounds receive and send.
- **Own models.** The last two columns are accuracies on each client's own test examples: the mean over the clients, and
  the mean of the worst 10 %. Algorithms with personal models are scored with them, all others after one epoch of
  fine-tuning with their tuned learning rate and plain SGD. This rate is too large for a few algorithms whose local
  steps are not plain SGD of all parameters (FedCM, MoFedSAM, FedBABU). The global models of algorithms with personal
  models are not comparable, so they have no rank.
- FedGVR and FedGVRGM read the accuracy on the test set during training. In the final runs, they have an advantage that
  the others do not have.
"""
RANKS = """\
The rank of an algorithm is that of its accuracy, averaged over federations and partitions. Algorithms whose mean ranks
differ by less than the critical difference (Nemenyi, 5 %) are not significantly different.
"""


class Row(NamedTuple):
    """The numbers of one algorithm on one federation."""

    name: str
    accuracy: np.ndarray  # [runs], in percent
    diverged: int  # the number of runs that ended with parameters that are not finite
    to_target: np.ndarray  # [runs], rounds; inf if the target is not reached
    seconds: float  # CPU seconds per round
    megabytes: float  # per round
    worst: np.ndarray  # [runs], global model, worst 10 % of the clients, in percent
    own: np.ndarray  # [runs], own models, mean over the clients
    own_worst: np.ndarray  # [runs]
    setting: dict[str, float]


def write(output: Path) -> None:
    """Writes README.md and ranks.png to the folder of the results."""
    results = {
        federation: {
            name: result
            for name in ENTRANTS
            if runner.is_complete(result := runner.read(runner.file_of(output, federation, name)))
        }
        for federation in FEDERATIONS
    }
    done = sum(map(len, results.values()))
    parts = [wrapped(TEXT), f"{done} of {len(ENTRANTS) * len(FEDERATIONS)} combinations have been run.\n"]
    conclusions = output / "conclusions.md"
    if conclusions.exists():
        parts.append("## What it says\n\n" + conclusions.read_text())
    tables = {federation: [row(federation, *pair) for pair in each.items()] for federation, each in results.items()}
    ranked = ranks(tables)
    if len(ranked) > 2:
        picture(ranked, len(blocks(tables, list(ranked)))).savefig(output / "ranks.png", dpi=110)
        parts.append(
            "## Mean ranks\n\n![Mean rank of each algorithm, and the critical difference](ranks.png)\n\n"
            + wrapped(RANKS)
        )
    parts += [table(federation, rows) for federation, rows in tables.items() if rows]
    output.mkdir(parents=True, exist_ok=True)
    (output / "README.md").write_text("\n".join(parts))


def wrapped(text: str) -> str:
    """Paragraphs and list items in lines of at most 100 characters."""
    items = re.split(r"(\n\n|\n(?=- ))", text.strip())  # every second one is a separator
    items[::2] = [
        textwrap.fill(" ".join(item.split()), 100, subsequent_indent="  " * item.startswith("- "))
        for item in items[::2]
    ]
    return "".join(items) + "\n"


def row(federation: str, name: str, result: Mapping[str, Any]) -> Row:
    setup, entrant, runs = FEDERATIONS[federation], ENTRANTS[name], result["runs"]
    curves = [[value or 0.0 for value in run["series"]["accuracy"]] for run in runs]
    leaves = jax.tree.leaves_with_path(jax.eval_shape(setup.model().init, jax.random.key(0)))
    sent = [leaf for path, leaf in leaves if re.search(entrant.sent, jax.tree_util.keystr(path))]
    bytes_of_model = 4 * sum(leaf.size for leaf in sent)
    reached = [
        next((t for t, value in zip(run["series"]["round"], curve, strict=True) if value >= setup.target), math.inf)
        for run, curve in zip(runs, curves, strict=True)
    ]

    def percent(model: str, key: str) -> np.ndarray:
        return 100 * np.array([run["clients"][model][key] or 0.0 for run in runs])

    return Row(
        name,
        100 * np.array([np.mean(curve[-LAST:]) for curve in curves]),
        sum(run["series"]["loss"][-1] is None for run in runs),
        np.array(reached),
        float(np.mean([run["cpu_seconds_per_round"] for run in runs])),
        entrants.COHORT * bytes_of_model * (entrant.down + entrant.up) / 1e6,
        percent("accuracy", "lowest_10"),
        percent("personal_accuracy", "mean"),
        percent("personal_accuracy", "lowest_10"),
        result["best"],
    )


def table(federation: str, rows: Sequence[Row]) -> str:
    target = FEDERATIONS[federation].target
    base = next((one for one in rows if one.name == BASELINE), None)
    gaps = {one.name: fd.statistics.mean(one.accuracy - base.accuracy) for one in rows if base and one.name != BASELINE}
    corrected = dict(zip(gaps, fd.statistics.holm([gap.p for gap in gaps.values()]), strict=True))
    columns = ["algorithm", "accuracy (%)", f"vs {BASELINE}", f"rounds to {100 * target:g} %", "CPU s", "MB"]
    columns += ["worst 10 %", "own models", "own, worst 10 %", "setting"]
    lines = []
    for one in sorted(rows, key=lambda one: (ENTRANTS[one.name].personal, -one.accuracy.mean())):
        gap = f"{gaps[one.name].value:+.2f}" if one.name in gaps else "-"
        reached = one.to_target[np.isfinite(one.to_target)]
        some = f" ({len(reached)} of {len(one.to_target)})" if len(reached) < len(one.to_target) else ""
        costs = [f"{reached.mean():.0f}{some}" if len(reached) else "-", "-", "-"]
        if len(reached) == len(one.to_target):  # the mean over some of the runs would be too small
            costs[1:] = (f"{reached.mean() * each:.1f}" for each in (one.seconds, one.megabytes))
        diverged = f" ({one.diverged} of {len(one.accuracy)} diverged)" if one.diverged else ""
        cells = [
            one.name,
            markdown.interval(one.accuracy) + diverged,
            f"**{gap}**" if corrected.get(one.name, 1.0) <= fd.statistics.SIGNIFICANT else gap,
            *costs,
            *(f"{values.mean():.1f}" for values in (one.worst, one.own, one.own_worst)),
            markdown.words(one.setting, "="),
        ]
        lines.append(cells)
    return f"## {federation}\n\n{markdown.table(columns, lines, 'lrrrrrrrrl')}\n"


# --- statistics -------------------------------------------------------------------------------------------------------


def blocks(tables: Mapping[str, Sequence[Row]], names: Sequence[str]) -> list[list[float]]:
    """The mean accuracy of each algorithm on each partition of the federations that all of them have completed."""
    complete = [rows for rows in tables.values() if set(names) <= {one.name for one in rows}]
    first = np.cumsum([0, *map(len, entrants.SEEDS)])
    return [
        [next(one for one in rows if one.name == name).accuracy[first[p] : first[p + 1]].mean() for name in names]
        for rows in complete
        for p in range(len(entrants.SEEDS))
    ]


def ranks(tables: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """The mean rank of each algorithm with a comparable global model. 1 is the best. Only if all have been run."""
    names = [name for name, entrant in ENTRANTS.items() if not entrant.personal]
    has_run = set.union(set(), *({one.name for one in rows} for rows in tables.values()))
    names = [name for name in names if name in has_run]
    accuracies = blocks(tables, names)
    if not accuracies:
        return {}
    mean = np.mean([stats.rankdata([-value for value in block]) for block in accuracies], axis=0)
    return dict(sorted(zip(names, mean.tolist(), strict=True), key=lambda pair: pair[1]))


def critical_difference(k: int, n: int) -> float:
    """The critical difference of Nemenyi's test for the mean ranks of k algorithms on n blocks, at 5 %."""
    return float(stats.studentized_range.ppf(0.95, k, np.inf) / math.sqrt(2) * math.sqrt(k * (k + 1) / (6 * n)))


def picture(ranked: Mapping[str, float], n: int) -> Figure:
    """Draws the mean ranks, best on top, and the critical difference from the best one."""
    figure = Figure(figsize=(7, 0.24 * len(ranked) + 1.1), layout="constrained")
    axes = figure.subplots()
    y = np.arange(len(ranked))[::-1]
    best, difference = min(ranked.values()), critical_difference(len(ranked), n)
    axes.axvspan(best, best + difference, color="0.92", zorder=0)
    label = f"critical difference {difference:.1f}"
    axes.text(best + difference, y[0] + 0.7, label, ha="right", fontsize=8, color="0.4")
    axes.hlines(y, 1, list(ranked.values()), color="0.8", linewidth=1)
    axes.plot(list(ranked.values()), y, "o", color="#1f5fa8", markersize=5)
    axes.set_yticks(y, list(ranked), fontsize=8)
    axes.set(xlabel=f"Mean rank of the accuracy ({n} federations x partitions; 1 is the best)", xlim=(1, None))
    axes.set_ylim(-0.7, len(ranked) + 0.3)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure
