"""Client states outside the devices: in host memory, or in a file. Plain NumPy; only clients ever seen take space.

    store = ClientStore.create(initial, num_clients=100_000)    # path=... for files; ClientStore.open opens old ones
    states = store.gather(ids)                                  # leaves [K, ...]
    store.commit(ids, new_states, round=1)

A client's state is one record, all its leaves packed, in a numbered slot; a table [N] says which (-1: never seen, it
has ``initial``). A commit never overwrites what the table points to: new records go to free slots, then the table is
replaced as a whole, and the old slots become free. So a bank is always exactly as one of its commits left it, whatever
ends the process or the commit: a kill, Ctrl-C, a full disk. It holds up to K records more than clients seen.

A file bank is a folder of two files, for one process at a time (a lock on ``states`` that ends with the process):

    states   records in native byte order: the initial state, then slot 0, slot 1, ...; after each a checksum, the
             CRC-32 that begins with the client's id (the initial state's with N) and goes on over the record
    index    one line of JSON (format number, round, N, leaves, identity, ...), then the table, int32 [N], then the
             CRC-32 of both, uint32, all little-endian; written as ``index.new`` and renamed
    index.7  a pin: the index as it was at round 7. Slots that a pin points to are not free either

Records go through the operating system's page cache, as those of a memory map would, but by read and write calls: a
full disk or a file cut short is then an error, where touching a map would end the process. Nothing is forced to the
disk (no fsync): a bank survives the death of its process, not a power failure. Whatever was not written as it is read,
or for another client, is noticed when it is read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.errors import ConfigurationError, DamagedError, OtherRunError
from fedjax_drift.storage.files import lock
from fedjax_drift.types import PyTree

FORMAT = 3
MOST_CLIENTS = 2**30  # so that slots, of which there are up to N + K, fit in int32
INITIAL = -1  # the slot in a file of the state that clients never seen have
CHUNK_BYTES = 16 * 2**20  # of host memory taken at a time
INDEX, STATES, NEW_INDEX = "index", "states", "index.new"  # files of a bank's folder
ALIGNMENT = 64  # bytes; JAX's CPU backend takes arrays aligned so as they are, and copies others
MOST_BUFFERS = 1024  # in one read or write call
CHECK = 4  # bytes of a record's checksum


class _Table(NamedTuple):
    """Where the records are; immutable, so that putting another in its place is all that a commit needs."""

    round: int  # rounds committed
    slots: np.ndarray  # int32 [N], -1: never seen
    seen: int
    free: np.ndarray  # int32 [F], slots below `end` that no client and no pin has
    end: int  # slots from here on have never been used
    pinned: np.ndarray  # bool [end], slots that a pin has


def _table(round: int, slots: np.ndarray, pins: Mapping[int, np.ndarray], end: int = 0) -> _Table:
    """The table of these slots, where pins hold theirs; at least ``end`` slots have been used."""
    end = max(end, *(int(held.max(initial=-1)) + 1 for held in (slots, *pins.values())), 0)
    pinned, taken = np.zeros(end, bool), np.zeros(end, bool)
    for held in pins.values():
        pinned[held[held >= 0]] = True
    taken[slots[slots >= 0]] = True
    return _Table(round, slots, int(taken.sum()), np.flatnonzero(~(taken | pinned)).astype(np.int32), end, pinned)


def _pin(round: int | str) -> str:
    """The file of this round's pin."""
    return f"{INDEX}.{round}"


