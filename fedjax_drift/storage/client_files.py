"""The files of a client store: a folder with the files ``states`` and ``index`` and the pins, locked for one process.

    states   records in native byte order: the initial state, then slot 0, slot 1, ...; each is followed by a checksum,
             which is the CRC-32 of the client's id (N for the initial state) and the record
    index    one line of JSON (format number, round, N, leaves, identity, ...), then the slot of each client, int32 [N]
             (-1: the initial state), then the CRC-32 of both, uint32; all are little-endian; the index is written
             as ``index.new`` and renamed
    index.7  a pin: a copy of the index of round 7

The lock is on ``states`` and ends with the process.

Records are read and written with system calls, not through a memory map. Therefore a full disk or a truncated file
raises an exception. With a memory map it would kill the process.

The files are not forced to the disk (no fsync). They survive the death of the process, but maybe not a power failure.
The checksum detects a damaged record and a record of another client when the record is read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.disk import create_exclusively, lock, replace_file
from fedjax_drift.errors import DamagedError, OtherRunError
from fedjax_drift.storage.identity import differences, few

FORMAT = 3
INITIAL = -1  # the slot of the initial state in the file
INDEX, STATES, NEW_INDEX = "index", "states", "index.new"  # files of the folder
MOST_BUFFERS = 1024  # the largest number of buffers in one read or write call
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
        try:
            lock(
                self.states,
                f"path must be a client store that is not in use, got {path}, which is open already, in another "
                "process or in this one: close it there, or choose another folder",
            )
        except BaseException:
            self.states.close()
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

    def read(self, slot: int, client: int, into: list[np.ndarray]) -> None:
        check = np.empty(CHECK, np.uint8)
        if not _transfer(os.preadv, self.states.fileno(), [*into, check], self._start(slot)):
            raise damaged(self.path, f"its file {STATES} has been truncated")
        if not np.array_equal(check, _checksum(client, into)):
            whose = "the initial state" if slot == INITIAL else f"the state of client {client}"
            raise damaged(self.path, f"{whose} does not contain what was written")

    def write(self, slot: int, client: int, parts: list[np.ndarray]) -> None:
        _write(self.states.fileno(), [*parts, _checksum(client, parts)], self._start(slot))

    def prepare(self, header: dict[str, Any], t: int, slots: np.ndarray) -> int:
        """Writes the index of round t with the slots, int32 [N], as ``index.new``. Returns the inode of this file."""
        line = json.dumps(header | {"round": t}).encode() + b"\n"
        slots = np.ascontiguousarray(slots, "<i4").view(np.uint8)
        check = zlib.crc32(slots.data, zlib.crc32(line)).to_bytes(4, "little")
        parts = [np.frombuffer(line, np.uint8), slots, np.frombuffer(check, np.uint8)]
        new = self.path / NEW_INDEX
        new.unlink(missing_ok=True)  # a killed process may have left it; the folder is locked, so nobody writes it
        try:
            with create_exclusively(new) as file:
                _write(file.fileno(), parts, 0)
                return os.fstat(file.fileno()).st_ino
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def publish(self) -> None:
        """Replaces the index atomically by the one that `prepare` has written."""
        os.replace(self.path / NEW_INDEX, self.path / INDEX)

    def published(self, number: int) -> bool:
        """Whether the index is the file with this inode."""
        return os.stat(self.path / INDEX).st_ino == number

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
        if zlib.crc32(content[:-4]).to_bytes(4, "little") != content[-4:]:
            raise damaged(self.path, f"its file {name} does not contain what was written")
        return header, np.frombuffer(content[len(line) : -4], "<i4").astype(np.int32)

    def check_size(self, end: int) -> None:
        """Raises DamagedError unless the file has the records of all slots below ``end``."""
        size = os.fstat(self.states.fileno()).st_size
        if size < self._start(end):
            raise damaged(self.path, f"its file {STATES} must have {self._start(end)} bytes, got {size}")

    def close(self) -> None:
        self.states.close()


def _checksum(client: int, parts: list[np.ndarray]) -> np.ndarray:
    """Returns the checksum of a client's record, uint8 [CHECK]."""
    value = client
    for part in parts:
        value = zlib.crc32(part.data, value)
    return np.frombuffer(value.to_bytes(CHECK, "little"), np.uint8)


def _transfer(call: Callable[..., int], file: int, parts: list[np.ndarray], offset: int) -> bool:
    """Reads or writes all bytes of ``parts`` (uint8, contiguous), starting at ``offset``. Returns False if the
    file ends early."""
    left = sum(map(len, parts))
    while left:
        done = call(file, parts[:MOST_BUFFERS], offset)
        if done == 0:
            return False
        offset, left = offset + done, left - done
        if left:  # one call did not transfer all bytes
            parts = list(parts)
            while done >= len(parts[0]):
                done -= len(parts.pop(0))
            parts[0] = parts[0][done:]
    return True


def _write(file: int, parts: list[np.ndarray], offset: int) -> None:
    if not _transfer(os.pwritev, file, parts, offset):
        raise OSError(errno.EIO, "nothing could be written")


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
        return plain | leaves_by_name(header["leaves"])

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


def leaves_by_name(layout: list[list]) -> dict[str, str]:
    """Returns a dict from the name of a leaf to its dtype and shape."""
    return {f"leaf {path}": value for path, value in tree.described(layout).items()}


def damaged(path: Path, why: str) -> DamagedError:
    """Returns the error for a damaged folder."""
    return DamagedError(
        f"the client store in {path} is damaged, {why}: go back to an earlier round with "
        "Checkpoints.restore(sim, round), restore the folder from a copy, or start a new run in another folder"
    )
