"""The program of the kill test: kills runs at 50 random moments and resumes them. Prints the counts as JSON.

    python tests/kill.py FOLDER [MOMENTS]

A quarter of the kills are of one asynchronous run with client states on the device, a quarter of the same run with
client states in files, and a quarter of one run with three edge servers and a source of drift of one's own. The last
quarter are of runs with client states in files that have just started. Most of these runs have no checkpoint yet. After
its kills, each run is completed. The result must be bitwise identical to that of an uninterrupted run.

Starting Python and importing JAX takes seconds. Therefore this process imports everything, does not start JAX's
backend, and forks a child process for every attempt. The compilation cache is in FOLDER.

A child writes its progress to a pipe:

    begun 0        the child has started
    from t         the state of round t is initialized or restored, and training starts from it
    round t        the record of round t was reported to the user
    evaluating t   the evaluation after round t starts
    saving t       the save of round t starts
    saved t        the save of round t is known to be complete
    end ...        the run is complete; followed by its fingerprint

A child is killed a random time after one of these lines. So the kills hit the same phases of a run on a slow machine.
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
from small import forgetting

import fedjax_drift as fd
from fedjax_drift.simulation.loop import Loop
from fedjax_drift.storage import client_store, saver

EVERY, ROUNDS, FINAL = 2, 1_000_000, 6
CHILD_SECONDS = 60
WITHOUT_FILES = {"device": "device", "files": "device", "edges": "edges"}  # runs with the same results


def simulation(kind: str, folder: Path) -> fd.Simulation:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(4, 3)).astype(np.float32), rng.integers(0, 2, 4)) for _ in range(5)]
    many = (
        rng.normal(size=(400_000, 3)).astype(np.float32),
        rng.integers(0, 2, 400_000),
    )  # many examples, so that an evaluation takes a while
    data = fd.FederatedData.from_clients(rows, test=many)
    model = fd.Model(init=lambda key: jax.numpy.zeros((3, 2)), apply=lambda w, x: x @ w)
    data = data.shifted(fd.shift.gradual(1, 5, fd.shift.gaussian_noise(0.5)))
    algorithm = fd.compression.compressed(fd.algorithms.scaffold(), fd.compression.top_k(0.3))
    devices = fd.Devices(speed_spread=0.5, up=100.0, down=200.0)
    if kind == "edges":
        edges, sources = fd.topology.groups([0, 1, 2, 0, 1], every=3), [forgetting(2)]
        return fd.Simulation(model, data, algorithm, cohort_size=3, topology=edges, sources=sources, devices=devices)
    markov, clock = fd.participation.markov(0.5, 0.1), fd.clock.asynchronous(4, "polynomial", max_staleness=2)
    bank = str(folder / "bank") if kind == "files" else "device"
    return fd.Simulation(
        model, data, algorithm, cohort_size=2, participation=markov, bank=bank, clock=clock, devices=devices
    )


def fingerprint(state: fd.ServerState, history: list[dict]) -> str:
    """Returns all bits of a run except for the times in its history, as text."""
    clients = (
        state.clients.gather(np.arange(5)) if isinstance(state.clients, client_store.ClientStore) else state.clients
    )
    leaves = jax.tree.leaves(
        jax.device_get((state.round, jax.random.key_data(state.key), state.server, state.sources, clients))
    )
    told = [{name: value for name, value in record.items() if name != "seconds"} for record in history]
    return json.dumps([[leaf.tobytes().hex() for leaf in leaves], told])


def child(folder: Path, kind: str, rounds: int, pipe: int) -> None:
    """Trains until round ``rounds``. Starts from the newest checkpoint if there is one."""

    def say(*words: object) -> None:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    settle, write = saver.Saver._settle, saver.Saver._write
    run, score = fd.Simulation.run, Loop._score

    def writing(writer: saver.Saver, contents: saver.Contents, history: list) -> None:
        say("saving", contents.round)
        write(writer, contents, history)

    def settled(writer: saver.Saver) -> None:
        assert writer.writing is not None
        t = writer.writing[1].round
        settle(writer)
        say("saved", t)

    def scoring(loop: Loop) -> None:
        if loop._flying:
            say("evaluating", loop._flying[-1].done)
        score(loop)

    saver.Saver._settle, saver.Saver._write, Loop._score = settled, writing, scoring
    sim = simulation(kind, folder)
    checkpoints = fd.Checkpoints(folder / "run", every=EVERY, seconds=None, keep=2)
    say("begun", 0)
    state, before = checkpoints.restore(sim) if checkpoints.rounds else (sim.init(jax.random.key(0)), [])
    say("from", int(state.round))
    state, after = run(
        sim, state, rounds - len(before), 1, progress=False, checkpoints=checkpoints,
        on_round=lambda record: say("round", record["round"]),
    )  # fmt: skip
    say("end", fingerprint(state, before + after))


def attempt(folder: Path, kind: str, rounds: int, after: bytes = b"end", moment: float = 0.0) -> list[list[str]]:
    """Forks a child and kills it ``moment`` seconds after its first line ``after``. Returns the lines that it wrote."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(read)
            child(folder, kind, rounds, write)
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


