"""Computes the evidence and the verdicts of the claims page again from the raw results, and compares the two.

    python experiments/recompute_claims.py

This file shares no code with experiments/tables, so that a mistake there is seen here. It prints the rows that differ.
"""

from __future__ import annotations

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
PAGE = HERE / "results" / "README.md"
TABLES = {f"{file.parent.name}/{file.stem}": tomllib.loads(file.read_text()) for file in HERE.glob("*/*.toml")}
Run = dict[str, dict[int, float]]  # entry of the records -> round -> value


def source(table: str, setting: str) -> tuple[str, str, dict[str, Any]]:
    """The table, the setting and the options of the runs that a setting shows."""
    spec = TABLES[table]["settings"][setting]
    if "runs" in spec:
        return source(spec["runs"], spec.get("as", setting))
    base = TABLES[table].get("bases", {}).get(spec.get("base"), {})
    return table, setting, TABLES[table].get("common", {}) | base | spec


def read(table: str, setting: str, method: str) -> dict[int, Run]:
    """The runs of a cell by seed."""
    names = [re.sub(r"[^A-Za-z0-9.()=-]+", "-", name).strip("-") for name in (setting, method)]
    file, runs = HERE / "results" / table / names[0] / f"{names[1]}.jsonl", {}
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
    if take == "last":
        return scale * float(np.mean(list(y.values())[-spec.get("window", 1) :]))
    if take == "at":
        return scale * y.get(spec["round"], math.nan)
    if take == "when":
        starts = [t for t in y if run["accuracy"].get(t - 1, -1) >= target]
        divisor = run["accuracy"][starts[0] - 1] if starts and spec.get("relative") else 1
        return scale * y[starts[0]] / divisor if starts else math.nan
    ends = range(spec.get("smooth", 1), len(y) + 1)
    means = {list(y)[end - 1]: np.mean(list(y.values())[end - spec.get("smooth", 1) : end]) for end in ends}
    return float(min((t for t, value in means.items() if sign * value >= sign * target), default=math.inf))


def compare(table: str, setting: str, score: str, a: str, b: str) -> tuple[str, str, float] | None:
    """What the page shows about two methods, the answer before Holm's correction, and the p-value."""
    where, (spec, one, other) = source(table, setting), (TABLES[table]["scores"][score], *(
        read(*source(table, setting)[:2], method) for method in (a, b)))  # fmt: skip
    if not one or not other:
        return None
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return "no seed in common", "open", math.nan
    last = {(m, s): max(t for y in runs[s].values() for t in y) for m, runs in enumerate((one, other)) for s in seeds}
    least, rounds_to = min(last.values()), spec.get("take") == "rounds_to"
    cut = spec.get("take", "best") in ("best", "last") and least < max(last.values())
    x = {s: [number(runs[s], spec, least if cut else last[m, s]) for m, runs in enumerate((one, other))] for s in seeds}
    seeds = [s for s in seeds if not np.isnan(x[s]).any()]
    n = min(len(seeds) - len(seeds) % 3, 12)
    seeds = seeds[: n or None]
    if not seeds:
        return "not scored", "open", math.nan
    late = np.isinf([x[s] for s in seeds])
    if late.all():
        return "neither reached the target", "open", math.nan
    values = np.array([[last[m, s] + 1 if math.isinf(x[s][m]) else x[s][m] for m in (0, 1)] for s in seeds])
    lower = rounds_to or spec["of"].endswith("loss")
    gaps = (values[:, 0] - values[:, 1]) * (-1 if lower else 1) + 0.0
    digits = 1 if rounds_to else 2 if spec.get("scale", 1) > 1 else 4 if spec["of"] == "accuracy" else 3
    unit = "partition" if where[2].get("data_seed") == "seed" else "seed"
    rest = f", of the first {least} rounds" * cut + " (a bound: not all reached the target)" * bool(late.any())
    if not n:
        return f"{gaps.mean():+.{digits}f}, {len(gaps)} {unit}{'s' * (len(gaps) > 1)}{rest}", "open", math.nan
    half = stats.t.ppf(1 - 0.05 / 8, n - 1) * gaps.std(ddof=1) / math.sqrt(n) if np.ptp(gaps) else 0.0
    low, high = gaps.mean() - half, gaps.mean() + half
    margin = values[:, 1].mean() / 5 if lower else 0.5 if spec.get("scale", 1) > 1 else 0.005
    word = (
        "holds"
        if low > 0 and not late[:, 0].any()
        else "does not hold"
        if high < 0 and not late[:, 1].any()
        else "open"
    )
    word = "equal" if low <= 0 <= high and max(-low, high) <= margin and not late.any() else word
    if not np.ptp(gaps):
        same = word if word == "equal" else "open"
        return f"{gaps.mean():+.{digits}f} for each of {n} {unit}s{rest}", same, math.nan
    text = f"{gaps.mean():+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}], {n} {unit}s{rest}"
    return text, word, min(1, 4 * stats.ttest_1samp(gaps, 0).pvalue)


