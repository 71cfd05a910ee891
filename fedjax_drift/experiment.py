"""Runs the cells of a paper's table, and keeps their results as lines of JSON.

All seeds of a cell are one sweep, which goes on from its own states in parts of half a minute; after each part every
seed is saved. The results of a cell are one file, a line for each seed. Several processes may run one table.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift import options
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.papers import Cell, Score, Series, Table, arguments, last_number, parsed, tunable
from fedjax_drift.simulation.progress import Bar, Stop, stop_on_interrupt
from fedjax_drift.simulation.sweep import Setting
from fedjax_drift.storage.checkpoint import Checkpoints
from fedjax_drift.storage.files import lock_folder, replace_file
from fedjax_drift.types import Record

CHUNK = 30.0  # seconds of rounds between two saves, unless those between two evaluations take longer
TUNING_CHUNK = 300.0  # likewise of a grid, whose program is compiled anew after each save
BOOKKEEPING = (
    "round",
    "seconds",
    "clients",
    "lr",
    "steps",
    "executed_steps",
    "executed_ratio",
    "asked",
)  # in no results
TUNING_SEED = 1_000_000  # of the runs that tune, which are none of those reported


class Result(NamedTuple):
    """One run, as a line of JSON."""

    setting: str
    method: str
    seed: int
    rounds: int  # done
    reached: bool  # ended early, as the target was reached
    seconds: float  # of all seeds together
    together: int  # seeds
    command: str
    options: dict[str, Any]
    commit: str | None
    hardware: str
    versions: dict[str, str]
    date: str
    series: dict[str, Series]


# --- results ----------------------------------------------------------------------------------------------------------


def results(file: Path) -> dict[int, Result]:
    """The runs of a cell by their seeds; none where there is no file."""
    if not file.exists():
        return {}
    found = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            kept: dict[str, Series] = {}
            for columns in entry["series"]:
                rounds = columns.pop("round")
                kept |= {name: Series(rounds, values) for name, values in columns.items()}
            found[entry["seed"]] = Result(**entry | {"series": kept})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}, line {number} is no result ({error}): delete the file to run it again"
            ) from error
    return found


def _line(result: Result) -> dict[str, Any]:
    """As JSON: entries that are of the same rounds stand together, as the columns of one table."""
    columns: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, (rounds, values) in result.series.items():
        columns.setdefault(tuple(rounds), {"round": rounds})[name] = values
    return result._asdict() | {"series": list(columns.values())}


def _write(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """A line each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries))


def series(history: Sequence[Record], eval_every: int, every_round: Iterable[str]) -> dict[str, Series]:
    """What is kept of a run: the evaluated rounds, of some entries every round; five digits."""
    kept: dict[str, Series] = {}
    for record in history:
        t = record["round"]
        due = t == history[-1]["round"] or (t % eval_every == 0 if eval_every else False)
        for name, value in record.items():
            if name not in BOOKKEEPING and (due or name in every_round):
                rounds, values = kept.setdefault(name, Series([], []))
                rounds.append(t)  # type: ignore[attr-defined]
                values.append(_short(value))  # type: ignore[attr-defined]
    return kept


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.5g}") if math.isfinite(value) else None


