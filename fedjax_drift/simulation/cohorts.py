"""Cohorts that the caller of `Simulation.round_fn` and `Simulation.run` chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.devices.launch import traced
from fedjax_drift.devices.mesh import put
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.setup import Setup

Cohorts = Sequence[Sequence[int | str]] | np.ndarray | jax.Array | Callable[[int], Any]
"""The cohorts of many rounds. See `Simulation.run`."""


def checked_cohort(setup: Setup, cohort: Any, what: str = "cohort") -> jax.Array | None:
    """The cohort of one round as ids, or None if it is to be drawn. cohort: see `Simulation.round_fn`."""
    if cohort is None:
        return None
    if setup.options.clock.concurrency is not None:
        what += " must be None with asynchronous rounds, whose clients are those that report next"
        checks.refuse(what, checks.shown(cohort), "leave it out")
    if (rule := setup.options.participation).expected is not None:
        reason = "which divides by the expected weight of the clients that it selects itself"
        fix = "leave it out, or use another participation rule"
        checks.refuse(f"{what} must be None with {rule.name}, {reason}", checks.shown(cohort), fix)
    if traced(cohort):
        return cohort
    if isinstance(cohort, Sequence) and any(isinstance(client, str) for client in cohort):
        cohort = [setup.data.id_of(client) if isinstance(client, str) else client for client in cohort]
    ids, capacity = validate.check_cohort(cohort, setup.data.num_clients, what), setup.engine.capacity
    if setup.data.redeal not in (None, "evenly") and len(ids) > capacity:
        fix = "pass a larger cohort_size to Simulation"
        checks.refuse(f"{what} must have at most {capacity} clients with data.redealt(alpha)", len(ids), fix)
    return put(ids, setup.everywhere) if spans_processes(setup.mesh) else ids


def cohorts(setup: Setup, cohort: Cohorts, first: int, last: int) -> Callable[[int], Any]:
    """Returns the function from a round in first..last-1 to its checked cohort."""

    def of_round(t: int, ids: Any) -> Any:
        return checked_cohort(setup, () if ids is None else ids, f"cohort, in round {t},")

    if callable(cohort):
        checks.function("cohort", cohort, "it maps a round to client ids", takes=1)
        return lambda t: of_round(t, cohort(t))
    rows_missing = isinstance(cohort, str | bytes) or getattr(cohort, "ndim", 1) == 0
    if rows_missing or not isinstance(cohort, Sequence | np.ndarray | jax.Array):
        what = "cohort must be an array [rounds, clients] or a function of the round"
        checks.refuse(what, checks.shown(cohort), "pass lambda t: ids, for example")
    if len(cohort) < last:
        fix = f"add rows, or pass rounds={max(0, len(cohort) - first)}"
        checks.refuse(f"cohort must have a row for each of the rounds 0 to {last - 1}", f"{len(cohort)} rows", fix)
    rows = {t: of_round(t, cohort[t]) for t in range(first, last)}  # before anything is compiled
    return rows.__getitem__
