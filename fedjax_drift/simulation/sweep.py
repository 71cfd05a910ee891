"""Many runs at once: seeds, and settings that differ in continuous hyper-parameters, through one compiled program.

The values of a setting are arguments of the program, not constants of it. With at least as many runs as devices, each
device has runs of its own, and one program, compiled once, runs on all of them. On an accelerator a device's runs go
side by side (vmap); on a CPU, where that is slower, one after another, and no client's training waits for another core.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.devices.mesh import memory_of, spans_processes
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.round.engine import Engine
from fedjax_drift.simulation import programs, validate
from fedjax_drift.simulation.executor import UNTRACEABLE, out_of_memory
from fedjax_drift.simulation.loop import Loop, Schedule, attach_to
from fedjax_drift.simulation.progress import Bar, stop_on_interrupt
from fedjax_drift.simulation.records import complaints
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.simulation.turns import Layout, Planned, Setting, TurnPrograms, TurnTrack, compiled, of_form, turns
from fedjax_drift.storage.checkpoint import Checkpoints, restore_together, split_by_run
from fedjax_drift.storage.saver import saving
from fedjax_drift.types import Params, Record, ServerState


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
        raise ConfigurationError(f"{name} must be one or more values, got {checks.shown(values)}: grid({name}=[...])")
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
    rounds, eval_every, measure_every, progress = validate.check_run(rounds, eval_every, measure_every, progress)
    if on_round is not None:
        checks.function("on_round", on_round, "it is called with a seed, its setting and each record")
    if not checks.is_auto(together):
        together = checks.integer("together", together, 1, fix='or pass "auto"')
    all_seeds, all_settings = _check_seeds(seeds), _check_settings(build, settings)
    simulations = _build_all(build, all_settings)
    setup = simulations[0].setup
    if params is not None:
        tree.check_layout(params, setup.state.params, "params must be shaped like model.init's")
    varied = _varied(all_settings)
    planned = [
        Planned(seed, setting, {name: float(setting[name]) for name in varied})
        for setting in all_settings
        for seed in all_seeds
    ]
    _check_memory(setup, len(planned))
    if start is not None and checkpoints is not None:
        raise ConfigurationError("checkpoints have the runs to go on from: leave start out")
    states = None if start is None else _check_start(setup, start, planned, params)
    before: list[list[Record]] = [[] for _ in planned]  # the records of earlier sweeps
    kept: list[Checkpoints] = []
    specifications = [sim.specification for sim in simulations for _ in all_seeds] if checkpoints is not None else []
    if checkpoints is not None:
        kept = split_by_run(checkpoints, [_name_of_run(plan, varied) for plan in planned])
        states, before = restore_together(kept, specifications, rounds)
    first = 0 if states is None else int(states[0].round)
    last = rounds if kept else first + rounds
    schedule = Schedule(
        last,
        eval_every if setup.data.x_test is not None else 0,
        measure_every if setup.measures else 0,
        (kept[0].every or 0) if kept else 0,
        one_round_a_program=False,
    )

    def runs_of(loop: Loop, earlier: Sequence[list[Record]]) -> list[Run]:
        name, parts = setup.engine.algorithm.name, zip(planned, loop.states(), earlier, loop.histories, strict=True)
        return [Run(plan.seed, plan.setting, state, old + new, name) for plan, state, old, new in parts]

    def report(run: int, entry: Record) -> None:
        if on_round is not None:
            on_round(planned[run].seed, planned[run].setting, entry)

    def complain(run: int, t: int, info: dict, entry: Record) -> dict[str, str]:
        found = complaints(t, info, entry, setup.update_leaves)
        if not found and setup.engine.algorithm.observe is not None:
            scores = {name: value for name, value in info.items() if name.startswith("test_")}
            try:
                validate.check_scores(setup.engine.algorithm, t, scores)
            except ConfigurationError as error:
                found["not finite"] = str(error)
        return {kind: f"seed {planned[run].seed}, {planned[run].setting}, {text}" for kind, text in found.items()}

    on_cpu = setup.mesh.devices.flat[0].platform == "cpu"
    layout = _layout(setup, len(planned), together if isinstance(together, int) else 1 if on_cpu else len(planned))
    constant = False  # whether hyper-parameters are constants of the programs
    with stop_on_interrupt(terminate=bool(kept)) as stop:
        while True:
            of_turns, numbers = _compiled(build, all_settings[0], varied, setup, layout, constant)
            given = planned if varied else [plan._replace(values=numbers) for plan in planned]
            with Bar(last * len(planned), f"{setup.engine.algorithm.name}, {len(planned)} runs", progress) as bar:
                for entry in itertools.chain(*before):
                    bar.update(entry)
                tracks = [TurnTrack(setup, of_turns, layout, turn) for turn in turns(given, layout)]
                loop = Loop(tracks, len(planned), setup.mesh, schedule, bar, stop, None, report, complain)

                def attach(error: Exception, loop: Loop = loop) -> None:
                    if any(loop.histories):
                        attach_to(error, runs=runs_of(loop, [[] for _ in planned]))

                try:
                    for track in tracks:
                        track.start(params, states)
                    whole = saving(kept, specifications, loop.states(), stop.held, back=True) if kept else nullcontext()
                    with whole as loop.savers:
                        loop.run(first, attach)
                    break
                except UNTRACEABLE:
                    if varied or constant:
                        raise
                    constant = True  # a number is used where a program cannot have an argument
                    continue
                except jax.errors.JaxRuntimeError as error:
                    if not out_of_memory(error) or any(loop.histories):
                        raise
                    if layout.at_once == 1:
                        raise MemoryError(
                            f"a run of {simulations[0]!r} must fit in a device's memory: lower lanes, or sweep fewer "
                            "runs"
                        ) from error
            fewer = _layout(setup, len(planned), layout.at_once // 2)
            checks.warn(
                f"{layout.at_once} runs side by side do not fit in a device's memory, going on with {fewer.at_once}"
            )
            layout = fewer
    if stop.terminated:
        raise SystemExit(143)
    return runs_of(loop, before)


def _name_of_run(plan: Planned, varied: Sequence[str]) -> str:
    """The folder of its checkpoints."""
    return "-".join([*(f"{name}={plan.setting[name]}" for name in varied), f"seed-{plan.seed}"])


# --- what is swept, and whether it can be -----------------------------------------------------------------------------


def _check_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, (str, bytes, type)) or not isinstance(seeds, Iterable):
        raise ConfigurationError(
            f"seeds must be several integers, got {checks.shown(seeds)}: pass range(8) for 8 of them"
        )
    found = [checks.integer("a seed", seed, 0, 2**32 - 1) for seed in seeds]
    if not found or len(set(found)) < len(found):
        raise ConfigurationError(f"seeds must be at least one, each once, got {found}")
    return found


def _check_settings(build: Any, settings: Any) -> list[Setting]:
    if not callable(build):
        raise ConfigurationError(
            f"build must be a function that makes a Simulation, got {type(build).__name__}: "
            "lambda lr: fd.Simulation(...), or Simulation.sweep for seeds alone"
        )
    if isinstance(settings, Mapping | np.ndarray | jax.Array) or not isinstance(settings, Iterable):
        raise ConfigurationError(
            f"settings must be several dicts, got {checks.shown(settings)}: [{{'lr': 0.1}}, {{'lr': 0.3}}]"
        )
    found = list(settings)
    if not found or not all(isinstance(setting, Mapping) for setting in found):
        raise ConfigurationError(f"settings must be at least one dict, got {checks.shown(found)}")
    names = set(found[0])
    for i, setting in enumerate(found):
        if set(setting) != names:
            raise ConfigurationError(
                f"settings must all have the same names, got {sorted(names)} in setting 0 and {sorted(setting)} in "
                f"setting {i}: give build's default where it is meant"
            )
        try:
            inspect.signature(build).bind(**setting)
        except ValueError:  # built in, it tells no signature
            pass
        except TypeError as error:
            raise ConfigurationError(
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
            raise ConfigurationError(f"setting {i}, {setting}: {error}") from error
        if not isinstance(sim, Simulation):
            raise ConfigurationError(f"build must return a Simulation, got {type(sim).__name__}")
        if not simulations:
            check_sweepable(sim.setup)
        simulations.append(sim)
        for name, one, other in _static_differences(simulations[0].setup, sim.setup):
            raise ConfigurationError(
                f"settings must be alike in all but continuous hyper-parameters, got {name} {one} in setting 0 and "
                f"{other} in setting {i}, {setting}: sweep each by itself"
            )
    return simulations


def check_sweepable(setup: Setup) -> None:
    """Raises ConfigurationError for a simulation that needs the host, or other processes, in every round."""
    if spans_processes(setup.mesh):
        raise ConfigurationError(
            "a sweep runs on one process's devices, got a mesh of several processes: "
            "mesh=fd.clients_mesh(jax.local_devices()), and settings or seeds of its own for each process"
        )
    if setup.engine.rows_by_rank is not None:
        raise ConfigurationError(
            "a sweep needs all rows on every device, got a simulation that cuts them: shard_data=False"
        )
    if setup.streamed:
        raise ConfigurationError(
            "a sweep needs its rows on the devices, got a simulation that streams them: stream=False"
        )
    if setup.client_store != "device":
        raise ConfigurationError(
            f'a sweep keeps client states on the devices, got bank={setup.client_store!r}: bank="device"'
        )
    if setup.on_nonfinite == "raise":
        raise ConfigurationError(
            'on_nonfinite must be "keep" or "drop_client" in a sweep, got "raise": one run that diverges must not end '
            "the others"
        )


def _check_memory(setup: Setup, runs: int) -> None:
    devices = setup.mesh.size if runs >= setup.mesh.size else 1  # over which the runs' states are spread
    needed = -(-runs // devices) * tree.nbytes(setup.state.clients)
    if needed > memory_of(setup.mesh):
        raise ConfigurationError(
            f"the client states of {runs} runs must fit in the devices' memory, got {needed / 1e9:.1f} GB on each: "
            "sweep fewer at a time"
        )


def _check_start(
    setup: Setup, start: Sequence[Run], planned: Sequence[Planned], params: Params | None
) -> list[ServerState]:
    """The states to go on from, in the order planned."""
    if params is not None:
        raise ConfigurationError("start goes on from states, which have their parameters: leave params out")
    if not isinstance(start, Sequence) or not all(isinstance(run, Run) for run in start):
        raise ConfigurationError(f"start must be what fd.sweep returned, got {checks.shown(start)}")
    states = []
    for seed, setting, _ in planned:
        runs = [run for run in start if run.seed == seed and dict(run.setting) == setting]
        if len(runs) != 1:
            raise ConfigurationError(
                f"start must hold one run of every seed and setting, got {len(runs)} of {seed}, {setting}"
            )
        states.append(setup.admit(runs[0].state))
    rounds = sorted({int(state.round) for state in states})
    if len(rounds) > 1:
        raise ConfigurationError(
            f"start must hold runs at the same round, got rounds {rounds}: go on from each by itself"
        )
    return states


def _static_differences(a: Setup, b: Setup) -> Iterable[tuple[str, Any, Any]]:
    """(name, value of a, value of b) for everything that keeps two simulations from sharing a program."""
    if a.data is not b.data:
        yield "the data set", a.data, f"another one, {b.data} (make it once, outside build)"
    engines = a.engine, b.engine
    locals_ = a.engine.local, b.engine.local
    for name in ("epochs", "batch_size"):
        yield from _differs(name, *[getattr(local, name) for local in locals_])
    for name in ("clip_norm", "optimizer"):  # their values may be traced, whether they are given may not
        yield from _differs(name, *[_presence(getattr(local, name)) for local in locals_])
    for name in ("cohort_size", "bernoulli", "lanes", "drop_nonfinite", "max_size", "redeal", "mesh"):
        yield from _differs(name, *[getattr(engine, name) for engine in engines])
    yield from _differs("over_selection", *[f"of {engine.clients_asked} clients" for engine in engines])
    yield from _differs("a deadline", *[_presence(e.failures and e.failures.deadline) for e in engines])
    yield from _differs("the aggregation", *[engine.aggregation.name.partition("(")[0] for engine in engines])
    yield from _differs("on_nonfinite", a.on_nonfinite, b.on_nonfinite)
    yield from _differs("bank", a.client_store, b.client_store)
    yield from _differs("measure", a.measures, b.measures)
    for name in ("name", "requires"):
        yield from _differs(f"the algorithm's {name}", *[getattr(e.algorithm, name) for e in engines])
    for name in ("observe", "finish", "report"):
        yield from _differs(f"the algorithm's {name}", *[_presence(getattr(e.algorithm, name)) for e in engines])
    for what, trees in (("test batches of", (a.arrays.test, b.arrays.test)), ("states of", (a.state, b.state))):
        yield from _differs(what, *[tree.described(tree.layout(each)) for each in trees])


def _differs(name: str, one: Any, other: Any) -> Iterable[tuple[str, Any, Any]]:
    if one != other:
        yield name, one, other


def _presence(value: Any) -> str:
    return "None" if value is None else "given"


def _varied(settings: Sequence[Setting]) -> list[str]:
    """The names in which settings differ; ValueError unless those are numbers."""
    varied = [name for name, one in settings[0].items() if not all(_alike(one, other[name]) for other in settings)]
    for name in varied:
        for value in (setting[name] for setting in settings):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigurationError(
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


def _layout(setup: Setup, runs: int, most: int) -> Layout:
    """Which runs train at once: at most so many on a device, and about as many in every turn."""
    apart = 1 < setup.mesh.size <= runs
    on_device = -(-runs // setup.mesh.size) if apart else runs
    number = -(-on_device // min(most, on_device))
    return Layout(setup.mesh, apart, at_once=-(-on_device // number))


def _compiled(
    build: Callable[..., Simulation],
    setting: Setting,
    varied: Sequence[str],
    setup: Setup,
    layout: Layout,
    constant: bool,
) -> tuple[TurnPrograms, tuple[float, ...]]:
    """The programs, and the numbers of the engine, which they take unless settings vary."""
    static = layout.inside(setup.engine)
    if varied:
        fixed = {name: value for name, value in setting.items() if name not in varied}
        return compiled(partial(_traced_engine, build, fixed, setup, static), setup.measures, layout), ()
    form, numbers = programs.split(static, constant)
    return of_form(form, setup.measures, layout), numbers


def _traced_engine(
    build: Callable[..., Simulation], fixed: Setting, setup: Setup, static: Engine, values: Setting
) -> Engine:
    """The engine with tracers for values. What cannot be traced is taken from the first setting's engine."""
    try:
        traced = build(**fixed, **values).setup
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"settings must be alike in all but continuous hyper-parameters, but of {', '.join(values)} at least one "
            f"is used as something else: {str(error).splitlines()[0]}"
        ) from error
    if traced.data is not setup.data:
        raise ConfigurationError("build must use one data set in all calls: make it once, outside build")
    return static._replace(**{name: getattr(traced.engine, name) for name in ("model", *programs.CONTINUOUS)})
