"""Pooling and resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.convolution import windows
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.operations.convolutions import sizes
from fedjax_drift.pytorch.operations.images import Images, on_grid

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


class Windows(NamedTuple):
    """The windows of a pooling along one axis."""

    size: int
    step: int
    before: int
    after: int


def _windows(x: Any, window: Sizes, stride: Sizes, padding: Sizes, ceil: bool) -> list[Windows]:
    """One for each of the last axes. With ``ceil``, the last window may begin in the image and end after it."""
    axes = 2 if isinstance(x, Images) or x.ndim == 4 else x.ndim - 2
    found = []
    steps = sizes(stride or window, axes)
    for n, k, s, p in zip(x.shape[-axes:], sizes(window, axes), steps, sizes(padding, axes), strict=True):
        count = (n + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        count -= (count - 1) * s >= n + p
        found.append(Windows(k, s, p, (count - 1) * s + k - n - p))
    return found


def _reduce(x: Any, along: list[Windows], empty: float, combine: Callable[..., Array]) -> Any:
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - len(along))
    for axis, (size, step, before, after) in enumerate(along, first):
        edges = [(before, max(after, 0), 0) if i == axis else (0, 0, 0) for i in range(grid.ndim)]
        grid = lax.pad(grid, jnp.asarray(empty, grid.dtype), edges)
        count = (grid.shape[axis] - size) // step + 1
        slices = [windows.strided_slice(grid, axis, i, count, step) for i in range(size)]
        grid = slices[0]
        for each in slices[1:]:
            grid = combine(grid, each)
    return Images(grid) if isinstance(x, Images) else grid


def max_pool(
    x: Any, window: Sizes, stride: Sizes = (), padding: Sizes = 0, dilation: Sizes = 1, ceil: bool = False
) -> Any:
    if set(sizes(dilation, 1)) != {1}:
        raise ConfigurationError(f"dilation of a max-pooling must be 1, got {dilation}")
    return _reduce(x, _windows(x, window, stride, padding, ceil), -jnp.inf, jnp.maximum)


def avg_pool(
    x: Any,
    window: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil: bool = False,
    with_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    along = _windows(x, window, stride, padding, ceil)
    total = _reduce(x, along, 0.0, jnp.add)
    if divisor:
        return on_grid(lambda y: y / divisor, total)
    counts: list[Array] = []  # per axis: how many numbers of each window count
    for n, (size, step, before, after) in zip(x.shape[-len(along) :], along, strict=True):
        starts = jnp.arange((n + before + max(after, 0) - size) // step + 1) * step - before
        low, high = (-before, n + before) if with_padding else (0, n)
        counts.append(jnp.minimum(starts + size, high) - jnp.maximum(starts, low))
    count = counts[0].astype(x.dtype)
    for each in counts[1:]:
        count = count[..., None] * each.astype(x.dtype)
    if isinstance(total, Images):
        return Images(total.grid / count[..., None])
    return total / count


def adaptive_pool(reduce: Callable[..., Array], x: Any, size: Sequence[int]) -> Any:
    """Reduces parts of the axes, of nearly equal lengths."""
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - len(size))
    for axis, parts in enumerate(size, first):
        n = grid.shape[axis]
        if n % parts == 0:
            shape = (*grid.shape[:axis], parts, n // parts, *grid.shape[axis + 1 :])
            grid = reduce(grid.reshape(shape), axis + 1)
        else:
            edges = [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]
            grid = jnp.stack([reduce(lax.slice_in_dim(grid, a, b, axis=axis), axis) for a, b in edges], axis)
    return Images(grid) if isinstance(x, Images) else grid


def adaptive_max_pool(x: Any, size: Sequence[int]) -> tuple[Any, None]:
    """The maxima, and nothing in place of PyTorch's indices."""
    return adaptive_pool(jnp.max, x, size), None


def upsample(resize: Callable[..., Array], x: Any, size: Sequence[int] | None, factors: Sequence[float] | None) -> Any:
    """Resizes the last axes to ``size``, or by ``factors``: ``resize(grid, axis, m, scale)`` makes an axis of length n
    one of length m, with the old coordinate ``scale`` times the new one."""
    axes = len(size or factors or ())
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - axes)
    for i, axis in enumerate(range(first, first + axes)):
        n = grid.shape[axis]
        m, scale = (size[i], n / size[i]) if size else (int(n * factors[i]), 1 / factors[i])  # type: ignore[index]
        grid = resize(grid, axis, m, scale)
    return Images(grid) if isinstance(x, Images) else grid


def upsample_nearest(x: Any, size: Sequence[int] | None, factors: Sequence[float] | None = None) -> Any:
    def resize(grid: Array, axis: int, m: int, scale: float) -> Array:
        return jnp.take(grid, jnp.asarray([min(int(j * scale), grid.shape[axis] - 1) for j in range(m)]), axis)

    return upsample(resize, x, size, factors)


def upsample_linear(
    x: Any, size: Sequence[int] | None, corners: bool = False, factors: Sequence[float] | None = None
) -> Any:
    def resize(grid: Array, axis: int, m: int, scale: float) -> Array:
        n, j = grid.shape[axis], jnp.arange(m)
        at = j * (n - 1) / max(m - 1, 1) if corners else jnp.maximum((j + 0.5) * scale - 0.5, 0)
        low = jnp.clip(jnp.floor(at).astype(int), 0, n - 1)
        weight = (at - low).astype(grid.dtype).reshape(-1, *[1] * (grid.ndim - axis - 1))
        below, above = (jnp.take(grid, jnp.minimum(low + k, n - 1), axis) for k in (0, 1))
        return below + weight * (above - below)

    return upsample(resize, x, size, factors)


OF_IMAGES: dict[str, Callable[..., Any]] = {
    "adaptive_avg_pool1d": partial(adaptive_pool, jnp.mean),
    "adaptive_avg_pool2d": partial(adaptive_pool, jnp.mean),
    "adaptive_avg_pool3d": partial(adaptive_pool, jnp.mean),
    "adaptive_max_pool1d": adaptive_max_pool,
    "adaptive_max_pool2d": adaptive_max_pool,
    "avg_pool1d": avg_pool,
    "avg_pool2d": avg_pool,
    "avg_pool3d": avg_pool,
    "max_pool1d": max_pool,
    "max_pool2d": max_pool,
    "max_pool3d": max_pool,
    "upsample_bilinear2d": upsample_linear,
    "upsample_linear1d": upsample_linear,
    "upsample_nearest1d": upsample_nearest,
    "upsample_nearest2d": upsample_nearest,
}
