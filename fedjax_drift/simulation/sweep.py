"""Sweeps: many seeds, and settings that differ in continuous hyper-parameters, in one compiled program.

The values of a setting are arguments of the program, not constants. If there are at least as many runs as devices, each
device trains different runs. On an accelerator, the runs of a device are trained side by side (vmap). On a CPU, vmap is
slower, so each device trains its runs one after another. The devices do not wait for each other during a round.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_drift import checks, recipes, reprs, tree
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.devices.mesh import num_teams
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.round.engine import Engine
from fedjax_drift.simulation import programs, validate
from fedjax_drift.simulation.executor import UNTRACEABLE, out_of_memory
from fedjax_drift.simulation.loop import Loop, Schedule, attach_to
from fedjax_drift.simulation.progress import Bar, stop_on_interrupt
from fedjax_drift.simulation.records import SHOWN, History, complaints
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.simulation.turns import Layout, Planned, Setting, TurnPrograms, TurnTrack, compiled, of_form, turns
from fedjax_drift.simulation.until import Until, ends, has_ended
from fedjax_drift.storage.checkpoint import Checkpoints, restore_together, split_by_run
from fedjax_drift.storage.saver import saving
from fedjax_drift.storage.specification import Specification
from fedjax_drift.types import Params, PyTree, Record, ServerState


class Simulated(Protocol):
    """The attributes of a `Simulation` that a sweep uses."""

    @property
    def setup(self) -> Setup: ...

    @property
    def specification(self) -> Specification: ...


class Run(NamedTuple):
    """One run of a sweep."""

    seed: int
    setting: Setting  # the arguments of ``build``
    state: ServerState  # the state after the last round
    history: list[Record]
    algorithm: str = ""  # the name of the algorithm

    def __repr__(self) -> str:
        """Returns a short text without the arrays of the state, for notebooks, which show the value of the last
        line."""
        end = reprs.scores(self.history[-1] if self.history else {})
        setting = f", {self.setting}" if self.setting else ""
        return f"Run({self.algorithm}, seed {self.seed}{setting}: {end})"


class Runs(list[Run]):
    """The runs of a sweep: a list, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for run in self for name in run.setting))
        ends = [run.history[-1] if run.history else {} for run in self]
        metrics = [name for name in SHOWN if any(name in end for end in ends)]
        rows = []
        for run, last in zip(self, ends, strict=True):
            setting = [run.setting.get(name, "") for name in names]
            rows.append([run.algorithm, *setting, run.seed, *(last.get(name, "") for name in metrics)])
        header = ["algorithm", *names, "seed", *metrics]
        return reprs.html_table(header, rows, f"{len(self)} runs, the last round of each")


jax.tree_util.register_pytree_node(Runs, lambda runs: (list(runs), None), lambda _, items: Runs(items))


def grid(**values: Iterable[Any]) -> list[Setting]:
    """Returns all combinations of the values as a list of settings. The last name varies fastest.

    Raises ValueError if the values of a name are not an iterable, or are empty.

    >>> grid(lr=[0.1, 0.3], mu=[0.0, 1.0])[:2]
    [{'lr': 0.1, 'mu': 0.0}, {'lr': 0.1, 'mu': 1.0}]
    """
    lists = {name: _value_list(name, iterable) for name, iterable in values.items()}
    return [dict(zip(lists, combination, strict=True)) for combination in itertools.product(*lists.values())]


def _shown(setting: Mapping[str, Any]) -> str:
    """The text of a setting in a message after a comma, for example ``, lr=0.1``. An empty setting has no text."""
    return "".join(f", {name}={checks.shown(value)}" for name, value in setting.items())


def _value_list(name: str, values: Any) -> list[Any]:
    """Returns the values of one name as a list. Raises ConfigurationError for a single value and for no values."""
    one = isinstance(values, str | bytes | Mapping) or isinstance(values, np.ndarray | jax.Array) and values.ndim == 0
    if one or not isinstance(values, Iterable) or not (listed := list(values)):
        raise ConfigurationError(
            f"{name} must be a list of one or more values, got {checks.shown(values)}: pass grid({name}=[...])"
        )
    return listed


