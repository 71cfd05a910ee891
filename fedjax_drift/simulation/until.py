"""Rules that end a run early: `Simulation.run(until=...)` and `fd.sweep(until=...)`.

A rule is a function from the history of a run to a bool. It is called after every evaluation, with the records of all
rounds so far. The run ends with this round if the rule returns True.

    sim.run(state, 1000, until=fd.until.reaches(accuracy=0.98))
    sim.run(state, 1000, until=fd.until.stalls("accuracy", evaluations=10))
    sim.run(state, 1000, until=fd.until.time(3600))
    sim.run(state, 1000, until=lambda history: history[-1]["loss"] < 0.1 or history[-1]["round"] == 500)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np

from fedjax_drift import checks
from fedjax_drift.spec import Amount, AmountOrZero, Count, Fix, Text, checked
from fedjax_drift.storage.checkpoint import score
from fedjax_drift.types import Record

__all__ = ["megabytes", "reaches", "stalls", "time"]
__dir__ = __all__.copy


Until = Callable[[Sequence[Record]], bool]


def reaches(**targets: float) -> Until:
    """A rule that ends a run when all metrics reach their targets in the same evaluation.

    Args:
      targets: names of metrics in the records, and their targets. A metric must be at least its target, or at most its
        target if the name ends in "loss". For example ``reaches(accuracy=0.98)``.

    Raises:
      ValueError: no target is given. The rule raises it if a record has no such metric.
    """
    if not targets:
        checks.refuse("reaches needs at least 1 target", "none", "pass reaches(accuracy=0.98), for example")
    goals = {name: checks.target(name, value, name) for name, value in targets.items()}

    def rule(history: Sequence[Record]) -> bool:
        return all(gain(history[-1], name) >= gain({name: goal}, name) for name, goal in goals.items())

    return rule


@checked
def stalls(
    metric: Annotated[Text, Fix('an entry of the records such as "accuracy"')] = "accuracy",
    evaluations: Count = 10,
    by: AmountOrZero = 0.0,
) -> Until:
    """A rule that ends a run after a number of evaluations without improvement ("patience").

    Use it with data whose test set is held out from the training examples (`FederatedData.with_validation`). Otherwise
    the test set decides when to stop.

    Args:
      metric: the name of a metric in the records. The largest value is best, or the smallest if the name ends in
        "loss".
      evaluations: >= 1. The run ends when none of so many evaluations in a row is better than the best one before.
      by: >= 0. A value counts as better only if it is better by more than this.

    The rule raises ValueError if a record has no such metric.
    """

    def rule(history: Sequence[Record]) -> bool:
        gain(history[-1], metric)
        values = [gain(record, metric) for record in history if metric in record]
        best, since = values[0], 0
        for value in values[1:]:
            best, since = (value, 0) if value > best + by else (best, since + 1)
        return since >= evaluations

    return rule


@checked
def time(seconds: Amount) -> Until:
    """A rule that ends a run when the virtual clock shows this time.

    The simulation needs ``devices=`` or an asynchronous ``clock=``. The rule raises ValueError if a record has no time.
    """

    def rule(history: Sequence[Record]) -> bool:
        if "time" not in history[-1]:
            fix = "simulate with devices=fd.Devices(...), for example"
            checks.refuse("until.time needs records with a time", "none", fix)
        return history[-1]["time"] >= seconds

    return rule


@checked
def megabytes(amount: Amount) -> Until:
    """A rule that ends a run when the clients have sent and received this many megabytes (10^6 bytes).

    It counts the records that it gets: those of this call of `run`, and those that ``checkpoints`` has.
    """

    def rule(history: Sequence[Record]) -> bool:
        return sum(record["uplink_bytes"] + record["downlink_bytes"] for record in history) >= 1e6 * amount

    return rule


def ends(until: Until, history: Sequence[Record]) -> bool:
    """The answer of a rule. Raises ConfigurationError unless it is a bool."""
    answer = until(history)
    if not isinstance(answer, bool | np.bool):
        checks.refuse("until must return True or False", checks.shown(answer))
    return bool(answer)


def has_ended(until: Until, history: Sequence[Record]) -> bool:
    """Whether the rule has returned True after one of the evaluations in a history."""
    evaluated = [i for i, record in enumerate(history, 1) if "loss" in record]
    return any(ends(until, history[:i]) for i in reversed(evaluated))


def gain(record: Record, metric: str) -> float:
    """The value of a metric, with the sign for which larger is better. -inf for NaN."""
    if metric not in record:
        fix = f"they have {checks.listed(sorted(record))}"
        checks.refuse("until must use a metric of the evaluated records", repr(metric), fix)
    if not isinstance(record[metric], int | float):
        checks.refuse("until must use a metric with one number per round", repr(metric))
    value = score([record], metric)
    return -math.inf if value is None else value  # a diverged model is never better
