"""The contract of a codec: what the receiver of an array decodes, and how many bits are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_drift import reprs
from fedjax_drift.recipes import Recipe


class Codec(NamedTuple):
    """A codec of arrays: one pure function.

    The simulation does not write the bits. It computes what their receiver decodes, and counts them as a real encoder
    would write them. With the decorator `fd.compression.codec` on the factory of a codec of your own, its numbers are
    arguments of the compiled round.

    Attributes:
      send: ``send(key, x) -> (decoded, bits)``. key: a PRNG key of this message. x: an array of floating-point numbers
        of any shape, with at least one element. decoded: an array like x. bits: the number of bits that are sent, a
        number or a scalar.
      name: the name in logs and messages.
      recipe: how it was made, recorded by `fd.compression.codec`.
    """

    send: Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]
    name: str = "codec"
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)


def bits_of(x: jax.Array) -> int:
    """The number of bits of one value of the array."""
    return 8 * x.dtype.itemsize
