"""The compiled programs of a simulation, shared by all simulations whose engines differ in hyper-parameters alone.

Programs take the hyper-parameters first: the numbers that `hyper.split` takes out of the engine. So another
learning rate, mu or alpha compiles nothing. The programs of the last `KEPT` forms of an engine are kept, whether or
not their simulations still exist: a function that builds a simulation, runs it and returns compiles once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import drift, engine, hyper, personal
from fedjax_drift.engine import AXIS, Engine
from fedjax_drift.sharding import spans_processes
from fedjax_drift.types import ServerState

KEPT = 64  # forms of an engine
MOST_ROUNDS = 64  # in one program of `run`
CONTINUOUS = ("algorithm", "local", "failures", "aggregation")  # the fields of an engine that hold numbers
SCORING = ("model", "mesh", "decode", "test_size", "row_scores", "set_scores")  # those that an evaluation depends on
Numbers = tuple[Any, ...]


class Programs(NamedTuple):
    """Compiled when they are first called."""

    init: Callable  # (numbers, key, params) -> state
    round: Callable  # (numbers, state, arrays, cohort) -> (state, info)
    donating_round: Callable  # the same; the state is overwritten
    rounds: Callable  # (numbers, state, arrays, n) -> (state, infos), n <= MOST_ROUNDS; the state is overwritten
    measure: Callable  # (numbers, names, state, arrays, cohort) -> measures
    draw: Callable  # (key, t) -> ids
    evaluate: Callable  # (params, test) -> scores
    evaluate_rows: Callable  # (params, test) -> (scores of each row, logits)


def split(how: Engine, constant: bool = False) -> tuple[hyper.Form, tuple[float, ...]]:
    """The form of an engine, for which programs are compiled, and its numbers; constant: none, they are in the form."""
    if constant:
        return hyper.split(how, Engine._fields)
    # The name of an aggregation has its numbers in it.
    rule = how.aggregation._replace(name=how.aggregation.name.partition("(")[0])
    return hyper.split(how._replace(aggregation=rule), [name for name in Engine._fields if name not in CONTINUOUS])


def placement(how: Engine) -> ServerState:
    """Where each part of a state belongs."""
    every = NamedSharding(how.mesh, P())
    clients = NamedSharding(how.mesh, P(AXIS)) if how.sharded else every
    return ServerState(*(every, every, every, clients))  # type: ignore[arg-type]


def programs(form: hyper.Form, one_state: bool) -> Programs:
    """The programs of engines of this form; one_state: `init` makes one client's state, a `Bank` keeps the others."""
    if form.private:
        return _compiled.__wrapped__(form, one_state)
    return _compiled(form, one_state)


@lru_cache(KEPT)
def _compiled(form: hyper.Form, one_state: bool) -> Programs:
    how: Engine = form.value
    # A state always leaves a round placed as it came in, so that the next round finds the program compiled. What the
    # host looks at is whole on every process.
    state, seen = placement(how), NamedSharding(how.mesh, P()) if spans_processes(how.mesh) else None

    def jit(function: Callable, *fixed: Any, change: dict[str, Any] | None = None, **options: Any) -> Callable:
        """``function(engine, *fixed, ...)`` as a program of the numbers; change: fields of the engine."""

        def of_numbers(numbers: Numbers, *arguments: Any) -> Any:
            return function(hyper.join(form, numbers)._replace(**(change or {})), *fixed, *arguments)

        of_numbers.__name__ = function.__name__
        return jax.jit(of_numbers, **options)

    scoring = how._replace(**{name: None for name in Engine._fields if name not in SCORING})  # type: ignore[arg-type]
    evaluate, evaluate_rows = _scoring(hyper.split(scoring, Engine._fields)[0])
    return Programs(
        init=jit(engine.init, change={"bank_rows": 1} if one_state else None, out_shardings=state),
        round=jit(engine.round_fn, out_shardings=(state, seen)),
        donating_round=jit(engine.round_fn, donate_argnums=1, out_shardings=(state, seen)),
        rounds=jit(engine.rounds, MOST_ROUNDS, donate_argnums=1, out_shardings=(state, seen)),
        measure=drift.allowing_nan(jit(drift.measure, static_argnums=1, out_shardings=seen)),
        draw=jax.jit(partial(engine.draw, how)),
        evaluate=evaluate,
        evaluate_rows=evaluate_rows,
    )


@lru_cache(KEPT)
def _scoring(form: hyper.Form) -> tuple[Callable, Callable]:
    """The evaluations, which algorithms on the same data share."""
    how: Engine = form.value
    seen = NamedSharding(how.mesh, P()) if spans_processes(how.mesh) else None

    evaluate, evaluate_rows = partial(engine.evaluate, how), partial(engine.evaluate_rows, how)
    return jax.jit(evaluate, out_shardings=seen), jax.jit(evaluate_rows, out_shardings=seen)


@lru_cache(KEPT)
def fine_tuning(form: hyper.Form, eval_batch_size: int) -> Callable:
    """``(numbers, state, rows, clients, tests) -> scores`` of fine-tuned models, see `personal.fine_tuned`."""

    def fine_tuned(numbers: Numbers, *arguments: Any) -> Any:
        return personal.fine_tuned(hyper.join(form, numbers), eval_batch_size, *arguments)

    mesh = form.value.mesh
    return jax.jit(fine_tuned, out_shardings=NamedSharding(mesh, P()) if spans_processes(mesh) else None)
