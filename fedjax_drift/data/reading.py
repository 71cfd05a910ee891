"""Copies the rows of many clients from an array in memory or from a memory-mapped file."""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np


def source(array: np.ndarray) -> np.ndarray | _Mapped:
    """Returns an object from which `cut` reads the rows of the array. A memory map is read with system calls."""
    return array if (root := _root(array)) is None else _Mapped(root, array)


def cut(rows: np.ndarray | _Mapped, begins: np.ndarray, sizes: np.ndarray, places: np.ndarray, R: int) -> np.ndarray:
    """Returns an array [R, ...] with the rows of several clients. The rest of the array is zero.

    The rows of client k are begins[k] .. begins[k] + sizes[k] - 1. They are copied to the positions from places[k] on.
    """
    out = np.zeros((R, *rows.shape[1:]), rows.dtype)
    for begin, size, place in zip(begins.tolist(), sizes.tolist(), places.tolist(), strict=True):
        if size:
            out[place : place + size] = rows[begin : begin + size]
    return out


class _Mapped:
    """The rows of a memory-mapped file, read with system calls.

    Reading through the memory map would be several times slower when a page is accessed for the first time. It would
    also kill the process if the file has been truncated.
    """

    def __init__(self, root: np.memmap, array: np.ndarray) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self.file = os.fspath(root.filename)  # type: ignore[arg-type]
        within = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        self.begin, self.row = root.offset + within, array[:1].nbytes
        self.descriptor = os.open(self.file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def __getitem__(self, rows: slice) -> np.ndarray:
        out = np.empty((rows.stop - rows.start, *self.shape[1:]), self.dtype)
        missing, position = out.reshape(-1).view(np.uint8), self.begin + rows.start * self.row
        while missing.size:  # one call reads at most 2 GiB
            count = os.preadv(self.descriptor, [missing], position)  # type: ignore[list-item]
            if not count:
                raise OSError(f"the data file {self.file} must not become shorter during a run: restore it")
            missing, position = missing[count:], position + count
        return out


def _root(array: np.ndarray) -> np.memmap | None:
    """Returns the memory map of which the array is a contiguous part, or None."""
    root: Any = array
    while root is not None and not (isinstance(root, np.memmap) and not isinstance(root.base, np.ndarray)):
        root = getattr(root, "base", None)
    readable = root is not None and root.filename is not None and array.flags.c_contiguous and hasattr(os, "preadv")
    return root if readable else None
