"""Products with matrices W + A B, where A and B have few columns and rows, without computing the sum.

x (W + A B) is computed as x W + (x A) B. Then the gradient of W is never computed, and clients that train side by side
(vmap) share the product with W. For this, `applied` traces a function of the parameters, and evaluates its operations
one by one. A function of any library can be used, because all of them consist of JAX's operations.

An operation that uses such a matrix in another way than in a product gets the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from fedjax_drift.types import Params, PyTree


class LowRank(NamedTuple):
    """The matrix W + A B, or a stack of such matrices along the leading axes."""

    w: jax.Array  # [..., in, out]
    a: jax.Array  # [..., in, r]
    b: jax.Array  # [..., r, out]

    def matrix(self) -> jax.Array:
        return self.w + (self.a @ self.b).astype(self.w.dtype)


def added(w: jax.Array, a: jax.Array, b: jax.Array, places: tuple[int, int]) -> LowRank | jax.Array:
    """W + A B, if the axes ``places`` of w are those of the inputs and of the outputs."""
    last = w.ndim - 2, w.ndim - 1
    if places == last:
        return LowRank(w, a, b)
    if places == last[::-1]:
        return LowRank(w, b.swapaxes(-1, -2), a.swapaxes(-1, -2))
    return plus(w, a @ b, places)


def plus(w: jax.Array, matrix: jax.Array, places: tuple[int, int]) -> jax.Array:
    """W plus a matrix [..., in, out], if the axes ``places`` of w are those of the inputs and of the outputs."""
    return w + jnp.moveaxis(matrix, (w.ndim - 2, w.ndim - 1), places).astype(w.dtype)


def is_low_rank(value: Any) -> bool:
    return isinstance(value, LowRank)


def matrices(params: PyTree) -> Params:
    """Returns the parameters with the sums W + A B."""
    return jax.tree.map(lambda leaf: leaf.matrix() if is_low_rank(leaf) else leaf, params, is_leaf=is_low_rank)


def applied(function: Callable[..., PyTree], params: PyTree, *inputs: Any) -> PyTree:
    """Returns ``function(matrices(params), *inputs)``, up to rounding."""
    leaves = jax.tree.leaves(params, is_leaf=is_low_rank)
    if not any(map(is_low_rank, leaves)):
        return function(params, *inputs)
    program, outputs = jax.make_jaxpr(function, return_shape=True)(
        jax.tree.map(_shape, params, is_leaf=is_low_rank), *jax.tree.map(_shape, inputs)
    )
    results = _evaluated(program, [*leaves, *jax.tree.leaves(inputs)])
    return jax.tree.unflatten(jax.tree.structure(outputs), map(_dense, results))


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array or of a sum W + A B, without a sharding, which differs inside of `jax.shard_map`."""
    array = value.w if is_low_rank(value) else value
    return jax.ShapeDtypeStruct(jnp.shape(array), array.dtype)


def _dense(value: Any) -> Any:
    return value.matrix() if is_low_rank(value) else value


