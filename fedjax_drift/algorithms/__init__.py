"""The algorithms: one file each, and a plain dict of their factories."""

from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.algorithms.fedavgm import fedavgm
from fedjax_drift.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from fedjax_drift.algorithms.fedprox import fedprox

ALGORITHMS = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
}

__all__ = ["ALGORITHMS", *ALGORITHMS]
