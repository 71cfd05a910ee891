"""The dtypes of results, by PyTorch's rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def dtype_of(value: Any) -> Any:
    """The dtype of an array or a number. Those of numbers do not depend on x64 but for the width of integers."""
    if hasattr(value, "dtype"):
        return value.dtype
    if isinstance(value, bool):
        return np.dtype(bool)
    return whole_numbers() if isinstance(value, int) else np.dtype("float32")


def whole_numbers() -> Any:
    """PyTorch's int64. JAX has int32 in its place, unless it runs with x64."""
    return jax.dtypes.canonicalize_dtype("int64")


def _kind(dtype: Any) -> int:
    """0: booleans, 1: integers, 2: floating numbers, 3: complex numbers."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    return next((i + 1 for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), 0)


def is_float(value: Any) -> bool:
    return _kind(dtype_of(value)) >= 2


def result_type(*values: Any) -> Any:
    """Arrays without axes and numbers change a dtype only if they are of a higher kind."""
    groups: list[list[Any]] = [[], [], []]  # arrays with axes, arrays without, numbers
    for value in values:
        groups[int(value.ndim == 0) if hasattr(value, "dtype") else 2].append(dtype_of(value))
    return reduce(_joined, [reduce(jnp.promote_types, group) for group in groups if group])


def _joined(result: Any, lower: Any) -> Any:
    if _kind(lower) <= _kind(result):
        return result
    if _kind(lower) == 3 and _kind(result) == 2:
        return jnp.promote_types(result, "complex64")
    return lower


def promoted(*values: Any) -> list[Array]:
    """Operands with the dtype of the result."""
    dtype = result_type(*values)
    return [jnp.asarray(value, dtype) for value in values]


def floating(x: Any) -> Array:
    """Integers as float32."""
    return jnp.asarray(x, dtype_of(x) if is_float(x) else jnp.float32)


def of_floats(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function whose result is floating for integers, too."""
    return lambda x: function(floating(x))


def whole(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function that leaves integers as they are, such as floor."""
    return lambda x: function(x) if is_float(x) else x


def of_promoted(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function of two operands."""
    return lambda x, y: function(*promoted(x, y))


def of_floats_promoted(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, y: function(*map(floating, promoted(x, y)))


def counted(x: Array, dtype: Any = None) -> Array:
    """What is summed or multiplied: small integers and booleans as integers of full width."""
    return x.astype(dtype or (x.dtype if is_float(x) else whole_numbers()))
