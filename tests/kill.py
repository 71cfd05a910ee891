"""The kill test's program: runs killed at random moments and resumed, 50 times; prints the counts as JSON.

    python tests/kill.py FOLDER [MOMENTS]

A third of the kills are of one run with its client states on the device, a third of one with them in files, and a third
of runs with them in files that have hardly begun: most of these have no checkpoint yet. Each run then comes to its end,
which is to be that of a run that nobody disturbed.

Starting Python and importing JAX takes seconds, so this process imports all of it, leaves JAX's backend alone, and
forks a child for every attempt. The compilation cache is in FOLDER. A child writes to a pipe what it does: "begun",
"from t" (the state it starts from is there), "round t" (reported to the user), "evaluating t", "saving t", "saved t"
(known to be complete). It is killed a random while after it has said one of these, so that a busy machine is killed at
the same kinds of moments.
"""

from __future__ import annotations

import functools
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift.simulation.loop import Loop
from fedjax_drift.storage import client_store, orbax_backend, saver

EVERY, ROUNDS, FINAL = 2, 1_000_000, 6
CHILD_SECONDS = 60


def simulation(bank: str) -> fd.Simulation:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(4, 3)).astype(np.float32), rng.integers(0, 2, 4)) for _ in range(5)]
    many = (
        rng.normal(size=(400_000, 3)).astype(np.float32),
        rng.integers(0, 2, 400_000),
    )  # takes a while to evaluate
    data = fd.FederatedData.from_clients(rows, test=many)
    model = fd.Model(init=lambda key: jax.numpy.zeros((3, 2)), apply=lambda w, x: x @ w)
    return fd.Simulation(model, data, fd.algorithms.scaffold(), cohort_size=2, bank=bank)


def fingerprint(state: fd.ServerState, history: list[dict]) -> str:
    """All bits of a run but the times."""
    clients = (
        state.clients.gather(np.arange(5)) if isinstance(state.clients, client_store.ClientStore) else state.clients
    )
    leaves = jax.tree.leaves(jax.device_get((state.round, jax.random.key_data(state.key), state.server, clients)))
    told = [{name: value for name, value in record.items() if name != "seconds"} for record in history]
    return json.dumps([[leaf.tobytes().hex() for leaf in leaves], told])


def child(folder: Path, bank: str, rounds: int, pipe: int) -> None:
    """Runs up to ``rounds``, from the newest checkpoint if there is one."""

    def say(*words: object) -> None:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    settle, write = saver.Saver._settle, saver.Saver._write
    run, score = fd.Simulation.run, Loop._score

    def writing(writer: saver.Saver, contents: saver.Contents, history: list) -> None:
        say("saving", contents.round)
        write(writer, contents, history)

    def settled(writer: saver.Saver) -> None:
        started = writer.started
        settle(writer)
        if started is not None:
            say("saved", started)

    def scoring(loop: Loop) -> None:
        if loop._flying:
            say("evaluating", loop._flying[-1].done)
        score(loop)

    saver.Saver._settle, saver.Saver._write, Loop._score = settled, writing, scoring
    sim = simulation(str(folder / "bank") if bank == "files" else bank)
    checkpoints = fd.Checkpoints(folder / "run", every=EVERY, seconds=None, keep=2)
    say("begun", 0)
    state, before = checkpoints.restore(sim) if checkpoints.rounds else (sim.init(jax.random.key(0)), [])
    say("from", int(state.round))
    state, after = run(
        sim, state, rounds - len(before), 1, progress=False, checkpoints=checkpoints,
        on_round=lambda record: say("round", record["round"]),
    )  # fmt: skip
    say("end", fingerprint(state, before + after))


