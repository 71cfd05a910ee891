"""Computes the claims page and the numbers of docs/papers.md again from the raw results, and compares them.

    python -m experiments.recompute_claims

This file shares no code with experiments/tables and experiments/pages.py, so that a mistake there is seen here. It
prints what differs.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

HERE = Path(__file__).parent
PAGE, DOCS = HERE / "results" / "README.md", HERE.parent / "docs"
PAGES = [DOCS / "papers.md", DOCS / "known_results.md"]
TABLES = {f"{file.parent.name}/{file.stem}": tomllib.loads(file.read_text()) for file in HERE.glob("*/*.toml")}
KEYS = ("paper", "data", "table", "claim")  # claims with the same of these are one row of docs/papers.md
Run = dict[str, dict[int, float]]  # entry of the records -> round -> value


def source(table: str, setting: str) -> tuple[str, str, dict[str, Any]]:
    """The table, the setting and the options of the runs that a setting shows."""
    spec = TABLES[table]["settings"][setting]
    if "runs" in spec:
        return source(spec["runs"], spec.get("as", setting))
    base = TABLES[table].get("bases", {}).get(spec.get("base"), {})
    return table, setting, TABLES[table].get("common", {}) | base | spec


def file_of(table: str, setting: str, method: str) -> Path:
    """The file of the runs of a cell."""
    setting, method = (re.sub(r"[^A-Za-z0-9.()=-]+", "-", name).strip("-") for name in (setting, method))
    return HERE / "results" / table / setting / f"{method}.jsonl"


@functools.cache
def read(table: str, setting: str, method: str) -> dict[int, Run]:
    """The runs of a cell by seed."""
    file, runs = file_of(table, setting, method), {}
    for line in file.read_text().splitlines() if file.exists() else ():
        runs[json.loads(line)["seed"]] = {
            name: {t: math.nan if (y := x[-1] if isinstance(x, list) else x) is None else y
                   for t, x in zip(columns["round"], values, strict=True)}
            for columns in json.loads(line)["series"] for name, values in columns.items() if name != "round"
        }  # fmt: skip
    return runs


def number(run: Run, spec: dict[str, Any], rounds: int) -> float:
    """The score of a run in its first rounds: infinity if the target was not reached, NaN without a score."""
    of, take, sign = spec["of"], spec.get("take", "best"), -1 if spec["of"].endswith("loss") else 1
    target, scale = spec.get("target", math.nan), spec.get("scale", 1)
    y = {t: value for t, value in run.get(of, {}).items() if t <= rounds}
    if not y:
        return math.nan
    if take == "best":
        return scale * sign * float(np.nanmax([sign * value for value in y.values()]))
    if take == "median":
        return scale * float(np.nanmedian([value for t, value in y.items() if t > max(y) / 10]))
    if take == "last":
        return scale * float(np.mean(list(y.values())[-spec.get("window", 1) :]))
    if take == "at":
        return scale * y.get(spec["round"], math.nan)
    if take == "when":
        starts = [t for t in y if run["accuracy"].get(t - 1, -1) >= target]
        divisor = run["accuracy"][starts[0] - 1] if starts and spec.get("relative") else 1
        return scale * y[starts[0]] / divisor if starts else math.nan
    if spec.get("interpolate"):
        t, best = [], []
        for at, value in y.items():
            if math.isfinite(value):
                t, best = [*t, at], [*best, max([*best, value])]
        return crossing(t, best, target)
    ends = range(spec.get("smooth", 1), len(y) + 1)
    means = {list(y)[end - 1]: np.mean(list(y.values())[end - spec.get("smooth", 1) : end]) for end in ends}
    return float(min((t for t, value in means.items() if sign * value >= sign * target), default=math.inf))


def crossing(t: list[int], best: list[float], target: float) -> float:
    """Where the line through the best values so far reaches the target, infinity if it does not."""
    if not best or best[-1] < target:
        return math.inf
    later = int(np.searchsorted(best, target))
    return float(np.interp(target, best[later - 1 : later + 1], t[later - 1 : later + 1])) if later else float(t[0])


def published(table: str, setting: str, score: str) -> dict[str, Any]:
    """The numbers of the paper for a setting, or for the setting that it is like."""
    spec = TABLES[table]["settings"][setting]
    if "like" in spec:
        other, _, title = spec["like"].rpartition(": ")
        return published(other or table, title, score)
    numbers = spec.get("printed", {})
    if numbers and not isinstance(next(iter(numbers.values())), dict):
        numbers = {next(iter(TABLES[table]["scores"])): numbers}
    return numbers.get(score, {})


def plain(number: Any) -> float:
    """A printed number: 98.5, "69.1±0.6" or ">600"."""
    return math.inf if str(number).startswith(">") else float(str(number).partition("±")[0])


def seeds_of(table: str, setting: str, method: str) -> tuple[int, bool]:
    """The number of seeds that the table fixed, and whether there is one look only."""
    where = source(table, setting)
    own = TABLES[where[0]]["methods"].get(method, {})
    own = own if isinstance(own, dict) else {}
    here = where[2].get("methods", {}).get(method, {})
    spec = where[2] | own | (here if isinstance(here, dict) else {})
    return spec.get("seeds", 1), spec.get("one_look", False)


Answer = tuple[str, str, float]  # what the page shows, the word, the p-value


def compare(table: str, score: str, plus: list[tuple[str, str]], minus: list[tuple[str, str]]) -> Answer | None:
    """The difference of the scores of some settings and methods, before Holm's correction."""
    spec, both = TABLES[table]["scores"][score], [*plus, *minus]
    runs = [read(*source(table, setting)[:2], method) for setting, method in both]
    if not all(runs):
        return None
    seeds = sorted(set.intersection(*(set(each) for each in runs)))
    if not seeds:
        return "no seed in common", "open", math.nan
    last = {(m, s): max(t for y in each[s].values() for t in y) for m, each in enumerate(runs) for s in seeds}
    least, rounds_to = min(last.values()), spec.get("take") == "rounds_to"
    most = max(min(value, spec.get("round") or value) for value in last.values())
    cut = spec.get("take", "best") in ("best", "last") and least < most
    x = {s: [number(each[s], spec, least if cut else last[m, s]) for m, each in enumerate(runs)] for s in seeds}
    seeds = [s for s in seeds if not np.isnan(x[s]).any()]
    fixed = [seeds_of(table, setting, method) for setting, method in both]
    first, one = max(3, *(n for n, _ in fixed)), any(once for _, once in fixed)
    looks = [first] if one else [first, *(n for n in (6, 9, 12) if n > first)]
    n = max((look for look in looks if look <= len(seeds)), default=0)
    seeds = seeds[: n or None]
    if not seeds:
        return "not scored", "open", math.nan
    late = np.isinf([x[s] for s in seeds])
    if late.all():
        return "neither reached the target", "open", math.nan
    end = {key: min(value, spec.get("round") or value) + 1 for key, value in last.items()}
    values = np.array([[end[m, s] if math.isinf(x[s][m]) else x[s][m] for m in range(len(both))] for s in seeds])
    lower = rounds_to or spec["of"].endswith("loss")
    signs = np.array([1] * len(plus) + [-1] * len(minus)) * (-1 if lower else 1)
    gaps, k = (values * signs).sum(1) + 0.0, len(plus)
    digits = 1 if rounds_to else 2 if spec.get("scale", 1) > 1 else 4 if spec["of"] == "accuracy" else 3
    own = any(source(table, setting)[2].get("data_seed") == "seed" for setting, _ in both)
    unit, plural = "partition" if own else "seed", "s" * ((n or len(gaps)) > 1)
    rest = f", of the first {least} rounds" * cut + " (a bound: not all reached the target)" * bool(late.any())
    if not n:
        return f"{gaps.mean():+.{digits}f}, {len(gaps)} {unit}{plural}{rest}", "open", math.nan
    shares = 1 if one else 4
    half = stats.t.ppf(1 - 0.025 / shares, n - 1) * gaps.std(ddof=1) / math.sqrt(n) if np.ptp(gaps) else 0.0
    low, high = gaps.mean() - half, gaps.mean() + half
    word = "holds" if low > 0 and not late[:, :k].any() else "open"
    word = "does not hold" if high < 0 and not late[:, k:].any() else word
    if len(both) == 2 and low <= 0 <= high and not late.any():
        rate = not lower and spec.get("take") != "median" and not spec.get("relative", False)
        size = abs((100 if spec.get("scale", 1) > 1 else 1) * rate - values[:, 1].mean()) / 10
        numbers = published(table, both[0][0], score) if both[0][0] == both[1][0] else {}
        if all(method in numbers for _, method in both):
            gap = abs(plain(numbers[both[0][1]]) - plain(numbers[both[1][1]]))
            size = min(size, gap / 2) if 0 < gap < math.inf else size
        word = "equal" if max(-low, high) <= size else word
    if not np.ptp(gaps):
        same = word if word == "equal" else "open"
        return f"{gaps.mean():+.{digits}f} for each of {n} {unit}s{rest}", same, math.nan
    text = f"{gaps.mean():+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}], {n} {unit}s{rest}"
    return text, word, min(1, shares * stats.ttest_1samp(gaps, 0).pvalue)


