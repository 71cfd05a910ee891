"""Logs of runs. A log writes every round as one line of JSON and one row of CSV. A `Track` sends it to a tracker.

    with fd.logs.Log("runs/mine") as log:
        state, history = sim.run(state, rounds=100, on_round=log)

`Simulation.run` calls the log with each record. So does it with a `Track`, for Weights & Biases, MLflow or TensorBoard,
and with a function of your own. `read` returns the records of a log, and the functions of `plots` accept the path of a
log.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from fedjax_drift import checks, spec
from fedjax_drift.data import files
from fedjax_drift.devices.distributed import is_first
from fedjax_drift.disk import replace_file, write_all
from fedjax_drift.spec import Fix, checked
from fedjax_drift.track import Before, Track, scalars

__all__ = ["Log", "Track", "read", "scalars"]
__dir__ = __all__.copy


Record = Mapping[str, Any]


class Log:
    """Writes each record to ``rounds.jsonl`` and ``rounds.csv`` in a folder as soon as its round has ended.

    ``rounds.jsonl`` has one line per record. Numbers that are not finite are written as null, because JSON has no NaN.

    ``rounds.csv`` has one row per record. Numbers that are not finite are empty fields. A list of n values has the
    columns ``name[0]`` to ``name[n-1]``. A column that first appears in a later round is added to all rows.

    If a write fails, for example because the disk is full, there is one warning and the training continues. The files
    then contain complete lines only. The missing lines are written with a later record, or by `close`, once there is
    space again.

    With several processes, only the first process writes.

    Args:
      folder: the folder of the log. It is created if it does not exist.
      before: the records of earlier rounds, for example the history that `Checkpoints.restore` returns. They replace
        an existing log in the folder. Default None: the folder must not have a log.

    Raises:
      ValueError: the folder already has a log or is not writable.
    """

    @checked
    def __init__(
        self,
        folder: Annotated[str | os.PathLike[str], spec.FOLDER, Fix('Log("runs/mine")')],
        before: Annotated[Before, Fix("pass [] for an empty log")] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._columns: dict[str, None] = {}  # the columns of the CSV file, in order
        self._table: _Lines | None = None  # the CSV file; None: it lacks rows or columns of the JSON file
        self._writes, self._warned = is_first(), False
        if not self._writes:
            return
        if before is None and (self.folder / "rounds.jsonl").exists():
            fix = "pass before=history to continue it, before=[] to replace it, or another folder"
            checks.refuse("folder must not have a log", f"{self.folder}, which has one", fix)
        text = b"".join(map(_line, before or []))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / "rounds.jsonl", text)
            self._lines = _Lines(self.folder / "rounds.jsonl")
            self._table = self._new_table()
        except OSError as error:
            fix = "choose another folder, or make it writable"
            checks.refuse("folder must be where files can be written", f"{self.folder} ({error.strerror})", fix, error)

    def __call__(self, record: Record) -> None:
        """Writes one record."""
        line = _line(record)
        if self._writes:
            self._write(line, [_flat(record)])

    def _write(self, line: bytes, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends to both files. The CSV file is rewritten if it lacks columns, or rows that could not be written."""
        table, self._table = self._table, None
        try:
            self._lines.write(line)
            if table is not None and all(row.keys() <= self._columns.keys() for row in rows):
                table.write(self._csv(rows))
                self._table = table
            else:
                self._table = self._new_table()
        except OSError as error:
            if not self._warned:
                checks.warn(
                    f"the log in {self.folder} could not be written ({error.strerror}): the run continues. The missing "
                    "lines are written with a later round when writing is possible again, for example after disk "
                    "space has been freed"
                )
            self._warned = True
        if table is not None and table is not self._table:
            table.close()

    def _new_table(self) -> _Lines:
        """Rewrites the CSV file from the JSON file, with all columns so far."""
        rows = [_flat(record) for record in read(self.folder)]
        self._columns |= dict.fromkeys(name for row in rows for name in row)
        header = {name: name for name in self._columns}
        replace_file(self.folder / "rounds.csv", self._csv([header, *rows]) if rows else b"")
        return _Lines(self.folder / "rounds.csv")

    def _csv(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, [*self._columns], lineterminator="\n").writerows(rows)
        return text.getvalue().encode()

    def close(self) -> None:
        """Closes the files. The end of a ``with`` block calls it."""
        if self._writes:
            self._write(b"", [])
            for file in filter(None, (self._lines, self._table)):
                file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lines:
    """A file to which complete lines are appended. Lines that cannot be written are kept for the next write."""

    def __init__(self, path: Path) -> None:
        self._file = FileIO(str(path), "ab")
        self._end = self._file.tell()
        self._missing = b""

    def write(self, lines: bytes) -> None:
        """Appends the missing lines, then ``lines``. On failure, raises OSError and leaves the file unchanged."""
        self._missing += lines
        try:
            write_all(self._file, self._missing)
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(self._missing)
        self._missing = b""

    def close(self) -> None:
        self._file.close()


@checked
def read(
    path: Annotated[str | os.PathLike[str], spec.GIVEN_PATH, Fix("the folder of a log, or a file of JSON lines")],
) -> list[dict[str, Any]]:
    """Returns the records of a log.

    null becomes NaN. An incomplete last line, from a process that was killed while it wrote the line, is left out.

    Args:
      path: the folder of a log, or a file of JSON lines such as ``rounds.jsonl``.

    Raises:
      ValueError: there is no log at this path, or a line is not a record.
    """
    path = Path(path, "rounds.jsonl") if os.path.isdir(path) else Path(path)
    try:
        with files.opened_text(path) as file:
            text = file.read()
    except FileNotFoundError as error:
        checks.refuse(
            "path must be a log (a folder with rounds.jsonl, or a file of JSON lines)",
            f"{path}, which does not exist",
            cause=error,
        )
    return list(_records(path, text.splitlines(keepends=True)))


def _records(path: Path, log_lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(log_lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(log_lines) and not line.endswith("\n"):
                return
            checks.refuse(f"{path}, line {number}: a record must be one line of JSON", repr(line[:60]), cause=error)
        if not isinstance(record, dict):
            checks.refuse(f"{path}, line {number}: a record must be a JSON object", repr(line[:60]))
        yield {name: _number(value) for name, value in record.items()}


def _line(record: Record) -> bytes:
    if not isinstance(record, Mapping):
        checks.refuse("a record must be a dict", checks.shown(record), "pass one record of a history")
    try:
        return json.dumps({name: _plain(value) for name, value in record.items()}).encode() + b"\n"
    except (TypeError, ValueError) as error:
        checks.refuse(
            "a record must only contain values that JSON has",
            f"{checks.shown(record)} ({error})",
            "use numbers, strings, lists and dicts",
            error,
        )


def _plain(value: Any) -> Any:
    """The value with None in place of floats that are not finite."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    """The value with NaN in place of None."""
    return [_number(item) for item in value] if isinstance(value, list) else math.nan if value is None else value


def _flat(record: Record) -> dict[str, Any]:
    """The columns of a record in the CSV file. Numbers that are not finite become None, an empty field."""
    row: dict[str, Any] = {}
    for name, value in record.items():
        plain = _plain(value)
        row |= {f"{name}[{i}]": item for i, item in enumerate(plain)} if isinstance(plain, list) else {name: plain}
    return row
