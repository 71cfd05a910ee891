"""Normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.batch_norm import rows
from fedjax_drift.convolution.groups import normalized
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.operations.images import Images, plain
from fedjax_drift.pytorch.operations.mode import Mode

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def batch_norm(
    mode: Mode,
    x: Any,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    variance: Array,
    momentum: float,
    eps: float,
) -> tuple[Any, None, None]:
    """BatchNorm with running statistics, in evaluation."""
    scale = lax.rsqrt(variance + eps) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    return _scaled(x, scale, shift), None, None


def batch_norm_training(
    mode: Mode,
    x: Any,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    variance: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, None, None, Array, Array]:
    """BatchNorm in training. Returns the output and, as the last two, the new running statistics.

    The padding of a batch is left out. As in PyTorch, the running variance has n - 1 in its denominator.
    """
    if mode.frozen or not training:
        return *batch_norm(mode, x, weight, bias, mean, variance, momentum, eps), mean, variance
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
    y = centred * jnp.expand_dims(scale, others)
    y = y if bias is None else y + jnp.expand_dims(bias, others)
    unbiased = spread * n / jnp.maximum(n - 1, 1)
    new = [(1 - momentum) * old + momentum * now for old, now in ((mean, average), (variance, unbiased))]
    return Images(y) if isinstance(x, Images) else y, None, None, new[0], new[1]


def _scaled(x: Any, scale: Array, shift: Array) -> Any:
    """x * scale + shift, with one number for each channel."""
    if isinstance(x, Images):
        return Images(x.grid * scale[:, None, None, None] + shift[:, None, None, None])
    shape = (1, -1, *[1] * (x.ndim - 2))
    return x * scale.reshape(shape) + shift.reshape(shape)


def _normalised(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(dtype)
    wide = wide - wide.mean(axes, keepdims=True)
    return (wide * lax.rsqrt(jnp.square(wide).mean(axes, keepdims=True) + eps)).astype(x.dtype)


def layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5, *_: Any
) -> Array:
    y = _normalised(x, tuple(range(-len(shape), 0)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Array, shape: Sequence[int], weight: Array | None = None, eps: float | None = None) -> Array:
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    y = x * lax.rsqrt(jnp.square(x).mean(tuple(range(-len(shape), 0)), keepdims=True) + eps)
    return y if weight is None else y * weight


def group_norm(
    x: Any, groups: int, weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5, *_: Any
) -> Any:
    if isinstance(x, Images):
        y: Any = Images(normalized(x.grid, groups, eps))
    else:
        y = _normalised(x.reshape(x.shape[0], groups, -1), (2,), eps).reshape(x.shape)
    C = x.shape[1]
    scale, shift = jnp.ones(C, x.dtype) if weight is None else weight, jnp.zeros(C, x.dtype) if bias is None else bias
    return _scaled(y, scale, shift)


def instance_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, own: bool, momentum: float, eps: float, *_: Any
) -> Any:
    if not own:
        raise ConfigurationError("InstanceNorm must have no running statistics: pass track_running_stats=False")
    return group_norm(x, x.shape[1], weight, bias, eps)


ARRAYS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}

OF_IMAGES: dict[str, Callable[..., Any]] = {
    "group_norm": group_norm,
    "instance_norm": instance_norm,
}

OF_IMAGES_IN_MODE: dict[str, Callable[..., Any]] = {
    "_native_batch_norm_legit_functional": batch_norm_training,
    "_native_batch_norm_legit_no_training": batch_norm,
}
