"""Our numbers beside the papers': tables, curves, and whether the methods come in the papers' order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_drift import plots
from fedjax_drift.experiment import Result, best_of, results, summary, tuned, tuning_score
from fedjax_drift.papers import Cell, Printed, Score, Series, Setting, Table, last_number, names, read_all, slug

CONFIDENCE = 0.95
WORDS = ("holds", "does not hold", "open")
INITIALS = ("auc", "cka", "kl", "lp")  # among what is drawn
BETTER, WORSE, ALIKE = "▲", "▼", "≈"
Found = Mapping[str, Mapping[str, Mapping[int, Result]]]  # setting -> method -> seed -> result


class Verdict(NamedTuple):
    """Whether method a is better than b in a setting, as the paper says."""

    setting: str
    score: str
    a: str
    b: str
    word: str  # "holds", "does not hold", "open"
    text: str  # the difference and its confidence interval


# --- what there is ----------------------------------------------------------------------------------------------------


def found(table: Table, place: Path) -> Found:
    """All results of a table, for the settings that have any."""
    everything = {
        setting.name: {method: runs for method, cell in setting.cells.items() if (runs := results(place / cell.file))}
        for setting in table.settings.values()
    }
    return {name: methods for name, methods in everything.items() if methods}


def has_results(table: Table, place: Path) -> bool:
    return any((place / cell.file).exists() for setting in table.settings.values() for cell in setting.cells.values())


def where(table: Table, places: Sequence[Path]) -> Path:
    """The first folder that has results of the table, else the last."""
    return next((place for place in places if has_results(table, place)), places[-1])


def status(table: Table, ours: Found) -> str:
    """ "complete", "12 of 30 cells", or "not run"."""
    cells = sum(len(setting.cells) for setting in table.settings.values())
    done = sum(
        complete(table.settings[name].cells[method], runs)
        for name, methods in ours.items()
        for method, runs in methods.items()
    )
    return "complete" if done == cells else f"{done} of {cells} cells" if done else "not run"


def complete(cell: Cell, runs: Mapping[int, Result]) -> bool:
    """Whether the runs have all the rounds that they were to have."""
    return all(run.reached or run.rounds >= cell.options["rounds"] for run in runs.values())


def listing(place: Path, outputs: Sequence[Path]) -> str:
    """One line a table."""
    tables = read_all(place, names(place))
    width = max(len(table.name) for table in tables)
    lines = [f"{'table':{width}}  {'results':16}  what"]
    for table in tables:
        lines.append(f"{table.name:{width}}  {status(table, found(table, where(table, outputs))):16}  {table.title}")
    return "\n".join(lines)


# --- one table --------------------------------------------------------------------------------------------------------


def write(table: Table, place: Path) -> list[Path]:
    """Writes <table>.md and its pictures from the results in ``place``; returns their paths."""
    where, ours = place / f"{table.name}.md", found(table, place)
    drawn = {place / f"{table.name}.png": draw(table, ours, place / f"{table.name}.png")}
    drawn |= {path: True for path in draw_label_mixes(table, ours, place)}
    pictures = [path for path, there in drawn.items() if there]
    where.write_text(page(table, place, ours, pictures))
    return [where, *pictures]


def page(table: Table, place: Path, ours: Found, pictures: Sequence[Path]) -> str:
    """The results in ``place`` as markdown, with pictures that lie beside it."""
    return "\n".join(_page(table, place, ours, pictures)) + "\n"


def _page(table: Table, place: Path, ours: Found, pictures: Sequence[Path]) -> Iterator[str]:
    yield from (f"# {table.paper}: {table.title}", "", table.note.strip())
    for picture in pictures:
        mixes = picture.stem.removeprefix(table.name.split("/")[-1]).replace("-", " ").strip()
        what = mixes or f"{table.picture} against rounds, for each method and setting"
        yield from ("", f"![{what}]({picture.name})")
    for score in table.scores.values():
        shown = [setting for setting in table.settings.values() if setting.name in ours and _has(setting, score)]
        if shown:
            yield from ("", f"## {score.name}", "")
            yield from _comparison(table, score, shown, ours)
    yield from ("", *_legend(ours))
    verdicts = list(orderings(table, ours))
    if verdicts:
        yield from ("", "## The paper's order", "", *_verdict_lines(verdicts))
    yield from ("", "## How each cell was run", "", *_runs(table, place, ours))
    if missing := _missing(table, ours):
        yield from ("", "## Not run", "", *_not_run(missing))
    made, run = f"`fedjax-drift report {table.name}`", f"`fedjax-drift experiment {table.name}`"
    yield from ("", f"This page is made by {made} from the JSONL beside it; {run} runs it.")


def _has(setting: Setting, score: Score) -> bool:
    return not setting.printed or score.name in setting.printed


def _comparison(table: Table, score: Score, shown: Sequence[Setting], ours: Found) -> Iterator[str]:
    methods = [m for m in table.methods if any(m in ours[setting.name] for setting in shown)]
    yield "| setting | | " + " | ".join(methods) + " |"
    yield "|---|---|" + "---:|" * len(methods)
    for setting in shown:
        printed = setting.printed.get(score.name, {})
        values = {method: _values(score, runs) for method, runs in ours[setting.name].items()}
        rows = {}
        if printed:
            rows["paper"] = [printed[m].text if m in printed else "-" for m in methods]
        rows["ours"] = [_ours(values[m], score, ours[setting.name][m]) if m in values else "-" for m in methods]
        if printed:
            rows["difference"] = [
                difference(ours[setting.name][m], printed[m], score) if m in values and m in printed else "-"
                for m in methods
            ]
        for number, (what, cells) in enumerate(rows.items()):
            yield f"| {setting.name if number == 0 else ''} | {what} | " + " | ".join(cells) + " |"


def _values(score: Score, runs: Mapping[int, Result]) -> list[float]:
    return [score(runs[seed].series) for seed in sorted(runs)]


def _ours(values: Sequence[float], score: Score, runs: Mapping[int, Result]) -> str:
    if score.take == "rounds_to" and all(map(math.isinf, values)):
        return f">{min(run.rounds for run in runs.values())}"
    return summary(values, score.digits)


def difference(runs: Mapping[int, Result], printed: Printed, score: Score) -> str:
    """Ours less the paper's; ▲ and ▼: better and worse by more than two standard deviations, ≈: by less.

    Of a target: ▲ where the paper did not reach it, ▼ where no run of ours did in the paper's rounds. No mark where
    only some of our runs have the number.
    """
    values = _values(score, runs)
    known = [value for value in values if math.isfinite(value)]
    if not known:
        late = all(map(math.isinf, values)) and min(run.rounds for run in runs.values()) >= printed.value
        return f"{WORSE} not reached" if late else "-"
    if not math.isfinite(printed.value):
        return f"{BETTER} reached"
    gap = float(np.mean(known)) - printed.value
    own = float(np.var(known, ddof=1)) if len(known) > 1 else None
    spread = math.sqrt((own or 0.0) + (printed.std or 0.0) ** 2) if own is not None or printed.std else None
    mark = ""
    if spread is not None and score.sign and len(known) == len(values):
        mark = f" {ALIKE}" if abs(gap) <= 2 * spread else f" {BETTER if gap * score.sign > 0 else WORSE}"
    return f"{gap:+.{score.digits}f}{mark}"


def _legend(ours: Found) -> Iterator[str]:
    seeds = sorted({len(runs) for methods in ours.values() for runs in methods.values()})
    yield (
        f"Ours: mean ± standard deviation over seeds ({', '.join(map(str, seeds))} of them; one has no ±). Seeds are "
        "of cohorts and initial models, the partition is the same. Difference: ours less the paper's; "
        f"{BETTER} better, {WORSE} worse by more than two standard deviations (ours and the paper's together, where "
        f"there are any), {ALIKE} by less. >200: not within 200 rounds; (2 of 3): mean of the two seeds that have it."
    )


def _runs(table: Table, place: Path, ours: Found) -> Iterator[str]:
    yield "| setting | method | seeds | rounds | minutes | hardware | commit | date |"
    yield "|---|---|---|---:|---:|---|---|---|"
    commands, tunings = [], []
    for name, methods in ours.items():
        for method, runs in methods.items():
            # Seeds that ran side by side share their time.
            minutes = sum(run.seconds / run.together for run in runs.values()) / 60
            rounds = "-".join(dict.fromkeys(str(f([run.rounds for run in runs.values()])) for f in (min, max)))
            about = [", ".join(sorted({getattr(run, what) or "?" for run in runs.values()}))
                     for what in ("hardware", "commit", "date")]  # fmt: skip
            seeds = ", ".join(map(str, sorted(runs)))
            yield f"| {name} | {method} | {seeds} | {rounds} | {minutes:.1f} | " + " | ".join(about) + " |"
            commands.append(f"{next(iter(runs.values())).command}")
            cell = table.settings[name].cells[method]
            if tried := tuned(cell, place):
                best = ", ".join(f"{key} {value:g}" for key, value in best_of(tried, tuning_score(table)).items())
                tunings.append(
                    f"- {name}, {method}: {best} (best of {len(tried)} combinations after {tried[0].rounds} rounds, "
                    "another seed than those reported)"
                )
    if tunings:
        yield from ("", "Tuned:", "", *tunings)
    yield from ("", "<details><summary>The command of each, for its first seed</summary>", "", "```")
    yield from commands
    yield from ("```", "", "</details>")


def _missing(table: Table, ours: Found) -> dict[str, list[str]]:
    """Why something was not run -> the settings, with their methods where some were."""
    reasons: dict[str, list[str]] = {}
    for setting in table.settings.values():
        missing = [method for method in setting.cells if method not in ours.get(setting.name, {})]
        if missing:
            whole = len(missing) == len(setting.cells)
            what = setting.name if whole else f"{setting.name} ({', '.join(missing)})"
            reasons.setdefault(setting.needs or "not run yet", []).append(what)
    return reasons


def _not_run(missing: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"- {'; '.join(settings)}: {why}" for why, settings in missing.items()]


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(table: Table, ours: Found, path: Path) -> bool:
    """The curves of all settings that were run, with the paper's numbers where they are of what is drawn.

    False, and no picture, where no run has a number to draw.
    """
    scale = max((score.scale for score in table.scores.values() if score.of == table.picture), default=1.0)
    scale = 100.0 if "accuracy" in table.picture else scale
    shown = [method for method in table.methods if any(method in methods for methods in ours.values())]
    settings = []
    for name, methods in ours.items():
        curves = {
            method: [_curve(run, table.picture, scale) for run in methods.get(method, {}).values()] for method in shown
        }
        runs = {method: [curve for curve in of if curve[0]] for method, of in curves.items()}
        settings.append(plots.Compared(name, runs, _marks(table, name, ours[name], scale)))
    curves_of_all = (curve for setting in settings for curves in setting.runs.values() for curve in curves)
    if not any(math.isfinite(value) for _, values in curves_of_all for value in values):
        return False
    words = " ".join(word.upper() if word in INITIALS else word for word in table.picture.split("_"))
    plots.compared(settings, words[0].upper() + words[1:] + (" (%)" if scale == 100 else ""), path)
    return True


def draw_label_mixes(table: Table, ours: Found, place: Path) -> list[Path]:
    """A picture of the cohorts' labels for each setting, of the first seed of the method that the table names."""
    written = []
    for name, methods in ours.items():
        runs = methods.get(table.label_mix, {})
        first = next(iter(runs.values()), None)
        if first is not None and "label_mix" in first.series:
            history = [{"round": t, "label_mix": mix} for t, mix in zip(*first.series["label_mix"], strict=True)]
            written.append(place / f"{table.name}-label-mix-{slug(name)}.png")
            plots.label_mix(history, written[-1])
    return written


