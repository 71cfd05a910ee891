"""Numbers that are functions of the round: learning rates, and other hyper-parameters of algorithms.

A schedule is a function of the round t, such as those of optax. The round is traced, so a schedule is a part of the
compiled program, and its values are not arguments of the program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.recipes import float_parameters

P = ParamSpec("P")
R = TypeVar("R")


def is_schedule(value: Any) -> bool:
    """Whether a value is a function, and not a number."""
    return callable(value) and not isinstance(value, type | jax.core.Tracer)


def checked(name: str, schedule: Any) -> Any:
    """Returns the schedule. Raises ConfigurationError unless it returns a floating scalar for a round."""
    example = "pass a number, or optax.cosine_decay_schedule(0.1, decay_steps=500), for example"
    try:
        value = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
        shape, dtype = value.shape, value.dtype
    except Exception as error:
        raise ConfigurationError(
            f"{name} must be a number, or a function of the round that returns a number, got one that fails "
            f"({checks.first_line(error)}): {example}"
        ) from error
    if shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigurationError(
            f"{name} must return a floating scalar for every round, got {dtype}{[*shape]}: {example}"
        )
    return schedule


def of_rounds(factory: Callable[P, R], of_a_round: Sequence[str]) -> Callable[P, R]:
    """Decorates a factory of algorithms, so that its numbers may be schedules.

    The functions that know the round are, in round t, those of the algorithm that the factory returns for the values of
    round t. Its other functions are those of round 0.

    Args:
      of_a_round: the names of the functions that know the round, as ``t`` of their third argument.
    """
    signature = inspect.signature(factory)
    floats = float_parameters(signature)

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        if not any(map(is_schedule, (*args, *kwargs.values()))):
            return factory(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        schedules = {n: checked(n, v) for n, v in bound.arguments.items() if n in floats and is_schedule(v)}
        if not schedules:
            return factory(*args, **kwargs)

        def made_of(values: dict[str, Any]) -> Any:
            arguments = inspect.BoundArguments(signature, bound.arguments | values)  # type: ignore[arg-type]
            return factory(*arguments.args, **arguments.kwargs)

        def at_round(function: str) -> Callable:
            def call(*arguments: Any) -> Any:
                now = made_of({name: schedule(arguments[2].t) for name, schedule in schedules.items()})
                return getattr(now, function)(*arguments)

            return call

        first: Any = made_of({name: _first(schedule) for name, schedule in schedules.items()})
        present = [name for name in of_a_round if getattr(first, name) is not None]
        return first._replace(**{name: at_round(name) for name in present})

    return make


def _first(schedule: Callable[[jax.Array], Any]) -> Any:
    """The value of round 0. A warm-up may begin at 0, which many numbers must not be."""
    value = jnp.asarray(schedule(jnp.zeros((), jnp.int32)))
    return value if isinstance(value, jax.core.Tracer) else float(value) or float(jnp.finfo(value.dtype).tiny)
