"""Runs the experiment of another library: the table in docs/coming_from.md.

    python -m experiments.ported pfllib FOLDER [--seeds 3]
    python -m experiments.ported {fl_bench,fl_simulator,niid_bench} FOLDER

FOLDER has the files that the other library writes; the docstring of each experiment has its commands. Prints the
accuracy after every round: that of the global model on the whole test set, or the clients' own models' on their test
examples, weighted by their numbers. Seconds are CPU seconds of the process, the median over all rounds but the first.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from pathlib import Path

import jax
import numpy as np

import fedjax_drift as fd


def accuracy(sim: fd.Simulation, state: fd.ServerState) -> float:
    if sim.algorithm.personal is None:
        return float(sim.evaluate(state)["accuracy"])
    own, sizes = sim.evaluate_clients(state)["personal_accuracy"], sim.data.test_sizes
    return float(np.average(own, weights=sizes))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.ported", description=__doc__)
    parser.add_argument("name", choices=["pfllib", "fl_bench", "fl_simulator", "niid_bench"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    experiment = importlib.import_module(f"experiments.ported.{args.name}")
    sim, seconds, scoring = experiment.port(args.folder), [], []
    print(sim.data)
    for seed in range(args.seeds):
        state, scores = sim.init(jax.random.key(seed)), []
        for _ in range(experiment.ROUNDS):
            start = time.process_time()
            state, _ = jax.block_until_ready(sim.round_fn(state))
            end = time.process_time()
            scores.append(accuracy(sim, state))
            seconds.append(end - start)
            scoring.append(time.process_time() - end)
        print(seed, *(f"{100 * score:.1f}" for score in scores), flush=True)
    round_, evaluation = statistics.median(seconds[1:]), statistics.median(scoring[1:])
    print(f"{round_:.2f} CPU seconds per round, {evaluation:.2f} per evaluation")


if __name__ == "__main__":
    main()
