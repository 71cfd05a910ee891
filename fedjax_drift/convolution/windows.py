"""Padding, pooling, and a convolution that is one matrix product of patches and weights, for images [C, H, W, B].

The implementation for a CPU uses these functions, too. conv.py selects the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks

Padding = str | tuple[int, int]


def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
    """The default implementation of `conv.conv`: one matrix product.

    The patches are concatenated slices. Each slice is a contiguous copy, and elementwise operations vectorise over the
    batch. `jax.vmap` over clients turns this function into a batched matrix product. It would turn `lax.conv` into a
    grouped convolution.
    """
    h, w, C, F = kernel.shape
    x = pad(x, (h, w), stride, padding, 0.0)
    H, W = positions(x, (h, w), stride)
    # First the columns of each window, then its rows, with w + h slices instead of w * h. Patches have rows (i, j, c).
    columns = jnp.concatenate([strided_slice(x, 2, j, W, stride) for j in range(w)])
    patches = jnp.concatenate([strided_slice(columns, 1, i, H, stride) for i in range(h)])
    out = kernel.reshape(h * w * C, F).T @ patches.reshape(h * w * C, -1)
    out = out.reshape(F, H, W, -1)
    return max_pool(out, pool) if pool > 1 else out


def max_pool(x: jax.Array, window: int = 2, stride: int | None = None, padding: Padding = "VALID") -> jax.Array:
    """The maximum over window x window: [C, H, W, B] -> [C, H', W', B]. ``stride`` defaults to the window."""
    return _pool(x, window, stride or window, padding, -jnp.inf, jnp.maximum)


def avg_pool(x: jax.Array, window: int = 2, stride: int | None = None, padding: Padding = "VALID") -> jax.Array:
    """The mean over window x window, where padding counts as zero: [C, H, W, B] -> [C, H', W', B]."""
    return _pool(x, window, stride or window, padding, 0.0, jnp.add) / window**2


def pad(x: jax.Array, window: tuple[int, int], stride: int, padding: Padding, value: float) -> jax.Array:
    """Pads H and W of [C, H, W, B] with ``value``."""
    if padding == "VALID":
        return x
    return jnp.pad(x, ((0, 0), *amounts(x, window, stride, padding), (0, 0)), constant_values=value)


def amounts(x: jax.Array, window: tuple[int, int], stride: int, padding: Padding) -> list[tuple[int, int]]:
    """How many rows ``padding`` adds before and after x [C, H, W, B], and how many columns."""
    if padding == "VALID":
        return [(0, 0), (0, 0)]
    if padding == "SAME":
        return [_same(n, k, stride) for n, k in zip(x.shape[1:3], window, strict=True)]
    if isinstance(padding, tuple):
        return [padding, padding]
    checks.refuse('padding must be "VALID", "SAME" or a pair of integers', repr(padding))


def positions(x: jax.Array, window: tuple[int, int], stride: int, padding: Padding = "VALID") -> tuple[int, int]:
    """(H', W'), the number of positions of a window in x [C, H, W, B]. Raises ValueError if there is none."""
    size = tuple(n + sum(a) for n, a in zip(x.shape[1:3], amounts(x, window, stride, padding), strict=True))
    H, W = ((n - k) // stride + 1 for n, k in zip(size, window, strict=True))
    if H < 1 or W < 1:
        fix = "use larger images or padding"
        checks.refuse(f"the window {window} must not be larger than the image", f"an image of size {size}", fix)
    return H, W


def strided_slice(x: jax.Array, axis: int, start: int, count: int, stride: int) -> jax.Array:
    """``count`` elements of x along an axis, beginning at ``start``, with steps of ``stride``."""
    return lax.slice_in_dim(x, start, start + (count - 1) * stride + 1, stride, axis)


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _pool(
    x: jax.Array, window: int, stride: int, padding: Padding, empty: float, combine: Callable[..., jax.Array]
) -> jax.Array:
    x = pad(x, (window, window), stride, padding, empty)
    H, W = positions(x, (window, window), stride)
    x = reduce(combine, [strided_slice(x, 1, i, H, stride) for i in range(window)])
    return reduce(combine, [strided_slice(x, 2, j, W, stride) for j in range(window)])
