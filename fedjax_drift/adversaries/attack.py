"""The contract of an attack: what a hostile client sends, or how its examples differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import reprs
from fedjax_drift.recipes import Recipe
from fedjax_drift.robust.rule import along
from fedjax_drift.shift.rule import Shift
from fedjax_drift.tree import PyTree


class Seen(NamedTuple):
    """What the adversaries of a round know: the messages of all clients, and the rule with which they are combined."""

    each: PyTree  # leaves [M, ...], the messages. Those of the adversaries are what honest training gave them
    honest: jax.Array  # bool [M], the clients that report and are honest
    hostile: jax.Array  # bool [M], the clients that report and are not
    ids: jax.Array  # int32 [M]
    key: jax.Array  # of this round
    judge: Callable[[PyTree], PyTree]
    """``judge(messages)``, leaves [M, ...]: what the server makes of these messages, with its own random numbers
    exchanged for others."""

    @property
    def mean(self) -> PyTree:
        """mu, the mean of the honest messages."""
        return jax.tree.map(lambda a: _mean_of(self.honest, a), self.each)

    @property
    def deviation(self) -> PyTree:
        """sigma, the standard deviation of each coordinate over the honest messages (divided by their number)."""
        mean, honest = self.mean, self.honest
        return jax.tree.map(lambda a, mu: jnp.sqrt(_mean_of(honest, jnp.square(a - mu[None]))), self.each, mean)

    def sent(self, attack: PyTree) -> PyTree:
        """The messages, leaves [M, ...], if all adversaries send ``attack``, leaves [...] or [M, ...]."""

        def leaf(a: jax.Array, lie: jax.Array) -> jax.Array:
            return jnp.where(along(self.hostile, a), jnp.broadcast_to(lie, a.shape).astype(a.dtype), a)

        return jax.tree.map(leaf, self.each, attack)


class Attack(NamedTuple):
    """An attack, for `fd.adversaries.share` and `fd.adversaries.clients`.

    Attributes:
      send: ``send(seen) -> message``, leaves [...] if all adversaries send the same, or [M, ...]. None: what their
        training gave them.
      examples: a shift of the training examples of the adversaries. None: they are as stored.
      target: of a backdoor, the class that triggered images shall have.
      name: the name in logs and messages.
      recipe: how it was made.
    """

    send: Callable[[Seen], PyTree] | None = None
    examples: Shift | None = None
    target: int | None = None
    trigger: Callable[[jax.Array], jax.Array] | None = None  # of a backdoor: ``trigger(x) -> x`` of one image
    name: str = "attack"
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)


def _mean_of(chosen: jax.Array, a: jax.Array) -> jax.Array:
    """The mean of the rows of a [M, ...] with True in ``chosen`` [M]. The others may be anything."""
    weights = chosen.astype(a.dtype) / jnp.maximum(chosen.sum(), 1).astype(a.dtype)
    return jnp.tensordot(weights, jnp.where(along(chosen, a), a, 0), 1, precision="highest")
