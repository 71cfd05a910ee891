"""Pytrees: the few reductions over parameters, and how the layouts of two trees are compared.

Elementwise equations are written out in the algorithms as ``jax.tree.map``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.errors import ConfigurationError
from fedjax_drift.types import PyTree

# --- reductions -------------------------------------------------------------------------------------------------------


def zeros_like(tree: PyTree) -> PyTree:
    """A tree of zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """a - b."""
    return jax.tree.map(lambda a, b: a - b, a, b)


def dot(a: PyTree, b: PyTree) -> jax.Array:
    """The inner product <a, b>, a scalar, summed in float32 or wider whatever the dtypes of the leaves."""

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
        return (a.astype(wide) * b.astype(wide)).sum()

    return jnp.stack([leaf(a, b) for a, b in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]).sum()


def size(tree: PyTree) -> int:
    """Number of values in all leaves, d for a model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def nbytes(tree: PyTree) -> int:
    """Bytes of all leaves, computed from their shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def all_finite(tree: PyTree) -> jax.Array:
    """bool []: no floating leaf contains NaN or infinity."""
    return first_nonfinite(tree) < 0


def first_nonfinite(tree: PyTree) -> jax.Array:
    """int32 []: index, in the order of `jax.tree.leaves`, of the first leaf with a NaN or an infinity; -1: none."""
    leaves = list(enumerate(jax.tree.leaves(tree)))
    floating = [(i, leaf) for i, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not floating:
        return jnp.int32(-1)
    bad = jnp.stack([~jnp.isfinite(leaf).all() for _, leaf in floating])
    return jnp.where(bad.any(), jnp.array([i for i, _ in floating], jnp.int32)[bad.argmax()], jnp.int32(-1))


def select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """``new`` where the scalar condition holds, else ``old``."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


# --- layouts ----------------------------------------------------------------------------------------------------------


def layout(tree: PyTree) -> list[list]:
    """[path, dtype, shape] of every leaf, as JSON stores it."""
    return [
        [jax.tree_util.keystr(path), leaf.dtype.name, list(leaf.shape)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def described(layout: Iterable[list]) -> dict[str, str]:
    """Path of every leaf -> its dtype and shape, such as ``float32[3, 2]``."""
    return {path or "(the value itself)": f"{dtype}{shape}" for path, dtype, shape, *_ in layout}


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any], between: str = "instead of") -> list[str]:
    """``name: actual <between> expected`` for every entry in which two descriptions differ."""
    names = [name for name in {**expected, **actual} if actual.get(name) != expected.get(name)]
    return [f"{name}: {actual.get(name, 'nothing')} {between} {expected.get(name, 'nothing')}" for name in names]


def check_layout(tree: Any, expected: Any, what: str, dtypes: bool = True) -> None:
    """Raises ConfigurationError, starting with ``what``, unless both trees have the same structure and shapes.

    dtypes: whether dtypes must be the same, too. The message lists the leaves that differ.
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
        {jax.tree_util.keystr(path): described_leaf(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(each)}
        for each in (tree, expected)
    )
    missing = dict.fromkeys(wanted, "missing")
    listed = differences({**missing, **actual}, wanted)
    raise ConfigurationError(f"{what}: {'; '.join(listed[:3]) or type(tree).__name__}")


def cast_like(new: PyTree, old: PyTree, what: str) -> PyTree:
    """``new`` in the dtypes of ``old``, as a compiled loop of rounds needs it.

    Raises ConfigurationError where the structure or a shape differs, and where a float would become an integer.
    """
    check_layout(new, old, f"{what} must have the structure and the shapes of the one before", dtypes=False)

    def cast(path: Any, new: Any, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new)
        if jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact):
            where = jax.tree_util.keystr(path) or "it"
            raise ConfigurationError(
                f"{what} must keep its dtypes, got {new.dtype} instead of {old.dtype} in {where}: begin with a float, "
                "0.0 instead of 0, or round it"
            )
        return new.astype(old.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)


def strip_weak_type(value: Any) -> jax.Array:
    """The value as an array of a fixed dtype: the weak dtype of a Python number would change in the first round."""
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    return lax.convert_element_type(array, array.dtype)
