"""`plan`: what a simulation would need on a TPU slice or on GPUs that are not here."""

from __future__ import annotations

from typing import Any

from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.described import described_mesh
from fedjax_drift.model import Model
from fedjax_drift.simulation.plan import Plan
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.types import Algorithm


def plan(topology: str, model: Model, data: FederatedData, algorithm: Algorithm, **options: Any) -> Plan:
    """Compiles a round for a TPU slice or for GPUs that are not here, and returns what it needs.

    Nothing is executed, and no example is copied. `FederatedData.of_shapes` describes data that are not here either.
    Needs a compiler. For TPUs: ``pip install "jax[tpu]"``. For GPUs: ``pip install jax-cuda12-plugin jax-cuda12-pjrt
    nvidia-cuda-nvcc-cu12``, in the version of jax.

    >>> data = fd.FederatedData.of_shapes(3400, 195, (28, 28, 1))  # doctest: +SKIP
    >>> scaffold = fd.algorithms.scaffold()  # doctest: +SKIP
    >>> print(fd.plan("v5e:4x4", fd.models.lenet5(), data, scaffold, cohort_size=3400))  # doctest: +SKIP

    Args:
      topology: a TPU slice such as "v5e:4x4", or GPUs such as "h100:8". See `described_mesh`.
      options: as in `Simulation`.

    Raises:
      ValueError: the examples or client states would be kept on the host.
      ImportError: the compiler for these devices is not installed.
    """
    return Simulation(model, data, algorithm, mesh=described_mesh(topology), **options).plan()
