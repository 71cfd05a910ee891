"""Runs that survive: the whole state of a run in a folder, saved while it runs, restored bit for bit.

    checkpoints = fd.Checkpoints("folder")
    state, history = sim.run(state, rounds, checkpoints=checkpoints)
    state, history = checkpoints.restore(sim)

    folder/00000040/          the checkpoint of round 40; it has this name only once it is complete
        about.json            `About` as a text, and its CRC-32
        arrays.0              the state's arrays, see array_files.py
    folder/00000050.damaged/  one that could not be read when a run went on from an older one
    folder/lock               locked by the process that runs here

orbax has a checkpoint written beside its final place and renames it, from a thread of its own. That the bytes read are
the bytes saved is what `About`'s checksums of every array are for. Client states in files (`bank=folder`) are not
copied but pinned, see bank.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.checks import first_line
from fedjax_drift.devices.launch import launch
from fedjax_drift.devices.mesh import leaf_shardings
from fedjax_drift.devices.processes import first_does, spans_processes
from fedjax_drift.errors import ConfigurationError, DamagedError
from fedjax_drift.storage import array_files
from fedjax_drift.storage.client_store import ClientStore, few
from fedjax_drift.storage.files import lock_folder, unused
from fedjax_drift.storage.identity import crc32, differ
from fedjax_drift.storage.specification import Specification, key_words
from fedjax_drift.types import THREEFRY, PyTree, Record, ServerState
from fedjax_drift.version import __version__

FORMAT = 4
ABOUT = "about.json"
UNFINISHED = "*.orbax-checkpoint-tmp*"  # what orbax calls a checkpoint that is being written
DELETED, DAMAGED = ".deleted", ".damaged"  # suffixes of folders
Leaf = jax.Array | np.ndarray
Hold = Callable[[], contextlib.AbstractContextManager]


class Specified(Protocol):
    """What `Checkpoints.restore` needs of a `Simulation`."""

    @property
    def specification(self) -> Specification: ...


class About(NamedTuple):
    """What a checkpoint is of; JSON."""

    format: int
    versions: dict[str, str]
    identity: dict[str, Any]
    round: int
    key: list[int]  # the run's: another seed is another run
    history: list[Record]  # of all rounds so far
    leaves: list[list]  # [name, dtype, shape, checksum] of every array


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run is saved; ``sim.run(..., checkpoints=)`` saves, `restore` restores.

    A checkpoint holds the whole state, the history and what they belong to. Saving goes on beside the training, and is
    always complete or absent, whatever ends the process. One process at a time may use a folder.

    Raises ValueError for values out of range.
    """

    folder: str | os.PathLike
    """Made when it is first written to."""
    every: int | None = None
    """>= 1: rounds between saves, and the most that are lost. Default None: by the clock alone."""
    seconds: float | None = 60.0
    """> 0: seconds after which the next round is saved, unless a save is still on its way; None: by rounds alone."""
    keep: int = 3
    """>= 1: the last so many are kept, and the best."""
    best: str | None = "accuracy"
    """The entry of an evaluated round's record by which one is the best: the largest, or the smallest where the name
    ends in "loss". The best so far is kept in host memory as soon as it is known, and written with the next save.
    None: none is kept for being the best."""
    config: Mapping[str, Any] | None = None
    """What else has to be the same when a run goes on; JSON. Restoring with None does not ask."""

    def __post_init__(self) -> None:
        if not isinstance(self.config, Mapping | None):
            raise ConfigurationError(
                f"config must be a dict of what JSON has, or None, got {checks.shown(self.config)}"
            )
        try:
            json.dumps(dict(self.config or {}))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"config must be a dict of what JSON has, got {checks.shown(self.config)}: {error}"
            ) from error
        set_to = functools.partial(object.__setattr__, self)  # this is frozen
        set_to("folder", checks.path("folder", self.folder, "Checkpoints(folder, ...)").absolute())
        if self.every is not None:
            set_to("every", checks.integer("every", self.every, 1, fix="None: by the clock alone"))
        if self.seconds is not None:
            set_to("seconds", checks.positive("seconds", self.seconds, "None: by rounds alone", computed=False))
        set_to("keep", checks.integer("keep", self.keep, 1))
        if self.best is not None:
            checks.text("best", self.best, 'an entry of the records such as "accuracy", or None')

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        return Path(self.folder)

    @property
    def rounds(self) -> list[int]:
        """The rounds of which there is a checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        try:
            numbers = [int(entry.name) for entry in self.path.iterdir() if entry.name.isdecimal()]
        except OSError as error:
            raise ConfigurationError(
                f"folder must be one that can be read, got {self.path} ({error.strerror})"
            ) from error
        return sorted(number for number in set(numbers) if os.path.lexists(self.place(number)))

    def about(self, round: int) -> About:
        """What the checkpoint of this round is of, arrays left unread. ValueError where that is damaged."""
        with _damage("its about.json can't be read"):
            written = json.loads((self.place(round) / ABOUT).read_bytes())
            about = json.loads(written["about"])
            if zlib.crc32(written["about"].encode()) != written["crc32"] or about["round"] != round:
                raise DamagedError("its about.json is not what was written")
        if about["format"] != FORMAT:
            raise ConfigurationError(
                f"checkpoints must be of format {FORMAT}, got {about['format']} in {self.place(round)}: use the "
                "version of fedjax_drift that wrote it"
            )
        return About(**about)

    def place(self, round: int) -> Path:
        """Where the checkpoint of this round is, or would be."""
        return self.path / f"{round:08d}"

    def restore(self, sim: Specified, round: int | str | None = None) -> tuple[ServerState, list[Record]]:
        """The state and the history of a run, for ``sim.run(state, ..., checkpoints=...)`` to go on from.

        On as many devices as before the run goes on bit for bit as if it had not ended; on another number, or between
        ``bank="device"`` and "sharded", up to rounding. With ``bank=folder`` the folder is set back to that round.

        round: one of `rounds`, or "best"; default the newest that is intact, with a warning about each damaged one.
        Raises ValueError, and changes nothing: no checkpoint that is intact; one of another simulation (what differs is
        listed) or format; a folder in use.
        """
        spec = getattr(sim, "specification", None)
        if not isinstance(spec, Specification):
            raise ConfigurationError(f"sim must be a Simulation, got {type(sim).__name__}: make it as for the run")
        _check_mesh(spec)
        wanted = self._wanted(round)
        with self._locked(create=False):
            for number in wanted:
                try:
                    return self.restored(spec, number)
                except DamagedError as error:
                    damaged = f"the checkpoint of round {number} in {self.path} is damaged ({error})"
                    if round is not None:
                        raise ConfigurationError(f"{damaged}: choose another of the rounds {self.rounds}") from error
                    before = "going back to the one before" if number > wanted[-1] else "and there is none before"
                    checks.warn(f"{damaged}: {before}")
        raise ConfigurationError(
            f"a checkpoint must be intact to go on from, got {len(wanted)} damaged ones in {self.path}: nothing was "
            "changed; restore the folder from a copy, or start anew in another folder"
        )

    def _wanted(self, round: int | str | None) -> list[int]:
        """The rounds to try, in this order."""
        rounds = self.rounds
        if not rounds:
            raise ConfigurationError(
                f"folder must hold a checkpoint, got {self.path}, which has none: start with sim.init"
            )
        if round is None:
            return rounds[::-1]
        if isinstance(round, str) and round == "best":
            scores = {number: score for number in rounds if (score := self._score(number)) is not None}
            if not scores:
                raise ConfigurationError(
                    f"no checkpoint in {self.path} has {self.best!r}: choose one of the rounds {rounds}"
                )
            return [max(scores, key=lambda number: scores[number])]
        if isinstance(round, bool) or not isinstance(round, Integral) or round not in rounds:
            raise ConfigurationError(f'round must be one of those kept, {rounds}, or "best", got {checks.shown(round)}')
        return [int(round)]

    def _score(self, round: int) -> float | None:
        """How good the checkpoint is, more is better; None if unknown."""
        with contextlib.suppress(ValueError):
            return score(self.about(round).history, self.best)
        return None

    def restored(self, spec: Specification, round: int) -> tuple[ServerState, list[Record]]:
        about = self.about(round)
        there = about.identity
        if self.config is None:  # to look at a run, one need not know what it was configured with
            there = {name: value for name, value in there.items() if not name.startswith("config.")}
        _check_same(self.path, there, self.identity_of(spec))
        here = versions()
        if changed := [f"{name} {was}, now {here.get(name)}" for name, was in about.versions.items()
                       if here.get(name) != was]:  # fmt: skip
            checks.warn(
                f"the checkpoint of round {round} was written with {', '.join(changed)}: the run goes on, but "
                "maybe not to the last bit as it would have"
            )
        return _state(spec, round, self._read(spec, about)), about.history

    def _read(self, spec: Specification, about: About) -> list[Leaf]:
        """The arrays, checked."""
        _check_arrays(self.path, spec, about)
        with _damage("its arrays can't be read"):
            leaves = _read_all(self.place(about.round), spec, about)
        for (name, *_, check), found in zip(about.leaves, checksums(spec, leaves), strict=True):
            if found != check:
                raise DamagedError(f"its array {name} is not what was written")
        return leaves

    def identity_of(self, spec: Specification) -> dict[str, Any]:
        """What a run with this configuration must have in common with its checkpoints."""
        return spec.identity | {f"config.{name}": value for name, value in (self.config or {}).items()}

    def _locked(self, create: bool) -> contextlib.AbstractContextManager[None]:
        """Keeps other runs out; process 0 does it for all of its run. Without ``create`` nothing is written."""
        unlocked = not create and not (self.path / "lock").exists()
        if jax.process_index() or unlocked:
            return contextlib.nullcontext()
        return lock_folder(self.path, "folder", create)

    @contextlib.contextmanager
    def saving(self, spec: Specification, state: ServerState, hold: Hold, back: bool = False) -> Iterator[Saver]:
        """A `Saver` for a run from this state, which every process of the run asks for.

        hold: in it no signal may interrupt; orbax would go on without us. back: delete this run's later checkpoints.

        ValueError: a folder that can't be written or is in use, or that holds another run's checkpoints or later ones.
        """
        _check_mesh(spec)
        with contextlib.ExitStack() as locked:
            first_does(spec.mesh, lambda: locked.enter_context(self._locked(create=True)))
            mine = self.identity_of(spec)
            if back:
                self._go_back(state, mine)
            history, damaged = self._checked(spec, state, mine)
            first_does(spec.mesh, lambda: self._move_aside(damaged))
            saver = Saver(self, spec, state, mine, history, hold)
            if saver.bank is not None and int(state.round) not in saver.scores:
                saver.save(state, [])  # or else a kill before the first save would leave a bank without a state
                saver.settle()
            try:
                yield saver
            finally:
                saver.close()

    def _checked(self, spec: Specification, state: ServerState, mine: dict[str, Any]) -> tuple[list[Record], list[int]]:
        """The history up to the state, and the rounds after it whose checkpoints are damaged."""
        t, rounds, damaged = int(state.round), self.rounds, []
        for number in [number for number in rounds if number >= t]:
            try:
                about = self.about(number)
                if number > t and not differ(about.identity, mine)[0]:
                    self._read(spec, about)
                    _check_pinned(state, number)
            except DamagedError:
                damaged.append(number)
        intact = [number for number in rounds if number not in damaged]
        newest = next(filter(None, map(self._about_or_none, intact[::-1])), None)
        if newest is not None:
            _check_same(self.path, newest.identity | {"key": newest.key}, mine | {"key": key_words(state)})
        if intact and intact[-1] > t:
            raise ConfigurationError(
                f"checkpoints must be of rounds up to the state's, {t}, got round {intact[-1]} in {self.path}: go on "
                "from there with checkpoints.restore(sim), or choose another folder, whose history starts with this run"
            )
        if newest is not None and newest.round < t:
            checks.warn(
                f"rounds {newest.round + 1} to {t} were done without checkpoints: the history in {self.path} leaves "
                "them out"
            )
        return newest.history if newest is not None else [], damaged

    def _go_back(self, state: ServerState, mine: dict[str, Any]) -> None:
        """Deletes the checkpoints of rounds after the state's, unless they are another run's."""
        for number in [number for number in self.rounds if number > int(state.round)]:
            if (about := self._about_or_none(number)) is not None:
                _check_same(self.path, about.identity | {"key": about.key}, mine | {"key": key_words(state)})
            self._delete(number)

    def _delete(self, round: int) -> None:
        place = self.place(round)
        place.rename(place.with_name(place.name + DELETED))  # at once: what is left of one is not a checkpoint

    def _move_aside(self, damaged: list[int]) -> None:
        for number in damaged:
            place = self.place(number)
            place.rename(unused(place.with_name(place.name + DAMAGED)))

    def _about_or_none(self, round: int) -> About | None:
        with contextlib.suppress(DamagedError):
            return self.about(round)
        return None


class Contents(NamedTuple):
    """A state as it is written."""

    round: int
    leaves: list[Leaf]
    listed: list[list]  # [name, dtype, shape, checksum] of each
    records: int  # of this run's history, up to the state
    score: float | None


class Saver:
    """Saves one run. orbax is asked by every process; process 0 alone deletes, warns and looks at the clock."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        spec: Specification,
        state: ServerState,
        identity: dict[str, Any],
        history: list[Record],
        hold: Hold,
    ) -> None:
        self.checkpoints, self.spec, self.identity, self.before = checkpoints, spec, identity, history
        self.hold, self.key = hold, key_words(state)
        self.bank = state.clients if isinstance(state.clients, ClientStore) and state.clients.in_files else None
        self.scores = {round: checkpoints._score(round) for round in checkpoints.rounds}
        self.started: int | None = None  # the round whose save is on its way
        self.value: float | None = None  # its score
        self.best: Contents | None = None  # better than all that are saved, and not yet written
        self.clock = time.monotonic()
        self._tidy()
        self.orbax = _checkpointer()

    def due(self, t: int) -> bool:
        """Whether to save after round t."""
        every, seconds = self.checkpoints.every, self.checkpoints.seconds
        waited = time.monotonic() - self.clock
        return due(every, seconds, t, waited, self._busy())

    def save(self, state: ServerState, history: list[Record]) -> None:
        """Starts to save the state, with the history of this run; a failure is a warning, and the run goes on."""
        self.settle()
        self._write_best(int(state.round), history)
        if int(state.round) in self.scores:
            return
        self.started = int(state.round)  # what an error of it is about
        self._try(lambda: self._write(self._contents(state, history), history))

    def confirm(self) -> None:
        """With ``every``, waits for the save on its way: rounds after it are not reported before it is complete, so
        that never more than ``every`` that were are lost. They are trained meanwhile."""
        if self.checkpoints.every is not None:
            self.settle()

    def settle(self) -> None:
        """Waits for the save on its way; a failure is a warning."""
        self._try(self._settle)

    def consider(self, state: ServerState, history: list[Record]) -> None:
        """Keeps the state if its round, the last of the history, is the best evaluated so far.

        It is kept in host memory and written by the next save, as writing each would hold up short rounds; what a kill
        loses are rounds that are done again. Over several processes it is written at once.
        """
        value = self._score(history)
        known = [*self.scores.values(), self.value if self.started is not None else None]
        known += [self.best.score if self.best is not None else None]
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
                    f"round {int(state.round)}, the best so far, could not be kept ({_why(error)}): the run goes on"
                )

    def _try(self, step: Callable[[], None]) -> None:
        with self.hold():
            try:
                step()
            except Exception as error:  # orbax and its parts raise whatever they like
                self._failed(error)

    def finish(self, state: ServerState, history: list[Record]) -> None:
        """Saves the run's last state, unless it is, and waits for it.

        OSError, with the state and the history as ``error.state`` and ``error.history``, if it could not be saved.
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
            self._failed(error, quietly=True)
            last = max(self.scores, default=None)
            where = f"the last checkpoint is of round {last}" if self.scores else "there is no checkpoint"
            lost = OSError(
                getattr(error, "errno", None) or errno.EIO,
                f"the end of the run, round {t}, could not be saved in {self.checkpoints.path} ({_why(error)}), "
                f"{where}: all rounds are in error.state and error.history; make room or mend the folder",
            )
            vars(lost).update(state=state, history=history)
            raise lost from error

    def close(self) -> None:
        """Waits for what is on its way."""
        self.settle()
        self.orbax.close()
        self._tidy()

    def _busy(self) -> bool:
        """Whether a save is on its way."""
        self._try(self.orbax.check_for_errors)
        return self.started is not None and not self.checkpoints.place(self.started).exists()

    def _contents(self, state: ServerState, history: list[Record]) -> Contents:
        """What is to be written of a state; of client states in files a pin."""
        if self.bank is not None:
            self.bank.pin()
        contents = _contents(state)
        leaves = jax.tree.leaves(contents)
        listed = [
            [*leaf, check] for leaf, check in zip(tree.layout(contents), checksums(self.spec, leaves), strict=True)
        ]
        return Contents(int(state.round), leaves, listed, len(history), self._score(history))

    def _score(self, history: list[Record]) -> float | None:
        return score(history or self.before, self.checkpoints.best)

    def _write_best(self, t: int, history: list[Record]) -> None:
        """Saves the best state, unless it is that of round t, which is saved anyway."""
        if self.best is None:
            return
        best = self.best
        if best.round != t:
            self._try(lambda: self._write(best, history))
            self.settle()
        self.best = None

    def _write(self, contents: Contents, history: list[Record]) -> None:
        """Starts to write."""
        t = contents.round
        self.started, self.clock, self.value = t, time.monotonic(), contents.score
        records = self.before + history[: contents.records]
        about = About(FORMAT, versions(), self.identity, t, self.key, records, contents.listed)
        text = json.dumps(about._asdict())  # now: the records are the caller's, too, who may change them
        self.orbax.save(self.checkpoints.place(t), args=_orbax()[1](text, array_files.parts_here(contents.leaves)))

    def _settle(self) -> None:
        """Waits for the save on its way, and deletes what need not be kept any more."""
        self.orbax.wait_until_finished()
        if self.started is None:
            return
        if jax.process_index() == 0 and not self.checkpoints.place(self.started).exists():
            raise OSError(errno.ENOENT, "it is not there")
        self.scores[self.started], self.started = self.value, None
        kept = kept_of(self.scores, self.checkpoints.keep)
        self.scores = {round: score for round, score in self.scores.items() if round in kept}
        if jax.process_index() == 0:
            for round in set(self.checkpoints.rounds) - kept:
                self.checkpoints._delete(round)
            self._tidy()
        if self.bank is not None:
            for round in set(self.bank.pins) - kept - {self.best.round if self.best is not None else -1}:
                self.bank.unpin(round)

    def _tidy(self) -> None:
        """Deletes what is left of saves that failed and of deletions that were interrupted."""
        if jax.process_index() == 0:
            for pattern in (UNFINISHED, "*" + DELETED):
                for place in self.checkpoints.path.glob(pattern):
                    shutil.rmtree(place, ignore_errors=True)

    def _failed(self, error: Exception, quietly: bool = False) -> None:
        round, self.started = self.started, None
        self.orbax = _checkpointer()
        self._tidy()
        if jax.process_index() == 0 and not quietly:
            checks.warn(
                f"round {round} could not be saved in {self.checkpoints.path} ({_why(error)}): the run goes on, "
                "and the next save tries again"
            )


class Savers:
    """Saves runs that go on side by side: the one run of `Simulation.run`, or those of a sweep."""

    def __init__(self, savers: Sequence[Saver]) -> None:
        self.savers = savers
        self.follows_best = savers[0].checkpoints.best is not None

    def due(self, t: int) -> bool:
        """Whether to save after round t."""
        return self.savers[0].due(t)

    def save(self, states: Sequence[ServerState], histories: Sequence[list[Record]]) -> None:
        """Starts to save every run, with its records since it was opened."""
        for saver, state, history in zip(self.savers, states, histories, strict=True):
            saver.save(state, history)

    def confirm(self) -> None:
        """See `Saver.confirm`."""
        for saver in self.savers:
            saver.confirm()

    def consider(self, states: Sequence[ServerState], histories: Sequence[list[Record]]) -> None:
        """Keeps the states that are the best of their run so far, see `Saver.consider`."""
        for saver, state, history in zip(self.savers, states, histories, strict=True):
            saver.consider(state, history)

    def finish(self, states: Sequence[ServerState], histories: Sequence[list[Record]]) -> None:
        """Saves the end of every run. Raises OSError, once all have been tried, if one could not be saved."""
        failed: list[OSError] = []
        for saver, state, history in zip(self.savers, states, histories, strict=True):
            try:
                saver.finish(state, history)
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]


@contextlib.contextmanager
def saving(
    each: Sequence[Checkpoints],
    specs: Sequence[Specification],
    states: Sequence[ServerState],
    hold: Hold,
    back: bool = False,
) -> Iterator[Savers]:
    """`Savers` of runs that begin with these states; arguments as in `Checkpoints.saving`."""
    with contextlib.ExitStack() as stack:
        runs = zip(each, specs, states, strict=True)
        yield Savers([stack.enter_context(one.saving(spec, state, hold, back)) for one, spec, state in runs])


def split_by_run(checkpoints: Checkpoints | str | os.PathLike, names: Sequence[str]) -> list[Checkpoints]:
    """The checkpoints of several runs, each in a folder of its own within the folder given."""
    whole = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"checkpoints need runs that differ in a number, got {twice} twice: leave one out")
    return [replace(whole, folder=whole.path / name) for name in names]


def restore_together(
    each: Sequence[Checkpoints], specs: Sequence[Specification], rounds: int
) -> tuple[list[ServerState] | None, list[list[Record]]]:
    """The state and the history of every run, at the newest round of which all have an intact checkpoint.

    The states are None where there is no such round. Raises ConfigurationError for checkpoints of other simulations,
    and of more than ``rounds`` rounds.
    """
    parent = each[0].path.parent
    common = set.intersection(*(set(one.rounds) for one in each))
    if max(common, default=0) > rounds:
        raise ConfigurationError(
            f"rounds must be at least the {max(common)} that are done in {parent}, got {rounds}: ask for as "
            "many, or choose another folder"
        )
    for number in sorted(common, reverse=True):
        try:
            pairs = [one.restored(spec, number) for one, spec in zip(each, specs, strict=True)]
        except DamagedError as error:
            checks.warn(f"a checkpoint of round {number} in {parent} is damaged ({error})")
            continue
        return [state for state, _ in pairs], [history for _, history in pairs]
    return None, [[] for _ in each]


def due(every: int | None, seconds: float | None, t: int, waited: float, busy: bool) -> bool:
    """Whether to save after round t, ``waited`` seconds after the save before, which is ``busy`` or done."""
    return every is not None and t % every == 0 or seconds is not None and waited >= seconds and not busy


def score(history: list[Record], best: str | None) -> float | None:
    """How good the last round is, more is better; None where its record does not say."""
    value = history[-1].get(best) if history and best else None
    if not isinstance(value, int | float) or value != value:
        return None
    return -value if best and best.endswith("loss") else value


def kept_of(scores: Mapping[int, float | None], keep: int) -> set[int]:
    """The rounds to keep of those saved: the last ones, and the best."""
    known = {round: value for round, value in scores.items() if value is not None}
    best = [max(known, key=lambda round: known[round])] if known else []
    return {*sorted(scores)[-keep:], *best}


# What a checkpoint belongs to.


def versions() -> dict[str, str]:
    """Of what computes."""
    return {"fedjax_drift": __version__, "jax": jax.__version__}


def _check_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """ValueError with the differences unless the identities are the same; a warning for functions whose code alone has
    changed, as that may mean nothing."""
    wrong, changed = differ(there, here)
    if wrong:
        listed = [f"{name}: {was} in the checkpoint, not {now}" for name, (was, now) in wrong.items()]
        raise ConfigurationError(
            f"the checkpoints in {path} belong to another simulation: {few(listed, 12)}: restore them with what they "
            "were made with, or choose another folder"
        )
    if changed:
        checks.warn(
            f"since the checkpoints in {path} were written the code of {few(changed)} has changed: the run goes on, "
            "with the code as it is now"
        )


def _check_mesh(spec: Specification) -> None:
    if jax.process_count() > 1 and not spans_processes(spec.mesh):
        raise ConfigurationError(
            "checkpoints must be of a simulation on the devices of all processes, got one on this process's alone: "
            "leave out mesh=, or save elsewhere"
        )


def _check_pinned(state: ServerState, round: int) -> None:
    bank = state.clients
    if isinstance(bank, ClientStore) and bank.in_files and round not in bank.pins:
        raise DamagedError("the pin of its client states is missing or damaged")


# What is written, and how it is checked.


def _contents(state: ServerState) -> PyTree:
    """The state's arrays: a key as its words; of a bank in host memory the clients seen, and as the last the initial
    state; of one in files nothing."""
    clients = state.clients
    if isinstance(clients, ClientStore) and clients.in_files:
        clients = ()
    elif isinstance(clients, ClientStore):
        ids = np.append(clients.ids, clients.num_clients)
        clients = {"ids": ids, "states": clients.gather(ids)}
    return state._replace(key=jax.random.key_data(state.key), clients=clients)


def _state(spec: Specification, round: int, leaves: list[Leaf]) -> ServerState:
    """The state of these arrays: `_contents` undone."""
    expected = spec.state
    on_devices: Any = jax.tree.structure(expected._replace(clients=()) if spec.states_on_host else expected)
    n = on_devices.num_leaves
    state = jax.tree.unflatten(on_devices, leaves[:n])
    state = state._replace(key=jax.random.wrap_key_data(state.key, impl=THREEFRY))
    if not spec.states_on_host:
        return spec.admit(state)
    if spec.client_store != "host":
        return spec.reopen(state, round)
    ids, *rows = [np.asarray(leaf) for leaf in leaves[n:]]
    states = jax.tree.unflatten(jax.tree.structure(expected.clients), rows)
    bank = ClientStore.create(
        jax.tree.map(lambda leaf: leaf[-1], states), spec.num_clients, None, spec.store_identity(state)
    )
    if round:
        bank.commit(ids[:-1], jax.tree.map(lambda leaf: leaf[:-1], states), round)
    return spec.admit(state._replace(clients=bank))


def _check_arrays(path: Path, spec: Specification, about: About) -> None:
    """ValueError unless the checkpoint's arrays are those of this simulation."""

    def described(leaves: list[list]) -> dict[str, str]:
        """Of client states the rows don't count: they depend on the devices, or on who has been seen."""
        return {name: f"{dtype}{shape[name.startswith('.clients') :]}" for name, dtype, shape, *_ in leaves}

    expected = _with_key_words(spec.state)
    if spec.states_on_host:
        clients = {"ids": np.zeros(0, np.int64), "states": expected.clients} if spec.client_store == "host" else ()
        expected = expected._replace(clients=clients)
    between = "in the checkpoint, not"
    if wrong := tree.differences(described(about.leaves), described(tree.layout(expected)), between):
        raise ConfigurationError(
            f"the checkpoints in {path} have other arrays than this simulation: {few(wrong)}: restore them with the "
            "model and the algorithm that they were made with, or choose another folder"
        )