def reached(entry: dict[str, Any], setting: str) -> Answer | None:
    """Whether all runs of a method reach a target."""
    runs = read(*source(entry["table"], setting)[:2], entry["better"])
    spec = TABLES[entry["table"]]["scores"][entry["score"]]
    y = [value for run in runs.values() if not math.isnan(value := number(run, spec, sys.maxsize))]
    met = [value >= entry["target"] for value in y]
    word = "open" if len(y) < 3 or any(met) != all(met) else "holds" if all(met) else "does not hold"
    return (f"{min(y):.2f} to {max(y):.2f}, {len(y)} seeds", word, math.nan) if y else None


def answer(entry: dict[str, Any], worse: str, setting: str) -> Answer | None:
    """The answer to a claim in one of its settings, before Holm's correction."""
    if "target" in entry:
        return reached(entry, setting)
    a, _, b = setting.partition(" over ")
    plus, minus = [(a, entry["better"])], [(a, worse)] * bool(worse)
    if b:
        plus, minus = plus + [(b, worse)] * bool(worse), [*minus, (b, entry["better"])]
    found = compare(entry["table"], entry["score"], plus, minus)
    if found is None or "without" not in entry:
        return found
    harm = compare(entry["table"], entry["score"], [(a, entry["without"])], minus)
    text = f"{found[0]} (harm: {harm[0] if harm else 'not run'})"
    if found[1] != "holds":
        return text, *found[1:]
    return (text, "holds", max(found[2], harm[2])) if harm and harm[1] == "holds" else (text, "open", 1.0)


