"""A paper's table as a file: settings, methods, scores, and the numbers as printed.

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
shown in both. All methods of a setting have the same data, cohorts and, for each seed, the same initial model.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks, options
from fedjax_drift.algorithms import ALGORITHMS

TAKES = ("best", "last", "at", "rounds_to", "median")
TABLE_KEYS = {
    "title", "paper", "note", "common", "bases", "methods", "scores", "settings", "tune", "claims", "needs", "picture",
    "label_mix",
}  # fmt: skip
REFERENCE_KEYS = {"runs", "as", "printed", "marks"}  # of a setting that is another table's
NOT_OPTIONS = {*REFERENCE_KEYS, "base", "methods", "needs"}  # of a setting
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

    def within(self, rounds: int) -> int:
        """How many rounds of a run of so many count."""
        return min(rounds, self.round or rounds)

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
    marks: bool = True  # whether differences from the paper's numbers are marked; not where its data are another draw


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
    label_mix: str = ""  # the method whose cohorts' labels are drawn, too


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


def read(place: Path, name: str, others: dict[str, Table] | None = None) -> Table:
    """A table by its name. ValueError for what a table can't be.

    others: tables read before; those that this one refers to are read once, and put there.
    """
    others = {} if others is None else others
    if name in others:
        return others[name]
    known = names(place)
    if name not in known:
        raise ValueError(f"a table must be one of {', '.join(known)}, got {name!r}{checks.nearest(name, known)}")
    path = place / f"{name}.toml"
    try:
        return others.setdefault(name, _table(place, name, tomllib.loads(path.read_text()), others))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {what}") from error


def read_all(place: Path, several: Iterable[str]) -> list[Table]:
    """Tables by their names, each file read once."""
    others: dict[str, Table] = {}
    return [read(place, name, others) for name in several]


def _table(place: Path, name: str, of: dict[str, Any], others: dict[str, Table]) -> Table:
    _known("a table", of, TABLE_KEYS)
    scores = {}
    for title, score in of["scores"].items():
        _known(f"score {title!r}", score, set(Score._fields) - {"name"})
        scores[title] = Score(title, **score)
        checks.choice("take", scores[title].take, TAKES)
    methods = {method: _options(spec) for method, spec in of["methods"].items()}
    settings = {
        title: _setting(place, name, title, setting, of, methods, scores, others)
        for title, setting in of["settings"].items()
    }
    claims = of.get("claims", [])
    for chain in claims:
        for method in chain:
            checks.choice("a method that is claimed to be better", method, methods)
    tune = of.get("tune", {})
    if tune:
        _known("tune", tune, TUNE_KEYS)
        _known("tune.grid", tune["grid"], set().union(*map(tunable, methods.values())))
        better = [score for score in scores if scores[score].sign]
        checks.choice(
            "the score to tune for, of which more or less is better,", tune.get("score", next(iter(scores))), better
        )
    return Table(
        name, of["title"], of["paper"], of.get("note", ""), settings, list(methods), scores, claims, tune,
        of.get("picture", next(iter(scores.values())).of), of.get("label_mix", ""),
    )  # fmt: skip


def _setting(
    place: Path,
    table: str,
    name: str,
    of: dict[str, Any],
    whole: dict[str, Any],
    methods: dict[str, dict[str, Any]],
    scores: dict[str, Score],
    others: dict[str, Table],
) -> Setting:
    own = {key: of[key] for key in of if key not in NOT_OPTIONS}
    needs = of.get("needs", whole.get("needs", ""))
    if "runs" in of:
        _known(f"{name}, which is {of['runs']}'s,", of, REFERENCE_KEYS)
        other = read(place, of["runs"], others).settings[of.get("as", name)]
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
    return Setting(name, cells, found, needs, of.get("marks", True))


def _options(spec: str | dict[str, Any]) -> dict[str, Any]:
    return {"algorithm": spec} if isinstance(spec, str) else spec


def tunable(of: Mapping[str, Any]) -> set[str]:
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


def _parser(prog: str) -> options.Parser:
    parser = options.Parser(prog=prog)
    options.add_run(parser)
    return parser


OPTIONS = frozenset(action.dest for action in _parser("run")._actions) - {"help"}


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
    return _parser(f"{cell.setting}, {cell.method}").parse_args(arguments(cell, seed))


def chosen(table: Table, rows: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """The cells of the settings that start with one of ``rows`` (or, if none does, have it in them) and of the methods
    named, whatever their case; all without a choice. A text may be several, between commas or semicolons."""
    settings = _matching("--rows", rows, list(table.settings))
    columns = _matching("--methods", methods, table.methods, whole=True)
    return [cell for name in settings for method, cell in table.settings[name].cells.items() if method in columns]


def _matching(flag: str, wanted: Sequence[str], known: Sequence[str], whole: bool = False) -> list[str]:
    def alike(text: str) -> list[str]:
        low = text.strip().lower()
        found = [name for name in known if (name.lower() == low if whole else name.lower().startswith(low))]
        return found or [name for name in known if low in name.lower() and not whole]

    found = set[str]()
    for text in itertools.chain(*(several.split(";") for several in wanted)):
        for part in [text] if alike(text) else text.split(","):  # a name may have a comma
            if not (some := alike(part)):
                near = checks.nearest(part.strip(), known)
                raise ValueError(f"{flag} must match one of {'; '.join(known)}, got {part.strip()!r}{near}")
            found |= set(some)
    return [name for name in known if not wanted or name in found]
