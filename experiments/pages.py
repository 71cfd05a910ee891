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
import inspect
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import markdown
from experiments.tables import claims, report
from experiments.tables.comparison import agrees, compare, half_width, looks_of, values_of
from experiments.tables.papers import EXPERIMENTS, Setting, read_tables, table_names

ROOT = EXPERIMENTS.parent
PAGES = (
    "README.md", "BUILD_NOTES.md", "docs/papers.md", "docs/performance.md", "docs/faq.md", "docs/language_models.md",
    "docs/sources_of_drift.md", "docs/known_results.md", "experiments/README.md",
)  # fmt: skip
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


# --- the functions of the expressions ---------------------------------------------------------------------------------


class Benchmarks:
    """The results of experiments/benchmarks, and the JSON files of experiments/results."""

    def __init__(self, experiments: Path) -> None:
        self.experiments = experiments

    def data(self, file: str) -> Any:
        """The contents of a file of experiments/results."""
        return json.loads((self.experiments / "results" / file).read_text())

    def table(self, file: str, title: str = "") -> str:
        """The table of a Markdown file of experiments/results. title: the heading above it, if there are several."""
        text = (self.experiments / "results" / file).read_text()
        part = text.partition(f"## {title}\n")[2].partition("\n## ")[0] if title else text
        return "\n".join(line for line in part.splitlines() if line.startswith("|"))

    def cell(self, file: str, row: str, column: str, title: str = "") -> str:
        """A cell of such a table, by the first cell of its row and the heading of its column."""
        lines = self.table(file, title).splitlines()
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
        (found,) = [cells for cells in rows if cells[0] == row]
        return found[head.index(column)]

    def rows(self, file: str) -> Any:
        """The rows of a benchmark."""
        return json.loads((self.experiments / "benchmarks" / "results" / f"{file}.json").read_text())["rows"]

    def number(self, file: str, what: str) -> float:
        """The median of a row of a benchmark."""
        (row,) = [row for row in self.rows(file) if row["what"] == what]
        return float(row["median"])

    def bench(self, file: str, what: str, form: str = ".3g", take: Callable[[float], float] = float) -> str:
        """The median of a row of a benchmark, in this format. take: what is shown of it."""
        return format(take(self.number(file, what)), form)

    def note(self, file: str, what: str, pattern: str) -> str:
        """A part of the note of a row of a benchmark."""
        (row,) = [row for row in self.rows(file) if row["what"] == what]
        (found,) = re.findall(pattern, row["note"])
        return str(found)


