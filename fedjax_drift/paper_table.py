"""The table of a paper: accuracy, rounds to a target and paired tests for each method, over seeds."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np

from fedjax_drift import checks, spec, statistics
from fedjax_drift.records import (
    EVALUATE,
    UNITS,
    By,
    Reached,
    Records,
    Seeds,
    by_run_and_seed,
    measured,
    rounds_to_target,
)
from fedjax_drift.spec import Count, Fix, Text, checked
from fedjax_drift.statistics import Mean

Cells = list[list[str]]  # the rows of a table, the first one with the headings
ROUNDING = float(np.finfo(np.float32).eps)  # of the accuracies, relative


class Method(NamedTuple):
    """The numbers of one method."""

    scores: dict[int | None, float]  # seed -> mean of the last evaluations; NaN if the run has diverged
    evaluations: int  # the number of evaluations in this mean, the smallest of all seeds
    rounds: tuple[int, int]  # the last round of the shortest and of the longest run
    reached: list[Reached] | None  # None without a target
    pairs: int | None = None  # the number of seeds that the baseline has too; None: it is the baseline
    difference: Mean = Mean(math.nan, math.nan, math.nan)
    """From the baseline, over the pairs. NaN without pairs, and if a run of a pair has diverged."""
    p: float = math.nan  # of the paired t test, with Holm's correction for all methods of the table

    @property
    def score(self) -> Mean:
        """The mean of the seeds that have not diverged."""
        return statistics.mean([value for value in self.scores.values() if math.isfinite(value)])

    @property
    def diverged(self) -> int:
        return sum(not math.isfinite(value) for value in self.scores.values())


Target = Annotated[float, spec.number("a finite number", lambda v: True, (0, -1), (), computed=False)]


@checked
def table(
    records: Records,
    last: Count = 10,
    format: Literal["markdown", "latex", "csv"] = "markdown",  # noqa: A002
    *,
    target: Target | None = None,
    baseline: str | None = None,
    key: Annotated[Text, Fix("an entry of the records")] = "accuracy",
    by: By = "round",
) -> str:
    """Returns a table for a paper: one row per method, with intervals over seeds and tests against a baseline.

    The score of a run is the mean of its last evaluations. The table has the mean of the scores over the seeds and its
    95 % confidence interval (Student's t). The difference from the baseline is the mean over the seeds that both
    methods have, with the interval of a paired t test. Its p-value has Holm's correction for all methods of the table.
    With fewer than two such seeds there is no interval and no p-value.

    A run has diverged if its loss or its score is not finite at the last evaluation. The mean is then over the other
    seeds, and the table says how many have diverged. There is no difference if a run of a pair has diverged, because
    the remaining seeds would favour the method that diverges.

    The histories of logs and sweeps have seeds. Histories in a list are paired by their position.

    Args:
      records: the runs: a history, a list of histories (one per seed), the path of a log, the result of `fd.sweep` or
        `fd.load_run`, or a dict from the name of a method to one of these, as `plots` accepts them.
      last: the number of evaluations whose mean is the score, >= 1. A run with fewer evaluations has the mean of all of
        them. The notes of the table say so. Default: 10.
      format: "markdown" (default), "latex" (for the package booktabs) or "csv". Markdown and LaTeX show accuracies in
        percent. CSV has plain numbers, with accuracies in 0..1, and an empty field for a number that does not exist.
      target: adds the rounds until ``key`` reaches this value, see `fd.rounds_to_target`: the mean over the seeds, of
        the first evaluated round at the target. ">" means that not all seeds reach it. An accuracy is in 0..1. Default:
        no such column.
      baseline: the name of the method with which the others are compared. Default: the first method.
      key: the entry of the records to compare. Default: "accuracy".
      by: what is counted until the target: "round" (default), "time" or "megabytes", as in `fd.rounds_to_target`.

    Returns:
      The table as text. Markdown has notes below the table, and LaTeX has them as comments.

    Raises:
      ValueError: no method has the name ``baseline``, or no record has the key.

    >>> def run(*accuracies):
    ...     return [{"round": t, "accuracy": value} for t, value in enumerate(accuracies, 1)]
    >>> methods = {"FedAvg": [run(0.5, 0.6), run(0.5, 0.7)], "FedDC": [run(0.6, 0.8), run(0.7, 0.8)]}
    >>> print(table(methods, last=1, target=0.7))
    | method | accuracy (%), 95 % interval | seeds | rounds to 70 % | vs FedAvg, 95 % interval |     p |
    |:-------|----------------------------:|------:|---------------:|-------------------------:|------:|
    | FedAvg |               65.00 ± 63.53 |     2 |   > 2 (1 of 2) |                        - |     - |
    | FedDC  |                80.00 ± 0.00 |     2 |            1.5 |           +15.00 ± 63.53 | 0.205 |
    <BLANKLINE>
    accuracy: mean of the last evaluation, and then over seeds.
    ±: half the width of the 95 % t interval over seeds.
    p: paired t test against FedAvg, with Holm's correction.
    """
    runs = by_run_and_seed(records)
    methods = _methods(runs, last, key, target, by)
    first = next(iter(methods))
    baseline = first if baseline is None else checks.choice("baseline", baseline, methods)
    methods = _compared(methods, baseline)
    if format == "csv":
        return _csv(methods, baseline, key, target, by)
    cells = _cells(methods, baseline, key, target, by)
    return (_latex if format == "latex" else _markdown)(cells, _notes(methods, baseline, key, last, by))


# --- the numbers ------------------------------------------------------------------------------------------------------


def _methods(runs: dict[str, Seeds], last: int, key: str, target: float | None, by: By) -> dict[str, Method]:
    """The numbers of the methods that have been evaluated. Runs without evaluations are left out."""
    evaluated = {
        name: {seed: history for seed, history in seeds.items() if any(key in record for record in history)}
        for name, seeds in runs.items()
    }
    evaluated = {name or "run": seeds for name, seeds in evaluated.items() if seeds}
    if not evaluated:
        checks.refuse(f"table needs at least 1 round with {key!r}", "none", EVALUATE)
    histories = {name: list(seeds.values()) for name, seeds in evaluated.items()}
    reached = {} if target is None else rounds_to_target(histories, target, key, by)
    points, losses = measured(histories, key), measured(histories, "loss")
    methods = {}
    for name, seeds in evaluated.items():
        scores, counts, ends = {}, [], []
        for seed, (rounds, values), (_, loss) in zip(seeds, points[name], losses[name], strict=True):
            score = float(np.mean(values[-last:, -1]))
            diverged = not math.isfinite(score) or len(loss) > 0 and not np.isfinite(loss[-1]).all()
            scores[seed] = math.nan if diverged else score
            counts.append(len(values[-last:]))
            ends.append(int(rounds[-1]))
        methods[name] = Method(scores, min(counts), (min(ends), max(ends)), reached.get(name))
    return methods


def _compared(methods: dict[str, Method], baseline: str) -> dict[str, Method]:
    """The methods, all but the baseline with their difference from it."""
    base, others = methods[baseline].scores, {}
    for name, method in methods.items():
        if name != baseline:
            common = [seed for seed in method.scores if seed in base]
            one, other = (np.array([scores[seed] for seed in common]) for scores in (method.scores, base))
            rounding = ROUNDING * float(np.fmax.reduce(np.abs([*one, *other]), initial=0.0))
            others[name] = method._replace(pairs=len(common), difference=statistics.mean(one - other, rounding))
    corrected = statistics.holm([method.difference.p for method in others.values()])
    return methods | {n: method._replace(p=p) for (n, method), p in zip(others.items(), corrected, strict=True)}


# --- the cells --------------------------------------------------------------------------------------------------------


def _csv(methods: dict[str, Method], baseline: str, key: str, target: float | None, by: str) -> str:
    """The numbers as CSV. NaN is an empty field."""
    rows: list[dict[str, str | float]] = []
    for name, method in methods.items():
        score, gap = method.score, method.difference
        row: dict[str, str | float] = {
            "method": name, "seeds": len(method.scores), "diverged": method.diverged,
            "evaluations": method.evaluations, "shortest_run": method.rounds[0], "longest_run": method.rounds[1],
            key: score.value, f"{key}_low_95": score.low, f"{key}_high_95": score.high,
        }  # fmt: skip
        if target is not None:
            met = [seed.round for seed in method.reached or () if seed.round is not None]
            everyone = len(met) == len(method.scores)
            row |= {"target": target, "reached": len(met)}
            row[f"{UNITS[by].lower()}_to_target"] = float(np.mean(met)) if everyone else math.nan
        if len(methods) > 1:
            row |= {
                "baseline": baseline, "pairs": "" if method.pairs is None else method.pairs, "difference": gap.value,
                "difference_low_95": gap.low, "difference_high_95": gap.high, "p": gap.p, "p_holm": method.p,
            }  # fmt: skip
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({n: f"{x:.6g}".replace("nan", "") if isinstance(x, float) else x for n, x in row.items()}
                     for row in rows)  # fmt: skip
    return text.getvalue()


def _cells(methods: dict[str, Method], baseline: str, key: str, target: float | None, by: str) -> Cells:
    """The headings and the rows of the table, as text."""
    percent = key.endswith("accuracy")
    factor = 100 if percent else 1
    intervals = any(len(method.scores) > 1 for method in methods.values())
    named = key.replace("_", " ") + " (%)" * percent + ", 95 % interval" * intervals
    goal = "" if target is None else f"{100 * target:g} %" if percent else f"{target:g}"
    heading = ["method", named, "seeds", *([f"{UNITS[by].lower()} to {goal}"] if goal else [])]
    heading += [f"vs {baseline}" + ", 95 % interval" * intervals, "p"] if len(methods) > 1 else []
    digits = ".2f" if percent else "#.4g"
    rows = [heading]
    for name, method in methods.items():
        n = len(method.scores)
        some = f" ({method.diverged} of {n} diverged)" if method.diverged else ""
        row = [name, "diverged" if method.diverged == n else _interval(method.score, digits, factor) + some, str(n)]
        row += [_reached(method.reached or [])] if goal else []
        if len(methods) > 1:
            paired, gap = method.pairs or 0, _interval(method.difference, f"+{digits}", factor)
            few = f" ({paired} pair{'s' * (paired != 1)})" if paired < max(n, len(methods[baseline].scores)) else ""
            p = "-" if math.isnan(method.p) else "< 0.001" if method.p < 0.001 else f"{method.p:.3f}"
            row += [gap + few * (gap != "-"), p]
        rows.append(row)
    return rows


def _interval(mean: Mean, digits: str, factor: float) -> str:
    if math.isnan(mean.value):
        return "-"
    half = "" if math.isnan(mean.half) else f" ± {factor * mean.half:{digits.lstrip('+')}}"
    return f"{factor * mean.value:{digits}}{half}"


def _reached(seeds: Sequence[Reached]) -> str:
    """The mean over the seeds. A seed that does not reach the target counts with its last round."""
    met = sum(seed.round is not None for seed in seeds)
    if not met:
        return "not reached"
    rounds = f"{np.mean([seed.after if seed.round is None else seed.round for seed in seeds]):.4g}"
    return rounds if met == len(seeds) else f"> {rounds} ({met} of {len(seeds)})"


def _notes(methods: dict[str, Method], baseline: str, key: str, last: int, by: str) -> list[str]:
    """What the numbers mean, and what makes the runs hard to compare."""
    counts = sorted({method.evaluations for method in methods.values()})
    of = f"last {counts[-1]} evaluations" if counts[-1] > 1 else "last evaluation"
    several = any(len(method.scores) > 1 for method in methods.values())
    notes = [f"{key.replace('_', ' ')}: mean of the {of}{', and then over seeds' * several}."]
    if several:
        notes.append("±: half the width of the 95 % t interval over seeds.")
        if len(methods) > 1:
            notes.append(f"p: paired t test against {baseline}, with Holm's correction.")
    if counts[0] < min(last, counts[-1]):
        few = ", ".join(f"{name} {each.evaluations}" for name, each in methods.items() if each.evaluations < counts[-1])
        notes.append(f"Fewer evaluations: {few}.")
    reached = [seed for method in methods.values() for seed in method.reached or () if seed.round is not None]
    widest = max((seed.round - seed.after for seed in reached if seed.round is not None), default=0)
    if by == "round" and widest > 1:
        notes.append(f"Rounds to the target: the first evaluated round, with evaluations up to {widest} rounds apart.")
    if len({end for method in methods.values() for end in method.rounds}) > 1:
        rounds = {name: method.rounds for name, method in methods.items()}
        ends = (f"{name} {low}" + f" to {high}" * (low < high) for name, (low, high) in rounds.items())
        notes.append(f"The runs have different numbers of rounds: {', '.join(ends)}.")
    return notes


# --- the text ---------------------------------------------------------------------------------------------------------


def _markdown(cells: Cells, notes: Sequence[str]) -> str:
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = [f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:])]
    lines = [
        f"| {' | '.join([name.ljust(widths[0]), *map(str.rjust, others, widths[1:])])} |" for name, *others in cells
    ]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:], "", *notes])


def _latex(cells: Cells, notes: Sequence[str]) -> str:
    heading, *rows = (" & ".join(map(_escaped, row)) + r" \\" for row in cells)
    columns = "l" + "r" * (len(cells[0]) - 1)
    return "\n".join([
        *(f"% {' '.join(note.split())}" for note in notes),
        rf"\begin{{tabular}}{{{columns}}}", r"\toprule", heading, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}",
    ])  # fmt: skip


ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$",
    ">": "$>$", "|": r"\textbar{}", **{c: f"\\{c}" for c in "&%$#_{}"},
}  # fmt: skip


def _escaped(text: str) -> str:
    """The text in LaTeX. The sign of a number is a minus or plus sign, not a hyphen."""
    escaped = re.sub(r"[\\~^±<>|&%$#_{}]", lambda found: ESCAPES[found[0]], " ".join(text.split()))
    return "--" if escaped == "-" else re.sub(r"^[+-](?=\d+\.)", lambda found: f"${found[0]}$", escaped)
