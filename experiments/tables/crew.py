"""Runs the queue: one worker process for each core, or one for all accelerators.

This process computes nothing. It gives each free worker the next job, tells what is running and what is left, and asks
the workers to save and stop at the end. After each job it asks again what is missing, because a claim may be decided,
or may need more seeds. Before a long job is run, a worker times a round of it, and of the jobs that may be shorter.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import jax

import fedjax_drift as fd
from experiments.tables import queue, runner
from experiments.tables.claims import Claim
from experiments.tables.papers import Table
from experiments.tables.queue import Job, Question
from experiments.tables.results import hardware
from experiments.tables.times import Machine, Times, timed_options
from experiments.tables.worker import Done, Place, Said, Task, work

LOCK = "queue.partial"  # the folder in that of the results which the process of the queue locks
REPORT_SECONDS = 600.0  # the time between two reports
POLL_SECONDS = 0.5  # the longest time after which a signal or the end of the time is noticed
BUSY_SECONDS = 300.0  # until a cell is tried again which another process ran


def machine() -> Machine:
    """Returns the machine of the workers.

    A process that starts JAX on an accelerator keeps its memory. So a process asks that ends at once, and the process
    of the queue only uses the CPU.
    """
    if jax.config.values["jax_platforms"] == "cpu":
        return Machine("cpu", hardware())
    program = (
        "import json, jax; from experiments.tables.results import hardware; "
        "print(json.dumps([jax.default_backend(), hardware()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"JAX must start on this machine, got exit code {done.returncode}: see its message above")
    jax.config.update("jax_platforms", "cpu")
    return Machine(*json.loads(done.stdout.splitlines()[-1]))


def places(machine: Machine) -> list[Place]:
    """Returns the places of the workers: the cores that this process may use, or one for all accelerators."""
    cache = jax.config.values["jax_compilation_cache_dir"]
    if machine.platform != "cpu":
        return [Place(machine.hardware, None, cache)]
    known = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if known else range(os.cpu_count() or 1)
    return [Place(f"core {core}", core, cache) for core in cores]


class Worker:
    """A worker process, seen from the process of the queue.

    Attributes:
      job: the job in progress. None: the worker is free.
      timing: whether the worker only times a round of the job.
    """

    def __init__(self, place: Place, output: Path) -> None:
        self.job: Job | None = None
        self.place, self.timing, self.began = place, False, 0.0
        context = multiprocessing.get_context("spawn")  # a process that is forked could not use JAX
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, place, output), daemon=True)
        with _without_interrupts():  # a Ctrl-C is for the process of the queue, which tells the workers
            self.process.start()
        theirs.close()  # so that the end of the process is the end of the connection

    def begin(self, job: Job, timing: bool) -> None:
        self.job, self.timing, self.began = job, timing, time.monotonic()
        with contextlib.suppress(OSError):  # the process has ended, which `received` reports
            self.connection.send(Task(job.table, job.cell, job.seeds, timing))

    def received(self) -> Said | Done:
        """Returns the next message. `Done` with an error if the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            return self.connection.recv()
        self.process.join()
        return Done(f"its process has ended with exit code {self.process.exitcode}")

    @property
    def minutes(self) -> float:
        """The time since the job began."""
        return (time.monotonic() - self.began) / 60

    def stop(self) -> None:
        """Asks the process to save and to stop."""
        with contextlib.suppress(OSError):
            self.connection.send(None)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Blocks SIGINT in the block, and in the processes that are started there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Crew:
    """The queue, and the workers that run its jobs.

    Args:
      say: ``say(text)`` is told each line for people.
      only: as in `queue.missing`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        output: Path,
        claimed: Sequence[Claim],
        times: Times,
        say: Callable[[str], None],
        only: Container[str] | None = None,
    ) -> None:
        self.tables, self.output, self.claimed, self.times, self._say = tables, output, claimed, times, say
        self.only = only
        self.began = self.reported = time.monotonic()
        self.jobs: list[Job] = []
        self.workers: list[Worker] = []
        self.tried = set[tuple]()  # the keys of the jobs that were run
        self.untimed = set[str]()  # the options of cells that could not be timed
        self.again: dict[Path, float] = {}  # cells that another process runs, and when to try them again
        self.failed: dict[Path, str] = {}  # cells that failed, with the error; their other seeds are not tried

    def say(self, text: str) -> None:
        minutes = int(time.monotonic() - self.began) // 60
        self._say(f"{minutes // 60}:{minutes % 60:02d}  {text}")

    def refresh(self) -> None:
        """Asks what is missing. Jobs that no claim waits for any more are dropped, or come later."""
        self.jobs = queue.missing(self.tables, self.output, self.claimed, self.times, self.only)

    def run(self, ended: Callable[[], bool]) -> bool:
        """Runs the jobs until none is left, or until ``ended()``. Returns whether none is left."""
        while not ended():
            for place, worker in enumerate(self.workers):
                if worker.job is None:
                    self._give(place)
            busy = [worker for worker in self.workers if worker.job is not None]
            if not busy and not self.again:
                return True
            if time.monotonic() - self.reported >= REPORT_SECONDS:
                self._report(busy)
            ready = wait([worker.connection for worker in busy], POLL_SECONDS)
            for worker in busy:
                if worker.connection in ready and not ended():  # a signal may have ended the workers, too
                    self._hear(worker)
        return False

    def _give(self, place: int) -> None:
        """Gives a free worker the next job, if there is one. Replaces a process that has ended."""
        now, doing = time.monotonic(), [worker for worker in self.workers if worker.job is not None]
        self.again = {file: when for file, when in self.again.items() if when > now}
        taken = {*self.failed, *self.again, *(worker.job.cell.file for worker in doing if worker.job is not None)}
        free = [job for job in self.jobs if not (job.obstacle or job.key in self.tried or job.cell.file in taken)]
        if not free:
            return
        timing = {timed_options(worker.job.cell) for worker in doing if worker.job is not None and worker.timing}
        job = queue.to_time(free, self.untimed | timing)
        if not self.workers[place].process.is_alive():
            self.workers[place] = Worker(self.workers[place].place, self.output)
        worker = self.workers[place]
        worker.begin(job or free[0], timing=job is not None)
        if job is None:
            self.tried.add(free[0].key)
            self.say(f"{worker.place.name}: {free[0].title}, {free[0].shown_minutes}")

    def _hear(self, worker: Worker) -> None:
        """Takes a message of a worker."""
        message, job, name = worker.received(), worker.job, worker.place.name
        if job is None:
            return
        if isinstance(message, Said):
            self.say(f"{name}: {message.text}")
            return
        worker.job = None
        if worker.timing:
            self._timed(job, message, name)
        elif message.busy:
            self.tried.discard(job.key)
            self.again[job.cell.file] = time.monotonic() + BUSY_SECONDS
        else:
            if message.error:
                self.failed[job.cell.file] = f"{job.title}: {message.error}"
                self.say(f"{name}: failed: {message.error}")
            self._ran(worker.minutes, name)

    def _timed(self, job: Job, message: Done, name: str) -> None:
        if message.error:
            self.untimed.add(timed_options(job.cell))
            self.say(f"{name}: {job.title} could not be timed: {message.error}")
            return
        self.times.add(job.cell, message.seconds)
        self.times.save()
        self.jobs = queue.ordered(self.jobs, self.times)
        now = [each.shown_minutes for each in self.jobs if each.key == job.key]
        shown = now[0] if now else "not needed any more"  # since another worker has ended its job
        self.say(
            f"{name}: timed {job.title}: {message.seconds:.3g} s a round, {shown} (estimated: {job.minutes:.1f} min)"
        )

    def _ran(self, minutes: float, name: str) -> None:
        """Asks what is missing after a job, and says which questions wait for no more runs."""
        before = self._waiting()
        self.refresh()
        left = self._left()
        self.say(f"{name}: {minutes:.1f} min; left: {queue.count(left)}, {queue.hours(left, len(self.workers))}")
        if gone := before - self._waiting():
            answers = queue.answers(self.claimed, self.tables, self.output)
            for question in gone:
                claim = question.claim
                self.say(f"{answers[question]} in {question.setting}: {claim.paper}: {claim.text}")

    def _waiting(self) -> set[Question]:
        return {question for job in self.jobs for question in job.questions}

    def _left(self) -> list[Job]:
        """The jobs that are left to run here, those in progress with their remaining minutes."""
        running = {
            worker.job.key: worker.job._replace(minutes=max(0.0, worker.job.minutes - worker.minutes))
            for worker in self.workers
            if worker.job is not None and not worker.timing
        }
        gone = {*self.tried, *running}
        free = [job for job in self.jobs if not (job.obstacle or job.key in gone or job.cell.file in self.failed)]
        return [*running.values(), *free]

    def _report(self, busy: Sequence[Worker]) -> None:
        self.reported, left = time.monotonic(), self._left()
        self.say(f"left: {queue.count(left)}, {queue.hours(left, len(self.workers))}")
        for worker in busy:
            if worker.job is not None:
                what = f"{'timing ' * worker.timing}{worker.job.title}"
                of = "" if worker.timing else f" of {worker.job.shown_minutes}"
                self._say(f"      {worker.place.name}: {what}, {worker.minutes:.0f}{of}")

    def close(self) -> None:
        """Asks all workers to save and to stop, and waits until they have."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            while worker.process.is_alive():
                if worker.connection.poll(POLL_SECONDS):  # a worker may wait until somebody reads its message
                    worker.received()

    def kill(self) -> None:
        """Ends all workers that are left, at once."""
        for worker in self.workers:
            worker.process.kill()


