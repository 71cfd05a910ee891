"""Checks of arguments, and warnings. Arguments are checked before anything is compiled.

A message has the form ``NAME must be ALLOWED, got VALUE: FIX``. A traced number passes every check of a range, because
its value is unknown. (A sweep traces the hyper-parameters that it varies.)
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift.errors import ConfigurationError
from fedjax_drift.untraceable import explained

MOST = 2**63 - 1  # the default upper bound of an integer: the largest int64
SMALL = 1e-37  # JAX's float dtypes of 4 and 8 bytes represent SMALL and 1 / SMALL
LARGE = 2**31 - 1  # messages mention an upper bound if the bound is below LARGE, or if the value exceeds the bound
# The scheme of an address. pathlib.Path("gs://a") is "gs:/a", and its absolute() is below the working directory. One
# letter is a drive of Windows.
SCHEME = re.compile(r"(?:^|[/\\])([A-Za-z][A-Za-z0-9+.-]+):/")
WITHIN = ("fedjax_drift", "contextlib", "jax")  # packages that a warning is not attributed to


PLACES = {  # the name of a type: where its values are passed
    "Aggregation": "Simulation(aggregation=aggregation)",
    "Attack": "Simulation(sources=[fd.adversaries.share(0.2, attack)])",
    "Codec": "fd.compression.compressed(algorithm, codec)",
    "Participation": "Simulation(participation=participation)",
    "Rule": "Simulation(aggregation=fd.aggregation.robust(rule))",
    "Shift": "data.shifted(shift)",
    "Source": "Simulation(sources=[source])",
}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that shows the file and the line of the code that called the library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in WITHIN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def shown(value: Any) -> str:
    """The text of a value in a message. Long values and values without a repr are shown as their type."""
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    try:
        text = repr(value)
    except Exception:  # a donated array, or an object whose __repr__ fails
        text = "\n"
    return text if len(text) <= 200 and "\n" not in text else type_of(value)


def type_of(value: Any) -> str:
    """The type of a value in a message, such as "a list" or "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def listed(names: Iterable[Any]) -> str:
    """The names in a message, separated by commas. Of a long list, the first names and the number of the others."""
    texts = [str(name) for name in names]
    texts = [text if len(text) <= 60 else f"{text[:57]}..." for text in texts]
    count = 0
    while count < len(texts) and len(", ".join(texts[: count + 1])) <= 200:
        count += 1
    return ", ".join(texts[:count]) + (f" and {len(texts) - count} more" if count < len(texts) else "")


