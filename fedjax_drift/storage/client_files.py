"""The files of a client store: a folder with the files ``states`` and ``index`` and the pins, locked for one process.

    states   records in native byte order: the initial state, then slot 0, slot 1, ...; each is followed by a checksum,
             which is the CRC-32 of the client's id (N for the initial state) and the record
    index    one line of JSON (format number, round, N, leaves, identity, ...), then the slot of each client, int32 [N]
             (-1: the initial state), then the CRC-32 of both, uint32; all are little-endian; the index is written
             as ``index.new`` and renamed
    index.7  a pin: a copy of the index of round 7

The lock is on ``states`` and ends with the process.

Records are not read and written through a memory map, with which a full disk would kill the process.

The files are not forced to the disk (no fsync). They survive the death of the process, but maybe not a power failure.
The checksum detects a damaged record and a record of another client when the record is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.disk import lock, replace_file, write_all
from fedjax_drift.errors import DamagedError, OtherRunError
from fedjax_drift.storage.identity import differences, few

FORMAT = 3
INITIAL = -1  # the slot of the initial state in the file
INDEX, STATES, NEW_INDEX = "index", "states", "index.new"  # files of the folder
CHECK = 4  # bytes of a record's checksum


def pin_file(t: int | str) -> str:
    """Returns the file name of the pin of round t."""
    return f"{INDEX}.{t}"


def header(num_clients: int, leaves: list[list], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the header of an index without the round. leaves: see `tree.layout`."""
    return {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        "num_clients": num_clients,
        "leaves": leaves,
        "identity": dict(identity),
    }


