"""The contract of a robust rule: it sees the messages of all clients at once, and some of them may be hostile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import reprs, tree
from fedjax_drift.recipes import Recipe
from fedjax_drift.tree import PyTree


class Stack(NamedTuple):
    """The messages x_1, ..., x_n of a round. Clients that do not report are masked, so n is a number of the program."""

    each: PyTree  # leaves [M, ...], M >= n
    present: jax.Array  # bool [M], which of them count
    ids: jax.Array  # int32 [M], different for different messages; random numbers depend on them
    parts: Callable[[PyTree], PyTree] = lambda message: message  # what norms and distances are computed of

    @property
    def n(self) -> jax.Array:
        """int32 []: the number of messages."""
        return self.present.sum(dtype=jnp.int32)

    def squared_norms(self) -> jax.Array:
        """float [M]: ||x_i||^2, infinite where nothing is present."""
        return self.squared_distances_from(jax.tree.map(lambda a: jnp.zeros_like(a[0]), self.each))

    def squared_distances_from(self, z: PyTree) -> jax.Array:
        """float [M]: ||x_i - z||^2, infinite where nothing is present."""
        leaves = zip(jax.tree.leaves(self.parts(self.each)), jax.tree.leaves(self.parts(z)), strict=True)
        squares = sum(jnp.square(a - b[None]).reshape(len(a), -1).sum(1) for a, b in leaves)
        return jnp.where(self.present, squares, jnp.inf)

    def squared_distances(self) -> jax.Array:
        """float [M, M]: ||x_i - x_j||^2, infinite where one of them is not present. From the products of the messages:
        ||x_i||^2 + ||x_j||^2 - 2 x_i x_j."""
        matrices = [a.reshape(len(a), -1) for a in jax.tree.leaves(self.parts(self.each))]
        gram = sum(jnp.matmul(a, a.T, precision=lax.Precision.HIGHEST) for a in matrices)
        norms = jnp.diagonal(gram)
        squares = jnp.maximum(norms[:, None] + norms[None] - 2 * gram, 0)
        squares = jnp.where(jnp.eye(len(norms), dtype=bool), 0, squares)
        return jnp.where(self.present[:, None] & self.present[None], squares, jnp.inf)

    def mixed(self, weights: jax.Array) -> PyTree:
        """The sums over i of weights[..., i] x_i. weights: float [..., M], 0 where nothing is present."""
        highest = lax.Precision.HIGHEST
        return jax.tree.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, 1, precision=highest), self.each)

    def mean_of(self, chosen: jax.Array) -> PyTree:
        """The mean of the messages with True in ``chosen``, bool [..., M]. 0 if there are none."""
        weights = chosen.astype(float)
        return self.mixed(weights / jnp.maximum(weights.sum(-1, keepdims=True), 1))


def along(values: jax.Array, a: jax.Array) -> jax.Array:
    """Values [M] in the shape [M, 1, ...] that is multiplied with a [M, ...]."""
    return values.reshape(-1, *(1,) * (a.ndim - 1))


def among_lowest(values: jax.Array, count: jax.Array) -> jax.Array:
    """bool [..., M]: which values are among the ``count`` lowest along the last axis. Of equals, the first ones."""
    return jnp.argsort(jnp.argsort(values, -1, stable=True), -1) < count


class Rule(NamedTuple):
    """A robust rule, for `fd.aggregation.robust`.

    Attributes:
      combine: ``combine(state, stack, key) -> (message, state)``. key: of the round.
      init: ``init(message) -> state``, before round 0. message: zeros. Default: no state.
      f: the number of adversaries that it withstands, less than half of the messages.
      name: the name in logs and messages.
      recipe: how it was made.
    """

    combine: Callable[[PyTree, Stack, jax.Array], tuple[PyTree, PyTree]]
    init: Callable[[PyTree], PyTree] = lambda message: ()
    f: int = 0
    name: str = "rule"
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)


class Before(NamedTuple):
    """What is done with the messages before a robust rule.

    Attributes:
      change: ``change(stack, key) -> stack``.
      count: ``count(n)``, the number of messages that are left of n.
      f: as in `Rule`.
      name: the name in logs and messages.
      recipe: how it was made.
    """

    change: Callable[[Stack, jax.Array], Stack]
    count: Callable[[int], int] = lambda n: n
    f: int = 0
    name: str = "before"
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)


def of_finite(stack: Stack) -> Stack:
    """The stack without messages that are not finite. Zeros take the place of those that are not present."""
    finite = jax.vmap(tree.first_nonfinite)(stack.each) < 0
    present = stack.present & finite
    each = jax.tree.map(lambda a: jnp.where(along(present, a), a, 0), stack.each)
    return stack._replace(each=each, present=present)
