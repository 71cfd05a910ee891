"""Operations that are computed for each number by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from fedjax_drift.pytorch.operations.dtypes import (
    floating,
    is_float,
    of_floats,
    of_floats_promoted,
    of_promoted,
    promoted,
    result_type,
    whole,
)

Array = jax.Array


def add(x: Any, y: Any, alpha: float = 1) -> Array:
    x, y = promoted(x, y)
    return x + (y if alpha == 1 else jnp.asarray(alpha, y.dtype) * y)


def subtract(x: Any, y: Any, alpha: float = 1) -> Array:
    x, y = promoted(x, y)
    return x - (y if alpha == 1 else jnp.asarray(alpha, y.dtype) * y)


def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Array:
    """With a rounding, integers stay integers, and the gradient is 0."""
    x, y = promoted(x, y)
    if rounding_mode is None:
        return floating(x) / floating(y)
    if not is_float(x):
        return jnp.floor_divide(x, y) if rounding_mode == "floor" else lax.div(*jnp.broadcast_arrays(x, y))
    x, y = lax.stop_gradient(x), lax.stop_gradient(y)
    if rounding_mode == "trunc":
        return jnp.trunc(x / y)
    return jnp.where(y == 0, x / y, jnp.floor_divide(x, y))


def power(x: Any, exponent: Any) -> Array:
    """Whole exponents are products, whose derivatives are finite at 0."""
    dtype = result_type(x, exponent)
    if isinstance(exponent, int | float) and math.isfinite(exponent) and exponent == int(exponent):
        return lax.integer_pow(jnp.asarray(x, dtype), int(exponent))
    return jnp.power(jnp.asarray(x, dtype), jnp.asarray(exponent, dtype))


def arctan2(y: Array, x: Array) -> Array:
    """The gradient at (0, 0) is 0."""
    at_zero = (x == 0) & (y == 0)
    angles = jnp.arctan2(jnp.where(at_zero, 0, y), jnp.where(at_zero, 1, x))
    return jnp.where(at_zero, lax.stop_gradient(jnp.arctan2(y, x)), angles)


def clamp(x: Any, low: Any = None, high: Any = None, share: float = 1.0) -> Array:
    """share: the part of the gradient that x has where it is equal to a bound, see `reading.at_bounds`."""
    dtype = result_type(*(each for each in (x, low, high) if each is not None))
    wrapped = [np.asarray(each).astype(dtype) if isinstance(each, int) else each for each in (x, low, high)]
    x, low, high = (None if each is None else jnp.asarray(each, dtype) for each in wrapped)
    x = x if low is None else _bounded(x, low, lambda x: x < low, jnp.maximum, share)
    return x if high is None else _bounded(x, high, lambda x: x > high, jnp.minimum, share)


def _bounded(
    x: Array, bound: Array, outside: Callable[..., Array], extreme: Callable[..., Array], share: float
) -> Array:
    if share == 0.5:
        return extreme(x, bound)
    return jnp.where(outside(x) | jnp.isnan(bound) | (x == bound) & (share == 0), bound, x)


def hardtanh(x: Array, low: float = -1.0, high: float = 1.0) -> Array:
    """The gradient at the bounds is 0, as in PyTorch."""
    bottom, top = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    return jnp.where(x <= bottom, bottom, jnp.where(x >= top, top, x))


def cast(x: Any, dtype: Any = None, non_blocking: bool = False, copy: bool = False) -> Any:
    """Floating numbers become small integers by way of large ones, whose last bits count, as in PyTorch."""
    if dtype is None:
        return x
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real
    if is_float(x) and jnp.issubdtype(dtype, jnp.integer):
        x = x.astype(jnp.int32 if jnp.iinfo(dtype).bits < 32 else dtype)
    return x.astype(dtype)


def elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * jnp.where(x > 0, 0, x)))


def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    linear = x * beta > threshold
    return jnp.where(linear, x, jax.nn.softplus(jnp.where(linear, 0, x * beta)) / beta)


def where(condition: Array, x: Any = None, y: Any = None) -> Array:
    x, y = promoted(x, y)
    return jnp.where(condition, x, y)


def round_(x: Array, decimals: int = 0) -> Array:
    """Halves to even numbers."""
    factor = 10.0 ** abs(decimals)
    if not is_float(x) or decimals == 0:
        return whole(jnp.round)(x)
    return jnp.round(x * factor) / factor if decimals > 0 else jnp.round(x / factor) * factor


def logit(x: Any, eps: float | None = None) -> Array:
    x = floating(x)
    x = x if eps is None else clamp(x, eps, 1 - eps)
    return jnp.log(x) - jnp.log1p(-x)


def xlogy(x: Any, y: Any) -> Array:
    x, y = map(floating, promoted(x, y))
    return x * jnp.log(jnp.where((x == 0) & (y <= 0), 1, y))


def sign(x: Array) -> Array:
    """0 for NaN."""
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.sign(x)


def absolute(x: Array) -> Array:
    """The derivative at 0 is 0. Here it is 1 for `jnp.abs` of real numbers, and NaN for complex ones."""
    if jnp.iscomplexobj(x):
        return jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)))
    return x * lax.stop_gradient(jnp.sign(x))


def copysign(x: Array, y: Array) -> Array:
    size = absolute(x)
    return jnp.where(jnp.signbit(lax.stop_gradient(y)), -size, size)


def fmax(x: Array, y: Array) -> Array:
    """The other one if one is NaN. The first of equal ones gets the gradient."""
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


def fmin(x: Array, y: Array) -> Array:
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


def _unchanged(x: Any) -> Any:
    return x


def _named(names: str, library: Any, kind: Callable[..., Any] = _unchanged, prefix: str = "") -> dict[str, Any]:
    """Functions that have the same name in JAX. kind: how their arguments become those of JAX (`dtypes`)."""
    return {f"{prefix}{name}": kind(getattr(library, name)) for name in names.split()}


COMPARISONS = {
    "eq": "equal",
    "ge": "greater_equal",
    "gt": "greater",
    "le": "less_equal",
    "lt": "less",
    "ne": "not_equal",
}
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **_named("acos acosh asin asinh atan atanh cos cosh exp exp2 expm1 log log10 log1p log2", jnp, of_floats),
    **_named("reciprocal sin sinc sinh sqrt tan tanh", jnp, of_floats),
    **_named("digamma erf erfc erfinv i0", special, of_floats),
    **_named("entr i0e i1 i1e log_ndtr ndtri", special, of_floats, "special_"),
    **_named("bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor", jnp, of_promoted),
    **_named("fmod hypot logaddexp logaddexp2 maximum minimum remainder", jnp, of_promoted),
    **_named("bitwise_not isfinite isinf isnan logical_and logical_not logical_or logical_xor signbit", jnp),
    **_named("ceil floor trunc", jnp, whole),
    "__lshift__": of_promoted(jnp.left_shift),
    "__rshift__": of_promoted(jnp.right_shift),
    "_to_copy": cast,
    "abs": absolute,
    "add": add,
    "alias": _unchanged,
    "atan2": of_floats_promoted(arctan2),
    "celu": lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    "clamp": clamp,
    "clone": _unchanged,
    "copysign": of_floats_promoted(copysign),
    "detach": lax.stop_gradient,
    "detach_copy": lax.stop_gradient,
    "div": divide,
    "elu": elu,
    "eq": of_promoted(jnp.equal),
    "fmax": of_promoted(fmax),
    "fmin": of_promoted(fmin),
    "full_like": lambda x, value, dtype=None: jnp.full(x.shape, value, dtype or x.dtype),
    "ge": of_promoted(jnp.greater_equal),
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "gt": of_promoted(jnp.greater),
    "hardsigmoid": lambda x: hardtanh(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * hardtanh(x + 3, 0, 6) / 6,
    "hardtanh": hardtanh,
    "le": of_promoted(jnp.less_equal),
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "lgamma": of_floats(special.gammaln),
    "log_sigmoid": jax.nn.log_sigmoid,
    "logit": logit,
    "lt": of_promoted(jnp.less),
    "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "mul": of_promoted(jnp.multiply),
    "ne": of_promoted(jnp.not_equal),
    "neg": jnp.negative,
    "polygamma": lambda n, x: special.polygamma(n, floating(x)),
    "pow": power,
    "relu": jax.nn.relu,
    "round": round_,
    "rsqrt": of_floats(lax.rsqrt),
    "sigmoid": of_floats(jax.nn.sigmoid),
    "sign": sign,
    "silu": jax.nn.silu,
    "softplus": softplus,
    "sub": subtract,
    "where": where,
    "xlogy": xlogy,
}