def _evaluated(program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a traced program. Some of its arguments, and then some of its results, may be low-rank."""
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= zip(program.jaxpr.invars, arguments, strict=True)

    def value_of(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in program.jaxpr.eqns:
        values |= zip(equation.outvars, _operation(equation, [value_of(v) for v in equation.invars]), strict=True)
    return [value_of(v) for v in program.jaxpr.outvars]


def _operation(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Evaluates one operation. Returns its results."""
    name, options = equation.primitive.name, equation.params
    if any(map(is_low_rank, inputs)):
        if name in ("jit", "pjit"):
            return _evaluated(options["jaxpr"], inputs)
        if name in ("checkpoint", "remat2"):
            inner = partial(_evaluated, _closed(options["jaxpr"]))
            names = ("prevent_cse", "policy")
            return jax.checkpoint(inner, **{n: options[n] for n in names})(inputs)
        if name == "scan":
            return _scan(equation, inputs)
        if name == "dot_general" and not is_low_rank(inputs[0]) and _is_matrix_product(inputs[1], options):
            return [_product(inputs[0], inputs[1], options)]
        if name == "convert_element_type" and jnp.issubdtype(options["new_dtype"], jnp.floating):
            return [LowRank(*(part.astype(options["new_dtype"]) for part in inputs[0]))]
        if name == "transpose" and _swaps_matrix_axes(options["permutation"]):
            w, a, b = (part.swapaxes(-1, -2) for part in inputs[0])
            return [LowRank(w, b, a)]
    return _alone(equation)(*map(_dense, inputs))


def _alone(equation: JaxprEqn) -> Callable[..., list[Any]]:
    """The function that evaluates one operation."""
    places = [i for i, variable in enumerate(equation.invars) if not isinstance(variable, Literal)]
    variables = [equation.invars[i] for i in places]
    # A program with the right numbers of inputs and outputs, whose only operation is then replaced.
    program = jax.make_jaxpr(lambda *_: [0.0 for _ in equation.outvars])(*[v.aval for v in variables]).jaxpr
    program = program.replace(
        invars=variables, outvars=list(equation.outvars), eqns=[equation], effects=equation.effects
    )
    evaluate = jaxpr_as_fun(ClosedJaxpr(program, ()))
    return lambda *inputs: evaluate(*(inputs[i] for i in places))


def _is_matrix_product(matrix: LowRank, options: dict[str, Any]) -> bool:
    """Whether a product sums over one of the two axes of the matrix, with all leading axes as batch axes."""
    (_, (contracted, *others)), (_, batch) = options["dimension_numbers"]
    return not others and tuple(batch) == tuple(range(matrix.w.ndim - 2)) and contracted >= matrix.w.ndim - 2


def _product(x: jax.Array, matrix: LowRank, options: dict[str, Any]) -> jax.Array:
    """x (W + A B), or x (W + A B)^T if the product sums over the last axis of W."""
    (_, (contracted,)), (_, batch) = options["dimension_numbers"]
    a, b = matrix.a.astype(x.dtype), matrix.b.astype(x.dtype)
    first, second = (a, b) if contracted == matrix.w.ndim - 2 else (b, a)
    projected = lax.dot_general(x, first, **options).astype(x.dtype)  # [batch..., free axes of x..., r]
    dimensions = ((projected.ndim - 1,), (contracted,)), (tuple(range(len(batch))), batch)
    added = lax.dot_general(projected, second, **options | {"dimension_numbers": dimensions})
    return lax.dot_general(x, matrix.w, **options) + added


def _scan(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """A scan over stacked matrices, such as those of the blocks of a transformer."""
    consts, carried = scan_counts(equation)
    options, program = equation.params, _closed(equation.params["jaxpr"])
    constants, start, stacked = inputs[:consts], inputs[consts:][:carried], inputs[consts + carried :]
    stacked = [_dense(value) if is_low_rank(value) and value.w.ndim == 2 else value for value in stacked]

    def step(carry: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
        results = [_dense(value) for value in _evaluated(program, [*constants, *carry, *each])]
        return results[:carried], results[carried:]

    names = ("length", "reverse", "unroll")
    carry, results = lax.scan(step, [_dense(value) for value in start], stacked, **{n: options[n] for n in names})
    return [*carry, *results]


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are the same in every iteration, and how many are carried from one to the next.

    The others are stacked: they have one axis more than in the body. JAX's parameters with these numbers differ between
    versions.
    """
    body = _closed(equation.params["jaxpr"]).jaxpr
    carried = sum(map(_same_rank, equation.outvars, body.outvars))
    return sum(map(_same_rank, equation.invars, body.invars)) - carried, carried


def _same_rank(one: Any, other: Any) -> bool:
    return len(one.aval.shape) == len(other.aval.shape)


def _closed(program: Any) -> ClosedJaxpr:
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def _swaps_matrix_axes(permutation: tuple[int, ...]) -> bool:
    *leading, last, before = permutation
    n = len(permutation)
    return leading == list(range(n - 2)) and (last, before) == (n - 1, n - 2)
