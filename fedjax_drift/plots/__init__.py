"""Plots of runs (accuracy, loss, drift), of the clients' data, and of the accuracy for each client.

The argument ``records`` is one of these:

- a list: the records of a history; or histories, one per seed; or the runs of `fd.sweep` or of `fd.load_run`
- the path of a log (`logs.Log`), of an output folder of ``fedjax-drift run``, or of a folder with such folders
- a dict from a name to one of these

Each algorithm, and each setting of a sweep, is a run of its own. For the logs of several seeds, pass ``{name:
[fd.logs.read(path) for path in paths]}``.

Every function returns a `matplotlib.figure.Figure`. A notebook shows it if it is the last expression of a cell, with
or without ``%matplotlib inline``. The functions do not use pyplot, so no window opens and the backend does not change.
matplotlib is imported when the first figure is created.

- ``style=`` selects the smoothing, the band and the size of the figure, see `Style`.
- The colour, line style and marker of a run depend on its position in ``records``. So a run looks the same in all plots
  of the same records.
- Rounds without the plotted quantity are skipped, and so are values that are not finite. The legend says in which round
  a run diverged, that is, from which round on its loss is not finite.
- With several seeds, a line is the mean over the seeds, for the rounds that all seeds have. By default, the band is the
  95 % confidence interval of the mean. On a logarithmic axis, mean and band are those of the logarithms. The band is
  clipped to the range of the quantity. A run with one seed has no band.
- If a run has more than 100 rounds, the values of each seed are first averaged in at most 50 windows, which have the
  same length.
- If a few values are so large that the other lines would be flat, they are outside of the axis. Triangles mark where a
  line leaves the axis, and the title says how far it reaches.
- The colours follow matplotlib's style, so ``plt.style.use("dark_background")`` works.
"""

# training.py, clients.py, examples.py, participation.py, planes.py, story.py and tables.py have the plot functions.
# They use canvas.py (figures), axis.py (the y axis), lines.py (the values), looks.py (colours) and style.py (options).

from fedjax_drift.plots.clients import fairness, federation, label_mix
from fedjax_drift.plots.examples import examples
from fedjax_drift.plots.looks import COLOURS, MARKERS, STYLES
from fedjax_drift.plots.participation import participation
from fedjax_drift.plots.planes import loss_plane
from fedjax_drift.plots.story import drift_story
from fedjax_drift.plots.style import Style
from fedjax_drift.plots.tables import Compared, compared
from fedjax_drift.plots.training import (
    agreement,
    curves,
    drift,
    forgetting,
    gain,
    quadratics,
    rounds_to_target,
    sharpness,
    updates,
)  # fmt: skip

__all__ = [
    "COLOURS", "Compared", "MARKERS", "STYLES", "Style", "agreement", "compared", "curves", "drift", "drift_story",
    "examples", "fairness", "federation", "forgetting", "gain", "label_mix", "loss_plane", "participation",
    "quadratics", "rounds_to_target", "sharpness", "updates",
]  # fmt: skip
__dir__ = __all__.copy
