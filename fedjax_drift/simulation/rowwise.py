"""Whether a program computes each example of a batch on its own, read from its operations.

Nothing is compiled or computed, so this costs no more than a trace, also for a large model. For every array that
depends on the examples, the position of the batch axis is followed (`BatchAxis`). An operation that would mix positions
of this axis, or that is not known here, gives `MIXED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fedjax_drift.models.low_rank import scan_counts


class BatchAxis(NamedTuple):
    """Where the batch axis of an array is. In row-major order, the array is [before, B, after], and position b of B
    depends on example b alone. A reshape does not change these two numbers."""

    before: int
    after: int

    @classmethod
    def of(cls, array: Any) -> BatchAxis:
        """That of an array [B, ...]."""
        return cls(1, math.prod(array.shape[1:]))


MIXED = "mixed"
Dependence = BatchAxis | str | None  # None: it does not depend on the examples

ELEMENTWISE = set(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos "
    "cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p "
    "logistic lt max min mul name ne neg nextafter not optimization_barrier or pow real reduce_precision rem round "
    "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub "
    "tan tanh xor".split()
)
ALONG = {  # operations along axes: the name of the parameter with these axes
    **dict.fromkeys(["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"], "axes"),
    **dict.fromkeys(["argmax", "argmin"], "axes"),
    "unstack": "axis",
}
KEPT_ALONG = {  # likewise, but the results have all axes
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"], "axis"),
    **dict.fromkeys(["concatenate", "sort"], "dimension"),
    "rev": "dimensions",
}


def dependences(program: ClosedJaxpr, inputs: Sequence[Dependence]) -> list[Dependence]:
    """How the outputs of a program depend on the examples, if its inputs depend on them like ``inputs``."""
    return _outputs(program.jaxpr, inputs)


def _outputs(jaxpr: Jaxpr, inputs: Sequence[Dependence]) -> list[Dependence]:
    known: dict[Any, Dependence] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> Dependence:
        return None if isinstance(variable, Literal) else known.get(variable)

    for equation in jaxpr.eqns:
        operands = [of(variable) for variable in equation.invars]
        if all(each is None for each in operands):
            continue
        results = [MIXED] * len(equation.outvars) if MIXED in operands and not _inside(equation) else None
        known.update(zip(equation.outvars, results or _results(equation, operands), strict=True))
    return [of(variable) for variable in jaxpr.outvars]


def _results(equation: JaxprEqn, operands: list[Dependence]) -> list[Dependence]:
    """The dependences of the results of an operation."""
    name, count = equation.primitive.name, len(equation.outvars)
    if name in ("reshape", "squeeze"):
        return operands[:1]
    if (rule := INSIDE.get(name)) is not None:
        return rule(equation, operands)
    if (inner := _inside(equation)) is not None:
        return _outputs(inner, operands)
    shapes = [_shape(variable) for variable in equation.invars]
    axes = [None if each is None else _axis(each, shape) for each, shape in zip(operands, shapes, strict=True)]
    place = _moved(equation, axes, shapes)
    if place is None:
        return [MIXED] * count
    axis, outer, inside = place
    results = [_shape(variable) for variable in equation.outvars]
    return [BatchAxis(math.prod(s[:axis]) * outer, inside * math.prod(s[axis + 1 :])) for s in results]


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())


def _inside(equation: JaxprEqn) -> Jaxpr | None:
    """The program inside of an operation that calls it once."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            inner = getattr(equation.params[name], "jaxpr", equation.params[name])
            shapes = [[*map(_shape, variables)] for variables in (inner.invars, equation.invars)]
            return inner if shapes[0] == shapes[1] else None
    return None


def _merged(operands: Sequence[Dependence]) -> Dependence:
    different = {each for each in operands if each is not None}
    return different.pop() if len(different) == 1 else MIXED if different else None


# --- an axis ----------------------------------------------------------------------------------------------------------

Axis = tuple[int, int, int]  # j, outer, inner: axis j of an array is [outer, B, inner] in row-major order


def _axis(rows: Any, shape: tuple[int, ...]) -> Axis | None:
    """The axis of an array of this shape that contains the batch axis. None if several axes do."""
    for j, length in enumerate(shape):
        before, after = math.prod(shape[:j]), math.prod(shape[j + 1 :])
        if rows.before % before == 0 and rows.after % after == 0:
            outer, inner = rows.before // before, rows.after // after
            batch = math.prod(shape) // (rows.before * rows.after)
            if outer * batch * inner == length:
                return j, outer, inner
    return None


