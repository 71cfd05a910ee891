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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_drift import checks
from fedjax_drift.checkpoint import replace_file
from fedjax_drift.data import lines
from fedjax_drift.distributed import is_first

Record = Mapping[str, Any]


class Log:
    """Writes records to ``rounds.jsonl`` and ``rounds.csv`` of a folder, a line each, at once.

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
      ValueError: a folder that has a log already, or is a file.
      ImportError: ``tensorboard=True`` without tensorboardX.
    """

    def __init__(
        self, folder: str | os.PathLike[str], before: Sequence[Record] | None = None, *, tensorboard: bool = False
    ) -> None:
        checks.flag("tensorboard", tensorboard)
        if tensorboard:
            needs_tensorboard()
        self.folder = Path(folder)
        self._columns: dict[str, None] = {}  # of the CSV file, in order
        self._writers: dict[str, Any] | None = {} if tensorboard else None
        self._writes = is_first()
        if not self._writes:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"folder must be a folder, got the file {self.folder}: choose another name")
        if before is None and (self.folder / "rounds.jsonl").exists():
            raise ValueError(
                f"folder must be one without a log, got {self.folder}, which has one: pass before=history to go on "
                "with it, before=[] to replace it, or another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if tensorboard:
            shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        replace_file(self.folder / "rounds.jsonl", "".join(map(_line, before or [])))
        self._lines = (self.folder / "rounds.jsonl").open("a")
        self._write_csv()
        for record in before or []:
            self._to_tensorboard(record)

    def __call__(self, record: Record) -> None:
        """Writes one record."""
        if not self._writes:
            return
        self._lines.write(_line(record))
        self._lines.flush()
        if (row := _flat(record)).keys() <= self._columns.keys():
            self._csv.writerow(row)
            self._table.flush()
        else:
            self._table.close()
            self._write_csv()
        self._to_tensorboard(record)

    def _write_csv(self) -> None:
        """The whole file, from the lines of JSON, with the columns that these have by now."""
        rows = [_flat(record) for record in read(self.folder)]
        self._columns |= dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        whole = csv.DictWriter(text, [*self._columns], lineterminator="\n")
        whole.writeheader()
        whole.writerows(rows)
        replace_file(self.folder / "rounds.csv", text.getvalue() if rows else "")
        self._table = (self.folder / "rounds.csv").open("a")
        self._csv = csv.DictWriter(self._table, [*self._columns], lineterminator="\n")

    def _to_tensorboard(self, record: Record) -> None:
        if self._writers is None:
            return
        from tensorboardX import SummaryWriter

        name = str(record.get("algorithm", ".")).replace("/", "_")
        name += f"-seed-{record['seed']}" if "seed" in record else ""
        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self.folder / "tensorboard" / name), flush_secs=10)
        for key, value in record.items():
            last = value[-1] if isinstance(value, list) and value else value
            if key != "round" and isinstance(last, (int, float)):
                self._writers[name].add_scalar(key, last, record["round"])

    def close(self) -> None:
        """Closes the files; leaving ``with`` does."""
        if self._writes:
            self._lines.close()
            self._table.close()
        for writer in (self._writers or {}).values():
            writer.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def needs_tensorboard() -> None:
    """ImportError unless events for TensorBoard can be written."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ImportError('writing for TensorBoard needs tensorboardX: pip install "fedjax-drift[tensorboard]"')


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a log: of its folder, or of one of JSON lines such as ``rounds.jsonl``.

    null becomes NaN; a last line that a kill has cut off is left out. Raises ValueError for a path without a log, and
    for one whose lines are not records.
    """
    path = Path(path)
    path = path / "rounds.jsonl" if path.is_dir() else path
    try:
        with lines.opened(path) as file:
            text = file.read()
    except FileNotFoundError as error:
        raise ValueError(
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
            raise ValueError(f"{path}, line {number}: a record must be one line of JSON, got {line[:60]!r}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a record must be a JSON object, got {line[:60]!r}")
        yield {name: _number(value) for name, value in record.items()}


def _line(record: Record) -> str:
    return json.dumps({name: _plain(value) for name, value in record.items()}) + "\n"


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
