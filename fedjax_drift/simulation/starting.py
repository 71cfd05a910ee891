"""The states from which a simulation starts: new ones, and those whose client states are in a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedjax_drift import checks, tree
from fedjax_drift.round.initial import keys_of
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.description import identity
from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.placement import moved
from fedjax_drift.storage.client_store import ClientStore
from fedjax_drift.storage.specification import Specification
from fedjax_drift.types import Params, ServerState


def specification(executor: Executor, known: dict[str, Any] | None = None) -> Specification:
    """See `Simulation.specification`. known: the identity, if it is known."""
    setup = executor.setup
    if known is None:
        known = identity(setup, executor.computation())
    return Specification(
        mesh=setup.mesh,
        num_clients=setup.data.num_clients,
        state=setup.state,
        shardings=setup.shardings,
        client_store=setup.client_store,
        identity=known,
        key_of_state=lambda key: keys_of(validate.check_key(key))[1],
        admit=setup.admit,
        reopen=lambda *given: reopen(executor, lambda: specification(executor, known), *given),
    )


def start(
    executor: Executor, key: jax.Array, params: Params | None, described: Callable[[], Specification]
) -> ServerState:
    """See `Simulation.init`. described: returns the specification, for client states that are on the host."""
    setup, key = executor.setup, validate.check_key(key)
    validate.check_x64(setup.x64)
    if params is not None:
        validate.check_params(params, setup.state.params)
    key, params = moved((key, params), setup.everywhere)
    state = executor.launch("init", key, params, setup.arrays.sizes)
    if not setup.states_on_host:
        return state
    setup.refuse_traced("key", state)
    folder = setup.client_store if setup.in_files else None
    identity_of_store = described().store_identity(state)
    store = ClientStore.create(_of_one(state), setup.data.num_clients, folder, identity_of_store)
    return state._replace(clients=store)


def reopen(
    executor: Executor,
    described: Callable[[], Specification],
    state: ServerState,
    at: int | None = None,
    strict: bool = True,
) -> ServerState:
    """See `Simulation.reopen`. described: see `start`. at: the round."""
    setup = executor.setup
    folder = setup.client_store
    if not setup.in_files:
        fix = "create the simulation with bank=path"
        checks.refuse("bank must be a folder for reopen", f"bank={folder!r}", fix)
    validate.check_state(state)
    setup.check_rules(state)
    what = "this state is of another algorithm, model or federation"
    tree.check_layout(state._replace(clients=()), setup.state._replace(clients=()), what)
    key, params = moved((state.key, state.params), setup.everywhere)
    first = executor.launch("init", key, params, setup.arrays.sizes)
    identity_of_store = described().store_identity(state)
    store = ClientStore.open(folder, _of_one(first), setup.data.num_clients, identity_of_store, at, strict)
    return setup.admit(state._replace(clients=store))


def _of_one(state: ServerState) -> Any:
    """The initial state of a client, on the host."""
    return jax.tree.map(lambda leaf: leaf[0], jax.device_get(state.clients))
