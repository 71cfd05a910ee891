"""Figures and axes: panels side by side, line styles, legends, limits and files.

matplotlib is imported when the first figure is created.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.plots.lines import Line
from fedjax_drift.plots.style import Style

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
SHOWN_MARKERS, ALL_MARKERS = 30, 400  # lines have no markers if one of them, or all, have more points
FONT_SIZE = 10  # points; the sizes of figures are for this size
NEAR, FAR = 2, 10  # the axis ends after NEAR times the usual span, if values are FAR times this span away

MEASURE = "pass measure=({!r},) to Simulation"  # the fix in error messages


class Panel(NamedTuple):
    """The content of one matplotlib `Axes`. Panels of a figure with the same y label share their y axis."""

    title: str
    ylabel: str
    lines: Mapping[str, Line]  # name of a run -> its line, for all runs in the order of `records`
    log: bool = False  # logarithmic y axis
    guide: float | None = None  # y of a grey horizontal line
    limits: tuple[float, float] = (-math.inf, math.inf)  # the y axis shows nothing outside
    steps: bool = False  # the lines are steps


def figure_of_panels(
    name: str, panels: Sequence[Panel], fix: str, style: Style, xlabel: str = "Round", legend: str = ""
) -> Figure:
    """Returns a figure of the panels that have data, side by side above one legend.

    name, fix: for the error message if no panel has data. legend: the title of the legend.
    """
    every = panels
    panels = [panel for panel in every if any(line.x.size for line in panel.lines.values())]
    if not panels:
        notes = [f"{run} {line.note}".strip() for panel in every for run, line in panel.lines.items() if line.note]
        if notes:
            raise ConfigurationError(
                f"{name} needs at least 1 round with finite values, got none: {notes[0]}; lower the learning rate"
            )
        raise ConfigurationError(f"{name} needs at least 1 round that was measured, got none: {fix}")
    figure = new_figure({1: 6.0, 2: 9.0}.get(len(panels), 4.2 * len(panels)), 4.2, style)
    drawn: dict[str, Line2D] = {}
    groups: dict[str, list[tuple[Panel, Axes]]] = {}  # y label -> the panels that share the scale
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        group = groups.setdefault(panel.ylabel, [])
        if group:
            axes.sharey(group[0][1])
        group.append((panel, axes))
        drawn = draw_panel(panel, axes, xlabel) | drawn
    for group in groups.values():
        set_scale(group)
    add_legend(figure, with_notes(panels, drawn), style, legend)
    return figure


def draw_panel(panel: Panel, axes: Axes, xlabel: str = "Round") -> dict[str, Line2D]:
    """Draws the lines of a panel with its labels and title, and returns the lines by name."""
    drawn = draw_lines(panel, axes)
    axes.set(xlabel=described(panel, xlabel), ylabel=panel.ylabel, title=panel.title)
    add_grid(axes)
    return drawn


def described(panel: Panel, xlabel: str) -> str:
    """Returns the label of the x axis, with what the lines and the bands show."""
    shows = dict.fromkeys(words for line in panel.lines.values() if line.x.size for words in line.shows)
    return f"{xlabel}\n({'; '.join(shows)})" if shows else xlabel


def colour(place: int, axes: Axes) -> Any:
    """Returns the colour of the run at a position in `records`. Black is replaced by the colour of the labels."""
    chosen = COLOURS[place % len(COLOURS)]
    return ink(axes) if chosen == "#000000" else chosen


def ink(axes: Axes) -> Any:
    """Returns the colour of the labels, which can be seen on the background."""
    return axes.xaxis.label.get_color()


def draw_lines(panel: Panel, axes: Axes) -> dict[str, Line2D]:
    """Draws the lines that have points, and returns them by name.

    A run that diverged before its first point also has a line, without points, for the legend.
    """
    drawn: dict[str, Line2D] = {}
    sizes = [line.x.size for line in panel.lines.values() if line.x.size]
    for i, (name, line) in enumerate(panel.lines.items()):
        if not line.x.size and not line.note:
            continue
        look: dict[str, Any] = {"color": colour(i, axes), "linestyle": STYLES[i // len(COLOURS) % len(STYLES)]}
        if panel.steps:
            look["drawstyle"] = "steps-pre"
        elif max(sizes) <= SHOWN_MARKERS and sum(sizes) <= ALL_MARKERS:
            look["marker"] = MARKERS[i % len(MARKERS)]
        (drawn[name],) = axes.plot(line.x, line.y, label=name, linewidth=1.6, markersize=4.5, **look)
        if line.low is not None and line.high is not None:
            # With more bands, each band is fainter, because many bands on top of each other would hide the lines.
            alpha = min(0.15, 0.6 / len(sizes))
            axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=alpha, linewidth=0)
    if panel.guide is not None:
        axes.axhline(panel.guide, color=ink(axes), alpha=0.6, linewidth=1.0, zorder=1)
    return drawn


def with_notes(panels: Sequence[Panel], drawn: Mapping[str, Line2D]) -> dict[str, Line2D]:
    """Returns the entries of the legend, in the order of the runs: the drawn lines by name and note."""
    notes: dict[str, str] = {}
    for panel in panels:
        notes = {name: notes.get(name) or line.note for name, line in panel.lines.items()}
    return {
        (f"{name} ({notes[name]})" if name and notes[name] else name or notes[name]): drawn[name]
        for name in notes
        if name in drawn
    }


# --- the y axis -------------------------------------------------------------------------------------------------------


def set_scale(group: Sequence[tuple[Panel, Axes]]) -> None:
    """Sets the scale and the limits of the y axis that the panels share, and marks the points outside."""
    if group[0][0].log:
        use_log_scale(group[0][1])
    set_limits(group)
    mark_outside(group)


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


def set_limits(group: Sequence[tuple[Panel, Axes]]) -> None:
    """Limits the y axis so that a run that diverges, or a wide band, does not flatten the other lines."""
    panel, axes = group[0]
    scale = axes.get_yscale()
    low, high = axes.get_ylim()
    if extent := readable([line for panel, _ in group for line in panel.lines.values()], scale != "linear"):
        low, high = (low if scale == "symlog" else extent[0]), extent[1]
    axes.set_ylim(max(low, panel.limits[0]), min(high, panel.limits[1]))


def readable(lines: Sequence[Line], log: bool) -> tuple[float, float] | None:
    """Returns the limits of an axis on which the lines are not flat. None if all points and bands can be shown.

    The usual values of a line are its first one, and those between its quantiles 0.1 and 0.9. The usual values of the
    panel are those of the line in the middle. Values that are far away from these are outside of the limits.
    """
    bands = np.concatenate([row for line in lines for row in (line.y, line.low, line.high) if row is not None])
    curves = [line.y for line in lines]
    if log:
        bands, curves = np.log10(bands[bands > 0]), [np.log10(y[y > 0]) for y in curves]
    curves = [y for y in curves if y.size]
    if not curves:
        return None
    usual = np.sort(
        [[min(low, y[0]), max(high, y[0])] for y in curves for low, high in [np.quantile(y, (0.1, 0.9))]], 0
    )
    low, high = sorted((usual[len(usual) // 2, 0], usual[(len(usual) - 1) // 2, 1]))
    span = max(high - low, 1 if log else max(abs(low), abs(high)))
    if not span:  # most values are 0
        return None
    near, far = (value * span for value in (NEAR, FAR))
    values = np.concatenate(curves)
    top, bottom = values.max(), values.min()
    if top > high + far:
        top = values[values <= high + near].max()
    if bottom < low - far:
        bottom = values[values >= low - near].min()
    room = max(top - bottom, span)  # for bands above and below the lines
    limits = max(bands.min(), bottom - room), min(bands.max(), top + room)
    if limits == (bands.min(), bands.max()):
        return None
    margin = 0.05 * (limits[1] - limits[0])
    low, high = limits[0] - margin, limits[1] + margin
    return (10**low, 10**high) if log else (low, high)


def mark_outside(group: Sequence[tuple[Panel, Axes]]) -> None:
    """Draws a triangle where a line leaves the y axis. The title says how far the values reach."""
    for panel, axes in group:
        low, high = axes.get_ylim()
        reach = []
        for i, line in enumerate(panel.lines.values()):
            for outside, edge, marker in ((line.y > high, 1, "^"), (line.y < low, 0, "v")):
                begins = outside & ~np.append(False, outside[:-1])
                if begins.any():
                    place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
                    ys = np.full(begins.sum(), edge)
                    axes.plot(line.x[begins], ys, marker, color=colour(i, axes), markersize=6, **place)
                    reach.append(line.y.max() if edge else line.y.min())
        if reach:
            far = ((min(reach), "down to", min(reach) < low), (max(reach), "up to", max(reach) > high))
            words = " and ".join(f"{to} {y:.3g}" for y, to, is_outside in far if is_outside)
            axes.set_title(f"{axes.get_title()}\n(triangles: outside, {words})")


# --- the figure -------------------------------------------------------------------------------------------------------


def add_legend(figure: Figure, lines: Mapping[str, Any], style: Style, title: str = "") -> None:
    """Adds a legend below the axes, with as many columns as fit.

    If the style has no size, the figure gets higher by the height of the legend. Runs without a name are left out.
    """
    if not any(lines):
        return
    import matplotlib

    letters = max(20, int(figure.get_figwidth() / 2 * 130 / matplotlib.rcParams["font.size"]) - 8)  # of half the width
    lines = {wrapped(name, letters): line for name, line in lines.items() if name}
    look: dict[str, Any] = {"frameon": False, "fontsize": "small", "handlelength": 3, "title": title or None}
    for columns in range(min(len(lines), 6), 0, -1):
        legend = figure.legend(
            lines.values(), lines.keys(), loc="outside lower center", ncols=columns, title_fontsize="small", **look
        )
        box = legend.get_window_extent()
        if columns == 1 or box.width <= figure.bbox.width:
            break
        legend.remove()
    if style.figsize is None:
        figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)


def new_figure(width: float, height: float, style: Style) -> Figure:
    """Returns an empty figure. Width and height are in inches, for a font of 10 points. Larger fonts get more."""
    import matplotlib
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from fedjax_drift.plots.figure import Picture

    larger = math.sqrt(max(1.0, matplotlib.rcParams["font.size"] / FONT_SIZE))
    size = style.figsize or (width * larger, height * larger)
    return Picture(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1))


def add_grid(axes: Axes) -> None:
    """Draws a pale grid behind the lines, with integer ticks on the x axis."""
    axes.grid(True, color=ink(axes), alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    hide_frame(axes)


def hide_frame(axes: Axes) -> None:
    """Hides the frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def wrapped(text: str, letters: int) -> str:
    """Returns the text in lines of at most so many letters, and of about the same length."""
    text = text.replace(" %", "\u00a0%")  # "95 %" stays in one line
    rows = len(textwrap.wrap(text, letters))
    shortest = next(n for n in range(letters // 2, letters + 1) if len(textwrap.wrap(text, n)) <= rows)
    return textwrap.fill(text, shortest).replace("\u00a0", " ")


def wrap_texts(figure: Figure) -> None:
    """Breaks the titles and labels that are longer than their axes."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.get_window_extent()
        for text, room in ((axes.title, box.width), (axes.xaxis.label, box.width), (axes.yaxis.label, box.height)):
            used = text.get_window_extent()
            length = used.height if text is axes.yaxis.label else used.width
            if text.get_text() and length > room:
                lines = text.get_text().split("\n")
                letters = max(12, int(max(map(len, lines)) * room / length))
                text.set_text("\n".join(wrapped(line, letters) for line in lines))


def finished(figure: Figure, path: FilePath) -> Figure:
    """Breaks long labels, writes the figure to the path, unless the path is None, and returns the figure."""
    wrap_texts(figure)
    if path is not None:
        file, formats = checks.path("path", path), figure.canvas.get_supported_filetypes()
        if (suffix := file.suffix[1:].lower()) and suffix not in formats:
            raise ConfigurationError(
                f"path must end in one of {', '.join(sorted(formats))}, got {file}: .png, for example"
            )
        figure.savefig(file, dpi=150)
    return figure