@functools.cache
def answers() -> list[tuple[dict[str, Any], str, dict[str, Answer | None]]]:
    """All claims with their answers after Holm's correction: a difference that is not significant is open."""
    claims = [
        (entry, worse, {setting: answer(entry, worse, setting) for setting in entry["settings"]})
        for entry in tomllib.loads((HERE / "claims.toml").read_text())["claims"]
        for worse in ([entry["worse"]] if isinstance(entry.get("worse", ""), str) and "worse" in entry else
                      entry.get("worse", [""]))
    ]  # fmt: skip
    families: dict[str, list[float]] = {}

    def family(entry: dict[str, Any]) -> str:
        return entry.get("family", f"{entry['paper']}, {entry['data']}")

    for entry, _, found in claims:
        if "target" not in entry:
            p = [1.0 if each is None or math.isnan(each[2]) else each[2] for each in found.values()]
            families.setdefault(family(entry), []).extend(p)
    limits = {}
    for name, p in families.items():
        passed = [value for rank, value in enumerate(sorted(p)) if value * (len(p) - rank) > 0.05]
        limits[name] = min(passed, default=math.inf)  # those below are significant
    for entry, _, found in claims:
        if "target" not in entry:
            for setting, each in found.items():
                if each and each[1] in ("holds", "does not hold") and not each[2] < limits[family(entry)]:
                    found[setting] = each[0], "open", each[2]
    return claims


def verdict(found: dict[str, Answer | None]) -> str:
    said, n, begin, end = [], len(found), 0, 0
    words = [setting.split(", ") for setting in found]
    shortest = min(len(each) for each in words)
    while begin + 1 < shortest and all(each[begin] == words[0][begin] for each in words):
        begin += 1
    while begin + end + 1 < shortest and all(each[-1 - end] == words[0][-1 - end] for each in words):
        end += 1
    for word, name in {"holds": "holds", "does not hold": "fails", "equal": "equal"}.items():
        where = [setting for setting, each in found.items() if each and each[1] == word]
        which = "; ".join(", ".join(s.split(", ")[begin : s.count(", ") + 1 - end]) for s in where)
        if where:
            listed = "" if len(where) in (n, *range(3, n)) else f" ({which})"
            said.append(name if n == 1 else f"{name} in {len(where)} of {n}{listed}")
    return ", ".join(said) or ("open" if any(found.values()) else "not run")


