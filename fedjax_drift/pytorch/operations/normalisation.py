"""Normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks
from fedjax_drift.batch_norm import rows
from fedjax_drift.convolution import groups as images
from fedjax_drift.pytorch.operations.images import Images, on_grid, plain
from fedjax_drift.pytorch.operations.mode import Mode

Array = jax.Array


def batch_norm(mode: Mode, x: Any, weight: Array | None, bias: Array | None, *options: Any) -> tuple[Any, None, None]:
    """BatchNorm in evaluation. options: the running mean and variance, the momentum and eps."""
    mean, variance, _, eps = options
    scale = lax.rsqrt(variance + eps) * (1 if weight is None else weight)
    y = on_grid(lambda grid: grid - _channels(x, mean), x)  # first, because the mean may be large
    return _scaled(y, scale, bias), None, None


def batch_norm_training(
    mode: Mode, x: Any, weight: Array | None, bias: Array | None, mean: Array, variance: Array, *options: Any
) -> tuple[Any, None, None, Array, Array]:
    """BatchNorm in training. options: whether it is in training, the momentum and eps.

    Returns the output and, as the last two, the new running statistics. The padding of a batch is left out. As in
    PyTorch, the running variance has n - 1 in its denominator.
    """
    training, momentum, eps = options
    if mode.frozen or not training:
        return *batch_norm(mode, x, weight, bias, mean, variance, momentum, eps), mean, variance
    y, average, spread = _by_batch(mode, x, weight, bias, eps)
    new = [(1 - momentum) * old + momentum * now for old, now in ((mean, average), (variance, spread))]
    return y, None, None, new[0], new[1]


def batch_norm_without_statistics(
    mode: Mode, x: Any, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Any, None, None]:
    """With track_running_stats=False, also evaluation normalises with the batch. momentum has no influence."""
    return _by_batch(mode, x, weight, bias, eps)[0], None, None


def _by_batch(mode: Mode, x: Any, weight: Array | None, bias: Array | None, eps: float) -> tuple[Any, Array, Array]:
    """x normalised with the mean and variance of the batch. Returns also the mean and the unbiased variance."""
    grid, axis = (x.grid, 0) if isinstance(x, Images) else (x, 1)
    others = tuple(i for i in range(grid.ndim) if i != axis)
    if mode.mask is None:
        real, n = None, jnp.asarray(grid.size // grid.shape[axis], grid.dtype)
    else:
        real = rows(mode.mask, plain(x), None)
        real = real.reshape(1, 1, 1, -1) if isinstance(x, Images) else real
        n = real.sum().astype(grid.dtype) * (math.prod(x.shape[2:]))
        n = jnp.maximum(n, 1)
    average = grid.sum(others, where=real) / n
    centred = grid - jnp.expand_dims(average, others)
    spread = jnp.square(centred).sum(others, where=real) / n
    scale = lax.rsqrt(spread + eps) * (1 if weight is None else weight)
    y = _scaled(Images(centred) if isinstance(x, Images) else centred, scale, bias)
    return y, average, spread * n / jnp.maximum(n - 1, 1)


def _channels(x: Any, values: Array) -> Array:
    """One number for each channel, in the layout of x."""
    return values[:, None, None, None] if isinstance(x, Images) else values.reshape(1, -1, *[1] * (x.ndim - 2))


def _scaled(x: Any, scale: Array | None, shift: Array | None) -> Any:
    """x * scale + shift, with one number for each channel."""
    x = x if scale is None else on_grid(lambda grid: grid * _channels(x, scale), x)
    return x if shift is None else on_grid(lambda grid: grid + _channels(x, shift), x)


def _normalised(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(dtype)
    wide = wide - wide.mean(axes, keepdims=True)
    return (wide * lax.rsqrt(jnp.square(wide).mean(axes, keepdims=True) + eps)).astype(x.dtype)


def layer_norm(
    x: Array,
    shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Array:
    """cudnn_enable has no influence, also below."""
    y = _normalised(x, tuple(range(-len(shape), 0)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Array, shape: Sequence[int], weight: Array | None = None, eps: float | None = None) -> Array:
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    y = x * lax.rsqrt(jnp.square(x).mean(tuple(range(-len(shape), 0)), keepdims=True) + eps)
    return y if weight is None else y * weight


def group_norm(
    x: Any,
    groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if isinstance(x, Images):  # the variance E[x^2] - E[x]^2 is exact only for means of the order of the deviation
        channels, size = x.grid.shape[0], x.grid.shape[0] // groups
        first = lax.stop_gradient(x.grid[::size, :1, :1])
        shifted = x.grid - jnp.repeat(first, size, 0, total_repeat_length=channels)
        return Images(images.group_norm(shifted, groups, eps, weight, bias))
    y = _normalised(x.reshape(x.shape[0], groups, -1), (2,), eps).reshape(x.shape)
    return _scaled(y, weight, bias)


def instance_norm(x: Any, weight: Array | None, bias: Array | None, mean: Array | None, *options: Any) -> Any:
    """options: the running variance, whether the statistics are those of the input, the momentum, eps."""
    _, of_input, _, eps, _ = options
    if mean is not None or not of_input:
        checks.refuse(
            "InstanceNorm must have no running statistics", "track_running_stats=True", "pass False, or use BatchNorm"
        )
    return group_norm(x, x.shape[1], weight, bias, eps)


ARRAYS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}


def prelu(x: Any, weight: Array) -> Any:
    """The slope of each channel for numbers below 0."""
    slope = weight.reshape(()) if weight.size == 1 else _channels(x, weight)
    return on_grid(lambda grid: jnp.where(grid > 0, grid, slope * grid), x)


OF_IMAGES: dict[str, Callable[..., Any]] = {
    "group_norm": group_norm,
    "prelu": prelu,
    "instance_norm": instance_norm,
}

OF_IMAGES_IN_MODE: dict[str, Callable[..., Any]] = {
    "_native_batch_norm_legit.no_stats": batch_norm_without_statistics,
    "_native_batch_norm_legit_functional": batch_norm_training,
    "_native_batch_norm_legit_no_training": batch_norm,
}
