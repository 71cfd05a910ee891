"""The values of ``info``, which a round returns besides the new state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.round.cohort import Assignment
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.train import executed_steps
from fedjax_drift.types import Metrics

RECORDED = {"round", "train_loss", "clients", "seconds", "accuracy"}
"""Names of values that `Simulation.run` and evaluations add to records. A metric must have a different name."""


def describe(engine: Engine, assigned: Assignment, outcome: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The values of ``info`` that every algorithm has. The docstring of `Simulation.round_fn` describes them.

    outcome: values of each client of the cohort, [K].
    """
    present = assigned.cohort.id < engine.num_clients
    steps, executed = assigned.placed.steps.sum(), executed_steps(engine, assigned.placed)
    info = {
        "cohort": jnp.where(present, assigned.cohort.id, -1),
        "size": assigned.cohort.size,
        "weight": outcome["weight"],
        "client_steps": assigned.cohort.steps,
        "bad_leaf": jnp.where(present, outcome["bad_leaf"], -1),
        "steps": steps,
        "executed_steps": executed,
        "executed_ratio": executed / jnp.maximum(steps, 1),
        "lr": assigned.shared.lr,
    }
    info["finite"] = info["bad_leaf"] < 0
    return info


def of_present(cohort: jax.Array, metrics: Metrics) -> Metrics:
    """The metrics [K] of the clients, and 0 where the cohort has none, id -1: what is computed there has no meaning."""
    return {name: jnp.where(cohort < 0, jnp.zeros_like(value), value) for name, value in metrics.items()}


def with_metrics(engine: Engine, info: dict[str, jax.Array], metrics: Metrics) -> dict[str, jax.Array]:
    """``info`` with additional metrics. Raises ConfigurationError if a name is already used."""
    if clash := (info.keys() | RECORDED) & metrics.keys():
        what = f"{engine.algorithm.name}: the name of a metric must not be used already"
        checks.refuse(what, ", ".join(sorted(clash)), f"rename it, for example to {min(clash)}_of_clients")
    return info | dict(metrics)


def check_names(engine: Engine, info: dict[str, jax.Array], models: Mapping[str, Any]) -> None:
    """Raises ConfigurationError if a score of one of the server's ``models`` would have the name of a metric."""
    scores = [f"{model}_{score}" for model in models for score in ("loss", "accuracy")]
    with_metrics(engine, dict.fromkeys(scores, jnp.zeros(())), info)
