"""Checkpoints: the full state of a run in a folder, saved during training and restored bit for bit.

    checkpoints = fd.Checkpoints("folder")
    state, history = sim.run(state, rounds, checkpoints=checkpoints)
    state, history = checkpoints.restore(sim)
    state, history = checkpoints.restore_or_init(sim, key)  # a script that can be started again

    folder/00000040/          the checkpoint of round 40; the folder has this name only once it is complete
        about.json            metadata, see contents.py
        arrays.0              the arrays of the state, see array_files.py
    folder/00000050.damaged/  a checkpoint that could not be read when a run resumed from an older one
    folder/lock               locked by the process whose run is saved here

saver.py writes the checkpoints, in a thread, to a temporary folder that is then renamed (writing.py). The checksum of
every array is stored too, so that a damaged file is detected when it is read.

With ``bank=folder``, client states are already in files. A checkpoint does not copy them. It stores a pin, which tells
the client store to keep the states of this round (see client_store.py).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Protocol

import jax

from fedjax_drift import checks, spec
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.disk import lock_folder
from fedjax_drift.errors import ConfigurationError, DamagedError, NothingToRestoreError, OtherRunError
from fedjax_drift.spec import Amount, Count, Fix, Flag, Text, checked
from fedjax_drift.storage.contents import About, read_about, read_arrays, restored_state
from fedjax_drift.storage.identity import differences, few
from fedjax_drift.storage.specification import Specification, key_words
from fedjax_drift.types import Params, Record, ServerState
from fedjax_drift.version import __version__


class Specified(Protocol):
    """The attributes of a `Simulation` that `Checkpoints` uses."""

    @property
    def specification(self) -> Specification: ...

    def init(self, key: jax.Array, params: Params | None = None) -> ServerState: ...


def _json(name: str, value: Any, fix: str) -> Any:
    allowed = "a dict of values that JSON can store"
    if not isinstance(value, Mapping):
        checks.refuse(f"{name} must be {allowed}, or None", checks.shown(value))
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        checks.refuse(f"{name} must be {allowed}", checks.shown(value), str(error), error)
    return value


@dataclass(frozen=True)
@checked
class Checkpoints:
    """The folder where a run is saved, and how often. ``sim.run(..., checkpoints=)`` saves, and `restore` restores.

    A checkpoint contains the state, the history and a description of the simulation (data, model, algorithm).
    Checkpoints are written in the background. Writes are atomic: after a crash a checkpoint is either complete or does
    not exist. Only one run at a time can use a folder.

    Attributes:
      folder: Created when the first checkpoint is written.
      every: Number of rounds between saves, >= 1. After a crash, at most ``every`` of the rounds already reported to
        ``on_round`` are lost. None (default): use only ``seconds``.
      seconds: Number of seconds (> 0) between saves. No save starts while the previous one is running. A crash loses
        at most these seconds, one round, and the time of a save. None: use only ``every``.
      keep: Number of most recent checkpoints to keep, >= 1. The best checkpoint is kept too.
      best: Name of the metric that selects the best checkpoint, such as "accuracy". It must be an entry of the records
        of evaluated rounds. The largest value is best, or the smallest if the name ends in "loss". The best state is
        copied to host memory after its evaluation and written with the next save. None: do not keep a best checkpoint.
      config: Extra configuration (JSON-serializable) that must match when a run is resumed. If it is None, `restore`
        skips this check.
    """

    folder: Annotated[str | os.PathLike, spec.PATH, Fix("Checkpoints(folder, ...)")]
    every: Annotated[Count, Fix("None means: save only by seconds=")] | None = None
    seconds: Annotated[Amount, Fix("None means: save only by every=")] | None = 60.0
    keep: Count = 3
    best: Annotated[Text, Fix('an entry of the records such as "accuracy", or None')] | None = "accuracy"
    config: Annotated[Mapping[str, Any], spec.Spec(_json, "json")] | None = None

    @property
    def path(self) -> Path:
        """The absolute path of the folder."""
        return Path(self.folder)

    @property
    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, in ascending order."""
        names = [entry.name for entry in self.path.iterdir() if entry.name.isdecimal()] if self.path.is_dir() else []
        return sorted(int(name) for name in names if name == self.place(int(name)).name)

    def place(self, round: int) -> Path:  # noqa: A002
        """Returns the path of the checkpoint of this round. It may not exist yet."""
        return self.path / f"{round:08d}"

    def about(self, round: int) -> About:  # noqa: A002
        """Returns the metadata of the checkpoint of this round, without reading the arrays.

        Raises:
          ValueError: the metadata are damaged or have another format.
        """
        return read_about(self.place(round), round)

    @checked
    def restore(
        self,
        sim: Specified,
        round: int | str | None = None,  # noqa: A002
        strict: Flag = True,
    ) -> tuple[ServerState, list[Record]]:
        """Returns the state and the history of a run. ``sim.run(state, ..., checkpoints=...)`` then resumes the run.

        With the same number of devices, the resumed run is bitwise identical to an uninterrupted one. With another
        number of devices, or after a change between ``bank="device"`` and "sharded", it is identical except for
        rounding errors. With ``bank=folder``, the client states in the folder are set back to the restored round.

        Args:
          sim: the simulation of the run, constructed with the same arguments.
          round: one of `rounds`, or "best". Default: the newest intact checkpoint, with a warning for each damaged one.
          strict: whether the algorithm, its hyper-parameters, the model, the data and ``config`` must be those of the
            checkpoint. If False, a warning lists the differences. Arrays of other shapes or dtypes still raise an
            error. Use another checkpoint folder for the continued run. With ``bank=folder``, the client states in that
            folder belong to the continued run from then on.

        Raises:
          NothingToRestoreError: the folder has no checkpoint.
          OtherRunError: the checkpoint belongs to another simulation. The message lists the differences.
          InUseError: another run uses the folder.
          ValueError: there is no intact checkpoint, or it has another format. (The three errors above are also
            ValueErrors.) No files have been changed.
        """
        spec = _specification(sim)
        check_mesh(spec)
        candidates = self._candidates(round)
        with self.locked(create=False):
            for number in candidates:
                try:
                    return self.restored(spec, number, strict)
                except DamagedError as error:
                    damaged = f"the checkpoint of round {number} in {self.path} is damaged ({error})"
                    if round is not None:
                        raise ConfigurationError(f"{damaged}: choose another of the rounds {self.rounds}") from error
                    before = "trying the one before" if number > candidates[-1] else "there is no earlier one"
                    checks.warn(f"{damaged}: {before}")
        fix = "restore the folder from a copy, or start a new run in another folder (no files were changed)"
        checks.refuse("folder must have an intact checkpoint", f"{len(candidates)} damaged ones in {self.path}", fix)

    @checked
    def restore_or_init(
        self, sim: Specified, key: jax.Array, params: Params | None = None, strict: Flag = True
    ) -> tuple[ServerState, list[Record]]:
        """Returns what `restore` returns, or a first state and an empty history if the folder has no checkpoint.

        A script with this call can be started again and again, until all rounds are done:

            state, history = checkpoints.restore_or_init(sim, jax.random.key(0))
            state, more = sim.run(state, rounds=100 - len(history), checkpoints=checkpoints)

        Args:
          sim: the simulation of the run.
          key, params: the arguments of `Simulation.init`. If there is a checkpoint, its state is returned, and
            ``params`` are not used.
          strict: as for `restore`.

        Raises:
          OtherRunError: the checkpoint belongs to another simulation or to another key.
          ValueError: the errors of `restore` and of `Simulation.init`. If all checkpoints are damaged, no new run
            starts.
        """
        key_of_state = _specification(sim).key_of_state(key)
        try:
            state, history = self.restore(sim, strict=strict)
        except NothingToRestoreError:
            return sim.init(key, params), []
        check_same(self.path, {"key": key_words(state)}, {"key": key_words(state._replace(key=key_of_state))}, strict)
        return state, history

    def _candidates(self, wanted: int | str | None) -> list[int]:
        """Returns the rounds to try, in this order."""
        rounds = self.rounds
        if not rounds:
            raise NothingToRestoreError(
                f"folder must have a checkpoint, got {self.path}, which has none: start the run with sim.init, or use "
                "restore_or_init"
            )
        if wanted is None:
            return rounds[::-1]
        if isinstance(wanted, str) and wanted == "best":
            scores = [(value, number) for number in rounds if (value := self.score_of(number)) is not None]
            if scores:
                return [max(scores)[1]]
            raise ConfigurationError(f"no checkpoint in {self.path} has {self.best!r}: choose one of {rounds}")
        if isinstance(wanted, bool) or not isinstance(wanted, Integral) or wanted not in rounds:
            checks.refuse(f'round must be one of the saved rounds {rounds}, or "best"', checks.shown(wanted))
        return [int(wanted)]

    def score_of(self, t: int) -> float | None:
        """Returns the score of the checkpoint of round t. Larger is better. None: the score is unknown."""
        with contextlib.suppress(ValueError):
            return score(self.about(t).history, self.best)
        return None

    def restored(self, spec: Specification, t: int, strict: bool = True) -> tuple[ServerState, list[Record]]:
        """Returns the state and the history of round t. Raises DamagedError, OtherRunError or ConfigurationError."""
        about = self.about(t)
        stored = about.identity
        if self.config is None:  # so that a run can be restored without its config
            stored = {name: value for name, value in stored.items() if not name.startswith("config.")}
        check_same(self.path, stored, self.identity_of(spec), strict)
        current = versions()
        if changed := [f"{name} {version}, now {current.get(name)}" for name, version in about.versions.items()
                       if current.get(name) != version]:  # fmt: skip
            checks.warn(
                f"the checkpoint of round {t} was written with {', '.join(changed)}: the run continues, but its "
                "results may differ in the last bits"
            )
        leaves = read_arrays(self.place(t), spec, about)
        return restored_state(spec, about, leaves, strict), about.history

    def identity_of(self, spec: Specification) -> dict[str, Any]:
        """Returns the identity of a run. It must equal the identity in the checkpoint that is restored."""
        return spec.identity | {f"config.{name}": value for name, value in (self.config or {}).items()}

    def locked(self, create: bool) -> contextlib.AbstractContextManager[None]:
        """Locks the folder. Only process 0 holds the lock. If ``create`` is False, no files are written."""
        unlocked = not create and not (self.path / "lock").exists()
        if jax.process_index() or unlocked:
            return contextlib.nullcontext()
        return lock_folder(self.path, "folder", create)


