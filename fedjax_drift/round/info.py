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

Info = dict[str, jax.Array]
"""What a round reports: the second result of `Simulation.round_fn`.

Of each client of the cohort, [K]. With Bernoulli and importance sampling, K here is not the expected number of clients
but a fixed upper bound, which a cohort exceeds with probability of at most 1e-12.

- ``cohort``: int32, the ids of the aggregated clients. -1 marks a client that did not report, a client that got no
  example from `FederatedData.redealt`, and an unused entry.
- ``size``: the number of examples of the client.
- ``weight``: the weight of the client in the mean. 0 for an unused entry.
- ``client_steps``: the number of local steps that the client has done.
- ``loss``: the client's objective (loss plus the terms of the algorithm), averaged over these steps.
- ``finite``: whether the update and the loss of the client are finite.
- ``bad_leaf``: the index of the first leaf of the update that is not finite, or -1.
- ``uplink_bytes``: the bytes that the client has sent, 0 for a client that does not report. A value that does not
  depend on the client is not sent.
- ``selected``: the ids of all selected clients. Only present if clients can fail. With over-selection this array is
  longer than the others.

Scalars:

- ``lr``: the learning rate of the round.
- ``steps``: the sum of ``client_steps``.
- ``executed_steps``: the number of local steps that the devices run. If L > 1 clients are trained side by side on a
  device, it includes the idle steps of clients that wait for a client with more steps.
- ``executed_ratio``: ``executed_steps / steps``.
- ``downlink_bytes``: the bytes that each selected client receives: the variables of the server that its update reads,
  or what the server can compute from them alone if this is less.
- ``available``: the number of available clients. Only present with a rule of availability.
- ``time``: the virtual time after the round, in seconds. Only present with ``devices=`` or asynchronous rounds.

With asynchronous rounds, whose cohort is the K clients that report next:

- ``staleness``: [K], the number of updates of the server since the client started.
- ``start_distance``: [K], ||w_t - w_v||, the distance of the global model from the one with which the client started.
- ``too_stale``: the number of updates that were dropped because of ``max_staleness``.

Then the metrics of the algorithm (FedEve: ``gain``, ...) and of the sources of drift and, with ``measure=``, the
results of `Simulation.measure`.

If no client reports, all weights are 0, and the state does not change, except for ``round``. (With
``fd.aggregation.private`` the server is also updated in such a round.)
"""


def describe(engine: Engine, assigned: Assignment, outcome: dict[str, jax.Array]) -> Info:
    """The values of ``info`` that every algorithm has. `Info` describes them.

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


def with_metrics(engine: Engine, info: dict[str, jax.Array], metrics: Metrics) -> Info:
    """``info`` with additional metrics. Raises ConfigurationError if a name is already used."""
    if clash := (info.keys() | RECORDED) & metrics.keys():
        what = f"{engine.algorithm.name}: the name of a metric must not be used already"
        checks.refuse(what, ", ".join(sorted(clash)), f"rename it, for example to {min(clash)}_of_clients")
    return info | dict(metrics)


def check_names(engine: Engine, info: dict[str, jax.Array], models: Mapping[str, Any]) -> None:
    """Raises ConfigurationError if a score of one of the server's ``models`` would have the name of a metric."""
    scores = [f"{model}_{score}" for model in models for score in ("loss", "accuracy")]
    with_metrics(engine, dict.fromkeys(scores, jnp.zeros(())), info)
