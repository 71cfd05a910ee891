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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.disk import explained
from fedjax_drift.errors import ConfigurationError, DamagedError, OtherRunError
from fedjax_drift.storage import client_files
from fedjax_drift.storage.client_files import INDEX, INITIAL, STATES, ClientFiles, damaged
from fedjax_drift.storage.client_memory import ClientMemory
from fedjax_drift.storage.identity import few
from fedjax_drift.types import PyTree

MOST_CLIENTS = 2**30  # so that the indices of N + K slots fit in int32
ALIGNMENT = 64  # bytes; JAX's CPU backend uses arrays with this alignment without copying them


class _Table(NamedTuple):
    """The slots of the records. A table is immutable. A commit replaces it as a whole."""

    round: int  # number of committed rounds
    slots: np.ndarray  # int32 [N], -1: the client has never taken part
    seen: int
    free: np.ndarray  # int32 [F], slots below `end` that neither a client nor a pin uses
    end: int  # all slots >= end have never been used
    pinned: np.ndarray  # bool [end], whether a pin uses the slot


def _table(t: int, slots: np.ndarray, pins: Mapping[int, np.ndarray], end: int = 0) -> _Table:
    """Returns the table of round t with these slots.

    pins: the slots of each pinned round. end: a lower bound of the table's ``end``.
    """
    end = max(end, *(int(held.max(initial=-1)) + 1 for held in (slots, *pins.values())), 0)
    pinned, taken = np.zeros(end, bool), np.zeros(end, bool)
    for held in pins.values():
        pinned[held[held >= 0]] = True
    taken[slots[slots >= 0]] = True
    return _Table(t, slots, int(taken.sum()), np.flatnonzero(~(taken | pinned)).astype(np.int32), end, pinned)