def sweep(
    build: Callable[..., Simulated],
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
    until: Until | None = None,
) -> list[Run]:
    """Runs every setting with every seed, for ``rounds`` rounds each.

    Except for rounding errors, a run gives the same results as ``sim = build(**setting)`` followed by
    ``sim.run(sim.init(jax.random.key(seed)), rounds)``. All runs together take less time than such separate runs. If
    the algorithm is stateful, the memory must have room for the client states of all runs.

    >>> import fedjax_drift as fd
    >>> data = fd.FederatedData.from_clients([(np.eye(2, dtype="f4"), np.array([0, 1])) for _ in range(4)])
    >>> def build(lr):
    ...     model, local = fd.models.linear((2,), num_classes=2), fd.LocalTraining(lr=lr)
    ...     return fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=2)
    >>> runs = sweep(build, 3, seeds=range(2), settings=grid(lr=[0.1, 0.5]), progress=False)
    >>> [(run.setting["lr"], run.seed, len(run.history)) for run in runs]
    [(0.1, 0, 3), (0.1, 1, 3), (0.5, 0, 3), (0.5, 1, 3)]

    Args:
      build: a function that returns the `Simulation` for the values of a setting. It is called once for each setting.
        It is also called for each program that is traced. In these calls, the values that differ between settings are
        tracers. Create the data set outside ``build``, so that all simulations share it.
      rounds: number of rounds of each run, >= 0.
      seeds: different integers >= 0. Seed s stands for ``jax.random.key(s)``. Default: (0,).
      settings: dicts of keyword arguments of ``build``, all with the same names (`grid` makes them). Values that differ
        between settings must be numbers that vary continuously (lr, mu, alpha, ...). Values that are equal in all
        settings may be anything. Default: one setting without arguments.
      eval_every: rounds between evaluations, as in `Simulation.run`; 0 means never. Default: 10.
      params: initial parameters of all runs. Default: the model initialises those of each seed.
      start: runs of an earlier sweep to continue. They must have the same settings and seeds, and all be at the same
        round. The histories of the returned runs then contain only the new rounds.
      together: number of runs that a device trains side by side (vmap), >= 1, or "auto" (default). "auto" is 1 on a CPU
        and the number of all runs of the device on an accelerator. If they do not fit in the device's memory, the
        number is halved, with a warning, until they fit.
      progress: whether to show a progress bar. Default: in a terminal or a notebook, but not in CI. Elsewhere a run
        that takes more than a minute prints a line on stderr after every tenth of its rounds.
      on_round: ``on_round(seed, setting, record)`` is called for each round of each run.
      measure_every: as in `Simulation.run`, for simulations with ``measure=``.
      checkpoints: `fd.Checkpoints`, or a folder. Each run is saved to its own subfolder during the sweep: ``seed-0``,
        or ``lr=0.1-seed-0`` if lr differs between settings. To resume a sweep that was stopped or killed, call `sweep`
        again with the same folder. ``rounds`` is the total number of rounds per run, and the returned histories include
        the earlier rounds. With checkpoints, SIGTERM stops the sweep like Ctrl-C and then raises SystemExit(143).
      until: a rule that ends the sweep early, as in `Simulation.run`. All runs continue until the rule has returned
        True for each of them, because they advance together.

    Returns:
      A list with one `Run` per setting and seed, ordered by setting and then by seed. A ``history`` has the
      records of `Simulation.run`, but ``seconds`` is the duration of a round of all runs together.

      - The first Ctrl-C stops the sweep after the rounds in progress, and the runs so far are returned. A second Ctrl-C
        stops the sweep immediately. Some runs may then have fewer rounds than others.
      - If the updates or evaluations of a run are not finite, there is a warning. The run continues, and the other runs
        are not affected.

    Raises:
      ValueError: one of these is the case:

        - An argument is out of range.
        - The settings cannot share a program, because they differ in something other than continuous hyper-parameters
          (epochs, batch_size, cohort_size, the model, ...).
        - The simulations need the host in every round (``stream=True``, ``bank=`` other than "device",
          ``on_nonfinite="raise"``), or use ``shard_data=True`` or several processes.
        - The client states do not fit in the devices' memory.
        - The checkpoints belong to another sweep or have more rounds.
      MemoryError: a single run does not fit in a device's memory.
    """
    rounds, eval_every, measure_every, progress = validate.check_run(rounds, eval_every, measure_every, progress)
    if on_round is not None:
        checks.function("on_round", on_round, "it is called with a seed, its setting and each record")
    if not checks.is_auto(together):
        together = checks.integer("together", together, 1, fix='or pass "auto"')
    all_seeds, all_settings = _check_seeds(seeds), _check_settings(build, settings)
    simulations = _build_all(build, all_settings)
    setup = simulations[0].setup
    validate.check_until(until, eval_every, setup.data.x_test is not None)
    if eval_every and setup.data.x_test is not None:
        validate.warn_of_initial_statistics(setup.engine.model)
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
        raise ConfigurationError(
            "start must be None with checkpoints, got both: leave start out, the sweep resumes from its checkpoints"
        )
    states = None if start is None else _check_start(setup, start, planned, params)
    before: list[list[Record]] = [[] for _ in planned]  # the records of earlier sweeps
    run_checkpoints: list[Checkpoints] = []
    specifications = [sim.specification for sim in simulations for _ in all_seeds] if checkpoints is not None else []
    if checkpoints is not None:
        run_checkpoints = split_by_run(checkpoints, [_name_of_run(plan, varied) for plan in planned])
        states, before = restore_together(run_checkpoints, specifications, rounds)
    first = 0 if states is None else int(states[0].round)
    last = rounds if run_checkpoints else first + rounds
    ended = {run for run, history in enumerate(before) if until is not None and has_ended(until, history)}
    if len(ended) == len(planned):
        last = first
    schedule = Schedule(
        last,
        eval_every if setup.data.x_test is not None else 0,
        measure_every if setup.measures else 0,
        (run_checkpoints[0].every or 0) if run_checkpoints else 0,
        one_round_a_program=False,
    )

    def runs_of(states: Sequence[Any], histories: Sequence[list[Record]]) -> list[Run]:
        runs = zip(planned, states, histories, strict=True)
        return Runs(Run(*plan[:2], state, history, setup.engine.algorithm.name) for plan, state, history in runs)

    def report(run: int, entry: Record) -> None:
        if on_round is not None:
            on_round(planned[run].seed, planned[run].setting, entry)

    def complain(run: int, t: int, info: dict, entry: Record) -> dict[str, str]:
        messages = complaints(t, info, entry, setup)
        if not messages and setup.engine.algorithm.observe is not None:
            scores = {name: value for name, value in info.items() if name.startswith("test_")}
            try:
                validate.check_scores(setup.engine.algorithm, t, scores)
            except ConfigurationError as error:
                messages["not finite"] = str(error)
        of_run = f"seed {planned[run].seed}{_shown(planned[run].setting)}"
        return {kind: f"{of_run}, {text}" for kind, text in messages.items()}

    def run_ends(run: int, history: list[Record]) -> bool:
        return until is not None and (run in ended or ends(until, before[run] + history))

    on_cpu = setup.mesh.devices.flat[0].platform == "cpu"
    layout = _layout(setup, len(planned), together if isinstance(together, int) else 1 if on_cpu else len(planned))
    constant = False  # whether hyper-parameters are constants of the programs
    with stop_on_interrupt(terminate=bool(run_checkpoints)) as stop:
        while True:
            of_turns, numbers = _compiled(build, all_settings[0], varied, setup, layout, constant)
            given = planned if varied else [plan._replace(values=numbers) for plan in planned]
            with Bar(last * len(planned), f"{setup.engine.algorithm.name}, {len(planned)} runs", progress) as bar:
                for entry in itertools.chain(*before):
                    bar.update(entry, restored=True)
                tracks = [TurnTrack(setup, of_turns, layout, turn) for turn in turns(given, layout)]
                loop = Loop(
                    tracks, len(planned), setup.mesh, schedule, bar, stop, None, report, complain, until and run_ends
                )

                def attach(error: Exception, states: list[ServerState | None], loop: Loop = loop) -> None:
                    attach_to(error, runs=runs_of(states, loop.histories))

                try:
                    for track in tracks:
                        track.start(params, states)
                    savers: Any = nullcontext()
                    if run_checkpoints:
                        savers = saving(run_checkpoints, specifications, loop.states(), stop.held, back=True)
                    with savers as loop.savers:
                        loop.run(first, attach)
                    break
                except UNTRACEABLE:
                    if varied or constant:
                        raise
                    constant = True  # the algorithm uses a number in a way that JAX cannot trace
                    continue
                except jax.errors.JaxRuntimeError as error:
                    if not out_of_memory(error) or any(loop.histories):
                        raise
                    if layout.per_device == 1:
                        raise MemoryError(
                            f"a run of {simulations[0]!r} does not fit in a device's memory: pass a smaller lanes=, or "
                            "sweep fewer runs"
                        ) from error
            fewer = _layout(setup, len(planned), layout.per_device // 2)
            checks.warn(
                f"{layout.per_device} runs side by side do not fit in a device's memory, continuing with "
                f"{fewer.per_device}"
            )
            layout = fewer
    if stop.terminated:
        raise SystemExit(143)
    return runs_of(loop.states(), [History(old + new) for old, new in zip(before, loop.histories, strict=True)])


def _name_of_run(plan: Planned, varied: Sequence[str]) -> str:
    """Returns the name of the run's checkpoint folder."""
    return "-".join([*(f"{name}={plan.setting[name]}" for name in varied), f"seed-{plan.seed}"])


# --- arguments --------------------------------------------------------------------------------------------------------


def _check_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, (str, bytes, type)) or not isinstance(seeds, Iterable):
        raise ConfigurationError(
            f"seeds must be a list of integers, got {checks.shown(seeds)}: pass range(8) for 8 seeds"
        )
    integers = [checks.integer("a seed", seed, 0, 2**32 - 1) for seed in seeds]
    if not integers or len(set(integers)) < len(integers):
        raise ConfigurationError(f"seeds must be at least one integer, all different, got {integers}")
    return integers


