"""Pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.convolution import windows
from fedjax_drift.pytorch.operations.convolutions import sizes
from fedjax_drift.pytorch.operations.images import Images, on_grid
from fedjax_drift.pytorch.operations.reductions import best

Array = jax.Array
Sizes = int | Sequence[int]


class Windows(NamedTuple):
    """The windows of a pooling along one axis."""

    size: int
    step: int
    before: int
    after: int
    dilation: int
    number: int  # of windows

    @classmethod
    def of(cls, n: int, size: int, step: int, padding: int, dilation: int, ceil: bool) -> Windows:
        """With ``ceil``, the last window may begin in the image and end after it."""
        extent = dilation * (size - 1) + 1
        count = (n + 2 * padding - extent + (step - 1 if ceil else 0)) // step + 1
        count -= ceil and (count - 1) * step >= n + padding
        return cls(size, step, padding, max((count - 1) * step + extent - n - padding, 0), dilation, count)


def _windows(
    axes: int, x: Any, window: Sizes, stride: Sizes, padding: Sizes, ceil: bool, dilation: Sizes = 1
) -> list[Windows]:
    """One for each of the last axes."""
    options = (sizes(each, axes) for each in (window, stride or window, padding, dilation))
    return [Windows.of(n, k, s, p, d, ceil) for n, k, s, p, d in zip(x.shape[-axes:], *options, strict=True)]


def _reduce(x: Any, along: list[Windows], empty: float, combine: Callable[..., Array]) -> Any:
    """Combines the numbers of each window. The last axis is the first, so that they come in PyTorch's order."""
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - len(along))
    for axis, each in reversed(list(enumerate(along, first))):
        edges = [(each.before, each.after, 0) if i == axis else (0, 0, 0) for i in range(grid.ndim)]
        grid = lax.pad(grid, jnp.asarray(empty, grid.dtype), edges)
        starts = range(0, each.size * each.dilation, each.dilation)
        grid = reduce(combine, [windows.strided_slice(grid, axis, i, each.number, each.step) for i in starts])
    return Images(grid) if isinstance(x, Images) else grid


def _larger(x: Array, y: Array) -> Array:
    """The first of equal ones gets the gradient, as in PyTorch. With `jnp.maximum`, they share it."""
    return jnp.where((y > x) | jnp.isnan(y), y, x)


def max_pool(
    axes: int,
    x: Any,
    window: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil: bool = False,
) -> Any:
    return _reduce(x, _windows(axes, x, window, stride, padding, ceil, dilation), -jnp.inf, _larger)


def avg_pool(
    axes: int,
    x: Any,
    window: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil: bool = False,
    with_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    along = _windows(axes, x, window, stride, padding, ceil)
    total = _reduce(x, along, 0.0, jnp.add)
    if divisor:
        return on_grid(lambda y: y / divisor, total)
    counts: list[Array] = []  # per axis: how many numbers of each window count
    for n, each in zip(x.shape[-axes:], along, strict=True):
        starts = jnp.arange(each.number) * each.step - each.before
        low, high = (-each.before, n + each.before) if with_padding else (0, n)
        counts.append(jnp.minimum(starts + each.size, high) - jnp.maximum(starts, low))
    count = counts[0].astype(x.dtype)
    for more in counts[1:]:
        count = count[..., None] * more.astype(x.dtype)
    if isinstance(total, Images):
        return Images(total.grid / count[..., None])
    return total / count


def adaptive_pool(along: Callable[..., Array], x: Any, size: Sequence[int]) -> Any:
    """Reduces parts of the axes, of nearly equal lengths."""
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - len(size))
    for axis, parts in reversed(list(enumerate(size, first))):
        n = grid.shape[axis]
        if n % parts == 0:
            shape = (*grid.shape[:axis], parts, n // parts, *grid.shape[axis + 1 :])
            grid = along(grid.reshape(shape), axis + 1)
        else:
            edges = [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]
            grid = jnp.stack([along(lax.slice_in_dim(grid, a, b, axis=axis), axis) for a, b in edges], axis)
    return Images(grid) if isinstance(x, Images) else grid


def largest(x: Array, axis: int) -> Array:
    return best(x, axis, False, jnp.argmax)[0]


OF_IMAGES: dict[str, Callable[..., Any]] = {
    **{f"adaptive_avg_pool{n}d": partial(adaptive_pool, jnp.mean) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": lambda x, size: (adaptive_pool(largest, x, size), None) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": partial(avg_pool, n) for n in (1, 2, 3)},
    **{f"max_pool{n}d": partial(max_pool, n) for n in (1, 2, 3)},
}
