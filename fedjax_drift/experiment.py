"""A paper's table as a file, its cells as runs, their results as lines of JSON.

experiments/<paper>/<table>.toml says what a table is: settings (its rows: data, partition, model, rounds), methods (its
columns: algorithms with their hyper-parameters), scores, and the numbers as printed. Settings and methods are written
in the options of `fedjax-drift run` (underscores for dashes), so every cell is a command that anybody can type.

    title = "Best test accuracy"
    paper = "FedDC, CVPR 2022, table 3"
    [common]                        # options of every run; a setting's own come after, a method's last
    epochs = 5
    [bases.mnist]                   # options that several settings share
    dataset = "mnist"
    [methods]
    FedAvg = "fedavg"
    FedDC = {algorithm = "feddc:alpha=0.1", rounds = 300}
    [scores]
    "best accuracy (%)" = {of = "accuracy", take = "best", scale = 100}
    [settings."MNIST, D1"]
    base = "mnist"
    partition = "dirichlet:0.6"
    printed = {FedAvg = 98.13, FedDC = 98.49}

A setting with ``runs = "paper/table"`` is that table's setting of the same name (or of the name ``as``): run once,
shown in both. All methods of a setting have the same data, cohorts and, for each seed, the same initial model. The
results of a cell are one file, a line for each seed.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
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
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks, options
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.checkpoint import Checkpoints, lock_folder
from fedjax_drift.progress import Bar, Record, Stop, stop_on_interrupt

CHUNK = 30.0  # seconds of rounds between two saves: the most that a kill loses
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
TAKES = ("best", "last", "at", "rounds_to", "median")
TABLE_KEYS = {
    "title", "paper", "note", "common", "bases", "methods", "scores", "settings", "tune", "claims", "needs", "picture",
}  # fmt: skip
REFERENCE_KEYS = {"runs", "as", "printed"}  # of a setting that is another table's
TUNE_KEYS = {"rounds", "grid", "score"}


class Score(NamedTuple):
    """A number of a run, made from one entry of its records."""

    name: str
    of: str = "accuracy"  # the entry; of a list, the last number
    take: str = "best"
    """best: the largest (smallest of a loss); last: of the last `window` rounds that have one, the mean; at: in round
    `round`; rounds_to: the first round that has `target` or better; median: over rounds, the first tenth left out."""
    target: float = math.nan
    round: int = 0  # at: this; best, rounds_to: none later counts (0: all do)
    window: int = 1
    scale: float = 1.0  # 100 for percent

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is, 0 where neither."""
        if self.take == "median":
            return 0
        return -1 if self.take == "rounds_to" or self.of.endswith("loss") else 1

    @property
    def digits(self) -> int:
        """Decimals that are shown."""
        return 0 if self.take == "rounds_to" else 2 if self.scale > 1 else 4 if self.of == "accuracy" else 3

    def __call__(self, series: Mapping[str, Series]) -> float:
        """NaN for a run that lacks it; infinity for a target that was not reached.

        A value that is not finite makes what it is part of NaN; best, rounds_to and median pass it over.
        """
        if self.of not in series or not series[self.of].rounds:
            return math.nan
        rounds = np.asarray(series[self.of].rounds)
        values = np.array([last_number(value) for value in series[self.of].values])
        if self.take == "at":
            return self.scale * float(values[rounds == self.round][-1]) if self.round in rounds else math.nan
        if self.take == "last":
            return self.scale * float(values[-self.window :].mean())
        if self.take == "median":
            known = values[(rounds > rounds[-1] / 10) & np.isfinite(values)]
            return self.scale * float(np.median(known)) if known.size else math.nan
        counts = np.isfinite(values) & ((rounds <= self.round) if self.round else True)
        better = -1 if self.of.endswith("loss") else 1
        if self.take == "best":
            return self.scale * better * float(np.max(better * values[counts])) if counts.any() else math.nan
        reached = counts & (better * values >= better * self.target)
        return float(rounds[reached][0]) if reached.any() else math.inf


def last_number(value: Any) -> float:
    """Of a record's entry: itself, or the last of a list (a number for each local epoch); NaN for None."""
    value = value[-1] if isinstance(value, list) else value
    return math.nan if value is None else float(value)


