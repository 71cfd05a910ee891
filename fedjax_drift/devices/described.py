"""Devices that are not here. XLA can compile programs for devices that are only described."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from jax.experimental import topologies
from jax.sharding import Mesh

from fedjax_drift import checks
from fedjax_drift.devices import gpus
from fedjax_drift.devices.mesh import clients_mesh, is_described
from fedjax_drift.errors import ConfigurationError, MissingPackageError
from fedjax_drift.spec import Fix, Text, checked

EXAMPLES = "a TPU slice or GPUs, such as v5e:4x4, v5p:2x2x1, h100 or h100:8"
# What the compilers read while they describe devices. Without these, libtpu asks the metadata server of a TPU VM and
# warns that it does not know the type of this machine (any type will do), and JAX's CUDA plugin checks the versions of
# all CUDA libraries.
SETTINGS = {
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "cuda": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}


@checked
def described_mesh(topology: Annotated[Text, Fix(f"pass {EXAMPLES}")]) -> Mesh:
    """Returns the mesh of devices that need not exist.

    topology: one of these.

      - A TPU slice, such as "v5e:4x4": 16 chips of TPU v5e.
      - GPUs: "h100" is one, "h100:8" is one host with 8, and "h100:2x8" is two hosts with 8 each. Known are a100 (80
        GB), a100-40gb, h100, h200 and b200.
      - Other GPUs: the path of a description that ends in .txtpb instead of the name. On a machine with such a GPU,
        ``jaxlib.xla_client.get_topology_for_devices(jax.devices()).target_config`` returns the description.

    Raises:
      ValueError: the name is not that of a slice or of GPUs.
      ImportError: the compiler for these devices is not installed.
    """
    if re.fullmatch(r"v\w+:[1-9]\d*(x[1-9]\d*)*", topology):
        generation, _, shape = topology.partition(":")
        alone = set(shape.split("x")) == {"1"}  # by default a host has 2 x 2 chips
        options: dict[str, Any] = {"chips_per_host_bounds": [1] * 3} if alone else {}
        if generation == "v4":  # JAX uses the two cores of a TPU v4 as one device
            options["chip_config_name"] = "megacore"
        return _mesh(topology, "tpu", 'libtpu: pip install "jax[tpu]"', topology_name=topology, **options)
    if parts := re.fullmatch(r"(.+?)(?::(?:([1-9]\d*)x)?([1-9]\d*))?", topology):
        gpu, hosts, each = parts[1], parts[2] or "1", parts[3] or "1"
        if gpu in gpus.GPUS or gpu.endswith(".txtpb"):
            description = str(gpus.GPUS[gpu]) if gpu in gpus.GPUS else _read(gpu)
            name = re.search(r'^device_description_str: "(.*)"', description, re.MULTILINE)
            if name and (memory := re.search(r"\bdevice_memory_size: (\d+)", description)):
                gpus.MEMORY[name[1]] = int(memory[1])
            packages = (
                "JAX's CUDA plugin and compiler: pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12"
            )
            return _mesh(topology, "cuda", packages, target_config=description, topology=f"1x{hosts}x{each}")
    checks.refuse(f"topology must be {EXAMPLES}", repr(topology), f"the known GPUs are {', '.join(gpus.GPUS)}")


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """Options with which XLA compiles for the devices of a mesh. None if they are here."""
    if not is_described(mesh) or mesh.devices.flat[0].platform != "gpu":
        return None
    # XLA's Triton kernels for matrix products can fail to compile without a GPU on which to tune them.
    return {"xla_gpu_enable_triton_gemm": False}


def _read(path: str) -> str:
    try:
        return checks.path("topology", path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"topology: the description {path!r} cannot be read: {error}") from error


def _mesh(name: str, platform: str, packages: str, **options: Any) -> Mesh:
    try:
        with _environment(SETTINGS[platform]):
            return clients_mesh(topologies.get_topology_desc(platform=platform, **options).devices)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "not installed" in str(error):
            raise MissingPackageError(f"compiling for {name}, which is not here, needs {packages}") from error
        checks.refuse(f"topology must be {EXAMPLES}", repr(name), checks.first_line(error), error)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set yet, and removes them again.

    On a TPU VM, they would otherwise hide the other hosts from a simulation that starts later in this process.
    """
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
