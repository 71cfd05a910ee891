"""Selects the clients of a round, and assigns them to devices, groups and lanes (places.py)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.round.arrays import Arrays, Client, Rows
from fedjax_drift.round.engine import Engine, Shared, look_up, moment, partitionable, replicated, round_keys
from fedjax_drift.round.places import at_places
from fedjax_drift.round.sources import Cohort, functions_of
from fedjax_drift.types import ServerState


class Assignment(NamedTuple):
    """The clients of a round, and the place at which each client trains.

    K' clients are selected, and K of them remain after failures. K' > K only with over-selection.
    """

    shared: Shared
    drawn: jax.Array  # int32 [K'], the selected ids; N marks an absent client
    selected: Client  # [K'], the selected clients with their examples in this round; absent if a client has none
    cohort: Client  # [K], the clients after failures; a client that does not report is absent
    order: jax.Array  # int32 [D, G, L], for each place the index in ``cohort`` of the client that trains there
    empty: jax.Array  # bool [D, G, L], True for places without a client
    placed: Client  # [D, G, L], the client at each place


def assign(engine: Engine, state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None) -> Assignment:
    """Selects the round's cohort, and assigns it to devices, groups and lanes.

    cohort: the clients that are given to the round, or None. They still may fail.
    """
    if arrays.rows is None:
        reason = "because the host sends the examples in every round"
        what = f"a round of a streamed data set must be called outside jax.jit, jax.vmap and lax.scan, {reason}"
        checks.refuse(what, "a traced one", "use a Python loop, or stream=False")
    _, key = round_keys(state.key, state.round)
    if cohort is not None and not isinstance(cohort, Client):
        cohort = look_up(engine, arrays.rows, cohort.astype(jnp.int32))
    chosen = Cohort(cohort, arrays.rows, engine.num_clients)
    for source, choose in functions_of(engine.sources, "select"):
        chosen = choose(source.state_of(state), chosen, moment(engine, state, arrays, source, key))
    clients, rows, _, drawn, selected = chosen
    # With sharded examples, clients are sorted by the batches of an epoch, because `rows_by_rank` assumes it.
    steps = clients.steps if engine.rows_by_rank is None else engine.local.batches(clients.size)
    order, empty, placed = at_places(engine, clients, steps)
    order, placed = replicated(engine, (order, placed))
    of_clients = [source for source in engine.sources if source.receive or source.send]
    states = {source.name: source.state_of(state) for source in of_clients}
    lr = engine.local.rate(state.round)
    shared = Shared(state.server, rows, key, state.round, lr, sources=states, run_key=state.key)
    return Assignment(shared, drawn, selected, clients, order, empty, placed)


@partitionable
def select(engine: Engine, state: ServerState, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    """The ids int32 [capacity] of a round's clients, and their factors float [capacity], or None without factors.

    Unused entries are N. The examples need not be on the devices.
    """
    _, key = round_keys(state.key, state.round)
    (first, choose), none = functions_of(engine.sources, "select")[0], jnp.zeros_like(arrays.sizes)
    rows = Rows(none, none, none, arrays.sizes) if arrays.rows is None else arrays.rows
    cohort = Cohort(None, rows, engine.num_clients)
    clients = choose(first.state_of(state), cohort, moment(engine, state, arrays, first, key)).clients
    return clients.id, clients.factor
