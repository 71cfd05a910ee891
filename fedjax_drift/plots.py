"""Plots of runs (accuracy, loss, drift), of the clients' data, and of the accuracy for each client.

The argument ``records`` is one of these:

- the history of a run
- the path of a log (`logs.Log`), or of an output folder of ``fedjax-drift run``: one line per algorithm
- the result of `fd.sweep`: one line per setting and algorithm
- a dict from the name of a run to its history, to the histories of its seeds, to the result of a sweep, or to the path
  of a log or the paths of the logs of its seeds

Every function returns a `matplotlib.figure.Figure`. It does not use pyplot, so no window opens and the backend does not
change. In a notebook, the figure is shown if it is the last expression of a cell. matplotlib is imported when the first
figure is created.

- The colour, line style and marker of a run depend on its position in ``records``. So all plots of the same records use
  the same ones.
- Rounds without the measure, and values that are not finite, are skipped.
- With several seeds, a line is the mean over the seeds, for the rounds that all seeds have. The band is the 95 %
  confidence interval of the mean (Student's t). On a logarithmic axis, both are computed from the logarithms. The band
  is clipped to the range of the quantity.
- With one seed and more than 100 rounds, the rounds are grouped into windows; 500 rounds give windows of 10. The line
  is the median of each window, and the band shows its quartiles. With several seeds and more than 50 rounds, the line
  and the band are means over 50 windows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.measures.personal import summary
from fedjax_drift.records import History, Records, Runs, by_run, measured, numbers
from fedjax_drift.records import rounds_to_target as reached_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FilePath = str | os.PathLike[str] | None

# Okabe and Ito's colours, which are distinct also for people with a red-green colour vision deficiency. Their yellow is
# missing, because it is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*"
SHOWN_CLIENTS = 50
SHOWN_ROUNDS = 30
SHOWN_MARKERS = 30
SHOWN_POINTS = 100  # most points of a line; longer lines are summarised in half as many windows
QUARTILES = (0.25, 0.5, 0.75)

RANGES = {  # the possible values of entries of a record
    "accuracy": (0, 1), "client_mean_accuracy": (0, 1), "cka": (0, 1), "gain": (0, 1), "update_cosine": (-1, 1),
}  # fmt: skip
QUARTILES_SHOWN = "median and quartiles"
SEEDS_SHOWN = "mean over seeds, 95 % confidence"

MEASURE = "pass measure=({!r},) to Simulation"


class Line(NamedTuple):
    """The points of one run in a panel. There are none if the run has no data for the panel."""

    x: np.ndarray  # [n]
    y: np.ndarray  # [n]
    low: np.ndarray | None = None  # [n], lower edge of a band around y
    high: np.ndarray | None = None  # [n], upper edge
    band: str = ""  # description of the line and the band, for the x axis


class Panel(NamedTuple):
    """The content of one matplotlib `Axes`. Panels of a figure with the same y label share their y axis."""

    title: str
    ylabel: str
    lines: Mapping[str, Line]  # name of a run -> its line, for all runs in the order of `records`
    log: bool = False  # logarithmic y axis
    guide: float | None = None  # y of a grey horizontal line


def curves(records: Records, path: FilePath = None) -> Figure:
    """Plots test accuracy (in percent) and training loss against rounds, one line per run.

    If no run has an accuracy, because the models are not classifiers, it plots the test loss instead.

    Args:
      records: the runs to plot, in one of the forms that `fd.plots` lists.
      path: file to which the figure is written. Its suffix selects the format. Default: no file.

    Raises:
      ValueError: the records have no round.
    """
    runs = by_run(records)
    accuracy, loss = by_round(runs, "accuracy", 100), "Loss (nats per row)"
    tested = Panel("Test accuracy of the global model", "Test accuracy (%)", accuracy)
    if not any(line.x.size for line in accuracy.values()):
        loss = "Loss, mean over rows"
        tested = Panel("Test loss of the global model", loss, by_round(runs, "loss"))
    panels = tested, Panel("Training loss, mean of the cohort", loss, by_round(runs, "train_loss"))
    return figure_of_panels("curves", panels, "pass {name: history of Simulation.run}", path)


def drift(records: Records, path: FilePath = None) -> Figure:
    """Plots period drift, client drift after the last local epoch, and dissimilarity against rounds.

    Period drift (FedEve, eq. 3) and client drift (FedEve, eq. 4) are squared norms of differences of gradients. Their
    panels share a logarithmic axis. The dissimilarity of gradients is eq. 4 of FedGVRGM. Panels without data are left
    out.

    records, path: as in `curves`. Raises ValueError if no round has any of these measures.
    """
    runs = by_run(records)
    squared = "Squared gradient norm"
    panels = (
        Panel("Period drift", squared, by_round(runs, "period_drift", log=True), log=True),
        Panel("Client drift after the last local epoch", squared, by_round(runs, "client_drift", log=True), log=True),
        Panel("Dissimilarity of gradients", "Dissimilarity", by_round(runs, "dissimilarity", log=True), log=True),
    )
    return figure_of_panels("drift", panels, MEASURE.format("gradients"), path)


def updates(records: Records, path: FilePath = None) -> Figure:
    """Plots the norm of the clients' updates, and their cosine with the mean update, against rounds.

    Both are means over the cohort, after the last local epoch.

    records, path: as in `curves`. Raises ValueError if no round has these measures.
    """
    runs = by_run(records)
    panels = (
        Panel("Norm of client updates", "Norm, mean of the cohort", by_round(runs, "update_norm")),
        Panel("Cosine of client updates with their mean", "Cosine", by_round(runs, "update_cosine")),
    )
    return figure_of_panels("updates", panels, MEASURE.format("updates"), path)


def agreement(records: Records, path: FilePath = None) -> Figure:
    """Plots linear CKA and KL divergence between the predictions of local and global models (LfD, section 3).

    The x axis is the local epoch. A line is the median over the measured rounds, and its band shows the quartiles. If
    no run has more than one local epoch, the x axis is the round.

    records, path: as in `curves`. Raises ValueError if no round has these measures.
    """
    runs = by_run(records)
    histories = [seed for key in ("cka", "kl") for seeds in measured(runs, key).values() for seed in seeds]
    epochs = max((values.shape[1] for _, values in histories), default=1)
    lines, xlabel = (by_epoch, "Local epoch") if epochs > 1 else (by_round, "Round")
    panels = (
        Panel("CKA of local and global predictions", "Linear CKA", lines(runs, "cka")),
        Panel("KL of local and global predictions", "KL divergence (nats)", lines(runs, "kl")),
    )
    return figure_of_panels("agreement", panels, MEASURE.format("predictions"), path, xlabel)


def forgetting(records: Records, path: FilePath = None) -> Figure:
    """Plots LP against rounds. LP is a local model's accuracy on a class divided by the global model's (LfD, eq. 11).

    One panel shows the classes that are present in a client's data, the other one the absent classes. A value below the
    grey line at 1 means that local training forgets.

    records, path: as in `curves`. Raises ValueError if no round has this measure.
    """
    runs = by_run(records)
    ratio = "LP (local / global accuracy)"
    panels = (
        Panel("Classes present at the client", ratio, by_round(runs, "lp_present"), guide=1),
        Panel("Classes absent from the client", ratio, by_round(runs, "lp_absent"), guide=1),
    )
    figure = figure_of_panels("forgetting", panels, MEASURE.format("forgetting"), None)
    for axes in figure.axes:  # in early rounds, LP divides by global accuracies of almost 0
        if axes.get_ylim()[1] > 3:
            axes.set_ylim(top=3)
            axes.set_title(f"{axes.get_title()} (up to 3)")
    return written(figure, path)


def gain(records: Records, path: FilePath = None) -> Figure:
    """Plots FedEve's Kalman gain, period variance and client variance against rounds.

    The legend shows the median of the gain. Runs of other algorithms are left out.

    records, path: as in `curves`. Raises ValueError if no round has a gain.
    """
    runs, renamed = by_run(records), {}
    for name, seeds in measured(runs, "gain").items():
        gains = np.concatenate([finite_points(rounds, values[:, -1]).y for rounds, values in seeds])
        renamed[f"{name} (median gain {np.median(gains):.2f})".strip() if gains.size else name] = runs[name]
    panels = (
        Panel("Kalman gain", "Gain", by_round(renamed, "gain")),
        Panel("Period variance", "Variance", by_round(renamed, "period_variance", log=True), log=True),
        Panel("Client variance", "Variance", by_round(renamed, "client_variance", log=True), log=True),
    )
    return figure_of_panels("gain", panels, "pass the history of a run of fedeve", path)


def rounds_to_target(records: Records, target: float, path: FilePath = None, *, key: str = "accuracy") -> Figure:
    """Plots the rounds until each run first reaches a target. A bar is the mean over the seeds, a dot is one seed.

    If a run is evaluated only every few rounds, it may reach the target between two evaluations. A thin line shows this
    interval. A hatched bar is a lower bound: at least one seed has not reached the target in its rounds.
    `fd.rounds_to_target` returns the numbers.

    Args:
      records, path: as in `curves`.
      target: the smallest value of ``key`` that reaches the target; for a key that ends in "loss", the largest value.
      key: the entry of the records to compare. Default: "accuracy", in 0..1.

    Raises:
      ValueError: the target is not a finite number, or is an accuracy above 1; or no round has the key.
    """
    runs, target = reached_rounds(records, target, key), float(target)
    places = [*by_run(records)]  # a run has the same colour as in other plots
    figure = new_figure(7.5, 1.6 + 0.42 * len(runs))
    axes = figure.subplots()
    for i, (name, seeds) in enumerate(runs.items()):
        colour = COLOURS[places.index(name) % len(COLOURS)]
        needed = np.array([seed.after if seed.round is None else seed.round for seed in seeds], float)
        several = len(needed) > 1
        missed = sum(seed.round is None for seed in seeds)
        style: dict[str, Any] = (
            {"facecolor": "white", "hatch": "///", "edgecolor": colour} if missed else {"color": colour}
        )
        axes.barh(i, needed.mean(), height=0.62, **style)
        text = f"{'mean ' if several else ''}{'> ' if missed else ''}{needed.mean():,.4g}"
        if missed and several:
            text += f" ({len(needed) - missed} of {len(needed)} seeds)"
        axes.annotate(text, (needed.max(), i), (6, 0), textcoords="offset points", va="center", fontsize=9)
        heights = i + np.linspace(-0.2, 0.2, len(needed)) if several else np.array([float(i)])
        for seed, y in zip(seeds, heights, strict=True):
            if seed.round is not None and seed.round - seed.after > 1:
                axes.plot([seed.after, seed.round], [y, y], color="black", linewidth=1)
        if several:
            axes.plot(needed, heights, "o", color="black", markersize=3.5, markerfacecolor="white")
    axes.set_yticks(range(len(runs)), [*runs])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    goal = f"{100 * target:g} % test accuracy" if key == "accuracy" else f"{key.replace('_', ' ')} {target:g}"
    coarse = any(seed.round is not None and seed.round - seed.after > 1 for seeds in runs.values() for seed in seeds)
    since = " of the first evaluation at the target (line: since the evaluation before)" if coarse else ""
    axes.set(xlabel=f"Round{since}", title=f"Rounds to {goal}")
    add_grid(axes)
    axes.grid(False, axis="y")
    return written(figure, path)


def fairness(scores: Mapping[str, Any], path: FilePath = None) -> Figure:
    """Plots the quantiles over the clients of the accuracy on their own test examples, the worst client first.

    If there is no accuracy, it plots the loss. A dashed line shows the values after each client has fine-tuned its copy
    of the model, if they were computed. The worst 10 % of the clients are shaded. Their mean is in the legend.

    Args:
      scores: the result of `Simulation.evaluate_clients`, or a dict from the name of a run to such a result.
      path: as in `curves`.

    Raises:
      ValueError: ``scores`` is anything else, or no client has test examples.
    """
    single = isinstance(scores, Mapping) and not any(isinstance(value, Mapping) for value in scores.values())
    named = {"": scores} if single else scores
    if not isinstance(named, Mapping) or not all(isinstance(result, Mapping) for result in named.values()):
        raise ConfigurationError(
            f"scores must be what Simulation.evaluate_clients(state) returns, or a dict of that, got "
            f"{type(scores).__name__}"
        )
    key = "accuracy" if any("accuracy" in result for result in named.values()) else "loss"
    factor, unit, worst = (100, " %", "lowest_10") if key == "accuracy" else (1, "", "highest_10")
    lines: dict[str, Line2D] = {}
    figure = new_figure(6.5, 4.2)
    axes = figure.subplots()
    for i, (name, result) in enumerate(named.items()):
        for entry, linestyle, note in ((key, "-", ""), (f"personal_{key}", "--", "fine-tuned")):
            values = np.sort(numbers(f"scores[{entry!r}]", result.get(entry, [])))
            values = factor * values[np.isfinite(values)]
            if values.size:
                worst_first = values if key == "accuracy" else values[::-1]
                share = 100 * np.arange(values.size + 1) / values.size
                style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": linestyle, "linewidth": 1.6}
                (line,) = axes.plot(share, [worst_first[0], *worst_first], drawstyle="steps-pre", **style)
                label = ", ".join(part for part in (name, note) if part) or "all clients"
                lines[f"{label}: {summary(values)[worst]:.3g}{unit}"] = line
    if not lines:
        raise ConfigurationError(
            "fairness needs the scores of at least 1 client, got none: pass evaluate_clients(state)"
        )
    axes.axvspan(0, 10, color="0.92", zorder=0)
    ylabel = "Accuracy on own test rows (%)" if key == "accuracy" else "Loss on own test rows"
    axes.set(xlabel="Clients, the worst off first (%)", ylabel=ylabel, xlim=(0, 100))
    axes.set_title(f"{key.capitalize()} of each client; below: mean of the worst 10 %", fontsize=11)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    hide_frame(axes)
    add_legend(figure, lines, 6.5)
    return written(figure, path)


class Compared(NamedTuple):
    """One setting of a paper's table: our runs of its methods, and the published numbers."""

    title: str
    runs: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]  # method -> (rounds, values) of each seed
    printed: Mapping[str, Sequence[tuple[float | None, float]]]  # method -> (round, value); None: the last round
    reached: Mapping[str, Sequence[tuple[float | None, float]]] = {}  # our (round, value), if the paper reports a round


