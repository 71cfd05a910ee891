"""Plots of the clients: their data, the labels of the cohorts, and the accuracy for each client."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data.federated import FederatedData, GivenData
from fedjax_drift.measures.data_distance import distances
from fedjax_drift.measures.personal import summary
from fedjax_drift.plots.canvas import (
    MEASURE,
    FilePath,
    Panel,
    count_on_x,
    figure_of_panels,
    finished,
    hide_frame,
    letters_across,
    new_figure,
    wrapped,
)
from fedjax_drift.plots.lines import Line
from fedjax_drift.plots.looks import COLOURS, fill, ink
from fedjax_drift.plots.style import DEFAULT, AnyStyle
from fedjax_drift.records import History, by_run, measured, numbers
from fedjax_drift.spec import Share, Text, checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_CLIENTS = 50
SHOWN_ROUNDS = 30


@checked
def fairness(scores: Mapping[str, Any], path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots the accuracy of every client on its own test examples, sorted, the worst client first.

    If there is no accuracy, it plots the loss. A second panel shows the values of the clients' own models, if they were
    computed: those of the algorithm, or copies of the global model that the clients have fine-tuned. The worst 10 % of
    the clients are shaded. Their mean is in the legend.

    Args:
      scores: the result of `Simulation.evaluate_clients`, or a dict from the name of a run to such a result.
      path: as in `curves`.
      style: only its ``figsize`` has an effect.

    Raises:
      ValueError: ``scores`` is anything else, or no client has test examples.
    """
    single = isinstance(scores, Mapping) and not any(isinstance(value, Mapping) for value in scores.values())
    named = {"": scores} if single else scores
    if not isinstance(named, Mapping) or not all(isinstance(result, Mapping) for result in named.values()):
        checks.refuse(
            "scores must be the result of Simulation.evaluate_clients(state), or a dict of such results",
            type(scores).__name__,
        )
    key = "accuracy" if any("accuracy" in result for result in named.values()) else "loss"
    ylabel = "Accuracy on own test data (%)" if key == "accuracy" else "Loss on own test data"
    titles = {key: f"{key.capitalize()} of the global model", f"personal_{key}": f"{key.capitalize()} of own models"}
    panels: dict[str, dict[str, Line]] = {entry: {} for entry in titles}
    for name, result in named.items():
        values = {entry: _finite(entry, result) for entry in titles}
        label = ": ".join(filter(None, (name or "all clients", _worst(values, key))))
        note = "" if any(of.size for of in values.values()) else "no finite score"
        for entry in titles:
            panels[entry][label] = _worst_first(values[entry], key)._replace(note=note)
    if not any(line.x.size for lines in panels.values() for line in lines.values()):
        checks.refuse("fairness needs the scores of at least 1 client", "none", "pass evaluate_clients(state)")
    shown = [Panel(title, ylabel, panels[entry], steps=True) for entry, title in titles.items()]
    texts = "Clients, the worst first (%)", "Mean of the worst 10 % of the clients"
    figure = figure_of_panels("fairness", shown, "pass evaluate_clients(state)", style, *texts)
    for axes in figure.axes:
        axes.axvspan(0, 10, color=ink(axes), alpha=0.08, linewidth=0, zorder=0)
        axes.set_xlim(0, 100)
    return finished(figure, path)


