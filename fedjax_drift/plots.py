"""Pictures of runs: accuracy, drift, and what clients hold and get.

`records` is whatever a run leaves (`fedjax_drift.records`): its history; the path of a log (`logs.Log`, or a folder of
the command line), a line for each ``algorithm`` in it; what `fd.sweep` returns, a line for each setting and algorithm;
or a dict: name of a run -> its history, the histories of several seeds, what a sweep returned, or the paths of logs.
Of several seeds a line is the mean of the rounds that all have, in a band of its 95 % confidence interval (Student's
t); on logarithmic axes of their logarithms. A band ends where the quantity's range does.

Each returns a `matplotlib.figure.Figure` that belongs to no window and leaves the caller's backend alone; in a notebook
the last expression of a cell shows it. matplotlib is imported when a picture is drawn. A run's colour, line style and
marker follow from its place in `records`, so that pictures of the same records agree. Rounds that lack a measurement,
and values that aren't finite, are skipped. Where more than 100 rounds have one, lines are medians of windows of rounds
(500 in windows of 10), in bands between the windows' quartiles; of several seeds means.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.personal import summary
from fedjax_drift.records import History, Reached, Records, Runs, by_run, measured
from fedjax_drift.records import rounds_to_target as reached_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FilePath = str | os.PathLike[str] | None

# Okabe and Ito's colours, which people who confuse red and green tell apart; its yellow is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*"
SHOWN_CLIENTS = 50
SHOWN_ROUNDS = 30
SHOWN_MARKERS = 30
SPACED_MARKERS = 12  # of a line that has markers however many points it has
SHOWN_POINTS = 100  # of a line against rounds; more are summed up in half as many windows at most
QUARTILES = (0.25, 0.5, 0.75)

RANGES = {  # of what a record has
    "accuracy": (0, 1), "client_mean_accuracy": (0, 1), "cka": (0, 1), "gain": (0, 1), "update_cosine": (-1, 1),
}  # fmt: skip
QUARTILES_SHOWN = "median and quartiles"
SEEDS_SHOWN = "mean over seeds, 95 % confidence"

CLIENT_DRIFT = "Client drift after the last local epoch"
MEASURE = "pass measure=({!r},) to Simulation"


class Line(NamedTuple):
    """What one run shows in a panel; no points where it has nothing to show."""

    x: np.ndarray  # [n]
    y: np.ndarray  # [n]
    low: np.ndarray | None = None  # [n], lower edge of a band around y
    high: np.ndarray | None = None  # [n]
    band: str = ""  # what the line and the band are


class Panel(NamedTuple):
    """Lines in one pair of axes. Panels of a picture with the same y label share their y axis."""

    title: str
    ylabel: str
    lines: Mapping[str, Line]  # name of a run -> its line, for all runs in the order of `records`
    log: bool = False
    guide: float | None = None  # a grey horizontal line


def curves(records: Records, path: FilePath = None) -> Figure:
    """Test accuracy (percent), or of what is no classifier test loss, and training loss against rounds, a line per run.

    records: see above. path: where to write the picture, if given; its ending decides the format. Raises ValueError
    without a single round.
    """
    runs = by_run(records)
    accuracy, loss = _by_round(runs, "accuracy", 100), "Loss (nats per row)"
    tested = Panel("Test accuracy of the global model", "Test accuracy (%)", accuracy)
    if not any(line.x.size for line in accuracy.values()):
        loss = "Loss, mean over rows"
        tested = Panel("Test loss of the global model", loss, _by_round(runs, "loss"))
    panels = tested, Panel("Training loss, mean of the cohort", loss, _by_round(runs, "train_loss"))
    return _picture("curves", panels, "pass {name: history of Simulation.run}", path)


def drift(records: Records, path: FilePath = None) -> Figure:
    """Period drift and client drift after the last local epoch against rounds, and dissimilarity where it was measured.

    Period drift is FedEve's eq. 3, client drift its eq. 4, both squared norms of differences of gradients, on one
    logarithmic scale; dissimilarity is FedGVRGM's eq. 4. records, path: as in `curves`. Raises ValueError where no
    round has any of them.
    """
    runs = by_run(records)
    squared = "Squared gradient norm"
    panels = (
        Panel("Period drift", squared, _by_round(runs, "period_drift", log=True), log=True),
        Panel(CLIENT_DRIFT, squared, _by_round(runs, "client_drift", log=True), log=True),
        Panel("Dissimilarity of gradients", "Dissimilarity", _by_round(runs, "dissimilarity", log=True), log=True),
    )
    return _picture("drift", panels, MEASURE.format("gradients"), path)


def updates(records: Records, path: FilePath = None) -> Figure:
    """Norm of the clients' updates and their cosine with the mean update after the last local epoch, against rounds.

    records, path: as in `curves`. Raises ValueError where no round has them.
    """
    runs = by_run(records)
    panels = (
        Panel("Norm of client updates", "Norm, mean of the cohort", _by_round(runs, "update_norm")),
        Panel("Cosine of client updates with their mean", "Cosine", _by_round(runs, "update_cosine")),
    )
    return _picture("updates", panels, MEASURE.format("updates"), path)


def agreement(records: Records, path: FilePath = None) -> Figure:
    """Linear CKA and KL divergence between predictions of local and global models (LfD, section 3).

    Against local epochs, the median of the measured rounds in a band between their quartiles; against rounds where no
    run has more than one local epoch. records, path: as in `curves`. Raises ValueError where no round has them.
    """
    runs = by_run(records)
    known = [seed for key in ("cka", "kl") for seeds in measured(runs, key).values() for seed in seeds]
    epochs = max((values.shape[1] for _, values in known), default=1)
    lines, xlabel = (_by_epoch, "Local epoch") if epochs > 1 else (_by_round, "Round")
    panels = (
        Panel("CKA of local and global predictions", "Linear CKA", lines(runs, "cka")),
        Panel("KL of local and global predictions", "KL divergence (nats)", lines(runs, "kl")),
    )
    return _picture("agreement", panels, MEASURE.format("predictions"), path, xlabel)


def forgetting(records: Records, path: FilePath = None) -> Figure:
    """LP, the accuracy local training leaves on a class over the global model's, against rounds (LfD, eq. 11).

    Apart for classes that are present at a client and those that are absent; below the line at 1 local training
    forgets. records, path: as in `curves`. Raises ValueError where no round has it.
    """
    runs = by_run(records)
    ratio = "LP (local / global accuracy)"
    panels = (
        Panel("Classes present at the client", ratio, _by_round(runs, "lp_present"), guide=1),
        Panel("Classes absent from the client", ratio, _by_round(runs, "lp_absent"), guide=1),
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
    runs, renamed = by_run(records), {}
    for name, seeds in measured(runs, "gain").items():
        gains = np.concatenate([_finite(rounds, of[:, -1]).y for rounds, of in seeds])
        renamed[f"{name} (median gain {np.median(gains):.2f})".strip() if gains.size else name] = runs[name]
    panels = (
        Panel("Kalman gain", "Gain", _by_round(renamed, "gain")),
        Panel("Period variance", "Variance", _by_round(renamed, "period_variance", log=True), log=True),
        Panel("Client variance", "Variance", _by_round(renamed, "client_variance", log=True), log=True),
    )
    return _picture("gain", panels, "pass the history of a run of fedeve", path)


def rounds_to_target(records: Records, target: float, path: FilePath = None, *, key: str = "accuracy") -> Figure:
    """Rounds until a run first meets the target, as bars: the mean over its seeds, and each seed as a dot.

    A run that is evaluated every few rounds meets the target after the evaluation before the first that does: a thin
    line leads there from each dot. A hatched bar is a bound: at least one seed did not get there in the rounds that it
    had. `fd.rounds_to_target` gives the numbers. target: what ``key`` must be: at least that much, or for a key that
    ends in "loss" at most. records, path: see `curves`. Raises ValueError for a target that is not a number, and where
    no round has the key.
    """
    runs, target = reached_rounds(records, target, key), float(target)
    figure = _figure(7.5, 1.6 + 0.42 * len(runs))
    axes = figure.subplots()
    _bars(runs, [*by_run(records)], axes)
    goal = f"{100 * target:g} % test accuracy" if key == "accuracy" else f"{key.replace('_', ' ')} {target:g}"
    axes.set_title(f"Rounds to {goal}")
    return _written(figure, path)


def drift_story(records: Records, target: float, data: FederatedData, path: FilePath = None) -> Figure:
    """What drift is and what it costs, in four panels: the clients' label mixes, the drift of their local models, the
    test accuracy of the global model with the target, and the rounds until it first meets the target.

    Client drift is FedEve's eq. 4 after the last local epoch, the mean of the cohort: ||grad F_i(theta_i) -
    grad F_i(w_S)||^2, where theta_i is what client i has made of the global model, w_S the mean of the cohort's
    theta_i, and F_i the mean loss of client i's rows. It is 0 if all local models agree. records, target: as in
    `rounds_to_target`. data: whose clients trained. path: as in `curves`. Raises ValueError for data without one
    integer label a row, for a target that is no accuracy, and where no round has an accuracy or a client drift.
    """
    checks.instance("data", data, FederatedData, "pass sim.data, for example")
    reached, runs, target = reached_rounds(records, target), by_run(records), float(target)
    drifts = Panel(CLIENT_DRIFT, "Squared gradient norm", _by_round(runs, "client_drift", log=True), log=True)
    if not any(line.x.size for line in drifts.lines.values()):
        raise ValueError(
            f"drift_story needs at least 1 round that was measured, got none: {MEASURE.format('gradients')}"
        )
    accuracies = _by_round(runs, "accuracy", 100)
    accuracy = Panel("Test accuracy of the global model", "Test accuracy (%)", accuracies, guide=100 * target)
    width, height = 9.6, 6.8
    figure = _figure(width, height)
    mix_axes, drift_axes, accuracy_axes, rounds_axes = figure.subplots(2, 2).flat
    _label_mixes(data, mix_axes, figure)
    drawn: dict[str, Line2D] = {}
    for panel, axes in ((accuracy, accuracy_axes), (drifts, drift_axes)):
        lines = _draw_panel(panel, axes)
        for name, line in lines.items():  # told apart without colours, too
            every = math.ceil(panel.lines[name].x.size / SPACED_MARKERS)
            line.set(marker=MARKERS[[*runs].index(name) % len(MARKERS)], markevery=every)
        drawn = lines | drawn
    _log_scale(drift_axes)
    beside = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 9}
    accuracy_axes.annotate("target", (0.01, 100 * target), **beside)
    _bars(reached, [*runs], rounds_axes)
    rounds_axes.set_title(f"Rounds to {100 * target:g} % test accuracy")
    _legend(figure, {name: drawn[name] for name in runs if name in drawn}, width, height)
    return _written(figure, path)


def _bars(reached: Mapping[str, Sequence[Reached]], places: Sequence[str], axes: Axes) -> None:
    """The rounds that each run has taken; a run has the colour that its place gives it in other pictures."""
    for i, (name, seeds) in enumerate(reached.items()):
        colour = COLOURS[places.index(name) % len(COLOURS)]
        took = np.array([seed.after if seed.round is None else seed.round for seed in seeds], float)
        missed = sum(seed.round is None for seed in seeds)
        look: dict[str, Any] = (
            {"facecolor": "white", "hatch": "///", "edgecolor": colour} if missed else {"color": colour}
        )
        axes.barh(i, took.mean(), height=0.62, **look)
        text = f"{'mean ' * (len(took) > 1)}{'> ' * bool(missed)}{took.mean():,.4g}"
        if missed and len(took) > 1:
            text += f" ({len(took) - missed} of {len(took)} seeds)"
        axes.annotate(text, (took.max(), i), (6, 0), textcoords="offset points", va="center", fontsize=9)
        apart = i + np.linspace(-0.2, 0.2, len(took)) if len(took) > 1 else np.array([float(i)])
        for seed, y in zip(seeds, apart, strict=True):
            if seed.round is not None and seed.round - seed.after > 1:
                axes.plot([seed.after, seed.round], [y, y], color="black", linewidth=1)
        if len(took) > 1:
            axes.plot(took, apart, "o", color="black", markersize=3.5, markerfacecolor="white")
    axes.set_yticks(range(len(reached)), [*reached])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    coarse = any(seed.round is not None and seed.round - seed.after > 1 for seeds in reached.values() for seed in seeds)
    since = " of the first evaluation at the target\n(line: since the evaluation before)" if coarse else ""
    axes.set_xlabel(f"Round{since}")
    _ruled(axes)
    axes.grid(False, axis="y")


def fairness(scores: Mapping[str, Any], path: FilePath = None) -> Figure:
    """How good the model is for each client, the worst off first: the quantiles of accuracy on clients' own test rows,
    or of loss where there is no accuracy.

    Dashed, after each client has fine-tuned its copy, where that was scored. The worst 10 % of the clients are shaded,
    their mean is in the legend. scores: what `Simulation.evaluate_clients` returns, or name of a run -> that. path: as
    in `curves`. Raises ValueError for anything else, and where no client has test rows.
    """
    alone = isinstance(scores, Mapping) and not any(isinstance(of, Mapping) for of in scores.values())
    named = {"": scores} if alone else scores
    if not isinstance(named, Mapping) or not all(isinstance(of, Mapping) for of in named.values()):
        raise ValueError(
            f"scores must be what Simulation.evaluate_clients(state) returns, or a dict of that, got "
            f"{type(scores).__name__}"
        )
    key = "accuracy" if any("accuracy" in of for of in named.values()) else "loss"
    factor, unit, worst = (100, " %", "lowest_10") if key == "accuracy" else (1, "", "highest_10")
    lines: dict[str, Line2D] = {}
    figure = _figure(6.5, 4.2)
    axes = figure.subplots()
    for i, (name, of) in enumerate(named.items()):
        for name_of, style, what in ((key, "-", ""), (f"personal_{key}", "--", "fine-tuned")):
            known = np.sort(_numbers(f"scores[{name_of!r}]", of.get(name_of, [])))
            known = factor * known[np.isfinite(known)]
            if known.size:
                by_merit = known if key == "accuracy" else known[::-1]
                share = 100 * np.arange(known.size + 1) / known.size
                look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": style, "linewidth": 1.6}
                (line,) = axes.plot(share, [by_merit[0], *by_merit], drawstyle="steps-pre", **look)
                full = ", ".join(part for part in (name, what) if part) or "all clients"
                lines[f"{full}: {summary(known)[worst]:.3g}{unit}"] = line
    if not lines:
        raise ValueError("fairness needs the scores of at least 1 client, got none: pass evaluate_clients(state)")
    axes.axvspan(0, 10, color="0.92", zorder=0)
    what = "Accuracy on own test rows (%)" if key == "accuracy" else "Loss on own test rows"
    axes.set(xlabel="Clients, the worst off first (%)", ylabel=what, xlim=(0, 100))
    axes.set_title(f"{key.capitalize()} of each client; below: mean of the worst 10 %", fontsize=11)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    _tidy(axes)
    _legend(figure, lines, 6.5)
    return _written(figure, path)


class Compared(NamedTuple):
    """One setting of a table: the runs of its methods, and what the paper printed."""

    title: str
    runs: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]  # method -> (rounds, values) of each seed
    printed: Mapping[str, Sequence[tuple[float | None, float]]]  # method -> (round, value); None: at the last round
    reached: Mapping[str, Sequence[tuple[float | None, float]]] = {}  # likewise ours, where the paper prints the round


def compared(settings: Sequence[Compared], ylabel: str, path: FilePath = None) -> Figure:
    """A table's curves, a panel for each setting with a point: the mean over seeds, from the lowest to the highest.

    A hollow marker is the paper's number, where it has one for what is drawn, a filled one ours. The axis starts at the
    lowest value after a tenth of the rounds; panels of a single method have one axis, as they are what is compared.
    path: as in `curves`. Raises ValueError without a single point.
    """
    if not isinstance(settings, Sequence):
        raise ValueError(f"settings must be a list of Compared values, got {checks.shown(settings)}")
    settings, ylabel = [_of_numbers(setting) for setting in settings], checks.text("ylabel", ylabel)
    methods = list(dict.fromkeys(method for setting in settings for method in setting.runs))
    panels = {}
    for setting in settings:
        lines = {method: _over_seeds(setting.runs.get(method, ()), _extremes) for method in methods}
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


def _of_numbers(setting: Any) -> Compared:
    """The setting, its points as numbers; ValueError for what is none."""
    try:
        runs = {method: [_curve(rounds, values) for rounds, values in seeds] for method, seeds in setting.runs.items()}
        printed, reached = (
            {
                method: [(None if t is None else _point(t), _point(v)) for t, v in points]
                for method, points in of.items()
            }
            for of in (setting.printed, setting.reached)
        )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        what = "Compared values, of (rounds, values) of each seed and of pairs of numbers"
        raise ValueError(f"settings must be {what}, got {checks.shown(setting)} ({error})") from error
    return Compared(checks.text("a setting's title", setting.title), runs, printed, reached)


def _curve(rounds: Any, values: Any) -> tuple[list[int], list[float]]:
    found = [checks.integer("a round", round, 0) for round in rounds], _numbers("values", values).tolist()
    if len(found[0]) != len(found[1]):
        raise ValueError(f"one value a round is needed, got {len(found[1])} for {len(found[0])} rounds")
    return found


def _point(value: Any) -> float:
    return checks.number("a point", value, "a finite number", math.isfinite, computed=False)


def _over_seeds(
    runs: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]],
    band: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Line:
    """The mean of the rounds that all seeds have, in the band that ``band`` makes of their values [S, n]."""
    tables = [dict(zip(map(int, rounds), values, strict=True)) for rounds, values in runs]
    rounds = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[t] for t in rounds] for table in tables], float).reshape(len(tables), len(rounds))
    known = np.isfinite(values).all(0)
    x, values = np.array(rounds)[known], values[:, known]
    if not x.size:
        return Line(np.array([]), np.array([]))
    if len(tables) == 1:
        line = Line(x, values[0])
        return line if x.size <= SHOWN_POINTS else Line(*_means(np.stack([x, values[0]])))
    return Line(*_means(np.stack([x, values.mean(0), *band(values)])))


def _mean_of_seeds(values: Sequence[tuple[np.ndarray, np.ndarray]], log: bool) -> Line:
    """With its confidence interval; of the logarithms, if asked and all values are positive."""
    log = log and all((y[np.isfinite(y)] > 0).all() for _, y in values)
    line = _over_seeds([(t, np.log(y) if log else y) for t, y in values], _confidence)._replace(band=SEEDS_SHOWN)
    if not log or line.low is None or line.high is None:
        return line
    return line._replace(y=np.exp(line.y), low=np.exp(line.low), high=np.exp(line.high))


def _within(line: Line, values: Sequence[tuple[np.ndarray, np.ndarray]], key: str, factor: float) -> Line:
    """The line in a band that does not leave the range of the quantity; what is never negative is taken not to be."""
    if line.low is None or line.high is None:
        return line
    low, high = RANGES.get(key, (0 if all((y[np.isfinite(y)] >= 0).all() for _, y in values) else -np.inf, np.inf))
    return line._replace(low=line.low.clip(min=factor * low), high=line.high.clip(max=factor * high))


def _extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values.min(0), values.max(0)


def _confidence(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % confidence interval of the mean over the first axis."""
    from scipy.stats import t

    S = len(values)
    half = t.ppf(0.975, S - 1) * values.std(0, ddof=1) / S**0.5
    return values.mean(0) - half, values.mean(0) + half


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
    if not isinstance(errors, Mapping) or not all(isinstance(of, Sequence) for of in errors.values()):
        raise ValueError(f"errors must be a dict of lists, one for each title, got {checks.shown(errors)}")
    if not isinstance(titles, Sequence) or isinstance(titles, str | bytes):
        raise ValueError(f"titles must be a list of strings, got {checks.shown(titles)}")
    titles = [checks.text("each of titles", title) for title in titles]
    for name, settings in errors.items():
        if len(settings) != len(titles):
            raise ValueError(
                f"errors[{name!r}] must have one list per title ({len(titles)}), got {len(settings)}: "
                "pass an empty list for a setting in which it wasn't run"
            )
    distance = "Distance to the optimum"
    lines = [
        {name: _from_one(_numbers(f"errors[{name!r}]", of[i])) for name, of in errors.items()}
        for i in range(len(titles))
    ]
    panels = [Panel(title, distance, drawn, log=True) for title, drawn in zip(titles, lines, strict=True)]
    return _picture("quadratics", panels, "pass {name: [distances after each round, for each title]}", path)