def run(
    tables: Sequence[Table],
    output: Path,
    claimed: Sequence[Claim],
    hours: float | None,
    say: Callable[[str], None],
    only: Container[str] | None = None,
) -> int:
    """Runs the queue at the lowest priority of the operating system, until nothing is left or the time is over.

    It can be stopped or killed at any moment. The next call continues.

    Args:
      hours: then the jobs in progress are saved, and the queue stops. None: no limit.
      only: as in `queue.missing`.

    Returns:
      The exit code: 0, or 1 if a job failed, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
      BusyError: another process runs the queue.
    """
    deadline = math.inf if hours is None else time.monotonic() + 3600 * hours
    with runner.locked(output / LOCK) as is_ours, fd.stop_on_interrupt(terminate=True) as stop:
        if not is_ours:
            raise runner.BusyError(f"one process at a time can run the queue, got a second one for {output}")
        os.nice(19 - os.nice(0))  # the workers inherit it
        here = machine()
        crew, complete = Crew(tables, output, claimed, Times(output, here, say), say, only), False
        try:
            crew.workers = [Worker(place, output) for place in places(here)]
            crew.refresh()
            crew.times.save()
            left = [job for job in crew.jobs if not job.obstacle]
            crew.say(f"{queue.count(left)}, {queue.hours(left, len(crew.workers))}, on {here.hardware}")
            complete = crew.run(lambda: stop.requested or time.monotonic() >= deadline)
            if not complete:
                crew.say("the workers save their rounds and stop")
            crew.close()
        except KeyboardInterrupt:
            complete = False  # at the second Ctrl-C: nobody waits for the workers
        finally:
            crew.kill()
        crew.refresh()  # also the rounds that were saved at the end
    for failure in crew.failed.values():
        say(f"failed: {failure}")
    say(
        f"nothing {'else ' * bool(crew.failed)}is left to run here" if complete else "left, the same command continues:"
    )
    say(queue.summary(crew.jobs, claimed, here.hardware, len(crew.workers)))
    if stop.requested and not complete:
        return 143 if stop.terminated else 130
    return 1 if crew.failed else 0


def listed(
    tables: Sequence[Table],
    output: Path,
    claimed: Sequence[Claim],
    say: Callable[[str], None],
    only: Container[str] | None = None,
) -> str:
    """Returns the text about all jobs that are left. Nothing is run. only: as in `queue.missing`."""
    here = machine()
    times = Times(output, here, say)
    jobs = queue.missing(tables, output, claimed, times, only)
    with runner.locked(output / LOCK) as is_ours:
        if is_ours:  # otherwise the process that runs the queue writes the file
            times.save()
    return queue.listing(jobs, claimed, here.hardware, len(places(here)))
