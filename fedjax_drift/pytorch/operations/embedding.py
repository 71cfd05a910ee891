"""Rows of a table, and their sums, means and maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks

Array = jax.Array


def embedding(
    table: Array, ids: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    """Selects rows. The row ``padding_idx`` gets no gradient. An id outside of the table gives NaN.

    sparse: how PyTorch stores the gradient, which has no influence on its values.
    """
    _check_frequencies(scale_grad_by_freq)
    selected = table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    if padding_idx < 0:
        return selected
    return jnp.where((ids == padding_idx)[..., None], lax.stop_gradient(selected), selected)


def _check_frequencies(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        checks.refuse(
            "scale_grad_by_freq of an embedding must be False",
            "True",
            "leave it out, because the padding of a batch would count, too",
        )


class Bags(NamedTuple):
    """The arguments of embedding_bag after the offsets."""

    scale_grad_by_freq: bool = False
    mode: int = 0
    sparse: bool = False
    per_sample_weights: Array | None = None
    include_last_offset: bool = False
    padding_idx: int | None = None


def embedding_bag(table: Array, ids: Array, offsets: Array, *given: Any) -> tuple[Array, None, None, None]:
    """The sum (mode 0), mean (1) or maximum (2) of the rows of each bag. A bag of ``ids [n]`` begins at its offset.

    An empty bag gives 0. The ids ``padding_idx`` do not count.
    """
    scale_grad_by_freq, mode, _, per_sample_weights, include_last_offset, padding_idx = Bags(*given)
    _check_frequencies(scale_grad_by_freq)
    bags = len(offsets) - include_last_offset
    rows = embedding(table, ids)
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(len(ids)), side="right") - 1
    counts = jnp.ones(len(ids), bool) if padding_idx is None else ids != padding_idx
    bag = jnp.where(counts, bag, bags)  # outside, where it is left out

    if mode == 2:
        return _largest(rows, bag, bags), None, None, None
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    total = jax.ops.segment_sum(rows, bag, bags)
    if mode == 1:
        total = total / jnp.maximum(jax.ops.segment_sum(counts.astype(rows.dtype), bag, bags), 1)[:, None]
    return total, None, None, None


def _largest(rows: Array, bag: Array, bags: int) -> Array:
    """The first of equal ones gets the gradient, as in PyTorch."""
    n = len(rows)
    fixed = lax.stop_gradient(rows)
    top = jax.ops.segment_max(fixed, bag, bags)
    hit = fixed == top.at[bag].get(mode="fill", fill_value=jnp.nan)
    first = jax.ops.segment_min(jnp.where(hit, jnp.arange(n)[:, None], n), bag, bags)
    return jnp.where(first < n, jnp.take_along_axis(rows, jnp.minimum(first, n - 1), 0), 0)


ARRAYS: dict[str, Callable[..., Any]] = {
    "embedding": embedding,
    "embedding_bag": embedding_bag,
}
