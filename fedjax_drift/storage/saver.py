"""Writes the checkpoints of a run during training, and deletes the checkpoints that are not kept."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.devices.processes import first_does, spans_processes
from fedjax_drift.disk import unused
from fedjax_drift.errors import DamagedError
from fedjax_drift.storage import array_files
from fedjax_drift.storage.checkpoint import Checkpoints, check_mesh, check_same, score, versions
from fedjax_drift.storage.client_store import ClientStore
from fedjax_drift.storage.contents import (
    FORMAT,
    About,
    Leaf,
    arrays_of,
    checksums,
    layout,
    read_arrays,
    reason,
)
from fedjax_drift.storage.identity import differences
from fedjax_drift.storage.specification import Specification, key_words
from fedjax_drift.storage.writing import Write, delete_unfinished
from fedjax_drift.types import Record, ServerState

DELETED, DAMAGED = ".deleted", ".damaged"  # suffixes of folders
Hold = Callable[[], contextlib.AbstractContextManager]


@contextlib.contextmanager
def saving(
    each: Sequence[Checkpoints],
    specs: Sequence[Specification],
    states: Sequence[ServerState],
    hold: Hold,
    back: bool = False,
) -> Iterator[list[Saver]]:
    """Returns a context manager that saves runs: the run of `Simulation.run`, or those of a sweep. Every process of the
    runs enters it.

    Args:
      each: the `Checkpoints` of each run.
      specs: the description of the simulation of each run.
      states: the state from which each run starts.
      hold: a context manager that delays signals during the steps of a save, so that no process leaves a step in which
        all of them take part.
      back: whether to delete checkpoints of these runs that are later than their start states.

    Raises:
      OtherRunError: a folder has the checkpoints of another run.
      InUseError: a folder is in use.
      ConfigurationError: a folder cannot be written, or has checkpoints of later rounds.
    """
    savers = []
    with contextlib.ExitStack() as stack:
        for checkpoints, spec, state in zip(each, specs, states, strict=True):
            check_mesh(spec)
            first_does(spec.mesh, partial(stack.enter_context, checkpoints.locked(create=True)))
            history, damaged, later = _history(checkpoints, spec, state, back)
            first_does(spec.mesh, partial(_clear, checkpoints, damaged, later))
            savers.append(Saver(checkpoints, spec, state, history, hold))
            stack.callback(savers[-1].settle)
            savers[-1].save_start(state)
        yield savers


def _history(
    checkpoints: Checkpoints, spec: Specification, state: ServerState, back: bool
) -> tuple[list[Record], list[int], list[int]]:
    """Returns the history up to the state's round, the damaged checkpoints of this and later rounds, and the intact
    checkpoints of later rounds. Raises ConfigurationError if there are any, unless ``back``."""
    t, identity, store = int(state.round), checkpoints.identity_of(spec), state.clients
    intact, damaged = list[About](), list[int]()
    for number in checkpoints.rounds:
        try:
            about = checkpoints.about(number)
            if number > t and not back and not differences(about.identity, identity)[0]:
                read_arrays(checkpoints.place(number), spec, about)
                if isinstance(store, ClientStore) and store.in_files and number not in store.pins:
                    raise DamagedError("the pin of its client states is missing or damaged")
            intact.append(about)
        except DamagedError:
            damaged += [number] * (number >= t)
    if intact:
        stored = intact[-1].identity | {"key": intact[-1].key}
        check_same(checkpoints.path, stored, identity | {"key": key_words(state)})
    later = [about.round for about in intact if about.round > t]
    if later and not back:
        checks.refuse(
            f"the folder must have no checkpoints of rounds after {t}, the round of the state",
            f"round {later[-1]} in {checkpoints.path}",
            "resume with checkpoints.restore(sim), or choose another folder",
        )
    before = intact[: len(intact) - len(later)]
    if before and before[-1].round < t:
        checks.warn(
            f"rounds {before[-1].round + 1} to {t} were run without checkpoints: the history in {checkpoints.path} "
            "does not contain them"
        )
    return before[-1].history if before else [], damaged, later


def _delete(checkpoints: Checkpoints, t: int) -> None:
    """Deletes a checkpoint. It is renamed first, so that an interruption does not leave an incomplete checkpoint."""
    folder = checkpoints.place(t)
    renamed = folder.rename(folder.with_name(folder.name + DELETED))
    shutil.rmtree(renamed, ignore_errors=True)


def _clear(checkpoints: Checkpoints, damaged: list[int], later: list[int]) -> None:
    """Moves damaged checkpoints aside, and deletes later ones."""
    for number in damaged:
        folder = checkpoints.place(number)
        folder.rename(unused(folder.with_name(folder.name + DAMAGED)))
    for number in later:
        _delete(checkpoints, number)


class Contents(NamedTuple):
    """The contents of the checkpoint of a state."""

    round: int
    leaves: list[Leaf]
    described: list[list]  # [name, dtype, shape, checksum] of each leaf
    records: int  # number of records that were added up to the state, since saving started
    score: float | None


class Saver:
    """Saves one run, in every process. Only process 0 deletes checkpoints, warns, and decides when to save."""

    def __init__(
        self, checkpoints: Checkpoints, spec: Specification, state: ServerState, history: list[Record], hold: Hold
    ) -> None:
        self.checkpoints, self.spec, self.history_before, self.hold = checkpoints, spec, history, hold
        self.identity, self.key = checkpoints.identity_of(spec), key_words(state)
        in_files = isinstance(state.clients, ClientStore) and state.clients.in_files
        self.client_files: ClientStore | None = state.clients if in_files else None
        self.scores = {t: checkpoints.score_of(t) for t in checkpoints.rounds}
        self.writing: tuple[Write, Contents] | None = None  # the current save
        self.best: Contents | None = None  # a state that is better than all saved states and is not written yet
        self.clock = time.monotonic()
        self._delete_leftovers()

    def save_start(self, state: ServerState) -> None:
        """Saves the first state of a run whose client states are in files.

        Otherwise, if the process is killed before the first save, the folder ``bank=`` has client states, but there is
        no checkpoint with the rest of the run's state.
        """
        if self.client_files is not None and int(state.round) not in self.scores:
            self.save(state, [])
            self.settle()

    def due(self, t: int, ahead: float) -> bool:
        """Whether to save after round t, which ends in ``ahead`` seconds. Its save starts then.

        Without ``ahead``, the answer would be one round late: the host asks while round t is still being trained.
        """
        every, seconds = self.checkpoints.every, self.checkpoints.seconds
        if every is not None and t % every == 0:
            return True
        return seconds is not None and time.monotonic() - self.clock + ahead >= seconds and not self._is_busy()

    def save(self, state: ServerState, history: list[Record]) -> None:
        """Starts to save the state, with the history of this run. If saving fails, it warns, and training continues."""
        self.settle()
        t = int(state.round)
        self._write_best(t, history)
        if t not in self.scores:
            self._try(t, lambda: self._write(self._contents(state, history), history))

    def confirm(self) -> None:
        """Waits until the current save is complete, if ``every`` is set or there are several processes. The devices
        train during this time.

        Later rounds are reported only after the save is complete. So a crash never loses more than ``every`` reported
        rounds. Several processes complete a save together, which they can do only at the same point of the run.
        """
        if self.checkpoints.every is not None or spans_processes(self.spec.mesh):
            self.settle()

    def settle(self) -> None:
        """Waits until the current save is complete. If the save has failed, it warns."""
        if self.writing is not None:
            self._try(self.writing[1].round, self._settle)

    def consider(self, state: ServerState, history: list[Record]) -> None:
        """Keeps the state if it is the best evaluated state so far. Its score is in the last record of the history.

        The state stays in host memory and is written with the next save, because writing every best state would slow
        down short rounds. If the process is killed before that, the lost rounds are repeated after a restart. With
        several processes the state is written immediately.
        """
        value = self._score(history)
        unsaved = [self.best, self.writing[1] if self.writing is not None else None]
        known = [*self.scores.values(), *(contents.score for contents in unsaved if contents is not None)]
        if value is None or any(other is not None and other >= value for other in known):
            return
        if spans_processes(self.spec.mesh):
            self.save(state, history)
            return
        with self.hold():
            try:
                contents = self._contents(state, history)
                self.best = contents._replace(leaves=[np.array(leaf) for leaf in contents.leaves])
            except Exception as error:
                checks.warn(
                    f"round {int(state.round)}, the best so far, could not be saved ({reason(error)}): the run "
                    "continues"
                )

    def finish(self, state: ServerState, history: list[Record]) -> None:
        """Saves the final state if it is not saved yet, and waits until the save is complete.

        Raises:
          OSError: the state could not be saved. The exception has ``error.state`` and ``error.history``.
        """
        t = int(state.round)
        self.settle()
        self._write_best(t, history)
        if t in self.scores:
            return
        try:
            with self.hold():
                self._write(self._contents(state, history), history)
                self._settle()
        except Exception as error:
            self._discard()
            last = max(self.scores, default=None)
            where = f"the last checkpoint is of round {last}" if self.scores else "there is no checkpoint"
            lost = OSError(
                getattr(error, "errno", None) or errno.EIO,
                f"the end of the run, round {t}, could not be saved in {self.checkpoints.path} ({reason(error)}), "
                f"{where}: all rounds are in error.state and error.history; free some disk space or repair the folder",
            )
            vars(lost).update(state=state, history=history)
            raise lost from error

    def _try(self, t: int, step: Callable[[], None]) -> None:
        """Calls a step of the save of round t. If it fails, warns, and deletes what is written of this save."""
        with self.hold():
            try:
                step()
            except Exception as error:
                self._discard()
                if jax.process_index() == 0:
                    checks.warn(
                        f"round {t} could not be saved in {self.checkpoints.path} ({reason(error)}): the run "
                        "continues, and the next save tries again"
                    )

    def _is_busy(self) -> bool:
        """Whether a save is in progress."""
        return self.writing is not None and not self.writing[0].has_ended()

    def _contents(self, state: ServerState, history: list[Record]) -> Contents:
        """Returns the arrays of a state with their checksums. Client states in files are pinned."""
        if self.client_files is not None:
            self.client_files.pin()
        arrays = arrays_of(state)
        leaves = jax.tree.leaves(arrays)
        layouts = zip(layout(self.spec, arrays), checksums(self.spec, leaves), strict=True)
        described = [[*leaf, check] for leaf, check in layouts]
        return Contents(int(state.round), leaves, described, len(history), self._score(history))

    def _score(self, history: list[Record]) -> float | None:
        return score(history or self.history_before, self.checkpoints.best)

    def _write_best(self, t: int, history: list[Record]) -> None:
        """Saves the best state, unless it is the state of round t, which is saved anyway."""
        best, self.best = self.best, None
        if best is not None and best.round != t:
            self._try(best.round, lambda: self._write(best, history))
            self.settle()

    def _write(self, contents: Contents, history: list[Record]) -> None:
        """Starts to write."""
        self.clock = time.monotonic()
        records = self.history_before + history[: contents.records]
        about = About(FORMAT, versions(), self.identity, contents.round, self.key, records, contents.described)
        text = json.dumps(about._asdict())  # encoded now, because the caller may change the records
        parts = array_files.parts_here(contents.leaves)
        write = Write(self.spec.mesh, self.checkpoints.place(contents.round), text, parts)
        self.writing = write, contents._replace(leaves=[])  # the memory of the arrays is free once they are written

    def _settle(self) -> None:
        """Waits until the current save is complete, and deletes checkpoints that are not kept any more."""
        assert self.writing is not None
        write, contents = self.writing
        write.wait()
        self.scores[contents.round], self.writing = contents.score, None
        kept = rounds_to_keep(self.scores, self.checkpoints.keep)
        self.scores = {t: value for t, value in self.scores.items() if t in kept}
        if jax.process_index() == 0:
            for t in set(self.checkpoints.rounds) - kept:
                _delete(self.checkpoints, t)
        if self.client_files is not None:
            for t in set(self.client_files.pins) - kept - {self.best.round if self.best is not None else -1}:
                self.client_files.unpin(t)

    def _discard(self) -> None:
        """Gives up the current save."""
        self.writing = None
        self._delete_leftovers()

    def _delete_leftovers(self) -> None:
        """Deletes the remaining files of failed saves and of interrupted deletions."""
        if jax.process_index() == 0:
            delete_unfinished(self.checkpoints.path)
            for folder in self.checkpoints.path.glob("*" + DELETED):
                shutil.rmtree(folder, ignore_errors=True)


def rounds_to_keep(scores: Mapping[int, float | None], keep: int) -> set[int]:
    """Returns the last ``keep`` rounds and the best round. If several rounds are equally good, the last one is kept.

    scores: the score of each saved round. Larger is better. None: unknown.
    """
    known = [(score, t) for t, score in scores.items() if score is not None]
    return {*sorted(scores)[-keep:], *([max(known)[1]] if known else [])}
