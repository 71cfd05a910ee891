"""Attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift.pytorch.operations.mode import Mode, kept

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def attention(
    mode: Mode,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """[..., length, width]. With enable_gqa, several heads of the queries share a head of the keys and values."""
    if enable_gqa:
        key, value = (jnp.repeat(each, query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = query @ jnp.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None and mask.dtype == bool:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = jax.nn.softmax(scores)
    if mask is not None and mask.dtype == bool:
        weights = jnp.where(mask, weights, 0)  # also if a position attends to nothing
    return kept(mode, weights, dropout_p) @ value


IN_MODE: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
}
