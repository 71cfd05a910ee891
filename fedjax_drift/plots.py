"""Two pictures: the curves of a comparison, and what a federation's clients hold.

Each returns a `matplotlib.figure.Figure` that belongs to no window and leaves the caller's backend alone; in a notebook
the last expression of a cell shows it. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_drift.data.federated import FederatedData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FilePath = str | os.PathLike[str] | None

# Okabe and Ito's colours, which people who confuse red and green tell apart; its yellow is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*"
SHOWN_CLIENTS = 50


def curves(records: Mapping[str, Sequence[Mapping[str, Any]]], path: FilePath = None) -> Figure:
    """Test accuracy (percent) and training loss against rounds, one line per run.

    records: name of a run -> its history, as `Simulation.run` returns it. path: where to write the picture, if given;
    its ending decides the format. Raises ValueError without a single round.
    """
    if not any(records.values()):
        raise ValueError("curves needs at least 1 round, got none: pass {name: history of Simulation.run}")
    figure = _figure(9.0, 4.4)
    accuracy, loss = figure.subplots(1, 2)
    evaluated = max(sum("accuracy" in record for record in history) for history in records.values())
    for i, (name, history) in enumerate(records.items()):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 1.6}
        marks: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markersize": 4.5} if evaluated <= 30 else {}
        known = [record for record in history if "accuracy" in record]
        rounds, percent = [record["round"] for record in known], [100 * record["accuracy"] for record in known]
        accuracy.plot(rounds, percent, label=name, **look, **marks)
        loss.plot([record["round"] for record in history], [record["train_loss"] for record in history], **look)
    accuracy.set(xlabel="Round", ylabel="Test accuracy (%)", title="Test accuracy of the global model")
    loss.set(xlabel="Round", ylabel="Loss (nats per row)", title="Training loss, mean of the cohort")
    for axes in (accuracy, loss):
        _tidy(axes)
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.locator_params(axis="x", integer=True)
    if not evaluated:
        accuracy.text(0.5, 0.5, "never evaluated", transform=accuracy.transAxes, ha="center", color="0.4")
    longest = max(map(len, records))
    columns = max(1, min(len(records), 4, 110 // (longest + 8)))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return _written(figure, path)


def federation(data: FederatedData, path: FilePath = None) -> Figure:
    """Label mix per client (at most 50 of them, evenly spread over the ids) and the sizes of all clients.

    path: as in `curves`. Raises ValueError unless the labels are integers, one a row.
    """
    counts = data.label_counts()
    N, C = counts.shape
    shown = np.arange(min(N, SHOWN_CLIENTS)) * N // min(N, SHOWN_CLIENTS)
    share = 100 * counts[shown] / data.sizes[shown, None]
    figure = _figure(10.0, 5.0)
    mix, sizes = figure.subplots(1, 2, width_ratios=(3, 2))

    image = mix.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=share.max(), interpolation="nearest")
    every = max(1, round(len(shown) / 10))
    mix.set_yticks(range(0, len(shown), every), [f"{i:,}" for i in shown[::every]])
    mix.set_xticks(range(0, C, 1 if C <= 12 else 5 if C <= 70 else 10 if C <= 150 else C // 10))
    subset = f"{len(shown)} of {N:,} clients" if len(shown) < N else f"{N:,} clients" if N > 1 else "1 client"
    mix.set(xlabel="Label", ylabel="Client", title=f"Label mix of {subset}")
    figure.colorbar(image, ax=mix, label="Share of the client's rows (%)", fraction=0.05, pad=0.02)

    low, high = int(data.sizes.min()), int(data.sizes.max())
    width = max(1, -(-(high - low + 1) // min(30, math.ceil(2 * N**0.5))))
    bins = np.arange(low, high + width + 1, width) - 0.5
    sizes.hist(data.sizes, bins=bins.tolist(), color=COLOURS[0], edgecolor="white", linewidth=0.5)
    median = float(np.median(data.sizes))
    sizes.axvline(median, color=COLOURS[1], linestyle="--", linewidth=1.4, label=f"median {median:,.0f}")
    if high - low < 10:
        sizes.set_xlim(low - 5, high + 5)
    sizes.set(xlabel="Training rows of a client", ylabel="Clients", title=f"Sizes ({len(data.x):,} rows in all)")
    sizes.set_ylim(top=1.15 * sizes.get_ylim()[1])  # room for the legend
    sizes.locator_params(integer=True)
    sizes.legend(frameon=False)
    _tidy(sizes)
    figure.suptitle(data.name)
    return _written(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _written(figure: Figure, path: FilePath) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
