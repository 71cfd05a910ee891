"""Rounds whose rows or client states are kept on the host: what they need is fetched while the round before trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.data.reading import cut, source
from fedjax_drift.devices.mesh import put
from fedjax_drift.local import LocalTraining
from fedjax_drift.round.engine import Arrays, Client, Rows
from fedjax_drift.simulation.setup import Setup


class Fetched(NamedTuple):
    """What a round needs beside the state."""

    arrays: Arrays
    cohort: jax.Array | Client | None = None  # None: the round draws it
    ids: np.ndarray | None = None  # int [K], where the host has to know the cohort


class Host:
    """Sends rounds the rows and the clients of their cohorts."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._stream = Stream(setup.data, setup.everywhere) if setup.streamed else None

    def fetch(self, ids: np.ndarray) -> Fetched:
        """What a round with the cohort ``ids`` needs."""
        places = np.arange(len(ids)) if self.setup.states_on_host else ids
        return Fetched(*self.send(ids, places, self.setup.engine.local), ids)

    def send(self, ids: np.ndarray, places: np.ndarray, local: LocalTraining) -> tuple[Arrays, Client]:
        """The data set, of streamed rows only those of the clients ``ids``; and these clients.

        places: the rows of ServerState.clients in which their states are.
        """
        arrays, N, sizes = self.setup.arrays, self.setup.data.num_clients, self.setup.data.sizes_of(ids)
        if arrays.rows is not None:
            offsets = np.asarray(arrays.rows.offsets)[np.minimum(ids, N - 1)]
        elif self._stream is not None:
            x, y, offsets = self._stream.fetch(ids)
            arrays = arrays._replace(rows=Rows(x, y))
        places = np.where(ids < N, places, self.setup.engine.state_rows)
        columns = (ids, sizes, offsets, local.steps(sizes), places)
        return arrays, Client(*put([column.astype(np.int32) for column in columns], self.setup.everywhere))


@contextmanager
def prefetching(fetch: Callable[[int], Fetched], last: int) -> Iterator[Callable[[int], Fetched]]:
    """A ``fetch(t)`` that also starts to fetch what round t + 1 needs, if that is before round ``last``."""
    with ThreadPoolExecutor(1) as pool:
        waiting: dict[int, Future[Fetched]] = {}

        def ahead(t: int) -> Fetched:
            ready = waiting.pop(t, None)
            fetched = fetch(t) if ready is None else ready.result()
            if t + 1 < last:
                waiting[t + 1] = pool.submit(fetch, t + 1)
            return fetched

        yield ahead


class CohortRows(NamedTuple):
    """A cohort's rows on the devices, one client after the other; the rest of the buffer is padding."""

    x: jax.Array  # [R, ...] as stored
    y: jax.Array  # [R, ...]
    offsets: np.ndarray  # int32 [K], where each client's rows begin


class Stream:
    """Cuts the rows of a cohort out of the data set and sends them to the devices.

    The buffer's length R depends on the cohort's length only, so that rounds share one compiled program: six standard
    deviations above the rows of a mean cohort. A cohort with more rows than that gets a buffer for the largest clients.
    """

    def __init__(self, data: FederatedData, sharding: Sharding) -> None:
        self.data, self.sharding = data, sharding
        self._mean, self._spread = float(data.sizes.mean()), float(data.sizes.std())
        self._largest = np.cumsum(np.sort(data.sizes)[::-1], dtype=np.int64)
        self._sources = [source(a) for a in (data.x, data.y)]

    def buffer_rows(self, clients: int, needed: int = 0) -> int:
        """R for a cohort of ``clients`` places that has ``needed`` rows."""
        most = int(self._largest[min(clients, len(self._largest)) - 1])
        usual = int(np.ceil(clients * self._mean + 6 * clients**0.5 * self._spread))
        return usual if needed <= usual < most else most

    def fetch(self, ids: np.ndarray) -> CohortRows:
        """The rows of the clients ``ids`` int [K]; those not in 0..N-1 have none. Waits for reading, not for sending.

        Raises OSError if a memory-mapped file has changed since the data set was opened.
        """
        sizes = self.data.sizes_of(ids)
        begins = self.data.offsets[np.minimum(ids, self.data.num_clients - 1)]
        ends = np.cumsum(sizes, dtype=np.int64)
        R = self.buffer_rows(len(ids), int(ends[-1]))
        x, y = (cut(array, begins, sizes, ends - sizes, R) for array in self._sources)
        sent_x, sent_y = put((x, integers_as_int32(y)), self.sharding)
        return CohortRows(sent_x, sent_y, (ends - sizes).astype(np.int32))
