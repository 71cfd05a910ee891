"""The convolution on a TPU. There, XLA chooses the order of the axes in memory, also for all operations around it.

A TPU keeps an array in tiles of 8 x 128 numbers. In the patches of `windows.convolve` the batch is the last axis, and
a batch of 20 fills only 20 of 128 places. With XLA's own convolution and pooling, clients and channels fill them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.convolution import windows
from fedjax_drift.convolution.windows import Padding


def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
    """An implementation of `conv.conv`.

    `jax.vmap` over clients makes one grouped convolution of it. If several numbers of a pooling window are the largest,
    the first one gets the gradient.
    """
    # The convolution itself pads. A padded copy of the images would be an operation of its own.
    around = windows.amounts(x, (kernel.shape[0], kernel.shape[1]), stride, padding)
    if x.shape[2] == kernel.shape[1] == pool == 1 and around[1] == (0, 0):  # XLA is faster without the axis of size 1
        axes = ("CHN", "HIO", "CHN")
        out = lax.conv_general_dilated(x[:, :, 0], kernel[:, 0], (stride,), around[:1], dimension_numbers=axes)
        return out[:, :, None]
    out = lax.conv_general_dilated(x, kernel, (stride, stride), around, dimension_numbers=("CHWN", "HWIO", "CHWN"))
    if pool == 1:
        return out
    window = (1, pool, pool, 1)
    return lax.reduce_window(out, -jnp.inf, lax.max, window, window, "VALID")
