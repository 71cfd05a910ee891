"""Fourier transforms and complex numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift.pytorch.operations.dtypes import floating

Array = jax.Array


def transform(function: Callable[..., Array]) -> Callable[..., Array]:
    """Along one axis."""

    def made(x: Array, n: int | None = None, dim: int = -1, norm: str | None = None) -> Array:
        return function(floating(x), n, dim, norm)

    return made


def transform_2d(function: Callable[..., Array]) -> Callable[..., Array]:
    def made(x: Array, s: Any = None, dim: Sequence[int] = (-2, -1), norm: str | None = None) -> Array:
        return _of_axes(function, x, s, dim, norm)

    return made


def transform_nd(function: Callable[..., Array]) -> Callable[..., Array]:
    """Along all axes, or the last ones if there are sizes."""

    def made(x: Array, s: Any = None, dim: Sequence[int] | None = None, norm: str | None = None) -> Array:
        axes = range(x.ndim if s is None else len(s)) if dim is None else dim
        return _of_axes(function, x, s, [a - len(axes) for a in axes] if dim is None else axes, norm)

    return made


def _of_axes(function: Callable[..., Array], x: Array, s: Any, dim: Sequence[int], norm: str | None) -> Array:
    """A size of -1 is that of the array."""
    sizes = None if s is None else tuple(x.shape[d] if n == -1 else n for n, d in zip(s, dim, strict=True))
    return function(floating(x), sizes, tuple(dim), norm)


def shift(function: Callable[..., Array]) -> Callable[..., Array]:
    def made(x: Array, dim: Any = None) -> Array:
        return function(x, dim if dim is None or isinstance(dim, int) else tuple(dim))

    return made


def frequencies(function: Callable[..., Any]) -> Callable[..., Array]:
    def made(n: int, d: float = 1.0, dtype: Any = None) -> Array:
        return jnp.asarray(function(n, d), dtype or jnp.float32)

    return made


def view_as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


def view_as_complex(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


def polar(size: Array, angle: Array) -> Array:
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


ARRAYS: dict[str, Callable[..., Any]] = {
    "_conj": jnp.conj,
    "angle": jnp.angle,
    "complex": lambda x, y: lax.complex(*jnp.broadcast_arrays(x, y)),
    "fft_fft": transform(jnp.fft.fft),
    "fft_fft2": transform_2d(jnp.fft.fftn),
    "fft_fftfreq": frequencies(np.fft.fftfreq),
    "fft_fftn": transform_nd(jnp.fft.fftn),
    "fft_fftshift": shift(jnp.fft.fftshift),
    "fft_hfft": transform(jnp.fft.hfft),
    "fft_ifft": transform(jnp.fft.ifft),
    "fft_ifft2": transform_2d(jnp.fft.ifftn),
    "fft_ifftn": transform_nd(jnp.fft.ifftn),
    "fft_ifftshift": shift(jnp.fft.ifftshift),
    "fft_irfft": transform(jnp.fft.irfft),
    "fft_irfft2": transform_2d(jnp.fft.irfftn),
    "fft_irfftn": transform_nd(jnp.fft.irfftn),
    "fft_rfft": transform(jnp.fft.rfft),
    "fft_rfft2": transform_2d(jnp.fft.rfftn),
    "fft_rfftfreq": frequencies(np.fft.rfftfreq),
    "fft_rfftn": transform_nd(jnp.fft.rfftn),
    "polar": polar,
    "view_as_complex": view_as_complex,
    "view_as_real": view_as_real,
}
