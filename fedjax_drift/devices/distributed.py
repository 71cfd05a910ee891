"""Several processes, each with devices of its own, that simulate together: every one runs the same script.

    import fedjax_drift as fd
    fd.distributed.initialize()        # first of all
    sim = fd.Simulation(...)           # its mesh: the devices of all processes
    state, history = sim.run(sim.init(jax.random.key(0)), 100)
    if fd.distributed.is_first():
        ...                            # write files

All processes have to do the same, in the same order, with the same values: the same data, seeds and options. What
`Simulation` returns to the host (info, history, scores) is whole in every process.
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
from fedjax_drift.devices.mesh import clients_mesh, memory_of, use_cpu_devices
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
    """Joins this process to the others of its job, through `jax.distributed`, and starts JAX's backend.

    What is not given is found by JAX, in this order:

    - Open MPI up to version 4: ``OMPI_MCA_orte_hnp_uri``, ``OMPI_COMM_WORLD_SIZE``, ``_RANK``, ``_LOCAL_RANK``
    - SLURM, in a step (``srun``): ``SLURM_JOB_ID``, ``SLURM_STEP_NODELIST``, ``SLURM_NTASKS``, ``SLURM_PROCID``,
      ``SLURM_LOCALID``
    - TPU pods of GKE: ``TPU_WORKER_HOSTNAMES`` (or ``TPU_PROCESS_ADDRESSES``), ``TPU_WORKER_ID``, and
      ``MEGASCALE_COORDINATOR_ADDRESS``, ``_NUM_SLICES``, ``_SLICE_ID`` of several slices
    - TPU VMs: the machine's metadata (``agent-worker-number``, ``worker-network-endpoints``); needs ``requests``
    - Kubernetes Jobs and JobSets: ``KUBERNETES_SERVICE_HOST``, ``JOB_COMPLETION_INDEX``, ``HOSTNAME`` and the
      cluster's own record of the job, of ``completionMode: Indexed``; needs the package ``kubernetes``
    - other launchers of MPI (one of ``PMI_SIZE``, ``MV2_COMM_WORLD_SIZE``, ``OMPI_COMM_WORLD_SIZE``): through the
      package ``mpi4py``, which they need

    ``JAX_COORDINATOR_ADDRESS`` gives the address anywhere, ``JAX_COORDINATOR_PORT`` another port where it is found.
    Under Open MPI, SLURM and mpi4py a process sees only the GPU of its local number: start one for each.

    Args:
      coordinator_address: "host:port" of process 0, which listens there.
      num_processes: P >= 1.
      process_id: this one's number, in 0..P-1; process 0 shows the progress bar, and should be the one that writes.
      cpu_devices: CPU devices of this process, in 1..256; default: as `use_cpu_devices` has set it before, or else 1.
        CPUs of several processes talk through Gloo, JAX's default (``jax_cpu_collectives_implementation``).
      timeout_seconds: how long to wait for the others.

    Raises:
      ValueError: arguments out of range, or not given and not found.
      RuntimeError: JAX has started its backend already; a second call; the others are not there in time.
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
        initialization_timeout=timeout_seconds + 3600,  # JAX ends the process then, so we are to be first
    )
    try:
        met = _in_time(join, timeout_seconds)
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
    if not met:
        raise RuntimeError(
            f"the processes must find each other in {timeout_seconds} s, got no answer: see that all of them run, that "
            "num_processes is their number and each has its own process_id, that the host and port of process 0 "
            f"({coordinator_address or 'found by JAX'}) can be reached from the others (firewall, name, proxy "
            "variables), and that nothing else listens there; then start all again"
        )
    memory_of(clients_mesh())  # they talk at once, as Gloo gives up if the first to come has to wait for half a minute


def _in_time(call: Callable[[], None], seconds: float) -> bool:
    """Whether ``call()``, which can't be interrupted, ended in time; raises what it raises."""
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
    """Whether this is process 0, which should be the one to print and to write; True in a single process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0  # does not start the backend needlessly


def _is_address(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _detected_by(environment: Mapping[str, str]) -> str | None:
    """The way of finding the others that JAX must be told to go, as it tries it only then: mpi4py."""
    known_to_jax = "OMPI_MCA_orte_hnp_uri" in environment or "SLURM_PROCID" in environment
    started_by_mpi = any(name in environment for name in STARTED_BY_MPI)
    return "mpi4py" if started_by_mpi and not known_to_jax else None
