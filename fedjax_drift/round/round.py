"""One round of federated learning, as one pure function that compiles once.

draw      state.key -> cohort [K]                                              cohort.py
fail      some clients drop out, some do only a part of their steps            cohort.py
gather    client states [N, ...] -> [K, ...]                                   client_states.py
deal      the cohort to devices and groups of L lanes, longest first           cohort.py
train     scan over the groups: L clients side by side (vmap)                  train.py
sum       weight * message added to a running sum, then one psum over devices  train.py
update    server_update(server, sum / total weight, context)                   aggregation.py
scatter   new client states back to [N, ...]                                   client_states.py
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import tree
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.round.client_states import finish, gather, scatter, state_of
from fedjax_drift.round.cohort import Plan, plan, undealt
from fedjax_drift.round.engine import Arrays, Client, Engine, Shared, partitionable, replicated
from fedjax_drift.round.evaluate import evaluate
from fedjax_drift.round.train import check_finite, client_work, executed_steps, over_clients, scalars, update
from fedjax_drift.types import Metrics, Params, PyTree, Round, ServerState

RECORDED = {"round", "train_loss", "clients", "seconds", "accuracy", "client_mean_loss", "client_mean_accuracy"}
"""Names that `Simulation.run` and evaluations put into records, so a metric must not use them."""


@partitionable
def init(engine: Engine, key: jax.Array, params: Params | None) -> ServerState:
    """The state before round 0, from ``params`` or, by default, from the model's own initial parameters."""
    init_key, round_key = jax.random.split(key)
    params = engine.model.init(init_key) if params is None else params
    client = engine.algorithm.init_client(params)
    clients = jax.tree.map(lambda c: jnp.broadcast_to(c, (engine.state_rows, *jnp.shape(c))), client)
    server, clients = jax.tree.map(tree.strip_weak_type, (engine.algorithm.init_server(params), clients))
    if not hasattr(server, "params"):
        raise ConfigurationError(
            f"{engine.algorithm.name}: init_server must return a pytree with an attribute params, got "
            f"{type(server).__name__}: a NamedTuple with the global model, params, first"
        )
    return ServerState(jnp.zeros((), jnp.int32), round_key, server, clients)


@partitionable
def round_fn(
    engine: Engine, state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None
) -> tuple[ServerState, dict]:
    """One round: ``(state, arrays, cohort [K] or None) -> (state, info)``. Pure; traced once for each cohort length.

    cohort: client ids, or `Client`s from a host that keeps the rows or the states. None: drawn from the state's key.
    """
    algorithm, aggregation = engine.algorithm, engine.aggregation
    today = plan(engine, state, arrays.rows, cohort)
    gathered = gather(engine, state.clients, today.dealt.place)  # () unless states are sharded: see `state_of`

    def train(shared: Shared, client: Client, gathered: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree]:
        """One client: what is added to the sum over clients, and what is kept of it."""
        old = state_of(engine, shared, client, gathered)
        result = update(engine, shared, old, client_work(engine, shared, client, longest))
        answered, bad_leaf = check_finite(engine, client, result)
        if engine.drop_nonfinite:
            result = result._replace(state=tree.select(answered, result.state, old))
        message, weight = aggregation.contribute(result.message, result.weight)
        weight = jnp.where(answered, weight, 0)
        message = jax.tree.map(lambda m: jnp.where(answered, weight * m, 0), message)
        return (message, weight, answered.astype(weight.dtype)), (
            result.state,
            {"weight": weight, "answered": answered, "bad_leaf": bad_leaf},
            jax.tree.map(lambda m: jnp.zeros(0, m.dtype), result.message),  # empty: only the dtypes are needed
            result.metrics,
        )

    (total, weight, count), kept = over_clients(engine, train, today.shared, today.dealt, gathered)
    new_states, outcome, message_dtypes, metrics = kept
    outcome, metrics = replicated(engine, (outcome, metrics))

    N, K, private = engine.num_clients, engine.cohort_size, aggregation.noise_multiplier is not None
    mean = aggregation.combine(total, weight, jax.random.fold_in(today.shared.key, N + 2), K)
    mean = jax.tree.map(lambda s, m: s.astype(m.dtype), mean, message_dtypes)  # sums have the dtype of the weights
    participation = jnp.asarray(K / N, count.dtype) if private else count / N
    context = Round(state.round, today.shared.lr, participation, N, engine.mean_size)
    server = tree.cast_like(
        algorithm.server_update(state.server, mean, context), state.server, f"{algorithm.name}: the updated server"
    )
    any_answer = private | (weight > 0)  # without one the server keeps its variables
    server = tree.select(any_answer, server, state.server)
    scores: dict[str, jax.Array] = {}
    if algorithm.observe is not None and arrays.test is not None:
        scores = evaluate(engine, server.params, arrays.test)
        observed = tree.cast_like(
            algorithm.observe(server, scores), server, f"{algorithm.name}: the server after an evaluation"
        )
        server = tree.select(any_answer, observed, server)
    if algorithm.finish is not None:
        new_states = finish(algorithm.finish, server, outcome["answered"], new_states)
    clients = scatter(engine, state.clients, today.dealt.place, new_states)  # absent clients have no place: dropped

    info = describe(engine, today, outcome)
    of_cohort = partial(undealt, len(today.cohort.id), today.order, today.empty)
    info = with_metrics(engine, info, jax.tree.map(of_cohort, metrics))
    info = with_metrics(engine, info, {f"test_{name}": value for name, value in scores.items()})
    if algorithm.report is not None:
        info = with_metrics(engine, info, scalars(algorithm, dict(algorithm.report(state.server, mean, context))))
    return ServerState(state.round + 1, state.key, server, clients), info


