"""Writes docs/agreement.md from results.json in this folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "agreement.md"
ROUNDING = 1e-12

INTRODUCTION = """\
# Agreement with other people's code

Other people have written many of our algorithms, too. We ran their code beside ours, in float64, on
the same small federation: six clients with 5 to 25 examples, two dense layers, the same initial
model, the same cohorts of three clients, the same batches. Their classes and functions run as they
are. We replace four things: their data loaders, their choice of clients, their files, and calls that
PyTorch no longer has. Where they fix float32, we use float64. So what is left is rounding, or a
difference between two algorithms.

{summary}

- **difference** is the largest relative difference ||ours - theirs|| / ||ours||, over all rounds
  for global models, over all clients for personal ones. Rounding is below 1e-12.
- **default** is the same difference with the arguments that our algorithm has by default, where
  others are needed.
- **where** is the place of the update in their code, at the commit that we ran.

We are grateful to all authors who publish their code. Where a row says that two codes differ, we
say where and why, so that you can choose. If you see that a row is wrong, please tell us.

The scripts are in `experiments/agreement_with_others`. They contain none of the other code. Clone
the repositories into one folder, install PyTorch and scikit-learn
(for FedSA-LoRA also grpcio, pympler and wandb), and run

```
python -m experiments.agreement_with_others FOLDER
```

It exits with status 1 if a difference has changed, and prints the old one.
"""


def rendered(results: dict[str, Any]) -> str:
    """The page of these results."""
    rows = [row for source in results.values() for row in source["rows"]]
    names = algorithms(results)
    agreeing = {name_of(row) for row in rows if row["difference"] < ROUNDING}
    summary = (
        f"The table has {len(rows)} comparisons of {len(names)} algorithms with {len(results)} repositories. "
        f"{len(agreeing)} algorithms agree with at least one of them to rounding."
    )
    parts = [INTRODUCTION.format(summary=wrapped(summary))]
    for source in results.values():
        parts.append(section(source))
    return "\n".join(parts)


def algorithms(results: dict[str, Any]) -> set[str]:
    """The names of the algorithms that are compared."""
    return {name_of(row) for source in results.values() for row in source["rows"]}


def section(source: dict[str, Any]) -> str:
    repository, commit = source["repository"], source["commit"]
    link = f"https://github.com/{repository}"
    lines = [f"## {repository.split('/')[1]}", ""]
    about = f"[{repository}]({link}), commit `{commit[:7]}` of {source['date']}. {source['about']}"
    lines += [wrapped(about), "", "| ours | where | difference | default |", "|---|---|---|---|"]
    notes: list[str] = []
    for row in source["rows"]:
        note = " ".join(text for text in (sentence(row["setting"]), row["cause"]) if text)
        if note and note not in notes:
            notes.append(note)
        mark = f" ({notes.index(note) + 1})" if note else ""
        places = ", ".join(place(link, commit, line) for line in row["lines"])
        default = "" if row["default"] is None else shown(row["default"])
        lines.append(f"| `{row['algorithm']}`{mark} | {places} | {shown(row['difference'])} | {default} |")
    lines += [""] + [wrapped(f"{number}. {note}", "   ") for number, note in enumerate(notes, 1)]
    return "\n".join(lines) + ("\n" if notes else "")


def changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """One line for every row of a source whose differences have changed, or that is missing now."""
    now = {(row["algorithm"], row["setting"]): row for row in after}
    lines = []
    for row in before:
        new = now.get((row["algorithm"], row["setting"]))
        pairs = [(new and new[kind], row[kind], kind) for kind in ("difference", "default")]
        lines += [
            f"{row['algorithm']}: {kind} {'none' if is_now is None else shown(is_now)}, was {shown(was)}"
            for is_now, was, kind in pairs
            if was is not None and not same(is_now, was)
        ]
    return lines


def same(difference: float | None, other: float) -> bool:
    """Whether two differences are equal up to 1 %, or both are rounding."""
    if difference is None:
        return False
    return max(difference, other) < ROUNDING or math.isclose(difference, other, rel_tol=0.01)


def name_of(row: dict[str, Any]) -> str:
    return row["algorithm"].split("(")[0]


def shown(difference: float) -> str:
    return f"{difference:.0e}" if difference < 1e-3 else f"{difference:.2g}"


def place(link: str, commit: str, line: str) -> str:
    path, number = line.rsplit(":", 1)
    name = path.rsplit("/", 1)[-1]
    return f"[{name}:{number}]({link}/blob/{commit}/{path.replace(' ', '%20')}#L{number})"


def sentence(text: str) -> str:
    """The text with a full stop and, unless it begins with a name such as ``lr_decay=0.9``, a capital letter."""
    begins_with_a_name = not text.split(" ")[0].strip(",;:.").isalpha()
    begin = text[:1] if begins_with_a_name else text[:1].upper()
    return text and begin + text[1:] + ("" if text.endswith(".") else ".")


def wrapped(text: str, indent: str = "", width: int = 100) -> str:
    """The text in lines of this width, without a break inside of code."""
    words, lines = text.split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) >= width and lines[-1].count("`") % 2 == 0:
            lines.append(indent + word)
        else:
            lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def write() -> None:
    PAGE.write_text(rendered(json.loads(RESULTS.read_text())))