def commit() -> str | None:
    """Of the sources that run, with a plus where they have been changed since; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(fd.__file__).parent), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return f"{os.cpu_count()} cores, {match[1]}"
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"


# --- running ----------------------------------------------------------------------------------------------------------


def run(
    table: Table,
    cells: Sequence[Cell],
    seeds: Sequence[int] | None,
    output: Path,
    *,
    rounds: int | None = None,
    tune: bool = False,
    progress: bool = True,
    say: Callable[[str], None] = print,
) -> bool:
    """Runs what is not done of the cells, and keeps it in ``output``; False when Ctrl-C ended it.

    seeds: of every cell; default as many as the table was run with. rounds: at most so many, instead of the table's.
    Cells whose files are not there are passed over; FileNotFoundError if that is all of them.
    """
    if tune and not table.tune:
        raise ValueError(f"{table.name} must have a grid to be tuned, got a table without [tune]: leave --tune out")
    made: dict[str, fd.FederatedData] = {}
    lacking: list[FileNotFoundError] = []
    for number, cell in enumerate(cells, 1):
        title = f"{number}/{len(cells)}  {cell.setting}  {cell.method}"
        with _claimed(cell, output) as ours, stop_on_interrupt() as stop:
            if not ours:
                say(f"{title}: another process is at it")
                continue
            try:
                if tune and not tuned(cell, output):
                    say(f"{title}: tuning {len(_grid(table, cell))} combinations")
                    _tune(table, cell, output, _data(cell, made), progress, stop)
                if not stop.asked:
                    cell = with_tuned(cell, table, output)
                    cell = cell if rounds is None else cell._replace(options=_at_most(cell.options, rounds))
                    wanted = list(seeds if seeds is not None else range(cell.seeds))
                    missing = _missing(cell, output, wanted)
                    what = f"{cell.options['rounds']} rounds, seeds {', '.join(map(str, missing))}"
                    say(f"{title}: {what if missing else 'done before'}")
                    if missing:
                        _run_cell(cell, missing, output, _data(cell, made), progress, stop)
                        _tell(table, cell, output, wanted, say)
            except FileNotFoundError as error:
                say(f"{title}: not run: {error}")
                lacking.append(error)
            if stop.asked:
                say("interrupted: the same command goes on from here")
                return False
    if cells and len(lacking) == len(cells):
        raise lacking[0]
    return True


def _tell(table: Table, cell: Cell, output: Path, wanted: Sequence[int], say: Callable[[str], None]) -> None:
    """The scores of a cell that has just been run."""
    found = results(output / cell.file)
    if set(wanted) <= set(found):
        for score in _scores_of(table, cell):
            values = [score(found[seed].series) for seed in wanted]
            say(f"      {score.name}: {summary(values, score.digits)}   ({found[wanted[-1]].seconds:.0f} s)")


def _scores_of(table: Table, cell: Cell) -> list[Score]:
    """Those that the paper prints of a cell, which may be another table's; all where it prints none."""
    settings = [s for s in table.settings.values() if cell.file in [each.file for each in s.cells.values()]]
    printed = {name for setting in settings for name in setting.printed}
    return [score for score in table.scores.values() if not printed or score.name in printed]


@contextlib.contextmanager
def _claimed(cell: Cell, output: Path) -> Iterator[bool]:
    """Whether this process has the cell to itself: several may share a table."""
    place = _partial(cell, output)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(place, "--output"))
        except ValueError as error:
            if "in use" not in str(error):
                raise
            yield False
            return
        try:
            yield True
        finally:
            if [entry.name for entry in place.iterdir()] == ["lock"]:
                shutil.rmtree(place, ignore_errors=True)


