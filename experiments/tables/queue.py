"""What has not been run yet, how long it would take here, and the runs themselves, the most valuable first.

A job is one cell with seeds that have not been run. The order of the jobs is

  1. those that an open claim of claims.toml waits for, first the comparisons that take the least time
  2. those of the settings that are a headline of their table, by the ``priority`` of the table, 1 before 2
  3. all others, by the ``priority`` of the table

Within 2 and 3, the first seed of all cells comes before the others. A cell needs 3 seeds, and more if the rule of
`comparison` asks for them.

The estimate is the FLOPs of the local training divided by a rate. The rate is that of earlier results with this
model and algorithm on the same hardware, or else with this model. A run of more than `MOST_HOURS` is left for a faster
machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from experiments.tables import claims, report, runner
from experiments.tables.claims import Claim
from experiments.tables.comparison import looks_of
from experiments.tables.papers import Cell, Table
from experiments.tables.results import Result, hardware, read_results
from experiments.tables.tuning import read_tuned, tuning_grid, with_tuned

MOST_HOURS = 8.0  # of one run
DEFAULT_RATES = {
    "cpu": 5e10,
    "gpu": 5e12,
    "tpu": 5e12,
}  # FLOP/s, including compilation, if there are no results of this hardware
STAGES = (
    "for open claims", "headline settings", "headline settings, more seeds", "other settings",
    "other settings, more seeds",
)  # fmt: skip


class Job(NamedTuple):
    """A cell, and seeds that have not been run."""

    table: Table
    cell: Cell
    seeds: list[int]
    stage: int  # an index of `STAGES`
    minutes: float  # the estimate for this machine, all seeds together; NaN if the data are not on it
    obstacle: str = ""  # why it cannot run here; empty: it can
    questions: tuple[Question, ...] = ()  # those that wait for it
    together: float = math.inf  # the minutes of the cheapest of these questions, with all of its jobs


class Question(NamedTuple):
    """An open claim in one setting."""

    claim: Claim
    setting: str


class Needs(NamedTuple):
    """The numbers of seeds that cells need, and why."""

    seeds: dict[Path, int]  # by the rule, of every cell
    for_claims: dict[Path, int]  # of the cells that an open claim waits for
    questions: dict[Path, list[Question]]


class Cost(NamedTuple):
    """The work of one data set and model: all that the estimate of a cell needs besides its options."""

    flops: float  # of training on one example, forward and backward
    examples: int  # M, of all clients
    clients: int  # N


# --- what is missing --------------------------------------------------------------------------------------------------


def missing(
    tables: Sequence[Table], output: Path, claimed: Sequence[Claim] = (), say: Callable[[str], None] = print
) -> list[Job]:
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
    needs, jobs = _needs(tables, output, claimed), []
    for file, (table, cell) in cells.items():
        cost, obstacle = costs.get(_cost_key(cell), ""), _not_available(table, cell)
        wanted = list(range(needs.seeds.get(file, looks_of([cell]).seeds[0])))
        try:
            wanted = runner.unfinished(with_tuned(cell, table, output), output, wanted)
        except ValueError:
            obstacle = f"{output / file} has results of other options"
        tuning = _tuning_rounds(table, cell, output)
        for stage, seeds in _stages(table, cell, wanted, needs.for_claims.get(file, 0)):
            questions = tuple(needs.questions.get(file, ())) if stage == 0 else ()
            if obstacle or isinstance(cost, str):
                jobs.append(Job(table, cell, seeds, stage, math.nan, obstacle or str(cost), questions))
                continue
            rounds = _expected_rounds(table, cell, results[file].values()) * len(seeds) + tuning
            tuning = 0  # it belongs to the first job of the cell
            minutes = _round_flops(cell, cost) * rounds / _rate(cell, rates) / 60
            slow = f"more than {MOST_HOURS:g} hours here" if minutes > 60 * MOST_HOURS * len(seeds) else ""
            jobs.append(Job(table, cell, seeds, stage, minutes, slow, questions))
    return sorted(_with_costs(jobs), key=_order)


def _needs(tables: Sequence[Table], output: Path, claimed: Sequence[Claim]) -> Needs:
    """The seeds that the comparisons of the tables need by the rule, and those that the open claims wait for."""
    needs = Needs({}, {}, {})

    def want(where: dict[Path, int], cell: Cell, seeds: int) -> None:
        where[cell.file] = max(where.get(cell.file, looks_of([cell]).seeds[0]), seeds)

    results = {table.name: report.results_of(table, output) for table in tables}
    for table in tables:
        for verdict in report.orderings(table, results[table.name]):
            for method in (verdict.a, verdict.b):
                want(needs.seeds, table.settings[verdict.setting].cells[method], verdict.wanted_seeds)
    by_name = {table.name: table for table in tables}
    asked = [claim for claim in claimed if claim.table in by_name]
    for claim, tested in zip(asked, claims.evidence(asked, tables, results), strict=True):
        for setting in claim.settings:
            cells = claims.cells(claim, setting, by_name[claim.table])
            seeds = looks_of(cells).seeds[0]
            if setting in tested:
                seeds = tested[setting].wanted_seeds
                if tested[setting].decided or seeds == tested[setting].answer.seeds:
                    continue
            for cell in cells:
                want(needs.for_claims, cell, seeds)
                needs.questions.setdefault(cell.file, []).append(Question(claim, setting))
    return needs


def _with_costs(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs, each with the minutes of the cheapest question that waits for it."""
    minutes: dict[Question, float] = {}
    for job in jobs:
        for question in job.questions:
            minutes[question] = minutes.get(question, 0.0) + (math.inf if job.obstacle else job.minutes)
    return [
        job._replace(together=min((minutes[question] for question in job.questions), default=math.inf)) for job in jobs
    ]


