"""Statistics of the tables: our numbers against the published ones, and one method against another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import fedjax_drift as fd
from experiments.tables.papers import Printed, Score, Series
from experiments.tables.results import Result

WORDS = ("holds", "does not hold", "open")
BETTER, WORSE, EQUAL, OPEN = "▲", "▼", "≈", "?"


class Comparison(NamedTuple):
    """Whether one method is better than another."""

    word: str  # one of `WORDS`
    text: str  # by how much the first method is better, with the confidence interval
    p: float  # of the two-sided t test, NaN without an interval


class Verdict(NamedTuple):
    """The answer to the question whether method a is better than b in a setting, as the paper claims."""

    setting: str
    score: str
    a: str
    b: str
    printed: str  # whether the numbers of the paper have this order: "yes", "no", "equal", or "-" if there are none
    word: str  # one of `WORDS`
    text: str  # the difference and its confidence interval
    p: float  # the p-value, NaN if there is no confidence interval
    survives: bool = False  # whether the difference is significant if all claims of the table are corrected together

    @property
    def interval(self) -> bool:
        return not math.isnan(self.p)


def values_of(score: Score, runs: Mapping[int, Result]) -> list[float]:
    """The score of each run, in the order of the seeds."""
    return [score(runs[seed].series) for seed in sorted(runs)]


# --- against the paper ------------------------------------------------------------------------------------------------


def margin(score: Score, printed: Printed) -> float:
    """The difference from a published number that counts as equal: half a percentage point, or a fifth of the number.

    Percentages and accuracies have the absolute margin, all other scores the relative one.
    """
    percent = 1.0 if score.scale > 1 else 0.01
    return 0.5 * percent if score.of.endswith("accuracy") else abs(printed.value) / 5


def difference(runs: Mapping[int, Result], printed: Printed, score: Score, marks: bool = True) -> tuple[str, str]:
    """Returns our mean minus the paper's number, as text, and a mark ("" if there is none).

    The mark depends on the 95 % t interval of the difference:

    - ≈ if the whole interval is within the `margin`: the numbers are equal for practical purposes
    - ▲ if the interval is on the better side of 0, ▼ if it is on the worse side
    - ? otherwise: with these seeds, the question is open

    The standard deviation of the paper's number is the published one or, if none is published, that of our runs. The
    interval ignores the effect of the partition, unless every seed has its own one.

    There is no mark if there is only one seed, if all seeds have the same number, or if only some seeds have a number.

    The number of rounds to a target has a mark in two other cases: ▲ if all our runs reached the target and the paper
    did not, and ▼ if none of our runs reached it in as many rounds as the paper needed.
    """
    values = values_of(score, runs)
    known = [value for value in values if math.isfinite(value)]
    n, marks = len(values), marks and len(values) > 1
    if not known:
        rounds = min(score.within(run.rounds) for run in runs.values())
        late = all(map(math.isinf, values)) and rounds >= printed.value
        return ("not reached" if late else "-"), WORSE if late and marks else ""
    if not math.isfinite(printed.value):
        return "reached", BETTER if marks and len(known) == n else ""
    gap = float(np.mean(known)) - printed.value
    text, variance = f"{gap:+.{score.digits}f}", float(np.var(known, ddof=1)) if len(known) > 1 else 0.0
    if not marks or not variance or not score.sign or len(known) < n:
        return text, ""
    theirs = variance if printed.std is None else printed.std**2
    half = fd.statistics.quantile(n) * math.sqrt(variance / n + theirs)
    if abs(gap) + half <= margin(score, printed):
        return text, EQUAL
    return text, OPEN if abs(gap) <= half else BETTER if gap * score.sign > 0 else WORSE


# --- one method against another ---------------------------------------------------------------------------------------


def compare(a: Mapping[int, Result], b: Mapping[int, Result], score: Score) -> Comparison:
    """Compares method a with method b: "holds" (a is better), "does not hold" (b is better) or "open".

    The interval is a t interval of the differences between runs with the same seed. The verdict is "open" if fewer than
    two seeds have both methods, or if the difference is the same for all seeds. Runs without the score are left out.
    The scores "best" and "last" only use the rounds that all runs have.

    A run that did not reach the target counts as if it reached the target one round after its last round, which is too
    early. So a method with such a run is never found to be better. The verdict is then "open".
    """
    rounds = [run.rounds for run in (*a.values(), *b.values())]
    most = min(rounds) if score.take in ("best", "last") and min(rounds) < max(map(score.within, rounds)) else 0
    x, y = (
        {seed: value for seed, run in runs.items() if not math.isnan(value := score(_up_to(run, most).series))}
        for runs in (a, b)
    )
    if not x or not y:
        return Comparison("open", "not scored", math.nan)
    late = [any(map(math.isinf, values.values())) for values in (x, y)]
    if all(map(math.isinf, (*x.values(), *y.values()))):
        return Comparison("open", "neither reached the target", math.nan)
    one, other = (
        {seed: score.within(runs[seed].rounds) + 1.0 if math.isinf(value) else value for seed, value in values.items()}
        for runs, values in ((a, x), (b, y))
    )
    digits, within = max(score.digits, 1), f", of the first {most} rounds" if most else ""
    gaps = np.array([score.sign * (one[seed] - other[seed]) for seed in sorted(set(one) & set(other))])
    if len(gaps) < 2:
        mean = score.sign * (np.mean(list(one.values())) - np.mean(list(other.values())))
        return Comparison("open", f"{mean:+.{digits}f}{within}", math.nan)
    if not np.ptp(gaps):
        return Comparison("open", f"{gaps[0]:+.{digits}f} for every seed{within}", math.nan)
    gap = fd.statistics.mean(gaps)
    better, worse = gap.low > 0 and not late[0], gap.high < 0 and not late[1]
    bound = " (a bound: not all reached the target)" if any(late) else ""
    text = f"{gap.value:+.{digits}f} [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}], {len(gaps)} seeds{within}{bound}"
    return Comparison("holds" if better else "does not hold" if worse else "open", text, gap.p)


def _up_to(run: Result, most: int) -> Result:
    """Returns the first ``most`` rounds of the run. 0 means all rounds."""
    if not most or run.rounds == most:
        return run
    kept = {name: sum(t <= most for t in rounds) for name, (rounds, _) in run.series.items()}
    return run._replace(
        series={
            name: Series(rounds[: kept[name]], values[: kept[name]]) for name, (rounds, values) in run.series.items()
        }
    )
