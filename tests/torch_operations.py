"""The operations of `Model.from_torch` against PyTorch itself, with random arguments.

    python tests/torch_operations.py SECONDS [SEED]

Each operation has an entry that draws the arguments of a call: negative axes, no axis, arrays without axes, equal
numbers, zeros, infinities, integers. Values, shapes, dtypes and the gradient of a random projection are compared, in
float32 and in float64. Gradients are not compared where the argument, or PyTorch's own gradient, is NaN.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch import export, reading, run
from fedjax_drift.pytorch.operations import (
    creation,
    elementwise,
    losses,
    parts,
    products,
    reductions,
    shapes,
    spectral,
)
from fedjax_drift.pytorch.operations.mode import Mode
from fedjax_drift.pytorch.reading import of_version, plain_values

TABLE: dict[str, Callable[..., Any]] = {
    **elementwise.ELEMENTWISE,
    **creation.ARRAYS,
    **shapes.ARRAYS,
    **parts.ARRAYS,
    **reductions.ARRAYS,
    **products.ARRAYS,
    **spectral.ARRAYS,
    **losses.ARRAYS,
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (4,), (2, 3), (3, 1), (2, 1, 3)]
# The entries of these are those of the operations that have them in their decomposition. The last are never in a graph.
INSIDE = {*"nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward _pad_circular _weight_norm_interface".split()}
INSIDE |= {"empty_permuted", *"_fft_c2c _fft_c2r _fft_r2c _pad_enum atleast_1d atleast_2d atleast_3d".split()}
INSIDE |= {"_unsafe_index", "_unsafe_index_put", "diagonal_copy", "tensordot"}
INSIDE |= {f"{name}.correction" for name in ("std", "std_mean", "var", "var_mean")}
INSIDE |= {*"broadcast_to chunk contiguous expand_as flatten lift_fresh_copy meshgrid movedim narrow numel".split()}
INSIDE |= {*"reshape reshape_as to unflatten unsafe_chunk view_as".split()}
INF, NAN = math.inf, math.nan
TOLERANCE = {"float32": 3e-5, "float64": 1e-9}
Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*arguments: Any, **options: Any) -> Call:
    return arguments, options


class Draw:
    """Random arguments."""

    def __init__(self, seed: int, dtype: str = "float32") -> None:
        self.rng, self.name, self.dtype = np.random.default_rng(seed), dtype, getattr(torch, dtype)

    def pick(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def often(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def shape(self, least: int = 0) -> tuple[int, ...]:
        return self.pick(*(shape for shape in SHAPES if len(shape) >= least))

    def floats(self, *shape: int, special: bool = False, low: float = -INF, high: float = INF) -> torch.Tensor:
        """Often with equal numbers and zeros."""
        x = np.array(self.rng.normal(size=shape) * 1.5)
        if self.often():
            x = np.round(x, self.pick(0, 1))
        if special:
            x = np.where(self.rng.random(shape) < 0.2, self.rng.choice([INF, -INF, NAN, 0.0, 1e4], shape), x)
        return torch.from_numpy(np.array(np.clip(x, low, high))).to(self.dtype)

    def whole(self, *shape: int, low: int = -4, high: int = 5, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rng.integers(low, high, shape))).to(dtype)

    def bools(self, *shape: int) -> torch.Tensor:
        return self.whole(*shape, low=0, high=2).bool()

    def bytes(self, *shape: int) -> torch.Tensor:
        return self.whole(*shape, low=0, high=256, dtype=torch.uint8)

    def any(self, *shape: int, special: bool = False) -> torch.Tensor:
        """Of any dtype."""
        kind = self.pick("float", "float", "float", "int", "bool", "byte", "int32")
        if kind == "float":
            return self.floats(*shape, special=special)
        if kind == "int32":
            return self.whole(*shape, dtype=torch.int32)
        return {"int": self.whole, "bool": self.bools, "byte": self.bytes}[kind](*shape)

    def number(self) -> Any:
        return self.pick(-2, 0, 1, 3, -1.5, 0.5, 2.0)

    def dim(self, x: torch.Tensor) -> int:
        n = max(x.ndim, 1)
        return int(self.rng.integers(-n, n))

    def dims(self, x: torch.Tensor) -> list[int]:
        n = max(x.ndim, 1)
        chosen = self.rng.permutation(n)[: self.rng.integers(0, n + 1)]
        return [int(d) - (n if self.often() else 0) for d in chosen]

    def options(self, **chances: Any) -> dict[str, Any]:
        """Each option half of the time, one of its values."""
        return {name: self.pick(*values) for name, values in chances.items() if self.often()}

    def matrix(self, n: int = 3) -> torch.Tensor:
        """Well conditioned."""
        return torch.from_numpy(self.rng.normal(size=(n, n)) + 4 * np.eye(n)).to(self.dtype)

    def complexes(self, *shape: int) -> torch.Tensor:
        return torch.complex(self.floats(*shape), self.floats(*shape))


Entry = Callable[[Draw], Call]


def unary(low: float = -INF, high: float = INF, special: bool = True, any_: bool = True) -> Entry:
    def drawn(d: Draw) -> Call:
        bounded = low > -INF or high < INF
        if any_ and not bounded and d.often(0.3):
            return call(d.any(*d.shape(), special=special))
        return call(d.floats(*d.shape(), special=special and not bounded, low=low, high=high))

    return drawn


def in_quarters(entry: Entry) -> Entry:
    def drawn(d: Draw) -> Call:
        arguments, options = entry(d)
        return tuple((4 * x).round() / 4 if is_tensor(x) and x.is_floating_point() else x for x in arguments), options

    return drawn


def operands(d: Draw, special: bool, numbers: bool) -> tuple[Any, Any]:
    """Two arrays, one of them perhaps with fewer axes, or of another dtype; or an array and a number."""
    shape = d.shape()
    x, y = (d.any(*shape, special=special) if d.often(0.4) else d.floats(*shape, special=special) for _ in range(2))
    if d.often(0.3):
        y = d.any(*shape[1:])
    elif d.often(0.2):
        y = d.any()
    elif numbers and d.often(0.3):
        y = d.number()
    elif d.often(0.2):
        y = x.clone()
    return x, y


def binary(special: bool = True, numbers: bool = True, **options: Any) -> Entry:
    return lambda d: (operands(d, special, numbers), d.options(**options))


def bits(d: Draw) -> Call:
    shape = d.shape()
    kind = d.pick(d.whole, d.bools, d.bytes)
    return call(kind(*shape), kind(*shape))


def shifts(d: Draw) -> Call:
    shape = d.shape()
    return call(d.whole(*shape, low=0), d.pick(2, d.whole(*shape, low=0, high=4)))


def reduction(dims: bool = True, any_: bool = True, special: bool = True, **options: Any) -> Entry:
    def drawn(d: Draw) -> Call:
        x = (d.any if any_ else d.floats)(*d.shape(), special=special and d.often(0.3))
        if d.often(0.2):
            return call(x)
        dim = d.dims(x) if dims and d.often() else d.dim(x)
        given = d.options(keepdim=[True, False], **options)
        keepdim = given.pop("keepdim", False)
        return (x, dim, keepdim), given

    return drawn


def one_axis(*rest: Any, least: int = 0, any_: bool = True, special: bool = True, **options: Any) -> Entry:
    def drawn(d: Draw) -> Call:
        x = (d.any if any_ else d.floats)(*d.shape(least), special=special and d.often(0.3))
        return (x, d.dim(x), *(d.pick(*each) for each in rest)), d.options(**options)

    return drawn


def spread(mean: bool) -> Entry:
    def drawn(d: Draw) -> Call:
        x = d.floats(*d.shape())
        if d.often(0.2):
            x = x * 0 + 2
        if d.often(0.2):
            return call(x, *d.pick((), (True,), (False,)))
        if d.often(0.3):
            return call(x, d.dims(x) or [0], d.often(), d.often())
        # No empty list of axes, for which PyTorch's gradient is that of one number.
        dims, options = d.pick(None, d.dims(x) or [0]), d.options(correction=[0, 1, 2, 0.5, 9], keepdim=[True])
        if dims is None:
            options.setdefault("correction", 1)  # without it, PyTorch 2.15 takes None for unbiased=False
        return (x, dims), options

    return drawn


def norms(d: Draw) -> Call:
    x = d.floats(*d.shape())
    order = d.pick(2, 1, 3, 0, INF, -INF, -1, 0.5, 2.5, 1.5)
    return call(x, order, d.dims(x), d.often())


def arrays(d: Draw, least: int = 1, same: bool = False) -> list[torch.Tensor]:
    shape = d.shape(least)
    kind = d.floats if same or d.often(0.7) else d.any
    return [kind(*shape) for _ in range(d.pick(1, 2, 3))]


def joined(least: int = 1, dim: bool = True) -> Entry:
    def drawn(d: Draw) -> Call:
        each = arrays(d, least)
        return call(each, *([d.dim(each[0])] if dim and d.often(0.7) else []))

    return drawn


def added(*sizes: str, **extents: int) -> Entry:
    """addmm and its like. sizes: the axes of bias, x and y."""

    def drawn(d: Draw) -> Call:
        n = {"b": 2, "i": 3, "j": 4, "k": 2}
        given = [d.floats(*(n[axis] for axis in each)) for each in sizes]
        if d.often(0.3):
            given[0] = d.floats(*given[0].shape[-1:])
        return tuple(given), d.options(beta=[0, 2, 0.5], alpha=[3, 0.5])

    return drawn


def scattered(values: bool = True, **options: Any) -> Entry:
    def drawn(d: Draw) -> Call:
        x = d.floats(3, 4)
        dim = d.pick(0, 1, -1)
        count = d.pick(1, 3)
        places = torch.from_numpy(np.array(d.rng.permuted(np.tile(np.arange(3), (3, 1)), axis=1)))[:count]
        places = places if dim != 0 else places.T
        given = d.floats(3, 4) if values or d.often() else d.pick(2.0, -1)
        return (x, dim, places, given), options

    return drawn


def reduced_scatter(d: Draw) -> Call:
    x, dim = d.pick(d.floats(3, 4), d.whole(3, 4)), d.pick(0, 1, -2)
    places = d.whole(3, 3, low=0, high=3)
    source = d.floats(3, 4) if x.is_floating_point() else d.whole(3, 4)
    return (x, dim, places, source, d.pick("sum", "mean", "amax", "amin")), d.options(include_self=[True, False])


def indexed(d: Draw) -> tuple[torch.Tensor, int, torch.Tensor]:
    """An array, an axis, and two different places of it."""
    x = d.floats(3, 4, 3)
    return x, d.dim(x), torch.from_numpy(d.rng.permutation(3)[:2].copy())


def rows_of(d: Draw) -> Call:
    x, dim, places = indexed(d)
    values = d.floats(*(2 if axis == dim % 3 else n for axis, n in enumerate(x.shape)))
    return call(x, dim, places, values)


def index_lists(d: Draw) -> tuple[torch.Tensor, list[Any]]:
    x = d.floats(3, 4, 3)
    i, j = (d.whole(*d.pick((2,), (2, 1), (1, 2)), low=-3, high=3) for _ in range(2))
    return x, d.pick([i], [None, i], [i, j], [i, None, j], [None, i, j], [None, None, i])


def put(d: Draw) -> Call:
    x, dim = d.floats(3, 4), d.pick([None, torch.tensor([2, 0])], [torch.tensor([2, -3])])
    return call(
        x, dim, d.pick(d.floats(), d.floats(1), d.floats(3, 2) if dim[0] is None else d.floats(2, 4)), d.often()
    )


def edges(d: Draw) -> torch.Tensor:
    return d.floats(5).sort().values


def images(d: Draw) -> tuple[torch.Tensor, list[list[int]]]:
    return d.floats(*d.pick((2, 2), (2,)), 6, 5), [d.pick([2, 2], [3, 1]), d.pick([1, 1], [1, 2]), [1, 0], [2, 1]]


def folded(d: Draw) -> Call:
    x, how = images(d)
    columns = torch.ops.aten.im2col(x, *how)
    return call(d.floats(*columns.shape), [6, 5], *how)


def padding(axes: int, negative: bool = True) -> Entry:
    def drawn(d: Draw) -> Call:
        amounts = [d.pick(*((-1, 0, 1, 2) if negative else (0, 1, 2))) for _ in range(2 * axes)]
        return call(d.floats(2, *[4] * axes), amounts)

    return drawn


def any_padding(d: Draw) -> Call:
    (x, amounts), _ = padding(d.pick(1, 2), negative=False)(d)
    mode = d.pick("constant", "reflect", "replicate", "circular")
    if mode != "constant":
        return call(x, amounts, mode)
    return call(x, amounts, mode, *([d.number()] if d.often() else []))


def transforms(complex_: bool = False, many: bool = False) -> Entry:
    def drawn(d: Draw) -> Call:
        x = (d.complexes if complex_ else d.floats)(*d.pick((4, 6), (2, 5, 4)))
        norm = d.pick(None, "ortho", "forward", "backward")
        if many:
            return call(x, d.pick(None, [4, 3]), [-2, -1], norm)
        return call(x, d.pick(None, 3, 6), d.dim(x), norm)

    return drawn


def cell(gates: int, states: int) -> Entry:
    def drawn(d: Draw) -> Call:
        given = [d.floats(2, 3) for _ in range(states)]
        biases = d.pick((), (d.floats(3 * gates), d.floats(3 * gates)))
        return call(
            d.floats(2, 4), given if states > 1 else given[0], d.floats(3 * gates, 4), d.floats(3 * gates, 3), *biases
        )

    return drawn


def vectors(d: Draw) -> Call:
    return call(d.floats(3), d.floats(3))


def new_of(*value: Any) -> Entry:
    return lambda d: (
        (d.any(2), d.pick([], [2], [2, 3]), *value),
        d.options(dtype=[torch.float32, torch.int64, torch.bool]),
    )


def sized(d: Draw) -> Call:
    return (d.pick([], [3], [0, 2]),), d.options(dtype=[torch.float32, torch.int64, torch.bool])


def alike(*value: Any) -> Entry:
    return lambda d: ((d.any(*d.shape()), *value), d.options(dtype=[torch.float32, torch.int64, torch.bool]))


def of(function: Callable[[Draw], tuple[Any, ...]]) -> Entry:
    """Of a call without options."""
    return lambda d: (function(d), {})


def labelled(d: Draw) -> Call:
    """Logits or logarithms, classes, weights of classes, reduction, a class that does not count."""
    shape = d.pick((), (3,), (3, 2))
    classes, weight = d.whole(*shape, low=0, high=4), d.pick(None, d.floats(4, low=0.1))
    return call(d.floats(*shape[:1], 4, *shape[1:]), classes, weight, d.pick(0, 1, 2), d.pick(-100, 1))


floats_only = unary(any_=False)


def clamped(d: Draw) -> Call:
    """Without negative bounds of uint8, which PyTorch's versions take for different numbers."""
    x = d.any(2, 3)
    low = 0 if x.dtype == torch.uint8 else -1
    return d.pick(
        call(x, d.pick(None, low, 0.5), 1),
        call(x, low),
        call(d.floats(2, 3), d.floats(3), d.pick(None, d.floats(2, 1))),
        call(d.floats(2, 3, special=True), -1.0, 2.0),
    )


