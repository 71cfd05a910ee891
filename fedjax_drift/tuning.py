"""Tuning with equal effort: every algorithm tries the same number of settings, with the same seeds.

The command ``fedjax-drift tune`` and the leaderboard follow this rule:

- Every algorithm gets the same number of settings. Values are drawn from ranges that are fixed before the first run
  (`settings`). An algorithm without hyper-parameters tries more learning rates instead.
- A setting is scored by the mean of its late evaluations, and then over the seeds (`score`). The last evaluation of one
  seed chooses nothing, because its noise is often larger than the differences between settings.
- The examples that give the score are held out from the training examples, for example by
  `FederatedData.with_validation`.
- The setting with the highest score is the best one (`best`). If its learning rate is the smallest or the largest of
  those that were tried, the range was too narrow.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.records import measured
from fedjax_drift.simulation.runs import Run
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.spec import Fix, Text, checked

__all__ = ["SEEDS", "Range", "best", "score", "settings"]
__dir__ = __all__.copy


SEEDS = (1_000_000, 1_000_001)  # of the tuning runs; no reported run has them


class Range(NamedTuple):
    """An interval of a hyper-parameter. Values are drawn uniformly, or uniformly in the logarithm."""

    low: float
    high: float
    log: bool = True  # whether the logarithm is uniform; low must then be > 0

    def check(self, name: str) -> None:
        """Raises ValueError unless the interval is not empty, and finite, and its logarithm is defined if it is used.

        name: of the interval in the message.
        """
        low, high = (
            checks.number(f"{name}.{end}", value, "a finite number", math.isfinite, computed=False)
            for end, value in zip(("low", "high"), self[:2], strict=True)
        )
        if low > high or checks.flag(f"{name}.log", self.log) and low <= 0:
            allowed = "0 < low <= high, or low <= high with log=False"
            checks.refuse(f"{name} must have {allowed}", f"{low:g} and {high:g}")

    def at(self, u: float) -> float:
        """The value at the fraction u of the interval, in 0..1, with three digits."""
        self.check("the range")
        u = checks.number("u", u, "in 0..1", lambda v: 0 <= v <= 1, computed=False)
        if self.log:
            value = math.exp(math.log(self.low) + u * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + u * (self.high - self.low)
        return float(f"{value:.3g}")


def _ranges(name: str, ranges: Any, fix: str) -> dict[str, Range]:
    checks.instance(name, ranges, Mapping, fix)  # type: ignore[type-abstract]
    for key, interval in ranges.items():
        checks.instance(f"{name}[{key!r}]", interval, Range)
        interval.check(f"{name}[{key!r}]")
    return dict(ranges)


Ranges = Annotated[Mapping[str, Range], spec.Spec(_ranges, "ranges"), Fix('pass {"lr": Range(0.01, 1.0)}, for example')]


@checked
def settings(
    shared: Ranges, own: Ranges, number: Annotated[int, spec.integer(1, 10_000)], name: Text, algorithm: Text
) -> list[dict[str, float]]:
    """Draws the settings that an algorithm tries. They are the same whenever this is called.

    Args:
      shared: the ranges of the options of local training, such as ``{"lr": Range(0.01, 1.0)}``. Each range is divided
        into ``number`` equal parts, and each part gives one value. All algorithms get the same values.
      own: the ranges of the algorithm's hyper-parameters. Each setting has a random value.
      number: the number of settings, in 1..10,000.
      name: of the comparison, for example of the data set. Another name gives other values.
      algorithm: the name of the algorithm. It changes the values of ``own``, not those of ``shared``.

    Returns:
      ``number`` dicts from the name of an option to its value. `fd.sweep` accepts them as ``settings``.

    Raises:
      ValueError: a range is empty or not finite, or its logarithm is not defined.

    >>> settings({"lr": Range(0.01, 1.0)}, {"mu": Range(0.0, 1.0, log=False)}, 2, "mnist", "fedprox")
    [{'lr': 0.0638, 'mu': 0.811}, {'lr': 0.371, 'mu': 0.44}]
    """
    of_all = np.random.default_rng(zlib.crc32(name.encode()))
    values = {
        key: [interval.at((part + of_all.uniform()) / number) for part in of_all.permutation(number)]
        for key, interval in shared.items()
    }
    of_one = np.random.default_rng(zlib.crc32(f"{name} {algorithm}".encode()))
    return [
        {key: drawn[j] for key, drawn in values.items()}
        | {key: interval.at(of_one.uniform()) for key, interval in own.items()}
        for j in range(number)
    ]


def _settings(name: str, settings: Any, fix: str) -> list[Mapping[str, Any]]:
    each = checks.items(settings)
    if not each or not all(isinstance(setting, Mapping) for setting in each):
        checks.refuse(f'{name} must be a list of one or more dicts such as {{"lr": 0.1}}', checks.shown(settings))
    return each


def _names(name: str, names: Any, fix: str) -> tuple[str, ...]:
    each = checks.items(names)
    if each is None or not all(isinstance(one, str) for one in each):
        checks.refuse(f'{name} must be a list of names such as ["lr", "server_lr"]', checks.shown(names))
    return tuple(each)


@checked
def best(
    settings: Annotated[Sequence[Mapping[str, Any]], spec.Spec(_settings, "settings")],
    scores: Annotated[
        np.ndarray, spec.array("numbers, one for each setting", lambda scores: spec.numbers(np.nan_to_num(scores), 1))
    ],
    names: Annotated[Sequence[str], spec.Spec(_names, "names")] = ("lr",),
) -> dict[str, Any]:
    """The setting with the highest score. The first one, if several have it.

    Warns if its learning rate is the smallest or the largest of those that were tried: a better one may be outside of
    them.

    Args:
      settings: one or more dicts from the name of an option to its value.
      scores: a number for each setting; higher is better. A setting whose score is not finite is not chosen.
      names: the options for which it warns. Default: the learning rate. Options that a setting does not have, that have
        one value in all settings, or that are not numbers are ignored.

    Raises:
      ValueError: no score is finite, or there are not as many scores as settings.

    >>> best([{"lr": 0.01}, {"lr": 0.1}, {"lr": 1.0}], [0.2, 0.7, float("nan")])
    {'lr': 0.1}
    """
    if len(settings) != len(scores) or not np.isfinite(scores).any():
        got = f"{len(scores)} for {len(settings)} settings" if len(settings) != len(scores) else "none that is finite"
        checks.refuse("scores must have a number for each setting", got)
    chosen = dict(settings[int(np.argmax(np.where(np.isfinite(scores), scores, -np.inf)))])
    for text in at_edge(settings, chosen, names):
        checks.warn(f"{text}: try other values, too")
    return chosen


def at_edge(settings: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """For each name whose chosen value is the smallest or the largest of those in the settings, a text that says so."""
    texts = []
    for name in names:
        tried = sorted({setting[name] for setting in settings if isinstance(setting.get(name), Real)})
        if len(tried) > 1 and (value := chosen.get(name)) in (tried[0], tried[-1]):
            which = "smallest" if value == tried[0] else "largest"
            texts.append(
                f"the best {name}, {value:g}, is the {which} of {len(tried)} values, {tried[0]:g} to {tried[-1]:g}"
            )
    return texts


@checked
def score(sim: Annotated[Simulation, spec.instance(Simulation)], runs: Sequence[Run]) -> float:
    """The score of one setting, which chooses the best one: an accuracy in 0..1, the mean over its runs.

    It is the mean of the last fifth of the evaluations, at least two. For algorithms with personal models it is the
    mean accuracy of these models over the clients, after the last round. A run that has diverged counts as 0.

    Args:
      sim: the simulation with this setting.
      runs: its runs, one per seed, as `fd.sweep` returns them.

    Raises:
      ValueError: there is no run, or a run has no accuracy.
    """
    if not isinstance(runs, Sequence) or not runs or not all(isinstance(run, Run) for run in runs):
        checks.refuse("runs must be a list of runs of fd.sweep", checks.shown(runs))
    if sim.algorithm.personal is not None:
        own = [np.nanmean(sim.evaluate_clients(run.state)["personal_accuracy"]) for run in runs]
        return float(np.mean(np.nan_to_num(own, nan=0.0)))
    late = []
    for (_, accuracies), (_, losses) in zip(*(_series(runs, key) for key in ("accuracy", "loss")), strict=True):
        if not len(accuracies):
            checks.refuse("runs must have accuracies", "none", "evaluate during the run (eval_every=)")
        diverged = len(losses) and not np.isfinite(losses[-1]).all()
        late.append(0.0 if diverged else float(np.mean(accuracies[-max(2, len(accuracies) // 5) :])))
    return float(np.mean(np.nan_to_num(late, nan=0.0)))


def _series(runs: Sequence[Run], key: str) -> list[tuple[np.ndarray, np.ndarray]]:
    return measured({"": [run.history for run in runs]}, key)[""]