def attempt(folder: Path, bank: str, rounds: int, after: bytes = b"end", moment: float = 0.0) -> list[list[str]]:
    """What a child said before it was killed, ``moment`` seconds after it first said ``after``."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(read)
            child(folder, bank, rounds, write)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    text, deadline, started = b"", time.monotonic() + CHILD_SECONDS, False
    while (left := deadline - time.monotonic()) > 0:
        if select.select([read], [], [], left)[0]:
            if not (got := os.read(read, 65536)):
                break
            text += got
        if not started and after in text:
            started, deadline = True, time.monotonic() + moment
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while got := os.read(read, 65536):
        text += got
    os.close(read)
    return [line.split(" ", 1) for line in text.decode().splitlines()]


def last(lines: list[list[str]], what: str) -> int:
    return max((int(value) for name, value in lines if name == what), default=0)


LATE = [(b"from", 0.5), (b"saving", 0.1), (b"saving", 0.1), (b"round", 0.4)]  # after what, and at most how long after
EARLY = [(b"begun", 0.5), (b"from", 0.1), (b"saving", 0.05)]


class Life:
    """One run, killed again and again."""

    def __init__(self, folder: Path, bank: str) -> None:
        self.folder, self.bank = folder, bank
        self.known = 0  # rounds reported to the user, those that were lost included
        self.complete = 0  # the newest save reported complete
        folder.mkdir()

    def _went_on(self, lines: list[list[str]], counts: Counter[str]) -> int:
        """The round it went on from."""
        names = [name for name, _ in lines]
        assert "begun" in names, f"the child has not even started: {lines}"
        if "from" not in names:
            return self.complete  # killed before
        start = last(lines, "from")
        assert start >= self.complete, f"round {self.complete} was saved, but it went on from {start}"
        counts["most_lost"] = max(counts["most_lost"], self.known - start)
        return start

    def kill(self, moments: list[tuple[bytes, float]], counts: Counter[str]) -> None:
        after, most = random.choice(moments)
        lines = attempt(self.folder, self.bank, ROUNDS, after, random.uniform(0, most))
        assert "end" not in dict(lines)
        start = self._went_on(lines, counts)
        if "from" in dict(lines):
            self.known = max(last(lines, "round"), start)
        self.complete = max(last(lines, "saved"), start)
        evaluated = [int(value) for name, value in lines if name == "evaluating"]
        where = (
            "starting" if "from" not in dict(lines) else "before the first save" if not self.saved
            else "saving" if any((self.folder / "run").glob("*.orbax-checkpoint-tmp*"))
            else "evaluating" if evaluated and evaluated[-1] > last(lines, "round")
            else "training" if last(lines, "round") else "starting"
        )  # fmt: skip
        counts["moments"] += 1
        counts[where] += 1
        counts["in files"] += self.bank == "files"

    @property
    def saved(self) -> bool:
        return bool(fd.Checkpoints(self.folder / "run").rounds)

    def end(self, total: int, counts: Counter[str]) -> str:
        """Its end's fingerprint."""
        lines = attempt(self.folder, self.bank, total)
        self._went_on(lines, counts)
        return dict(lines)["end"]


def main(folder: Path, moments: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    orbax_backend._handler_and_arguments()  # imports orbax
    random.seed(0)
    counts: Counter[str] = Counter(most_lost=0)
    lives = [Life(folder / bank, bank) for bank in ("device", "files")]
    for life in lives:
        for _ in range(moments // 3):
            life.kill(LATE, counts)

    @functools.cache
    def alone(total: int) -> str:
        return Life(folder / f"alone-{total}", "device").end(total, Counter())

    total = max(life.known for life in lives) + FINAL
    same = [life.end(total, counts) == alone(total) for life in lives]
    while counts["moments"] < moments:
        early = Life(folder / f"early-{counts['moments']}", "files")
        while not early.saved and counts["moments"] < moments:
            early.kill(EARLY, counts)
        first = max(FINAL, early.known)
        same.append(early.end(first, counts) == alone(first))
    print(json.dumps({**counts, "rounds": total, "runs": len(same), "bitwise": all(same)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50)
