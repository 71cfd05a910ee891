"""fedjax_drift simulates federated learning to study drift. Each round is one compiled JAX program.

>>> import jax, numpy as np
>>> import fedjax_drift as fd
>>> data = fd.FederatedData.from_clients([(np.eye(2, dtype="f4"), np.array([0, 1])) for _ in range(4)])
>>> model = fd.models.linear((2,), num_classes=2)
>>> sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=fd.LocalTraining(lr=0.5), cohort_size=2)
>>> state, info = sim.round_fn(sim.init(jax.random.key(0)))
>>> int(state.round)
1
"""

from typing import TYPE_CHECKING, Any

from fedjax_drift import (
    adversaries,
    algorithms,
    clock,
    compression,
    data,
    errors,
    logs,
    measures,
    models,
    participation,
    plots,
    robust,
    shift,
    statistics,
    testing,
    topology,
    tuning,
)
from fedjax_drift.clock import Devices
from fedjax_drift.data import augment, datasets, partition
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.data.redeal import drift_regimes
from fedjax_drift.devices import distributed
from fedjax_drift.devices.cache import use_compilation_cache
from fedjax_drift.devices.described import described_mesh
from fedjax_drift.devices.mesh import clients_mesh, use_cpu_devices
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures import drift, personal
from fedjax_drift.model import Model
from fedjax_drift.models import ranking
from fedjax_drift.paper_table import table
from fedjax_drift.records import rounds_to_target
from fedjax_drift.round import aggregation, sources
from fedjax_drift.round.failures import Failures
from fedjax_drift.run_folder import load_run
from fedjax_drift.simulation import until
from fedjax_drift.simulation.placement import Placement
from fedjax_drift.simulation.plan import Plan
from fedjax_drift.simulation.planning import plan
from fedjax_drift.simulation.progress import stop_on_interrupt
from fedjax_drift.simulation.runs import Run, grid
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.simulation.sweep import sweep
from fedjax_drift.storage.checkpoint import Checkpoints
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Round, Row, ServerState, Work, algorithm
from fedjax_drift.version import __version__ as __version__

if TYPE_CHECKING:
    from fedjax_drift.cli.parsed_run import ParsedRun, parse_run
else:

    def __getattr__(name: str) -> Any:
        """Imports the command line when one of its names is first used, because most programs do not need it."""
        if name not in ("ParsedRun", "parse_run"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fedjax_drift.cli import parsed_run

        return getattr(parsed_run, name)


__all__ = [
    "Algorithm", "Batch", "Checkpoints", "ClientResult", "Devices", "Failures", "FederatedData", "LocalTraining",
    "Model", "Needs", "Placement", "Plan", "ParsedRun", "Round", "Row", "Run", "ServerState", "Simulation", "Work",
    "adversaries", "aggregation", "algorithm", "algorithms", "augment", "clients_mesh", "clock", "compression", "data",
    "datasets", "described_mesh", "distributed", "drift", "drift_regimes", "errors", "grid", "load_run", "logs",
    "measures", "models", "parse_run", "participation", "partition", "personal", "plan", "plots", "ranking", "robust",
    "rounds_to_target", "shift", "sources", "statistics", "stop_on_interrupt", "sweep", "table", "testing",
    "topology", "tuning", "until", "use_compilation_cache", "use_cpu_devices",
]  # fmt: skip
__dir__ = __all__.copy