def compared(settings: Sequence[Compared], ylabel: str, path: FilePath = None) -> Figure:
    """Plots the training curves behind a paper's table, one panel for each setting that has data.

    A line is the mean over the seeds, and its band goes from the smallest to the largest value. Hollow markers are the
    published numbers, filled markers are ours. The y axis starts at the lowest value after the first 10 % of the
    rounds. If there is only one method, the panels share the y axis, because then the settings are compared.

    ylabel: the label of the y axes. path: as in `curves`. Raises ValueError if there are no data.
    """
    if not isinstance(settings, Sequence):
        raise ConfigurationError(f"settings must be a list of Compared values, got {checks.shown(settings)}")
    settings, ylabel = [_of_numbers(setting) for setting in settings], checks.text("ylabel", ylabel)
    methods = list(dict.fromkeys(method for setting in settings for method in setting.runs))
    panels = {}
    for setting in settings:
        lines = {method: over_seeds(setting.runs.get(method, ()), extremes) for method in methods}
        if any(line.x.size for line in lines.values()):
            panels[setting.title] = Panel(setting.title, ylabel, lines)
    if not panels:
        raise ConfigurationError(
            "compared needs at least 1 round of a run, got none: pass (rounds, values) of each seed"
        )
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(4.4 * columns + 0.6, 3.2 * rows + 0.7)
    drawn: dict[str, Line2D] = {}
    one_scale = len(methods) == 1
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=one_scale).flat)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    extents = []  # the lowest and the highest value of each panel
    shown = [setting for setting in settings if setting.title in panels]
    for number, (setting, axes) in enumerate(zip(shown, grid, strict=False)):
        panel = panels[setting.title]
        panel_lines = draw_lines(panel, axes)
        drawn = panel_lines | drawn
        if len(panel_lines) > 1 and methods[0] in panel_lines:  # lines close to the first one must not hide it
            panel_lines[methods[0]].set(linestyle=(0, (3, 1.5)), zorder=3)
        late = [
            y[line.x >= line.x[-1] / 10]
            for line in panel.lines.values()
            for y in (line.y, line.low, line.high)
            if line.x.size and y is not None
        ]
        last = max((line.x[-1] for line in panel.lines.values() if line.x.size), default=1)
        for i, method in enumerate(methods):
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "clip_on": False, "zorder": 4}
            for t, value in setting.printed.get(method, ()):
                late.append(np.array([value]))
                marker = "o" if t is not None else "<"
                axes.plot(last if t is None else t, value, marker=marker, markerfacecolor="none", **style)
            for t, value in setting.reached.get(method, ()):
                axes.plot(t, value, marker="o", markersize=4, **style)
        extents.append((min(map(np.min, late)), max(map(np.max, late))))
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel(ylabel if number % columns == 0 else "")
        axes.set_xlabel("Round" if number + columns >= len(panels) else "")
        add_grid(axes)
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
    return written(figure, path)


