"""Statistics of the tables: our numbers against the published ones, and one method against another.

Methods are compared by a rule for the number of seeds. They are compared after 3 seeds. If the question is still open,
3 more seeds are run, at most 12 in all. So there are up to four looks at the same question. Each look has a share of a
quarter of the 5 % (Bonferroni): its interval is a 98.75 % interval, and its p-value is multiplied by 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import fedjax_drift as fd
from experiments.tables.papers import Printed, Score, Series
from experiments.tables.results import Result

WORDS = ("holds", "does not hold", "equal", "open")
LOOKS = (3, 6, 9, 12)  # the numbers of seeds after which two methods are compared
CONFIDENCE = 1 - fd.statistics.SIGNIFICANT / len(LOOKS)  # of the interval of each look
BETTER, WORSE, EQUAL, OPEN = "▲", "▼", "≈", "?"


class Comparison(NamedTuple):
    """Whether one method is better than another."""

    word: str  # one of `WORDS`
    text: str  # by how much the first method is better, with the confidence interval
    p: float  # of the two-sided paired t test, multiplied by the number of looks; NaN without an interval
    seeds: int = 0  # the number of seeds that were compared, one of `LOOKS`; 0 before the first look


class Verdict(NamedTuple):
    """The answer to the question whether method a is better than b in a setting, as the paper claims."""

    setting: str
    score: str
    a: str
    b: str
    printed: str  # whether the numbers of the paper have this order: "yes", "no", "equal", or "-" if there are none
    word: str  # one of `WORDS`
    text: str  # the difference and its confidence interval
    p: float  # the p-value, corrected for the looks; NaN if there is no confidence interval
    seeds: int = 0  # the number of seeds that were compared, 0 before the first look
    survives: bool = False  # whether the difference is significant if all claims of the table are corrected together

    @property
    def interval(self) -> bool:
        return not math.isnan(self.p)

    @property
    def decided(self) -> bool:
        """Whether the rule asks for no more seeds: the difference is significant, or the methods are equal."""
        return self.survives or self.word == "equal"

    @property
    def wanted_seeds(self) -> int:
        """The number of seeds that the rule asks for: those of the next look if the question is open."""
        later = [look for look in LOOKS if look > self.seeds]
        return later[0] if later and not self.decided else self.seeds


def values_of(score: Score, runs: Mapping[int, Result]) -> list[float]:
    """The score of each run, in the order of the seeds."""
    return [score(runs[seed].series) for seed in sorted(runs)]


# --- against the paper ------------------------------------------------------------------------------------------------


def margin(score: Score, value: float) -> float:
    """The difference from a number that counts as equal: half a percentage point, or a fifth of the number.

    Scores of which more is better (accuracies, AUC, ratios) have the absolute margin, all other scores the relative
    one.
    """
    percent = 1.0 if score.scale > 1 else 0.01
    return 0.5 * percent if score.sign > 0 else abs(value) / 5


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
    if abs(gap) + half <= margin(score, printed.value):
        return text, EQUAL
    return text, OPEN if abs(gap) <= half else BETTER if gap * score.sign > 0 else WORSE


# --- one method against another ---------------------------------------------------------------------------------------


def compare(a: Mapping[int, Result], b: Mapping[int, Result], score: Score) -> Comparison:
    """Compares method a with method b by the differences between runs with the same seed.

    The answer is that of the last look: of the 3, 6, 9 or 12 lowest seeds that both methods have. It depends on the
    t interval of the mean difference:

    - "holds" if a is better in the whole interval, "does not hold" if b is better
    - "equal" if the whole interval is within the `margin` and includes 0
    - "open" otherwise, for example before the first look

    Runs without the score are left out. The scores "best" and "last" only use the rounds that all runs have.

    A run that did not reach the target counts as if it reached the target one round after its last round, which is too
    early. So a method with such a run is never found to be better or equal. The answer is then "open".
    """
    runs = [(a[seed], b[seed]) for seed in sorted(set(a) & set(b))]
    if not runs:
        return Comparison("open", "no seed in common", math.nan)
    rounds = [run.rounds for pair in runs for run in pair]
    most = min(rounds) if score.take in ("best", "last") and min(rounds) < max(map(score.within, rounds)) else 0
    scored = [(pair, [score(_up_to(run, most).series) for run in pair]) for pair in runs]
    scored = [(pair, values) for pair, values in scored if not np.isnan(values).any()]
    seeds = max((look for look in LOOKS if look <= len(scored)), default=0)
    scored = scored[: seeds or None]
    if not scored:
        return Comparison("open", "not scored", math.nan)
    values = np.array([values for _, values in scored])  # [seeds, 2]
    late = np.isinf(values).any(0)
    if np.isinf(values).all():
        return Comparison("open", "neither reached the target", math.nan, seeds)
    after_last = np.array([[score.within(run.rounds) + 1.0 for run in pair] for pair, _ in scored])
    values = np.where(np.isinf(values), after_last, values)
    gaps = score.sign * (values[:, 0] - values[:, 1]) + 0.0  # not -0.0
    digits, within = max(score.digits, 1), f", of the first {most} rounds" if most else ""
    within += " (a bound: not all reached the target)" if late.any() else ""
    if not seeds:
        number = f"{len(gaps)} seed{'s' * (len(gaps) > 1)}{within}"
        return Comparison("open", f"{gaps.mean():+.{digits}f}, {number}", math.nan)
    gap = fd.statistics.mean(gaps, confidence=CONFIDENCE)
    word = _word(gap, margin(score, float(values[:, 1].mean())), late)
    if not np.ptp(gaps):  # there is no t test
        text = f"{gap.value:+.{digits}f} for each of {seeds} seeds{within}"
        return Comparison(word if word == "equal" else "open", text, math.nan, seeds)
    text = f"{gap.value:+.{digits}f} [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}], {seeds} seeds{within}"
    return Comparison(word, text, min(1.0, len(LOOKS) * gap.p), seeds)


def _word(gap: fd.statistics.Mean, equal: float, late: np.ndarray) -> str:
    """The answer for the mean difference of two methods.

    Args:
      equal: the margin within which the methods are equal.
      late: bool [2], whether a run of the method did not reach the target.
    """
    if gap.low > 0 and not late[0]:
        return "holds"
    if gap.high < 0 and not late[1]:
        return "does not hold"
    within = gap.low <= 0 <= gap.high and max(-gap.low, gap.high) <= equal
    return "equal" if within and not late.any() else "open"


def reaches(runs: Mapping[int, Result], score: Score, target: float) -> Comparison:
    """Whether the score of a method is at least the target: "holds" if it is in all of three or more runs, "does not
    hold" if it is in none of them, otherwise "open"."""
    values = [value for value in values_of(score, runs) if not math.isnan(value)]
    if not values:
        return Comparison("open", "not scored", math.nan)
    met = sum(value >= target for value in values)
    text = f"{min(values):.{score.digits}f} to {max(values):.{score.digits}f}, {len(values)} seeds"
    word = "open" if len(values) < LOOKS[0] or 0 < met < len(values) else "holds" if met else "does not hold"
    return Comparison(word, text, math.nan, len(values))


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
