"""Plots of training: accuracy, loss, drift, and the rounds to a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.plots.canvas import (
    MEASURE,
    FilePath,
    Panel,
    add_grid,
    figure_of_panels,
    finished,
    new_figure,
    wrapped,
)
from fedjax_drift.plots.lines import by_epoch, by_round, divergence, lines_of, over
from fedjax_drift.plots.looks import ink, look
from fedjax_drift.plots.style import DEFAULT, AnyStyle, Style
from fedjax_drift.records import UNITS, By, Reached, Records, Runs, by_run, measured, numbers
from fedjax_drift.records import rounds_to_target as reached_rounds
from fedjax_drift.spec import Fix, Spec, checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LONGEST_TICK = 30  # characters of a name in one line beside a bar
AXIS = {"round": "Round", "time": "Virtual time (s)", "megabytes": "Megabytes sent and received"}
CLIENT_DRIFT, SQUARED = "Client drift after the last local epoch", "Squared gradient norm"
ACCURACY = "Test accuracy of the global model", "Test accuracy (%)"


def _labels(name: str, value: Any, fix: str) -> dict[str, str]:
    if not checks.instance(name, value, Mapping, fix):  # type: ignore[type-abstract]
        checks.refuse(f"{name} must have at least one entry", "{}", fix)
    return {checks.text(f"{name}'s entry", key): checks.text(f"{name}[{key!r}]", label) for key, label in value.items()}


Labels = Annotated[Mapping[str, str], Spec(_labels, "labels"), Fix('pass {"perplexity": "Perplexity"}, for example')]


@checked
def curves(
    records: Records, path: FilePath = None, *, x: By = "round", y: Labels | None = None, style: AnyStyle = DEFAULT
) -> Figure:
    """Plots test accuracy (in percent) and training loss against rounds, seconds or megabytes, one line per run.

    If no run has an accuracy, because the models are not classifiers, it plots the test loss instead. ``y`` selects
    other entries of the records, such as those of `Model.scores`.

    Args:
      records: the runs to plot. The module `fd.plots` lists the allowed types.
      path: file to which the figure is written. Its suffix selects the format. Default: no file.
      x: the axis of the lines: "round" (default), "time", the virtual seconds (``clock=`` and ``devices=`` of
        `fd.Simulation`), or "megabytes", the 10^6 bytes that the clients have sent and received until then.
      y: the panels, a dict from an entry of the records to the label of its axis, such as
        ``{"perplexity": "Perplexity"}``. The values are plotted as they are in the records.
      style: how the rounds are smoothed, which band is drawn, and the size of the figure. Default: `Style()`.

    Raises:
      ValueError: the records have no round with finite values.
    """
    runs = by_run(records)
    chosen = [panels_of(runs, style)(key, "", label) for key, label in (y or {}).items()]
    panels = chosen or usual_panels(runs, style)
    panels = [panel._replace(lines=over(x, panel.lines, runs), counts=x == "round") for panel in panels]
    hint = "pass {name: history of Simulation.run}"
    return finished(figure_of_panels("curves", panels, hint, style, AXIS[x]), path)


def usual_panels(runs: Runs, style: Style) -> list[Panel]:
    """The panels of `curves`: the test accuracy, or else the test loss, and the training loss."""
    panel, loss = panels_of(runs, style), "Loss (nats per example)"
    tested = panels_of(runs, style, factor=100)("accuracy", *ACCURACY)
    if not any(line.x.size for line in tested.lines.values()):
        loss = "Loss, mean over examples"
        tested = panel("loss", "Test loss of the global model", loss)
    return [tested, panel("train_loss", "Training loss, mean of the cohort", loss)]


def panels_of(runs: Runs, style: Style, **options: Any) -> Callable[[str, str, str], Panel]:
    """Returns ``panel(key, title, ylabel)``: an entry of the records against rounds. options: those of `by_round`."""
    log = options.get("log", False)
    return lambda key, title, ylabel: Panel(title, ylabel, by_round(runs, key, style, **options), log)


@checked
def drift(records: Records, path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots period drift, client drift after the last local epoch, and dissimilarity against rounds.

    Period drift (FedEve, eq. 3) and client drift (FedEve, eq. 4) are squared norms of differences of gradients, see
    `Simulation.measure`. Their panels share a logarithmic axis. Panels without data are left out.

    records, path, style: as in `curves`. Raises ValueError if no round has any of these measures.
    """
    panel = panels_of(by_run(records), style, log=True)
    panels = (
        panel("period_drift", "Period drift", SQUARED),
        panel("client_drift", CLIENT_DRIFT, SQUARED),
        panel("dissimilarity", "Dissimilarity of gradients", "Dissimilarity"),
    )
    return finished(figure_of_panels("drift", panels, MEASURE.format("gradients"), style), path)


