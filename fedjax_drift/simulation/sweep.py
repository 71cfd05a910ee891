"""Sweeps: many seeds and many settings.

Runs that differ only in seeds and numbers (lr, mu, alpha, ...) share a compiled program, whose arguments are these
numbers. If there are at least as many such runs as devices, each device trains different runs. On an accelerator, the
runs of a device are trained side by side (vmap). On a CPU, vmap is slower, so each device trains its runs one after
another. The devices do not wait for each other during a round.

Runs whose examples or client states are on the host, or sharded, train one after another, each on all devices.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from numbers import Real
from typing import Any

import jax
import numpy as np

from fedjax_drift import checks, reprs, tree
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.devices.mesh import num_teams
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.simulation import starting, validate
from fedjax_drift.simulation.asked import Asked
from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.loop import attach_to
from fedjax_drift.simulation.programs import split
from fedjax_drift.simulation.progress import stop_on_interrupt
from fedjax_drift.simulation.records import History, complaints
from fedjax_drift.simulation.retries import fitting, traceable
from fedjax_drift.simulation.runner import Job, train
from fedjax_drift.simulation.runs import Run, Runs, Setting, shown
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.simulation.tracks import alone
from fedjax_drift.simulation.turns import Planned, side_by_side, started, turns
from fedjax_drift.simulation.until import Until
from fedjax_drift.storage.checkpoint import Checkpoints, restore_together, split_by_run
from fedjax_drift.types import Params, Record, ServerState


def sweep(
    build: Callable[..., Any],
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
    the algorithm is stateful, the memory must have room for the client states of all runs, unless they are in files.

    Runs whose examples or client states are on the host, or sharded over several devices, train one after another, each
    on all devices. With ``bank=folder``, each run has a folder in it, with the name that its checkpoints have.

    >>> import fedjax_drift as fd
    >>> data = fd.FederatedData.from_clients([(np.eye(2, dtype="f4"), np.array([0, 1])) for _ in range(4)])
    >>> def build(lr):
    ...     model, local = fd.models.linear((2,), num_classes=2), fd.LocalTraining(lr=lr)
    ...     return fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=2)
    >>> runs = fd.sweep(build, 3, seeds=range(2), settings=fd.grid(lr=[0.1, 0.5]), progress=False)
    >>> [(run.setting["lr"], run.seed, len(run.history)) for run in runs]
    [(0.1, 0, 3), (0.1, 1, 3), (0.5, 0, 3), (0.5, 1, 3)]

    Args:
      build: a function that returns the `Simulation` for the values of a setting. It is called once for each setting.
        Create the data set outside ``build``, so that all simulations share it.
      rounds: number of rounds of each run, >= 0.
      seeds: different integers >= 0. Seed s stands for ``jax.random.key(s)``. Default: (0,).
      settings: dicts of keyword arguments of ``build``, all with the same names (`grid` makes them). Settings that
        differ only in numbers that vary continuously (lr, mu, alpha, ...) share a program. Others (epochs, batch_size,
        the algorithm, the model, the data, a 0 that switches something off) need a program each, at most 16 together.
        Default: one setting without arguments.
      eval_every: rounds between evaluations, as in `Simulation.run`; 0 means never. Default: 10.
      params: initial parameters of all runs. Default: the model initialises those of each seed.
      start: runs of an earlier sweep to continue. They must have the same settings and seeds, and all be at the same
        round. The histories of the returned runs then contain only the new rounds.
      together: number of runs that a device trains side by side (vmap), >= 1, or "auto" (default). "auto" is 1 on a CPU
        and the number of all runs of the device on an accelerator. If they do not fit in the device's memory, the
        number is halved, with a warning, until they fit.
      progress, measure_every: as in `Simulation.run`.
      on_round: ``on_round(seed, setting, record)`` is called for each round of each run.
      checkpoints: `fd.Checkpoints`, or a folder. Each run is saved to its own subfolder during the sweep: ``seed-0``,
        or ``lr=0.1-seed-0`` if lr differs between settings. Such values must be numbers or strings. To resume a sweep
        that was stopped or killed, call `sweep` again with the same folder. ``rounds`` is the total number of rounds
        per run, and the returned histories include the earlier rounds. With checkpoints, SIGTERM stops the sweep like
        Ctrl-C and then raises SystemExit(143).
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

        - The settings need more than 16 programs, or use different devices.
        - The simulations use several processes or ``on_nonfinite="raise"``.
        - The client states do not fit in the devices' memory.
        - The checkpoints belong to another sweep or have more rounds.
      MemoryError: a single run does not fit in a device's memory, even with 1 lane.
    """
    asked = Asked(rounds, eval_every, measure_every, progress, until)
    if on_round is not None:
        checks.function("on_round", on_round, "it is called with a seed, its setting and each record", 3)
    if not checks.is_auto(together):
        together = checks.integer("together", together, 1, fix='or pass "auto"')
    if start is not None and checkpoints is not None:
        fix = "leave start out, the sweep resumes from its checkpoints"
        checks.refuse("start must be None with checkpoints", "both", fix)
    all_seeds, all_settings = _check_seeds(seeds), _check_settings(build, settings)
    simulations = _build_all(build, all_settings)
    planned, names = _planned(simulations, all_settings, all_seeds, saved=checkpoints is not None)
    _check_memory(planned)
    if params is not None:
        for sim in simulations:
            validate.check_params(params, sim.setup.state.params)
    states = None if start is None else _check_start(start, planned, params)
    each_checkpoints: list[Checkpoints] = []
    specifications = [plan.specification() for plan in planned] if checkpoints is not None else []
    if checkpoints is not None:
        each_checkpoints = split_by_run(checkpoints, names)
        states, _ = restore_together(each_checkpoints, specifications, asked.rounds)
    first = 0 if states is None else int(states[0].round)
    last = asked.rounds if each_checkpoints else first + asked.rounds
    setups = [plan.setup for plan in planned]

    def runs_of(states: Sequence[Any], histories: Sequence[list[Record]]) -> list[Run]:
        return Runs(
            Run(plan.seed, plan.setting, state, history, plan.setup.algorithm.name)
            for plan, state, history in zip(planned, states, histories, strict=True)
        )

    def report(run: int, entry: Record) -> None:
        if on_round is not None:
            on_round(planned[run].seed, planned[run].setting, entry)

    job = Job(
        asked, asked.schedule(setups, last, next(iter(each_checkpoints), None)), setups,
        f"{', '.join(dict.fromkeys(setup.algorithm.name for setup in setups))}, {len(planned)} runs",
        complaints=partial(_complaints, planned),
        on_record=report,
        attach=lambda error, states, histories: attach_to(error, runs=runs_of(states, histories)),
        checkpoints=each_checkpoints,
        specifications=specifications,
        from_start=bool(each_checkpoints),
    )  # fmt: skip
    stores: dict[int, ServerState] = {}  # first states whose client states are on the host, also for another attempt

    def first_state(run: int, executor: Executor) -> ServerState:
        if states is not None:
            return states[run]
        if run not in stores:
            key = jax.random.key(planned[run].seed)
            state = starting.start(executor, key, params, planned[run].specification)
            if not executor.setup.states_on_host:
                return state
            stores[run] = state
        return stores[run]

    def attempt(planned: Sequence[Planned], most: int, constant: bool) -> list[Run]:
        """Runs all rounds, with at most ``most`` runs side by side on a device."""
        with ExitStack() as stack:
            tracks = [started(executor, params, states) for executor in turns(planned, most, constant)]
            for run, setup in enumerate(setups):
                if setup.trains_alone:
                    executor, own = Executor(setup), states is None and not setup.states_on_host
                    track = alone(executor, first_state(run, executor), last, may_overwrite=own, run=run)
                    tracks.append(stack.enter_context(track))
            newest, before, histories = train(job, tracks, first, stop)
        return runs_of(newest, [History(old + new) for old, new in zip(before, histories, strict=True)])

    most = _most(together, planned)
    with stop_on_interrupt(terminate=bool(each_checkpoints)) as stop:
        return _with_runs_that_fit(attempt, planned, most)


