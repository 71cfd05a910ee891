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
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any

import jax

from fedjax_drift import checks
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.devices.mesh import clients_mesh, use_cpu_devices
from fedjax_drift.errors import ConfigurationError

STARTED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    cpu_devices: int | None = None,
    *,
    timeout_seconds: int = 300,
) -> None:
    """Connects this process to the other processes of its job with `jax.distributed`, and starts JAX's backend.

    JAX detects the arguments that are not given. It looks for these launchers, in this order:

    - Open MPI up to version 4: ``OMPI_MCA_orte_hnp_uri``, ``OMPI_COMM_WORLD_SIZE``, ``_RANK``, ``_LOCAL_RANK``
    - SLURM, in a job step (``srun``): ``SLURM_JOB_ID``, ``SLURM_STEP_NODELIST``, ``SLURM_NTASKS``, ``SLURM_PROCID``,
      ``SLURM_LOCALID``
    - TPU pods of GKE: ``TPU_WORKER_HOSTNAMES`` (or ``TPU_PROCESS_ADDRESSES``) and ``TPU_WORKER_ID``; for a job on
      several slices also ``MEGASCALE_COORDINATOR_ADDRESS``, ``_NUM_SLICES``, ``_SLICE_ID``
    - TPU VMs: the machine's metadata (``agent-worker-number``, ``worker-network-endpoints``). This needs the package
      ``requests``.
    - Kubernetes Jobs and JobSets with ``completionMode: Indexed``: ``KUBERNETES_SERVICE_HOST``,
      ``JOB_COMPLETION_INDEX``, ``HOSTNAME`` and the description of the job in the Kubernetes API. This needs the
      package ``kubernetes``.
    - other MPI launchers, which set ``PMI_SIZE``, ``MV2_COMM_WORLD_SIZE`` or ``OMPI_COMM_WORLD_SIZE``. This needs the
      package ``mpi4py``.

    ``JAX_COORDINATOR_ADDRESS`` replaces the detected address, and ``JAX_COORDINATOR_PORT`` only its port. Under Open
    MPI, SLURM and mpi4py, a process uses only the GPU whose index is its local rank: start one process per GPU.

    Args:
      coordinator_address: "host:port" at which process 0 listens. Default: detected.
      num_processes: number of processes P, >= 1. Default: detected.
      process_id: number of this process, in 0..P-1. Default: detected. Process 0 shows the progress bar, and it should
        be the process that writes files.
      cpu_devices: number of CPU devices of this process, in 1..256. Default: the number that `use_cpu_devices` has set,
        otherwise 1. CPU devices of different processes communicate with Gloo, JAX's default
        (``jax_cpu_collectives_implementation``).
      timeout_seconds: how long to wait for the other processes, >= 1. Default: 300.

    Raises:
      ValueError: an argument is out of range, or it is not given and JAX cannot detect it.
      RuntimeError: JAX has already started its backend; or this is a second call; or the other processes do not
        connect before the timeout.
    """
    if num_processes is not None:
        num_processes = checks.integer("num_processes", num_processes, 1)
    if process_id is not None:
        most = checks.MOST if num_processes is None else num_processes - 1
        process_id = checks.integer("process_id", process_id, 0, most, "every process has its own")
    if coordinator_address is not None and not _is_address(coordinator_address):
        raise ConfigurationError(
            f'coordinator_address must be "host:port", got {checks.shown(coordinator_address)}: the host of process 0, '
            "and a port that is free there"
        )
    if cpu_devices is not None:
        cpu_devices = checks.integer("cpu_devices", cpu_devices, 1, 256)
    timeout_seconds = checks.integer("timeout_seconds", timeout_seconds, 1)
    if jax.distributed.is_initialized():
        raise RuntimeError("fd.distributed.initialize() must be called once, got a second call: leave it out")
    if cpu_devices is not None:
        use_cpu_devices(cpu_devices)
    join = partial(
        jax.distributed.initialize,
        coordinator_address,
        num_processes,
        process_id,
        cluster_detection_method=_detected_by(os.environ),
        initialization_timeout=timeout_seconds + 3600,  # later than ours, because JAX then ends the process
    )
    try:
        connected = _in_time(join, timeout_seconds)
    except ValueError as error:
        raise ConfigurationError(
            "fd.distributed.initialize() must be given coordinator_address, num_processes and process_id where JAX "
            f"finds no SLURM, Kubernetes, MPI or TPU job around it ({error}): pass them, or start the script with a "
            "launcher, srun for example"
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
            f"the processes must find each other in {timeout_seconds} s, got no answer: see that all of them run, that "
            "num_processes is their number and each has its own process_id, that the host and port of process 0 "
            f"({coordinator_address or 'found by JAX'}) can be reached from the others (firewall, name, proxy "
            "variables), and that nothing else listens there; then start all again"
        )
    # The processes communicate once now: Gloo fails if, at the first time, one of them waits for half a minute.
    memory_of(clients_mesh())


def _in_time(call: Callable[[], None], seconds: float) -> bool:
    """Calls ``call()`` in a thread, as it can't be interrupted. Returns whether it ended in time; raises its errors."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        outcome.result(seconds)
    except TimeoutError:
        return False
    return True


def is_first() -> bool:
    """Whether this is process 0, the process that should print and write files. True if there is only one process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0  # with one process, starts no backend


def _is_address(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _detected_by(environment: Mapping[str, str]) -> str | None:
    """The ``cluster_detection_method`` for JAX: "mpi4py", which JAX uses only on request, or None for the others."""
    known_to_jax = "OMPI_MCA_orte_hnp_uri" in environment or "SLURM_PROCID" in environment
    started_by_mpi = any(name in environment for name in STARTED_BY_MPI)
    return "mpi4py" if started_by_mpi and not known_to_jax else None