def label_mix(
    history: History | str | os.PathLike[str],
    path: FilePath = None,
    *,
    title: str = "Label mix of the cohort",
    largest: float | None = None,
) -> Figure:
    """Labels of the cohort's rows in each round, as bubbles whose area is the label's share (FedEve, fig. 3a).

    history: of one run, or the path of its log, of several algorithms the first's (their cohorts are the same); of more
    than 30 measured rounds every second, third, ... is shown. path: as in `curves`. largest: the share (0 to 1) of the
    largest bubble, for pictures to be compared; default the largest there is. Raises ValueError where no round has a
    label mix.
    """
    run = next(iter(by_run(history).values()), [[]])[0]
    title = checks.text("title", title)
    if largest is not None:
        largest = checks.number("largest", largest, "in (0, 1]", lambda v: 0 < v <= 1, computed=False)
    known = [record for record in run if "label_mix" in record]
    if not known:
        raise ValueError(f"label_mix needs at least 1 round that has it, got none: {MEASURE.format('labels')}")
    every = -(-len(known) // SHOWN_ROUNDS)
    shown = known[::every]
    ((_, mixes),) = measured({"": [shown]}, "label_mix")[""]
    share = 100 * mixes  # [T, C]
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
    """Label mix per client (at most 50 of them, evenly spread over the ids), where labels are integers, one a row, and
    the sizes of all clients. path: as in `curves`. Raises ValueError for what is no FederatedData.
    """
    if not isinstance(data, FederatedData):
        raise ValueError(f"data must be of type FederatedData, got {type(data).__name__}: pass sim.data, for example")
    N = data.num_clients
    labelled = np.issubdtype(data.y.dtype, np.integer) and data.y.ndim == 1
    figure = _figure(10.0 if labelled else 5.0, 5.0)
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
    _tidy(sizes)
    figure.suptitle(data.name)
    return _written(figure, path)


def _label_mixes(data: FederatedData, axes: Axes, figure: Figure) -> None:
    counts = data.label_counts()
    N, C = counts.shape
    shown = np.arange(min(N, SHOWN_CLIENTS)) * N // min(N, SHOWN_CLIENTS)
    share = 100 * counts[shown] / data.sizes[shown, None]
    image = axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=share.max(), interpolation="nearest")
    every = max(1, round(len(shown) / 10))
    axes.set_yticks(range(0, len(shown), every), [f"{i:,}" for i in shown[::every]])
    axes.set_xticks(_label_ticks(C))
    subset = f"{len(shown)} of {N:,} clients" if len(shown) < N else f"{N:,} clients" if N > 1 else "1 client"
    axes.set(xlabel="Label", ylabel="Client", title=f"Label mix of {subset}")
    figure.colorbar(image, ax=axes, label="Share of the client's rows (%)", fraction=0.05, pad=0.02)


