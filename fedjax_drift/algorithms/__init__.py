"""The algorithms: one file each, and a plain dict of their factories."""

from collections.abc import Callable

from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.algorithms.fedavgm import fedavgm
from fedjax_drift.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from fedjax_drift.algorithms.fedprox import fedprox
from fedjax_drift.types import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
}

__all__ = ["ALGORITHMS", *ALGORITHMS]
