"""SQLite databases of others, which may be damaged or hostile."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedjax_drift.data import files

VALUE = 2**30  # limit in bytes of one value


@contextlib.contextmanager
def opened(path: Path, tables: Sequence[str], other: str) -> Iterator[sqlite3.Connection]:
    """Opens a database for reading. Raises `Wrong` if it is damaged or lacks a table. other: the reader to suggest."""
    # immutable: SQLite reads no other file and waits for no lock.
    uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(max(os.path.getsize(path), 4096), VALUE))
            for table in tables:
                _check_table(connection, table, other)
            if (result := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise files.Wrong(f"it is damaged ({files.one_line(result)}): download it again")
            yield connection
    except sqlite3.Error as error:
        raise files.Wrong(f"it is damaged or of another kind ({error}): download it again, or {other}") from error


def _check_table(connection: sqlite3.Connection, table: str, other: str) -> None:
    """Raises `Wrong` if there is no such table. A view is no table, because its query may never end."""
    query = "SELECT sql FROM sqlite_master WHERE name = ? COLLATE NOCASE"
    statements = "; ".join(str(sql) for (sql,) in connection.execute(query, [table]))
    if not statements.startswith("CREATE TABLE "):
        got = files.one_line(statements or "no such table")
        raise files.Wrong(f"it must have a table {table}, got {got}: download it again, or {other}")