def _at_most(given: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The options with fewer rounds."""
    fewer = {name: min(rounds, given[name]) for name in ("rounds", "measure_every", "eval_every") if name in given}
    return given | fewer


def summary(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation of the numbers; how many of them are finite where some are not."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "not reached" if any(map(math.isinf, values)) else "-"
    spread = f" ± {np.std(known, ddof=1):.{digits}f}" if len(known) > 1 else ""
    return f"{np.mean(known):.{digits}f}{spread}" + f" ({len(known)} of {len(values)})" * (len(known) < len(values))


def _data(cell: Cell, made: dict[str, fd.FederatedData]) -> fd.FederatedData:
    """The federation of a cell: the same for all methods of a setting, and only the last is kept in memory."""
    args = parsed(cell, 0)
    key = json.dumps([args.dataset, args.partition, args.clients, args.size_sigma, args.data_seed, args.redeal])
    if key not in made:
        made.clear()
        made[key] = options.load(args)
    return made[key]


def _missing(cell: Cell, output: Path, seeds: Iterable[int]) -> list[int]:
    """The seeds that are not done; ValueError where the file holds results of other options."""
    found = results(output / cell.file)
    for result in found.values():
        rounds = min(result.options["rounds"], cell.options["rounds"])
        was, now = _at_most(result.options, rounds), _at_most(cell.options, rounds)
        if changed := {key for key in {*was, *now} if was.get(key) != now.get(key)}:
            raise ValueError(
                f"{output / cell.file} must be of the table's options, got another {', '.join(sorted(changed))}: move "
                "the file away, or choose another --output"
            )
    asked = cell.options["rounds"]
    return [seed for seed in seeds if seed not in found or (found[seed].rounds < asked and not found[seed].reached)]


class Member(NamedTuple):
    """One of the runs that go side by side, and where it is saved."""

    seed: int
    setting: Setting
    saved: Checkpoints


def _run_cell(cell: Cell, seeds: list[int], output: Path, data: fd.FederatedData, progress: bool, stop: Stop) -> None:
    """Runs the seeds side by side, saved every half a minute, to their end, their target or Ctrl-C."""
    args = parsed(cell, seeds[0])
    simulations, params, _ = options.asked(args, data)
    (sim,) = simulations.values()
    members = [Member(seed, {}, _saved(cell, output, f"seed-{seed}")) for seed in seeds]
    for together in _side_by_side(members, args.rounds):
        histories = _run_together(cell, args, lambda: sim, params, together, CHUNK, progress, stop)
        if stop.asked:
            return
        found = results(output / cell.file)
        for member, history in zip(together, histories, strict=True):
            found[member.seed] = _result(cell, member.seed, history, len(together), args)
        _write(output / cell.file, [_line(found[seed]) for seed in sorted(found)])
    _forget(members)


def _run_together(
    cell: Cell,
    args: argparse.Namespace,
    build: Callable[..., fd.Simulation],
    params: Any,
    members: Sequence[Member],
    chunk: float,
    progress: bool,
    stop: Stop,
) -> list[list[Record]]:
    """Runs that are at one round, to ``args.rounds``, the target or Ctrl-C, and saves them; their whole histories."""
    seeds, every = list(dict.fromkeys(member.seed for member in members)), args.eval_every or 10  # in their order
    settings = [member.setting for member in members[:: len(seeds)]]  # either seeds differ or settings do
    sims = [build(**member.setting) for member in members]
    runs = [_start(sim, member, params) for sim, member in zip(sims, members, strict=True)]
    t, histories = int(runs[0].state.round), [list(run.history) for run in runs]
    new = [list[Record]() for _ in runs]  # those that the checkpoints don't have
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Bar(args.rounds * len(runs), f"{cell.setting}, {cell.method}", progress))
        for record in itertools.chain(*histories):
            bar.update(record)
        savers = [
            stack.enter_context(member.saved.saving(sim.specification, run.state, stop.held))
            for member, sim, run in zip(members, sims, runs, strict=True)
        ]
        n = every - t % every  # to a round that is evaluated, wherever the runs were interrupted
        while t < args.rounds and not stop.asked and not (t % every == 0 and _reached(cell, args, histories)):
            n, started = min(n, args.rounds - t), time.perf_counter()
            runs = fd.sweep(
                build, n, seeds, settings, args.eval_every, start=runs, progress=False,
                measure_every=args.measure_every or 1, on_round=lambda seed, setting, record: bar.update(record),
            )  # fmt: skip
            seconds = (time.perf_counter() - started) / max(len(runs[0].history), 1)  # a round
            for i, run in enumerate(runs):
                made = [record | {"seconds": seconds} for record in run.history]
                new[i] += made
                histories[i] += made
                (savers[i].finish if stop.asked else savers[i].save)(run.state, new[i])
            t += len(runs[0].history)
            n = _chunk(chunk, seconds, every)
    return histories


def _start(sim: fd.Simulation, member: Member, params: Any) -> fd.Run:
    """From the last save, or from the first round."""
    saved = member.saved.rounds
    state, history = member.saved.restore(sim) if saved else (sim.init(jax.random.key(member.seed), params), [])
    return fd.Run(member.seed, member.setting, state, history)


def _partial(cell: Cell, output: Path) -> Path:
    """Where a cell that is under way is saved."""
    return (output / cell.file).with_suffix(".partial")


def _saved(cell: Cell, output: Path, name: str) -> Checkpoints:
    return Checkpoints(_partial(cell, output) / name, keep=1, best=None)


def _forget(members: Iterable[Member]) -> None:
    """Removes what was saved of runs whose results are kept."""
    for member in members:
        shutil.rmtree(member.saved.path, ignore_errors=True)


def _side_by_side(members: Iterable[Member], rounds: int) -> Iterator[list[Member]]:
    """Those that are at one round together: a kill between two saves may have left some behind the others."""
    found: dict[int, list[Member]] = {}
    for member in members:
        found.setdefault(max(member.saved.rounds, default=0), []).append(member)
    if max(found) > rounds:
        raise ValueError(
            f"{max(found)} rounds are done in {found[max(found)][0].saved.path.parent}, which are not all that were "
            f"asked for, got --rounds {rounds}: ask for as many, or choose another --output"
        )
    yield from found.values()


def _chunk(chunk: float, seconds: float, every: int) -> int:
    """Rounds to the next save, a multiple of ``every``, for rounds that take so long."""
    return every * max(1, int(chunk / (every * seconds)))


def _reached(cell: Cell, args: argparse.Namespace, histories: Iterable[Sequence[Record]]) -> bool:
    """Whether every run has reached the target after which it need not go on."""
    if cell.until is None:
        return False
    return all(math.isfinite(cell.until(series(history, args.eval_every, cell.keep))) for history in histories)


def _result(cell: Cell, seed: int, history: Sequence[Record], together: int, args: argparse.Namespace) -> Result:
    return Result(
        cell.setting, cell.method, seed, len(history), len(history) < args.rounds,
        round(sum(record["seconds"] for record in history), 1), together,
        shlex.join(["fedjax-drift", "run", *arguments(cell, seed)]), cell.options, commit(), hardware(),
        {"fedjax_drift": fd.__version__, "jax": jax.__version__, "python": platform.python_version()},
        time.strftime("%Y-%m-%d"), series(history, args.eval_every, cell.keep),
    )  # fmt: skip


# --- tuning -----------------------------------------------------------------------------------------------------------


class Tuned(NamedTuple):
    """What one combination of the grid gave."""

    values: dict[str, float]
    score: float
    rounds: int


def tuning_file(cell: Cell, output: Path) -> Path:
    return (output / cell.file).with_suffix(".tuning.jsonl")


def tuned(cell: Cell, output: Path) -> list[Tuned]:
    """What tuning the cell gave; nothing where it was not tuned."""
    file = tuning_file(cell, output)
    found = [Tuned(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    return [each._replace(score=last_number(each.score)) for each in found]


def best_of(tried: Sequence[Tuned], score: Score) -> dict[str, float]:
    """The values with the best score; of those that are equal the first."""
    return max(tried, key=lambda each: score.sign * each.score if math.isfinite(each.score) else -math.inf).values


def with_tuned(cell: Cell, table: Table, output: Path) -> Cell:
    """The cell with the values that were found best, where it was tuned."""
    tried = tuned(cell, output)
    if not tried:
        return cell
    values = best_of(tried, tuning_score(table))
    found = options.spec("algorithm", cell.options["algorithm"], ALGORITHMS)
    local = {key: value for key, value in values.items() if key in options.LOCAL}
    own = {key: value for key, value in values.items() if key not in local}
    algorithm = options.written(found._replace(options=found.options | own))
    return cell._replace(options=cell.options | local | {"algorithm": algorithm})


def tuning_score(table: Table) -> Score:
    return table.scores[table.tune.get("score", next(iter(table.scores)))]


def _grid(table: Table, cell: Cell) -> list[dict[str, float]]:
    """All combinations of the values that the method has."""
    known = tunable(cell.options)
    return fd.grid(**{key: values for key, values in table.tune["grid"].items() if key in known})


def _tune(table: Table, cell: Cell, output: Path, data: fd.FederatedData, progress: bool, stop: Stop) -> None:
    """Tries the grid, all of it side by side in one program, saved every five minutes."""
    args = parsed(cell, TUNING_SEED)
    args.rounds = min(table.tune.get("rounds", args.rounds), args.rounds)
    simulations, params, _ = options.asked(args, data)

    def build(**values: float) -> fd.Simulation:
        return next(iter(options.asked(args, data, values).simulations.values()))

    names = {"-".join(f"{key}={value}" for key, value in each.items()): each for each in _grid(table, cell)}
    members = [Member(TUNING_SEED, setting, _saved(cell, output, f"tuning-{name}")) for name, setting in names.items()]
    score, found, endless = tuning_score(table), {}, cell._replace(until=None)
    for together in _side_by_side(members, args.rounds):
        histories = _run_together(endless, args, build, params, together, TUNING_CHUNK, progress, stop)
        if stop.asked:
            return
        for member, history in zip(together, histories, strict=True):
            value = score(series(history, args.eval_every, ()))
            found[member.saved.path] = Tuned(member.setting, value, args.rounds)
    tried = [found[member.saved.path] for member in members]
    _write(tuning_file(cell, output), [each._asdict() | {"score": _short(each.score)} for each in tried])
    _forget(members)
