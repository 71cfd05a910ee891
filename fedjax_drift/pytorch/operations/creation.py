"""New arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift.pytorch.operations.dtypes import dtype_of, result_type

Array = jax.Array


def full(shape: Sequence[int], value: Any, dtype: Any = None) -> Array:
    return jnp.full(tuple(shape), value, dtype or dtype_of(value))


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Array:
    start, stop = (0, start) if stop is None else (start, stop)
    return jnp.asarray(np.arange(start, stop, step), dtype or result_type(start, stop, step))


ARRAYS: dict[str, Callable[..., Any]] = {
    "arange": arange,
    "empty": lambda shape, dtype=None: jnp.zeros(tuple(shape), dtype or jnp.float32),
    "empty_permuted": lambda shape, order, dtype=None: jnp.zeros(tuple(shape), dtype or jnp.float32),
    "full": full,
    "scalar_tensor": lambda value, dtype=None: jnp.asarray(value, dtype or jnp.float32),
}
