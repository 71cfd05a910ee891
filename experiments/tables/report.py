"""Writes pages with our numbers beside those of the papers: tables, curves, and the order of the methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments import markdown
from experiments.tables import claims
from experiments.tables.claims import Claim, Results
from experiments.tables.comparison import (
    BETTER,
    EQUAL,
    FIRST,
    OPEN,
    WORDS,
    WORSE,
    Verdict,
    compare,
    difference,
    looks_of,
    values_of,
)
from experiments.tables.papers import SCALES, Cell, Printed, Score, Setting, Table
from experiments.tables.pictures import draw, draw_label_mixes, published_marks
from experiments.tables.results import Result, read_results, summary
from experiments.tables.tuning import Tuned, best_of, read_tuned, tuning_score

PRINTED_OR_NOT = (
    "claims that the paper's numbers show",
    "other claims (settings of our own, and claims of the paper's text that its numbers do not show)",
)
ENDED_EARLY = " A run that reached its target ended in that round, before the number of rounds in its command."
COMMAND = "python -m experiments.tables"


# --- which results exist ----------------------------------------------------------------------------------------------


def results_of(table: Table, folder: Path) -> Results:
    """Returns all results of a table, for the settings that have results."""
    results = {
        setting.name: {m: runs for m, cell in setting.cells.items() if (runs := read_results(folder / cell.file))}
        for setting in table.settings.values()
    }
    return {name: methods for name, methods in results.items() if methods}


def has_results(table: Table, folder: Path) -> bool:
    return any((folder / cell.file).exists() for setting in table.settings.values() for cell in setting.cells.values())


def folder_with_results(table: Table, folders: Sequence[Path]) -> Path:
    """Returns the first folder that has results of the table, or the last folder if none has."""
    return next((folder for folder in folders if has_results(table, folder)), folders[-1])


def status(table: Table, ours: Results) -> str:
    """Returns "complete", "12 of 30 cells, 3 in part", or "not run"."""
    cells = sum(len(setting.cells) for setting in table.settings.values())
    begun = [(table.settings[name].cells[m], runs) for name, methods in ours.items() for m, runs in methods.items()]
    done = sum(complete(cell, runs) for cell, runs in begun)
    part = f", {len(begun) - done} in part" if done < len(begun) else ""
    return "complete" if done == cells else f"{done} of {cells} cells{part}" if begun else "not run"


def complete(cell: Cell, runs: Mapping[int, Result]) -> bool:
    """Whether the cell has all seeds with all rounds."""
    done = [run for run in runs.values() if run.reached or run.rounds >= cell.options["rounds"]]
    return len(done) >= max(cell.seeds, len(runs))


def listing(tables: Sequence[Table], folders: Sequence[Path]) -> str:
    """Returns one line per table."""
    width = max(len(table.name) for table in tables)
    lines = [f"{'table':{width}}  {'results':26}  what"]
    for table in tables:
        ours = results_of(table, folder_with_results(table, folders))
        lines.append(f"{table.name:{width}}  {status(table, ours):26}  {table.title}")
    return "\n".join(lines)


# --- one table --------------------------------------------------------------------------------------------------------


def write_page(table: Table, folder: Path) -> list[Path]:
    """Writes <table>.md and its plots from the results in the folder. Returns their paths."""
    file, ours = folder / f"{table.name}.md", results_of(table, folder)
    curves = file.with_suffix(".png")
    pictures = [curves] if draw(table, ours, curves) else []
    pictures += draw_label_mixes(table, ours, folder)
    file.write_text(page(table, folder, ours, pictures))
    return [file, *pictures]


def page(table: Table, folder: Path, ours: Results, pictures: Sequence[Path]) -> str:
    """Returns the results in the folder as Markdown, with links to the plots."""
    return "\n".join(_page(table, folder, ours, pictures)) + "\n"


def _page(table: Table, folder: Path, ours: Results, pictures: Sequence[Path]) -> Iterator[str]:
    yield from (f"# {table.paper}: {table.title}", "", table.note.strip())
    for picture in pictures:
        mixes = picture.stem.removeprefix(table.name.split("/")[-1]).replace("-", " ").strip()
        what = mixes or f"{table.picture} against rounds, for each method and setting"
        yield from ("", f"![{what}]({picture.name})")
    if pictures:
        yield from ("", *_caption(table, ours))
    for score in table.scores.values():
        shown = [s for s in table.settings.values() if _has(s, score) and _scored(score, ours.get(s.name, {}))]
        if shown:
            yield from ("", f"## {score.name}", "")
            yield _comparison(table, score, shown, ours)
    yield from ("", *_legend(table, ours))
    verdicts = list(orderings(table, ours))
    if verdicts:
        yield from (
            "", "## The order of the methods", "", "The comparisons of this page are not corrected for their number. "
            "[The claims](../README.md) are: a comparison that holds here may be open there.", "",
            *_verdict_lines(table, verdicts),
        )  # fmt: skip
    yield from ("", "## How each cell was run", "", *_runs(table, folder, ours))
    if missing := _missing(table, ours):
        yield from ("", "## Not run", "", *_not_run(missing))
    report, run = (f"`{COMMAND} {command} {table.name}`" for command in ("report", "run"))
    yield from ("", f"{report} makes this page from the JSONL files in its folder. {run} runs the table.")


def _has(setting: Setting, score: Score) -> bool:
    """Whether the setting is about this score: one that is printed, or the target at which its runs end."""
    targets = {cell.until.name for cell in setting.cells.values() if cell.until}
    if setting.printed:
        return score.name in setting.printed
    return score.take != "rounds_to" or not targets or score.name in targets


def _scored(score: Score, methods: Mapping[str, Mapping[int, Result]]) -> bool:
    """Whether at least one run has this score. A run that did not reach its target counts: its score is infinity."""
    return any(not math.isnan(value) for runs in methods.values() for value in values_of(score, runs))


def _caption(table: Table, ours: Results) -> Iterator[str]:
    several = any(len(runs) > 1 for methods in ours.values() for runs in methods.values())
    band = " The band is ± standard deviation over seeds, as in the table." if several else ""
    yield f"Lines are means over seeds. If there are many rounds, they are also means over neighbouring rounds.{band}"
    marks = [published_marks(table, name, methods, 1.0) for name, methods in ours.items()]
    points = [at for of in marks for each in of.values() for at, _ in each]
    if any(at is not None for at in points):
        yield "○ is the published number of rounds to the target. ● is ours, the mean over the seeds that reached it."
    if None in points:
        yield "◁ at the right edge is the published number. It does not belong to a round."


def _comparison(table: Table, score: Score, shown: Sequence[Setting], ours: Results) -> str:
    methods, lines = [m for m in table.methods if any(m in ours[setting.name] for setting in shown)], []
    for setting in shown:
        printed = setting.printed.get(score.name, {})
        values = {method: values_of(score, runs) for method, runs in ours[setting.name].items()}
        rows = {}
        if printed:
            rows["paper"] = [printed[m].text if m in printed else "-" for m in methods]
        rows["ours"] = [_ours(values[m], score, ours[setting.name][m]) if m in values else "-" for m in methods]
        if printed:
            rows["difference"] = [
                _difference_text(ours[setting.name][m], printed[m], score, setting.marks)
                if m in values and m in printed
                else "-"
                for m in methods
            ]
        lines += [[setting.name if n == 0 else "", what, *rows[what]] for n, what in enumerate(rows)]
    return markdown.table(["setting", "", *methods], lines, "ll" + "r" * len(methods))


def _ours(values: Sequence[float], score: Score, runs: Mapping[int, Result]) -> str:
    if score.take == "rounds_to" and all(map(math.isinf, values)):
        return f">{min(score.within(run.rounds) for run in runs.values())}"
    return summary(values, score.digits)


def _difference_text(runs: Mapping[int, Result], printed: Printed, score: Score, marks: bool) -> str:
    return " ".join(filter(None, difference(runs, printed, score, marks)))


def _legend(table: Table, ours: Results) -> Iterator[str]:
    seeds = sorted({len(runs) for methods in ours.values() for runs in methods.values()})
    own = [name for name in ours if any(cell.own_partitions for cell in table.settings[name].cells.values())]
    same = f"the partition is the same, except in {'; '.join(own)}." if own else "the partition is the same."
    same = "every seed has its own partition." if len(own) == len(ours) else same
    yield (
        f"Our numbers are mean ± standard deviation over seeds (number of seeds: {', '.join(map(str, seeds))}). A "
        f"number with one seed has no ±. Seeds differ in cohorts and initial models; {same} The "
        f"difference is our number minus the published number. {BETTER} (better) and {WORSE} (worse) mark differences "
        f"that are larger than the spread over seeds explains (95 %). {EQUAL} marks differences whose 95 % interval is "
        "within the margin of what counts as equal: a tenth of the published error rate, or of the published number of "
        f"rounds or loss. {OPEN} marks all others: they need more seeds. If the "
        "partition is the same, the spread does not include the effect of another partition. "
        '">200" means that the target was not reached within 200 rounds. '
        '"(2 of 3)" marks the mean of the two seeds that reached the target.'
    )


def _runs(table: Table, folder: Path, ours: Results) -> Iterator[str]:
    rows, commands, tunings = [], [], []
    for name, methods in ours.items():
        for method, runs in methods.items():
            # The seconds of a run are those of its whole sweep.
            minutes = sum(run.seconds / run.together for run in runs.values()) / 60
            rounds = "-".join(dict.fromkeys(str(f([run.rounds for run in runs.values()])) for f in (min, max)))
            about = [", ".join(sorted({getattr(run, what) or "?" for run in runs.values()}))
                     for what in ("hardware", "commit", "date")]  # fmt: skip
            seeds = ", ".join(map(str, sorted(runs)))
            rows.append([name, method, seeds, rounds, f"{minutes:.1f}", *about])
            commands.append(next(iter(runs.values())).command)
            cell = table.settings[name].cells[method]
            if tuned := read_tuned(cell, folder):
                share, whole = tuned[0].validation, cell.options["rounds"]
                on = f", on {share:.0%} of the training examples" if share else ""
                chosen = best_of(tuned, tuning_score(table))
                best = ", ".join(_chosen(option, tuned, chosen[option]) for option in chosen)
                tunings.append(
                    f"- {name}, {method}: {best} (best of {len(tuned)} combinations after {tuned[0].rounds} of "
                    f"{whole} rounds{on}, another seed than those reported)"
                )
    columns = ["setting", "method", "seeds", "rounds", "minutes", "hardware", "commit", "date"]
    yield markdown.table(columns, rows, "lllrrlll")
    every = [run for methods in ours.values() for runs in methods.values() for run in runs.values()]
    versions = dict.fromkeys(", ".join(f"{name} {number}" for name, number in run.versions.items()) for run in every)
    yield from ("", f"Versions: {'; '.join(versions)}." + (ENDED_EARLY if any(run.reached for run in every) else ""))
    if tunings:
        yield from ("", "Tuned:", "", *tunings)
    yield from ("", "<details><summary>The command of each cell, for its first seed</summary>", "", "```")
    yield from commands
    yield from ("```", "", "</details>")


def _chosen(option: str, tuned: Sequence[Tuned], value: float) -> str:
    """The value that was chosen, its grid, and whether it is at an edge: "lr 0.1 (of 0.01, 0.1: at its edge)"."""
    grid = sorted({each.values[option] for each in tuned})
    edge = ": at its edge" if len(grid) > 1 and value in (grid[0], grid[-1]) else ""
    return f"{option} {value:g} (of {', '.join(f'{each:g}' for each in grid)}{edge})"


def _missing(table: Table, ours: Results) -> dict[str, list[str]]:
    """Returns the reasons why runs are missing, each with the names of the settings that it applies to.

    If a setting was run in part, its name is followed by the missing methods and seeds.
    """
    reasons: dict[str, list[str]] = {}
    for setting in table.settings.values():
        runs = ours.get(setting.name, {})
        missing = [method for method in setting.cells if method not in runs]
        missing += [
            f"{method}: {len(runs[method])} of {cell.seeds} seeds"
            for method, cell in setting.cells.items()
            if method in runs and len(runs[method]) < cell.seeds
        ]
        if missing:
            what = f"{setting.name} ({', '.join(missing)})" if runs else setting.name
            reasons.setdefault(setting.needs or "only time", []).append(what)
    return reasons


def _not_run(missing: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"- {'; '.join(settings)}: {why}" for why, settings in missing.items()]


# --- orderings --------------------------------------------------------------------------------------------------------


def orderings(table: Table, ours: Results) -> Iterator[Verdict]:
    """Yields one verdict per claim "method a is better than b", setting and score, if both methods were run.

    The comparisons are not corrected for their number. `claims.evidence` corrects those of the papers' claims.
    """
    pairs = dict.fromkeys(pair for chain in table.claims for pair in itertools.pairwise(chain))
    for score in table.scores.values():
        for name, methods in ours.items():
            setting = table.settings[name]
            if not score.sign or not _has(setting, score):
                continue
            for a, b in pairs:
                if a in methods and b in methods:
                    order = _printed_order(setting.printed.get(score.name, {}), a, b, score)
                    looks = looks_of([setting.cells[a], setting.cells[b]])
                    gap = setting.published_gap(score.name, a, b)
                    answer = compare([methods[a]], [methods[b]], score, looks, gap)
                    decided = answer.word in WORDS[:2]
                    yield Verdict(name, score.name, a, b, order, looks, answer, decided)


def _printed_order(printed: Mapping[str, Printed], a: str, b: str, score: Score) -> str:
    if a not in printed or b not in printed:
        return "-"
    x, y = score.sign * printed[a].value, score.sign * printed[b].value
    return "yes" if x > y else "no" if x < y else "equal"


def _counts(verdicts: Iterable[Verdict]) -> list[int]:
    """Returns the numbers of claims with each of `WORDS`."""
    words = [verdict.word for verdict in verdicts]
    return [words.count(word) for word in WORDS]


def _two_counts(verdicts: Sequence[Verdict]) -> list[list[int]]:
    """Returns the counts for the claims that the paper's numbers show, and for all other claims."""
    return [_counts(v for v in verdicts if (v.printed == "yes") == agrees) for agrees in (True, False)]


