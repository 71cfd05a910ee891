"""Descriptions of a simulation: its title for people, its settings for logs, and its identity for checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import recipes, reprs
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.mesh import num_teams, team_size
from fedjax_drift.participation.cohorts import short_name
from fedjax_drift.recipes import Frozen
from fedjax_drift.round.engine import initial_client
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.storage.identity import COMPUTATION
from fedjax_drift.tree import crc32, described, layout

MOST_BYTES = 10**9  # `fingerprint` reads only some rows of a larger array
LIBRARIES = ("fedjax_drift", "jax", "jaxlib", "flax", "optax", "chex", "numpy", "ml_dtypes", "builtins")


def title(setup: Setup) -> str:
    """The text of a simulation in messages and notebooks."""
    e, options, together = setup.engine, setup.options, team_size(setup.mesh)
    teams = f"{_counted(num_teams(setup.mesh), 'team')} of " if together > 1 else ""
    number = together if teams else setup.mesh.size
    devices = _counted(number, f"{setup.mesh.devices.flat[0].platform} device")
    unusual = [
        *([options.participation] if options.participation.name != "uniform" else []),
        *([options.failures] if options.failures.any else []),
        *([options.aggregation] if options.aggregation.name != "mean" else []),
        *([] if options.topology.is_star else [options.topology]),
        *options.sources,
    ]
    return (
        f"Simulation({setup.algorithm!r}, {setup.data!r}, {e.local!r}, {e.cohort_size} clients a round"
        f"{f' of {M} in flight' if (M := options.clock.concurrency) else ''}, "
        f"{''.join(f'{value!r}, ' for value in unusual)}"
        f"{_counted(e.lanes, 'lane')} on {teams}{devices})"
    )


def settings(setup: Setup) -> dict[str, Any]:
    """See `Simulation.settings`."""
    options, local, rule = setup.options, dataclasses.asdict(setup.engine.local), setup.options.participation
    of_algorithm = _arguments(setup.algorithm)
    if setup.engine.local.optimizer is not None:
        local["optimizer"] = reprs.function_name(setup.engine.local.optimizer.update)
    values = {"algorithm": setup.algorithm.name, **of_algorithm}
    values |= {f"local_{name}" if name in of_algorithm else name: value for name, value in local.items()}
    values |= {"data": setup.data.name, "clients": setup.data.num_clients, "cohort_size": options.cohort_size}
    short = short_name(rule)
    values |= {"sampling": short} if short else {"participation": rule.name, **_arguments(rule, "participation_")}
    values["aggregation"] = options.aggregation.name
    if options.failures.any:
        values |= dataclasses.asdict(options.failures)
    if options.clock.concurrency is not None:
        values |= {"clock": options.clock.name, **_arguments(options.clock)}
    if options.devices is not None:
        values |= dataclasses.asdict(options.devices)
    if not options.topology.is_star:
        values["topology"] = options.topology.name
    for source in options.sources:
        values |= {source.name: True, **_arguments(source, f"{source.name}_")}
    return reprs.plain(values)


def _arguments(value: Any, prefix: str = "") -> dict[str, Any]:
    """The numbers and the texts among the arguments of the value's recipe, and of the recipes of these arguments."""
    if not value.recipe:
        return {}
    settings = {f"{prefix}{name}": argument for name, argument in reprs.plain(value.recipe.arguments).items()}
    for name, part in value.recipe.arguments.items():
        if getattr(part, "recipe", None) is not None and hasattr(part, "name"):  # such as the attack of adversaries
            settings |= {f"{prefix}{name}": part.name, **_arguments(part, f"{prefix}{name}_")}
    return settings


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}"


# --- identity ---------------------------------------------------------------------------------------------------------


def identity(setup: Setup, computation: str) -> dict[str, Any]:
    """Everything that the results of a run depend on, as a dict that JSON can store. `Checkpoints` compare it.

    - Algorithms, models and aggregations are described by their recipes: the factory and its arguments. Functions are
      described by their names.
    - The code of functions, and the values that functions capture, have one entry: ``computation``, a checksum of the
      traced updates, after the version of JAX and the kind of device.
    - The code of libraries is identified by their versions.
    - The number of lanes, the devices and streaming are not part of it, because results do not depend on them.
    """
    engine, options = setup.engine._replace(model=setup.model), setup.options
    clock, state, lr = options.clock, setup.state, engine.local.lr
    rule = options.participation
    short = short_name(rule)  # the first two rules have had the name "sampling" since the first version
    entries = {  # the options of Simulation that change results
        "cohort_size": engine.cohort_size,
        **({"sampling": short} if short else {"participation": rule.name, **by_name(rule, "participation")}),
        "on_nonfinite": setup.on_nonfinite,
        **by_name(options.failures, "failures"),
        **by_name(options.aggregation, "aggregation"),
        **({} if clock.concurrency is None else by_name(clock, "clock")),
        **by_name(options.devices, "devices"),
    }
    if not options.topology.is_star:
        entries |= by_name(options.topology, "topology")
    for source in options.sources:
        entries |= by_name(source, f"sources.{source.name}")
    places = {"device": "on the devices", "sharded": "on the devices", "host": "on the host"}
    shapes = {"server": state.server, "client": jax.eval_shape(functools.partial(initial_client, engine), state.params)}
    return {
        "algorithm": engine.algorithm.name,
        **by_name(engine.algorithm, "algorithm"),
        **by_name(engine.model, "model"),
        **by_name(engine.local, "local"),
        # of a schedule, the learning rates of 1,024 rounds
        **({"local.lr": _crc(np.asarray(jax.vmap(lr)(jnp.arange(1024))))} if callable(lr) else {}),
        **entries,
        "client states": places.get(setup.client_store, "files"),
        **described(layout(shapes)),
        **fingerprint(options.data),
        COMPUTATION: computation,
    }


