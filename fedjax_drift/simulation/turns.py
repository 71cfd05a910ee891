"""The runs of a sweep that are trained together in one program: a turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks
from fedjax_drift.devices.mesh import copied
from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.layout import Layout, Turn
from fedjax_drift.simulation.programs import KEPT, scoring, split
from fedjax_drift.simulation.runs import Setting
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.simulation.starting import specification
from fedjax_drift.simulation.tracks import Track
from fedjax_drift.storage.specification import Specification
from fedjax_drift.types import THREEFRY, Params, ServerState


class Planned(NamedTuple):
    """A run before it is trained."""

    seed: int
    setting: Setting
    setup: Setup
    specification: Callable[[], Specification]

    def with_lanes(self, lanes: int) -> Planned:
        return self if self.setup.trains_alone else self._replace(setup=self.setup.with_lanes(lanes))

    def in_folder(self, name: str) -> Planned:
        """The run with a folder of its own, if its client states are in files: a folder in that of the simulation."""
        if not self.setup.in_files:
            return self
        setup = replace(self.setup, client_store=str(Path(self.setup.client_store) / name))
        return self._replace(
            setup=setup, specification=lambda: specification(Executor(setup), self.specification().identity)
        )


def turns(planned: Sequence[Planned], most: int, constant: bool) -> list[Executor]:
    """Groups the runs that can share a program, splits the groups into turns, and returns the executor of each turn.

    most: the number of runs that a device may train side by side. constant: whether numbers are constants of the
    programs.
    """
    groups = _groups(planned, constant)
    return [executor for group in groups for executor in _turns_of_group(planned, group, most, constant)]


def started(executor: Executor, params: Params | None, states: Sequence[ServerState] | None) -> Track:
    """The track of a turn, from ``states``, or from round 0 if they are None."""
    turn = executor.turn
    assert turn is not None
    if states is None:
        params = None if params is None else jax.device_put(params, NamedSharding(turn.layout.mesh, P()))
        state = executor.launch("init", turn.key, params, executor.arrays.sizes)
    else:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[states[run] for run in turn.runs])
        state = copied(jax.device_put(stacked, turn.layout.sharding), turn.layout.sharding)  # rounds overwrite it
    return Track(executor, state)


def side_by_side(planned: Sequence[Planned], most: int) -> int:
    """Returns the largest number of runs that a device trains side by side, if it may train ``most``."""
    groups = _groups(planned, constant=False)
    return max((Layout.of(planned[group[0]].setup.mesh, len(group), most).per_device for group in groups), default=1)


def _groups(planned: Sequence[Planned], constant: bool) -> list[list[int]]:
    """Returns the positions of the runs that can share a program and its arguments. They may differ in numbers."""
    groups: dict[Any, list[int]] = {}
    for run, (_, _, setup, _) in enumerate(planned):
        if not setup.trains_alone:
            frozen, form = [frozen.checksum for frozen in setup.model.frozen], split(setup.engine, constant)[0]
            shared = form, id(setup.data.root), *frozen, setup.measures, setup.eval_batch_size
            groups.setdefault(shared, []).append(run)
    if len(groups) > KEPT:
        fix = "only numbers such as lr, mu and alpha share a program. Use one sweep for each value of the other "
        fix += "arguments, decorate your own algorithm with fd.algorithm, and create models, functions and data sets "
        checks.refuse(f"settings must need at most {KEPT} programs", len(groups), fix + "outside build")
    return list(groups.values())


def _turns_of_group(planned: Sequence[Planned], group: Sequence[int], most: int, constant: bool) -> list[Executor]:
    setup = planned[group[0]].setup
    layout = Layout.of(setup.mesh, len(group), most)

    def starting_at(first: int) -> Executor:
        runs = tuple(group[min(first + j, len(group) - 1)] for j in range(layout.size))
        engines = [planned[run].setup.engine for run in runs]
        numbers = _columns([split(engine, constant)[1] for engine in engines])
        of_scoring = _columns([split(scoring(engine), constant)[1] for engine in engines])
        key = jnp.stack([jax.random.key(planned[run].seed, impl=THREEFRY) for run in runs])
        placed = jax.device_put((numbers, of_scoring, key), layout.sharding)
        return Executor(setup, Turn(layout, runs, *placed), constant)

    return [starting_at(first) for first in range(0, len(group), layout.size)]


def _columns(each: Sequence[tuple[float, ...]]) -> tuple[jax.Array, ...]:
    """The numbers of several runs, an array [runs] for each number. They are weakly typed, like the Python numbers of a
    single run, so that results have the parameters' dtype."""
    return tuple(jnp.stack([jnp.asarray(number) for number in column]) for column in zip(*each, strict=True))