def _order(job: Job) -> tuple:
    """The sort key of a job. Jobs of one question come one after another."""
    if job.stage == 0:
        return bool(job.obstacle), 0, job.together, job.minutes
    return bool(job.obstacle), 2 if job.stage > 2 else 1, job.table.priority, job.stage, job.minutes


def listing(jobs: Sequence[Job], claimed: Sequence[Claim] = ()) -> str:
    """One line per job: its minutes, what it is, and the claims that wait for it; at the end the sums."""
    lines = []
    possible = [job for job in jobs if not job.obstacle]
    for stage, name in enumerate(STAGES):
        of_stage = [job for job in possible if job.stage == stage]
        if of_stage:
            lines += ["", f"{name}: {_count(of_stage)}, {_hours(of_stage)}"]
            lines += [f"{job.minutes:8.1f} min  {_title(job)}{_served(job)}" for job in of_stage]
    for obstacle in dict.fromkeys(job.obstacle for job in jobs if job.obstacle):
        impossible = [job for job in jobs if job.obstacle == obstacle]
        tables = ", ".join(dict.fromkeys(job.table.name for job in impossible))
        lines += ["", f"not here ({obstacle}): {_count(impossible)} of {tables}"]
    lines += _hours_of_claims(jobs, claimed)
    return "\n".join([*lines, "", f"all that can run on {hardware()}: {_count(possible)}, {_hours(possible)}"])


def _served(job: Job) -> str:
    names = dict.fromkeys(question.claim.short for question in job.questions)
    return f"  for {'; '.join(names)}" if names else ""


def _hours_of_claims(jobs: Sequence[Job], claimed: Sequence[Claim]) -> Iterator[str]:
    """Yields the open claims with the hours until the next look in all of their open settings."""
    if any(job.questions for job in jobs):
        yield from (
            "",
            "open claims, and the hours until their next look (jobs that several claims share count in each):",
        )
    for claim in claimed:
        waiting = [job for job in jobs if any(question.claim == claim for question in job.questions)]
        if waiting:
            here = [job for job in waiting if not job.obstacle]
            obstacles = "; ".join(dict.fromkeys(job.obstacle for job in waiting if job.obstacle))
            rest = f" ({len(waiting) - len(here)} of {len(waiting)} jobs not here: {obstacles})" if obstacles else ""
            yield f"{sum(job.minutes for job in here) / 60:6.1f} h  {claim.paper}: {claim.claim}{rest}"


def _cells(table: Table) -> Iterator[Cell]:
    """The cells that this table runs itself."""
    for setting in table.settings.values():
        yield from (cell for cell in setting.cells.values() if cell.table == table.name)


def _not_available(table: Table, cell: Cell) -> str:
    """What the setting needs, if the table says that it is not available: a smaller data set may have its name."""
    needs = table.settings[cell.setting].needs
    return needs if "not available here" in needs else ""


def _stages(table: Table, cell: Cell, seeds: Sequence[int], for_claims: int) -> Iterator[tuple[int, list[int]]]:
    """Yields the seeds of each stage. for_claims: the seeds below this number are for open claims."""
    first, rest = (1 if cell.setting in table.headline else 3), [seed for seed in seeds if seed >= for_claims]
    parts = {
        0: [seed for seed in seeds if seed < for_claims],
        first: [seed for seed in rest if seed == 0],
        first + 1: [seed for seed in rest if seed > 0],
    }
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
    tables: Sequence[Table],
    output: Path,
    claimed: Sequence[Claim],
    budget: float | None,
    say: Callable[[str], None],
    progress: bool | None,
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
            tried = set[tuple[Path, tuple[int, ...]]]()
            while jobs := _untried(missing(tables, output, claimed, say), tried):
                say(f"{_count(jobs)}, {_hours(jobs)} on {hardware()}")
                if jobs[0].stage == 0:  # after these, the claims may need more seeds
                    jobs = [job for job in jobs if job.stage == 0]
                for number, job in enumerate(jobs, 1):
                    say(f"{(time.monotonic() - start) / 60:.0f} min, job {number} of {len(jobs)}: {_title(job)}")
                    tried.add(_key(job))
                    tune = bool(job.table.tune)
                    try:
                        runner.run_cells(
                            job.table, [job.cell], job.seeds, output, tune=tune, progress=progress, say=say
                        )
                    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:  # the others can run
                        say(f"failed: {error}")
        except KeyboardInterrupt:
            if not stopped:
                raise
    return bool(stopped)


def _key(job: Job) -> tuple[Path, tuple[int, ...]]:
    return job.cell.file, tuple(job.seeds)


def _untried(jobs: Iterable[Job], tried: Container[tuple[Path, tuple[int, ...]]]) -> list[Job]:
    """The jobs that can run here and that were not tried before."""
    return [job for job in jobs if not job.obstacle and _key(job) not in tried]


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