def _moved(equation: JaxprEqn, axes: list[Axis | None], shapes: list[tuple[int, ...]]) -> Axis | None:
    """The axis of the results that contains the batch axis, or None if the operation may mix examples."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _product(params["dimension_numbers"], axes, shapes)
    if name == "gather":
        return _gathered(params, axes, shapes)
    given = [axis for axis in axes if axis is not None]
    if len(set(given)) != 1:
        return None
    (j, outer, inner), shape = given[0], shapes[axes.index(given[0])]
    if name in ELEMENTWISE:  # an axis of length 1 is stretched
        return given[0] if _shape(equation.outvars[0])[j] == shape[j] else None
    if name in ALONG or name in KEPT_ALONG:
        along = params[(ALONG | KEPT_ALONG)[name]]
        along = (along,) if isinstance(along, int) else along
        return None if j in along else (j - sum(axis < j for axis in along if name in ALONG), outer, inner)
    if axes[0] is None and name != "dynamic_update_slice":
        return None
    if name == "broadcast_in_dim":
        to = params["broadcast_dimensions"][j]
        return (to, outer, inner) if params["shape"][to] == shape[j] else None
    if name == "transpose":
        return params["permutation"].index(j), outer, inner
    whole = {
        "pad": lambda: params["padding_config"][j] == (0, 0, 0),
        "slice": lambda: params["limit_indices"][j] - params["start_indices"][j] == shape[j],
        "dynamic_slice": lambda: params["slice_sizes"][j] == shape[j] and len(given) == 1,
        "dynamic_update_slice": lambda: all(s[j] == shape[j] for s in shapes[:2]) and not any(axes[2:]),
        "cpu_convolution": lambda: j == 0 and len(given) == 1,
        "top_k": lambda: j < len(shape) - 1,
        "conv_general_dilated": lambda: (
            params["dimension_numbers"].lhs_spec[0] == j and params["batch_group_count"] == 1 and len(given) == 1
        ),
        **dict.fromkeys(
            ["reduce_window_max", "reduce_window_sum", "reduce_window_min"],
            lambda: (
                params["window_dimensions"][j] == params["window_strides"][j] == 1 and params["padding"][j] == (0, 0)
            ),
        ),
    }
    if name not in whole or not whole[name]():
        return None
    return (params["dimension_numbers"].out_spec[0] if name == "conv_general_dilated" else j), outer, inner


def _product(numbers: Any, axes: list[Axis | None], shapes: list[tuple[int, ...]]) -> Axis | None:
    """The axis of the result of ``dot_general``: its axes are the batch axes, and the free ones of both factors."""
    contracted, batched = numbers
    free = [
        [j for j in range(len(s)) if j not in (*c, *b)] for s, c, b in zip(shapes, contracted, batched, strict=True)
    ]
    places = []
    for side, axis in enumerate(axes):
        if axis is None:
            continue
        j, outer, inner = axis
        if j in contracted[side]:
            return None
        if j in batched[side]:
            places.append((list(batched[side]).index(j), outer, inner))
        elif None not in axes:  # products of all pairs of examples
            return None
        else:
            before = len(batched[side]) + (len(free[0]) if side else 0)
            places.append((before + free[side].index(j), outer, inner))
    return places[0] if len(set(places)) == 1 else None


def _gathered(params: Any, axes: list[Axis | None], shapes: list[tuple[int, ...]]) -> Axis | None:
    """The axis of the result of ``gather``: of looked up rows, of the same rows for all examples, or along an axis."""
    numbers, (of_operand, of_indices) = params["dimension_numbers"], axes
    rank = len(shapes[1]) - 1 + len(numbers.offset_dims)
    batch_dims = [d for d in range(rank) if d not in numbers.offset_dims]
    if of_indices is not None:
        j, outer, inner = of_indices
        if j == len(shapes[1]) - 1:
            return None
        if of_operand is not None:  # as in `jnp.take_along_axis`
            pairs = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
            if of_operand != (dict((b, a) for a, b in pairs).get(j), outer, inner):
                return None
        return batch_dims[j], outer, inner
    assert of_operand is not None
    j, outer, inner = of_operand
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if j in (*numbers.start_index_map, *removed) or params["slice_sizes"][j] != shapes[0][j]:
        return None
    return numbers.offset_dims[j - sum(d < j for d in removed)], outer, inner


# --- operations with programs inside ----------------------------------------------------------------------------------


def _of_branches(equation: JaxprEqn, operands: list[Dependence]) -> list[Dependence]:
    branches = [_outputs(branch.jaxpr, operands[1:]) for branch in equation.params["branches"]]
    return [MIXED if operands[0] else _merged(each) for each in zip(*branches, strict=True)]


def _of_scan(equation: JaxprEqn, operands: list[Dependence]) -> list[Dependence]:
    consts, carried = scan_counts(equation)
    length = equation.params["length"]

    def each(rows: Dependence, variable: Any) -> Dependence:
        """The dependence of one slice along the first axis."""
        if not isinstance(rows, BatchAxis):
            return rows
        axis = _axis(rows, _shape(variable))
        return BatchAxis(rows.before // length, rows.after) if axis is not None and axis[0] > 0 else MIXED

    stacked = slice(consts + carried, None)
    slices = [each(*pair) for pair in zip(operands[stacked], equation.invars[stacked], strict=True)]
    body = equation.params["jaxpr"].jaxpr
    carry, outputs = _fixed(body, operands[:consts], operands[consts : consts + carried], slices)
    return [*carry, *(BatchAxis(y.before * length, y.after) if isinstance(y, BatchAxis) else y for y in outputs)]


def _of_while(equation: JaxprEqn, operands: list[Dependence]) -> list[Dependence]:
    of_condition, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    consts, carry = operands[of_condition : of_condition + of_body], operands[of_condition + of_body :]
    carry, _ = _fixed(equation.params["body_jaxpr"].jaxpr, consts, carry, [])
    (stop,) = _outputs(equation.params["cond_jaxpr"].jaxpr, [*operands[:of_condition], *carry])
    return carry if stop is None else [MIXED] * len(carry)


def _fixed(
    body: Jaxpr, consts: list[Dependence], carry: list[Dependence], slices: list[Dependence]
) -> tuple[list[Dependence], list[Dependence]]:
    """The carried values after any number of iterations, and the other outputs."""
    while True:
        outputs = _outputs(body, [*consts, *carry, *slices])
        after = [_merged(pair) for pair in zip(carry, outputs[: len(carry)], strict=True)]
        if after == carry:
            return carry, outputs[len(carry) :]
        carry = after


INSIDE: dict[str, Callable[[JaxprEqn, list[Dependence]], list[Dependence]]] = {
    "cond": _of_branches,
    "scan": _of_scan,
    "while": _of_while,
}
