"""Decides where the arrays of a simulation are kept, and how many clients train side by side on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, get_args
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, spec
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.launch import traced
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.devices.mesh import AXIS, MODEL_AXIS, clients_mesh, is_described, num_teams, over_team, put, team_size
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.model import Model
from fedjax_drift.recipes import Frozen
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.initial import init
from fedjax_drift.simulation.lanes import Lane, fastest
from fedjax_drift.spec import Count, Fix, Flag, checked
from fedjax_drift.storage.specification import ON_DEVICES
from fedjax_drift.tree import nbytes
from fedjax_drift.types import THREEFRY, PyTree, ServerState


def _mesh(name: str, mesh: Any, fix: str) -> Mesh:
    if not isinstance(mesh, Mesh) or mesh.axis_names not in ((AXIS,), (AXIS, MODEL_AXIS)):
        checks.refuse(f'{name} must be a jax.sharding.Mesh with the axis "{AXIS}"', checks.shown(mesh), fix)
    return mesh


def _bank(name: str, bank: Any, fix: str) -> str:
    """The place of client states as a string. A folder is returned as its path."""
    folder = checks.path(name, bank, '"auto", "device", "sharded", "host" or a folder')
    known = get_args(Bank)
    if isinstance(bank, str) and os.sep not in bank and bank not in known and (meant := checks.nearest(bank, known)):
        fix = f"{meant.removeprefix(': ')} For a folder with this name, pass pathlib.Path({bank!r})"
        checks.refuse(f"{name} must be one of {known}, or a folder", repr(bank), fix)
    return str(folder if isinstance(bank, str) else folder.absolute())  # Path("host") is a folder of that name


Auto = Literal["auto"]
Bank = Literal["auto", "device", "sharded", "host"]
OR_AUTO = Fix('or pass "auto"')


@dataclass(frozen=True)
@checked
class Placement:
    """Options for the placement of examples and client states on devices. Pass it as ``Simulation(placement=)``.

    The placement does not change the results, except for rounding errors.

    Attributes:
      lanes: L, the number of lanes: L clients train side by side (vmap) on one device.

        None means 1. "auto" is 1 on a CPU, where clients train fastest one after another. On a GPU it is a quarter of
        the clients that one device trains in a round, but at least 16 and at most 128. On a TPU it is the largest power
        of two, up to 128, with which the images in the convolutions of a step need at most 16 MiB, so that they fit on
        the chip. "auto" is smaller if so many lanes would take more than half of a device's memory, or if many would be
        idle in its last group. L is never larger than the number of clients that one device trains in a round.
      mesh: The devices: a mesh such as that of `clients_mesh`. None: all devices of all processes.
      devices_per_client: The number of devices that train a client together. It must divide the number of devices.

        Use this if the frozen parameters of a model (`fd.models.lora`) do not fit in the memory of one device. With 4,
        each team of 4 devices trains a client. The frozen matrices, the products with them and the client states are
        sharded over the team. Everything else is replicated in the team. In these docs, "device" then means a team.
      stream: Whether the training examples are kept on the host, in memory or in a memory-mapped file. The examples of
        each cohort are then prefetched while the previous round is trained. "auto": True if the examples take more than
        half of a device's memory and cannot be sharded, or if they take more than half of the memory of all devices
        together.
      shard_data: Whether the training examples are sharded over the devices. False: they are replicated.

        If they are sharded, all examples of a client are on one device, and in every round the devices exchange the
        examples of the cohort. With several processes, each process reads only the examples of the clients on its
        devices. "auto": True if the examples take more than half of a device's memory, but not more than half of the
        memory of all devices together.
      bank: Where client states are kept.

        - "device": replicated on every device.
        - "sharded": sharded over the devices.
        - "host": in the host memory of every process.
        - A path: in files in this folder.
        - "auto": "device" if all client states together take at most half of a device's memory. With several devices,
          two copies of the cohort's states are added to these, because every device receives the new states of all
          others. Otherwise "sharded" if one device's share of all client states takes at most half of its memory.
          Otherwise "host".

        With "host" or a path, only clients that have taken part need space. Every round overwrites the client states in
        place, so the `ServerState` of the previous round becomes invalid.
      donate: Whether `Simulation.round_fn` may overwrite the state that is passed to it. This saves the memory of one
        state. The old state is then invalid.
      eval_batch_size: Examples per batch in `Simulation.evaluate`.
    """

    lanes: Annotated[Count, OR_AUTO] | Auto | None = "auto"
    mesh: Annotated[Mesh, spec.Spec(_mesh, "instance"), Fix("fd.clients_mesh() returns one")] | None = None
    devices_per_client: Count = field(default=1, kw_only=True)
    stream: Annotated[Flag, OR_AUTO] | Auto = "auto"
    shard_data: Annotated[Flag, OR_AUTO] | Auto = "auto"
    bank: Annotated[str | os.PathLike, spec.Spec(_bank, "path")] | Bank = "auto"
    donate: Flag = False
    eval_batch_size: Count = 500

    def devices(self) -> Mesh:
        """Returns the mesh, with the axis type that compiled rounds need."""
        devices = jax.devices() if self.mesh is None else list(self.mesh.devices.flat)
        together = self.devices_per_client
        if together == 1 and self.mesh is not None:
            together = team_size(self.mesh)
        mesh = clients_mesh(devices, together)
        if not mesh.local_devices:
            checks.refuse("mesh must have a device of this process", "none", "make it, and use it, where there is one")
        return mesh

    def lanes_for(self, capacity: int, mesh: Mesh, lane_on: Callable[[str], Lane]) -> int:
        """Returns L for cohorts of up to ``capacity`` clients. lane_on: returns what a lane needs on a platform."""
        per_device = -(-capacity // num_teams(mesh))
        if checks.is_auto(self.lanes):
            platform = mesh.devices.flat[0].platform
            return 1 if platform == "cpu" else fastest(per_device, memory_of(mesh), lane_on(platform))
        return 1 if self.lanes is None else min(int(self.lanes), per_device)

    def rows_at(self, data: FederatedData, mesh: Mesh) -> str:
        """Returns where the training examples are kept: "devices" (replicated), "parts" (sharded) or "host"."""
        if self.shard_data is True:
            if self.stream is True:
                what = "shard_data=True keeps the examples on the devices, stream=True on the host"
                checks.refuse(what, "both", "choose one")
            if data.redeal is not None:
                what = "shard_data must be False for data.redealt(), which pools the examples of a cohort"
                checks.refuse(what, "True")
        needed, D = data.x.nbytes + data.y.nbytes, num_teams(mesh)
        # Examples are counted in int32, including the padding of sharded examples.
        fits_int32, fits_sharded = len(data.x) < 2**31, len(data.x) + D * int(data.sizes.max()) < 2**31
        if self.shard_data is True and not fits_sharded:
            checks.refuse("shard_data=True needs fewer than 2**31 examples", len(data.x), "use stream=True")
        if self.stream is True:
            return "host"
        if self.shard_data is True:
            return "parts" if D > 1 else "devices"
        if "auto" not in (self.stream, self.shard_data):
            return "devices"
        room = memory_of(mesh) / 2
        if needed <= room and fits_int32:
            return "devices"
        can_shard = self.shard_data == "auto" and D > 1 and data.redeal is None and fits_sharded
        if can_shard and (needed <= room * D or self.stream is False):
            return "parts"
        return "host" if self.stream == "auto" else "devices"

    def states_at(self, client: PyTree, N: int, K: int, mesh: Mesh) -> str:
        """Returns where N client states like ``client`` are kept: "device", "sharded", "host" or a folder.

        K: the largest number of clients of a round.
        """
        if not checks.is_auto(self.bank):
            chosen = str(self.bank)
            if chosen not in (*ON_DEVICES, "host") and spans_processes(mesh):
                what = 'bank must be "device", "sharded" or "host" over several processes'
                checks.refuse(what, f"the folder {chosen}", "its files are for one process")
            return chosen
        D = num_teams(mesh)
        # The devices of a team share the states, except for biases and other small arrays.
        needed, room = N * nbytes(client) // team_size(mesh), memory_of(mesh) / 2
        copies = 2 * K * nbytes(client) if D > 1 else 0
        if needed + copies <= room:
            return "device"
        chosen = "sharded" if needed <= room * D else "host"
        of_cohort = f" and two copies of those of {K} clients" if copies else ""
        checks.warn(
            f"{N} client states{of_cohort} need {(needed + copies) / 1e9:.1f} GB, more than half of a device's memory: "
            f"using bank={chosen!r}"
        )
        return chosen


def shardings_of(engine: Engine, on_host: bool) -> ServerState:
    """Returns the sharding of each field of a state. For the client states of teams, a tree of shardings.

    on_host: whether client states are kept on the host or in files.
    """
    mesh, axis = engine.mesh, AXIS if engine.sharded else None
    everywhere = NamedSharding(mesh, P())
    clients: PyTree = NamedSharding(mesh, P(axis))
    if team_size(mesh) > 1 and not on_host:
        sizes = jax.ShapeDtypeStruct((engine.num_clients,), np.int32)
        state = jax.eval_shape(partial(init, engine), jax.random.key(0, impl=THREEFRY), None, sizes)
        clients = jax.tree.map(lambda a: NamedSharding(mesh, P(axis, *over_team(a.shape[1:], mesh))), state.clients)
    fields: dict[str, PyTree] = dict.fromkeys(ServerState._fields, everywhere)
    return ServerState(**fields | {"clients": clients})


_PLACED: WeakKeyDictionary[Frozen, dict[Mesh, PyTree]] = WeakKeyDictionary()


def frozen_parameters(model: Model, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the frozen parameters of a model, on every device, or sharded over each team of devices.

    Simulations with the same parameters share them.
    """

    def place(frozen: Frozen) -> PyTree:
        copies = _PLACED.setdefault(frozen, {})
        if mesh not in copies:
            with jax.ensure_compile_time_eval():  # a Simulation made inside jax.jit must not leave tracers here
                arrays = frozen.shapes if is_described(mesh) else frozen.arrays()
                copies[mesh] = put(
                    arrays, jax.tree.map(lambda a: NamedSharding(mesh, over_team(jnp.shape(a), mesh)), arrays)
                )
        return copies[mesh]

    return tuple(place(frozen) for frozen in model.frozen)


def moved(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns the tree with these shardings (one sharding, or a tree of shardings). Tracers are returned unchanged."""
    if traced(tree):
        return tree
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    if all(getattr(leaf, "sharding", None) == sharding for leaf, sharding in pairs):
        return tree
    return put(tree, shardings)


def on_host(state: ServerState) -> ServerState:
    """Returns a copy of what a cohort is selected from: the round, the key and the state of the participation rule.

    The copy is on a CPU device, or on the first device if JAX has no CPU device (JAX_PLATFORMS=cuda). With it, the next
    cohort is selected on the CPU while an accelerator is busy with the previous round.
    """
    rule = {name: of_source for name, of_source in state.sources.items() if name == "participation"}
    words, rule = jax.device_get((jax.random.key_data(state.key), rule))
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    words, rule = jax.device_put((words, rule), device)
    key = jax.random.wrap_key_data(words, impl=THREEFRY)
    return at_round(state._replace(key=key, server=(), clients=(), sources=rule), int(state.round))


def at_round(state: ServerState, t: int) -> ServerState:
    """Returns the state with the number of another round, on the host."""
    return state._replace(round=np.int32(t))  # type: ignore[arg-type]
