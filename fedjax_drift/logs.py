"""Logs of runs: every round as a line of JSON and of CSV, and on request in TensorBoard, as the rounds end.

    with fd.logs.Log("runs/mine") as log:
        state, history = sim.run(state, rounds=100, on_round=log)

A log is called with each record; anything else that follows a run (Weights & Biases, MLflow) is a function of a record
too. `read` gives the records back, and every picture of `plots` takes the path of a log.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from fedjax_drift import checks
from fedjax_drift.data import lines
from fedjax_drift.devices.distributed import is_first
from fedjax_drift.errors import ConfigurationError, MissingPackageError
from fedjax_drift.storage.files import replace_file

Record = Mapping[str, Any]


class Log:
    """Writes records to ``rounds.jsonl`` and ``rounds.csv`` of a folder, a line each, at once.

    Where that is not possible, as on a full disk, there is one warning, and the run goes on. The files then hold whole
    lines, and what is missing is written with a later record, or when the log is closed, if there is room again.

    A number that is not finite is null in JSON, which has none, and an empty field of the CSV file. There, a list of n
    values has n columns, ``name[0]`` to ``name[n-1]``, and a column that first shows later is added to all rows.
    TensorBoard gets every number (of a list the last, the one after the last local epoch) against the rounds done, in
    ``tensorboard/`` of the folder, one run for each ``algorithm`` and ``seed`` that the records name.

    Of several processes the first writes, and the others' logs do nothing.

    Args:
      folder: where; made if need be.
      before: the records of earlier rounds, such as the history that `Checkpoints.restore` returns: they replace what
        the folder has. Default None: it must not have a log yet.
      tensorboard: also write events for TensorBoard; needs the package tensorboardX.

    Raises:
      ValueError: a folder that has a log already, is a file or can't be written; records that are none.
      ImportError: ``tensorboard=True`` without tensorboardX.
    """

    def __init__(
        self, folder: str | os.PathLike[str], before: Sequence[Record] | None = None, *, tensorboard: bool = False
    ) -> None:
        checks.flag("tensorboard", tensorboard)
        if tensorboard:
            needs_tensorboard()
        if before is not None and (isinstance(before, str | Mapping) or not isinstance(before, Sequence)):
            raise ConfigurationError(
                f"before must be a history, or None, got {checks.shown(before)}: [] for an empty log"
            )
        self.folder = checks.path("folder", folder, 'Log("runs/mine")').absolute()  # wherever one goes later
        self._columns: dict[str, None] = {}  # of the CSV file, in order
        self._table: _Lines | None = None  # the CSV file,
        self._behind = True  # which lacks rows that the other has
        self._events: dict[str, _Lines] | None = {} if tensorboard else None
        self._writes, self._warned = is_first(), False
        if not self._writes:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigurationError(f"folder must be a folder, got the file {self.folder}: choose another name")
        if before is None and (self.folder / "rounds.jsonl").exists():
            raise ConfigurationError(
                f"folder must be one without a log, got {self.folder}, which has one: pass before=history to go on "
                "with it, before=[] to replace it, or another folder"
            )
        text = b"".join(map(_line, before or []))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if tensorboard:
                shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
            replace_file(self.folder / "rounds.jsonl", text.decode())
            self._lines = _Lines(self.folder / "rounds.jsonl")
            self._renew_table()
        except OSError as error:
            raise ConfigurationError(
                f"folder must be where files can be written, got {self.folder} ({error.strerror}): choose another, or "
                "see to that"
            ) from error
        for record in before or []:
            self._try(self._to_tensorboard, record)

    def __call__(self, record: Record) -> None:
        """Writes one record."""
        line = _line(record)
        if self._writes:
            self._try(self._lines.write, line)
            self._try(self._to_table, record)
            self._try(self._to_tensorboard, record)

    def _try(self, write: Callable[..., Any], *what: Any) -> None:
        try:
            write(*what)
        except OSError as error:
            if not self._warned:
                checks.warn(
                    f"the log in {self.folder} could not be written ({error.strerror}): the run goes on; make room, "
                    "and what is missing is written with a later round"
                )
            self._warned = True

    def _to_table(self, record: Record) -> None:
        """Appends a row, or writes the table anew where it lacks columns or rows."""
        row = _flat(record)
        self._behind |= bool(self._lines.missing) or not row.keys() <= self._columns.keys()
        if self._table is not None and not self._behind:
            self._table.write(self._csv([row]))
        elif not self._lines.missing:
            self._renew_table()

    def _renew_table(self) -> None:
        """Makes the table from the lines of JSON, with the columns that these have by now."""
        rows = [_flat(record) for record in read(self.folder)]
        self._columns |= dict.fromkeys(name for row in rows for name in row)
        header = {name: name for name in self._columns}
        replace_file(self.folder / "rounds.csv", self._csv([header, *rows]).decode() if rows else "")
        if self._table is not None:
            self._table.close()
        self._table, self._behind = _Lines(self.folder / "rounds.csv"), False

    def _csv(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, [*self._columns], lineterminator="\n").writerows(rows)
        return text.getvalue().encode()

    def _to_tensorboard(self, record: Record) -> None:
        if self._events is None:
            return
        name = str(record.get("algorithm", ".")).replace("/", "_")
        name += f"-seed-{record['seed']}" if "seed" in record else ""
        if name not in self._events:
            file = self.folder / "tensorboard" / name / "events.out.tfevents"
            file.parent.mkdir(parents=True, exist_ok=True)
            self._events[name] = _Lines(file)
        self._events[name].write(_event(record))

    def close(self) -> None:
        """Closes the files; leaving ``with`` does."""
        if self._writes:
            self._try(self._lines.write, b"")
            if self._behind and not self._lines.missing:
                self._try(self._renew_table)
            for file in filter(None, (self._lines, self._table, *(self._events or {}).values())):
                self._try(file.write, b"")
                file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lines:
    """A file of whole lines, on the disk at once. What a full disk refuses is kept, and written with what follows."""

    def __init__(self, path: Path) -> None:
        self._file = FileIO(str(path), "ab")
        self._end = self._file.tell()
        self.missing = b""

    def write(self, lines: bytes) -> None:
        """OSError, and nothing of it is in the file, if all of it can't be."""
        self.missing += lines
        left = memoryview(self.missing)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(self.missing)
        self.missing = b""

    def close(self) -> None:
        self._file.close()
        self.missing = b""


