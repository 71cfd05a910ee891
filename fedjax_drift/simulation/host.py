"""Sends examples and client states from the host to the devices, while the previous round is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift.data.federated import integers_as_int32
from fedjax_drift.data.reading import cut, source
from fedjax_drift.devices.mesh import flat, put
from fedjax_drift.local import LocalTraining
from fedjax_drift.round.arrays import Arrays, Client, Rows
from fedjax_drift.simulation.setup import Setup


class Fetched(NamedTuple):
    """The arguments of a round besides the state."""

    arrays: Arrays
    cohort: jax.Array | Client | None = None  # None: the round draws the cohort itself
    ids: np.ndarray | None = None  # int [K], the cohort. None: the host does not need it


class Host:
    """Sends the examples and the client records of a cohort to the devices."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._stream = Stream(setup) if setup.streamed else None

    def fetch(self, ids: np.ndarray, factor: np.ndarray | None, local: LocalTraining | None = None) -> Fetched:
        """Returns what a round with the cohort ``ids`` needs.

        If the examples are streamed, the data set contains only the examples of these clients.

        factor: the clients' factors, or None. local: the local training. Default: that of the simulation.
        """
        local = self.setup.engine.local if local is None else local
        places = np.arange(len(ids)) if self.setup.states_on_host else ids
        arrays, N, sizes = self.setup.arrays, self.setup.data.num_clients, self.setup.data.sizes_of(ids)
        if arrays.rows is not None:
            offsets = np.asarray(arrays.rows.offsets)[np.minimum(ids, N - 1)]
        elif self._stream is not None:
            rows, offsets = self._stream.fetch(ids)
            arrays = arrays._replace(rows=rows)
        places = np.where(ids < N, places, self.setup.engine.state_rows)
        columns = [column.astype(np.int32) for column in (ids, sizes, offsets, local.num_steps(sizes), places)]
        clients = Client(*put(columns, self.setup.everywhere))
        if factor is not None:
            clients = clients._replace(factor=put(factor, self.setup.everywhere))
        return Fetched(arrays, clients, ids)


@contextmanager
def prefetching(fetch: Callable[[int], Fetched], last: int) -> Iterator[Callable[[int, Any], Fetched]]:
    """Yields a ``fetch(t, state)`` that also starts to fetch what round t + 1 needs, if t + 1 < last."""
    with ThreadPoolExecutor(1) as pool:
        waiting: dict[int, Future[Fetched]] = {}

        def ahead(t: int, state: Any) -> Fetched:
            ready = waiting.pop(t, None)
            fetched = fetch(t) if ready is None else ready.result()
            if t + 1 < last:
                waiting[t + 1] = pool.submit(fetch, t + 1)
            return fetched

        yield ahead


class Stream:
    """Reads the examples of a cohort from the data set and sends them to the devices in a buffer of length R.

    R usually depends only on the number of clients, so that all rounds share one compiled program. R is then the mean
    number of examples of such a cohort plus six standard deviations. A cohort with more examples gets a buffer
    that is long enough for every cohort, that is, for the K largest clients together.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, data = setup, setup.data
        self._mean, self._spread = float(data.sizes.mean()), float(data.sizes.std())
        self._largest = np.cumsum(np.sort(data.sizes)[::-1], dtype=np.int64)
        self._sources = [source(a) for a in (data.x, data.y)]

    def fetch(self, ids: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Returns the examples of the clients ``ids`` int [K] on the devices, one client after the other, and the index
        of each client's first example, int32 [K]. An id outside of 0..N-1 has no examples.

        Returns when the examples have been read, and does not wait until they have been sent. Raises OSError if a
        memory-mapped file was truncated.
        """
        data = self.setup.data
        sizes, begins = data.sizes_of(ids), data.offsets[np.minimum(ids, data.num_clients - 1)]
        ends = np.cumsum(sizes, dtype=np.int64)
        most = int(self._largest[min(len(ids), len(self._largest)) - 1])
        usual = int(np.ceil(len(ids) * self._mean + 6 * len(ids) ** 0.5 * self._spread))
        R = usual if ends[-1] <= usual < most else most
        x, y = (cut(array, begins, sizes, ends - sizes, R) for array in self._sources)
        sent_x, sent_y = put((flat(x, self.setup.mesh), integers_as_int32(y)), self.setup.everywhere)
        return Rows(sent_x, sent_y), (ends - sizes).astype(np.int32)