def first_line(error: Exception) -> str:
    """The first line of the error's message, or the name of its type."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def refuse(what: str, got: Any, fix: str = "", cause: Exception | None = None) -> NoReturn:
    """Raises ConfigurationError: WHAT, got GOT: FIX.

    what: NAME must be ALLOWED. got: a text, or a value whose text is short. cause: the error that says why.
    """
    error = ConfigurationError(f"{what}, got {got}" + (f": {fix}" if fix else ""))
    if cause is not None:
        error.__cause__ = cause
    raise error


def target(name: str, value: Any, metric: str) -> float:
    """Returns the target of a metric as a float. Raises ValueError unless it is a finite number, and in 0..1 if the
    name of the metric ends in "accuracy"."""
    result = number(name, value, "a finite number", math.isfinite, computed=False)
    if metric.endswith("accuracy") and not 0 <= result <= 1:
        fix = f"pass {result / 100:g} for {result:g} %" if 1 < result <= 100 else ""
        refuse(f"{name} must be an accuracy in 0..1", f"{result:g}", fix)
    return result


def number(
    name: str, value: Any, allowed: str, ok: Callable[[Any], bool], fix: str = "", computed: bool = True
) -> float:
    """Returns the value as a float. Raises ValueError unless it is finite, real and ok(value).

    A tracer is returned as is.

    computed: whether JAX computes with the value. If so, the value must not underflow to 0 or overflow in JAX's default
    float dtype.
    """
    if isinstance(value, jax.core.Tracer):
        return value  # type: ignore[return-value]
    scalar = value if type(value) is float else one_in(value)
    if isinstance(scalar, bool) or not isinstance(scalar, Real) or not _is_finite(scalar) or not ok(scalar):
        refuse(f"{name} must be {allowed}", shown(value), fix)
    result = float(scalar)
    if not computed or not result or SMALL <= abs(result) <= 1 / SMALL:
        return result
    floats = jnp.finfo(jax.dtypes.canonicalize_dtype(float))
    if not float(floats.tiny) <= abs(result) <= float(floats.max):
        becomes = "0" if abs(result) < 1 else "infinite"
        raise ConfigurationError(
            f"{name} must be {allowed} in {floats.dtype}, the dtype that JAX uses, got {shown(value)}, which becomes "
            f'{becomes}: choose another value, or call jax.config.update("jax_enable_x64", True)'
        )
    return result


def one_in(value: Any) -> Any:
    """The number in an array without axes. Any other value is returned as is."""
    has_no_axes = isinstance(value, jax.Array | np.ndarray | np.generic) and value.ndim == 0
    if not has_no_axes or isinstance(value, np.ma.MaskedArray):
        return value
    try:
        return value.item()
    except (AttributeError, RuntimeError, TypeError):  # a key, or a donated array
        return value


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than every float
        return False


def integer(name: str, value: Any, low: int, high: float = MOST, fix: str = "") -> int:
    """Returns the value as an int. Raises ValueError unless it is an integer in low..high."""
    scalar = one_in(value)
    if isinstance(scalar, bool) or not isinstance(scalar, Integral) or not low <= int(scalar) <= high:
        allowed = f"in {low}..{high}"
        if high >= LARGE and (not isinstance(scalar, Integral) or int(scalar) <= high):
            allowed = f"an integer >= {low}"
        refuse(f"{name} must be {allowed}", shown(value), fix)
    return int(scalar)


def used(value: Any) -> bool:
    """Whether a factor can have an effect. True if it is not 0, or if it is traced, because its value is unknown."""
    return isinstance(value, jax.core.Tracer) or bool(value)


def flag(name: str, value: Any, fix: str = "") -> bool:
    """Returns the value. Raises ValueError unless it is True or False."""
    if not isinstance(value, bool | np.bool):
        refuse(f"{name} must be True or False", shown(value), fix)
    return bool(value)


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Returns the value. Raises ValueError unless it is one of ``allowed``, and suggests the most similar one."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        fix = nearest(value, allowed).removeprefix(": ")
        refuse(f"{name} must be one of {listed(map(repr, allowed))}", shown(value), fix)
    return str(value)


def choices(name: str, value: Any, allowed: Iterable[str]) -> tuple[str, ...]:
    """Returns the chosen names. ``value`` is one of ``allowed``, several of them, True (all) or False (none).

    Raises ValueError for any other value.
    """
    allowed = tuple(allowed)
    if isinstance(value, bool | np.bool):
        return allowed if value else ()
    several = items(value)
    return tuple(choice(name, one, allowed) for one in ([value] if several is None else several))


def items(value: Any) -> list[Any] | None:
    """The items of a list, an array or another iterable. None for any other value, and for a text, a dict, a class, and
    an array that is donated or has no axes."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | type):
        return None
    if getattr(value, "ndim", 1) == 0 or isinstance(value, jax.Array) and value.is_deleted():
        return None
    return list(value)


def text(name: str, value: Any, fix: str = "") -> str:
    """Returns the value. Raises ValueError unless it is a string."""
    return str(instance(name, value, str, fix))


def function(name: str, value: Any, fix: str = "", takes: int | None = None, form: str = "") -> Any:
    """Returns the value. Raises ValueError unless it is callable, and accepts its arguments by position.

    takes: the number of arguments, or None if any number is allowed. form: for the message, such as "(x, y) -> loss".
    """
    allowed, got = f"a function {form}".rstrip(), shown(value)
    if callable(value):
        try:  # not the signature of the function inside: a decorator may change the number of arguments
            signature = inspect.signature(value, follow_wrapped=False)
            if takes is not None:
                signature.bind(*range(takes))
            fits = True
        except ValueError:  # it has no signature, as many builtin functions and all classes like int
            fits = not isinstance(value, type)
        except TypeError:
            fits, allowed = False, allowed if form else f"a function of {takes} argument{'s' * (takes != 1)}"
            got = f"{getattr(value, '__name__', type(value).__name__)}{signature}"
        if fits:
            return value
    refuse(f"{name} must be {allowed}", got, fix)


def shapes_of(what: str, function: Callable, *arguments: Any, fix: str = "") -> Any:
    """The shapes that a user's function returns for shapes. Raises ConfigurationError if it fails: WHAT, got one that
    fails (WHY): FIX.

    A ConfigurationError of the library, which the function raises, says more, and is raised as it is.
    """
    with explained():
        try:
            return jax.eval_shape(function, *arguments)
        except ConfigurationError:
            raise
        except Exception as error:
            refuse(what, f"one that fails ({first_line(error)})", fix, error)


