"""Many runs at once: seeds, and settings that differ in continuous hyper-parameters, through one traced program.

The values of a setting are arguments of the program, not constants of it, so it is traced once for all runs. On an
accelerator runs go side by side (vmap); on a CPU, where that is slower than one after another, each core has a run of
its own and no client's training waits for another core.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, drift, engine, fit
from fedjax_drift.progress import Bar, Record, Stop, nonfinite_message, record, stop_on_interrupt
from fedjax_drift.sharding import clients_mesh, copied, launch, memory_of, spans_processes, wait_for_turn
from fedjax_drift.simulation import CHUNK_SECONDS, MOST_ROUNDS, Simulation
from fedjax_drift.types import THREEFRY, Params, PyTree, ServerState

Setting = dict[str, Any]


class Run(NamedTuple):
    """One run of a sweep, as `Simulation.run` would have left it."""

    seed: int
    setting: Setting  # what ``build`` was given
    state: ServerState
    history: list[Record]


def grid(**values: Iterable[Any]) -> list[Setting]:
    """All combinations, the last name's values fastest.

    >>> grid(lr=[0.1, 0.3], mu=[0.0, 1.0])[:2]
    [{'lr': 0.1, 'mu': 0.0}, {'lr': 0.1, 'mu': 1.0}]
    """
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def sweep(
    build: Callable[..., Simulation],
    rounds: int,
    seeds: Iterable[int] = (0,),
    settings: Iterable[Mapping[str, Any]] = ({},),
    eval_every: int = 10,
    *,
    params: Params | None = None,
    start: Sequence[Run] | None = None,
    together: int | str = "auto",
    progress: bool | None = None,
    on_round: Callable[[int, Setting, Record], None] | None = None,
    measure_every: int = 1,
) -> list[Run]:
    """Runs every setting with every seed, ``rounds`` rounds each.

    Every run is what ``sim = build(**setting)`` and ``sim.run(sim.init(jax.random.key(seed)), rounds)`` give, but for
    rounding, in a fraction of their time. The client states of a stateful algorithm take memory once for each run.

    >>> import fedjax_drift as fd
    >>> data = fd.FederatedData.from_clients([(np.eye(2, dtype="f4"), np.array([0, 1])) for _ in range(4)])
    >>> def build(lr):
    ...     model, local = fd.models.linear((2,), num_classes=2), fd.LocalTraining(lr=lr)
    ...     return fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=2)
    >>> runs = sweep(build, 3, seeds=range(2), settings=grid(lr=[0.1, 0.5]), progress=False)
    >>> [(run.setting["lr"], run.seed, len(run.history)) for run in runs]
    [(0.1, 0, 3), (0.1, 1, 3), (0.5, 0, 3), (0.5, 1, 3)]

    Args:
      build: makes the simulation of a setting. It is called with each setting's values and, for each program that is
        traced, once with tracers in place of the values in which settings differ. The data set is made outside it.
      rounds: rounds of every run, >= 0.
      seeds: different integers >= 0; seed s is ``jax.random.key(s)``.
      settings: ``build``'s keyword arguments, the same names in each. Values that differ between settings must be
        numbers that vary continuously (lr, mu, alpha, ...); what is alike in all of them may be anything.
      eval_every: as in `Simulation.run`; 0 never.
      params: initial parameters of all runs. Default: each seed's own, from the model.
      start: runs of an earlier sweep to go on from, one of every setting and seed, all at the same round. The runs
        returned have the new rounds alone in their history.
      together: runs trained side by side (vmap) on one device. "auto": 1 on a CPU; on an accelerator all, or if its
        memory does not suffice, half of them, and so on (a warning says so).
      progress: show a bar. Default: in a terminal or a notebook, not in CI.
      on_round: ``on_round(seed, setting, record)`` is called as the record of each round of each run is made.
      measure_every: as in `Simulation.run`, for simulations with ``measure=``.

    Returns:
      The runs, for each setting all seeds. ``history`` as `Simulation.run` makes it, except that ``seconds`` is what a
      round of all runs took. Ctrl-C ends the sweep after the rounds in progress and returns what is done (a second one
      at once: some runs may then be some rounds behind). A run whose updates or evaluations are no longer finite goes
      on, with a warning, and does not touch the others.

    Raises:
      ValueError: arguments out of range; settings that can't share a program, as they differ in something static
        (epochs, batch_size, cohort_size, the model, ...); simulations that need the host in every round (streamed data,
        ``bank=`` other than "device", ``on_nonfinite="raise"``); client states beyond the devices' memory.
      MemoryError: not even one run fits in a device's memory.
    """
    checks.integer("rounds", rounds, 0)
    checks.integer("eval_every", eval_every, 0, fix="0 means never")
    checks.integer("measure_every", measure_every, 1)
    if together != "auto":
        checks.integer("together", together, 1, fix='or pass "auto"')
    all_seeds, all_settings = _check_seeds(seeds), _check_settings(build, settings)
    sim = _build_all(build, all_settings)
    if params is not None:
        fit.check_like(params, sim._expected.params, "params must be shaped like model.init's")
    varied = _varied(all_settings)
    planned = [(seed, setting) for setting in all_settings for seed in all_seeds]
    _check_memory(sim, len(planned))
    states = None if start is None else _check_start(sim, start, planned, params)
    first = 0 if states is None else int(states[0].round)

    meshes = _meshes(sim.mesh, len(planned))
    at_once = -(-len(planned) // len(meshes))  # on one device
    if together != "auto":
        at_once = min(int(together), at_once)
    elif sim.mesh.devices.flat[0].platform == "cpu":
        at_once = 1
    at_once = _evenly(len(planned), at_once)
    if sim.data.x_test is None:
        eval_every = 0
    name = f"{sim.algorithm.name}, {len(planned)} runs"
    while True:
        programs = _programs(build, all_settings[0], varied, sim, meshes, at_once)
        groups = _groups(sim, planned, varied, meshes, at_once)
        with stop_on_interrupt() as stop, Bar(rounds * len(planned), name, progress) as bar:
            under_way = _Sweep(sim, programs, groups, planned, bar, on_round)
            try:
                under_way.start(params, states)
                _run(under_way, first, first + rounds, eval_every, measure_every, stop)
                return under_way.runs()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or any(under_way.histories):
                    raise
                if at_once == 1:
                    raise MemoryError(
                        f"a run of {sim!r} must fit in a device's memory: lower lanes, or sweep fewer runs"
                    ) from error
        fewer = _evenly(len(planned), at_once // 2)
        warnings.warn(
            f"{at_once} runs side by side do not fit in a device's memory, going on with {fewer}",
            stacklevel=_stacklevel(),
        )
        at_once = fewer


def _evenly(runs: int, at_once: int) -> int:
    """At most at_once, so that as many groups of runs are about equally large."""
    return -(-runs // -(-runs // at_once))


# --- what is swept, and whether it can be -----------------------------------------------------------------------------


def _check_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, (str, bytes)) or not isinstance(seeds, Iterable):
        raise ValueError(f"seeds must be several integers, got {seeds!r}: pass range(8) for 8 of them")
    found = [checks.integer("a seed", seed, 0, 2**32 - 1) for seed in seeds]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"seeds must be at least one, each once, got {found}")
    return found


def _check_settings(build: Any, settings: Any) -> list[Setting]:
    if not callable(build):
        raise ValueError(
            f"build must be a function that makes a Simulation, got {type(build).__name__}: "
            "lambda lr: fd.Simulation(...), or Simulation.sweep for seeds alone"
        )
    if isinstance(settings, Mapping) or not isinstance(settings, Iterable):
        raise ValueError(f"settings must be several dicts, got {settings!r}: [{{'lr': 0.1}}, {{'lr': 0.3}}]")
    found = list(settings)
    if not found or not all(isinstance(setting, Mapping) for setting in found):
        raise ValueError(f"settings must be at least one dict, got {found!r}")
    names = set(found[0])
    for i, setting in enumerate(found):
        if set(setting) != names:
            raise ValueError(
                f"settings must all have the same names, got {sorted(names)} in setting 0 and {sorted(setting)} in "
                f"setting {i}: give build's default where it is meant"
            )
        try:
            inspect.signature(build).bind(**setting)
        except TypeError as error:
            raise ValueError(
                f"settings must have the names of build's arguments, got {sorted(setting)}: {error}"
            ) from error
    return [{name: _as_number(value) for name, value in setting.items()} for setting in found]


def _as_number(value: Any) -> Any:
    """The number in an array of no axes; anything else as it is."""
    return value.item() if isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.ndim == 0 else value


def _build_all(build: Callable[..., Simulation], settings: Sequence[Setting]) -> Simulation:
    """The first setting's simulation, once all of them were built and found alike in what is static."""
    first: Simulation | None = None
    for i, setting in enumerate(settings):
        try:
            sim = build(**setting)
        except ValueError as error:
            raise ValueError(f"setting {i}, {setting}: {error}") from error
        if not isinstance(sim, Simulation):
            raise ValueError(f"build must return a Simulation, got {type(sim).__name__}")
        if first is None:
            first = sim
            _check_sweepable(sim)
        for name, one, other in _static_differences(first, sim):
            raise ValueError(
                f"settings must be alike in all but continuous hyper-parameters, got {name} {one} in setting 0 and "
                f"{other} in setting {i}, {setting}: sweep each by itself"
            )
    assert first is not None
    return first


