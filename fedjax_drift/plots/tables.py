"""The training curves behind the tables of papers. `experiments.tables` uses this module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.plots.canvas import (
    FilePath,
    Panel,
    add_grid,
    add_legend,
    colour,
    described,
    draw_lines,
    finished,
    new_figure,
)
from fedjax_drift.plots.lines import lines_of, trailing_note, within
from fedjax_drift.plots.style import DEFAULT, Style, checked
from fedjax_drift.records import numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


class Compared(NamedTuple):
    """One setting of a paper's table: the runs of its methods, and the published numbers."""

    title: str
    runs: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]  # method -> (rounds, values) of each seed
    printed: Mapping[str, Sequence[tuple[float | None, float]]]  # method -> published (round, value); None: last round
    reached: Mapping[
        str, Sequence[tuple[float | None, float]]
    ] = {}  # method -> our (mean round, target), if the paper prints the round


def compared(settings: Sequence[Compared], ylabel: str, path: FilePath = None, *, style: Style = DEFAULT) -> Figure:
    """Plots the training curves behind a paper's table, one panel for each setting that has data.

    A line is the mean over the seeds, with the band of the style. Hollow markers are the published numbers, and filled
    markers are the numbers of our runs. The title of a panel names the methods that diverged. The y axis starts at the
    lowest value after the first 10 % of the rounds. If there is only one method, the panels share the y axis, so that
    the settings can be compared.

    ylabel: the label of the y axes. path, style: as in `curves`. Raises ValueError if there are no data.
    """
    if not isinstance(settings, Sequence):
        raise ConfigurationError(f"settings must be a list of Compared values, got {checks.shown(settings)}")
    style, settings, ylabel = (
        checked(style),
        [_of_numbers(setting) for setting in settings],
        checks.text("ylabel", ylabel),
    )
    methods = list(dict.fromkeys(method for setting in settings for method in setting.runs))
    panels = {}
    for setting in settings:
        seeds = {method: setting.runs.get(method, ()) for method in methods}
        lines = {method: within(line, seeds[method]) for method, line in lines_of(seeds, style).items()}
        if any(line.x.size for line in lines.values()):
            panels[setting.title] = Panel(setting.title, ylabel, lines)
    if not panels:
        raise ConfigurationError(
            "compared needs at least 1 round of a run, got none: pass (rounds, values) of each seed"
        )
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(4.4 * columns + 0.6, 3.2 * rows + 0.3, style)
    drawn: dict[str, Line2D] = {}
    one_scale = len(methods) == 1
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=one_scale).flat)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    extents = []  # the lowest and the highest value of each panel
    shown = [setting for setting in settings if setting.title in panels]
    for number, (setting, axes) in enumerate(zip(shown, grid, strict=False)):
        panel = panels[setting.title]
        panel_lines = draw_lines(panel, axes)
        drawn = panel_lines | drawn
        if len(panel_lines) > 1 and methods[0] in panel_lines:  # so that lines close to the first one do not hide it
            panel_lines[methods[0]].set(linestyle=(0, (3, 1.5)), zorder=3)
        late = [
            y[line.x >= line.x[-1] / 10]
            for line in panel.lines.values()
            for y in (line.y, line.low, line.high)
            if line.x.size and y is not None
        ]
        last = max((line.x[-1] for line in panel.lines.values() if line.x.size), default=1)
        for i, method in enumerate(methods):
            look: dict[str, Any] = {"color": colour(i, axes), "clip_on": False, "zorder": 4}
            for t, value in setting.printed.get(method, ()):
                late.append(np.array([value]))
                marker = "o" if t is not None else "<"
                axes.plot(last if t is None else t, value, marker=marker, markerfacecolor="none", **look)
            for t, value in setting.reached.get(method, ()):
                axes.plot(t, value, marker="o", markersize=4, **look)
        extents.append((min(map(np.min, late)), max(map(np.max, late))))
        notes = {method: trailing_note(setting.runs.get(method, ())) for method in methods}
        said = [f"{method}: {note}" for method, note in notes.items() if note]
        axes.set_title("\n".join([panel.title, *said]), fontsize="medium")
        axes.set_ylabel(ylabel if number % columns == 0 else "")
        axes.set_xlabel(described(panel, "Round") if number + columns >= len(panels) else "")
        add_grid(axes)
    for axes, extent in zip(grid, extents, strict=False):
        low, high = (np.min(extents), np.max(extents)) if one_scale else extent
        if low < high:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    legend = {method: drawn[method] for method in methods if method in drawn}
    add_legend(figure, legend, style)
    return finished(figure, path)


def _of_numbers(setting: Any) -> Compared:
    """Returns the setting with its points as numbers. Raises ConfigurationError if it is not a setting."""
    try:
        runs = {method: [_curve(rounds, values) for rounds, values in seeds] for method, seeds in setting.runs.items()}
        printed, reached = (
            {
                method: [(None if t is None else _point(t), _point(v)) for t, v in points]
                for method, points in marks.items()
            }
            for marks in (setting.printed, setting.reached)
        )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        allowed = "Compared values, with (rounds, values) for each seed and with pairs of numbers"
        raise ConfigurationError(f"settings must be {allowed}, got {checks.shown(setting)} ({error})") from error
    return Compared(checks.text("a setting's title", setting.title), runs, printed, reached)


def _curve(rounds: Any, values: Any) -> tuple[list[int], list[float]]:
    points = [checks.integer("a round", t, 0) for t in rounds], numbers("values", values).tolist()
    if len(points[0]) != len(points[1]):
        raise ConfigurationError(
            f"values must have one value per round, got {len(points[1])} values for {len(points[0])} rounds"
        )
    return points


def _point(value: Any) -> float:
    return checks.number("a point", value, "a finite number", math.isfinite, computed=False)
