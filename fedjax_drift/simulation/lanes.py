"""How many clients should train side by side on an accelerator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from fedjax_drift.model import Model
from fedjax_drift.models.low_rank import scan_counts
from fedjax_drift.tree import nbytes

COPIES = 4  # of the parameters in a lane: the local model, its gradient, its momentum and the message
PRODUCTS = ("dot_general", "conv_general_dilated")  # the operations whose factors and results a lane keeps
# Bytes that convolutions read and write. With many more of them, XLA's compiler for a TPU v5e moves them to the memory
# outside of the chip, and a step of LeNet-5, EMNIST CNN or MNIST CNN takes twice as many cycles per example. Networks
# without convolutions get faster with more lanes. This is a rule of thumb: BUILD_NOTES.md has the estimates. The
# compilers for other TPUs were not asked.
ON_CHIP = 16 * 2**20


class Lane(NamedTuple):
    """The memory that one client needs while it trains. In bytes, without the padding of tiles."""

    platform: str  # of the devices: "cpu", "tpu" or "gpu"
    parameters: int
    activations: int
    """The factors and results of all matrix products and convolutions of a forward pass on one batch. The backward
    pass needs them again. XLA stores little else."""

    convolved: int
    """The part of the activations that convolutions read and write."""

    @property
    def total(self) -> int:
        return COPIES * self.parameters + self.activations


def fastest(most: int, memory: float, lane: Lane) -> int:
    """Returns a number of lanes with which an accelerator should be fast, at least 1 and at most ``most``.

    most: the clients that one device trains in a round. memory: that of one device, in bytes.
    """
    if lane.platform == "tpu":
        lanes = 2 ** min(7, int(math.log2(max(1.0, ON_CHIP / max(1, lane.convolved)))))
    else:  # with more lanes, rounds were slower on an H200, because lanes wait for the client with the most steps
        lanes = max(16, min(128, -(-most // 4)))
    lanes = max(1, int(min(most, lanes, memory / 2 / lane.total)))
    groups = -(-most // lanes)
    # Of 5 clients in groups of 4, the second group would have 3 idle lanes. 3 lanes do the same number of steps.
    return lanes if lanes * groups <= 1.1 * most else -(-most // groups)


def lane_of(model: Model, decode: Callable[[jax.Array], jax.Array], x: Any, y: Any, B: int, platform: str) -> Lane:
    """Returns what a lane needs for a step on B of the examples x, y. Nothing is computed."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = [jax.ShapeDtypeStruct((B, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype)) for a in (x, y)]
    model = model.with_mask(jnp.ones(B, bool))
    forward = jax.make_jaxpr(lambda params, x, y: model.loss(model.apply(params, decode(x)), y))(params, *batch).jaxpr
    activations, convolved = (sum(_kept(forward, platform, of, forward.invars[-2:])) for of in (PRODUCTS, PRODUCTS[1:]))
    return Lane(platform, nbytes(params), activations, convolved)


def _kept(
    jaxpr: Jaxpr, platform: str, operations: Sequence[str], inputs: Sequence[Var], constants: Sequence[Var] = ()
) -> Iterator[int]:
    """The bytes of the factors and results of the operations in a program, also of those inside of its loops.

    Only values that depend on the examples count. All others are parameters, or were computed from parameters alone.

    operations: names of JAX's primitives.
    inputs: the program's inputs that depend on the examples.
    constants: variables that do not count, because they are the same in every iteration of a `lax.scan` around this
      program. A `lax.while_loop` counts with one iteration.
    """
    depending = set(inputs)

    def counted(variables: Sequence[Any]) -> list[Var]:
        return [v for v in variables if isinstance(v, Var) and v in depending]

    for equation in jaxpr.eqns:
        if not counted(equation.invars):
            continue
        depending.update(equation.outvars)
        inner = _inner(equation, platform)
        if inner is not None:
            consts, carried = scan_counts(equation) if equation.primitive.name == "scan" else (0, 0)
            # The program does not get the index of a branch. A kernel (Pallas) also gets the arrays that it writes to.
            outer = equation.invars[max(0, len(equation.invars) - len(inner.invars)) :]
            inside = [v for v, w in zip(inner.invars, outer, strict=False) if counted([w])]
            inside += inner.invars[consts : consts + carried]  # an iteration gets what the one before computed
            each = sum(_kept(inner, platform, operations, inside, inner.invars[:consts]))
            yield equation.params.get("length", 1) * each + (_size(counted(outer[:consts])) if each else 0)
        elif equation.primitive.name in operations:
            yield _size([v for v in counted([*equation.invars, *equation.outvars]) if v not in constants])


def _size(variables: Sequence[Any]) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)


def _inner(equation: JaxprEqn, platform: str) -> Jaxpr | None:
    """The program inside of an operation, or None. Of several branches, the one for the platform, or the last one."""
    if "branches" in equation.params:
        platforms = equation.params.get("branches_platforms") or ()
        of = [i for i, names in enumerate(platforms) if names is not None and platform in names]
        return equation.params["branches"][of[0] if of else -1].jaxpr
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr"):
        if name in equation.params:
            return getattr(equation.params[name], "jaxpr", equation.params[name])
    return None
