"""Runs that advance together in one program: one run, or the runs of a turn of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.host import Fetched, prefetching
from fedjax_drift.simulation.placement import at_round
from fedjax_drift.types import ServerState

Fetch = Callable[[int, ServerState], Fetched]


class Track:
    """Runs that advance together.

    Args:
      executor: their programs.
      state: the state from which they start. Those of a turn have a first axis of runs.
      run: the number of the run, if it is one.
      fetch: ``fetch(t, state)`` returns what round t, which starts with ``state``, needs from the host. Default: the
        data are on the devices.
      stacked: whether a program may run several rounds.
      may_overwrite: whether the first program may overwrite the state.
    """

    def __init__(
        self,
        executor: Executor,
        state: ServerState,
        run: int = 0,
        fetch: Fetch | None = None,
        stacked: bool = True,
        may_overwrite: bool = True,
    ) -> None:
        self.executor, self.state, self.stacked = executor, state, stacked
        turn = executor.turn
        self.places = [(0, run)] if turn is None else [*turn.places()]
        self.runs = [run for _, run in self.places]
        self._fetch = fetch or (lambda t, state: Fetched(executor.arrays))
        self._may_overwrite = may_overwrite
        self._done: int  # the number of completed rounds when the last program has finished

    def prepare(self, t: int) -> None:
        """Waits for the data and client states that round t needs from the host."""
        self._fetched = self._fetch(t, self.state)

    def advance(self, t: int, n: int, measured: bool) -> dict[str, jax.Array]:
        """Dispatches n rounds from round t and returns their infos. measured: measure drift in the last round."""
        measures = self.executor.setup.measures if measured else ()
        self.state, infos = self.executor.rounds(self.state, n, self._fetched, measures, self._may_overwrite)
        self._may_overwrite, self._done = True, t + n
        return infos

    def score(self) -> dict[str, jax.Array]:
        """Dispatches the evaluation of the newest state."""
        if self.executor.arrays.test is None:  # in a sweep, other runs may have one
            return {}
        if self.executor.turn is None:
            return self.executor.scores(self.state)
        return self.executor.scores(self.state, np.int32(self._done))

    def rounds(self, n: int, infos: dict, scores: dict) -> Iterator[tuple[int, int, dict, dict]]:
        """Yields (run, j, info, scores) for each round j < n of each run, from results on the host."""
        for place, run in self.places:
            of_run, scored = (each if self.executor.turn is None else _at(place, each) for each in (infos, scores))
            for j in range(n):
                yield run, j, _at(j, of_run) if self.stacked else of_run, scored if j == n - 1 else {}

    def states(self) -> Iterable[tuple[int, ServerState]]:
        """Returns (run, newest state) for each run. A state is on the devices that trained it."""
        turn = self.executor.turn
        if turn is None:
            return [(self.runs[0], self.state)]
        return [(run, turn.layout.of_place(self.state, place)) for place, run in self.places]


def _at(i: int, values: dict[str, Any]) -> dict[str, Any]:
    return {name: array[i] for name, array in values.items()}


@contextmanager
def alone(
    executor: Executor,
    state: ServerState,
    last: int,
    *,
    may_overwrite: bool,
    cohort_of: Callable[[int], Any] | None = None,
    run: int = 0,
) -> Iterator[Track]:
    """Yields the track of one run until round ``last``. While it trains, the next round is fetched from the host.

    may_overwrite: see `Track`. cohort_of: the cohort of a round; None: they are drawn.
    """
    setup, given = executor.setup, cohort_of or (lambda t: None)
    fetching: Any = nullcontext(lambda t, state: Fetched(setup.arrays, given(t)))
    if setup.needs_host:
        start = executor.selects_from(state)  # a copy, because the state is donated
        fetching = nullcontext(lambda t, state: executor.fetch(state, given(t)))
        if setup.selects_ahead or cohort_of is not None:
            fetching = prefetching(lambda t: executor.fetch(at_round(start, t), given(t)), last)
    with fetching as fetch:
        stacked = not setup.one_round_a_program and cohort_of is None
        yield Track(executor, state, run, fetch, stacked, may_overwrite)
