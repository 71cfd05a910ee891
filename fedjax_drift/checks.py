"""What a value may be, said before anything compiles: what, the allowed range, the value, the fix. And warnings.

A traced value (an axis of a sweep) passes every check of a number's range.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np

WITHIN = ("fedjax_drift", "contextlib", "jax")  # packages whose frames a warning does not name


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that names the line outside the library from which it was called, however deep the library is in."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in WITHIN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def shown(value: Any) -> str:
    """In a message: a value of many lines is named by its type."""
    text = repr(value)
    return text if len(text) <= 200 else f"a {type(value).__name__}"


def positive(name: str, value: Any, fix: str = "") -> float:
    """The value as a float; ValueError unless it is a finite number > 0."""
    return number(name, value, "a finite number > 0", lambda v: v > 0, fix)


def nonnegative(name: str, value: Any, fix: str = "") -> float:
    """The value as a float; ValueError unless it is a finite number >= 0."""
    return number(name, value, "a finite number >= 0", lambda v: v >= 0, fix)


def fraction(name: str, value: Any, fix: str = "") -> float:
    """The value as a float; ValueError unless it is in [0, 1)."""
    return number(name, value, "in [0, 1)", lambda v: 0 <= v < 1, fix)


def number(name: str, value: Any, allowed: str, ok: Callable[[Any], bool], fix: str = "") -> float:
    """The value as a float; ValueError unless it is a finite real number for which ok holds. A tracer as it is."""
    if isinstance(value, jax.core.Tracer):
        return value  # type: ignore[return-value]
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not ok(value):
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}" + (f": {fix}" if fix else ""))
    return float(value)


def integer(name: str, value: Any, low: int, high: float = math.inf, fix: str = "") -> int:
    """The value as an int; ValueError unless it is a whole number in low..high."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        allowed = f"an integer >= {low}" if high == math.inf else f"in {low}..{high}"
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}" + (f": {fix}" if fix else ""))
    return int(value)


def used(value: Any) -> bool:
    """Whether a number makes a difference: it is not 0, or traced, and may be anything."""
    return isinstance(value, jax.core.Tracer) or bool(value)


def flag(name: str, value: Any) -> None:
    """ValueError unless value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """ValueError unless value is one of allowed; names the nearest."""
    allowed = list(allowed)
    if value not in allowed:
        listed = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {listed}, got {shown(value)}{nearest(value, allowed)}")


def choices(name: str, value: Any, allowed: Iterable[str]) -> tuple[str, ...]:
    """The names chosen: value is one of allowed, several of them, or True (all) or False (none); else ValueError."""
    allowed = tuple(allowed)
    if isinstance(value, bool):
        return allowed if value else ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        value = (value,)
    for one in (value := tuple(value)):
        choice(name, one, allowed)
    return value


def nearest(value: Any, known: Iterable[str]) -> str:
    """``: did you mean 'x'?`` where one of the known names is close to value, else nothing."""
    words = {str(name).lstrip("-"): str(name) for name in known}  # the dashes of options are alike in all
    word = str(value).lstrip("-")
    begin = [name for name in words if len(word) > 2 and name.startswith(word)]
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.7) or begin[:1]
    return f": did you mean {words[close[0]]!r}?" if close else ""
