"""Modules of version 0.3 that have moved. They can still be imported under the old path, with a DeprecationWarning.

The names in `fedjax_drift` itself (``fd.Simulation``, ``fd.drift``, ...) are the public interface and have not changed.
The old path ``fedjax_drift.sweep`` is not supported, because importing a module of this name would replace the function
``fd.sweep``.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "fedjax_drift"
MOVED = {  # old path -> the new ones, in the order in which they are searched for a name
    "aggregation": "round.aggregation",
    "bank": "storage.client_store storage.client_files",
    "checkpoint": "storage.checkpoint storage.saver storage.contents disk",
    "distributed": "devices.distributed",
    "drift": "measures.drift",
    "engine": "round.round round.engine round.cohort round.train round.client_states round.rows round.evaluate",
    "exchange": "round.exchange",
    "failures": "round.failures",
    "fit": "simulation.fit simulation.validate tree",
    "hyper": "simulation.hyper",
    "identity": "storage.identity",
    "options": "cli.parsed_run cli.flags",
    "personal": "measures.personal",
    "programs": "simulation.programs",
    "progress": "simulation.progress simulation.records",
    "ranking": "models.ranking",
    "sharding": "devices.mesh devices.processes devices.launch devices.memory devices.cache",
    "stream": "simulation.host data.reading",
    "turns": "simulation.turns",
}
RENAMED = {"Bank": "ClientStore", "Damaged": "DamagedError", "check_like": "check_layout"}  # names in these modules


class MovedModules(MetaPathFinder, Loader):
    """Imports a module under its old path.

    If it is one module today, the result is that module. If it was split, the result looks up each attribute in the new
    modules.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == PACKAGE and name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        paths = [f"{PACKAGE}.{path}" for path in MOVED[str(module.__name__).rpartition(".")[2]].split()]
        text = f"{module.__name__} has moved: import {' or '.join(paths)}, or use the public names of fedjax_drift"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        homes = [importlib.import_module(path) for path in paths]
        if len(homes) == 1:  # `import fedjax_drift.drift` sets fd.drift, which must stay the same module
            sys.modules[str(module.__name__)] = homes[0]
            return

        def attribute(name: str) -> Any:
            new = RENAMED.get(name, name)
            for home in homes:
                if hasattr(home, new):
                    return getattr(home, new)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module)["__getattr__"] = attribute


sys.meta_path.append(MovedModules())
