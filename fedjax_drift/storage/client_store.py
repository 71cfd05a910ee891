"""Client states outside the devices: in host memory, or in files. Only clients that have taken part need space.

    store = ClientStore.create(initial, num_clients=100_000)    # path=... for files; ClientStore.open opens old ones
    states = store.gather(ids)                                  # leaves [K, ...]
    store.commit(ids, new_states, round=1)

The state of a client is stored as one record in a numbered slot. The record has the bytes of all leaves. A table [N]
has the slot of each client. If a client has never taken part, its slot is -1, and its state is ``initial``.

A commit never overwrites a slot that is in the table. It writes the new records to free slots and then replaces the
whole table. After that the old slots are free. Therefore a store always has the state of its last complete commit, even
if a kill, Ctrl-C or a full disk interrupts the next commit. If n clients have taken part, a store without pins needs
space for up to n + K records.

A pin keeps the table of a round. The slots in this table are not free either. client_files.py describes the files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.disk import explained
from fedjax_drift.errors import ConfigurationError, DamagedError, OtherRunError
from fedjax_drift.storage import client_files
from fedjax_drift.storage.client_files import INDEX, INITIAL, STATES, ClientFiles, damaged
from fedjax_drift.types import PyTree

ALIGNMENT = 64  # bytes; JAX's CPU backend uses arrays with this alignment without copying them


class ClientMemory:
    """Records in host memory, with the methods of `ClientFiles`."""

    def __init__(self) -> None:
        self._records: dict[int, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._records.values()))

    def reserve(self, end: int) -> None:
        """Memory is only reserved when a record is written."""

    def read(self, slot: int, client: int) -> np.ndarray:
        return self._records[slot]

    def write(self, slot: int, client: int, record: np.ndarray) -> None:
        self._records[slot] = record

    def close(self) -> None:
        self._records = {}


class _Table(NamedTuple):
    """The slots of the records. A table is immutable. A commit replaces it as a whole."""

    round: int  # number of committed rounds
    slots: np.ndarray  # int32 [N], -1: the client has never taken part
    free: np.ndarray  # int32 [F], slots below `end` that neither a client nor a pin uses
    end: int  # all slots >= end have never been used


def _table(t: int, slots: np.ndarray, pins: Mapping[int, np.ndarray], end: int = 0) -> _Table:
    """Returns the table of round t with these slots.

    pins: the slots of each pinned round. end: a lower bound of the table's ``end``.
    """
    tables = [slots, *pins.values()]
    end = max(end, *(int(of.max(initial=-1)) + 1 for of in tables))
    used = np.zeros(end, bool)
    for of in tables:
        used[of[of >= 0]] = True
    return _Table(t, slots, np.flatnonzero(~used).astype(np.int32), end)


class ClientStore:
    """The states of N clients, outside the devices. `create` and `open` return a store, and ``with`` closes it.

    A store must not be used by several threads at the same time.
    """

    def __init__(self, initial: PyTree, num_clients: int, identity: Mapping[str, Any]) -> None:
        self.num_clients = num_clients
        leaves, structure = jax.tree.flatten(initial)
        self._structure: Any = structure
        self._leaves = [np.array(leaf, order="C") for leaf in leaves]
        self._layout = tree.layout(jax.tree.unflatten(self._structure, self._leaves))
        self._edges = np.cumsum([0, *(leaf.nbytes for leaf in self._leaves)]).tolist()  # of the leaves in a record
        self._initial = np.concatenate([np.zeros(0, np.uint8), *(leaf.reshape(-1).view("u1") for leaf in self._leaves)])
        self._header = client_files.header(self.num_clients, self._layout, identity)
        self._pins: dict[int, np.ndarray] = {}  # round -> slots, int32 [N]
        self._table: _Table | None = _table(0, np.full(self.num_clients, -1, np.int32), {})  # None: read the index
        self._records: ClientMemory | ClientFiles | None = None  # None: closed

    @classmethod
    def create(
        cls,
        initial: PyTree,
        num_clients: int,
        path: str | os.PathLike[str] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> ClientStore:
        """Returns a new client store at round 0, in which all clients have the initial state.

        Args:
          initial: the state of ONE client before its first round, as arrays without a client axis.
          num_clients: N.
          path: a new or empty folder for the states. Default: host memory. The folder may also have a store that was
            created with the same arguments and has no commits. (A run that ended before its first save leaves such a
            store.)
          identity: a description of the run (federation, algorithm, ...) that `open` compares.

        Raises:
          InUseError: the folder is in use.
          ValueError: the folder has other files or cannot be written.
        """
        store = cls(initial, num_clients, identity or {})
        if path is None:
            store._records = ClientMemory()
            return store
        path = Path(path).absolute()
        if path.exists() and not path.is_dir():
            checks.refuse("path must be a folder", f"the file {path}", "choose another path")
        if (path / INDEX).exists():
            with contextlib.suppress(DamagedError, OtherRunError):
                old = cls.open(path, initial, num_clients, identity)
                if not (old.round or old.seen) and np.array_equal(old._initial, store._initial):
                    return old
                old.close()
            fix = "choose another folder, or open this store with Simulation.reopen"
            checks.refuse("path must be a new or empty folder", f"{path}, which has a client store", fix)
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            client_files.check_empty(path)
            files = ClientFiles(path, len(store._initial), create=True)
        with files.closed_after_errors(), explained(path):
            client_files.check_empty(path)  # again, because the folder is locked now
            files.prepare(store._header, 0, store._now().slots)
            files.reserve(0)
            files.write(INITIAL, num_clients, store._initial)
            files.publish()
        store._records = files
        return store

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        initial: PyTree,
        num_clients: int,
        identity: Mapping[str, Any] | None = None,
        round: int | None = None,  # noqa: A002
        strict: bool = True,
    ) -> ClientStore:
        """Opens the client store in a folder, with the states of its last commit. After an error the files are
        unchanged.

        Args:
          path: the folder.
          initial: as in `create`. Only its structure, shapes and dtypes are used. The initial state itself is read from
            the folder.
          num_clients: as in `create`.
          identity: as in `create`.
          round: a pinned round. The folder is set back to this round. Default: the last commit.
          strict: whether ``identity`` must equal that of the folder. If False, a warning lists the differences.

        Raises:
          OtherRunError: the store was created with other arguments. The message lists the differences.
          InUseError: the folder is in use.
          ValueError: the folder has no client store, is damaged, or has another format.
        """
        store = cls(initial, num_clients, identity or {})
        path = Path(path).absolute()
        name = INDEX if round is None else client_files.pin_file(round)
        for file in (name, STATES):
            if not (path / file).is_file():
                raise DamagedError(f"path must be the folder of a client store, got {path}, which has no {file}")
        with explained(path):
            files = ClientFiles(path, len(store._initial), create=False)
        with files.closed_after_errors():
            header, slots = files.read_index(name)
            if round not in (None, header["round"]):
                raise damaged(path, f"its file {name} is of round {header['round']}")
            client_files.check_same(path, header, store._header, strict)
            files.check_size(int(slots.max(initial=-1)) + 1)
            store._initial = files.read(INITIAL, num_clients)
            store._pins = dict(files.read_pins())
            if round is not None:
                with explained(path):
                    files.prepare(store._header, round, slots)
                    files.publish()
        store._table = _table(header["round"], slots, store._pins)
        files.end = store._table.end
        store._records = files
        return store

    @property
    def round(self) -> int:
        """The number of committed rounds: 0 at first, then the ``round`` of the last `commit`."""
        return self._now().round

    @property
    def seen(self) -> int:
        """Number of clients whose state has been committed."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """The number of bytes used in memory or on disk.

        Without pins, these are 4 N bytes for the table, one record per client that has taken part, and up to about K
        more records.
        """
        return self._opened().nbytes + self._now().slots.nbytes

    @property
    def in_files(self) -> bool:
        """Whether the states are in a folder. If False, they are in host memory."""
        return isinstance(self._records, ClientFiles)

    @property
    def ids(self) -> np.ndarray:
        """The ids of the clients whose state has been committed, [seen], in ascending order."""
        return np.flatnonzero(self._now().slots >= 0)

    @property
    def pins(self) -> list[int]:
        """The pinned rounds, in ascending order."""
        return sorted(self._pins)

    def pin(self) -> None:
        """Keeps the states of the current round in their files, so that `open` can return to it.

        The records are not copied. Later commits do not overwrite them, so the store grows by the records that later
        rounds change. Raises OSError if the table could not be written.
        """
        table, files = self._now(), self._opened()
        assert isinstance(files, ClientFiles)
        files.pin(table.round)
        self._pins[table.round] = table.slots
        self._table = _table(table.round, table.slots, self._pins, table.end)

    def unpin(self, round: int) -> None:  # noqa: A002
        """Deletes the pin of this round, if there is one. Records that are not needed any more become free."""
        table, files = self._now(), self._opened()
        if isinstance(files, ClientFiles) and self._pins.pop(round, None) is not None:
            files.unpin(round)
            self._table = _table(table.round, table.slots, self._pins, table.end)

    def gather(self, ids: np.ndarray | Sequence[int]) -> PyTree:
        """Returns the states of the clients ``ids`` [K] after the last commit, leaves [K, ...].

        A client that has never taken part has the state ``initial``. The id N, which stands for no client, also gives
        ``initial``. The arrays are new copies. On a CPU, `jax.device_put` may use their memory without copying them, so
        do not write to the arrays after that call.

        Raises DamagedError if a record in the files is damaged.
        """
        table, records, ids = self._now(), self._opened(), np.asarray(ids)
        slots = np.append(table.slots, np.int32(-1))[ids]
        leaves = [_aligned((len(ids), *leaf.shape), leaf.dtype) for leaf in self._leaves]
        rows = self._rows(leaves, len(ids))
        for k, slot in enumerate(slots.tolist()):
            record = self._initial if slot < 0 else records.read(slot, int(ids[k]))
            for row, (start, stop) in zip(rows, pairwise(self._edges), strict=True):
                row[k] = record[start:stop]
        return jax.tree.unflatten(self._structure, leaves)

    def commit(
        self,
        ids: np.ndarray | Sequence[int],
        states: PyTree,
        round: int,  # noqa: A002
        keep: np.ndarray | None = None,
    ) -> None:
        """Stores the new states of the clients of a round. After an error, no state has been stored.

        Args:
          ids: [K] client ids, all different. The id N, which stands for no client, may be repeated.
          states: leaves [K, ...], with the structure, shapes and dtypes of ``initial``.
          round: the number of completed rounds, including this one.
          keep: bool [K]. If an entry is False, the new state is not stored, and the client keeps its old state.
            Default: all True.

        Raises:
          OSError: the disk is full, or the folder does not exist any more. The round can be repeated when there is
            space again.
          MemoryError: there is not enough host memory.
        """
        table, records, ids = self._now(), self._opened(), np.asarray(ids)
        rows = self._rows([np.ascontiguousarray(leaf) for leaf in self._structure.flatten_up_to(states)], len(ids))
        present = np.flatnonzero((ids < self.num_clients) & (True if keep is None else keep))
        recycled = table.free[: len(present)]
        end = table.end + len(present) - len(recycled)
        new = np.concatenate([recycled, np.arange(table.end, end, dtype=np.int32)])
        slots = table.slots.copy()
        slots[ids[present]] = new
        with _kept(table.round, round):
            records.reserve(end)
            for k, slot in zip(present.tolist(), new.tolist(), strict=True):
                records.write(slot, int(ids[k]), np.concatenate([self._initial[:0], *(row[k] for row in rows)]))
            following = _table(round, slots, self._pins, end)
            if isinstance(records, ClientFiles):
                records.prepare(self._header, round, slots)
                self._table = None  # if Ctrl-C interrupts the next line, the index says which round is stored
                records.publish()
        self._table = following

    def close(self) -> None:
        """Frees the memory, or unlocks the folder. Nothing is written, because commits are stored immediately."""
        if self._records is not None:
            self._records.close()
        self._records = None

    def __enter__(self) -> ClientStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._records is None:
            return f"ClientStore({self.num_clients} clients, closed)"
        where = f"in {self._records.path}" if isinstance(self._records, ClientFiles) else "in host memory"
        megabytes = f"{self.nbytes / 1e6:.1f} MB"
        return f"ClientStore({self.num_clients} clients, {self.seen} seen, round {self.round}, {megabytes} {where})"

    def _opened(self) -> ClientMemory | ClientFiles:
        """Returns the records. Raises ConfigurationError if the store is closed."""
        if self._records is None:
            raise ConfigurationError("the client store is closed: open it again, or use it before closing it")
        return self._records

    def _now(self) -> _Table:
        """Returns the table of the last commit."""
        if self._table is None:
            files = self._opened()
            assert isinstance(files, ClientFiles)
            header, slots = files.read_index(INDEX)
            self._table = _table(header["round"], slots, self._pins, files.end)
        return self._table

    def _rows(self, leaves: Sequence[np.ndarray], K: int) -> list[np.ndarray]:
        """Returns the memory of leaves [K, ...] as bytes, each uint8 [K, bytes]."""
        return [
            leaf.reshape(-1).view(np.uint8).reshape(K, stop - start)
            for leaf, (start, stop) in zip(leaves, pairwise(self._edges), strict=True)
        ]


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array whose first byte is aligned."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


@contextlib.contextmanager
def _kept(before: int, t: int) -> Iterator[None]:
    """Replaces an OSError in the block by an OSError that names the round whose states remain."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"the client states of round {t} could not be stored ({error.strerror}): the client store stays at round "
            f"{before}, and no states are lost; free some disk space or repair the folder, and repeat the round",
        ) from error
