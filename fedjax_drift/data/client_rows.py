"""The clients of a federated file, one after the other: what the formats of LEAF, FedJAX and TFF share.

Files may be damaged or hostile. Functions raise `files.Wrong`, to which `files.opened` adds the name of the file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files

INSTALL = "msgpack h5py"  # the packages that read these files
VALUE = 2**30  # limit in bytes of one value of a database

Client = tuple[str, np.ndarray, np.ndarray]
"""The name, the inputs [n, ...] and the labels [n, ...] of a client in one file, n >= 1."""


def checked(client: str, x: Any, y: Any, rows: int) -> Iterator[Client]:
    """Yields one `Client`, or nothing if it has no examples. Labels like 5.0, which are whole, become int64.

    Raises `Wrong` unless x and y are numeric and have ``rows`` rows.
    """
    for kind, array in (("inputs", x), ("labels", y)):
        wrong = ""
        if not isinstance(array, np.ndarray) or array.size and array.dtype.kind not in "biuf":
            wrong = "be numbers: encode text as integers, and write the file again"
        elif array.shape[:1] != (rows,):
            wrong = f"have {rows} rows, got {list(array.shape)}: copy or write the file again"
        if wrong:
            raise files.Wrong(f"the {kind} of client {client!r} must {wrong}")
    if rows:
        is_whole = y.dtype.kind == "f" and bool((np.abs(y) < 2**53).all() and (y == np.floor(y)).all())
        yield client, x, y.astype(np.int64) if is_whole else y


def pick(columns: Any, x: str, y: str) -> tuple[Any, Any]:
    """Returns the columns of the inputs and the labels. Raises `Wrong` if there is none of this name."""
    for key in (x, y):
        if key not in columns:
            raise files.Wrong(
                f"it has no column {key!r}, only {checks.listed(columns) or 'none'}{checks.nearest(key, columns)}: "
                "pass the names of the columns as x= (inputs) and y= (labels)"
            )
    return columns[x], columns[y]


@contextlib.contextmanager
def database(path: Path, *tables: str, other: str) -> Iterator[sqlite3.Connection]:
    """Opens an SQLite database for reading. Raises `Wrong` if it is damaged or lacks a table.

    other: the reader to suggest. A view is no table, because its query may never end.
    """
    # immutable: SQLite reads no other file and waits for no lock.
    uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro&immutable=1"
    query = "SELECT sql FROM sqlite_master WHERE name = ? COLLATE NOCASE"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(max(os.path.getsize(path), 4096), VALUE))
            for table in tables:
                statements = "; ".join(str(sql) for (sql,) in connection.execute(query, [table]))
                if not statements.startswith("CREATE TABLE "):
                    got = files.one_line(statements or "no such table")
                    raise files.Wrong(f"it must have a table {table}, got {got}: download it again, or {other}")
            if (result := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise files.Wrong(f"it is damaged ({files.one_line(result)}): download it again")
            yield connection
    except sqlite3.Error as error:
        raise files.Wrong(f"it is damaged or of another kind ({error}): download it again, or {other}") from error