def rows() -> list[str]:
    """The rows of the table of claims, without the link to the page."""
    lines = []
    for entry, worse, found in answers():
        shown = [f"{setting}: {each[0] if each else 'not run'}" for setting, each in found.items()]
        claim = entry["claim"].replace("{worse}", worse)
        lines.append(f"{claim} | {entry['data']} | {'; '.join(shown)} | {verdict(found)} |")
    return lines


def differences(page: str) -> list[str]:
    """The rows of the page that are not those that this file computes, and the other way round."""
    table = re.search(r"\| paper \| claim \| data \| evidence \| verdict \|\n\|---.*\n((?:\|.*\n)+)", page)
    shown = [line.split(" | ", 1)[1] for line in table[1].splitlines()] if table else []
    computed = rows()
    return [f"page:     {row}" for row in shown if row not in computed] + [
        f"computed: {row}" for row in computed if row not in shown
    ]


# --- docs/papers.md and docs/known_results.md -------------------------------------------------------------------------


def scores_of(table: str, setting: str, score: str, method: str) -> list[float]:
    spec = TABLES[table]["scores"][score]
    runs = read(*source(table, setting)[:2], method)
    return [number(run, spec, sys.maxsize) for _, run in sorted(runs.items())]


def digits_of(spec: dict[str, Any]) -> int:
    if spec.get("take") == "rounds_to":
        return 0
    return 2 if spec.get("scale", 1) > 1 else 4 if spec["of"] == "accuracy" else 3


