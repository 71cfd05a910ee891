"""One round of federated learning, as one pure function that compiles once.

assign    the sources of drift select the cohort [K], which is assigned to D devices, with G groups of L clients
                                                                                  sources.py, cohort.py, places.py
survey    the mean of a first message of each client, for Mime                    phase.py
phase     in a scan over the groups (train.over_clients):                         phase.py, train.py
  fetch     the client states of a group, [N, ...] -> [L, ...]                    client_states.py
  receive   the sources of drift see what a client starts with                    train.py, sources.py
  train     the L clients of the group side by side (vmap): client_update         train.py, observer.py
  check     which updates are finite; the sources of drift weigh them             train.py
  send      the sources of drift see each message                                 sources.py
  store     the new client states, [L, ...] -> [N, ...]                           client_states.py
  sum       adds weight * message to a running sum, then one psum over the devices
combine   the mean of the messages: sum / total weight, or another rule           phase.py, sources.py
update    server_update(server, mean, context)                                    server.py
after     the sources of drift see the new state                                  sources.py
"""

from __future__ import annotations

from functools import partial

import jax

from fedjax_drift import tree
from fedjax_drift.round.arrays import Arrays, Client
from fedjax_drift.round.cohort import assign
from fedjax_drift.round.engine import Engine, moment, partitionable, replicated
from fedjax_drift.round.evaluate import at_round, evaluate, other_models
from fedjax_drift.round.info import check_names, describe, of_present, with_metrics
from fedjax_drift.round.observer import Observer
from fedjax_drift.round.phase import phase, survey
from fedjax_drift.round.places import in_cohort_order
from fedjax_drift.round.server import update_server
from fedjax_drift.round.sources import Outcome, functions_of
from fedjax_drift.round.traffic import exchanged_bytes
from fedjax_drift.round.train import finished
from fedjax_drift.types import Metrics, ServerState


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
    algorithm = engine.algorithm
    assigned = assign(engine, state, arrays, cohort)
    first = survey(engine, state, arrays, assigned) if algorithm.survey is not None else None
    if first is not None:
        assigned = assigned._replace(shared=assigned.shared._replace(surveyed=first.received.total))
    shared = assigned.shared._replace(extra=observer.before(assigned, arrays))
    trained = phase(engine, state, arrays, assigned._replace(shared=shared), observer.train)
    outcome = trained.outcome
    if first is not None:
        outcome["bits"] += first.outcome["bits"]
    outcome, metrics = replicated(engine, (outcome, trained.metrics))

    updated = update_server(engine, state, assigned, trained._replace(outcome=outcome))
    server, sources, any_answer = updated.server, updated.sources, updated.answered
    scores: dict[str, jax.Array] = {}
    if algorithm.observe is not None and arrays.test is not None:
        scores = evaluate(engine, server.params, at_round(engine, arrays.test, state.round))
        what = f"{algorithm.name}: the server after an evaluation"
        server = tree.select(any_answer, tree.cast_like(algorithm.observe(server, scores), server, what), server)
    clients = trained.clients
    if algorithm.finish is not None:
        after = assigned.shared._replace(server=server, sources=sources)
        clients = finished(engine, after, assigned.placed, outcome["answered"], clients)
    new = ServerState(state.round + 1, state.key, server, clients, sources)

    of_cohort = partial(in_cohort_order, len(assigned.cohort.id), assigned.order, assigned.empty)
    outcome, metrics = jax.tree.map(of_cohort, (outcome, metrics))  # [K, ...]
    info = describe(engine, assigned, outcome)
    info |= exchanged_bytes(engine, state, info["cohort"], outcome["bits"])
    info = with_metrics(engine, info, of_present(info["cohort"], metrics))
    info = with_metrics(engine, info, {f"test_{name}": value for name, value in scores.items()})
    info = with_metrics(engine, info, updated.reported)
    seen_by = assigned._replace(shared=shared)
    measures = observer.after(seen_by, state.clients, trained.sums, trained.measured, server.params)
    check_names(engine, info, other_models(algorithm, state.server))
    for source, finish in functions_of(engine.sources, "after"):
        seen = Outcome(assigned.cohort, outcome["answered"], metrics.get("loss"), assigned.drawn, new)
        changed, values = finish(source.state_of(new), seen, moment(engine, state, arrays, source, shared.key))
        new = new.with_source(source.name, source.kept(changed, source.state_of(new)))
        info = with_metrics(engine, info, values)
    return new, info, measures