def _check_sweepable(sim: Simulation) -> None:
    if spans_processes(sim.mesh):
        raise ValueError(
            "a sweep runs on one process's devices, got a mesh of several processes: "
            "mesh=fd.clients_mesh(jax.local_devices()), and settings or seeds of its own for each process"
        )
    if sim._engine.rows_by_rank is not None:
        raise ValueError("a sweep needs all rows on every device, got a simulation that cuts them: shard_data=False")
    if sim._stream is not None:
        raise ValueError("a sweep needs its rows on the devices, got a simulation that streams them: stream=False")
    if sim.bank != "device":
        raise ValueError(f'a sweep keeps client states on the devices, got bank={sim.bank!r}: bank="device"')
    if sim.on_nonfinite == "raise":
        raise ValueError(
            'on_nonfinite must be "keep" or "drop_client" in a sweep, got "raise": one run that diverges must not end '
            "the others"
        )


def _check_memory(sim: Simulation, runs: int) -> None:
    leaves = jax.tree.leaves(sim._expected.clients)
    devices = sim.mesh.size if runs >= sim.mesh.size else 1  # over which the runs' states are spread
    need = -(-runs // devices) * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if need > memory_of(sim.mesh):
        raise ValueError(
            f"the client states of {runs} runs must fit in the devices' memory, got {need / 1e9:.1f} GB on each: "
            "sweep fewer at a time"
        )


def _check_start(
    sim: Simulation, start: Sequence[Run], planned: Sequence[tuple[int, Setting]], params: Params | None
) -> list[ServerState]:
    """The states to go on from, in the order planned."""
    if params is not None:
        raise ValueError("start goes on from states, which have their parameters: leave params out")
    found = []
    for seed, setting in planned:
        runs = [run for run in start if run.seed == seed and dict(run.setting) == setting]
        if len(runs) != 1:
            raise ValueError(f"start must hold one run of every seed and setting, got {len(runs)} of {seed}, {setting}")
        found.append(sim._check(runs[0].state))
    rounds = sorted({int(state.round) for state in found})
    if len(rounds) > 1:
        raise ValueError(f"start must hold runs at the same round, got rounds {rounds}: go on from each by itself")
    return found


def _static_differences(a: Simulation, b: Simulation) -> Iterable[tuple[str, Any, Any]]:
    """Name and both values of what keeps two simulations from sharing a program."""
    if a.data is not b.data:
        yield "the data set", a.data, f"another one, {b.data} (make it once, outside build)"
    for name in ("epochs", "batch_size"):
        yield from _differs(name, getattr(a.local, name), getattr(b.local, name))
    for name in ("clip_norm", "optimizer"):  # their values may be traced, whether they are there may not
        yield from _differs(name, *[_presence(getattr(sim.local, name)) for sim in (a, b)])
    engines = a._engine, b._engine
    for name in ("cohort_size", "asked", "bernoulli", "lanes", "drop_nonfinite", "max_size", "redeal", "mesh"):
        yield from _differs(name, *[getattr(how, name) for how in engines])
    yield from _differs("a deadline", *[_presence(how.failures and how.failures.deadline) for how in engines])
    yield from _differs("the aggregation", *[how.aggregation.name.partition("(")[0] for how in engines])
    yield from _differs("on_nonfinite", a.on_nonfinite, b.on_nonfinite)
    yield from _differs("bank", a.bank, b.bank)
    yield from _differs("measure", a._measures, b._measures)
    for name in ("name", "requires"):
        yield from _differs(f"the algorithm's {name}", *[getattr(how.algorithm, name) for how in engines])
    for name in ("observe", "finish", "report"):
        yield from _differs(f"the algorithm's {name}", *[_presence(getattr(how.algorithm, name)) for how in engines])
    yield from _differs("test batches of", *[_shapes(sim._arrays.test) for sim in (a, b)])
    yield from _differs("states of", _shapes(a._expected), _shapes(b._expected))


def _differs(name: str, one: Any, other: Any) -> Iterable[tuple[str, Any, Any]]:
    if one != other:
        yield name, one, other


def _presence(value: Any) -> str:
    return "None" if value is None else "given"


def _shapes(tree: PyTree) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _varied(settings: Sequence[Setting]) -> list[str]:
    """The names in which settings differ; ValueError unless those are numbers."""
    varied = [name for name, one in settings[0].items() if not all(_alike(one, other[name]) for other in settings)]
    for name in varied:
        for value in (setting[name] for setting in settings):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(
                    f"{name} must be a number where settings differ in it, got {value!r}: sweep each value that is no "
                    "continuous hyper-parameter by itself"
                )
    return varied


def _alike(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except ValueError:  # arrays
        return False


# --- programs ---------------------------------------------------------------------------------------------------------


class _Programs(NamedTuple):
    """Compiled when first called on a device. All take a group's ``values`` first; with several runs in a group
    these, keys and states have an axis of them."""

    init: Callable[..., ServerState]  # (values, key, params)
    rounds: Callable[..., tuple[ServerState, dict]]  # (values, state, arrays, n); leaves of the info [MOST_ROUNDS, ...]
    measure: Callable[..., dict]  # (values, state, arrays)
    evaluate: Callable[..., dict]  # (values, server, test)


_SEEDS_ALONE: WeakKeyDictionary[Simulation, dict[tuple, _Programs]] = WeakKeyDictionary()


def _programs(
    build: Callable[..., Simulation],
    setting: Setting,
    varied: Sequence[str],
    sim: Simulation,
    meshes: Sequence[Mesh],
    at_once: int,
) -> _Programs:
    """The programs for groups of ``at_once`` runs; those of a simulation whose seeds alone are swept are kept."""
    mesh: Any = sim.mesh if len(meshes) == 1 else _any_device()
    static = sim._engine._replace(mesh=mesh)
    if varied:
        fixed = {name: value for name, value in setting.items() if name not in varied}
        return _compiled(partial(_traced_engine, build, fixed, sim, static), sim._measures, meshes, at_once)
    kept = _SEEDS_ALONE.setdefault(sim, {})
    key = (static.lanes, len(meshes), at_once)
    if key not in kept:
        kept[key] = _compiled(lambda values: static, sim._measures, meshes, at_once)
    return kept[key]


def _any_device() -> AbstractMesh:
    """One device, whichever the arguments are on: what is traced once serves all."""
    return AbstractMesh((1,), (engine.AXIS,), axis_types=(AxisType.Auto,))


def _traced_engine(
    build: Callable[..., Simulation], fixed: Setting, sim: Simulation, static: engine.Engine, values: Setting
) -> engine.Engine:
    """The engine with tracers for values; what cannot be traced is the first setting's."""
    try:
        traced = build(**fixed, **values)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"settings must be alike in all but continuous hyper-parameters, but of {', '.join(values)} at least one "
            f"is used as something else: {str(error).splitlines()[0]}"
        ) from error
    if traced.data is not sim.data:
        raise ValueError("build must use one data set in all calls: make it once, outside build")
    own = {name: getattr(traced._engine, name) for name in ("model", "algorithm", "local", "failures", "aggregation")}
    return static._replace(**own)


def _compiled(
    how: Callable[[Setting], engine.Engine], measures: tuple[str, ...], meshes: Sequence[Mesh], at_once: int
) -> _Programs:
    """The programs of ``how(values)``; they hold no simulation, so that one whose programs are kept can end."""

    def init(values: Setting, key: jax.Array, params: Params | None) -> ServerState:
        return engine.init(how(values), key, params)

    def rounds(values: Setting, state: ServerState, arrays: engine.Arrays, n: jax.Array) -> tuple[ServerState, dict]:
        return engine.rounds(how(values), MOST_ROUNDS, state, arrays, n)

    def measure(values: Setting, state: ServerState, arrays: engine.Arrays) -> dict:
        return drift.measure(how(values), measures, state, arrays, None)

    def evaluate(values: Setting, server: Any, test: engine.TestRows) -> dict:
        return engine.evaluate_server(how(values), server, test)

    # Over a mesh, a state must leave a program placed as it came in; on one device there is but one place.
    placed: Any = {"out_shardings": NamedSharding(meshes[0], P())} if len(meshes) == 1 else {}

    def compiled(program: Callable, others: tuple, **options: Any) -> Callable:
        many = program if at_once == 1 else jax.vmap(program, in_axes=(0, 0, *others))
        return jax.jit(many, **options, **placed)

    return _Programs(
        init=compiled(init, (None,)),
        rounds=compiled(rounds, (None, None), donate_argnums=1),
        measure=compiled(measure, (None,)),
        evaluate=compiled(evaluate, (None,)),
    )


# --- who runs where ---------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Runs that train side by side on one device; or on all, if there are fewer runs than devices."""

    runs: tuple[int, ...]  # their places in the list of runs; the last group may repeat its last run to be as long
    mesh: Mesh
    arrays: engine.Arrays  # the data set, on the group's devices
    values: dict[str, Any]  # the numbers of its settings: floats, or [at_once] for more than one run
    key: jax.Array  # [] or [at_once]


def _meshes(mesh: Mesh, runs: int) -> list[Mesh]:
    """One for each device, unless there are more of them than runs."""
    devices = list(mesh.devices.flat)
    return [clients_mesh([device]) for device in devices] if 1 < len(devices) <= runs else [mesh]


def _groups(
    sim: Simulation,
    planned: Sequence[tuple[int, Setting]],
    varied: Sequence[str],
    meshes: Sequence[Mesh],
    at_once: int,
) -> list[_Group]:
    groups, arrays = [], [_arrays_on(sim, mesh) for mesh in meshes]
    for number, start in enumerate(range(0, len(planned), at_once)):
        runs = tuple(min(start + j, len(planned) - 1) for j in range(at_once))
        values: dict[str, Any] = {name: [float(planned[i][1][name]) for i in runs] for name in varied}
        key = jnp.stack([jax.random.key(planned[i][0], impl=THREEFRY) for i in runs])
        if at_once == 1:  # as a Python number is in the run alone: its type gives way to the parameters'
            values, key = {name: one for name, (one,) in values.items()}, key[0]
        else:
            values = {name: np.asarray(several, jnp.result_type(float)) for name, several in values.items()}
        where = number % len(meshes)
        everywhere = NamedSharding(meshes[where], P())
        groups.append(_Group(runs, meshes[where], arrays[where], values, jax.device_put(key, everywhere)))
    return groups


def _arrays_on(sim: Simulation, mesh: Mesh) -> engine.Arrays:
    """The simulation's data set on some of its devices; rows, of which each device has a copy, stay where they are."""
    if mesh == sim.mesh:
        return sim._arrays
    devices = set(mesh.devices.flat)

    def there(array: jax.Array) -> jax.Array:
        copies = [shard.data for shard in array.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, P()), copies)

    test = sim._arrays.test
    if test is not None:
        test = engine.place(sim.data, mesh, test.x.shape[1], streamed=True).test
    return engine.Arrays(jax.tree.map(there, sim._arrays.rows), test)


