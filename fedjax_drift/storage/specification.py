"""What storage has to know of a simulation: `Simulation.specification`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.random import key_data
from jax.sharding import Mesh

from fedjax_drift.storage.identity import without_code
from fedjax_drift.types import ServerState


class Specification(NamedTuple):
    """The run that a checkpoint or a client store belongs to."""

    mesh: Mesh
    num_clients: int  # N
    state: ServerState  # shapes and dtypes; with states on the host ``clients`` are those of one client, [1, ...]
    shardings: ServerState  # of each part of a state
    client_store: str  # "device", "sharded", "host" or a folder
    identity: dict[str, Any]  # all that results depend on, see identity.py
    admit: Callable[[Any], ServerState]  # a state that was read -> the same on the devices, checked
    reopen: Callable[[ServerState, int], ServerState]  # a state without client states -> with those of the folder

    @property
    def states_on_host(self) -> bool:
        """Whether client states are kept in host memory or in files."""
        return self.client_store not in ("device", "sharded")

    def store_identity(self, state: ServerState) -> dict[str, Any]:
        """What a client store must agree on: what checkpoints ask for, and the key."""
        return {"key": str(key_words(state))} | without_code(self.identity)


def key_words(state: ServerState) -> list[int]:
    """The words of the state's key: another seed is another run."""
    return np.asarray(key_data(state.key)).tolist()
