"""The contents of a checkpoint: the arrays of a state, their checksums and their description.

about.json    `About` as text, and its CRC-32
arrays.0      the arrays, see array_files.py
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.devices.launch import launch
from fedjax_drift.devices.memory import out_of_memory
from fedjax_drift.devices.mesh import leaf_shardings
from fedjax_drift.errors import DamagedError, OtherRunError
from fedjax_drift.storage import array_files
from fedjax_drift.storage.client_store import ClientStore
from fedjax_drift.storage.identity import few
from fedjax_drift.storage.specification import Specification
from fedjax_drift.types import THREEFRY, PyTree, Record, ServerState

FORMAT = 5
ABOUT = "about.json"
Leaf = jax.Array | np.ndarray


class About(NamedTuple):
    """The metadata of a checkpoint, stored as JSON."""

    format: int
    versions: dict[str, str]
    identity: dict[str, Any]
    round: int
    key: list[int]  # the key of the run, which identifies its seed
    history: list[Record]  # the records of all rounds so far
    leaves: list[list]  # [name, dtype, shape, checksum] of every array


def write_about(folder: Path, text: str) -> None:
    """Writes `About`, already encoded as JSON, with its CRC-32."""
    with open(folder / ABOUT, "w") as file:
        json.dump({"crc32": zlib.crc32(text.encode()), "about": text}, file)
        file.flush()
        os.fsync(file.fileno())


def read_about(folder: Path, t: int) -> About:
    """Returns the metadata of the checkpoint of round t.

    Raises DamagedError for a damaged file, and ConfigurationError for another format.
    """
    with as_damage(f"its {ABOUT} can't be read"):
        written = json.loads((folder / ABOUT).read_bytes())
        about = json.loads(written["about"])
        if zlib.crc32(written["about"].encode()) != written["crc32"] or about["round"] != t:
            raise DamagedError(f"its {ABOUT} does not contain what was written")
    if about["format"] != FORMAT:
        fix = "use the version of fedjax_drift that wrote the checkpoint"
        checks.refuse(f"checkpoints must be of format {FORMAT}", f"{about['format']} in {folder}", fix)
    return About(**about)


# --- a state as arrays ------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """The fields of a state in the order in which they are written. Client states may be on the host, so they are last.

    The key is its words. The first sources of drift have had fields of their own since the first version.
    """

    round: Any
    key: Any
    server: PyTree
    participation: PyTree
    aggregation: PyTree
    clock: PyTree
    sources: dict[str, PyTree]  # the other ones
    clients: PyTree


FIRST = ("participation", "aggregation", "clock")


def stored(state: ServerState, key: Any, clients: PyTree) -> Stored:
    """The fields of a state as they are written."""
    first: Any = [state.sources.get(name, ()) for name in FIRST]
    others = {name: of_source for name, of_source in state.sources.items() if name not in FIRST}
    return Stored(*(state.round, key, state.server, *first, others, clients))


def state_of(read: Stored) -> ServerState:
    """The inverse of `stored`."""
    key = jax.random.wrap_key_data(read.key, impl=THREEFRY)
    state = ServerState(read.round, key, read.server, read.clients, read.sources)
    for name in FIRST:
        state = state.with_source(name, getattr(read, name))
    return state


def arrays_of(state: ServerState) -> Stored:
    """Returns the arrays that are written for a state.

    The key is written as its words. Client states in files are not written. If client states are in host memory, the
    states of the clients that have taken part are written, and after them the initial state, with the id N.
    """
    clients = state.clients
    if isinstance(clients, ClientStore) and clients.in_files:
        clients = ()
    elif isinstance(clients, ClientStore):
        ids = np.append(clients.ids, clients.num_clients)
        clients = {"ids": ids, "states": clients.gather(ids)}
    return stored(state, jax.random.key_data(state.key), clients)


def layout(spec: Specification, arrays: PyTree) -> list[list]:
    """Returns [name, dtype, shape] of every array.

    The result does not depend on the devices, because the shape of client states has N rows, without padding.
    """
    leaves = tree.layout(arrays)
    if spec.states_on_host:
        return leaves
    N = spec.num_clients
    return [[name, dtype, [N, *shape[1:]] if _is_of_clients(name) else shape] for name, dtype, shape in leaves]


def restored_state(spec: Specification, about: About, leaves: list[Leaf], strict: bool) -> ServerState:
    """Returns the state with these arrays. It is the inverse of `arrays_of`. strict: see `Checkpoints.restore`."""
    expected = _shapes(spec.state)
    on_devices: Any = jax.tree.structure(expected._replace(clients=()) if spec.states_on_host else expected)
    n = on_devices.num_leaves
    read: Stored = jax.tree.unflatten(on_devices, leaves[:n])
    state = state_of(read)
    if not spec.states_on_host:
        return spec.admit(state)
    if spec.client_store != "host":
        return spec.reopen(state, about.round, strict)
    ids, *rows = [np.asarray(leaf) for leaf in leaves[n:]]
    if ids[-1] != spec.num_clients:
        raise OtherRunError(
            f"the checkpoint must have the states of {spec.num_clients} clients, got {ids[-1]} clients: restore it "
            "with the data of its run"
        )
    states = jax.tree.unflatten(jax.tree.structure(expected.clients), rows)
    initial = jax.tree.map(lambda leaf: leaf[-1], states)
    store = ClientStore.create(initial, spec.num_clients, None, spec.store_identity(state))
    if about.round:
        store.commit(ids[:-1], jax.tree.map(lambda leaf: leaf[:-1], states), about.round)
    return spec.admit(state._replace(clients=store))


def read_arrays(folder: Path, spec: Specification, about: About) -> list[Leaf]:
    """Reads every array to the devices or the memory where this simulation keeps it, and compares the checksums.

    Raises OtherRunError if the arrays do not fit the simulation, and DamagedError if a file is damaged.
    """
    _check_arrays(folder.parent, spec, about)
    with as_damage("its arrays can't be read"):
        leaves = _read_all(folder, spec, about)
    for (name, *_, written), read in zip(about.leaves, checksums(spec, leaves), strict=True):
        if read != written:
            raise DamagedError(f"its array {name} does not contain what was written")
    return leaves


def _check_arrays(path: Path, spec: Specification, about: About) -> None:
    def described(leaves: list[list]) -> dict[str, str]:
        """Returns dtype and shape of each array by name.

        The shape of client states on the host lacks the first axis, whose length is the number of stored clients.
        """
        return {
            name: f"{dtype}{shape[spec.states_on_host and _is_of_clients(name) :]}" for name, dtype, shape, *_ in leaves
        }

    expected = _shapes(spec.state)
    if spec.states_on_host:
        clients = {"ids": np.zeros(0, np.int64), "states": expected.clients} if spec.client_store == "host" else ()
        expected = expected._replace(clients=clients)
    between = "in the checkpoint, not"
    if wrong := tree.differences(described(about.leaves), described(layout(spec, expected)), between):
        raise OtherRunError(
            f"the checkpoints in {path} have other arrays than this simulation: {few(wrong)}: restore them with the "
            "model and the algorithm of their run, or choose another folder"
        )


def _read_all(folder: Path, spec: Specification, about: About) -> list[Leaf]:
    expected = _shapes(spec.state)
    if spec.states_on_host:
        expected = expected._replace(clients=())
    of, of_source = spec.shardings, spec.shardings.sources
    prefix: Any = Stored(of.round, of.key, of.server, of_source, of_source, of_source, of_source, of.clients)
    shardings = jax.tree.leaves(leaf_shardings(prefix, expected))
    targets = [(leaf.shape, at) for leaf, at in zip(jax.tree.leaves(expected), shardings, strict=True)]
    targets += [(shape, None) for _, _, shape, _ in about.leaves[len(targets) :]]  # to host memory
    dtypes = [jnp.dtype(dtype) for _, dtype, _, _ in about.leaves]
    files = array_files.ArrayFiles(folder)
    return [files.array(i, dtypes[i], shape, sharding) for i, (shape, sharding) in enumerate(targets)]


def _is_of_clients(name: str) -> bool:
    return name.startswith(".clients")


def _shapes(state: ServerState) -> Stored:
    """Returns the shapes of the arrays that are written for a state, given its shapes."""
    return stored(state, jax.ShapeDtypeStruct((2,), jnp.uint32), state.clients)


# --- checksums --------------------------------------------------------------------------------------------------------


def checksums(spec: Specification, leaves: list[Leaf]) -> list[int]:
    """Returns one checksum per array of a state, computed on the devices that hold the array.

    The padding of client states after the N clients is left out, because its length depends on the devices.
    """
    first_client = len(jax.tree.leaves(_shapes(spec.state)._replace(clients=())))
    on_devices = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    rows = tuple(spec.num_clients if i >= first_client else None for i in on_devices)
    computed = launch(spec.mesh, functools.partial(_sums, rows), list(on_devices.values()))
    known = dict(zip(on_devices, np.asarray(computed).tolist(), strict=True))
    return [known[i] if i in known else tree.crc32(np.asarray(leaf)) for i, leaf in enumerate(leaves)]


@functools.partial(jax.jit, static_argnums=0)
def _sums(rows: tuple[int | None, ...], leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([checksum(leaf, n) for leaf, n in zip(leaves, rows, strict=True)])


def checksum(array: jax.Array, rows: int | None = None) -> jax.Array:
    """Returns the sum over i of (2 i + 1) times word i, modulo 2^32, as uint32 [].

    The factors are odd, so every change of a single bit changes the sum. A sum of integers does not depend on the order
    of its terms. Therefore it does not depend on the devices.

    rows: only the first ``rows`` rows of the array are summed. Default: all.
    """
    words = array.astype(jnp.uint8) if array.dtype == bool else array
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[words.dtype.itemsize]
    words = lax.bitcast_convert_type(words, unsigned).astype(jnp.uint32)
    if rows is not None:
        words = jnp.where(lax.broadcasted_iota(jnp.int32, words.shape, 0) < rows, words, 0)
    words = words.reshape(-1)
    return (words * (2 * lax.iota(jnp.uint32, words.size) + 1)).sum(dtype=jnp.uint32)


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_damage(what: str) -> Iterator[None]:
    """Raises DamagedError for every exception in the block, except for MemoryError and errors of device memory."""
    try:
        yield
    except (DamagedError, MemoryError):
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise DamagedError(f"{what}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Returns the first line of an error's message, shortened."""
    return checks.first_line(error)[:150]
