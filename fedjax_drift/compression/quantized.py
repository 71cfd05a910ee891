"""Codecs that send all values with fewer bits."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from fedjax_drift import checks, spec
from fedjax_drift.compression.codec import Codec, bits_of
from fedjax_drift.recipes import recorded


@recorded
def none() -> Codec:
    """Every value as it is."""
    return Codec(lambda key, x: (x, x.size * bits_of(x)), "none")


@recorded
def cast(dtype: Any = "bfloat16") -> Codec:
    """Every value in another floating-point dtype, rounded to nearest.

    Args:
      dtype: "bfloat16" (default), "float16" or another floating-point dtype of JAX, as a name or a dtype.
    """
    dtype = checks.floating_dtype("dtype", dtype)
    return Codec(lambda key, x: (x.astype(dtype).astype(x.dtype), x.size * 8 * dtype.itemsize), "cast")


@recorded
def qsgd(levels: Annotated[int, spec.integer(1, 2**20)]) -> Codec:
    """QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, arXiv 1610.02132, section 3.1). It is unbiased.

        x_j -> ||x||_2 sign(x_j) xi_j / s

    xi_j is one of the two integers next to s |x_j| / ||x||_2, at random, so that its mean is this number. A message has
    the norm in 32 bits, and 1 + ceil(log2(s + 1)) bits for each value. (The paper also has a code of variable length.)

    Args:
      levels: s, the number of levels above 0, >= 1.
    """
    s = levels

    def send(key: jax.Array, x: jax.Array) -> tuple[jax.Array, int]:
        norm = jnp.sqrt((x * x).sum())
        level = s * jnp.abs(x) / jnp.where(norm > 0, norm, 1)
        xi = jnp.floor(level + jax.random.uniform(key, x.shape, x.dtype))
        return norm * jnp.sign(x) * xi / s, 32 + x.size * (1 + math.ceil(math.log2(s + 1)))

    return Codec(send, "qsgd")


@recorded
def sign(scale: Literal["l1", "none"] = "l1") -> Codec:
    """The sign of every value (+1 for 0), with one bit. It is biased, so use it with error feedback.

    Args:
      scale: "l1" (default): the signs are multiplied by ||x||_1 / d, which is sent in 32 bits (Karimireddy, Rebjock,
        Stich, Jaggi 2019, arXiv 1901.09847). "none": the decoded values are +1 and -1, as in signSGD.
    """

    def send(key: jax.Array, x: jax.Array) -> tuple[jax.Array, int]:
        signs = _signs(x)
        return (signs * jnp.abs(x).mean(), 32 + x.size) if scale == "l1" else (signs, x.size)

    return Codec(send, "sign")


@recorded
def drive() -> Codec:
    """DRIVE (Vargaftik et al. 2021, arXiv 2105.08339): one bit for each value, after a random rotation.

        x -> R^-1 (||x||_2^2 / ||R x||_1 sign(R x)),    R = H diag(random signs) / sqrt(d)

    H is the Hadamard matrix. <decoded, x> = ||x||^2 holds exactly. The mean of the decoded array over the keys is x
    only up to a few per cent, because this rotation is not uniform. A message has 32 bits for the scale, and one bit
    for each of the d values, where d is rounded up to a power of 2. Receivers make R from a seed that they know.
    """

    def send(key: jax.Array, x: jax.Array) -> tuple[jax.Array, int]:
        d = 2 ** math.ceil(math.log2(x.size))
        diagonal = jax.random.rademacher(key, (d,), x.dtype)
        rotated = hadamard(diagonal * jnp.pad(x.ravel(), (0, d - x.size)))
        length = jnp.abs(rotated).sum()
        scale = (x * x).sum() / jnp.where(length > 0, length, 1)
        decoded = diagonal * hadamard(scale * _signs(rotated))
        return decoded[: x.size].reshape(x.shape), 32 + d

    return Codec(send, "drive")


def hadamard(x: jax.Array) -> jax.Array:
    """H x / sqrt(d) for the Hadamard matrix H in Sylvester's order. d, the length of x, is a power of 2."""
    d, h = len(x), 1
    while h < d:
        pairs = x.reshape(-1, 2, h)
        x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(d)
        h *= 2
    return x / math.sqrt(d)


def _signs(x: jax.Array) -> jax.Array:
    """+1 or -1 for each value."""
    return jnp.where(x >= 0, jnp.ones_like(x), -jnp.ones_like(x))