def fields(value: Any, fix: str = "") -> None:
    """Checks the functions, the flags and the texts among the fields of a NamedTuple, such as those of a `Model`.

    The annotation of a field says how many arguments its function takes, and of which other types the field may be.
    """
    kind = type(value)
    for name, annotation in get_type_hints(kind).items():
        members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        field, expected = getattr(value, name), next((one for one in members if get_origin(one) is Callable), None)
        if annotation is bool:
            flag(f"{kind.__name__}.{name}", field)
        elif annotation is str:
            text(f"{kind.__name__}.{name}", field)
        elif expected is not None and not isinstance(field, tuple(one for one in members if isinstance(one, type))):
            arguments = get_args(expected)[0]
            function(f"{kind.__name__}.{name}", field, fix, None if arguments is ... else len(arguments))


def instance(name: str, value: Any, kind: type, fix: str = "", what: str = "") -> Any:
    """Returns the value. Raises ValueError unless it has the type ``kind``. what: says this in the message."""
    if not isinstance(value, kind):
        what = what or ("a string" if kind is str else f"of type {kind.__name__}")
        refuse(f"{name} must be {what}", shown(value), place_of(value) or fix)
    return value


def place_of(value: Any) -> str:
    """What to do with a value that belongs somewhere else, or with a factory that was not called. "" if unknown."""
    if isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        return f"call it, {value.__name__}(...)"
    return f"pass {place}" if (place := PLACES.get(type(value).__name__)) else ""


def path(name: str, value: Any, fix: str = "") -> Path:
    """Returns the value as a path with ~ expanded.

    Raises ValueError unless it is a non-empty string or path, and for an address such as ``gs://bucket/run``.
    """
    is_text = isinstance(value, str | os.PathLike) and isinstance(written := os.fspath(value), str)
    if not is_text or not written or "\0" in written:
        refuse(f"{name} must be a path", shown(value), fix or "pass a string or a pathlib.Path")
    if address := SCHEME.search(written):
        where = "leave out file://" if address[1] == "file" else (
            f"mount the {address[1]} storage as a folder and pass this folder, or use a local folder and copy its files"
        )  # fmt: skip
        refuse(f"{name} must be a path of the local file system", shown(value), where)
    return Path(os.path.expanduser(written))


def is_auto(value: Any) -> bool:
    """Whether the value is the string "auto". Returns False for an array."""
    return isinstance(value, str) and value == "auto"


def shape(name: str, value: Any, length: int | None = None) -> tuple[int, ...]:
    """Returns the value as a tuple. Raises ValueError unless it consists of integers >= 1.

    length: the required number of integers, or None if any number is allowed.
    """
    has_length = isinstance(value, tuple | list) and length in (None, len(value))
    if not has_length or not all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1 for n in value):
        example = (28, 28, 1) if length is None else (32,) * length
        refuse(f"{name} must be a tuple of integers >= 1 such as {example}", shown(value))
    return tuple(map(int, value))


def array(name: str, value: Any) -> np.ndarray:
    """Returns the value as a NumPy array in native byte order. A memory map stays a memory map.

    Raises ValueError unless the value is a numeric array with at least one axis, or can be converted to one.
    """
    if np.ma.is_masked(value):
        refuse(f"{name} must be an array without masked values", "a masked array", "fill or remove the masked values")
    try:
        result = value if isinstance(value, np.ndarray) else exact_array(value)
    except Exception as error:  # the conversion of a foreign object may raise anything
        got = f"{shown(value)} ({first_line(error)})"
        refuse(f"{name} must be an array, or lists that all have the same length", got, cause=error)
    if result.dtype.kind in "OSU" and result.ndim and not result.size:
        result = result.astype(np.float64)  # an empty array has no text and no objects
    if result.dtype.kind in "OSU" and not result.ndim:
        refuse(f"{name} must be a numeric array with at least one axis", shown(value))
    is_numeric = result.dtype.kind in "biuf" and result.dtype.itemsize <= 8 or result.dtype.name == "bfloat16"
    if result.ndim < 1 or not is_numeric:
        fix = "encode text as integers, and stack examples of the same shape"
        refuse(f"{name} must be a numeric array with at least one axis", f"{result.dtype}{list(result.shape)}", fix)
    return result if result.dtype.isnative else result.astype(result.dtype.newbyteorder("="))


def ids(name: str, values: Any, rows: int) -> np.ndarray:
    """Returns ids [rows], one per example. Raises ValueError unless they are all integers or all strings."""
    what = f"{name} must be {rows} integers or strings, one per example"
    try:
        result = np.asarray(values)
    except Exception as error:  # ragged lists, or a foreign object
        refuse(what, f"{shown(values)} ({first_line(error)})", cause=error)
    if result.shape != (rows,) or result.dtype.kind not in "iuUS":
        refuse(what, f"{result.dtype}{list(result.shape)}")
    if result.dtype.kind in "US" and (others := [value for value in values if not isinstance(value, str | bytes)]):
        got = f"both, such as {shown(others[0])}"
        refuse(f"{name} must be all integers or all strings", got, "convert them with str")
    return result


