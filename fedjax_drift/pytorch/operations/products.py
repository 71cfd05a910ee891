"""Products of matrices, and layers of one product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks
from fedjax_drift.pytorch.operations.dtypes import promoted, result_type
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


def einsum(equation: str, operands: Sequence[Array], path: Sequence[int] | None = None) -> Array:
    """The path is an order of the products. JAX finds its own."""
    return jnp.einsum(equation, *operands)


def cosine_similarity(x: Array, y: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    """The bound of the norms has no part in the gradient, as in PyTorch."""
    x, y = jnp.broadcast_arrays(*promoted(x, y))

    def directed(each: Array) -> Array:
        length = norm(each, 2, dim, True)
        return each / (length + lax.stop_gradient(jnp.maximum(length, eps) - length))

    return (directed(x) * directed(y)).sum(axes_of(x, dim))


def pairwise_distance(x: Array, y: Array, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Array:
    return norm(x - y + eps, p, -1, keepdim)


def distances(x: Array, y: Array, p: float = 2, compute_mode: int | None = None) -> Array:
    """cdist. The mode has no influence on the numbers. With p = inf, equal numbers do not share the gradient."""
    z = x[..., :, None, :] - y[..., None, :, :]
    if p != math.inf:
        return norm(z, p, -1)
    size = absolute(z)
    largest = lax.stop_gradient(size.max(-1, keepdims=True))
    return largest[..., 0] + jnp.where(size == largest, size - lax.stop_gradient(size), 0).sum(-1)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def bilinear(x: Array, y: Array, weight: Array, bias: Array | None = None) -> Array:
    z = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return z if bias is None else z + bias


def block_diagonal(parts: Sequence[Array]) -> Array:
    dtype = result_type(*parts)
    return jax.scipy.linalg.block_diag(*(part.astype(dtype) for part in parts))


def kron(x: Array, y: Array) -> Array:
    return jnp.kron(*promoted(x, y))


def cross(x: Array, y: Array, dim: int | None = None) -> Array:
    """Along the first axis of 3 by default."""
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=x.shape.index(3) if dim is None else dim)


def vecdot(x: Array, y: Array, dim: int = -1) -> Array:
    return (jnp.conj(x) * y).sum(dim)


def matrix_norm(
    x: Array, order: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, dtype: Any = None
) -> Array:
    """Sums along an axis and their extreme, or from all numbers."""
    if order == "fro":
        return norm(x, 2, dim, keepdim, dtype)
    if order not in (1, -1, math.inf, -math.inf):
        checks.refuse("the norm of a matrix must be 'fro', 1, -1, inf or -inf", f"{order!r}", "use 'fro'")
    rows, columns = dim if abs(order) == 1 else dim[::-1]
    sums = norm(x, 1, rows, True, dtype)
    result = norm(sums, math.copysign(math.inf, order), columns, True)
    return result if keepdim else result.squeeze(axes_of(x, dim))


def linalg_norm(x: Array, order: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    if order is None or isinstance(dim, int) or (dim is None and x.ndim == 1) or (dim is not None and len(dim) == 1):
        return norm(x, 2 if order is None else order, dim, keepdim, dtype)
    return matrix_norm(x, order, (-2, -1) if dim is None else dim, keepdim, dtype)


def inverse(x: Array) -> Array:
    return jnp.linalg.inv(x)


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


def matrix_power(x: Array, n: int) -> Array:
    return jnp.linalg.matrix_power(x, n)


def chain(matrices: Sequence[Array]) -> Array:
    return reduce(jnp.matmul, matrices)


ARRAYS: dict[str, Callable[..., Any]] = {
    "addbmm": plus(lambda x, y: jnp.einsum("bij,bjk->ik", x, y)),
    "addmm": plus(jnp.matmul),
    "addmv": plus(jnp.matmul),
    "addr": plus(jnp.outer),
    "baddbmm": plus(jnp.matmul),
    "bilinear": bilinear,
    "block_diag": block_diagonal,
    "bmm": jnp.matmul,
    "cdist": distances,
    "chain_matmul": chain,
    "cosine_similarity": cosine_similarity,
    "cross": cross,
    "dot": jnp.dot,
    "einsum": einsum,
    "inner": jnp.inner,
    "inverse": inverse,
    "kron": kron,
    "linalg_cholesky": cholesky,
    "linalg_cross": lambda x, y, dim=-1: cross(x, y, dim),
    "linalg_det": jnp.linalg.det,
    "linalg_inv": inverse,
    "linalg_matrix_norm": matrix_norm,
    "linalg_matrix_power": matrix_power,
    "linalg_multi_dot": chain,
    "linalg_norm": linalg_norm,
    "linalg_slogdet": lambda x: tuple(jnp.linalg.slogdet(x)),
    "linalg_solve": solve,
    "linalg_vecdot": vecdot,
    "linear": linear,
    "matmul": jnp.matmul,
    "mm": jnp.matmul,
    "mv": jnp.matmul,
    "outer": jnp.outer,
    "pairwise_distance": pairwise_distance,
    "vdot": vecdot,
}
