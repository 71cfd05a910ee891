"""The runs of a sweep on the devices. A turn is a group of runs that are trained in one program.

If there are at least as many runs as devices, each device trains different runs (``apart``), and the devices do not
communicate. Otherwise all devices train the same runs together, as in `Simulation.run`. Each device trains
``per_device`` runs of a turn side by side (vmap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import recipes
from fedjax_drift.devices.launch import launch
from fedjax_drift.devices.mesh import AXIS, any_device, copied, num_teams
from fedjax_drift.measures.drift import nan_allowed
from fedjax_drift.round import rows
from fedjax_drift.round.engine import Arrays, Engine, TestRows
from fedjax_drift.round.evaluate import evaluate, server_scores
from fedjax_drift.round.round import init
from fedjax_drift.simulation import programs
from fedjax_drift.simulation.loop import rounds_of_one
from fedjax_drift.simulation.placement import frozen_parameters
from fedjax_drift.simulation.programs import FrozenArrays
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.types import THREEFRY, Params, PyTree, ServerState

Setting = dict[str, Any]


# --- programs ---------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The placement of the runs of a turn on the devices."""

    mesh: Mesh
    apart: bool  # whether each device trains different runs
    per_device: int  # number of runs that a device trains side by side

    @property
    def size(self) -> int:
        """The number of runs in a turn."""
        return self.per_device * (num_teams(self.mesh) if self.apart else 1)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of arrays whose first axis is the runs of a turn."""
        return NamedSharding(self.mesh, P(AXIS) if self.apart else P())

    def inside(self, engine: Engine) -> Engine:
        """The engine of one run.

        If the runs are apart, its mesh is one abstract device, which stands for any device. Otherwise it is ``engine``.
        """
        return engine._replace(mesh=any_device()) if self.apart else engine  # type: ignore[arg-type]


class TurnPrograms(NamedTuple):
    """Programs that are compiled when they are first called.

    The first axis of values, keys, states and results is the runs of a turn.
    """

    init: Callable[..., ServerState]  # (values, key, frozen, params)
    rounds: Callable[..., tuple[ServerState, dict]]  # (values, state, frozen, arrays, n)
    """The leaves of the infos are [runs, MOST_ROUNDS, ...], or [runs, 1, ...] with measures."""
    measured_round: Callable[..., tuple[ServerState, dict]]  # one of `rounds`, with drift measures
    evaluate: Callable[..., dict]  # (values, server, frozen, test)


def compiled(
    engine_of: Callable[[PyTree, FrozenArrays], Engine], measures: tuple[str, ...], layout: Layout
) -> TurnPrograms:
    """The programs for the engines ``engine_of(values, frozen)``."""

    def turn_init(values: PyTree, key: jax.Array, frozen: FrozenArrays, params: Params | None) -> ServerState:
        return init(engine_of(values, frozen), key, params)

    def rounds_with(names: tuple[str, ...]) -> Callable:
        def turn_rounds(
            values: PyTree, state: ServerState, frozen: FrozenArrays, arrays: Arrays, n: jax.Array
        ) -> tuple[ServerState, dict]:
            return programs.rounds(engine_of(values, frozen), names, state, arrays, n)

        return turn_rounds

    def turn_evaluate(values: PyTree, server: Any, frozen: FrozenArrays, test: TestRows) -> dict:
        engine = engine_of(values, frozen)
        return server_scores(lambda params: evaluate(engine, params, test), server)

    def of_turn(program: Callable, shared: int, **options: Any) -> Callable:
        """The program for a turn. shared: the last ``shared`` arguments are the same for all runs."""
        on_device = partial(_several if layout.per_device > 1 else _one, program, shared)
        if not layout.apart:
            return jax.jit(on_device, out_shardings=layout.sharding, **options)

        def on_devices(*arguments: Any) -> Any:
            per_run = len(arguments) - shared
            specs = (*[P(AXIS)] * per_run, *[P()] * shared)
            # check_vma=False for the reason given in `round.engine.on_each_device`.
            return jax.shard_map(
                on_device, mesh=layout.mesh, in_specs=specs, out_specs=P(AXIS), axis_names={AXIS}, check_vma=False
            )(*arguments)  # fmt: skip

        on_devices.__name__ = program.__name__
        return jax.jit(on_devices, **options)

    return TurnPrograms(
        init=of_turn(turn_init, 2),
        rounds=of_turn(rounds_with(()), 3, donate_argnums=1),
        measured_round=of_turn(rounds_with(measures), 3, donate_argnums=1),
        evaluate=of_turn(turn_evaluate, 2),
    )


def _one(program: Callable, shared: int, *arguments: Any) -> Any:
    """Calls the program for one run, without vmap. Arguments and results have a first axis of length 1."""
    per_run = len(arguments) - shared
    of_the_run = jax.tree.map(lambda a: a[0], arguments[:per_run])
    return jax.tree.map(lambda a: a[None], program(*of_the_run, *arguments[per_run:]))


def _several(program: Callable, shared: int, *arguments: Any) -> Any:
    """Calls the program for several runs side by side."""
    return jax.vmap(program, in_axes=(*[0] * (len(arguments) - shared), *[None] * shared))(*arguments)


@lru_cache(programs.KEPT)
def of_form(form: recipes.Form, measures: tuple[str, ...], layout: Layout) -> TurnPrograms:
    """The programs for runs that differ in their seeds and in the numbers of their engine."""
    return compiled(lambda numbers, frozen: recipes.join(form, numbers, frozen), measures, layout)


# --- runs -------------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A run before it is trained."""

    seed: int
    setting: Setting
    values: PyTree  # the numbers of the setting that are arguments of the programs


