"""Records in all the forms that runs leave them in, and the rounds that runs take to a target.

`Records` is whatever a run leaves: its history; the path of a log (`logs.Log`, or a folder of the command line), which
may name several algorithms and seeds; what `fd.sweep` returns, or several of that; or a dict: name of a run -> one of
these, or the histories or logs of several seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_drift import checks, logs
from fedjax_drift.errors import ConfigurationError

if TYPE_CHECKING:
    from fedjax_drift.simulation.sweep import Run

History = Sequence[Mapping[str, Any]]
FilePath = str | os.PathLike[str]
OneRun = FilePath | History | Sequence[History] | Sequence[FilePath] | Sequence["Run"]
Records = FilePath | History | Sequence["Run"] | Sequence[FilePath] | Mapping[str, OneRun] | Mapping[str, FilePath]
Runs = Mapping[str, Sequence[History]]  # name of a run -> the history of each seed


class Reached(NamedTuple):
    """When one run reached a target. It is evaluated every few rounds, so the target is met in after + 1..round."""

    round: int | None  # the first evaluated round that meets it; None: none does
    after: int  # the evaluated round before that, which does not (0: there is none); the last one if none does


def rounds_to_target(records: Records, target: float, key: str = "accuracy") -> dict[str, list[Reached]]:
    """When runs first meet a target: name of a run -> `Reached` of each seed.

    Args:
      records: see above. A single history has the name "".
      target: what ``key`` must be at least or, for a key that ends in "loss", at most. An accuracy is in 0..1.
      key: an entry of the records.

    Raises:
      ValueError: a target that is no number, or an accuracy above 1; no round that has the key.

    >>> history = [{"round": 10, "accuracy": 0.5}, {"round": 20, "accuracy": 0.9}, {"round": 30, "accuracy": 0.8}]
    >>> rounds_to_target({"FedAvg": history}, 0.7)
    {'FedAvg': [Reached(round=20, after=10)]}
    """
    target = checks.number("target", target, "a finite number", math.isfinite, computed=False)
    key = checks.text("key", key, "an entry of the records")
    if key == "accuracy" and target > 1:
        raise ConfigurationError(
            f"target must be an accuracy in 0..1, got {target:g}: {target / 100:g} for {target:g} %"
        )
    runs = measured(by_run(records), key)
    found = {name: [_reached(*seed, target, key) for seed in seeds if seed[0].size] for name, seeds in runs.items()}
    if not any(found.values()):
        raise ConfigurationError(
            f"rounds_to_target needs at least 1 round with {key!r}, got none: evaluate, or pass another key"
        )
    return {name: of_seeds for name, of_seeds in found.items() if of_seeds}


def _reached(rounds: np.ndarray, values: np.ndarray, target: float, key: str) -> Reached:
    """Of one run; values [n, E], of which the last counts."""
    meets = values[:, -1] <= target if key.endswith("loss") else values[:, -1] >= target
    if not meets.any():
        return Reached(None, int(rounds[-1]))
    first = int(meets.argmax())
    return Reached(int(rounds[first]), int(rounds[first - 1]) if first else 0)


def measured(runs: Runs, key: str) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Name of a run -> of each seed the rounds [n] that have ``key``, and their values [n, E]; None is NaN."""
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, seeds in runs.items():
        found[name] = []
        for history in seeds:
            known = [record for record in history if key in record]
            values = _numbers(key, [record[key] for record in known])
            rounds = [checks.integer("records' round", record.get("round"), 0) for record in known]
            found[name].append((np.array(rounds, int), values if values.ndim == 2 else values[:, None]))
    return found


def _numbers(key: str, values: Sequence[Any]) -> np.ndarray:
    """[n] or [n, E]; None is NaN."""
    try:
        found = np.array(values, float)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"records must have a number, or lists of as many, as {key!r}: {error}") from error
    if found.ndim not in (1, 2) or found.ndim == 2 and not found.shape[1]:
        raise ConfigurationError(
            f"records must have a number, or a list of them, as {key!r}, got {checks.shown(values[0])}"
        )
    return found


