"""One client outside of a round. The shapes of what clients send, their bytes and their weights follow from it.

It is client 0 in its initial state, as if it had a given number of examples. Only shapes, and numbers that depend on
the number of examples alone, are used. The compiler removes everything else.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.message import summed
from fedjax_drift.round.arrays import Client, Rows
from fedjax_drift.round.engine import Engine, Shared, initial_client, initial_server, partitionable
from fedjax_drift.round.sources import Moment
from fedjax_drift.round.train import client_work, unchecked, update
from fedjax_drift.types import THREEFRY, ClientResult, Params, PyTree


def phases(
    engine: Engine, shared: Shared, old: PyTree, size: jax.Array, step: Callable[..., ClientResult] = update
) -> list[ClientResult]:
    """The results of the client in the phases of a round.

    old: its state. size: int32 [], its number of examples. step: `update`, or without its checks `unchecked`.
    """
    zero = jnp.zeros((), jnp.int32)
    client = Client(zero, size, zero, engine.local.num_steps(size), zero)
    work, surveys = client_work(engine._replace(lanes=1), shared, client, size), []
    if engine.algorithm.survey is not None:
        surveys = [step(engine, shared, client, old, work, "survey")]
        if work.surveyed is None:
            work = work._replace(surveyed=summed(surveys[0].message))
    return [*surveys, step(engine, shared, client, old, work)]


def shared_by(server: PyTree, rows: Rows) -> Shared:
    """What clients share in round 0, with a learning rate of 0."""
    zero = jnp.zeros((), jnp.int32)
    return Shared(server, rows, jax.random.key(0, impl=THREEFRY), zero, jnp.zeros((), float))


def zero_rows(engine: Engine) -> Rows:
    """One example of zeros."""
    return Rows(*tree.zeros_like(engine.federation.row))


@partitionable
def results(engine: Engine, server: PyTree, rows: Rows) -> list[ClientResult]:
    """`phases` of a client without examples."""
    return phases(engine, shared_by(server, rows), initial_client(engine, server.params), jnp.zeros((), jnp.int32))


@partitionable
def incomplete_message(engine: Engine, params: Params, rows: Rows) -> PyTree:
    """The message of a client whose state `Algorithm.complete` has not completed."""
    shared, client = shared_by(initial_server(engine, params), rows), engine.algorithm.init_client(params)
    return phases(engine, shared, client, jnp.zeros((), jnp.int32), unchecked)[-1].message


def weights(moment: Moment, sizes: jax.Array) -> jax.Array:
    """float [C]: the weights that the algorithm gives to clients with these numbers of examples, int32 [C]."""
    engine: Engine = moment.engine
    shared = shared_by(moment.server, zero_rows(engine))._replace(t=moment.t, lr=engine.local.rate(moment.t))
    old = initial_client(engine, moment.server.params)
    return jax.vmap(lambda size: phases(engine, shared, old, size)[-1].weight)(sizes)
