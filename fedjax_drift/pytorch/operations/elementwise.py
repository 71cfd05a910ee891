"""Operations that are computed for each number by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.pytorch.operations.creation import full_like

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


def add(x: Any, y: Any, alpha: float = 1) -> Array:
    return jnp.add(x, y if alpha == 1 else alpha * y)


def subtract(x: Any, y: Any, alpha: float = 1) -> Array:
    return jnp.subtract(x, y if alpha == 1 else alpha * y)


def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    quotient = jnp.true_divide(x, y)
    return quotient if rounding_mode is None else jnp.trunc(quotient).astype(jnp.result_type(x, y))


def power(x: Any, exponent: Any) -> Array:
    if isinstance(exponent, float) and exponent == int(exponent):
        exponent = int(exponent)  # products; their derivatives are finite at 0
    return x**exponent if not isinstance(x, int | float) else jnp.power(x, exponent)


def clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    """The gradient at the bounds is that of x, as in PyTorch."""
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def hardtanh(x: Array, low: float = -1.0, high: float = 1.0) -> Array:
    """The gradient at the bounds is 0, as in PyTorch."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def cast(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
    return x if dtype is None else jnp.asarray(x).astype(dtype)


def gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * jnp.minimum(x, 0)))


def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    return jax.nn.softplus(x * beta) / beta  # beyond the threshold, the difference is less than 1e-8


def fill(x: Array, value: Any) -> Array:
    return jnp.full(x.shape, value, x.dtype)


def like(value: float) -> Callable[..., Array]:
    """zeros_like, ones_like."""
    return lambda x, dtype=None, **_: jnp.full(x.shape, value, dtype or x.dtype)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "abs": jnp.abs,
    "add": add,
    "alias": lambda x: x,
    "acos": jnp.arccos,
    "asin": jnp.arcsin,
    "atan": jnp.arctan,
    "atan2": jnp.arctan2,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "ceil": jnp.ceil,
    "celu": lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    "clamp": clamp,
    "clamp_max": lambda x, high: clamp(x, None, high),
    "clamp_min": clamp,
    "clone": lambda x, **_: x,
    "contiguous": lambda x, **_: x,
    "cos": jnp.cos,
    "detach": lax.stop_gradient,
    "detach_copy": lax.stop_gradient,
    "div": divide,
    "elu": elu,
    "empty_like": like(0),
    "eq": jnp.equal,
    "erf": jax.scipy.special.erf,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "fill": fill,
    "floor": jnp.floor,
    "floor_divide": jnp.floor_divide,
    "full_like": full_like,
    "ge": jnp.greater_equal,
    "gelu": gelu,
    "gt": jnp.greater,
    "hardsigmoid": lambda x: hardtanh(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * hardtanh(x + 3, 0, 6) / 6,
    "hardtanh": hardtanh,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "le": jnp.less_equal,
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "lerp": lambda x, y, weight: x + weight * (y - x),
    "lift_fresh_copy": lambda x: x,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "lt": jnp.less,
    "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "max.other": jnp.maximum,
    "maximum": jnp.maximum,
    "min.other": jnp.minimum,
    "minimum": jnp.minimum,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "neg": jnp.negative,
    "ones_like": like(1),
    "pow": power,
    "reciprocal": jnp.reciprocal,
    "relu": jax.nn.relu,
    "relu6": lambda x: hardtanh(x, 0, 6),
    "remainder": jnp.remainder,
    "round": jnp.round,
    "rsqrt": lax.rsqrt,
    "rsub": lambda x, y, alpha=1: subtract(y, x, alpha),
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "softplus": softplus,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "sub": subtract,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "threshold": lambda x, threshold, value: jnp.where(x > threshold, x, value),
    "to": cast,
    "_to_copy": cast,
    "trunc": jnp.trunc,
    "type_as": lambda x, other: x.astype(other.dtype),
    "where": jnp.where,
    "zeros_like": like(0),
}
