"""Checks a loss, or a score, on a few examples of the data with random logits.

Shapes say little about a loss. With logits [B, 1] and labels [B], a mean over the last axis has the right shape [B],
and yet every example has the labels of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift.devices.launch import traced
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.model import cross_entropy

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
    raise ConfigurationError(
        f"{what} of an example must not depend on the other examples of its batch, got {float(alone[k]):.4g} alone and "
        f"{float(together[k]):.4g} in a batch of {len(z)}: check that logits {[*z.shape]} and labels "
        f"{[*labels.shape]} do not broadcast against each other; z[:, 0] turns logits [B, 1] into [B]; a loss that "
        "compares the examples of a batch needs an argument mask, loss(logits, y, mask), which is False for padding"
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
    raise ConfigurationError(
        f"the loss of an example must not depend on the padding of its batch, got {float(values[0][k]):.4g} and "
        f"{float(values[1][k]):.4g} with another padding: leave out the examples where mask is False"
    )


def check_labels(loss: Function, logits: jax.ShapeDtypeStruct, y: np.ndarray, low: Any, high: Any, kind: str) -> None:
    """Raises ConfigurationError for labels that cross-entropy is not defined for, if the loss is a cross-entropy.

    The loss is one if it has the values of one on these examples, which include the smallest and the largest label. A
    loss that handles such labels itself, for example leaves out the label -1, has other values.

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
    if y.dtype.kind in "iu" and z.shape[:-1] == labels.shape and C > 1:
        if not 0 <= low <= high < C and _same(values, cross_entropy(z, labels)):
            raise ConfigurationError(outside(kind, C, low, high))
    elif z.size == labels.size and not 0 <= low <= high <= 1:
        flat = z.reshape(len(z), -1)
        terms = jax.nn.softplus(flat) - labels.reshape(flat.shape) * flat  # the binary cross-entropy
        if _same(values, terms.mean(1)) or _same(values, terms.sum(1)):
            raise ConfigurationError(
                f"{kind} labels must be in 0..1 for the binary cross-entropy, got {low}..{high}: pass 0 and 1, as "
                "np.unique(y, return_inverse=True)[1] does for two classes"
            )


def outside(kind: str, num_classes: int, low: Any, high: Any) -> str:
    """The message for class labels that are out of range."""
    fix = "use a model with more classes, or renumber the labels"
    if low < 0:
        fix = "number the classes from 0, as np.unique(y, return_inverse=True)[1] does"
    return (
        f"{kind} labels must be in 0..{num_classes - 1} (the model has {num_classes} outputs), got {low}..{high}: {fix}"
    )


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
