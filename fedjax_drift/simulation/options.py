"""The arguments of a simulation."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import Any, NamedTuple, TypedDict

from jax.sharding import Mesh

from fedjax_drift import checks
from fedjax_drift.clock import Clock, Devices, asynchronous
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures.drift import Measured
from fedjax_drift.model import Model
from fedjax_drift.participation import Participation
from fedjax_drift.round.aggregation import Aggregation
from fedjax_drift.round.failures import Failures
from fedjax_drift.round.sources import Source
from fedjax_drift.simulation.placement import Placement
from fedjax_drift.topology import Topology
from fedjax_drift.types import Algorithm


class Options(NamedTuple):
    """The arguments of `Simulation`, as they were given."""

    model: Model
    data: FederatedData
    algorithm: Algorithm
    local: LocalTraining
    cohort_size: int
    participation: Participation
    failures: Failures
    aggregation: Aggregation
    clock: Clock
    devices: Devices | None
    placement: Placement
    on_nonfinite: str
    measure: Measured
    sources: tuple[Source, ...] = ()
    topology: Topology = Topology()


class FlatOptions(TypedDict, total=False):
    """The fields of `Failures` and of `Placement`, which are also keyword arguments of `Simulation`, and the short form
    of ``participation``."""

    sampling: str
    dropout: float
    stragglers: float
    over_selection: float
    deadline: float | None
    speed_spread: float
    lanes: int | str | None
    mesh: Mesh | None
    devices_per_client: int
    stream: bool | str
    shard_data: bool | str
    bank: str | os.PathLike
    donate: bool
    eval_batch_size: int


def unexpected(name: str, arguments: Iterable[str]) -> str:
    """The message about an unknown argument of `Simulation`. arguments: those that it has."""
    known = [*arguments, *FlatOptions.__annotations__]
    groups = {
        "local=fd.LocalTraining": LocalTraining.__dataclass_fields__,
        "devices=fd.Devices": Devices.__dataclass_fields__,
        "clock=fd.clock.asynchronous": inspect.signature(asynchronous).parameters,
    }
    group = next((group for group, names in groups.items() if name in names), None)
    fix = f": pass {group}({name}=...)" if group else checks.nearest(name, known)
    return f"Simulation() got an unexpected keyword argument {name!r}{fix}"


def grouped(name: str, kind: Any, value: Any, options: Any) -> Any:
    """Returns the group of options ``value``, an instance of ``kind`` (`Failures` or `Placement`).

    If it is None, the group is made from those entries of ``options`` that are fields of ``kind``. These entries are
    removed from ``options``.
    """
    flat = {field: options.pop(field) for field in kind.__dataclass_fields__ if field in options}
    if value is None:
        return kind(**flat)
    checks.instance(name, value, kind, f"fd.{kind.__name__}(...)")
    if flat:
        checks.refuse(f"{name}= has the option {next(iter(flat))}", "both", f"pass it only in fd.{kind.__name__}(...)")
    return value
