"""Plots of runs (accuracy, loss, drift), of the clients' data, and of the accuracy for each client.

The argument ``records`` is one of these:

- the history of a run
- the path of a log (`logs.Log`), or of an output folder of ``fedjax-drift run``; the plot has one line per algorithm
- the result of `fd.sweep`; the plot has one line per setting and algorithm
- a dict from the name of a run to one of these values:

  - its history
  - a list of histories, one per seed
  - the result of a sweep
  - the path of a log
  - a list of paths of logs, one per seed

Every function returns a `matplotlib.figure.Figure`. It does not use pyplot, so no window opens and the backend does not
change. In a notebook, the figure is shown if it is the last expression of a cell. matplotlib is imported when the first
figure is created.

- The colour, line style and marker of a run depend on its position in ``records``. So a run looks the same in all plots
  of the same records.
- Rounds without the plotted quantity are skipped, and so are values that are not finite.
- With several seeds, a line is the mean over the seeds, for the rounds that all seeds have. The band is the 95 %
  confidence interval of the mean (Student's t). On a logarithmic axis, both are computed from the logarithms. The band
  is clipped to the range of the quantity.
- With one seed and more than 100 rounds, the rounds are grouped into about 50 windows. The line is the median of each
  window, and the band shows its quartiles.
- With several seeds and more than 50 rounds, the rounds are grouped into 50 windows. The mean and the interval are
  computed for every round, and then averaged within each window.
"""

# training.py, clients.py, story.py and tables.py have the plot functions. They use canvas.py and lines.py.

from fedjax_drift.plots.canvas import COLOURS, MARKERS, STYLES
from fedjax_drift.plots.clients import fairness, federation, label_mix
from fedjax_drift.plots.story import drift_story
from fedjax_drift.plots.tables import Compared, compared
from fedjax_drift.plots.training import (
    agreement,
    curves,
    drift,
    forgetting,
    gain,
    quadratics,
    rounds_to_target,
    updates,
)

__all__ = [
    "COLOURS",
    "Compared",
    "MARKERS",
    "STYLES",
    "agreement",
    "compared",
    "curves",
    "drift",
    "drift_story",
    "fairness",
    "federation",
    "forgetting",
    "gain",
    "label_mix",
    "quadratics",
    "rounds_to_target",
    "updates",
]


def __dir__() -> list[str]:
    return list(__all__)
