"""Figures and axes: panels side by side, line styles, legends, scales and files.

matplotlib is imported when the first figure is created.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.plots.lines import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FilePath = str | os.PathLike[str] | None

# The colours of Okabe and Ito, which people with a red-green colour vision deficiency can distinguish. Yellow is left
# out, because it is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*"
SHOWN_MARKERS = 30  # lines with more points have no markers

MEASURE = "pass measure=({!r},) to Simulation"  # the fix in error messages


class Panel(NamedTuple):
    """The content of one matplotlib `Axes`. Panels of a figure with the same y label share their y axis."""

    title: str
    ylabel: str
    lines: Mapping[str, Line]  # name of a run -> its line, for all runs in the order of `records`
    log: bool = False  # logarithmic y axis
    guide: float | None = None  # y of a grey horizontal line


def figure_of_panels(name: str, panels: Sequence[Panel], fix: str, path: FilePath, xlabel: str = "Round") -> Figure:
    """Returns a figure of the panels that have data, side by side above one legend.

    name, fix: for the error message if no panel has data.
    """
    panels = [panel for panel in panels if any(line.x.size for line in panel.lines.values())]
    if not panels:
        raise ConfigurationError(f"{name} needs at least 1 round that was measured, got none: {fix}")
    width = {1: 6.0, 2: 9.0}.get(len(panels), 4.2 * len(panels))
    figure = new_figure(width, 4.2)
    drawn: dict[str, Line2D] = {}
    first: dict[str, Axes] = {}  # y label -> the first axes with this label; later axes share its scale
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        if (twin := first.setdefault(panel.ylabel, axes)) is not axes:
            axes.sharey(twin)
        drawn = draw_panel(panel, axes, xlabel) | drawn
    for panel in panels:
        if panel.log:
            use_log_scale(first[panel.ylabel])
    add_legend(figure, {name: drawn[name] for name in panels[0].lines if name in drawn}, width)
    return written(figure, path)


def draw_panel(panel: Panel, axes: Axes, xlabel: str = "Round") -> dict[str, Line2D]:
    """Draws the lines of a panel with its labels and title, and returns the lines by name."""
    drawn = draw_lines(panel, axes)
    bands = dict.fromkeys(line.band for line in panel.lines.values() if line.band and line.x.size)
    axes.set_xlabel(f"{xlabel} ({'; '.join(bands)})" if bands else xlabel)
    axes.set(ylabel=panel.ylabel, title=panel.title)
    add_grid(axes)
    return drawn


def draw_lines(panel: Panel, axes: Axes) -> dict[str, Line2D]:
    """Draws the lines that have points, and returns them by name."""
    drawn: dict[str, Line2D] = {}
    sizes = [line.x.size for line in panel.lines.values() if line.x.size]
    for i, (name, line) in enumerate(panel.lines.items()):
        if not line.x.size:
            continue
        colour, linestyle = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        marker = MARKERS[i % len(MARKERS)] if max(sizes) <= SHOWN_MARKERS else ""
        style: dict[str, Any] = {"color": colour, "linestyle": linestyle, "linewidth": 1.6, "markersize": 4.5}
        (drawn[name],) = axes.plot(line.x, line.y, label=name, marker=marker, **style)
        if line.low is not None and line.high is not None:
            # With more bands, each band is fainter, because many bands on top of each other would hide the lines.
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=min(0.15, 0.6 / len(sizes)), linewidth=0)
    if panel.guide is not None:
        axes.axhline(panel.guide, color="0.4", linewidth=1.0, zorder=1)
    return drawn


def use_log_scale(axes: Axes) -> None:
    """Makes the y axis logarithmic. If there are zeros, it is linear below the smallest positive value.

    Period drift is zero if all clients take part.
    """
    y = np.concatenate(
        [line.get_ydata() for twin in axes.get_shared_y_axes().get_siblings(axes) for line in twin.lines]
    )
    if (y > 0).all():
        axes.set_yscale("log")
    elif (y > 0).any():
        smallest = y[y > 0].min()
        axes.set_yscale("symlog", linthresh=smallest)
        axes.set_ylim(bottom=-0.2 * smallest)


def add_legend(figure: Figure, lines: Mapping[str, Any], width: float, height: float = 4.2) -> None:
    """Adds a legend below the axes, and makes the figure higher by the height of the legend.

    Runs without a name are left out. height: the height of the figure without the legend, in inches.
    """
    lines = {name: line for name, line in lines.items() if name}
    if not lines:
        return
    columns = max(1, min(len(lines), 5, int(11 * width) // (max(map(len, lines)) + 8)))
    figure.set_figheight(height + 0.2 * math.ceil(len(lines) / columns))
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, **style)


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1))


def add_grid(axes: Axes) -> None:
    """Draws a pale grid behind the lines, with integer ticks on the x axis."""
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    hide_frame(axes)


def hide_frame(axes: Axes) -> None:
    """Hides the frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def written(figure: Figure, path: FilePath) -> Figure:
    """Writes the figure to the path, unless the path is None, and returns the figure."""
    if path is not None:
        file, formats = checks.path("path", path), figure.canvas.get_supported_filetypes()
        if (suffix := file.suffix[1:].lower()) and suffix not in formats:
            raise ConfigurationError(
                f"path must end in one of {', '.join(sorted(formats))}, got {file}: .png, for example"
            )
        figure.savefig(file, dpi=150)
    return figure
