"""The output folder: its path, and the tables and plots in it."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.cli.flags import add, add_switch
from fedjax_drift.cli.values import COUNT, COUNT_OR_ZERO, LOCAL_PATH
from fedjax_drift.disk import replacing
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.records import By
from fedjax_drift.run_folder import CONFIG


def add_output(group: Any, progress: bool = True) -> None:
    """Adds the flags of the output. The time of the command names the folder."""
    add(group, "--output", "new or empty folder for the results (default: runs/NAME-DATE-TIME)", LOCAL_PATH)
    add_switch(group, "--force", "write into the folder of --output even if it contains files")
    if progress:
        add_switch(group, "--no-progress", "no progress bars")
    group.set_defaults(started=int(time.time()))


def add_checkpoints(group: Any, what: str, keep: int) -> None:
    """Adds the flags of the checkpoints. what: is resumed. keep: the default number of checkpoints."""
    add(group, "--resume", f"resume the {what} in this folder; see below", LOCAL_PATH, metavar="OUTPUT")
    add(group, "--checkpoint-every", "rounds between checkpoints (default: only --checkpoint-seconds)", COUNT)
    add(group, "--checkpoint-seconds", "seconds between checkpoints; the last round is always saved", float, 60.0)
    text = "number of newest checkpoints to keep, in addition to the best one; 0: write no checkpoints"
    add(group, "--keep", text, COUNT_OR_ZERO, keep)


def command_of(output: Path) -> str:
    """Returns the command that created the folder. Raises OSError, ValueError, KeyError or TypeError if none did."""
    return str(json.loads((output / CONFIG).read_text())["command"])


def resume_words(output: Path, command: str = "run") -> list[str]:
    """Returns the words of the command that resumes the run in this folder."""
    return ["fedjax-drift", command, "--resume", str(output)]


def output_folder(args: argparse.Namespace, *names: str) -> Path:
    """Returns the output folder, which is not created yet. By default, it is named after the names and the time.

    Raises ConfigurationError if files would be overwritten without --force.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(args.started))
    path = args.output or Path("runs") / f"{'-'.join(dict.fromkeys(names))[:80]}-{stamp}"
    if not fd.distributed.is_first():
        return path
    if path.is_dir() and any(path.iterdir()) and not args.force:
        again = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            again = f", or resume it: {shlex.join(resume_words(path, shlex.split(command_of(path))[1]))}"
        fix = f"choose another folder, add --force to replace the files of an earlier run{again}"
        checks.refuse("--output must be a new or empty folder", f"{path}, which has files", fix)
    return path


@contextlib.contextmanager
def written(path: Path, output: Path, command: str = "run") -> Iterator[Path]:
    """Yields the path of a file that replaces ``path`` after the block. If the disk is full, there is a warning.

    command: the one that writes the folder ``output``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            yield new
    except OSError as error:
        again = shlex.join(resume_words(output, command))
        checks.warn(f"{path} could not be written ({error.strerror}): free some disk space, then: {again}")


def write_results(
    output: Path,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    per_client: Mapping[str, Mapping[str, np.ndarray]],
    goal: tuple[float | None, By],
    data: fd.FederatedData,
) -> list[str]:
    """Writes the tables and plots for which the records have numbers, and returns the names of the files.

    goal: the target accuracy, or None, and what is counted until then (`records.UNITS`).
    """
    target, by = goal
    plots = fd.plots
    files: dict[str, Callable[[Path], Any]] = {
        "summary.csv": lambda path: path.write_text(fd.table(records, format="csv", target=target, by=by))
    }
    files["curves.png"] = partial(plots.curves, records, x=by)
    for draw in (plots.updates, plots.drift, plots.agreement, plots.forgetting, plots.sharpness, plots.gain):
        files[f"{draw.__name__}.png"] = partial(draw, records)
    files["label_mix.png"] = partial(plots.label_mix, next(iter(records.values()), []))
    if target is not None:
        files["rounds_to_target.png"] = partial(plots.rounds_to_target, records, target, by=by)
        files["drift_story.png"] = partial(plots.drift_story, records, target, data)
    if per_client:
        files["clients.csv"] = partial(_write_clients, per_client)
        files["fairness.png"] = partial(plots.fairness, per_client)
    for name, write in files.items():
        try:
            with written(output / name, output) as new:
                write(new)
        except ConfigurationError:  # the records have no numbers for this file; an old file is out of date
            (output / name).unlink(missing_ok=True)
    return [name for name in files if (output / name).exists()]


def _write_clients(per_client: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Writes the scores of every client, one line per client."""
    names = [*next(iter(per_client.values()))]
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["algorithm", "client", *names])
        for algorithm, scores in per_client.items():
            values = np.stack([scores[name] for name in names], axis=1)
            lines.writerows([algorithm, i, *row] for i, row in enumerate(values) if np.isfinite(row).any())
