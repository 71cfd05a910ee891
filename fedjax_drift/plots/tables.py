"""The training curves behind the tables of papers. `experiments.tables` uses this module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from fedjax_drift import checks, reprs, spec
from fedjax_drift.plots.axis import mark_outside, readable
from fedjax_drift.plots.canvas import (
    CROSS,
    FilePath,
    Panel,
    add_grid,
    add_legend,
    cross_entry,
    described,
    draw_lines,
    finished,
    new_figure,
)
from fedjax_drift.plots.lines import Line, lines_of
from fedjax_drift.plots.looks import ink, look
from fedjax_drift.plots.style import DEFAULT, AnyStyle
from fedjax_drift.spec import Text, checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

EARLY = 0.1  # the y axis need not show this part of the rounds


class Compared(NamedTuple):
    """One setting of a paper's table: the runs of its methods, and the published numbers."""

    title: str
    runs: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]  # method -> (rounds, values) of each seed
    printed: Mapping[str, Sequence[tuple[float | None, float]]]  # method -> published (round, value); None: last round
    reached: Mapping[str, Sequence[tuple[float | None, float]]] = {}  # method -> our (mean round, target), if published

    def __repr__(self) -> str:
        return reprs.fields(self)


@checked
def compared(
    settings: Annotated[Sequence[Compared], spec.instance(Sequence, "a list of Compared values")],
    ylabel: Text,
    path: FilePath = None,
    *,
    limits: tuple[float, float] | None = None,
    style: AnyStyle = DEFAULT,
) -> Figure:
    """Plots the training curves behind a paper's table, one panel for each setting that has data.

    A line is the mean over the seeds, with the band of the style. Hollow markers are the published numbers, and filled
    markers are the numbers of our runs. A cross ends the line of a method that diverged. The y axis starts at the
    lowest value after the first 10 % of the rounds. If there is only one method, the panels share the y axis, so that
    the settings can be compared.

    Args:
      settings: the panels.
      ylabel: the label of the y axes.
      limits: the smallest and the largest possible value, for example ``(0, 100)`` for an accuracy in percent. The
        bands are clipped to them. Default: the bands start at 0, if no value is negative.
      path, style: as in `curves`.

    Raises:
      ValueError: there are no data.
    """
    settings = [_of_numbers(setting) for setting in settings]
    methods = list(dict.fromkeys(method for setting in settings for method in setting.runs))
    runs = [{method: setting.runs.get(method, ()) for method in methods} for setting in settings]
    lines = [lines_of(seeds, style, limits=limits) for seeds in runs]
    panels = [Panel(setting.title, ylabel, of) for setting, of in zip(settings, lines, strict=True)]
    shown = [pair for pair in zip(settings, panels, strict=True) if any(line.x.size for line in pair[1].lines.values())]
    if not shown:
        checks.refuse("compared needs at least 1 round of a run", "none", "pass (rounds, values) of each seed")
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(4.4 * columns + 0.6, 3.2 * rows + 0.3, style)
    one_scale = len(methods) == 1
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=one_scale).flat)
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    legend: dict[str, Any] = {}
    for number, ((setting, panel), axes) in enumerate(zip(shown, grid, strict=False)):
        legend |= {method: line for method, line in draw_lines(panel, axes).items() if method not in legend}
        _mark_numbers(setting, panel, axes)
        axes.set_title(panel.title, fontsize="medium")
        axes.set_ylabel(ylabel if number % columns == 0 else "")
        axes.set_xlabel(described(panel, "Round") if number + columns >= len(shown) else "")
        add_grid(axes)
    extents = [_extent(setting, panel) for setting, panel in shown]
    for (_, panel), axes, extent in zip(shown, grid, extents, strict=False):
        low, high = (min(low for low, _ in extents), max(high for _, high in extents)) if one_scale else extent
        if low < high:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            mark_outside({method: _late(line) for method, line in panel.lines.items()}, axes)
    entries = {method: legend[method] for method in methods if method in legend}
    crosses = cross_entry([panel for _, panel in shown], grid[0])
    add_legend(figure, entries | _symbols([setting for setting, _ in shown], grid[0]) | crosses, style)
    return finished(figure, path)


def _mark_numbers(setting: Compared, panel: Panel, axes: Axes) -> None:
    """Draws the published numbers, our numbers, and a cross at the bottom for a method without a finite value."""
    rounds = np.concatenate([line.x for line in panel.lines.values()])
    for i, (method, line) in enumerate(panel.lines.items()):
        shape = look(i, axes) | {"linestyle": "", "clip_on": False, "zorder": 4}
        for points, size, face in ((setting.printed, 6, "none"), (setting.reached, 4, shape["color"])):
            for t, value in points.get(method, ()):
                at = float(rounds.max()) if t is None else t
                axes.plot(at, value, markersize=size, markerfacecolor=face, **shape)
        if line.ended and not line.x.size:
            place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 4}
            axes.plot(rounds.min(), 0, "x", color=shape["color"], **place, **CROSS)


def _symbols(settings: Sequence[Compared], axes: Axes) -> dict[str, Line2D]:
    """Returns the entries of the legend that explain the markers."""
    from matplotlib.lines import Line2D

    words = {"published": ("none", "printed"), "our runs": (None, "reached")}
    return {
        name: Line2D([], [], marker="o", linestyle="", color=ink(axes), markerfacecolor=face)
        for name, (face, field) in words.items()
        if any(points for setting in settings for points in getattr(setting, field).values())
    }


def _extent(setting: Compared, panel: Panel) -> tuple[float, float]:
    """Returns the lowest and the highest value that the y axis of a panel shows."""
    late = [_late(line) for line in panel.lines.values() if line.x.size]
    low, high = readable(late) or (
        min(np.min(row) for line in late for row in (line.y, line.low) if row is not None),
        max(np.max(row) for line in late for row in (line.y, line.high) if row is not None),
    )
    published = [value for points in setting.printed.values() for _, value in points]
    return min([low, *published]), max([high, *published])


def _late(line: Line) -> Line:
    """Returns the line without its early rounds."""
    if not line.x.size:
        return line
    late = line.x >= EARLY * line.x[-1]
    low, high = (row if row is None else row[late] for row in (line.low, line.high))
    return line._replace(x=line.x[late], y=line.y[late], low=low, high=high)


def _of_numbers(setting: Any) -> Compared:
    """Returns the setting with its points as numbers. Raises ConfigurationError if it is not a setting."""

    def points(rounds: Any, values: Any) -> Any:
        return np.array([*zip(rounds, values, strict=True)], float).reshape(-1, 2).T

    try:
        runs = {method: [points(*seed) for seed in seeds] for method, seeds in setting.runs.items()}
        printed, reached = (
            {method: [(None if t is None else float(t), float(v)) for t, v in of] for method, of in marks.items()}
            for marks in (setting.printed, setting.reached)
        )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        allowed = "Compared values, with (rounds, values) for each seed and with pairs of numbers"
        checks.refuse(f"settings must be {allowed}", f"{checks.shown(setting)} ({error})", cause=error)
    return Compared(checks.text("a setting's title", setting.title), runs, printed, reached)