# --- running ----------------------------------------------------------------------------------------------------------


class _Flight(NamedTuple):
    """n rounds of a group on their way, the last of which is round ``done``."""

    g: int
    done: int
    n: int
    infos: dict[str, jax.Array]  # leaves [at_once, MOST_ROUNDS, ...], without the first axis if at_once is 1
    scores: dict[str, jax.Array]  # of the last round


class _Sweep:
    """A sweep under way: the groups' states, what is in flight, and the records made so far."""

    def __init__(
        self,
        sim: Simulation,
        programs: _Programs,
        groups: Sequence[_Group],
        planned: Sequence[tuple[int, Setting]],
        bar: Bar,
        on_round: Callable[[int, Setting, Record], None] | None,
    ) -> None:
        self.sim, self.programs, self.groups, self.planned = sim, programs, groups, planned
        self.bar, self.on_round = bar, on_round
        self.states: list[ServerState] = []  # one for each group
        self.histories: list[list[Record]] = [[] for _ in planned]
        self.seconds = float("inf")  # that a round of all runs took lately
        self._flying: deque[_Flight] = deque()
        self._landed: deque[tuple] = deque()  # rounds fetched and not yet recorded
        self._clock, self._warned = time.perf_counter(), set[int]()

    def start(self, params: Params | None, states: Sequence[ServerState] | None) -> None:
        """From each run's state, or round 0. Rounds overwrite what they start from, so it is copied."""
        for group in self.groups:
            everywhere = NamedSharding(group.mesh, P())
            if states is None:
                own = _own(params, everywhere)
                self.states.append(launch(group.mesh, self.programs.init, group.values, group.key, own))
                continue
            several = [states[run] for run in group.runs]
            state = several[0] if len(several) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
            self.states.append(_own(state, everywhere))

    def advance(self, g: int, t: int, n: int, measured: bool) -> None:
        """Sends off n rounds of a group, from round t."""
        group, programs = self.groups[g], self.programs
        given = group.values, self.states[g], group.arrays
        found = launch(group.mesh, programs.measure, *given) if measured else {}
        self.states[g], infos = launch(group.mesh, programs.rounds, *given, np.int32(n))
        axis = int(len(group.runs) > 1)
        infos = self.sim._with_measured(infos, jax.tree.map(lambda a: jnp.expand_dims(a, axis), found))
        self._flying.append(_Flight(g, t + n, n, infos, {}))

    def score(self) -> None:
        """Sends off the evaluation of what is newest of each group, unless its records are made already."""
        newest = {flight.g: at for at, flight in enumerate(self._flying)}
        for g, at in newest.items():
            group, flight = self.groups[g], self._flying[at]
            if not flight.scores:
                scores = launch(
                    group.mesh, self.programs.evaluate, group.values, self.states[g].server, group.arrays.test
                )
                self._flying[at] = flight._replace(scores=scores)

    def catch_up(self, behind: int, stop: Stop) -> None:
        """Waits until only ``behind`` programs are on their way, and records the rounds of the others."""
        while len(self._flying) > behind:
            first = self._flying[0]
            infos, scores = jax.device_get((first.infos, first.scores))  # here Ctrl-C may interrupt
            with stop.held():
                self._flying.popleft()
                if first.g == len(self.groups) - 1:
                    self.seconds = (time.perf_counter() - self._clock) / first.n
                    self._clock = time.perf_counter()
                self._landed.extend(self._rounds_of(first, infos, scores))
                self._record_landed()
        self._record_landed()  # what an error of on_round has left

    def _rounds_of(self, flight: _Flight, infos: dict[str, np.ndarray], scores: dict[str, np.ndarray]) -> list[tuple]:
        """For each round of each run: the run, rounds done, the round's info, the scores after it."""
        runs, found = self.groups[flight.g].runs, []
        for lane, run in enumerate(runs):
            if run in runs[:lane]:  # repeated, to fill the group up
                continue
            alone = len(runs) == 1
            own, scored = (infos, scores) if alone else jax.tree.map(lambda a, lane=lane: a[lane], (infos, scores))
            for j in range(flight.n):
                info = {name: values[j] for name, values in own.items()}
                found.append((run, flight.done - flight.n + 1 + j, info, scored if j == flight.n - 1 else {}))
        return found

    def _record_landed(self) -> None:
        while self._landed:
            run, done, info, scores = self._landed.popleft()
            seed, setting = self.planned[run]
            made = record(done, info) | {"seconds": self.seconds} | {name: float(v) for name, v in scores.items()}
            self.histories[run].append(made)
            self.bar.update(made)
            wrong = self._wrong(done - 1, info)
            if wrong and run not in self._warned:
                self._warned.add(run)
                warnings.warn(f"seed {seed}, {setting}, {wrong}", RuntimeWarning, stacklevel=_stacklevel())
            if self.on_round is not None:
                self.on_round(seed, setting, made)

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

    def runs(self) -> list[Run]:
        """Each run with its state, which stays where it was trained."""
        states: dict[int, ServerState] = {}
        for group, state in zip(self.groups, self.states, strict=True):
            for lane, run in enumerate(group.runs):
                states[run] = state if len(group.runs) == 1 else jax.tree.map(lambda a, lane=lane: a[lane], state)
        return [Run(*run, states[i], self.histories[i]) for i, run in enumerate(self.planned)]


