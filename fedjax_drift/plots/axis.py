"""The y axis of panels: its scale, its limits, and the marks where a line leaves it or ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_drift.plots.lines import Line
from fedjax_drift.plots.looks import look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 10  # values that are this many times the usual span away from the usual values are outside of the axis
TRIANGLE = 6.0  # points


def use_log_scale(lines: Sequence[Line], axes: Axes) -> None:
    """Makes the y axis logarithmic. If there are zeros, it is linear below the smallest positive value.

    Period drift is zero if all clients take part.
    """
    y = np.concatenate([line.y for line in lines])
    if (y > 0).all():
        axes.set_yscale("log")
    elif (y > 0).any():
        smallest = y[y > 0].min()
        axes.set_yscale("symlog", linthresh=smallest)
        axes.set_ylim(bottom=-0.2 * smallest)


def readable(lines: Sequence[Line], log: bool = False) -> tuple[float, float] | None:
    """Returns the limits of an axis on which the lines are not flat. None if all points and bands can be shown.

    The usual values of a line are its first one, and those between its quantiles 0.1 and 0.9. The usual values of the
    panel are those of the line in the middle. A line leaves the axis if a value is far away from these. The axis has
    room for the usual values, for all lines that do not leave it, and for bands up to twice that.
    """
    curves = [line.y for line in lines]
    bands = [np.concatenate([row for row in (line.y, line.low, line.high) if row is not None]) for line in lines]
    if log:
        curves, bands = ([np.log10(y[y > 0]) for y in of] for of in (curves, bands))
    curves, bands = [y for y in curves if y.size], [y for y in bands if y.size]
    if not curves:
        return None
    usual = np.sort(
        [[min(low, y[0]), max(high, y[0])] for y in curves for low, high in [np.quantile(y, (0.1, 0.9))]], 0
    )
    low, high = sorted((usual[len(usual) // 2, 0], usual[(len(usual) - 1) // 2, 1]))
    span = max(high - low, 1 if log else max(abs(low), abs(high)))
    if not span:  # most values are 0
        return None
    far = FAR * span
    below, above = ([side(y) for y in curves] for side in (np.min, np.max))
    bottom = min([low, *(y for y in below if y >= low - far)])
    top = max([high, *(y for y in above if y <= high + far)])
    room = max(top - bottom, span)  # for bands above and below the lines
    stays = [band for band, y, z in zip(bands, below, above, strict=True) if y >= bottom and z <= top]
    every = np.concatenate(bands)
    edges = np.concatenate([*stays, [bottom, top]])
    limits = max(edges.min(), bottom - room), min(edges.max(), top + room)
    if limits == (every.min(), every.max()):
        return None
    margin = 0.05 * (limits[1] - limits[0])
    low, high = limits[0] - margin, limits[1] + margin
    return (10**low, 10**high) if log else (low, high)


def in_points(axes: Axes, right: float = 0.0, up: float = 0.0) -> Any:
    """Returns the transform that moves what is drawn by this number of points."""
    from matplotlib.transforms import ScaledTranslation

    return ScaledTranslation(right / 72, up / 72, axes.figure.dpi_scale_trans)


def mark_outside(lines: Mapping[str, Line], axes: Axes) -> None:
    """Draws a triangle where a line leaves the y axis. The title says how far the values reach.

    Triangles that would cover each other are drawn one below the other.
    """
    low, high = axes.get_ylim()
    scale, near = axes.yaxis.get_transform().transform, 0.02 * np.ptp(axes.get_xlim())
    marks: list[tuple[float, int]] = []
    for i, line in enumerate(lines.values()):
        for sign, edge, marker in ((-1, low, "v"), (1, high, "^")):
            y = sign * (scale(line.y) - scale(edge))  # > 0 outside
            for n in np.flatnonzero((y > 0) & ~np.append(False, y[:-1] > 0)):
                x = np.interp(0, y[n - 1 : n + 1], line.x[n - 1 : n + 1]) if n else line.x[0]
                row = sum(abs(other - x) < near and other_sign == sign for other, other_sign in marks)
                place = axes.get_xaxis_transform() + in_points(axes, up=-sign * row * TRIANGLE)
                shape = {"color": look(i, axes)["color"], "markersize": TRIANGLE, "clip_on": False, "zorder": 5}
                axes.plot(x, float(sign > 0), marker, transform=place, **shape)
                marks.append((x, sign))
    if not marks:
        return
    values = np.concatenate([line.y for line in lines.values()])
    reach = [f"down to {values.min():.3g}"] if values.min() < low else []
    reach += [f"up to {values.max():.3g}"] if values.max() > high else []
    axes.title.set_text(f"{axes.get_title()}\n(triangles: outside, {' and '.join(reach)})".lstrip("\n"))
