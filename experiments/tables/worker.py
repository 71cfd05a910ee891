"""A worker process of the queue. It runs one task at a time, which `crew` sends to it.

On a CPU, a worker has one core and one device. The processes don't wait for each other then, as the threads of one
process would. On an accelerator, there is one worker with all devices.

The process stops when it is told to, or when the process that started it has ended. In both cases it sends SIGTERM to
itself: a sweep in progress is saved first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax

import fedjax_drift as fd
from experiments.tables import runner, times
from experiments.tables.papers import Cell, Table


class Place(NamedTuple):
    """Where a worker runs."""

    name: str  # for people
    core: int | None  # None: all cores, and all accelerators
    cache: str | None = None  # the folder of compiled programs


class Task(NamedTuple):
    """What a worker should do with a cell: run it, or time its rounds."""

    table: Table
    cell: Cell
    seeds: tuple[int, ...]
    timing: bool = False


class Said(NamedTuple):
    """A line of text about the task in progress."""

    text: str


class Done(NamedTuple):
    """The end of a task."""

    error: str = ""  # why it failed; empty: it has not failed
    seconds: float = 0.0  # of a round, if the task was to time it
    busy: bool = False  # whether another process runs the cell


def perform(task: Task, output: Path, send: Callable[[Said | Done], Any]) -> None:
    """Performs a task, and sends what there is to say about it. An error ends the task, but not the worker."""
    try:
        if task.timing:
            send(Done(seconds=times.seconds_of_round(task.cell)))
            return
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            send(Said(text.removeprefix("1/1  ").strip()))

        tune = bool(task.table.tune)
        ran = runner.run_cells(
            task.table, [task.cell], task.seeds, output, tune=tune, progress=False, say=say
        )  # fmt: skip
        send(Done("" if ran else said[-1], busy=said[-1].endswith(runner.BUSY)))
    except Exception as error:  # the other tasks can run
        send(Done(f"{type(error).__name__}: {error}"))


def work(connection: Connection, place: Place, output: Path) -> None:
    """Performs the tasks that arrive, until None arrives or the other end is closed. It is the whole process."""
    if place.core is not None:  # before JAX starts its threads, which inherit the core
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {place.core})
        jax.config.update("jax_platforms", "cpu")
        fd.use_cpu_devices(1)
    if place.cache is not None:
        with contextlib.suppress(OSError):  # without the folder every program is compiled again
            fd.use_compilation_cache(place.cache)
    tasks: SimpleQueue[Task] = SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while (task := connection.recv()) is not None:
                tasks.put(task)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        perform(tasks.get(), output, connection.send)
