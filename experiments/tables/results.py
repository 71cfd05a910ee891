"""The result of a run as a line of JSON, and the files of these lines."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from experiments.tables.papers import Series

# The entries of the records that are not stored.
BOOKKEEPING = {"round", "seconds", "clients", "lr", "steps", "executed_steps", "executed_ratio", "selected"}
Record = dict[str, Any]


class Result(NamedTuple):
    """The result of one run, stored as a line of JSON."""

    setting: str
    method: str
    seed: int
    rounds: int  # the number of rounds that were run
    reached: bool  # whether the run ended early because the target was reached
    seconds: float  # the time of all seeds together
    together: int  # the number of seeds that ran together in one sweep
    command: str
    options: dict[str, Any]
    commit: str | None
    hardware: str
    versions: dict[str, str]
    date: str
    series: dict[str, Series]


def read_results(file: Path) -> dict[int, Result]:
    """Returns the results of a cell by seed. Returns an empty dict if there is no file."""
    results: dict[int, Result] = {}
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        try:
            entry = json.loads(line)
            series: dict[str, Series] = {}
            for columns in entry["series"]:
                rounds = columns.pop("round")
                series |= {name: Series(rounds, values) for name, values in columns.items()}
            results[entry["seed"]] = Result(**entry | {"series": series})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}, line {number} is not a result ({error}): delete the file to run the cell again"
            ) from error
    return results


def _as_json(result: Result) -> dict[str, Any]:
    """Returns the result as a dict for JSON. Its "series" is a list of tables, one for each set of recorded rounds.

    A table is a dict of columns: "round", and one column for each entry that was recorded in these rounds.
    """
    columns: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, (rounds, values) in result.series.items():
        columns.setdefault(tuple(rounds), {"round": rounds})[name] = values
    return result._asdict() | {"series": list(columns.values())}


def write_results(file: Path, results: Iterable[Result]) -> None:
    """Writes the results of a cell, ordered by seed."""
    write_lines(file, [_as_json(result) for result in sorted(results, key=lambda result: result.seed)])


def write_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes one line of JSON per entry."""
    lines = [json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n" for entry in entries]
    write_text(file, "".join(lines))


def write_text(file: Path, text: str) -> None:
    """Replaces the file atomically by one with this text: a kill leaves the old or the new file."""
    new = file.with_name(file.name + ".new")
    file.parent.mkdir(parents=True, exist_ok=True)
    new.unlink(missing_ok=True)  # left by a killed process; no other process writes this file
    with open(new, "x") as empty:  # "x" never follows a link
        empty.write(text)
    os.replace(new, file)


def kept_series(history: Sequence[Record], eval_every: int, every_round: Iterable[str]) -> dict[str, Series]:
    """Returns the values of a run to store, with five significant digits.

    These are the values of the evaluated rounds. The entries in ``every_round`` have the values of all rounds.
    """
    rounds: dict[str, list[int]] = {}
    values: dict[str, list[Any]] = {}
    for record in history:
        t = record["round"]
        evaluated = t == history[-1]["round"] or eval_every > 0 and t % eval_every == 0
        for name, value in record.items():
            if name not in BOOKKEEPING and (evaluated or name in every_round):
                rounds.setdefault(name, []).append(t)
                values.setdefault(name, []).append(five_digits(value))
    return {name: Series(rounds[name], values[name]) for name in rounds}


def five_digits(value: Any) -> Any:
    """Rounds a number or a list of numbers to five significant digits. A number that is not finite becomes None."""
    if isinstance(value, list):
        return [five_digits(each) for each in value]
    return float(f"{value:.5g}") if math.isfinite(value) else None


def summary(values: Sequence[float], digits: int) -> str:
    """Returns "mean ± standard deviation" of the finite values, and how many are finite if not all are: "(2 of 3)"."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "not reached" if any(map(math.isinf, values)) else "-"
    spread = f" ± {np.std(known, ddof=1):.{digits}f}" if len(known) > 1 else ""
    number = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
    return f"{np.mean(known):.{digits}f}{spread}{number}"


@functools.cache
def commit() -> str | None:
    """Returns the commit of the library when this function is first called, with a plus if its sources have
    uncommitted changes.

    Returns None outside of a git repository.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(fd.__file__).parent), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> str:
    """Returns the names of the devices. On a CPU: the number of cores that this process may use, and their name."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            name = match[1]
    return f"{cores} core{'s' * (cores > 1)}, {name}"