def _curve(run: Result, entry: str, scale: float) -> tuple[list[int], list[float]]:
    if entry not in run.series:
        return [], []
    rounds, values = run.series[entry]
    return list(rounds), [scale * last_number(value) for value in values]


def _marks(
    table: Table, setting: str, methods: Mapping[str, Mapping[int, Result]], scale: float
) -> dict[str, list[tuple[float | None, float]]]:
    """The paper's numbers that are points of our curves; none of a round that we did not get to."""
    last = max(run.rounds for runs in methods.values() for run in runs.values())
    marks: dict[str, list[tuple[float | None, float]]] = {}
    for name, printed in table.settings[setting].printed.items():
        score = table.scores[name]
        if score.of != table.picture or (score.take == "at" and score.round > last):
            continue
        for method, number in printed.items():
            if math.isfinite(number.value):
                point = {"rounds_to": (number.value, scale * score.target), "at": (score.round, number.value)}
                marks.setdefault(method, []).append(point.get(score.take, (None, number.value)))
    return marks


# --- orderings --------------------------------------------------------------------------------------------------------


def orderings(table: Table, ours: Found) -> Iterator[Verdict]:
    """What came of every claim that a method is better than another, in every setting and score that was run."""
    pairs = dict.fromkeys(pair for chain in table.claims for pair in itertools.pairwise(chain))
    for score in table.scores.values():
        for name, methods in ours.items():
            if not score.sign or not _has(table.settings[name], score):
                continue
            for a, b in pairs:
                if a in methods and b in methods:
                    yield Verdict(name, score.name, a, b, *compare(methods[a], methods[b], score))


