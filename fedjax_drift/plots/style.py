"""The options that all plots share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from fedjax_drift import spec
from fedjax_drift.spec import Amount, Count, Fix

Band = Literal["interval", "deviation", "range"]
Size = Annotated[tuple[float, float], spec.pair("(width, height) in inches", Amount), Fix("pass (9, 4), for example")]


@dataclasses.dataclass(frozen=True)
@spec.checked
class Style:
    """How a plot is drawn. All functions of `fd.plots` accept it as ``style``.

    The label of the x axis says how the rounds were smoothed, and which band is drawn. Plots without lines, such as
    `federation`, only use ``figsize``.

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

    smooth: Annotated[Count, Fix('pass "auto", or None to plot every round')] | Literal["auto"] | None = "auto"
    band: Band | None = "interval"
    figsize: Size | None = None


DEFAULT = Style()
AnyStyle = Annotated[Style, spec.instance(Style), Fix("pass fd.plots.Style(smooth=..., band=..., figsize=...)")]