def _verdict_lines(table: Table, verdicts: Sequence[Verdict]) -> Iterator[str]:
    for what, counts in zip(PRINTED_OR_NOT, _two_counts(verdicts), strict=True):
        if sum(counts):
            counted = ", ".join(f"{word}: {number}" for word, number in zip(WORDS, counts, strict=True))
            yield f"- {what}: {counted}."
    if held := _by_data_set(table, verdicts):
        yield f"- those that hold, by data set: {held}."
    tested = [verdict for verdict in verdicts if verdict.interval]
    if tested:
        level = " or ".join(dict.fromkeys(f"{100 * verdict.looks.confidence:g} %" for verdict in tested))
        columns = ["setting", "score", "claim", "holds in the published numbers", "holds in ours"]
        rows = [[v.setting, v.score, f"{v.a} better than {v.b}", v.printed, v.word, v.answer.text] for v in tested]
        yield from ("", *markdown.table([*columns, f"better by, {level} interval"], rows, "llllll").splitlines())
    untested: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if not verdict.interval:
            line = untested.setdefault((verdict.setting, verdict.score), [])
            line.append(f"{verdict.a} over {verdict.b}: {verdict.answer.text}")
    if untested:
        yield from (
            "",
            f"The following claims have no interval, because the methods share fewer than {FIRST} seeds (or fewer than "
            "the table fixed beforehand), or because no t test is possible. The numbers say by how much the first "
            "method is better with the same seeds:",
            "",
        )
        yield from (f"- {setting}, {score}: {'; '.join(lines)}" for (setting, score), lines in untested.items())