def _check_settings(build: Any, settings: Any) -> list[Setting]:
    if not callable(build):
        raise ConfigurationError(
            f"build must be a function that returns a Simulation, got {type(build).__name__}: "
            "pass lambda lr: fd.Simulation(...), or use Simulation.sweep if only the seeds differ"
        )
    if isinstance(settings, Mapping | np.ndarray | jax.Array) or not isinstance(settings, Iterable):
        raise ConfigurationError(
            f"settings must be a list of dicts, got {checks.shown(settings)}: pass [{{'lr': 0.1}}, {{'lr': 0.3}}], for "
            "example"
        )
    settings = list(settings)
    if not settings or not all(isinstance(setting, Mapping) for setting in settings):
        raise ConfigurationError(f"settings must be a list of at least one dict, got {checks.shown(settings)}")
    names = set(settings[0])
    for i, setting in enumerate(settings):
        if set(setting) != names:
            raise ConfigurationError(
                f"settings must all have the same names, got {sorted(names)} in setting 0 and {sorted(setting)} in "
                f"setting {i}: add the missing names, with the default values of build"
            )
        try:
            inspect.signature(build).bind(**setting)
        except ValueError:  # a builtin function without a signature
            pass
        except TypeError as error:
            raise ConfigurationError(
                f"settings must have the names of the arguments of build, got {sorted(setting)}: {error}"
            ) from error
    return [{name: checks.one_in(value) for name, value in setting.items()} for setting in settings]


