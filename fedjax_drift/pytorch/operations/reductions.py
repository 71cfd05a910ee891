"""Sums, maxima, norms, order, and what runs along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.pytorch.operations.dtypes import counted, floating
from fedjax_drift.pytorch.operations.elementwise import absolute, cast

Array = jax.Array
Axes = int | Sequence[int] | None


def axes_of(x: Array, dim: Axes) -> tuple[int, ...]:
    """The axes of a reduction. None or no axis: all. An array without axes has one for PyTorch."""
    if x.ndim == 0:
        return ()
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.ndim))
    return tuple(d % x.ndim for d in dims)


def _along(x: Array, dim: int) -> tuple[Array, int]:
    """An array with at least one axis, and the axis."""
    return (x[None], 0) if x.ndim == 0 else (x, dim % x.ndim)


def mean(x: Array, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return cast(x, dtype).mean(axes_of(x, dim), keepdims=keepdim)


def variance(x: Array, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> Array:
    axes = axes_of(x, dim)
    count = math.prod(x.shape[axis] for axis in axes)
    squares = jnp.square(x - x.mean(axes, keepdims=True)).sum(axes, keepdims=keepdim)
    return squares / jnp.asarray(max(count - (1 if correction is None else correction), 0), x.dtype)


def root(x: Array) -> Array:
    """The gradient at 0 is 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def deviation(x: Array, dim: Axes = None, **options: Any) -> Array:
    return root(variance(x, dim, **options))


