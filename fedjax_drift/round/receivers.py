"""A topology as a source of drift: several servers, of which each has variables of its own.

The clients of an edge server, or the neighbours in a graph, send to the same receiver. Each receiver updates its own
variables with the mean that it gets, as the single server of a star does.

`ServerState.server` is the mean of all receivers. It is evaluated, and it has the structure of the algorithm's server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import tree
from fedjax_drift.recipes import recorded
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.rehearsal import weights
from fedjax_drift.round.sources import Moment, Outcome, Received, Receivers, Source, Start
from fedjax_drift.topology import Topology, neighbours
from fedjax_drift.types import Metrics, PyTree


class Servers(NamedTuple):
    """The state of a topology."""

    each: PyTree  # the variables of the receivers, leaves [R, ...]
    weight: jax.Array  # float [R], of each receiver in the mean; their sum is 1


@recorded
def hierarchy(topology: Topology) -> Source:
    """The source of `topology.groups`."""
    of, R, every = jnp.asarray(topology.groups), topology.receivers, topology.every
    clients = jnp.asarray(np.bincount(topology.groups))  # type: ignore[arg-type]

    def receiver(client: Client) -> jax.Array:
        return of.at[client.id].get(mode="clip")

    def route(client: Client, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        return receiver(client)[None], jnp.ones(1)

    def join(servers: Servers, t: jax.Array) -> PyTree:
        mean = mean_of(servers)
        averages = (t + 1) % every == 0
        return jax.tree.map(lambda a, m: jnp.where(averages, m, a), servers.each, mean)

    def init(moment: Moment) -> Servers:
        of_receiver = jnp.zeros(R).at[of].add(weights(moment, moment.sizes))
        return replicas(moment.server, of_receiver / of_receiver.sum())

    receivers = Receivers(R, receiver, route, mix=lambda each, present, t: each, join=join, clients=clients)
    return source_of(topology, receivers, init)


@recorded
def decentralised(topology: Topology) -> Source:
    """The source of `topology.graph`. A message has the weight W_ij at its receivers."""
    assert topology.weights is not None
    T, N = topology.weights.shape[:2]
    to, weights_to = neighbours(topology.weights)  # of each client: to whom it sends
    senders, weights = neighbours(topology.weights.swapaxes(1, 2))  # of each receiver: who sends to it

    def route(client: Client, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = t % T, jnp.minimum(client.id, N - 1)
        return to[row], weights_to[row].astype(float)

    def mix(each: PyTree, present: jax.Array, t: jax.Array) -> PyTree:
        """x_i <- sum_j W_ij x_j. A receiver keeps the weight of an absent neighbour for its own model."""
        j = senders[t % T]  # [N, d]
        w = jnp.where(present[j], weights[t % T].astype(float), 0)

        def leaf(a: jax.Array) -> jax.Array:
            if not jnp.issubdtype(a.dtype, jnp.inexact):
                return a  # a counter, for example
            column = (-1, *(1,) * (a.ndim - 1))

            def add(k: jax.Array, mixed: jax.Array) -> jax.Array:
                return mixed + w[:, k].astype(a.dtype).reshape(column) * a[j[:, k]]

            kept = (1 - w.sum(1)).astype(a.dtype).reshape(column) * a
            # a neighbour at a time: a[j] would be a copy of d models for each of the N receivers
            return jax.lax.fori_loop(0, j.shape[1], add, kept)

        return jax.tree.map(leaf, each)

    def combine(state: Servers, received: Received, moment: Moment) -> tuple[Received, PyTree]:
        # The weights of a row have the sum 1. So the sum of the messages is their mean, in which an absent neighbour
        # has the message 0, and all have taken part.
        any_answer = (received.weight > 0).astype(received.weight.dtype)
        return received._replace(weight=any_answer, participation=any_answer), state

    def init(moment: Moment) -> Servers:
        return replicas(moment.server, jnp.full(N, 1 / N))

    receivers = Receivers(N, lambda client: jnp.minimum(client.id, N - 1), route, mix, join=None, clients=jnp.ones(N))
    weigh: Callable = lambda weight, client: jnp.ones_like(weight)  # noqa: E731
    return source_of(topology, receivers, init)._replace(combine=combine, weigh=weigh)


def source_of(topology: Topology, receivers: Receivers, init: Callable[[Moment], Servers]) -> Source:
    """What the sources of all topologies have in common."""

    def receive(servers: Servers, start: Start, client: Client, moment: Moment) -> Start:
        r = receivers.of(client)
        server, surveyed = jax.tree.map(lambda a: a[r], (servers.each, start.surveyed))
        return start._replace(server=server, surveyed=surveyed)

    def after(servers: Servers, outcome: Outcome, moment: Moment) -> tuple[Servers, Metrics]:
        return servers, {"consensus_distance": consensus_distance(servers)}

    name = {"kind": "topology", "title": topology.name}
    return Source("topology", init, receive=receive, after=after, receivers=receivers, **name)  # type: ignore[arg-type]


def replicas(server: Any, weight: jax.Array) -> Servers:
    """All receivers start with the same variables. weight: float [R]."""
    each = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(weight), *jnp.shape(a))), server)
    return Servers(jax.tree.map(tree.strip_weak_type, each), weight)


def mean_of(servers: Servers) -> PyTree:
    """The weighted mean of the receivers' variables. A counter is that of the first one."""

    def leaf(a: jax.Array) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return a[0]
        return jnp.tensordot(servers.weight.astype(a.dtype), a, 1)

    return jax.tree.map(leaf, servers.each)


def consensus_distance(servers: Servers) -> jax.Array:
    """float []: the root of the mean over the receivers of ||x_i - x||^2, where x is the mean model."""
    mean = mean_of(servers).params
    squares = jax.vmap(lambda x: tree.dot(tree.subtract(x, mean), tree.subtract(x, mean)))(servers.each.params)
    return jnp.sqrt((servers.weight.astype(squares.dtype) * squares).sum())


def updated(
    receivers: Receivers, servers: Servers, update: Callable[..., Any], received: Received, present: jax.Array, t: Any
) -> Servers:
    """The receivers' variables after a round.

    update: ``update(server, received) -> server`` of one receiver. received: leaves [R, ...]. present: bool [N], the
    clients that are aggregated. t: the round.
    """
    mixed = receivers.mix(servers.each, present, t)
    new = jax.vmap(update)(mixed, received)
    answered = received.weight > 0

    def leaf(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(answered.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    servers = servers._replace(each=jax.tree.map(leaf, new, mixed))
    return servers if receivers.join is None else servers._replace(each=receivers.join(servers, t))
