"""Finds and opens text files. Errors name the damaged line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from fedjax_drift.data import files


def find(filename: str, places: Sequence[Path], instructions: str) -> Path:
    """Returns the file in the first folder that has it. Raises FileNotFoundError with the instructions."""
    path = files.find([filename], places)
    if path is None:
        wanted = " or ".join(str(folder / filename) for folder in places)
        raise FileNotFoundError(f"{wanted} does not exist: {instructions}")
    return path


@contextlib.contextmanager
def opened(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """Opens a text file. An error inside the context becomes a ValueError that names the file."""
    with files.opened(path) as file, io.TextIOWrapper(file, encoding, newline="") as text:
        yield text


def damaged(number: int, wanted: str, got: object) -> files.Wrong:
    """Returns the error for line ``number``, counted from 1. Raise it while the file is `opened`."""
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return files.Wrong(f"line {number} must be {wanted}, got {shown}: download it again, or correct it")
