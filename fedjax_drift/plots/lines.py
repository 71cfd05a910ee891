"""The lines of a plot: the values of each run against rounds or local epochs, with a band over the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift.plots.style import Style
from fedjax_drift.records import History, Runs, measured, spent
from fedjax_drift.statistics import quantile

SHOWN_POINTS = 100  # lines with more points are smoothed by default, to at most half as many points
LINE_WIDTH = 0.005  # of a line in a plot, relative to the range of the values
RANGES = {  # the possible values of entries of a record
    "accuracy": (0, 1), "client_mean_accuracy": (0, 1), "cka": (0, 1), "gain": (0, 1), "update_cosine": (-1, 1),
}  # fmt: skip
BELOW_AND_ABOVE = np.array([[-1.0], [1.0]])
BANDS: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {  # its name in plots and tables, and its edges [2, n]
    "interval": (
        "95 % interval of the mean",
        lambda v: v.mean(0) + BELOW_AND_ABOVE * (quantile(len(v)) * v.std(0, ddof=1) / len(v) ** 0.5),
    ),
    "deviation": ("± standard deviation", lambda v: v.mean(0) + BELOW_AND_ABOVE * v.std(0, ddof=1)),
    "range": ("smallest to largest seed", lambda v: (v.min(0), v.max(0))),
}
LOSSES = ("train_loss", "loss")  # a run has diverged if one of them is not finite
Seeds = Sequence[tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]]  # (rounds, values) of each seed


class Line(NamedTuple):
    """The points of one run in a panel. There are none if the run has no data for the panel."""

    x: np.ndarray  # [n]
    y: np.ndarray  # [n]
    low: np.ndarray | None = None  # [n], lower edge of a band around y
    high: np.ndarray | None = None  # [n], upper edge
    shows: tuple[str, ...] = ()  # what the line and the band are; the label of the x axis says it
    note: str = ""  # what the legend adds to the name, for example that the run diverged
    ended: bool = False  # whether a seed has no finite values after the last point


def by_round(
    runs: Runs, key: str, style: Style, factor: float = 1, log: bool = False, entry: int = -1
) -> dict[str, Line]:
    """Returns the line of each run over the rounds that have `key`.

    log: average the logarithms, if all values are positive. entry: the one that is used of a list. Default: the last.
    """
    values = {
        name: [(t, factor * values[:, entry]) for t, values in seeds] for name, seeds in measured(runs, key).items()
    }
    return lines_of(values, style, log, limits(key, factor), notes_of(runs, values))


def over(by: str, lines: Mapping[str, Line], runs: Runs) -> dict[str, Line]:
    """Returns lines over rounds as lines over another unit, see `records.UNITS`: the mean over the seeds of a run."""
    if by == "round":
        return dict(lines)

    def mean(histories: Sequence[History], x: np.ndarray) -> np.ndarray:
        return np.mean([spent(history, by, x) for history in histories], axis=0)

    return {name: line._replace(x=mean(runs[name], line.x)) if line.x.size else line for name, line in lines.items()}


def by_epoch(runs: Runs, key: str, style: Style) -> dict[str, Line]:
    """Returns the line of each run over the local epochs. The value of a seed is the median of `key` over rounds."""
    medians: dict[str, Seeds] = {}
    measurements = measured(runs, key)
    for name, seeds in measurements.items():
        finite = [values[np.isfinite(values).all(axis=1)] for _, values in seeds]
        medians[name] = [(range(1, values.shape[1] + 1), np.median(values, axis=0)) for values in finite if len(values)]
    notes = notes_of(runs, measurements)
    lines = lines_of(medians, replace(style, smooth=None), limits=limits(key), notes=notes)
    return {name: line._replace(shows=("median over rounds", *line.shows)) for name, line in lines.items()}


def lines_of(
    runs: Mapping[str, Seeds],
    style: Style,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> dict[str, Line]:
    """Returns the line of each run, for the rounds in which all its seeds have finite values.

    The values of each seed are averaged in windows. The line is the mean over the seeds, with the band of the style.

    Args:
      log: average the logarithms, if all values are positive.
      limits: of the quantity. Bands are clipped to them. Default: a band starts at 0, if no value is negative.
      notes: what the legend adds to the names. Default: when the values diverge, and the line ends there with a cross.
    """
    tables = {name: _common(seeds) for name, seeds in runs.items()}
    length, lines = _window(style, max((x.size for x, _ in tables.values()), default=0)), {}
    for name, seeds in runs.items():
        note = trailing_note(seeds) if notes is None else notes[name]
        line = _line(*tables[name], length, style, log)._replace(note=note, ended=notes is None and bool(note))
        if line.low is not None and line.high is not None:
            finite = np.concatenate([np.asarray(y)[np.isfinite(y)] for _, y in seeds])
            low, high = limits or (0 if (finite >= 0).all() else -np.inf, np.inf)
            line = line._replace(low=line.low.clip(low, high), high=line.high.clip(low, high))
        lines[name] = line
    return lines


def _common(seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rounds in which all seeds have finite values, [n], and the values, [S, n]."""
    tables = [dict(zip(map(int, rounds), values, strict=True)) for rounds, values in seeds]
    rounds = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[t] for t in rounds] for table in tables], float).reshape(len(tables), len(rounds))
    finite = np.isfinite(values).all(0)
    return np.array(rounds, int)[finite], values[:, finite]


