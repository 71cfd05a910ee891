"""Checks that the model and the data fit together, and returns properties of the model, before a round is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import axes, checks
from fedjax_drift.checks import first_line
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.masks import takes_mask
from fedjax_drift.model import Model, cross_entropy
from fedjax_drift.simulation import losses, mixing
from fedjax_drift.simulation.retries import UNTRACEABLE
from fedjax_drift.types import Params


class Shapes(NamedTuple):
    """Properties of a model that `check_model` determines."""

    params: Params  # shapes and dtypes of the parameters
    num_classes: int | None  # C for a classifier with one label per example, otherwise None
    row_scores: tuple[str, ...]  # names of the entries of `Model.scores` with one value per example
    set_scores: tuple[str, ...]  # names of the entries of `Model.scores` with one value for the whole test set


def check_model(model: Model, data: FederatedData, decode: Callable) -> Shapes:
    """Checks that model and data fit together, and returns the properties of the model.

    The model must accept the examples, its loss must give one number per example, and integer labels must be in the
    range of its classes. decode: converts stored examples to model inputs.
    """
    B = 7  # a batch size that is unlikely to be the length of another axis

    for name in ("x", "y", "x_test", "y_test"):
        _check_range(data, name)
    _check_ids(model.vocabulary, data)

    def rows(array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((B, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype))

    what = "Model.init must take a key and return a pytree of arrays only"
    fix = "keep functions and settings outside; for an Equinox module, return eqx.partition(module, "
    fix += "eqx.is_inexact_array)[0], and use eqx.combine in apply"
    params = checks.shapes_of(what, lambda: model.init(jax.random.key(0)), fix=fix)
    axes.check(model.output_axes, params)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path)
            fix = "keep constants outside params"
            if "rngs" in name:
                fix = "use fd.Model.from_nnx(lambda rngs: Net(rngs)), which takes only the parameters of an nnx module"
            checks.refuse("parameters must have a floating dtype", f"{leaf.dtype} at {name}", fix)
    masked = model.with_mask(jnp.ones(B, bool))
    try:
        logits = jax.eval_shape(lambda p, x: masked.apply(p, decode(x)), params, rows(data.x))
    except Exception as error:
        fix = f"create the model with input_shape={data.x.shape[1:]}, or reshape the examples"
        if type(error).__name__ == "TraceContextError":
            fix = "the model changes its own state, as nnx.Dropout does: use fd.Model.from_nnx, which handles this"
        elif data.x.dtype.kind != "i" and _accepts(masked, params, (B, *data.x.shape[1:]), jnp.int32):
            fix = "it needs integers: pass ids and tokens as x.astype(np.int32)"
        elif isinstance(error, UNTRACEABLE):
            fix = "compute with jax.numpy instead of numpy, and choose with jnp.where instead of if"
        raise ConfigurationError(
            f"the model does not accept the examples of the data, {data.x.dtype}{list(data.x.shape[1:])} each "
            f"({first_line(error)}): {fix}"
        ) from error
    if not isinstance(logits, jax.ShapeDtypeStruct):
        checks.refuse("Model.apply must return an array", checks.type_of(logits), "return the logits alone")
    default_loss = model.loss is cross_entropy
    for kind, y in (("training", data.y), ("test", data.y_test)):
        if y is None or not default_loss:
            continue
        if not np.issubdtype(y.dtype, np.integer):
            fix = "y.astype(int)" if y.dtype == bool else "y.astype(int) if they are class numbers, or Model(loss=...)"
            checks.refuse(f"{kind} labels must be integers for the default loss", y.dtype, f"pass {fix}")
        if logits.shape[:-1] != (B, *y.shape[1:]):
            what = f"{kind} labels must have the shape of the logits without the class axis, "
            what += f"that is {[*logits.shape[1:-1]]} per example"
            fix = "convert the labels (one-hot labels: y.argmax(-1)), or pass Model(loss=...)"
            checks.refuse(what, [*y.shape[1:]], fix)
        C = logits.shape[-1]
        low, high = data.range_of("y" if kind == "training" else "y_test")
        if low < 0 or high >= C:
            losses.refuse_labels(kind, C, y, low, high)
    z, labels = [*logits.shape], [B, *data.y.shape[1:]]
    loss = checks.shapes_of(f"the loss must accept logits {z} with labels {labels}", masked.loss, logits, rows(data.y))
    if getattr(loss, "shape", None) != (B,):
        got = f"{jax.tree.map(lambda a: [*a.shape], loss)} for logits {z} and labels {labels}"
        fix = "do not average over the examples, and check that logits and labels have matching shapes"
        checks.refuse(f"the loss must return one number per example, [{B}] for {B} examples", got, fix)
    if not default_loss:
        if takes_mask(model.loss):
            losses.check_padding(model.loss, logits, data.y)
        else:
            losses.check_apart(model.loss, logits, data.y, "the loss")
        for kind, name in (("training", "y"), ("test", "y_test")):
            if (y := getattr(data, name)) is not None:
                losses.check_labels(masked.loss, logits, y, *data.range_of(name), kind)
    mixing.check_mixing(model, params, data, decode)
    scored: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    if model.scores is not None and data.y_test is not None:
        y_test = rows(data.y_test)
        by_size = [
            [jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for a in (logits, y_test)]
            for size in (len(data.y_test), B)
        ]
        scored = _check_scores(model.scores, *by_size)
        for name in scored[0]:
            losses.check_apart(partial(_score, model.scores, name), logits, data.y_test, f"the score {name!r}")
    one_label = default_loss and data.y.ndim == 1 and logits.ndim == 2
    return Shapes(params, logits.shape[-1] if one_label else None, *scored)


def _accepts(model: Model, params: Params, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether the model accepts inputs of this shape and dtype."""
    try:
        jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct(shape, dtype))
    except Exception:
        return False
    return True


