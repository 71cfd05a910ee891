"""The first phase of a round: the mean of one message of each client, before the clients train (`Algorithm.survey`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift.message import coded_bits, summed
from fedjax_drift.round.cohort import NOISE, Assignment
from fedjax_drift.round.engine import Client, Engine, Shared
from fedjax_drift.round.train import check_finite, client_work, over_clients, update
from fedjax_drift.types import PyTree

SURVEY = 2**32 - 1  # fold_in(noise key, SURVEY) is the key of the aggregation rule in this phase


def survey(
    engine: Engine, assigned: Assignment, states: PyTree, expected: jax.Array | None
) -> tuple[PyTree, jax.Array]:
    """The mean of the messages of the first phase, and the bits of codecs that each client sends, float [D, G, L].

    The clients, their weights and the aggregation rule are those of the second phase. If no client reports, the mean
    is 0.

    states: `ServerState.clients`. expected: the divisor of the mean, for a participation rule that fixes it.
    """
    shared, rule = assigned.shared, engine.aggregation

    def one(shared: Shared, client: Client, old: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        work = client_work(engine, shared, client, longest)
        result = update(engine, shared, client, old, work, "survey")
        reports, _ = check_finite(engine, client, result)
        message = summed(result.message)
        dtypes = jax.tree.map(lambda m: jnp.zeros(0, m.dtype), message)
        message, weight = rule.contribute(shared.aggregation, message, result.weight)
        weight = jnp.where(reports, weight, 0)
        added = jax.tree.map(lambda m: jnp.where(reports, weight * m, 0), message), weight
        return added, (dtypes, coded_bits(result.message)), ()

    (total, weight), (dtypes, bits), _ = over_clients(engine, one, shared, assigned.placed, states)
    divisor = weight if expected is None else expected.astype(weight.dtype)
    key = jax.random.fold_in(jax.random.fold_in(shared.key, engine.num_clients + NOISE), SURVEY)
    mean, _ = rule.combine(shared.aggregation, total, jnp.where(divisor > 0, divisor, 1), key, engine.cohort_size)
    return jax.tree.map(lambda mean, m: mean.astype(m.dtype), mean, dtypes), bits