def _by_round(runs: Runs, key: str, factor: float = 1, log: bool = False) -> dict[str, Line]:
    """Each run's rounds that have `key`; of a list the last entry, which is after the last local epoch."""
    lines = {}
    for name, seeds in measured(runs, key).items():
        values = [(t, factor * values[:, -1]) for t, values in seeds]
        alone = len(values) == 1
        lines[name] = _finite(*values[0]) if alone else _within(_mean_of_seeds(values, log), values, key, factor)
    longest = max((line.x.size for line in lines.values() if not line.band), default=0)
    if longest <= SHOWN_POINTS:
        return lines
    length = math.ceil(longest / (SHOWN_POINTS // 2))
    return {name: line if line.band else _windows(line, length) for name, line in lines.items()}


def _windows(line: Line, length: int) -> Line:
    """Medians and quartiles of windows of about `length` points."""
    if not line.x.size:
        return line
    parts = np.array_split(np.stack([line.x, line.y]), math.ceil(line.x.size / length), axis=1)
    low, median, high = np.transpose([np.quantile(y, QUARTILES) for _, y in parts])
    return Line(np.array([x.mean() for x, _ in parts]), median, low, high, QUARTILES_SHOWN)


def _by_epoch(runs: Runs, key: str) -> dict[str, Line]:
    """Each run's quartiles, over the rounds of all its seeds, of the lists under `key`, against local epochs."""
    lines = {}
    for name, seeds in measured(runs, key).items():
        known = [values[np.isfinite(values).all(axis=1)] for _, values in seeds]
        known = [values for values in known if len(values)]
        low, median, high = np.quantile(np.concatenate(known), QUARTILES, axis=0) if known else np.empty((3, 0))
        lines[name] = Line(np.arange(1, len(median) + 1), median, low, high, QUARTILES_SHOWN)
    return lines


def _finite(x: Sequence[int] | np.ndarray, y: Sequence[float] | np.ndarray) -> Line:
    x, y = np.asarray(x), np.asarray(y, float)
    return Line(x[np.isfinite(y)], y[np.isfinite(y)])


def _from_one(y: np.ndarray) -> Line:
    return _finite(range(1, len(y) + 1), y)


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
        drawn = _draw_panel(panel, axes, xlabel) | drawn
    for panel in panels:
        if panel.log:
            _log_scale(first[panel.ylabel])
    _legend(figure, {name: drawn[name] for name in panels[0].lines if name in drawn}, width)
    return _written(figure, path)


def _draw_panel(panel: Panel, axes: Axes, xlabel: str = "Round") -> dict[str, Line2D]:
    """Draws the runs that have points, with labels and a title; returns their lines by name."""
    drawn = _draw(panel, axes)
    bands = dict.fromkeys(line.band for line in panel.lines.values() if line.band and line.x.size)
    axes.set_xlabel(f"{xlabel} ({'; '.join(bands)})" if bands else xlabel)
    axes.set(ylabel=panel.ylabel, title=panel.title)
    _ruled(axes)
    return drawn


def _legend(figure: Figure, lines: Mapping[str, Any], width: float, height: float = 4.2) -> None:
    """Below the picture, which is so high without it; of a run without a name none."""
    lines = {name: line for name, line in lines.items() if name}
    if not lines:
        return
    columns = max(1, min(len(lines), 5, int(11 * width) // (max(map(len, lines)) + 8)))
    figure.set_figheight(height + 0.2 * math.ceil(len(lines) / columns))
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, **look)


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
        place, known = checks.path("path", path), figure.canvas.get_supported_filetypes()
        if (ending := place.suffix[1:].lower()) and ending not in known:
            raise ValueError(f"path must end in one of {', '.join(sorted(known))}, got {place}: .png, for example")
        figure.savefig(place, dpi=150)
    return figure


def _numbers(name: str, values: Any) -> np.ndarray:
    """[n]; ValueError for anything else than numbers."""
    try:
        found = np.asarray(values, float)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be numbers, got {checks.shown(values)}") from error
    if found.ndim != 1:
        raise ValueError(f"{name} must be numbers, one after another, got {checks.shown(values)}")
    return found
