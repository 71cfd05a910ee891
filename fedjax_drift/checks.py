"""What a value may be, said before anything compiles: what, the allowed range, the value, the fix. And warnings.

A traced value (an axis of a sweep) passes every check of a number's range.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift.errors import ConfigurationError

MOST = 2**63 - 1  # where nothing else bounds an integer: what NumPy counts with
LARGE = 2**31 - 1  # a bound that need not be said to those who are far below it
WITHIN = ("fedjax_drift", "contextlib", "jax")  # packages whose frames a warning does not name


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that names the line outside the library from which it was called, however deep the library is in."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in WITHIN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def shown(value: Any) -> str:
    """In a message: a value of many lines is named by its type, and so is one that can't be shown."""
    try:
        text = repr(value)
    except Exception:  # an array that was donated, or somebody else's object
        text = "\n"
    return text if len(text) <= 200 and "\n" not in text else f"a {type(value).__name__}"


def first_line(error: Exception) -> str:
    """Of its message, or its name."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def positive(name: str, value: Any, fix: str = "", computed: bool = True) -> float:
    """The value as a float; ValueError unless it is a finite number > 0."""
    return number(name, value, "a finite number > 0", lambda v: v > 0, fix, computed)


def nonnegative(name: str, value: Any, fix: str = "", computed: bool = True) -> float:
    """The value as a float; ValueError unless it is a finite number >= 0."""
    return number(name, value, "a finite number >= 0", lambda v: v >= 0, fix, computed)


def fraction(name: str, value: Any, fix: str = "") -> float:
    """The value as a float; ValueError unless it is in [0, 1)."""
    return number(name, value, "in [0, 1)", lambda v: 0 <= v < 1, fix)


def number(
    name: str, value: Any, allowed: str, ok: Callable[[Any], bool], fix: str = "", computed: bool = True
) -> float:
    """The value as a float; ValueError unless it is a finite real number for which ok holds. A tracer as it is.

    computed: JAX computes with it, so it must neither become 0 nor infinite in JAX's floats, float32 or float64.
    """
    if isinstance(value, jax.core.Tracer):
        return value  # type: ignore[return-value]
    one = one_in(value)
    if isinstance(one, bool) or not isinstance(one, Real) or not _is_finite(one) or not ok(one):
        raise ConfigurationError(f"{name} must be {allowed}, got {shown(value)}" + (f": {fix}" if fix else ""))
    found, floats = float(one), jnp.finfo(jax.dtypes.canonicalize_dtype(float))
    if computed and found and not float(floats.tiny) <= abs(found) <= float(floats.max):
        becomes = "0" if abs(found) < 1 else "infinite"
        raise ConfigurationError(
            f"{name} must be {allowed} in {floats.dtype}, which JAX computes with, got {shown(value)}, which is "
            f'{becomes} there: choose another, or jax.config.update("jax_enable_x64", True)'
        )
    return found


def one_in(value: Any) -> Any:
    """The number in an array of no axes; anything else as it is."""
    holds_one = isinstance(value, jax.Array | np.ndarray | np.generic) and value.ndim == 0
    if not holds_one or isinstance(value, np.ma.MaskedArray):
        return value
    try:
        return value.item()
    except (AttributeError, RuntimeError, TypeError):  # a key, or an array that was donated
        return value


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def integer(name: str, value: Any, low: int, high: float = MOST, fix: str = "") -> int:
    """The value as an int; ValueError unless it is a whole number in low..high."""
    found = one_in(value)
    if isinstance(found, bool) or not isinstance(found, Integral) or not low <= int(found) <= high:
        allowed = f"in {low}..{high}"
        if high >= LARGE and (not isinstance(found, Integral) or int(found) <= high):
            allowed = f"an integer >= {low}"
        raise ConfigurationError(f"{name} must be {allowed}, got {shown(value)}" + (f": {fix}" if fix else ""))
    return int(found)


def used(value: Any) -> bool:
    """Whether a number makes a difference: it is not 0, or traced, and may be anything."""
    return isinstance(value, jax.core.Tracer) or bool(value)


def flag(name: str, value: Any, fix: str = "") -> bool:
    """The value; ValueError unless it is True or False."""
    if not isinstance(value, bool | np.bool):
        raise ConfigurationError(f"{name} must be True or False, got {shown(value)}" + (f": {fix}" if fix else ""))
    return bool(value)


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """The value; ValueError unless it is one of allowed; names the nearest."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(map(repr, allowed))
        raise ConfigurationError(f"{name} must be one of {listed}, got {shown(value)}{nearest(value, allowed)}")
    return str(value)


