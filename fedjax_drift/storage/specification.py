"""The description of a simulation that checkpoints and client stores need: `Simulation.specification`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.random import key_data
from jax.sharding import Mesh

from fedjax_drift.types import ServerState

ON_DEVICES = ("device", "sharded")  # values of ``bank`` that keep client states on the devices


class Specification(NamedTuple):
    """A description of the simulation that a checkpoint or a client store belongs to."""

    mesh: Mesh
    num_clients: int  # N
    state: ServerState  # shapes and dtypes; with states on the host, ``clients`` has one client, [1, ...]
    shardings: ServerState  # the sharding of each field of a state
    client_store: str  # "device", "sharded", "host" or a folder
    identity: dict[str, Any]  # everything that the results depend on, see identity.py
    key_of_state: Callable[[Any], jax.Array]  # checks the key of `Simulation.init`, and returns that of the state
    admit: Callable[[Any], ServerState]  # checks a state that was read and moves it to the devices
    reopen: Callable[[ServerState, int, bool], ServerState]  # (state, round, strict): adds the folder's client states

    @property
    def states_on_host(self) -> bool:
        """Whether client states are kept in host memory or in files."""
        return self.client_store not in ON_DEVICES

    def store_identity(self, state: ServerState) -> dict[str, Any]:
        """Returns the identity of a client store: the identity of the simulation, and the key."""
        return {"key": str(key_words(state))} | self.identity


def key_words(state: ServerState) -> list[int]:
    """Returns the words of the state's key. They identify the seed of a run."""
    return np.asarray(key_data(state.key)).tolist()
