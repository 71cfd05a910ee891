"""Products of matrices, and layers of one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift.pytorch.operations.reductions import norm

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def addmm(bias: Array, x: Array, y: Array, beta: float = 1, alpha: float = 1) -> Array:
    return beta * bias + alpha * (x @ y)


def einsum(equation: str, operands: Sequence[Array], **_: Any) -> Array:
    return jnp.einsum(equation, *operands)


def cosine_similarity(x: Array, y: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    x, y = (each / jnp.maximum(norm(each, 2, dim, True), eps) for each in (x, y))
    return (x * y).sum(dim)


def baddbmm(bias: Array, x: Array, y: Array, beta: float = 1, alpha: float = 1) -> Array:
    return (beta * bias if beta else 0) + alpha * (x @ y)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def bilinear(x: Array, y: Array, weight: Array, bias: Array | None = None) -> Array:
    z = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return z if bias is None else z + bias


ARRAYS: dict[str, Callable[..., Any]] = {
    "addmm": addmm,
    "baddbmm": baddbmm,
    "bmm": jnp.matmul,
    "cosine_similarity": cosine_similarity,
    "dot": jnp.dot,
    "einsum": einsum,
    "matmul": jnp.matmul,
    "mm": jnp.matmul,
    "mv": jnp.matmul,
    "outer": jnp.outer,
    "bilinear": bilinear,
    "linear": linear,
}
