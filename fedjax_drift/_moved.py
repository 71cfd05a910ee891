"""Module paths of version 0.3 that have moved. They can still be imported, with a DeprecationWarning.

The names in `fedjax_drift` itself (``fd.Simulation``, ``fd.drift``, ...) are the public interface and have not changed.
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
MOVED = {
    "aggregation": "round.aggregation",
    "bank": "storage.client_store",
    "checkpoint": "storage.checkpoint",
    "distributed": "devices.distributed",
    "drift": "measures.drift",
    "engine": "round.round",
    "exchange": "round.exchange",
    "failures": "round.failures",
    "fit": "simulation.validate",
    "hyper": "simulation.hyper",
    "identity": "storage.identity",
    "options": "cli.parsed_run",
    "personal": "measures.personal",
    "programs": "simulation.programs",
    "progress": "simulation.progress",
    "ranking": "models.ranking",
    "sharding": "devices.mesh",
    "stream": "simulation.host",
    "sweep": "simulation.sweep",
    "turns": "simulation.turns",
}
RENAMED = {"Bank": "ClientStore", "Damaged": "DamagedError", "check_like": "check_layout"}  # names within modules


class MovedModules(MetaPathFinder, Loader):
    """Finds a moved module under its old path, as a module that passes on what the new one has."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == PACKAGE and name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = f"{PACKAGE}.{MOVED[str(module.__name__).rpartition('.')[2]]}"
        text = f"{module.__name__} has moved: import {new}, or the public names of fedjax_drift"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        moved = importlib.import_module(new)

        def attribute(name: str) -> Any:
            return getattr(moved, RENAMED.get(name, name))

        vars(module)["__getattr__"] = attribute


sys.meta_path.append(MovedModules())
