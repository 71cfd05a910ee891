"""Fourier transforms and complex numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
FORWARD = ("backward", "ortho", "forward")  # NumPy's name of PyTorch's number: divided by 1, by sqrt(n), by n
INVERSE = FORWARD[::-1]


def of_complex(x: Array, dim: Sequence[int], norm: int, forward: bool) -> Array:
    return jnp.fft.fftn(x, None, dim, FORWARD[norm]) if forward else jnp.fft.ifftn(x, None, dim, INVERSE[norm])


def of_real(x: Array, dim: Sequence[int], norm: int, onesided: bool) -> Array:
    return (jnp.fft.rfftn if onesided else jnp.fft.fftn)(x, None, dim, FORWARD[norm])


def to_real(x: Array, dim: Sequence[int], norm: int, last: int) -> Array:
    """last: the size of the last transformed axis."""
    return jnp.fft.irfftn(x, (*(x.shape[axis] for axis in dim[:-1]), last), dim, INVERSE[norm])


ARRAYS: dict[str, Callable[..., Any]] = {
    "_conj": jnp.conj,
    "_fft_c2c": of_complex,
    "_fft_c2r": to_real,
    "_fft_r2c": of_real,
    "angle": jnp.angle,
    "complex": lambda x, y: lax.complex(*jnp.broadcast_arrays(x, y)),
    "polar": lambda size, angle: lax.complex(size * jnp.cos(angle), size * jnp.sin(angle)),
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
}