@checked
def label_mix(
    history: History | str | os.PathLike[str],
    path: FilePath = None,
    *,
    title: Text = "Label mix of the cohort",
    largest: Share | None = None,
    style: AnyStyle = DEFAULT,
) -> Figure:
    """Plots the label distribution of the cohort's examples in each round (FedEve, fig. 3a).

    The area of a bubble is the share of a label. If more than 30 rounds were measured, only every second, third, ...
    measured round is shown.

    Args:
      history: the history of one run, or the path of its log. If the log has several algorithms, the first one is used,
        because they all have the same cohorts.
      path: as in `curves`.
      title: the title of the figure. Default: "Label mix of the cohort".
      largest: the share, in (0, 1], that a bubble of the largest size has. No share of the history may be larger.
        Use the same number in figures that you want to compare.
        Default: the largest share in this history.
      style: only its ``figsize`` has an effect.

    Raises:
      ValueError: no round has a label mix, or ``largest`` is smaller than a share.
    """
    run = next(iter(by_run(history).values()), [[]])[0]
    with_labels = [record for record in run if "label_mix" in record]
    if not with_labels:
        checks.refuse("label_mix needs at least 1 round with a label mix", "none", MEASURE.format("labels"))
    every = -(-len(with_labels) // SHOWN_ROUNDS)
    shown = with_labels[::every]
    ((_, mixes),) = measured({"": [shown]}, "label_mix")[""]
    share = 100 * mixes  # [T, C]
    if largest is not None and share.max() > 100 * largest * (1 + 1e-6):
        checks.refuse(
            f"largest must be at least the largest share of this history, {share.max() / 100:.3g}",
            f"{largest:g}",
            "pass the largest share of all histories that you compare",
        )
    T, C = share.shape
    width, height = 9.5, min(max(4.0, 0.2 * C), 9.0)
    # The largest bubble fills its cell, and the cells cover about 80 % of the figure. With many labels, the cells are
    # tiny, and the bubble may cover the cells of its neighbours.
    diameter = max(16.0, min(0.8 * 72 * width / T, 0.8 * 72 * height / C, 30.0))
    point = diameter**2 / (share.max() if largest is None else 100 * largest)  # area of a share of 1 %

    figure = new_figure(width, height, style)
    axes = figure.subplots()
    t, c = np.nonzero(share > 0)
    rounds = np.array([record["round"] for record in shown])
    look: dict[str, Any] = {"color": fill(axes)[0], "alpha": 0.75}
    bubbles = axes.scatter(rounds[t], c, s=point * share[t, c], linewidth=0, **look)
    room = max(0.7, 0.8 * diameter * C / (72 * height))  # labels; more than half of the largest bubble
    axes.set(xlabel="Round", ylabel="Label", ylim=(-room, C - 1 + room), yticks=label_ticks(C))
    axes.set_title(title + (f", one in {every} of the measured rounds" if every > 1 else ""))
    count_on_x(axes)
    hide_frame(axes)
    sizes, names = bubbles.legend_elements("sizes", num=4, func=lambda s: s / point, fmt="{x:.3g} %", **look)
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "labelspacing": max(0.6, diameter / 12)}
    axes.legend(sizes, names, title="Share of examples", frameon=False, **place)
    return finished(figure, path)


