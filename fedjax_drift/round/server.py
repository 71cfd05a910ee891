"""The update of the server with the mean of the messages, or of each receiver of a topology with its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.round.cohort import Assignment
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.phase import Phase
from fedjax_drift.round.receivers import mean_of, updated
from fedjax_drift.round.sources import Received
from fedjax_drift.round.train import scalars
from fedjax_drift.types import Metrics, PyTree, Round, ServerState


class Updated(NamedTuple):
    """The server after a round."""

    server: Any  # its variables; with a topology the mean of those of its receivers
    sources: dict[str, PyTree]  # the states of the sources of drift
    answered: jax.Array  # bool [], whether a server has received something. Otherwise nothing has changed
    reported: Metrics  # what `Algorithm.report` returns; with a topology the mean over its receivers


def update_server(engine: Engine, state: ServerState, assigned: Assignment, trained: Phase) -> Updated:
    """Updates the server, or each receiver of a topology. trained: the phase in which the clients have trained."""
    algorithm, receivers, shared = engine.algorithm, engine.receivers, assigned.shared

    def context(received: Received) -> Round:
        share, N, mean_size = received.participation, received.clients, engine.federation.mean_size
        return Round(state.round, shared.lr, share, N, mean_size, received.surveyed, engine.model)

    def update(server: Any, received: Received) -> Any:
        try:
            new = algorithm.server_update(server, received.total, context(received))
        except (TypeError, ValueError) as error:  # often from jax.tree.map of trees with different structures
            mean = jax.tree.map(lambda a: f"{a.dtype}{[*a.shape]}", received.total)
            error.add_note(f"server_update of {algorithm.name} received this mean of the messages: {mean!s:.500}")
            raise
        return tree.cast_like(new, server, f"{algorithm.name}: the updated server")

    def report(server: Any, received: Received) -> Metrics:
        if algorithm.report is None:
            return {}
        metrics = algorithm.report(server, received.total, context(received))
        return scalars(algorithm, "the result of report", metrics)

    N: Any = engine.num_clients if receivers is None else receivers.clients
    received = trained.received._replace(surveyed=shared.surveyed, clients=N)
    if receivers is None:
        answered = received.weight > 0
        server = tree.select(answered, update(state.server, received), state.server)
        kept = {name: state.sources[name] for name in trained.sources if name in state.sources}
        sources = state.sources | tree.select(answered, {name: trained.sources[name] for name in kept}, kept)
        return Updated(server, sources, answered, report(state.server, received))
    present = jnp.zeros(engine.num_clients, bool).at[assigned.placed.id].set(trained.outcome["answered"], mode="drop")
    old = state.sources["topology"]
    servers = updated(receivers, old, update, received, present, state.round)
    reported = {name: value.mean() for name, value in jax.vmap(report)(old.each, received).items()}
    return Updated(mean_of(servers), state.sources | {"topology": servers}, (received.weight > 0).any(), reported)
