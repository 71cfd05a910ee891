"""The files of a client store: a folder of two files and the pins, locked for one process.

    states   records in native byte order: the initial state, then slot 0, slot 1, ...; after each a checksum, the
             CRC-32 that begins with the client's id (the initial state's with N) and goes on over the record
    index    one line of JSON (format number, round, N, leaves, identity, ...), then the table, int32 [N], then the
             CRC-32 of both, uint32, all little-endian; written as ``index.new`` and renamed
    index.7  a pin: the index as it was at round 7

The lock is on ``states`` and ends with the process. Records go through the operating system's page cache, as those of
a memory map would, but by read and write calls: a full disk or a truncated file is then an error, where touching a map
would end the process. Nothing is forced to the disk (no fsync): the files survive the death of their process, not a
power failure. A record that was not written as it is read, or for another client, is detected when it is read.
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
from fedjax_drift.errors import ConfigurationError, DamagedError, OtherRunError
from fedjax_drift.storage.files import lock
from fedjax_drift.storage.identity import differences, few

FORMAT = 3
INITIAL = -1  # the slot in a file of the state that clients never seen have
INDEX, STATES, NEW_INDEX = "index", "states", "index.new"  # files of the folder
MOST_BUFFERS = 1024  # in one read or write call
CHECK = 4  # bytes of a record's checksum


def pin_file(t: int | str) -> str:
    """The name of the file of the pin of round t."""
    return f"{INDEX}.{t}"


def header(num_clients: int, leaves: list[list], identity: Mapping[str, Any]) -> dict[str, Any]:
    """What an index says of the records, but for the round. leaves: see `tree.layout`."""
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
        """Makes room on the disk for slots below ``end``. OSError, with the file as it was, if there is none."""
        start, stop = os.fstat(self.states.fileno()).st_size, self._start(end)
        if start < stop and hasattr(os, "posix_fallocate"):  # elsewhere a write fails
            try:
                os.posix_fallocate(self.states.fileno(), start, stop - start)
            except OSError:
                os.ftruncate(self.states.fileno(), start)
                raise
        self.end = max(self.end, end)

    def read(self, slot: int, client: int, into: list[np.ndarray]) -> None:
        check = np.empty(CHECK, np.uint8)
        if not _transfer(os.preadv, self.states.fileno(), [*into, check], self._start(slot)):
            raise damaged(self.path, f"its file {STATES} has been cut short")
        if not np.array_equal(check, _checksum(client, into)):
            whose = "the initial state" if slot == INITIAL else f"the state of client {client}"
            raise damaged(self.path, f"{whose} is not what was written")

    def write(self, slot: int, client: int, parts: list[np.ndarray]) -> None:
        _write(self.states.fileno(), [*parts, _checksum(client, parts)], self._start(slot))

    def prepare(self, header: dict[str, Any], t: int, slots: np.ndarray) -> int:
        """Writes the index of round t with the slots, int32 [N], as ``index.new``; returns the number of that file."""
        line = json.dumps(header | {"round": t}).encode() + b"\n"
        slots = np.ascontiguousarray(slots, "<i4").view(np.uint8)
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
        """Replaces the index by the one that `prepare` has written, atomically."""
        os.replace(self.path / NEW_INDEX, self.path / INDEX)

    def published(self, number: int) -> bool:
        """Whether the index is the file of this number."""
        return os.stat(self.path / INDEX).st_ino == number

    def pin(self, t: int) -> None:
        """Copies the index to the pin of round t, atomically."""
        new = self.path / NEW_INDEX
        try:
            new.write_bytes((self.path / INDEX).read_bytes())
            os.replace(new, self.path / pin_file(t))
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def unpin(self, t: int) -> None:
        """Deletes the pin of round t."""
        (self.path / pin_file(t)).unlink(missing_ok=True)

    def read_pins(self) -> Iterator[tuple[int, np.ndarray]]:
        """Round and slots of every pin, but for damaged ones."""
        for file in self.path.glob(pin_file("[0-9]*")):
            with contextlib.suppress(DamagedError):
                header, slots = self.read_index(file.name)
                yield header["round"], slots

    def read_index(self, name: str) -> tuple[dict[str, Any], np.ndarray]:
        """The header and the slots, int32 [N], of an index or a pin. Raises DamagedError, and ConfigurationError for
        another format."""
        try:
            content = (self.path / name).read_bytes()
            line = content[: content.find(b"\n") + 1]
            header = json.loads(line)
            number = header["format"]
        except (OSError, ValueError, TypeError, KeyError):
            raise damaged(self.path, f"its file {name} can't be read") from None
        if number != FORMAT:
            raise ConfigurationError(
                f"the bank in {self.path} must be of format {FORMAT}, got {number}: use the version that wrote it"
            )
        if zlib.crc32(content[:-4]).to_bytes(4, "little") != content[-4:]:
            raise damaged(self.path, f"its file {name} is not what was written")
        return header, np.frombuffer(content[len(line) : -4], "<i4").astype(np.int32)

    def check_size(self, end: int) -> None:
        """Raises DamagedError unless the file holds the records of all slots below ``end``."""
        size = os.fstat(self.states.fileno()).st_size
        if size < self._start(end):
            raise damaged(self.path, f"its file {STATES} must have {self._start(end)} bytes, got {size}")

    def close(self) -> None:
        self.states.close()


def _checksum(client: int, parts: list[np.ndarray]) -> np.ndarray:
    """The checksum of a client's record, uint8 [CHECK]."""
    value = client
    for part in parts:
        value = zlib.crc32(part.data, value)
    return np.frombuffer(value.to_bytes(CHECK, "little"), np.uint8)


