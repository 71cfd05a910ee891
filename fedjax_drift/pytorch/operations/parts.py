"""Parts of arrays: slices, indices and what is written to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks
from fedjax_drift.pytorch.operations.dtypes import is_float, promoted

Array = jax.Array


def part(x: Array, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    return (*[slice(None)] * (dim % x.ndim), slice(start, None if end is None else min(end, x.shape[dim]), step))


def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[part(x, dim, start, end, step)]


def slice_scatter(
    x: Array, values: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return x.at[part(x, dim, start, end, step)].set(values.astype(x.dtype))


def diagonal_scatter(x: Array, values: Array, offset: int = 0, dim: int = 0, other: int = 1) -> Array:
    moved = jnp.moveaxis(x, (dim, other), (-2, -1))
    at = jnp.arange(values.shape[-1])
    moved = moved.at[..., at + max(-offset, 0), at + max(offset, 0)].set(values.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim, other))


def _indices(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_indices(indices)]


def index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    at, values = x.at[_indices(indices)], values.astype(x.dtype)
    return at.add(values) if accumulate else at.set(values)


def index_select(x: Array, dim: int, indices: Array) -> Array:
    return x.reshape(1)[indices].reshape(()) if x.ndim == 0 else jnp.take(x, indices.reshape(-1), dim)


def _rows(x: Array, dim: int, indices: Array) -> Any:
    """The places of an axis."""
    return x.at[(*[slice(None)] * (dim % x.ndim), indices.reshape(-1))]


def gather(x: Array, dim: int, indices: Array, sparse_grad: bool = False) -> Array:
    """Only the first rows of the other axes are read if they are longer than those of the indices."""
    if x.ndim == 0 or indices.ndim == 0:
        return x.reshape(-1)[indices]
    dim = dim % x.ndim
    x = x[tuple(slice(None) if axis == dim else slice(n) for axis, n in enumerate(indices.shape))]
    return jnp.take_along_axis(x, indices, dim)


def _scattered(x: Array, dim: int, indices: Array, values: Any) -> tuple[tuple[Array, ...], Array]:
    """Where numbers go that are scattered along an axis, and the numbers."""
    places = list(jnp.indices(indices.shape, sparse=True))
    places[dim % x.ndim] = indices
    if not hasattr(values, "ndim") or values.ndim == 0:
        return tuple(places), jnp.broadcast_to(jnp.asarray(values, x.dtype), indices.shape)
    return tuple(places), values[tuple(map(slice, indices.shape))].astype(x.dtype)


def scatter(x: Array, dim: int, indices: Array, values: Any, reduce: str | None = None) -> Array:
    names = {"add": "sum", "multiply": "prod"}
    if reduce is not None:
        return scatter_reduce(x, dim, indices, values, names[reduce])
    if x.ndim == 0:
        return _scattered(x[None], 0, indices.reshape(1), values)[1].reshape(())
    places, values = _scattered(x, dim, indices, values)
    return x.at[places].set(values)


def scatter_reduce(x: Array, dim: int, indices: Array, values: Any, reduce: str, include_self: bool = True) -> Array:
    """include_self=False: only places that get nothing keep their numbers."""
    if x.ndim == 0:
        return scatter_reduce(x[None], 0, indices.reshape(1), jnp.reshape(values, 1), reduce, include_self)[0]
    places, values = _scattered(x, dim, indices, values)
    if reduce in ("sum", "mean"):
        kept = x if include_self else x.at[places].set(0)
        sums = kept.at[places].add(values)
        if reduce == "sum":
            return sums
        own = 1 if include_self else 0
        counts = jnp.maximum(jnp.full(x.shape, own, jnp.int32).at[places].add(1), 1).astype(x.dtype)
        return sums / counts if is_float(x) else jnp.floor_divide(sums, counts)
    if reduce in ("amax", "amin"):
        return _extremes(x, places, values, reduce, include_self)
    checks.refuse(
        "the reduction of a scatter must be sum, mean, amax or amin", f"{reduce!r}", "use exp, sum and log for products"
    )


def _extremes(x: Array, places: tuple[Array, ...], values: Array, reduce: str, include_self: bool) -> Array:
    """Equal extremes share the gradient."""
    untouched = jnp.ones(x.shape, bool).at[places].set(False)
    own = untouched | include_self
    fixed = lax.stop_gradient(x)
    worst = jnp.finfo(x.dtype) if is_float(x) else jnp.iinfo(x.dtype)
    start = jnp.where(own, fixed, worst.min if reduce == "amax" else worst.max)
    at = start.at[places]
    best = (at.max if reduce == "amax" else at.min)(lax.stop_gradient(values))
    if not is_float(x):
        return best
    mine, theirs = own & (fixed == best), values == best[places]
    shares = mine.astype(x.dtype).at[places].add(theirs.astype(x.dtype))

    def changes(each: Array, among: Array) -> Array:
        """Zeros that carry the gradient."""
        return jnp.where(among & jnp.isfinite(each), each - lax.stop_gradient(each), 0)

    return best + changes(x, mine).at[places].add(changes(values, theirs)) / jnp.maximum(shares, 1)


def masked_scatter(x: Array, mask: Array, values: Array) -> Array:
    """The numbers go to the places of the mask in their order."""
    mask = jnp.broadcast_to(mask, x.shape)
    order = (jnp.cumsum(mask.reshape(-1)) - 1).reshape(x.shape)
    return jnp.where(mask, jnp.take(values.reshape(-1), order, mode="clip"), x)


def _places(edges: Array, x: Any, right: bool, side: str | None = None) -> Array:
    edges, x = promoted(edges, jnp.asarray(x))
    side = side or ("right" if right else "left")
    if edges.ndim == 1:
        return jnp.searchsorted(edges, x, side=side)
    lead = edges.shape[:-1]
    found = jax.vmap(lambda e, v: jnp.searchsorted(e, v, side=side))(
        edges.reshape(-1, edges.shape[-1]), x.reshape(-1, x.shape[-1])
    )
    return found.reshape(*lead, x.shape[-1])


def _searchsorted(
    edges: Array, x: Any, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Array:
    return _places(edges if sorter is None else jnp.take_along_axis(edges, sorter, -1), x, right, side)


ARRAYS: dict[str, Callable[..., Any]] = {
    "_unsafe_index": index,
    "_unsafe_index_put": index_put,
    "bucketize": lambda x, edges, out_int32=False, right=False: _places(edges, x, right),
    "copy": lambda x, values, non_blocking=False: jnp.broadcast_to(values, x.shape).astype(x.dtype),
    "diagonal": lambda x, offset=0, dim=0, other=1: jnp.diagonal(x, offset, dim, other),
    "diagonal_scatter": diagonal_scatter,
    "flip": lambda x, dims: jnp.flip(x, tuple(dims)),
    "gather": gather,
    "index": index,
    "index_put": index_put,
    "index_select": index_select,
    "masked_scatter": masked_scatter,
    "roll": lambda x, shifts, dims=(): jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, sum(shifts)),
    "scatter": scatter,
    "scatter_add": partial(scatter_reduce, reduce="sum"),
    "scatter_reduce": scatter_reduce,
    "searchsorted": _searchsorted,
    "select": lambda x, dim, index: lax.index_in_dim(x, index, dim, keepdims=False),
    "slice": slice_,
    "slice_scatter": slice_scatter,
    "tril": jnp.tril,
    "triu": jnp.triu,
}
