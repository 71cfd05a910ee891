"""Many runs at once: seeds, and settings that differ in continuous hyper-parameters, through one compiled program.

The values of a setting are arguments of the program, not constants of it. With at least as many runs as devices, each
device has runs of its own, and one program, compiled once, runs on all of them. On an accelerator a device's runs go
side by side (vmap); on a CPU, where that is slower, one after another, and no client's training waits for another core.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, fit, programs
from fedjax_drift.checkpoint import Checkpoints, SavedRuns
from fedjax_drift.engine import Engine
from fedjax_drift.progress import Bar, Record, Stop, stop_on_interrupt
from fedjax_drift.sharding import memory_of, spans_processes, wait_for_turn
from fedjax_drift.simulation import CHUNK_SECONDS, Simulation
from fedjax_drift.turns import Layout, Planned, Setting, TurnPrograms, UnderWay, compiled, of_form
from fedjax_drift.types import Params, PyTree, ServerState


class Run(NamedTuple):
    """One run of a sweep, as `Simulation.run` would have left it."""

    seed: int
    setting: Setting  # what ``build`` was given
    state: ServerState
    history: list[Record]
    algorithm: str = ""  # its name

    def __repr__(self) -> str:
        """Without the arrays of the state: in a notebook a sweep is often the last line of a cell."""
        last = self.history[-1] if self.history else {}
        scores = [f"{name} {last[name]:.3g}" for name in ("loss", "accuracy") if name in last]
        end = ", ".join([f"round {last.get('round', 0)}", *scores])
        return f"Run({self.algorithm}, seed {self.seed}, {self.setting}: {end})"


def grid(**values: Iterable[Any]) -> list[Setting]:
    """All combinations, the last name's values fastest. Raises ValueError for a name without several values.

    >>> grid(lr=[0.1, 0.3], mu=[0.0, 1.0])[:2]
    [{'lr': 0.1, 'mu': 0.0}, {'lr': 0.1, 'mu': 1.0}]
    """
    several = {name: _several(name, of) for name, of in values.items()}
    return [dict(zip(several, each, strict=True)) for each in itertools.product(*several.values())]


def _several(name: str, values: Any) -> list[Any]:
    """The values of one name; ValueError for what is one value, or none."""
    one = isinstance(values, str | bytes | Mapping) or isinstance(values, np.ndarray | jax.Array) and values.ndim == 0
    if one or not isinstance(values, Iterable) or not (found := list(values)):
        raise ValueError(f"{name} must be one or more values, got {checks.shown(values)}: grid({name}=[...])")
    return found


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
    checkpoints: Checkpoints | str | os.PathLike | None = None,
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
      checkpoints: `fd.Checkpoints`, or just a folder, in which every run is saved while the sweep goes on, in a folder
        of its own (``seed-0``, or ``lr=0.1-seed-0`` where lr differs between settings). A sweep with the same folder
        goes on from what is there, so the same call again finishes what was stopped or killed: ``rounds`` is then what
        each run has in all, and the histories returned are whole. SIGTERM ends it like Ctrl-C, and then raises
        SystemExit(143).

    Returns:
      The runs, for each setting all seeds. ``history`` as `Simulation.run` makes it, except that ``seconds`` is what a
      round of all runs took. Ctrl-C ends the sweep after the rounds in progress and returns what is done (a second one
      at once: some runs may then be some rounds behind). A run whose updates or evaluations are no longer finite goes
      on, with a warning, and does not touch the others.

    Raises:
      ValueError: arguments out of range; settings that can't share a program, as they differ in something static
        (epochs, batch_size, cohort_size, the model, ...); simulations that need the host in every round (streamed data,
        ``bank=`` other than "device", ``on_nonfinite="raise"``); client states beyond the devices' memory; checkpoints
        of another sweep, or of more rounds.
      MemoryError: not even one run fits in a device's memory.
    """
    rounds, eval_every, measure_every, progress = fit.check_run(rounds, eval_every, measure_every, progress)
    if on_round is not None:
        checks.function("on_round", on_round, "it is called with a seed, its setting and each record")
    if not checks.is_auto(together):
        together = checks.integer("together", together, 1, fix='or pass "auto"')
    all_seeds, all_settings = _check_seeds(seeds), _check_settings(build, settings)
    simulations = _build_all(build, all_settings)
    sim = simulations[0]
    if params is not None:
        fit.check_like(params, sim._expected.params, "params must be shaped like model.init's")
    varied = _varied(all_settings)
    planned = [
        Planned(seed, setting, {name: float(setting[name]) for name in varied})
        for setting in all_settings
        for seed in all_seeds
    ]
    _check_memory(sim, len(planned))
    if start is not None and checkpoints is not None:
        raise ValueError("checkpoints have the runs to go on from: leave start out")
    states = None if start is None else _check_start(sim, start, planned, params)
    if sim.data.x_test is None:
        eval_every = 0
    saved, before = None, None
    if checkpoints is not None:
        of_runs = [one for one in simulations for _ in all_seeds]
        saved = SavedRuns(checkpoints, of_runs, [_name_of_run(plan, varied) for plan in planned])
        states, before = saved.restore(rounds)
    first = 0 if states is None else int(states[0].round)
    last = rounds if checkpoints is not None else first + rounds

    most = together if isinstance(together, int) else 1 if sim.mesh.devices.flat[0].platform == "cpu" else len(planned)
    layout = _layout(sim, len(planned), most)
    with stop_on_interrupt(terminate=saved is not None) as stop:
        while True:
            made, numbers = _made(build, all_settings[0], varied, sim, layout)
            given = planned if varied else [plan._replace(values=numbers) for plan in planned]
            with Bar(last * len(planned), f"{sim.algorithm.name}, {len(planned)} runs", progress) as bar:
                for record in itertools.chain(*(before or [])):
                    bar.update(record)
                under_way = UnderWay(sim, made, layout, given, bar, on_round)
                try:
                    under_way.start(params, states)
                    with nullcontext() if saved is None else saved.open(under_way.states_of_runs(), stop.held):
                        _run(under_way, first, last, eval_every, measure_every, stop, saved)
                    break
                except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                    if varied or sim._constant:
                        raise
                    sim._constant = True  # a number is used where a program can't have an argument
                    continue
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error) or any(under_way.histories):
                        raise
                    if layout.at_once == 1:
                        raise MemoryError(
                            f"a run of {sim!r} must fit in a device's memory: lower lanes, or sweep fewer runs"
                        ) from error
            fewer = _layout(sim, len(planned), layout.at_once // 2)
            checks.warn(
                f"{layout.at_once} runs side by side do not fit in a device's memory, going on with {fewer.at_once}"
            )
            layout = fewer
    if stop.terminated:
        raise SystemExit(143)
    return _runs(under_way, before)


def _name_of_run(plan: Planned, varied: Sequence[str]) -> str:
    """The folder of its checkpoints."""
    return "-".join([*(f"{name}={plan.setting[name]}" for name in varied), f"seed-{plan.seed}"])


# --- what is swept, and whether it can be -----------------------------------------------------------------------------


def _check_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, (str, bytes, type)) or not isinstance(seeds, Iterable):
        raise ValueError(f"seeds must be several integers, got {checks.shown(seeds)}: pass range(8) for 8 of them")
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
    if isinstance(settings, Mapping | np.ndarray | jax.Array) or not isinstance(settings, Iterable):
        raise ValueError(
            f"settings must be several dicts, got {checks.shown(settings)}: [{{'lr': 0.1}}, {{'lr': 0.3}}]"
        )
    found = list(settings)
    if not found or not all(isinstance(setting, Mapping) for setting in found):
        raise ValueError(f"settings must be at least one dict, got {checks.shown(found)}")
    names = set(found[0])
    for i, setting in enumerate(found):
        if set(setting) != names:
            raise ValueError(
                f"settings must all have the same names, got {sorted(names)} in setting 0 and {sorted(setting)} in "
                f"setting {i}: give build's default where it is meant"
            )
        try:
            inspect.signature(build).bind(**setting)
        except ValueError:  # built in, it tells no signature
            pass
        except TypeError as error:
            raise ValueError(
                f"settings must have the names of build's arguments, got {sorted(setting)}: {error}"
            ) from error
    return [{name: checks.one_in(value) for name, value in setting.items()} for setting in found]