def _specification(sim: Any) -> Specification:
    """The description of a simulation, which is an argument of the user."""
    spec = getattr(sim, "specification", None)
    if not isinstance(spec, Specification):
        checks.refuse("sim must be a Simulation", type(sim).__name__, "create it with the arguments of the run")
    return spec


def split_by_run(checkpoints: Checkpoints | str | os.PathLike, names: Sequence[str]) -> list[Checkpoints]:
    """Returns one `Checkpoints` per run, each for a subfolder with the name of the run."""
    whole = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    return [replace(whole, folder=whole.path / name) for name in names]


def restore_together(
    each: Sequence[Checkpoints], specs: Sequence[Specification], rounds: int
) -> tuple[list[ServerState] | None, list[list[Record]]]:
    """Returns the state and history of every run, at the newest round for which all runs have an intact checkpoint.

    If there is no such round, the states are None, and the runs start from round 0. Raises OtherRunError for
    checkpoints of other simulations, and ConfigurationError for checkpoints of more than ``rounds`` rounds.
    """
    parent = each[0].path.parent
    common = set.intersection(*(set(one.rounds) for one in each))
    if max(common, default=0) > rounds:
        fix = "pass a larger number, or choose another folder"
        checks.refuse(f"rounds must be at least {max(common)}, the number of completed rounds in {parent}", rounds, fix)
    for number in sorted(common, reverse=True):
        try:
            pairs = [one.restored(spec, number) for one, spec in zip(each, specs, strict=True)]
        except DamagedError as error:
            checks.warn(f"a checkpoint of round {number} in {parent} is damaged ({error})")
            continue
        return [state for state, _ in pairs], [history for _, history in pairs]
    return None, [[] for _ in each]


