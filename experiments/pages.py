"""Fills in the numbers of the pages from the result files.

    python -m experiments.pages

A number on a page is between two comments, which nobody sees:

    SCAFFOLD needs <!--= gap("feddc/partitions", "MNIST iid partial", ...) -->6.1 (2.4 to 9.8; 12)<!--/--> rounds more.

The first comment is a Python expression of the functions below. The command writes its value between the two, and
prints the lines that change. A test fails if a page has another value. A value of several lines, such as a table, is a
block of its own. A sentence that depends on a verdict is an expression, too.

experiments/recompute_claims.py has these functions a second time. They share no code with these.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tables import claims, report
from experiments.tables.comparison import Comparison, Verdict, compare, looks_of, values_of
from experiments.tables.papers import EXPERIMENTS, SCALES, Table, read_tables, table_names

ROOT = EXPERIMENTS.parent
PAGES = ("README.md", "BUILD_NOTES.md", "docs/papers.md", "docs/performance.md", "docs/faq.md", "experiments/README.md")
BUILTINS = {"__builtins__": {each.__name__: each for each in (float, len, max, min, sum, tuple)}}
MARK = re.compile(r"(<!--= (.*?)\s-->)(.*?)(<!--/-->)", re.DOTALL)


def rendered(text: str, functions: dict[str, Callable[..., Any]]) -> str:
    """Returns a page with the values of all its expressions."""

    def filled(mark: re.Match[str]) -> str:
        value = str(eval(" ".join(mark[2].split()), BUILTINS | functions))
        block = f"\n\n{value}\n\n" if "\n" in value else value
        return f"{mark[1]}{block}{mark[4]}"

    return MARK.sub(filled, text)


def changes(old: str, new: str) -> list[str]:
    """Returns the lines that differ, with - and + in front of them."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


# --- the functions ----------------------------------------------------------------------------------------------------