def describe(engine: Engine, today: Plan, outcome: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The entries of ``info`` that every algorithm has; `Simulation.round_fn` says what they are."""
    N = engine.num_clients
    of_cohort = partial(undealt, len(today.cohort.id), today.order, today.empty)
    present = today.cohort.id < N
    steps, executed = today.dealt.steps.sum(), executed_steps(engine, today.dealt)
    info = {
        "cohort": jnp.where(present, today.cohort.id, -1),
        "size": today.cohort.size,
        "weight": of_cohort(outcome["weight"]),
        "client_steps": today.cohort.steps,
        "bad_leaf": jnp.where(present, of_cohort(outcome["bad_leaf"]), -1),
        "steps": steps,
        "executed_steps": executed,
        "executed_ratio": executed / jnp.maximum(steps, 1),
        "lr": today.shared.lr,
    }
    info["finite"] = info["bad_leaf"] < 0
    if engine.failures is not None:
        info["asked"] = jnp.where(today.drawn < N, today.drawn, -1)
    return info


def with_metrics(engine: Engine, info: dict[str, jax.Array], metrics: Metrics) -> dict[str, jax.Array]:
    """``info`` with more entries. Raises ConfigurationError for a name that is taken."""
    if clash := (info.keys() | RECORDED) & metrics.keys():
        raise ConfigurationError(
            f"{engine.algorithm.name}: a metric needs a name of its own, got {', '.join(sorted(clash))}: call it "
            f"{min(clash)}_of_clients, say"
        )
    return info | dict(metrics)


def rounds(engine: Engine, most: int, state: ServerState, arrays: Arrays, n: jax.Array) -> tuple[ServerState, dict]:
    """n <= most rounds in one program: the last state, and the info of every round, leaves [most, ...]; the first n
    count."""
    _, info = jax.eval_shape(partial(round_fn, engine), state, arrays, None)
    infos = jax.tree.map(lambda a: jnp.zeros((most, *a.shape), a.dtype), info)

    def one(j: jax.Array, carry: tuple[ServerState, dict]) -> tuple[ServerState, dict]:
        state, infos = carry
        state, info = round_fn(engine, state, arrays, None)
        return state, jax.tree.map(lambda stacked, value: stacked.at[j].set(value), infos, info)

    return lax.fori_loop(0, n, one, (state, infos))
