"""Losses, for modules that compute one in their forward.

reduction: 0 leaves the losses as they are, 1 is their mean and 2 their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift.pytorch.operations.dtypes import is_float, promoted
from fedjax_drift.pytorch.operations.elementwise import absolute

Array = jax.Array
MEAN, SUM = 1, 2


def _reduced(losses: Array, reduction: int) -> Array:
    return losses.mean() if reduction == MEAN else losses.sum() if reduction == SUM else losses


def of_difference(loss: Callable[..., Array], option: float | None = None) -> Callable[..., Array]:
    """A loss of x - y. option: the default of its last argument."""

    def reduced(x: Array, y: Array, reduction: int = MEAN, parameter: Any = option) -> Array:
        x, y = promoted(x, y)
        return _reduced(loss(x - y) if option is None else loss(x - y, parameter), reduction)

    return reduced


def _smooth(z: Array, beta: float) -> Array:
    far = absolute(z)
    return far if beta == 0 else jnp.where(far < beta, 0.5 * z * z / beta, far - 0.5 * beta)


def _huber(z: Array, delta: float) -> Array:
    far = absolute(z)
    return jnp.where(far <= delta, 0.5 * z * z, delta * (far - 0.5 * delta))


def cross_entropy_of_probabilities(x: Array, y: Array, weight: Array | None = None, reduction: int = MEAN) -> Array:
    """Logarithms are at least -100, as in PyTorch, and so is their gradient finite."""
    positive = jnp.maximum(jnp.log(jnp.where(x > 0, x, 1e-44)), -100)
    negative = jnp.maximum(jnp.log(jnp.where(x < 1, 1 - x, 1e-44)), -100)
    losses = -(y * positive + (1 - y) * negative)
    return _reduced(losses if weight is None else losses * weight, reduction)


def cross_entropy_of_two(
    x: Array, y: Array, weight: Array | None = None, pos_weight: Array | None = None, reduction: int = MEAN
) -> Array:
    """binary_cross_entropy_with_logits."""
    factor = 1 if pos_weight is None else 1 + (pos_weight - 1) * y
    losses = (1 - y) * x - factor * jax.nn.log_sigmoid(x)
    return _reduced(losses if weight is None else losses * weight, reduction)


def divergence(x: Array, y: Array, reduction: int = MEAN, log_target: bool = False) -> Array:
    """kl_div, where x are logarithms. 0 where y is 0."""
    if log_target:
        return _reduced(jnp.exp(y) * (y - x), reduction)
    return _reduced(jnp.where(y > 0, y * jnp.log(jnp.where(y > 0, y, 1)), 0) - y * x, reduction)


def negative_likelihood(
    x: Array, y: Array, weight: Array | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Array:
    """nll_loss. x: logarithms [classes], [B, classes] or [B, classes, ...]. y: classes, without that axis.

    The mean is over the weights of the examples that count.
    """
    axis = min(x.ndim - 1, 1)
    counts = y != ignore_index
    classes = jnp.where(counts, y, 0)
    chosen = jnp.take_along_axis(x, jnp.expand_dims(classes, axis), axis).squeeze(axis)
    weights = jnp.where(counts, 1 if weight is None else weight[classes], 0).astype(x.dtype)
    losses = jnp.where(counts, -chosen * weights, 0)
    return losses.sum() / weights.sum() if reduction == MEAN else _reduced(losses, reduction)


def cross_entropy(
    x: Array,
    y: Array,
    weight: Array | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:
    """y: classes, or probabilities of the shape of x."""
    axis = min(x.ndim - 1, 1)
    logs = jax.nn.log_softmax(x, axis)
    weights = 1 if weight is None else weight.reshape(-1, *[1] * (x.ndim - axis - 1))
    if is_float(y):
        y = y * (1 - label_smoothing) + label_smoothing / x.shape[axis]
        losses = -(logs * y * weights).sum(axis)
        return losses.sum() / max(losses.size, 1) if reduction == MEAN else _reduced(losses, reduction)
    sharp = negative_likelihood(logs, y, weight, reduction, ignore_index)
    if not label_smoothing:
        return sharp
    counts = y != ignore_index
    spread = jnp.where(counts, -(logs * weights).sum(axis), 0)
    if reduction == MEAN:
        own = 1 if weight is None else weight[jnp.where(counts, y, 0)]
        smooth = spread.sum() / jnp.where(counts, own, 0).sum()
    else:
        smooth = _reduced(spread, reduction)
    return (1 - label_smoothing) * sharp + label_smoothing / x.shape[axis] * smooth


ARRAYS: dict[str, Callable[..., Any]] = {
    "binary_cross_entropy": cross_entropy_of_probabilities,
    "binary_cross_entropy_with_logits": cross_entropy_of_two,
    "cross_entropy_loss": cross_entropy,
    "huber_loss": of_difference(_huber, 1.0),
    "kl_div": divergence,
    "l1_loss": of_difference(absolute),
    "mse_loss": of_difference(jnp.square),
    "nll_loss_nd": negative_likelihood,
    "smooth_l1_loss": of_difference(_smooth, 1.0),
    "soft_margin_loss": lambda x, y, reduction=MEAN: _reduced(jax.nn.softplus(-x * y), reduction),
}