class ClientStore:
    """The states of N clients, outside the devices. `create` and `open` return a store, and ``with`` closes it.

    A store must not be used by several threads at the same time.
    """

    def __init__(self, initial: PyTree, num_clients: int, identity: Mapping[str, Any]) -> None:
        self.num_clients = checks.integer("num_clients", num_clients, 1, MOST_CLIENTS)
        leaves, structure = jax.tree.flatten(initial)
        self._structure: Any = structure
        self._initial = [np.array(leaf, order="C") for leaf in leaves]
        self._layout = tree.layout(jax.tree.unflatten(self._structure, self._initial))
        if objects := [name for name, dtype, _ in self._layout if dtype == "object"]:
            checks.refuse("client states must be numeric arrays", f"Python objects at {checks.listed(objects)}")
        self._rows = [leaf.reshape(-1).view(np.uint8) for leaf in self._initial]  # [bytes] each
        self._header = client_files.header(self.num_clients, self._layout, identity)
        self._pins: dict[int, np.ndarray] = {}  # round -> slots, int32 [N]
        self._table = _table(0, np.full(self.num_clients, -1, np.int32), self._pins)
        self._records: ClientMemory | ClientFiles | None = None  # None: closed
        self._pending: tuple[_Table, int] | None = None

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
          num_clients: N, in 1..2**30.
          path: a new or empty folder for the states. Default: host memory. The folder may also have a store that was
            created with the same arguments and has no commits. (A run that ended before its first save leaves such a
            store.)
          identity: a description of the run (federation, algorithm, ...) that `open` compares.

        Raises:
          InUseError: the folder is in use.
          ValueError: an argument is out of range, or the folder has other files or cannot be written.
        """
        store = cls(initial, num_clients, identity or {})
        if path is None:
            store._records = ClientMemory(store._record_bytes)
            return store
        path = Path(path).absolute()
        if path.exists() and not path.is_dir():
            checks.refuse("path must be a folder", f"the file {path}", "choose another path")
        if (path / INDEX).exists():
            return store._as_made_before(path, identity)
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            client_files.check_empty(path)
            files = ClientFiles(path, store._record_bytes, create=True)
        try:
            client_files.check_empty(path)  # again, because the folder is locked now
            with explained(path):
                files.prepare(store._header, 0, store._table.slots)
                files.reserve(0)
                files.write(INITIAL, store.num_clients, store._rows)
                files.publish()
        except BaseException:
            files.close()
            raise
        store._records = files
        return store

    def _as_made_before(self, path: Path, identity: Mapping[str, Any] | None) -> ClientStore:
        """Returns the store in the folder if it equals this new one. Raises ConfigurationError if it does not."""
        existing = None
        with contextlib.suppress(DamagedError, OtherRunError):
            initial = jax.tree.unflatten(self._structure, self._initial)
            existing = ClientStore.open(path, initial, self.num_clients, identity)
            rows = zip(existing._rows, self._rows, strict=True)
            if not (existing.round or existing.seen) and all(np.array_equal(*pair) for pair in rows):
                return existing
        if existing is not None:
            existing.close()
        fix = "choose another folder, or open this store with Simulation.reopen (ClientStore.open)"
        checks.refuse("path must be a new or empty folder", f"{path}, which has a client store", fix)

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
        """Opens the client store in a folder, with the states of its last commit.

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

        After each of these errors the files are unchanged.
        """
        store = cls(initial, num_clients, identity or {})
        path = Path(path).absolute()
        name = INDEX if round is None else client_files.pin_file(round)
        if not (path / name).is_file():
            raise DamagedError(
                f"path must be the folder of a client store, got {path}, which has no {name}: use ClientStore.create"
            )
        if not (path / STATES).is_file():
            raise damaged(path, f"its file {STATES} is missing")
        with explained(path):
            files = ClientFiles(path, store._record_bytes, create=False)
        try:
            header, slots = files.read_index(name)
            if round not in (None, header["round"]):
                raise damaged(path, f"its file {name} is of round {header['round']}")
            client_files.check_same(path, header, store._header, strict)
            files.check_size(int(slots.max(initial=-1)) + 1)
            files.read(INITIAL, store.num_clients, store._rows)
            store._pins = dict(files.read_pins())
            if round is not None:
                with explained(path):
                    files.prepare(store._header, round, slots)
                    files.publish()
        except BaseException:
            files.close()
            raise
        store._table = _table(header["round"], slots, store._pins)
        files.end = store._table.end
        store._records = files
        return store

    @property
    def round(self) -> int:
        """The number of committed rounds: 0 at first, then the ``round`` of the last `commit`."""
        return self._now()[0].round

    @property
    def seen(self) -> int:
        """Number of clients whose state has been committed."""
        return self._now()[0].seen

    @property
    def nbytes(self) -> int:
        """The number of bytes used in memory or on disk.

        Without pins, these are 4 N bytes for the table, one record per client that has taken part, and up to about K
        more records.
        """
        table, records = self._now()
        return records.nbytes + table.slots.nbytes

    @property
    def in_files(self) -> bool:
        """Whether the states are in a folder. If False, they are in host memory."""
        return isinstance(self._records, ClientFiles)

    @property
    def ids(self) -> np.ndarray:
        """The ids of the clients whose state has been committed, [seen], in ascending order."""
        return np.flatnonzero(self._now()[0].slots >= 0)

    @property
    def pins(self) -> list[int]:
        """The pinned rounds, in ascending order."""
        return sorted(self._pins)

    def pin(self) -> None:
        """Keeps the states of the current round, so that `open` can return to it.

        The records are not copied. Later commits do not overwrite them, so the store grows by the records that later
        rounds change.

        Raises:
          ValueError: the states are in host memory.
          OSError: the table could not be written.
        """
        table, records = self._now()
        if not isinstance(records, ClientFiles):
            checks.refuse(
                "only a client store in files can be pinned", "one in host memory", "copy its states with gather"
            )
        records.pin(table.round)
        self._pins[table.round] = table.slots
        self._table = _table(table.round, table.slots, self._pins, table.end)

    def unpin(self, round: int) -> None:  # noqa: A002
        """Deletes the pin of this round, if there is one. Records that are not needed any more become free."""
        table, records = self._now()
        if isinstance(records, ClientFiles) and self._pins.pop(round, None) is not None:
            records.unpin(round)
            self._table = _table(table.round, table.slots, self._pins, table.end)

    def gather(self, ids: np.ndarray | Sequence[int]) -> PyTree:
        """Returns the states of the clients ``ids`` [K] after the last commit, leaves [K, ...].

        A client that has never taken part has the state ``initial``. The id N, which stands for no client, also gives
        ``initial``. The arrays are new copies. On a CPU, `jax.device_put` may use their memory without copying them, so
        do not write to the arrays after that call.

        Raises:
          ValueError: an id is not in 0..N.
          DamagedError: a record in the files is damaged.
        """
        table, records = self._now()
        ids = self._check_ids(ids)
        slots = np.where(ids < self.num_clients, table.slots[np.minimum(ids, self.num_clients - 1)], -1)
        states, rows = self._empty(len(ids))
        unseen = slots < 0
        for row, initial in zip(rows, self._rows, strict=True):
            row[unseen] = initial
        for k in np.argsort(slots, kind="stable")[unseen.sum() :].tolist():  # in the file's order
            records.read(int(slots[k]), int(ids[k]), [row[k] for row in rows])
        return states

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
          round: the number of completed rounds, including this one. It must be larger than the property `round`.
          keep: bool [K]. If an entry is False, the new state is not stored, and the client keeps its old state.
            Default: all True.

        Raises:
          OSError: the disk is full, or the folder does not exist any more. The round can be repeated when there is
            space again.
          MemoryError: there is not enough host memory.
        """
        table, records = self._now()
        ids = self._check_ids(ids)
        t = checks.integer("round", round, table.round + 1, fix=f"round {table.round} was the last one committed")
        rows = self._check_states(states, len(ids))
        present = ids < self.num_clients
        if len(np.unique(ids[present])) < present.sum():
            values, counts = np.unique(ids[present], return_counts=True)
            checks.refuse(
                "ids must contain each client at most once", f"{values[counts.argmax()]} {counts.max()} times"
            )
        if keep is not None:
            present &= _check_keep(keep, len(ids))
        places = np.flatnonzero(present)
        recycled = table.free[: len(places)]
        end = table.end + len(places) - len(recycled)
        new = np.concatenate([recycled, np.arange(table.end, end, dtype=np.int32)])
        old = table.slots[ids[places]]
        old = old[old >= 0]
        pinned = np.pad(table.pinned, (0, end - table.end))
        with _kept(table.round, t):
            records.reserve(end)
            for k, slot in zip(places.tolist(), new.tolist(), strict=True):
                records.write(slot, int(ids[k]), [row[k] for row in rows])
            slots = table.slots.copy()
            slots[ids[places]] = new
            free = np.concatenate([table.free[len(places) :], old[~pinned[old]]])
            following = _Table(t, slots, table.seen + len(places) - len(old), free, end, pinned)
            if isinstance(records, ClientMemory):
                self._table = following
                return
            self._pending = following, records.prepare(self._header, t, slots)
            records.publish()
            self._now()

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

    @property
    def _record_bytes(self) -> int:
        """The number of bytes of a client's state."""
        return sum(len(row) for row in self._rows)

    def _now(self) -> tuple[_Table, ClientMemory | ClientFiles]:
        """Returns the table and the records. Raises ConfigurationError if the store is closed."""
        if self._records is None:
            raise ConfigurationError("the client store is closed: open it again, or use it before closing it")
        if self._pending is not None:
            # `_pending` is set before the index is renamed. If Ctrl-C interrupted the commit, the index shows whether
            # it was renamed.
            following, written = self._pending
            if isinstance(self._records, ClientFiles) and self._records.published(written):
                self._table = following
            self._pending = None
        return self._table, self._records

    def _check_ids(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """Returns the checked ids, int64 [K]."""
        array = np.asarray(ids)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            checks.refuse("ids must be a list of client ids", f"{array.dtype}{list(array.shape)}")
        bad = array[(array < 0) | (array > self.num_clients)]
        if len(bad):
            checks.refuse(f"ids must be in 0..{self.num_clients} ({self.num_clients} stands for no client)", bad[0])
        return array.astype(np.int64)

    def _check_states(self, states: PyTree, K: int) -> list[np.ndarray]:
        """Returns the bytes of the leaves, each uint8 [K, bytes]."""
        leaves, structure = jax.tree.flatten(states)
        arrays = [np.asarray(leaf) for leaf in leaves]
        if structure != self._structure or any(
            array.shape != (K, *leaf.shape) or array.dtype != leaf.dtype
            for array, leaf in zip(arrays, self._initial, strict=True)
        ):
            want = [[name, dtype, [K, *shape]] for name, dtype, shape in self._layout]
            got = tree.layout(jax.tree.unflatten(structure, arrays))
            by_name = client_files.leaves_by_name
            wrong = tree.differences(by_name(got), by_name(want), "instead of") or [checks.type_of(states)]
            checks.refuse(
                f"states must have the leaves of the initial state with a first axis of length {K}", few(wrong)
            )
        rows = zip(arrays, self._rows, strict=True)
        return [np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(K, len(row)) for a, row in rows]

    def _empty(self, K: int) -> tuple[PyTree, list[np.ndarray]]:
        """Returns uninitialized states with leaves [K, ...], and the same memory as uint8 arrays [K, bytes]."""
        sizes = [K * len(row) for row in self._rows]
        starts = np.cumsum([0] + [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes])
        memory = np.empty(starts[-1] + ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % ALIGNMENT :]
        flat = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        leaves = [m.view(leaf.dtype).reshape(K, *leaf.shape) for m, leaf in zip(flat, self._initial, strict=True)]
        rows = [m.reshape(K, len(row)) for m, row in zip(flat, self._rows, strict=True)]
        return jax.tree.unflatten(self._structure, leaves), rows


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


def _check_keep(keep: Any, K: int) -> np.ndarray:
    keep = np.asarray(keep)
    if keep.dtype != bool or keep.shape != (K,):
        checks.refuse(f"keep must be bool[{K}], one per id", f"{keep.dtype}{list(keep.shape)}")
    return keep