def _build_all(build: Callable[..., Simulated], settings: Sequence[Setting]) -> list[Simulated]:
    """Returns the simulation of each setting. Raises ConfigurationError if they cannot share a program."""
    simulations: list[Simulated] = []
    for i, setting in enumerate(settings):
        try:
            sim = build(**setting)
        except ValueError as error:
            raise ConfigurationError(f"setting {i}{_shown(setting)}: {error}") from error
        if not isinstance(getattr(sim, "setup", None), Setup):
            raise ConfigurationError(f"build must return a Simulation, got {type(sim).__name__}")
        validate.check_x64(sim.setup.x64)
        if not simulations:
            check_sweepable(sim.setup)
        simulations.append(sim)
        for name, one, other in _static_differences(simulations[0].setup, sim.setup):
            raise ConfigurationError(
                f"settings may differ only in continuous hyper-parameters, got {name} {one} in setting 0 and "
                f"{other} in setting {i}{_shown(setting)}: create it once, outside build, or use one sweep for each "
                "value"
            )
    return simulations


def check_sweepable(setup: Setup) -> None:
    """Raises ConfigurationError for a simulation that needs the host, or other processes, in every round."""
    if spans_processes(setup.mesh):
        raise ConfigurationError(
            "mesh must have only devices of this process in a sweep, got a mesh of several processes: pass "
            "mesh=fd.clients_mesh(jax.local_devices()), and give each process different settings or seeds"
        )
    if setup.engine.rows_by_rank is not None:
        raise ConfigurationError(
            "shard_data must be False in a sweep, got a simulation with sharded examples: pass shard_data=False"
        )
    if setup.streamed:
        raise ConfigurationError(
            "stream must be False in a sweep, got a simulation that streams its examples: pass stream=False"
        )
    if setup.client_store != "device":
        raise ConfigurationError(f'bank must be "device" in a sweep, got {setup.client_store!r}: pass bank="device"')
    if setup.on_nonfinite == "raise":
        raise ConfigurationError(
            'on_nonfinite must be "keep" or "drop_client" in a sweep, got "raise": a run that diverges must not stop '
            "the other runs"
        )