def _with_key_words(shapes: Any) -> ServerState:
    """The shapes of a state whose key is stored as its words."""
    return shapes._replace(key=jax.ShapeDtypeStruct((2,), jnp.uint32))


def _read_all(place: Path, spec: Specification, about: About) -> list[Leaf]:
    """Every array, where this simulation has it."""
    expected = _with_key_words(spec.state)
    if spec.states_on_host:
        expected = expected._replace(clients=())
    here = zip(jax.tree.leaves(expected), jax.tree.leaves(leaf_shardings(spec.shardings, expected)), strict=True)
    where = [(leaf.shape, at) for leaf, at in here]
    where += [(shape, None) for _, _, shape, _ in about.leaves[len(where) :]]
    dtypes = [jnp.dtype(dtype) for _, dtype, _, _ in about.leaves]
    files = array_files.ArrayFiles(place)
    return [files.array(i, dtypes[i], shape, at) for i, (shape, at) in enumerate(where)]


def checksums(spec: Specification, leaves: list[Leaf]) -> list[int]:
    """One number for each of a state's arrays, whatever devices they are on, taken where they are.

    Rows of client states beyond the N clients don't count: how many there are depends on the devices.
    """
    first_client = len(jax.tree.leaves(spec.state._replace(clients=())))
    N = spec.num_clients
    on_devices = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    rows = tuple(N if i >= first_client else None for i in on_devices)
    found = launch(spec.mesh, functools.partial(_sums, rows), list(on_devices.values()))
    known = dict(zip(on_devices, np.asarray(found).tolist(), strict=True))
    return [known[i] if i in known else crc32(np.asarray(leaf)) for i, leaf in enumerate(leaves)]


