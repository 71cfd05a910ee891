"""Trains runs, R >= 1 of them. A run is a sweep of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

from fedjax_drift import checks
from fedjax_drift.devices.processes import leads
from fedjax_drift.simulation.asked import Asked
from fedjax_drift.simulation.cohorts import Cohorts, cohorts
from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.loop import Loop, Schedule, attach_to
from fedjax_drift.simulation.progress import Bar, Stop, stop_on_interrupt
from fedjax_drift.simulation.records import complaints
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.simulation.tracks import Track, alone
from fedjax_drift.simulation.until import ends, has_ended
from fedjax_drift.storage.checkpoint import Checkpoints
from fedjax_drift.storage.saver import Saver, saving
from fedjax_drift.storage.specification import Specification
from fedjax_drift.types import Record, ServerState


@dataclass(frozen=True)
class Job:
    """What is trained, for whom, and where it is saved.

    Attributes:
      asked: the arguments of the caller.
      schedule: see `Schedule`.
      setups: of each run.
      title: the name of the bar.
      complaints, on_record: see `Loop`.
      attach: ``attach(error, states, histories)`` attaches the results so far to an exception.
      checkpoints, specifications: of each run; empty: nothing is saved.
      from_start: whether the rounds are counted from round 0, so that the bar has the rounds of ``checkpoints``, and
        later checkpoints are deleted.
    """

    asked: Asked
    schedule: Schedule
    setups: Sequence[Setup]
    title: str
    complaints: Callable[[int, int, dict, Record], Mapping[str, str]]
    on_record: Callable[[int, Record], None] | None
    attach: Callable[[Exception, Sequence[ServerState | None], Sequence[list[Record]]], None]
    checkpoints: Sequence[Checkpoints] = ()
    specifications: Sequence[Specification] = ()
    from_start: bool = False


def train(
    job: Job, tracks: Sequence[Track], first: int, stop: Stop
) -> tuple[list[ServerState], list[list[Record]], list[list[Record]]]:
    """Trains the runs from round ``first``.

    Returns the last state of each run, its records in earlier processes, and its new records. Raises SystemExit(143) if
    SIGTERM has ended it.
    """
    asked, mesh = job.asked, job.setups[0].mesh
    schedule = replace(job.schedule, one_round_a_program=not all(track.stacked for track in tracks))
    with ExitStack() as stack:
        savers: Sequence[Saver] = ()
        if job.checkpoints:
            states = [state for track in tracks for state in track.states()]
            starts = [state for _, state in sorted(states, key=lambda pair: pair[0])]
            savers = stack.enter_context(
                saving(job.checkpoints, job.specifications, starts, stop.held, back=job.from_start)
            )
        before = [saver.history_before for saver in savers] or [[] for _ in job.setups]
        until = asked.until
        ended = {run for run, history in enumerate(before) if until is not None and has_ended(until, history)}
        if len(ended) == len(before):
            schedule = replace(schedule, last=first)
        restored = [*chain(*before)] if job.from_start else []
        total = len(before) * (schedule.last - first) + len(restored)
        bar = stack.enter_context(Bar(total, job.title, asked.progress if leads(mesh) else False))
        for entry in restored:
            bar.update(entry, restored=True)

        def run_ends(run: int, history: list[Record]) -> bool:
            assert until is not None
            return run in ended or ends(until, before[run] + history)

        ends_early = run_ends if until is not None else None
        loop = Loop(tracks, mesh, schedule, job.complaints, job.on_record, ends_early, bar, stop)
        loop.savers = savers
        loop.run(first, lambda error, states: job.attach(error, states, loop.histories))
    if loop.terminated or stop.terminated:
        raise SystemExit(143)
    return loop.states(), before, loop.histories


def run_alone(
    executor: Executor,
    specification: Callable[[], Specification],
    state: ServerState,
    asked: Asked,
    on_round: Callable[[Record], None] | None,
    checkpoints: Checkpoints | str | os.PathLike | None,
    cohort: Cohorts | None,
) -> tuple[ServerState, list[Record]]:
    """See `Simulation.run`. specification: returns that of the simulation, for checkpoints."""
    if on_round is not None:
        checks.function("on_round", on_round, "it is called with each record", takes=1)
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        checkpoints = Checkpoints(checkpoints)
    setup = executor.setup
    state = setup.admit(state)
    first, last = int(state.round), int(state.round) + asked.rounds
    given = None if cohort is None else cohorts(setup, cohort, first, last)
    job = Job(
        asked, asked.schedule([setup], last, checkpoints), [setup], setup.algorithm.name,
        complaints=lambda run, t, info, entry: complaints(t, info, entry, setup),
        on_record=None if on_round is None else lambda run, entry: on_round(entry),
        attach=lambda error, states, histories: attach_to(error, state=states[0], history=histories[0]),
        checkpoints=[] if checkpoints is None else [checkpoints],
        specifications=[] if checkpoints is None else [specification()],
    )  # fmt: skip
    with (
        stop_on_interrupt(terminate=checkpoints is not None) as stop,
        alone(executor, state, last, may_overwrite=setup.donate, cohort_of=given) as track,
    ):
        (state,), _, (history,) = train(job, [track], first, stop)
    return state, history
