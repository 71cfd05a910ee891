"""Training rows that stay on the host, in memory or in a memory-mapped file: a round's are fetched for its cohort."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from fedjax_drift.data.federated import FederatedData, integers_as_int32


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
        self._largest = np.cumsum(np.sort(data.sizes)[::-1], dtype=np.int64)
        self._files = [file for array in (data.x, data.y) if (file := _file_behind(array)) is not None]
        self._stamps = [_stamp(file) for file in self._files]

    def buffer_rows(self, clients: int, needed: int = 0) -> int:
        """R for a cohort of ``clients`` places, that has ``needed`` rows."""
        sizes, most = self.data.sizes, int(self._largest[min(clients, len(self._largest)) - 1])
        usual = int(np.ceil(clients * sizes.mean() + 6 * clients**0.5 * sizes.std()))
        return usual if needed <= usual < most else most

    def fetch(self, ids: np.ndarray) -> Cut:
        """The rows of the clients ``ids`` int [K] (those not in 0..N-1 have none); blocks for reading, not for sending.

        Raises OSError if a memory-mapped file has changed since the data set was opened.
        """
        self._check_files()
        data = self.data
        sizes = data.sizes_of(ids)
        ends = np.cumsum(sizes, dtype=np.int64)
        R = self.buffer_rows(len(ids), int(ends[-1]))
        x, y = (np.zeros((R, *a.shape[1:]), a.dtype) for a in (data.x, data.y))
        for id, size, end in zip(ids, sizes, ends, strict=True):
            if size:
                first = int(data.offsets[id])
                x[end - size : end], y[end - size : end] = data.x[first : first + size], data.y[first : first + size]
        self._check_files()
        sent_x, sent_y = jax.device_put((x, integers_as_int32(y)), self.placement)
        return Cut(sent_x, sent_y, (ends - sizes).astype(np.int32))

    def _check_files(self) -> None:
        for file, stamp in zip(self._files, self._stamps, strict=True):
            if _stamp(file) != stamp:
                raise OSError(
                    f"the data file {file} must not change during a run, but it has another size or time now: "
                    "restore it, or open the data set again"
                )


def _file_behind(array: Any) -> str | None:
    """The file that a memory-mapped array, or a view of one, reads from."""
    while array is not None:
        if isinstance(array, np.memmap) and array.filename is not None:
            return os.fspath(array.filename)
        array = getattr(array, "base", None)
    return None


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
