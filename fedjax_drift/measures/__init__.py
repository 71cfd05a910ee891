"""Measures: drift, curvature, the loss between models, distances between the clients' data, and personal scores.

`Measure` is a measure of the clients' drift (`measure.py`), for ``Simulation(measure=)``. Those of the library are in
`drift.py`, with the curvature of `curvature.py`. `Simulation.evaluate_clients` computes the scores of each client
(`personal.py`). `loss_plane` and `distances` need no round.

The modules import `round` and modules that `round` imports. `personal.py` also imports the fine-tuning of
`algorithms/running_statistics.py`.
"""

from fedjax_drift.measures.data_distance import Distances, distances
from fedjax_drift.measures.drift import (
    forgetting,
    gradients,
    labels,
    local_sharpness,
    low_rank,
    predictions,
    sharpness,
    updates,
)
from fedjax_drift.measures.measure import Cohort, Global, Mean, Measure, Needs, Seen
from fedjax_drift.measures.planes import LossPlane, loss_plane
from fedjax_drift.recipes import recorded

__all__ = [
    "Cohort", "Distances", "Global", "LossPlane", "Mean", "Measure", "Needs", "Seen", "distances", "forgetting",
    "gradients", "labels", "local_sharpness", "loss_plane", "low_rank", "predictions", "recorded", "sharpness",
    "updates",
]  # fmt: skip
__dir__ = __all__.copy