def _build_all(build: Callable[..., Simulation], settings: Sequence[Setting]) -> list[Simulation]:
    """Each setting's simulation; ValueError unless they are alike in what is static."""
    simulations: list[Simulation] = []
    for i, setting in enumerate(settings):
        try:
            sim = build(**setting)
        except ValueError as error:
            raise ValueError(f"setting {i}, {setting}: {error}") from error
        if not isinstance(sim, Simulation):
            raise ValueError(f"build must return a Simulation, got {type(sim).__name__}")
        if not simulations:
            check_sweepable(sim)
        simulations.append(sim)
        for name, one, other in _static_differences(simulations[0], sim):
            raise ValueError(
                f"settings must be alike in all but continuous hyper-parameters, got {name} {one} in setting 0 and "
                f"{other} in setting {i}, {setting}: sweep each by itself"
            )
    return simulations


def check_sweepable(sim: Simulation) -> None:
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
    sim: Simulation, start: Sequence[Run], planned: Sequence[Planned], params: Params | None
) -> list[ServerState]:
    """The states to go on from, in the order planned."""
    if params is not None:
        raise ValueError("start goes on from states, which have their parameters: leave params out")
    if not isinstance(start, Sequence) or not all(isinstance(run, Run) for run in start):
        raise ValueError(f"start must be what fd.sweep returned, got {checks.shown(start)}")
    found = []
    for seed, setting, _ in planned:
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
                    f"{name} must be a number where settings differ in it, got {checks.shown(value)}: sweep each "
                    "value that is no continuous hyper-parameter by itself"
                )
    return varied


