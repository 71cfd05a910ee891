"""The runs of a sweep on the devices. A turn is as many runs as the devices train at once, in one program.

With at least as many runs as devices, each device has runs of its own ("apart"), and the devices exchange nothing.
Otherwise all devices share one run after another, as they do in `Simulation.run`. On each device a turn has ``at_once``
runs, side by side (vmap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift.devices.launch import launch
from fedjax_drift.devices.mesh import AXIS, copied
from fedjax_drift.measures import drift
from fedjax_drift.round import rows
from fedjax_drift.round.engine import Arrays, Engine, TestRows
from fedjax_drift.round.evaluate import evaluate_server
from fedjax_drift.round.round import init, rounds
from fedjax_drift.simulation import hyper, programs
from fedjax_drift.simulation.executor import with_measured
from fedjax_drift.simulation.loop import rounds_of_one
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.types import THREEFRY, Params, PyTree, ServerState

Setting = dict[str, Any]


# --- programs ---------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How the runs of a turn lie on the devices."""

    mesh: Mesh
    apart: bool  # each device has runs of its own
    at_once: int  # runs on a device

    @property
    def size(self) -> int:
        """Runs of a turn."""
        return self.at_once * (self.mesh.size if self.apart else 1)

    @property
    def sharding(self) -> NamedSharding:
        """Of arrays whose first axis counts the runs of a turn."""
        return NamedSharding(self.mesh, P(AXIS) if self.apart else P())

    def inside(self, engine: Engine) -> Engine:
        """The engine of one run: alone on its device, whichever that is, or on all of them."""
        alone = AbstractMesh((1,), (AXIS,), axis_types=(AxisType.Auto,))
        return engine._replace(mesh=alone) if self.apart else engine  # type: ignore[arg-type]


class TurnPrograms(NamedTuple):
    """Compiled when first called. Values, keys, states and results have an axis of a turn's runs in front."""

    init: Callable[..., ServerState]  # (values, key, params)
    rounds: Callable[..., tuple[ServerState, dict]]  # (values, state, arrays, n); infos [runs, MOST_ROUNDS, ...]
    measure: Callable[..., dict]  # (values, state, arrays)
    evaluate: Callable[..., dict]  # (values, server, test)


def compiled(engine_of: Callable[[PyTree], Engine], measures: tuple[str, ...], layout: Layout) -> TurnPrograms:
    """The programs of the engines ``engine_of(values)``."""

    def turn_init(values: PyTree, key: jax.Array, params: Params | None) -> ServerState:
        return init(engine_of(values), key, params)

    def turn_rounds(values: PyTree, state: ServerState, arrays: Arrays, n: jax.Array) -> tuple[ServerState, dict]:
        return rounds(engine_of(values), programs.MOST_ROUNDS, state, arrays, n)

    def turn_measure(values: PyTree, state: ServerState, arrays: Arrays) -> dict:
        return drift.measure(engine_of(values), measures, state, arrays, None)

    def turn_evaluate(values: PyTree, server: Any, test: TestRows) -> dict:
        return evaluate_server(engine_of(values), server, test)

    def of_turn(program: Callable, shared: int, **options: Any) -> Callable:
        """The program for a turn; its last ``shared`` arguments are the same for all runs."""
        on_device = partial(_several if layout.at_once > 1 else _one, program, shared)
        if not layout.apart:
            return jax.jit(on_device, out_shardings=layout.sharding, **options)

        def on_devices(*arguments: Any) -> Any:
            own = len(arguments) - shared
            specs = (*[P(AXIS)] * own, *[P()] * shared)
            return jax.shard_map(
                on_device, mesh=layout.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False
            )(*arguments)  # fmt: skip

        on_devices.__name__ = program.__name__
        return jax.jit(on_devices, **options)

    return TurnPrograms(
        init=of_turn(turn_init, 1),
        rounds=of_turn(turn_rounds, 2, donate_argnums=1),
        measure=drift.allowing_nan(of_turn(turn_measure, 1)),
        evaluate=of_turn(turn_evaluate, 1),
    )


def _one(program: Callable, shared: int, *arguments: Any) -> Any:
    """The program for an axis of one run, without vmap."""
    own = len(arguments) - shared
    alone = jax.tree.map(lambda a: a[0], arguments[:own])
    return jax.tree.map(lambda a: a[None], program(*alone, *arguments[own:]))


def _several(program: Callable, shared: int, *arguments: Any) -> Any:
    """The program for several runs, side by side."""
    return jax.vmap(program, in_axes=(*[0] * (len(arguments) - shared), *[None] * shared))(*arguments)


