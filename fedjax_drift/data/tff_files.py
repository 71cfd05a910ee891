"""The files of TensorFlow Federated: SQLite databases, also packed with lzma, and the HDF5 files of before 2021.

A database has the tables ``examples(split_name, client_id, serialized_example_proto)`` and ``client_metadata(client_id,
split_name, num_examples)``. An example is a message `tf.train.Example`: a map from a name to a list of floats, integers
or texts. It is decoded here, so TensorFlow is not needed. (google-parfait/tensorflow-federated,
simulation/datasets/sql_client_data.py.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import lzma
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.data.federated_files import (
    INSTALL,
    Client,
    ColumnName,
    FilePath,
    checked_client,
    column_pair,
    database,
    federation,
)
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import checked

SQLITE, XZ, LZMA = b"SQLite format 3\0", b"\xfd7zXZ\0", b"]\0\0"
OTHER_FILE = "check that it is one of TFF's files"
MAKE_ROOM = "make room, or set FEDJAX_DRIFT_CACHE to another folder"
TEXTS, FLOATS, INTEGERS = 1, 2, 3  # numbers of the fields of tf.train.Feature


class Source(NamedTuple):
    """An open file."""

    splits: list[str]
    """The names of the splits of a database. Empty for an HDF5 file, which has one split without a name."""
    read: Callable[[str, str, str | None], Iterator[Client]]
    """``read(x, y, split)`` yields the clients of a split, sorted by name. x, y: the names of the columns."""
    texts: Callable[[str, str], Iterator[tuple[str, list[bytes]]]] | None = None
    """``texts(column, split)`` yields the clients of a split of a database, sorted by name, with their texts."""

    def chosen(self, split: str | None, default: str) -> str | None:
        """Returns the checked name of a split. For None, it is the only split, or ``default`` if there are several."""
        if not self.splits:
            if split is not None:
                checks.refuse("split must be None for an HDF5 file", repr(split), "leave it out")
            return None
        only = self.splits[0] if len(self.splits) == 1 else default
        return checks.choice("split", only if split is None else split, self.splits)


@checked
def from_tff(
    train: FilePath,
    test: FilePath | None = None,
    x: ColumnName = "pixels",
    y: ColumnName = "label",
    *,
    split: str | None = None,
) -> FederatedData:
    """Creates a federation from TensorFlow Federated's files. TensorFlow is not needed.

    Since 2021, they are SQLite databases such as emnist_all.sqlite, which may be packed (emnist_all.sqlite.lzma).
    Before, they were HDF5 files with one group examples/<client> per client, which need h5py.

    The clients are sorted by name. The test set, the columns and the errors are as in `from_fedjax`. A database has no
    shapes: x is [M, length], float32 or int64, so give images their shape with
    ``dataclasses.replace(data, x=data.x.reshape(-1, 28, 28, 1), x_test=data.x_test.reshape(-1, 28, 28, 1))``.

    Args:
      train: a file with the training examples. A packed file is unpacked to a temporary file in the cache.
      test: a file with the test examples. Default: those in the file ``train``, if it is a database that has a split
        like ``split``, but with "test" instead of "train" in its name. Otherwise there is no test set.
      x, y: names of the columns of the inputs and the labels, for example x="image" for CIFAR-100.
      split: the split of a database, such as "all_train" or "digits_only_train" of EMNIST. Default: its only split, or
        "train".
    """
    train_path, test_path = Path(train), None if test is None else Path(test)
    tests: Iterable[Client] = ()
    with opened(train_path) as file:
        split = file.chosen(split, "train")
        clients, test_split = list(file.read(x, y, split)), (split or "train").replace("train", "test")
        if test_path is None and test_split != split and test_split in file.splits:
            tests = list(file.read(x, y, test_split))
    if test_path is not None:
        with opened(test_path) as file:
            tests = list(file.read(x, y, file.chosen(None, test_split)))
    return federation(clients, tests, train_path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Opens a file of any of the three kinds. A packed file is unpacked to a temporary file in the cache.

    Errors in the context become ValueErrors that name the file.
    """
    with files.opened(path) as file, contextlib.ExitStack() as stack:
        start = file.read(len(SQLITE))
        file.seek(0)
        is_packed = start.startswith((XZ, LZMA)) or (path.suffix == ".lzma" and start != SQLITE)
        if not is_packed and start != SQLITE and path.suffix != ".sqlite":
            files.require("h5py", f"reading {path}", INSTALL)
            yield Source([], functools.partial(_read_h5, path))
            return
        file_path = stack.enter_context(_unpacked(file)) if is_packed else path
        connection = stack.enter_context(database(file_path, "read FedJAX's files with from_fedjax"))
        splits = connection.execute("SELECT DISTINCT split_name FROM client_metadata")
        names = sorted(str(name) for (name,) in splits)
        yield Source(names, functools.partial(_read_sqlite, connection), functools.partial(_read_texts, connection))


# ---------------------------------------------------------------- SQLite


def _read_sqlite(connection: sqlite3.Connection, x: str, y: str, split: str | None) -> Iterator[Client]:
    for client, messages, rows in _messages(connection, split):
        examples = [_values_of(message, x, y) for message in messages]
        inputs, labels = (_stacked(client, name, [row[i] for row in examples]) for i, name in enumerate((x, y)))
        if labels is not None and labels.shape[1:] == (1,):
            labels = labels[:, 0]
        yield from checked_client(client, inputs, labels, rows)


