"""Federated data in other formats: LEAF's JSON, FedJAX's SQLite, TensorFlow Federated's HDF5.

A reader yields one `Rows` per client. `from_leaf`, `from_fedjax` and `from_tff` create a federation from any numeric
columns.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.data.files import Column
from fedjax_drift.errors import ConfigurationError, MissingPackageError

FilePath = str | os.PathLike[str]

INSTALL = 'pip install "fedjax-drift[formats]"'
CLIENT_BYTES = 2**27  # limit of the unpacked data of one client in FedJAX's format; femnist needs at most 2 MB
NDARRAY = 1  # FedJAX's msgpack extension type of a numeric array


class Rows(NamedTuple):
    """The data of one client in one file."""

    client: str
    x: np.ndarray
    """[n, ...], n >= 1."""
    y: np.ndarray
    """[n, ...]"""


def from_leaf(folder: FilePath) -> FederatedData:
    """Creates a federation from the JSON files of LEAF's preprocessing: folder/train/*.json and folder/test/*.json.

    Each file has `users`, `num_samples` and `user_data`, a dict user -> {"x": [...], "y": [...]}. The values are
    numbers in nested lists. All examples of a client must have the same shape. Fractional numbers become float32. The
    users become the clients, in the order of the files. Users without examples are left out.

    The test files may be missing. If all their users are clients (LEAF's `-t sample`), every client has its own test
    examples. Otherwise (`-t user`) the test set is pooled.

    Raises FileNotFoundError without folder/train/*.json. Raises ValueError if a file is damaged, is not a LEAF file, or
    contains text (encode it as integers first).
    """
    folder = checks.path("folder", folder).absolute()
    has_test = any((folder / "test").glob("*.json"))
    return _federation(read_leaf(folder / "train"), read_leaf(folder / "test") if has_test else None, folder)


def from_fedjax(train: FilePath, test: FilePath | None = None, x: str = "pixels", y: str = "label") -> FederatedData:
    """Creates a federation from FedJAX's SQLite files. Needs msgpack.

    The clients have the order of the file. Clients without examples are left out. If every client of ``test`` is also a
    training client, the test examples are stored per client. Otherwise the test set is pooled.

    Args:
      train, test: files with a table federated_data(client_id, data, num_examples), where data is zlib-compressed
        msgpack of NumPy columns. Default: no test set.
      x, y: names of the columns of the inputs and the labels. They must be numeric, and are not converted.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a file is damaged or has another format, or a column is missing or contains text.
      ImportError: msgpack is not installed.
    """
    return _from_files(read_fedjax, train, test, x, y)


def from_tff(train: FilePath, test: FilePath | None = None, x: str = "pixels", y: str = "label") -> FederatedData:
    """Creates a federation from TensorFlow Federated's HDF5 files. Needs h5py.

    ``train`` and ``test`` have one group examples/<client> per client. ``x`` and ``y`` are the names of the HDF5 data
    sets in a group that have the inputs and the labels. They must be numeric, and are not converted. The clients are
    sorted by name. The test set and the errors are as in `from_fedjax`, with h5py instead of msgpack.
    """
    return _from_files(read_tff, train, test, x, y)


def _from_files(
    read: Callable[[Path, str, str], Iterator[Rows]], train: FilePath, test: FilePath | None, x: str, y: str
) -> FederatedData:
    for name, column in (("x", x), ("y", y)):
        if not isinstance(column, str):
            raise ConfigurationError(f"{name} must be the name of a column, got {checks.shown(column)}: pass text")
    train_path = checks.path("train", train)
    tests = None if test is None else read(checks.path("test", test), x, y)
    return _federation(read(train_path, x, y), tests, train_path)


def _federation(train: Iterator[Rows], test: Iterator[Rows] | None, path: Path) -> FederatedData:
    clients = _by_client(train)
    tests = None if test is None else _by_client(test)
    with files.plain_errors(path):
        if tests is None:
            return FederatedData.from_clients(clients, name=path.stem)
        if tests.keys() <= clients.keys():
            return FederatedData.from_clients(clients, test_clients=tests, name=path.stem)
        pooled = FederatedData.from_clients(tests)
        return FederatedData.from_clients(clients, (pooled.x, pooled.y), name=path.stem)


def _by_client(rows: Iterator[Rows]) -> dict[str, Pair]:
    clients: dict[str, Pair] = {}
    for client, x, y in rows:
        if client in clients:
            raise ConfigurationError(f"client {client!r} must be in one file of the folder only, got two: remove one")
        clients[client] = (x, y)
    return clients


def read_femnist(path: Path) -> files.Arrays:
    """Reads x uint8 [M, 28, 28, 1] (255 = ink), y [M] and writer [M] (sorted), and x_test, y_test and writer_test.

    path: LEAF's folder with train and test, or the training file of FedJAX or TFF, with the test file in the same
    folder. If there is no test file, the result has no test arrays. The data are converted once and kept in the cache
    until a file changes. Raises the errors of `from_leaf`, `from_fedjax` and `from_tff`.
    """
    read: Callable[[Path], Iterator[Rows]]
    if path.suffix == "":
        read, train, test = read_leaf, path / "train", path / "test"
        sources = [*sorted(train.glob("*.json")), *sorted(test.glob("*.json"))]
    else:
        read = functools.partial(read_fedjax if path.suffix == ".sqlite" else read_tff, x="pixels", y="label")
        train, test = path, path.with_name(path.name.replace("_train", "_test"))
        sources = [part for part in (train, test) if part.exists()]
    parts = {"": train} | ({"_test": test} if test.exists() else {})

    def convert() -> files.Arrays:
        number: dict[str, int] = {}
        return {
            f"{key}{part}": column
            for part, place in parts.items()
            for key, column in _by_writer(read(place), place, number).items()
        }

    return files.cached(f"{path.stem}_{files.stamp(sources)}.npz", writers_spec(parts), convert)


def writers_spec(parts: Iterable[str], num_writers: int | None = None) -> files.Spec:
    """Returns the requirements for the arrays of a data set of handwritten characters.

    The arrays are x, y and writer, once with each suffix in ``parts``: x_test, y_test and writer_test for "_test".
    """
    spec: dict[str, Column] = {}
    for part in parts:
        spec |= {
            f"x{part}": Column("uint8", (28, 28, 1), part),
            f"y{part}": Column(table=part, classes=62),
            f"writer{part}": Column(table=part, classes=num_writers),
        }
    return spec


def _by_writer(rows: Iterator[Rows], place: Path, number: dict[str, int]) -> files.Arrays:
    """Returns the concatenated data, sorted by writer id. New writers get the next ids, which are added to
    ``number``."""
    clients = []
    for client, x, y in rows:
        name = f"{place}: client {client!r}"
        writer = client.rpartition(":")[2]  # FedJAX prefixes LEAF's name with a hash and a colon
        files.check({"labels": y}, {"labels": Column(classes=62)}, name)
        clients.append((number.setdefault(writer, len(number)), _ink(x, name), y))
    if not clients:
        raise ConfigurationError(f"{place} must have at least 1 example, got none: copy or download it again")
    ids, x, y = zip(*sorted(clients, key=lambda client: client[0]), strict=True)
    return {"x": np.concatenate(x), "y": np.concatenate(y), "writer": np.repeat(ids, [len(labels) for labels in y])}


def _ink(x: np.ndarray, name: str) -> np.ndarray:
    """Converts pixels in [0, 1], where 1 is background, to uint8 [n, 28, 28, 1], where 255 is ink.

    The conversion is exact, because the published pixels are bytes / 255.
    """
    if x[0].size != 28 * 28 or not (0 <= x.min() and x.max() <= 1):
        raise ConfigurationError(f"{name} must have images of 28 x 28 numbers in 0..1, got {list(x.shape[1:])}, "
                         f"{x.min()}..{x.max()}: is it FEMNIST?")  # fmt: skip
    return np.rint(255 * (1 - x.reshape(-1, 28, 28, 1))).astype(np.uint8)


def read_leaf(folder: Path) -> Iterator[Rows]:
    """Reads the clients of a folder with LEAF's JSON files, in the order of file names. Errors as in `from_leaf`."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} must have *.json files of LEAF's preprocess.sh, got none: copy them there")
    for path in paths:
        with files.opened(path) as file:
            content = json.loads(file.read())
            if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
                raise files.Wrong("it must have LEAF's users, num_samples and user_data: copy it again")
            for client, rows in zip(content["users"], content["num_samples"], strict=True):
                columns = content["user_data"].pop(client)  # pop: parsed JSON takes 30 times the memory of an image
                yield from _rows(client, _numbers(columns["x"]), _numbers(columns["y"]), rows)


def _numbers(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise files.Wrong(
            "all examples of a client must have the same shape: pad them, and write the file again"
        ) from error
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def read_fedjax(path: Path, x: str, y: str) -> Iterator[Rows]:
    """Reads the clients of one of FedJAX's SQLite files, in its order. Errors as in `from_fedjax`."""
    import sqlite3

    _require("msgpack", path)
    with files.opened(path) as file:
        # immutable: SQLite reads no other file and waits for no lock.
        uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro&immutable=1"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, os.fstat(file.fileno()).st_size)
                _check_database(connection)
                query = "SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid"
                for client, data, rows in connection.execute(query):
                    yield from _rows(_text(client), *_pick(_unpack(client, data), x, y), rows)
        except sqlite3.Error as error:
            raise files.Wrong(f"it is damaged or not one of FedJAX's files ({error}): download it again") from error


def _check_database(connection: Any) -> None:
    """Raises `Wrong` for a damaged database, and for a view instead of a table, because its query may never end."""
    query = "SELECT sql FROM sqlite_master WHERE name = 'federated_data' COLLATE NOCASE"
    statements = "; ".join(str(sql) for (sql,) in connection.execute(query))
    if not statements.startswith("CREATE TABLE "):
        got = files.one_line(statements or "no such table")
        raise files.Wrong(f"it must have a table federated_data, got {got}: download it again")
    if (result := connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        raise files.Wrong(f"it is damaged ({files.one_line(result)}): download it again")


def _unpack(client: str | bytes, compressed: bytes) -> dict[str, Any]:
    """Unpacks the columns of a client. A column that is not a numeric array (text) becomes None."""
    import msgpack

    def array(kind: int, packed: bytes) -> np.ndarray | None:
        if kind != NDARRAY:
            return None
        shape, dtype, values = msgpack.unpackb(packed, raw=True)
        return np.frombuffer(values, np.dtype(dtype.decode())).reshape(shape)

    inflate = zlib.decompressobj()
    data = inflate.decompress(compressed, CLIENT_BYTES)
    if not inflate.eof:
        raise files.Wrong(
            f"the data of client {client!r} must be complete and at most {CLIENT_BYTES} bytes unpacked, got "
            f"{'more' if len(data) == CLIENT_BYTES else 'incomplete data'}: download it again"
        )
    columns = msgpack.unpackb(data, ext_hook=array)
    if not isinstance(columns, dict) or not all(isinstance(name, str) for name in columns):
        raise files.Wrong(f"a client's data must be named columns, got a {type(columns).__name__}: download it again")
    return columns


def read_tff(path: Path, x: str, y: str) -> Iterator[Rows]:
    """Reads the clients of one of TensorFlow Federated's HDF5 files, sorted by name. Errors as in `from_tff`."""
    _require("h5py", path)
    import h5py

    def values(column: Any) -> np.ndarray:
        """Returns the values of a column, after a check of its size.

        HDF5 returns a fill value for values that are not stored. So a small file can declare a huge array.
        """
        packed = column.id.get_create_plist().get_nfilters() > 0
        files.must_fit(column.name, column.nbytes, None if packed else min(column.id.get_storage_size(), size))
        return column[()]

    with files.opened(path) as content, h5py.File(path, "r") as file:
        size, clients = os.fstat(content.fileno()).st_size, file.get("examples")
        if not isinstance(clients, h5py.Group):
            got = checks.listed(file) or "nothing"
            raise files.Wrong(f"it must have a group examples, got {got}: check that it is one of TFF's files")
        for client, columns in clients.items():
            if not isinstance(columns, h5py.Group):
                raise files.Wrong(
                    f"client {client!r} must be a group of columns, got an array: check that it is one of TFF's files"
                )
            inputs, labels = map(values, _pick(columns, x, y))
            yield from _rows(client, inputs, labels, len(labels))


def _pick(columns: Any, x: str, y: str) -> tuple[Any, Any]:
    for key in (x, y):
        if key not in columns:
            raise files.Wrong(
                f"it has no column {key!r}, only {checks.listed(columns)}: pass the names of the columns "
                "as x= (inputs) and y= (labels)"
            )
    return columns[x], columns[y]


def _rows(client: str, x: Any, y: Any, rows: int) -> Iterator[Rows]:
    """Yields one `Rows`, or nothing for a client without examples.

    Raises `Wrong` unless x and y are numeric and have ``rows`` rows.
    """
    for kind, array in (("inputs", x), ("labels", y)):
        if not isinstance(array, np.ndarray) or array.size and array.dtype.kind not in "biuf":
            raise files.Wrong(
                f"the {kind} of client {client!r} must be numbers: encode text as integers, and write the file again"
            )
        if array.shape[:1] != (rows,):
            raise files.Wrong(
                f"the {kind} of client {client!r} must have {rows} rows, got {list(array.shape)}: copy or write the "
                "file again"
            )
    if rows:
        yield Rows(client, x, y)


def _text(client: str | bytes) -> str:
    client = client.decode() if isinstance(client, bytes) else client
    if not isinstance(client, str):
        raise files.Wrong(f"client_id must be text, got {client!r}: download it again")
    return client


def _require(package: str, path: Path) -> None:
    try:
        __import__(package)
    except ImportError as error:
        raise MissingPackageError(f"reading {path} needs {package}: {INSTALL}") from error
