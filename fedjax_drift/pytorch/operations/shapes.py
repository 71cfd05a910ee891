"""Other shapes of the same numbers, and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks
from fedjax_drift.pytorch.operations.dtypes import result_type
from fedjax_drift.pytorch.operations.elementwise import cast

Array = jax.Array
Axes = int | Sequence[int] | None


def reshape(x: Array, shape: Sequence[int]) -> Array:
    return x.reshape(tuple(shape))


def view(x: Array, shape: Any) -> Array:
    """view(dtype) reads the bits as other numbers."""
    if not isinstance(shape, list | tuple):
        checks.refuse("view must get a shape", shape, "use x.to(dtype)")
    return reshape(x, shape)


def reshape_as(x: Array, other: Array) -> Array:
    return x.reshape(other.shape)


def flatten(x: Array, start: int = 0, end: int = -1) -> Array:
    if x.ndim == 0:
        return x.reshape(1)
    start, end = start % x.ndim, end % x.ndim
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    dim = dim % x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def transpose(x: Array, dim: int = 0, other: int = 1) -> Array:
    return jnp.swapaxes(x, dim, other) if x.ndim > 1 else x


def permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, tuple(dims))


def squeeze(x: Array, dim: Axes = None) -> Array:
    if x.ndim == 0:
        return x
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


def expand(x: Array, shape: Sequence[int], implicit: bool = False) -> Array:
    missing = len(shape) - x.ndim
    return jnp.broadcast_to(x, tuple(x.shape[i - missing] if n == -1 else n for i, n in enumerate(shape)))


def expand_as(x: Array, other: Array) -> Array:
    return jnp.broadcast_to(x, other.shape)


def repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def repeat_interleave(x: Array, repeats: int, dim: int | None = None, output_size: int | None = None) -> Array:
    if not isinstance(repeats, int) and output_size is None:
        checks.refuse("repeat_interleave must get output_size=", "repeats of an array", "pass their sum")
    return jnp.repeat(x, repeats, dim, total_repeat_length=None if isinstance(repeats, int) else output_size)


def concatenate(parts: Sequence[Array], dim: int = 0) -> Array:
    """As PyTorch's old habit is, parts of shape [0] are left out."""
    dtype = result_type(*parts)
    shaped = [part.astype(dtype) for part in parts if part.shape != (0,)]
    return jnp.concatenate(shaped, dim) if shaped else jnp.zeros(0, dtype)


def stacked(function: Callable[..., Array]) -> Callable[..., Array]:
    """hstack, vstack, dstack, column_stack."""

    def made(parts: Sequence[Array]) -> Array:
        dtype = result_type(*parts)
        return function([part.astype(dtype) for part in parts])

    return made


def stack(parts: Sequence[Array], dim: int = 0) -> Array:
    dtype = result_type(*parts)
    return jnp.stack([part.astype(dtype) for part in parts], dim)


def split(x: Array, size: int | Sequence[int], dim: int = 0) -> list[Array]:
    if isinstance(size, int):
        n = x.shape[dim]
        size = [min(size, n - start) for start in range(0, n, size)] if n else [0]
    return jnp.split(x, np.cumsum(size)[:-1].tolist(), dim)


