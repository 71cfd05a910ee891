"""Text of pages: tables in Markdown, means with their intervals, and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

import fedjax_drift as fd


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A table, without a line break at its end.

    align: "l" or "r" for each column. By default, a column is "l" if one of its cells begins with a letter.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if not align:
        align = "".join("l" if any(row[i][:1].isalpha() for row in cells) else "r" for i in range(len(columns)))
    marks = ["---:" if side == "r" else "---" for side in align]
    lines = [f"| {' | '.join(columns)} |".replace("|  |", "| |"), f"|{'|'.join(marks)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def interval(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """The mean, and half the width of its 95 % confidence interval: "94.93 ± 0.14"."""
    mean, half, _ = fd.statistics.mean(values)
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}"


def words(settings: Mapping[str, float], sign: str = " ") -> str:
    """Settings as text: "lr 0.05, alpha 0.1"."""
    return ", ".join(f"{name}{sign}{value:g}" for name, value in settings.items())
