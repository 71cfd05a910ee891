"""Devices that are not here. XLA can compile programs for a TPU slice that is only described."""

from __future__ import annotations

import os
import re

from jax.experimental import topologies
from jax.sharding import Mesh

from fedjax_drift import checks
from fedjax_drift.devices.mesh import clients_mesh
from fedjax_drift.errors import ConfigurationError, MissingPackageError

EXAMPLES = "v5e:4x4, v5p:2x2x1, v6e:16x16"
# What libtpu reads when it describes a slice. Without these, it asks the metadata server of a TPU VM.
SETTINGS = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def described_mesh(topology: str) -> Mesh:
    """Returns the mesh of a TPU slice that need not exist, such as "v5e:4x4": 16 chips of TPU v5e.

    Raises:
      ValueError: the name is not that of a slice.
      ImportError: libtpu is not installed.
    """
    name = checks.text("topology", topology, f"pass the name of a TPU slice, such as {EXAMPLES}")
    if not re.fullmatch(r"v\w+:\d+(x\d+)*", name):
        raise ConfigurationError(f"topology must be the name of a TPU slice, such as {EXAMPLES}, got {name!r}")
    for setting, value in SETTINGS.items():
        os.environ.setdefault(setting, value)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "not installed" in str(error):
            raise MissingPackageError(
                'compiling for a TPU that is not here needs libtpu: pip install "jax[tpu]"'
            ) from error
        raise ConfigurationError(
            f"topology must be the name of a TPU slice, such as {EXAMPLES}, got {name!r}: {checks.first_line(error)}"
        ) from error
    return clients_mesh(described.devices)
