"""Functions for pytrees: reductions over parameters, and the comparison of layouts.

The layout of a tree is its structure together with the shapes and dtypes of its leaves. The algorithms write
elementwise equations with ``jax.tree.map``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError

PyTree = Any

# --- reductions -------------------------------------------------------------------------------------------------------


def zeros_like(tree: PyTree) -> PyTree:
    """A tree of zeros with the same structure, shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """a - b."""
    return jax.tree.map(lambda a, b: a - b, a, b)


def dot(a: PyTree, b: PyTree) -> jax.Array:
    """The inner product <a, b>, a scalar. It is computed in float32, or in the dtype of the leaves if it is wider."""

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
        return (a.astype(wide) * b.astype(wide)).sum()

    def total(pairs: list) -> jax.Array:
        return jnp.stack([leaf(a, b) for a, b in pairs]).sum()

    def total_of_vectors(pairs: list) -> jax.Array:
        # In a training step on a CPU, XLA computes this sum about five times as fast from vectors as from matrices.
        # Without the barrier, it undoes the reshape.
        return total(lax.optimization_barrier([(a.ravel(), b.ravel()) for a, b in pairs]))

    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    # the barrier would only cost an accelerator a fusion
    return lax.platform_dependent(pairs, cpu=total_of_vectors, default=total)


def clip(tree: PyTree, norm: float) -> PyTree:
    """The tree scaled down to a global norm of at most ``norm``. Values that are not finite stay non-finite."""
    length = jnp.sqrt(dot(tree, tree))
    scale = jnp.where(length > norm, norm / jnp.where(length > norm, length, 1), 1)
    return jax.tree.map(lambda a: (scale * a).astype(a.dtype), tree)


def size(tree: PyTree) -> int:
    """The number of values in all leaves. For a model's parameters this is d."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def nbytes(tree: PyTree) -> int:
    """The number of bytes of all leaves, computed from their shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def crc32(tree: PyTree, start: int = 0) -> int:
    """The CRC-32 of the bytes of all leaves, one after the other. start: the CRC-32 of what comes before them."""
    for leaf in jax.tree.leaves(tree):
        start = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, start)
    return start


def first_nonfinite(tree: PyTree) -> jax.Array:
    """int32 []: the index of the first leaf with a NaN or an infinity, in the order of `jax.tree.leaves`.

    The index is -1 if all leaves are finite.
    """
    leaves = list(enumerate(jax.tree.leaves(tree)))
    floating = [(i, leaf) for i, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not floating:
        return jnp.int32(-1)
    bad = jnp.stack([~jnp.isfinite(leaf).all() for _, leaf in floating])
    return jnp.where(bad.any(), jnp.array([i for i, _ in floating], jnp.int32)[bad.argmax()], jnp.int32(-1))


def select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """``new`` if the scalar ``condition`` is True, otherwise ``old``."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


# --- layouts ----------------------------------------------------------------------------------------------------------


def layout(tree: PyTree) -> list[list]:
    """A list with [path, dtype, shape] for every leaf. It can be stored as JSON."""
    return [
        [jax.tree_util.keystr(path), leaf.dtype.name, list(leaf.shape)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def described(layout: Iterable[list]) -> dict[str, str]:
    """A dict from the path of every leaf to the text of its dtype and shape, such as ``float32[3, 2]``."""
    return {path or "(the value itself)": f"{dtype}{shape}" for path, dtype, shape, *_ in layout}


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any], between: str = "instead of") -> list[str]:
    """Lists the names whose values differ, each as the text ``name: actual <between> expected``."""
    names = [name for name in {**expected, **actual} if actual.get(name) != expected.get(name)]
    return [f"{name}: {actual.get(name, 'nothing')} {between} {expected.get(name, 'nothing')}" for name in names]


def check_layout(tree: Any, expected: Any, what: str, dtypes: bool = True) -> None:
    """Raises ConfigurationError unless both trees have the same structure and shapes.

    The message begins with ``what`` and lists the leaves that differ. dtypes: whether dtypes must be the same, too.
    """

    def leaf_layout(leaf: Any) -> tuple:
        try:
            return jnp.shape(leaf), jnp.result_type(leaf)
        except (TypeError, ValueError, OverflowError):  # not an array
            return type(leaf), None

    def compared(tree: Any) -> list[tuple]:
        return [leaf_layout(leaf)[: 1 + dtypes] for leaf in jax.tree.leaves(tree)]

    structure: Any = jax.tree.structure
    if structure(tree) == structure(expected) and compared(tree) == compared(expected):
        return

    def described_leaf(leaf: Any) -> str:
        shape, dtype = leaf_layout(leaf)
        return f"a {shape.__name__}" if dtype is None else f"{dtype}{list(shape)}"

    actual, wanted = (
        {jax.tree_util.keystr(p) or "the value": described_leaf(leaf) for p, leaf in jax.tree.leaves_with_path(each)}
        for each in (tree, expected)
    )
    missing = dict.fromkeys(wanted, "missing")
    listed = differences({**missing, **actual}, wanted)
    raise ConfigurationError(f"{what}: {'; '.join(listed[:3]) or type(tree).__name__}")


def cast_like(new: PyTree, old: PyTree, what: str) -> PyTree:
    """``new``, cast to the dtypes of ``old``. A compiled loop over rounds needs the same dtypes in every round.

    Raises ConfigurationError if the structure or a shape differs, or if a floating-point number would become an
    integer.
    """
    check_layout(new, old, f"{what} must have the structure and the shapes of the previous one", dtypes=False)

    def cast(path: Any, new: Any, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new)
        if jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact):
            where = jax.tree_util.keystr(path) or "the value itself"
            checks.refuse(
                f"{what} must keep its dtypes",
                f"{new.dtype} instead of {old.dtype} in {where}",
                "initialise it with a float (0.0 instead of 0), or round the new value to an integer",
            )
        return new.astype(old.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)


def strip_weak_type(value: Any) -> jax.Array:
    """The value as an array whose dtype is not weak. The weak dtype of a Python number could change in a round."""
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    return lax.convert_element_type(array, array.dtype)
