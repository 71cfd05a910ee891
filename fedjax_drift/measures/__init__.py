"""Measures: drift, curvature, the loss between models, distances between the clients' data, and personal scores.

`Simulation.measure` computes drift (`drift.py`) and curvature (`curvature.py`) in a round, and
`Simulation.evaluate_clients` the scores of each client (`personal.py`). `fd.measures` has the measures that need no
round: `loss_plane` and `distances`.

The modules import `round` and modules that `round` imports. `personal.py` also imports the fine-tuning of
`algorithms/running_statistics.py`.
"""

from fedjax_drift.measures.data_distance import Distances, distances
from fedjax_drift.measures.planes import LossPlane, loss_plane

__all__ = ["Distances", "LossPlane", "distances", "loss_plane"]


def __dir__() -> list[str]:
    return list(__all__)
