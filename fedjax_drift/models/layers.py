"""Layers that are fast if every client has different weights.

Inside a network, images have the layout [C, H, W, B], where the batch B is the last axis. The convolution and
the pooling after it are in conv.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.convolution.conv import conv
from fedjax_drift.convolution.groups import group_norm
from fedjax_drift.convolution.windows import Padding, avg_pool, max_pool, pad

__all__ = [
    "Classifier",
    "Conv",
    "Dense",
    "Embedding",
    "GroupNorm",
    "Padding",
    "avg_pool",
    "conv",
    "cosine_logits",
    "flatten",
    "max_pool",
    "normalize",
    "pad",
    "to_grid",
    "torch_uniform",
]


def to_grid(x: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [C, H, W, B], the layout of the layers in this file."""
    return x.transpose(3, 1, 2, 0)


def flatten(x: jax.Array) -> jax.Array:
    """[C, H, W, B] -> [B, C * H * W]."""
    return x.reshape(-1, x.shape[-1]).T


def torch_uniform(fan_in: int) -> Callable[..., jax.Array]:
    """An initializer for U(-1/sqrt(fan_in), 1/sqrt(fan_in)). It is PyTorch's default for weights and biases."""
    bound = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


class Conv(nn.Module):
    """Convolution and max-pooling with a kernel [h, w, C, F] and a bias [F], initialised as in PyTorch."""

    features: int
    kernel_size: int | tuple[int, int]  # k means k x k; or (h, w), which is (h, 1) for texts
    stride: int = 1
    padding: Padding = "VALID"
    use_bias: bool = True
    pool: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        C, k = x.shape[0], self.kernel_size
        h, w = (k, k) if isinstance(k, int) else k
        init = torch_uniform(h * w * C)
        y = conv(x, self.param("kernel", init, (h, w, C, self.features)), self.stride, self.padding, self.pool)
        if self.use_bias:  # added after the pooling: the result is the same, with fewer additions
            y = y + self.param("bias", init, (self.features,))[:, None, None, None]
        return y


class Dense(nn.Module):
    """A dense layer [B, in] -> [B, features], with a kernel [in, features] and a bias.

    It is initialised as in PyTorch, or to zero with ``zero_init=True``.
    """

    features: int
    use_bias: bool = True
    zero_init: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init: Any = nn.initializers.zeros if self.zero_init else torch_uniform(x.shape[-1])
        y = x @ self.param("kernel", init, (x.shape[-1], self.features))
        return y + self.param("bias", init, (self.features,))[None] if self.use_bias else y


class Embedding(nn.Module):
    """int [...] -> [..., features]: selects rows of a table [count, features].

    The table is initialised with N(0, 1), as in PyTorch. An id outside 0..count-1 gives NaN. So the first loss is NaN
    if the table is too small for the data.
    """

    count: int
    features: int
    output_axes = {"table": -2}

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        table = self.param("table", nn.initializers.normal(1.0), (self.count, self.features))
        return table.at[ids.astype(jnp.int32)].get(mode="fill", fill_value=jnp.nan)


class GroupNorm(nn.Module):
    """Group normalisation of [C, H, W, B], with a scale and a bias per channel (`convolution.groups`)."""

    groups: int = 2
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        C = x.shape[0]
        scale = self.param("scale", nn.initializers.ones, (C,))
        bias = self.param("bias", nn.initializers.zeros, (C,))
        return group_norm(x, self.groups, self.epsilon, scale, bias)


class Classifier(nn.Module):
    """The last layer: `Dense`, or with ``cosine=True`` the cosines between features and class weights, without bias."""

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
    """x / ||x|| along an axis. A zero vector stays zero, with a finite gradient."""
    return x * lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis, keepdims=True), 1e-12))
