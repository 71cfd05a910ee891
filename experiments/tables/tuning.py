"""The tuning of a cell: the result of each combination of its grid, and the cell with the best one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import fedjax_drift as fd
from experiments.tables.papers import LOCAL_OPTIONS, Cell, Score, Table, last_number, tunable
from experiments.tables.results import write_lines


def tuning_grid(table: Table, cell: Cell) -> list[dict[str, float]]:
    """Returns all combinations of the values that are tuned for this method, an empty list if there are none."""
    names = tunable(cell.options)
    values = {name: values for name, values in table.tune.get("grid", {}).items() if name in names}
    of_method = table.tune.get("methods", {}).get(cell.method, {})
    values |= {name: values for name, values in of_method.items() if name in names}
    return fd.grid(**values) if values else []


class Tuned(NamedTuple):
    """The result of one combination of the grid."""

    values: dict[str, float]
    score: float
    rounds: int
    validation: float | None = None  # the share of the training examples that gave the score; None: the test set


def tuning_file(cell: Cell, output: Path) -> Path:
    return (output / cell.file).with_suffix(".tuning.jsonl")


def read_tuned(cell: Cell, output: Path) -> list[Tuned]:
    """Returns the result of every combination. Returns an empty list if the cell was not tuned."""
    file = tuning_file(cell, output)
    tuned = [Tuned(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    return [each._replace(score=last_number(each.score)) for each in tuned]


def write_tuned(cell: Cell, output: Path, tuned: Sequence[Tuned]) -> None:
    write_lines(tuning_file(cell, output), [each._asdict() for each in tuned])


def check_tuned(table: Table, cell: Cell, output: Path) -> None:
    """Raises ValueError if the cell was tuned in another way than the table says."""
    tuned, share = read_tuned(cell, output), table.tune.get("validation")
    if tuned and ([each.values for each in tuned], tuned[0].validation) != (tuning_grid(table, cell), share):
        raise ValueError(
            f"{tuning_file(cell, output)} must have the grid and the validation of the table, got others: move the "
            "file, or pass another --output"
        )


def best_of(tuned: Sequence[Tuned], score: Score) -> dict[str, float]:
    """Returns the combination with the best score, and the first one of several that are equally good."""
    return max(tuned, key=lambda each: score.sign * each.score if math.isfinite(each.score) else -math.inf).values


def with_tuned(cell: Cell, table: Table, output: Path) -> Cell:
    """Returns the cell with the best values if it was tuned, otherwise the cell unchanged."""
    tuned = read_tuned(cell, output)
    if not tuned:
        return cell
    values = best_of(tuned, tuning_score(table))
    local = {name: value for name, value in values.items() if name in LOCAL_OPTIONS}
    name, _, options = cell.options["algorithm"].partition(":")
    of_algorithm = dict(option.split("=", 1) for option in options.split(",") if option)
    of_algorithm |= {name: str(value) for name, value in values.items() if name not in local}
    algorithm = name + ":" * bool(of_algorithm) + ",".join(map("=".join, of_algorithm.items()))
    return cell._replace(options=cell.options | local | {"algorithm": algorithm})


def tuning_score(table: Table) -> Score:
    return table.scores[table.tune.get("score", next(iter(table.scores)))]


def cell_for_tuning(table: Table, cell: Cell) -> Cell:
    """Returns the cell of the tuning runs, which may be scored on a part of the training examples."""
    share = table.tune.get("validation")
    return cell if share is None else cell._replace(options=cell.options | {"validation": share})
