"""Runs the cells of a paper's table, and stores their results.

The seeds of a cell are one sweep, unless each has its own partition. A sweep saves checkpoints, and can be resumed
after it was stopped or killed. The results of a cell are one file with one line per seed. The checkpoints of an
unfinished cell are in a folder beside this file. Several processes may run one table. Each process then runs cells that
no other process is running.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import fedjax_drift as fd
from experiments.tables.papers import Cell, Series, Table
from experiments.tables.results import (
    Result,
    commit,
    five_digits,
    hardware,
    kept_series,
    read_results,
    summary,
    write_results,
)
from experiments.tables.tuning import (
    Tuned,
    cell_for_tuning,
    check_tuned,
    read_tuned,
    tuning_grid,
    tuning_score,
    with_tuned,
    write_tuned,
)

SAVE_SECONDS = 25.0  # the time between two saves. A save takes a moment, and a kill then loses less than half a minute
TARGET_SECONDS = 30.0  # a cell with a target checks about this often whether all seeds have reached it
DATA_OPTIONS = (
    "dataset",
    "partition",
    "clients",
    "size_sigma",
    "imbalance",
    "data_dir",
    "data_seed",
    "redeal",
    "validation",
    "standardize",
)
BUSY = "another process is running it"
TUNING_SEED = 1_000_000  # the seed of the tuning runs, which no reported run has


class BusyError(ValueError):
    """Another process does the same work."""


# --- running ----------------------------------------------------------------------------------------------------------


def run_cells(
    table: Table,
    cells: Sequence[Cell],
    seeds: Sequence[int] | None,
    output: Path,
    *,
    rounds: int | None = None,
    tune: bool = False,
    progress: bool | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Runs the seeds of the cells that have no result in ``output`` yet, and stores their results there.

    Cells whose data are not on this machine are skipped.

    Args:
      seeds: the number of seeds of every cell. Default: as in the table.
      rounds: the largest number of rounds. Default: as in the table.
      tune: whether to try the grid of the table for each cell first, and then run the cell with the best values.
      progress: as in `fd.sweep`.
      say: ``say(text)`` is called with a line of text about each cell.

    Returns:
      False if all cells were skipped because their data are not on this machine.

    Raises:
      KeyboardInterrupt: after Ctrl-C, when the rounds in progress have been saved.
      ValueError: a cell has an invalid option, or ``output`` has results of a cell that was run with other options.
    """
    if tune and not table.tune:
        raise ValueError(f"{table.name} must have a grid for --tune, got a table without [tune]: leave --tune out")
    commit()  # files may change while the cells run
    federations: dict[tuple, fd.FederatedData] = {}
    without_data, reasons = 0, set[str]()
    for number, cell in enumerate(cells, 1):
        title = f"{number}/{len(cells)}  {cell.setting}  {cell.method}"
        with locked(_partial(cell, output)) as is_ours, fd.stop_on_interrupt() as stop:
            if not is_ours:
                say(f"{title}: {BUSY}")
                continue
            try:
                check_tuned(table, cell, output)
                if tune and not read_tuned(cell, output) and (grid := tuning_grid(table, cell)):
                    say(f"{title}: tuning {len(grid)} combinations")
                    _tune(table, cell_for_tuning(table, cell), grid, output, federations, progress)
                cell = with_tuned(cell, table, output)
                cell = cell if rounds is None else cell._replace(options=_at_most(cell.options, rounds))
                wanted = list(range(cell.seeds) if seeds is None else seeds)
                longer = _store_beginnings(cell, unfinished(cell, output, wanted), output)
                for file in longer:
                    say(f"{title}: the beginning of a longer run, {file}")
                missing = unfinished(cell, output, wanted)
                if missing:
                    say(f"{title}: {cell.options['rounds']} rounds, seeds {', '.join(map(str, missing))}")
                    _run_cell(cell, missing, output, federations, progress)
                if missing or longer:
                    _say_scores(table, cell, output, wanted, say)
                else:
                    say(f"{title}: already done")
            except FileNotFoundError as error:
                say(f"{title}: not run{', for the same reason' if str(error) in reasons else f': {error}'}")
                reasons.add(str(error))
                without_data += 1
            if stop.requested:  # while the last rounds of this cell ran
                raise KeyboardInterrupt
    return not cells or without_data < len(cells)


