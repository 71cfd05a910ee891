"""The runs of a sweep on the devices. A turn is as many runs as the devices train at once, in one program.

With at least as many runs as devices, the runs are apart: each device has runs of its own. Otherwise all devices share
one run after another, as they do in `Simulation.run`. On each device a turn has ``at_once`` runs, side by side (vmap).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, drift, engine, fit, hyper, programs
from fedjax_drift.engine import AXIS, Engine
from fedjax_drift.progress import Bar, Record, Stop, nonfinite_message, record
from fedjax_drift.sharding import copied, launch
from fedjax_drift.simulation import Simulation
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
    def placement(self) -> NamedSharding:
        """Of arrays with an axis of runs, their first."""
        return NamedSharding(self.mesh, P(AXIS) if self.apart else P())

    def inside(self, how: Engine) -> Engine:
        """The engine of one run: alone on its device, whichever that is, or on all of them."""
        alone = AbstractMesh((1,), (AXIS,), axis_types=(AxisType.Auto,))
        return how._replace(mesh=alone) if self.apart else how  # type: ignore[arg-type]


class TurnPrograms(NamedTuple):
    """Compiled when first called. Values, keys, states and what is returned have an axis of a turn's runs."""

    init: Callable[..., ServerState]  # (values, key, params)
    rounds: Callable[
        ..., tuple[ServerState, dict]
    ]  # (values, state, arrays, n); leaves of infos [runs, MOST_ROUNDS, ...]
    measure: Callable[..., dict]  # (values, state, arrays)
    evaluate: Callable[..., dict]  # (values, server, test)