def _check_memory(setup: Setup, runs: int) -> None:
    D = num_teams(setup.mesh)
    devices = D if runs >= D else 1  # devices that hold states of different runs
    needed = -(-runs // devices) * tree.nbytes(setup.state.clients)
    if needed > memory_of(setup.mesh):
        raise ConfigurationError(
            f"the client states of {runs} runs must fit in the devices' memory, got {needed / 1e9:.1f} GB on each "
            "device: sweep fewer runs at a time"
        )


def _check_start(
    setup: Setup, start: Sequence[Run], planned: Sequence[Planned], params: Params | None
) -> list[ServerState]:
    """Returns the states to start from, in the order of the planned runs."""
    if params is not None:
        raise ConfigurationError(
            "params must be None with start, got both: leave params out, because the runs in start have parameters"
        )
    if not isinstance(start, Sequence) or not all(isinstance(run, Run) for run in start):
        raise ConfigurationError(f"start must be a list of runs that fd.sweep returned, got {checks.shown(start)}")
    states = []
    for seed, setting, _ in planned:
        runs = [run for run in start if run.seed == seed and dict(run.setting) == setting]
        if len(runs) != 1:
            raise ConfigurationError(
                f"start must have one run of every seed and setting, got {len(runs)} runs of seed "
                f"{seed}{_shown(setting)}"
            )
        states.append(setup.admit(runs[0].state))
    rounds = sorted({int(state.round) for state in states})
    if len(rounds) > 1:
        raise ConfigurationError(
            f"start must have runs at the same round, got rounds {rounds}: use one sweep for the runs of each round"
        )
    return states


def _static_differences(a: Setup, b: Setup) -> Iterable[tuple[str, Any, Any]]:
    """Yields (name, value of a, value of b) for every difference that prevents a and b from sharing a program."""
    if a.data is not b.data:
        yield "the data set", a.data, f"another one, {b.data} (create it once, outside build)"
    engines = a.engine, b.engine
    locals_ = a.engine.local, b.engine.local
    for name in ("epochs", "batch_size", "augment"):
        yield from _differs(name, *[getattr(local, name) for local in locals_])
    for name in ("clip_norm", "optimizer"):  # the values may differ, but not whether there is a value
        yield from _differs(name, *[_presence(getattr(local, name)) for local in locals_])
    for name in ("cohort_size", "bernoulli", "lanes", "drop_nonfinite", "max_size", "redeal", "mesh"):
        yield from _differs(name, *[getattr(engine, name) for engine in engines])
    yield from _differs("over_selection", *[f"of {engine.clients_selected} clients" for engine in engines])
    yield from _differs("a deadline", *[_presence(e.failures and e.failures.deadline) for e in engines])
    yield from _differs("the aggregation", *[engine.aggregation.name.partition("(")[0] for engine in engines])
    yield from _differs("on_nonfinite", a.on_nonfinite, b.on_nonfinite)
    yield from _differs("bank", a.client_store, b.client_store)
    yield from _differs("measure", a.measures, b.measures)
    for one, other in zip(a.model.frozen, b.model.frozen, strict=True):
        if one is not other:
            yield from _differs("frozen parameters with checksum", one.checksum, other.checksum)
    for name in ("name", "requires"):
        yield from _differs(f"the algorithm's {name}", *[getattr(e.algorithm, name) for e in engines])
    for name in ("observe", "finish", "report"):
        yield from _differs(f"the algorithm's {name}", *[_presence(getattr(e.algorithm, name)) for e in engines])
    for what, trees in (("test batches of", (a.arrays.test, b.arrays.test)), ("states of", (a.state, b.state))):
        yield from _differs(what, *[tree.described(tree.layout(each)) for each in trees])


def _differs(name: str, one: Any, other: Any) -> Iterable[tuple[str, Any, Any]]:
    if one != other and recipes.split(one) != recipes.split(other):  # build creates equal functions in every call
        yield name, one, other


def _presence(value: Any) -> str:
    return "None" if value is None else "given"


def _varied(settings: Sequence[Setting]) -> list[str]:
    """Returns the names whose values differ between settings. Raises ConfigurationError unless they are numbers."""
    varied = [name for name, one in settings[0].items() if not all(_alike(one, other[name]) for other in settings)]
    for name in varied:
        for value in (setting[name] for setting in settings):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigurationError(
                    f"{name} must be a number, because it differs between settings, got {checks.shown(value)}: use one "
                    "sweep for each value of an argument that is not a continuous hyper-parameter"
                )
    return varied


def _alike(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # arrays with several values, and donated arrays
        return False


# --- programs ---------------------------------------------------------------------------------------------------------


def _layout(setup: Setup, runs: int, most: int) -> Layout:
    """Splits the runs into turns and returns the layout of a turn. A turn is a group of runs that share a program call.

    A turn has at most ``most`` runs per device. All turns have about the same number of runs.
    """
    D = num_teams(setup.mesh)
    apart = 1 < D <= runs
    on_device = -(-runs // D) if apart else runs
    num_turns = -(-on_device // min(most, on_device))
    return Layout(setup.mesh, apart, per_device=-(-on_device // num_turns))


def _compiled(
    build: Callable[..., Simulated],
    setting: Setting,
    varied: Sequence[str],
    setup: Setup,
    layout: Layout,
    constant: bool,
) -> tuple[TurnPrograms, tuple[float, ...]]:
    """Returns the programs of a turn, and the numbers of the engine.

    If no value differs between settings, the programs take these numbers as arguments. Otherwise they take the values
    that differ, and no numbers are returned.
    """
    static = layout.inside(setup.engine)
    if varied:
        fixed = {name: value for name, value in setting.items() if name not in varied}
        return compiled(partial(_traced_engine, build, fixed, setup, static), setup.measures, layout), ()
    form, numbers = programs.split(static, constant)
    return of_form(form, setup.measures, layout), numbers


def _traced_engine(
    build: Callable[..., Simulated],
    fixed: Setting,
    setup: Setup,
    static: Engine,
    values: Setting,
    frozen: tuple[PyTree, ...],
) -> Engine:
    """Returns the engine for traced values. Its static fields are those of the engine of the first setting."""
    try:
        traced = build(**fixed, **values).setup
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"settings may differ only in continuous hyper-parameters, but build uses at least one of "
            f"{', '.join(values)} in another way: {str(error).splitlines()[0]}"
        ) from error
    if traced.data is not setup.data:
        raise ConfigurationError("build must use the same data set in all calls: create it once, outside build")
    engine = static._replace(**{name: getattr(traced.engine, name) for name in ("model", *programs.CONTINUOUS)})
    return recipes.bind(engine, frozen)
