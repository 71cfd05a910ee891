"""A plot of the loss on the plane through three models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.measures.planes import LossPlane
from fedjax_drift.plots.canvas import FilePath, finished, new_figure
from fedjax_drift.plots.looks import COLOURS, MARKERS
from fedjax_drift.plots.style import DEFAULT, AnyStyle
from fedjax_drift.spec import Fix, checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = 24
SIZE, SMALLEST, LARGEST = 5.2, 2.0, 8.0  # inches: the width of the axes, and the limits of their height


@checked
def loss_plane(
    plane: Annotated[LossPlane, spec.instance(LossPlane), Fix("pass fd.measures.loss_plane(sim, states)")],
    path: FilePath = None,
    *,
    key: Literal["loss", "accuracy"] = "loss",
    style: AnyStyle = DEFAULT,
) -> Figure:
    """Plots the loss on the plane through three models as filled contours, with the models as markers.

    Both axes have the same scale. If the loss is positive, the contours are closer together where it is small: their
    levels are a geometric series. Grid points whose loss is not finite are left empty.

    Args:
      plane: the result of `fd.measures.loss_plane`.
      path: as in `curves`.
      key: "loss" or "accuracy". Default: "loss".
      style: only its ``figsize`` has an effect.

    Raises:
      ValueError: no value is finite, or the model has no accuracy.
    """
    values = plane.accuracy if key == "accuracy" else plane.loss
    if values is None or not np.isfinite(values).any():
        checks.refuse(f"plane needs at least 1 finite {key}", "none", 'pass key="loss", or other models')
    from matplotlib.patheffects import withStroke

    values = np.ma.masked_invalid(100 * values if key == "accuracy" else values)
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1e-6 * max(1, abs(low))
    spaced = np.geomspace if key == "loss" and low > 0 else np.linspace
    height = SIZE * np.ptp(plane.y) / np.ptp(plane.x)
    figure = new_figure(SIZE + 1.6, float(np.clip(height, SMALLEST, LARGEST)) + 0.9, style)
    axes = figure.subplots()
    colours = "viridis" if key == "accuracy" else "viridis_r"  # the better, the lighter
    areas = axes.contourf(plane.x, plane.y, values, levels=spaced(low, high, LEVELS), cmap=colours)
    label = "Accuracy (%)" if key == "accuracy" else "Loss, mean over examples"
    bar = figure.colorbar(areas, ax=axes, label=label, ticks=spaced(low, high, 7))
    bar.ax.set_yticklabels(_told_apart(spaced(low, high, 7)))
    outline = [withStroke(linewidth=2.5, foreground="white")]  # names can be seen on every colour
    for (x, y), name, colour, marker in zip(plane.models, plane.names, COLOURS, MARKERS, strict=False):
        axes.plot(x, y, marker, color=colour, markeredgecolor="white", markersize=9, label=name)
        axes.annotate(
            name, (x, y), (0, 9), textcoords="offset points", ha="center", color="black", path_effects=outline
        )
    axes.set_aspect("equal")
    axes.set(xlabel=f"Distance from {plane.names[0]} towards {plane.names[1]}", ylabel="Distance from this line")
    axes.set_title(f"{key.capitalize()} on the plane through three models")
    return finished(figure, path)


def _told_apart(values: np.ndarray) -> list[str]:
    """Returns the values as texts that all differ, with at least three digits."""
    texts = ([f"{value:.{digits}g}" for value in values] for digits in range(3, 17))
    return next((each for each in texts if len(set(each)) == len(values)), [f"{value:.17g}" for value in values])
