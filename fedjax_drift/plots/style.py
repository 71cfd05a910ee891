"""The options that all plots share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.plots.bands import BANDS

Band = Literal["interval", "deviation", "range"]


@dataclasses.dataclass(frozen=True)
class Style:
    """How a plot is drawn. All functions of `fd.plots` accept it as ``style``.

    The label of the x axis says how the rounds were smoothed, and which band is drawn. Plots without lines, such as
    `federation`, only use ``figsize``.

    Raises ValueError if a value is not allowed.

    Attributes:
      smooth: The number of measured rounds in a window, >= 1. A point of a line is the mean of one window. All windows
        of a panel have the same number of rounds, so the last two windows of a line may overlap. None and 1 plot every
        round. "auto" plots every round if no run of a panel has more than 100 rounds, and at most 50 windows otherwise.
      band: The band around the mean over seeds. "interval" is the 95 % confidence interval of the mean (Student's t).
        "deviation" is the mean plus and minus one standard deviation of the seeds (with S - 1). "range" goes from the
        smallest to the largest seed. None draws no band. A run with one seed never has a band.
      figsize: Width and height of the figure in inches, > 0. None: the size depends on the number of panels, on the
        legend and on matplotlib's font size.

    >>> fd.plots.curves(history, style=fd.plots.Style(smooth=None, figsize=(8, 3)))  # doctest: +SKIP
    """

    smooth: int | Literal["auto"] | None = "auto"
    band: Band | None = "interval"
    figsize: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.smooth is not None and not checks.is_auto(self.smooth):
            fix = 'pass "auto", or None to plot every round'
            object.__setattr__(self, "smooth", checks.integer("smooth", self.smooth, 1, fix=fix))
        if self.band is not None:
            checks.choice("band", self.band, BANDS)
        if self.figsize is not None:
            object.__setattr__(self, "figsize", _two_lengths(self.figsize))


def _two_lengths(figsize: object) -> tuple[float, float]:
    if not isinstance(figsize, Sequence) or isinstance(figsize, str) or len(figsize) != 2:
        raise ConfigurationError(
            f"figsize must be (width, height) in inches, got {checks.shown(figsize)}: pass (9, 4), for example"
        )
    width, height = (checks.positive("each of figsize", length, computed=False) for length in figsize)
    return width, height


DEFAULT = Style()


def checked(style: Style) -> Style:
    """Returns the style. Raises ConfigurationError unless it is a `Style`."""
    checks.instance("style", style, Style, "pass fd.plots.Style(smooth=..., band=..., figsize=...)")
    return style
