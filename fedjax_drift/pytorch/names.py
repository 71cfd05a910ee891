"""The names of parameters: with dots in PyTorch, nested dicts here."""

from __future__ import annotations

from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

Params = Any


def nested(named: dict[str, Any]) -> Params:
    """{"conv1.weight": w} -> {"conv1": {"weight": w}}."""
    return unflatten_dict(named, sep=".")


def flat(params: Params) -> dict[str, Any]:
    """The inverse of `nested`."""
    return flatten_dict(params, sep=".")
