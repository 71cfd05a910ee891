"""Text files as others publish them: found, opened, and refused with the number of the line that is damaged."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from fedjax_drift.data import files


def find(filename: str, places: Sequence[Path], how: str) -> Path:
    """The file in the first of the folders that has it; FileNotFoundError says how to get it."""
    path = files.find([filename], places)
    if path is None:
        wanted = " or ".join(str(folder / filename) for folder in places)
        raise FileNotFoundError(f"{wanted} is not there: {how}")
    return path


@contextlib.contextmanager
def opened(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """The file as text. What goes wrong with it, or is found wrong while it is open, is a ValueError that names it."""
    with files.opened(path) as file, io.TextIOWrapper(file, encoding, newline="") as text:
        yield text


def damaged(number: int, wanted: str, got: object) -> files.Wrong:
    """For line ``number``, from 1: raised while a file is `opened`."""
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return files.Wrong(f"line {number} must be {wanted}, got {shown}: download it again, or mend it")