def functions_of(experiments: Path = EXPERIMENTS) -> dict[str, Callable[..., Any]]:
    """Returns the functions that the expressions of the pages use. experiments: the folder of tables and results."""
    tables = {table.name: table for table in read_tables(experiments, table_names(experiments))}
    results = {name: report.results_of(table, experiments / "results") for name, table in tables.items()}
    claimed = claims.read(experiments, list(tables.values()))
    tested = claims.evidence(claimed, list(tables.values()), results)

    @functools.cache
    def data(file: str) -> Any:
        """The contents of a JSON file of results."""
        return json.loads((experiments / "results" / file).read_text())

    @functools.cache
    def rows(file: str) -> Any:
        """The rows of a benchmark."""
        return json.loads((experiments / "benchmarks" / "results" / f"{file}.json").read_text())["rows"]

    def number(file: str, what: str) -> float:
        """The median of a row of a benchmark."""
        (row,) = [row for row in rows(file) if row["what"] == what]
        return float(row["median"])

    def bench(file: str, what: str, form: str = ".3g", take: Callable[[float], float] = float) -> str:
        """The median of a row of a benchmark, in this format. take: what is shown of it."""
        return format(take(number(file, what)), form)

    def note(file: str, what: str, pattern: str) -> str:
        """A part of the note of a row of a benchmark."""
        (row,) = [row for row in rows(file) if row["what"] == what]
        (found,) = re.findall(pattern, row["note"])
        return str(found)

    def asked(table: str, setting: str, score: str, better: str, worse: str) -> Verdict | None:
        """The answer to a claim of a paper."""
        for claim, answers in zip(claimed, tested, strict=True):
            if (claim.table, claim.score, claim.better, claim.worse) == (table, score, better, worse):
                if setting in claim.settings:
                    return answers.get(setting)
        return None

    def compared(table: str, setting: str, score: str, better: str, worse: str) -> Comparison | None:
        runs, cells = results[table].get(setting, {}), tables[table].settings[setting].cells
        if better not in runs or worse not in runs:
            return None
        looks = looks_of([cells[better], cells[worse]])
        return compare([runs[better]], [runs[worse]], tables[table].scores[score], looks)

    def gap(table: str, setting: str, score: str, better: str, worse: str) -> str:
        """By how much a method is better than another one: "6.1 (2.4 to 9.8; 12)", with the interval and the seeds.

        It is bold if it is significant and a claim of the paper.
        """
        answer, claim = compared(table, setting, score, better, worse), asked(table, setting, score, better, worse)
        if answer is None or math.isnan(answer.gap.value):
            return "-"
        digits = max(tables[table].scores[score].digits, 1)
        value, low, high = (format(x, f".{digits}f") for x in (answer.gap.value, answer.gap.low, answer.gap.high))
        if not answer.seeds:
            return f"{value} (too few seeds)"
        if answer.gap.low == answer.gap.high:
            return f"{value} (the same in {answer.seeds} seeds: no test)"
        bound = ", a bound" if "a bound" in answer.text else ""
        if claim is not None and claim.decided and claim.word != "equal":
            value = f"**{value}**"
        return f"{value} ({low} to {high}; {answer.seeds}{bound})"

    def word(table: str, setting: str, score: str, better: str, worse: str) -> str:
        """The answer to a claim in a setting: "holds", "fails", "equal" or "open"."""
        return claims.word(asked(table, setting, score, better, worse))

    def mean(table: str, setting: str, score: str, method: str, spread: bool = False) -> str:
        """The mean of a score over all seeds: "50", "98.51 ± 0.06", or ">300" if no run reached the target."""
        runs, scored = results[table].get(setting, {}).get(method, {}), tables[table].scores[score]
        values = values_of(scored, runs)
        if not values:
            return "-"
        if np.isinf(values).any():
            return f">{min(scored.within(run.rounds) for run in runs.values())}"
        deviation = f" ± {np.std(values, ddof=1):.{scored.digits}f}" if spread and len(values) > 1 else ""
        return f"{np.mean(values):.{scored.digits}f}{deviation}"

    def one(table: str, setting: str, score: str, method: str, seed: int = 0) -> str:
        """The score of one seed."""
        scored = tables[table].scores[score]
        return f"{scored(results[table][setting][method][seed].series):.{scored.digits}f}"

    def printed(table: str, setting: str, score: str, method: str) -> str:
        """The number in the paper."""
        return tables[table].settings[setting].published[score][method].text

    def means(table: str, score: str, settings: Sequence[str], methods: Sequence[str], spread: bool = False) -> str:
        """A table of means over all seeds, with the published numbers in parentheses, and the numbers of seeds."""
        lines = [f"| | {' | '.join(methods)} | seeds |", "|---|" + "---:|" * len(methods) + "---|"]
        for setting in settings:
            numbers = tables[table].settings[setting].printed.get(score, {})
            row = [
                mean(table, setting, score, method, spread)
                + (f" ({numbers[method].text})" if method in numbers else "")
                for method in methods
            ]
            seeds = {len(results[table].get(setting, {}).get(method, {})) for method in methods} - {0} or {0}
            lines.append(
                f"| {setting} | {' | '.join(row)} | {' to '.join(map(str, sorted({min(seeds), max(seeds)})))} |"
            )
        return "\n".join(lines)

    def gaps(table: str, score: str, settings: Sequence[str], better: str | Sequence[str], worse: Sequence[str]) -> str:
        """A table of how much a method is better than others, a row for each setting; or, with several methods in
        ``better``, a row for each of them."""
        betters = [better] if isinstance(better, str) else better
        head = f"{better} minus" if isinstance(better, str) else "minus"
        lines = [f"| {head} | {' | '.join(worse)} |", "|---|" + "---|" * len(worse)]
        for setting, method in itertools.product(settings, betters):
            row = [gap(table, setting, score, method, other) for other in worse]
            lines.append(f"| {setting if len(betters) == 1 else method} | {' | '.join(row)} |")
        return "\n".join(lines)

    def claims_of(paper: str) -> str:
        """A table of the claims of a paper with their verdicts, and a line about those that have not been run."""
        lines = ["| claim | whose data | verdict | evidence |", "|---|---|---|---|"]
        lines += [f"| {row}" for name, _, row in _rows(claimed, tested) if name == paper]
        absent = [claim for claim, answers in zip(claimed, tested, strict=True) if not answers]
        where = [
            f"{claim.paper.partition(', ')[2]} on {claim.data}" for claim in absent if claim.paper.startswith(paper)
        ]
        rest = dict.fromkeys(each.replace("on stand-in:", "on the stand-in") for each in where)
        return "\n".join(lines) + (f"\n\nClaims of these have not been run: {'; '.join(rest)}." if rest else "")

    def headlines() -> str:
        """A table of the headline claims with their verdicts, also of those that have not been run."""
        lines = ["| paper | claim | whose data | verdict | evidence |", "|---|---|---|---|---|"]
        rows = _rows(claimed, tested, absent=True)
        return "\n".join([*lines, *(f"| {name} | {row}" for name, first, row in rows if first)])

    def counted() -> str:
        """A table of the numbers of claims with each answer."""
        return "\n".join(claims.counted(claimed, tested))

    def cells() -> str:
        """A table of the numbers of cells by paper."""
        return "\n".join(_cells(list(tables.values()), results))

    made = [
        data,
        rows,
        number,
        bench,
        note,
        gap,
        word,
        mean,
        one,
        printed,
        means,
        gaps,
        claims_of,
        headlines,
        counted,
        cells,
    ]
    return {each.__name__: each for each in made}