ENTRIES: dict[str, Entry] = {
    **dict.fromkeys(("digamma", "lgamma"), lambda d: call(d.floats(*d.shape(0), low=0.1))),  # without their poles
    **dict.fromkeys(
        """abs asinh atan cos deg2rad erf erfc exp exp2 expm1 isfinite isinf isnan isneginf isposinf
        logical_not rad2deg reciprocal sgn sigmoid sign signbit sin sinc sinh square tan tanh
        special_expit alias clone detach detach_copy ceil fix floor trunc neg
        zero log log10 log1p log2 sqrt rsqrt relu nan_to_num cosh""".split(),
        unary(),
    ),
    **dict.fromkeys(
        """celu elu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish relu6 selu silu softplus
        softshrink frac""".split(),
        floats_only,
    ),
    "gelu": unary(-6, 6),  # PyTorch's is NaN at infinity for some lengths of arrays
    **dict.fromkeys("acos asin atanh erfinv".split(), unary(-1, 1)),
    **dict.fromkeys("special_i0e special_i1 special_i1e i0 special_log_ndtr special_ndtr".split(), unary(-5, 5)),
    **dict.fromkeys(["special_ndtri"], unary(0.01, 0.99)),
    **dict.fromkeys(["acosh"], unary(1)),
    **dict.fromkeys(["special_entr"], unary(-5, 5)),
    **dict.fromkeys("eq ne lt le gt ge pow".split(), binary()),
    **dict.fromkeys("fmod remainder floor_divide".split(), in_quarters(binary())),  # no rounding next to a jump
    **dict.fromkeys("logical_and logical_or logical_xor".split(), binary(numbers=False)),
    **dict.fromkeys("maximum minimum max.other min.other fmax fmin hypot".split(), binary(numbers=False)),
    # Of uint8, PyTorch's gradient overflows.
    **dict.fromkeys(
        ["arctan2", "atan2"],
        lambda d: (lambda shape: call(d.floats(*shape, special=True), d.floats(*shape, special=True)))(d.shape()),
    ),
    **dict.fromkeys("logaddexp logaddexp2 heaviside".split(), binary(numbers=False)),
    **dict.fromkeys("add sub rsub".split(), binary(alpha=[2, 3])),
    **dict.fromkeys("mul true_divide copysign".split(), binary()),
    **dict.fromkeys("xlogy special_xlogy".split(), binary(special=False)),
    "div": binary(rounding_mode=["floor", "trunc"]),
    "isclose": lambda d: (operands(d, True, False), d.options(rtol=[0.1], atol=[0.5], equal_nan=[True])),
    **dict.fromkeys("__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor".split(), bits),
    **dict.fromkeys("__lshift__ __rshift__ bitwise_left_shift bitwise_right_shift".split(), shifts),
    "bitwise_not": of(lambda d: bits(d)[0][:1]),
    **dict.fromkeys(["clamp", "clip"], clamped),
    **dict.fromkeys(
        ["clamp_min", "clamp_max"], of(lambda d: (d.any(2, 3, special=True), d.pick(0, 0.5, d.floats(3), d.floats())))
    ),
    **{
        "threshold": of(lambda d: (d.floats(2, 3, special=True), d.number(), d.number())),
        "round": lambda d: (unary()(d)[0], {}) if d.often() else ((d.floats(3) * 40,), {"decimals": d.pick(1, -1, 2)}),
        "logit": of(lambda d: (d.floats(4, low=0, high=1), d.pick(None, 0.1, 1e-6))),
        "special_logit": of(lambda d: (d.floats(4, low=0, high=1), d.pick(None, 0.1))),
        "lerp": of(lambda d: (d.floats(2, 3), d.floats(2, 3), d.pick(0.3, 0.7, 1.0, -2.0, d.floats(2, 3)))),
        "fill": of(lambda d: (d.any(2, 3), d.pick(d.number(), torch.tensor(2), d.floats()))),
        "masked_fill": of(
            lambda d: (d.any(2, 3), d.bools(*d.pick((2, 3), (3,))), d.pick(1, torch.tensor(1), d.pick(0, 2)))
        ),
        "where": of(lambda d: (d.bools(2, 3), *operands(d, True, True))),
        "addcmul": lambda d: ((d.floats(2, 3), d.floats(3), d.floats(2, 1)), d.options(value=[2, 0.5])),
        "addcdiv": lambda d: ((d.floats(2, 3), d.floats(3), d.floats(2, 1) + 9), d.options(value=[2, 0.5])),
        "polygamma": of(lambda d: (d.pick(1, 2), d.floats(3, low=0.5))),
        "_to_copy": lambda d: ((d.any(2, 3),), d.options(dtype=[torch.float32, torch.int64, torch.bool])),
        "type_as": of(lambda d: (d.any(2, 3), d.any(1))),
        "full_like": alike(2),
        **dict.fromkeys(["ones_like", "zeros_like"], alike()),
    },
    # creation
    **dict.fromkeys(["zeros", "ones"], sized),
    **dict.fromkeys(["new_zeros", "new_ones"], new_of()),
    "empty": of(lambda d: ([0, 3],)),
    "empty_like": of(lambda d: (d.any(0, 3),)),
    "new_empty": of(lambda d: (d.any(2), [0, 3])),
    "new_full": new_of(2),
    "full": lambda d: ((d.pick([], [2, 3]), d.pick(2, 1.5, True)), d.options(dtype=[torch.float32, torch.int64])),
    "arange": lambda d: (
        d.pick((5,), (1.5,), (1, 7, 2), (0.0, 1.0, 0.3), (5, 0, -1), (2, 4)),
        d.options(dtype=[torch.float32]),
    ),
    "linspace": lambda d: ((d.pick(0, -1.5), 3, d.pick(1, 4)), d.options(dtype=[torch.float32, torch.int64])),
    "eye": lambda d: ((3, *d.pick((), (2,))), d.options(dtype=[torch.int64, torch.bool])),
    "one_hot": of(lambda d: (d.whole(*d.shape(), low=0, high=4), 5)),
    "scalar_tensor": lambda d: ((d.pick(2, 1.5, True),), d.options(dtype=[torch.int64])),
    # shapes
    **dict.fromkeys(["view", "_unsafe_view"], of(lambda d: (d.any(2, 6), d.pick([3, 4], [-1], [2, -1, 2])))),
    "transpose": of(lambda d: (x := d.any(*d.shape(1)), d.dim(x), d.dim(x))),
    "t": of(lambda d: (d.any(*d.pick((), (3,), (2, 3))),)),
    "permute": of(lambda d: (d.any(2, 1, 3), d.pick([2, 0, 1], [-1, 0, 1]))),
    "squeeze": lambda d: (lambda x: call(x, *d.pick((), (d.dim(x),), (d.dims(x),))))(d.any(*d.shape())),
    "unsqueeze": of(lambda d: (x := d.any(*d.shape()), d.pick(0, -1, x.ndim))),
    "expand": of(lambda d: (d.any(3, 1), d.pick([3, 2], [-1, 4], [2, -1, 5]))),
    **dict.fromkeys(["repeat", "tile"], of(lambda d: (d.any(2, 3), d.pick([2, 1], [1, 2, 3], [0, 1])))),
    "repeat_interleave": lambda d: d.pick(
        call(d.any(2, 3), 2, d.pick(None, 0, -1)), call(d.any(2, 3), torch.tensor([1, 0, 2]), 1, output_size=3)
    ),
    **dict.fromkeys(["cat", "concat"], joined()),
    "stack": joined(0),
    **dict.fromkeys(["hstack", "vstack", "dstack", "column_stack"], joined(0, False)),
    "split": of(lambda d: (d.any(5, 4), d.pick(1, 2, 3, 7), d.pick(0, 1, -1))),
    "unsafe_split": of(lambda d: (d.any(5, 4), d.pick(1, 2, 3, 7), d.pick(0, 1, -1))),
    "split_with_sizes": of(lambda d: (d.any(5, 4), d.pick([1, 4], [2, 0, 3]), 0)),
    "unbind": one_axis(least=1),
    "broadcast_tensors": of(lambda d: ([d.any(2, 3), d.any(3), d.any()],)),
    "constant_pad_nd": lambda d: (lambda c: call(*c[0], *([d.number()] if d.often() else [])))(
        padding(d.pick(1, 2))(d)
    ),
    "pad": any_padding,
    **{f"{kind}_pad{n}d": padding(n, False) for n in (1, 2, 3) for kind in ("reflection", "replication")},
    "unfold": of(lambda d: (d.any(5, 4), d.pick(0, 1, -1), d.pick(1, 2, 3), d.pick(1, 2))),
    "pixel_shuffle": of(lambda d: (d.any(*d.pick((2,), ()), 8, 2, 3), 2)),
    "pixel_unshuffle": of(lambda d: (d.any(*d.pick((2,), ()), 2, 4, 6), 2)),
    **dict.fromkeys("mse_loss l1_loss".split(), of(lambda d: (d.floats(2, 3), d.floats(2, 3), d.pick(0, 1, 2)))),
    **dict.fromkeys(
        "smooth_l1_loss huber_loss".split(),
        of(lambda d: (d.floats(2, 3), d.floats(2, 3), d.pick(0, 1, 2), d.pick(1.0, 0.5))),
    ),
    "soft_margin_loss": of(lambda d: (d.floats(2, 3), d.floats(2, 3).sign(), d.pick(0, 1, 2))),
    "binary_cross_entropy": of(
        lambda d: (d.floats(2, 3).sigmoid(), d.bools(2, 3).to(d.dtype), d.pick(None, d.floats(2, 3)), d.pick(0, 1, 2))
    ),
    "binary_cross_entropy_with_logits": of(
        lambda d: (
            d.floats(2, 3),
            d.floats(2, 3, low=0, high=1),
            d.pick(None, d.floats(3)),
            d.pick(None, d.floats(3, low=0.1)),
            d.pick(0, 1, 2),
        )
    ),
    "kl_div": lambda d: call(
        d.floats(2, 3), d.floats(2, 3, low=0, high=1), d.pick(0, 1, 2), **d.options(log_target=[True])
    ),
    "nll_loss_nd": labelled,
    "cross_entropy_loss": lambda d: d.pick(
        call(*labelled(d)[0], d.pick(0.0, 0.2)),
        call(d.floats(2, 4), d.floats(2, 4).softmax(1), d.pick(None, d.floats(4, low=0.1)), d.pick(0, 1, 2), -100, 0.1),
    ),
    "glu": of(lambda d: (d.floats(2, 4, 6), d.pick(-1, 1, 2, -2))),
    "channel_shuffle": of(lambda d: (d.floats(2, 6, *d.pick((2,), (2, 2))), 3)),
    "im2col": lambda d: (lambda x, how: call(x, *how))(*images(d)),
    "col2im": folded,
    "affine_grid_generator": of(lambda d: (d.floats(2, 2, 3), [2, 3, 4, d.pick(1, 5)], d.often())),
    # parts
    "slice": of(
        lambda d: (d.any(5, 4), d.pick(0, 1, -1), d.pick(None, 1, -2, 9), d.pick(None, 3, -1, 2**63 - 1), d.pick(1, 2))
    ),
    "select": of(lambda d: (d.any(3, 4), d.pick(0, -1), d.pick(0, -1, 2))),
    "slice_scatter": of(lambda d: (d.any(5, 4), d.any(2, 4), 0, d.pick(1, -4), d.pick(3, -2))),
    "select_scatter": of(lambda d: (d.any(3, 4), d.any(3), -1, d.pick(1, -1))),
    "diagonal_scatter": lambda d: (lambda x, o: call(x, d.floats(*x.diagonal(o).shape), o))(
        d.floats(3, 4), d.pick(-1, 0, 2)
    ),
    "copy": of(lambda d: (d.any(2, 3), d.any(*d.pick((3,), (2, 3), ())))),
    "index": of(index_lists),
    "index_put": put,
    "index_select": of(lambda d: (d.any(3, 4), d.pick(0, -1), d.whole(2, low=0, high=3))),
    "index_add": lambda d: (rows_of(d)[0], d.options(alpha=[2, 0.5])),
    "index_copy": rows_of,
    "index_fill": lambda d: call(*indexed(d), d.pick(2.0, -1, d.floats())),
    "gather": of(lambda d: (d.any(3, 4), d.pick(0, 1, -1), d.whole(*d.pick((2, 3), (3, 1)), low=0, high=3))),
    "take": of(lambda d: (d.any(3, 4), d.whole(2, 3, low=-12, high=12))),
    "take_along_dim": of(
        lambda d: d.pick((x := d.any(3, 4), d.whole(3, 2, low=0, high=3), -1), (x, d.whole(2, low=0, high=9)))
    ),
    "scatter": lambda d: d.pick(scattered(False)(d), scattered(False, reduce=d.pick("add"))(d)),
    "scatter_add": scattered(),
    "scatter_reduce": reduced_scatter,
    "masked_scatter": of(lambda d: (d.floats(3, 4), d.bools(*d.pick((3, 4), (4,))), d.floats(3, 4))),
    "searchsorted": lambda d: (
        (edges(d), d.pick(d.floats(2, 3), 0.5)),
        d.pick({}, {"right": True}, {"side": "right"}, {"out_int32": True}),
    ),
    "bucketize": lambda d: ((d.floats(2, 3), edges(d)), d.options(right=[True], out_int32=[True])),
    "flip": lambda d: (lambda x: call(x, d.dims(x) if x.ndim else []))(d.any(*d.shape())),
    **dict.fromkeys(["fliplr", "flipud"], of(lambda d: (d.any(2, 3),))),
    "roll": of(lambda d: d.pick((x := d.any(3, 4), [2]), (x, [1, -2], [0, -1]), (x, [5], [-1]))),
    "rot90": of(lambda d: (d.any(2, 3, 4), d.pick(-1, 0, 1, 2, 3), d.pick([0, 1], [1, -1]))),
    "diagonal": of(lambda d: (d.any(2, 3, 4), d.pick(-1, 0, 2), *d.pick((), (0, 2), (-1, 1)))),
    "diag": of(lambda d: (d.any(*d.pick((3,), (2, 3))), d.pick(-1, 0, 1))),
    "diag_embed": of(lambda d: (d.any(2, 3), d.pick(-1, 0, 2), *d.pick((), (0, 2), (-1, 0), (1, 0)))),
    "trace": of(lambda d: (d.any(2, 3),)),
    **dict.fromkeys(["tril", "triu"], of(lambda d: (d.any(*d.pick((2, 3), (2, 3, 3))), *d.pick((), (-1,), (1,))))),
    # reductions
    "sum": reduction(dtype=[torch.float32, torch.int64]),
    "mean": reduction(any_=False, dtype=[torch.float32]),
    "nansum": reduction(),
    "nanmean": reduction(any_=False),
    "prod": reduction(dims=False, special=False, dtype=[torch.float32]),
    "count_nonzero": of(lambda d: (x := d.any(*d.shape()), *d.pick((), (d.dim(x),), (d.dims(x),)))),
    "any": reduction(),
    "all": reduction(),
    "var": spread(False),
    "std": spread(False),
    "var_mean": spread(True),
    "std_mean": spread(True),
    "norm": norms,
    "linalg_vector_norm": lambda d: (norms(d)[0], d.options(dtype=[d.dtype])),
    **dict.fromkeys(["amax", "amin"], reduction()),
    **dict.fromkeys(["max", "min"], lambda d: call(d.any(*d.shape(), special=d.often(0.2)))),
    **dict.fromkeys(["max.dim", "min.dim"], one_axis([True, False])),
    "aminmax": lambda d: (lambda x: ((x,), d.options(dim=[d.dim(x)], keepdim=[True])))(d.any(*d.shape())),
    **dict.fromkeys(["argmax", "argmin"], reduction(dims=False)),
    **dict.fromkeys(["sort", "argsort"], one_axis([True, False])),
    "msort": lambda d: call(d.any(*d.shape())),
    "topk": lambda d: (lambda x: call(x, 1 if x.ndim == 0 else d.pick(1, 2), -1, d.often()))(
        d.any(*d.pick((), (4,), (2, 3)))
    ),
    "kthvalue": one_axis([True, False], least=1),
    "median": lambda d: (lambda x: call(x, *d.pick((), (d.dim(x), d.often()))))(
        d.any(*d.shape(), special=d.often(0.2))
    ),
    "logsumexp": lambda d: (lambda x: call(x, d.dims(x), d.often()))(d.any(*d.shape(), special=d.often())),
    **dict.fromkeys(["cumsum", "cumprod"], one_axis(dtype=[torch.float32])),
    "logcumsumexp": one_axis(any_=False, special=False),
    **dict.fromkeys(["cummax", "cummin"], one_axis(special=False)),
    "diff": lambda d: (
        (lambda x: call(x, d.pick(1, 2), d.dim(x)))(d.any(3, 4))
        if d.often()
        else call(d.floats(3, 4), 1, -1, d.pick(None, d.floats(3, 1)), d.pick(None, d.floats(3, 2)))
    ),
    **dict.fromkeys(["softmax", "log_softmax"], one_axis([None, torch.float32])),
    "_weight_norm": of(lambda d: (d.floats(3, 4), d.floats(3, 1), 0)),
    # products
    "addmm": added("ik", "ij", "jk"),
    "addmv": added("i", "ij", "j"),
    "addr": added("ij", "i", "j"),
    "addbmm": added("ik", "bij", "bjk"),
    "baddbmm": added("bik", "bij", "bjk"),
    "bilinear": of(lambda d: (d.floats(2, 3), d.floats(2, 4), d.floats(5, 3, 4), d.pick(None, d.floats(5)))),
    "linear": of(lambda d: (d.floats(*d.pick((), (2,), (2, 2)), 3), d.floats(4, 3), d.pick(None, d.floats(4)))),
    "block_diag": of(lambda d: ([d.any(2, 3), d.any(2), d.any()],)),
    "bmm": of(lambda d: (d.floats(2, 3, 4), d.floats(2, 4, 3))),
    "cdist": of(
        lambda d: (
            x := d.floats(3, 4),
            d.pick(x.clone(), d.floats(2, 4), d.floats(2, 5, 4)),
            d.pick(1.0, 2.0, INF, 3.0, 0.5),
        )
    ),
    **dict.fromkeys(
        ["chain_matmul", "linalg_multi_dot"], of(lambda d: ([d.floats(2, 3), d.floats(3, 4), d.floats(4, 2)],))
    ),
    "cosine_similarity": of(
        lambda d: (
            d.floats(*d.pick((2, 3), (4, 2, 3), (1, 3))) * d.pick(1, 0),
            d.floats(2, 3),
            d.pick(-1, 1),
            d.pick(1e-8, 2.0),
        )
    ),
    **dict.fromkeys(
        ["cross", "linalg_cross"], lambda d: call(d.floats(2, 3), d.floats(*d.pick((2, 3), (1, 3))), *d.pick((), (-1,)))
    ),
    **dict.fromkeys(["dot", "vdot", "outer"], vectors),
    "inner": of(lambda d: (d.floats(2, 3), d.floats(*d.pick((3,), (4, 3), ())))),
    "einsum": of(
        lambda d: d.pick(("ij,kj->ik", [d.floats(2, 3), d.floats(4, 3)]), ("...ij->...ji", [d.floats(2, 3, 4)]))
    ),
    "kron": of(lambda d: (d.any(2, 3), d.any(*d.pick((2,), (2, 2))))),
    "matmul": of(
        lambda d: d.pick(
            (d.floats(2, 3), d.floats(3)),
            (d.floats(3), d.floats(2, 3, 4)),
            (d.whole(2, 3), d.whole(3, 2)),
            vectors(d)[0],
        )
    ),
    "mm": of(lambda d: d.pick((d.floats(2, 3), d.floats(3, 2)), (d.whole(2, 3), d.whole(3, 2)))),
    "mv": of(lambda d: (d.floats(2, 3), d.floats(3))),
    "pairwise_distance": of(
        lambda d: (d.floats(2, 3), d.floats(*d.pick((2, 3), (3,))), d.pick(1.0, 2.0, 3.0), d.pick(1e-6, 0.0), d.often())
    ),
    **dict.fromkeys("inverse linalg_inv linalg_det linalg_slogdet".split(), of(lambda d: (d.matrix(),))),
    "linalg_cholesky": lambda d: (lambda x: ((x @ x.T,), d.options(upper=[True])))(d.matrix()),
    "linalg_matrix_power": of(lambda d: (d.matrix(), d.pick(-1, 0, 1, 3))),
    "linalg_solve": lambda d: d.pick(
        call(d.matrix(), d.floats(3, 2)), call(d.matrix(), d.floats(3)), call(d.matrix(), d.floats(2, 3), left=False)
    ),
    "linalg_matrix_norm": of(
        lambda d: (d.floats(2, 3, 4), d.pick("fro", 1, -1, INF, -INF), d.pick([-2, -1], [0, 1]), d.often())
    ),
    "linalg_norm": lambda d: d.pick(
        call(d.floats(2, 3), d.pick(None, 1, INF)),
        call(d.floats(2, 3, 4), None, d.pick(None, [1], [0, 2])),
        call(d.floats(3), 3),
    ),
    "linalg_vecdot": lambda d: (vectors(d)[0], {}),
    # cells
    "gru_cell": cell(3, 1),
    "lstm_cell": cell(4, 2),
    **dict.fromkeys(["rnn_relu_cell", "rnn_tanh_cell"], cell(1, 1)),
    # spectral
    **dict.fromkeys(["fft_fft", "fft_rfft"], transforms()),
    **dict.fromkeys(["fft_fft2", "fft_fftn", "fft_rfft2", "fft_rfftn"], transforms(many=True)),
    **dict.fromkeys(["fft_ifft", "fft_irfft", "fft_hfft"], transforms(True)),
    **dict.fromkeys(["fft_ifft2", "fft_ifftn", "fft_irfft2", "fft_irfftn"], transforms(True, True)),
    **dict.fromkeys(["fft_fftshift", "fft_ifftshift"], of(lambda d: (d.floats(3, 4), *d.pick((), ([1],), ([0, -1],))))),
    "angle": of(lambda d: (d.complexes(3),)),
    "_conj": of(lambda d: (d.complexes(3),)),
    "complex": of(lambda d: (d.floats(2, 3), d.floats(3))),
    "polar": of(lambda d: (d.floats(3, low=0.1), d.floats(3))),
    "view_as_complex": of(lambda d: (d.floats(3, 2),)),
    "view_as_real": of(lambda d: (d.complexes(3),)),
}


