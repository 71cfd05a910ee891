"""Products of matrices, and layers of one product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.pytorch.operations.dtypes import promoted
from fedjax_drift.pytorch.operations.elementwise import absolute
from fedjax_drift.pytorch.operations.reductions import axes_of, norm

Array = jax.Array


def plus(product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """addmm and its like: beta * bias + alpha * product. With beta=0, a NaN of the bias has no influence."""

    def added(bias: Array, x: Array, y: Array, beta: float = 1, alpha: float = 1) -> Array:
        z = product(x, y)
        scaled = z if alpha == 1 else jnp.asarray(alpha, z.dtype) * z
        return scaled + jnp.broadcast_to(jnp.asarray(beta, z.dtype) * bias if beta else 0, z.shape).astype(z.dtype)

    return added


def cosine_similarity(x: Array, y: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    """The bound of the norms has no part in the gradient, as in PyTorch."""
    x, y = jnp.broadcast_arrays(*promoted(x, y))

    def directed(each: Array) -> Array:
        length = norm(each, 2, dim, True)
        return each / (length + lax.stop_gradient(jnp.maximum(length, eps) - length))

    return (directed(x) * directed(y)).sum(axes_of(x, dim))


def distances(x: Array, y: Array, p: float = 2, compute_mode: int | None = None) -> Array:
    """cdist. The mode has no influence on the numbers. With p = inf, equal numbers do not share the gradient."""
    z = x[..., :, None, :] - y[..., None, :, :]
    if p != math.inf:
        return norm(z, p, -1)
    size = absolute(z)
    largest = lax.stop_gradient(size.max(-1, keepdims=True))
    return largest[..., 0] + jnp.where(size == largest, size - lax.stop_gradient(size), 0).sum(-1)


def plus_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def cross(x: Array, y: Array, dim: int = -1) -> Array:
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=dim)


def solve(x: Array, y: Array, left: bool = True) -> Array:
    if not left:
        return jnp.swapaxes(solve(jnp.swapaxes(x, -1, -2), jnp.swapaxes(y, -1, -2)), -1, -2)
    if y.ndim == 1 or y.shape == x.shape[:-1]:
        return jnp.linalg.solve(x, y[..., None])[..., 0]
    return jnp.linalg.solve(x, y)


def cholesky(x: Array, upper: bool = False) -> Array:
    """Reads the lower triangle. The gradient is symmetric."""
    halves = (x + jnp.swapaxes(x, -1, -2)) / 2
    read = jnp.tril(x) + jnp.swapaxes(jnp.tril(x, -1), -1, -2)
    lower = jnp.linalg.cholesky(halves + lax.stop_gradient(read - halves), symmetrize_input=False)
    return jnp.swapaxes(lower, -1, -2) if upper else lower


ARRAYS: dict[str, Callable[..., Any]] = {
    "addbmm": plus(lambda x, y: jnp.einsum("bij,bjk->ik", x, y)),
    "addmm": plus(jnp.matmul),
    "addmv": plus(jnp.matmul),
    "bilinear": lambda x, y, weight, bias=None: plus_bias(jnp.einsum("...i,oij,...j->...o", x, weight, y), bias),
    "bmm": jnp.matmul,
    "cdist": distances,
    "cosine_similarity": cosine_similarity,
    "dot": jnp.dot,
    "einsum": lambda equation, operands, path=None: jnp.einsum(equation, *operands),
    "linalg_cholesky": cholesky,
    "linalg_cross": cross,
    "linalg_det": jnp.linalg.det,
    "linalg_inv": jnp.linalg.inv,
    "linalg_slogdet": lambda x: tuple(jnp.linalg.slogdet(x)),
    "linalg_solve": solve,
    "linear": lambda x, weight, bias=None: plus_bias(x @ weight.T, bias),
    "matmul": jnp.matmul,
    "mm": jnp.matmul,
    "mv": jnp.matmul,
}
