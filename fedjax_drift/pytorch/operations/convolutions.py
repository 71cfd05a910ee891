"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.convolution.conv import conv
from fedjax_drift.pytorch.operations.images import Images, as_images, plain

Array = jax.Array
Sizes = int | Sequence[int]


def sizes(value: Sizes, axes: int) -> tuple[int, ...]:
    """An option of a convolution, one number for each axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def conv2d(
    x: Images | Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    pool: int = 1,
) -> Images | Array:
    """pool: the window and the stride of a max-pooling after the convolution (`graph.pooled`)."""
    grid = as_images(x).grid
    strides, dilations = sizes(stride, 2), sizes(dilation, 2)
    around = _amounts(padding, weight.shape[2:], dilations)
    if groups == 1 and dilations == (1, 1) and strides[0] == strides[1]:
        grid = jnp.pad(grid, ((0, 0), *around, (0, 0))) if around[0] != around[1] else grid
        same: Any = "VALID" if around[0] != around[1] or around[0] == (0, 0) else around[0]
        y = conv(grid, weight.transpose(2, 3, 1, 0), strides[0], same, pool)
    else:
        axes = ("CHWN", "OIHW", "CHWN")
        y = lax.conv_general_dilated(grid, weight, strides, around, None, dilations, axes, groups)
    y = y if bias is None else y + bias[:, None, None, None]
    return Images(y) if x.ndim == 4 else y[..., 0]


def _amounts(padding: Sizes | str, window: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """How many zeros a convolution adds before and after each axis."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
        return [(n // 2, n - n // 2) for n in totals]
    return [(n, n) for n in sizes(0 if isinstance(padding, str) else padding, len(window))]


def conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    """A convolution of images [B, C, length, 1]."""
    (stride,), (dilation,) = sizes(stride, 1), sizes(dilation, 1)
    around = padding if isinstance(padding, str) else (*sizes(padding, 1), 0)
    return plain(conv2d(x[..., None], weight[..., None], bias, stride, around, (dilation, 1), groups))[..., 0]


def conv3d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    dilations = sizes(dilation, 3)
    around = _amounts(padding, weight.shape[2:], dilations)
    axes = ("NCDHW", "OIDHW", "NCDHW")
    batch = x if x.ndim == 5 else x[None]
    y = lax.conv_general_dilated(batch, weight, sizes(stride, 3), around, None, dilations, axes, groups)
    y = y if bias is None else y + bias[:, None, None, None]
    return y if x.ndim == 5 else y[0]


def transposed(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Array:
    """A transposed convolution in any number of dimensions. weight: [in, out / groups, ...]."""
    n = weight.ndim - 2
    strides, dilations = sizes(stride, n), sizes(dilation, n)
    C, F, *window = weight.shape
    kernel = jnp.flip(weight, range(2, n + 2)).reshape(groups, C // groups, F, *window)
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(groups * F, C // groups, *window)
    around = [
        (d * (k - 1) - p, d * (k - 1) - p + extra)
        for d, k, p, extra in zip(dilations, window, sizes(padding, n), sizes(output_padding, n), strict=True)
    ]
    batch = x if x.ndim == n + 2 else x[None]
    y = lax.conv_general_dilated(batch, kernel, (1,) * n, around, strides, dilations, feature_group_count=groups)
    y = y if bias is None else y + bias.reshape(-1, *[1] * n)
    return y if x.ndim == n + 2 else y[0]


ARRAYS: dict[str, Callable[..., Any]] = {
    "conv1d": conv1d,
    "conv3d": conv3d,
    "conv_transpose1d": transposed,
    "conv_transpose2d": transposed,
    "conv_transpose3d": transposed,
}

OF_IMAGES: dict[str, Callable[..., Any]] = {
    "conv2d": conv2d,
}
