"""Rows of many clients, cut out of an array in memory or out of a memory-mapped file."""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

import numpy as np


def source(array: np.ndarray) -> np.ndarray | _Mapped:
    """The rows of an array, to be `cut` from: by read calls if it is a memory map."""
    return array if (root := _root(array)) is None else _Mapped(root, array)


def cut(rows: np.ndarray | _Mapped, begins: np.ndarray, sizes: np.ndarray, places: np.ndarray, R: int) -> np.ndarray:
    """[R, ...]: of clients whose ``sizes`` rows start at ``begins``, [K] each, the rows from ``places`` on; zeros."""
    out = np.zeros((R, *rows.shape[1:]), rows.dtype)
    for begin, size, place in zip(begins.tolist(), sizes.tolist(), places.tolist(), strict=True):
        if size:
            out[place : place + size] = rows[begin : begin + size]
    if isinstance(rows, _Mapped):
        rows.check()
    return out


class _Mapped:
    """Rows of a memory-mapped file, by read calls: touching pages of a map for the first time costs several times more,
    and ends the process if the file has been cut short."""

    def __init__(self, root: np.memmap, array: np.ndarray) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self.file = os.fspath(root.filename)  # type: ignore[arg-type]
        within = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        self.begin, self.row = root.offset + within, array[:1].nbytes
        self.stamp = _stamp(self.file)
        self.descriptor = os.open(self.file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def __getitem__(self, rows: slice) -> np.ndarray:
        out = np.empty((rows.stop - rows.start, *self.shape[1:]), self.dtype)
        left, at = out.reshape(-1).view(np.uint8), self.begin + rows.start * self.row
        while left.size:
            read = os.preadv(self.descriptor, [left], at)  # type: ignore[list-item]
            if not read:
                self._changed()
            left, at = left[read:], at + read
        return out

    def check(self) -> None:
        """OSError if the file is another than when it was opened."""
        if _stamp(self.file) != self.stamp:
            self._changed()

    def _changed(self) -> NoReturn:
        raise OSError(
            f"the data file {self.file} must not change during a run, but it has another size or time now: restore it, "
            "or open the data set again"
        )


def _root(array: np.ndarray) -> np.memmap | None:
    """The memory map of a file that an array is, or is a part of in one piece."""
    root: Any = array
    while root is not None and not (isinstance(root, np.memmap) and not isinstance(root.base, np.ndarray)):
        root = getattr(root, "base", None)
    readable = root is not None and root.filename is not None and array.flags.c_contiguous and hasattr(os, "preadv")
    return root if readable else None


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
