"""Layers that stay fast when every client has its own weights.

Inside a network images are (C, H, W, B), the batch innermost, and a convolution is one matrix product: its patches are
shifted slices, each a contiguous copy, and every elementwise operation vectorises over the batch. Under `jax.vmap` over
clients that is a batched product; `lax.conv` would become a grouped convolution, and inside a loop on a CPU it leaves
the fast path altogether.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

Padding = str | tuple[int, int]


def to_grid(x: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [C, H, W, B], the layout of the layers below."""
    return x.transpose(3, 1, 2, 0)


def flatten(x: jax.Array) -> jax.Array:
    """[C, H, W, B] -> [B, C * H * W]."""
    return x.reshape(-1, x.shape[-1]).T


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: Padding = "VALID") -> jax.Array:
    """Two-dimensional convolution (cross-correlation, as in `lax.conv_general_dilated`).

    Args:
      x: [C, H, W, B].
      kernel: [h, w, C, F].
      stride: same in both directions.
      padding: "VALID", "SAME" (XLA's and TensorFlow's convention), or (p, p'): rows and columns added before and after.

    Returns:
      [F, H', W', B].
    """
    h, w, C, F = kernel.shape
    x = pad(x, (h, w), stride, padding, 0.0)
    H, W = _positions(x, (h, w), stride)
    # First the columns of each window, then its rows: w + h slices instead of w * h. Rows of the patches are (i, j, c).
    columns = jnp.concatenate([_every(x, 2, j, W, stride) for j in range(w)])
    patches = jnp.concatenate([_every(columns, 1, i, H, stride) for i in range(h)])
    out = kernel.reshape(h * w * C, F).T @ patches.reshape(h * w * C, -1)
    return out.reshape(F, H, W, -1)


def max_pool(x: jax.Array, window: int = 2, stride: int | None = None, padding: Padding = "VALID") -> jax.Array:
    """Maximum over window x window; [C, H, W, B] -> [C, H', W', B]. ``stride`` defaults to the window."""
    return _pool(x, window, stride or window, padding, -jnp.inf, jnp.maximum)


def avg_pool(x: jax.Array, window: int = 2, stride: int | None = None, padding: Padding = "VALID") -> jax.Array:
    """Mean over window x window (padding counts as zero); [C, H, W, B] -> [C, H', W', B]."""
    return _pool(x, window, stride or window, padding, 0.0, jnp.add) / window**2


def pad(x: jax.Array, window: tuple[int, int], stride: int, padding: Padding, value: float) -> jax.Array:
    """Pads H and W of [C, H, W, B] with ``value``."""
    if padding == "VALID":
        return x
    if padding == "SAME":
        amounts = [_same(n, k, stride) for n, k in zip(x.shape[1:3], window, strict=True)]
    elif isinstance(padding, tuple):
        amounts = [padding, padding]
    else:
        raise ValueError(f'padding must be "VALID", "SAME" or a pair of numbers, got {padding!r}')
    return jnp.pad(x, ((0, 0), *amounts, (0, 0)), constant_values=value)


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _positions(x: jax.Array, window: tuple[int, int], stride: int) -> tuple[int, int]:
    H, W = ((n - k) // stride + 1 for n, k in zip(x.shape[1:3], window, strict=True))
    if H < 1 or W < 1:
        raise ValueError(f"a window of {window} does not fit an image of {x.shape[1:3]}: use larger images or padding")
    return H, W


def _every(x: jax.Array, axis: int, start: int, count: int, stride: int) -> jax.Array:
    """``count`` entries of x along an axis, ``stride`` apart."""
    return lax.slice_in_dim(x, start, start + (count - 1) * stride + 1, stride, axis)


def _pool(
    x: jax.Array, window: int, stride: int, padding: Padding, empty: float, combine: Callable[..., jax.Array]
) -> jax.Array:
    x = pad(x, (window, window), stride, padding, empty)
    H, W = _positions(x, (window, window), stride)
    x = reduce(combine, [_every(x, 1, i, H, stride) for i in range(window)])
    return reduce(combine, [_every(x, 2, j, W, stride) for j in range(window)])


def torch_uniform(fan_in: int) -> Callable[..., jax.Array]:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for weights and biases, which the papers' code uses."""
    bound = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


class Conv(nn.Module):
    """`conv` with a kernel [h, w, C, F] and a bias [F], initialised as PyTorch does."""

    features: int
    kernel_size: int
    stride: int = 1
    padding: Padding = "VALID"
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        C, k = x.shape[0], self.kernel_size
        init = torch_uniform(k * k * C)
        y = conv(x, self.param("kernel", init, (k, k, C, self.features)), self.stride, self.padding)
        if self.use_bias:
            y = y + self.param("bias", init, (self.features,))[:, None, None, None]
        return y


class Dense(nn.Module):
    """[B, in] -> [B, features], kernel [in, features] and bias [features], initialised as PyTorch does, or to zero."""

    features: int
    use_bias: bool = True
    zero_init: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init: Any = nn.initializers.zeros if self.zero_init else torch_uniform(x.shape[-1])
        y = x @ self.param("kernel", init, (x.shape[-1], self.features))
        return y + self.param("bias", init, (self.features,))[None] if self.use_bias else y


class GroupNorm(nn.Module):
    """Group normalisation of [C, H, W, B] over (C/groups, H, W) of each image, with a scale and a bias per channel."""

    groups: int = 2
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        C, H, W, B = x.shape
        grouped = x.reshape(self.groups, -1, B)
        mean = grouped.mean(1, keepdims=True)
        variance = jnp.square(grouped - mean).mean(1, keepdims=True)
        x = ((grouped - mean) * lax.rsqrt(variance + self.epsilon)).reshape(C, H, W, B)
        scale = self.param("scale", nn.initializers.ones, (C,))
        bias = self.param("bias", nn.initializers.zeros, (C,))
        return x * scale[:, None, None, None] + bias[:, None, None, None]


class Classifier(nn.Module):
    """The last layer: `Dense`, or with ``cosine`` the cosines between features and class weights, without a bias."""

    num_classes: int
    cosine: bool = False
    zero_init: bool = False

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        if not self.cosine:
            return Dense(self.num_classes, zero_init=self.zero_init, name="dense")(features)
        shape = (features.shape[-1], self.num_classes)
        return cosine_logits(features, self.param("kernel", torch_uniform(shape[0]), shape))


def cosine_logits(features: jax.Array, kernel: jax.Array) -> jax.Array:
    """Cosines in [-1, 1] between features [B, F] and the columns of kernel [F, C]: [B, C]. Zero vectors give 0."""
    return normalize(features, -1) @ normalize(kernel, 0)


def normalize(x: jax.Array, axis: int) -> jax.Array:
    """x / ||x|| along axis; a zero vector stays zero, with a finite gradient."""
    return x * lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis, keepdims=True), 1e-12))
