"""What a run's results depend on, as plain values by name: runs are the same if these are, and else differ in those.

Hyper-parameters live in closures, so that is where `settings` looks for them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Mapping
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from fedjax_drift.bank import layout
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.failures import NONE

if TYPE_CHECKING:
    from fedjax_drift.simulation import Simulation

MOST_BYTES = 10**9  # of an array that `fingerprint` reads as a whole
VERSIONED = ("fedjax_drift", "jax", "flax", "optax", "chex", "numpy")  # packages whose code their version stands for


def identity(sim: Simulation, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All that a run's results depend on, by name, as JSON has it. Lanes, devices, streaming and the like are not."""
    how = sim._engine
    options = {  # of Simulation: each one that changes results has its place here
        "cohort_size": how.cohort_size,
        "sampling": "bernoulli" if how.bernoulli else "uniform",
        "on_nonfinite": sim.on_nonfinite,
        "asked": how.asked,
        **settings(how.failures or NONE, "failures"),
        **settings(how.aggregation, "aggregation"),
    }
    kept = "on the devices" if sim.bank in ("device", "sharded") else "on the host" if sim.bank == "host" else "files"
    expected = sim._expected
    shapes = {"server": expected.server, "client": jax.eval_shape(sim.algorithm.init_client, expected.params)}
    return {
        "algorithm": sim.algorithm.name,
        **settings(sim.algorithm, "algorithm"),
        **settings(sim.model, "model"),
        **settings(sim.local, "local"),
        **options,
        "client states": kept,
        **{name: f"{dtype}{shape}" for name, dtype, shape in layout(shapes)},
        **fingerprint(sim.data),
        **{f"config.{name}": value for name, value in (config or {}).items()},
    }


def settings(value: Any, name: str) -> dict[str, Any]:
    """The plain values in a tree of NamedTuples, dataclasses, containers and the closures of functions, by dotted name.

    Arrays count by their contents, and functions that are not of a library by their code and defaults, too. What a
    function looks up in its module is not seen.

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
    own = [] if _versioned(function) else [("code", f"crc32 {_code(function.__code__):08x}")]
    return [("", function.__qualname__), *own, *defaults.items(), *inspect.getclosurevars(function).nonlocals.items()]


def _versioned(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in (*VERSIONED, "builtins")


def _code(code: CodeType, crc: int = 0) -> int:
    """CRC-32 of what the code does, wherever it is written."""
    crc = zlib.crc32(code.co_code + " ".join((*code.co_names, *code.co_varnames)).encode(), crc)
    for constant in code.co_consts:
        if isinstance(constant, frozenset):  # whose order changes from process to process
            constant = sorted(constant, key=repr)
        crc = _code(constant, crc) if isinstance(constant, CodeType) else zlib.crc32(repr(constant).encode(), crc)
    return crc


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
