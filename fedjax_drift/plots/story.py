"""A figure that shows client drift, and how much is gained by correcting it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedjax_drift import checks
from fedjax_drift.data.federated import GivenData
from fedjax_drift.plots.canvas import (
    MEASURE,
    FilePath,
    add_legend,
    draw_panel,
    finished,
    legend_entries,
    new_figure,
    set_scale,
)
from fedjax_drift.plots.clients import draw_label_mixes
from fedjax_drift.plots.looks import look
from fedjax_drift.plots.style import DEFAULT, AnyStyle
from fedjax_drift.plots.training import (
    ACCURACY,
    CLIENT_DRIFT,
    SQUARED,
    bar_labels,
    draw_bars,
    height_of_bars,
    panels_of,
)
from fedjax_drift.records import Records, by_run, rounds_to_target
from fedjax_drift.spec import checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MARKERS_PER_LINE = 12


@checked
def drift_story(
    records: Records, target: float, data: GivenData, path: FilePath = None, *, style: AnyStyle = DEFAULT
) -> Figure:
    """Plots client drift, and how much is gained by correcting it, in four panels.

    The panels show:

    - the label mixes of the clients
    - the client drift against rounds
    - the test accuracy of the global model against rounds, with the target
    - the number of rounds until each run first reaches the target

    Client drift is eq. 4 of FedEve after the last local epoch, as the mean over the cohort: ||grad F_i(theta_i) -
    grad F_i(w_S)||^2. Here theta_i is the local model of client i, w_S is the mean of the cohort's local models, and
    F_i is the mean loss over the examples of client i. It is 0 if all local models are equal.

    Args:
      records, path, style: as in `curves`.
      target: the test accuracy to reach, in 0..1.
      data: the clients that trained, with one integer label per example.

    Raises:
      ValueError: the labels are not integers with one label per example, the target is not an accuracy, or no round has
        an accuracy or a client drift.
    """
    reached, runs, target = rounds_to_target(records, target), by_run(records), float(target)
    drift = panels_of(runs, style, log=True)("client_drift", CLIENT_DRIFT, SQUARED)
    if not any(line.x.size for line in drift.lines.values()):
        checks.refuse("drift_story needs at least 1 round that was measured", "none", MEASURE.format("gradients"))
    accuracy = panels_of(runs, style, factor=100)("accuracy", *ACCURACY)._replace(guide=100 * target)
    labels = bar_labels(dict.fromkeys(reached, ""))  # the legend says which runs diverged
    below = max(3.4, 1.1 + height_of_bars(labels))  # inches of the panels with the bars
    figure = new_figure(10.6, 3.4 + below, style, text=1.0 + height_of_bars(labels))
    mix_axes, drift_axes, accuracy_axes, rounds_axes = figure.subplots(2, 2, height_ratios=(3.4, below)).flat
    draw_label_mixes(data, mix_axes, figure)
    drawn: dict[str, Line2D] = {}
    for panel, axes in ((accuracy, accuracy_axes), (drift, drift_axes)):
        lines = draw_panel(panel, axes)
        for name, line in lines.items():  # markers, so that runs also differ without colours
            every = max(1, math.ceil(panel.lines[name].x.size / MARKERS_PER_LINE))
            line.set(marker=look([*runs].index(name), axes)["marker"], markevery=every)
        drawn = lines | drawn
        set_scale([(panel, axes)])
    beside = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
    accuracy_axes.annotate("target", (1.01, 100 * target), va="center", fontsize="small", **beside)
    draw_bars(reached, runs, rounds_axes)
    rounds_axes.set_yticks(range(len(labels)), labels, fontsize="small")
    rounds_axes.set_title(f"Rounds to {100 * target:g} % test accuracy")
    add_legend(figure, legend_entries([accuracy, drift], drawn, drift_axes), style)
    return finished(figure, path)
