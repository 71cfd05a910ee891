"""Participation: which clients take part in a round. A rule is a value that every algorithm can be combined with.

    sim = fd.Simulation(model, data, algorithm, cohort_size=100, participation=fd.participation.cyclic(groups=4))

Rules that select a cohort: `uniform` (the default), `bernoulli`, `by_size`, `importance`, `power_of_choice`,
`schedule`. Rules of availability: `cyclic`, `diurnal`, `markov`, `trace`. Another rule, ``base=``, selects from the
clients that are available.
"""

from fedjax_drift.participation.availability import cyclic, diurnal, markov, trace
from fedjax_drift.participation.cohorts import bernoulli, by_size, importance, power_of_choice, schedule, uniform
from fedjax_drift.participation.rule import Clients, Participation
from fedjax_drift.recipes import recorded as rule

__all__ = [
    "Clients", "Participation", "bernoulli", "by_size", "cyclic", "diurnal", "importance", "markov",
    "power_of_choice", "rule", "schedule", "trace", "uniform",
]  # fmt: skip
__dir__ = __all__.copy
