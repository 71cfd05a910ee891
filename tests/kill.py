"""The kill test's program: a run killed at random moments and resumed, until 50 have been; prints the counts as JSON.

    python tests/kill.py FOLDER [MOMENTS]

Starting Python and importing JAX takes seconds, so this process imports all of it, leaves JAX's backend alone, and
forks a child for every attempt. The compilation cache is in FOLDER. A child writes to a pipe what it does:
"round t" (reported to the user), "evaluating t", "saving t", "saved t" (known to be complete). It is killed a random
while after it has said one of these, so that a busy machine is killed at the same kinds of moments.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift import checkpoint

EVERY, ROUNDS, FINAL = 2, 1_000_000, 6
CHILD_SECONDS = 60


def simulation() -> fd.Simulation:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(4, 3)).astype(np.float32), rng.integers(0, 2, 4)) for _ in range(5)]
    many = (
        rng.normal(size=(400_000, 3)).astype(np.float32),
        rng.integers(0, 2, 400_000),
    )  # takes a while to evaluate
    data = fd.FederatedData.from_clients(rows, test=many)
    model = fd.Model(init=lambda key: jax.numpy.zeros((3, 2)), apply=lambda w, x: x @ w)
    return fd.Simulation(model, data, fd.algorithms.scaffold(), cohort_size=2)


def fingerprint(state: fd.ServerState, history: list[dict]) -> str:
    """All bits of a run but the times."""
    leaves = jax.tree.leaves(jax.device_get(state._replace(key=jax.random.key_data(state.key))))
    told = [{name: value for name, value in record.items() if name != "seconds"} for record in history]
    return json.dumps([[leaf.tobytes().hex() for leaf in leaves], told])


def child(folder: Path, rounds: int, pipe: int) -> None:
    """Runs up to ``rounds``, from the newest checkpoint if there is one."""

    def say(*words: object) -> None:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    settle, write = checkpoint.Saver._settle, checkpoint.Saver._write
    run, score = fd.Simulation.run, fd.simulation.Recorder.score

    def writing(saver: checkpoint.Saver, contents: checkpoint.Contents, history: list) -> None:
        say("saving", contents.round)
        write(saver, contents, history)

    def settled(saver: checkpoint.Saver) -> None:
        started = saver.started
        settle(saver)
        if started is not None:
            say("saved", started)

    def scoring(recorder: object, scores: dict) -> None:
        say("evaluating", recorder._flying[-1].done)
        score(recorder, scores)

    checkpoint.Saver._settle, checkpoint.Saver._write, fd.simulation.Recorder.score = settled, writing, scoring
    sim, checkpoints = simulation(), fd.Checkpoints(folder / "run", every=EVERY, seconds=None, keep=2)
    state, before = checkpoints.restore(sim) if checkpoints.rounds else (sim.init(jax.random.key(0)), [])
    say("from", int(state.round))
    state, after = run(
        sim, state, rounds - len(before), 1, progress=False, checkpoints=checkpoints,
        on_round=lambda record: say("round", record["round"]),
    )  # fmt: skip
    say("end", fingerprint(state, before + after))


def attempt(folder: Path, rounds: int, after: bytes = b"end", moment: float = 0.0) -> list[list[str]]:
    """What a child said before it was killed, ``moment`` seconds after it first said ``after``."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(read)
            child(folder, rounds, write)
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


def main(folder: Path, moments: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    checkpoint._orbax()
    random.seed(0)
    counts = {"moments": 0, "saving": 0, "evaluating": 0, "training": 0, "starting": 0, "most_lost": 0, "rounds": 0}
    known = 0  # rounds reported to the user, those that were lost included
    complete = 0  # the newest save reported complete
    for kill in range(moments + 1):
        # Most while it trains and saves, some while it compiles; the last reveals only where it goes on from.
        after, most = random.choices([(b"from", 0.5), (b"saving", 0.1), (b"round", 0.4)], weights=[1, 3, 4])[0]
        lines = attempt(folder, ROUNDS, *((b"from", 0.0) if kill == moments else (after, random.uniform(0, most))))
        start = last(lines, "from")
        assert lines, "the child has not even started"
        assert start >= complete, f"round {complete} was saved, but it went on from {start}"
        counts["most_lost"] = max(counts["most_lost"], known - start)
        if kill == moments:
            break
        known, complete = max(last(lines, "round"), start), max(last(lines, "saved"), start)
        evaluated = [int(value) for name, value in lines if name == "evaluating"]
        saving = any((folder / "run").glob(checkpoint.UNFINISHED))
        where = (
            "saving" if saving else "evaluating" if evaluated and evaluated[-1] > last(lines, "round")
            else "training" if last(lines, "round") else "starting"
        )  # fmt: skip
        counts["moments"] += 1
        counts[where] += 1
    total = start + FINAL
    resumed = dict(attempt(folder, total))["end"]
    alone = folder / "alone"
    alone.mkdir()
    counts["rounds"], counts["bitwise"] = total, resumed == dict(attempt(alone, total))["end"]
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50)
