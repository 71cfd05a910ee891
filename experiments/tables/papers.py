"""Reads the description of a paper's table from a TOML file.

experiments/<paper>/<table>.toml describes a table:

- settings, the rows of the table: data, partition, model, rounds
- methods, the columns of the table: algorithms with their hyper-parameters
- scores: the numbers that the table compares
- the numbers as printed in the paper

Settings and methods are written as options of `fedjax-drift run`, with underscores in place of dashes. So every cell
of the table corresponds to a command.

    title = "Best test accuracy"
    paper = "FedDC, CVPR 2022, table 3"
    [common]                        # options of every run
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

An option may be set in several places. Later places of this list override earlier ones: [common], the base of the
setting, the setting, the method, the method in the table ``methods`` of the setting.

All seeds of a cell have the same partition. With ``data_seed = "seed"``, every seed has its own partition.

``seeds`` is the number of seeds that was fixed before the first run. Methods are first compared with all of them (at
least 3), and then with more. With ``one_look = true`` there is only the first comparison (`comparison`).

A setting with ``like = "FEMNIST, alpha 1"`` or ``like = "paper/table: setting"`` has the same question as that setting,
with other data or another partition. The published differences there say which differences count as equal.

A setting with ``runs = "paper/table"`` refers to the setting of the same name in another table. If it has another name
there, the key ``as`` gives that name. The setting is run once and shown in both tables.

The table ``tune`` says which hyper-parameters are tuned before the runs:

    [tune]
    score = "accuracy (%)"          # the score to tune for (default: the first one)
    rounds = 10                     # of every combination
    validation = 0.1                # they are scored on this share of the training examples, not on the test set
    grid = {lr = [0.01, 0.1]}       # for all methods that have the option
    [tune.methods]
    FedProx = {mu = [0.01, 0.1]}    # for one method

Unless a method has its own partition, all methods of a setting have the same data and, for each seed, the same cohorts
and the same initial model.

Options of `fedjax-drift run` are checked by `fd.parse_run` when a cell is run. Everything else is checked when the file
is read.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedjax_drift as fd

EXPERIMENTS = Path(__file__).parents[1]  # the folder of all tables
TAKES = ("best", "last", "at", "rounds_to", "when", "median")
TABLE_KEYS = {
    "title", "paper", "note", "common", "bases", "methods", "scores", "settings", "tune", "claims", "needs", "picture",
    "label_mix", "headline", "priority",
}  # fmt: skip
SCALES = ("full", "reduced", "stand-in")  # the paper's setting; with fewer rounds; with other data, or our own setting
# The keys of a setting that refers to another table.
REFERENCE_KEYS = {"runs", "as", "printed", "like", "marks", "scale", "why"}
NOT_OPTIONS = {*REFERENCE_KEYS, "base", "methods", "needs"}  # the keys of a setting that are not options of a run
TUNE_KEYS = {"rounds", "grid", "methods", "score", "validation"}
LOCAL_OPTIONS = {field.name for field in fields(fd.LocalTraining)} - {"optimizer"}


class Score(NamedTuple):
    """A number of a run, computed from one entry of its records."""

    name: str
    of: str = "accuracy"  # the entry of the records; if it is a list, its last number is used
    take: str = "best"
    """How the number is computed.

    - best: the largest value, or the smallest for a loss.
    - last: the mean over the last `window` rounds that have the entry.
    - at: the value in round `round`.
    - rounds_to: the first round in which the value is `target` or better.
    - when: the value of a drift measure in the first measured round that starts with a model whose test accuracy is
      `target` or better. If `relative`, the value is divided by this test accuracy.
    - median: the median over all rounds except the first tenth."""
    target: float = math.nan
    round: int = 0  # "at": the round of the value; "best", "rounds_to": the last round that counts (0: all)
    window: int = 1
    smooth: int = 1  # with "rounds_to": the number of last evaluations whose mean must reach the target
    # With "rounds_to": where the line between two evaluations reaches the target, as in McMahan et al.
    interpolate: bool = False
    scale: float = 1.0  # 100 for percent
    relative: bool = False  # with "when": divide the value by the accuracy of the model that the round starts with

    @property
    def sign(self) -> int:
        """1 if a larger number is better, -1 if a smaller number is better, otherwise 0."""
        if self.take == "median":
            return 0
        return -1 if self.take == "rounds_to" or self.of.endswith("loss") else 1

    def within(self, rounds: int) -> int:
        """Returns the number of rounds that count, for a run with this number of rounds."""
        return min(rounds, self.round or rounds)

    @property
    def digits(self) -> int:
        """The number of decimals in the tables."""
        return 0 if self.take == "rounds_to" else 2 if self.scale > 1 else 4 if self.of == "accuracy" else 3

    def __call__(self, series: Mapping[str, Series]) -> float:
        """Returns the score of a run: NaN if the run does not have the entry, infinity if the target was not reached
        (with "when", also NaN).

        "best", "rounds_to" and "median" ignore values that are not finite. With "last" and "at", such a value makes the
        score NaN.
        """
        if self.of not in series or not series[self.of].rounds:
            return math.nan
        rounds = np.asarray(series[self.of].rounds)
        values = np.array([last_number(value) for value in series[self.of].values])
        if self.take == "at":
            return self.scale * float(values[rounds == self.round][-1]) if self.round in rounds else math.nan
        if self.take == "last":
            return self.scale * float(values[-self.window :].mean())
        if self.take == "when":
            return self.scale * _when(self, series)
        if self.take == "median":
            known = values[(rounds > rounds[-1] / 10) & np.isfinite(values)]
            return self.scale * float(np.median(known)) if known.size else math.nan
        counts = np.isfinite(values) & ((rounds <= self.round) if self.round else True)
        better = -1 if self.of.endswith("loss") else 1
        if self.take == "best":
            return self.scale * better * float(np.max(better * values[counts])) if counts.any() else math.nan
        if self.smooth > 1:
            values = np.array([values[max(0, end - self.smooth) : end].mean() for end in range(1, len(values) + 1)])
            counts = counts & np.isfinite(values) & (np.arange(len(values)) >= self.smooth - 1)
        reached = counts & (better * values >= better * self.target)
        if not reached.any():
            return math.inf
        first = int(reached.argmax())
        if self.interpolate and counts[:first].any():  # from the best value before
            before = int(np.flatnonzero(counts[:first])[-1])
            low = float(np.max(better * values[:first][counts[:first]]))
            share = (better * self.target - low) / (better * float(values[first]) - low)
            return float(rounds[before] + share * (rounds[first] - rounds[before]))
        return float(rounds[first])


def _when(score: Score, series: Mapping[str, Series]) -> float:
    """The value in the first round that starts with a model that has the target, NaN if there is none."""
    starts = {
        t + 1: last_number(value)  # round t + 1 starts with the model of round t
        for t, value in zip(*series.get("accuracy", Series([], [])), strict=True)
    }
    for t, value in zip(*series[score.of], strict=True):
        if starts.get(t, -math.inf) >= score.target:
            return last_number(value) / (starts[t] if score.relative else 1)
    return math.nan


def last_number(value: Any) -> float:
    """Returns the entry of a record, or its last number if it is a list (one per local epoch). Returns NaN for None."""
    value = value[-1] if isinstance(value, list) else value
    return math.nan if value is None else float(value)


class Series(NamedTuple):
    """One entry of a run's records."""

    rounds: Sequence[int]
    values: Sequence[Any]


