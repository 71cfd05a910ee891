"""Other shapes of the same numbers, and padding."""

from __future__ import annotations

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


def view(x: Array, shape: Any) -> Array:
    """view(dtype) reads the bits as other numbers."""
    if not isinstance(shape, list | tuple):
        checks.refuse("view must get a shape", shape, "use x.to(dtype)")
    return x.reshape(tuple(shape))


def squeeze(x: Array, dim: Axes = None) -> Array:
    if x.ndim == 0:
        return x
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


def expand(x: Array, shape: Sequence[int], implicit: bool = False) -> Array:
    missing = len(shape) - x.ndim
    return jnp.broadcast_to(x, tuple(x.shape[i - missing] if n == -1 else n for i, n in enumerate(shape)))


def repeat_interleave(x: Array, repeats: int, dim: int | None = None, output_size: int | None = None) -> Array:
    if not isinstance(repeats, int) and output_size is None:
        checks.refuse("repeat_interleave must get output_size=", "repeats of an array", "pass their sum")
    return jnp.repeat(x, repeats, dim, total_repeat_length=None if isinstance(repeats, int) else output_size)


def concatenate(parts: Sequence[Array], dim: int = 0) -> Array:
    """As PyTorch's old habit is, parts of shape [0] are left out."""
    dtype = result_type(*parts)
    shaped = [part.astype(dtype) for part in parts if part.shape != (0,)]
    return jnp.concatenate(shaped, dim) if shaped else jnp.zeros(0, dtype)


def stack(parts: Sequence[Array], dim: int = 0) -> Array:
    dtype = result_type(*parts)
    return jnp.stack([part.astype(dtype) for part in parts], dim)


def split(x: Array, size: int | Sequence[int], dim: int = 0) -> list[Array]:
    if isinstance(size, int):
        n = x.shape[dim]
        size = [min(size, n - start) for start in range(0, n, size)] if n else [0]
    return jnp.split(x, np.cumsum(size)[:-1].tolist(), dim)


def _pairs(x: Array, amounts: Sequence[int]) -> list[tuple[int, int]]:
    """amounts: before and after the last axis, then the axis before it, and so on."""
    pairs = [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


def constant_pad(x: Array, amounts: Sequence[int], value: float | None = 0) -> Array:
    """Negative amounts crop."""
    pairs = [(before, after, 0) for before, after in _pairs(x, amounts)]
    return lax.pad(x, cast(jnp.asarray(value or 0), x.dtype), pairs)


def padded_with(mode: str) -> Callable[..., Array]:
    """reflection_pad, replication_pad. Negative amounts crop, before the rest is padded."""

    def padded(x: Array, amounts: Sequence[int]) -> Array:
        pairs = _pairs(x, amounts)
        x = jnp.pad(x, [(max(before, 0), max(after, 0)) for before, after in pairs], mode=mode)
        ends = zip(pairs, x.shape, strict=True)
        return x[tuple(slice(max(-before, 0), n - max(-after, 0)) for (before, after), n in ends)]

    return padded


def unfold(x: Array, dim: int, size: int, step: int) -> Array:
    """Windows of an axis: [..., n, ..., size]."""
    starts = jnp.arange((x.shape[dim] - size) // step + 1) * step
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), dim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


ARRAYS: dict[str, Callable[..., Any]] = {
    **{f"reflection_pad{n}d": padded_with("reflect") for n in (1, 2, 3)},
    **{f"replication_pad{n}d": padded_with("edge") for n in (1, 2, 3)},
    "_unsafe_view": view,
    "cat": concatenate,
    "constant_pad_nd": constant_pad,
    "expand": expand,
    "permute": lambda x, dims: jnp.transpose(x, tuple(dims)),
    "repeat": lambda x, repeats: jnp.tile(x, tuple(repeats)),
    "repeat_interleave": repeat_interleave,
    "split": split,
    "split_with_sizes": split,
    "squeeze": squeeze,
    "stack": stack,
    "t": lambda x: x.T,
    "transpose": lambda x, dim, other: jnp.swapaxes(x, dim, other) if x.ndim else x,
    "unbind": lambda x, dim=0: list(jnp.unstack(x, axis=dim)),
    "unfold": unfold,
    "unsafe_split": split,
    "unsqueeze": jnp.expand_dims,
    "view": view,
}