def compare(a: Mapping[int, Result], b: Mapping[int, Result], score: Score) -> tuple[str, str]:
    """Whether a is better than b: a word, and the difference with its confidence interval.

    A t interval of the differences between runs of the same seed; where they share fewer than two, of two means with
    one variance. Both are scored over the rounds that all of these runs have. A target that was not reached in them
    counts as reached in the round after, which is too soon: it is then open whether that method is better. A run that
    lacks the score does not count.
    """
    most = min(run.rounds for run in (*a.values(), *b.values())) if score.take != "rounds_to" else 0
    x, y = (
        {seed: value for seed, run in runs.items() if not math.isnan(value := score(_up_to(run, most).series))}
        for runs in (a, b)
    )
    if not x or not y:
        return "open", "not scored"
    late = [any(map(math.isinf, values.values())) for values in (x, y)]
    if all(map(math.isinf, (*x.values(), *y.values()))):
        return "open", "neither got there"
    one, other = (
        {seed: runs[seed].rounds + 1.0 if math.isinf(value) else value for seed, value in values.items()}
        for runs, values in ((a, x), (b, y))
    )
    mean, error, df, how = _difference(one, other)
    digits = max(score.digits, 1)
    if not df:
        return "open", f"{score.sign * mean:+.{digits}f}, one seed: no interval"
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, df)) * error
    low, high = sorted((score.sign * (mean - half), score.sign * (mean + half)))
    better, worse = low > 0 and not late[0], high < 0 and not late[1]
    bound = " (a bound: not all got there)" if any(late) else ""
    text = f"{score.sign * mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}], {how}{bound}"
    return "holds" if better else "does not hold" if worse else "open", text


