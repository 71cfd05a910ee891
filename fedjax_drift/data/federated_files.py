"""Federated data in the formats of LEAF (JSON) and FedJAX (SQLite), and what these share with TFF's formats.

The functions read_... yield one `Client` after the other. `from_leaf` and `from_fedjax` create a federation from any
numeric columns. `files.opened` adds the name of the file to all errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.data import files, joining
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Fix, checked

FilePath = Annotated[str | os.PathLike[str], spec.PATH]
ColumnName = Annotated[str, spec.instance(str, "the name of a column"), Fix("pass text")]
Client = tuple[str, np.ndarray, np.ndarray]
"""The name, the inputs [n, ...] and the labels [n, ...] of a client in one file, n >= 1."""

INSTALL = "msgpack h5py"  # the packages that read these formats
ENCODE = "encode text as integers, and write the file again"
NDARRAY = 1  # FedJAX's msgpack extension type of a numeric array


@checked
def from_leaf(folder: FilePath) -> FederatedData:
    """Creates a federation from the JSON files of LEAF's preprocessing: folder/train/*.json and folder/test/*.json.

    Each file has `users`, `num_samples` and `user_data`, a dict user -> {"x": [...], "y": [...]}. The values are
    numbers in nested lists. All examples must have the same shape. If one client has fractional numbers, the numbers of
    all clients become float32. Labels that are whole numbers, such as 5.0, become integers. The users become the
    clients, in the order of the files. Users without examples are left out.

    The test files may be missing. If all their users are clients (LEAF's `-t sample`), every client has its own test
    examples. Otherwise (`-t user`) the test set is pooled.

    Raises FileNotFoundError without folder/train/*.json. Raises ValueError if a file is damaged, is not a LEAF file, or
    contains text (encode it as integers first).
    """
    folder = Path(folder)
    has_test = any((folder / "test").glob("*.json"))
    return federation(read_leaf(folder / "train"), read_leaf(folder / "test") if has_test else (), folder)


@checked
def from_fedjax(
    train: FilePath, test: FilePath | None = None, x: ColumnName = "pixels", y: ColumnName = "label"
) -> FederatedData:
    """Creates a federation from FedJAX's SQLite files. Needs msgpack.

    The clients have the order of the file. Clients without examples are left out. If every client of ``test`` is also a
    training client, the test examples are stored per client. Otherwise the test set is pooled.

    Args:
      train, test: files with a table federated_data(client_id, data, num_examples), where data is zlib-compressed
        msgpack of NumPy columns. Default: no test set.
      x, y: names of the columns of the inputs and the labels. They must be numeric. If the dtypes of clients differ,
        they are converted to one that holds the numbers of all clients. Labels that are whole numbers, such as 5.0,
        become integers.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a file is damaged or has another format, or a column is missing or contains text.
      ImportError: msgpack is not installed.
    """
    tests = () if test is None else read_fedjax(Path(test), x, y)
    return federation(read_fedjax(Path(train), x, y), tests, Path(train))


def federation(clients: Iterable[Client], test_clients: Iterable[Client], path: Path) -> FederatedData:
    """The test set is pooled if one of its clients is no training client."""
    train, test = _by_name(clients), _by_name(test_clients)
    with files.plain_errors(path):
        if train:
            _unify(train, test)
        if test.keys() <= train.keys():
            return FederatedData.from_clients(train, test_clients=test or None, name=path.stem)
        pooled = FederatedData.from_clients(test)
        return FederatedData.from_clients(train, (pooled.x, pooled.y), name=path.stem)


def _by_name(clients: Iterable[Client]) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for client, x, y in clients:
        if client in pairs:
            checks.refuse(f"client {client!r} must be in one file of the folder only", "two", "remove one")
        pairs[client] = (x, y)
    return pairs


def _unify(*parts: dict[str, Pair]) -> None:
    """Converts the inputs of all clients to one dtype, and the labels, too. Raises ValueError if a number changes."""
    for column, kind in enumerate(("inputs", "labels")):
        dtypes = {pair[column].dtype for part in parts for pair in part.values()}
        dtype, fix = joining.common_dtype(dtypes), "write the file again with numbers of one dtype"
        for part in parts:
            for client, pair in part.items():
                array = checks.converted(f"the {kind} of client {client!r}", pair[column], dtype, fix)
                part[client] = (pair[0], array) if column else (array, pair[1])


def checked_client(client: str, x: Any, y: Any, rows: int) -> Iterator[Client]:
    """Yields one `Client`, or nothing if it has no examples. Labels like 5.0, which are whole, become int64.

    x and y must be numeric and have ``rows`` rows.
    """
    for kind, array in ((f"the inputs of client {client!r}", x), (f"the labels of client {client!r}", y)):
        if not isinstance(array, np.ndarray) or array.size and array.dtype.kind not in "biuf":
            raise ConfigurationError(f"{kind} must be numbers: {ENCODE}")
        if array.shape[:1] != (rows,):
            checks.refuse(f"{kind} must have {rows} rows", list(array.shape), "copy or write the file again")
    if rows:
        is_whole = y.dtype.kind == "f" and bool((np.abs(y) < 2**53).all() and (y == np.floor(y)).all())
        yield client, x, y.astype(np.int64) if is_whole else y


def column_pair(columns: Any, x: str, y: str) -> tuple[Any, Any]:
    """Returns the columns of the inputs and the labels. Refuses names that are not there."""
    for key in (x, y):
        if key not in columns:
            raise ConfigurationError(
                f"it has no column {key!r}, only {checks.listed(columns) or 'none'}{checks.nearest(key, columns)}: "
                "pass the names of the columns as x= (inputs) and y= (labels)"
            )
    return columns[x], columns[y]


@contextlib.contextmanager
def database(path: Path, other: str) -> Iterator[sqlite3.Connection]:
    """Opens an SQLite database for reading. Errors of SQLite become ValueErrors, which suggest another reader."""
    # immutable: SQLite reads no other file and waits for no lock.
    uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            if (result := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise ConfigurationError(f"it is damaged ({files.one_line(result)}): download it again")
            yield connection
    except sqlite3.Error as error:
        why = f"it is damaged or of another kind ({error}): download it again, or {other}"
        raise ConfigurationError(why) from error


def read_leaf(folder: Path) -> Iterator[Client]:
    """Reads the clients of a folder with LEAF's JSON files, in the order of file names. Errors as in `from_leaf`."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} must have *.json files of LEAF's preprocess.sh, got none: copy them there")
    for path in paths:
        with files.opened(path) as file:
            content = json.loads(file.read())
            if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
                raise ConfigurationError("it must have LEAF's users, num_samples and user_data: copy it again")
            for client, rows in zip(content["users"], content["num_samples"], strict=True):
                columns = content["user_data"].pop(client)  # pop: parsed JSON takes 30 times the memory of an image
                x, y = (_narrowed(columns[key], f"{key} of client {client!r}") for key in ("x", "y"))
                yield from checked_client(client, x, y, rows)


def _narrowed(values: Any, name: str) -> np.ndarray:
    """Returns numbers, of which fractions become float32."""
    array, fix = numbers(values, name), "scale the numbers, and write the file again"
    return checks.converted(name, array, np.float32, fix) if array.dtype.kind == "f" and array.ndim else array


def numbers(values: Any, name: str) -> np.ndarray:
    """Returns lists of numbers as an array. Refuses anything else."""
    try:
        array = checks.exact_array(values)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except ValueError as error:
        why = "all examples of a client must have the same shape: pad them, and write the file again"
        raise ConfigurationError(why) from error
    if array.dtype.kind not in "biuf":
        raise ConfigurationError(f"{name} must be numbers: {ENCODE}")
    return array


def read_fedjax(path: Path, x: str, y: str) -> Iterator[Client]:
    """Reads the clients of one of FedJAX's SQLite files, in its order. Errors as in `from_fedjax`."""
    files.require("msgpack", f"reading {path}", INSTALL)
    other = "read TensorFlow Federated's files with from_tff"
    with files.opened(path), database(path, other) as connection:
        query = "SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid"
        for client, data, rows in connection.execute(query):
            columns = column_pair(_unpack(data), x, y)
            name = client.decode() if isinstance(client, bytes) else client
            if not isinstance(name, str):
                checks.refuse("client_id must be text", repr(name), "download it again")
            yield from checked_client(name, *columns, rows)


def _unpack(compressed: bytes) -> dict[str, Any]:
    """Unpacks the columns of a client. A column that is not a numeric array (text) becomes None."""
    import msgpack

    def array(kind: int, packed: bytes) -> np.ndarray | None:
        if kind != NDARRAY:
            return None
        shape, dtype, values = msgpack.unpackb(packed, raw=True)
        return np.frombuffer(values, np.dtype(dtype.decode())).reshape(shape)

    return msgpack.unpackb(zlib.decompress(compressed), ext_hook=array)
