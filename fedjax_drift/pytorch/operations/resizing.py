"""Resizing and sampling of images.

The old coordinates are numbers of the code. They are rounded as in PyTorch, which computes them in the dtype of the
images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks
from fedjax_drift.pytorch.operations.images import Images

Array = jax.Array
Kernel = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def _resize(x: Any, size: Sequence[int] | None, factors: Sequence[float] | None, taps: Callable[..., Any]) -> Any:
    """Resizes the last axes to ``size``, or by ``factors``.

    taps: (n, m, factor or None, dtype) -> old indices [k, m] and their weights [k, m], or None for 1.
    """
    axes = len(size or factors or ())
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - axes)
    for i, axis in enumerate(range(first, first + axes)):
        n, factor = grid.shape[axis], factors[i] if factors else None
        m = size[i] if size else int(n * factors[i])  # type: ignore[index]
        at, weights = taps(n, m, factor, np.dtype(grid.dtype))
        parts = [jnp.take(grid, np.clip(each, 0, n - 1), axis) for each in at]
        if weights is not None:
            shape = (-1, *[1] * (grid.ndim - axis - 1))
            parts = [part * w.astype(grid.dtype).reshape(shape) for part, w in zip(parts, weights, strict=True)]
        grid = sum(parts[1:], parts[0])
    return Images(grid) if isinstance(x, Images) else grid


def _scale(n: int, m: int, factor: float | None, dtype: Any) -> Any:
    """The step of the old coordinate."""
    return dtype.type(1 / factor) if factor else dtype.type(n) / dtype.type(m)


def nearest(shift: float, x: Any, size: Sequence[int] | None, factors: Sequence[float] | None = None) -> Any:
    def taps(n: int, m: int, factor: float | None, dtype: Any) -> Any:
        at = (np.arange(m).astype(dtype) + dtype.type(shift)) * _scale(n, m, factor, dtype)
        return np.floor(at.astype(np.float32)).astype(int)[None], None

    return _resize(x, size, factors, taps)


def interpolated(
    cubic: bool,
    x: Any,
    size: Sequence[int] | None,
    align_corners: bool = False,
    factors: Sequence[float] | None = None,
) -> Any:
    """Linear or cubic interpolation along each axis."""

    def taps(n: int, m: int, factor: float | None, dtype: Any) -> Any:
        new = np.arange(m).astype(dtype)
        if align_corners:
            at = new * (dtype.type(n - 1) / dtype.type(m - 1) if m > 1 else dtype.type(0))
        else:
            at = _scale(n, m, factor, dtype) * (new + dtype.type(0.5)) - dtype.type(0.5)
        if n == m and not cubic:
            at = new
        return _cubic(at) if cubic else _linear(np.maximum(at, 0), n)

    return _resize(x, size, factors, taps)


def _linear(at: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    low = np.minimum(np.floor(at).astype(int), n - 1)
    weight = np.clip(at - low, 0, 1)
    return np.stack([low, low + 1]), np.stack([1 - weight, weight])


def _cubic(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a = -0.75
    low = np.floor(at).astype(int)
    t = at - low

    def near(d: np.ndarray) -> np.ndarray:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: np.ndarray) -> np.ndarray:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return low + np.arange(-1, 3)[:, None], np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)])


# --- sampling ---------------------------------------------------------------------------------------------------------


def grid_sample(x: Array, grid: Array, interpolation: int, padding: int, align_corners: bool) -> Array:
    """Images [B, C, H, W] at the points [B, h, w, 2] between -1 and 1."""
    if x.ndim != 4 or interpolation > 1:
        checks.refuse(
            'grid_sample must have images [B, C, H, W] and mode "bilinear" or "nearest"',
            f"an array of shape {[*x.shape]} and {('bilinear', 'nearest', 'bicubic')[interpolation]!r}",
        )
    H, W = x.shape[2:]
    column, row = (_position(grid[..., i], n, padding, align_corners) for i, n in enumerate((W, H)))
    if interpolation == 1:
        return _pixels(x, jnp.round(row), jnp.round(column))
    top, left = jnp.floor(row), jnp.floor(column)
    total = jnp.zeros((), x.dtype)
    for i, share in ((top, top + 1 - row), (top + 1, row - top)):
        for j, part in ((left, left + 1 - column), (left + 1, column - left)):
            total = total + _pixels(x, i, j) * (share * part)[:, None]
    return total


def _position(point: Array, n: int, padding: int, align_corners: bool) -> Array:
    at = (point + 1) / 2 * (n - 1) if align_corners else ((point + 1) * n - 1) / 2
    if padding == 2:
        at = _reflected(at, 0, n - 1) if align_corners else _reflected(at, -0.5, n - 0.5)
    # The gradient at the border is 0, as in PyTorch.
    return at if padding == 0 else jnp.where(at <= 0, 0, jnp.where(at >= n - 1, n - 1, at))


def _reflected(at: Array, low: float, high: float) -> Array:
    if high == low:
        return jnp.zeros_like(at)
    distance = jnp.abs(at - low)
    turns = jnp.floor(distance / (high - low))
    rest = distance - turns * (high - low)
    return jnp.where(turns % 2 == 0, rest + low, high - rest)


def _pixels(x: Array, row: Array, column: Array) -> Array:
    """[B, C, h, w], with 0 outside of the images."""
    H, W = x.shape[2:]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    i, j = jnp.clip(row, 0, H - 1).astype(int), jnp.clip(column, 0, W - 1).astype(int)
    return jnp.where(inside[:, None], jax.vmap(lambda image, i, j: image[:, i, j])(x, i, j), 0)


ARRAYS: dict[str, Callable[..., Any]] = {
    "grid_sampler": grid_sample,
}

OF_IMAGES: dict[str, Callable[..., Any]] = {
    **{f"upsample_nearest{n}d": partial(nearest, 0.0) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": partial(nearest, 0.5) for n in (1, 2, 3)},
    "upsample_bicubic2d": partial(interpolated, True),
    "upsample_bilinear2d": partial(interpolated, False),
    "upsample_linear1d": partial(interpolated, False),
    "upsample_trilinear3d": partial(interpolated, False),
}
