"""Attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift.pytorch.operations.mode import Mode, kept

Array = jax.Array


class Options(NamedTuple):
    """The arguments of scaled_dot_product_attention after the values."""

    mask: Array | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False  # several heads of the queries share a head of the keys and values


def attention(mode: Mode, query: Array, key: Array, value: Array, *given: Any, **options: Any) -> Array:
    """[..., length, width]."""
    mask, dropout_p, is_causal, scale, enable_gqa = Options(*given, **options)
    if enable_gqa:
        key, value = (jnp.repeat(each, query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = query @ jnp.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is None:
        weights = jax.nn.softmax(scores)
    else:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
        # A position that attends to nothing gets 0.
        nothing = (scores == -jnp.inf).all(-1, keepdims=True)
        weights = jnp.where(nothing, 0, jax.nn.softmax(jnp.where(nothing, 0, scores)))
    return kept(mode, weights, dropout_p) @ value


IN_MODE: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
}
