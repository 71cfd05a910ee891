"""What a hyper-parameter may be, said before anything compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any


def positive(name: str, value: Any) -> None:
    """ValueError unless value is a finite number > 0. A traced value (a sweep's axis) passes."""
    _require(name, value, "a finite number > 0", lambda v: v > 0)


def nonnegative(name: str, value: Any) -> None:
    """ValueError unless value is a finite number >= 0."""
    _require(name, value, "a finite number >= 0", lambda v: v >= 0)


def fraction(name: str, value: Any) -> None:
    """ValueError unless value is in [0, 1)."""
    _require(name, value, "in [0, 1)", lambda v: 0 <= v < 1)


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """ValueError unless value is one of allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _require(name: str, value: Any, allowed: str, ok: Any) -> None:
    if isinstance(value, (str, bool, type(None))):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    if isinstance(value, Real) and not (math.isfinite(value) and ok(value)):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