def by_run(records: Any) -> dict[str, list[History]]:
    """Name of each run -> the history of each of its seeds, whatever form they have. ValueError for anything else."""
    if isinstance(records, (str, os.PathLike)):
        records = checks.path("records", records)
        below = sorted(path.parent for path in records.glob("*/rounds.jsonl"))
        if below and not (records / "rounds.jsonl").exists():
            return {path.name: _one_log(path.name, path) for path in below}
        return _by_algorithm(logs.read(records))
    if isinstance(records, Mapping):
        named = [(str(name), _one_run(name, of)) for name, of in records.items()]
        return {", ".join(filter(None, (name, more))): seeds for name, of in named for more, seeds in of.items()}
    items = list(records) if isinstance(records, Sequence) else None
    kind = "" if items is None else _kind(items)
    if kind == "path":
        return {os.path.basename(os.path.normpath(path)): _one_log(path, path) for path in items or ()}
    if kind == "run":
        return _by_setting(items or [])
    if kind == "record" or items == []:
        return _by_algorithm(items or []) or {"": [[]]}
    wrong = f" of {type(items[0]).__name__}" if items else ""
    raise ConfigurationError(
        "records must be a history, a dict of histories, the path of a log or what fd.sweep returns, got a "
        f"{type(records).__name__}{wrong}: state, history = sim.run(...)"
    )


def _kind(items: Sequence[Any]) -> str:
    """What all of the items are; nothing where they are of several kinds, or of none that is known."""
    for kind, is_one in (
        ("record", lambda item: isinstance(item, Mapping)),
        ("path", lambda item: isinstance(item, (str, os.PathLike))),
        ("run", lambda item: hasattr(item, "history") and hasattr(item, "setting")),
        ("history", lambda item: isinstance(item, Sequence) and _kind(item) in ("record", "empty")),
    ):
        if items and all(map(is_one, items)):
            return kind
    return "" if items else "empty"


def _one_run(name: Any, of: Any) -> dict[str, list[History]]:
    """The seeds of what stands behind a name; of a sweep over settings, of each of them."""
    if isinstance(of, (str, os.PathLike)):
        return {"": _one_log(name, of)}
    if hasattr(of, "history") and hasattr(of, "setting"):
        return {"": [of.history]}
    items = list(of) if isinstance(of, Sequence) else []
    kind = _kind(items) if isinstance(of, Sequence) else ""
    if kind == "run":
        return _by_setting(items)
    if kind == "path":
        return {"": [history for path in items for history in _one_log(name, path)]}
    if kind in ("record", "empty"):
        return {"": by_seed(items) or [[]]}
    if kind == "history":
        return {"": items}
    raise ConfigurationError(
        f"records[{name!r}] must be a history, those of several seeds, the path of a log, several of these, or what "
        f"fd.sweep returns, got a {type(of).__name__}: state, history = sim.run(...)"
    )


def _by_setting(runs: Sequence[Any]) -> dict[str, list[History]]:
    """Runs of sweeps by algorithm, where there are several, and setting."""
    several = len({run.algorithm for run in runs}) > 1
    found: dict[str, dict[int, History]] = {}
    for run in runs:
        setting = [f"{name} {value}" for name, value in run.setting.items()]
        name = ", ".join([run.algorithm] * several + setting)
        seeds = found.setdefault(name, {})
        if run.seed in seeds:
            raise ConfigurationError(
                f"records must hold one run of each setting and seed, got two of {name or run.algorithm} with seed "
                f"{run.seed}: pass a dict, name -> what each sweep returned"
            )
        seeds[run.seed] = run.history
    return {name: list(seeds.values()) for name, seeds in found.items()}


def _one_log(name: Any, path: FilePath) -> list[History]:
    """The seeds of a log of one algorithm."""
    found = _by_algorithm(logs.read(path))
    if len(found) > 1:
        raise ConfigurationError(
            f"records[{name!r}] must be the log of one algorithm, got {', '.join(found)}: pass the path alone"
        )
    return next(iter(found.values()), [[]])


def _by_algorithm(records: Sequence[Mapping[str, Any]]) -> dict[str, list[History]]:
    """The lines of a log by algorithm and seed, if they name them."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(str(record.get("algorithm", "")), []).append(record)
    return {name: by_seed(history) for name, history in found.items()}


def by_seed(records: Sequence[Mapping[str, Any]]) -> list[History]:
    """The records of each seed, if they name seeds; the seeds in order."""
    found: dict[int | None, list[Mapping[str, Any]]] = {}
    for record in records:
        seed = record.get("seed")
        found.setdefault(None if seed is None else checks.integer("records' seed", seed, 0), []).append(record)
    return [found[seed] for seed in sorted(found, key=lambda seed: (seed is not None, seed))]