def by_name(value: Any, name: str) -> dict[str, Any]:
    """Returns the plain values in recipes, NamedTuples, dataclasses and containers, by dotted name.

    Arrays are compared by their contents, functions and all other objects by their names.

    >>> from fedjax_drift.algorithms import fedprox
    >>> by_name(fedprox(0.5), "algorithm")
    {'algorithm': 'fedprox', 'algorithm.mu': 0.5, 'algorithm.server_lr': 1, 'algorithm.weighting': 'examples'}
    """
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        value = _of_array(value)
    if isinstance(value, Frozen):
        value = value.checksum
    if isinstance(value, np.dtype):
        value = str(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1 and 1.0 are the same setting
    if value is None or isinstance(value, bool | int | float | str):
        return {name: value}
    recipe = recipes.recipe_of(value)
    entries = {name: _name(recipe.factory)} if recipe else {}
    parts = _parts(value)
    for part, inner in ({"": _name(value)} if parts is None else parts).items():
        entries |= by_name(inner, f"{name}.{part}" if part else name)
    return entries


def _of_array(array: Any) -> Any:
    """Returns the number for a scalar, and dtype, shape and checksum for any other array."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.item() if array.ndim == 0 and array.dtype.kind in "biuf" else _crc(array)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Returns the elements, fields or arguments by name. None for an object that has none."""
    parts = recipes.parts_of(value)
    if parts is None and isinstance(value, tuple | list):
        parts = {str(i): item for i, item in enumerate(value)}
    if parts is None and isinstance(value, set | frozenset):
        parts = {str(i): item for i, item in enumerate(sorted(value, key=repr))}
    if parts is None and isinstance(value, dict):
        parts = {str(key): item for key, item in value.items()}
    if parts is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {"": _name(value)} | {
            field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
        }
    return None if parts is None else {name: part for name, part in parts.items() if name != "recipe"}


def _name(value: Any) -> str:
    """Returns the name of a function, of a class or of an object's class, with the last part of its module's name.

    "__main__" is replaced by the file name of the script, so that a script has the same names when it is run and when
    it is imported. Functions of a notebook have no module name. Functions of libraries have no module name either,
    because new versions of a library may move them to another module.
    """
    function = value.func if isinstance(value, functools.partial) else value
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None) or ""
    if module in ("__main__", "__mp_main__"):  # the latter in processes that multiprocessing has started
        module = Path(getattr(sys.modules[module], "__file__", None) or "").stem
    elif module.partition(".")[0] in LIBRARIES:
        module = ""
    return f"{module.rpartition('.')[2]}.{named.__qualname__}".removeprefix(".")


_fingerprints: WeakKeyDictionary[FederatedData, dict[str, Any]] = WeakKeyDictionary()


def fingerprint(data: FederatedData) -> dict[str, Any]:
    """Returns checksums of the arrays of a federation. For arrays of more than 1 GB only evenly spaced rows are
    read."""
    if data.root not in _fingerprints:
        arrays = {name: getattr(data, name) for name in ("sizes", "x", "y", "x_test", "y_test", "mean", "std")}
        known = {name: None if array is None else _crc(np.asarray(array)) for name, array in arrays.items()}
        _fingerprints[data.root] = {f"data.{name}": value for name, value in known.items()}
    plain = {"data.name": data.name, "data.redeal": data.redeal}
    if data.x.dtype == np.uint8 and not data.has_images:  # earlier versions divided all uint8 inputs by 255
        plain["data.inputs"] = "unscaled"
    return plain | _fingerprints[data.root] | by_name(data.shifting, "data.shifting")


def _crc(array: np.ndarray) -> str:
    rows = array
    if array.nbytes > MOST_BYTES:
        share = max(1, int(len(array) * MOST_BYTES / array.nbytes))
        rows = array[np.linspace(0, len(array) - 1, share).astype(np.int64)]
    return f"{array.dtype}{list(array.shape)}, crc32 {crc32(rows):08x}"
