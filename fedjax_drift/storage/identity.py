"""The identity of a run: a dict with everything that its results depend on.

Two runs are the same if their identities are equal. Otherwise the entries that differ show why.

- Hyper-parameters are captured in closures, so `settings` collects them from there. A function is identified by its
  name and the values that it captures.
- The code of a user's function has a separate entry. A difference in such an entry only causes a warning.
- The code of libraries is identified by their versions.
- Docstrings, comments, names of local and captured variables, and bytecode are not part of the identity.
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
from fedjax_drift.types import Frozen, ServerState

CODE = "<code>"  # the last part of the name of an entry for the code of a function
MOST_BYTES = 10**9  # `fingerprint` reads only some rows of a larger array
LIBRARIES = ("fedjax_drift", "jax", "jaxlib", "flax", "optax", "chex", "numpy", "ml_dtypes", "builtins")


def identity(
    engine: Engine, data: FederatedData, on_nonfinite: str, client_store: str, state: ServerState
) -> dict[str, Any]:
    """Returns everything that the results of a run depend on, as a dict that JSON can store.

    The number of lanes, the devices and streaming are not part of it, because results do not depend on them.

    Args:
      engine: the round, with its algorithm, model and options.
      data: the federation.
      on_nonfinite: the option of `Simulation`.
      client_store: "device", "sharded", "host" or a folder.
      state: shapes and dtypes of the whole state.
    """
    options = {  # the options of Simulation that change results
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
    """Returns the plain values in NamedTuples, dataclasses, containers and closures of functions, by dotted name.

    Arrays are compared by their contents. For the code of a function there is an entry that ends in "<code>", except
    for functions of libraries. Global variables that a function uses are not included.

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
        if isinstance(value, Frozen):
            value = value.checksum
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 1 and 1.0 are the same setting
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
    """Returns the number for a scalar, and dtype, shape and checksum for any other array."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.item() if array.ndim == 0 and array.dtype.kind in "biuf" else _crc(array)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Returns the name and value of each element, field or captured variable. Empty for an unknown type."""
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
    """Returns the name of a function or class: the last part of its module's name, and its qualified name.

    "__main__" is replaced by the file name of the script, so that a script has the same names when it is run and when
    it is imported. Functions of a notebook have no module name. Functions of libraries have no module name either,
    because new versions of a library may move them to another module.
    """
    module = "" if _of_library(value) else getattr(value, "__module__", None) or ""
    if module in ("__main__", "__mp_main__"):  # the latter in processes that multiprocessing has started
        module = Path(getattr(sys.modules[module], "__file__", None) or "").stem
    return f"{module.rpartition('.')[2]}.{value.__qualname__}".removeprefix(".")


def _fingerprint_of_code(code: CodeType) -> str | None:
    """Returns the checksum of a function's source without comments, docstrings, annotations and layout.

    It does not depend on the version of Python. Several lambdas on one line have the same checksum. None: there is no
    source.
    """
    source = "".join(linecache.getlines(code.co_filename))
    text = _codes(source).get((code.co_name, code.co_firstlineno))
    return None if text is None else f"crc32 {zlib.crc32(text.encode()):08x}"


@functools.lru_cache(64)
def _codes(source: str) -> dict[tuple[str, int], str]:
    """Returns the code of every function of a source file, by name and first line."""
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
    """Returns the entries in which two identities differ, with both values as JSON, and the functions with changed
    code.

    A captured variable that has another name but the same value is not a difference.
    """
    old, new = ({name: json.dumps(value) for name, value in side.items()} for side in (stored, current))
    for one, other in ((old, new), (new, old)):  # an option that one version lacks has its default, None, in the other
        for name in [name for name in one if one[name] == "null" and name not in other]:
            del one[name]
    functions = {name.removesuffix("." + CODE) for name in {**old, **new} if name.endswith("." + CODE)}

    def anonymous(name: str) -> str:
        """Removes the names of captured variables, which follow the name of a function."""
        parts = name.split(".")
        return ".".join("*" if ".".join(parts[:i]) in functions else part for i, part in enumerate(parts))

    for name in [name for name in old if name not in new]:
        others = [other for other in new if other not in old and anonymous(other) == anonymous(name)]
        if renamed := [other for other in others if new[other] == old[name]]:
            del old[name], new[renamed[0]]
    pairs = {name: (old.get(name, "nothing"), new.get(name, "nothing")) for name in {**new, **old}}
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    edited = [name for name in pairs if name.endswith("." + CODE)]
    known = [name.removesuffix("." + CODE) for name in edited if "null" not in pairs[name]]  # null: no source
    return {name: pair for name, pair in pairs.items() if name not in edited}, known


def few(items: list[str], most: int = 6) -> str:
    """Returns the first ``most`` items as text, with the number of the remaining items."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


_fingerprints: WeakKeyDictionary[FederatedData, dict[str, Any]] = WeakKeyDictionary()


def fingerprint(data: FederatedData) -> dict[str, Any]:
    """Returns checksums of the arrays of a federation. For arrays of more than 1 GB only evenly spaced rows are
    read."""
    if data not in _fingerprints:
        arrays = {name: getattr(data, name) for name in ("sizes", "x", "y", "x_test", "y_test", "mean", "std")}
        plain = {"name": data.name, "redeal": data.redeal}
        if data.x.dtype == np.uint8 and not data.has_images:  # earlier versions divided all uint8 inputs by 255
            plain["inputs"] = "unscaled"
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
    """Returns the CRC-32 of the bytes of an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
