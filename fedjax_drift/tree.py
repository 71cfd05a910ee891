"""The few reductions over pytrees of parameters. Elementwise equations are written out as ``jax.tree.map``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift.types import PyTree


def zeros_like(tree: PyTree) -> PyTree:
    """A tree of zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """a - b."""
    return jax.tree.map(lambda a, b: a - b, a, b)


def dot(a: PyTree, b: PyTree) -> jax.Array:
    """The inner product <a, b>, a scalar, summed in float32 or wider whatever the leaves are."""

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
        return (a.astype(wide) * b.astype(wide)).sum()

    return jnp.stack([leaf(a, b) for a, b in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]).sum()


def size(tree: PyTree) -> int:
    """Number of values in all leaves, d for a model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def nbytes(tree: PyTree) -> int:
    """Bytes of all leaves, from their shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def all_finite(tree: PyTree) -> jax.Array:
    """bool []: no NaN and no infinity in any floating leaf."""
    return first_nonfinite(tree) < 0


def first_nonfinite(tree: PyTree) -> jax.Array:
    """int32 []: the first leaf, as `jax.tree.leaves` counts them, that holds NaN or infinity; -1: none does."""
    leaves = list(enumerate(jax.tree.leaves(tree)))
    floating = [(i, leaf) for i, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not floating:
        return jnp.int32(-1)
    bad = jnp.stack([~jnp.isfinite(leaf).all() for _, leaf in floating])
    return jnp.where(bad.any(), jnp.array([i for i, _ in floating], jnp.int32)[bad.argmax()], jnp.int32(-1))
