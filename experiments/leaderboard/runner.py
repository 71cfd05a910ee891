"""Tunes and runs one algorithm on one federation, and stores the result as JSON.

A result is one file. It is written after the tuning and after the runs of each partition, so at most the runs of one
partition are lost when the process is killed. The files are replaced atomically.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import fedjax_drift as fd
from experiments.leaderboard import entrants
from experiments.leaderboard.entrants import Entrant, Federation
from experiments.tables.results import commit, five_digits, hardware, write_lines

VALIDATION = 0.1  # share of each client's training examples that chooses the setting
KEPT = ("round", "accuracy", "loss", "train_loss")
Say = Callable[[str], None]


def file_of(output: Path, federation: str, entrant: str) -> Path:
    """The file of a result."""
    folder = federation.replace(", ", "-").replace(" ", "_").lower()
    return output / folder / f"{entrant.replace(' ', '_').lower()}.json"


def read(file: Path) -> dict[str, Any]:
    """Returns the result in a file, or an empty dict if there is none."""
    return json.loads(file.read_text()) if file.exists() else {}


def is_complete(result: dict[str, Any]) -> bool:
    """Whether a result has the runs of all seeds on all partitions, in this order, and no others."""
    wanted = [(partition, seed) for partition, seeds in enumerate(entrants.SEEDS) for seed in seeds]
    return [(run["partition"], run["seed"]) for run in result.get("runs", [])] == wanted


def run(federation: str, name: str, output: Path, progress: bool | None, say: Say) -> None:
    """Runs what is missing of a result. Raises KeyboardInterrupt after Ctrl-C."""
    setup, entrant, file = entrants.FEDERATIONS[federation], entrants.ENTRANTS[name], file_of(output, federation, name)
    result = read(file)
    if not result:
        say(f"{federation}, {name}: tuning {entrants.SETTINGS} settings")
        tried = tune(setup, entrant, entrant.settings(federation), progress)
        best = max(tried, key=lambda one: one["score"])["setting"]
        result = {"federation": federation, "entrant": name, "tried": tried, "best": best, "runs": []}
        result |= {"commit": commit(), "hardware": hardware(), "date": time.strftime("%Y-%m-%d")}
        write_lines(file, [result])
    done = {one["partition"] for one in result["runs"]}
    for partition in [number for number in range(len(entrants.SEEDS)) if number not in done]:
        say(f"{federation}, {name}: {result['best']}, partition {partition}")
        result["runs"] += final(setup, entrant, result["best"], partition, progress)
        write_lines(file, [result])


def tune(setup: Federation, entrant: Entrant, settings: list[dict], progress: bool | None) -> list[dict[str, Any]]:
    """Returns each setting with its score on held-out examples of all clients, on the first partition.

    The score is that of `fd.tuning.score` after `TUNING_ROUNDS` rounds.
    """
    data = setup.data(0).with_validation(VALIDATION)
    build = builder(setup, entrant, data)
    runs = sweep(build, entrants.TUNING_ROUNDS, fd.tuning.SEEDS[:1], settings, progress)
    tried = []
    for run in runs:
        score = fd.tuning.score(build(**run.setting), [run])
        tried.append({"setting": run.setting, "score": round(score, 5)})
    return tried


def final(
    setup: Federation, entrant: Entrant, setting: dict[str, float], partition: int, progress: bool | None
) -> list[dict[str, Any]]:
    """Returns the runs of all seeds on one partition."""
    build = builder(setup, entrant, setup.data(partition))
    times: list[float] = []
    runs = sweep(
        build,
        entrants.ROUNDS,
        entrants.SEEDS[partition],
        [setting],
        progress,
        lambda *_: times.append(time.process_time()),
    )
    # The first records include the compilation. CPU time does not depend on what else the machine does.
    skipped = len(times) // 4
    seconds = (times[-1] - times[skipped]) / (len(times) - 1 - skipped)
    sim, results = build(**setting), []
    for run in runs:
        tuned = 1 if sim.algorithm.personal is None else None
        scores = sim.evaluate_clients(run.state, fine_tune=tuned)
        summaries = {name: fd.personal.summary(scores[name]) for name in ("accuracy", "personal_accuracy")}
        evaluated = [record for record in run.history if "accuracy" in record]
        results.append(
            {
                "partition": partition,
                "seed": run.seed,
                "cpu_seconds_per_round": float(f"{seconds:.4g}"),
                "series": {name: [five_digits(record[name]) for record in evaluated] for name in KEPT},
                "clients": {
                    name: {k: five_digits(s[k]) for k in ("mean", "lowest_10")} for name, s in summaries.items()
                },
            }
        )
    return results


def builder(setup: Federation, entrant: Entrant, data: fd.FederatedData) -> Callable[..., fd.Simulation]:
    model = setup.model(cosine=True) if entrant.cosine else setup.model()

    def build(lr: float, **options: float) -> fd.Simulation:
        local = fd.LocalTraining(epochs=entrants.EPOCHS, batch_size=entrants.BATCH_SIZE, lr=lr)
        algorithm = entrant.factory(**options)
        return fd.Simulation(model, data, algorithm, local=local, cohort_size=entrants.COHORT)

    return build


def sweep(
    build: Callable[..., fd.Simulation],
    rounds: int,
    seeds: Any,
    settings: list[dict[str, float]],
    progress: bool | None,
    on_round: Callable[..., None] | None = None,
) -> list[fd.Run]:
    """Runs a sweep. Raises KeyboardInterrupt if Ctrl-C has ended it early."""
    with warnings.catch_warnings():  # a setting with a large learning rate may diverge, and is not chosen
        warnings.simplefilter("ignore", RuntimeWarning)
        runs = fd.sweep(build, rounds, seeds, settings, entrants.EVAL_EVERY, progress=progress, on_round=on_round)
    if any(int(jax.device_get(run.state.round)) < rounds for run in runs):
        raise KeyboardInterrupt
    return runs
