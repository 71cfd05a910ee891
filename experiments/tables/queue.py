"""What has not been run yet, in the order in which it should run, and how long it takes here.

A job is one cell with seeds that have not been run. The order of the jobs is

  1. those that an open claim of claims.toml waits for, first the comparisons that take the least time
  2. those of the settings that are a headline of their table, by the ``priority`` of the table, 1 before 2
  3. all others, by the ``priority`` of the table

Within 2 and 3, the first seed of all cells comes before the others. A cell needs the seeds that its table fixed, at
least 3, and more if the rule of `comparison` asks for them.

The minutes of a job are its rounds, times the seconds of a round (`times`). A run of more than `MOST_HOURS` is left for
a faster machine. `crew` runs the jobs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.tables import claims, report, runner
from experiments.tables.claims import Claim
from experiments.tables.comparison import looks_of
from experiments.tables.papers import Cell, Table
from experiments.tables.results import Result, read_results
from experiments.tables.times import Times, timed_options
from experiments.tables.tuning import read_tuned, tuning_grid, with_tuned

MOST_HOURS = 8.0  # of one run
WRONG = 3.0  # an estimate that was not timed may be wrong by this factor
WORTH_MINUTES = 3.0  # jobs with a shorter estimate are not timed: they would hardly take longer
STAGES = (
    "for open claims", "headline settings", "headline settings, more seeds", "other settings",
    "other settings, more seeds",
)  # fmt: skip


class Question(NamedTuple):
    """An open claim in one setting."""

    claim: Claim
    setting: str


class Job(NamedTuple):
    """A cell, and seeds that have not been run."""

    table: Table
    cell: Cell
    seeds: tuple[int, ...]
    stage: int  # an index of `STAGES`
    rounds: float  # those that are left, of all seeds and of the tuning
    obstacle: str = ""  # why it cannot run here; empty: it can
    questions: tuple[Question, ...] = ()  # those that wait for it
    minutes: float = math.nan  # of one worker; NaN if the data are not on this machine
    timed: bool = False  # whether a round was timed here; otherwise the minutes are estimated
    together: float = math.inf  # the minutes of the cheapest of its questions, with all of its jobs

    @property
    def key(self) -> tuple[Path, tuple[int, ...]]:
        return self.cell.file, self.seeds

    @property
    def title(self) -> str:
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        return f"{self.table.name}  {self.cell.setting}  {self.cell.method}  {seeds}"

    @property
    def shown_minutes(self) -> str:
        return f"{'' if self.timed else '~'}{self.minutes:.1f} min"


class Needs(NamedTuple):
    """The numbers of seeds that cells need, and why."""

    seeds: dict[Path, int]  # by the rule, of every cell
    for_claims: dict[Path, int]  # of the cells that an open claim waits for
    questions: dict[Path, list[Question]]


# --- what is left -----------------------------------------------------------------------------------------------------


def missing(
    tables: Sequence[Table], output: Path, claimed: Sequence[Claim], times: Times, only: Container[str] | None = None
) -> list[Job]:
    """Returns the jobs of the tables, in the order in which they should run; those that cannot run here come last.

    Args:
      tables: all tables that the claims are about. A claim is corrected together with those about other tables.
      only: the names of the tables whose jobs are returned. None: all.
    """
    cells = {
        cell.file: (table, cell) for table in tables if only is None or table.name in only for cell in _cells(table)
    }
    results = {file: read_results(output / file) for file in cells}
    times.learn((cells[file][1], runs) for file, runs in results.items())
    needs, jobs = _needs(tables, output, claimed), []
    for file, (table, cell) in cells.items():
        obstacle, wanted = _not_available(table, cell), list(range(needs.seeds.get(file, looks_of([cell]).seeds[0])))
        try:
            wanted = runner.unfinished(with_tuned(cell, table, output), output, wanted)
        except ValueError:
            obstacle = f"{output / file} has results of other options"
        expected, tuning = _expected_rounds(table, cell, results[file].values()), _tuning_rounds(table, cell, output)
        for stage, seeds in _stages(table, cell, wanted, needs.for_claims.get(file, 0)):
            questions = tuple(needs.questions.get(file, ())) if stage == 0 else ()
            rounds = sum(max(0.0, expected - runner.saved_round(cell, output, seed)) for seed in seeds) + tuning
            tuning = 0  # it belongs to the first job of the cell
            jobs.append(Job(table, cell, seeds, stage, rounds, obstacle, questions))
    return ordered(jobs, times)


def ordered(jobs: Iterable[Job], times: Times) -> list[Job]:
    """Returns the jobs with their minutes, in the order in which they should run."""
    estimated = [_with_minutes(job, times) for job in jobs]
    minutes: dict[Question, float] = {}
    for job in estimated:
        for question in job.questions:
            minutes[question] = minutes.get(question, 0.0) + (math.inf if job.obstacle else job.minutes)
    return sorted(
        (
            job._replace(together=min((minutes[question] for question in job.questions), default=math.inf))
            for job in estimated
        ),
        key=_order,
    )


def _with_minutes(job: Job, times: Times) -> Job:
    if job.obstacle and math.isnan(job.minutes):
        return job
    seconds = times.of_round(job.cell)
    if isinstance(seconds, str):
        return job._replace(obstacle=seconds)
    hours = job.rounds / len(job.seeds) * seconds.value / 3600
    slow = f"more than {MOST_HOURS:g} hours here" if hours > MOST_HOURS * (1 if seconds.timed else WRONG) else ""
    return job._replace(minutes=job.rounds * seconds.value / 60, timed=seconds.timed, obstacle=slow)


def _order(job: Job) -> tuple:
    """The sort key of a job. Jobs of one question come one after another."""
    return bool(job.obstacle), *_group(job), job.together, job.minutes


def _group(job: Job) -> tuple:
    """Jobs of the same group are ordered by their minutes."""
    return (0,) if job.stage == 0 else (2 if job.stage > 2 else 1, job.table.priority, job.stage)


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
    for claim, tested in zip(claimed, claims.evidence(claimed, tables, results), strict=True):
        for setting in claim.settings:
            cells = claims.cells(claim, setting, by_name[claim.table])
            seeds = looks_of(cells).seeds[0]
            if setting in tested:
                seeds = tested[setting].wanted_seeds
                if tested[setting].decided or seeds == tested[setting].answer.seeds:
                    continue
            for cell in cells:
                want(needs.seeds, cell, seeds)  # also if the difference is significant without the correction
                want(needs.for_claims, cell, seeds)
                needs.questions.setdefault(cell.file, []).append(Question(claim, setting))
    return needs


def answers(claimed: Sequence[Claim], tables: Sequence[Table], output: Path) -> dict[Question, str]:
    """Returns the answer to every claim in each of its settings: "holds", "fails", "equal" or "open"."""
    results = {table.name: report.results_of(table, output) for table in tables}
    found = zip(claimed, claims.evidence(claimed, tables, results), strict=True)
    return {Question(claim, s): claims.word(tested.get(s)) for claim, tested in found for s in claim.settings}


def _cells(table: Table) -> Iterator[Cell]:
    """The cells that this table runs itself."""
    for setting in table.settings.values():
        yield from (cell for cell in setting.cells.values() if cell.table == table.name)


def _not_available(table: Table, cell: Cell) -> str:
    """What the setting needs, if the table says that it is not available: a smaller data set may have its name."""
    needs = table.settings[cell.setting].needs
    return needs if "not available here" in needs else ""


def _stages(table: Table, cell: Cell, seeds: Sequence[int], for_claims: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the seeds of each stage. for_claims: the seeds below this number are for open claims."""
    first, rest = (1 if cell.setting in table.headline else 3), [seed for seed in seeds if seed >= for_claims]
    parts = {
        0: [seed for seed in seeds if seed < for_claims],
        first: [seed for seed in rest if seed == 0],
        first + 1: [seed for seed in rest if seed > 0],
    }
    return ((stage, tuple(part)) for stage, part in parts.items() if part)


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


