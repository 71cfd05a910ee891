"""Simulations on several processes. Each process has its own devices, and all processes run the same script.

    import fedjax_drift as fd
    fd.distributed.initialize()        # before anything else
    sim = fd.Simulation(...)           # its mesh has the devices of all processes
    state, history = sim.run(sim.init(jax.random.key(0)), 100)
    if fd.distributed.is_first():
        ...                            # write files

All processes must make the same calls in the same order, with the same data, seeds and options. Every process gets the
complete info, history and scores from `Simulation`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from threading import Thread
from typing import Annotated, Any

import jax

from fedjax_drift import checks, spec
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.devices.mesh import clients_mesh, use_cpu_devices
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Count, Fix, checked

__all__ = ["initialize", "is_first"]
__dir__ = __all__.copy


STARTED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def _address(name: str, text: Any, fix: str) -> str:
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        checks.refuse(f'{name} must be "host:port"', checks.shown(text), fix)
    return text


Address = Annotated[str, spec.Spec(_address, "address"), Fix("pass the host of process 0 and a free port of this host")]


@checked
def initialize(
    coordinator_address: Address | None = None,
    num_processes: Count | None = None,
    process_id: int | None = None,
    cpu_devices: Annotated[int, spec.integer(1, 256)] | None = None,
    *,
    timeout_seconds: Count = 300,
) -> None:
    """Connects this process to the other processes of its job with `jax.distributed`, and starts JAX's backend.

    JAX detects the arguments that are not given. It knows Open MPI up to version 4, SLURM (in a job step of ``srun``),
    TPU pods of GKE, TPU VMs (with the package ``requests``), and Kubernetes Jobs and JobSets with ``completionMode:
    Indexed`` (with the package ``kubernetes``). Other MPI launchers need the package ``mpi4py``.

    ``JAX_COORDINATOR_ADDRESS`` replaces the detected address, and ``JAX_COORDINATOR_PORT`` only its port. With Open
    MPI, SLURM and mpi4py, a process uses only the GPU whose index is its local rank. So start one process per GPU.

    Args:
      coordinator_address: "host:port" at which process 0 listens. Default: detected.
      num_processes: number of processes P, >= 1. Default: detected.
      process_id: number of this process, in 0..P-1. Default: detected. Process 0 shows the progress bar, and it should
        be the process that writes files.
      cpu_devices: number of CPU devices of this process, in 1..256. Default: the number that `use_cpu_devices` has set,
        otherwise 1. CPU devices of different processes communicate with Gloo, JAX's default
        (``jax_cpu_collectives_implementation``).
      timeout_seconds: the largest time to wait for the other processes, in seconds, >= 1. Default: 300.

    Raises:
      ValueError: an argument is not given and JAX cannot detect it.
      RuntimeError: JAX has already started its backend; or `initialize` has already been called; or the other processes
        do not connect before the timeout.
    """
    if process_id is not None:
        most = checks.MOST if num_processes is None else num_processes - 1
        process_id = checks.integer("process_id", process_id, 0, most, "every process needs a different one")
    if jax.distributed.is_initialized():
        raise RuntimeError("fd.distributed.initialize() must only be called once, got a second call: remove it")
    if cpu_devices is not None:
        use_cpu_devices(cpu_devices)
    join = partial(
        jax.distributed.initialize,
        coordinator_address,
        num_processes,
        process_id,
        cluster_detection_method=_detected_by(os.environ),
        initialization_timeout=timeout_seconds + 3600,  # longer than timeout_seconds: JAX's timeout ends the process
    )
    try:
        connected = _in_time(join, timeout_seconds)
    except ValueError as error:
        raise ConfigurationError(
            "fd.distributed.initialize() needs coordinator_address, num_processes and process_id, because JAX did not "
            f"detect a SLURM, Kubernetes, MPI or TPU job ({error}): pass them, or start the script with a launcher "
            "such as srun"
        ) from error
    except RuntimeError as error:
        if "before any JAX" in str(error):
            raise RuntimeError(
                "fd.distributed.initialize() must be called before JAX starts its backend: move it to the top of the "
                "script, before any array is made or jax.devices() is called"
            ) from error
        raise
    if not connected:
        raise RuntimeError(
            f"all processes must connect within {timeout_seconds} s, got a timeout: restart all processes after these "
            "checks: (1) all of them are running; (2) num_processes is the number of processes, and each process has "
            "a different process_id; (3) the host and port of process 0 "
            f"({coordinator_address or 'detected by JAX'}) can be reached from the other processes (firewall, host "
            "name, proxy variables); (4) no other program uses this port"
        )
    # The processes communicate once now. Gloo fails if a process waits for half a minute in the first communication.
    memory_of(clients_mesh())


def _in_time(call: Callable[[], None], seconds: float) -> bool:
    """Calls ``call()`` in a thread, because it can't be interrupted, and raises its errors.

    Returns whether the call ended within ``seconds``.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def is_first() -> bool:
    """Whether this is process 0, the process that should print and write files. True if there is only one process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0  # starts no backend with a single process


def _detected_by(environment: Mapping[str, str]) -> str | None:
    """The ``cluster_detection_method`` for JAX. "mpi4py" for MPI launchers that JAX does not detect, otherwise None."""
    known_to_jax = "OMPI_MCA_orte_hnp_uri" in environment or "SLURM_PROCID" in environment
    started_by_mpi = any(name in environment for name in STARTED_BY_MPI)
    return "mpi4py" if started_by_mpi and not known_to_jax else None