def _rows(
    claimed: Sequence[claims.Claim], tested: Sequence[claims.Tested], absent: bool = False
) -> Iterator[tuple[str, bool, str]]:
    """Yields (paper, whether it is a headline, row of a table). A claim about several methods is one row.

    absent: also the claims that have not been run.
    """

    def same(pair: tuple[claims.Claim, claims.Tested]) -> tuple[str, ...]:
        claim = pair[0]
        before, _, after = claim.claim.rpartition(claim.worse) if claim.worse else (claim.claim, "", "")
        return claim.paper, claim.data, claim.table, f"{before}others{after}"

    for (paper, data, table, text), group in itertools.groupby(zip(claimed, tested, strict=True), same):
        pairs = list(group)
        if not absent and not any(answers for _, answers in pairs):
            continue
        words = [(claim.worse, claims.verdict(claim, answers)) for claim, answers in pairs]
        verdict = "; ".join(f"{worse}: {word}" for worse, word in words) if len(pairs) > 1 else words[0][1]
        name, _, where = paper.partition(", ")
        linked = f"[{where}](../experiments/results/{table}.md)" if any(each for _, each in pairs) else where
        first = pairs[0][0]
        data = data if first.kind == "stand-in" else f"the paper's: {data}"
        verdict += " (stand-in)" * (first.kind == "stand-in")
        yield name, first.headline, f"{text if len(pairs) > 1 else first.claim} | {data} | {verdict} | {linked} |"


def _cells(tables: Sequence[Table], results: dict[str, claims.Results]) -> list[str]:
    """The cells for which a paper prints a number. A cell that several tables share counts once."""
    counts: dict[str, dict[Path, list[int]]] = {}
    for table in tables:
        for setting in table.settings.values():
            for method in {method for numbers in setting.printed.values() for method in numbers}:
                runs = results[table.name].get(setting.name, {}).get(method, {})
                full = SCALES.index(setting.scale) == 0 and bool(runs)
                known = counts.setdefault(table.paper.partition(" (")[0], {}).setdefault(setting.cells[method].file, [])
                known[:] = [max(old, new) for old, new in zip(known or (0, 0), (full, full * len(runs)), strict=True)]
    lines = [
        "| paper | cells with a printed number | run at full scale | with 3 seeds or more |",
        "|---|" + "---:|" * 3,
    ]
    numbers = []
    for paper, cells in counts.items():
        numbers.append([len(cells), sum(full for full, _ in cells.values()), sum(n >= 3 for _, n in cells.values())])
        lines.append(f"| {paper} | {' | '.join(map(str, numbers[-1]))} |")
    return [*lines, f"| all | {' | '.join(map(str, np.sum(numbers, 0)))} |"]


def main() -> None:
    functions = functions_of()
    for name in PAGES:
        page = ROOT / name
        old = page.read_text()
        new = rendered(old, functions)
        if new != old:
            page.write_text(new)
            print(name, *changes(old, new), sep="\n")


if __name__ == "__main__":
    main()