class Evidence:
    """The results of the papers' tables.

    A comparison is named by (table, setting, score, better, worse), and a score by (table, setting, score, method).
    """

    def __init__(self, experiments: Path) -> None:
        self.tables = {table.name: table for table in read_tables(experiments, table_names(experiments))}
        tables = list(self.tables.values())
        self.results = {table.name: report.results_of(table, experiments / "results") for table in tables}
        self.claims = claims.read(experiments, tables)
        self.tested = claims.evidence(self.claims, tables, self.results)

    # --- one number ---

    def gap(self, table: str, setting: str, score: str, better: str, worse: str) -> str:
        """By how much a method is better than another one: "6.1 (2.4 to 9.8; 12)", with the interval and the seeds.

        It is bold if it is a claim of the paper and significant.
        """
        runs, cells = self.results[table].get(setting, {}), self.tables[table].settings[setting].cells
        if better not in runs or worse not in runs:
            return "-"
        scored, looks = self.tables[table].scores[score], looks_of([cells[better], cells[worse]])
        answer = compare([runs[better]], [runs[worse]], scored, looks)
        if math.isnan(answer.gap.value):
            return "-"
        digits = max(scored.digits, 1)
        value, low, high = (f"{x:.{digits}f}" for x in (answer.gap.value, answer.gap.low, answer.gap.high))
        if not answer.seeds:
            return f"{value} (too few seeds)"
        if answer.gap.low == answer.gap.high:
            return f"{value} (the same in {answer.seeds} seeds: no test)"
        bound = ", a bound" if "a bound" in answer.text else ""
        significant = self.word(table, setting, score, better, worse) in ("holds", "fails")
        return f"{f'**{value}**' if significant else value} ({low} to {high}; {answer.seeds}{bound})"

    def word(self, *comparison: str) -> str:
        """The answer to a claim in a setting: "holds", "fails", "equal", "open" or "not run"."""
        table, setting, score, better, worse = comparison
        for claim, answers in zip(self.claims, self.tested, strict=True):
            if (claim.table, claim.score, claim.better, claim.worse) == (table, score, better, worse):
                if setting in claim.settings:
                    return claims.word(answers.get(setting))
        return "open"

    def mean(self, table: str, setting: str, score: str, method: str, spread: bool = False) -> str:
        """The mean of a score over all seeds: "50", "98.51 ± 0.06", or ">300" if a run did not reach the target."""
        runs, scored = self.results[table].get(setting, {}).get(method, {}), self.tables[table].scores[score]
        values = values_of(scored, runs)
        if not values:
            return "-"
        if np.isinf(values).any():
            return f">{min(scored.within(run.rounds) for run in runs.values())}"
        deviation = f" ± {np.std(values, ddof=1):.{scored.digits}f}" if spread and len(values) > 1 else ""
        return f"{np.mean(values):.{scored.digits}f}{deviation}"

    def one(self, table: str, setting: str, score: str, method: str, seed: int = 0) -> str:
        """The score of one seed."""
        scored = self.tables[table].scores[score]
        return f"{scored(self.results[table][setting][method][seed].series):.{scored.digits}f}"

    # --- a table ---

    def means(
        self, table: str, score: str, settings: Sequence[str], methods: Sequence[str], spread: bool = False
    ) -> str:
        """The means over all seeds, with the published numbers in parentheses, and the numbers of seeds."""
        lines = []
        for setting in settings:
            printed = self.tables[table].settings[setting].printed.get(score, {})
            row = [
                self.mean(table, setting, score, method, spread)
                + (f" ({printed[method].text})" if method in printed else "")
                for method in methods
            ]
            seeds = [len(self.results[table].get(setting, {}).get(method, {})) for method in methods]
            several = ", ".join(map(str, seeds)) if len(set(seeds)) > 1 else seeds[0]
            lines.append([setting, *row, several])
        return markdown.table(["", *methods, "seeds"], lines, "l" + "r" * len(methods) + "l")

    def gaps(
        self, table: str, score: str, settings: Sequence[str], better: str | Sequence[str], worse: Sequence[str]
    ) -> str:
        """How much a method is better than others, a row for each setting; or a row for each method in ``better``."""
        one = isinstance(better, str)
        rows = [
            [setting if one else method, *(self.gap(table, setting, score, method, other) for other in worse)]
            for setting, method in itertools.product(settings, [better] if isinstance(better, str) else better)
        ]
        return markdown.table([f"{better} against" if one else "against", *worse], rows, "l" * (len(worse) + 1))

    def claims_of(self, paper: str) -> str:
        """The claims of a paper with their verdicts, and a line about those that have not been run."""
        rows = [row for name, _, row in _rows(self.claims, self.tested) if name == paper]
        table = markdown.table(["claim", "whose data", "verdict", "evidence"], rows, "llll")
        absent: dict[tuple[str, str], dict[str, None]] = {}
        for claim, answers in zip(self.claims, self.tested, strict=True):
            if claim.paper.startswith(paper) and not answers:
                where = f"{claim.paper.partition(', ')[2]} on {claim.data.replace('stand-in:', 'the stand-in')}"
                absent.setdefault((where, claim.better), {}).update({claim.worse: None} if claim.worse else {})
        shown = [
            f"{where} ({better}{' over ' if worse else ''}{', '.join(worse)})"
            for (where, better), worse in absent.items()
        ]
        return table + (f"\n\nThese claims have not been run: {'; '.join(shown)}." if shown else "")

    def headlines(self) -> str:
        """The headline claims with their verdicts, also those that have not been run."""
        rows = [[name, *row] for name, first, row in _rows(self.claims, self.tested, absent=True) if first]
        return markdown.table(["paper", "claim", "whose data", "verdict", "evidence"], rows, "lllll")

    def counted(self) -> str:
        """The numbers of comparisons with each answer."""
        return claims.counted(self.claims, self.tested)

    # --- known results ---

    def known(self, table: str) -> str:
        """The printed numbers of a table that have been run with two seeds or more, beside ours.

        Ours is the mean with the interval in which the printed number is expected, and the seeds.
        """
        rows = []
        for name, setting, score, method, values in self._known(table):
            printed, scored = setting.printed[score][method], self.tables[table].scores[score]
            half, same = half_width(values, printed), agrees(values, printed)
            interval = (f"{np.mean(values) + side * half:.{scored.digits}f}" for side in (-1, 1))
            reached = f" ({' to '.join(interval)}; {len(values)})" if np.isfinite(values).all() else ""
            hours = sum(run.seconds / run.together for run in self.results[table][name][method].values()) / 3600
            what = f"{method}, {score}" if len(setting.printed) > 1 else method
            ours, why = self.mean(table, name, score, method) + reached, "" if same else setting.why or "not known"
            rows.append([name, what, printed.text, ours, "yes" if same else "no", why, f"{hours:.2f}"])
        columns = ["setting", "method", "printed", "ours", "agrees", "why not", "hours"]
        if not rows:
            return "Not run yet."
        command = (
            f'python -m experiments.tables run {table}{" --tune" * bool(self.tables[table].tune)} --rows "SETTING"'
        )
        link = f"[All runs](../experiments/results/{table}.md). The command of a row is `{command}`."
        return f"{markdown.table(columns, rows, 'llllllr')}\n\n{link}"

    def agreeing(self, *names: str) -> str:
        """How many of the printed numbers of some tables that were run agree: "9 of 12"."""
        found = [
            agrees(values, setting.printed[score][method])
            for table in names
            for _, setting, score, method, values in self._known(table)
        ]
        return f"{sum(found)} of {len(found)}"

    def _known(self, table: str) -> Iterator[tuple[str, Setting, str, str, list[float]]]:
        """Yields (name of the setting, setting, score, method, our values) of the printed numbers that were run."""
        for name, setting in self.tables[table].settings.items():
            for score, printed in setting.printed.items():
                for method in printed:
                    values = values_of(
                        self.tables[table].scores[score], self.results[table].get(name, {}).get(method, {})
                    )
                    if len(values) > 1:
                        yield name, setting, score, method, values

    # --- all papers ---

    def cells(self) -> str:
        """The numbers of cells by paper."""
        return report.coverage(list(self.tables.values()), self.results)


