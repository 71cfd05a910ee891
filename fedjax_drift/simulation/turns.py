"""The runs of a sweep that are trained in one program: a turn, and its `Track`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks
from fedjax_drift.devices.launch import launch
from fedjax_drift.devices.mesh import copied
from fedjax_drift.measures.measure import nan_allowed
from fedjax_drift.round import rows
from fedjax_drift.round.evaluate import after, server_scores, shifted
from fedjax_drift.simulation.layout import Layout
from fedjax_drift.simulation.loop import rounds_of_one
from fedjax_drift.simulation.programs import KEPT, Programs, scoring, split
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.types import THREEFRY, Params, PyTree, ServerState

Setting = dict[str, Any]


class Planned(NamedTuple):
    """A run before it is trained."""

    seed: int
    setting: Setting
    setup: Setup


class Turn(NamedTuple):
    """A group of runs that are trained together in one program."""

    runs: tuple[int, ...]  # positions in the list of runs; the last turn may repeat its last run
    numbers: PyTree  # the numbers of the engines, leaves [runs]
    scoring: PyTree  # those that an evaluation uses, leaves [runs]
    key: jax.Array  # [runs]

    def places(self) -> Iterator[tuple[int, int]]:
        """Yields (index in the turn, run), without the indices that repeat a run."""
        for place, run in enumerate(self.runs):
            if run not in self.runs[:place]:
                yield place, run


def tracks(planned: Sequence[Planned], most: int, constant: bool) -> list[TurnTrack]:
    """Groups the runs that can share a program, and splits the groups into turns.

    most: the number of runs that a device may train side by side. constant: whether numbers are constants of the
    programs.
    """
    groups = _groups(planned, constant)
    return [track for group in groups for track in _tracks_of_group(planned, group, most, constant)]


def side_by_side(planned: Sequence[Planned], most: int) -> int:
    """Returns the largest number of runs that a device trains side by side, if it may train ``most``."""
    groups = _groups(planned, constant=False)
    return max(Layout.of(planned[group[0]].setup.mesh, len(group), most).per_device for group in groups)


def _groups(planned: Sequence[Planned], constant: bool) -> list[list[int]]:
    """Returns the positions of the runs that can share a program, for each program."""
    groups: dict[Any, list[int]] = {}
    for run, plan in enumerate(planned):
        groups.setdefault(_shared(plan.setup, constant), []).append(run)
    if len(groups) > KEPT:
        fix = "only numbers such as lr, mu and alpha share a program. Use one sweep for each value of the other "
        fix += "arguments, decorate your own algorithm with fd.algorithm, and create models, functions and data sets "
        checks.refuse(f"settings must need at most {KEPT} programs", len(groups), fix + "outside build")
    return list(groups.values())


def _shared(setup: Setup, constant: bool) -> Any:
    """What runs have in common that share a program and its arguments. Runs may differ in their numbers."""
    frozen = tuple(frozen.checksum for frozen in setup.model.frozen)
    form, _ = split(setup.engine, constant)
    return form, id(setup.data.root), frozen, setup.measures, setup.eval_batch_size


def _tracks_of_group(planned: Sequence[Planned], group: Sequence[int], most: int, constant: bool) -> list[TurnTrack]:
    setup = planned[group[0]].setup
    layout = Layout.of(setup.mesh, len(group), most)
    programs = Programs(layout.inside(setup.engine), setup.model, one_state=False, constant=constant, layout=layout)

    def starting_at(first: int) -> TurnTrack:
        runs = tuple(group[min(first + j, len(group) - 1)] for j in range(layout.size))
        engines = [planned[run].setup.engine for run in runs]
        numbers = _columns([split(engine, constant)[1] for engine in engines])
        of_scoring = _columns([split(scoring(engine), constant)[1] for engine in engines])
        key = jnp.stack([jax.random.key(planned[run].seed, impl=THREEFRY) for run in runs])
        placed = jax.device_put((numbers, of_scoring, key), layout.sharding)
        return TurnTrack(setup, programs, layout, Turn(runs, *placed))

    return [starting_at(first) for first in range(0, len(group), layout.size)]


def _columns(each: Sequence[tuple[float, ...]]) -> tuple[jax.Array, ...]:
    """The numbers of several runs, an array [runs] for each number. They are weakly typed, like the Python numbers of a
    single run, so that results have the parameters' dtype."""
    return tuple(jnp.stack([jnp.asarray(number) for number in column]) for column in zip(*each, strict=True))


class TurnTrack:
    """A turn as a `Track` of the loop in `loop.py`. It holds the states of the runs and advances them."""

    def __init__(self, setup: Setup, programs: Programs, layout: Layout, turn: Turn) -> None:
        self.setup, self.programs, self.layout, self.turn = setup, programs, layout, turn
        # The examples are replicated in a sweep. If the runs are apart, each device evaluates on the whole test set.
        self.arrays = rows.place(
            setup.data, setup.mesh, "devices", setup.eval_batch_size, shifted(setup.engine), whole_test=layout.apart
        )
        self.runs = dict(turn.places()).values()
        self.state: ServerState

    def start(self, params: Params | None, states: Sequence[ServerState] | None) -> None:
        """Starts from ``states``, or at round 0 if it is None. States are copied because rounds donate their input."""
        if states is None:
            params = None if params is None else jax.device_put(params, NamedSharding(self.layout.mesh, P()))
            self.state = self._launch("init", self.turn.key, params, self.arrays.sizes)
            return
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[states[run] for run in self.turn.runs])
        self.state = copied(jax.device_put(stacked, self.layout.sharding), self.layout.sharding)

    def _launch(self, name: str, *arguments: Any) -> Any:
        program = getattr(self.programs.compiled, name)
        return launch(self.layout.mesh, program, self.turn.numbers, self.programs.frozen, *arguments)

    def prepare(self, t: int) -> None:
        """Does nothing: the data are already on the devices."""

    def advance(self, t: int, n: int, measured: bool) -> dict[str, jax.Array]:
        measures = self.setup.measures if measured else ()
        self._rounds = t + n
        with nan_allowed(measures):
            self.state, infos = self._launch("rounds", measures, self.state, self.arrays, np.int32(n))
        return infos

    def score(self) -> dict[str, jax.Array]:
        if self.arrays.test is None:
            return {}
        test = after(self.setup.engine, self.arrays.test, np.int32(self._rounds))
        score = partial(self.programs.launch_scoring, "evaluate", numbers=self.turn.scoring)
        algorithm = self.setup.engine.algorithm
        return server_scores(lambda params: score(params, test), algorithm, self.state.server)

    def rounds(self, n: int, infos: dict, scores: dict) -> Iterator[tuple[int, int, dict, dict]]:
        for place, run in self.turn.places():
            run_infos, run_scores = ({name: v[place] for name, v in each.items()} for each in (infos, scores))
            for j, info, last in rounds_of_one(n, run_infos, run_scores, stacked=True):
                yield run, j, info, last

    def states(self) -> Iterable[tuple[int, ServerState]]:
        """The state of each run, on the device that trained it."""
        return [(run, self.layout.of_place(self.state, place)) for place, run in self.turn.places()]
