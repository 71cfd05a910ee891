"""One round of federated learning, as one pure function that compiles once.

select    the participation rule selects the ids of the cohort [K]                cohort.py
fail      some clients drop out, some do only a part of their local steps         cohort.py
assign    assigns the cohort to D devices, with G groups of L clients per device  places.py
survey    the mean of a first message of each client, for Mime                    survey.py
          then, in a scan over the groups:
fetch     the client states of a group, [N, ...] -> [L, ...]                      client_states.py
train     the L clients of the group side by side (vmap)                          train.py
store     the new client states, [L, ...] -> [N, ...]                             client_states.py
sum       adds weight * message to a running sum, then one psum over the devices  train.py
combine   the mean of the messages: sum / total weight, or another rule           aggregation.py
update    server_update(server, mean, context)                                    round.py
observe   the participation rule sees the losses of the cohort                    round.py
advance   virtual time goes on, and other clients start (asynchronous rounds)     clock.py
"""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.message import coded_bits, summed
from fedjax_drift.round.clock import advance
from fedjax_drift.round.cohort import NOISE, assign, available, observe
from fedjax_drift.round.engine import Arrays, Client, Engine, Shared, partitionable, replicated
from fedjax_drift.round.evaluate import at_round, evaluate, other_models
from fedjax_drift.round.flight import as_started, mixed
from fedjax_drift.round.info import check_names, describe, of_present, with_metrics
from fedjax_drift.round.observer import Observer
from fedjax_drift.round.places import in_cohort_order
from fedjax_drift.round.survey import survey
from fedjax_drift.round.traffic import exchanged_bytes
from fedjax_drift.round.train import check_finite, client_work, expected_weight, finished, over_clients, scalars
from fedjax_drift.types import Metrics, PyTree, Round, ServerState


def round_fn(
    engine: Engine, state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None, observer: Observer
) -> tuple[ServerState, dict]:
    """One round: ``(state, arrays, cohort) -> (state, info)``. Pure. It is traced once for each length of the cohort.

    Args:
      cohort: client ids [K]; or a `Client` [K], if the host keeps the examples or the client states; or None, if the
        cohort is to be sampled with the key of the state.
      observer: its measures are added to ``info``.
    """
    state, info, measured = observed_round(engine, state, arrays, cohort, observer)
    return state, with_metrics(engine, info, measured)