class Series(NamedTuple):
    """One entry of a run's records."""

    rounds: Sequence[int]
    values: Sequence[Any]


class Cell(NamedTuple):
    """One method in one setting."""

    table: str  # whose run it is
    setting: str
    method: str
    options: dict[str, Any]  # of `fedjax-drift run`
    seeds: int = 1  # that the table was run with
    until: Score | None = None  # the target after which all is known
    keep: tuple[str, ...] = ()  # entries of the records that are kept of every round, not just of those evaluated

    @property
    def file(self) -> Path:
        """Of its results, in the folder of all results."""
        return Path(self.table) / slug(self.setting) / f"{slug(self.method)}.jsonl"


class Setting(NamedTuple):
    """One row of a table."""

    name: str
    cells: dict[str, Cell]  # of each method
    printed: dict[str, dict[str, Printed]]  # score -> method -> the paper's number
    needs: str  # what it takes that not everybody has


class Printed(NamedTuple):
    """A number in a paper."""

    value: float  # infinity: not within the rounds
    std: float | None
    text: str


class Table(NamedTuple):
    """A table of a paper."""

    name: str  # "feddc/table3"
    title: str
    paper: str
    note: str
    settings: dict[str, Setting]
    methods: list[str]
    scores: dict[str, Score]
    claims: list[list[str]]  # chains of methods, the best first, as the paper orders them
    tune: dict[str, Any]
    picture: str  # the entry that is drawn


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


def slug(name: str) -> str:
    """A file name."""
    return re.sub(r"[^A-Za-z0-9.()=-]+", "-", name).strip("-")


# --- reading ----------------------------------------------------------------------------------------------------------


def folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Where the tables are: as given, or ./experiments, or the one beside the package."""
    places = [Path(given)] if given else [Path("experiments"), Path(fd.__file__).parents[1] / "experiments"]
    for place in places:
        if any(place.glob("*/*.toml")):
            return place
    raise ValueError(
        f"tables are in experiments/ of the project's sources, got {' or '.join(map(str, places))} without any: clone "
        "the project and go to its folder, or pass --experiments DIR"
    )


def names(place: Path) -> list[str]:
    """Of all tables."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in place.glob("*/*.toml"))


def read(place: Path, name: str) -> Table:
    """A table by its name. ValueError for what a table can't be."""
    known = names(place)
    if name not in known:
        raise ValueError(f"a table must be one of {', '.join(known)}, got {name!r}{checks.nearest(name, known)}")
    path = place / f"{name}.toml"
    try:
        return _table(place, name, tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {what}") from error


def _table(place: Path, name: str, of: dict[str, Any]) -> Table:
    _known("a table", of, TABLE_KEYS)
    scores = {}
    for title, score in of["scores"].items():
        _known(f"score {title!r}", score, set(Score._fields) - {"name"})
        scores[title] = Score(title, **score)
        checks.choice("take", scores[title].take, TAKES)
    methods = {method: _options(spec) for method, spec in of["methods"].items()}
    settings = {
        title: _setting(place, name, title, setting, of, methods, scores) for title, setting in of["settings"].items()
    }
    claims = of.get("claims", [])
    for chain in claims:
        for method in chain:
            checks.choice("a method that is claimed to be better", method, methods)
    tune = of.get("tune", {})
    if tune:
        _known("tune", tune, TUNE_KEYS)
        _known("tune.grid", tune["grid"], set().union(*map(_tunable, methods.values())))
        checks.choice("the score to tune for", tune.get("score", next(iter(scores))), scores)
    return Table(
        name, of["title"], of["paper"], of.get("note", ""), settings, list(methods), scores, claims, tune,
        of.get("picture", next(iter(scores.values())).of),
    )  # fmt: skip


def _setting(
    place: Path,
    table: str,
    name: str,
    of: dict[str, Any],
    whole: dict[str, Any],
    methods: dict[str, dict[str, Any]],
    scores: dict[str, Score],
) -> Setting:
    own = {key: of[key] for key in of if key not in ("base", "printed", "needs", "runs", "as", "methods")}
    needs = of.get("needs", whole.get("needs", ""))
    if "runs" in of:
        _known(f"{name}, which is {of['runs']}'s,", of, REFERENCE_KEYS)
        other = read(place, of["runs"]).settings[of.get("as", name)]
        cells, needs = {method: other.cells[method] for method in methods if method in other.cells}, other.needs
    else:
        base = whole.get("bases", {})[of["base"]] if "base" in of else {}
        cells = {}
        _known(f"{name}, methods", of.get("methods", {}), methods)
        for method, spec in methods.items():
            special = _options(of.get("methods", {}).get(method, {}))
            merged = {**whole.get("common", {}), **base, **own, **spec, **special}
            seeds, until, keep = (
                merged.pop(key, usual) for key, usual in (("seeds", 1), ("until", None), ("keep", ()))
            )
            _known(f"{name}, {method}", merged, OPTIONS)
            for key in ("dataset", "rounds"):
                if key not in merged:
                    raise ValueError(f"{name}, {method} needs {key}, got none: write it there, or under [common]")
            cells[method] = Cell(
                table, name, method, merged, seeds, None if until is None else scores[until], tuple(keep)
            )
    printed = of.get("printed", {})
    if printed and not isinstance(next(iter(printed.values())), Mapping):
        printed = {next(iter(scores)): printed}
    for score, numbers in printed.items():
        checks.choice("a score that is printed", score, scores)
        _known(f"{name}, printed", numbers, set(methods))
    found = {score: {m: _printed(number) for m, number in numbers.items()} for score, numbers in printed.items()}
    return Setting(name, cells, found, needs)


def _options(spec: str | dict[str, Any]) -> dict[str, Any]:
    return {"algorithm": spec} if isinstance(spec, str) else spec


def _tunable(of: Mapping[str, Any]) -> set[str]:
    """The numbers that a method has: local training's and its algorithm's."""
    return {*options.LOCAL, *inspect.signature(ALGORITHMS[of["algorithm"].partition(":")[0]]).parameters}


def _known(what: str, keys: Iterable[str], known: Iterable[str]) -> None:
    for key in keys:
        if key not in known:
            raise ValueError(f"{what} has an unknown entry {key!r}{checks.nearest(key, list(known))}")


def _printed(number: float | str) -> Printed:
    """98.5, "69.1±0.6", ">600" (not within 600 rounds)."""
    text = str(number)
    if text.startswith(">"):
        return Printed(math.inf, None, text)
    value, spread, std = text.partition("±")
    return Printed(float(value), float(std) if spread else None, text)


def _flags() -> dict[str, argparse.Action]:
    parser = options.Parser(prog="run")
    options.add_run(parser)
    return {action.dest: action for action in parser._actions if action.dest != "help"}


OPTIONS = frozenset(_flags())


def arguments(cell: Cell, seed: int) -> list[str]:
    """What one types after `fedjax-drift run` for one seed of a cell; data and partition are the same for all."""
    given = {"data_seed": 0, **cell.options, "seed": seed}
    words = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is not False:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [flag] if value is True else [f"{flag}={text}"]
    return words


def parsed(cell: Cell, seed: int) -> argparse.Namespace:
    parser = options.Parser(prog=f"{cell.setting}, {cell.method}")
    options.add_run(parser)
    return parser.parse_args(arguments(cell, seed))


# --- results ----------------------------------------------------------------------------------------------------------


def results(file: Path) -> dict[int, Result]:
    """The runs of a cell by their seeds; none where there is no file."""
    if not file.exists():
        return {}
    found = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            entry["series"] = {name: Series(*series) for name, series in entry["series"].items()}
            found[entry["seed"]] = Result(**entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}, line {number} is no result ({error}): delete the file to run it again"
            ) from error
    return found


def _write(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """A line each; a kill leaves the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    new.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    os.replace(new, file)


def series(history: Sequence[Record], eval_every: int, every_round: Iterable[str]) -> dict[str, Series]:
    """What is kept of a run: the evaluated rounds, of some entries every round; six digits."""
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
    return float(f"{value:.6g}") if math.isfinite(value) else None


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


def chosen(table: Table, rows: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """The cells of the settings that start with one of ``rows`` (or, if none does, have it in them) and of the methods
    named, whatever their case; all without a choice."""
    settings = _matching("--rows", rows, list(table.settings))
    columns = _matching("--methods", methods, table.methods, whole=True)
    return [cell for name in settings for method, cell in table.settings[name].cells.items() if method in columns]


def _matching(flag: str, wanted: Sequence[str], known: Sequence[str], whole: bool = False) -> list[str]:
    found = set()
    for text in wanted:
        low = text.lower()
        alike = [name for name in known if (name.lower() == low if whole else name.lower().startswith(low))]
        alike = alike or [name for name in known if low in name.lower() and not whole]
        if not alike:
            raise ValueError(f"{flag} must match one of {'; '.join(known)}, got {text!r}{checks.nearest(text, known)}")
        found |= set(alike)
    return [name for name in known if not wanted or name in found]


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
    made: dict[str, fd.FederatedData] = {}
    lacking: list[FileNotFoundError] = []
    if tune and not table.tune:
        raise ValueError(f"{table.name} must have a grid to be tuned, got a table without [tune]: leave --tune out")
    for number, cell in enumerate(cells, 1):
        title = f"{number}/{len(cells)}  {cell.setting}  {cell.method}"
        with _claimed(cell, output) as ours, stop_on_interrupt() as stop:
            if not ours:
                say(f"{title}: another process is at it")
                continue
            try:
                if tune and not tuned(cell, output):
                    say(f"{title}: tuning {len(_grid(table, cell))} combinations")
                    if not _tune(table, cell, output, _data(cell, made), progress, stop):
                        say("interrupted: the same command starts this tuning again, and nothing else")
                        return False
                cell = with_tuned(cell, table, output)
                if rounds is not None:
                    cell = cell._replace(options=_at_most(cell.options, rounds))
                wanted = list(seeds if seeds is not None else range(cell.seeds))
                if not (missing := _missing(cell, output, wanted)):
                    say(f"{title}: done before")
                    continue
                say(f"{title}: {cell.options['rounds']} rounds, seeds {', '.join(map(str, missing))}")
                if not _run_cell(cell, missing, output, _data(cell, made), progress, stop):
                    say("interrupted: the same command goes on from here")
                    return False
                found = results(output / cell.file)
                for score in _scores_of(table, cell):
                    text = summary([score(found[seed].series) for seed in wanted], score.digits)
                    say(f"      {score.name}: {text}   ({found[missing[0]].seconds:.0f} s)")
            except FileNotFoundError as error:
                say(f"{title}: not run: {error}")
                lacking.append(error)
    if cells and len(lacking) == len(cells):
        raise lacking[0]
    return True


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
        with contextlib.suppress(RuntimeError):
            fd.use_cpu_devices(args.devices)
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


def _run_cell(cell: Cell, seeds: list[int], output: Path, data: fd.FederatedData, progress: bool, stop: Stop) -> bool:
    """Runs the seeds side by side, saved every half a minute; False when Ctrl-C ended it."""
    args = parsed(cell, seeds[0])
    simulations, params, _ = options.asked(args, data)
    (sim,) = simulations.values()
    kept = {seed: Checkpoints(_partial(cell, output) / f"seed-{seed}", keep=1, best=None) for seed in seeds}
    for t, together in _side_by_side(kept).items():
        if t > args.rounds:
            raise ValueError(
                f"{cell.setting}, {cell.method} has been run for {t} rounds, and is not done, got --rounds "
                f"{args.rounds}: ask for as many, or choose another --output"
            )
        if t:
            runs = [fd.Run(seed, {}, *kept[seed].restore(sim)) for seed in together]
        else:
            runs = [fd.Run(seed, {}, sim.init(jax.random.key(seed), params), []) for seed in together]
        histories = _run_together(cell, args, sim, runs, kept, progress, stop)
        if stop.asked:
            return False
        found = results(output / cell.file)
        found |= {seed: _result(cell, seed, history, len(together), args) for seed, history in histories.items()}
        _write(output / cell.file, [found[seed]._asdict() for seed in sorted(found)])
    for seed in seeds:
        shutil.rmtree(kept[seed].path, ignore_errors=True)
    return True


def _run_together(
    cell: Cell,
    args: argparse.Namespace,
    sim: fd.Simulation,
    runs: list[fd.Run],
    kept: Mapping[int, Checkpoints],
    progress: bool,
    stop: Stop,
) -> dict[int, list[Record]]:
    """Runs that are at one round, to the cell's end, its target or Ctrl-C, and saves them; seed -> whole history."""
    t, every, seeds = int(runs[0].state.round), args.eval_every or 10, [run.seed for run in runs]
    histories = {run.seed: list(run.history) for run in runs}
    new = {seed: list[Record]() for seed in seeds}  # those that the checkpoints don't have
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Bar(args.rounds * len(runs), f"{cell.setting}, {cell.method}", progress))
        for record in itertools.chain(*histories.values()):
            bar.update(record)
        savers = {run.seed: stack.enter_context(kept[run.seed].saving(sim, run.state, stop.held)) for run in runs}
        n = every - t % every  # to a round that is evaluated, wherever the runs were interrupted
        while t < args.rounds and not stop.asked and not (t % every == 0 and _reached(cell, args, histories)):
            n, started = min(n, args.rounds - t), time.perf_counter()
            runs = sim.sweep(
                n, seeds, args.eval_every, start=runs, progress=False, measure_every=args.measure_every or 1,
                on_round=lambda seed, setting, record: bar.update(record),
            )  # fmt: skip
            seconds = (time.perf_counter() - started) / max(len(runs[0].history), 1)  # a round
            for run in runs:
                made = [record | {"seconds": seconds} for record in run.history]
                new[run.seed] += made
                histories[run.seed] += made
                (savers[run.seed].finish if stop.asked else savers[run.seed].save)(run.state, new[run.seed])
            t += len(runs[0].history)
            n = _chunk(seconds, every)
    return histories


def _partial(cell: Cell, output: Path) -> Path:
    """Where a cell that is under way is saved."""
    return (output / cell.file).with_suffix(".partial")


def _side_by_side(kept: Mapping[int, Checkpoints]) -> dict[int, list[int]]:
    """The round to go on from -> seeds. A kill between two saves may have left some seeds behind the others."""
    found: dict[int, list[int]] = {}
    for seed, checkpoints in kept.items():
        found.setdefault(max(checkpoints.rounds, default=0), []).append(seed)
    return found


def _chunk(seconds: float, every: int) -> int:
    """Rounds to the next save, a multiple of ``every``, for rounds that take so long."""
    return every * max(1, int(CHUNK / (every * seconds)))


def _reached(cell: Cell, args: argparse.Namespace, histories: Mapping[int, Sequence[Record]]) -> bool:
    """Whether every seed has reached the target after which the cell need not go on."""
    if cell.until is None:
        return False
    return all(math.isfinite(cell.until(series(history, args.eval_every, cell.keep))) for history in histories.values())


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
    own = {key: value for key, value in values.items() if key not in OPTIONS}
    text = ",".join(f"{key}={_text(value)}" for key, value in (found.options | own).items())
    algorithm = f"{found.name}:{text}" if text else found.name
    return cell._replace(
        options=cell.options
        | {key: value for key, value in values.items() if key in OPTIONS}
        | {"algorithm": algorithm}
    )


def _text(value: Any) -> str:
    return (
        "+".join(map(str, value))
        if isinstance(value, tuple)
        else str(value).lower()
        if value in (True, False, None)
        else str(value)
    )


def tuning_score(table: Table) -> Score:
    return table.scores[table.tune.get("score", next(iter(table.scores)))]


def _grid(table: Table, cell: Cell) -> list[dict[str, float]]:
    """All combinations of the values that the method has."""
    known = _tunable(cell.options)
    return fd.grid(**{key: values for key, values in table.tune["grid"].items() if key in known})


def _tune(table: Table, cell: Cell, output: Path, data: fd.FederatedData, progress: bool, stop: Stop) -> bool:
    """Tries the grid, all of it side by side in one program; False when Ctrl-C ended it."""
    rounds = min(table.tune.get("rounds", cell.options["rounds"]), cell.options["rounds"])
    args, settings = parsed(cell, TUNING_SEED), _grid(table, cell)

    def build(**values: float) -> fd.Simulation:
        return next(iter(options.asked(args, data, values).simulations.values()))

    every = args.measure_every or 1
    runs = fd.sweep(build, rounds, (TUNING_SEED,), settings, args.eval_every, progress=progress, measure_every=every)
    if stop.asked:
        return False
    score = tuning_score(table)
    found = [Tuned(run.setting, score(series(run.history, args.eval_every, ())), rounds) for run in runs]
    _write(tuning_file(cell, output), [each._asdict() | {"score": _short(each.score)} for each in found])
    return True
