"""Pictures of runs: accuracy, drift and what clients hold.

Each returns a `matplotlib.figure.Figure` that belongs to no window and leaves the caller's backend alone; in a notebook
the last expression of a cell shows it. matplotlib is imported when a picture is drawn. A run's colour, line style and
marker follow from its place in `records`, so that pictures of the same records agree. Rounds that lack a measurement,
and values that aren't finite, are skipped. Where more than 100 rounds have one, lines are medians of windows of rounds
(500 in windows of 10), in bands between the windows' quartiles.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_drift.data.federated import FederatedData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FilePath = str | os.PathLike[str] | None
History = Sequence[Mapping[str, Any]]
Records = Mapping[str, History]

# Okabe and Ito's colours, which people who confuse red and green tell apart; its yellow is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*"
SHOWN_CLIENTS = 50
SHOWN_ROUNDS = 30
SHOWN_MARKERS = 30
SHOWN_POINTS = 100  # of a line against rounds; more are summed up in half as many windows at most
QUARTILES = (0.25, 0.5, 0.75)

MEASURE = "pass measure=({!r},) to Simulation"


class Line(NamedTuple):
    """What one run shows in a panel; no points where it has nothing to show."""

    x: np.ndarray  # [n]
    y: np.ndarray  # [n]
    low: np.ndarray | None = None  # [n], lower edge of a band around y
    high: np.ndarray | None = None  # [n]


class Panel(NamedTuple):
    """Lines in one pair of axes. Panels of a picture with the same y label share their y axis."""

    title: str
    ylabel: str
    lines: Mapping[str, Line]  # name of a run -> its line, for all runs in the order of `records`
    log: bool = False
    guide: float | None = None  # a grey horizontal line


def curves(records: Records, path: FilePath = None) -> Figure:
    """Test accuracy (percent), if it was ever measured, and training loss against rounds, one line per run.

    records: name of a run -> its history, as `Simulation.run` returns it. path: where to write the picture, if given;
    its ending decides the format. Raises ValueError without a single round.
    """
    panels = (
        Panel("Test accuracy of the global model", "Test accuracy (%)", _by_round(records, "accuracy", 100)),
        Panel("Training loss, mean of the cohort", "Loss (nats per row)", _by_round(records, "train_loss")),
    )
    return _picture("curves", panels, "pass {name: history of Simulation.run}", path)


def drift(records: Records, path: FilePath = None) -> Figure:
    """Period drift and client drift after the last local epoch against rounds, and dissimilarity where it was measured.

    Period drift is FedEve's eq. 3, client drift its eq. 4, both squared norms of differences of gradients, on one
    logarithmic scale; dissimilarity is FedGVRGM's eq. 4. records, path: as in `curves`. Raises ValueError where no
    round has any of them.
    """
    squared = "Squared gradient norm"
    panels = (
        Panel("Period drift", squared, _by_round(records, "period_drift"), log=True),
        Panel("Client drift after the last local epoch", squared, _by_round(records, "client_drift"), log=True),
        Panel("Dissimilarity of gradients", "Dissimilarity", _by_round(records, "dissimilarity"), log=True),
    )
    return _picture("drift", panels, MEASURE.format("gradients"), path)


def updates(records: Records, path: FilePath = None) -> Figure:
    """Norm of the clients' updates and their cosine with the mean update after the last local epoch, against rounds.

    records, path: as in `curves`. Raises ValueError where no round has them.
    """
    panels = (
        Panel("Norm of client updates", "Norm, mean of the cohort", _by_round(records, "update_norm")),
        Panel("Cosine of client updates with their mean", "Cosine", _by_round(records, "update_cosine")),
    )
    return _picture("updates", panels, MEASURE.format("updates"), path)


def agreement(records: Records, path: FilePath = None) -> Figure:
    """Linear CKA and KL divergence between predictions of local and global models (LfD, section 3).

    Against local epochs, the median of the measured rounds in a band between their quartiles; against rounds where no
    run has more than one local epoch. records, path: as in `curves`. Raises ValueError where no round has them.
    """
    measured = [*_measured(records, "cka").values(), *_measured(records, "kl").values()]
    epochs = max((values.shape[1] for _, values in measured), default=1)
    lines, xlabel = (_by_epoch, "Local epoch") if epochs > 1 else (_by_round, "Round")
    panels = (
        Panel("CKA of local and global predictions", "Linear CKA", lines(records, "cka")),
        Panel("KL of local and global predictions", "KL divergence (nats)", lines(records, "kl")),
    )
    return _picture("agreement", panels, MEASURE.format("predictions"), path, xlabel)


def forgetting(records: Records, path: FilePath = None) -> Figure:
    """LP, the accuracy local training leaves on a class over the global model's, against rounds (LfD, eq. 11).

    Apart for classes that are present at a client and those that are absent; below the line at 1 local training
    forgets. records, path: as in `curves`. Raises ValueError where no round has it.
    """
    ratio = "LP (local / global accuracy)"
    panels = (
        Panel("Classes present at the client", ratio, _by_round(records, "lp_present"), guide=1),
        Panel("Classes absent from the client", ratio, _by_round(records, "lp_absent"), guide=1),
    )
    figure = _picture("forgetting", panels, MEASURE.format("forgetting"), None)
    for axes in figure.axes:  # early rounds divide by global accuracies of almost 0
        if axes.get_ylim()[1] > 3:
            axes.set_ylim(top=3)
            axes.set_title(f"{axes.get_title()} (up to 3)")
    return _written(figure, path)


def gain(records: Records, path: FilePath = None) -> Figure:
    """FedEve's Kalman gain (its median in the legend), period variance and client variance against rounds.

    records, path: as in `curves`; runs of other algorithms are left out. Raises ValueError where no round has a gain.
    """
    renamed = {}
    for name, (rounds, gains) in _measured(records, "gain").items():
        line = _finite(rounds, gains[:, -1])
        renamed[f"{name} (median gain {np.median(line.y):.2f})" if line.y.size else name] = records[name]
    panels = (
        Panel("Kalman gain", "Gain", _by_round(renamed, "gain")),
        Panel("Period variance", "Variance", _by_round(renamed, "period_variance"), log=True),
        Panel("Client variance", "Variance", _by_round(renamed, "client_variance"), log=True),
    )
    return _picture("gain", panels, "pass the history of a run of fedeve", path)


class Compared(NamedTuple):
    """One setting of a table: the runs of its methods, and what the paper printed."""

    title: str
    runs: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]  # method -> (rounds, values) of each seed
    printed: Mapping[str, Sequence[tuple[float | None, float]]]  # method -> (round, value); None: at the last round
    reached: Mapping[str, Sequence[tuple[float, float]]] = {}  # likewise ours, where the paper prints the round


def compared(settings: Sequence[Compared], ylabel: str, path: FilePath = None) -> Figure:
    """A table's curves, a panel for each setting with a point: the mean over seeds, from the lowest to the highest.

    A hollow marker is the paper's number, where it has one for what is drawn, a filled one ours. The axis starts at the
    lowest value after a tenth of the rounds; panels of a single method have one axis, as they are what is compared.
    path: as in `curves`. Raises ValueError without a single point.
    """
    methods = list(dict.fromkeys(method for setting in settings for method in setting.runs))
    panels = {}
    for setting in settings:
        lines = {method: _over_seeds(setting.runs.get(method, ())) for method in methods}
        if any(line.x.size for line in lines.values()):
            panels[setting.title] = Panel(setting.title, ylabel, lines)
    if not panels:
        raise ValueError("compared needs at least 1 round of a run, got none: pass (rounds, values) of each seed")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = _figure(4.4 * columns + 0.6, 3.2 * rows + 0.7)
    drawn: dict[str, Line2D] = {}
    one_scale = len(methods) == 1
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=one_scale).flat)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    extents = []  # of each panel, the lowest and the highest value
    shown = [setting for setting in settings if setting.title in panels]
    for number, (setting, axes) in enumerate(zip(shown, grid, strict=False)):
        panel = panels[setting.title]
        here = _draw(panel, axes)
        drawn = here | drawn
        if len(here) > 1 and methods[0] in here:  # or else those that hardly differ from it would hide it
            here[methods[0]].set(linestyle=(0, (3, 1.5)), zorder=3)
        late = [
            y[line.x >= line.x[-1] / 10]
            for line in panel.lines.values()
            for y in (line.y, line.low, line.high)
            if line.x.size and y is not None
        ]
        last = max((line.x[-1] for line in panel.lines.values() if line.x.size), default=1)
        for i, method in enumerate(methods):
            look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "clip_on": False, "zorder": 4}
            for at, value in setting.printed.get(method, ()):
                late.append(np.array([value]))
                marker = "o" if at is not None else "<"
                axes.plot(last if at is None else at, value, marker=marker, markerfacecolor="none", **look)
            for at, value in setting.reached.get(method, ()):
                axes.plot(at, value, marker="o", markersize=4, **look)
        extents.append((min(map(np.min, late)), max(map(np.max, late))))
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel(ylabel if number % columns == 0 else "")
        axes.set_xlabel("Round" if number + columns >= len(panels) else "")
        _ruled(axes)
    for axes, extent in zip(grid, extents, strict=False):
        low, high = (np.min(extents), np.max(extents)) if one_scale else extent
        if low < high:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    legend = {method: drawn[method] for method in methods if method in drawn}
    figure.legend(
        legend.values(),
        legend.keys(),
        loc="outside lower center",
        ncols=min(3 * columns, 6, len(legend)),
        frameon=False,
        fontsize=9,
    )
    return _written(figure, path)


def _over_seeds(runs: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Line:
    """The mean of the rounds that all seeds have, between the lowest and the highest."""
    tables = [dict(zip(rounds, values, strict=True)) for rounds, values in runs]
    rounds = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[t] for t in rounds] for table in tables], float).reshape(len(tables), len(rounds))
    known = np.isfinite(values).all(0)
    x, values = np.array(rounds)[known], values[:, known]
    if not x.size:
        return Line(np.array([]), np.array([]))
    if len(tables) == 1:
        line = Line(x, values[0])
        return line if x.size <= SHOWN_POINTS else Line(*_means(np.stack([x, values[0]])))
    return Line(*_means(np.stack([x, values.mean(0), values.min(0), values.max(0)])))


def _means(rows: np.ndarray) -> np.ndarray:
    """Of windows of neighbouring columns, as many as are shown."""
    parts = np.array_split(rows, min(rows.shape[1], SHOWN_POINTS // 2), axis=1)
    return np.transpose([part.mean(1) for part in parts])


def quadratics(errors: Mapping[str, Sequence[Sequence[float]]], titles: Sequence[str], path: FilePath = None) -> Figure:
    """Distance to the optimum against rounds on a logarithmic scale, a panel per setting and a line per algorithm.

    errors: name of an algorithm -> for each setting the distances after rounds 1, 2, ...; an empty one where it wasn't
    run. titles: the settings' names, such as "all clients" and "20 % a round". path: as in `curves`. Raises ValueError
    unless every algorithm has one list per title, and without a single distance.
    """
    for name, settings in errors.items():
        if len(settings) != len(titles):
            raise ValueError(
                f"errors[{name!r}] must have one list per title ({len(titles)}), got {len(settings)}: "
                "pass an empty list for a setting in which it wasn't run"
            )
    distance = "Distance to the optimum"
    lines = [
        {name: _finite(range(1, len(of[i]) + 1), of[i]) for name, of in errors.items()} for i in range(len(titles))
    ]
    panels = [Panel(title, distance, drawn, log=True) for title, drawn in zip(titles, lines, strict=True)]
    return _picture("quadratics", panels, "pass {name: [distances after each round, for each title]}", path)


def label_mix(
    history: History, path: FilePath = None, *, title: str = "Label mix of the cohort", largest: float | None = None
) -> Figure:
    """Labels of the cohort's rows in each round, as bubbles whose area is the label's share (FedEve, fig. 3a).

    history: of one run, as `Simulation.run` returns it; of more than 30 measured rounds every second, third, ... is
    shown. path: as in `curves`. largest: the share (0 to 1) of the largest bubble, for pictures to be compared; default
    the largest there is. Raises ValueError where no round has a label mix.
    """
    known = [record for record in history if "label_mix" in record]
    if not known:
        raise ValueError(f"label_mix needs at least 1 round that has it, got none: {MEASURE.format('labels')}")
    every = -(-len(known) // SHOWN_ROUNDS)
    shown = known[::every]
    share = 100 * np.array([record["label_mix"] for record in shown], float)  # [T, C]
    T, C = share.shape
    width, height = 9.5, min(max(4.0, 0.2 * C), 9.0)
    # The largest share fills its cell of about 80 % of the figure; of many labels it covers its neighbours' cells, too,
    # or else there was little to see.
    diameter = max(16.0, min(0.8 * 72 * width / T, 0.8 * 72 * height / C, 30.0))
    point = diameter**2 / (share.max() if largest is None else 100 * largest)  # area of 1 percent

    figure = _figure(width, height)
    axes = figure.subplots()
    t, c = np.nonzero(share > 0)
    rounds = np.array([record["round"] for record in shown])
    look: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.75}
    bubbles = axes.scatter(rounds[t], c, s=point * share[t, c], linewidth=0, **look)
    axes.set(xlabel="Round", ylabel="Label", ylim=(-0.7, C - 0.3), yticks=_label_ticks(C))
    axes.set_title(title + (f", one in {every} of the measured rounds" if every > 1 else ""))
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    _tidy(axes)
    sizes, names = bubbles.legend_elements("sizes", num=4, func=lambda s: s / point, fmt="{x:.3g} %", **look)
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "labelspacing": max(0.6, diameter / 12)}
    axes.legend(sizes, names, title="Share of rows", frameon=False, **beside)
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
    mix.set_xticks(_label_ticks(C))
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


def _by_round(records: Records, key: str, factor: float = 1) -> dict[str, Line]:
    """Each run's rounds that have `key`; of a list the last entry, which is after the last local epoch."""
    lines = {name: _finite(t, factor * values[:, -1]) for name, (t, values) in _measured(records, key).items()}
    longest = max((line.x.size for line in lines.values()), default=0)
    if longest <= SHOWN_POINTS:
        return lines
    length = math.ceil(longest / (SHOWN_POINTS // 2))
    return {name: _windows(line, length) for name, line in lines.items()}


def _windows(line: Line, length: int) -> Line:
    """Medians and quartiles of windows of about `length` points."""
    if not line.x.size:
        return line
    parts = np.array_split(np.stack([line.x, line.y]), math.ceil(line.x.size / length), axis=1)
    low, median, high = np.transpose([np.quantile(y, QUARTILES) for _, y in parts])
    return Line(np.array([x.mean() for x, _ in parts]), median, low, high)


def _by_epoch(records: Records, key: str) -> dict[str, Line]:
    """Each run's quartiles over rounds of the lists under `key`, against local epochs."""
    lines = {}
    for name, (_, values) in _measured(records, key).items():
        values = values[np.isfinite(values).all(axis=1)]
        low, median, high = np.quantile(values, QUARTILES, axis=0) if len(values) else np.empty((3, 0))
        lines[name] = Line(np.arange(1, len(median) + 1), median, low, high)
    return lines


def _measured(records: Records, key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name of a run -> numbers [n] of the rounds that have `key`, and their values [n, E]; None becomes NaN."""
    measured = {}
    for name, history in records.items():
        known = [record for record in history if key in record]
        values = np.array([record[key] for record in known], float)
        rounds = np.array([record["round"] for record in known], int)
        measured[name] = rounds, values if values.ndim == 2 else values[:, None]
    return measured


def _finite(x: Sequence[int] | np.ndarray, y: Sequence[float] | np.ndarray) -> Line:
    x, y = np.asarray(x), np.asarray(y, float)
    return Line(x[np.isfinite(y)], y[np.isfinite(y)])


def _picture(name: str, panels: Sequence[Panel], fix: str, path: FilePath, xlabel: str = "Round") -> Figure:
    """The panels that have a point, side by side, above one legend."""
    panels = [panel for panel in panels if any(line.x.size for line in panel.lines.values())]
    if not panels:
        raise ValueError(f"{name} needs at least 1 round that was measured, got none: {fix}")
    width = {1: 6.0, 2: 9.0}.get(len(panels), 4.2 * len(panels))
    figure = _figure(width, 4.2)
    drawn: dict[str, Line2D] = {}
    first: dict[str, Axes] = {}  # y label -> the axes that the others with it follow
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        if (twin := first.setdefault(panel.ylabel, axes)) is not axes:
            axes.sharey(twin)
        drawn = _draw(panel, axes) | drawn
        banded = any(line.low is not None for line in panel.lines.values())
        axes.set_xlabel(xlabel + " (median and quartiles)" * banded)
        axes.set(ylabel=panel.ylabel, title=panel.title)
        _ruled(axes)
    for panel in panels:
        if panel.log:
            _log_scale(first[panel.ylabel])
    legend = {name: drawn[name] for name in panels[0].lines if name in drawn}
    columns = max(1, min(len(legend), 5, int(11 * width) // (max(map(len, legend)) + 8)))
    figure.set_figheight(4.2 + 0.2 * math.ceil(len(legend) / columns))
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=columns, **look)
    return _written(figure, path)


def _draw(panel: Panel, axes: Axes) -> dict[str, Line2D]:
    """Draws the runs that have points; returns their lines by name."""
    drawn: dict[str, Line2D] = {}
    sizes = [line.x.size for line in panel.lines.values() if line.x.size]
    for i, (name, line) in enumerate(panel.lines.items()):
        if not line.x.size:
            continue
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        marker = MARKERS[i % len(MARKERS)] if max(sizes) <= SHOWN_MARKERS else ""
        look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 1.6, "markersize": 4.5}
        (drawn[name],) = axes.plot(line.x, line.y, label=name, marker=marker, **look)
        if line.low is not None and line.high is not None:
            # Fainter, the more there are: a dozen bands on each other would hide the lines.
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=min(0.15, 0.6 / len(sizes)), linewidth=0)
    if panel.guide is not None:
        axes.axhline(panel.guide, color="0.4", linewidth=1.0, zorder=1)
    return drawn


def _log_scale(axes: Axes) -> None:
    """Logarithmic; where there are zeros (all clients: no period drift), linear below the smallest positive value."""
    y = np.concatenate(
        [line.get_ydata() for twin in axes.get_shared_y_axes().get_siblings(axes) for line in twin.lines]
    )
    if (y > 0).all():
        axes.set_yscale("log")
    elif (y > 0).any():
        smallest = y[y > 0].min()
        axes.set_yscale("symlog", linthresh=smallest)
        axes.set_ylim(bottom=-0.2 * smallest)


def _label_ticks(labels: int) -> range:
    step = 1 if labels <= 12 else 5 if labels <= 70 else 10 if labels <= 150 else labels // 10
    return range(0, labels, step)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1))


def _ruled(axes: Axes) -> None:
    """A pale grid behind, whole rounds below."""
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _written(figure: Figure, path: FilePath) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