def of_page() -> dict[str, Any]:
    """The functions that the page uses, written a second time."""
    found = answers()

    def decided(table: str, setting: str, score: str, better: str, worse: str) -> str:
        for entry, other, of_claim in found:
            asked = entry["table"], entry["score"], entry["better"], other
            if asked == (table, score, better, worse) and setting in of_claim:
                return of_claim[setting][1] if of_claim[setting] else "not run"
        return "open"

    def word(*question: str) -> str:
        return {"does not hold": "fails"}.get(answer := decided(*question), answer)

    def gap(table: str, setting: str, score: str, better: str, worse: str) -> str:
        result = compare(table, score, [(setting, better)], [(setting, worse)])
        if result is None or result[0] in ("no seed in common", "not scored", "neither reached the target"):
            return "-"
        value, *interval = re.findall(r"[+-][0-9.]+", result[0])
        value = value.lstrip("+")
        if same := re.search(r"for each of ([0-9]+)", result[0]):
            return f"{value} (the same in {same[1]} seeds: no test)"
        if not interval:
            return f"{value} (too few seeds)"
        (seeds,) = re.findall(r"\], ([0-9]+)", result[0])
        bound = ", a bound" * ("a bound" in result[0])
        significant = decided(table, setting, score, better, worse) in ("holds", "does not hold")
        low, high = (each.lstrip("+") for each in interval)
        return f"{'**' * significant}{value}{'**' * significant} ({low} to {high}; {seeds}{bound})"

    def mean(table: str, setting: str, score: str, method: str, spread: bool = False) -> str:
        values, spec = scores_of(table, setting, score, method), TABLES[table]["scores"][score]
        if not values:
            return "-"
        if math.inf in values:
            runs = read(*source(table, setting)[:2], method).values()
            return f">{min(max(t for y in run.values() for t in y) for run in runs)}"
        d = digits_of(spec)
        return f"{np.mean(values):.{d}f}" + (f" ± {np.std(values, ddof=1):.{d}f}" if spread and len(values) > 1 else "")

    def own(table: str, setting: str, score: str) -> dict[str, Any]:
        spec = TABLES[table]["settings"][setting]
        return published(table, setting, score) if "printed" in spec else {}

    def table_of(head: list[str], rows: list[list[str]], marks: str) -> str:
        lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|---|" + marks]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])

    def means(table: str, score: str, settings: list[str], methods: list[str], spread: bool = False) -> str:
        rows = []
        for setting in settings:
            texts = {m: f" ({number})" for m, number in own(table, setting, score).items()}
            seeds = [len(read(*source(table, setting)[:2], m)) for m in methods]
            few = str(seeds[0]) if len(set(seeds)) == 1 else ", ".join(str(n) for n in seeds)
            row = [mean(table, setting, score, m, spread) + texts.get(m, "") for m in methods]
            rows.append([setting, *row, few])
        return table_of(["", *methods, "seeds"], rows, "---:|" * len(methods) + "---|")

    def gaps(table: str, score: str, settings: list[str], better: str | list[str], worse: list[str]) -> str:
        one = isinstance(better, str)
        pairs = [(setting, method) for setting in settings for method in ([better] if one else better)]
        rows = [
            [setting if one else method, *(gap(table, setting, score, method, other) for other in worse)]
            for setting, method in pairs
        ]
        return table_of([f"{better} against" if one else "against", *worse], rows, "---|" * len(worse))

    def verdicts(wanted: str | None) -> str:
        """The rows of the claims of a paper, or of all headlines."""
        rows = []
        for _, group in itertools.groupby(found, lambda each: [each[0][key] for key in KEYS]):
            claims = list(group)
            entry, same = claims[0][0], [(worse, of_claim) for _, worse, of_claim in claims]
            paper, _, where = entry["paper"].partition(", ")
            if not (entry.get("headline") if wanted is None else paper == wanted):
                continue
            several = len(same) > 1
            names = [worse for worse, _ in same]
            text = entry["claim"].replace("{worse}", "others" if len(names) > 2 else " and ".join(names))
            verdicts = [f"vs {worse}: {verdict(each)}" if several else verdict(each) for worse, each in same]
            stand_in = entry["data"].startswith("stand-in")
            known = any(any(each.values()) for _, each in same)
            if not known and wanted is not None:
                continue
            rows.append([paper] * (wanted is None) + [
                text, entry["data"] if stand_in else f"the paper's: {entry['data']}",
                "; ".join(verdicts) + " (stand-in)" * stand_in,
                f"[{where}](../experiments/results/{entry['table']}.md)" if known else where,
            ])  # fmt: skip
        head = ["paper"] * (wanted is None) + ["claim", "whose data", "verdict", "evidence"]
        shown = table_of(head, rows, "---|" * len(head[1:]))
        if wanted is None:
            return shown
        absent: dict[str, list[str]] = {}
        for entry, worse, each in found:
            if entry["paper"].startswith(wanted) and not any(each.values()):
                where = entry["data"].replace("stand-in:", "the stand-in")
                line = f"{entry['paper'].partition(', ')[2]} on {where} ({entry['better']}"
                absent.setdefault(line, []).extend([worse] if worse and worse not in absent.get(line, []) else [])
        rest = "; ".join(f"{line}{' over ' * bool(names)}{', '.join(names)})" for line, names in absent.items())
        return shown + f"\n\nThese claims have not been run: {rest}." * bool(rest)

    def counted() -> str:
        counts: dict[tuple[str, str], list[str]] = {}
        for entry, _, of_claim in found:
            kinds = [kind for kind in ("stand-in", "identical clients") if kind in entry["data"]]
            key = entry["paper"].partition(",")[0], kinds[0] if kinds else "the paper's"
            counts.setdefault(key, []).extend(each[1] if each else "not run" for each in of_claim.values())
        names = ("holds", "does not hold", "equal", "open", "not run")
        lines = [[*key, str(len(words)), *(str(words.count(name)) for name in names)] for key, words in counts.items()]
        head = "| paper | data | comparisons | hold | fail | equal | open | not run |\n|---|---|" + "---:|" * 6
        return "\n".join([head, *(f"| {' | '.join(line)} |" for line in lines)])

    def cells() -> str:
        counts: dict[str, dict[tuple[str, ...], int]] = {}
        for name in sorted(name for name in TABLES if not name.startswith("known/")):
            for setting, spec in TABLES[name]["settings"].items():
                numbers = spec.get("printed", {})
                nested = any(isinstance(value, dict) for value in numbers.values())
                for method in {m for each in numbers.values() for m in each} if nested else numbers:
                    where = source(name, setting)[:2]
                    of_paper = counts.setdefault(re.split(r" \(|,", TABLES[name]["paper"])[0], {})
                    seeds = len(read(*where, method)) * (spec.get("scale", "full") == "full")
                    of_paper[*where, method] = max(seeds, of_paper.get((*where, method), 0))
        rows = [[paper, *(sum(n >= least for n in of.values()) for least in (0, 1, 3))] for paper, of in counts.items()]
        rows.append(["all", *(sum(row[k] for row in rows) for k in (1, 2, 3))])
        head = ["paper", "cells with a printed number", "run at full scale", "with 3 seeds or more"]
        return table_of(head, [list(map(str, row)) for row in rows], "---:|" * 3)

    def data(file: str) -> Any:
        return json.loads((HERE / "results" / file).read_text())

    def known(name: str) -> str:
        """The printed numbers of a table beside ours."""
        lines = []
        for setting, spec in TABLES[name]["settings"].items():
            scores = {s: numbers for s in TABLES[name]["scores"] if (numbers := published(name, setting, s))}
            for score, numbers in scores.items():
                for method, text in numbers.items():
                    if len(values := scores_of(name, setting, score, method)) < 2:
                        continue
                    half, same = expected(values, text)
                    d, middle = digits_of(TABLES[name]["scores"][score]), np.mean(values)
                    ours = mean(name, setting, score, method)
                    ours += f" ({middle - half:.{d}f} to {middle + half:.{d}f}; {len(values)})" * bool(
                        math.isfinite(middle)
                    )
                    why = "" if same else spec.get("why", "not known")
                    hours = sum(s / n for s, n in seconds(name, setting, method)) / 3600
                    what = f"{method}, {score}" if len(scores) > 1 else method
                    lines.append([setting, what, str(text), ours, "yes" if same else "no", why, f"{hours:.2f}"])
        head = ["setting", "method", "printed", "ours", "agrees", "why not", "hours"]
        tune = " --tune" if "tune" in TABLES[name] else ""
        link = f"[All runs](../experiments/results/{name}.md). The command of a row is "
        link += f'`python -m experiments.tables run {name}{tune} --rows "SETTING"`.'
        return table_of(head, lines, "---|" * 5 + "---:|") + f"\n\n{link}" if lines else "Not run yet."

    def agreeing(*names: str) -> str:
        answers = [row.split(" | ")[4] for name in names for row in known(name).splitlines()[2:] if row[:1] == "|"]
        return f"{answers.count('yes')} of {len(answers)}"

    return {
        "gap": gap, "word": word, "mean": mean, "means": means, "gaps": gaps, "counted": counted, "cells": cells,
        "data": data, "claims_of": verdicts, "headlines": lambda: verdicts(None), "known": known, "agreeing": agreeing,
    }  # fmt: skip


