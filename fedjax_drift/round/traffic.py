"""The bytes that server and clients exchange in a round, read from the traced update of one client.

- Up: the leaves of the message, except for those that do not depend on the client (the zeros of `partly_shared`).
- Down: what the update needs of the server. These are the server's variables that the update reads, or what the server
  can compute from its variables alone, whichever is less. FedEve's server sends w_hat = w - server_lr M, not w and M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_drift import tree
from fedjax_drift.round.engine import Engine, Rows, Shared, initial_client
from fedjax_drift.round.train import some_client, update, with_survey
from fedjax_drift.types import THREEFRY, ClientResult, PyTree

CONSTANT, SERVER, CLIENT = range(3)  # what a value depends on; everything also depends on constants


def exchanged_bytes(engine: Engine, server: PyTree, rows: Rows, info: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """``uplink_bytes`` [K] of the clients of a round, and ``downlink_bytes`` [] for each of them.

    info: of the round. Its ``uplink_bytes`` are those of a codec, if the algorithm has one.
    """
    up, down = traffic(engine, server, rows)
    sent = jnp.where(info["cohort"] >= 0, info.get("uplink_bytes", float(up)), 0.0)
    return {"uplink_bytes": sent, "downlink_bytes": jnp.asarray(down, float)}


def traffic(engine: Engine, server: PyTree, rows: Rows) -> tuple[int, int]:
    """The bytes that a client sends without a codec, and those that it receives.

    server, rows: only their shapes are used.
    """

    def result(server: PyTree, state: PyTree, rows: Rows, t: jax.Array) -> tuple[ClientResult, PyTree]:
        key = jax.random.fold_in(jax.random.key(0, impl=THREEFRY), t)
        shared = Shared(server, rows, key, t, jnp.asarray(t, float))
        client, work = some_client(engine, shared, t)
        work = with_survey(engine.algorithm, server, state, work)
        return update(engine, shared, client, state, work), work.surveyed

    state = jax.eval_shape(lambda server: initial_client(engine, server.params), server)
    closed, shapes = jax.make_jaxpr(result, return_shape=True)(server, state, rows, jnp.int32(0))
    program, is_read = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    variables = program.invars[: sum(is_read[: len(jax.tree.leaves(server))])]
    source, needed = _sources(program, variables)
    message = program.outvars[: len(jax.tree.leaves(shapes[0].message))]  # the first field of a `ClientResult`
    of_client = [v for v in message if _of(source, v) == CLIENT]
    up, read, computed = (tree.nbytes([v.aval for v in each]) for each in (of_client, variables, needed))
    survey = tree.nbytes(shapes[1])  # its message goes up, and the mean comes down
    return up + survey, min(read, computed) + survey


def _sources(program: Jaxpr, variables: list[Var]) -> tuple[dict[Var, int], set[Any]]:
    """What each value of the program depends on, and the values of the server that the client needs."""
    source = dict.fromkeys(program.constvars, CONSTANT) | dict.fromkeys(program.invars, CLIENT)
    source |= dict.fromkeys(variables, SERVER)
    needed: set[Any] = set()
    for equation in program.eqns:
        level = max((_of(source, v) for v in equation.invars), default=CONSTANT)
        source |= dict.fromkeys(equation.outvars, level)
        if level == CLIENT:
            needed |= {v for v in equation.invars if _of(source, v) == SERVER}
    return source, needed | {v for v in program.outvars if _of(source, v) == SERVER}


def _of(source: dict[Var, int], v: Any) -> int:
    return CONSTANT if isinstance(v, Literal) else source[v]