class Cell(NamedTuple):
    """One method in one setting, for all seeds."""

    table: str  # the table that runs it
    setting: str
    method: str
    options: dict[str, Any]  # options of `fedjax-drift run`
    seeds: int = 1  # the number of seeds of the table, which were fixed before the first look
    one_look: bool = False  # whether all these seeds are looked at once, and no others
    until: Score | None = None  # the target at which a run may end
    keep: tuple[str, ...] = ()  # entries of the records that are stored for every round, not only for evaluated rounds

    @property
    def file(self) -> Path:
        """The path of the results, relative to the folder of all results."""
        return Path(self.table) / slug(self.setting) / f"{slug(self.method)}.jsonl"

    @property
    def own_partitions(self) -> bool:
        """Whether every seed has its own partition. Otherwise all seeds have the same data and partition."""
        return self.options.get("data_seed") == "seed"

    def words(self, seed: int) -> list[str]:
        """Returns the options of `fedjax-drift run` for one seed."""
        words = []
        for name, value in {"data_seed": 0, **self.options, "seed": seed}.items():
            value = seed if (name, value) == ("data_seed", "seed") else value
            flag = "--" + name.replace("_", "-")
            if value is not False:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                words += [flag] if value is True else [f"{flag}={text}"]
        return words


class Setting(NamedTuple):
    """One row of a table."""

    name: str
    cells: dict[str, Cell]  # method -> cell
    printed: dict[str, dict[str, Printed]]  # score -> method -> the number in the paper
    published: dict[str, dict[str, Printed]]  # the same, or those of the setting in `like`
    needs: str  # the data or hardware that is needed to run it
    scale: str = "full"  # one of SCALES
    marks: bool = True  # whether differences from the paper are marked; False if our data are another sample
    why: str = ""  # why our numbers differ from the printed ones

    def published_gap(self, score: str, a: str, b: str) -> float:
        """The difference of two methods in the paper, NaN if it does not print both numbers."""
        numbers = self.published.get(score, {})
        return numbers[a].value - numbers[b].value if a in numbers and b in numbers else math.nan