def _window(style: Style, points: int) -> int:
    """Returns the number of points in a window."""
    if style.smooth == "auto":
        return 1 if points <= SHOWN_POINTS else math.ceil(points / (SHOWN_POINTS // 2))
    return style.smooth or 1


def windows(points: int, length: int) -> np.ndarray:
    """Returns the indices [windows, length] of windows that cover all points.

    All windows have the same length, so that they smooth noise equally. For this, the last one may overlap the one
    before. If there are fewer points than ``length``, there is one window with all of them.
    """
    length = min(length, points)
    starts = np.minimum(np.arange(0, points, max(1, length)), points - length)
    return starts[:, None] + np.arange(length)


def _line(x: np.ndarray, values: np.ndarray, length: int, style: Style, log: bool) -> Line:
    if not x.size:
        return Line(np.array([]), np.array([]))
    log = log and len(values) * length > 1 and bool((values > 0).all())  # a single value stays exact
    at = windows(x.size, length)
    seeds = (np.log(values) if log else values)[:, at].mean(2)
    shows = (f"means of {length} measured rounds",) * (length > 1)
    edges: Any = ()
    if len(seeds) > 1:
        shows += ("mean over seeds",)
        if style.band is not None:
            words, edges_of = BANDS[style.band]
            shows, edges = (*shows, f"band: {words}"), edges_of(seeds)
    y, *edges = (np.exp(row) if log else row for row in (seeds.mean(0), *edges))
    low, high = edges or (None, None)
    return Line(x[at].mean(1), y, low, high, shows)


def covering(lines: Sequence[Line], log: bool = False) -> list[int]:
    """Returns for each line how many of the later ones coincide with it, and so would hide it.

    Two lines coincide if they differ by less than about the width of a line at most of their common points.
    """
    heights = [np.log10(np.where(line.y > 0, line.y, np.nan)) if log else line.y for line in lines]
    every = np.concatenate(heights)[np.isfinite(np.concatenate(heights))]
    low, high = np.quantile(every, (0.05, 0.95)) if every.size else (0.0, 0.0)

    def coincide(i: int, j: int) -> bool:
        _, of_i, of_j = np.intersect1d(lines[i].x, lines[j].x, return_indices=True)
        near = abs(heights[i][of_i] - heights[j][of_j]) <= LINE_WIDTH * (high - low)
        return bool(near.size and near.mean() > 0.5)

    n = len(lines)
    return [sum(coincide(i, j) for j in range(i + 1, n)) for i in range(n)]


def limits(key: str, factor: float = 1) -> tuple[float, float] | None:
    """Returns the smallest and the largest possible value of an entry of a record, times the factor."""
    return (RANGES[key][0] * factor, RANGES[key][1] * factor) if key in RANGES else None


def notes_of(runs: Runs, values: Mapping[str, Sequence[tuple[Any, Any]]]) -> dict[str, str]:
    """Returns the notes that runs diverged. "" for a run that has no values, finite or not."""
    return {n: divergence(runs[n]) if any(len(rounds) for rounds, _ in of) else "" for n, of in values.items()}


def divergence(histories: Sequence[History]) -> str:
    """Returns "diverged in round 12" if the losses of a run are not finite from then on, otherwise "".

    Rounds in which no client has reported are left out, because they have no loss.
    """

    def reports(record: Mapping[str, Any]) -> bool:
        clients = record.get("clients")
        return not (isinstance(clients, Real) and clients == 0)

    reported = [[record for record in history if reports(record)] for history in histories]
    losses = [measured({"": reported}, key)[""] for key in LOSSES]
    return trailing_note([min(seed, key=_end) for seed in zip(*losses, strict=True)])


def trailing_note(seeds: Seeds) -> str:
    """Returns "diverged in round 12" if the values of a seed are not finite from then on, otherwise ""."""
    ends = [end for end in map(_end, seeds) if math.isfinite(end)]
    if not ends:
        return ""
    if len(seeds) == 1:
        return f"diverged in round {ends[0]}"
    return f"{len(ends)} of {len(seeds)} seeds diverged, the first in round {min(ends)}"


def _end(seed: tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]) -> float:
    """Returns the first round from which on all values are not finite. Infinity if the last value is finite."""
    rounds, values = seed
    finite = np.flatnonzero(np.isfinite(values)) if len(rounds) else np.array([], int)
    first = finite[-1] + 1 if finite.size else 0
    return int(rounds[first]) if first < len(rounds) else math.inf