def _messages(connection: sqlite3.Connection, split: str | None) -> Iterator[tuple[str, list[bytes], int]]:
    """Yields each client, its examples, and how many they should be."""
    counts = dict(
        connection.execute("SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?", [split])
    )
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid"
    for client, rows in itertools.groupby(connection.execute(query, [split]), key=lambda row: row[0]):
        messages = [message for _, message in rows]
        if not isinstance(client, str) or not all(isinstance(message, bytes) for message in messages):
            raise ConfigurationError("client_id must be text and serialized_example_proto bytes: download it again")
        yield client, messages, counts.pop(client, 0)
    if any(counts.values()):
        missing = next(filter(counts.get, counts))
        raise ConfigurationError(f"the examples of client {missing!r} are missing: download it again")


def _read_texts(connection: sqlite3.Connection, column: str, split: str | None) -> Iterator[tuple[str, list[bytes]]]:
    """Yields each client, and the text of each of its examples."""
    for client, messages, rows in _messages(connection, split):
        texts = [_text(_features(message), column) for message in messages]
        if len(texts) != rows:
            checks.refuse(f"client {client!r} must have {rows} examples", len(texts), "download it again")
        yield client, texts


def _text(features: dict[str, bytes], column: str) -> bytes:
    for kind, message in _fields(features.get(column, b"")):
        if kind == TEXTS:
            return b"".join(value for _, value in _fields(message))
    checks.refuse(f"its examples must have the text {column}", checks.listed(features), "is it another file?")


def _stacked(client: str, name: str, values: list[np.ndarray | None]) -> np.ndarray | None:
    """Returns the values of a client's examples as one array [n, length], or None for text."""
    arrays = [array for array in values if array is not None]
    if len({(array.dtype, array.shape) for array in arrays}) > 1:
        what = f"{name} of client {client!r} must have as many values in each example"
        checks.refuse(what, f"{arrays[0].size} and others", "pad them, and write the file again")
    return np.stack(arrays) if len(arrays) == len(values) else None


def _values_of(example: bytes, x: str, y: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns two features of a message `tf.train.Example`, [length] each."""
    inputs, labels = column_pair(_features(example), x, y)
    return _numbers(inputs), _numbers(labels)


def _features(example: bytes) -> dict[str, bytes]:
    """Returns the features of a message `tf.train.Example` by name. They are not decoded yet."""
    features = {}
    for _, entries in _fields(example):
        for _, entry in _fields(entries):
            of_entry = dict(_fields(entry))
            features[of_entry[1].decode()] = of_entry[2]
    return features


def _numbers(feature: bytes) -> np.ndarray | None:
    """Returns the numbers in a message `tf.train.Feature`, float32 or int64 [length]. None for text."""
    for kind, message in _fields(feature):
        values = b"".join(value for _, value in _fields(message))
        if kind == FLOATS:
            return np.frombuffer(values, "<f4")
        if kind == INTEGERS:
            return _integers(values)
    return None


def _integers(content: bytes) -> np.ndarray:
    """Decodes consecutive integers of protocol buffers: 7 bits per byte. The last byte of an integer is below 128."""
    encoded = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(encoded < 128) + 1
    if len(ends) == len(encoded):
        return encoded.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    places = np.arange(len(encoded)) - np.repeat(starts, ends - starts)
    shifted = (encoded & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(shifted, starts).view(np.int64)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the numbers and the contents of the fields of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _integer(message, at)
        start, kind = at, tag & 7
        if kind == 2:
            length, start = _integer(message, at)
            at = start + length
        elif kind == 0:
            _, at = _integer(message, at)
        else:
            at += {1: 8, 5: 4}.get(kind, len(message) + 1)
        if at > len(message):
            raise ConfigurationError("an example is damaged: download it again")
        yield tag >> 3, message[start:at]


def _integer(message: bytes, at: int) -> tuple[int, int]:
    """Returns the integer that is encoded at a position, and the position after it."""
    value = place = 0
    while (byte := message[at]) >= 128:
        value |= (byte & 127) << place
        at, place = at + 1, place + 7
    return value | byte << place, at + 1


# ---------------------------------------------------------------- lzma


@contextlib.contextmanager
def _unpacked(file: BinaryIO) -> Iterator[Path]:
    """Unpacks a database to a temporary file in the cache."""
    folder = files.cache_dir()
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.NamedTemporaryFile(prefix="unpacked_", suffix=".sqlite", dir=folder)
            database = stack.enter_context(temporary)
            shutil.copyfileobj(lzma.open(file), database)
            database.flush()
        except OSError as error:
            raise ConfigurationError(f"it can't be unpacked in {folder} ({error.strerror}): {MAKE_ROOM}") from error
        yield Path(database.name)


# ---------------------------------------------------------------- HDF5


def read_h5(path: Path, x: str, y: str) -> Iterator[Client]:
    """Reads the clients of one HDF5 file, sorted by name. Errors as in `opened`."""
    with opened(path) as file:
        yield from file.read(x, y, None)


def _read_h5(path: Path, x: str, y: str, split: str | None) -> Iterator[Client]:
    import h5py

    with h5py.File(path, "r") as file:
        clients = file.get("examples")
        if not isinstance(clients, h5py.Group):
            checks.refuse("it must have a group examples", checks.listed(file) or "nothing", OTHER_FILE)
        for client, columns in clients.items():
            if not isinstance(columns, h5py.Group):
                checks.refuse(f"client {client!r} must be a group of columns", "an array", OTHER_FILE)
            inputs, labels = (column[()] for column in column_pair(columns, x, y))
            yield from checked_client(client, inputs, labels, len(labels))
