"""The identity of a run: all that its results depend on, as plain values by name.

Two runs are the same if their identities are; else the names that differ tell a person why. Hyper-parameters live in
closures, so that is where `settings` looks for them. A function is known by its name and the values that it captures.
Not part of the identity are docstrings, comments, names of local and captured variables, and bytecode. The code of a
user's function is an entry of its own, which only warns; the code of libraries is known by their versions.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import linecache
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
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

CODE = "<code>"  # the last part of the name of an entry for the code of a function
MOST_BYTES = 10**9  # the size up to which `fingerprint` reads the whole of an array
LIBRARIES = ("fedjax_drift", "jax", "jaxlib", "flax", "optax", "chex", "numpy", "ml_dtypes", "builtins")


def identity(
    engine: Engine, data: FederatedData, on_nonfinite: str, client_store: str, state: ServerState
) -> dict[str, Any]:
    """Returns all that a run's results depend on, by name, as JSON stores it: not lanes, devices or streaming.

    Args:
      engine: the round, with its algorithm, model and options.
      data: the federation.
      on_nonfinite: the option of `Simulation`.
      client_store: "device", "sharded", "host" or a folder.
      state: shapes and dtypes of the whole state.
    """
    options = {  # of Simulation: all that change results
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


def settings(value: Any, name: str) -> dict[str, Any]:
    """The plain values in a tree of NamedTuples, dataclasses, containers and the closures of functions, by dotted name.

    Arrays count by their contents. The code of functions is an entry that ends in "<code>", but for those of libraries.
    What a function looks up in its module is not seen.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> entries = settings((scaled(0.5), 3), "pair")
    >>> entries["pair.0"], entries["pair.0.factor"], entries["pair.1"]
    ('scaled.<locals>.<lambda>', 0.5, 3)
    """
    entries: dict[str, Any] = {}
    above: set[int] = set()

    def walk(value: Any, name: str) -> None:
        if isinstance(value, (np.generic, np.ndarray, jax.Array)):
            value = _of_array(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 1 and 1.0 are one setting
        if value is None or isinstance(value, bool | int | float | str):
            entries[name] = value
            return
        if isinstance(value, type | np.dtype | ModuleType):
            entries[name] = _name(value) if isinstance(value, type) else getattr(value, "__name__", str(value))
            return
        if id(value) in above:  # a function that calls itself
            return
        above.add(id(value))
        for part, inner in _parts(value):
            walk(inner, f"{name}.{part}" if part else name)
        above.remove(id(value))

    walk(value, name)
    return entries


def _of_array(array: Any) -> Any:
    """The number of a scalar; dtype, shape and checksum of any other array."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.item() if array.ndim == 0 and array.dtype.kind in "biuf" else _crc(array)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The name and value of each part of a value; none for a value of an unknown kind."""
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
    if not _of_library(type(value)) and hasattr(value, "__dict__"):
        return [("", type(value)), *vars(value).items()]
    return []


def _parts_of_function(function: Any) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    code = [] if _of_library(function) else [(CODE, _fingerprint_of_code(function.__code__))]
    return [("", _name(function)), *code, *defaults.items(), *inspect.getclosurevars(function).nonlocals.items()]


def _of_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in LIBRARIES


def _name(value: Any) -> str:
    """The name of a function or class: the last part of its module's name, and its qualified name.

    A script that is run and the same script imported, from whatever folder, give one name: "__main__" is replaced by
    the script's file name. A notebook has none; and no module is given for libraries, which move functions between
    modules from one version to the next.
    """
    module = "" if _of_library(value) else getattr(value, "__module__", None) or ""
    if module in ("__main__", "__mp_main__"):  # the latter in processes that multiprocessing has started
        module = Path(getattr(sys.modules[module], "__file__", None) or "").stem
    return f"{module.rpartition('.')[2]}.{value.__qualname__}".removeprefix(".")


def _fingerprint_of_code(code: CodeType) -> str | None:
    """The checksum of a function's source without comments, docstrings, annotations and layout; None without a source.

    It is the same in all versions of Python. Lambdas on one line have one fingerprint.
    """
    source = "".join(linecache.getlines(code.co_filename))
    text = _codes(source).get((code.co_name, code.co_firstlineno))
    return None if text is None else f"crc32 {zlib.crc32(text.encode()):08x}"


@functools.lru_cache(64)
def _codes(source: str) -> dict[tuple[str, int], str]:
    """The code of every function of a source file, by name and first line."""
    codes: defaultdict[tuple[str, int], str] = defaultdict(str)
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return codes
    for node in nodes:
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            codes[node.name, first] += ast.unparse(node)
        elif isinstance(node, ast.Lambda):
            codes["<lambda>", node.lineno] += ast.unparse(node)
    return codes


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The entries in which two identities differ, with both values as JSON; and the functions whose code has changed.

    A variable that a user's function captures may have another name with the same value.
    """
    old, new = ({name: json.dumps(value) for name, value in side.items()} for side in (stored, current))
    for one, other in ((old, new), (new, old)):  # an option that one version lacks has its default, None, in the other
        for name in [name for name in one if one[name] == "null" and name not in other]:
            del one[name]
    functions = {name.removesuffix("." + CODE) for name in {**old, **new} if name.endswith("." + CODE)}

    def anonymous(name: str) -> str:
        """The name without those of captured variables, which follow that of a function."""
        parts = name.split(".")
        return ".".join("*" if ".".join(parts[:i]) in functions else part for i, part in enumerate(parts))

    for name in [name for name in old if name not in new]:
        others = [other for other in new if other not in old and anonymous(other) == anonymous(name)]
        if renamed := [other for other in others if new[other] == old[name]]:
            del old[name], new[renamed[0]]
    pairs = {name: (old.get(name, "nothing"), new.get(name, "nothing")) for name in {**new, **old}}
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    edited = [name for name in pairs if name.endswith("." + CODE)]
    known = [name.removesuffix("." + CODE) for name in edited if "null" not in pairs[name]]  # null: without a source
    return {name: pair for name, pair in pairs.items() if name not in edited}, known


def few(items: list[str], most: int = 6) -> str:
    """The items as a text, with the number of those beyond the first ``most``."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


_fingerprints: WeakKeyDictionary[FederatedData, dict[str, Any]] = WeakKeyDictionary()


def fingerprint(data: FederatedData) -> dict[str, Any]:
    """Checksums of the arrays of a federation; for arrays of more than 1 GB, those of evenly spaced rows."""
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
    """The CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
