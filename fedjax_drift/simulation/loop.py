"""The loop behind `Simulation.run` and `sweep`: rounds, evaluations, records, checkpoints, and stopping.

    track      the runs that advance together in one program, see `Track`
    flight     a program that has been dispatched, and whose results have not been fetched yet
    record     the entry of the history for one round of one run; it is made when the results have been fetched

The host dispatches the next program before it fetches the results of the previous one. So the devices do not wait for
the host.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fedjax_drift import checks
from fedjax_drift.devices.launch import intact, wait_for_turn
from fedjax_drift.devices.processes import agree, spans_processes
from fedjax_drift.simulation.programs import MOST_ROUNDS
from fedjax_drift.simulation.progress import Bar, Stop
from fedjax_drift.simulation.records import History, record
from fedjax_drift.simulation.tracks import Track
from fedjax_drift.storage.saver import Saver
from fedjax_drift.types import Record, ServerState

CHUNK_SECONDS = 0.1  # the intended duration of a program of several rounds; Ctrl-C takes effect after about this time


class Flight(NamedTuple):
    """n rounds of a track that have been dispatched."""

    track: int
    done: int  # number of completed rounds of each run when these n rounds have finished
    n: int
    infos: dict[str, Any]
    scores: dict[str, Any]  # the evaluation of the state after the last round


@dataclass(frozen=True)
class Schedule:
    """The rounds in which the runs are evaluated, measured and saved. 0 in a field ``..._every`` means never."""

    last: int  # the round at which the runs end
    eval_every: int
    measure_every: int
    save_every: int
    one_round_a_program: bool = False  # `runner.train` sets it

    def step(self, t: int, most: int) -> tuple[int, bool]:
        """Returns the number of rounds (at most ``most``) that the next program runs from round t, and whether the
        last of them is measured."""

        def rounds_to(every: int) -> int:
            return every - t % every if every else self.last - t

        n = min(most, self.last - t, rounds_to(self.eval_every), rounds_to(self.save_every))
        if not self.measure_every:
            return n, False
        measured = rounds_to(self.measure_every) == 1
        return (1 if measured else min(n, rounds_to(self.measure_every) - 1)), measured

    def evaluates(self, t: int) -> bool:
        return bool(self.eval_every) and t % self.eval_every == 0


class Loop:
    """Advances the tracks of a mesh together, round by round, and keeps the history of every run.

    Args:
      tracks: the tracks, all at the same round, each with at least one run.
      schedule: the rounds in which the runs are evaluated, measured and saved.
      complaints: ``complaints(run, t, info, record) -> {kind: message}`` returns the warnings about a round. Each kind
        is issued once per run.
      on_record: ``on_record(run, record)`` is called for each record, until it raises an exception.
      until: ``until(run, history)`` is called after each evaluation. The loop ends when it has returned True for every
        run.
      bar: the progress bar, shown while the loop runs.
      stop: becomes `requested` when Ctrl-C or SIGTERM stops the loop.

    Attributes:
      savers: save the runs, one each. Empty: nothing is saved.
    """

    savers: Sequence[Saver] = ()

    def __init__(
        self,
        tracks: Sequence[Track],
        mesh: Mesh,
        schedule: Schedule,
        complaints: Callable[[int, int, dict, Record], Mapping[str, str]],
        on_record: Callable[[int, Record], None] | None,
        until: Callable[[int, list[Record]], bool] | None,
        bar: Bar,
        stop: Stop,
    ) -> None:
        self.tracks, self.mesh, self.schedule = tracks, mesh, schedule
        self.complaints, self.on_record, self.until = complaints, on_record, until
        self.bar, self.stop = bar, stop
        self._ended: set[int] = set()  # runs for which `until` has returned True
        self.histories: list[list[Record]] = [History() for track in tracks for _ in track.runs]
        self.seconds = float("inf")  # the duration of a recent round of all runs together
        self.terminated = False  # whether SIGTERM has ended the loop, in this process or in another one
        self._flying: deque[Flight] = deque()
        self._landed: deque[tuple] = deque()  # rounds fetched and not yet recorded
        self._clock = time.perf_counter()
        self._reported: set[tuple[int, str]] = set()

    def states(self) -> list[ServerState]:
        """Returns the newest state of every run."""
        newest = dict(pair for track in self.tracks for pair in track.states())
        return [newest[run] for run in range(len(self.histories))]

    def surviving_states(self) -> list[ServerState | None]:
        """Returns the newest state of every run, or None for a run whose state a failed program has overwritten."""
        newest = dict(pair for track in self.tracks if intact(track.state) for pair in track.states())
        return [newest.get(run) for run in range(len(self.histories))]

    def run(self, t: int, attach: Callable[[Exception, list[ServerState | None]], None]) -> None:
        """Advances all runs from round t to the last round.

        attach: ``attach(error, states)`` is called with an exception that ends the loop and the surviving states. It
        attaches the states and histories to the exception.
        """
        with self._saved_on_error(attach):
            with suppress(KeyboardInterrupt):
                t = self._advance(t)
            try:
                # The last round of a stopped run that can be resumed is not evaluated.
                if self.schedule.eval_every and (not self.savers or t == self.schedule.last):
                    self._score()
                self._catch_up(0)
            except KeyboardInterrupt:  # the completed rounds are recorded without this evaluation
                self._without_scores()
                with suppress(KeyboardInterrupt), self.stop.held():
                    self._catch_up(0)
        with suppress(KeyboardInterrupt), self.stop.held():  # everything is saved even after Ctrl-C
            with ExitStack() as stack:  # all runs are saved, even if one of them raises OSError
                for saver, state, history in self._saved():
                    stack.callback(saver.finish, state, history)

    def _saved(self) -> Iterator[tuple[Saver, ServerState, list[Record]]]:
        """The saver, the newest state and the history of every run, if the runs are saved."""
        if self.savers:
            yield from zip(self.savers, self.states(), self.histories, strict=True)

    def _advance(self, t: int) -> int:
        """Advances to the last round, or to the round after which a stop was requested. Returns this round."""
        savers, schedule, started = self.savers, self.schedule, False
        while t < schedule.last:
            if savers and started and math.isinf(self.seconds):
                self._catch_up(0)  # from now on, the duration of a round is known
            in_flight = self.seconds * self._flying[-1].n if self._flying else 0.0  # seconds until they have landed
            due = bool(savers) and started and savers[0].due(t, in_flight)
            at_once = 1 if schedule.one_round_a_program else max(1, min(MOST_ROUNDS, int(CHUNK_SECONDS / self.seconds)))
            numbers = [at_once, int(due)]
            (most, save), (stopped, terminated) = agree(self.mesh, numbers, [self.stop.requested, self.stop.terminated])
            self.terminated |= bool(terminated)
            if stopped:
                break
            if save:
                self._catch_up(0)
                for saver, state, history in self._saved():
                    saver.save(state, history)
            n, measured = schedule.step(t, most)
            for number, track in enumerate(self.tracks):
                track.prepare(t)
                wait_for_turn(self.mesh)  # here Ctrl-C may interrupt
                with self.stop.held():  # no interrupt between donating a state and storing the next one
                    self._flying.append(Flight(number, t + n, n, track.advance(t, n, measured), {}))
            t, started = t + n, True
            if schedule.evaluates(t):
                self._score()
            for saver in savers:
                saver.confirm()
            if savers and schedule.evaluates(t) and savers[0].checkpoints.best is not None:
                self._catch_up(0)
                for saver, state, history in self._saved():
                    saver.consider(state, history)
            if schedule.evaluates(t) and self._all_ended():
                break
            self._catch_up(len(self.tracks))
        return t

    def _all_ended(self) -> bool:
        """Whether `until` has returned True for every run. Waits for the evaluation of the newest states."""
        if self.until is None:
            return False
        self._catch_up(0)
        self._ended |= {run for run, history in enumerate(self.histories) if history and self.until(run, history)}
        return len(self._ended) == len(self.histories)

    def _score(self) -> None:
        """Dispatches the evaluation of the newest state of each track.

        Skips a track whose newest state is already being evaluated or whose newest rounds have been recorded.
        """
        newest = {flight.track: position for position, flight in enumerate(self._flying)}
        for track, position in newest.items():
            if not self._flying[position].scores:
                self._flying[position] = self._flying[position]._replace(scores=self.tracks[track].score())

    def _without_scores(self) -> None:
        """Leaves out the evaluations of the programs in flight."""
        self._flying = deque(flight._replace(scores={}) for flight in self._flying)

    def _catch_up(self, behind: int) -> None:
        """Waits until only ``behind`` programs are in flight, and records the rounds of the finished programs."""
        while len(self._flying) > behind:
            flight = self._flying[0]
            infos, scores = jax.device_get((flight.infos, flight.scores))  # here Ctrl-C may interrupt
            with self.stop.held():
                self._flying.popleft()
                elapsed, landed = time.perf_counter() - self._clock, flight.track + 1
                # Until all tracks have landed once, the duration for all of them is extrapolated.
                seconds = (
                    self.seconds if math.isfinite(self.seconds) else elapsed * len(self.tracks) / landed / flight.n
                )
                if landed == len(self.tracks):
                    seconds = self.seconds = elapsed / flight.n
                    self._clock = time.perf_counter()
                for run, j, info, last in self.tracks[flight.track].rounds(flight.n, infos, scores):
                    self._landed.append((run, flight.done - flight.n + j, info, last, seconds))
            self._record_landed()
        self._record_landed()  # the rounds that were not recorded because on_record raised an exception

    def _record_landed(self) -> None:
        while self._landed:
            with self.stop.held():
                run, t, info, scores, seconds = self._landed.popleft()
                entry = record(t + 1, info) | {"seconds": seconds}
                entry |= {name: float(value) for name, value in scores.items()}
                self.histories[run].append(entry)
            self.bar.update(entry)
            for kind, message in self.complaints(run, t, info, entry).items():
                if (run, kind) not in self._reported:
                    self._reported.add((run, kind))
                    checks.warn(message, RuntimeWarning)
            if self.on_record is not None:
                try:
                    self.on_record(run, entry)
                except Exception:  # on_record is not called for the remaining records
                    self.on_record = None
                    raise

    @contextmanager
    def _saved_on_error(self, attach: Callable[[Exception, list[ServerState | None]], None]) -> Iterator[None]:
        """If a round or on_record raises an exception in the block, attaches the results to it and saves them."""
        try:
            yield
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and spans_processes(self.mesh):
                raise  # another process may be gone, and its results would be waited for
            with suppress(Exception):
                self._catch_up(0)
            with suppress(Exception):  # again, because an evaluation may have failed after its rounds
                self._without_scores()
                self._catch_up(0)
            states = self.surviving_states()
            attach(error, states)
            if None in states:
                error.add_note(
                    "The program that failed has overwritten the state before it, which is lost (None). The records "
                    "of the rounds before are attached to this exception. Continue from a checkpoint, or start again."
                )
            elif any(self.histories) and not spans_processes(self.mesh):
                for saver, state, history in self._saved():
                    saver.save(state, history)
            raise


def attach_to(error: Exception, **results: Any) -> None:
    """Sets attributes of an exception, unless its type does not allow attributes."""
    with suppress(TypeError):
        vars(error).update(results)