def _most(together: int | str, planned: Sequence[Planned]) -> int:
    """The largest number of runs that a device trains side by side."""
    on_cpu = planned[0].setup.mesh.devices.flat[0].platform == "cpu"
    return side_by_side(planned, together if isinstance(together, int) else 1 if on_cpu else len(planned))


def _with_runs_that_fit(
    attempt: Callable[[Sequence[Planned], int, bool], list[Run]], planned: Sequence[Planned], most: int
) -> list[Run]:
    """Returns ``attempt(planned, most, constant)``, with as many runs and lanes as fit in a device's memory.

    constant: whether hyper-parameters are constants of the programs.
    """
    constant = False

    def use_constants() -> bool:
        nonlocal constant
        had, constant = constant, True
        return not had

    def smaller(error: jax.errors.JaxRuntimeError) -> None:
        nonlocal most, planned
        if any(run.history for run in getattr(error, "runs", [])):
            raise error
        if most > 1:
            fewer = side_by_side(planned, most // 2)
            checks.warn(f"{most} runs side by side do not fit in a device's memory, continuing with {fewer}")
            most = fewer
            return
        lanes = max((plan.setup.engine.lanes for plan in planned if not plan.setup.trains_alone), default=1)
        if lanes == 1:
            raise MemoryError(
                "a run does not fit in a device's memory even with 1 lane: use a smaller model, batch_size or "
                "cohort_size, or sweep fewer runs"
            ) from error
        checks.warn(f"{lanes} lanes do not fit in a device's memory: the sweep continues with {lanes // 2}")
        planned = [plan.with_lanes(min(plan.setup.engine.lanes, lanes // 2)) for plan in planned]

    return fitting(lambda: traceable(lambda: attempt(planned, most, constant), use_constants), smaller)


def _planned(
    simulations: Sequence[Any], settings: Sequence[Setting], seeds: Sequence[int], saved: bool
) -> tuple[list[Planned], list[str]]:
    """Returns all runs, and their names if these are needed: for the folders of checkpoints or of client states."""
    planned = [
        Planned(seed, setting, sim.setup, lambda sim=sim: sim.specification)  # type: ignore[misc]
        for sim, setting in zip(simulations, settings, strict=True)
        for seed in seeds
    ]
    if not saved and not any(sim.setup.in_files for sim in simulations):
        return planned, []
    names = _names_of_runs(planned)
    return [plan.in_folder(name) for plan, name in zip(planned, names, strict=True)], names


def restored(
    sim: Any, checkpoints: Checkpoints, seeds: Sequence[int], rounds: int
) -> tuple[list[ServerState] | None, list[list[Record]]]:
    """The states and histories from which a sweep of ``sim`` over ``seeds`` resumes, see `restore_together`."""
    planned, names = _planned([sim], [{}], seeds, saved=True)
    return restore_together(split_by_run(checkpoints, names), [plan.specification() for plan in planned], rounds)


def _complaints(planned: Sequence[Planned], run: int, t: int, info: dict, entry: Record) -> dict[str, str]:
    """Returns the warnings about round t of a run, by kind."""
    seed, setting, setup, _ = planned[run]
    messages = complaints(t, info, entry, setup)
    if not messages and setup.engine.algorithm.observe is not None:
        scores = {name: value for name, value in info.items() if name.startswith("test_")}
        try:
            validate.check_scores(setup.engine.algorithm, t, scores)
        except ConfigurationError as error:
            messages["not finite"] = str(error)
    return {kind: f"seed {seed}{shown(setting)}, {text}" for kind, text in messages.items()}


def _names_of_runs(planned: Sequence[Planned]) -> list[str]:
    """Returns the names of the runs' folders: the values that differ between settings, and the seed."""
    settings = [plan.setting for plan in planned]
    varied = [name for name, one in settings[0].items() if not all(_alike(one, other[name]) for other in settings)]
    for name in varied:
        for setting in settings:
            if not isinstance(value := setting[name], bool | Real | str) or "/" in str(value):
                where = "in a sweep with checkpoints or bank=folder"
                what = f"{name} must be a number or a name {where}, because it names the folders of the runs"
                checks.refuse(what, checks.shown(value), "pass a name to build, and look the value up there")
    names = ["-".join([*(f"{name}={plan.setting[name]}" for name in varied), f"seed-{plan.seed}"]) for plan in planned]
    if twice := next((name for name in names if names.count(name) > 1), None):
        what = "checkpoints and bank=folder need a different folder for each run"
        checks.refuse(what, f"{twice} twice", "leave out the repeated setting")
    return names


# --- arguments --------------------------------------------------------------------------------------------------------


def _check_seeds(seeds: Any) -> list[int]:
    if (listed := checks.items(seeds)) is None:
        checks.refuse("seeds must be a list of integers", checks.shown(seeds), "pass range(8) for 8 seeds")
    integers = [checks.integer("a seed", seed, 0, 2**32 - 1) for seed in listed]
    if not integers or len(set(integers)) < len(integers):
        checks.refuse("seeds must be at least one integer, all different", reprs.short(integers))
    return integers


def _check_settings(build: Any, settings: Any) -> list[Setting]:
    if not callable(build):
        fix = "pass lambda lr: fd.Simulation(...), or use Simulation.sweep if only the seeds differ"
        checks.refuse("build must be a function that returns a Simulation", type(build).__name__, fix)
    if isinstance(settings, Mapping | np.ndarray | jax.Array) or not isinstance(settings, Iterable):
        fix = "pass [{'lr': 0.1}, {'lr': 0.3}], for example"
        checks.refuse("settings must be a list of dicts", checks.shown(settings), fix)
    settings = list(settings)
    if not settings or not all(isinstance(setting, Mapping) for setting in settings):
        checks.refuse("settings must be a list of at least one dict", checks.shown(settings))
    names = set(settings[0])
    for i, setting in enumerate(settings):
        if set(setting) != names:
            what = "settings must all have the same names"
            fix = "add the missing names, with the default values of build"
            checks.refuse(what, f"{sorted(names)} in setting 0 and {sorted(setting)} in setting {i}", fix)
        try:
            inspect.signature(build).bind(**setting)
        except ValueError:  # a builtin function without a signature
            pass
        except TypeError as error:
            checks.refuse("settings must have the names of the arguments of build", sorted(setting), str(error), error)
    return [{name: checks.one_in(value) for name, value in setting.items()} for setting in settings]


def _build_all(build: Callable[..., Any], settings: Sequence[Setting]) -> list[Any]:
    """Returns the simulation of each setting. Raises ConfigurationError if they cannot run together."""
    simulations: list[Any] = []
    for i, setting in enumerate(settings):
        try:
            sim = build(**setting)
        except ValueError as error:
            raise ConfigurationError(f"setting {i}{shown(setting)}: {error}") from error
        if not isinstance(getattr(sim, "setup", None), Setup):
            checks.refuse("build must return a Simulation", type(sim).__name__)
        validate.check_x64(sim.setup.x64)
        check_sweepable(sim.setup)
        simulations.append(sim)
        if sim.setup.mesh != simulations[0].setup.mesh:
            got = f"{simulations[0].setup.mesh} in setting 0 and {sim.setup.mesh} in setting {i}{shown(setting)}"
            checks.refuse("settings must use the same devices", got, "create the mesh outside build")
    _warn_of_copies([sim.setup for sim in simulations])
    return simulations


def _warn_of_copies(setups: Sequence[Setup]) -> None:
    """Warns if settings have data sets of their own that could be the same."""
    data = {split(setup.engine)[0]: setup.data.root for setup in setups}
    copies = sum(data[split(setup.engine)[0]] is not setup.data.root for setup in setups)
    if copies:
        checks.warn(
            f"{copies} of {len(setups)} settings have a data set of their own, of the same size as that of another "
            "setting: if the examples are the same, create the data set once, outside build"
        )


def check_sweepable(setup: Setup) -> None:
    """Raises ConfigurationError for a simulation that needs other processes, or whose failure would stop other runs."""
    if spans_processes(setup.mesh):
        fix = "pass mesh=fd.clients_mesh(jax.local_devices()), and give each process different settings or seeds"
        checks.refuse("mesh must have only devices of this process in a sweep", "a mesh of several processes", fix)
    if setup.on_nonfinite == "raise":
        fix = "a run that diverges must not stop the other runs"
        checks.refuse('on_nonfinite must be "keep" or "drop_client" in a sweep', '"raise"', fix)


def _check_memory(planned: Sequence[Planned]) -> None:
    mesh, D = planned[0].setup.mesh, num_teams(planned[0].setup.mesh)
    setups = [plan.setup for plan in planned if not plan.setup.states_on_host]
    together = [tree.nbytes(setup.state.clients) for setup in setups if not setup.trains_alone]
    devices = D if len(together) >= D else 1  # devices that hold states of different runs
    needed = -(-len(together) // devices) * max(together, default=0)
    needed += sum(tree.nbytes(s.state.clients) // (D if s.engine.sharded else 1) for s in setups if s.trains_alone)
    if needed > memory_of(mesh):
        what = f"the client states of {len(setups)} runs must fit in the devices' memory"
        checks.refuse(what, f"{needed / 1e9:.1f} GB on each device", "sweep fewer runs at a time")


def _check_start(start: Sequence[Run], planned: Sequence[Planned], params: Params | None) -> list[ServerState]:
    """Returns the states to start from, in the order of the planned runs."""
    if params is not None:
        fix = "leave params out, because the runs in start have parameters"
        checks.refuse("params must be None with start", "both", fix)
    if not isinstance(start, Sequence) or not all(isinstance(run, Run) for run in start):
        checks.refuse("start must be a list of runs that fd.sweep returned", checks.shown(start))
    states = []
    for seed, setting, setup, _ in planned:
        runs = [run for run in start if run.seed == seed and dict(run.setting) == setting]
        if len(runs) != 1:
            what = "start must have one run of every seed and setting"
            checks.refuse(what, f"{len(runs)} runs of seed {seed}{shown(setting)}")
        states.append(setup.admit(runs[0].state))
    rounds = sorted({int(state.round) for state in states})
    if len(rounds) > 1:
        fix = "use one sweep for the runs of each round"
        checks.refuse("start must have runs at the same round", f"rounds {rounds}", fix)
    return states


def _alike(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # arrays with several values, and donated arrays
        return False