class ClientStore:
    """N clients' states, outside the devices. Make one with `create` or `open`; ``with`` closes it.

    Not for several threads at once.
    """

    def __init__(self, initial: PyTree, num_clients: int, identity: Mapping[str, Any]) -> None:
        self.num_clients = checks.integer("num_clients", num_clients, 1, MOST_CLIENTS)
        leaves, structure = jax.tree.flatten(initial)
        self._structure: Any = structure
        self._initial = [np.array(leaf, order="C") for leaf in leaves]
        self._layout = tree.layout(jax.tree.unflatten(self._structure, self._initial))
        if objects := [name for name, dtype, _ in self._layout if dtype == "object"]:
            raise ConfigurationError(
                f"client states must be numeric arrays, got Python objects at {', '.join(objects)}"
            )
        self._rows = [leaf.reshape(-1).view(np.uint8) for leaf in self._initial]  # [bytes] each
        self._header = {
            "format": FORMAT,
            "byteorder": sys.byteorder,
            "num_clients": self.num_clients,
            "leaves": self._layout,
            "identity": dict(identity),
        }
        self._pins: dict[int, np.ndarray] = {}  # round -> slots, int32 [N]
        self._table = _table(0, np.full(self.num_clients, -1, np.int32), self._pins)
        self._store: _Memory | _Folder | None = None
        self._pending: tuple[_Table, int] | None = None

    @classmethod
    def create(
        cls,
        initial: PyTree,
        num_clients: int,
        path: str | os.PathLike[str] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> ClientStore:
        """A new bank, at round 0, in which no client has been seen.

        Args:
          initial: ONE client's state before its first round, arrays without a client axis.
          num_clients: N, in 1..2**30.
          path: a folder for it, new or empty; default None: host memory. A bank that was made there with the same
            arguments, and in which nobody has been seen, is taken as it is: a run that ended before its first save left
            it.
          identity: what the states belong to (federation, algorithm, ...); `open` compares it.

        Raises:
          ValueError: arguments out of range; a folder that holds files, is in use or cannot be written.
        """
        bank = cls(initial, num_clients, identity or {})
        if path is None:
            bank._store = _Memory(bank._record)
            return bank
        path = Path(path).absolute()
        if path.exists() and not path.is_dir():
            raise ConfigurationError(f"path must be a folder, got the file {path}: choose another name")
        if (path / INDEX).exists():
            return bank._as_made_before(path, identity)
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
            _check_empty(path)
            store = _Folder(path, bank._record, create=True)
        try:
            _check_empty(path)  # now that nobody else can make one here
            with _explained(path):
                store.prepare(bank._header, bank._table)
                store.reserve(0)
                store.write(INITIAL, bank.num_clients, bank._rows)
                store.publish()
        except BaseException:
            store.close()
            raise
        bank._store = store
        return bank

    def _as_made_before(self, path: Path, identity: Mapping[str, Any] | None) -> ClientStore:
        """The bank of the folder, if it is as this one would be made there; ValueError for any other."""
        there = None
        with contextlib.suppress(DamagedError, OtherRunError):
            initial = jax.tree.unflatten(self._structure, self._initial)
            there = ClientStore.open(path, initial, self.num_clients, identity)
            rows = zip(there._rows, self._rows, strict=True)
            if not (there.round or there.seen) and all(np.array_equal(*pair) for pair in rows):
                return there
        if there is not None:
            there.close()
        raise ConfigurationError(
            f"path must be a new or empty folder, got {path}, which holds a bank: choose another, or go on from that "
            "one with ClientStore.open (Simulation.reopen)"
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        initial: PyTree,
        num_clients: int,
        identity: Mapping[str, Any] | None = None,
        round: int | None = None,
    ) -> ClientStore:
        """The bank in the folder ``path``, as its last commit left it; the arguments are those that it was made with.

        Of ``initial`` only the structure, shapes and dtypes count: a client never seen has the state given to `create`.
        round: as the pin of this round left it instead, to which the folder is set back.

        Raises ValueError, and changes nothing: no bank there, one in use, damaged, or of another format; one made with
        other arguments, whose differences are listed.
        """
        bank = cls(initial, num_clients, identity or {})
        path = Path(path).absolute()
        name = INDEX if round is None else _pin(round)
        if not (path / name).is_file():
            raise DamagedError(
                f"path must be the folder of a bank, got {path}, which has no {name}: use ClientStore.create"
            )
        if not (path / STATES).is_file():
            raise _damaged(path, f"its file {STATES} is missing")
        with _explained(path):
            store = _Folder(path, bank._record, create=False)
        try:
            header, slots = store.read_index(name)
            if round not in (None, header["round"]):
                raise _damaged(path, f"its file {name} is of round {header['round']}")
            _check_same(path, header, bank._header)
            store.check_size(int(slots.max(initial=-1)) + 1)
            store.read(INITIAL, bank.num_clients, bank._rows)
            bank._pins = dict(store.read_pins())
            if round is not None:
                with _explained(path):
                    store.copy_index(name, INDEX)
        except BaseException:
            store.close()
            raise
        bank._table = _table(header["round"], slots, bank._pins)
        store.end = bank._table.end
        bank._store = store
        return bank

    @property
    def round(self) -> int:
        """Rounds committed: 0 at creation, then what the last `commit` was given."""
        return self._now()[0].round

    @property
    def seen(self) -> int:
        """Clients that have a state of their own."""
        return self._now()[0].seen

    @property
    def nbytes(self) -> int:
        """Bytes taken, in memory or on disk: (clients seen + at most about K) records, and 4 N for the table."""
        table, store = self._now()
        return store.nbytes + table.slots.nbytes

    @property
    def in_files(self) -> bool:
        """Whether it is in a folder, and not in host memory."""
        return isinstance(self._store, _Folder)

    @property
    def ids(self) -> np.ndarray:
        """[seen] the clients that have a state of their own, ascending."""
        return np.flatnonzero(self._now()[0].slots >= 0)

    @property
    def pins(self) -> list[int]:
        """The rounds pinned, ascending."""
        return sorted(self._pins)

    def pin(self) -> None:
        """Keeps the bank as it is now, for `open` to come back to: later commits leave its records alone.

        Takes no copy of them: the space grows by what later rounds change. For banks in files only. OSError where the
        table could not be written.
        """
        table, store = self._now()
        if not isinstance(store, _Folder):
            raise ConfigurationError(
                "only a bank in files can be pinned, got one in host memory: gather its states instead"
            )
        store.copy_index(INDEX, _pin(table.round))
        self._pins[table.round] = table.slots
        self._table = _table(table.round, table.slots, self._pins, table.end)

    def unpin(self, round: int) -> None:
        """Gives up the pin of this round, and with it the records that nothing else needs; nothing if there is none."""
        table, store = self._now()
        if isinstance(store, _Folder) and self._pins.pop(round, None) is not None:
            (store.path / _pin(round)).unlink(missing_ok=True)
            self._table = _table(table.round, table.slots, self._pins, table.end)

    def gather(self, ids: np.ndarray | Sequence[int]) -> PyTree:
        """The states of the clients ``ids`` [K], leaves [K, ...], as the last commit left them.

        A client never seen has ``initial``, and so has id N, an absent one. Fresh copies, aligned such that
        `jax.device_put` need not copy them on CPU: don't write to them after it.

        Raises ValueError: ids out of 0..N; of a bank in files a state that is not what was written (`DamagedError`).
        """
        table, store = self._now()
        ids = self._check_ids(ids)
        slots = np.where(ids < self.num_clients, table.slots[np.minimum(ids, self.num_clients - 1)], -1)
        states, rows = self._empty(len(ids))
        unseen = slots < 0
        for row, initial in zip(rows, self._rows, strict=True):
            row[unseen] = initial
        for k in np.argsort(slots, kind="stable")[unseen.sum() :].tolist():  # in the file's order
            store.read(int(slots[k]), int(ids[k]), [row[k] for row in rows])
        return states

    def commit(
        self, ids: np.ndarray | Sequence[int], states: PyTree, round: int, keep: np.ndarray | None = None
    ) -> None:
        """Stores the new states of a round's clients; either all of it happens or, after any error, nothing.

        Args:
          ids: [K] client ids, distinct; N, an absent client, any number of times.
          states: leaves [K, ...], of ``initial``'s structure, shapes and dtypes.
          round: rounds done with this one, more than `round`, which it becomes.
          keep: bool [K]: where False, the new state is not stored, and the client keeps its old one. Default: all True.

        Raises:
          ValueError: arguments out of range.
          OSError: a full disk, a folder that is gone; do the round again once there is room.
          MemoryError: no host memory left.
        """
        table, store = self._now()
        ids = self._check_ids(ids)
        round = checks.integer(
            "round", round, table.round + 1, fix=f"the bank has been committed up to round {table.round}"
        )
        rows = self._check_states(states, len(ids))
        present = ids < self.num_clients
        if len(np.unique(ids[present])) < present.sum():
            values, counts = np.unique(ids[present], return_counts=True)
            raise ConfigurationError(
                f"ids must hold every client once, got {values[counts.argmax()]} {counts.max()} times"
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
        with _kept(table.round, round):
            store.reserve(end)
            for k, slot in zip(places.tolist(), new.tolist(), strict=True):
                store.write(slot, int(ids[k]), [row[k] for row in rows])
            slots = table.slots.copy()
            slots[ids[places]] = new
            free = np.concatenate([table.free[len(places) :], old[~pinned[old]]])
            following = _Table(round, slots, table.seen + len(places) - len(old), free, end, pinned)
            if isinstance(store, _Memory):
                self._table = following
                return
            self._pending = following, store.prepare(self._header, following)
            store.publish()
            self._now()

    def close(self) -> None:
        """Ends the bank's use: frees its memory, or its file for others. Nothing needs to be written for it."""
        if self._store is not None:
            self._store.close()
        self._store = None

    def __enter__(self) -> ClientStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._store is None:
            return f"ClientStore({self.num_clients} clients, closed)"
        where = f"in {self._store.path}" if isinstance(self._store, _Folder) else "in host memory"
        megabytes = f"{self.nbytes / 1e6:.1f} MB"
        return f"ClientStore({self.num_clients} clients, {self.seen} seen, round {self.round}, {megabytes} {where})"

    @property
    def _record(self) -> int:
        """Bytes a client's state takes."""
        return sum(len(row) for row in self._rows)

    def _now(self) -> tuple[_Table, _Memory | _Folder]:
        """The table and the store. ValueError for a bank that is closed."""
        if self._store is None:
            raise ConfigurationError("the bank is closed: open it again, or use it before closing")
        if self._pending is not None:
            # Set before the rename and cleared here, so that Ctrl-C right after it leaves no doubt about the round.
            following, written = self._pending
            if isinstance(self._store, _Folder) and self._store.published(written):
                self._table = following
            self._pending = None
        return self._table, self._store

    def _check_ids(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """[K], int64."""
        array = np.asarray(ids)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ConfigurationError(f"ids must be one axis of client ids, got {array.dtype}{list(array.shape)}")
        bad = array[(array < 0) | (array > self.num_clients)]
        if len(bad):
            raise ConfigurationError(f"ids must be in 0..{self.num_clients} (the last: an absent client), got {bad[0]}")
        return array.astype(np.int64)

    def _check_states(self, states: PyTree, K: int) -> list[np.ndarray]:
        """The leaves' bytes, uint8 [K, bytes] each."""
        leaves, structure = jax.tree.flatten(states)
        arrays = [np.asarray(leaf) for leaf in leaves]
        if structure != self._structure or any(
            array.shape != (K, *leaf.shape) or array.dtype != leaf.dtype
            for array, leaf in zip(arrays, self._initial, strict=True)
        ):
            want = [[name, dtype, [K, *shape]] for name, dtype, shape in self._layout]
            got = tree.layout(jax.tree.unflatten(structure, arrays))
            differ = tree.differences(_leaves(got), _leaves(want), "instead of") or [f"a {type(states).__name__}"]
            raise ConfigurationError(
                f"states must be like the initial state, with an axis of {K} in front, got {few(differ)}"
            )
        rows = zip(arrays, self._rows, strict=True)
        return [np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(K, len(row)) for a, row in rows]

    def _empty(self, K: int) -> tuple[PyTree, list[np.ndarray]]:
        """States with leaves [K, ...] to be filled in, and the same memory as uint8 [K, bytes] each."""
        sizes = [K * len(row) for row in self._rows]
        starts = np.cumsum([0] + [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes])
        memory = np.empty(starts[-1] + ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % ALIGNMENT :]
        flat = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        leaves = [m.view(leaf.dtype).reshape(K, *leaf.shape) for m, leaf in zip(flat, self._initial, strict=True)]
        rows = [m.reshape(K, len(row)) for m, row in zip(flat, self._rows, strict=True)]
        return jax.tree.unflatten(self._structure, leaves), rows


class _Memory:
    """Records in chunks of host memory, which never move."""

    def __init__(self, record: int) -> None:
        self.record, self.end = record, 0
        self.chunk_slots = max(1, CHUNK_BYTES // max(record, 1))
        self.chunks: list[np.ndarray] = []  # uint8 [chunk_slots, record]; takes space once written to

    @property
    def nbytes(self) -> int:
        return self.end * self.record

    def reserve(self, end: int) -> None:
        """Makes room for slots below end."""
        while len(self.chunks) * self.chunk_slots < end:
            self.chunks.append(np.empty((self.chunk_slots, self.record), np.uint8))
        self.end = max(self.end, end)

    def read(self, slot: int, client: int, into: list[np.ndarray]) -> None:
        record, start = self.chunks[slot // self.chunk_slots][slot % self.chunk_slots], 0
        for part in into:
            part[:] = record[start : start + len(part)]
            start += len(part)

    def write(self, slot: int, client: int, parts: list[np.ndarray]) -> None:
        record, start = self.chunks[slot // self.chunk_slots][slot % self.chunk_slots], 0
        for part in parts:
            record[start : start + len(part)] = part
            start += len(part)

    def close(self) -> None:
        self.chunks = []


class _Folder:
    """The two files of a bank, locked for this process."""

    def __init__(self, path: Path, record: int, create: bool) -> None:
        flags = os.O_CREAT if create else 0
        self.path, self.record, self.end = path, record + CHECK, 0
        self.states = FileIO(str(path / STATES), "r+b", opener=lambda name, mode: os.open(name, mode | flags, 0o666))
        try:
            lock(
                self.states,
                f"path must be a bank that nobody else uses, got {path}, which is open already, in another process or "
                "in this one: close it there, or choose another folder",
            )
        except BaseException:
            self.states.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._start(self.end)

    def _start(self, slot: int) -> int:
        """The slot's first byte in the file."""
        return (slot + 1) * self.record

    def reserve(self, end: int) -> None:
        """Makes room for slots below end on the disk; OSError, and no more taken than before, where there is none."""
        start, stop = os.fstat(self.states.fileno()).st_size, self._start(end)
        if start < stop and hasattr(os, "posix_fallocate"):  # elsewhere writing finds out
            try:
                os.posix_fallocate(self.states.fileno(), start, stop - start)
            except OSError:
                os.ftruncate(self.states.fileno(), start)
                raise
        self.end = max(self.end, end)

    def read(self, slot: int, client: int, into: list[np.ndarray]) -> None:
        check = np.empty(CHECK, np.uint8)
        if not _transfer(os.preadv, self.states.fileno(), [*into, check], self._start(slot)):
            raise _damaged(self.path, f"its file {STATES} has been cut short")
        if not np.array_equal(check, _checksum(client, into)):
            whose = "the initial state" if slot == INITIAL else f"the state of client {client}"
            raise _damaged(self.path, f"{whose} is not what was written")

    def write(self, slot: int, client: int, parts: list[np.ndarray]) -> None:
        _write(self.states.fileno(), [*parts, _checksum(client, parts)], self._start(slot))

    def prepare(self, header: dict[str, Any], table: _Table) -> int:
        """Writes the next index beside the one there; the number of its file."""
        line = json.dumps(header | {"round": table.round}).encode() + b"\n"
        slots = np.ascontiguousarray(table.slots, "<i4").view(np.uint8)
        check = zlib.crc32(slots.data, zlib.crc32(line)).to_bytes(4, "little")
        parts = [np.frombuffer(line, np.uint8), slots, np.frombuffer(check, np.uint8)]
        new = self.path / NEW_INDEX
        try:
            with open(new, "wb", buffering=0) as file:
                _write(file.fileno(), parts, 0)
                return os.fstat(file.fileno()).st_ino
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def publish(self) -> None:
        """Makes the next index the index, at once."""
        os.replace(self.path / NEW_INDEX, self.path / INDEX)

    def published(self, number: int) -> bool:
        """Whether the index is the file of this number."""
        return os.stat(self.path / INDEX).st_ino == number

    def copy_index(self, name: str, to: str) -> None:
        """Makes ``to`` a copy of the index ``name``, at once."""
        new = self.path / NEW_INDEX
        try:
            new.write_bytes((self.path / name).read_bytes())
            os.replace(new, self.path / to)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def read_pins(self) -> Iterator[tuple[int, np.ndarray]]:
        """Round and slots of every pin; one that is damaged holds nothing that could be opened."""
        for file in self.path.glob(_pin("[0-9]*")):
            with contextlib.suppress(DamagedError):
                header, slots = self.read_index(file.name)
                yield header["round"], slots

    def read_index(self, name: str) -> tuple[dict[str, Any], np.ndarray]:
        """The header and the slots, int32 [N], of an index or a pin; ValueError where they are damaged or of another
        format."""
        try:
            content = (self.path / name).read_bytes()
            line = content[: content.find(b"\n") + 1]
            header = json.loads(line)
            number = header["format"]
        except (OSError, ValueError, TypeError, KeyError):
            raise _damaged(self.path, f"its file {name} can't be read") from None
        if number != FORMAT:
            raise ConfigurationError(
                f"the bank in {self.path} must be of format {FORMAT}, got {number}: use the version that wrote it"
            )
        if zlib.crc32(content[:-4]).to_bytes(4, "little") != content[-4:]:
            raise _damaged(self.path, f"its file {name} is not what was written")
        return header, np.frombuffer(content[len(line) : -4], "<i4").astype(np.int32)

    def check_size(self, end: int) -> None:
        """ValueError unless the records below end are there."""
        size = os.fstat(self.states.fileno()).st_size
        if size < self._start(end):
            raise _damaged(self.path, f"its file {STATES} must have {self._start(end)} bytes, got {size}")

    def close(self) -> None:
        self.states.close()


def _checksum(client: int, parts: list[np.ndarray]) -> np.ndarray:
    """Of a client's record, uint8 [CHECK]."""
    found = client
    for part in parts:
        found = zlib.crc32(part.data, found)
    return np.frombuffer(found.to_bytes(CHECK, "little"), np.uint8)


def _transfer(call: Callable[..., int], file: int, parts: list[np.ndarray], offset: int) -> bool:
    """Reads or writes all bytes of the parts (uint8, contiguous) from offset on; False where the file ends before."""
    left = sum(map(len, parts))
    while left:
        done = call(file, parts[:MOST_BUFFERS], offset)
        if done == 0:
            return False
        offset, left = offset + done, left - done
        if left:  # too much for one call
            parts = list(parts)
            while done >= len(parts[0]):
                done -= len(parts.pop(0))
            parts[0] = parts[0][done:]
    return True


def _write(file: int, parts: list[np.ndarray], offset: int) -> None:
    if not _transfer(os.pwritev, file, parts, offset):
        raise OSError(errno.EIO, "nothing could be written")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """An OSError as a ValueError about the path."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"path must be a folder where files can be written and locked, got {path} ({error.strerror}): choose "
            "another, or see to that"
        ) from error


@contextlib.contextmanager
def _kept(before: int, round: int) -> Iterator[None]:
    """An OSError that says what became of the states."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"the client states of round {round} could not be stored ({error.strerror}): the bank stays at round "
            f"{before}, with nothing lost; make room or mend the folder, and do the round again",
        ) from error


def _check_empty(path: Path) -> None:
    """ValueError unless the folder holds nothing but what a `create` that was killed may have left."""
    files = {file.name for file in path.iterdir()}
    unfinished = NEW_INDEX in files or STATES in files and not (path / STATES).stat().st_size
    if others := sorted(files - ({STATES, NEW_INDEX} if unfinished else set())):
        raise ConfigurationError(
            f"path must be a new or empty folder, got {path}, which holds {few(others)}: choose another"
        )


def _check_keep(keep: Any, K: int) -> np.ndarray:
    keep = np.asarray(keep)
    if keep.dtype != bool or keep.shape != (K,):
        raise ConfigurationError(f"keep must be bool[{K}], one for each id, got {keep.dtype}{list(keep.shape)}")
    return keep


def _check_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """ValueError with the differences unless a bank with this header is what the arguments describe."""

    def described(header: dict[str, Any]) -> dict[str, str]:
        named = {f"identity {name!r}": repr(value) for name, value in sorted(header["identity"].items())}
        plain = {name: str(header[name]) for name in ("num_clients", "byteorder")}
        return plain | named | _leaves(header["leaves"])

    if differ := tree.differences(described(there), described(here), "in the bank, not"):
        raise OtherRunError(
            f"the bank in {path} belongs to another simulation: {few(differ)}: open it with what it was made with, or "
            "choose another folder"
        )


def _leaves(layout: list[list]) -> dict[str, str]:
    return {f"leaf {path}": value for path, value in tree.described(layout).items()}


def few(items: list[str], most: int = 6) -> str:
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(
        f"the bank in {path} is damaged, {why}: go back to an earlier round with Checkpoints.restore(sim, round), "
        "restore the folder from a copy, or start a new one in another folder"
    )