@partitionable
def observed_round(
    engine: Engine, state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None, observer: Observer
) -> tuple[ServerState, dict, Metrics]:
    """Like `round_fn`. Also returns the measures of ``observer``."""
    algorithm, aggregation = engine.algorithm, engine.aggregation
    N, K, private = engine.num_clients, engine.cohort_size, aggregation.noise_multiplier is not None
    fixed = engine.participation.expected is not None  # whether the divisor of the mean is
    assigned, allowed = assign(engine, state, arrays, cohort), available(engine, state)
    expected = expected_weight(engine, assigned.shared, arrays.sizes, allowed) if fixed else None
    if algorithm.survey is not None:
        surveyed, survey_bits = survey(engine, assigned, state.clients, expected)
        assigned = assigned._replace(shared=assigned.shared._replace(surveyed=surveyed))
    shared = assigned.shared._replace(extra=observer.before(assigned, arrays))

    def train(shared: Shared, client: Client, old: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        """Trains one client. Returns values to be summed over the clients, values of this client, and its new state."""
        start = as_started(engine, shared, client)  # ``shared``, unless it has started in an earlier round
        result, terms, measured = observer.update(start, client, old, client_work(engine, start, client, longest))
        answered, bad_leaf = check_finite(engine, client, result)  # answered: it is aggregated
        if engine.drop_nonfinite:
            result = result._replace(state=tree.select(answered, result.state, old))
        message, bits = mixed(engine, shared, start, summed(result.message)), coded_bits(result.message)
        dtypes = jax.tree.map(lambda m: jnp.zeros(0, m.dtype), message)  # empty: only the dtypes are needed
        message, weight = aggregation.contribute(shared.aggregation, message, result.weight)
        weight = jnp.where(answered, weight, 0)
        factor = weight if client.discount is None else client.discount.astype(weight.dtype) * weight
        message = jax.tree.map(lambda m: jnp.where(answered, factor * m, 0), message)
        added = message, weight, answered.astype(weight.dtype), terms
        of_client = (
            {"weight": weight, "answered": answered, "bad_leaf": bad_leaf, "bits": bits},
            dtypes,
            {**result.metrics},
            measured,
        )
        return added, of_client, result.state

    (total, weight, count, sums), of_clients, clients = over_clients(
        engine, train, shared, assigned.placed, state.clients
    )
    outcome, message_dtypes, metrics, measured = of_clients
    if algorithm.survey is not None:
        outcome["bits"] += survey_bits
    outcome, metrics = replicated(engine, (outcome, metrics))
    chex.assert_rank([weight, count], 0)
    chex.assert_shape([*outcome.values()], assigned.placed.id.shape)  # [D, G, L]
    chex.assert_trees_all_equal_shapes_and_dtypes(clients, state.clients)

    divisor = weight if expected is None else expected.astype(weight.dtype)
    noise_key = jax.random.fold_in(assigned.shared.key, N + NOISE)
    mean, averaged = aggregation.combine(state.aggregation, total, divisor, noise_key, K)
    mean = jax.tree.map(lambda s, m: s.astype(m.dtype), mean, message_dtypes)  # sums have the dtype of the weights
    participation = count / N
    if private or fixed:
        share = jnp.ones(()) if private or allowed is None else allowed.mean()
        participation = (K / N * share).astype(count.dtype)
    context = Round(state.round, shared.lr, participation, N, engine.mean_size, shared.surveyed)
    server = tree.cast_like(
        algorithm.server_update(state.server, mean, context), state.server, f"{algorithm.name}: the updated server"
    )
    # If it is False, the server keeps its variables. A fixed divisor is 0 if no client is available.
    any_answer = private | (divisor > 0)
    server = tree.select(any_answer, server, state.server)
    averaged = tree.cast_like(averaged, state.aggregation, f"the state of the aggregation rule {aggregation.name}")
    averaged = tree.select(any_answer, averaged, state.aggregation)
    scores: dict[str, jax.Array] = {}
    if algorithm.observe is not None and arrays.test is not None:
        scores = evaluate(engine, server.params, at_round(engine, arrays.test, state.round))
        what = f"{algorithm.name}: the server after an evaluation"
        server = tree.select(any_answer, tree.cast_like(algorithm.observe(server, scores), server, what), server)
    if algorithm.finish is not None:
        after = assigned.shared._replace(server=server)
        clients = finished(engine, after, assigned.placed, outcome["answered"], clients)

    of_cohort = partial(in_cohort_order, len(assigned.cohort.id), assigned.order, assigned.empty)
    outcome, metrics = jax.tree.map(of_cohort, (outcome, metrics))  # [K, ...]
    state_of_rule = observe(engine, state, assigned, outcome["answered"], metrics.get("loss"))
    info = describe(engine, assigned, outcome, allowed)
    info |= exchanged_bytes(engine, state.server, assigned.shared.rows, info["cohort"], outcome["bits"])
    info = with_metrics(engine, info, of_present(info["cohort"], metrics))
    info = with_metrics(engine, info, {f"test_{name}": value for name, value in scores.items()})
    if algorithm.report is not None:
        reported = scalars(algorithm, "the result of report", algorithm.report(state.server, mean, context))
        info = with_metrics(engine, info, reported)
    measures = observer.after(assigned._replace(shared=shared), state.clients, sums, measured)
    if aggregation.report is not None:
        info = with_metrics(engine, info, aggregation.report(averaged))
    new = ServerState(state.round + 1, state.key, server, clients, state_of_rule, averaged, state.clock)
    check_names(engine, info, other_models(algorithm, state.server))
    clock, times = advance(engine, state, new, arrays, assigned)
    return new._replace(clock=clock), with_metrics(engine, info, times), measures
