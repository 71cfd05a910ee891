"""What has not been run yet, how long it would take here, and the runs themselves, the most valuable first.

A job is one cell with seeds that have not been run. Jobs are ordered by

  1. whether their setting is a headline of its table
  2. the ``priority`` of the table, 1 before 2
  3. their seeds: the first seed of all cells, then the others up to `SEEDS`
  4. their estimated minutes

The estimate is the FLOPs of the local training divided by a rate. The rate is that of earlier results with this
model and algorithm on the same hardware, or else with this model. A job of more than `MOST_HOURS` is left for a faster
machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from experiments.tables import runner
from experiments.tables.papers import Cell, Table
from experiments.tables.results import Result, hardware, read_results
from experiments.tables.tuning import read_tuned, tuning_grid, with_tuned

SEEDS = 3  # the number of seeds that every cell should have
MOST_HOURS = 8.0
DEFAULT_RATES = {
    "cpu": 5e10,
    "gpu": 5e12,
    "tpu": 5e12,
}  # FLOP/s, including compilation, if there are no results of this hardware
STAGES = ("headline settings", "headline settings, more seeds", "other settings", "other settings, more seeds")


class Job(NamedTuple):
    """A cell, and seeds that have not been run."""

    table: Table
    cell: Cell
    seeds: list[int]
    stage: int  # an index of `STAGES`
    minutes: float  # the estimate for this machine, all seeds together; NaN if the data are not on it
    obstacle: str = ""  # why it cannot run here; empty: it can


class Cost(NamedTuple):
    """The work of one data set and model: all that the estimate of a cell needs besides its options."""

    flops: float  # of training on one example, forward and backward
    examples: int  # M, of all clients
    clients: int  # N


# --- what is missing --------------------------------------------------------------------------------------------------


def missing(tables: Sequence[Table], output: Path, say: Callable[[str], None] = print) -> list[Job]:
    """Returns the jobs of the tables, in the order in which they should run; those that cannot run here come last.

    Loads every data set once, to count its examples and the FLOPs of the models. say: is told what is being read.
    """
    costs: dict[tuple, Cost | str] = {}
    cells = {cell.file: (table, cell) for table in tables for cell in _cells(table)}
    results = {file: read_results(output / file) for file in cells}
    for _, cell in cells.values():
        key = _cost_key(cell)
        if key not in costs and not _not_available(*cells[cell.file]):
            say(f"reading {key[0]}")
            costs[key] = _cost(cell)
    rates = _rates([(cells[file][1], runs) for file, runs in results.items()], costs)
    jobs = []
    for file, (table, cell) in cells.items():
        cost, obstacle, wanted = costs.get(_cost_key(cell), ""), _not_available(table, cell), list(range(SEEDS))
        try:
            wanted = runner.unfinished(with_tuned(cell, table, output), output, wanted)
        except ValueError:
            obstacle = f"{output / file} has results of other options"
        for stage, seeds in _stages(table, cell, wanted):
            if obstacle or isinstance(cost, str):
                jobs.append(Job(table, cell, seeds, stage, math.nan, obstacle or str(cost)))
                continue
            rounds = _expected_rounds(table, cell, results[file].values())
            tuning = _tuning_rounds(table, cell, output)
            flops = _round_flops(cell, cost) * (rounds * len(seeds) + tuning)
            minutes = flops / _rate(cell, rates) / 60
            slow = f"more than {MOST_HOURS:g} hours here" if minutes > 60 * MOST_HOURS else ""
            jobs.append(Job(table, cell, seeds, stage, minutes, slow))
    return sorted(jobs, key=lambda job: (bool(job.obstacle), job.stage > 1, job.table.priority, job.stage, job.minutes))


def listing(jobs: Sequence[Job]) -> str:
    """One line per job: its minutes, and what it is; at the end the sums."""
    lines = []
    possible = [job for job in jobs if not job.obstacle]
    for stage, name in enumerate(STAGES):
        of_stage = [job for job in possible if job.stage == stage]
        if of_stage:
            lines += ["", f"{name}: {_count(of_stage)}, {_hours(of_stage)}"]
            lines += [f"{job.minutes:8.1f} min  {_title(job)}" for job in of_stage]
    for obstacle in dict.fromkeys(job.obstacle for job in jobs if job.obstacle):
        impossible = [job for job in jobs if job.obstacle == obstacle]
        tables = ", ".join(dict.fromkeys(job.table.name for job in impossible))
        lines += ["", f"not here ({obstacle}): {_count(impossible)} of {tables}"]
    return "\n".join([*lines, "", f"all that can run on {hardware()}: {_count(possible)}, {_hours(possible)}"])


def _cells(table: Table) -> Iterator[Cell]:
    """The cells that this table runs itself."""
    for setting in table.settings.values():
        yield from (cell for cell in setting.cells.values() if cell.table == table.name)


def _not_available(table: Table, cell: Cell) -> str:
    """What the setting needs, if the table says that it is not available: a smaller data set may have its name."""
    needs = table.settings[cell.setting].needs
    return needs if "not available here" in needs else ""


def _stages(table: Table, cell: Cell, seeds: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    first = 0 if cell.setting in table.headline else 2
    parts = {first: [seed for seed in seeds if seed == 0], first + 1: [seed for seed in seeds if seed > 0]}
    return ((stage, part) for stage, part in parts.items() if part)


def _title(job: Job) -> str:
    seeds = f"seed{'s' * (len(job.seeds) > 1)} {', '.join(map(str, job.seeds))}"
    return f"{job.table.name}  {job.cell.setting}  {job.cell.method}  {seeds}"


def _count(jobs: Sequence[Job]) -> str:
    return f"{len(jobs)} jobs of {len({job.cell.file for job in jobs})} cells"


def _hours(jobs: Iterable[Job]) -> str:
    return f"about {sum(job.minutes for job in jobs) / 60:.1f} hours"


# --- the estimate -----------------------------------------------------------------------------------------------------


def _cost_key(cell: Cell) -> tuple:
    """Cells with the same key have the same number of examples, number of clients and network."""
    names = ("dataset", "data_dir", "data_seed", "model", "cosine", "clients")
    natural = cell.options.get("partition", "by_writer") == "by_writer"
    return (*(str(cell.options.get(name)) for name in names), natural)


def _cost(cell: Cell) -> Cost | str:
    """The cost of a cell, or why its data cannot be loaded."""
    try:
        parsed = fd.parse_run(cell.words(0))
    except FileNotFoundError as error:
        return f"data not found: {str(error).partition(':')[0]}"
    (sim,) = parsed.simulations.values()
    B, data, model = 8, parsed.data, sim.model

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return model.loss(model.apply(params, data.decode(x)), y).mean()

    shapes = [jax.ShapeDtypeStruct((B, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype)) for a in (data.x, data.y)]
    params = jax.eval_shape(model.init, jax.random.key(0))
    analysis = jax.jit(jax.value_and_grad(loss)).lower(params, *shapes).cost_analysis() or {}
    return Cost(float(analysis.get("flops", 0.0)) / B or 1.0, len(data.x), data.num_clients)


def _round_flops(cell: Cell, cost: Cost) -> float:
    """FLOPs of the local training of one round."""
    return cell.options["cohort"] * cell.options.get("epochs", 1) * cost.flops * cost.examples / cost.clients


def _expected_rounds(table: Table, cell: Cell, runs: Iterable[Result]) -> float:
    """The rounds of one run. Fewer than in its options if it ends at a target that other seeds or the paper reached."""
    rounds = cell.options["rounds"]
    if cell.until is None:
        return rounds
    known = [run.rounds for run in runs if run.reached]
    if known:
        return statistics.mean(known)
    printed = table.settings[cell.setting].printed.get(cell.until.name, {}).get(cell.method)
    return min(rounds, 1.3 * printed.value) if printed else rounds


def _tuning_rounds(table: Table, cell: Cell, output: Path) -> float:
    """The rounds of the runs that tune a cell, all together."""
    if not table.tune or read_tuned(cell, output):
        return 0
    return len(tuning_grid(table, cell)) * min(table.tune.get("rounds", math.inf), cell.options["rounds"])


def _rates(done: Iterable[tuple[Cell, dict[int, Result]]], costs: dict[tuple, Cost | str]) -> dict[tuple, float]:
    """FLOP/s on this hardware: by model and algorithm, by model, and of all, each of all runs together."""
    known: dict[tuple, list[tuple[float, float]]] = {}
    for cell, runs in done:
        cost = costs.get(_cost_key(cell))
        for run in runs.values():
            if isinstance(cost, Cost) and run.hardware == hardware() and run.seconds:
                work = _round_flops(cell, cost) * run.rounds, run.seconds / run.together
                for key in _rate_keys(cell):
                    known.setdefault(key, []).append(work)
    return {key: flops / seconds for key, runs in known.items() for flops, seconds in [np.sum(runs, 0)]}


def _rate_keys(cell: Cell) -> list[tuple]:
    """The keys of a cell in the rates, from the most to the least specific."""
    model = cell.options.get("model", cell.options["dataset"].partition(":")[0])
    return [(model, cell.options["algorithm"].partition(":")[0]), (model,), ()]


def _rate(cell: Cell, rates: dict[tuple, float]) -> float:
    return next((rates[key] for key in _rate_keys(cell) if key in rates), DEFAULT_RATES[jax.default_backend()])


# --- running ----------------------------------------------------------------------------------------------------------


def run_missing(
    tables: Sequence[Table], output: Path, budget: float | None, say: Callable[[str], None], progress: bool | None
) -> bool:
    """Runs the jobs one after another, at the lowest priority of the operating system, until none is left.

    It can be interrupted or killed at any moment. A job in progress is saved about every half minute, and the next call
    resumes it.

    Args:
      budget: seconds after which the job in progress is saved and the queue stops. None: no limit.

    Returns:
      True if the queue ended because the budget was used up.

    Raises:
      KeyboardInterrupt: after Ctrl-C, once the rounds in progress are saved.
      BusyError: another process runs the queue.
    """
    start = time.monotonic()
    with runner.locked(output / "queue.partial") as is_ours, _stopping_after(budget) as stopped:
        if not is_ours:
            raise runner.BusyError(f"one process at a time can run the queue, got a second one for {output}")
        os.nice(19 - os.nice(0))
        try:
            jobs = [job for job in missing(tables, output, say) if not job.obstacle]
            say(f"{_count(jobs)}, {_hours(jobs)} on {hardware()}")
            for number, job in enumerate(jobs, 1):
                say(f"{(time.monotonic() - start) / 60:.0f} min, job {number} of {len(jobs)}: {_title(job)}")
                tune = bool(job.table.tune)
                try:
                    runner.run_cells(job.table, [job.cell], job.seeds, output, tune=tune, progress=progress, say=say)
                except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:  # the others can still run
                    say(f"failed: {error}")
        except KeyboardInterrupt:
            if not stopped:
                raise
    return bool(stopped)


@contextlib.contextmanager
def _stopping_after(seconds: float | None) -> Iterator[list[bool]]:
    """Yields a list that is empty until the budget is used up. Then this process stops as after Ctrl-C."""
    stopped: list[bool] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.append(True)
        request = getattr(signal.getsignal(signal.SIGINT), "request", None)  # of the run in progress, if there is one
        if request is None:
            raise KeyboardInterrupt
        request()  # not a SIGINT, which a process in the background may ignore

    if seconds is None:
        yield stopped
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield stopped
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


DURATIONS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """The seconds of "90s", "150m" or "2.5h". Raises ValueError for anything else."""
    with contextlib.suppress(ValueError):
        if text and text[-1] in DURATIONS and 0 < float(text[:-1]) < math.inf:
            return float(text[:-1]) * DURATIONS[text[-1]]
    raise ValueError(f"--budget must be a number of seconds, minutes or hours such as 150m, got {text!r}")
