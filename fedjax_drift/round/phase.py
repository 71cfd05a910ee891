"""A phase of a round: the clients work, and the server receives the mean of their messages.

A round has one phase, in which the clients train. With `Algorithm.survey` it has another one before it, in which they
send a first message and keep their states.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.message import coded_bits, summed
from fedjax_drift.round.arrays import Arrays, Client
from fedjax_drift.round.cohort import Assignment
from fedjax_drift.round.engine import Engine, Shared, client_moment, moment, replicated
from fedjax_drift.round.observer import Task
from fedjax_drift.round.sources import Messages, Received, Source, functions_of
from fedjax_drift.round.train import check_finite, client_work, over_clients, start_of, started, update
from fedjax_drift.types import ClientResult, PyTree, ServerState, Work


class Phase(NamedTuple):
    """The result of a phase."""

    received: Received  # its total is the mean of the messages
    sources: dict[str, PyTree]  # the new states of the sources
    clients: PyTree  # `ServerState.clients` after the phase
    outcome: dict[str, jax.Array]  # values of each client, [D, G, L]
    metrics: dict[str, jax.Array]  # the metrics of each client, [D, G, L]
    sums: PyTree  # the sums of the terms of an observer over the clients
    measured: PyTree  # the values of an observer of each client, [D, G, L, ...]


def survey(engine: Engine, state: ServerState, arrays: Arrays, assigned: Assignment) -> Phase:
    """The first phase of the round."""

    def ask(shared: Shared, client: Client, old: PyTree, work: Work) -> tuple[ClientResult, PyTree, PyTree]:
        return update(engine, shared, client, old, work, "survey")._replace(state=()), (), ()

    return phase(engine, state, arrays, assigned, ask, survey=True)


def phase(
    engine: Engine, state: ServerState, arrays: Arrays, assigned: Assignment, task: Task, survey: bool = False
) -> Phase:
    """Runs a phase. task: what each client does, as `Observer.train`. survey: whether it is the first of two."""
    sources, shared = engine.sources, assigned.shared
    *inner, rule = [source for source in sources if source.send is not None]
    joint = functions_of(sources, "together")

    def one(shared: Shared, client: Client, old: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        """One client. Returns values to be summed over the clients, values of this client, and its new state."""
        start = started(engine, shared, client, survey)
        result, terms, measured = task(start, client, old, client_work(engine, start, client, longest))
        answered, bad_leaf = check_finite(engine, client, result)  # answered: it is aggregated
        if engine.drop_nonfinite and not survey:
            result = result._replace(state=tree.select(answered, result.state, old))
        message, weight = summed(result.message), result.weight
        for source in inner:
            message, weight = sent(source, shared, client, start, message, weight)
        dtypes = jax.tree.map(lambda m: jnp.zeros(0, m.dtype), message)  # empty: only the dtypes are needed
        contribution, weight = sent(rule, shared, client, start, message, weight)
        weight = jnp.where(answered, weight, 0)
        of_client = {"weight": weight, "answered": answered, "bad_leaf": bad_leaf, "bits": coded_bits(result.message)}
        factor = weight
        if joint:  # `added_up` computes the contribution, and multiplies by the weight, after `Source.together`
            factor, contribution = jnp.ones_like(weight), message
        factor = factor if client.discount is None else client.discount.astype(weight.dtype) * factor
        contribution = jax.tree.map(lambda m: jnp.where(answered, factor * m, 0), contribution)
        added = (() if joint else contribution, weight, answered.astype(weight.dtype)), terms
        each = contribution if joint else ()
        return added, (of_client, dtypes, {**result.metrics}, measured, each), result.state

    def sent(
        source: Source, shared: Shared, client: Client, start: Shared, message: PyTree, weight: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """What a source makes of the message and the weight of one client."""
        assert source.send is not None
        at = client_moment(engine, shared, source, client, start_of(start), survey)
        result = source.send(shared.sources[source.name], message, weight, client, at)
        if source is not rule:
            what = f"send of {source!r} must keep the structure and the shapes of a message"
            tree.check_layout(result[0], message, what, dtypes=False)
        return result

    def added_up(each: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array, dict[str, PyTree]]:
        """The sums of the messages [D, G, L, ...] and of the weights, after the sources have seen all of them; and
        the new states of these sources."""
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), (each, weights, assigned.placed))
        messages, states = Messages(*replicated(engine, flat)), {}
        for source, see in joint:
            at = moment(engine, state, arrays, source, shared.key, survey)
            messages, states[source.name] = see(source.state_of(state), messages, at)

        def one(message: PyTree, weight: jax.Array, client: Client) -> PyTree:
            message, _ = sent(rule, shared, client, shared, message, weight)
            return jax.tree.map(lambda m: jnp.where(weight > 0, weight * m, 0), message)

        total = jax.tree.map(lambda a: a.sum(0), jax.vmap(one)(*messages))
        return total, messages.weight.sum(), states

    receivers = engine.receivers
    ((total, weight, count), sums), of_clients, clients = over_clients(
        engine, one, shared, assigned.placed, state.clients, receivers
    )
    outcome, dtypes, metrics, measured, each = of_clients
    seen: dict[str, PyTree] = {}
    if joint:
        total, weight, seen = added_up(each, outcome["weight"])
    chex.assert_rank([weight, count], 0 if receivers is None else 1)
    chex.assert_shape([*outcome.values()], assigned.placed.id.shape)  # [D, G, L]
    if receivers is None:
        received = Received(total, weight, count / engine.num_clients)
        received, states = combined(engine, state, arrays, received, shared.key, survey, seen)
    else:  # no source that combines has a state

        def of_receiver(received: Received, r: jax.Array) -> Received:
            return combined(engine, state, arrays, received, jax.random.fold_in(shared.key, r), survey)[0]

        received = Received(total, weight, count / receivers.clients.astype(count.dtype))
        received, states = jax.vmap(of_receiver)(received, jnp.arange(receivers.number)), {}
    mean = jax.tree.map(lambda s, m: s.astype(m.dtype), received.total, dtypes)  # sums have the dtype of the weights
    return Phase(received._replace(total=mean), states, clients, outcome, metrics, sums, measured)


def combined(
    engine: Engine,
    state: ServerState,
    arrays: Arrays,
    received: Received,
    key: jax.Array,
    survey: bool,
    seen: Mapping[str, PyTree] = MappingProxyType({}),
) -> tuple[Received, dict[str, PyTree]]:
    """What a server makes of the sum of the messages, and the new states of the sources.

    key: see `engine.moment`. seen: the states of the sources after `Source.together`.
    """
    *inner, (rule, average) = functions_of(engine.sources, "combine")
    states = {}
    for source, combine in [*reversed(inner), (rule, average)]:
        if survey and source is rule:  # the mean of an empty cohort is 0
            received = received._replace(weight=jnp.where(received.weight > 0, received.weight, 1))
        at, old = moment(engine, state, arrays, source, key, survey), source.state_of(state)
        received, new = combine(seen.get(source.name, old), received, at)
        states[source.name] = source.kept(new, old)
    of_engine = {source.name: source for source in engine.sources}
    for name in seen.keys() - states.keys():
        states[name] = of_engine[name].kept(seen[name], of_engine[name].state_of(state))
    return received, states
