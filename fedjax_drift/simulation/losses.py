"""Checks a loss, or a score, on a few examples of the data with random logits.

Shapes say little about a loss. With logits [B, 1] and labels [B], a mean over the last axis has the right shape [B],
and yet every example has the labels of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from fedjax_drift import checks
from fedjax_drift.devices.launch import traced

NONE = (-1, -100)  # labels of examples without a label, in GLUE's test sets and in PyTorch's losses
COMPARISONS, LIMITS = ("eq", "ne", "lt", "le", "gt", "ge"), ("max", "min", "clamp", "rem")  # names of primitives
Function = Callable[[jax.Array, jax.Array], Any]  # (logits [B, ...], y [B, ...]) -> [B]


def check_apart(function: Function, logits: jax.ShapeDtypeStruct, y: np.ndarray, what: str) -> None:
    """Raises ConfigurationError if the value of an example depends on the other examples of its batch.

    Args:
      function: the loss, or a score.
      logits: the shape and the dtype of the logits of B examples, [B, ...].
      y: the labels of all examples, [M, ...].
      what: the name of the function in the message.
    """
    z, labels = _examples(logits, y)
    together = function(z, labels)
    alone = jax.lax.map(lambda example: function(*(a[None] for a in example))[0], (z, labels))
    if traced(together) or _same(together, alone):  # traced: inside jax.jit, as in a sweep
        return
    k = int(np.argmax(np.abs(np.asarray(together, float) - np.asarray(alone, float))))
    checks.refuse(
        f"{what} of an example must not depend on the other examples of its batch",
        f"{float(alone[k]):.4g} alone and {float(together[k]):.4g} in a batch of {len(z)}",
        f"check that logits {[*z.shape]} and labels {[*labels.shape]} do not broadcast against each other; z[:, 0] "
        "turns logits [B, 1] into [B]; a loss that compares the examples of a batch needs an argument mask, "
        "loss(logits, y, mask), which is False for padding",
    )


def check_padding(loss: Callable, logits: jax.ShapeDtypeStruct, y: np.ndarray) -> None:
    """Raises ConfigurationError if a loss with an argument ``mask`` depends on the padding. Arguments as above."""
    z, labels = _examples(logits, y)
    examples = np.arange(len(z)) < len(z) // 2
    wide = examples.reshape(-1, *[1] * (z.ndim - 1))
    others = jnp.asarray(np.where(examples, np.arange(len(z)), np.arange(len(z))[::-1]))
    batches = (z, labels), (jnp.where(wide, z, 3 * z[others]), labels[others])
    values = [loss(*batch, jnp.asarray(examples))[examples] for batch in batches]
    if traced(values) or _same(*values):
        return
    k = int(np.argmax(np.abs(np.asarray(values[0], float) - np.asarray(values[1], float))))
    what = "the loss of an example must not depend on the padding of its batch"
    fix = "leave out the examples where mask is False"
    checks.refuse(what, f"{float(values[0][k]):.4g} and {float(values[1][k]):.4g} with another padding", fix)


def check_labels(loss: Function, logits: jax.ShapeDtypeStruct, y: np.ndarray, low: Any, high: Any, kind: str) -> None:
    """Raises ConfigurationError for labels out of range that the loss takes without notice, or that are undefined.

    A classification with the label v < 0 or v >= C is one in which the loss

    - is NaN, because it reads beyond its C classes;
    - has the value of another class: v + C for an index from the end, 0 or C - 1 for an index that JAX limits; or
    - has one value for all labels out of range, because a one-hot vector of them has zeros only.

    In the last two cases, a loss may mean it, for example leave out the label -1. It compares or limits labels then.

    Args:
      low, high: the smallest and the largest label.
      kind: "training" or "test", for the message.
    """
    if y.dtype.kind not in "iuf":
        return
    z, labels = _examples(logits, y)
    values = loss(z, labels)
    if traced(values):
        return
    C = z.shape[-1]
    if z.shape[:-1] == labels.shape and C > 1:
        for label in (low, high):
            if not 0 <= label < C and _mistakes(loss, z, labels, label.item()):
                refuse_labels(kind, C, y, low, high)
    elif z.size == labels.size and not 0 <= low <= high <= 1:
        flat = z.reshape(len(z), -1)
        terms = jax.nn.softplus(flat) - labels.reshape(flat.shape) * flat  # the binary cross-entropy
        if _same(values, terms.mean(1)) or _same(values, terms.sum(1)):
            checks.refuse(f"{kind} labels must be in 0..1 for the binary cross-entropy", f"{low}..{high}", _numbered(y))


def refuse_labels(kind: str, num_classes: int, y: np.ndarray, low: Any, high: Any) -> NoReturn:
    """Raises ConfigurationError for class labels that are out of range. y: the labels of all examples, [M, ...]."""
    fix = _numbered(y) if low < 0 else "use a model with more classes, or renumber the labels"
    what = f"{kind} labels must be in 0..{num_classes - 1} (the model has {num_classes} outputs)"
    checks.refuse(what, f"{low}..{high}", fix)


def _numbered(y: np.ndarray) -> str:
    """What to do about labels below 0."""
    values = np.unique(y)
    if values[0] not in NONE or values.tolist() == [-1, 1]:
        return "number the classes from 0, as np.unique(y, return_inverse=True)[1] does"
    drop = f"drop these rows, x[y != {values[0]}] and y[y != {values[0]}], or " if y.ndim == 1 else ""
    return f"{values[0]} often means that there is no label: {drop}mask them in the loss, as docs/models.md shows"


def _mistakes(loss: Function, z: jax.Array, labels: jax.Array, label: float) -> bool:
    """Whether the loss takes a label out of range without notice, or is NaN. The label is < 0 or >= C."""
    C, first = z.shape[-1], (slice(None), *[0] * (labels.ndim - 1))  # of a sequence, the label of the first position
    integers = jnp.issubdtype(labels.dtype, jnp.integer)  # which are int32 in a round
    inside = jnp.clip(labels.astype(jnp.int32) if integers else labels, 0, C - 1)

    def at(value: float) -> jax.Array:
        return loss(z, inside.at[first].set(value))

    if _same(at(0), at(C - 1)):  # a loss without labels
        return False
    value, far = at(label), 2**20
    if jnp.isnan(value).any() and not jnp.isnan(at(0)).any() or -C <= label < 0 and _same(value, at(label + C)):
        return True
    is_limited = _same(value, at(0 if label < 0 else C - 1))
    is_none = _same(value, at(-far)) and _same(value, at(far))
    if not is_limited and not is_none:
        return False
    jaxpr = jax.make_jaxpr(loss)(z, labels).jaxpr
    return not _decides(jaxpr, {jaxpr.invars[1]}, {jaxpr.invars[0]})


def _decides(jaxpr: Any, of_labels: set, of_others: set) -> bool:
    """Whether the labels are limited, or a number or a bool that depends on them alone changes a loss, such as a mask.

    of_labels: the arguments that depend on the labels. of_others: those that depend on the logits. The numbers of the
    classes in a one-hot vector count as the latter. Both sets get the variables of the program.
    """
    for equation in jaxpr.eqns:
        operands: list[Any] = [v for v in equation.invars if isinstance(v, Var)]
        name = equation.primitive.name
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and len(inner.invars) == len(equation.invars):
            arguments = [(a, v) for a, v in zip(inner.invars, equation.invars, strict=True) if isinstance(v, Var)]
            inside = [{argument for argument, v in arguments if v in known} for known in (of_labels, of_others)]
            if _decides(inner, *inside):
                return True
            for known, variables in zip((of_labels, of_others), inside, strict=True):
                outputs = zip(equation.outvars, inner.outvars, strict=True)
                known |= {output for output, v in outputs if isinstance(v, Var) and v in variables}
            continue
        alone = [v for v in operands if v in of_labels and v not in of_others]
        if alone and name in LIMITS:
            return True
        mixed = any(v in of_others for v in operands) and name not in COMPARISONS
        if mixed and any(not jnp.issubdtype(v.aval.dtype, jnp.integer) for v in alone):  # type: ignore[attr-defined]
            return True
        if any(v in of_labels for v in operands):
            of_labels |= {*equation.outvars}
        if name == "iota" or any(v in of_others for v in operands):
            of_others |= {*equation.outvars}
    return False


def _examples(logits: jax.ShapeDtypeStruct, y: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Random logits, and the labels of as many examples of the data. Examples with extreme labels are among them."""
    B, width = logits.shape[0], max(1, y[:1].size)
    rows = [*np.linspace(0, len(y) - 1, B - 2).astype(int), int(y.argmin()) // width, int(y.argmax()) // width]
    z = np.random.default_rng(0).normal(size=logits.shape)
    return jnp.asarray(z, logits.dtype), jnp.asarray(np.stack([y[row] for row in rows]))


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays agree up to rounding in their dtype. NaN equals NaN."""
    a, b = np.asarray(a), np.asarray(b)
    inexact = jnp.issubdtype(a.dtype, jnp.inexact)
    tolerance = float(jnp.finfo(a.dtype).eps) ** 0.5 if inexact else 0
    return np.allclose(a.astype(float), b.astype(float), tolerance, tolerance, equal_nan=True)
