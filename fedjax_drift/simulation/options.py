"""The arguments of a simulation."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_drift.clock import Clock, Devices
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