# --- the next job -----------------------------------------------------------------------------------------------------


def to_time(jobs: Sequence[Job], skipped: Container[str] = ()) -> Job | None:
    """Returns a job of which a round should be timed before the first of these jobs is run, None if there is none.

    It is near the front: its estimate may be wrong so much that it belongs there.

    skipped: the options (`times.timed_options`) of cells that are not to be timed.
    """

    def least(job: Job) -> float:
        """The minutes until the job is of use. For a question that cannot be answered here: its own minutes."""
        return job.together if math.isfinite(job.together) else job.minutes

    near = [job for job in jobs if _group(job) == _group(jobs[0]) and least(job) <= WRONG * least(jobs[0])]
    worth = (job for job in near if not job.timed and job.minutes > WORTH_MINUTES)
    return next((job for job in worth if timed_options(job.cell) not in skipped), None)


# --- what people read -------------------------------------------------------------------------------------------------


def listing(jobs: Sequence[Job], claimed: Sequence[Claim], hardware: str, workers: int = 1) -> str:
    """One line per job: its minutes, what it is, and the claims that wait for it; then the `summary`."""
    lines = []
    possible = [job for job in jobs if not job.obstacle]
    for stage, name in enumerate(STAGES):
        of_stage = [job for job in possible if job.stage == stage]
        if of_stage:
            lines += ["", f"{name}:"]
            lines += [f"{job.shown_minutes:>12}  {job.title}{_served(job)}" for job in of_stage]
    if any(not job.timed for job in possible):
        lines += ["", "~: estimated from earlier results, or from the FLOPs; the others were timed on this machine"]
    return "\n".join([*lines, *([""] if lines else []), summary(jobs, claimed, hardware, workers)])