def compiled(how: Callable[[PyTree], Engine], measures: tuple[str, ...], layout: Layout) -> TurnPrograms:
    """The programs of the engines ``how(values)``."""

    def init(values: PyTree, key: jax.Array, params: Params | None) -> ServerState:
        return engine.init(how(values), key, params)

    def rounds(values: PyTree, state: ServerState, arrays: engine.Arrays, n: jax.Array) -> tuple[ServerState, dict]:
        return engine.rounds(how(values), programs.MOST_ROUNDS, state, arrays, n)

    def measure(values: PyTree, state: ServerState, arrays: engine.Arrays) -> dict:
        return drift.measure(how(values), measures, state, arrays, None)

    def evaluate(values: PyTree, server: Any, test: engine.TestRows) -> dict:
        return engine.evaluate_server(how(values), server, test)

    def of_turn(program: Callable, shared: int, **options: Any) -> Callable:
        """The program for a turn; the last ``shared`` of its arguments are the same for all runs."""
        on_device = partial(_several, program, shared) if layout.at_once > 1 else partial(_one, program, shared)
        if not layout.apart:
            return jax.jit(on_device, out_shardings=layout.placement, **options)

        def on_devices(*arguments: Any) -> Any:
            own = len(arguments) - shared
            specs = (*[P(AXIS)] * own, *[P()] * shared)
            # Runs exchange nothing, so there is no replication to check.
            return jax.shard_map(
                on_device, mesh=layout.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False
            )(*arguments)  # fmt: skip

        on_devices.__name__ = program.__name__
        return jax.jit(on_devices, **options)

    return TurnPrograms(
        init=of_turn(init, 1),
        rounds=of_turn(rounds, 2, donate_argnums=1),
        measure=drift.allowing_nan(of_turn(measure, 1)),
        evaluate=of_turn(evaluate, 1),
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

    runs: tuple[int, ...]  # their places in the list of runs; the last turn may repeat its last run to be as long
    values: PyTree  # leaves [runs]
    key: jax.Array  # [runs]


def turns(planned: Sequence[Planned], layout: Layout) -> list[Turn]:
    """The runs, as many at a time as the layout has places for."""

    def of(first: int) -> Turn:
        runs = tuple(min(first + j, len(planned) - 1) for j in range(layout.size))
        # As Python's numbers are in the run alone, these are weakly typed: their type gives way to the parameters'.
        values = jax.tree.map(
            lambda *each: jnp.stack([jnp.asarray(v) for v in each]), *[planned[i].values for i in runs]
        )
        key = jnp.stack([jax.random.key(planned[i].seed, impl=THREEFRY) for i in runs])
        return Turn(runs, *jax.device_put((values, key), layout.placement))

    return [of(first) for first in range(0, len(planned), layout.size)]


def arrays_for(sim: Simulation, layout: Layout) -> engine.Arrays:
    """The data set as a turn needs it: rows lie whole on each device; so does the test set where runs are apart."""
    if not layout.apart:
        return sim._arrays
    return sim._arrays._replace(test=engine.place_whole_test(sim.data, sim.mesh, sim._eval_batch_size))


def of_run(tree: PyTree, place: int, layout: Layout) -> PyTree:
    """What one run has of a tree with an axis of a turn's runs, on the device where it was trained."""
    device, lane = divmod(place, layout.at_once)

    def leaf(a: jax.Array) -> jax.Array:
        if not layout.apart:
            return a[place]
        (shard,) = [s for s in a.addressable_shards if (s.index[0].start or 0) == device * layout.at_once]
        return shard.data[lane]

    return jax.tree.map(leaf, tree)


class _Flight(NamedTuple):
    """n rounds of a turn on their way, the last of which is round ``done``."""

    turn: int
    done: int
    n: int
    infos: dict[str, jax.Array]  # leaves [runs, MOST_ROUNDS, ...]
    scores: dict[str, jax.Array]  # of the last round, leaves [runs]


class UnderWay:
    """A sweep under way: the turns' states, what is in flight, and the records made so far."""

    def __init__(
        self,
        sim: Simulation,
        made: TurnPrograms,
        layout: Layout,
        planned: Sequence[Planned],
        bar: Bar,
        on_round: Callable[[int, Setting, Record], None] | None,
    ) -> None:
        self.sim, self.programs, self.layout, self.planned = sim, made, layout, planned
        self.turns, self.arrays = turns(planned, layout), arrays_for(sim, layout)
        self.bar, self.on_round = bar, on_round
        self.states: list[ServerState] = []  # one for each turn
        self.histories: list[list[Record]] = [[] for _ in planned]
        self.seconds = float("inf")  # that a round of all runs took lately
        self._flying: deque[_Flight] = deque()
        self._landed: deque[tuple] = deque()  # rounds fetched and not yet recorded
        self._clock, self._warned = time.perf_counter(), set[int]()

    def start(self, params: Params | None, states: Sequence[ServerState] | None) -> None:
        """From each run's state, or round 0. Rounds overwrite what they start from, so it is copied."""
        everywhere = NamedSharding(self.layout.mesh, P())
        own = None if params is None else jax.device_put(params, everywhere)
        for turn in self.turns:
            if states is None:
                self.states.append(self._launch("init", turn, turn.key, own))
                continue
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[states[run] for run in turn.runs])
            self.states.append(copied(jax.device_put(stacked, self.layout.placement), self.layout.placement))

    def _launch(self, program: str, turn: Turn, *arguments: Any) -> Any:
        return launch(self.layout.mesh, getattr(self.programs, program), turn.values, *arguments)

    def advance(self, number: int, t: int, n: int, measured: bool) -> None:
        """Sends off n rounds of a turn, from round t."""
        turn, state = self.turns[number], self.states[number]
        found = self._launch("measure", turn, state, self.arrays) if measured else {}
        self.states[number], infos = self._launch("rounds", turn, state, self.arrays, np.int32(n))
        infos = self.sim._with_measured(infos, drift.of_one_round(found, axis=1))
        self._flying.append(_Flight(number, t + n, n, infos, {}))

    def score(self) -> None:
        """Sends off the evaluation of what is newest of each turn, unless its records are made already."""
        for at in {flight.turn: at for at, flight in enumerate(self._flying)}.values():
            flight = self._flying[at]
            if not flight.scores:
                server = self.states[flight.turn].server
                scores = self._launch("evaluate", self.turns[flight.turn], server, self.arrays.test)
                self._flying[at] = flight._replace(scores=scores)

    def catch_up(self, behind: int, stop: Stop) -> None:
        """Waits until only ``behind`` programs are on their way, and records the rounds of the others."""
        while len(self._flying) > behind:
            first = self._flying[0]
            infos, scores = jax.device_get((first.infos, first.scores))  # here Ctrl-C may interrupt
            with stop.held():
                self._flying.popleft()
                if first.turn == len(self.turns) - 1:
                    self.seconds = (time.perf_counter() - self._clock) / first.n
                    self._clock = time.perf_counter()
                self._landed.extend(self._rounds_of(first, infos, scores))
                self._record_landed()
        self._record_landed()  # what an error of on_round has left

    def _rounds_of(
        self, flight: _Flight, infos: Mapping[str, np.ndarray], scores: Mapping[str, np.ndarray]
    ) -> Iterator[tuple]:
        """For each round of each run: the run, rounds done, the round's info, the scores after it."""
        for place, run in self._places(flight.turn):
            for j in range(flight.n):
                info = {name: values[place, j] for name, values in infos.items()}
                last = {name: values[place] for name, values in scores.items()} if j == flight.n - 1 else {}
                yield run, flight.done - flight.n + 1 + j, info, last

    def _places(self, number: int) -> Iterator[tuple[int, int]]:
        """Place and run of a turn, without those that only fill it up."""
        runs = self.turns[number].runs
        for place, run in enumerate(runs):
            if run not in runs[:place]:
                yield place, run

    def _record_landed(self) -> None:
        while self._landed:
            run, done, info, scores = self._landed.popleft()
            plan = self.planned[run]
            made = record(done, info) | {"seconds": self.seconds} | {name: float(v) for name, v in scores.items()}
            self.histories[run].append(made)
            self.bar.update(made)
            wrong = self._wrong(done - 1, info)
            if wrong and run not in self._warned:
                self._warned.add(run)
                said = f"seed {plan.seed}, {plan.setting}, {wrong}"
                checks.warn(said, RuntimeWarning)
            if self.on_round is not None:
                self.on_round(plan.seed, plan.setting, made)

    def _wrong(self, t: int, info: dict[str, np.ndarray]) -> str:
        """What is not finite in a round, in words."""
        if not info["finite"].all():
            return nonfinite_message(t, info, self.sim._update_leaves)
        if self.sim.algorithm.observe is not None:
            scores = {name: value for name, value in info.items() if name.startswith("test_")}
            try:
                fit.check_scores(self.sim.algorithm, t, scores)
            except ValueError as error:
                return str(error)
        return ""

    def states_of_runs(self) -> list[ServerState]:
        """Each run's state, which stays where it was trained."""
        found: dict[int, ServerState] = {}
        for number, state in enumerate(self.states):
            for place, run in self._places(number):
                found[run] = of_run(state, place, self.layout)
        return [found[run] for run in range(len(self.planned))]