def _by_data_set(table: Table, verdicts: Sequence[Verdict]) -> str:
    """Returns the numbers of claims that hold on each data set, if the table has several: "mnist 5, synthetic 3"."""
    data_sets: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        name = table.settings[verdict.setting].cells[verdict.a].options["dataset"].partition(":")[0]
        data_sets.setdefault(name, []).append(verdict)
    counts = {name: sum(v.word == WORDS[0] for v in of) for name, of in data_sets.items()}
    if len(counts) < 2 or not any(counts.values()):
        return ""
    return ", ".join(f"{name} {number}" for name, number in counts.items())


# --- all tables -------------------------------------------------------------------------------------------------------


def write_index(tables: Sequence[Table], folder: Path, claimed: Sequence[Claim] = ()) -> list[Path]:
    """Writes README.md, a page about all claims and tables, and orderings.md. Returns their paths."""
    index, orders = folder / "README.md", folder / "orderings.md"
    results = [(table, results_of(table, folder)) for table in tables]
    everything = [(table, ours, list(orderings(table, ours))) for table, ours in results]
    tested = claims.evidence(claimed, tables, {table.name: ours for table, ours in results})
    index.write_text("\n".join([*claims.section(claimed, tested), *_index(everything)]) + "\n")
    orders.write_text("\n".join(_orderings(everything)) + "\n")
    return [index, orders]


