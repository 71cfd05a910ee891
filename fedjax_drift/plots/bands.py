"""The bands around a mean over seeds. The tables of the command line and the plots use the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_drift.statistics import quantile


class Band(NamedTuple):
    """A band around the mean over seeds."""

    words: str  # its name in plots and tables
    edges: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # values [S, n] -> lower and upper edge, [n] each


def half_width(values: np.ndarray) -> np.ndarray:
    """Returns half the width of the 95 % confidence interval of the mean over the first axis, which is at least 2."""
    return quantile(len(values)) * values.std(0, ddof=1) / len(values) ** 0.5


def _around_mean(half: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    return lambda values: (values.mean(0) - half(values), values.mean(0) + half(values))


BANDS = {
    "interval": Band("95 % interval of the mean", _around_mean(half_width)),
    "deviation": Band("± standard deviation", _around_mean(lambda values: values.std(0, ddof=1))),
    "range": Band("smallest to largest seed", lambda values: (values.min(0), values.max(0))),
}
