"""Operations of PyTorch on arrays, as functions of JAX arrays. The tables at the end have their names in PyTorch.

The arguments are those of PyTorch's operation, in its order. ``dim`` is an axis, and may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Axes = int | Sequence[int] | None
Array = jax.Array


# --- elementwise ------------------------------------------------------------------------------------------------------


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


# --- new arrays -------------------------------------------------------------------------------------------------------


def full(shape: Sequence[int], value: Any = 0, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(tuple(shape), value, dtype)


def zeros(shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jnp.zeros(tuple(shape), dtype or jnp.float32)


def ones(shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jnp.ones(tuple(shape), dtype or jnp.float32)


def new(value: float) -> Callable[..., Array]:
    """new_zeros, new_ones."""
    return lambda x, shape, dtype=None, **_: jnp.full(tuple(shape), value, dtype or x.dtype)


def new_full(x: Array, shape: Sequence[int], value: Any, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(tuple(shape), value, dtype or x.dtype)


def full_like(x: Array, value: Any, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(x.shape, value, dtype or x.dtype)


def arange(start: Any, stop: Any = None, step: Any = None, dtype: Any = None, **_: Any) -> Array:
    return jnp.arange(start, stop, step, dtype=dtype)


def linspace(start: float, stop: float, steps: int, dtype: Any = None, **_: Any) -> Array:
    return jnp.linspace(start, stop, steps, dtype=dtype)


def eye(rows: int, columns: int | None = None, dtype: Any = None, **_: Any) -> Array:
    return jnp.eye(rows, columns, dtype=dtype or jnp.float32)


def one_hot(x: Array, classes: int) -> Array:
    return jax.nn.one_hot(x, classes, dtype=jnp.int32)


# --- shapes -----------------------------------------------------------------------------------------------------------


def reshape(x: Array, shape: Sequence[int]) -> Array:
    return x.reshape(tuple(shape))


def flatten(x: Array, start: int = 0, end: int = -1) -> Array:
    start, end = start % x.ndim, end % x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    dim = dim % x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def transpose(x: Array, dim: int = 0, other: int = 1) -> Array:
    return jnp.swapaxes(x, dim, other) if x.ndim > 1 else x


def permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, tuple(dims))


def squeeze(x: Array, dim: Axes = None) -> Array:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


def expand(x: Array, shape: Sequence[int], implicit: bool = False) -> Array:
    missing = len(shape) - x.ndim
    return jnp.broadcast_to(x, tuple(x.shape[i - missing] if n == -1 else n for i, n in enumerate(shape)))


def expand_as(x: Array, other: Array) -> Array:
    return jnp.broadcast_to(x, other.shape)


def repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def repeat_interleave(x: Array, repeats: int, dim: int | None = None, **_: Any) -> Array:
    return jnp.repeat(x, repeats, dim)


def concatenate(parts: Sequence[Array], dim: int = 0) -> Array:
    dtype = jnp.result_type(*parts)
    return jnp.concatenate([part.astype(dtype) for part in parts if part.shape != (0,)], dim)


def stack(parts: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(parts, dim)


def split(x: Array, size: int | Sequence[int], dim: int = 0) -> list[Array]:
    sizes = [size] * -(-x.shape[dim] // size) if isinstance(size, int) else list(size)
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


def chunk(x: Array, chunks: int, dim: int = 0) -> list[Array]:
    return split(x, -(-x.shape[dim] // chunks), dim)


def unbind(x: Array, dim: int = 0) -> list[Array]:
    return list(jnp.unstack(x, axis=dim))


def constant_pad(x: Array, amounts: Sequence[int], value: float = 0) -> Array:
    """amounts: before and after the last axis, then the axis before it, and so on. Negative amounts crop."""
    pairs = [(0, 0)] * (x.ndim - len(amounts) // 2)
    pairs += [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    return lax.pad(x, jnp.asarray(value or 0, x.dtype), [(before, after, 0) for before, after in pairs])


def pad(x: Array, amounts: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    if mode == "constant":
        return constant_pad(x, amounts, value or 0)
    pairs = [(0, 0)] * (x.ndim - len(amounts) // 2)
    pairs += [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    return jnp.pad(x, pairs, mode={"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode])


def padded_with(mode: str) -> Callable[..., Array]:
    return lambda x, amounts: pad(x, amounts, mode)


def unfold(x: Array, dim: int, size: int, step: int) -> Array:
    """Windows of an axis: [..., n, ..., size]."""
    starts = jnp.arange((x.shape[dim] - size) // step + 1) * step
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), dim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


def pixel_shuffle(x: Array, factor: int) -> Array:
    *lead, C, H, W = x.shape
    x = x.reshape(*lead, C // factor**2, factor, factor, H, W)
    n = len(lead)
    x = x.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return x.reshape(*lead, C // factor**2, H * factor, W * factor)


# --- parts of arrays --------------------------------------------------------------------------------------------------


def part(x: Array, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    return (*[slice(None)] * (dim % x.ndim), slice(start, None if end is None else min(end, x.shape[dim]), step))


def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[part(x, dim, start, end, step)]


def select(x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim, keepdims=False)


def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    return x[part(x, dim, start, start + length, 1)]


def slice_scatter(
    x: Array, values: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return x.at[part(x, dim, start, end, step)].set(values)


def select_scatter(x: Array, values: Array, dim: int, index: int) -> Array:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].set(values)


def copy(x: Array, values: Array, *_: Any) -> Array:
    return jnp.broadcast_to(values, x.shape).astype(x.dtype)


def _indices(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_indices(indices)]


def index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    at = x.at[_indices(indices)]
    return at.add(values) if accumulate else at.set(values)


def index_select(x: Array, dim: int, indices: Array) -> Array:
    return jnp.take(x, indices, dim)


def gather(x: Array, dim: int, indices: Array, **_: Any) -> Array:
    """Only the first rows of the other axes are read if they are longer than those of the indices."""
    dim = dim % x.ndim
    x = x[tuple(slice(None) if axis == dim else slice(n) for axis, n in enumerate(indices.shape))]
    return jnp.take_along_axis(x, indices, dim)


def flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims))


def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims) or None)


def diagonal(x: Array, offset: int = 0, dim: int = 0, other: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim, other)


# --- reductions -------------------------------------------------------------------------------------------------------


def _axes(dim: Axes) -> Any:
    return tuple(dim) or None if isinstance(dim, list | tuple) else dim


def total(x: Array, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return x.sum(_axes(dim), dtype=dtype, keepdims=keepdim)


def mean(x: Array, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return x.mean(_axes(dim), dtype=dtype, keepdims=keepdim)


def product(x: Array, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return x.prod(dim, dtype=dtype, keepdims=keepdim)


def variance(
    x: Array, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, correction: float | None = None
) -> Array:
    if isinstance(dim, bool):  # var(x, unbiased)
        return x.var(ddof=int(dim))
    return x.var(_axes(dim), ddof=int(unbiased if correction is None else correction), keepdims=keepdim)


def deviation(x: Array, *arguments: Any, **options: Any) -> Array:
    return jnp.sqrt(variance(x, *arguments, **options))


def norm(x: Array, order: float = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Array:
    axes = _axes(dim)
    if order == 2:
        squares = jnp.square(x).sum(axes, keepdims=keepdim)
        return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)  # gradient 0 at 0
    if math.isinf(order):
        return jnp.abs(x).max(axes, keepdims=keepdim)
    return (jnp.abs(x) ** order).sum(axes, keepdims=keepdim) ** (1 / order)


def _at(x: Array, dim: int, where: Array) -> Array:
    return jnp.take_along_axis(x, where, dim)


def best(x: Array, dim: int, keepdim: bool, arg: Callable[..., Array]) -> tuple[Array, Array]:
    """The largest or smallest values along an axis, and where they are. The first of equal ones gets the gradient.

    XLA may compute a maximum again for its derivative, with another rounding. The derivative of `jnp.max` is then
    infinite. A gather has no such derivative.
    """
    where = arg(x, dim, keepdims=True)
    values = _at(x, dim, where)
    return (values, where) if keepdim else (values.squeeze(dim), where.squeeze(dim))


def largest(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return best(x, dim, keepdim, jnp.argmax)


def smallest(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return best(x, dim, keepdim, jnp.argmin)


def over_axes(arg: Callable[..., Array]) -> Callable[..., Array]:
    """amax, amin and the maximum of a whole array."""

    def reduced(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
        axes = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
        kept = [n for axis, n in enumerate(x.shape) if axis not in {a % x.ndim for a in axes}]
        moved = jnp.moveaxis(x, axes, range(-len(axes), 0)).reshape(*kept, -1)
        values = best(moved, -1, False, arg)[0]
        return jnp.expand_dims(values, [a % x.ndim for a in axes]) if keepdim else values

    return reduced


def argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmax(x, dim, keepdims=keepdim)


def argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmin(x, dim, keepdims=keepdim)


def topk(x: Array, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> tuple[Array, Array]:
    order = jnp.argsort(x, dim, descending=largest)
    where = lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)
    return _at(x, dim, where), where


def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    where = jnp.argsort(x, dim, stable=True, descending=descending)
    return _at(x, dim, where), where


def argsort(x: Array, dim: int = -1, descending: bool = False, **_: Any) -> Array:
    return sort(x, dim, descending)[1]


def logsumexp(x: Array, dim: Axes, keepdim: bool = False) -> Array:
    return jax.nn.logsumexp(x, _axes(dim), keepdims=keepdim)


def difference(x: Array, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Array:
    return jnp.diff(x, n, dim, prepend, append)


def cumulative(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, dim, dtype=None: function(x if dtype is None else x.astype(dtype), dim)


def softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.softmax(cast(x, dtype if isinstance(dtype, np.dtype) else None), dim)


def log_softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.log_softmax(cast(x, dtype if isinstance(dtype, np.dtype) else None), dim)


def any_(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
    return jnp.any(x, _axes(dim), keepdims=keepdim)


def all_(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
    return jnp.all(x, _axes(dim), keepdims=keepdim)


def weight_norm(direction: Array, length: Array, dim: int = 0) -> Array:
    return direction * (length / norm(direction, 2, [i for i in range(direction.ndim) if i != dim], True))


# --- products ---------------------------------------------------------------------------------------------------------


def addmm(bias: Array, x: Array, y: Array, beta: float = 1, alpha: float = 1) -> Array:
    return beta * bias + alpha * (x @ y)


def einsum(equation: str, operands: Sequence[Array], **_: Any) -> Array:
    return jnp.einsum(equation, *operands)


def cosine_similarity(x: Array, y: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    x, y = (each / jnp.maximum(norm(each, 2, dim, True), eps) for each in (x, y))
    return (x * y).sum(dim)


def baddbmm(bias: Array, x: Array, y: Array, beta: float = 1, alpha: float = 1) -> Array:
    return (beta * bias if beta else 0) + alpha * (x @ y)


# --- their names in PyTorch -------------------------------------------------------------------------------------------

# Functions of arrays that are computed for each number by itself. They work in any layout.
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

ARRAYS: dict[str, Callable[..., Any]] = {
    "_unsafe_view": reshape,
    "_weight_norm": weight_norm,
    "addmm": addmm,
    "all": all_,
    "amax": over_axes(jnp.argmax),
    "amin": over_axes(jnp.argmin),
    "any": any_,
    "arange": arange,
    "argmax": argmax,
    "argmin": argmin,
    "argsort": argsort,
    "baddbmm": baddbmm,
    "bmm": jnp.matmul,
    "cat": concatenate,
    "chunk": chunk,
    "constant_pad_nd": constant_pad,
    "copy": copy,
    "cosine_similarity": cosine_similarity,
    "cumprod": cumulative(jnp.cumprod),
    "cumsum": cumulative(jnp.cumsum),
    "diagonal": diagonal,
    "diff": difference,
    "dot": jnp.dot,
    "einsum": einsum,
    "empty": zeros,
    "expand": expand,
    "expand_as": expand_as,
    "eye": eye,
    "flatten": flatten,
    "flip": flip,
    "full": full,
    "gather": gather,
    "index": index,
    "index_put": index_put,
    "index_select": index_select,
    "linalg_vector_norm": norm,
    "linspace": linspace,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "matmul": jnp.matmul,
    "max": over_axes(jnp.argmax),
    "max.dim": largest,
    "mean": mean,
    "min": over_axes(jnp.argmin),
    "min.dim": smallest,
    "mm": jnp.matmul,
    "movedim": jnp.moveaxis,
    "mv": jnp.matmul,
    "narrow": narrow,
    "new_empty": new(0),
    "new_full": new_full,
    "new_ones": new(1),
    "new_zeros": new(0),
    "norm": norm,
    "numel": lambda x: math.prod(x.shape),
    "one_hot": one_hot,
    "ones": ones,
    "outer": jnp.outer,
    "pad": pad,
    "permute": permute,
    "pixel_shuffle": pixel_shuffle,
    "prod": product,
    "reflection_pad1d": padded_with("reflect"),
    "reflection_pad2d": padded_with("reflect"),
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "replication_pad1d": padded_with("replicate"),
    "replication_pad2d": padded_with("replicate"),
    "reshape": reshape,
    "roll": roll,
    "scalar_tensor": lambda value, dtype=None, **_: jnp.asarray(value, dtype),
    "select": select,
    "select_scatter": select_scatter,
    "slice": slice_,
    "slice_scatter": slice_scatter,
    "softmax": softmax,
    "sort": sort,
    "split": split,
    "split_with_sizes": split,
    "squeeze": squeeze,
    "stack": stack,
    "std": deviation,
    "sum": total,
    "t": transpose,
    "topk": topk,
    "transpose": transpose,
    "tril": jnp.tril,
    "triu": jnp.triu,
    "unbind": unbind,
    "unflatten": unflatten,
    "unfold": unfold,
    "unsqueeze": jnp.expand_dims,
    "var": variance,
    "view": reshape,
    "zeros": zeros,
}