def _index(everything: Sequence[tuple[Table, Results, list[Verdict]]]) -> Iterator[str]:
    yield from ("## All tables", "")
    yield (
        f"`{COMMAND} report --all` makes this page from the JSONL files in these folders. There is one file for each "
        "method in each setting, with one line for each seed. The page of a table has the commands, times, hardware "
        "and commits of its runs."
    )
    yield (
        '\nThe column "run" counts cells. A cell is one method in one setting. It has been run if every '
        'seed has all its rounds or has reached the target. "In part" means that seeds or rounds are missing. Other '
        "cells than those of the next table have been run, too: figures without printed numbers, other data sets that "
        "stand in for those that are not available here, and settings of our own."
    )
    results = {table.name: ours for table, ours, _ in everything}
    yield from ("", coverage([table for table, *_ in everything], results))
    yield (
        f'\nThe column "difference" compares our numbers with the published ones. It counts the numbers that are '
        f"{BETTER} better, {WORSE} worse, {EQUAL} equal within a margin, and {OPEN} undecided with these seeds. "
        "Numbers with one seed are not counted."
    )
    yield (
        '\nThe columns "orders" are about claims of the form "method a is better than method b". Each has four '
        "counts: claims that hold, that do not hold, of which the methods are equal within a margin, and that are "
        f'open. The column "orders, published" counts '
        f"{PRINTED_OR_NOT[0]}. "
        f'The column "orders, others" counts {PRINTED_OR_NOT[1]}.'
    )
    columns = ["table", "content", "run", "difference", "orders, published", "orders, others", "needed for the rest"]
    rows = []
    for table, ours, verdicts in everything:
        linked = f"[{table.paper}]({table.name}.md)" if ours else table.paper
        orders = [" / ".join(map(str, counts)) if sum(counts) else "-" for counts in _two_counts(verdicts)]
        needed = "; ".join(sorted(_missing(table, ours)))
        rows.append([linked, table.title, status(table, ours), _marks_of(table, ours), *orders, needed])
    yield from ("", markdown.table(columns, rows, "lllllll"))
    yield from ("", "[orderings.md](orderings.md) lists the claims that were tested.")


