"""Federated data in others' forms: LEAF's JSON, FedJAX's SQLite, TensorFlow Federated's HDF5.

A reader yields one `Rows` per client. `from_leaf`, `from_fedjax` and `from_tff` make a federation of any numeric
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
CLIENT_BYTES = 2**27  # to which a client's data in FedJAX's form may unpack; femnist's largest take 2 MB
NDARRAY = 1  # FedJAX's msgpack extension type of a numeric array


class Rows(NamedTuple):
    """What one client holds in one file."""

    client: str
    x: np.ndarray
    """[n, ...], n >= 1."""
    y: np.ndarray
    """[n, ...]"""


def from_leaf(folder: FilePath) -> FederatedData:
    """A federation from the JSON files that LEAF's preprocessing writes: folder/train/*.json and folder/test/*.json.

    Each file holds `users`, `num_samples` and `user_data`, user -> {"x": [...], "y": [...]}; any numbers, nested to one
    shape (fractions become float32). Users become the clients, in the files' order; those without rows are left out.
    The test part may be missing. Where it has the same users (LEAF's `-t sample`), their rows are the clients' own test
    rows, otherwise (`-t user`) a pooled test set.

    Raises FileNotFoundError without folder/train/*.json, ValueError for files that are damaged, no LEAF, or hold text
    (encode it as integers first).
    """
    folder = checks.path("folder", folder).absolute()
    has_test = any((folder / "test").glob("*.json"))
    return _federation(read_leaf(folder / "train"), read_leaf(folder / "test") if has_test else None, folder)


def from_fedjax(train: FilePath, test: FilePath | None = None, x: str = "pixels", y: str = "label") -> FederatedData:
    """A federation from FedJAX's SQLite files; needs msgpack.

    train, test: files with a table federated_data(client_id, data, num_examples), data being zlib-compressed msgpack of
    NumPy columns. x, y: names of the columns for inputs and labels, numeric ones, kept as they are. Clients come in the
    file's order; those without rows are left out. Clients of `test` that also train get these as their own test rows;
    where it has others too, the test set is pooled.

    Raises FileNotFoundError without a file, ValueError for one that is damaged, of another form, lacks a column, or
    holds text in it, ImportError without msgpack.
    """
    return _from_files(read_fedjax, train, test, x, y)


def from_tff(train: FilePath, test: FilePath | None = None, x: str = "pixels", y: str = "label") -> FederatedData:
    """A federation from TensorFlow Federated's HDF5 files; needs h5py.

    train, test: files with a group examples/<client> of data sets named `x` and `y`, numeric ones, kept as they are.
    For the rest see `from_fedjax`. Raises as that does, ImportError without h5py.
    """
    return _from_files(read_tff, train, test, x, y)


def _from_files(
    read: Callable[[Path, str, str], Iterator[Rows]], train: FilePath, test: FilePath | None, x: str, y: str
) -> FederatedData:
    for name, column in (("x", x), ("y", y)):
        if not isinstance(column, str):
            raise ConfigurationError(f"{name} must be the name of a column, got {checks.shown(column)}: pass text")
    place = checks.path("train", train)
    tests = None if test is None else read(checks.path("test", test), x, y)
    return _federation(read(place, x, y), tests, place)


def _federation(train: Iterator[Rows], test: Iterator[Rows] | None, place: Path) -> FederatedData:
    clients = _by_client(train)
    tests = None if test is None else _by_client(test)
    with files.plain_errors(place):
        if tests is None:
            return FederatedData.from_clients(clients, name=place.stem)
        if tests.keys() <= clients.keys():
            return FederatedData.from_clients(clients, test_clients=tests, name=place.stem)
        pooled = FederatedData.from_clients(tests)
        return FederatedData.from_clients(clients, (pooled.x, pooled.y), name=place.stem)


def _by_client(rows: Iterator[Rows]) -> dict[str, Pair]:
    clients: dict[str, Pair] = {}
    for client, x, y in rows:
        if client in clients:
            raise ConfigurationError(f"client {client!r} must be in one file of the folder, got it in two: remove one")
        clients[client] = (x, y)
    return clients


def read_femnist(path: Path) -> files.Arrays:
    """x uint8 [M, 28, 28, 1], 255 = ink, y [M], writer [M], rising, and x_test, y_test, writer_test of the test part.

    path: LEAF's folder of train and test, or FedJAX's or TFF's training file with the test file beside it; the test
    part may be missing, and its arrays then are, too. Converted once, kept in the cache until a file changes. Raises
    FileNotFoundError, ValueError and ImportError as `from_leaf`, `from_fedjax` and `from_tff` do.
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
    """Characters of 62 classes and their writers: x, y and writer with each of `parts` behind the name."""
    spec: dict[str, Column] = {}
    for part in parts:
        spec |= {
            f"x{part}": Column("uint8", (28, 28, 1), part),
            f"y{part}": Column(table=part, classes=62),
            f"writer{part}": Column(table=part, classes=num_writers),
        }
    return spec


def _by_writer(rows: Iterator[Rows], place: Path, number: dict[str, int]) -> files.Arrays:
    """The rows side by side, by the writers' numbers; writers that are new here get the next ones."""
    clients = []
    for client, x, y in rows:
        name = f"{place}: client {client!r}"
        writer = client.rpartition(":")[2]  # FedJAX writes a hash and a colon before LEAF's name
        files.check({"labels": y}, {"labels": Column(classes=62)}, name)
        clients.append((number.setdefault(writer, len(number)), _ink(x, name), y))
    if not clients:
        raise ConfigurationError(f"{place} must hold at least 1 row, got none: copy or download it again")
    ids, x, y = zip(*sorted(clients, key=lambda client: client[0]), strict=True)
    return {"x": np.concatenate(x), "y": np.concatenate(y), "writer": np.repeat(ids, [len(labels) for labels in y])}


def _ink(x: np.ndarray, name: str) -> np.ndarray:
    """uint8 [n, 28, 28, 1], 255 = ink, from numbers with 1 = background; they are bytes / 255, so this is exact."""
    if x[0].size != 28 * 28 or not (0 <= x.min() and x.max() <= 1):
        raise ConfigurationError(f"{name} must have images of 28 x 28 numbers in 0..1, got {list(x.shape[1:])}, "
                         f"{x.min()}..{x.max()}: is it FEMNIST?")  # fmt: skip
    return np.rint(255 * (1 - x.reshape(-1, 28, 28, 1))).astype(np.uint8)


def read_leaf(folder: Path) -> Iterator[Rows]:
    """The clients of a folder of LEAF's JSON files, by file name. Raises as `from_leaf` does."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} must hold *.json, as LEAF's preprocess.sh writes them, and holds none: copy them there"
        )
    for path in paths:
        with files.opened(path) as file:
            content = json.loads(file.read())
            if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
                raise files.Wrong("it must hold users, num_samples and user_data, as LEAF writes them: copy it again")
            for client, rows in zip(content["users"], content["num_samples"], strict=True):
                columns = content["user_data"].pop(client)  # the text's numbers take 30 times an image's room
                yield from _rows(client, _numbers(columns["x"]), _numbers(columns["y"]), rows)


def _numbers(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise files.Wrong("the rows of a client must have one shape: pad them, and write it anew") from error
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def read_fedjax(path: Path, x: str, y: str) -> Iterator[Rows]:
    """The clients of one of FedJAX's SQLite files, in its order. Raises as `from_fedjax` does."""
    import sqlite3

    _require("msgpack", path)
    with files.opened(path) as file:
        # immutable: nothing beside the file is read, and no lock is waited for.
        uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro&immutable=1"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, os.fstat(file.fileno()).st_size)
                _check_database(connection)
                query = "SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid"
                for client, data, rows in connection.execute(query):
                    yield from _rows(_text(client), *_pick(_unpack(client, data), x, y), rows)
        except sqlite3.Error as error:
            raise files.Wrong(f"it is damaged or none of FedJAX's SQLite files ({error}): download it again") from error


def _check_database(connection: Any) -> None:
    """`Wrong` for a damaged one, and for a view in the table's place, which may be a program without an end."""
    query = "SELECT sql FROM sqlite_master WHERE name = 'federated_data' COLLATE NOCASE"
    made_by = "; ".join(str(sql) for (sql,) in connection.execute(query))
    if not made_by.startswith("CREATE TABLE "):
        got = files.one_line(made_by or "no such table")
        raise files.Wrong(f"it must have a table federated_data, got {got}: download it again")
    if (found := connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        raise files.Wrong(f"it is damaged ({files.one_line(found)}): download it again")


def _unpack(client: str | bytes, compressed: bytes) -> dict[str, Any]:
    """FedJAX's columns; those that are no numeric arrays (text) become None."""
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
            f"the data of client {client!r} must be whole and unpack to at most {CLIENT_BYTES} bytes, got "
            f"{'more' if len(data) == CLIENT_BYTES else 'a part'}: download it again"
        )
    columns = msgpack.unpackb(data, ext_hook=array)
    if not isinstance(columns, dict) or not all(isinstance(name, str) for name in columns):
        raise files.Wrong(f"a client's data must be named columns, got a {type(columns).__name__}: download it again")
    return columns


def read_tff(path: Path, x: str, y: str) -> Iterator[Rows]:
    """The clients of one of TensorFlow Federated's HDF5 files, by name. Raises as `from_tff` does."""
    _require("h5py", path)
    import h5py

    def values(column: Any) -> np.ndarray:
        """HDF5 makes up values that a file declares and lacks, so none may lack."""
        packed = column.id.get_create_plist().get_nfilters() > 0
        files.must_fit(column.name, column.nbytes, None if packed else min(column.id.get_storage_size(), size))
        return column[()]

    with files.opened(path) as content, h5py.File(path, "r") as file:
        size, clients = os.fstat(content.fileno()).st_size, file.get("examples")
        if not isinstance(clients, h5py.Group):
            got = files.one_line(", ".join(file) or "nothing")
            raise files.Wrong(f"it must hold a group examples, got {got}: is it one of TFF's?")
        for client, columns in clients.items():
            if not isinstance(columns, h5py.Group):
                raise files.Wrong(f"client {client!r} must be a group of columns, got an array: is it one of TFF's?")
            inputs, labels = map(values, _pick(columns, x, y))
            yield from _rows(client, inputs, labels, len(labels))


def _pick(columns: Any, x: str, y: str) -> tuple[Any, Any]:
    for key in (x, y):
        if key not in columns:
            raise files.Wrong(
                f"it has no column {key!r}, only {files.one_line(', '.join(columns))}: name the inputs with x=, "
                "labels y="
            )
    return columns[x], columns[y]


def _rows(client: str, x: Any, y: Any, rows: int) -> Iterator[Rows]:
    """One `Rows`, or none for a client without rows; ValueError unless both are numbers, `rows` of them."""
    for kind, array in (("inputs", x), ("labels", y)):
        if not isinstance(array, np.ndarray) or array.size and array.dtype.kind not in "biuf":
            raise files.Wrong(
                f"the {kind} of client {client!r} must be numbers: encode text as integers, and write it anew"
            )
        if array.shape[:1] != (rows,):
            raise files.Wrong(
                f"the {kind} of client {client!r} must be {rows} rows, got {list(array.shape)}: copy or make it again"
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