class Printed(NamedTuple):
    """A number in a paper."""

    value: float  # infinity if the target was not reached in the rounds of the paper
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
    claims: list[list[str]]  # lists of methods in the order of the paper, the best first
    tune: dict[str, Any]
    picture: str  # the entry of the records that is plotted
    label_mix: str = ""  # the method for which the labels of the cohorts are plotted, too
    headline: tuple[str, ...] = ()  # the settings that the queue runs first
    priority: int = 9  # the queue runs tables with lower numbers first

    @property
    def known(self) -> bool:
        """Whether it is a known result of another paper than the five, for the page docs/known_results.md."""
        return self.name.startswith("known/")


def slug(name: str) -> str:
    """Converts a name to a file name."""
    return re.sub(r"[^A-Za-z0-9.()=-]+", "-", name).strip("-")


# --- reading ----------------------------------------------------------------------------------------------------------


def table_names(folder: Path) -> list[str]:
    """Returns the names of all tables in the folder. Raises ValueError if there are none."""
    names = sorted(f"{path.parent.name}/{path.stem}" for path in folder.glob("*/*.toml"))
    if not names:
        raise ValueError(
            f"tables must be files {folder}/<paper>/<table>.toml, got none: pass another folder as --tables"
        )
    return names


def read_table(folder: Path, name: str, tables: dict[str, Table] | None = None) -> Table:
    """Returns a table by its name. Raises ValueError if there is no such file or if the file is wrong.

    tables: the tables that have been read. This table and the tables that it refers to are added.
    """
    tables = {} if tables is None else tables
    if name in tables:
        return tables[name]
    check_name("a table", name, table_names(folder))
    path = folder / f"{name}.toml"
    try:
        return tables.setdefault(name, _table(folder, name, tomllib.loads(path.read_text()), tables))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        message = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {message}") from error


