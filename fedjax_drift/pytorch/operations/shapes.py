"""Other shapes of the same numbers, and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def reshape(x: Array, shape: Sequence[int]) -> Array:
    return x.reshape(tuple(shape))


def flatten(x: Array, start: int = 0, end: int = -1) -> Array:
    start, end = start % x.ndim, end % x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    dim = dim % x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def transpose(x: Array, dim: int = 0, other: int = 1) -> Array:
    return jnp.swapaxes(x, dim, other) if x.ndim > 1 else x


def permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, tuple(dims))


def squeeze(x: Array, dim: Axes = None) -> Array:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


def expand(x: Array, shape: Sequence[int], implicit: bool = False) -> Array:
    missing = len(shape) - x.ndim
    return jnp.broadcast_to(x, tuple(x.shape[i - missing] if n == -1 else n for i, n in enumerate(shape)))


def expand_as(x: Array, other: Array) -> Array:
    return jnp.broadcast_to(x, other.shape)


def repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def repeat_interleave(x: Array, repeats: int, dim: int | None = None, **_: Any) -> Array:
    return jnp.repeat(x, repeats, dim)


def concatenate(parts: Sequence[Array], dim: int = 0) -> Array:
    dtype = jnp.result_type(*parts)
    return jnp.concatenate([part.astype(dtype) for part in parts if part.shape != (0,)], dim)


def stack(parts: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(parts, dim)


def split(x: Array, size: int | Sequence[int], dim: int = 0) -> list[Array]:
    sizes = [size] * -(-x.shape[dim] // size) if isinstance(size, int) else list(size)
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


def chunk(x: Array, chunks: int, dim: int = 0) -> list[Array]:
    return split(x, -(-x.shape[dim] // chunks), dim)


def unbind(x: Array, dim: int = 0) -> list[Array]:
    return list(jnp.unstack(x, axis=dim))


def constant_pad(x: Array, amounts: Sequence[int], value: float = 0) -> Array:
    """amounts: before and after the last axis, then the axis before it, and so on. Negative amounts crop."""
    pairs = [(0, 0)] * (x.ndim - len(amounts) // 2)
    pairs += [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    return lax.pad(x, jnp.asarray(value or 0, x.dtype), [(before, after, 0) for before, after in pairs])


def pad(x: Array, amounts: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    if mode == "constant":
        return constant_pad(x, amounts, value or 0)
    pairs = [(0, 0)] * (x.ndim - len(amounts) // 2)
    pairs += [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    return jnp.pad(x, pairs, mode={"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode])


def padded_with(mode: str) -> Callable[..., Array]:
    return lambda x, amounts: pad(x, amounts, mode)


def unfold(x: Array, dim: int, size: int, step: int) -> Array:
    """Windows of an axis: [..., n, ..., size]."""
    starts = jnp.arange((x.shape[dim] - size) // step + 1) * step
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), dim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


def pixel_shuffle(x: Array, factor: int) -> Array:
    *lead, C, H, W = x.shape
    x = x.reshape(*lead, C // factor**2, factor, factor, H, W)
    n = len(lead)
    x = x.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return x.reshape(*lead, C // factor**2, H * factor, W * factor)


ARRAYS: dict[str, Callable[..., Any]] = {
    "_unsafe_view": reshape,
    "cat": concatenate,
    "chunk": chunk,
    "constant_pad_nd": constant_pad,
    "expand": expand,
    "expand_as": expand_as,
    "flatten": flatten,
    "movedim": jnp.moveaxis,
    "numel": lambda x: math.prod(x.shape),
    "pad": pad,
    "permute": permute,
    "pixel_shuffle": pixel_shuffle,
    "reflection_pad1d": padded_with("reflect"),
    "reflection_pad2d": padded_with("reflect"),
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "replication_pad1d": padded_with("replicate"),
    "replication_pad2d": padded_with("replicate"),
    "reshape": reshape,
    "split": split,
    "split_with_sizes": split,
    "squeeze": squeeze,
    "stack": stack,
    "t": transpose,
    "transpose": transpose,
    "unbind": unbind,
    "unflatten": unflatten,
    "unfold": unfold,
    "unsqueeze": jnp.expand_dims,
    "view": reshape,
}