@checked
def federation(data: GivenData, path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots the number of training examples of all clients and, for integer labels, their label distributions.

    The label distributions are shown for at most 50 clients, whose ids are evenly spaced. They need one label per
    example. A third panel shows how far the label distribution of each client is from that of the federation
    (`fd.measures.distances`).

    path: as in `curves`. style: only its ``figsize`` has an effect.
    """
    labelled = np.issubdtype(data.y.dtype, np.integer) and data.y.ndim == 1
    figure = new_figure(10.0 if labelled else 5.0, 6.4 if labelled else 5.0, style)
    if labelled:
        panels = figure.subplot_mosaic([["mix", "sizes"], ["mix", "far"]], width_ratios=(3, 2))
        draw_label_mixes(data, panels["mix"], figure)
        draw_sizes(data, panels["sizes"])
        draw_label_distances(data, panels["far"])
    else:
        draw_sizes(data, figure.subplots())
    figure.suptitle(wrapped(data.name, letters_across(0.8 * figure.get_figwidth())))
    return finished(figure, path)


def draw_sizes(data: FederatedData, axes: Axes) -> None:
    """Draws a histogram of the number of examples of the clients."""
    low, high = int(data.sizes.min()), int(data.sizes.max())
    width = max(1, -(-(high - low + 1) // min(30, math.ceil(2 * data.num_clients**0.5))))
    draw_histogram(data.sizes, np.arange(low, high + width + 1, width) - 0.5, ",.0f", axes)
    if high - low < 10:
        axes.set_xlim(low - 5, high + 5)
    axes.set(xlabel="Training examples of a client", title=f"Sizes ({len(data.x):,} examples in all)")
    axes.locator_params(axis="x", integer=True)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)


def draw_label_distances(data: FederatedData, axes: Axes) -> None:
    """Draws a histogram of the distances of the clients' label distributions from that of the federation."""
    measured = distances(data, pairs=1)
    draw_histogram(measured.jensen_shannon, np.arange(21) * 0.05, ".2f", axes)
    others = f"means: Hellinger {measured.hellinger.mean():.2f}, total variation {measured.total_variation.mean():.2f}"
    axes.set(xlabel=f"Jensen-Shannon distance of a label mix\n({others})", xlim=(0, 1))
    axes.set_title("Distance from all clients' mix")


def draw_histogram(of_clients: np.ndarray, bins: np.ndarray, digits: str, axes: Axes) -> None:
    """Draws how many clients have a value in each bin, and the median."""
    axes.hist(of_clients, bins.tolist(), color=fill(axes)[0], edgecolor=axes.get_facecolor(), linewidth=0.5)
    median = float(np.median(of_clients))
    axes.axvline(median, color=COLOURS[1], linestyle="--", linewidth=1.4, label=f"median {median:{digits}}")
    axes.set(ylabel="Clients", ylim=(0, 1.15 * axes.get_ylim()[1]))  # room for the legend
    axes.locator_params(axis="y", integer=True)
    axes.legend(frameon=False)
    hide_frame(axes)


def draw_label_mixes(data: FederatedData, axes: Axes, figure: Figure) -> None:
    """Draws the share of each label among the examples of at most 50 clients."""
    counts = data.label_counts()
    N, C = counts.shape
    shown = np.arange(min(N, SHOWN_CLIENTS)) * N // min(N, SHOWN_CLIENTS)
    share = 100 * counts[shown] / counts[shown].sum(1, keepdims=True)
    image = axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=share.max(), interpolation="nearest")
    axes.locator_params(axis="y", integer=True, min_n_ticks=1)
    axes.yaxis.set_major_formatter(lambda row, _: f"{shown[int(row)]:,}" if 0 <= row < len(shown) else "")
    axes.set_xticks(label_ticks(C))
    subset = f"{len(shown)} of {N:,} clients" if len(shown) < N else f"{N:,} clients" if N > 1 else "1 client"
    axes.set(xlabel="Label", ylabel="Client", title=f"Label mix of {subset}")
    figure.colorbar(image, ax=axes, label="Share of the client's labels (%)", fraction=0.05, pad=0.02)


def label_ticks(labels: int) -> range:
    """Returns the ticks of an axis with this number of labels, at most 15."""
    step = 1 if labels <= 12 else 5 if labels <= 70 else 10 if labels <= 150 else labels // 10
    return range(0, labels, step)


def _finite(entry: str, result: Mapping[str, Any]) -> np.ndarray:
    values = numbers(f"scores[{entry!r}]", result.get(entry, []))
    return values[np.isfinite(values)]


def _worst_first(values: np.ndarray, key: str) -> Line:
    """Returns the values of the clients as steps, the worst first. Accuracies are in percent."""
    if not values.size:
        return Line(values, values)
    ordered = 100 * np.sort(values) if key == "accuracy" else np.sort(values)[::-1]
    return Line(100 * np.arange(values.size + 1) / values.size, np.append(ordered[0], ordered))


def _worst(values: Mapping[str, np.ndarray], key: str) -> str:
    """Returns the means of the worst 10 % in words. values: entry -> the scores of the clients."""
    factor, unit = (100, " %") if key == "accuracy" else (1, "")
    worst = {name: summary(of, key == "accuracy")["worst_10"] for name, of in values.items() if of.size}
    means = {entry: f"{factor * mean:.3g}{unit}" for entry, mean in worst.items()}
    return ", ".join("own models " * (entry != key) + mean for entry, mean in means.items())
