"""What a run's results depend on, as plain values by name: runs are the same if these are, and else differ in those.

Hyper-parameters live in closures, so that is where `settings` looks for them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import linecache
import zlib
from collections.abc import Mapping
from types import CodeType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from fedjax_drift.data.federated import FederatedData
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.failures import Failures
from fedjax_drift.tree import described, layout
from fedjax_drift.types import ServerState

CODE = "<code>"  # the last part of the name of an entry that tells what a function does
MOST_BYTES = 10**9  # of an array that `fingerprint` reads as a whole
VERSIONED = ("fedjax_drift", "jax", "flax", "optax", "chex", "numpy")  # packages whose code their version stands for


def identity(
    engine: Engine, data: FederatedData, on_nonfinite: str, client_store: str, state: ServerState
) -> dict[str, Any]:
    """All that a run's results depend on, by name, as JSON stores it: not lanes, devices or streaming.

    client_store: "device", "sharded", "host" or a folder; state: shapes and dtypes of the whole state.
    """
    options = {  # of Simulation: each one that changes results has its place here
        "cohort_size": engine.cohort_size,
        "sampling": "bernoulli" if engine.bernoulli else "uniform",
        "on_nonfinite": on_nonfinite,
        **settings(engine.failures or Failures(), "failures"),
        **settings(engine.aggregation, "aggregation"),
    }
    places = {"device": "on the devices", "sharded": "on the devices", "host": "on the host"}
    shapes = {"server": state.server, "client": jax.eval_shape(engine.algorithm.init_client, state.params)}
    return {
        "algorithm": engine.algorithm.name,
        **settings(engine.algorithm, "algorithm"),
        **settings(engine.model, "model"),
        **settings(engine.local, "local"),
        **options,
        "client states": places.get(client_store, "files"),
        **described(layout(shapes)),
        **fingerprint(data),
    }


def without_code(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that do not describe what a function does."""
    return {name: value for name, value in identity.items() if not name.endswith(CODE)}


def settings(value: Any, name: str) -> dict[str, Any]:
    """The plain values in a tree of NamedTuples, dataclasses, containers and the closures of functions, by dotted name.

    Arrays count by their contents, and functions that are not of a library by what their source does, too (entries
    that end in "<code>"). What a function looks up in its module is not seen.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> found = settings((scaled(0.5), 3), "pair")
    >>> found["pair.0"], found["pair.0.factor"], found["pair.1"]
    ('scaled.<locals>.<lambda>', 0.5, 3)
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(value: Any, name: str) -> None:
        if isinstance(value, (np.generic, np.ndarray, jax.Array)):
            value = _of_array(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 1 and 1.0 are one setting
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
            return
        if isinstance(value, type | np.dtype | ModuleType):
            found[name] = getattr(value, "__name__", str(value))
            return
        if id(value) in seen:  # a function that calls itself
            return
        seen.add(id(value))
        for part, inner in _parts(value):
            walk(inner, f"{name}.{part}" if part else name)
        seen.remove(id(value))

    walk(value, name)
    return found


def _of_array(array: Any) -> Any:
    """A number, or what tells an array from others."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.item() if array.ndim == 0 and array.dtype.kind in "biuf" else _crc(array)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a value is made of; nothing for what is not known."""
    if isinstance(value, functools.partial):
        return [("", value.func), *((str(i), arg) for i, arg in enumerate(value.args)), *value.keywords.items()]
    if inspect.ismethod(value):
        return [("", value.__func__), ("self", value.__self__)]
    if callable(value) and inspect.isfunction(function := inspect.unwrap(value)):
        return _parts_of_function(function)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return [(str(i), item) for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(str(i), item) for i, item in enumerate(sorted(value, key=repr))]
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if not _versioned(type(value)) and hasattr(value, "__dict__"):
        return [("", type(value)), *vars(value).items()]
    return []


def _parts_of_function(function: Any) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    own = [] if _versioned(function) else [(CODE, _body(function.__code__))]
    return [("", function.__qualname__), *own, *defaults.items(), *inspect.getclosurevars(function).nonlocals.items()]


def _versioned(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in (*VERSIONED, "builtins")


def _body(code: CodeType) -> str | None:
    """What a function does, from its source: comments, docstrings, annotations, layout and the version of Python don't
    count. None where the source is not known."""
    lines = "".join(linecache.getlines(code.co_filename))
    found = [node for node in _functions(lines) if _is_of(node, code)]
    if not found:
        return None
    return f"crc32 {zlib.crc32(repr([_plain(node) for node in found]).encode()):08x}"


@functools.lru_cache(64)
def _functions(source: str) -> tuple[ast.AST, ...]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))


def _is_of(node: Any, code: CodeType) -> bool:
    """Whether the code is of this function."""
    if isinstance(node, ast.Lambda):  # of several in a line the one around the code's own places
        inside = [(line, column) for line, _, column, end in code.co_positions() if line and column is not None and end]
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        here = node.lineno == code.co_firstlineno and all(begin <= place <= end for place in inside)
        return code.co_name == "<lambda>" and here
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return code.co_name == node.name and first == code.co_firstlineno


def _plain(node: Any) -> Any:
    """A syntax tree as lists, alike in all versions of Python."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    left_out = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")
    named = [(name, value) for name, value in ast.iter_fields(node) if name not in left_out]
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
        named = [(name, value[1:] if name == "body" else value) for name, value in named]
    return [type(node).__name__, *([name, _plain(value)] for name, value in named if value not in (None, []))]


def differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """In which entries two identities differ, with both values as JSON; and the functions whose code has changed."""
    texts = [{name: json.dumps(value) for name, value in side.items()} for side in (there, here)]
    pairs = {name: (texts[0].get(name, "nothing"), texts[1].get(name, "nothing")) for name in {**texts[1], **texts[0]}}
    pairs = {name: (was, now) for name, (was, now) in pairs.items() if was != now}
    changed = [name for name in pairs if name.endswith("." + CODE)]
    seen = [name.removesuffix("." + CODE) for name in changed if "null" not in pairs[name]]  # null: source not known
    return {name: pair for name, pair in pairs.items() if name not in changed}, seen


_fingerprints: WeakKeyDictionary[FederatedData, dict[str, Any]] = WeakKeyDictionary()


def fingerprint(data: FederatedData) -> dict[str, Any]:
    """What tells a federation from others; of arrays of more than 1 GB, evenly spaced rows are looked at."""
    if data not in _fingerprints:
        arrays = {name: getattr(data, name) for name in ("sizes", "x", "y", "x_test", "y_test", "mean", "std")}
        plain = {"name": data.name, "redeal": data.redeal}
        known = plain | {name: None if array is None else _crc(np.asarray(array)) for name, array in arrays.items()}
        _fingerprints[data] = {f"data.{name}": value for name, value in known.items()}
    return _fingerprints[data]


def _crc(array: np.ndarray) -> str:
    rows = array
    if array.nbytes > MOST_BYTES:
        share = max(1, int(len(array) * MOST_BYTES / array.nbytes))
        rows = array[np.linspace(0, len(array) - 1, share).astype(np.int64)]
    return f"{array.dtype}{list(array.shape)}, crc32 {crc32(rows):08x}"


def crc32(array: np.ndarray) -> int:
    """Of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