@lru_cache(programs.KEPT)
def of_form(form: hyper.Form, measures: tuple[str, ...], layout: Layout) -> TurnPrograms:
    """The programs of runs that differ in seeds, and in the numbers of their engine."""
    return compiled(lambda numbers: hyper.join(form, numbers), measures, layout)


# --- runs -------------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A run that is to be done."""

    seed: int
    setting: Setting
    values: PyTree  # what the programs take of its setting, floats


class Turn(NamedTuple):
    """Runs that are trained by one call of a program."""

    runs: tuple[int, ...]  # their positions in the list of runs; the last turn may repeat its last run
    values: PyTree  # leaves [runs]
    key: jax.Array  # [runs]

    def places(self) -> Iterator[tuple[int, int]]:
        """(place, run), without the places that only repeat a run."""
        for place, run in enumerate(self.runs):
            if run not in self.runs[:place]:
                yield place, run


def turns(planned: Sequence[Planned], layout: Layout) -> list[Turn]:
    """The runs, as many at a time as the layout has places for."""

    def starting_at(first: int) -> Turn:
        runs = tuple(min(first + j, len(planned) - 1) for j in range(layout.size))
        # Weakly typed, as Python's numbers are in a single run: their dtype gives way to the parameters'.
        values = jax.tree.map(
            lambda *each: jnp.stack([jnp.asarray(v) for v in each]), *[planned[i].values for i in runs]
        )
        key = jnp.stack([jax.random.key(planned[i].seed, impl=THREEFRY) for i in runs])
        return Turn(runs, *jax.device_put((values, key), layout.sharding))

    return [starting_at(first) for first in range(0, len(planned), layout.size)]


class TurnTrack:
    """The runs of a turn, as the loop advances them."""

    def __init__(self, setup: Setup, compiled: TurnPrograms, layout: Layout, turn: Turn) -> None:
        self.setup, self.compiled, self.layout, self.turn = setup, compiled, layout, turn
        # Rows are replicated in a sweep. Where runs are apart, each device evaluates on the whole test set.
        self.arrays = rows.place(setup.data, setup.mesh, "devices", setup.eval_batch_size, whole_test=layout.apart)
        self.state: ServerState

    def start(self, params: Params | None, states: Sequence[ServerState] | None) -> None:
        """From each run's state, or from round 0. Rounds overwrite what they start from, so states are copied."""
        if states is None:
            params = None if params is None else jax.device_put(params, NamedSharding(self.layout.mesh, P()))
            self.state = self._launch("init", self.turn.key, params)
            return
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[states[run] for run in self.turn.runs])
        self.state = copied(jax.device_put(stacked, self.layout.sharding), self.layout.sharding)

    def _launch(self, program: str, *arguments: Any) -> Any:
        return launch(self.layout.mesh, getattr(self.compiled, program), self.turn.values, *arguments)

    def prepare(self, t: int) -> None:
        """The data are on the devices."""

    def advance(self, t: int, n: int, measured: bool) -> dict[str, jax.Array]:
        measures = self._launch("measure", self.state, self.arrays) if measured else {}
        self.state, infos = self._launch("rounds", self.state, self.arrays, np.int32(n))
        return with_measured(self.setup, infos, drift.of_one_round(measures, axis=1))

    def score(self) -> dict[str, jax.Array]:
        return self._launch("evaluate", self.state.server, self.arrays.test)

    def rounds(self, n: int, infos: dict, scores: dict) -> Iterator[tuple[int, int, dict, dict]]:
        for place, run in self.turn.places():
            own_infos, own_scores = ({name: v[place] for name, v in each.items()} for each in (infos, scores))
            for j, info, last in rounds_of_one(n, own_infos, own_scores, stacked=True):
                yield run, j, info, last

    def states(self) -> Iterable[tuple[int, ServerState]]:
        """Each run's state, which stays where it was trained."""
        return [(run, _of_place(self.state, place, self.layout)) for place, run in self.turn.places()]


def _of_place(tree: PyTree, place: int, layout: Layout) -> PyTree:
    """One run's part of a tree with an axis of a turn's runs, on the device where it was trained."""
    device, lane = divmod(place, layout.at_once)

    def leaf(a: jax.Array) -> jax.Array:
        if not layout.apart:
            return a[place]
        (shard,) = [s for s in a.addressable_shards if (s.index[0].start or 0) == device * layout.at_once]
        return shard.data[lane]

    return jax.tree.map(leaf, tree)
