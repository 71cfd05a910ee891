"""The convolution on a TPU. There, XLA chooses the order of the axes in memory, also for all operations around it.

A TPU keeps an array in tiles of 8 x 128 numbers. In the patches of `windows.convolve` the batch is the last axis, and
a batch of 20 fills only 20 of 128 places. With XLA's own convolution and pooling, clients and channels fill them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def convolve(x: jax.Array, kernel: jax.Array, stride: int, pool: int) -> jax.Array:
    """An implementation of `conv.conv`. x [C, H, W, B] is already padded.

    `jax.vmap` over clients makes one grouped convolution of it. If several numbers of a pooling window are the largest,
    the first one gets the gradient.
    """
    out = lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN"))
    if pool == 1:
        return out
    window = (1, pool, pool, 1)
    return lax.reduce_window(out, -jnp.inf, lax.max, window, window, "VALID")
