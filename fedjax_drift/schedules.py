"""Numbers that are functions of the round: learning rates, and other hyper-parameters of algorithms.

A schedule is a function of the round t, such as those of optax. The round is traced, so a schedule is a part of the
compiled program, and its values are not arguments of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift import checks, spec


def is_schedule(value: Any) -> bool:
    """Whether a value is a function, and not a number."""
    return callable(value) and not isinstance(value, type | jax.core.Tracer)


def checked(name: str, schedule: Any) -> Any:
    """Returns the schedule. Raises ConfigurationError unless it returns a floating scalar for a round."""
    example = "pass a number, or optax.cosine_decay_schedule(0.1, decay_steps=500), for example"
    what = f"{name} must be a number, or a function of the round that returns a number"
    value = checks.shapes_of(what, schedule, jax.ShapeDtypeStruct((), jnp.int32), fix=example)
    if not isinstance(value, jax.ShapeDtypeStruct):
        checks.refuse(what, f"one that returns {checks.shown(value)}", example)
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        got = f"{value.dtype}{[*value.shape]}"
        checks.refuse(f"{name} must return a floating scalar for every round", got, example)
    return schedule


def _rate(name: str, value: Any, fix: str) -> Any:
    return checked(name, value) if is_schedule(value) else spec.POSITIVE.check(name, value, fix)


POSITIVE = replace(spec.POSITIVE, check=_rate)  # a number > 0, or a schedule


def made(declared: spec.Declared, given: dict[str, Any], of_a_round: Sequence[str]) -> Any:
    """The algorithm that a factory makes of these arguments, whose numbers may be schedules.

    The functions that know the round are, in round t, those of the algorithm that the factory makes of the values of
    round t. Its other functions are those of round 0.

    Args:
      declared: the arguments of the factory.
      given: their values.
      of_a_round: the names of the functions that know the round, as ``t`` of their third argument.
    """
    if not any(map(is_schedule, given.values())):
        return declared.call(given)
    schedules = {n: checked(n, v) for n, v in given.items() if n in declared.numbers and is_schedule(v)}
    if not schedules:
        return declared.call(given)

    def at_round(function: str) -> Callable:
        def call(*arguments: Any) -> Any:
            now = {name: schedule(arguments[2].t) for name, schedule in schedules.items()}
            return getattr(declared.call(given | now), function)(*arguments)

        return call

    def before(schedule: Callable[[jax.Array], Any]) -> Any:
        value = jnp.asarray(schedule(jnp.zeros((), jnp.int32)))
        # a warm-up may begin at 0, which many numbers must not be
        return value if isinstance(value, jax.core.Tracer) else float(value) or float(jnp.finfo(value.dtype).tiny)

    first = declared.call(given | {name: before(schedule) for name, schedule in schedules.items()})
    present = [name for name in of_a_round if getattr(first, name) is not None]
    return first._replace(**{name: at_round(name) for name in present})
