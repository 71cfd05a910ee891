"""A picture of who took part in which round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.plots.canvas import FilePath, add_grid, finished, hide_frame, new_figure
from fedjax_drift.plots.looks import fill, ink
from fedjax_drift.plots.style import DEFAULT, AnyStyle
from fedjax_drift.spec import Count, checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS, MOST_COLUMNS = 400, 800  # cells of the picture; with more clients or rounds, a cell stands for several


@checked
def participation(
    cohorts: Sequence[Any], num_clients: Count, path: FilePath = None, *, style: AnyStyle = DEFAULT
) -> Figure:
    """Plots which clients took part in which round, and how often each client did.

    In the first panel a row is a client and a column is a round. With more than 400 clients or 800 rounds, a cell
    stands for several of them, and is darker if more of them took part. The second panel is the number of rounds of
    every client, next to its row.

    Args:
      cohorts: for every round the ``info`` of `Simulation.round_fn`, or the client ids [K]. -1 is ignored.
      num_clients: N.
      path: as in `curves`.
      style: only its ``figsize`` has an effect.

    Raises:
      ValueError: there is no round, or an id is out of range.
    """
    N = num_clients
    rounds = isinstance(cohorts, list | tuple) or isinstance(cohorts, np.ndarray) and cohorts.ndim
    if not rounds or not len(cohorts):
        checks.refuse("cohorts must be a list with at least 1 round", checks.shown(cohorts), "pass a list of infos")
    taken = [_ids(cohort, N) for cohort in cohorts]
    T = len(taken)
    rows, columns = -(-N // -(-N // MOST_ROWS)), -(-T // -(-T // MOST_COLUMNS))
    cells = np.zeros((rows, columns))
    for t, ids in enumerate(taken):
        cells[:, t * columns // T] += np.bincount(ids * rows // N, minlength=rows)
    counts = np.bincount(np.concatenate(taken), minlength=N)

    figure = new_figure(10.0, 5.0, style)
    when, often = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    extent = (-0.5, T - 0.5, N - 0.5, -0.5)
    image: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "Blues", "vmin": 0}
    when.imshow(cells, extent=extent, **image)
    when.set(xlabel="Round", ylabel="Client", title=f"{np.mean([len(ids) for ids in taken]):.3g} clients per round")
    when.locator_params(integer=True, min_n_ticks=1)
    hide_frame(when)
    often.barh(np.arange(N), counts, height=1.0, color=fill(often)[0])
    often.axvline(counts.mean(), color=ink(often), linestyle="--", linewidth=1.2)
    never = f", {(counts == 0).sum():,} never" if (counts == 0).any() else ""
    often.set(xlabel="Rounds of a client", title=f"Mean {counts.mean():.3g}{never}")
    add_grid(often)
    return finished(figure, path)


def _ids(cohort: Any, N: int) -> np.ndarray:
    """Returns the ids of a cohort without the unused entries."""
    ids = checks.array("a cohort", cohort["cohort"] if isinstance(cohort, Mapping) and "cohort" in cohort else cohort)
    ids = ids if ids.size else np.zeros(0, int)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and not -1 <= ids.min() <= ids.max() < N):
        checks.refuse(f"a cohort must be the info of a round, or client ids in 0..{N - 1}", checks.shown(cohort))
    return ids[ids >= 0]
