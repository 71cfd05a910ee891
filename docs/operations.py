"""Writes the table of PyTorch's operations in models.md: python docs/operations.py"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from fedjax_drift.pytorch import operations
from fedjax_drift.pytorch.operations.decomposed import DECOMPOSED

PAGE = Path(__file__).parent / "models.md"
START, END = "<!-- operations: start, written by docs/operations.py -->\n", "<!-- operations: end -->"


def rows() -> dict[str, list[str]]:
    """The names of the operations, by what the docstring of their file says."""
    covered, found = {name for table in (*operations.TABLES, DECOMPOSED) for name in table}, {}
    for each in pkgutil.iter_modules(operations.__path__):
        module = importlib.import_module(f"{operations.__name__}.{each.name}")
        tables = [
            value for name, value in vars(module).items() if name.isupper() and isinstance(value, dict | frozenset)
        ]
        if names := covered & {name for table in tables for name in table if isinstance(name, str)}:
            found[(module.__doc__ or each.name).partition("\n")[0].rstrip(".")] = sorted(names)
    if missing := covered - {name for names in found.values() for name in names}:
        raise ValueError(f"each operation must be in a table of a file in operations/, got {missing}")
    return found


def rendered(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split(START)
    lines = [f"| {what} | {', '.join(f'`{name}`' for name in names)} |" for what, names in rows().items()]
    table = "\n".join(["\n| file | operations |", "|---|---|", *lines, "\n"])
    return before + START + table + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
