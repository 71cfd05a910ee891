"""Draws the data flow of a round for docs/architecture.md: python docs/draw_round.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

STATE, STEP, PURE, OTHER = "#d6e4f5", "#f3f3f3", "#fbe3c0", "#e3f1dc"  # colours, see the legend
INK = "#222222"


def outline(ax: Axes, x: float, y: float, width: float, height: float, colour: str, edge: str, zorder: float) -> None:
    """A rounded rectangle. x, y: its lower left corner."""
    style = "round,pad=0,rounding_size=1"
    ax.add_patch(FancyBboxPatch((x, y), width, height, style, fc=colour, ec=edge, linewidth=0.9, zorder=zorder))


def box(ax: Axes, x: float, y: float, width: float, height: float, colour: str, name: str, below: str = "") -> None:
    """A rectangle with a name, and a smaller line below the name."""
    outline(ax, x, y, width, height, colour, INK, 3)
    middle = y + height / 2
    ax.text(x + width / 2, middle + (1.3 if below else 0), name, ha="center", va="center", weight="bold", zorder=4)
    ax.text(x + width / 2, middle - 1.7, below, ha="center", va="center", size=8, zorder=4)


def arrow(ax: Axes, *points: tuple[float, float], text: str = "", at: tuple[float, float] = (0, 0)) -> None:
    """A line through the points, with a head at the last one. at: the middle of the text's lower edge."""
    ax.plot(*zip(*points, strict=True), color=INK, linewidth=1, zorder=2)
    head = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", points[-1], points[-2], arrowprops=head, zorder=2)
    ax.text(*at, text, ha="center", va="bottom", size=8, zorder=4, linespacing=1.1)


def draw() -> plt.Figure:
    plt.rcParams.update({"font.size": 9.5, "font.family": "DejaVu Sans"})
    figure, ax = plt.subplots(figsize=(13, 6.6))
    ax.set(xlim=(0, 148), ylim=(-8, 69))
    ax.axis("off")

    # The state before the round, the data set, and the state after the round.
    for x, name, t in ((1, "state", "t"), (126, "new state", "t + 1")):
        ax.text(x + 10.5, 66, name, ha="center", va="bottom", style="italic")
        box(ax, x, 57, 21, 8, STATE, f"round {t}, key")
        box(ax, x, 38, 21, 8, STATE, "clients", "client states [N, ...]")
        box(ax, x, 5, 21, 8, STATE, "server", "w and other variables")
    box(ax, 1, 25, 21, 8, OTHER, "data set", "examples [M, ...]")
    box(ax, 126, 27, 21, 8, OTHER, "info", "results of the round")

    # Which clients take part, and where they train.
    box(ax, 30, 57, 19, 8, STEP, "sample", "cohort.py")
    box(ax, 60, 57, 19, 8, STEP, "fail", "failures.py, cohort.py")
    box(ax, 91, 57, 19, 8, STEP, "assign", "cohort.py")
    arrow(ax, (22, 61), (30, 61))
    arrow(ax, (49, 61), (60, 61), text="ids [K]", at=(54.3, 61.6))
    arrow(ax, (79, 61), (91, 61), text="clients [K]", at=(84.8, 61.6))
    arrow(ax, (100.5, 57), (100.5, 53.5), (60.5, 53.5), (60.5, 44.4), text="clients [D, G, L]", at=(79, 54))

    # Training, on every device.
    for shift in (1.6, 0.8, 0):
        outline(ax, 27 + shift, 19 + shift, 91, 31, "white", "#888888", 1)
    ax.text(28.5, 48.2, "each of D devices:", va="center", size=8.5, style="italic")
    ax.text(28.5, 46.2, "a scan over its G groups", va="center", size=8.5, style="italic")
    box(ax, 30, 38, 14, 7, STEP, "fetch", "client_states.py")
    for shift in (1.4, 0.7, 0):
        outline(ax, 52 + shift, 22.5 + shift, 17, 20.5, PURE, INK, 3)
    ax.text(60.5, 38.5, "client_update", ha="center", weight="bold", zorder=4)
    ax.text(60.5, 29.5, "local.train:\nlocal steps on the\nclient's batches", ha="center", size=8, zorder=4)
    ax.text(60.5, 24.5, "L clients, vmap", ha="center", size=8, style="italic", zorder=4)
    box(ax, 100, 38, 15, 7, STEP, "store", "client_states.py")
    box(ax, 79, 22, 19, 7, STEP, "sum", "of weight * message")
    arrow(ax, (22, 41.5), (30, 41.5))
    arrow(ax, (44, 41.5), (52, 41.5), text="[L, ...]", at=(48, 42))
    arrow(ax, (22, 30), (52, 30), text="batches", at=(36, 30.5))
    arrow(ax, (70.4, 41.5), (100, 41.5), text="new client states [L, ...]", at=(85, 42))
    arrow(ax, (70.4, 33), (126, 33), text="metrics", at=(85, 33.4))
    arrow(ax, (70.4, 25.5), (79, 25.5), text="message,\nweight", at=(74.7, 26))
    arrow(ax, (115, 41.5), (126, 41.5))

    # The server.
    box(ax, 78, 5, 21, 8, STEP, "combine", "psum, aggregation.py")
    box(ax, 105, 5, 17.5, 8, PURE, "server_update")
    arrow(ax, (88.5, 22), (88.5, 13), text="one sum per device", at=(98, 14.8))
    arrow(ax, (99, 9), (105, 9), text="mean", at=(101.9, 9.5))
    arrow(ax, (122.5, 9), (126, 9))
    arrow(ax, (22, 9), (60.5, 9), (60.5, 22.5), text="the server's variables", at=(40, 9.5))
    arrow(ax, (11.5, 5), (11.5, 1.5), (114, 1.5), (114, 5), text="the server's variables", at=(40, 2))

    legend = {"state": STATE, "function of the algorithm": PURE, "step of the round": STEP, "data and results": OTHER}
    for (name, colour), x in zip(legend.items(), (28, 44, 76, 102), strict=True):
        outline(ax, x, -6, 3, 2.4, colour, INK, 3)
        ax.text(x + 4, -4.8, name, va="center", size=8.5)
    return figure


if __name__ == "__main__":
    file = Path(__file__).parent / "pictures" / "round.png"
    draw().savefig(file, dpi=130, bbox_inches="tight")
    print(file)