class Difference(NamedTuple):
    name: str
    seed: int
    dtype: str
    why: str
    call: str

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, seed {self.seed}): {self.why}\n    {self.call}"


def theirs(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base)
    return getattr(packet, overload) if overload else packet


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    return jax.tree.map(lambda x: function(x) if is_tensor(x) else x, value, is_leaf=lambda x: x is None)


def as_jax(value: Any) -> Any:
    if is_tensor(value):
        return jnp.asarray(value.detach().resolve_conj().numpy())
    if isinstance(value, list | tuple):
        return tuple(map(as_jax, value))
    return {k: as_jax(v) for k, v in value.items()} if isinstance(value, dict) else plain_values(value)


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def decomposed(name: str, drawn: Call) -> Callable[..., Any]:
    """PyTorch's decomposition of a call, as `from_torch` reads it and carries it out."""
    leaves, tree = jax.tree.flatten(drawn, is_leaf=lambda x: x is None)
    places = [i for i, x in enumerate(leaves) if is_tensor(x)]

    class Called(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            given = dict(zip(places, tensors, strict=True))
            arguments, options = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
            return theirs(name)(*arguments, **options)

    program = torch.export.export(Called(), tuple(leaves[i].detach() for i in places), strict=False)
    program = program.run_decompositions(export._decompositions())
    nodes, values = reading._nodes(program, name)
    arrays = {**program.constants, **program.state_dict}
    specs = program.graph_signature.input_specs
    values |= {each.arg.name: reading.array(arrays[each.target]) for each in specs if each.target in arrays}
    inputs = [each.arg.name for each in specs if each.kind.name == "USER_INPUT"]
    outputs = next(node for node in program.graph.nodes if node.op == "output").args[0]

    def function(*arguments: Any, **options: Any) -> list[Any]:
        given = [x for x in jax.tree.leaves((arguments, options)) if isinstance(x, jax.Array)]
        known = values | dict(zip(inputs, given, strict=True))
        for node in nodes:
            known[node.name] = run._call(node, known, Mode())
        return [known[each.name] if hasattr(each, "name") else each for each in outputs]

    return function


def distance(ours: np.ndarray, others: np.ndarray, gradient: bool) -> float:
    """Relative to the numbers, or to 1 if they are less. inf: one is no number and the other is."""
    if ours.size == 0:
        return 0.0
    ours, others = np.asarray(ours, complex), np.asarray(others, complex)
    same = (ours == others) | (np.isnan(ours) & np.isnan(others))
    same |= gradient & (np.isnan(others) | (np.isinf(ours) & np.isinf(others)))  # 1/0 and 1/-0
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(others), 1)
        if gradient:
            size = np.maximum(size, np.max(np.abs(others), initial=1, where=np.isfinite(others)))
        far = np.where(same, 0, np.abs(ours - others) / size)
    return float(np.where(np.isfinite(far), far, INF).max())


