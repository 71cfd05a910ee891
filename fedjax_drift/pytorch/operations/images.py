"""Images in the layout of the fast convolutions, while a PyTorch network runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Images(NamedTuple):
    """A value of the network with the PyTorch shape [B, C, H, W], stored as [C, H, W, B]."""

    grid: jax.Array  # [C, H, W, B]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in PyTorch."""
        C, H, W, B = self.grid.shape
        return B, C, H, W

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> Any:
        return self.grid.dtype


def is_images(value: Any) -> bool:
    return isinstance(value, Images)


def plain(value: Any) -> Any:
    """The value in the layout of PyTorch, [B, C, H, W]."""
    return value.grid.transpose(3, 0, 1, 2) if isinstance(value, Images) else value


def as_images(value: Any) -> Images:
    """Images [B, C, H, W], or one image [C, H, W]."""
    if isinstance(value, Images):
        return value
    return Images((value if value.ndim == 4 else value[None]).transpose(1, 2, 3, 0))


def broadcast(value: Any) -> Any:
    """An operand of an elementwise operation with images: a scalar as it is, and arrays as [C, H, W, B]."""
    if isinstance(value, Images):
        return value.grid
    if not hasattr(value, "ndim") or value.ndim == 0:
        return value
    return jnp.reshape(value, (1,) * (4 - value.ndim) + value.shape).transpose(1, 2, 3, 0)


def on_grid(function: Callable[[Array], Array], x: Any) -> Any:
    """A function of each number by itself, of images or of an array."""
    return Images(function(x.grid)) if isinstance(x, Images) else function(x)


def concatenate_images(parts: Sequence[Any], dim: int = 0) -> Any:
    """Concatenates images along any axis."""
    return Images(jnp.concatenate([as_images(part).grid for part in parts], (3, 0, 1, 2)[dim]))


def flatten_images(x: Images) -> Array:
    """[B, C, H, W] -> [B, C * H * W]."""
    return x.grid.reshape(-1, x.grid.shape[-1]).T


def mean_of_images(x: Images, dim: Any, keepdim: bool = False) -> Any:
    """The mean over the positions."""
    return Images(x.grid.mean((1, 2), keepdims=True)) if keepdim else x.grid.mean((1, 2)).T
