"""The values of ``info``, which a round returns besides the new state."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from fedjax_drift.errors import ConfigurationError
from fedjax_drift.round.cohort import Plan, undealt
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.evaluate import OTHER_MODELS
from fedjax_drift.round.train import executed_steps
from fedjax_drift.types import Metrics

RECORDED = {"round", "train_loss", "clients", "seconds", "accuracy"} | {
    f"{model}_{score}" for model in OTHER_MODELS for score in ("loss", "accuracy")
}
"""Names of values that `Simulation.run` and evaluations add to records. A metric must have a different name."""


def describe(engine: Engine, planned: Plan, outcome: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The values of ``info`` that every algorithm has. The docstring of `Simulation.round_fn` describes them."""
    N = engine.num_clients
    of_cohort = partial(undealt, len(planned.cohort.id), planned.order, planned.empty)
    present = planned.cohort.id < N
    steps, executed = planned.dealt.steps.sum(), executed_steps(engine, planned.dealt)
    info = {
        "cohort": jnp.where(present, planned.cohort.id, -1),
        "size": planned.cohort.size,
        "weight": of_cohort(outcome["weight"]),
        "client_steps": planned.cohort.steps,
        "bad_leaf": jnp.where(present, of_cohort(outcome["bad_leaf"]), -1),
        "steps": steps,
        "executed_steps": executed,
        "executed_ratio": executed / jnp.maximum(steps, 1),
        "lr": planned.shared.lr,
    }
    info["finite"] = info["bad_leaf"] < 0
    if engine.failures is not None:
        info["selected"] = jnp.where(planned.drawn < N, planned.drawn, -1)
    return info


def with_metrics(engine: Engine, info: dict[str, jax.Array], metrics: Metrics) -> dict[str, jax.Array]:
    """``info`` with additional metrics. Raises ConfigurationError if a name is already used."""
    if clash := (info.keys() | RECORDED) & metrics.keys():
        raise ConfigurationError(
            f"{engine.algorithm.name}: the name of a metric must not be used already, got {', '.join(sorted(clash))}: "
            f"rename it, for example to {min(clash)}_of_clients"
        )
    return info | dict(metrics)
