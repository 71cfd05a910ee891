"""Tuning with equal effort: every algorithm tries the same number of settings, with the same seeds.

The command ``fedjax-drift tune`` and the leaderboard follow this rule:

- Every algorithm gets the same number of settings. Values are drawn from ranges that are fixed before the first run
  (`settings`). An algorithm without hyper-parameters tries more learning rates instead.
- A setting is scored by the mean of its late evaluations, and then over the seeds (`score`). The last evaluation of one
  seed chooses nothing, because its noise is often larger than the differences between settings.
- The examples that give the score are held out from the training examples, for example by
  `FederatedData.with_validation`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.records import measured
from fedjax_drift.simulation.runs import Run
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.spec import Fix, Text, checked

__all__ = ["SEEDS", "Range", "score", "settings"]
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