def _of_numbers(setting: Any) -> Compared:
    """The setting with its points as numbers. Raises ConfigurationError if it is not a setting."""
    try:
        runs = {method: [_curve(rounds, values) for rounds, values in seeds] for method, seeds in setting.runs.items()}
        printed, reached = (
            {
                method: [(None if t is None else _point(t), _point(v)) for t, v in points]
                for method, points in marks.items()
            }
            for marks in (setting.printed, setting.reached)
        )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        allowed = "Compared values, of (rounds, values) of each seed and of pairs of numbers"
        raise ConfigurationError(f"settings must be {allowed}, got {checks.shown(setting)} ({error})") from error
    return Compared(checks.text("a setting's title", setting.title), runs, printed, reached)


def _curve(rounds: Any, values: Any) -> tuple[list[int], list[float]]:
    points = [checks.integer("a round", t, 0) for t in rounds], numbers("values", values).tolist()
    if len(points[0]) != len(points[1]):
        raise ConfigurationError(f"one value a round is needed, got {len(points[1])} for {len(points[0])} rounds")
    return points


def _point(value: Any) -> float:
    return checks.number("a point", value, "a finite number", math.isfinite, computed=False)


def over_seeds(
    runs: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]],
    band: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Line:
    """The mean over the seeds, for the rounds that all seeds have.

    band: a function from the values [S, n] of the S seeds to the lower and the upper edge of the band, [n] each.
    """
    tables = [dict(zip(map(int, rounds), values, strict=True)) for rounds, values in runs]
    rounds = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[t] for t in rounds] for table in tables], float).reshape(len(tables), len(rounds))
    finite = np.isfinite(values).all(0)
    x, values = np.array(rounds)[finite], values[:, finite]
    if not x.size:
        return Line(np.array([]), np.array([]))
    if len(tables) == 1:
        line = Line(x, values[0])
        return line if x.size <= SHOWN_POINTS else Line(*_means(np.stack([x, values[0]])))
    return Line(*_means(np.stack([x, values.mean(0), *band(values)])))