def _transfer(call: Callable[..., int], file: int, parts: list[np.ndarray], offset: int) -> bool:
    """Reads or writes all bytes of the parts (uint8, contiguous) from offset on. False if the file ends before that."""
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
def explained(path: Path) -> Iterator[None]:
    """Raises a ConfigurationError about the path for every OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"path must be a folder where files can be written and locked, got {path} ({error.strerror}): choose "
            "another, or see to that"
        ) from error


def check_empty(path: Path) -> None:
    """Raises ConfigurationError if the folder holds files, but for those of a `ClientStore.create` that was killed."""
    files = {file.name for file in path.iterdir()}
    unfinished = NEW_INDEX in files or STATES in files and not (path / STATES).stat().st_size
    if others := sorted(files - ({STATES, NEW_INDEX} if unfinished else set())):
        raise ConfigurationError(
            f"path must be a new or empty folder, got {path}, which holds {few(others)}: choose another"
        )


def check_same(path: Path, stored: dict[str, Any], current: dict[str, Any], strict: bool = True) -> None:
    """Raises OtherRunError with the differences unless two headers agree; a warning if the identities alone differ and
    not ``strict``."""

    def described(header: dict[str, Any]) -> dict[str, str]:
        plain = {name: str(header[name]) for name in ("num_clients", "byteorder")}
        return plain | leaves_by_name(header["leaves"])

    wrong = tree.differences(described(stored), described(current), "in the bank, not")
    changed, _ = differences(stored["identity"], current["identity"])
    listed = wrong + [f"identity {name!r}: {old} in the bank, not {new}" for name, (old, new) in changed.items()]
    message = f"the bank in {path} belongs to another simulation: {few(listed)}"
    if wrong or changed and strict:
        raise OtherRunError(f"{message}: open it with what it was made with, or choose another folder")
    if changed:
        checks.warn(f"{message}: opened all the same, as strict=False")


def leaves_by_name(layout: list[list]) -> dict[str, str]:
    """Name -> dtype and shape."""
    return {f"leaf {path}": value for path, value in tree.described(layout).items()}


def damaged(path: Path, why: str) -> DamagedError:
    """The error for a damaged folder."""
    return DamagedError(
        f"the bank in {path} is damaged, {why}: go back to an earlier round with Checkpoints.restore(sim, round), "
        "restore the folder from a copy, or start a new one in another folder"
    )