@functools.partial(jax.jit, static_argnums=0)
def _sums(rows: tuple[int | None, ...], leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([checksum(leaf, n) for leaf, n in zip(leaves, rows, strict=True)])


def checksum(array: jax.Array, rows: int | None = None) -> jax.Array:
    """uint32 []: the sum of word i times 2 i + 1 over the array's first ``rows`` rows (default: all), modulo 2^32.

    An odd factor keeps the change of any one bit from vanishing; a sum of integers does not depend on its order, and so
    not on the devices.
    """
    words = array.astype(jnp.uint8) if array.dtype == bool else array
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[words.dtype.itemsize]
    words = lax.bitcast_convert_type(words, unsigned).astype(jnp.uint32)
    if rows is not None:
        words = jnp.where(lax.broadcasted_iota(jnp.int32, words.shape, 0) < rows, words, 0)
    words = words.reshape(-1)
    return (words * (2 * lax.iota(jnp.uint32, words.size) + 1)).sum(dtype=jnp.uint32)


# Files and folders.


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """Whatever a file that is not what was written makes its reader raise, as `DamagedError`."""
    try:
        yield
    except (DamagedError, MemoryError):
        raise
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise DamagedError(f"{what}: {_why(error)}") from error


def _why(error: Exception) -> str:
    return first_line(error)[:150]


@functools.cache
def _orbax() -> tuple[Any, Any]:
    """An orbax handler that writes a checkpoint's files by `stored`, and its arguments; imported when first used.

    orbax's own handler of arrays ends its event loop while other writes are under way when one of them fails, as on a
    full disk, and each of them then says so on stderr.
    """
    import orbax.checkpoint as ocp

    class Handler(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory: Path, args: Any) -> list[Any]:
            thread = ThreadPoolExecutor(1)
            written = thread.submit(_write, Path(directory), args.about, args.parts)
            thread.shutdown(wait=False)  # once that is done
            return [written]

        def save(self, directory: Path, args: Any) -> None:
            _write(Path(directory), args.about, args.parts)

        def restore(self, directory: Path, args: Any = None) -> None:
            raise NotImplementedError("Checkpoints.restore reads the files itself")

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclass
    class Save(ocp.args.CheckpointArgs):
        about: str
        parts: list[array_files.Part]

    logging.getLogger("absl").addFilter(_not_of_orbax)  # its errors are raised, too
    return Handler, Save


def _write(folder: Path, about: str, parts: list[array_files.Part]) -> None:
    if jax.process_index() == 0:
        with open(folder / ABOUT, "w") as file:
            json.dump({"crc32": zlib.crc32(about.encode()), "about": about}, file)
            file.flush()
            os.fsync(file.fileno())
    array_files.write(folder, parts)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    # The folder is there before the handler is called: orbax's signal that it is made is for handlers of its own.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.AsyncCheckpointer(_orbax()[0](), async_options=options)