def expected(values: list[float], text: Any) -> tuple[float, bool]:
    """Half the width of the interval around our mean in which a printed number is expected, and whether it is there."""
    if math.inf in values:
        return math.nan, False
    n, variance = len(values), float(np.var(values, ddof=1))
    _, given, std = str(text).partition("±")
    half = stats.t.ppf(0.975, n - 1) * math.sqrt(variance / n + (float(std) ** 2 if given else variance))
    return half, abs(np.mean(values) - plain(text)) <= half


def seconds(table: str, setting: str, method: str) -> list[tuple[float, int]]:
    """The seconds of each run of a cell, and the number of runs side by side."""
    lines = file_of(table, setting, method).read_text().splitlines()
    return [(run["seconds"], run["together"]) for run in map(json.loads, lines)]


def wrong_numbers(page: str) -> list[str]:
    """The numbers and tables of a page that are not those that this file computes."""
    functions, wrong = of_page(), []
    for expression, shown in re.findall(r"<!--= (.*?)\s-->(.*?)<!--/-->", page, re.DOTALL):
        computed = str(eval(" ".join(expression.split()), functions | {"tuple": tuple, "sum": sum}))
        if shown.strip() != computed:
            lines = zip(shown.strip().splitlines(), computed.splitlines(), strict=False)
            wrong += [f"page:     {a}\ncomputed: {b}" for a, b in lines if a != b] or [f"page:     {shown.strip()}"]
    return wrong


if __name__ == "__main__":
    found = differences(PAGE.read_text())
    for page in PAGES:
        found += wrong_numbers(page.read_text())
    pages = " and ".join(page.name for page in PAGES)
    print("\n".join(found) or f"all {len(rows())} claims and all numbers of {pages} are equal")
    sys.exit(bool(found))
