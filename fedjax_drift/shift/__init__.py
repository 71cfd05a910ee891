"""Shifts: clients with other features, and data that change over time.

    data = data.shifted(fd.shift.rotate(45))                             # client i is rotated by 45 i / N degrees
    data = data.shifted(fd.shift.sudden(50, fd.shift.permute_labels(0, [(1, 7)])))

Shifts of features: `gaussian_noise`, `rotate`, `brightness`, `blur`. Label noise: `noisy_labels`. Shifts over time:
`permute_labels`, `rotate_over_time`, `sudden`, `gradual`, `recurring`. Combinations: `mixture`, `domains`, `chain`,
`none`.
"""

from fedjax_drift.shift.features import blur, brightness, gaussian_noise, rotate
from fedjax_drift.shift.labels import noisy_labels
from fedjax_drift.shift.rule import Owner, Shift, rule
from fedjax_drift.shift.time import (
    chain,
    domains,
    gradual,
    mixture,
    none,
    permute_labels,
    recurring,
    rotate_over_time,
    sudden,
)

__all__ = [
    "Owner", "Shift", "blur", "brightness", "chain", "domains", "gaussian_noise", "gradual", "mixture", "noisy_labels",
    "none", "permute_labels", "recurring", "rotate", "rotate_over_time", "rule", "sudden",
]  # fmt: skip
__dir__ = __all__.copy