def compare(name: str, seed: int, dtype: str, table: dict[str, Callable[..., Any]] = TABLE) -> tuple[str, float]:
    """What is wrong with a call, and the distance of its numbers. "refused": by PyTorch, so there is nothing to say."""
    arguments, options = ENTRIES[name](Draw(seed, dtype))
    leaves = [x for x in jax.tree.leaves((arguments, options)) if is_tensor(x) and x.is_floating_point()]
    for x in leaves:
        x.requires_grad_()
    try:
        expected = listed(theirs(name)(*arguments, **options))
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return "refused", 0.0
    function = table.get(name) or decomposed(name, (arguments, options))
    given = as_jax((arguments, options | (of_version(name, (*arguments, *options.values())) if name in table else {})))
    flat, tree = jax.tree.flatten(given)
    places = [i for i, x in enumerate(jax.tree.leaves((arguments, options))) if is_tensor(x) and x.is_floating_point()]

    def ours(values: list[Any]) -> list[Any]:
        filled = list(flat)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        arguments, options = jax.tree.unflatten(tree, filled)
        return listed(function(*arguments, **options))

    start = [flat[i] for i in places]
    try:
        results = ours(start)
    except ConfigurationError:
        return "refused here", 0.0
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", INF
    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}", INF
    furthest, weights, rng = 0.0, [], np.random.default_rng(seed)
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        if not is_tensor(b):
            if a != b:
                return f"{a} instead of {b}", INF
            continue
        kind = str(b.dtype).removeprefix("torch.")
        if a.dtype != jax.dtypes.canonicalize_dtype(kind) and {str(a.dtype), kind} != {"int32", "int64"}:
            return f"{a.dtype} instead of {b.dtype}", INF
        if a.shape != tuple(b.shape):
            return f"shape {a.shape} instead of {tuple(b.shape)}", INF
        free = (
            i == 1 and name in ("sort", "topk", "kthvalue", "median") or name == "argsort"
        )  # indices of equal numbers
        if not free:
            far = distance(np.asarray(a), b.detach().resolve_conj().numpy(), False)
            furthest = max(furthest, far)
            if far > tolerance(name, "float32" if kind == "float32" else dtype):
                return f"values differ by {far:.1e}: {np.asarray(a).tolist()} instead of {b.tolist()}", far
        weights.append(rng.normal(size=(*b.shape, 2)[: None if b.is_complex() else b.ndim]).astype(dtype))
    numbers = [*leaves, *filter(is_tensor, expected)]
    if name not in AT_INFINITY and not all(bool(torch.isfinite(x).all()) for x in numbers):
        return "", furthest
    far, why = gradients(ours, start, leaves, results, expected, weights)
    return (why if far > 20 * tolerance(name, dtype) else "", max(furthest, 0.0 if far == INF else far))