def _alike(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # arrays, and such as were donated
        return False


# --- programs ---------------------------------------------------------------------------------------------------------


def _layout(sim: Simulation, runs: int, most: int) -> Layout:
    """Which runs are trained at once: on a device at most so many, and about as many in every turn."""
    apart = 1 < sim.mesh.size <= runs
    on_device = -(-runs // sim.mesh.size) if apart else runs
    turns = -(-on_device // min(most, on_device))
    return Layout(sim.mesh, apart, at_once=-(-on_device // turns))


def _made(
    build: Callable[..., Simulation],
    setting: Setting,
    varied: Sequence[str],
    sim: Simulation,
    layout: Layout,
) -> tuple[TurnPrograms, tuple[float, ...]]:
    """The programs, and the numbers of the engine, which they take where no setting is varied."""
    static = layout.inside(sim._engine)
    if varied:
        fixed = {name: value for name, value in setting.items() if name not in varied}
        return compiled(partial(_traced_engine, build, fixed, sim, static), sim._measures, layout), ()
    form, numbers = programs.split(static, sim._constant)
    return of_form(form, sim._measures, layout), numbers


def _traced_engine(
    build: Callable[..., Simulation], fixed: Setting, sim: Simulation, static: Engine, values: Setting
) -> Engine:
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
    own = {name: getattr(traced._engine, name) for name in ("model", *programs.CONTINUOUS)}
    return static._replace(**own)


# --- running ----------------------------------------------------------------------------------------------------------


def _run(
    under_way: UnderWay,
    t: int,
    last: int,
    eval_every: int,
    measure_every: int,
    stop: Stop,
    saved: SavedRuns | None,
) -> None:
    """From round t to the last."""
    turns, measured = range(len(under_way.turns)), bool(under_way.sim._measures)
    measure_every, save_every = measure_every if measured else 0, 0 if saved is None else saved.every
    fresh = True
    with _nothing_lost(under_way, stop, saved):
        with suppress(KeyboardInterrupt):
            while t < last and not stop.asked:
                if saved is not None and not fresh and saved.due(t):
                    under_way.catch_up(0, stop)
                    saved.save(under_way.states_of_runs(), under_way.histories)
                n, measures = _step(t, last, eval_every, measure_every, save_every, under_way.seconds)
                for number in turns:
                    wait_for_turn(under_way.layout.mesh)  # here Ctrl-C may interrupt
                    with stop.held():  # between donating a state and having the next one
                        under_way.advance(number, t, n, measures)
                t, fresh = t + n, False
                if scored := bool(eval_every) and t % eval_every == 0:
                    under_way.score()
                if saved is not None and scored and saved.follows_best:
                    under_way.catch_up(0, stop)
                    saved.consider(under_way.states_of_runs(), under_way.histories)
                under_way.catch_up(len(turns), stop)  # one program of each turn in flight, so that no device ever waits
        if eval_every and (saved is None or t == last):  # the last round, also of a sweep that was stopped for good
            under_way.score()
        under_way.catch_up(0, stop)
    if saved is not None:
        with stop.held():
            saved.finish(under_way.states_of_runs(), under_way.histories)


@contextmanager
def _nothing_lost(under_way: UnderWay, stop: Stop, saved: SavedRuns | None) -> Iterator[None]:
    """In it an error, of on_round say, carries the runs as they are, and they are saved."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # memory may not suffice: `sweep` tries again
        raise
    except Exception as error:
        under_way.on_round = None
        under_way.catch_up(0, stop)
        if any(under_way.histories):
            with suppress(TypeError):  # one that holds nothing
                vars(error).update(runs=_runs(under_way))
            if saved is not None:
                saved.save(under_way.states_of_runs(), under_way.histories)
        raise


def _runs(under_way: UnderWay, before: Sequence[list[Record]] | None = None) -> list[Run]:
    """The runs, with the records that they had before."""
    before = before or [[] for _ in under_way.planned]
    name = under_way.sim.algorithm.name
    parts = zip(under_way.planned, under_way.states_of_runs(), before, under_way.histories, strict=True)
    return [Run(plan.seed, plan.setting, state, old + new, name) for plan, state, old, new in parts]


def _step(t: int, last: int, eval_every: int, measure_every: int, save_every: int, seconds: float) -> tuple[int, bool]:
    """Rounds in the programs that follow round t, and whether they are measured; 0 for ``every``: never."""

    def rounds_to(every: int) -> int:
        return every - t % every if every else last - t

    most = min(max(1, int(CHUNK_SECONDS / seconds)), programs.MOST_ROUNDS)
    n = min(most, last - t, rounds_to(eval_every), rounds_to(save_every))
    if not measure_every:
        return n, False
    now = rounds_to(measure_every) == 1
    return (1 if now else min(n, rounds_to(measure_every) - 1)), now
