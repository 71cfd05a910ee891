"""Runs an experiment cell by cell, saves every cell, and writes the page and the pictures of all of them.

A cell is a combination of names, for example (algorithm, attack), and its entry has what was computed for it. The
entries are in NAME.json in the folder of the results. The file is replaced atomically after every cell, so a killed run
loses one cell, and the same command continues. A second process with --backwards begins at the other end.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedjax_drift as fd
from experiments import markdown
from experiments.tables.results import write_text

TUNING_SEED = 100  # no reported run has it
Cell = tuple[Any, ...]
Entry = dict[str, Any]


class Experiment(NamedTuple):
    """The cells of an experiment, and what is done with them."""

    name: str
    cells: Sequence[Cell]
    compute: Callable[..., Entry]  # compute(rounds, *cell)
    show: Callable[[Entry], str]  # what is printed about an entry
    report: Callable[[dict[Cell, Entry]], dict[str, Any]]  # file name -> text, or matplotlib's figure
    # If entries contain their cell, NAME.json is a list of them. Otherwise, there is an object for each name of a cell,
    # one in the other: {"groups": {"FedAvg": entry}}.
    cell_of: Callable[[Entry], Cell] | None = None

    def read(self, file: Path) -> dict[Cell, Entry]:
        """The entries in a file, by cell."""
        stored = json.loads(file.read_text()) if file.exists() else {}
        if self.cell_of:
            return {self.cell_of(entry): entry for entry in stored}
        found: dict[Cell, Any] = {(): stored}
        for _ in self.cells[0]:
            found = {(*cell, name): inner for cell, outer in found.items() for name, inner in outer.items()}
        return found

    def write(self, file: Path, found: dict[Cell, Entry]) -> None:
        """Replaces the file atomically."""
        stored: Any = [*found.values()] if self.cell_of else {}
        for (*outer, name), entry in () if self.cell_of else found.items():
            inside = stored
            for each in outer:
                inside = inside.setdefault(each, {})
            inside[name] = entry
        write_text(file, json.dumps(stored) + "\n")


def main(experiment: Experiment, doc: str | None, rounds: int, output: Path | None = None) -> None:
    """The command of an experiment. rounds, output: what it uses by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", "--updates", type=int, default=rounds, help="of a run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=output, help="folder of the results (default: %(default)s)")
    parser.add_argument("--backwards", action="store_true", help="begin with the last cell, beside another process")
    parser.add_argument("--draw", type=Path, help="only write the page and the pictures of this folder again")
    arguments = parser.parse_args()
    folder = arguments.draw or arguments.output
    file = folder / f"{experiment.name}.json" if folder else None
    found = experiment.read(file) if file else {}
    missing = [cell for cell in experiment.cells if cell not in found]
    if arguments.draw and missing:
        parser.error(f"--draw needs the results of all cells, but {file} lacks {len(missing)}: continue with --output")
    for cell in missing[::-1] if arguments.backwards else missing:
        if file and cell in (found := experiment.read(file)):  # another process has computed it
            continue
        start = time.perf_counter()
        entry = experiment.compute(arguments.rounds, *cell)
        shown = f"{', '.join(map(str, cell))}: {experiment.show(entry)}"
        print(f"{shown}, {time.perf_counter() - start:.0f} s", flush=True)
        found = add(experiment, file, cell, entry) if file else found | {cell: entry}
    if not folder or not file:
        return
    found = experiment.read(file)
    if left := [cell for cell in experiment.cells if cell not in found]:
        print(f"another process computes the last {len(left)}")
        return
    ordered = {cell: found[cell] for cell in experiment.cells}
    for name, content in experiment.report(ordered).items():
        if isinstance(content, str):
            write_text(folder / name, content + "\n")
        else:
            content.savefig(folder / name, dpi=110)


def add(experiment: Experiment, file: Path, cell: Cell, entry: Entry) -> dict[Cell, Entry]:
    """Adds an entry to the file, and returns all. One process at a time does so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = experiment.read(file) | {cell: entry}
        experiment.write(file, found)
    return found


def accuracies(run: fd.Run) -> list[float]:
    """The test accuracy after every evaluated round."""
    return [record["accuracy"] for record in run.history if "accuracy" in record]


def scores(entry: Entry, last: int) -> np.ndarray:
    """The mean accuracy (%) over the last evaluations of each run, [runs]."""
    return 100 * np.array([np.mean(accuracy[-last:]) for accuracy in entry["accuracy"]])


def show(entry: Entry, last: int) -> str:
    """The scores, and the settings if they were tuned."""
    settings = f"{markdown.words(entry['settings'])}, " if "settings" in entry else ""
    return f"{settings}{scores(entry, last).round(2)} %"


@functools.lru_cache(maxsize=1)
def held_out(federation: Callable[..., fd.FederatedData], *of: str) -> fd.FederatedData:
    """The federation of the seed for tuning, ``federation(*of, seed)``, with a tenth of its training examples as the
    test set."""
    return federation(*of, TUNING_SEED).with_validation(0.1, 0)


def tuned(
    build: Callable[..., fd.Simulation], settings: list[dict], rounds: int, last: int, eval_every: int = 1
) -> dict[str, float]:
    """The settings with the best mean accuracy over the last evaluations. build: ``build(**setting) -> simulation``."""
    runs = fd.sweep(build, rounds, [TUNING_SEED], settings, eval_every, progress=False)
    return fd.tuning.best([run.setting for run in runs], [np.mean(accuracies(run)[-last:]) for run in runs])
