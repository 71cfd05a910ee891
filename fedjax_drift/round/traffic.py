"""What server and clients exchange in a round. The bytes are read from the traced updates of one client.

- Up: the arrays of the messages of both phases, except for those that do not depend on the client; and what codecs send
  (`message`).
- Down: what the client needs of the server. These are the server's variables that its update reads, or what the server
  can compute from its variables alone, whichever is less. FedEve's server sends w_hat = w - server_lr M, not w and M.
  With two phases, also the mean of the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_drift import tree
from fedjax_drift.message import coded_bits, summed, uncoded
from fedjax_drift.round.arrays import Rows
from fedjax_drift.round.engine import Engine, Shared, initial_client, partitionable
from fedjax_drift.round.rehearsal import incomplete_message, phases, results, zero_rows
from fedjax_drift.round.sources import functions_of
from fedjax_drift.types import THREEFRY, Params, PyTree, ServerState

CONSTANT, SERVER, CLIENT = range(3)  # what a value depends on; everything also depends on constants


class Exchanged(NamedTuple):
    """The bytes that a client sends and receives in a round."""

    up: int  # without those of codecs
    down: int  # if no source codes the global model


@partitionable
def exchanged(engine: Engine, server: PyTree) -> Exchanged:
    """What a client sends and receives in a round. server: only the shapes of its variables are used."""
    rows, surveyed = Rows(*engine.federation.row), None
    if engine.algorithm.survey is not None:
        surveyed = jax.eval_shape(lambda *given: summed(results(engine, *given)[0].message), server, rows)
    return traffic(engine, server, rows, surveyed)


def summed_message(engine: Engine, params: Params) -> PyTree:
    """The shapes of what a client adds to the sum over the clients. params: the shapes of the model."""
    given = params, Rows(*engine.federation.row)
    return jax.eval_shape(lambda *given: summed(incomplete_message(engine, *given)), *given)


def exchanged_bytes(engine: Engine, state: ServerState, cohort: jax.Array, bits: jax.Array) -> dict[str, jax.Array]:
    """``uplink_bytes`` [K] of the clients of a round, and ``downlink_bytes`` [] for each of them.

    cohort: int [K], their ids, -1 for a client that does not report. bits: float [K], of the codecs of all phases.
    """
    client = exchanged(engine, state.server)
    up = jnp.where(cohort >= 0, client.up + bits / 8, 0.0)
    return {"uplink_bytes": up, "downlink_bytes": jnp.asarray(received(engine, state, client), float)}


def received(engine: Engine, state: ServerState, client: Exchanged) -> Any:
    """The bytes that a client receives in the round after this state."""
    down: Any = client.down
    for source, bits in functions_of(engine.sources, "down"):
        down = max(down - tree.nbytes(state.params), 0) + bits(source.state_of(state)) / 8
    return down


def sent(engine: Engine, state: ServerState, client: Exchanged) -> Any:
    """The bytes that a client sends in the round after this state. Those of a codec are the bytes of a message of
    zeros."""
    bits = [coded_bits(result.message) for result in results(engine, state.server, zero_rows(engine))]
    return client.up + sum(bits) / 8  # the compiler removes everything else


def traffic(engine: Engine, server: PyTree, rows: Rows, surveyed: PyTree) -> Exchanged:
    """The bytes, from the program of one client. server, rows, surveyed: only shapes are used."""

    def traced(server: PyTree, state: PyTree, rows: Rows, t: jax.Array, surveyed: PyTree) -> tuple:
        key = jax.random.fold_in(jax.random.key(0, impl=THREEFRY), t)
        shared = Shared(server, rows, key, t, jnp.asarray(t, float), surveyed=surveyed)
        of_phases = phases(engine, shared, state, t)
        return [uncoded(result.message) for result in of_phases], of_phases

    state = jax.eval_shape(lambda server: initial_client(engine, server.params), server)
    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(server, state, rows, jnp.int32(0), surveyed)
    program, is_read = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    variables = program.invars[: sum(is_read[: len(jax.tree.leaves(server))])]
    source, needed = _sources(program, variables)
    of_client = [v for v in program.outvars[: len(jax.tree.leaves(shapes[0]))] if _of(source, v) == CLIENT]
    up, read, computed = (tree.nbytes([v.aval for v in each]) for each in (of_client, variables, needed))
    return Exchanged(up, min(read, computed) + tree.nbytes(surveyed))


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