def _mean_of_seeds(values: Sequence[tuple[np.ndarray, np.ndarray]], log: bool) -> Line:
    """The mean over the seeds with its confidence interval. log: of the logarithms, if all values are positive."""
    log = log and all((y[np.isfinite(y)] > 0).all() for _, y in values)
    line = over_seeds([(t, np.log(y) if log else y) for t, y in values], _confidence)._replace(band=SEEDS_SHOWN)
    if not log or line.low is None or line.high is None:
        return line
    return line._replace(y=np.exp(line.y), low=np.exp(line.low), high=np.exp(line.high))


def _within(line: Line, values: Sequence[tuple[np.ndarray, np.ndarray]], key: str, factor: float) -> Line:
    """The line with its band clipped to the range of the quantity. If no value is negative, the range starts at 0."""
    if line.low is None or line.high is None:
        return line
    low, high = RANGES.get(key, (0 if all((y[np.isfinite(y)] >= 0).all() for _, y in values) else -np.inf, np.inf))
    return line._replace(low=line.low.clip(min=factor * low), high=line.high.clip(max=factor * high))


def extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values.min(0), values.max(0)


def _confidence(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % confidence interval of the mean over the first axis."""
    from scipy.stats import t

    S = len(values)
    half = t.ppf(0.975, S - 1) * values.std(0, ddof=1) / S**0.5
    return values.mean(0) - half, values.mean(0) + half


def _means(rows: np.ndarray) -> np.ndarray:
    """The mean of each row over windows of neighbouring columns, [rows, windows]."""
    parts = np.array_split(rows, min(rows.shape[1], SHOWN_POINTS // 2), axis=1)
    return np.transpose([part.mean(1) for part in parts])


def quadratics(errors: Mapping[str, Sequence[Sequence[float]]], titles: Sequence[str], path: FilePath = None) -> Figure:
    """Plots the distance to the optimum against rounds on a logarithmic axis.

    There is one panel per setting and one line per algorithm.

    Args:
      errors: a dict from the name of an algorithm to one list per setting: the distances after rounds 1, 2, ... The
        list is empty if the algorithm was not run in this setting.
      titles: the names of the settings, for example "all clients" and "20 % per round".
      path: as in `curves`.

    Raises:
      ValueError: an algorithm does not have one list per title, or there is no distance at all.
    """
    if not isinstance(errors, Mapping) or not all(isinstance(settings, Sequence) for settings in errors.values()):
        raise ConfigurationError(f"errors must be a dict of lists, one for each title, got {checks.shown(errors)}")
    if not isinstance(titles, Sequence) or isinstance(titles, str | bytes):
        raise ConfigurationError(f"titles must be a list of strings, got {checks.shown(titles)}")
    titles = [checks.text("each of titles", title) for title in titles]
    for name, settings in errors.items():
        if len(settings) != len(titles):
            raise ConfigurationError(
                f"errors[{name!r}] must have one list per title ({len(titles)}), got {len(settings)}: "
                "pass an empty list for a setting in which it wasn't run"
            )
    distance = "Distance to the optimum"
    lines = [
        {name: from_round_one(numbers(f"errors[{name!r}]", settings[i])) for name, settings in errors.items()}
        for i in range(len(titles))
    ]
    panels = [Panel(title, distance, by_name, log=True) for title, by_name in zip(titles, lines, strict=True)]
    return figure_of_panels("quadratics", panels, "pass {name: [distances after each round, for each title]}", path)


def label_mix(
    history: History | str | os.PathLike[str],
    path: FilePath = None,
    *,
    title: str = "Label mix of the cohort",
    largest: float | None = None,
) -> Figure:
    """Plots the label distribution of the cohort's examples in each round (FedEve, fig. 3a).

    The area of a bubble is the share of a label. If more than 30 rounds were measured, only every second, third, ... of
    them is shown.

    Args:
      history: the history of one run, or the path of its log. If the log has several algorithms, the first one is
        used; they all have the same cohorts.
      path: as in `curves`.
      title: the title of the figure. Default: "Label mix of the cohort".
      largest: the share, in (0, 1], of the largest bubble. Use the same number in figures that are to be compared.
        Default: the largest share in this history.

    Raises:
      ValueError: no round has a label mix, or an argument is out of range.
    """
    run = next(iter(by_run(history).values()), [[]])[0]
    title = checks.text("title", title)
    if largest is not None:
        largest = checks.number("largest", largest, "in (0, 1]", lambda v: 0 < v <= 1, computed=False)
    with_labels = [record for record in run if "label_mix" in record]
    if not with_labels:
        raise ConfigurationError(f"label_mix needs at least 1 round that has it, got none: {MEASURE.format('labels')}")
    every = -(-len(with_labels) // SHOWN_ROUNDS)
    shown = with_labels[::every]
    ((_, mixes),) = measured({"": [shown]}, "label_mix")[""]
    share = 100 * mixes  # [T, C]
    T, C = share.shape
    width, height = 9.5, min(max(4.0, 0.2 * C), 9.0)
    # The largest bubble fills its cell; the cells cover about 80 % of the figure. With many labels, cells are tiny, and
    # the bubble may cover its neighbours' cells.
    diameter = max(16.0, min(0.8 * 72 * width / T, 0.8 * 72 * height / C, 30.0))
    point = diameter**2 / (share.max() if largest is None else 100 * largest)  # area of a share of 1 %

    figure = new_figure(width, height)
    axes = figure.subplots()
    t, c = np.nonzero(share > 0)
    rounds = np.array([record["round"] for record in shown])
    style: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.75}
    bubbles = axes.scatter(rounds[t], c, s=point * share[t, c], linewidth=0, **style)
    axes.set(xlabel="Round", ylabel="Label", ylim=(-0.7, C - 0.3), yticks=label_ticks(C))
    axes.set_title(title + (f", one in {every} of the measured rounds" if every > 1 else ""))
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    hide_frame(axes)
    sizes, names = bubbles.legend_elements("sizes", num=4, func=lambda s: s / point, fmt="{x:.3g} %", **style)
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "labelspacing": max(0.6, diameter / 12)}
    axes.legend(sizes, names, title="Share of rows", frameon=False, **place)
    return written(figure, path)


def federation(data: FederatedData, path: FilePath = None) -> Figure:
    """Plots the number of training examples of all clients and, for integer labels, their label distributions.

    The label distributions are shown for at most 50 clients, whose ids are evenly spaced. They need one label per
    example.

    path: as in `curves`. Raises ValueError if ``data`` is not a `FederatedData`.
    """
    if not isinstance(data, FederatedData):
        raise ConfigurationError(
            f"data must be of type FederatedData, got {type(data).__name__}: pass sim.data, for example"
        )
    N = data.num_clients
    labelled = np.issubdtype(data.y.dtype, np.integer) and data.y.ndim == 1
    figure = new_figure(10.0 if labelled else 5.0, 5.0)
    if labelled:
        mix, sizes = figure.subplots(1, 2, width_ratios=(3, 2))
        _label_mixes(data, mix, figure)
    else:
        sizes = figure.subplots()

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
    hide_frame(sizes)
    figure.suptitle(data.name)
    return written(figure, path)


def _label_mixes(data: FederatedData, axes: Axes, figure: Figure) -> None:
    counts = data.label_counts()
    N, C = counts.shape
    shown = np.arange(min(N, SHOWN_CLIENTS)) * N // min(N, SHOWN_CLIENTS)
    share = 100 * counts[shown] / data.sizes[shown, None]
    image = axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=share.max(), interpolation="nearest")
    every = max(1, round(len(shown) / 10))
    axes.set_yticks(range(0, len(shown), every), [f"{i:,}" for i in shown[::every]])
    axes.set_xticks(label_ticks(C))
    subset = f"{len(shown)} of {N:,} clients" if len(shown) < N else f"{N:,} clients" if N > 1 else "1 client"
    axes.set(xlabel="Label", ylabel="Client", title=f"Label mix of {subset}")
    figure.colorbar(image, ax=axes, label="Share of the client's rows (%)", fraction=0.05, pad=0.02)


def by_round(runs: Runs, key: str, factor: float = 1, log: bool = False) -> dict[str, Line]:
    """The line of each run over the rounds that have `key`. Of a list, the last value is used: after the last epoch."""
    lines = {}
    for name, seeds in measured(runs, key).items():
        values = [(t, factor * values[:, -1]) for t, values in seeds]
        if len(values) == 1:
            lines[name] = finite_points(*values[0])
        else:
            lines[name] = _within(_mean_of_seeds(values, log), values, key, factor)
    longest = max((line.x.size for line in lines.values() if not line.band), default=0)
    if longest <= SHOWN_POINTS:
        return lines
    length = math.ceil(longest / (SHOWN_POINTS // 2))
    return {name: line if line.band else _windows(line, length) for name, line in lines.items()}


def _windows(line: Line, length: int) -> Line:
    """The medians and quartiles of windows of about `length` points."""
    if not line.x.size:
        return line
    parts = np.array_split(np.stack([line.x, line.y]), math.ceil(line.x.size / length), axis=1)
    low, median, high = np.transpose([np.quantile(y, QUARTILES) for _, y in parts])
    return Line(np.array([x.mean() for x, _ in parts]), median, low, high, QUARTILES_SHOWN)


def by_epoch(runs: Runs, key: str) -> dict[str, Line]:
    """The line of each run over the local epochs: the median of `key` over the rounds of all seeds, with quartiles."""
    lines = {}
    for name, seeds in measured(runs, key).items():
        finite = [values[np.isfinite(values).all(axis=1)] for _, values in seeds]
        finite = [values for values in finite if len(values)]
        low, median, high = np.quantile(np.concatenate(finite), QUARTILES, axis=0) if finite else np.empty((3, 0))
        lines[name] = Line(np.arange(1, len(median) + 1), median, low, high, QUARTILES_SHOWN)
    return lines


def finite_points(x: Sequence[int] | np.ndarray, y: Sequence[float] | np.ndarray) -> Line:
    """The line through the points with finite y."""
    x, y = np.asarray(x), np.asarray(y, float)
    return Line(x[np.isfinite(y)], y[np.isfinite(y)])


def from_round_one(y: np.ndarray) -> Line:
    """The line of values after rounds 1, 2, ..."""
    return finite_points(range(1, len(y) + 1), y)


def figure_of_panels(name: str, panels: Sequence[Panel], fix: str, path: FilePath, xlabel: str = "Round") -> Figure:
    """A figure of the panels that have data, side by side above one legend.

    name, fix: for the error message if no panel has data.
    """
    panels = [panel for panel in panels if any(line.x.size for line in panel.lines.values())]
    if not panels:
        raise ConfigurationError(f"{name} needs at least 1 round that was measured, got none: {fix}")
    width = {1: 6.0, 2: 9.0}.get(len(panels), 4.2 * len(panels))
    figure = new_figure(width, 4.2)
    drawn: dict[str, Line2D] = {}
    first: dict[str, Axes] = {}  # y label -> the first axes that have it, whose scale the others share
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        if (twin := first.setdefault(panel.ylabel, axes)) is not axes:
            axes.sharey(twin)
        drawn = draw_lines(panel, axes) | drawn
        bands = dict.fromkeys(line.band for line in panel.lines.values() if line.band and line.x.size)
        axes.set_xlabel(f"{xlabel} ({'; '.join(bands)})" if bands else xlabel)
        axes.set(ylabel=panel.ylabel, title=panel.title)
        add_grid(axes)
    for panel in panels:
        if panel.log:
            use_log_scale(first[panel.ylabel])
    add_legend(figure, {name: drawn[name] for name in panels[0].lines if name in drawn}, width)
    return written(figure, path)


def add_legend(figure: Figure, lines: Mapping[str, Any], width: float) -> None:
    """Adds a legend below the axes. Runs without a name are left out."""
    lines = {name: line for name, line in lines.items() if name}
    if not lines:
        return
    columns = max(1, min(len(lines), 5, int(11 * width) // (max(map(len, lines)) + 8)))
    figure.set_figheight(4.2 + 0.2 * math.ceil(len(lines) / columns))
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, **style)


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
            # The more bands, the fainter: a dozen bands on top of each other would hide the lines.
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


def label_ticks(labels: int) -> range:
    """The ticks of an axis of this many labels, at most 15."""
    step = 1 if labels <= 12 else 5 if labels <= 70 else 10 if labels <= 150 else labels // 10
    return range(0, labels, step)


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
    """The figure, after writing it to the path unless that is None."""
    if path is not None:
        file, formats = checks.path("path", path), figure.canvas.get_supported_filetypes()
        if (suffix := file.suffix[1:].lower()) and suffix not in formats:
            raise ConfigurationError(
                f"path must end in one of {', '.join(sorted(formats))}, got {file}: .png, for example"
            )
        figure.savefig(file, dpi=150)
    return figure