def with_mean(function: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """var_mean, std_mean."""
    return lambda x, dim=None, keepdim=False, **options: (
        function(x, dim, keepdim=keepdim, **options),
        mean(x, dim, keepdim),
    )


def norm(x: Array, order: float | None = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """The gradient at 0 is 0."""
    axes, size = axes_of(x, dim), absolute(cast(x, dtype))
    order = 2 if order is None else order
    if order == 2 and not jnp.iscomplexobj(x):
        return root(jnp.square(cast(x, dtype)).sum(axes, keepdims=keepdim))
    if order == 0:
        return (size != 0).astype(size.dtype).sum(axes, keepdims=keepdim)
    if order == 1:
        return size.sum(axes, keepdims=keepdim)
    if math.isinf(order):
        return (amax if order > 0 else amin)(size, axes, keepdim)
    powers = jnp.where(size == 0, 0 if order > 0 else jnp.inf, jnp.where(size == 0, 1, size) ** order)
    sums = powers.sum(axes, keepdims=keepdim)
    return jnp.where(sums == 0, 0, jnp.where(sums == 0, 1, sums) ** (1 / order))


def _at(x: Array, dim: int, where: Array) -> Array:
    return jnp.take_along_axis(x, where, dim)


def best(x: Array, dim: int, keepdim: bool, arg: Callable[..., Array]) -> tuple[Array, Array]:
    """The largest or smallest values along an axis, and where they are. The first of equal ones gets the gradient.

    XLA may compute a maximum again for its derivative, with another rounding. The derivative of `jnp.max` is then
    infinite. A gather has no such derivative.
    """
    if x.ndim == 0:
        return x, jnp.zeros((), arg(x).dtype)
    where = arg(x, dim, keepdims=True)
    values = _at(x, dim, where)
    return (values, where) if keepdim else (values.squeeze(dim), where.squeeze(dim))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _peak(x: Array, arg: Callable[..., Array]) -> Array:
    """The largest or smallest values along the last axis. Equal ones share the gradient."""
    return best(x, -1, False, arg)[0]


@_peak.defjvp
def _peak_jvp(arg: Callable[..., Array], primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x,), (change,) = primals, tangents
    values, where = best(x, -1, True, arg)
    among = (x == values) | (jnp.arange(x.shape[-1]) == where)  # never none, however x is rounded
    shares = among / among.sum(-1, keepdims=True).astype(x.dtype)
    return values.squeeze(-1), (change * shares).sum(-1)


def over_axes(arg: Callable[..., Array]) -> Callable[..., Array]:
    """amax, amin and the maximum of a whole array."""

    def reduced(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
        axes = axes_of(x, dim)
        kept = [n for axis, n in enumerate(x.shape) if axis not in axes]
        moved = jnp.moveaxis(x, axes, range(-len(axes), 0)).reshape(*kept, math.prod(x.shape[a] for a in axes))
        values = _peak(moved, arg)
        return jnp.expand_dims(values, axes) if keepdim else values

    return reduced


amax, amin = over_axes(jnp.argmax), over_axes(jnp.argmin)


def topk(x: Array, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    pair, axis = sort(x, dim, largest), dim % max(x.ndim, 1)
    return pair if x.ndim == 0 else tuple(lax.slice_in_dim(each, 0, k, axis=axis) for each in pair)


def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    pair, axis = sort(x, dim), dim % max(x.ndim, 1)
    return pair if x.ndim == 0 else tuple(lax.index_in_dim(each, k - 1, axis, keepdim) for each in pair)


def sort(x: Array, dim: int = -1, descending: bool = False, stable: bool | None = True) -> tuple[Array, Array]:
    """Always stable."""
    y, axis = _along(x, dim)
    where = jnp.argsort(y, axis, stable=True, descending=descending)
    return _at(y, axis, where).reshape(x.shape), where.reshape(x.shape)


def median(x: Array, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower one of two. A NaN is the median."""
    if dim is None:
        return median(x.reshape(-1), 0)[0]
    y, axis = _along(x, dim)
    ordered, where = sort(y, axis)
    middle = jnp.full((1,) * y.ndim, (y.shape[axis] - 1) // 2)
    at = jnp.where(jnp.isnan(y).any(axis, keepdims=True), jnp.argmax(jnp.isnan(ordered), axis, keepdims=True), middle)
    pair = _at(ordered, axis, at), _at(where, axis, at)
    return tuple(each.reshape(()) if x.ndim == 0 else each if keepdim else each.squeeze(axis) for each in pair)


def logsumexp(x: Array, dim: Axes, keepdim: bool = False) -> Array:
    """Where all are -inf, so is the result, and the gradient is 0."""
    x, axes = floating(x), axes_of(x, dim)
    peak = lax.stop_gradient(x.max(axes, keepdims=True))
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    sums = jnp.exp(x - peak).sum(axes, keepdims=True)
    result = jnp.where(sums == 0, -jnp.inf, jnp.log(jnp.where(sums == 0, 1, sums))) + peak
    return result if keepdim else result.squeeze(axes)


def cumulative(function: Callable[..., Array]) -> Callable[..., Array]:
    """cumsum, cumprod."""

    def along(x: Array, dim: int, dtype: Any = None) -> Array:
        y, axis = _along(counted(x, dtype), dim)
        return function(y, axis).reshape(x.shape)

    return along


def logcumsumexp(x: Array, dim: int) -> Array:
    y, axis = _along(floating(x), dim)
    return lax.cumlogsumexp(y, axis).reshape(x.shape)


def running(function: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """cummax, cummin. The last of equal ones counts."""

    def along(x: Array, dim: int) -> tuple[Array, Array]:
        y, axis = _along(x, dim)
        places = lax.broadcasted_iota(jnp.int32, y.shape, axis)
        numbers = y.astype(jnp.int32) if y.dtype == bool else y
        where = lax.cummax(jnp.where(numbers == function(lax.stop_gradient(numbers), axis), places, 0), axis)
        return _at(y, axis, where).reshape(x.shape), where.reshape(x.shape)

    return along


def truth(function: Callable[..., Array]) -> Callable[..., Array]:
    """any, all. Of uint8 they are uint8. An empty list of axes is none here, and not all of them."""

    def reduced(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
        axes = () if isinstance(dim, Sequence) and not dim else axes_of(x, dim)
        result = function(x.astype(bool), axes, keepdims=keepdim)
        return result.astype(jnp.uint8) if x.dtype == jnp.uint8 else result

    return reduced


ARRAYS: dict[str, Callable[..., Any]] = {
    "all": truth(jnp.all),
    "amax": amax,
    "amin": amin,
    "any": truth(jnp.any),
    "argmax": lambda x, dim=None, keepdim=False: jnp.argmax(x, dim if x.ndim else None, keepdims=keepdim),
    "argmin": lambda x, dim=None, keepdim=False: jnp.argmin(x, dim if x.ndim else None, keepdims=keepdim),
    "cummax": running(lax.cummax),
    "cummin": running(lax.cummin),
    "cumprod": cumulative(jnp.cumprod),
    "cumsum": cumulative(jnp.cumsum),
    "kthvalue": kthvalue,
    "linalg_vector_norm": norm,
    "log_softmax": lambda x, dim, dtype=None: jax.nn.log_softmax(cast(x, dtype), axes_of(x, dim)),
    "logcumsumexp": logcumsumexp,
    "logsumexp": logsumexp,
    "max": amax,
    "max.dim": lambda x, dim, keepdim=False: best(x, dim, keepdim, jnp.argmax),
    "mean": mean,
    "median": median,
    "min": amin,
    "min.dim": lambda x, dim, keepdim=False: best(x, dim, keepdim, jnp.argmin),
    "prod": lambda x, dim=None, keepdim=False, dtype=None: counted(x, dtype).prod(axes_of(x, dim), keepdims=keepdim),
    "softmax": lambda x, dim, dtype=None: jax.nn.softmax(cast(x, dtype), axes_of(x, dim)),
    "sort": sort,
    "std.correction": deviation,
    "std_mean.correction": with_mean(deviation),
    "sum": lambda x, dim=None, keepdim=False, dtype=None: counted(x, dtype).sum(axes_of(x, dim), keepdims=keepdim),
    "topk": topk,
    "var.correction": variance,
    "var_mean.correction": with_mean(variance),
}
