"""Reads the records of runs in all supported forms, and computes how many rounds a run needs to reach a target.

`Records`, the type of the argument ``records`` here and in `plots`, is one of these:

- the history of a run, as `Simulation.run` returns it, or a list of histories, one per seed
- the path of a log: the folder or file of a `logs.Log`, or the output folder of ``fedjax-drift run``. A log may have
  several algorithms and seeds.
- the path of a folder that has no log itself, but whose subfolders have logs. Each of these logs is one run. It must
  have only one algorithm.
- a list of paths of logs. Each log is one run. It must have only one algorithm.
- the result of `fd.sweep` or `fd.load_run`, or several such results in one list
- a dict from the name of a run to one of: its history; a list of histories, one per seed; the path of a log; a list of
  paths of logs, one per seed; the result of a sweep or of `fd.load_run`
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union

import numpy as np

from fedjax_drift import checks, logs
from fedjax_drift.spec import Fix, Text, checked

if TYPE_CHECKING:
    from fedjax_drift.run_folder import LoadedRun
    from fedjax_drift.simulation.runs import Run

History = Sequence[Mapping[str, Any]]
FilePath = str | os.PathLike[str]
AnyRun = Union["Run", "LoadedRun"]
OneRun = FilePath | History | AnyRun | Sequence[History] | Sequence[FilePath] | Sequence[AnyRun]
Records = OneRun | Mapping[str, OneRun] | Mapping[str, FilePath] | Mapping[str, AnyRun]
Runs = Mapping[str, Sequence[History]]  # name of a run -> one history per seed
Seeds = dict[int | None, History]  # seed -> history; None: the only history, whose seed is unknown
By = Literal["round", "time", "megabytes"]
UNITS = {"round": "Rounds", "time": "Seconds", "megabytes": "Megabytes"}  # what a run is counted in, and its name
EVALUATE = "evaluate during the run (eval_every=), or pass another key"  # the fix in error messages
HISTORY = "pass the history of state, history = sim.run(...)"


class Reached(NamedTuple):
    """When one run reached a target, in rounds, or in virtual seconds or megabytes with ``by=``.

    A run may be evaluated only every few rounds. So the run reached the target for the first time somewhere between
    ``after`` and ``round``.
    """

    round: float | None
    """The first evaluated round at the target. None if no evaluated round reaches the target."""
    after: float
    """The last evaluated round before ``round``, or 0 if there is none. If ``round`` is None, the last evaluated
    round."""


@checked
def rounds_to_target(
    records: Records,
    target: float,
    key: Annotated[Text, Fix("an entry of the records")] = "accuracy",
    by: By = "round",
) -> dict[str, list[Reached]]:
    """Computes when each run first reaches a target.

    Args:
      records: the runs, in one of the forms that `plots` accepts: a history, the path of a log, the result of
        `fd.sweep`, or a dict from the name of a run to one of these.
      target: a run reaches it when ``key`` is at least ``target``; for a key that ends in "loss", at most ``target``.
        An accuracy is in 0..1.
      key: the entry of the records to compare. Default: "accuracy".
      by: what is counted until then: "round" (default); "time", virtual seconds, for a simulation with ``clock=`` or
        ``devices=``; or "megabytes", the 10^6 bytes that the clients have sent and received.

    Returns:
      A dict from the name of a run to a list with one `Reached` per seed. The name of a single history is "".

    Raises:
      ValueError: the target is not a finite number, in 0..1 for an accuracy; or no record has the key, or the unit.

    >>> history = [{"round": 10, "accuracy": 0.5}, {"round": 20, "accuracy": 0.9}, {"round": 30, "accuracy": 0.8}]
    >>> rounds_to_target({"FedAvg": history}, 0.7)
    {'FedAvg': [Reached(round=20, after=10)]}
    """
    target = checks.target("target", target, key)
    histories = by_run(records)
    reached: dict[str, list[Reached]] = {}
    for name, seeds in measured(histories, key).items():
        pairs = zip(histories[name], seeds, strict=True)
        reached[name] = [_reached(spent(history, by, t), v, target, key) for history, (t, v) in pairs if t.size]
    if not any(reached.values()):
        checks.refuse(f"rounds_to_target needs at least 1 round with {key!r}", "none", EVALUATE)
    return {name: seeds for name, seeds in reached.items() if seeds}


def _reached(counts: np.ndarray, values: np.ndarray, target: float, key: str) -> Reached:
    """The `Reached` of one run. counts: [n], from `spent`. values: [n, E]; only the last column is compared."""
    at_target = values[:, -1] <= target if key.endswith("loss") else values[:, -1] >= target
    if not at_target.any():
        return Reached(None, counts[-1].item())
    first = int(at_target.argmax())
    return Reached(counts[first].item(), counts[first - 1].item() if first else 0)


def measured(runs: Runs, key: str) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """The values of ``key`` in the records.

    Returns a dict from the name of a run to a list with one pair per seed: the rounds [n] that have ``key``, and their
    values [n, E]. E is 1 for single numbers. None becomes NaN.
    """
    by_name: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, seeds in runs.items():
        by_name[name] = []
        for history in seeds:
            with_key = [record for record in history if key in record]
            values = numbers(f"records' {key}", [record[key] for record in with_key], lists=True)
            rounds = [checks.integer("records' round", record.get("round"), 0) for record in with_key]
            by_name[name].append((np.array(rounds, int), values if values.ndim == 2 else values[:, None]))
    return by_name


def spent(history: History, by: str, rounds: np.ndarray) -> np.ndarray:
    """What a run has used up after each of these rounds, [n], in one of the `UNITS`.

    Raises ConfigurationError for a history without virtual time, or without the bytes of every round.
    """
    if by == "round":
        return rounds
    runs, fix = {"": [history]}, 'or pass "round"'
    if by == "time":
        ((known, seconds),) = measured(runs, "time")[""]
        if not len(known):
            clock = "simulate with devices=fd.Devices(...) or clock=fd.clock.asynchronous(...)"
            checks.refuse("records must have a time", "none", f"{clock}, {fix}")
        return np.interp(rounds, known, seconds[:, 0])
    ((known, up),), ((also, down),) = (measured(runs, f"{way}link_bytes")[""] for way in ("up", "down"))
    if not len(known) or len(known) != len(history) or len(also) != len(history):
        needed = "uplink_bytes and downlink_bytes in every round"
        checks.refuse(f"records must have {needed}", "some without", f"run again with this version, {fix}")
    return np.interp(rounds, known, np.cumsum(up[:, 0] + down[:, 0]) / 1e6)


def numbers(name: str, values: Any, lists: bool = False) -> np.ndarray:
    """The values as an array of floats, [n]. None becomes NaN.

    With ``lists``, the values may be lists of E numbers, which give an array [n, E].

    Raises ConfigurationError for other values.
    """
    allowed = "numbers, or lists of numbers of the same length" if lists else "a flat list of numbers"
    try:
        array = np.asarray(values, float)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a donated array
        checks.refuse(f"{name} must be {allowed}", f"{checks.shown(values)} ({error})", cause=error)
    if array.ndim not in ((1, 2) if lists else (1,)) or 0 in array.shape[1:]:
        checks.refuse(f"{name} must be {allowed}", checks.shown(values))
    return array


def by_run(records: Any) -> dict[str, list[History]]:
    """The histories of all runs: a dict from the name of a run to a list with one history per seed.

    records: in any form of `Records`. Raises ConfigurationError for anything else.
    """
    return {name: list(seeds.values()) for name, seeds in by_run_and_seed(records).items()}


def by_run_and_seed(records: Any) -> dict[str, Seeds]:
    """Like `by_run`, with a dict from the seed to its history in place of each list.

    The histories of a list have the seeds in their records. If they have none, they have the seeds 0, 1, ...
    """
    if isinstance(records, (str, os.PathLike)):
        records = checks.path("records", records)
        logs_below = sorted(path.parent for path in records.glob("*/rounds.jsonl"))
        if logs_below and not (records / "rounds.jsonl").exists():
            return {path.name: _one_log(path.name, path) for path in logs_below}
        return _by_algorithm(logs.read(records))
    if isinstance(records, Mapping):
        named = [(str(name), _one_run(name, value)) for name, value in records.items()]
        return {
            ", ".join(filter(None, (name, setting))): seeds
            for name, settings in named
            for setting, seeds in settings.items()
        }
    if _is_run(records):
        return _by_setting([records])
    items = list(records) if isinstance(records, Sequence) else None
    kind = "" if items is None else _kind(items)
    if kind == "path":
        return {os.path.basename(os.path.normpath(path)): _one_log(path, path) for path in items or ()}
    if kind == "run":
        return _by_setting(items or [])
    if kind == "history":
        return {"": _numbered(items or [])}
    if kind == "record" or items == []:
        return _by_algorithm(items or []) or {"": {None: []}}
    items_type = f" of {type(items[0]).__name__}" if items else ""
    allowed = "a history, a dict of histories, the path of a log or the result of fd.sweep"
    checks.refuse(f"records must be {allowed}", f"{checks.type_of(records)}{items_type}", HISTORY)


def _is_run(item: Any) -> bool:
    """Whether it is a `Run` or the result of `fd.load_run`."""
    return all(hasattr(item, name) for name in ("algorithm", "seed", "history"))


def _kind(items: Sequence[Any]) -> str:
    """The common kind of all items: "record", "path", "run" or "history". "empty" without items, otherwise ""."""
    for kind, is_one in (
        ("record", lambda item: isinstance(item, Mapping)),
        ("path", lambda item: isinstance(item, (str, os.PathLike))),
        ("run", _is_run),
        ("history", lambda item: isinstance(item, Sequence) and _kind(item) in ("record", "empty")),
    ):
        if items and all(map(is_one, items)):
            return kind
    return "" if items else "empty"


def _one_run(name: Any, value: Any) -> dict[str, Seeds]:
    """Converts one value of a dict of runs to a dict from settings to the histories by seed.

    A setting is a combination of hyper-parameters. Only a sweep has several settings.
    """
    if isinstance(value, (str, os.PathLike)):
        return {"": _one_log(name, value)}
    if _is_run(value):
        return {"": {value.seed: value.history}}
    items = list(value) if isinstance(value, Sequence) else []
    kind = _kind(items) if isinstance(value, Sequence) else ""
    if kind == "run":
        return _by_setting(items)
    if kind == "path":
        return {"": _numbered([history for path in items for history in _one_log(name, path).values()])}
    if kind in ("record", "empty"):
        return {"": _seeds(items) or {None: []}}
    if kind == "history":
        return {"": _numbered(items)}
    allowed = "a history, a list of histories, the path of a log, a list of paths, or the result of fd.sweep"
    checks.refuse(f"records[{name!r}] must be {allowed}", checks.type_of(value), HISTORY)


def _by_setting(runs: Sequence[Any]) -> dict[str, Seeds]:
    """A dict from a setting to its histories by seed, for the results of sweeps and of `fd.load_run`.

    With several algorithms, the name of a setting begins with the algorithm.
    """
    several_algorithms = len({run.algorithm for run in runs}) > 1
    by_name: dict[str, Seeds] = {}
    for run in runs:
        setting = [f"{name} {value}" for name, value in getattr(run, "setting", {}).items()]
        name = ", ".join([run.algorithm, *setting] if several_algorithms else setting)
        seeds = by_name.setdefault(name, {})
        if run.seed in seeds:
            checks.refuse(
                "records must have one run for each setting and seed",
                f"two of {name or run.algorithm} with seed {run.seed}",
                "pass a dict from a name to the result of each sweep",
            )
        seeds[run.seed] = run.history
    return by_name


def _numbered(histories: Sequence[History]) -> Seeds:
    """The histories of a list by seed: the seed of their records, or 0, 1, ... unless all have different seeds."""
    seeds = [seed for history in histories for seed in _seeds(history)]
    if len(seeds) == len(set(seeds)) == len(histories) and None not in seeds:
        return dict(zip(seeds, histories, strict=True))
    return dict(enumerate(histories))


def _one_log(name: Any, path: FilePath) -> Seeds:
    """The histories of a log with one algorithm."""
    algorithms = _by_algorithm(logs.read(path))
    if len(algorithms) > 1:
        fix = "pass the path itself as records"
        checks.refuse(f"records[{name!r}] must be the log of one algorithm", checks.listed(algorithms), fix)
    return next(iter(algorithms.values()), {None: []})


def _by_algorithm(records: Sequence[Mapping[str, Any]]) -> dict[str, Seeds]:
    """A dict from an algorithm to its histories, for the records of a log.

    Records without an algorithm belong to the algorithm "".
    """
    algorithms: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        algorithms.setdefault(str(record.get("algorithm", "")), []).append(record)
    return {name: _seeds(history) for name, history in algorithms.items()}


def by_seed(records: Sequence[Mapping[str, Any]]) -> list[History]:
    """One history per seed, sorted by seed. Records without a seed form one history, which comes first."""
    return list(_seeds(records).values())


def _seeds(records: Sequence[Mapping[str, Any]]) -> Seeds:
    seeds: dict[int | None, list[Mapping[str, Any]]] = {}
    for record in records:
        seed = record.get("seed")
        seeds.setdefault(None if seed is None else checks.integer("records' seed", seed, 0), []).append(record)
    return {seed: seeds[seed] for seed in sorted(seeds, key=lambda seed: (seed is not None, seed))}