def _parsed(cell: Cell, seed: int, federations: dict[tuple, fd.FederatedData]) -> fd.ParsedRun:
    """Returns the simulation of a cell.

    The data are cached in ``federations``, because the methods of a setting have the same data.
    """
    key = (*(str(cell.options.get(name)) for name in DATA_OPTIONS), seed if cell.own_partitions else 0)
    if key not in federations:
        federations.clear()  # one federation at a time fits in memory
    parsed = fd.parse_run(cell.words(seed), data=federations.get(key))
    federations[key] = parsed.data
    return parsed


def _at_most(options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Returns the options with at most ``rounds`` rounds."""
    names = [name for name in ("rounds", "measure_every", "eval_every") if name in options]
    return options | {name: min(rounds, options[name]) for name in names}


def unfinished(cell: Cell, output: Path, seeds: Iterable[int]) -> list[int]:
    """Returns the seeds that have no result yet. Raises ValueError if the file has results with other options."""
    results, rounds = read_results(output / cell.file), cell.options["rounds"]
    for result in results.values():
        shared = min(result.options["rounds"], rounds)
        old, new = _at_most(result.options, shared), _at_most(cell.options, shared)
        if changed := sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)):
            raise ValueError(
                f"{output / cell.file} must have results with the options of the table, got another "
                f"{', '.join(changed)}: move the file, or pass another --output"
            )
    complete = {seed for seed, result in results.items() if result.reached or result.rounds >= rounds}
    return [seed for seed in seeds if seed not in complete]


def saved_round(cell: Cell, output: Path, seed: int) -> int:
    """Returns the last round of an unfinished run that is saved, 0 if none is."""
    folder = _partial(cell, output) / f"seed-{seed}"
    return max(fd.Checkpoints(folder).rounds, default=0) if folder.is_dir() else 0


def _add_results(cell: Cell, output: Path, new: dict[int, Result]) -> dict[int, Result]:
    """Adds results to the file of the cell. Returns all results of the file by seed."""
    results = read_results(output / cell.file) | new
    write_results(output / cell.file, results.values())
    return results


def _store_beginnings(cell: Cell, seeds: Sequence[int], output: Path) -> list[Path]:
    """Stores the results of the seeds for which another setting of the paper has a longer run with the same options.

    For example, a run to a target accuracy is the beginning of a run of all rounds for the best accuracy. Returns the
    files of these runs, relative to ``output``.
    """
    paper, *_, name = cell.file.parts
    files = []
    for file in sorted(output.glob(str(Path(paper, "*", "*", name)))):
        runs = {seed: run for seed, run in read_results(file).items() if seed in seeds}
        beginnings = {seed: result for seed, run in runs.items() if (result := _beginning(run, cell))}
        if beginnings:
            _add_results(cell, output, beginnings)
            for seed in beginnings:
                shutil.rmtree(_partial(cell, output) / f"seed-{seed}", ignore_errors=True)
            files.append(file.relative_to(output))
    return files


def _beginning(run: Result, cell: Cell) -> Result | None:
    """Returns the cell's result if this run contains it: the rounds until the target or the cell's last round.

    The time is a share of the run's time. Returns None if the options are others, or if the run is too short.
    """
    rounds = cell.options["rounds"]
    if run.options | {"rounds": rounds} != cell.options:
        return None
    within = _until_round(run.series, rounds)
    reached = math.inf if cell.until is None else cell.until(within)
    end = int(min(reached, rounds))
    last = max((t for series in within.values() for t in series.rounds), default=0)
    if end > last or any(len(within[name].rounds) < last for name in cell.keep if name in within):
        return None
    return run._replace(
        setting=cell.setting, method=cell.method, rounds=end, reached=end < rounds, options=cell.options,
        seconds=round(run.seconds * end / run.rounds, 1), series=_until_round(run.series, end),
        command=shlex.join(["fedjax-drift", "run", *cell.words(run.seed)]),
    )  # fmt: skip


def _until_round(series: Mapping[str, Series], end: int) -> dict[str, Series]:
    """Returns the values of the rounds 1 to ``end``."""
    counts = {name: sum(t <= end for t in each.rounds) for name, each in series.items()}
    return {name: Series(each.rounds[: counts[name]], each.values[: counts[name]]) for name, each in series.items()}


def _run_cell(
    cell: Cell,
    seeds: Sequence[int],
    output: Path,
    federations: dict[tuple, fd.FederatedData],
    progress: bool | None,
) -> None:
    """Runs the seeds until the last round or the target, side by side if they have the same data, and writes their
    results."""
    folder = _partial(cell, output)
    begun = [seed for seed in seeds if fd.Checkpoints(folder / f"seed-{seed}").rounds]
    # All seeds of a sweep must start at the same round.
    groups = [begun, [seed for seed in seeds if seed not in begun]]
    for group in [[seed] for seed in seeds] if cell.own_partitions else groups:
        if group:
            parsed = _parsed(cell, group[0], federations)
            runs = _sweep(cell, group, folder, parsed, progress)
            results = _add_results(cell, output, {run.seed: _result(cell, run, len(group), parsed) for run in runs})
            for seed in {*group, *results} - (set(seeds) - set(group)):  # a killed process may have left some
                shutil.rmtree(folder / f"seed-{seed}", ignore_errors=True)


def _sweep(cell: Cell, seeds: Sequence[int], folder: Path, parsed: fd.ParsedRun, progress: bool | None) -> list[fd.Run]:
    """Runs these seeds as one sweep and returns their runs, which end when all have reached the target."""
    (sim,) = parsed.simulations.values()

    def run(rounds: int) -> list[fd.Run]:
        return sim.sweep(
            rounds, seeds, parsed.eval_every, params=parsed.params, measure_every=parsed.measure_every,
            progress=progress, checkpoints=_checkpoints(folder),
        )  # fmt: skip

    saved = max(fd.Checkpoints(folder / f"seed-{seeds[0]}").rounds, default=0)
    return _in_sections(run, cell, parsed, parsed.rounds, saved, all)


def _in_sections(
    run: Callable[[int], list[fd.Run]],
    cell: Cell,
    parsed: fd.ParsedRun,
    rounds: int,
    saved: int,
    enough: Callable[[Iterable[bool]], bool],
) -> list[fd.Run]:
    """Returns the runs of a sweep.

    If the cell has a target, the sweep is run in sections. Each section ends at a round that is evaluated. No further
    section is run after enough runs have reached the target.

    Args:
      run: ``run(rounds)`` runs the sweep until this round, or continues it.
      rounds: the last round.
      saved: the last round that is saved.
      enough: ``enough(whether each run has reached the target)``, `all` or `any`.
    """
    every = max(parsed.eval_every, 1)
    total = rounds if cell.until is None else min(rounds, every * max(1, math.ceil(saved / every)))
    done = saved  # the rounds before this section
    with fd.stop_on_interrupt() as stop:
        while True:
            runs = run(total)
            _raise_if_interrupted(runs, total)
            if total == rounds or enough(_has_reached(cell, each, parsed) for each in runs):
                return runs
            if stop.requested:  # in the last rounds of this section
                raise KeyboardInterrupt
            # The mean over the section: rounds overlap, so the seconds of a single round are not its duration.
            section = [record["seconds"] for record in runs[0].history[done:]] or [math.inf]
            done, seconds = total, every * sum(section) / len(section)  # the time between two evaluations
            total = min(rounds, total + every * max(1, int(TARGET_SECONDS / seconds)))


def _checkpoints(folder: Path) -> fd.Checkpoints:
    """Returns the checkpoints of a cell, which keep the last two of each run.

    If the process is killed after some runs were saved and before the others, all runs still have a checkpoint of the
    same round.
    """
    return fd.Checkpoints(folder, seconds=SAVE_SECONDS, keep=2, best=None)


def _raise_if_interrupted(runs: Sequence[fd.Run], rounds: int) -> None:
    """Raises KeyboardInterrupt if a run has fewer rounds, because Ctrl-C stopped the sweep and saved it."""
    if any(int(run.state.round) < rounds for run in runs):
        raise KeyboardInterrupt


def _has_reached(cell: Cell, run: fd.Run, parsed: fd.ParsedRun) -> bool:
    """Whether the run has reached the target at which it may end."""
    return cell.until is not None and math.isfinite(cell.until(kept_series(run.history, parsed.eval_every, cell.keep)))


def _result(cell: Cell, run: fd.Run, together: int, parsed: fd.ParsedRun) -> Result:
    rounds, seconds = len(run.history), sum(record["seconds"] for record in run.history)
    return Result(
        cell.setting, cell.method, run.seed, rounds, rounds < parsed.rounds, round(seconds, 1), together,
        shlex.join(["fedjax-drift", "run", *cell.words(run.seed)]), cell.options, commit(), hardware(),
        {"fedjax_drift": fd.__version__, "jax": jax.__version__, "python": platform.python_version()},
        time.strftime("%Y-%m-%d"), kept_series(run.history, parsed.eval_every, cell.keep),
    )  # fmt: skip


def _say_scores(table: Table, cell: Cell, output: Path, seeds: Sequence[int], say: Callable[[str], None]) -> None:
    """Reports the scores of a finished cell: those that the paper prints for its setting, or all if there are none."""
    results = read_results(output / cell.file)
    rows = [s for s in table.settings.values() if cell.file in [other.file for other in s.cells.values()]]
    printed = {name for setting in rows for name in setting.printed}
    for score in table.scores.values():
        if not printed or score.name in printed:
            values = [score(results[seed].series) for seed in seeds]
            say(f"      {score.name}: {summary(values, score.digits)}   ({results[seeds[-1]].seconds:.0f} s)")


# --- cells that are not finished --------------------------------------------------------------------------------------


def _partial(cell: Cell, output: Path) -> Path:
    """Returns the folder for the checkpoints of an unfinished cell."""
    return (output / cell.file).with_suffix(".partial")


def _without_links(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Locks a folder, for example that of an unfinished cell. Yields False if another process has locked it.

    At the end, removes the folder if it has nothing else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", opener=_without_links) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name))
        except (BlockingIOError, FileNotFoundError):  # not found: another process has just removed the folder
            is_ours = False
        except OSError as error:
            fix = "pass an --output folder on another file system"
            raise ValueError(
                f"{folder} must be a folder that can be locked, got an error ({error.strerror}): {fix}"
            ) from error
        try:
            yield is_ours
        finally:
            if is_ours and os.listdir(folder) == ["lock"]:
                shutil.rmtree(folder)


# --- tuning -----------------------------------------------------------------------------------------------------------


def _tune(
    table: Table,
    cell: Cell,
    grid: Sequence[Mapping[str, float]],
    output: Path,
    federations: dict[tuple, fd.FederatedData],
    progress: bool | None,
) -> None:
    """Trains all combinations of the grid in one sweep, and writes the result of each combination.

    If the score is the rounds to the target at which runs may end, the sweep ends when the first run has reached it.
    """
    folder, parsed = _partial(cell, output) / "tuning", _parsed(cell, TUNING_SEED, federations)
    rounds = min(table.tune.get("rounds", parsed.rounds), parsed.rounds)

    def build(**values: float) -> fd.Simulation:
        (sim,) = fd.parse_run(cell.words(TUNING_SEED), data=parsed.data, values=values).simulations.values()
        return sim

    def run(last: int) -> list[fd.Run]:
        return fd.sweep(
            build, last, [TUNING_SEED], grid, parsed.eval_every, params=parsed.params, progress=progress,
            measure_every=parsed.measure_every, checkpoints=_checkpoints(folder),
        )  # fmt: skip

    score = tuning_score(table)
    target = cell._replace(until=cell.until if cell.until == score else None)
    saved = max((t for each in folder.glob("*") for t in fd.Checkpoints(each).rounds), default=0)
    runs = _in_sections(run, target, parsed, rounds, saved, any)
    rounds = len(runs[0].history)
    scores = [score(kept_series(run.history, parsed.eval_every, ())) for run in runs]
    share = table.tune.get("validation")
    tuned = [
        Tuned(dict(run.setting), five_digits(value), rounds, share) for run, value in zip(runs, scores, strict=True)
    ]
    write_tuned(cell, output, tuned)
    shutil.rmtree(folder)
