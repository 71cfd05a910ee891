"""Layers that stay fast when every client has its own weights.

Inside a network images are (C, H, W, B), the batch innermost, and a convolution is one matrix product: its patches are
shifted slices, each a contiguous copy, and every elementwise operation vectorises over the batch. Under `jax.vmap` over
clients that is a batched product; `lax.conv` would become a grouped convolution.

On a CPU clients train one after another, and what counts is how often images leave the caches: `_on_cpu` has faster
forms of the same convolution there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from fedjax_drift.errors import ConfigurationError

Padding = str | tuple[int, int]


def to_grid(x: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [C, H, W, B], the layout of the layers below."""
    return x.transpose(3, 1, 2, 0)


def flatten(x: jax.Array) -> jax.Array:
    """[C, H, W, B] -> [B, C * H * W]."""
    return x.reshape(-1, x.shape[-1]).T


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: Padding = "VALID", pool: int = 1) -> jax.Array:
    """Two-dimensional convolution (cross-correlation, as in `lax.conv_general_dilated`), then `max_pool`.

    Args:
      x: [C, H, W, B].
      kernel: [h, w, C, F].
      stride: same in both directions.
      padding: "VALID", "SAME" (XLA's and TensorFlow's convention), or (p, p'): rows and columns added before and after.
      pool: window and stride of the pooling; 1: none.

    Returns:
      [F, H', W', B].

    Derivatives are reverse-mode (`jax.grad`, `jax.vjp`), also of each other; not `jax.jvp` of the convolution itself.
    """
    window = kernel.shape[0], kernel.shape[1]
    x = pad(x, window, stride, padding, 0.0)
    _positions(x, window, stride)
    cpu, default = (partial(form, stride=stride, pool=pool) for form in (_on_cpu, _product))
    return lax.platform_dependent(x, kernel, cpu=cpu, default=default)


def _product(x: jax.Array, kernel: jax.Array, stride: int, pool: int) -> jax.Array:
    """One product of patches and weights."""
    h, w, C, F = kernel.shape
    H, W = _positions(x, (h, w), stride)
    # First the columns of each window, then its rows: w + h slices instead of w * h. Rows of the patches are (i, j, c).
    columns = jnp.concatenate([_every(x, 2, j, W, stride) for j in range(w)])
    patches = jnp.concatenate([_every(columns, 1, i, H, stride) for i in range(h)])
    out = kernel.reshape(h * w * C, F).T @ patches.reshape(h * w * C, -1)
    out = out.reshape(F, H, W, -1)
    return max_pool(out, pool) if pool > 1 else out


def _on_cpu(x: jax.Array, kernel: jax.Array, stride: int, pool: int) -> jax.Array:
    """The form that is fastest on one core: rounds take 0.92 (LeNet-5), 0.87 (MNIST CNN) and 0.74 (CIFAR CNN) of the
    time that they take with `_product` everywhere."""
    h, w, C, F = kernel.shape
    if pool == 2 and stride == 1 and F < 16:
        return _quads(x, kernel)
    # With up to 16 channels, or in another precision, XLA's own convolution is not its fast one; 1x1 has no patches.
    if stride > 1 or max(C, F) <= 16 or h * w == 1 or x.dtype != jnp.float32:
        return _pool_blocks(_product(x, kernel, stride, 1), pool)
    return _pool_blocks(_wide(x.transpose(3, 1, 2, 0), kernel), pool).transpose(3, 1, 2, 0)


