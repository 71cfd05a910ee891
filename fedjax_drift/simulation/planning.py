"""`plan`: what a simulation would need on a TPU slice that is not here."""

from __future__ import annotations

from typing import Any

from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.described import described_mesh
from fedjax_drift.simulation.plan import Plan
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.types import Algorithm, Model


def plan(topology: str, model: Model, data: FederatedData, algorithm: Algorithm, **options: Any) -> Plan:
    """Compiles a round for a TPU slice that is not here, and returns what it needs.

    Nothing is executed, and no example is copied. `FederatedData.of_shapes` describes data that are not here either.
    Needs libtpu: ``pip install "jax[tpu]"``.

    >>> data = fd.FederatedData.of_shapes(3400, 195, (28, 28, 1))  # doctest: +SKIP
    >>> scaffold = fd.algorithms.scaffold()  # doctest: +SKIP
    >>> print(fd.plan("v5e:4x4", fd.models.lenet5(), data, scaffold, cohort_size=3400))  # doctest: +SKIP

    Args:
      topology: the slice, such as "v5e:4x4", "v5p:4x4x4" or "v6e:16x16".
      options: as in `Simulation`.

    Raises:
      ValueError: an argument is wrong, or the examples or client states would be kept on the host.
      ImportError: libtpu is not installed.
    """
    return Simulation(model, data, algorithm, mesh=described_mesh(topology), **options).plan()
