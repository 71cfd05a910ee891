"""Figures of panels side by side, with one legend, and their files.

matplotlib is imported when the first figure is created.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.plots.axis import in_points, mark_outside, readable, use_log_scale
from fedjax_drift.plots.lines import Line, covering
from fedjax_drift.plots.looks import fill, ink, look
from fedjax_drift.plots.style import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FilePath = Annotated[str | os.PathLike[str], spec.GIVEN_PATH] | None

SHOWN_MARKERS, ALL_MARKERS = 30, 400  # lines have no markers if one of them, or all, have more points
FONT_SIZE = 10  # points; the sizes of figures are for this size
WIDER, MOST_COVERED = 2.6, 4  # points by which a line is wider for each line on it, of at most so many
CROSS: dict[str, Any] = {"markersize": 7, "markeredgewidth": 1.8}  # where a line ends because its run diverged

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
    counts: bool = True  # the x axis counts rounds, epochs or clients


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
            checks.refuse(
                f"{name} needs at least 1 round with finite values", "none", f"{notes[0]}; lower the learning rate"
            )
        checks.refuse(f"{name} needs at least 1 round that was measured", "none", fix)
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
    add_legend(figure, legend_entries(panels, drawn, figure.axes[0]), style, legend)
    return figure


def draw_panel(panel: Panel, axes: Axes, xlabel: str = "Round") -> dict[str, Line2D]:
    """Draws the lines of a panel with its labels and title, and returns the lines by name."""
    drawn = draw_lines(panel, axes)
    axes.set(xlabel=described(panel, xlabel), ylabel=panel.ylabel, title=panel.title)
    add_grid(axes, panel.counts)
    return drawn


def described(panel: Panel, xlabel: str) -> str:
    """Returns the label of the x axis, with what the lines and the bands show."""
    shows = dict.fromkeys(words for line in panel.lines.values() if line.x.size for words in line.shows)
    return f"{xlabel}\n({'; '.join(shows)})" if shows else xlabel


def draw_lines(panel: Panel, axes: Axes) -> dict[str, Line2D]:
    """Draws the lines that have points, and returns them by name.

    A run that diverged before its first point also has a line, without points, for the legend. A cross marks the last
    point of a line whose later values are not finite. A line on which later ones lie is wider than they are, and can be
    seen at both sides of them.
    """
    drawn: dict[str, Line2D] = {}
    sizes = [line.x.size for line in panel.lines.values() if line.x.size]
    marked = not panel.steps and max(sizes) <= SHOWN_MARKERS and sum(sizes) <= ALL_MARKERS
    hidden = covering(list(panel.lines.values()), panel.log) if max(sizes) > 1 else [0] * len(panel.lines)
    for i, (name, line) in enumerate(panel.lines.items()):
        if not line.x.size and not line.note:
            continue
        wider = WIDER * min(hidden[i], MOST_COVERED)
        shape = look(i, axes) | ({} if marked else {"marker": None})
        shape |= {"drawstyle": "steps-pre"} if panel.steps else {}
        if max(sizes) == 1:  # the points of one round are side by side
            shape["transform"] = axes.transData + in_points(axes, right=8 * (len(drawn) - (len(sizes) - 1) / 2))
            shown = np.array([row for row in (line.y, line.low, line.high) if row is not None]).reshape(-1)
            axes.update_datalim([(line.x[0], y) for y in shown])
        (drawn[name],) = axes.plot(line.x, line.y, label=name, linewidth=1.6 + wider, markersize=4.5 + wider, **shape)
        draw_band(line, axes, shape, len(sizes))
        if line.ended and line.x.size:
            axes.plot(line.x[-1], line.y[-1], "x", color=shape["color"], zorder=6, **CROSS)
    axes.autoscale_view()
    if panel.guide is not None:
        axes.axhline(panel.guide, color=ink(axes), alpha=0.6, linewidth=1.0, zorder=1)
    return drawn


def draw_band(line: Line, axes: Axes, shape: Mapping[str, Any], bands: int) -> None:
    """Draws the band of one of several lines, if it has one. The band of a single point is a bar."""
    if line.low is None or line.high is None:
        return
    color = shape["color"]
    if line.x.size == 1:
        transform = shape.get("transform", axes.transData)
        axes.vlines(line.x, line.low, line.high, color=color, linewidth=1.6, transform=transform)
        return
    # With more bands, each band is fainter, because many bands on top of each other would hide the lines.
    opacity = fill(axes)[1]
    axes.fill_between(line.x, line.low, line.high, color=color, alpha=min(opacity, 4 * opacity / bands), linewidth=0)


def legend_entries(panels: Sequence[Panel], drawn: Mapping[str, Line2D], axes: Axes) -> dict[str, Any]:
    """Returns the entries of the legend, in the order of the runs: the drawn lines by name and note.

    If the notes of a run differ between the panels, they are left out. The crosses in the panels show the difference.
    """
    entries: dict[str, Any] = {}
    for name in (name for name in panels[0].lines if name in drawn):
        notes = {panel.lines[name].note for panel in panels if panel.lines[name].x.size or panel.lines[name].note}
        note = notes.pop() if len(notes) == 1 else ""
        entries[f"{name} ({note})" if name and note else name or note] = drawn[name]
    return entries | cross_entry(panels, axes)


def cross_entry(panels: Sequence[Panel], axes: Axes) -> dict[str, Any]:
    """Returns the entry of the legend that explains the crosses, if there are any."""
    from matplotlib.lines import Line2D

    if not any(line.ended for panel in panels for line in panel.lines.values()):
        return {}
    return {"diverges after this point": Line2D([], [], marker="x", linestyle="", color=ink(axes), **CROSS)}


def set_scale(group: Sequence[tuple[Panel, Axes]]) -> None:
    """Sets the scale and the limits of the y axis that the panels share, and marks where lines leave it."""
    panel, axes = group[0]
    lines = [line for panel, _ in group for line in panel.lines.values()]
    if panel.log:
        use_log_scale(lines, axes)
    scale = axes.get_yscale()
    low, high = axes.get_ylim()
    if extent := readable(lines, scale != "linear"):
        low, high = (low if scale == "symlog" else extent[0]), extent[1]
    axes.set_ylim(max(low, panel.limits[0]), min(high, panel.limits[1]))
    for panel, axes in group:
        mark_outside(panel.lines, axes)


# --- the figure -------------------------------------------------------------------------------------------------------


def add_legend(figure: Figure, lines: Mapping[str, Any], style: Style, title: str = "") -> None:
    """Adds a legend below the axes, with as many columns as fit.

    If the style has no size, the figure gets higher by the height of the legend. Runs without a name are left out.
    """
    if not any(lines):
        return
    letters = max(20, letters_across(figure.get_figwidth() / 2) - 8)  # in half the width, without the line
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


def letters_across(width: float) -> int:
    """Returns the number of small letters that fit in a width in inches."""
    import matplotlib

    return int(width * 130 / matplotlib.rcParams["font.size"])


def new_figure(width: float, height: float, style: Style, text: float = 0.0) -> Figure:
    """Returns an empty figure. Width, height and text are in inches, for a font of 10 points. Larger fonts get more.

    text: the part of the height that lines of text fill. It is proportional to the size of the font.
    """
    import matplotlib
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from fedjax_drift.plots.figure import Picture

    larger = max(1.0, matplotlib.rcParams["font.size"] / FONT_SIZE)
    size = style.figsize or (width * math.sqrt(larger), (height - text) * math.sqrt(larger) + text * larger)
    return Picture(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1))


def add_grid(axes: Axes, counts: bool = True) -> None:
    """Draws a pale grid behind the lines. counts: see `count_on_x`."""
    axes.grid(True, color=ink(axes), alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    if counts:
        count_on_x(axes)
    hide_frame(axes)


def count_on_x(axes: Axes) -> None:
    """Puts the ticks of the x axis, which counts rounds for example, at integers. The axis has room for two of them."""
    axes.locator_params(axis="x", integer=True)
    low, high = axes.get_xlim()
    if math.floor(high) - math.ceil(low) < 1:
        axes.set_xlim(math.ceil(low) - 1, math.ceil(low) + 1)


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
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:
            checks.refuse("path must end in a format of matplotlib", path, str(error), error)
    return figure
