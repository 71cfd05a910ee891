"""The parts of a message that are not sent as the server adds them up.

A message is a pytree of arrays. A node of one of these types stands for other arrays:

- `Coded`: an array that went through a codec. The server adds up what it decodes, and the bits of the code are counted.
- `Row`: a part of the message for one of k models. The server adds it to row j of k rows. Only the part is sent.
- `Absent`: an array that is 0 for every client. It is neither sent nor added up.

`summed` returns the arrays that are added up, `coded_bits` and `uncoded` what is sent. So an algorithm around another
one may extend the message of its base, or leave out a part of it, and the count stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift.tree import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """An array that is sent with a codec."""

    decoded: jax.Array  # what the server decodes
    bits: jax.Array  # [], the number of bits that are sent


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Row:
    """A part of a message for one of several models, of which the others get nothing.

    The server adds up the pair (rows, chosen): ``rows`` has k rows in the place of each array of ``value``, leaves
    [k, ...], and ``chosen`` [k] is 1 for the model and 0 for the others.
    """

    value: PyTree  # leaves [...]
    index: jax.Array  # int32 [], the model j, in 0..k - 1
    k: int = field(metadata={"static": True})  # the number of models


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Absent:
    """An array of zeros that is not sent."""

    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})


def filled(message: PyTree) -> PyTree:
    """The message with zeros in the place of each `Absent` array."""
    return _replaced(Absent, lambda part: jnp.zeros(part.shape, part.dtype), message)


def decoded(message: PyTree) -> PyTree:
    """The message with what the server decodes in the place of each `Coded` array."""
    return _replaced(Coded, lambda part: part.decoded, message)


def summed(message: PyTree) -> PyTree:
    """The arrays that the server adds up."""

    def rows(part: Row) -> tuple[PyTree, jax.Array]:
        def at_index(value: jax.Array) -> jax.Array:
            return jnp.tensordot(jax.nn.one_hot(part.index, part.k, dtype=value.dtype), value, 0)

        return jax.tree.map(at_index, part.value), jax.nn.one_hot(part.index, part.k, dtype=float)

    return _replaced(Row, rows, decoded(message))


def is_like(params: PyTree) -> Callable[[PyTree], bool]:
    """A function of a part of a message that says whether it stands for arrays with the structure of ``params``."""

    def shapes(tree: PyTree) -> tuple[Any, list[Any]]:
        return jax.tree.structure(tree), [*map(jnp.shape, jax.tree.leaves(tree))]

    expected = shapes(params)
    return lambda part: shapes(filled(decoded(part))) == expected


def coded_bits(message: PyTree) -> jax.Array:
    """float []: the bits of all `Coded` arrays of a message. 0 without any."""
    coded = [part.bits for part in jax.tree.leaves(message, is_leaf=_is(Coded)) if isinstance(part, Coded)]
    return jnp.asarray(sum(coded, 0), float)


def uncoded(message: PyTree) -> list[jax.Array]:
    """The arrays of a message that are sent as they are."""
    return [part for part in jax.tree.leaves(message, is_leaf=_is(Coded)) if not isinstance(part, Coded)]


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda part: isinstance(part, kind)


def _replaced(kind: type, change: Callable[[Any], PyTree], message: PyTree) -> PyTree:
    """The message with ``change(part)`` in the place of each part of this kind."""
    return jax.tree.map(lambda part: change(part) if isinstance(part, kind) else part, message, is_leaf=_is(kind))
