"""Functions of a batch that also take its mask, bool [B], which is False for padding.

Such a function has a last argument ``mask`` without a default. An argument with a default, such as the mask of an
attention layer, keeps its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from fedjax_drift import checks


def takes_mask(function: Callable | None) -> bool:
    """Whether the function takes the mask of the batch."""
    try:
        parameter = inspect.signature(function).parameters.get("mask") if function else None
    except ValueError:  # some functions of C have no signature
        return False
    return parameter is not None and parameter.default is parameter.empty


def bound(function: Callable, mask: jax.Array | None) -> Callable:
    """The function for a batch with this mask, without the argument ``mask``."""
    if not takes_mask(function):
        return function
    if mask is None:
        checks.refuse(
            "mask must be that of the batch for a model or a loss with an argument mask",
            "None",
            "call work.logits(params, batch.x, key, batch.mask), or work.model.with_mask(batch.mask).apply(params, "
            "batch.x)",
        )
    return lambda *inputs: function(*inputs, mask)


def like(function: Callable, changed: Callable) -> Callable:
    """``changed``, which takes the mask as a last argument if ``function`` does."""
    if changed is not function:
        changed.__wrapped__ = function  # type: ignore[attr-defined]  # `inspect.signature` reads it
    return changed


def named(mask: tuple[jax.Array, ...]) -> dict[str, Any]:
    """The keyword arguments for a mask: one or none."""
    return dict(zip(("mask",), mask, strict=False))
