"""Whether a program computes each example of a batch on its own, read from the shapes of its arrays.

The program is traced with a batch of `BATCH` examples. This prime number hardly divides another length. So the arrays
with values of the examples are those with an axis whose length is a multiple of it. An operation keeps the examples
apart if it only moves this axis, or works beside it. Every other operation may mix them, also one that is not known
here. Nothing is compiled or computed, so this costs no more than a trace, also for a large model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params

BATCH = 109
CALLS = set("closed_call cond custom_jvp_call custom_vjp_call jit pjit checkpoint remat2 scan while".split())
APART = set(  # operations on each value, and those that mix positions of an axis only if they change its length
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos "
    "cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p "
    "logistic lt max min mul name ne neg nextafter not optimization_barrier or pow real reduce_precision rem round "
    "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub "
    "tan tanh xor "
    "argmax argmin broadcast_in_dim concatenate dot_general dynamic_slice dynamic_update_slice reduce_and reduce_max "
    "reduce_min reduce_or reduce_prod reduce_sum slice split top_k transpose unstack".split()
)


def is_rowwise(program: Jaxpr) -> bool:
    """Whether the results have the batch on their first axis, and the program keeps the examples apart.

    Its inputs with an axis of the batch are those that depend on the examples.
    """
    results: list[Any] = program.outvars
    return _keeps_apart(program) and all(_axis(v) == 0 and v.aval.shape[0] == BATCH for v in results)


def _keeps_apart(program: Jaxpr) -> bool:
    behind = _outermost(program.invars)
    return all(_is_apart(equation, behind) for equation in program.eqns) and _are_outermost(program.outvars, behind)


def _axis(variable: Any) -> int | None:
    """The axis of the batch, which other axes may have been merged into. None without one, -1 if there are several."""
    axes = [j for j, length in enumerate(getattr(variable.aval, "shape", ())) if length and length % BATCH == 0]
    return None if not axes else axes[0] if len(axes) == 1 else -1


def _outermost(variables: Sequence[Any]) -> dict[Any, int]:
    """For each array with one axis [BATCH, inner] of the batch, the number inner."""
    return {v: v.aval.shape[j] // BATCH for v in variables if (j := _axis(v)) is not None and j >= 0}


def _are_outermost(variables: Sequence[Any], behind: dict[Any, int]) -> bool:
    """Whether the arrays are as a program inside of an operation expects them."""
    known = [v for v in variables if isinstance(v, Var) and v in behind]
    return {v: behind[v] for v in known} == _outermost(known)


def _is_apart(equation: JaxprEqn, behind: dict[Any, int]) -> bool:
    """Whether an operation keeps the examples apart.

    behind: for each array that depends on the examples, the number inner, if the axis of the batch is
      [outer, BATCH, inner] in row-major order. It gets those of the results.
    """
    name, params = equation.primitive.name, equation.params
    results: list[Any] = equation.outvars
    known: list[Any] = [v for v in equation.invars if isinstance(v, Var) and v in behind]
    if not known:
        return True
    axes: list[Any] = [*map(_axis, results)]
    if name in CALLS:  # a loop over the examples is not followed
        behind |= _outermost(results)
        apart = params.get("length", 1) % BATCH > 0 and all(map(_keeps_apart, jaxprs_in_params(params)))
        return apart and _are_outermost(known, behind)
    if None in axes or -1 in [*axes, *map(_axis, equation.invars)]:
        return False
    shapes, (j, inner) = [v.aval.shape for v in (known[0], *results)], (_axis(known[0]), behind[known[0]])
    assert j is not None
    if name in ("reshape", "squeeze"):
        inner, rest = divmod(inner * math.prod(shapes[0][j + 1 :]), math.prod(shapes[1][axes[0] + 1 :]) or 1)
        behind[results[0]] = inner
        return rest == 0 and inner > 0 and shapes[1][axes[0]] % (inner * BATCH) == 0
    behind |= dict.fromkeys(results, inner)
    lengths = {v.aval.shape[_axis(v)] for v in (*known, *results)}
    if len(lengths) > 1 or len({behind[v] for v in known}) > 1:
        return False
    return name in APART or name in BESIDE and BESIDE[name](equation, j)


def _gathers_apart(equation: Any, j: int) -> bool:
    """Whether ``gather`` looks up rows of a table, takes the same entries of all examples, or along another axis."""
    (of_operand, of_indices), numbers = map(_axis, equation.invars), equation.params["dimension_numbers"]
    if of_operand is None:
        return True
    if of_indices is None:
        return equation.params["slice_sizes"][j] == equation.invars[0].aval.shape[j]
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return (of_operand, of_indices) in pairs


def _convolves_apart(equation: JaxprEqn, j: int) -> bool:
    numbers, of_kernel = equation.params["dimension_numbers"], _axis(equation.invars[1])
    return numbers.lhs_spec[0] == j and of_kernel is None and equation.params["batch_group_count"] == 1


def _pools_apart(equation: JaxprEqn, j: int) -> bool:
    params = equation.params
    return params["window_dimensions"][j] == params["window_strides"][j] == 1 and params["padding"][j] == (0, 0)


def _along_other(parameter: str) -> Callable[[JaxprEqn, int], bool]:
    """For operations along the axes in this parameter."""

    def is_apart(equation: JaxprEqn, j: int) -> bool:
        along = equation.params[parameter]
        return j not in (along if isinstance(along, tuple) else (along,))

    return is_apart


BESIDE: dict[str, Callable[[JaxprEqn, int], bool]] = {
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _along_other("axis")),
    **dict.fromkeys(["reduce_window_max", "reduce_window_min", "reduce_window_sum"], _pools_apart),
    "conv_general_dilated": _convolves_apart,
    "cpu_convolution": lambda equation, j: j == 0 and _axis(equation.invars[1]) is None,
    "winograd_convolution": lambda equation, j: j == 3 and _axis(equation.invars[1]) is None,
    "gather": _gathers_apart,
    "pad": lambda equation, j: equation.params["padding_config"][j] == (0, 0, 0),
    "rev": _along_other("dimensions"),
    "sort": _along_other("dimension"),
}
"""Operations along axes: whether they keep the examples apart, which are on axis j."""
