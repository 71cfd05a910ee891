"""Operations that are computed for each number by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from fedjax_drift.pytorch.operations.creation import full_like, like
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


def clamp_min(x: Any, low: Any, share: float = 1.0) -> Array:
    return clamp(x, low, None, share)


def clamp_max(x: Any, high: Any, share: float = 1.0) -> Array:
    return clamp(x, None, high, share)


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


def cast_to_device(x: Any, device: None, dtype: Any = None, non_blocking: bool = False, copy: bool = False) -> Any:
    return cast(x, dtype)


def cast_as(x: Any, other: Any, non_blocking: bool = False, copy: bool = False) -> Any:
    return cast(x, other.dtype)


def gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * jnp.where(x > 0, 0, x)))


def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    linear = x * beta > threshold
    return jnp.where(linear, x, jax.nn.softplus(jnp.where(linear, 0, x * beta)) / beta)


def softshrink(x: Array, width: float = 0.5) -> Array:
    return jnp.where(x > width, x - width, jnp.where(x < -width, x + width, x * 0))


def hardshrink(x: Array, width: float = 0.5) -> Array:
    return jnp.where((x >= -width) & (x <= width), jnp.zeros_like(x), x)


def fill(x: Array, value: Any) -> Array:
    return jnp.full(x.shape, value, x.dtype)


def lerp(x: Array, y: Array, weight: Any) -> Array:
    """From the nearer end, so that the ends are exact."""
    weight = jnp.asarray(weight, x.dtype)
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * (y - x), y - (y - x) * (1 - weight))


def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


def where(condition: Array, x: Any = None, y: Any = None) -> Array:
    x, y = promoted(x, y)
    return jnp.where(condition, x, y)


def threshold(x: Array, bound: float, value: float) -> Array:
    return jnp.where(x <= bound, jnp.asarray(value, x.dtype), x)


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


def heaviside(x: Array, middle: Array) -> Array:
    """0 for NaN."""
    return jnp.where(x > 0, 1, jnp.where(x == 0, middle, 0)).astype(x.dtype)


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


def nan_to_num(x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Array:
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf) if is_float(x) else x


def addcmul(x: Array, y: Array, z: Array, value: float = 1) -> Array:
    x, y, z = promoted(x, y, z)
    return x + (y * z if value == 1 else jnp.asarray(value, x.dtype) * y * z)


def addcdiv(x: Array, y: Array, z: Array, value: float = 1) -> Array:
    x, y, z = promoted(x, y, z)
    return x + jnp.asarray(value, x.dtype) * (y / z)


def isclose(x: Array, y: Array, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Array:
    return jnp.isclose(x, y, rtol, atol, equal_nan)


def frac(x: Array) -> Array:
    return x - jnp.trunc(x)


def polygamma(n: int, x: Any) -> Array:
    return special.polygamma(n, floating(x))


def _unchanged(x: Any) -> Any:
    return x


SELU = (1.6732632423543772, 1.0507009873554805)  # alpha and scale

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "__and__": of_promoted(jnp.bitwise_and),
    "__lshift__": of_promoted(jnp.left_shift),
    "__or__": of_promoted(jnp.bitwise_or),
    "__rshift__": of_promoted(jnp.right_shift),
    "__xor__": of_promoted(jnp.bitwise_xor),
    "_to_copy": cast,
    "abs": absolute,
    "acos": of_floats(jnp.arccos),
    "acosh": of_floats(jnp.arccosh),
    "add": add,
    "addcdiv": addcdiv,
    "addcmul": addcmul,
    "alias": _unchanged,
    "arctan2": of_floats_promoted(arctan2),
    "asin": of_floats(jnp.arcsin),
    "asinh": of_floats(jnp.arcsinh),
    "atan": of_floats(jnp.arctan),
    "atan2": of_floats_promoted(arctan2),
    "atanh": of_floats(jnp.arctanh),
    "bitwise_and": of_promoted(jnp.bitwise_and),
    "bitwise_left_shift": of_promoted(jnp.left_shift),
    "bitwise_not": jnp.bitwise_not,
    "bitwise_or": of_promoted(jnp.bitwise_or),
    "bitwise_right_shift": of_promoted(jnp.right_shift),
    "bitwise_xor": of_promoted(jnp.bitwise_xor),
    "ceil": whole(jnp.ceil),
    "celu": lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    "clamp": clamp,
    "clamp_max": clamp_max,
    "clamp_min": clamp_min,
    "clip": clamp,
    "clone": _unchanged,
    "contiguous": _unchanged,
    "copysign": of_floats_promoted(copysign),
    "cos": of_floats(jnp.cos),
    "cosh": of_floats(jnp.cosh),
    "deg2rad": of_floats(jnp.deg2rad),
    "detach": lax.stop_gradient,
    "detach_copy": lax.stop_gradient,
    "digamma": of_floats(special.digamma),
    "div": divide,
    "elu": elu,
    "eq": of_promoted(jnp.equal),
    "erf": of_floats(special.erf),
    "erfc": of_floats(special.erfc),
    "erfinv": of_floats(special.erfinv),
    "exp": of_floats(jnp.exp),
    "exp2": of_floats(jnp.exp2),
    "expm1": of_floats(jnp.expm1),
    "fill": fill,
    "fix": whole(jnp.trunc),
    "floor": whole(jnp.floor),
    "floor_divide": partial(divide, rounding_mode="floor"),
    "fmax": of_promoted(fmax),
    "fmin": of_promoted(fmin),
    "fmod": of_promoted(jnp.fmod),
    "frac": frac,
    "full_like": full_like,
    "ge": of_promoted(jnp.greater_equal),
    "gelu": gelu,
    "gt": of_promoted(jnp.greater),
    "hardshrink": hardshrink,
    "hardsigmoid": lambda x: hardtanh(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * hardtanh(x + 3, 0, 6) / 6,
    "hardtanh": hardtanh,
    "heaviside": of_promoted(heaviside),
    "hypot": of_promoted(jnp.hypot),
    "i0": of_floats(special.i0),
    "isclose": isclose,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "isneginf": jnp.isneginf,
    "isposinf": jnp.isposinf,
    "le": of_promoted(jnp.less_equal),
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "lerp": lerp,
    "lgamma": of_floats(special.gammaln),
    "lift_fresh_copy": _unchanged,
    "log": of_floats(jnp.log),
    "log10": of_floats(jnp.log10),
    "log1p": of_floats(jnp.log1p),
    "log2": of_floats(jnp.log2),
    "log_sigmoid": jax.nn.log_sigmoid,
    "logaddexp": of_promoted(jnp.logaddexp),
    "logaddexp2": of_promoted(jnp.logaddexp2),
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "logit": logit,
    "lt": of_promoted(jnp.less),
    "masked_fill": masked_fill,
    "max.other": of_promoted(jnp.maximum),
    "maximum": of_promoted(jnp.maximum),
    "min.other": of_promoted(jnp.minimum),
    "minimum": of_promoted(jnp.minimum),
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "mul": of_promoted(jnp.multiply),
    "nan_to_num": nan_to_num,
    "ne": of_promoted(jnp.not_equal),
    "neg": jnp.negative,
    "ones_like": like(1),
    "polygamma": polygamma,
    "pow": power,
    "rad2deg": of_floats(jnp.rad2deg),
    "reciprocal": of_floats(jnp.reciprocal),
    "relu": jax.nn.relu,
    "relu6": lambda x: hardtanh(x, 0, 6),
    "remainder": of_promoted(jnp.remainder),
    "round": round_,
    "rsqrt": of_floats(lax.rsqrt),
    "rsub": lambda x, y, alpha=1: subtract(y, x, alpha),
    "selu": lambda x: elu(x, *SELU),
    "sgn": sign,
    "sigmoid": of_floats(jax.nn.sigmoid),
    "sign": sign,
    "signbit": jnp.signbit,
    "silu": jax.nn.silu,
    "sin": of_floats(jnp.sin),
    "sinc": of_floats(jnp.sinc),
    "sinh": of_floats(jnp.sinh),
    "softplus": softplus,
    "softshrink": softshrink,
    "special_entr": of_floats(special.entr),
    "special_expit": of_floats(jax.nn.sigmoid),
    "special_i0e": of_floats(special.i0e),
    "special_i1": of_floats(special.i1),
    "special_i1e": of_floats(special.i1e),
    "special_log_ndtr": of_floats(special.log_ndtr),
    "special_logit": logit,
    "special_ndtr": of_floats(special.ndtr),
    "special_ndtri": of_floats(special.ndtri),
    "special_xlogy": xlogy,
    "sqrt": of_floats(jnp.sqrt),
    "square": lambda x: lax.integer_pow(x, 2),
    "sub": subtract,
    "tan": of_floats(jnp.tan),
    "tanh": of_floats(jnp.tanh),
    "threshold": threshold,
    "to": cast,
    "to.device": cast_to_device,
    "to.other": cast_as,
    "true_divide": divide,
    "trunc": whole(jnp.trunc),
    "type_as": cast_as,
    "where": where,
    "xlogy": xlogy,
    "zero": like(0),
    "zeros_like": like(0),
}
