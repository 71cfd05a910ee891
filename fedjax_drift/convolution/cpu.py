"""The convolution on a CPU. There, clients train one after another, and the speed depends on the caches.

Compared to `windows.convolve`, the time of a round is 0.92 times (LeNet-5), 0.87 times (MNIST CNN) or 0.74 times (CIFAR
CNN) as long.
"""

from __future__ import annotations

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.convolution import bilinear, windows, winograd
from fedjax_drift.convolution.windows import Padding


def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
    """The implementation of `conv.conv` that is fastest on one core."""
    h, w, C, F = kernel.shape
    H, W = windows.positions(x, (h, w), stride, padding)
    many, few = min(C, F) >= 64, H * W * x.shape[3] < 512  # channels, positions
    # With fewer channels, or half the precision, the transformations of the tiles cost more than the products save.
    if (h, w, stride) == (3, 3, 1) and many and not few and x.dtype in (jnp.float32, jnp.float64):
        around = tuple(windows.amounts(x, (3, 3), 1, padding))
        return pool_blocks(winograd.convolution.bind(x, kernel, padding=around), pool)
    x = windows.pad(x, (h, w), stride, padding, 0.0)
    if pool == 2 and stride == 1 and F <= 16:
        return _four_windows(x, kernel)
    # XLA's convolution is only fast with more than 16 channels and in float32. A 1x1 kernel needs no patches. If there
    # are few patches, or small ones, they cost less than the transpositions, which XLA repeats in each later operation.
    small = h * w * C < 32 and pool == 1
    if stride > 1 or max(C, F) <= 16 or h * w == 1 or small or many and few or x.dtype != jnp.float32:
        return pool_blocks(windows.convolve(x, kernel, stride, "VALID", 1), pool)
    return pool_blocks(convolution.bind(x.transpose(3, 1, 2, 0), kernel), pool).transpose(3, 1, 2, 0)


# --- few filters, and pooling -----------------------------------------------------------------------------------------


def _four_windows(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution and pooling by 2 for few filters.

    A patch of (h + 1) x (w + 1) pixels contains four h x w windows. The outputs at these windows are pooled into one.
    With a 5x5 kernel, a patch has 36 numbers per channel and serves four positions of the convolution. So there are 9
    numbers per position, instead of 25. The kernel is shifted to each of the four windows. These four kernels form
    a matrix with 4 F columns, because F columns are too few for vector instructions. The matrix product needs
    36 / 25 = 1.44 times as many operations as a convolution.
    """
    F = kernel.shape[-1]
    shifted = [jnp.pad(kernel, ((i, 1 - i), (j, 1 - j), (0, 0), (0, 0))) for i in (0, 1) for j in (0, 1)]
    four = windows.convolve(x, jnp.concatenate(shifted, -1), 2, "VALID", 1)
    return _largest(four.reshape(4, F, *four.shape[1:]), (0,))


def pool_blocks(x: jax.Array, pool: int) -> jax.Array:
    """`windows.max_pool` over the axes 1 and 2, for any order of the other axes."""
    if pool == 1:
        return x
    a, H, W, b = x.shape
    x = x[:, : H // pool * pool, : W // pool * pool]
    return _largest(x.reshape(a, H // pool, pool, W // pool, pool, b), (2, 4))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """``x.max(axes)`` with a faster derivative. Equal largest values share the gradient, as in JAX's own rule.

    With JAX's own rule, a training step of LeNet-5 takes a third longer.
    """
    if axes == (0,):  # XLA would pass a reduction to YNNPACK, and a round of LeNet-5 would take 1.2 times as long
        return reduce(jnp.maximum, jnp.unstack(x))
    return x.max(axes)


@_largest.defjvp
def _largest_derivative(axes: tuple[int, ...], primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    largest = _largest(x, axes)
    hit = x == jnp.expand_dims(largest, axes)
    return largest, jnp.where(hit, t, 0).sum(axes) / hit.sum(axes).astype(t.dtype)


# --- many channels ----------------------------------------------------------------------------------------------------
#
# Stride 1, no padding. x is [B, H, W, C], kernel is [h, w, C, F], and g [B, H', W', F] is the gradient of the output.
# Only in this layout is XLA's convolution as fast as a large matrix product. Therefore the weight gradient is a
# convolution in the same layout, and the image gradient is a matrix product. All three functions process a few images
# at a time, so that the patches stay in the cache.


def _convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x, kernel -> [B, H', W', F], the output."""
    h, w, C, _ = kernel.shape
    patch_numbers = h * w * C * (x.shape[1] - h + 1) * (x.shape[2] - w + 1)
    out = lax.map(lambda x: _correlate(x, kernel), _chunks(x, patch_numbers))
    return out.reshape(-1, *out.shape[2:])


def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """x, g -> [h, w, C, F], the gradient of the kernel.

    It is computed as a convolution of x with the kernel g. In this convolution, the C channels of x take the role of
    the images, and the B images take the role of the channels.
    """
    _, H, W, F = g.shape
    h, w, C = x.shape[1] - H + 1, x.shape[2] - W + 1, x.shape[3]

    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, g = chunk
        return total + _correlate(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3)), None

    patch_numbers = h * w * C * H * W
    chunks = _chunks(x, patch_numbers), _chunks(g, patch_numbers)
    total, _ = lax.scan(add, jnp.zeros((C, h, w, F), g.dtype), chunks)
    return total.transpose(1, 2, 0, 3)


def _image_gradient(g: jax.Array, kernel: jax.Array) -> jax.Array:
    """g, kernel -> [B, H, W, C]: adds the gradients of the patches in place, for each position in the window."""
    h, w, C, F = kernel.shape
    _, H, W, _ = g.shape

    def images(g: jax.Array) -> jax.Array:
        patches = (g.reshape(-1, F) @ kernel.reshape(-1, F).T).reshape(-1, H, W, h, w, C)
        x = jnp.zeros((len(g), H + h - 1, W + w - 1, C), g.dtype)
        for i in range(h):
            for j in range(w):
                x = lax.dynamic_update_slice(x, x[:, i : i + H, j : j + W] + patches[:, :, :, i, j], (0, i, j, 0))
        return x

    x = lax.map(images, _chunks(g, h * w * C * H * W))
    return x.reshape(-1, *x.shape[2:])


def _chunks(x: jax.Array, patch_numbers: int) -> jax.Array:
    """[B, ...] -> [B / n, n, ...], where the patches of n images have at most 4 MB.

    patch_numbers: the number of floats in the patches of one image.
    """
    most = min(len(x), max(1, 2**20 // patch_numbers))
    n = max(n for n in range(1, most + 1) if len(x) % n == 0)
    return x.reshape(-1, n, *x.shape[1:])


def _correlate(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


convolution = bilinear.primitive(_convolution, _image_gradient, _weight_gradient)