def coverage(tables: Sequence[Table], results: Mapping[str, Results]) -> str:
    """Returns a table of the cells for which one of the five papers prints a number. A cell that several tables share
    counts once.

    results: those of each table.
    """
    counts: dict[str, dict[Path, int]] = {}
    for table in (each for each in tables if not each.known):
        for setting in table.settings.values():
            for method in {method for numbers in setting.printed.values() for method in numbers}:
                seeds = len(results[table.name].get(setting.name, {}).get(method, {})) * (setting.scale == SCALES[0])
                of_paper = counts.setdefault(table.paper.partition(" (")[0].partition(",")[0], {})
                file = setting.cells[method].file
                of_paper[file] = max(seeds, of_paper.get(file, 0))
    numbers = {paper: [sum(n >= least for n in of.values()) for least in (0, 1, FIRST)] for paper, of in counts.items()}
    numbers["all"] = [sum(column) for column in zip([0] * 3, *numbers.values(), strict=True)]
    columns = ["paper", "cells with a printed number", "run at full scale", f"with {FIRST} seeds or more"]
    return markdown.table(columns, [[paper, *row] for paper, row in numbers.items()])


def _marks_of(table: Table, ours: Results) -> str:
    """Returns the numbers of each mark as text, for example "▲ 2, ≈ 10", or "-" if there are no marks."""
    marked = [
        difference(ours[name][method], number, table.scores[score], table.settings[name].marks)[1]
        for name in ours
        for score, printed in table.settings[name].printed.items()
        for method, number in printed.items()
        if method in ours[name]
    ]
    counts = [f"{mark} {marked.count(mark)}" for mark in (BETTER, EQUAL, OPEN, WORSE) if mark in marked]
    return ", ".join(counts) or "-"