def read_tables(folder: Path, names: Iterable[str]) -> list[Table]:
    """Returns tables by their names. Each file is read once."""
    tables: dict[str, Table] = {}
    return [read_table(folder, name, tables) for name in names]


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raises ValueError unless the name is one of ``known``."""
    known = list(known)
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}, got {name!r}{hint}")


def _check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        check_name(what, name, sorted(known))


def _table(folder: Path, name: str, entries: dict[str, Any], tables: dict[str, Table]) -> Table:
    _check_names("an entry of a table", entries, TABLE_KEYS)
    scores = {}
    for title, score in entries["scores"].items():
        _check_names(f"an entry of score {title!r}", score, set(Score._fields) - {"name"})
        scores[title] = Score(title, **score)
        check_name("take", scores[title].take, TAKES)
    methods = {method: _method_options(spec) for method, spec in entries["methods"].items()}
    settings = {
        title: _setting(folder, name, title, setting, entries, methods, scores, tables)
        for title, setting in entries["settings"].items()
    }
    _check_names("a setting in headline", entries.get("headline", ()), settings)
    claims = entries.get("claims", [])
    _check_names("a method that is claimed to be better", itertools.chain(*claims), methods)
    tune = entries.get("tune", {})
    if tune:
        _check_names("an entry of tune", tune, TUNE_KEYS)
        _check_names("a name in tune.grid", tune.get("grid", ()), set().union(*map(tunable, methods.values())))
        _check_names("a method in tune.methods", tune.get("methods", ()), methods)
        share = tune.get("validation", 0.5)
        if isinstance(share, bool) or not isinstance(share, float) or not 0 < share < 1:
            raise ValueError(f"tune.validation must be a share in (0, 1), got {share!r}")
        for method, of_method in tune.get("methods", {}).items():
            _check_names(f"a name in tune.methods.{method}", of_method, tunable(methods[method]))
        signed = [title for title, score in scores.items() if score.sign]
        check_name(
            "the score to tune for, of which more or less is better,", tune.get("score", next(iter(scores))), signed
        )
    return Table(
        name, entries["title"], entries["paper"], entries.get("note", ""), settings, list(methods), scores, claims,
        tune, entries.get("picture", next(iter(scores.values())).of), entries.get("label_mix", ""),
        tuple(entries.get("headline", ())), entries.get("priority", 9),
    )  # fmt: skip


def _setting(
    folder: Path,
    table: str,
    name: str,
    entries: dict[str, Any],
    table_entries: dict[str, Any],
    methods: dict[str, dict[str, Any]],
    scores: dict[str, Score],
    tables: dict[str, Table],
) -> Setting:
    needs = entries.get("needs", table_entries.get("needs", ""))
    if "runs" in entries:
        _check_names(f"an entry of {name}, which is {entries['runs']}'s,", entries, REFERENCE_KEYS)
        other = read_table(folder, entries["runs"], tables).settings[entries.get("as", name)]
        cells, needs = {method: other.cells[method] for method in methods if method in other.cells}, other.needs
    else:
        _check_names(f"a method of {name}", entries.get("methods", {}), methods)
        base = table_entries.get("bases", {})[entries["base"]] if "base" in entries else {}
        of_setting = {key: value for key, value in entries.items() if key not in NOT_OPTIONS}
        cells = {}
        for method, of_method in methods.items():
            of_cell = _method_options(entries.get("methods", {}).get(method, {}))
            options = {**table_entries.get("common", {}), **base, **of_setting, **of_method, **of_cell}
            seeds, one_look = options.pop("seeds", 1), options.pop("one_look", False)
            until, keep = options.pop("until", None), options.pop("keep", ())
            for key in ("dataset", "rounds"):
                if key not in options:
                    raise ValueError(f"{name}, {method} needs {key}, got none: add it there or under [common]")
            target = None if until is None else scores[until]
            cells[method] = Cell(table, name, method, options, seeds, one_look, target, tuple(keep))
    printed = _printed(name, entries, methods, scores)
    published = printed
    if "like" in entries:
        other, _, title = entries["like"].rpartition(": ")
        if other:
            published = read_table(folder, other, tables).settings[title].printed
        else:
            published = _printed(title, table_entries["settings"][title], methods, scores)
    scale = entries.get("scale", "full" if printed else "stand-in")
    check_name(f"the scale of {name}", scale, SCALES)
    return Setting(name, cells, printed, published, needs, scale, entries.get("marks", True), entries.get("why", ""))


def _printed(
    name: str, entries: Mapping[str, Any], methods: Iterable[str], scores: Mapping[str, Score]
) -> dict[str, dict[str, Printed]]:
    """The numbers of the paper for a setting: score -> method -> number."""
    numbers = entries.get("printed", {})
    if numbers and not isinstance(next(iter(numbers.values())), Mapping):
        numbers = {next(iter(scores)): numbers}
    _check_names("a score that is printed", numbers, scores)
    for of_methods in numbers.values():
        _check_names(f"a method printed in {name}", of_methods, methods)
    return {
        score: {method: printed_number(number) for method, number in of_methods.items()}
        for score, of_methods in numbers.items()
    }


def _method_options(spec: str | dict[str, Any]) -> dict[str, Any]:
    return {"algorithm": spec} if isinstance(spec, str) else spec


def tunable(options: Mapping[str, Any]) -> set[str]:
    """Returns the names of the numbers that can be tuned, in the local training and in the algorithm."""
    factory = fd.algorithms.ALGORITHMS[options["algorithm"].partition(":")[0]]
    return {*LOCAL_OPTIONS, *inspect.signature(factory).parameters}


def printed_number(number: float | str) -> Printed:
    """Parses a number of a paper: 98.5, "69.1±0.6", or ">600" (the target was not reached within 600 rounds)."""
    text = str(number)
    if text.startswith(">"):
        return Printed(math.inf, None, text)
    value, spread, std = text.partition("±")
    return Printed(float(value), float(std) if spread else None, text)


# --- a part of a table ------------------------------------------------------------------------------------------------


def select(table: Table, rows: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """Returns the cells of the selected settings and methods.

    rows: texts that select settings. A text selects the setting with this name. If there is none, it selects the
      settings whose names start with it or, if there are none, those whose names contain it. An empty sequence selects
      all settings.
    methods: names of methods. An empty sequence selects all methods.

    Upper and lower case are not distinguished. Several texts or names may be joined by commas or semicolons.
    """
    settings = _matching("--rows", rows, list(table.settings), _equal_or_similar)
    columns = _matching("--methods", methods, table.methods, _equal)
    return [cell for name in settings for method, cell in table.settings[name].cells.items() if method in columns]


def _equal(names: Sequence[str], text: str) -> list[str]:
    return [name for name in names if name.lower() == text]


def _equal_or_similar(names: Sequence[str], text: str) -> list[str]:
    beginning = [name for name in names if name.lower().startswith(text)]
    return _equal(names, text) or beginning or [name for name in names if text in name.lower()]


def _matching(
    flag: str, texts: Sequence[str], names: Sequence[str], match: Callable[[Sequence[str], str], list[str]]
) -> list[str]:
    selected = set[str]()
    for text in itertools.chain(*(several.split(";") for several in texts)):
        whole = match(names, text.strip().lower())  # a name may contain a comma
        for part in [text] if whole else text.split(","):
            matches = match(names, part.strip().lower())
            if not matches:
                check_name(flag, part.strip(), names)
            selected |= set(matches)
    return [name for name in names if not texts or name in selected]