def summary(jobs: Sequence[Job], claimed: Sequence[Claim], hardware: str, workers: int = 1) -> str:
    """The sums: the jobs and hours of each stage and of each open claim, and what cannot run here."""
    lines, possible = [], [job for job in jobs if not job.obstacle]
    for stage, name in enumerate(STAGES):
        if of_stage := [job for job in possible if job.stage == stage]:
            lines.append(f"{name}: {count(of_stage)}, {hours(of_stage, workers)}")
    for obstacle in dict.fromkeys(job.obstacle for job in jobs if job.obstacle):
        impossible = [job for job in jobs if job.obstacle == obstacle]
        tables = ", ".join(dict.fromkeys(job.table.name for job in impossible))
        lines.append(f"not here ({obstacle}): {count(impossible)} of {tables}")
    lines += _hours_of_claims(jobs, claimed)
    return "\n".join([*lines, f"all that can run on {hardware}: {count(possible)}, {hours(possible, workers)}"])


def count(jobs: Sequence[Job]) -> str:
    cells = len({job.cell.file for job in jobs})
    return f"{len(jobs)} job{'s' * (len(jobs) != 1)} of {cells} cell{'s' * (cells != 1)}"


def hours(jobs: Iterable[Job], workers: int) -> str:
    """The hours of one worker, and those of all workers together."""
    alone = sum(job.minutes for job in jobs) / 60
    shared = f", {alone / workers:.1f} with {workers} workers" if workers > 1 else ""
    return f"about {alone:.1f} hours{' of one worker' * (workers > 1)}{shared}"


def _served(job: Job) -> str:
    names = dict.fromkeys(question.claim.short for question in job.questions)
    return f"  for {'; '.join(names)}" if names else ""


def _hours_of_claims(jobs: Sequence[Job], claimed: Sequence[Claim]) -> Iterator[str]:
    """Yields the open claims with the hours until the next look in all of their open settings."""
    if any(job.questions for job in jobs):
        yield (
            "open claims, and the hours of one worker until their next look (jobs that several claims share count in "
            "each):"
        )
    for claim in claimed:
        waiting = [job for job in jobs if any(question.claim == claim for question in job.questions)]
        if waiting:
            here = [job for job in waiting if not job.obstacle]
            obstacles = "; ".join(dict.fromkeys(job.obstacle for job in waiting if job.obstacle))
            rest = f" ({len(waiting) - len(here)} of {len(waiting)} jobs not here: {obstacles})" if obstacles else ""
            yield f"{sum(job.minutes for job in here) / 60:6.1f} h  {claim.paper}: {claim.text}{rest}"
