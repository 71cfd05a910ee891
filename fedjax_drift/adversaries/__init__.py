"""Adversaries: clients that lie about their updates, or about their examples. A source of drift like the others.

    liars = fd.adversaries.share(0.2, fd.adversaries.alie())
    sim = fd.Simulation(model, data, algorithm, cohort_size=20, sources=[liars])

Who is hostile: `share`, `clients`. Attacks on messages: `sign_flip`, `ipm`, `alie`, `mimic`, `gaussian`, `scaled`,
`nan`. Attacks on data: `label_flip`, `backdoor`, which `attack_success` measures. `fedjax_drift.robust` has rules that
withstand some of them.
"""

from fedjax_drift.adversaries.acting import clients, share
from fedjax_drift.adversaries.attack import Attack, Seen
from fedjax_drift.adversaries.attacks import (
    alie,
    attack_success,
    backdoor,
    gaussian,
    ipm,
    label_flip,
    mimic,
    nan,
    scaled,
    sign_flip,
)
from fedjax_drift.recipes import recorded as attack

__all__ = [
    "Attack", "Seen", "alie", "attack", "attack_success", "backdoor", "clients", "gaussian", "ipm", "label_flip",
    "mimic", "nan", "scaled", "share", "sign_flip",
]  # fmt: skip
__dir__ = __all__.copy