def chunk(x: Array, chunks: int, dim: int = 0) -> list[Array]:
    n = x.shape[dim]
    return split(x, -(-n // chunks), dim) if n else split(x, [0] * chunks, dim)


def unbind(x: Array, dim: int = 0) -> list[Array]:
    return list(jnp.unstack(x, axis=dim))


def meshgrid(parts: Sequence[Array], indexing: str = "ij") -> list[Array]:
    return jnp.meshgrid(*(jnp.atleast_1d(part) for part in parts), indexing=indexing)


def broadcast_tensors(parts: Sequence[Array]) -> list[Array]:
    return jnp.broadcast_arrays(*parts)


def _pairs(x: Array, amounts: Sequence[int]) -> list[tuple[int, int]]:
    """amounts: before and after the last axis, then the axis before it, and so on."""
    pairs = [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


def constant_pad(x: Array, amounts: Sequence[int], value: float | None = 0) -> Array:
    """Negative amounts crop."""
    pairs = [(before, after, 0) for before, after in _pairs(x, amounts)]
    return lax.pad(x, cast(jnp.asarray(value or 0), x.dtype), pairs)


def pad(x: Array, amounts: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """Negative amounts crop, before the rest is padded."""
    if mode == "constant":
        return constant_pad(x, amounts, value)
    pairs = _pairs(x, amounts)
    added = [(max(before, 0), max(after, 0)) for before, after in pairs]
    x = jnp.pad(x, added, mode={"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode])
    return x[
        tuple(slice(max(-before, 0), n - max(-after, 0)) for (before, after), n in zip(pairs, x.shape, strict=True))
    ]


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


def pixel_unshuffle(x: Array, factor: int) -> Array:
    *lead, C, H, W = x.shape
    x = x.reshape(*lead, C, H // factor, factor, W // factor, factor)
    n = len(lead)
    x = x.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return x.reshape(*lead, C * factor**2, H // factor, W // factor)


def glu(x: Array, dim: int = -1) -> Array:
    a, b = jnp.split(x, 2, dim)
    return a * jax.nn.sigmoid(b)


def channel_shuffle(x: Array, groups: int) -> Array:
    B, C, *size = x.shape
    return jnp.swapaxes(x.reshape(B, groups, C // groups, *size), 1, 2).reshape(x.shape)


def im2col(
    x: Array, window: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Array:
    """The windows of images: [B, C, H, W] -> [B, C * numbers of a window, windows]."""
    if x.ndim == 3:
        return im2col(x[None], window, dilation, padding, stride)[0]
    B, C = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    rows, columns = (_window_places(x.shape[2 + i], *(each[i] for each in (window, dilation, stride))) for i in (0, 1))
    windows = x[:, :, rows[:, None, :, None], columns[None, :, None, :]]  # [B, C, kh, kw, H', W']
    return windows.reshape(B, C * math.prod(window), -1)


def _window_places(n: int, window: int, dilation: int, stride: int) -> np.ndarray:
    """[window, windows]."""
    starts = np.arange((n - dilation * (window - 1) - 1) // stride + 1) * stride
    return np.arange(window)[:, None] * dilation + starts


def col2im(
    x: Array,
    size: Sequence[int],
    window: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """The sums of the windows: the transpose of `im2col`."""
    lead = x.shape[:-2]
    shape = (*lead, x.shape[-2] // math.prod(window), *size)
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    return jax.linear_transpose(lambda image: im2col(image, window, dilation, padding, stride), like)(x)[0]


ARRAYS: dict[str, Callable[..., Any]] = {
    "_unsafe_view": reshape,
    "broadcast_tensors": broadcast_tensors,
    "broadcast_to": expand,
    "cat": concatenate,
    "channel_shuffle": channel_shuffle,
    "chunk": chunk,
    "col2im": col2im,
    "column_stack": stacked(jnp.column_stack),
    "concat": concatenate,
    "constant_pad_nd": constant_pad,
    "dstack": stacked(jnp.dstack),
    "expand": expand,
    "expand_as": expand_as,
    "flatten": flatten,
    "glu": glu,
    "hstack": stacked(jnp.hstack),
    "im2col": im2col,
    "meshgrid": meshgrid,
    "movedim": jnp.moveaxis,
    "numel": lambda x: math.prod(x.shape),
    "pad": pad,
    "permute": permute,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "reflection_pad1d": padded_with("reflect"),
    "reflection_pad2d": padded_with("reflect"),
    "reflection_pad3d": padded_with("reflect"),
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "replication_pad1d": padded_with("replicate"),
    "replication_pad2d": padded_with("replicate"),
    "replication_pad3d": padded_with("replicate"),
    "reshape": reshape,
    "reshape_as": reshape_as,
    "split": split,
    "split_with_sizes": split,
    "squeeze": squeeze,
    "stack": stack,
    "t": transpose,
    "tile": repeat,
    "transpose": transpose,
    "unbind": unbind,
    "unflatten": unflatten,
    "unfold": unfold,
    "unsafe_chunk": chunk,
    "unsafe_split": split,
    "unsqueeze": jnp.expand_dims,
    "view": view,
    "view_as": reshape_as,
    "vstack": stacked(jnp.vstack),
}
