"""Kills the queue of experiments at random moments and starts it again. Prints the counts as JSON.

    python tests/kill_queue.py FOLDER [KILLS] [SAVE_SECONDS] [ROUNDS]

The queue runs a small table with three methods and three seeds, whose rounds take about half a second. Each kill ends
all of its processes at once, with SIGKILL. Every fifth kill is while the processes start, the others are in the middle
of the rounds. After the kills the queue runs to its end. Its results must have the same bits as those of a queue that
was not killed, otherwise the exit code is 1. The results keep all bits here, and the loss of every round.

A kill loses the rounds since the last save: those of `SAVE_SECONDS` (in the queue: `runner.SAVE_SECONDS`), and the one
in progress. They are counted as the rounds that were reported twice.

The worker processes import this file, too. So they save as often as this file says, and write a line for each round.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedjax_drift as fd

sys.path.append(str(Path(__file__).parents[1]))  # for experiments/
from experiments.tables import results, runner
from experiments.tables.__main__ import main as tables_main

TABLE = """
title = "A small table"
paper = "Nobody, table 1"
[scores]
"last (%)" = {of = "accuracy", take = "last", scale = 100}
[methods]
FedAvg = "fedavg"
SCAFFOLD = "scaffold"
FedDC = "feddc:alpha=0.1"
[common]
dataset = "synthetic:num_clients=20,num_rows=400"
cohort = 10
batch_size = 4
epochs = 20
rounds = ROUNDS
eval_every = 5
keep = ["train_loss"]
[settings.small]
"""
LOG, SAVE = "KILL_QUEUE_LOG", "KILL_QUEUE_SAVE_SECONDS"
START_SECONDS = 300.0  # the longest time until the first round of a queue

if LOG in os.environ:  # in a process of the queue
    sweep = fd.Simulation.sweep

    def logged(sim: fd.Simulation, *arguments: Any, checkpoints: fd.Checkpoints | None = None, **options: Any) -> Any:
        def on_round(seed: int, setting: Mapping, record: Mapping) -> None:
            assert checkpoints is not None
            os.write(log, f"{checkpoints.path / str(seed)} {record['round']}\n".encode())

        return sweep(sim, *arguments, checkpoints=checkpoints, on_round=on_round, **options)

    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    runner.SAVE_SECONDS = float(os.environ[SAVE])
    results.five_digits = lambda value: value
    fd.Simulation.sweep = logged  # type: ignore[method-assign]


class Queue:
    """A queue that is killed repeatedly."""

    def __init__(self, folder: Path, tables: Path, save_seconds: float) -> None:
        self.output, self.log, self.text = folder / "results", folder / "log", folder / "text"
        folder.mkdir(parents=True)
        self.command = [sys.executable, __file__, "queue", f"--tables={tables}", f"--output={self.output}"]
        self.env = os.environ | {LOG: str(self.log), SAVE: str(save_seconds)}

    def lines(self) -> list[str]:
        """The rounds that all processes have reported."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def start(self) -> subprocess.Popen:
        with self.text.open("a") as text:
            return subprocess.Popen(
                self.command, env=self.env, stdout=text, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self, seconds: float, early: bool) -> bool:
        """Starts the queue, and kills it some seconds after its first round (early: after its start).

        Returns False if it has ended before.
        """
        known, process, deadline = len(self.lines()), self.start(), time.monotonic() + START_SECONDS
        while not early and len(self.lines()) == known and process.poll() is None:
            assert time.monotonic() < deadline, f"no round after {START_SECONDS} s: {self.text.read_text()}"
            time.sleep(0.05)
        time.sleep(seconds)
        ended = process.poll() is not None
        os.killpg(process.pid, signal.SIGKILL) if not ended else None
        process.wait()
        return not ended

    def bits(self) -> dict[str, list]:
        """All results, without what may differ: the times, the dates and the numbers of runs in a sweep."""
        kept = ("setting", "method", "seed", "rounds", "reached", "command", "options", "series")
        return {
            str(file.relative_to(self.output)): [
                {name: getattr(run, name) for name in kept} for run in results.read_results(file).values()
            ]
            for file in sorted(self.output.rglob("*/*.jsonl"))
        }


def main(folder: Path, kills: int, save_seconds: float, rounds: int) -> int:
    """Kills a queue, and returns the exit code."""
    tables = folder / "tables"
    (tables / "small").mkdir(parents=True)
    (tables / "small/table.toml").write_text(TABLE.replace("ROUNDS", str(rounds)))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "xla")
    whole, killed = Queue(folder / "whole", tables, save_seconds), Queue(folder / "killed", tables, save_seconds)
    assert whole.start().wait() == 0, whole.text.read_text()
    random.seed(0)
    count, early = 0, 0
    while count < kills:
        is_early = count % 5 == 4
        moment = random.uniform(0, 15) if is_early else random.uniform(0, 2.5 * save_seconds)
        if not killed.kill(moment, is_early):
            break  # nothing is left to kill
        count, early = count + 1, early + is_early
    assert killed.start().wait() == 0, killed.text.read_text()
    same, lines = killed.bits() == whole.bits(), killed.lines()
    counts = {"kills": count, "while starting": early, "rounds lost": len(lines) - len(set(lines))}
    print(json.dumps(counts | {"save seconds": save_seconds, "files": len(whole.bits()), "bitwise": same}))
    return 0 if same else 1


if __name__ == "__main__":
    if sys.argv[1] == "queue":  # the process of a `Queue`
        sys.exit(tables_main(sys.argv[1:]))
    _, place, kills, seconds, rounds = [*sys.argv, *["20", "3", "200"][len(sys.argv) - 2 :]]
    sys.exit(main(Path(place), int(kills), float(seconds), int(rounds)))