def comparisons(table: str) -> dict[tuple[str, str, str, str], tuple[str, str]]:
    """All comparisons of a table after Holm's correction: what the page shows, and the answer."""
    found = {}
    for setting, score in itertools.product(TABLES[table]["settings"], TABLES[table]["scores"]):
        options, printed = source(table, setting)[2], TABLES[table]["settings"][setting].get("printed", {})
        shown = (
            printed if any(isinstance(value, dict) for value in printed.values()) else [*TABLES[table]["scores"]][:1]
        )
        ends = options.get("until", score) == score or TABLES[table]["scores"][score]["take"] != "rounds_to"
        if score in shown if printed else ends:
            for a, b in {pair for chain in TABLES[table]["claims"] for pair in itertools.pairwise(chain)}:
                if (result := compare(table, setting, score, a, b)) is not None:
                    found[setting, score, a, b] = result
    p, significant, ordered = [result[2] for result in found.values() if not math.isnan(result[2])], set(), True
    for rank, value in enumerate(sorted(p)):
        ordered = ordered and value * (len(p) - rank) <= 0.05
        significant |= {value} if ordered else set()
    return {
        key: (text, word if word == "equal" or value in significant else "open")
        for key, (text, word, value) in found.items()
    }


def reached(entry: dict[str, Any], setting: str) -> tuple[str, str] | None:
    """Whether all runs of a method reach a target: what the page shows, and the answer."""
    runs = read(*source(entry["table"], setting)[:2], entry["better"])
    y = [number(run, TABLES[entry["table"]]["scores"][entry["score"]], sys.maxsize) for run in runs.values()]
    met = [value >= entry["target"] for value in y]
    word = "open" if len(y) < 3 or any(met) != all(met) else "holds" if all(met) else "does not hold"
    return (f"{min(y):.2f} to {max(y):.2f}, {len(y)} seeds", word) if y else None


def rows() -> list[str]:
    """The rows of the table of claims, without the link to the page."""
    lines, of_tables = [], {}
    for entry in tomllib.loads((HERE / "claims.toml").read_text())["claims"]:
        table, settings = entry["table"], entry["settings"]
        if table not in of_tables:
            of_tables[table] = comparisons(table)
        results, worse_ones = dict(of_tables[table]), entry.get("worse", "")
        if not worse_ones:
            key = (entry["score"], entry["better"], "")
            results |= {(name, *key): answer for name in settings if (answer := reached(entry, name))}
        for worse in [worse_ones] if isinstance(worse_ones, str) else worse_ones:
            keys = [(setting, entry["score"], entry["better"], worse) for setting in settings]
            shown = [f"{key[0]}: {results[key][0] if key in results else 'not run'}" for key in keys]
            words = [results[key][1] for key in keys if key in results]
            holds, fails, half = words.count("holds"), words.count("does not hold"), len(settings) / 2
            verdict = "no difference" if words.count("equal") == len(settings) else "open"
            verdict = "contradicted" if fails >= half and not holds else verdict
            verdict = "supported" if holds >= half and not fails else verdict
            lines.append(f"{entry['claim'].replace('{worse}', worse)} | {'; '.join(shown)} | {verdict} |")
    return lines


def differences(page: str) -> list[str]:
    """The rows of the page that are not those that this file computes, and the other way round."""
    table = re.search(r"\| paper \| claim \| evidence \| verdict \|\n\|---.*\n((?:\|.*\n)+)", page)
    shown = [line.split(" | ", 1)[1] for line in table[1].splitlines()] if table else []
    computed = rows()
    return [f"page:     {row}" for row in shown if row not in computed] + [
        f"computed: {row}" for row in computed if row not in shown
    ]


if __name__ == "__main__":
    found = differences(PAGE.read_text())
    print("\n".join(found) or f"all {len(rows())} claims are equal")
    sys.exit(bool(found))