def _quads(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution and pooling by 2 for few filters: a patch of (h + 1) x (w + 1) holds four windows pooled into one.

    For 5x5 that is 9 numbers of patches a position instead of 25, and four times as many columns in a product that is
    too narrow for vectors otherwise; it costs 1.44 times the operations.
    """
    F = kernel.shape[-1]
    shifted = [jnp.pad(kernel, ((i, 1 - i), (j, 1 - j), (0, 0), (0, 0))) for i in (0, 1) for j in (0, 1)]
    four = _product(x, jnp.concatenate(shifted, -1), 2, 1)
    return _largest(four.reshape(4, F, *four.shape[1:]), (0,))


def _pool_blocks(x: jax.Array, pool: int) -> jax.Array:
    """`max_pool` over axes 1 and 2, whatever the others are."""
    if pool == 1:
        return x
    a, H, W, b = x.shape
    x = x[:, : H // pool * pool, : W // pool * pool]
    return _largest(x.reshape(a, H // pool, pool, W // pool, pool, b), (2, 4))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """``x.max(axes)``; ties share the gradient, as in JAX's own rule, which makes a LeNet-5 step a third longer."""
    return x.max(axes)


@_largest.defjvp
def _largest_derivative(axes: tuple[int, ...], primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    largest = _largest(x, axes)
    hit = x == jnp.expand_dims(largest, axes)
    return largest, jnp.where(hit, t, 0).sum(axes) / hit.sum(axes).astype(t.dtype)


@jax.custom_vjp
def _wide(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [B, H, W, C], kernel [h, w, C, F] -> [B, H', W', F]: many channels, stride 1, no padding.

    In this layout, and in no other, `lax.conv` takes its patches on the fly, as fast as a large product. So the weight
    gradient is written in it as well, and the image gradient as a product; all go through a few images at a time, whose
    patches stay in the cache.
    """
    return _wide_product(x, kernel)


def _in_turn(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """f, of which `jax.vmap` makes a loop: over clients, it would become a grouped convolution."""
    call = jax.custom_jvp(sequential_vmap(f))
    call.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))  # else there were no second derivatives
    return call


def _chunks(x: jax.Array, numbers: int) -> jax.Array:
    """[B, ...] -> [B / n, n, ...]: n images of ``numbers`` numbers of patches each, at most 2**20 (4 MB) in all."""
    most = min(len(x), max(1, 2**20 // numbers))
    n = max(n for n in range(1, most + 1) if len(x) % n == 0)
    return x.reshape(-1, n, *x.shape[1:])


def _correlate(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@_in_turn
def _wide_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [B, H, W, C], kernel [h, w, C, F] -> [B, H', W', F]."""
    h, w, C, _ = kernel.shape
    numbers = h * w * C * (x.shape[1] - h + 1) * (x.shape[2] - w + 1)
    out = lax.map(lambda x: _correlate(x, kernel), _chunks(x, numbers))
    return out.reshape(-1, *out.shape[2:])


@_in_turn
def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """x [B, H, W, C], g [B, H', W', F] -> [h, w, C, F]: a convolution of C images that have B channels."""
    _, H, W, F = g.shape
    h, w, C = x.shape[1] - H + 1, x.shape[2] - W + 1, x.shape[3]

    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, g = chunk
        return total + _correlate(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3)), None

    numbers = h * w * C * H * W
    total, _ = lax.scan(add, jnp.zeros((C, h, w, F), g.dtype), (_chunks(x, numbers), _chunks(g, numbers)))
    return total.transpose(1, 2, 0, 3)


@_in_turn
def _image_gradient(g: jax.Array, kernel: jax.Array) -> jax.Array:
    """g [B, H', W', F], kernel [h, w, C, F] -> [B, H, W, C]: the patches' gradient, each part added in its place."""
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


_wide.defvjp(
    lambda x, kernel: (_wide_product(x, kernel), (x, kernel)),
    lambda kept, g: (_image_gradient(g, kept[1]), _weight_gradient(kept[0], g)),
)


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
        raise ConfigurationError(f'padding must be "VALID", "SAME" or a pair of numbers, got {padding!r}')
    return jnp.pad(x, ((0, 0), *amounts, (0, 0)), constant_values=value)


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _positions(x: jax.Array, window: tuple[int, int], stride: int) -> tuple[int, int]:
    H, W = ((n - k) // stride + 1 for n, k in zip(x.shape[1:3], window, strict=True))
    if H < 1 or W < 1:
        raise ConfigurationError(
            f"a window of {window} does not fit an image of {x.shape[1:3]}: use larger images or padding"
        )
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
    """`conv`, pooling included, with a kernel [h, w, C, F] and a bias [F], initialised as PyTorch does."""

    features: int
    kernel_size: int | tuple[int, int]  # k x k, or (h, w); sequences are images one column wide
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
        if self.use_bias:  # after the pooling, on fewer numbers: the same
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


class Embedding(nn.Module):
    """int [...] -> [..., features]: rows of a table [count, features], standard normal at first as in PyTorch.

    An id outside 0..count-1 gives NaN, so that a table too small for the data is seen in the first loss.
    """

    count: int
    features: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        table = self.param("table", nn.initializers.normal(1.0), (self.count, self.features))
        return table.at[ids.astype(jnp.int32)].get(mode="fill", fill_value=jnp.nan)


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