# (line of the child, largest number of seconds between this line and the kill)
LATE = [(b"from", 0.5), (b"saving", 0.1), (b"saving", 0.1), (b"round", 0.4)]
EARLY = [(b"begun", 0.5), (b"from", 0.1), (b"saving", 0.05)]


class Life:
    """One run that is killed repeatedly."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.known = 0  # the last round reported to the user, even if a kill has lost it
        self.complete = 0  # the round of the newest save that was reported as complete
        folder.mkdir()

    def _went_on(self, lines: list[list[str]], counts: Counter[str]) -> int:
        """Returns the round from which the run was resumed. Updates the largest number of lost rounds."""
        names = [name for name, _ in lines]
        assert "begun" in names, f"the child has not even started: {lines}"
        if "from" not in names:
            return self.complete  # killed before the state was restored
        start = last(lines, "from")
        assert start >= self.complete, f"round {self.complete} was saved, but it went on from {start}"
        counts["most_lost"] = max(counts["most_lost"], self.known - start)
        return start

    def kill(self, moments: list[tuple[bytes, float]], counts: Counter[str]) -> None:
        after, most = random.choice(moments)
        lines = attempt(self.folder, self.kind, ROUNDS, after, random.uniform(0, most))
        assert "end" not in dict(lines)
        start = self._went_on(lines, counts)
        if "from" in dict(lines):
            self.known = max(last(lines, "round"), start)
        self.complete = max(last(lines, "saved"), start)
        evaluated = [int(value) for name, value in lines if name == "evaluating"]
        where = (
            "starting" if "from" not in dict(lines) else "before the first save" if not self.saved
            else "saving" if any((self.folder / "run").glob("*.unfinished"))
            else "evaluating" if evaluated and evaluated[-1] > last(lines, "round")
            else "training" if last(lines, "round") else "starting"
        )  # fmt: skip
        counts["moments"] += 1
        counts[where] += 1
        counts["in files"] += self.kind == "files"

    @property
    def saved(self) -> bool:
        return bool(fd.Checkpoints(self.folder / "run").rounds)

    def end(self, total: int, counts: Counter[str]) -> str:
        """Completes the run. Returns the fingerprint of its final state and history."""
        lines = attempt(self.folder, self.kind, total)
        self._went_on(lines, counts)
        return dict(lines)["end"]


def main(folder: Path, moments: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    random.seed(0)
    counts: Counter[str] = Counter(most_lost=0)
    lives = [Life(folder / kind, kind) for kind in ("device", "files", "edges")]
    for life in lives:
        for _ in range(moments // 4):
            life.kill(LATE, counts)

    @functools.cache
    def alone(kind: str, total: int) -> str:
        return Life(folder / f"alone-{kind}-{total}", kind).end(total, Counter())

    total = max(life.known for life in lives) + FINAL
    same = [life.end(total, counts) == alone(WITHOUT_FILES[life.kind], total) for life in lives]
    while counts["moments"] < moments:
        early = Life(folder / f"early-{counts['moments']}", "files")
        while not early.saved and counts["moments"] < moments:
            early.kill(EARLY, counts)
        first = max(FINAL, early.known)
        same.append(early.end(first, counts) == alone("device", first))
    print(json.dumps({**counts, "rounds": total, "runs": len(same), "bitwise": all(same)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50)