@checked
def updates(records: Records, path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots the norm of the clients' updates, and their cosine with the mean update, against rounds.

    Both are means over the cohort, after the last local epoch.

    records, path, style: as in `curves`. Raises ValueError if no round has these measures.
    """
    panel = panels_of(by_run(records), style)
    panels = (
        panel("update_norm", "Norm of client updates", "Norm, mean of the cohort"),
        panel("update_cosine", "Cosine of client updates with their mean", "Cosine"),
    )
    return finished(figure_of_panels("updates", panels, MEASURE.format("updates"), style), path)


@checked
def agreement(records: Records, path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots linear CKA and KL divergence between the predictions of local and global models (LfD, section 3).

    The x axis is the local epoch. The value of a seed is the median over its measured rounds, and the line is the mean
    over the seeds. If no run has more than one local epoch, the x axis is the round.

    records, path, style: as in `curves`. Raises ValueError if no round has these measures.
    """
    runs = by_run(records)
    histories = [seed for key in ("cka", "kl") for seeds in measured(runs, key).values() for seed in seeds]
    epochs = max((values.shape[1] for _, values in histories), default=1)
    lines, xlabel = (by_epoch, "Local epoch") if epochs > 1 else (by_round, "Round")
    panels = (
        Panel("CKA of local and global predictions", "Linear CKA", lines(runs, "cka", style)),
        Panel("KL of local and global predictions", "KL divergence (nats)", lines(runs, "kl", style)),
    )
    return finished(figure_of_panels("agreement", panels, MEASURE.format("predictions"), style, xlabel), path)


@checked
def forgetting(records: Records, path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots LP against rounds. LP is a local model's accuracy on a class divided by the global model's (LfD, eq. 11).

    One panel shows the classes that are present in a client's data, and the other panel shows the absent classes. A
    value below the grey line at 1 means that the local model is worse than the global model, so that local training
    forgets. The axis ends at 3, because LP can be very large in early rounds, in which the global accuracies are almost
    0. Triangles mark larger values.

    records, path, style: as in `curves`. Raises ValueError if no round has this measure.
    """
    panel, ratio = panels_of(by_run(records), style), "LP (local / global accuracy)"
    panels = [
        panel(key, f"Classes {title} the client", ratio)._replace(guide=1, limits=(0, 3))
        for title, key in (("present at", "lp_present"), ("absent from", "lp_absent"))
    ]
    return finished(figure_of_panels("forgetting", panels, MEASURE.format("forgetting"), style), path)


@checked
def sharpness(records: Records, path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots the largest eigenvalue of the Hessian of the test loss, and its trace, against rounds.

    The eigenvalue is that at the global model after the round, and that at the local models after their training in it,
    as the mean of the cohort. Panels without data are left out.

    records, path, style: as in `curves`. Raises ValueError if no round has any of these measures.
    """
    panel = panels_of(by_run(records), style, entry=0)
    panels = (
        panel("sharpness", "Sharpness of the global model", "Largest eigenvalue"),
        panel("local_sharpness", "Sharpness of local models", "Largest eigenvalue"),
        panel("hessian_trace", "Trace of the Hessian", "Trace"),
    )
    return finished(figure_of_panels("sharpness", panels, MEASURE.format("sharpness"), style), path)


@checked
def gain(records: Records, path: FilePath = None, *, style: AnyStyle = DEFAULT) -> Figure:
    """Plots FedEve's Kalman gain, period variance and client variance against rounds.

    The legend shows the median of the gain. Runs of other algorithms are left out.

    records, path, style: as in `curves`. Raises ValueError if no round has a gain.
    """
    runs, renamed = by_run(records), {}
    for name, seeds in measured(runs, "gain").items():
        gains = np.concatenate([values[np.isfinite(values[:, -1]), -1] for _, values in seeds])
        median = f"median gain {np.median(gains):.2f}" if gains.size else ""
        renamed[", ".join(filter(None, (name, median)))] = runs[name]
    variance = panels_of(renamed, style, log=True)
    panels = (
        panels_of(renamed, style)("gain", "Kalman gain", "Gain"),
        variance("period_variance", "Period variance", "Variance"),
        variance("client_variance", "Client variance", "Variance"),
    )
    return finished(figure_of_panels("gain", panels, "pass the history of a run of fedeve", style), path)


@checked
def rounds_to_target(
    records: Records,
    target: float,
    path: FilePath = None,
    *,
    key: str = "accuracy",
    by: By = "round",
    style: AnyStyle = DEFAULT,
) -> Figure:
    """Plots the number of rounds, of seconds or of megabytes until each run first reaches a target.

    A bar is the mean over the seeds, and a dot is one seed. If a run is evaluated only every few rounds, it may reach
    the target between two evaluations. A thin line shows this interval. A hatched bar is a lower bound, because at
    least one seed has not reached the target in its rounds. Such a seed is a triangle that points to the right.
    `fd.rounds_to_target` returns the numbers.

    Args:
      records, path: as in `curves`.
      target: a run reaches the target when ``key`` is at least ``target``. If ``key`` ends in "loss", it must be at
        most ``target``.
      key: the entry of the records to compare. Default: "accuracy", in 0..1.
      by: what is counted: "round" (default), "time" or "megabytes", as in `fd.rounds_to_target`.
      style: only its ``figsize`` has an effect.

    Raises:
      ValueError: the target is not a finite number, in 0..1 for an accuracy; or no round has the key.
    """
    runs, reached = by_run(records), reached_rounds(records, target, key, by)
    labels = bar_labels({name: divergence(runs[name]) for name in reached})
    bars = height_of_bars(labels)
    figure = new_figure(7.5, 1.6 + bars, style, text=1.0 + bars)
    axes = figure.subplots()
    draw_bars(reached, runs, axes, by)
    axes.set_yticks(range(len(labels)), labels)
    target = float(target)
    goal = f"{100 * target:g} % test accuracy" if key == "accuracy" else f"{key.replace('_', ' ')} {target:g}"
    axes.set_title(f"{UNITS[by]} to {goal}")
    return finished(figure, path)


def bar_labels(notes: Mapping[str, str]) -> list[str]:
    """Returns the labels beside the bars. notes: name of a run -> what its label adds in brackets."""
    return [wrapped(f"{name} ({note})" if note else name, LONGEST_TICK) for name, note in notes.items()]


def height_of_bars(labels: Sequence[str]) -> float:
    """Returns the height, in inches for a font of 10 points, of one bar beside each label."""
    return sum(max(0.42, 0.2 * label.count("\n") + 0.25) for label in labels)


def draw_bars(reached: Mapping[str, Sequence[Reached]], runs: Runs, axes: Axes, by: str = "round") -> None:
    """Draws what each run needs, in one of the `records.UNITS`.

    A run has the colour of its position in ``runs``, as in other plots.
    """
    from matplotlib.patheffects import withStroke

    paper = axes.get_facecolor()
    smallest, coarse = 1 if by == "round" else 0, False  # a shorter interval isn't drawn
    outline = [withStroke(linewidth=2.5, foreground=paper)]  # the line can be seen on a bar of any colour
    for i, (name, seeds) in enumerate(reached.items()):
        shade = look([*runs].index(name), axes)["color"]
        needed = np.array([seed.after if seed.round is None else seed.round for seed in seeds], float)
        several = len(needed) > 1
        missed = sum(seed.round is None for seed in seeds)
        hatched: dict[str, Any] = {"facecolor": "none", "hatch": "///", "edgecolor": shade}
        axes.barh(i, needed.mean(), height=0.62, **(hatched if missed else {"color": shade}))
        text = f"{'mean ' if several else ''}{'> ' if missed else ''}{needed.mean():,.4g}"
        if missed and several:
            text += f" ({len(needed) - missed} of {len(needed)} seeds)"
        axes.annotate(text, (needed.max(), i), (6, 0), textcoords="offset points", va="center", fontsize="small")
        heights = i + np.linspace(-0.2, 0.2, len(needed)) if several else np.array([float(i)])
        for seed, y in zip(seeds, heights, strict=True):
            if seed.round is not None and seed.round - seed.after > smallest:
                axes.plot([seed.after, seed.round], [y, y], color=ink(axes), linewidth=1, path_effects=outline)
                coarse = True
        for marker, missing in (("o", False), (">", True)):
            at = [n for n, seed in enumerate(seeds) if several and (seed.round is None) == missing]
            if at:
                axes.plot(needed[at], heights[at], marker, color=ink(axes), markerfacecolor=paper, markersize=3.5)
    axes.set_yticks(range(len(reached)), [*reached])
    axes.tick_params(axis="y", length=0)
    room = max(0.6, (3 - len(reached)) / 2)  # so that a single bar is not as high as the axes
    axes.set_ylim(len(reached) - 1 + room, -room)
    axes.margins(x=0.14)
    since = " of the first evaluation at the target\n(line: since the evaluation before)" if coarse else ""
    axes.set_xlabel(f"{AXIS[by]}{since}")
    add_grid(axes, counts=by == "round")
    axes.grid(False, axis="y")


@checked
def quadratics(
    errors: Mapping[str, Sequence[Sequence[float]]],
    titles: Sequence[str],
    path: FilePath = None,
    *,
    style: AnyStyle = DEFAULT,
) -> Figure:
    """Plots the distance to the optimum against rounds on a logarithmic axis.

    There is one panel per setting and one line per algorithm.

    Args:
      errors: a dict from the name of an algorithm to one list per setting: the distances after rounds 1, 2, ... The
        list is empty if the algorithm was not run in this setting.
      titles: the names of the settings, for example "all clients" and "20 % per round".
      path, style: as in `curves`.

    Raises:
      ValueError: an algorithm does not have one list per title, or there is no distance at all.
    """
    if not isinstance(errors, Mapping) or not all(isinstance(settings, Sequence) for settings in errors.values()):
        checks.refuse("errors must be a dict of lists, one list per title", checks.shown(errors))
    if not isinstance(titles, Sequence) or isinstance(titles, str | bytes):
        checks.refuse("titles must be a list of strings", checks.shown(titles))
    titles = [checks.text("each of titles", title) for title in titles]
    for name, settings in errors.items():
        if len(settings) != len(titles):
            checks.refuse(
                f"errors[{name!r}] must have one list per title ({len(titles)})",
                len(settings),
                "pass an empty list for a setting in which it was not run",
            )
    panels = []
    for i, title in enumerate(titles):
        values = {name: numbers(f"errors[{name!r}]", of[i]) for name, of in errors.items()}
        seeds = {name: [(range(1, len(y) + 1), y)] if len(y) else [] for name, y in values.items()}
        panels.append(Panel(title, "Distance to the optimum", lines_of(seeds, style, log=True), log=True))
    fix = "pass {name: [distances after each round, for each title]}"
    return finished(figure_of_panels("quadratics", panels, fix, style), path)
