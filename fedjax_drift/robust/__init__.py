"""Robust rules, which see the messages of all clients at once: aggregation when some of the clients lie.

    rule = fd.aggregation.robust(fd.robust.krum(f=2), before=[fd.robust.nnm(f=2)])
    sim = fd.Simulation(model, data, algorithm, cohort_size=20, aggregation=rule)

Rules: `median`, `trimmed_mean`, `meamed`, `geometric_median`, `krum`, `multi_krum`, `cge`, `centered_clipping`. Before
a rule: `nnm`, `bucketing`, `arc`. Adversaries are in `fedjax_drift.adversaries`.
"""

from fedjax_drift.recipes import recorded
from fedjax_drift.robust.before import arc, bucketing, nnm
from fedjax_drift.robust.rule import Before, Rule, Stack
from fedjax_drift.robust.rules import (
    centered_clipping,
    cge,
    geometric_median,
    krum,
    meamed,
    median,
    multi_krum,
    trimmed_mean,
)

rule = recorded  # after the imports: that of the module `fedjax_drift.robust.rule` sets the same name

__all__ = [
    "Before", "Rule", "Stack", "arc", "bucketing", "centered_clipping", "cge", "geometric_median", "krum", "meamed",
    "median", "multi_krum", "nnm", "rule", "trimmed_mean",
]  # fmt: skip
__dir__ = __all__.copy