def _event(record: Record) -> bytes:
    """A record's numbers as TensorBoard has them in its files: an event between its length and their checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c

    last = {name: value[-1] if isinstance(value, list) and value else value for name, value in record.items()}
    numbers = {name: value for name, value in last.items() if name != "round" and isinstance(value, int | float)}
    values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
    event = Event(wall_time=time.time(), step=record["round"], summary=Summary(value=values)).SerializeToString()
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))


def needs_tensorboard() -> None:
    """ImportError unless events for TensorBoard can be written."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise MissingPackageError('writing for TensorBoard needs tensorboardX: pip install "fedjax-drift[tensorboard]"')


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a log: of its folder, or of one of JSON lines such as ``rounds.jsonl``.

    null becomes NaN; a last line that a kill has cut off is left out. Raises ValueError for a path without a log, and
    for one whose lines are not records.
    """
    path = checks.path("path", path, "the folder of a log, or a file of JSON lines")
    path = path / "rounds.jsonl" if os.path.isdir(path) else path
    try:
        with lines.opened(path) as file:
            text = file.read()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"path must be a log, a folder with rounds.jsonl or a file of JSON lines, got {path}"
        ) from error
    return list(_records(path, text.splitlines(keepends=True)))


def _records(path: Path, written: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(written, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(written) and not line.endswith("\n"):
                return
            raise ConfigurationError(
                f"{path}, line {number}: a record must be one line of JSON, got {line[:60]!r}"
            ) from error
        if not isinstance(record, dict):
            raise ConfigurationError(f"{path}, line {number}: a record must be a JSON object, got {line[:60]!r}")
        yield {name: _number(value) for name, value in record.items()}


def _line(record: Record) -> bytes:
    if not isinstance(record, Mapping):
        raise ConfigurationError(f"a record must be a dict, got {checks.shown(record)}: one of a history")
    try:
        return json.dumps({name: _plain(value) for name, value in record.items()}).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a record must hold what JSON has, got {checks.shown(record)}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return [_number(item) for item in value] if isinstance(value, list) else math.nan if value is None else value


def _flat(record: Record) -> dict[str, Any]:
    """The columns of a record; what is not finite stays empty."""
    row: dict[str, Any] = {}
    for name, value in record.items():
        plain = _plain(value)
        row |= {f"{name}[{i}]": item for i, item in enumerate(plain)} if isinstance(plain, list) else {name: plain}
    return row