def score(history: list[Record], best: str | None) -> float | None:
    """Returns the score of the last round. Larger is better. None: the record of this round has no entry ``best``."""
    value = history[-1].get(best) if history and best else None
    if not isinstance(value, int | float) or value != value:
        return None
    return -value if best and best.endswith("loss") else value


# --- the identity of a checkpoint -------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect the results."""
    return {"fedjax_drift": __version__, "jax": jax.__version__}


def check_same(path: Path, stored: Mapping[str, Any], current: Mapping[str, Any], strict: bool = True) -> None:
    """Raises OtherRunError with the differences of two identities, or warns if ``strict`` is False.

    If only the code of functions has changed, or the values that they capture, there is always a warning and no error,
    because the change may have no effect.
    """
    changed, edited = differences(stored, current)
    if changed:
        listed = [f"{name}: {old} in the checkpoint, not {new}" for name, (old, new) in changed.items()]
        message = f"the checkpoints in {path} belong to another simulation: {few(listed, 12)}"
        if strict:
            raise OtherRunError(
                f"{message}: restore them with the arguments of their run, or choose another folder (strict=False "
                "restores them with a warning)"
            )
        checks.warn(f"{message}: restored nevertheless, because strict=False; save the continued run in another folder")
    if edited:
        checks.warn(
            f"since the checkpoints in {path} were written, the code of the model, of the algorithm or of the local "
            "training has changed, or a value that it captures: the run continues with the new code"
        )


def check_mesh(spec: Specification) -> None:
    """Raises ConfigurationError unless the mesh spans all processes."""
    if jax.process_count() > 1 and not spans_processes(spec.mesh):
        checks.refuse(
            "mesh must have the devices of all processes for checkpoints",
            "a mesh with devices of this process only",
            "leave out mesh=, or save the state yourself",
        )