def _check_scores(scores: Callable, whole: list, some: list) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Checks `Model.scores`. Returns the names of its entries with one value per example, and of its scalar entries.

    whole, some: shapes of logits and labels, for the whole test set and for another number of examples.
    """
    outputs = _scores_of(scores, *whole)
    by_row = tuple(name for name, value in outputs.items() if value.shape == whole[0].shape[:1])
    if wrong := [name for name, value in outputs.items() if value.shape and name not in by_row]:
        what = f"Model.scores must return a number or one number per example, [{whole[0].shape[0]}] for the test set"
        checks.refuse(what, f"{[*outputs[wrong[0]].shape]} for {wrong[0]!r}")
    if "loss" in outputs:
        what = 'Model.scores must not return "loss", which is the name of the mean of Model.loss'
        checks.refuse(what, checks.listed(outputs), "choose another name")
    if by_row:  # they are also computed for a batch, and for the examples of one client
        few = _scores_of(scores, *some)
        if any(few[name].shape != some[0].shape[:1] for name in by_row if name in few) or few.keys() != outputs.keys():
            what = "Model.scores must return one number per example for any number of examples"
            shapes = ", ".join(f"{name} {[*value.shape]}" for name, value in few.items())
            checks.refuse(what, f"for {some[0].shape[0]} examples: {shapes}")
    return by_row, tuple(name for name in outputs if name not in by_row)


def _scores_of(scores: Callable, logits: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """The shapes of the entries of `Model.scores`."""
    what = f"Model.scores must accept logits {[*logits.shape]} with labels {[*y.shape]}"
    outputs = checks.shapes_of(what, scores, logits, y)
    if not isinstance(outputs, dict) or not all(hasattr(value, "shape") for value in outputs.values()):
        what = 'Model.scores must return a dict of numbers such as {"auc": ...}'
        checks.refuse(what, checks.type_of(outputs))
    return outputs


def _check_ids(vocabulary: Any, data: FederatedData) -> None:
    """Checks that inputs that are token ids are in the tables of the model. vocabulary: as in `Model`."""
    if vocabulary is None:
        return
    several = checks.items(vocabulary) or [vocabulary]
    sizes = [checks.integer("Model.vocabulary", size, 1) for size in several]
    for kind, name in (("training", "x"), ("test", "x_test")):
        x = getattr(data, name)
        if x is None or x.dtype.kind not in "iu":
            continue
        low, high = map(np.atleast_1d, data.range_of(name, by_position=len(sizes) > 1))
        rows = np.array([*sizes, *[sizes[-1]] * len(low)])[: len(low)]  # of the table for each position
        bad = np.flatnonzero((low < 0) | (high >= rows))
        if len(bad):
            k = bad[0]
            where = f" at position {k}" if len(sizes) > 1 else ""
            checks.refuse(
                f"{kind} inputs must be ids in 0..{rows[k] - 1}{where}, the rows of the model's table",
                f"{low[k]}..{high[k]}",
                "use a model with a larger vocabulary, or one id for all unknown tokens; Model(vocabulary=None) "
                "switches this check off",
            )


def _score(scores: Callable, name: str, *arguments: jax.Array) -> Any:
    return scores(*arguments)[name]


def _check_range(data: FederatedData, name: str) -> None:
    """Checks that the values of an array fit in the dtype that JAX computes with."""
    stored = getattr(data, name)
    if stored is None or stored.dtype.kind not in "iuf":
        return
    labels = name in ("y", "y_test") and stored.dtype.kind in "iu"
    computed = np.dtype(np.int32) if labels else jax.dtypes.canonicalize_dtype(stored.dtype)
    if np.can_cast(stored.dtype, computed):
        return
    limits: Any = np.finfo(computed) if stored.dtype.kind == "f" else np.iinfo(computed)
    low, high = data.range_of(name)
    if low < limits.min or high > limits.max:
        fix = "number the classes from 0" if labels else 'rescale, or jax.config.update("jax_enable_x64", True)'
        checks.refuse(f"data must fit in {computed}, which JAX computes with", f"{low}..{high} in {name}", fix)