def functions_of(experiments: Path = EXPERIMENTS) -> dict[str, Callable[..., Any]]:
    """Returns the functions by name. experiments: the folder of tables and results."""
    return {
        name: getattr(made, name)
        for made in (Benchmarks(experiments), Evidence(experiments))
        for name, value in vars(type(made)).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def _rows(
    claimed: Sequence[claims.Claim], tested: Sequence[claims.Tested], absent: bool = False
) -> Iterator[tuple[str, bool, list[str]]]:
    """Yields (paper, whether it is a headline, row of a table). A claim about several methods is one row.

    absent: also the claims that have not been run.
    """

    def same(pair: tuple[claims.Claim, claims.Tested]) -> tuple[str, ...]:
        claim = pair[0]
        return claim.paper, claim.data, claim.table, claim.claim

    for (paper, data, table, text), group in itertools.groupby(zip(claimed, tested, strict=True), same):
        pairs = list(group)
        if not absent and not any(answers for _, answers in pairs):
            continue
        words = [(claim.worse, claims.verdict(claim, answers)) for claim, answers in pairs]
        verdict = "; ".join(f"vs {worse}: {word}" for worse, word in words) if len(pairs) > 1 else words[0][1]
        name, _, where = paper.partition(", ")
        linked = f"[{where}](../experiments/results/{table}.md)" if any(each for _, each in pairs) else where
        first = pairs[0][0]
        others = claims.others([claim.worse for claim, _ in pairs])
        data = data if first.kind == "stand-in" else f"the paper's: {data}"
        verdict += " (stand-in)" * (first.kind == "stand-in")
        yield name, first.headline, [text.replace("{worse}", others), data, verdict, linked]


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
