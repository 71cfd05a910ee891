"""Reads the records of runs, and computes how many rounds a run needs to reach a target.

The module `plots` lists the forms of `Records`, the type of the argument ``records`` here and there. What has several
algorithms or settings gives several runs. In a dict, their names begin with the name in the dict.
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
Some = FilePath | AnyRun | History | Sequence[History] | Sequence[AnyRun]
Records = Some | Mapping[str, Some]
Runs = Mapping[str, Sequence[History]]  # name of a run -> one history per seed
Seeds = dict[int | None, History]  # seed -> history; None: the only history, whose seed is unknown
By = Literal["round", "time", "megabytes"]
UNITS = {"round": "Rounds", "time": "Seconds", "megabytes": "Megabytes"}  # what a run is counted in, and its name
EVALUATE = "evaluate during the run (eval_every=), or pass another key"  # the fix in error messages


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
      records: the runs: a history, the path of a log, the result of `fd.sweep`, or a dict from the name of a run to
        one of these, as `plots` accepts them.
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
    if not isinstance(records, Mapping):
        return _runs("records", records)
    named: dict[str, Seeds] = {}
    for name, value in records.items():
        runs = _runs(f"records[{name!r}]", value)
        named |= {", ".join(filter(None, (str(name), inner * (len(runs) > 1)))): seeds for inner, seeds in runs.items()}
    return named


def _runs(argument: str, value: Any) -> dict[str, Seeds]:
    """The runs of a path, of a list or of a single run, by name."""
    if isinstance(value, (str, os.PathLike)):
        path = checks.path(argument, value)
        below = sorted(log.parent for log in path.glob("*/rounds.jsonl"))
        if below and not (path / "rounds.jsonl").exists():
            return by_run_and_seed({folder.name: folder for folder in below})
        value = logs.read(path)
    value = [value] if _is_run(value) else value
    kind = _kind(value) if isinstance(value, Sequence) else ""
    parts: list[tuple[str, int | None, History]]  # the name, the seed and the history of each run
    if kind == "run":  # with several algorithms, the name of a setting begins with the algorithm
        several = len({run.algorithm for run in value}) > 1
        settings = [[f"{name} {setting}" for name, setting in getattr(run, "setting", {}).items()] for run in value]
        names = [", ".join([run.algorithm] * several + of) for run, of in zip(value, settings, strict=True)]
        parts = [(name, run.seed, run.history) for name, run in zip(names, value, strict=True)]
    elif kind == "history":  # their seeds are those in their records, or 0, 1, ... unless all have different ones
        seeds = [seed for history in value for _, seed in _by_algorithm_and_seed(history)]
        known = len(seeds) == len(set(seeds)) == len(value) and None not in seeds
        parts = [("", seeds[i] if known else i, history) for i, history in enumerate(value)]
    elif kind in ("record", "empty"):
        parts = [(name, seed, history) for (name, seed), history in _by_algorithm_and_seed(value).items()]
    else:
        items_type = f" of {type(value[0]).__name__}" if isinstance(value, Sequence) else ""
        checks.refuse(
            f"{argument} must be a history, a list or a dict of histories, the path of a log or the result of fd.sweep",
            f"{checks.type_of(value)}{items_type}",
            "pass the history of state, history = sim.run(...), or of logs {name: fd.logs.read(path)}",
        )
    runs: dict[str, Seeds] = {}
    for name, seed, history in parts:
        if seed in runs.setdefault(name, {}):
            checks.refuse(
                "records must have one run for each setting and seed",
                f"two of {name or value[0].algorithm} with seed {seed}",
                "pass a dict from a name to the result of each sweep",
            )
        runs[name][seed] = history
    return runs or {"": {None: []}}


def _by_algorithm_and_seed(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int | None], History]:
    """A dict from (algorithm, seed) to a history. Of an algorithm, records without a seed come first, and then the
    seeds in ascending order. Records without an algorithm belong to the algorithm ""."""
    histories: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for record in records:
        seed = record.get("seed")
        seed = None if seed is None else checks.integer("records' seed", seed, 0)
        histories.setdefault((str(record.get("algorithm", "")), seed), []).append(record)
    names = [*dict.fromkeys(name for name, _ in histories)]
    order = sorted(histories, key=lambda each: (names.index(each[0]), -1 if each[1] is None else each[1]))
    return {each: histories[each] for each in order}


def _is_run(item: Any) -> bool:
    """Whether it is a `Run` or the result of `fd.load_run`."""
    return all(hasattr(item, name) for name in ("algorithm", "seed", "history"))


def _kind(items: Sequence[Any]) -> str:
    """The common kind of all items: "record", "run" or "history". "empty" without items, otherwise ""."""

    def is_history(item: Any) -> bool:  # a text is a sequence of texts
        return isinstance(item, Sequence) and not isinstance(item, str) and _kind(item) in ("record", "empty")

    kinds = {"record": lambda item: isinstance(item, Mapping), "run": _is_run, "history": is_history}
    return next((kind for kind, is_one in kinds.items() if all(map(is_one, items))), "") if items else "empty"