def choices(name: str, value: Any, allowed: Iterable[str]) -> tuple[str, ...]:
    """The names chosen: value is one of allowed, several of them, or True (all) or False (none); else ValueError."""
    allowed = tuple(allowed)
    if isinstance(value, bool | np.bool):
        return allowed if value else ()
    several = isinstance(value, Iterable) and not isinstance(value, str | Mapping | type)
    return tuple(choice(name, one, allowed) for one in (tuple(value) if several else (value,)))


def text(name: str, value: Any, fix: str = "") -> str:
    """The value; ValueError unless it is a string."""
    return str(instance(name, value, str, fix))


def function(name: str, value: Any, fix: str = "") -> Any:
    """The value; ValueError unless it can be called."""
    if not callable(value):
        raise ConfigurationError(f"{name} must be a function, got {shown(value)}" + (f": {fix}" if fix else ""))
    return value


def instance(name: str, value: Any, kind: type, fix: str = "") -> Any:
    """The value; ValueError unless it is of this type."""
    if not isinstance(value, kind):
        what = "a string" if kind is str else f"of type {kind.__name__}"
        raise ConfigurationError(f"{name} must be {what}, got {shown(value)}" + (f": {fix}" if fix else ""))
    return value


def path(name: str, value: Any, fix: str = "") -> Path:
    """The value as a path, ~ expanded; ValueError unless it is one, or a string that may be one."""
    sound = isinstance(value, str | os.PathLike) and isinstance(found := os.fspath(value), str)
    if not sound or not found or "\0" in found:
        raise ConfigurationError(
            f"{name} must be a path, got {shown(value)}: {fix or 'pass a string or a pathlib.Path'}"
        )
    return Path(os.path.expanduser(found))


def is_auto(value: Any) -> bool:
    """Whether the value is the word "auto"; it may be anything."""
    return isinstance(value, str) and value == "auto"


def shape(name: str, value: Any, length: int | None = None) -> tuple[int, ...]:
    """The value as a tuple; ValueError unless it holds integers >= 1, as many as ``length`` says."""
    sound = isinstance(value, tuple | list) and length in (None, len(value))
    if not sound or not all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1 for n in value):
        example = (28, 28, 1) if length is None else (32,) * length
        raise ConfigurationError(f"{name} must be a tuple of integers >= 1 such as {example}, got {shown(value)}")
    return tuple(map(int, value))


def array(name: str, value: Any) -> np.ndarray:
    """The value as a NumPy array in this machine's byte order; a memory map as it is.

    ValueError unless it is an array of numbers, or nested lists that make one, with at least one axis.
    """
    if np.ma.is_masked(value):
        raise ConfigurationError(
            f"{name} must be a plain array, got a masked one: fill it, or leave out what is masked"
        )
    try:
        found = value if isinstance(value, np.ndarray) else np.asarray(value)
    except Exception as error:  # whatever an object of somebody else's raises
        raise ConfigurationError(
            f"{name} must be an array whose rows have one shape each, got {shown(value)} ({first_line(error)})"
        ) from error
    if (
        found.ndim < 1
        or (found.dtype.kind not in "biuf" or found.dtype.itemsize > 8)
        and found.dtype.name != "bfloat16"
    ):
        raise ConfigurationError(
            f"{name} must be a numeric array with at least one axis, got {found.dtype}{list(found.shape)}: rows of one "
            "data set have one shape (encode text as integers, stack the rows)"
        )
    return found if found.dtype.isnative else found.astype(found.dtype.newbyteorder("="))


def nearest(value: Any, known: Iterable[str]) -> str:
    """``: did you mean 'x'?`` where one of the known names is close to value, else nothing."""
    if not isinstance(value, str):
        return ""
    words = {str(name).lstrip("-"): str(name) for name in known}  # the dashes of options are alike in all
    word = value.lstrip("-")
    begin = [name for name in words if len(word) > 2 and name.startswith(word)]
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.7) or begin[:1]
    return f": did you mean {words[close[0]]!r}?" if close else ""
