"""How the runs look: a colour, a line style and a marker for each position in `records`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours of Okabe and Ito, which people with a red-green colour vision deficiency can distinguish. Yellow is left
# out, because it is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*"


def look(run: int, axes: Axes) -> dict[str, Any]:
    """Returns the colour, the line style and the marker of the run at a position in `records`.

    Black is replaced by the colour of the labels. Runs with the same colour have different line styles and markers.
    """
    number, again = run % len(COLOURS), run // len(COLOURS)
    return {
        "color": ink(axes) if COLOURS[number] == "#000000" else COLOURS[number],
        "linestyle": STYLES[again % len(STYLES)],
        "marker": MARKERS[(number + again) % len(MARKERS)],
    }


def ink(axes: Axes) -> Any:
    """Returns the colour of the labels, which can be seen on the background."""
    return axes.xaxis.label.get_color()


def fill(axes: Axes) -> tuple[Any, float]:
    """Returns the colour of areas, and the opacity of bands, that can be seen on the background."""
    from matplotlib.colors import to_rgb

    dark = max(to_rgb(axes.get_facecolor())) < 0.5
    return (COLOURS[5], 0.3) if dark else (COLOURS[0], 0.15)
