"""How long the rounds of a cell take here.

A worker of the queue times a round of the cell. The time is kept in a file beside the results, with the name of the
hardware. If a cell has not been timed, its time is estimated: the FLOPs of the local training, divided by a rate. The
rate is that of earlier results with this model and algorithm on the same processor, or else with this model. It is
often too low, because other processes used the machine, too. A time that was measured does not depend on them.

All times are those of one worker: a core, or all accelerators.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from experiments.tables.papers import Cell
from experiments.tables.results import Result, write_lines

FILE = "queue-times.jsonl"  # in the folder of the results
DEFAULT_RATES = {
    "cpu": 3e10,
    "gpu": 5e12,
    "tpu": 5e12,
}  # FLOP/s of a worker, including compilation, if there are no results of this hardware
TIMED_SECONDS = 2.0  # short rounds are timed for about this time
MOST_TIMED = 200  # rounds
# Options that do not change the time of a round, or hardly.
NOT_TIMED = {"rounds", "lr", "lr_decay", "data_seed"}


class Machine(NamedTuple):
    """Where the workers of the queue run."""

    platform: str  # "cpu", "gpu" or "tpu"
    hardware: str  # as `results.hardware` names it

    @property
    def of_worker(self) -> str:
        """The hardware of one worker: a core, or all accelerators."""
        return f"1 core, {_cores_of(self.hardware)[1]}" if self.platform == "cpu" else self.hardware


class Cost(NamedTuple):
    """The work of one data set and model: all that the estimate of a cell needs besides its options."""

    flops: float  # of training on one example, forward and backward
    examples: int  # M, of all clients
    clients: int  # N


class Seconds(NamedTuple):
    """The time of a round of one run."""

    value: float
    timed: bool  # otherwise it is estimated


def timed_options(cell: Cell) -> str:
    """The options that determine the time of a round. Cells with the same text have the same time."""
    return json.dumps({name: value for name, value in sorted(cell.options.items()) if name not in NOT_TIMED})


class Times:
    """The times of all cells on this machine.

    Reading a data set to estimate a time is slow. So the file also keeps the costs.

    Args:
      output: the folder of the results.
      say: ``say(text)`` is told which data set is being read.
    """

    def __init__(self, output: Path, machine: Machine, say: Callable[[str], None]) -> None:
        self.file, self.machine, self.say = output / FILE, machine, say
        self._timed: dict[tuple[str, str], float] = {}  # (hardware, options) -> seconds of a round
        self._costs: dict[str, Cost] = {}
        self._absent: dict[str, str] = {}  # why a data set cannot be read; asked again in every process
        self._rates: dict[tuple, float] | None = None
        self._results: list[tuple[Cell, Mapping[int, Result]]] = []
        self._read()

    def _read(self) -> None:
        """Adds the times and costs of the file to those that are known. The known ones are newer."""
        for number, line in enumerate(self.file.read_text().splitlines() if self.file.exists() else (), 1):
            try:
                entry = json.loads(line)
                if "hardware" in entry:
                    self._timed.setdefault((entry["hardware"], entry["of"]), float(entry["seconds"]))
                else:
                    self._costs.setdefault(entry["of"], Cost(*entry["cost"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.file}, line {number} must be a time or a cost, got {line[:50]!r} ({error!r}): delete the "
                    "file, and the rounds are timed again"
                ) from error

    def learn(self, results: Iterable[tuple[Cell, Mapping[int, Result]]]) -> None:
        """Takes the rates of the estimates from these results."""
        self._results, self._rates = list(results), None

    def add(self, cell: Cell, seconds: float) -> None:
        """Stores the time of a round of the cell."""
        self._timed[self.machine.of_worker, timed_options(cell)] = seconds

    def save(self) -> None:
        """Adds the times and costs to the file. Only one process at a time may do so: that which has locked the
        queue."""
        self._read()
        timed = [{"hardware": name, "of": of, "seconds": value} for (name, of), value in sorted(self._timed.items())]
        write_lines(self.file, [*timed, *({"of": of, "cost": cost} for of, cost in sorted(self._costs.items()))])

    def of_round(self, cell: Cell) -> Seconds | str:
        """Returns the seconds of a round of one run, or why the data of the cell cannot be read."""
        seconds = self._timed.get((self.machine.of_worker, timed_options(cell)))
        if seconds is not None:
            return Seconds(seconds, True)
        cost = self._cost(cell)
        return cost if isinstance(cost, str) else Seconds(_round_flops(cell, cost) / self._rate(cell), False)

    def _cost(self, cell: Cell) -> Cost | str:
        key = _data(cell)
        if key not in self._costs and key not in self._absent:
            self.say(f"reading {cell.options['dataset']}")
            try:
                self._costs[key] = cost_of(cell)
            except FileNotFoundError as error:
                self._absent[key] = f"data not found: {str(error).partition(':')[0]}"
        return self._costs[key] if key in self._costs else self._absent[key]

    def _rate(self, cell: Cell) -> float:
        """FLOP/s of a worker, of earlier results that are as similar to the cell as possible."""
        if self._rates is None:
            self._rates = self._measured_rates()
        default = DEFAULT_RATES[self.machine.platform]
        return next((self._rates[key] for key in _rate_keys(cell) if key in self._rates), default)

    def _measured_rates(self) -> dict[tuple, float]:
        """FLOP/s of one worker here: by model and algorithm, by model, and of all, each of all runs together."""
        name = _cores_of(self.machine.hardware)[1]
        known: dict[tuple, list[tuple[float, float]]] = {}
        for cell, runs in self._results:
            here = [run for run in runs.values() if run.seconds and _cores_of(run.hardware)[1] == name]
            if not here or isinstance(cost := self._cost(cell), str):
                continue
            for run in here:
                work = _round_flops(cell, cost) * run.rounds, run.seconds / run.together * _cores_of(run.hardware)[0]
                for key in _rate_keys(cell):
                    known.setdefault(key, []).append(work)
        return {key: flops / seconds for key, runs in known.items() for flops, seconds in [np.sum(runs, 0)]}


def seconds_of_round(cell: Cell) -> float:
    """Runs a few rounds of a cell, and returns the time of one, with its share of the evaluations and measurements.

    The first round and the first evaluation do not count, because they are compiled. On a CPU, the time is that of the
    processor in this process. So it does not depend on what else the machine does.
    """
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    parsed = fd.parse_run(cell.words(0))
    (sim,) = parsed.simulations.values()

    def rounds(number: int, measure_every: int = 2**30) -> tuple[float, fd.ServerState]:
        """Returns the time of a round after the first, and the last state."""
        ends: list[float] = []
        (run,) = sim.sweep(
            1 + number, [0], 0, params=parsed.params, measure_every=measure_every, progress=False,
            on_round=lambda seed, setting, record: ends.append(clock()),
        )  # fmt: skip
        return (ends[-1] - ends[0]) / number, run.state

    seconds, state = rounds(1)
    if (more := min(MOST_TIMED, int(TIMED_SECONDS / max(seconds, 1e-9)))) > 1:
        seconds, state = rounds(more)
    shared = 0.0
    if parsed.eval_every and parsed.data.x_test is not None:
        sim.evaluate(state)
        begin = clock()
        sim.evaluate(state)
        shared += (clock() - begin) / parsed.eval_every
    if cell.options.get("measure"):
        shared += max(0.0, rounds(1, measure_every=1)[0] - seconds) / parsed.measure_every
    return seconds + shared


def cost_of(cell: Cell) -> Cost:
    """Returns the cost of a cell. Reads its data, but trains nothing. Raises FileNotFoundError without the data."""
    parsed = fd.parse_run(cell.words(0))
    (sim,) = parsed.simulations.values()
    B, data, model = 8, parsed.data, sim.model

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return model.loss(model.apply(params, data.decode(x)), y).mean()

    shapes = [jax.ShapeDtypeStruct((B, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype)) for a in (data.x, data.y)]
    params = jax.eval_shape(model.init, jax.random.key(0))
    analysis = jax.jit(jax.value_and_grad(loss)).lower(params, *shapes).cost_analysis() or {}
    return Cost(float(analysis.get("flops", 0.0)) / B or 1.0, len(data.x), data.num_clients)


def _data(cell: Cell) -> str:
    """Cells with the same text have the same number of examples, number of clients and network."""
    names = ("dataset", "data_dir", "model", "cosine", "clients")
    natural = cell.options.get("partition", "by_writer") == "by_writer"
    return json.dumps({name: cell.options.get(name) for name in names} | {"natural": natural})


def _cores_of(hardware: str) -> tuple[int, str]:
    """The cores and the name of a processor, from the name of the hardware. Accelerators count as one."""
    match = re.fullmatch(r"(\d+) cores?, (.+)", hardware)
    return (int(match[1]), match[2]) if match else (1, hardware)


def _round_flops(cell: Cell, cost: Cost) -> float:
    """FLOPs of the local training of one round."""
    return cell.options["cohort"] * cell.options.get("epochs", 1) * cost.flops * cost.examples / cost.clients


def _rate_keys(cell: Cell) -> list[tuple]:
    """The keys of a cell in the rates, from the most to the least specific."""
    model = cell.options.get("model", cell.options["dataset"].partition(":")[0])
    return [(model, cell.options["algorithm"].partition(":")[0]), (model,), ()]
