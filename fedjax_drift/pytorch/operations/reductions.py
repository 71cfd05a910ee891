"""Sums, maxima, norms, order, and what runs along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift.pytorch.operations.elementwise import cast

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def _axes(dim: Axes) -> Any:
    return tuple(dim) or None if isinstance(dim, list | tuple) else dim


def total(x: Array, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return x.sum(_axes(dim), dtype=dtype, keepdims=keepdim)


def mean(x: Array, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return x.mean(_axes(dim), dtype=dtype, keepdims=keepdim)


def product(x: Array, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return x.prod(dim, dtype=dtype, keepdims=keepdim)


def variance(
    x: Array, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, correction: float | None = None
) -> Array:
    if isinstance(dim, bool):  # var(x, unbiased)
        return x.var(ddof=int(dim))
    return x.var(_axes(dim), ddof=int(unbiased if correction is None else correction), keepdims=keepdim)


def deviation(x: Array, *arguments: Any, **options: Any) -> Array:
    return jnp.sqrt(variance(x, *arguments, **options))


def norm(x: Array, order: float = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    axes = _axes(dim)
    if order == 2:
        squares = jnp.square(x).sum(axes, keepdims=keepdim)
        return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)  # gradient 0 at 0
    if math.isinf(order):
        return jnp.abs(x).max(axes, keepdims=keepdim)
    return (jnp.abs(x) ** order).sum(axes, keepdims=keepdim) ** (1 / order)


def _at(x: Array, dim: int, where: Array) -> Array:
    return jnp.take_along_axis(x, where, dim)


def best(x: Array, dim: int, keepdim: bool, arg: Callable[..., Array]) -> tuple[Array, Array]:
    """The largest or smallest values along an axis, and where they are. The first of equal ones gets the gradient.

    XLA may compute a maximum again for its derivative, with another rounding. The derivative of `jnp.max` is then
    infinite. A gather has no such derivative.
    """
    where = arg(x, dim, keepdims=True)
    values = _at(x, dim, where)
    return (values, where) if keepdim else (values.squeeze(dim), where.squeeze(dim))


def largest(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return best(x, dim, keepdim, jnp.argmax)


def smallest(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return best(x, dim, keepdim, jnp.argmin)


def over_axes(arg: Callable[..., Array]) -> Callable[..., Array]:
    """amax, amin and the maximum of a whole array."""

    def reduced(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
        axes = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
        kept = [n for axis, n in enumerate(x.shape) if axis not in {a % x.ndim for a in axes}]
        moved = jnp.moveaxis(x, axes, range(-len(axes), 0)).reshape(*kept, -1)
        values = best(moved, -1, False, arg)[0]
        return jnp.expand_dims(values, [a % x.ndim for a in axes]) if keepdim else values

    return reduced


def argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmax(x, dim, keepdims=keepdim)


def argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmin(x, dim, keepdims=keepdim)


def topk(x: Array, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> tuple[Array, Array]:
    order = jnp.argsort(x, dim, descending=largest)
    where = lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)
    return _at(x, dim, where), where


def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    where = jnp.argsort(x, dim, stable=True, descending=descending)
    return _at(x, dim, where), where


def argsort(x: Array, dim: int = -1, descending: bool = False, **_: Any) -> Array:
    return sort(x, dim, descending)[1]


def logsumexp(x: Array, dim: Axes, keepdim: bool = False) -> Array:
    return jax.nn.logsumexp(x, _axes(dim), keepdims=keepdim)


def difference(x: Array, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Array:
    return jnp.diff(x, n, dim, prepend, append)


def cumulative(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, dim, dtype=None: function(x if dtype is None else x.astype(dtype), dim)


def softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.softmax(cast(x, dtype if isinstance(dtype, np.dtype) else None), dim)


def log_softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.log_softmax(cast(x, dtype if isinstance(dtype, np.dtype) else None), dim)


def any_(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
    return jnp.any(x, _axes(dim), keepdims=keepdim)


def all_(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
    return jnp.all(x, _axes(dim), keepdims=keepdim)


def weight_norm(direction: Array, length: Array, dim: int = 0) -> Array:
    return direction * (length / norm(direction, 2, [i for i in range(direction.ndim) if i != dim], True))


ARRAYS: dict[str, Callable[..., Any]] = {
    "_weight_norm": weight_norm,
    "all": all_,
    "amax": over_axes(jnp.argmax),
    "amin": over_axes(jnp.argmin),
    "any": any_,
    "argmax": argmax,
    "argmin": argmin,
    "argsort": argsort,
    "cumprod": cumulative(jnp.cumprod),
    "cumsum": cumulative(jnp.cumsum),
    "diff": difference,
    "linalg_vector_norm": norm,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "max": over_axes(jnp.argmax),
    "max.dim": largest,
    "mean": mean,
    "min": over_axes(jnp.argmin),
    "min.dim": smallest,
    "norm": norm,
    "prod": product,
    "softmax": softmax,
    "sort": sort,
    "std": deviation,
    "sum": total,
    "topk": topk,
    "var": variance,
}
