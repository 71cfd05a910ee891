"""Codecs that send some of the values: the largest, or random ones.

A message has the k = ceil(fraction d) values, and says where they are: with ceil(log2 d) bits for each, or with a
bitmap of d bits if this is shorter.
"""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.compression.codec import Codec, bits_of
from fedjax_drift.recipes import recorded
from fedjax_drift.spec import Fix, Flag, Share

Sent = Annotated[Share, Fix("0.01 sends 1 % of the values")]


@recorded
def top_k(fraction: Sent) -> Codec:
    """The k values with the largest magnitudes, and zeros. It is biased, so use it with error feedback.

    Of equal magnitudes, those with the smallest indices are sent.

    Args:
      fraction: of the values that are sent, in (0, 1].
    """

    def send(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        k = number_sent(fraction, x.size)
        magnitude = lax.bitcast_convert_type(jnp.abs(x.ravel()), _unsigned(x.dtype))  # floats >= 0 have this order
        sent = largest(magnitude, k).reshape(x.shape)
        return jnp.where(sent, x, 0), sparse_bits(x, k)

    return Codec(send, "top_k")


@recorded
def random_k(fraction: Sent, scale: Flag = False) -> Codec:
    """k random values, each set of k values equally likely, and zeros.

    Args:
      fraction: of the values that are sent, in (0, 1].
      scale: whether the values are multiplied by d / k. The decoded array is then unbiased, and not a contraction: use
        it without error feedback. Default: False.
    """

    def send(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        k = number_sent(fraction, x.size)
        sent = largest(jax.random.bits(key, (x.size,), jnp.uint32), k).reshape(x.shape)
        factor = (x.size / k).astype(x.dtype) if scale else 1
        return jnp.where(sent, x * factor, 0), sparse_bits(x, k)

    return Codec(send, "random_k")


def number_sent(fraction: float, d: int) -> jax.Array:
    """k = ceil(fraction d), int32 []. In float32, 0.001 * 3000 is a little more than 3, which must not become 4."""
    return jnp.clip(jnp.ceil(fraction * d * (1 - 3e-7)), 1, d).astype(jnp.int32)


def sparse_bits(x: jax.Array, k: jax.Array) -> jax.Array:
    """The bits of k values of x and their places."""
    places = jnp.minimum(k * float(math.ceil(math.log2(x.size))), float(x.size))
    return k * float(bits_of(x)) + places


def largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """bool [d]: the k largest of the unsigned integers x [d]. Of equal ones, the first.

    The k-th largest integer is found bit by bit, each with one pass over x. On a CPU this is faster than sorting, and k
    may be an argument of the program.
    """
    bits = 8 * x.dtype.itemsize

    def next_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.ones((), x.dtype) << (bits - 1 - i).astype(x.dtype))
        return jnp.where((x >= candidate).sum() >= k, candidate, threshold)

    threshold = lax.fori_loop(0, bits, next_bit, jnp.zeros((), x.dtype))
    above, equal = x > threshold, x == threshold
    return above | (equal & (jnp.cumsum(equal) <= k - above.sum()))


def _unsigned(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{8 * dtype.itemsize}")