# Their gradients are compared where numbers are infinite, too.
AT_INFINITY = ("clamp", "logsumexp", "masked_fill", "relu", "where")
LOOSE = dict.fromkeys("digamma lgamma erfinv polygamma special_ndtri cdist pow i0 tan".split(), 20)


def tolerance(name: str, dtype: str) -> float:
    return TOLERANCE[dtype] * LOOSE.get(name, 1)


def gradients(
    ours: Callable[..., Any], start: list[Any], leaves: list[Any], results: Any, expected: Any, weights: list[Any]
) -> tuple[float, str]:
    def projected(values: list[Any]) -> Any:
        total = 0.0
        for y, w in zip([y for y in ours(values) if hasattr(y, "dtype")], weights, strict=True):
            if jnp.iscomplexobj(y):
                y = jnp.stack([y.real, y.imag], -1)
            if jnp.issubdtype(y.dtype, jnp.floating):
                total += jnp.where(w * jnp.ones_like(y) != 0, y, 0).astype(w.dtype).ravel() @ jnp.asarray(w).ravel()
        return total

    torch_total = 0.0
    for y, w in zip([y for y in expected if is_tensor(y)], weights, strict=True):
        if y.requires_grad:
            torch_total = torch_total + ((torch.view_as_real(y) if y.is_complex() else y) * torch.from_numpy(w)).sum()
    if not is_tensor(torch_total) or not leaves:
        return 0.0, ""
    try:
        wanted = torch.autograd.grad(torch_total, leaves, allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return 0.0, ""
    found = jax.grad(projected)(start)
    furthest, why = 0.0, ""
    for x, a, b in zip(leaves, found, wanted, strict=True):
        b = np.zeros(a.shape) if b is None else b.resolve_conj().numpy(force=True)
        b = np.where(np.isnan(x.detach().numpy()), np.nan, b)
        far = distance(np.asarray(a), b, True)
        if far >= furthest and far:
            furthest, why = far, f"gradients differ by {far:.1e}: {np.asarray(a).tolist()} instead of {b.tolist()}"
    return furthest, why


def check(name: str, seed: int, dtype: str, table: dict[str, Callable[..., Any]] = TABLE) -> tuple[Any, float]:
    """A `Difference`, or None; or "refused"."""
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(dtype == "float64"):
        try:
            why, far = compare(name, seed, dtype, table)
        except Exception as error:
            why, far = f"gradient: {type(error).__name__}: {str(error).splitlines()[:1]}", INF
    if not why or why.startswith("refused"):
        return why or None, far
    return Difference(name, seed, dtype, why, repr(ENTRIES[name](Draw(seed, dtype)))), far


def main(seconds: float, seed: int) -> int:
    torch.set_num_threads(1)
    end, calls, furthest, failed = time.time() + seconds, 0, 0.0, {}
    done: set[str] = set()
    refused: set[str] = set()
    while time.time() < end:
        for dtype in TOLERANCE:
            for name in ENTRIES:
                if time.time() > end:
                    break
                found, far = check(name, seed, dtype)
                calls += 1
                if isinstance(found, Difference):
                    if name not in failed:
                        print(found, flush=True)
                    failed[name] = failed.get(name, 0) + 1
                elif found is None:
                    done.add(name)
                    furthest = max(furthest, far)
                elif found == "refused here":
                    refused.add(name)
        seed += 1
    rare = sorted(set(ENTRIES) - done)
    print(f"{len(done)} of {len(ENTRIES)} operations, {calls} calls, the next seed is {seed}, differences: {failed}")
    print(
        f"never compared: {rare}; refused here: {sorted(refused)}; the longest distance of the others: {furthest:.1e}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