def _orderings(everything: Sequence[tuple[Table, Results, list[Verdict]]]) -> Iterator[str]:
    yield from ("# Do the papers' rankings hold in our results?", "")
    yield (
        'A claim is "method a is better than b". Each claim of a paper is tested in every setting that was run, with '
        "the differences between runs of the same seed. It holds if the confidence interval of their mean (a t "
        "interval over seeds) is above zero. It does not hold if the interval is below zero. The methods are equal if "
        "the interval includes zero and is within the margin. Otherwise the claim is open, for example if too few "
        "seeds are shared. The comparisons of this page are not corrected for their number. [The claims](README.md) "
        "are. Most intervals are for one partition, and with another partition the order may be different. In settings "
        f"with own partitions, every seed has another partition.\n\n{claims.THE_RULE}"
    )
    by_table, seen = [], set()
    for table, _, verdicts in everything:
        new = []
        for verdict in verdicts:
            cells = table.settings[verdict.setting].cells
            key = cells[verdict.a].file, cells[verdict.b].file, table.scores[verdict.score]._replace(name="")
            if key not in seen:  # otherwise an earlier table has the same claim about the same runs
                seen.add(key)
                new.append(verdict)
        by_table.append((table, new))
    yield from ("", f'"Published" counts {PRINTED_OR_NOT[0]}. "Others" counts {PRINTED_OR_NOT[1]}.', "")
    columns = [f"{word}, {where}" for where in ("published", "others") for word in WORDS]
    by_table = [(table, verdicts) for table, verdicts in by_table if verdicts]
    rows = [[table.paper, *itertools.chain(*_two_counts(verdicts))] for table, verdicts in by_table]
    yield markdown.table(["table", *columns], rows)
    for table, verdicts in by_table:
        yield from ("", f"## {table.paper}", "", *_verdict_lines(table, verdicts))
