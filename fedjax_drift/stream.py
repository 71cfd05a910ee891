"""Training rows that stay on the host, in memory or in a memory-mapped file: a round's are fetched for its cohort."""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import Sharding

from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.sharding import put


class Cut(NamedTuple):
    """A cohort's rows on the devices, one client after the other; the rest of the buffer is padding."""

    x: jax.Array  # [R, ...] as stored
    y: jax.Array  # [R, ...]
    offsets: np.ndarray  # int32 [K], where each client's rows begin


class Stream:
    """Cuts the rows of a cohort out of the data set and sends them to the devices.

    The buffer's length R depends on the cohort's length only, so that rounds share one compiled program: six standard
    deviations above the rows of a mean cohort. A cohort with more rows than that gets a buffer for the largest clients.
    """

    def __init__(self, data: FederatedData, placement: Sharding) -> None:
        self.data, self.placement = data, placement
        self._mean, self._spread = float(data.sizes.mean()), float(data.sizes.std())
        self._largest = np.cumsum(np.sort(data.sizes)[::-1], dtype=np.int64)
        self._sources = [source(a) for a in (data.x, data.y)]

    def buffer_rows(self, clients: int, needed: int = 0) -> int:
        """R for a cohort of ``clients`` places, that has ``needed`` rows."""
        most = int(self._largest[min(clients, len(self._largest)) - 1])
        usual = int(np.ceil(clients * self._mean + 6 * clients**0.5 * self._spread))
        return usual if needed <= usual < most else most

    def fetch(self, ids: np.ndarray) -> Cut:
        """The rows of the clients ``ids`` int [K] (those not in 0..N-1 have none); blocks for reading, not for sending.

        Raises OSError if a memory-mapped file has changed since the data set was opened.
        """
        sizes = self.data.sizes_of(ids)
        begins = self.data.offsets[np.minimum(ids, self.data.num_clients - 1)]
        ends = np.cumsum(sizes, dtype=np.int64)
        R = self.buffer_rows(len(ids), int(ends[-1]))
        x, y = (cut(array, begins, sizes, ends - sizes, R) for array in self._sources)
        sent_x, sent_y = put((x, integers_as_int32(y)), self.placement)
        return Cut(sent_x, sent_y, (ends - sizes).astype(np.int32))


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
