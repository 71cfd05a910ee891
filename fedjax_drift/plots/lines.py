"""The lines of a plot: the values of each run against rounds or local epochs, with a band for seeds or windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_drift.records import Runs, measured
from fedjax_drift.statistics import quantile

SHOWN_POINTS = 100  # a line of one seed with more points is summarised in about SHOWN_POINTS / 2 windows
QUARTILES = (0.25, 0.5, 0.75)
RANGES = {  # the possible values of entries of a record
    "accuracy": (0, 1), "client_mean_accuracy": (0, 1), "cka": (0, 1), "gain": (0, 1), "update_cosine": (-1, 1),
}  # fmt: skip
QUARTILES_SHOWN = "median and quartiles"
SEEDS_SHOWN = "mean over seeds, 95 % confidence"


class Line(NamedTuple):
    """The points of one run in a panel. There are none if the run has no data for the panel."""

    x: np.ndarray  # [n]
    y: np.ndarray  # [n]
    low: np.ndarray | None = None  # [n], lower edge of a band around y
    high: np.ndarray | None = None  # [n], upper edge
    band: str = ""  # what the line and the band show; added to the label of the x axis


def by_round(runs: Runs, key: str, factor: float = 1, log: bool = False) -> dict[str, Line]:
    """Returns the line of each run over the rounds that have `key`. If a value is a list, its last entry is used."""
    lines = {}
    for name, seeds in measured(runs, key).items():
        values = [(t, factor * values[:, -1]) for t, values in seeds]
        if len(values) == 1:
            lines[name] = finite_points(*values[0])
        else:
            lines[name] = _within(_mean_of_seeds(values, log), values, key, factor)
    longest = max((line.x.size for line in lines.values() if not line.band), default=0)
    if longest <= SHOWN_POINTS:
        return lines
    length = math.ceil(longest / (SHOWN_POINTS // 2))
    return {name: line if line.band else _windows(line, length) for name, line in lines.items()}


def _windows(line: Line, length: int) -> Line:
    """Returns the medians and quartiles of windows of about `length` points."""
    if not line.x.size:
        return line
    parts = np.array_split(np.stack([line.x, line.y]), math.ceil(line.x.size / length), axis=1)
    low, median, high = np.transpose([np.quantile(y, QUARTILES) for _, y in parts])
    return Line(np.array([x.mean() for x, _ in parts]), median, low, high, QUARTILES_SHOWN)


def by_epoch(runs: Runs, key: str) -> dict[str, Line]:
    """Returns the line of each run over the local epochs: median and quartiles of `key` over the rounds of all
    seeds."""
    lines = {}
    for name, seeds in measured(runs, key).items():
        finite = [values[np.isfinite(values).all(axis=1)] for _, values in seeds]
        finite = [values for values in finite if len(values)]
        low, median, high = np.quantile(np.concatenate(finite), QUARTILES, axis=0) if finite else np.empty((3, 0))
        lines[name] = Line(np.arange(1, len(median) + 1), median, low, high, QUARTILES_SHOWN)
    return lines


def finite_points(x: Sequence[int] | np.ndarray, y: Sequence[float] | np.ndarray) -> Line:
    """Returns the line through the points with finite y."""
    x, y = np.asarray(x), np.asarray(y, float)
    return Line(x[np.isfinite(y)], y[np.isfinite(y)])


def from_round_one(y: np.ndarray) -> Line:
    """Returns the line of values after rounds 1, 2, ..."""
    return finite_points(range(1, len(y) + 1), y)


def over_seeds(
    runs: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]],
    band: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Line:
    """Returns the mean over the seeds, for the rounds that all seeds have.

    band: a function from the values [S, n] of the S seeds to the lower and the upper edge of the band, [n] each.
    """
    tables = [dict(zip(map(int, rounds), values, strict=True)) for rounds, values in runs]
    rounds = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[t] for t in rounds] for table in tables], float).reshape(len(tables), len(rounds))
    finite = np.isfinite(values).all(0)
    x, values = np.array(rounds)[finite], values[:, finite]
    if not x.size:
        return Line(np.array([]), np.array([]))
    if len(tables) == 1:
        line = Line(x, values[0])
        return line if x.size <= SHOWN_POINTS else Line(*_means(np.stack([x, values[0]])))
    return Line(*_means(np.stack([x, values.mean(0), *band(values)])))


def _mean_of_seeds(values: Sequence[tuple[np.ndarray, np.ndarray]], log: bool) -> Line:
    """Returns the mean over the seeds with its confidence interval. log: use the logarithms, if all values are
    positive.
    """
    log = log and all((y[np.isfinite(y)] > 0).all() for _, y in values)
    line = over_seeds([(t, np.log(y) if log else y) for t, y in values], _confidence)._replace(band=SEEDS_SHOWN)
    if not log or line.low is None or line.high is None:
        return line
    return line._replace(y=np.exp(line.y), low=np.exp(line.low), high=np.exp(line.high))


def _confidence(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 95 % confidence interval of the mean over the first axis."""
    half = quantile(len(values)) * values.std(0, ddof=1) / len(values) ** 0.5
    return values.mean(0) - half, values.mean(0) + half


def extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values.min(0), values.max(0)


def _means(rows: np.ndarray) -> np.ndarray:
    """Returns the mean of each row over windows of neighbouring columns, [rows, windows]."""
    parts = np.array_split(rows, min(rows.shape[1], SHOWN_POINTS // 2), axis=1)
    return np.transpose([part.mean(1) for part in parts])


def _within(line: Line, values: Sequence[tuple[np.ndarray, np.ndarray]], key: str, factor: float) -> Line:
    """Clips the band of the line to the range of the quantity. If no value is negative, the range starts at 0."""
    if line.low is None or line.high is None:
        return line
    low, high = RANGES.get(key, (0 if all((y[np.isfinite(y)] >= 0).all() for _, y in values) else -np.inf, np.inf))
    return line._replace(low=line.low.clip(min=factor * low), high=line.high.clip(max=factor * high))
