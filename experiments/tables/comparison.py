"""Statistics of the tables: our numbers against the published ones, and one method against another.

Methods are compared by a rule for the number of seeds. The first look is after the seeds that the table fixed
beforehand, at least 3. If the question is then open, more seeds are run, and there are looks at 6, 9 and 12 seeds. So
there are at most four looks at the same question. Each look has a share of a quarter of the 5 % (Bonferroni): its
interval is a 98.75 % interval, and its p-value is multiplied by 4. If a table says that there is one look only, the
interval is a 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

import fedjax_drift as fd
from experiments.tables.papers import Cell, Printed, Score, Series
from experiments.tables.results import Result

WORDS = ("holds", "does not hold", "equal", "open")
FIRST, LATER = 3, (6, 9, 12)  # the smallest number of seeds of the first look, and those of the later looks
BETTER, WORSE, EQUAL, OPEN = "▲", "▼", "≈", "?"
Runs = Mapping[int, Result]  # the results of a cell by seed


class Looks(NamedTuple):
    """The numbers of seeds after which two methods are compared."""

    seeds: tuple[int, ...]
    one: bool  # whether there is one look only
    unit: str = "seed"  # what is counted: "partition" if every seed has its own one

    @property
    def number(self) -> int:
        """The number of looks among which the 5 % are shared."""
        return 1 if self.one else 1 + len(LATER)

    @property
    def confidence(self) -> float:
        """The confidence of the interval of each look."""
        return 1 - fd.statistics.SIGNIFICANT / self.number


def looks_of(cells: Sequence[Cell]) -> Looks:
    """The looks at a question about these cells: the first one is at all seeds that their table fixed beforehand."""
    first, one = max(FIRST, *(cell.seeds for cell in cells)), any(cell.one_look for cell in cells)
    unit = "partition" if any(cell.own_partitions for cell in cells) else "seed"
    return Looks((first,) if one else (first, *(look for look in LATER if look > first)), one, unit)


class Comparison(NamedTuple):
    """Whether one method is better than another."""

    word: str  # one of `WORDS`
    text: str  # by how much the first method is better, with the confidence interval
    p: float  # of the two-sided paired t test, multiplied by the number of looks; NaN without an interval
    seeds: int  # the number of seeds that were compared; 0 before the first look
    gap: fd.statistics.Mean  # the difference with its interval; NaN if there is none


class Verdict(NamedTuple):
    """The answer to the question whether method a is better than b in a setting, as the paper claims."""

    setting: str
    score: str
    a: str
    b: str
    printed: str  # whether the numbers of the paper have this order: "yes", "no", "equal", or "-" if there are none
    looks: Looks
    answer: Comparison
    significant: bool  # after Holm's correction, if it is part of a claim

    @property
    def word(self) -> str:
        return self.answer.word

    @property
    def interval(self) -> bool:
        return not math.isnan(self.answer.p)

    @property
    def decided(self) -> bool:
        """Whether the rule asks for no more seeds: the difference is significant, or the methods are equal."""
        return self.significant or self.word == "equal"

    @property
    def wanted_seeds(self) -> int:
        """The number of seeds that the rule asks for: those of the next look if the question is open."""
        seeds = self.answer.seeds
        later = [look for look in self.looks.seeds if look > seeds]
        return later[0] if later and not self.decided else seeds


def values_of(score: Score, runs: Runs) -> list[float]:
    """The score of each run, in the order of the seeds."""
    return [score(runs[seed].series) for seed in sorted(runs)]


# --- against the paper ------------------------------------------------------------------------------------------------


def margin(score: Score, value: float, published: float = math.nan) -> float:
    """The difference from a number that counts as equal.

    It is a tenth of the error rate (of the number itself, if it is not a rate of which more is better), or half of the
    published difference, whichever is smaller.

    Args:
      value: the number.
      published: the difference of the two methods in the paper; NaN if it is not known.
    """
    whole = 100.0 if score.scale > 1 else 1.0
    tenth = abs(whole - value if score.sign > 0 and not score.relative else value) / 10
    return min(tenth, abs(published) / 2) if math.isfinite(published) and published else tenth


def half_width(values: Sequence[float], printed: Printed) -> float:
    """Half the width of the 95 % t interval of our mean minus a number of a paper.

    The standard deviation of the paper's number is the published one or, if none is published, that of our values. So
    without a published one it is the interval in which one more run of ours is expected.
    """
    variance = float(np.var(values, ddof=1))
    theirs = variance if printed.std is None else printed.std**2
    return fd.statistics.quantile(len(values)) * math.sqrt(variance / len(values) + theirs)


def agrees(values: Sequence[float], printed: Printed) -> bool:
    """Whether the interval of `half_width` contains 0. False if a run did not reach the target."""
    gap = abs(float(np.mean(values)) - printed.value)
    return all(map(math.isfinite, values)) and gap <= half_width(values, printed)


def difference(runs: Runs, printed: Printed, score: Score, marks: bool = True) -> tuple[str, str]:
    """Returns our mean minus the paper's number, as text, and a mark ("" if there is none).

    The mark depends on the 95 % t interval of the difference:

    - ≈ if the whole interval is within the `margin`: the numbers are equal for practical purposes
    - ▲ if the interval is on the better side of 0, ▼ if it is on the worse side
    - ? otherwise: with these seeds, the question is open

    The interval (`half_width`) ignores the effect of the partition, unless every seed has its own one.

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
    text = f"{gap:+.{score.digits}f}"
    if not marks or not np.ptp(known) or not score.sign or len(known) < n:
        return text, ""
    half = half_width(known, printed)
    if abs(gap) + half <= margin(score, printed.value):
        return text, EQUAL
    return text, OPEN if abs(gap) <= half else BETTER if gap * score.sign > 0 else WORSE


