"""The losses whose gradient would be infinite, or a NaN, in PyTorch's own decomposition of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
MEAN, SUM = 1, 2  # of the losses; 0 leaves them as they are


def _reduced(losses: Array, reduction: int) -> Array:
    return losses.mean() if reduction == MEAN else losses.sum() if reduction == SUM else losses


def cross_entropy_of_probabilities(x: Array, y: Array, weight: Array | None = None, reduction: int = MEAN) -> Array:
    """Logarithms are at least -100, as in PyTorch, and so is their gradient finite."""
    positive = jnp.maximum(jnp.log(jnp.where(x > 0, x, 1e-44)), -100)
    negative = jnp.maximum(jnp.log(jnp.where(x < 1, 1 - x, 1e-44)), -100)
    losses = -(y * positive + (1 - y) * negative)
    return _reduced(losses if weight is None else losses * weight, reduction)


ARRAYS: dict[str, Callable[..., Any]] = {
    "binary_cross_entropy": cross_entropy_of_probabilities,
    "soft_margin_loss": lambda x, y, reduction=MEAN: _reduced(jax.nn.softplus(-x * y), reduction),
}
