"""Parts of arrays: slices, indices and what is written to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def part(x: Array, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    return (*[slice(None)] * (dim % x.ndim), slice(start, None if end is None else min(end, x.shape[dim]), step))


def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[part(x, dim, start, end, step)]


def select(x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim, keepdims=False)


def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    return x[part(x, dim, start, start + length, 1)]


def slice_scatter(
    x: Array, values: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return x.at[part(x, dim, start, end, step)].set(values)


def select_scatter(x: Array, values: Array, dim: int, index: int) -> Array:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].set(values)


def copy(x: Array, values: Array, *_: Any) -> Array:
    return jnp.broadcast_to(values, x.shape).astype(x.dtype)


def _indices(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_indices(indices)]


def index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    at = x.at[_indices(indices)]
    return at.add(values) if accumulate else at.set(values)


def index_select(x: Array, dim: int, indices: Array) -> Array:
    return jnp.take(x, indices, dim)


def gather(x: Array, dim: int, indices: Array, **_: Any) -> Array:
    """Only the first rows of the other axes are read if they are longer than those of the indices."""
    dim = dim % x.ndim
    x = x[tuple(slice(None) if axis == dim else slice(n) for axis, n in enumerate(indices.shape))]
    return jnp.take_along_axis(x, indices, dim)


def flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims))


def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims) or None)


def diagonal(x: Array, offset: int = 0, dim: int = 0, other: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim, other)


ARRAYS: dict[str, Callable[..., Any]] = {
    "copy": copy,
    "diagonal": diagonal,
    "flip": flip,
    "gather": gather,
    "index": index,
    "index_put": index_put,
    "index_select": index_select,
    "narrow": narrow,
    "roll": roll,
    "select": select,
    "select_scatter": select_scatter,
    "slice": slice_,
    "slice_scatter": slice_scatter,
    "tril": jnp.tril,
    "triu": jnp.triu,
}
