"""Communication between the processes of a mesh: common decisions, and work that only the first process does.

`devices.distributed` connects the processes. Every function that takes a mesh also works with a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift.devices.launch import launch
from fedjax_drift.errors import ConfigurationError


def spans_processes(mesh: Mesh) -> bool:
    """Whether some of the mesh's devices belong to other processes."""
    return bool(mesh.is_multi_process)


def leads(mesh: Mesh) -> bool:
    """Whether this is the first process of the mesh, that is, the process that has the mesh's first device."""
    return mesh.devices.flat[0].process_index == jax.process_index()


def agree(mesh: Mesh, numbers: Sequence[int] = (), flags: Sequence[bool] = ()) -> tuple[Sequence[int], Sequence[bool]]:
    """Makes all processes of the mesh use the same values for decisions that depend on clocks or signals.

    With several processes, all of them must call this function at the same point of the script. They exchange a few
    bytes. The exchange runs after all programs that were launched before. With one process, the arguments are returned
    unchanged.

    Args:
      numbers: integers in the range of int32.
      flags: booleans.

    Returns:
      The numbers of the first process; and for each flag, whether it is True in any process.
    """
    if not spans_processes(mesh):
        return numbers, flags
    of_this_process = np.array([[*numbers, *flags]], np.int32)
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    sent = jax.make_array_from_callback((mesh.size, of_this_process.size), sharding, lambda part: of_this_process)
    received: Any = np.asarray(launch(mesh, _gather_to_all(mesh), sent))  # [D, ...]
    return received[0, : len(numbers)].tolist(), received[:, len(numbers) :].any(0).tolist()


@cache
def _gather_to_all(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda parts: parts, out_shardings=NamedSharding(mesh, P()))


def first_does(mesh: Mesh, call: Callable[[], Any]) -> None:
    """Calls ``call()`` in the first process of the mesh only.

    All processes must call this function. The call starts when all processes have arrived, and all of them wait until
    it has ended. If it raises ValueError or OSError, the first process raises that error and the other processes raise
    ValueError.
    """
    agree(mesh)
    failure: Exception | None = None
    if leads(mesh):
        try:
            call()
        except (ValueError, OSError) as error:
            failure = error
    _, (failed,) = agree(mesh, flags=[failure is not None])
    if failure is not None:
        raise failure
    if failed:
        raise ConfigurationError("the first process raised an error: see the message of the first process")