class Turn(NamedTuple):
    """A group of runs that are trained together in one program."""

    runs: tuple[int, ...]  # positions in the list of runs; the last turn may repeat its last run
    values: PyTree  # leaves [runs]
    key: jax.Array  # [runs]

    def places(self) -> Iterator[tuple[int, int]]:
        """Yields (index in the turn, run), without the indices that repeat a run."""
        for place, run in enumerate(self.runs):
            if run not in self.runs[:place]:
                yield place, run


def turns(planned: Sequence[Planned], layout: Layout) -> list[Turn]:
    """Splits the runs into turns of ``layout.size`` runs."""

    def starting_at(first: int) -> Turn:
        runs = tuple(min(first + j, len(planned) - 1) for j in range(layout.size))
        # The values are weakly typed, like the Python numbers of a single run. So results have the parameters' dtype.
        values = jax.tree.map(
            lambda *each: jnp.stack([jnp.asarray(v) for v in each]), *[planned[i].values for i in runs]
        )
        key = jnp.stack([jax.random.key(planned[i].seed, impl=THREEFRY) for i in runs])
        return Turn(runs, *jax.device_put((values, key), layout.sharding))

    return [starting_at(first) for first in range(0, len(planned), layout.size)]


class TurnTrack:
    """A turn as a `Track` of the loop in `loop.py`. It holds the states of the runs and advances them."""

    def __init__(self, setup: Setup, compiled: TurnPrograms, layout: Layout, turn: Turn) -> None:
        self.setup, self.compiled, self.layout, self.turn = setup, compiled, layout, turn
        # The examples are replicated in a sweep. If the runs are apart, each device evaluates on the whole test set.
        self.arrays = rows.place(setup.data, setup.mesh, "devices", setup.eval_batch_size, whole_test=layout.apart)
        self.frozen = frozen_parameters(setup.model, setup.mesh)
        self.state: ServerState

    def start(self, params: Params | None, states: Sequence[ServerState] | None) -> None:
        """Starts from ``states``, or at round 0 if it is None. States are copied because rounds donate their input."""
        if states is None:
            params = None if params is None else jax.device_put(params, NamedSharding(self.layout.mesh, P()))
            self.state = self._launch("init", self.turn.key, self.frozen, params)
            return
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[states[run] for run in self.turn.runs])
        self.state = copied(jax.device_put(stacked, self.layout.sharding), self.layout.sharding)

    def _launch(self, program: str, *arguments: Any) -> Any:
        return launch(self.layout.mesh, getattr(self.compiled, program), self.turn.values, *arguments)

    def prepare(self, t: int) -> None:
        """Does nothing: the data are already on the devices."""

    def advance(self, t: int, n: int, measured: bool) -> dict[str, jax.Array]:
        program, names = ("measured_round", self.setup.measures) if measured else ("rounds", ())
        with nan_allowed(names):
            self.state, infos = self._launch(program, self.state, self.frozen, self.arrays, np.int32(n))
        return infos

    def score(self) -> dict[str, jax.Array]:
        return self._launch("evaluate", self.state.server, self.frozen, self.arrays.test)

    def rounds(self, n: int, infos: dict, scores: dict) -> Iterator[tuple[int, int, dict, dict]]:
        for place, run in self.turn.places():
            run_infos, run_scores = ({name: v[place] for name, v in each.items()} for each in (infos, scores))
            for j, info, last in rounds_of_one(n, run_infos, run_scores, stacked=True):
                yield run, j, info, last

    def states(self) -> Iterable[tuple[int, ServerState]]:
        """The state of each run, on the device that trained it."""
        return [(run, _of_place(self.state, place, self.layout)) for place, run in self.turn.places()]


def _of_place(tree: PyTree, place: int, layout: Layout) -> PyTree:
    """Returns the arrays of one run from a tree whose leaves have a first axis of runs.

    The arrays stay on the device that trained the run.
    """
    device, lane = divmod(place, layout.per_device)

    def leaf(a: jax.Array) -> jax.Array:
        if not layout.apart:
            return a[place]
        shard = next(s for s in a.addressable_shards if (s.index[0].start or 0) == device * layout.per_device)
        return shard.data[lane]

    return jax.tree.map(leaf, tree)
