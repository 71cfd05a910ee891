"""The bytes that server and clients exchange in a round, read from the traced updates of one client.

- Up: the arrays of the messages of both phases, except for those that do not depend on the client; and what codecs send
  (`message`).
- Down: what the client needs of the server. These are the server's variables that its update reads, or what the server
  can compute from its variables alone, whichever is less. FedEve's server sends w_hat = w - server_lr M, not w and M.
  With two phases, also the mean of the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_drift import tree
from fedjax_drift.message import coded_bits, uncoded
from fedjax_drift.round.arrays import Rows
from fedjax_drift.round.engine import Engine, Shared, initial_client
from fedjax_drift.round.sources import functions_of
from fedjax_drift.round.train import any_survey, phases
from fedjax_drift.types import THREEFRY, PyTree, ServerState

CONSTANT, SERVER, CLIENT = range(3)  # what a value depends on; everything also depends on constants


def exchanged_bytes(
    engine: Engine, state: ServerState, rows: Rows, cohort: jax.Array, bits: jax.Array
) -> dict[str, jax.Array]:
    """``uplink_bytes`` [K] of the clients of a round, and ``downlink_bytes`` [] for each of them.

    cohort: int [K], their ids, -1 for a client that does not report. bits: float [K], of the codecs of all phases.
    """
    up, arrays = traffic(engine, state.server, rows)
    down = coded_down(engine, state, arrays)
    return {"uplink_bytes": jnp.where(cohort >= 0, up + bits / 8, 0.0), "downlink_bytes": jnp.asarray(down, float)}


def coded_down(engine: Engine, state: ServerState, down: int) -> Any:
    """The bytes that a client receives, if a source of drift codes the global model. down: without it."""
    for source, bits in functions_of(engine.sources, "down"):
        down = max(down - tree.nbytes(state.params), 0) + bits(source.state_of(state)) / 8
    return down


def sent_and_received(engine: Engine, state: ServerState) -> tuple[Any, Any]:
    """The bytes that a client sends and receives in a round. Those of a codec are the bytes of a message of zeros."""
    server = state.server
    up, down = traffic(engine, server, Rows(*engine.federation.row))
    rows = Rows(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in engine.federation.row))
    zero = jnp.zeros((), jnp.int32)
    shared = Shared(server, rows, jax.random.key(0, impl=THREEFRY), zero, jnp.zeros((), float))
    results = phases(engine, shared, initial_client(engine, server.params), zero)
    bits = [coded_bits(result.message) for result in results]
    return up + sum(bits) / 8, coded_down(engine, state, down)  # the compiler removes everything else


def traffic(engine: Engine, server: PyTree, rows: Rows) -> tuple[int, int]:
    """The bytes that a client sends without those of codecs, and those that it receives.

    server, rows: only their shapes are used.
    """

    def traced(server: PyTree, state: PyTree, rows: Rows, t: jax.Array, surveyed: PyTree) -> tuple:
        key = jax.random.fold_in(jax.random.key(0, impl=THREEFRY), t)
        shared = Shared(server, rows, key, t, jnp.asarray(t, float), surveyed=surveyed)
        results = phases(engine, shared, state, t)
        return [uncoded(result.message) for result in results], results

    state = jax.eval_shape(lambda server: initial_client(engine, server.params), server)
    surveyed = jax.eval_shape(partial(any_survey, engine), server, rows)
    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(server, state, rows, jnp.int32(0), surveyed)
    program, is_read = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    variables = program.invars[: sum(is_read[: len(jax.tree.leaves(server))])]
    source, needed = _sources(program, variables)
    of_client = [v for v in program.outvars[: len(jax.tree.leaves(shapes[0]))] if _of(source, v) == CLIENT]
    up, read, computed = (tree.nbytes([v.aval for v in each]) for each in (of_client, variables, needed))
    return up, min(read, computed) + tree.nbytes(surveyed)


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