def _own(tree: PyTree, placement: NamedSharding) -> PyTree:
    """Copies of the arrays there. In two steps: JAX takes one device's part of an array that is on several as it is,
    even where it may not alias."""
    return copied(jax.device_put(tree, placement), placement)


def _run(under_way: _Sweep, t: int, last: int, eval_every: int, measure_every: int, stop: Stop) -> None:
    """From round t to the last."""
    groups, measured = range(len(under_way.groups)), bool(under_way.sim._measures)
    try:
        while t < last and not stop.asked:
            n, measures = _step(t, last, eval_every, measure_every if measured else 0, under_way.seconds)
            for g in groups:
                wait_for_turn(under_way.groups[g].mesh)  # here Ctrl-C may interrupt
                with stop.held():  # between donating a state and having the next one
                    under_way.advance(g, t, n, measures)
            t += n
            if eval_every and t % eval_every == 0:
                under_way.score()
            under_way.catch_up(len(groups), stop)  # one program of each group in flight, so that no device ever waits
    except KeyboardInterrupt:
        pass
    except jax.errors.JaxRuntimeError:  # memory may not suffice: `sweep` tries again
        raise
    except Exception as error:  # of on_round, say
        under_way.on_round = None
        under_way.catch_up(0, stop)
        if any(under_way.histories):
            with suppress(TypeError):
                vars(error).update(runs=under_way.runs())
        raise
    if eval_every:  # the last round, also of a sweep that was stopped
        under_way.score()
    under_way.catch_up(0, stop)


def _step(t: int, last: int, eval_every: int, measure_every: int, seconds: float) -> tuple[int, bool]:
    """Rounds in the programs that follow round t, and whether they are measured; 0 for ``every``: never."""

    def rounds_to(every: int) -> int:
        return every - t % every if every else last - t

    n = min(max(1, int(CHUNK_SECONDS / seconds)), MOST_ROUNDS, last - t, rounds_to(eval_every))
    if not measure_every:
        return n, False
    now = rounds_to(measure_every) == 1
    return (1 if now else min(n, rounds_to(measure_every) - 1)), now


def _stacklevel() -> int:
    """Of the first caller outside the library, for a warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fedjax_drift."):
        frame, level = frame.f_back, level + 1
    return level
