"""The tables of experiments/results/atlas.md again, from atlas.json, with other code.

    python experiments/recompute_atlas.py

Prints the cells that differ, and exits with 1 if there are any. It shares no code with experiments/atlas.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
from scipy import stats

RESULTS = Path(__file__).parent / "results"


def tables(page: str) -> dict[str, dict[tuple[str, str], str]]:
    """The cells of the tables of the models on a page: model -> (algorithm, column) -> text."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for title, body in re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", page, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines())
        if head[0] == "":
            found[title] = {(row[0], name): cell for row in rows for name, cell in zip(head[1:], row[1:], strict=True)}
    return found


def computed(entries: list[dict]) -> dict[str, dict[tuple[str, str], str]]:
    """The same cells from the results."""
    scores = {tuple(each["cell"]): [100 * sum(run[-10:]) / 10 for run in each["accuracy"]] for each in entries}
    losses = {key: np.subtract(scores[*key[:2], "none", ""], y) for key, y in scores.items() if key[2] != "none"}
    with np.errstate(all="ignore"):
        p = {key: float(stats.ttest_1samp(loss, 0).pvalue) for key, loss in losses.items()}
    tested = sorted((value, key) for key, value in p.items() if not np.isnan(value))
    significant, passed = set(), True
    for rank, (value, key) in enumerate(tested):
        passed = passed and value * (len(tested) - rank) < 0.05
        significant |= {key} if passed else set()
    found: dict[str, dict[tuple[str, str], str]] = {}
    for (model, name, source, strength), y in scores.items():
        if source == "none":
            half = stats.t.ppf(0.975, len(y) - 1) * np.std(y, ddof=1) / len(y) ** 0.5
            column, text = "none (accuracy)", f"{np.mean(y):.1f} ± {half:.1f}"
        else:
            key = model, name, source, strength
            loss = losses[key].mean()
            column, text = f"{source}, {strength}", f"{loss:.1f}" + ("*" if loss > 0 else "+") * (key in significant)
        found.setdefault(model, {})[name, column] = text
    return found


def differences(page: str, entries: list[dict]) -> list[str]:
    """The cells of the page that are not those of the results, and those that are not there."""
    shown, wanted = tables(page), computed(entries)
    return [
        f"{model}, {', '.join(cell)}: page {shown.get(model, {}).get(cell)}, computed {text}"
        for model, cells in wanted.items()
        for cell, text in cells.items()
        if shown.get(model, {}).get(cell) != text
    ]


if __name__ == "__main__":
    entries = json.loads((RESULTS / "atlas.json").read_text())
    wrong = differences((RESULTS / "atlas.md").read_text(), entries)
    print("\n".join(wrong) or f"all {len(entries)} cells are equal")
    sys.exit(bool(wrong))