# --- one method against another ---------------------------------------------------------------------------------------


def compare(
    better: Sequence[Runs], worse: Sequence[Runs], score: Score, looks: Looks, published: float = math.nan
) -> Comparison:
    """Compares methods by the differences between runs with the same seed.

    Usually ``better`` and ``worse`` have one method each. With two methods each, their sums are compared: a - b in one
    setting is larger than c - d in another one if a + d is larger than b + c.

    The answer is that of the last look at the lowest seeds that all have. It depends on the t interval of the mean
    difference:

    - "holds" if ``better`` is better in the whole interval, "does not hold" if ``worse`` is
    - "equal" if the whole interval is within the `margin` and includes 0 (not if sums are compared)
    - "open" otherwise, for example before the first look

    Runs without the score are left out. The scores "best" and "last" only use the rounds that all runs have.

    A run that did not reach the target counts as if it reached the target one round after its last round, which is too
    early. So a side with such a run is never found to be better or equal. The answer is then "open".

    Args:
      published: the difference in the paper, for the margin; NaN if it is not known.
    """
    sides = [*better, *worse]
    signs = np.array([1.0] * len(better) + [-1.0] * len(worse)) * (score.sign or 1)
    runs = [[runs[seed] for runs in sides] for seed in sorted(set.intersection(*map(set, sides)))]
    if not runs:
        return _open("no seed in common")
    rounds = [run.rounds for each in runs for run in each]
    most = min(rounds) if score.take in ("best", "last") and min(rounds) < max(map(score.within, rounds)) else 0
    scored = [(each, [score(_up_to(run, most).series) for run in each]) for each in runs]
    scored = [(each, values) for each, values in scored if not np.isnan(values).any()]
    seeds = max((look for look in looks.seeds if look <= len(scored)), default=0)
    scored = scored[: seeds or None]
    if not scored:
        return _open("not scored")
    values = np.array([values for _, values in scored])  # [seeds, sides]
    late = np.isinf(values).any(0)
    if np.isinf(values).all():
        return _open("neither reached the target", seeds)
    after_last = np.array([[score.within(run.rounds) + 1.0 for run in each] for each, _ in scored])
    values = np.where(np.isinf(values), after_last, values)
    gaps = values @ signs + 0.0  # not -0.0
    digits, within = max(score.digits, 1), f", of the first {most} rounds" if most else ""
    within += " (a bound: not all reached the target)" if late.any() else ""
    if not seeds:
        mean = fd.statistics.Mean(float(gaps.mean()), math.nan, math.nan)
        return _open(f"{mean.value:+.{digits}f}, {_count(len(gaps), looks.unit)}{within}", gap=mean)
    gap = fd.statistics.mean(gaps, confidence=looks.confidence)
    equal = margin(score, float(values[:, -1].mean()), published) if len(sides) == 2 else 0.0
    word = _word(gap, equal, late[: len(better)].any(), late[len(better) :].any())
    if not np.ptp(gaps):  # there is no t test
        text = f"{gap.value:+.{digits}f} for each of {_count(seeds, looks.unit)}{within}"
        return Comparison(word if word == "equal" else "open", text, math.nan, seeds, gap)
    text = (
        f"{gap.value:+.{digits}f} [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}], {_count(seeds, looks.unit)}{within}"
    )
    return Comparison(word, text, min(1.0, looks.number * gap.p), seeds, gap)


def _open(text: str, seeds: int = 0, gap: fd.statistics.Mean | None = None) -> Comparison:
    nothing = fd.statistics.Mean(math.nan, math.nan, math.nan)
    return Comparison("open", text, math.nan, seeds, nothing if gap is None else gap)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number > 1)}"


def _word(gap: fd.statistics.Mean, equal: float, better_late: bool, worse_late: bool) -> str:
    """The answer for a mean difference. late: whether a run of the side did not reach the target.

    equal: the margin within which the methods are equal.
    """
    if gap.low > 0 and not better_late:
        return "holds"
    if gap.high < 0 and not worse_late:
        return "does not hold"
    within = gap.low <= 0 <= gap.high and max(-gap.low, gap.high) <= equal
    return "equal" if within and not better_late and not worse_late else "open"


def reaches(runs: Runs, score: Score, target: float) -> Comparison:
    """Whether the score of a method is at least the target: "holds" if it is in all of three or more runs, "does not
    hold" if it is in none of them, otherwise "open"."""
    values = [value for value in values_of(score, runs) if not math.isnan(value)]
    if not values:
        return _open("not scored")
    met = sum(value >= target for value in values)
    text = f"{min(values):.{score.digits}f} to {max(values):.{score.digits}f}, {len(values)} seeds"
    word = "open" if len(values) < FIRST or 0 < met < len(values) else "holds" if met else "does not hold"
    return _open(text, len(values))._replace(word=word)


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
