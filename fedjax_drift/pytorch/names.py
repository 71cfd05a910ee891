"""The names of parameters: with dots in PyTorch, nested dicts here."""

from __future__ import annotations

from typing import Any

Params = Any


def nested(named: dict[str, Any]) -> Params:
    """{"conv1.weight": w} -> {"conv1": {"weight": w}}."""
    params: dict[str, Any] = {}
    for name, value in named.items():
        *layers, last = name.split(".")
        place = params
        for layer in layers:
            place = place.setdefault(layer, {})
        place[last] = value
    return params


def flat(params: Params, prefix: str = "") -> dict[str, Any]:
    """The inverse of `nested`."""
    named: dict[str, Any] = {}
    for name, value in params.items():
        named |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return named
