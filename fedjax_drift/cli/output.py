"""The output folder: its path, and the files and plots in it."""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.cli.flags import add
from fedjax_drift.disk import replacing
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.records import by_seed


def add_output(group: Any, progress: bool = True) -> None:
    add(group, "--output", "DIR", "new or empty folder for the results (default: runs/NAME-DATE-TIME)", Path)
    group.add_argument("--force", action="store_true", help="write into DIR even if it contains files")
    if progress:
        group.add_argument("--no-progress", action="store_true", help="no progress bars")


def output_folder(args: argparse.Namespace, what: str) -> Path:
    """Returns the output folder, which is not created yet.

    Raises ValueError if it cannot be written, or if files would be overwritten without --force.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(getattr(args, "now", None)))
    path = args.output or Path("runs") / f"{what}-{stamp}"
    if getattr(args, "resumed", False) or not fd.distributed.is_first():
        return path
    if path.exists() and not path.is_dir():
        raise ConfigurationError(f"--output must be a folder, got the file {path}: choose another path")
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"--output must be a folder where files can be written, got {path} ({existing} is not writable): choose "
            "another folder"
        )
    if path.is_dir() and any(path.iterdir()) and not args.force:
        raise ConfigurationError(
            f"--output must be a new or empty folder, got {path}, which has files: choose another folder, add --force "
            "to replace the files of an earlier run, or resume this run with run --resume"
        )
    return path


@contextlib.contextmanager
def written(path: Path, output: Path) -> Iterator[Path]:
    """Yields the path of a file that replaces ``path`` after the block. If the disk is full, there is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            yield new
    except OSError as error:
        again = shlex.join(["fedjax-drift", "run", "--resume", str(output)])
        checks.warn(f"{path} could not be written ({error.strerror}): free some disk space, then: {again}")


def draw_runs(
    records: Mapping[str, Sequence[Mapping[str, Any]]], target: float | None, data: fd.FederatedData, output: Path
) -> list[str]:
    """Writes the plots for which the records have numbers, and returns the file names."""
    from fedjax_drift import plots

    runs = {name: by_seed(history) for name, history in records.items()}
    first = next(iter(runs.values()), [()])[0]  # for one seed, all algorithms have the same cohorts and labels
    compared = (plots.curves, plots.updates, plots.drift, plots.agreement, plots.forgetting, plots.gain)
    pictures = {draw.__name__: functools.partial(draw, runs) for draw in compared}
    pictures["label_mix"] = functools.partial(plots.label_mix, first)
    if target is not None:
        pictures["rounds_to_target"] = functools.partial(plots.rounds_to_target, runs, target)
        pictures["drift_story"] = functools.partial(plots.drift_story, runs, target, data)
    names = []
    for name, draw in pictures.items():
        path = output / f"{name}.png"
        try:
            with written(path, output) as new:
                draw(new)
            if path.exists():
                names.append(path.name)
        except ConfigurationError:  # the records have no numbers for this plot; an old plot is out of date
            path.unlink(missing_ok=True)
    return names


def write_summary(records: Mapping[str, Sequence[Mapping[str, Any]]], target: float | None, output: Path) -> list[str]:
    """Writes the table of the algorithms, see `fd.table`. Returns its name, or nothing if nothing was evaluated."""
    path = output / "summary.csv"
    try:
        text = fd.table({name: by_seed(history) for name, history in records.items()}, format="csv", target=target)
    except ConfigurationError:  # nothing was evaluated; an old table is out of date
        path.unlink(missing_ok=True)
        return []
    with written(path, output) as new:
        new.write_text(text)
    return [path.name] if path.exists() else []


def write_clients(per_client: Mapping[str, Mapping[str, np.ndarray]], output: Path) -> list[str]:
    """Writes the scores of every client, one line per client, and a plot of them. Returns the file names."""
    if not per_client:
        return []
    from fedjax_drift import plots

    names = [*next(iter(per_client.values()))]
    lines = [["algorithm", "client", *names]]
    for algorithm, scores in per_client.items():
        values = np.stack([scores[name] for name in names], axis=1)
        lines += [[algorithm, str(i), *map(str, row)] for i, row in enumerate(values) if np.isfinite(row).any()]
    with written(output / "clients.csv", output) as new, new.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    with written(output / "fairness.png", output) as new:
        plots.fairness(per_client, new)
    return [name for name in ("clients.csv", "fairness.png") if (output / name).exists()]
