"""Plots of our runs beside the published numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import fedjax_drift as fd
from experiments.tables.claims import Results
from experiments.tables.comparison import values_of
from experiments.tables.papers import Table, last_number, slug
from experiments.tables.results import Result

INITIALS = ("auc", "cka", "kl", "lp")  # abbreviations among the plotted quantities


def draw(table: Table, ours: Results, path: Path) -> bool:
    """Plots the curves of all settings that were run.

    The paper's numbers are added if they are scores of the plotted entry. If no run has this entry, writes no plot and
    returns False.
    """
    scale = max((score.scale for score in table.scores.values() if score.of == table.picture), default=1.0)
    scale = 100.0 if "accuracy" in table.picture else scale
    shown = [method for method in table.methods if any(method in methods for methods in ours.values())]
    settings = []
    for name, methods in ours.items():
        curves = {
            method: [_curve(run, table.picture, scale) for run in methods.get(method, {}).values()] for method in shown
        }
        runs = {method: [curve for curve in of if curve[0]] for method, of in curves.items()}
        reached = {method: _reached_marks(table, name, of, scale) for method, of in methods.items()}
        settings.append(fd.plots.Compared(name, runs, published_marks(table, name, methods, scale), reached))
    curves_of_all = (curve for setting in settings for curves in setting.runs.values() for curve in curves)
    if not any(math.isfinite(value) for _, values in curves_of_all for value in values):
        return False
    words = " ".join(word.upper() if word in INITIALS else word for word in table.picture.split("_"))
    ylabel = words[0].upper() + words[1:] + (" (%)" if scale == 100 else "")
    limits = (0.0, scale) if "accuracy" in table.picture else None
    style = fd.plots.Style(band="deviation")  # ± in the table is the same
    fd.plots.compared(settings, ylabel, path, limits=limits, style=style)
    return True


def draw_label_mixes(table: Table, ours: Results, folder: Path) -> list[Path]:
    """Plots the labels of the cohorts for each setting, for the first seed of the method that the table names."""
    mixes = {}
    for name, methods in ours.items():
        first = next(iter(methods.get(table.label_mix, {}).values()), None)
        if first is not None and "label_mix" in first.series:
            mixes[name] = [{"round": t, "label_mix": mix} for t, mix in zip(*first.series["label_mix"], strict=True)]
    largest = max((max(record["label_mix"]) for history in mixes.values() for record in history), default=None)
    written = []
    for name, history in mixes.items():
        written.append(folder / f"{table.name}-label-mix-{slug(name)}.png")
        fd.plots.label_mix(history, written[-1], title=f"Labels of the cohort: {name}", largest=largest)
    return written


def _curve(run: Result, entry: str, scale: float) -> tuple[list[int], list[float]]:
    if entry not in run.series:
        return [], []
    rounds, values = run.series[entry]
    return list(rounds), [scale * last_number(value) for value in values]


def published_marks(
    table: Table, setting: str, methods: Mapping[str, Mapping[int, Result]], scale: float
) -> dict[str, list[tuple[float | None, float]]]:
    """Returns the paper's numbers to plot beside our curves, as points (round, value) for each method.

    The round is None if the number does not belong to a round. A number for a fixed round is left out if our runs have
    fewer rounds.
    """
    last = max(run.rounds for runs in methods.values() for run in runs.values())
    marks: dict[str, list[tuple[float | None, float]]] = {}
    for name, printed in table.settings[setting].printed.items():
        score = table.scores[name]
        if score.of != table.picture or (score.take == "at" and score.round > last):
            continue
        for method, number in printed.items():
            if math.isfinite(number.value):
                point = {"rounds_to": (number.value, scale * score.target), "at": (score.round, number.value)}
                marks.setdefault(method, []).append(point.get(score.take, (None, number.value)))
    return marks


def _reached_marks(table: Table, setting: str, runs: Mapping[int, Result], scale: float) -> list[tuple[float, float]]:
    """Returns a point (round, target) for each target for which the paper prints the number of rounds.

    The round is the mean over our runs that reached the target.
    """
    marks = []
    for score in table.scores.values():
        if score.take == "rounds_to" and score.of == table.picture and score.name in table.settings[setting].printed:
            known = [value for value in values_of(score, runs) if math.isfinite(value)]
            if known:
                marks.append((float(np.mean(known)), scale * score.target))
    return marks