def converted(name: str, array: np.ndarray, dtype: Any, fix: str) -> np.ndarray:
    """Returns numbers [n, ...] with another dtype. Arrays that have this dtype are not copied.

    Raises ValueError if a number would change: if it is out of range, if an integer dtype would lose its fraction, or
    if a float dtype would round an integer, because two ids could then be equal. Floats may be rounded.
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    result = np.empty(array.shape, dtype)
    step = max(1, 2**20 // max(1, array[:1].size))  # in chunks, as the array may be large
    for start in range(0, len(array), step):
        part, new = array[start : start + step], result[start : start + step]
        with np.errstate(all="ignore"):
            new[...] = part
            changed = _changed(part, new)
        if changed.any():
            at = np.unravel_index(int(changed.argmax()), changed.shape)
            got = f"{part[at]} in row {start + int(at[0])}"
            refuse(f"{name} must be {_allowed(array.dtype, dtype)}", got, fix)
    return result


def _changed(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Whether the numbers changed when they were converted. Rounding of floats is no change."""
    if old.dtype.kind == "b":
        return np.zeros(old.shape, bool)
    if old.dtype.kind in "iu" and new.dtype.kind in "iu":
        return (new.astype(old.dtype) != old) | ((new < 0) != (old < 0))
    if old.dtype.kind in "iu":
        return ~np.isfinite(new) | (new >= np.iinfo(old.dtype).max + 1.0) | (new.astype(old.dtype) != old)
    if new.dtype.kind in "iu":
        limits, wide = np.iinfo(new.dtype), old.astype(np.result_type(old.dtype, np.float64))
        return ~((wide >= limits.min) & (wide < limits.max + 1.0) & (wide == np.floor(wide)))
    return np.isfinite(old) & ~np.isfinite(new)


def _allowed(old: np.dtype, new: np.dtype) -> str:
    if new.kind in "iu":
        return f"whole numbers in {np.iinfo(new).min}..{np.iinfo(new).max} for {new}"
    if old.kind in "iu":
        return f"integers that {new} represents exactly, such as those up to {2 ** (jnp.finfo(new).nmant + 1)}"
    return f"numbers up to {jnp.finfo(new).max:.3g} for {new}"


def exact_array(values: Any) -> np.ndarray:
    """Returns lists as an array. Raises ValueError for ragged lists, and for integers of which NumPy makes floats.

    NumPy has no dtype for integers of both int64 and uint64.
    """
    array = np.asarray(values)
    if array.dtype == np.float64 and array.size and np.abs(array).max() >= 2.0**63:
        largest = max(np.asarray(values, object).flat, key=abs)
        if isinstance(largest, int):
            refuse("integers must be smaller than 2**63", largest, "number ids from 0")
    return array


def dtype(name: str, value: Any, allowed: str, ok: Callable[[np.dtype], Any], fix: str = "") -> np.dtype:
    """Returns the value as a dtype. Raises ValueError unless it is the name of a dtype, a scalar type or a dtype, of at
    most 8 bytes, and ok(dtype)."""
    try:  # other values, such as an array, may have a dtype or be converted to one
        result = jnp.dtype(value) if isinstance(value, np.dtype | type | str) else None
    except (TypeError, ValueError):
        result = None
    if result is None or result.itemsize > 8 or not ok(result):
        refuse(f"{name} must be {allowed}", shown(value), fix)
    return result


def floating_dtype(name: str, value: Any) -> np.dtype:
    """Returns the value as a dtype. Raises ValueError unless it is a floating-point dtype."""
    is_floating = lambda dtype: jnp.issubdtype(dtype, jnp.floating)  # noqa: E731
    return dtype(name, value, "a floating-point dtype", is_floating, "pass jnp.bfloat16, for example")


def nearest(value: Any, known: Iterable[str]) -> str:
    """``: did you mean 'x'?`` if one of the known names is similar to the value, else ""."""
    if not isinstance(value, str):
        return ""
    names = {str(name).lstrip("-"): str(name) for name in known}  # compared without the leading dashes of options
    word = value.lstrip("-")
    completions = [name for name in names if len(word) > 2 and name.startswith(word)]
    similar = difflib.get_close_matches(word, names, n=1, cutoff=0.7) or completions[:1]
    return f": did you mean {names[similar[0]]!r}?" if similar else ""