class ClientFiles:
    """The files in a folder, locked for this process."""

    def __init__(self, path: Path, record: int, create: bool) -> None:
        flags = os.O_CREAT if create else 0
        self.path, self.record, self.end = path, record + CHECK, 0
        self.states = FileIO(str(path / STATES), "r+b", opener=lambda name, mode: os.open(name, mode | flags, 0o666))
        with self.closed_after_errors():
            lock(
                self.states,
                f"path must be a client store that is not in use, got {path}, which is open already, in another "
                "process or in this one: close it there, or choose another folder",
            )

    @contextlib.contextmanager
    def closed_after_errors(self) -> Iterator[None]:
        """Closes the file, and so unlocks the folder, if the block raises an exception."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._start(self.end)

    def _start(self, slot: int) -> int:
        """Returns the position of the slot's first byte in the file."""
        return (slot + 1) * self.record

    def reserve(self, end: int) -> None:
        """Allocates disk space for the slots below ``end``. On a full disk, raises OSError and changes no file."""
        start, stop = os.fstat(self.states.fileno()).st_size, self._start(end)
        if start < stop and hasattr(os, "posix_fallocate"):  # without it, a full disk is only noticed when writing
            try:
                os.posix_fallocate(self.states.fileno(), start, stop - start)
            except OSError:
                os.ftruncate(self.states.fileno(), start)
                raise
        self.end = max(self.end, end)

    def read(self, slot: int, client: int) -> np.ndarray:
        """Returns the record of a client, uint8 [record]. Raises DamagedError if it is damaged."""
        stored = np.fromfile(self.path / STATES, np.uint8, self.record, offset=self._start(slot))
        if len(stored) < self.record:
            raise damaged(self.path, f"its file {STATES} has been truncated")
        if stored[-CHECK:].tobytes() != _checksum(client, stored[:-CHECK]):
            whose = "the initial state" if slot == INITIAL else f"the state of client {client}"
            raise damaged(self.path, f"{whose} does not contain what was written")
        return stored[:-CHECK]

    def write(self, slot: int, client: int, record: np.ndarray) -> None:
        self.states.seek(self._start(slot))
        write_all(self.states, record.tobytes() + _checksum(client, record))

    def prepare(self, header: dict[str, Any], t: int, slots: np.ndarray) -> None:
        """Writes the index of round t with the slots, int32 [N], as ``index.new``."""
        content = json.dumps(header | {"round": t}).encode() + b"\n" + slots.astype("<i4").tobytes()
        new = self.path / NEW_INDEX
        try:
            new.write_bytes(content + _crc32(content))
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def publish(self) -> None:
        """Replaces the index atomically by the one that `prepare` has written."""
        os.replace(self.path / NEW_INDEX, self.path / INDEX)

    def pin(self, t: int) -> None:
        """Copies the index atomically to the pin of round t."""
        replace_file(self.path / pin_file(t), (self.path / INDEX).read_bytes())

    def unpin(self, t: int) -> None:
        """Deletes the pin of round t."""
        (self.path / pin_file(t)).unlink(missing_ok=True)

    def read_pins(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields round and slots of every pin that is not damaged."""
        for file in self.path.glob(pin_file("[0-9]*")):
            with contextlib.suppress(DamagedError):
                header, slots = self.read_index(file.name)
                yield header["round"], slots

    def read_index(self, name: str) -> tuple[dict[str, Any], np.ndarray]:
        """Returns the header and the slots, int32 [N], of an index or a pin.

        Raises DamagedError for a damaged file, and ConfigurationError for another format.
        """
        try:
            content = (self.path / name).read_bytes()
            line = content[: content.find(b"\n") + 1]
            header = json.loads(line)
            number = header["format"]
        except (OSError, ValueError, TypeError, KeyError):
            raise damaged(self.path, f"its file {name} can't be read") from None
        if number != FORMAT:
            fix = "use the version of fedjax_drift that wrote it"
            checks.refuse(f"the client store in {self.path} must be of format {FORMAT}", number, fix)
        if _crc32(content[:-CHECK]) != content[-CHECK:]:
            raise damaged(self.path, f"its file {name} does not contain what was written")
        return header, np.frombuffer(content[len(line) : -CHECK], "<i4").astype(np.int32)

    def check_size(self, end: int) -> None:
        """Raises DamagedError unless the file has the records of all slots below ``end``."""
        size = os.fstat(self.states.fileno()).st_size
        if size < self._start(end):
            raise damaged(self.path, f"its file {STATES} must have {self._start(end)} bytes, got {size}")

    def close(self) -> None:
        self.states.close()


def _checksum(client: int, record: np.ndarray) -> bytes:
    return _crc32(record.data, client)


def _crc32(content: bytes | memoryview, start: int = 0) -> bytes:
    return zlib.crc32(content, start).to_bytes(CHECK, "little")


def check_empty(path: Path) -> None:
    """Raises ConfigurationError if the folder has files. Files that a killed `ClientStore.create` has left
    are allowed."""
    files = {file.name for file in path.iterdir()}
    unfinished = NEW_INDEX in files or STATES in files and not (path / STATES).stat().st_size
    if others := sorted(files - ({STATES, NEW_INDEX} if unfinished else set())):
        checks.refuse("path must be a new or empty folder", f"{path}, which has {few(others)}", "choose another folder")


def check_same(path: Path, stored: dict[str, Any], current: dict[str, Any], strict: bool = True) -> None:
    """Raises OtherRunError with the differences of two headers.

    If ``strict`` is False and only the identities differ, there is a warning instead.
    """

    def described(header: dict[str, Any]) -> dict[str, str]:
        plain = {name: str(header[name]) for name in ("num_clients", "byteorder")}
        return plain | {f"leaf {path}": value for path, value in tree.described(header["leaves"]).items()}

    wrong = tree.differences(described(stored), described(current), "in the client store, not")
    changed, _ = differences(stored["identity"], current["identity"])
    listed = wrong + [
        f"identity {name!r}: {old} in the client store, not {new}" for name, (old, new) in changed.items()
    ]
    message = f"the client store in {path} belongs to another simulation: {few(listed)}"
    if wrong or changed and strict:
        raise OtherRunError(f"{message}: open it with the arguments of its run, or choose another folder")
    if changed:
        checks.warn(f"{message}: opened nevertheless, because strict=False")


def damaged(path: Path, why: str) -> DamagedError:
    """Returns the error for a damaged folder."""
    return DamagedError(
        f"the client store in {path} is damaged, {why}: go back to an earlier round with "
        "Checkpoints.restore(sim, round), restore the folder from a copy, or start a new run in another folder"
    )
