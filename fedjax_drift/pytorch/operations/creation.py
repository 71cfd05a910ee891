"""New arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift.pytorch.operations.dtypes import dtype_of, result_type, whole_numbers

Array = jax.Array


def full(shape: Sequence[int], value: Any = 0, dtype: Any = None) -> Array:
    return jnp.full(tuple(shape), value, dtype or dtype_of(value))


def zeros(shape: Sequence[int], dtype: Any = None) -> Array:
    return jnp.zeros(tuple(shape), dtype or jnp.float32)


def ones(shape: Sequence[int], dtype: Any = None) -> Array:
    return jnp.ones(tuple(shape), dtype or jnp.float32)


def new(value: float) -> Callable[..., Array]:
    """new_zeros, new_ones."""
    return lambda x, shape, dtype=None: jnp.full(tuple(shape), value, dtype or x.dtype)


def new_full(x: Array, shape: Sequence[int], value: Any, dtype: Any = None) -> Array:
    return jnp.full(tuple(shape), value, dtype or x.dtype)


def full_like(x: Array, value: Any, dtype: Any = None) -> Array:
    return jnp.full(x.shape, value, dtype or x.dtype)


def like(value: float) -> Callable[..., Array]:
    """zeros_like, ones_like."""
    return lambda x, dtype=None: jnp.full(x.shape, value, dtype or x.dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Array:
    start, stop = (0, start) if stop is None else (start, stop)
    return jnp.asarray(np.arange(start, stop, step), dtype or result_type(start, stop, step))


def linspace(start: float, stop: float, steps: int, dtype: Any = None) -> Array:
    return _numbers(np.linspace(start, stop, steps), dtype)


def logspace(start: float, stop: float, steps: int, base: float = 10.0, dtype: Any = None) -> Array:
    return _numbers(np.logspace(start, stop, steps, base=base), dtype)


def _numbers(values: np.ndarray, dtype: Any) -> Array:
    return jnp.asarray(values.astype(dtype or np.float32))


def eye(rows: int, columns: int | None = None, dtype: Any = None) -> Array:
    return jnp.eye(rows, columns, dtype=dtype or jnp.float32)


def one_hot(x: Array, classes: int) -> Array:
    return jax.nn.one_hot(x, classes, dtype=whole_numbers())


def scalar_tensor(value: Any, dtype: Any = None) -> Array:
    return jnp.asarray(value, dtype or jnp.float32)


def window(*weights: float) -> Callable[..., Array]:
    """Sums of cosines. A periodic window lacks the last of its numbers."""

    def made(length: int, periodic: bool = True, dtype: Any = None) -> Array:
        angles = 2 * np.pi * np.arange(length) / max(length - (not periodic), 1)
        values = sum(weight * np.cos(i * angles) for i, weight in enumerate(weights))
        return _numbers(np.ones(1) if length == 1 else np.asarray(values), dtype)

    return made


def triangle(indices: Callable[..., Any]) -> Callable[..., Array]:
    def made(rows: int, columns: int, offset: int = 0, dtype: Any = None) -> Array:
        return jnp.asarray(np.stack(indices(rows, offset, columns)), dtype or whole_numbers())

    return made


ARRAYS: dict[str, Callable[..., Any]] = {
    "arange": arange,
    "blackman_window": window(0.42, -0.5, 0.08),
    "empty": zeros,
    "empty_like": like(0),
    "eye": eye,
    "full": full,
    "hamming_window": window(0.54, -0.46),
    "hann_window": window(0.5, -0.5),
    "linspace": linspace,
    "logspace": logspace,
    "new_empty": new(0),
    "new_full": new_full,
    "new_ones": new(1),
    "new_zeros": new(0),
    "one_hot": one_hot,
    "ones": ones,
    "scalar_tensor": scalar_tensor,
    "tril_indices": triangle(np.tril_indices),
    "triu_indices": triangle(np.triu_indices),
    "zeros": zeros,
}