def _up_to(run: Result, most: int) -> Result:
    """The run's first ``most`` rounds; 0: all."""
    if not most or run.rounds == most:
        return run
    kept = {name: sum(t <= most for t in rounds) for name, (rounds, _) in run.series.items()}
    return run._replace(
        series={
            name: Series(rounds[: kept[name]], values[: kept[name]]) for name, (rounds, values) in run.series.items()
        }
    )


def _difference(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[float, float, int, str]:
    """Of a and b: its mean, the mean's standard error, degrees of freedom, of how many seeds."""
    shared = sorted(set(a) & set(b))
    if len(shared) > 1:
        gaps = np.array([a[seed] - b[seed] for seed in shared])
        return gaps.mean(), gaps.std(ddof=1) / math.sqrt(len(gaps)), len(gaps) - 1, f"{len(shared)} seeds"
    x, y = np.array(list(a.values())), np.array(list(b.values()))
    df, mean = len(x) + len(y) - 2, x.mean() - y.mean()
    variance = (((x - x.mean()) ** 2).sum() + ((y - y.mean()) ** 2).sum()) / max(df, 1)
    return mean, math.sqrt(variance * (1 / len(x) + 1 / len(y))), df, f"{len(x)} and {len(y)} seeds"


def _counts(verdicts: Sequence[Verdict]) -> list[int]:
    """How many hold, do not hold, are open."""
    return [sum(verdict.word == word for verdict in verdicts) for word in WORDS]


def _verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    counted = zip(WORDS, _counts(verdicts), strict=True)
    yield ", ".join(f"{word}: {number}" for word, number in counted) + f" (of {len(verdicts)})."
    yield from ("", "| setting | score | claim | | better by, 95 % interval |", "|---|---|---|---|---|")
    for verdict in verdicts:
        claim = f"{verdict.a} better than {verdict.b}"
        yield f"| {verdict.setting} | {verdict.score} | {claim} | {verdict.word} | {verdict.text} |"


# --- all tables -------------------------------------------------------------------------------------------------------


def write_index(tables: Sequence[Table], place: Path) -> list[Path]:
    """Writes README.md, the page of all tables, and orderings.md; returns their paths."""
    index, orders = place / "README.md", place / "orderings.md"
    everything = [(table, ours, list(orderings(table, ours))) for table in tables for ours in [found(table, place)]]
    index.write_text("\n".join(_index(everything)) + "\n")
    orders.write_text("\n".join(_orderings(everything)) + "\n")
    return [index, orders]


def _index(everything: Sequence[tuple[Table, Found, list[Verdict]]]) -> Iterator[str]:
    yield from ("# All tables of the five papers", "")
    yield (
        "Made by `fedjax-drift report --all` from the JSONL in these folders: a file for each method in each setting, "
        f"a line for each seed. Beside the paper's: how many are {BETTER} better, {ALIKE} alike, {WORSE} worse, "
        "by two standard deviations; those of a single seed are not counted. Orders: how many of the paper's claims "
        "that one method is better than another hold, do not hold, are open, in the settings that were run."
    )
    yield from (
        "",
        "| table | what | run | beside the paper's | orders | not run, because it needs |",
        "|---|---|---|---|---|---|",
    )
    for table, ours, verdicts in everything:
        linked = f"[{table.paper}]({table.name}.md)" if ours else table.paper
        orders = " / ".join(map(str, _counts(verdicts))) if verdicts else "-"
        shown = [status(table, ours), _marks_of(table, ours), orders, "; ".join(sorted(_missing(table, ours)))]
        yield f"| {linked} | {table.title} | " + " | ".join(shown) + " |"
    yield from ("", "Which of the papers' orderings hold in these results: [orderings.md](orderings.md).")


def _marks_of(table: Table, ours: Found) -> str:
    """How many numbers are better, alike, worse."""
    marked = [
        difference(ours[name][method], number, table.scores[score])[-1]
        for name in ours
        for score, printed in table.settings[name].printed.items()
        for method, number in printed.items()
        if method in ours[name]
    ]
    counts = [f"{mark} {marked.count(mark)}" for mark in (BETTER, ALIKE, WORSE) if mark in marked]
    return ", ".join(counts) or "-"


def _orderings(everything: Sequence[tuple[Table, Found, list[Verdict]]]) -> Iterator[str]:
    yield from ("# The papers' orderings in our results", "")
    yield (
        'For every claim "method a is better than b" of a paper, in every setting that was run: it holds if the 95 % '
        "confidence interval of the difference is above zero (a t interval over seeds, of the same seeds' differences "
        "where both methods have them), does not hold if it is below, and is open otherwise. Intervals are of one "
        "comparison each, not of all of them together."
    )
    verdicts, seen = [], set()
    for table, _, found_there in everything:
        own = []
        for verdict in found_there:
            cells = table.settings[verdict.setting].cells
            key = cells[verdict.a].file, cells[verdict.b].file, table.scores[verdict.score]._replace(name="")
            if key not in seen:  # or else the same runs, shown in another table too
                seen.add(key)
                own.append(verdict)
        verdicts.append((table, own))
    yield from ("", "| table | holds | does not hold | open |", "|---|---:|---:|---:|")
    for table, own in verdicts:
        if own:
            yield f"| {table.paper} | " + " | ".join(map(str, _counts(own))) + " |"
    for table, own in verdicts:
        if own:
            yield from ("", f"## {table.paper}", "", *_verdict_lines(own))
