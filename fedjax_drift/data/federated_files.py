"""Federated data in other formats: LEAF's JSON, FedJAX's SQLite, TensorFlow Federated's SQLite and HDF5.

The functions read_... yield one `Client` after the other. `from_leaf`, `from_fedjax` and `from_tff` create a federation
from any numeric columns.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import client_rows, files, joining, tff_files
from fedjax_drift.data.client_rows import Client
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.errors import ConfigurationError

FilePath = str | os.PathLike[str]

CLIENT_BYTES = 2**27  # limit of the unpacked data of one client in FedJAX's format; femnist needs at most 2 MB
NDARRAY = 1  # FedJAX's msgpack extension type of a numeric array


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
    folder = checks.path("folder", folder).absolute()
    has_test = any((folder / "test").glob("*.json"))
    return _federation(read_leaf(folder / "train"), read_leaf(folder / "test") if has_test else (), folder)


def from_fedjax(train: FilePath, test: FilePath | None = None, x: str = "pixels", y: str = "label") -> FederatedData:
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
    _check_names(x, y)
    train_path, test_path = checks.path("train", train), None if test is None else checks.path("test", test)
    tests = () if test_path is None else read_fedjax(test_path, x, y)
    return _federation(read_fedjax(train_path, x, y), tests, train_path)


def from_tff(
    train: FilePath, test: FilePath | None = None, x: str = "pixels", y: str = "label", *, split: str | None = None
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
    _check_names(x, y)
    train_path, test_path = checks.path("train", train), None if test is None else checks.path("test", test)
    tests: Iterable[Client] = ()
    with tff_files.opened(train_path) as file:
        split = file.chosen(split, "train")
        clients, test_split = list(file.read(x, y, split)), (split or "train").replace("train", "test")
        if test_path is None and test_split != split and test_split in file.splits:
            tests = list(file.read(x, y, test_split))
    if test_path is not None:
        with tff_files.opened(test_path) as file:
            tests = list(file.read(x, y, file.chosen(None, test_split)))
    return _federation(clients, tests, train_path)


def _check_names(x: Any, y: Any) -> None:
    for name, column in (("x", x), ("y", y)):
        if not isinstance(column, str):
            raise ConfigurationError(f"{name} must be the name of a column, got {checks.shown(column)}: pass text")


def _federation(clients: Iterable[Client], test_clients: Iterable[Client], path: Path) -> FederatedData:
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
            raise ConfigurationError(f"client {client!r} must be in one file of the folder only, got two: remove one")
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


def read_leaf(folder: Path) -> Iterator[Client]:
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
                x, y = (_numbers(columns[key], f"{key} of client {client!r}") for key in ("x", "y"))
                yield from client_rows.checked(client, x, y, rows)


def _numbers(values: Any, name: str) -> np.ndarray:
    try:
        array = checks.exact_array(values)
    except ConfigurationError as error:
        raise files.Wrong(f"{name}: {error}") from error
    except ValueError as error:
        raise files.Wrong(
            "all examples of a client must have the same shape: pad them, and write the file again"
        ) from error
    fix = "scale the numbers, and write the file again"
    return checks.converted(name, array, np.float32, fix) if array.dtype.kind == "f" and array.ndim else array


def read_fedjax(path: Path, x: str, y: str) -> Iterator[Client]:
    """Reads the clients of one of FedJAX's SQLite files, in its order. Errors as in `from_fedjax`."""
    files.require("msgpack", f"reading {path}", client_rows.INSTALL)
    other = "read TensorFlow Federated's files with from_tff"
    with files.opened(path), client_rows.database(path, "federated_data", other=other) as connection:
        query = "SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid"
        for client, data, rows in connection.execute(query):
            columns = client_rows.pick(_unpack(client, data), x, y)
            name = client.decode() if isinstance(client, bytes) else client
            if not isinstance(name, str):
                raise files.Wrong(f"client_id must be text, got {name!r}: download it again")
            yield from client_rows.checked(name, *columns, rows)


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
