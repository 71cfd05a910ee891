"""New arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def full(shape: Sequence[int], value: Any = 0, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(tuple(shape), value, dtype)


def zeros(shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jnp.zeros(tuple(shape), dtype or jnp.float32)


def ones(shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jnp.ones(tuple(shape), dtype or jnp.float32)


def new(value: float) -> Callable[..., Array]:
    """new_zeros, new_ones."""
    return lambda x, shape, dtype=None, **_: jnp.full(tuple(shape), value, dtype or x.dtype)


def new_full(x: Array, shape: Sequence[int], value: Any, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(tuple(shape), value, dtype or x.dtype)


def full_like(x: Array, value: Any, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(x.shape, value, dtype or x.dtype)


def arange(start: Any, stop: Any = None, step: Any = None, dtype: Any = None, **_: Any) -> Array:
    return jnp.arange(start, stop, step, dtype=dtype)


def linspace(start: float, stop: float, steps: int, dtype: Any = None, **_: Any) -> Array:
    return jnp.linspace(start, stop, steps, dtype=dtype)


def eye(rows: int, columns: int | None = None, dtype: Any = None, **_: Any) -> Array:
    return jnp.eye(rows, columns, dtype=dtype or jnp.float32)


def one_hot(x: Array, classes: int) -> Array:
    return jax.nn.one_hot(x, classes, dtype=jnp.int32)


ARRAYS: dict[str, Callable[..., Any]] = {
    "arange": arange,
    "empty": zeros,
    "eye": eye,
    "full": full,
    "linspace": linspace,
    "new_empty": new(0),
    "new_full": new_full,
    "new_ones": new(1),
    "new_zeros": new(0),
    "one_hot": one_hot,
    "ones": ones,
    "scalar_tensor": lambda value, dtype=None, **_: jnp.asarray(value, dtype),
    "zeros": zeros,
}
