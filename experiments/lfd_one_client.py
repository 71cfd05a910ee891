"""LP of one client that has half of the classes, as LfD's table 5 describes it (arXiv 2309.07189, equation 11).

    python -m experiments.lfd_one_client [--methods LfD FedAvg] [--seeds 3] [--target 0.7] [--output FILE.json]

The settings are those of experiments/lfd/table5.toml on Fashion-MNIST, where each of the 10 clients has 5 of the 10
classes. All clients train until the global model has the target accuracy. From this model, client 0 trains for one more
round. LP is the accuracy of its model on a class divided by that of the global model, as a mean over the classes that
the client has (present) and those that it does not have (absent). All seeds have the same partition.

The page of table 5 has another score, which has less noise: a ratio of means over all clients.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax

import fedjax_drift as fd
from experiments.tables import papers

SETTING, CLIENT = "Fashion-MNIST", 0


def lp(words: list[str], seed: int, target: float) -> dict[str, float]:
    """The LP of the client after the round that starts with the first global model of the target accuracy."""
    parsed = fd.parse_run(words)
    (sim,) = parsed.simulations.values()
    state, accuracy = sim.init(jax.random.key(seed)), 0.0
    while accuracy < target and int(state.round) < parsed.rounds:
        state, _ = sim.round_fn(state)
        accuracy = float(sim.evaluate(state)["accuracy"])
    measured = sim.measure(state, ["forgetting"], cohort=[CLIENT])
    scores = {name: float(measured[name][0]) for name in ("lp_present", "lp_absent")}
    return {"seed": seed, "rounds": int(state.round), "accuracy": accuracy} | scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = papers.read_table(papers.EXPERIMENTS, "lfd/table5").settings[SETTING].cells
    parser.add_argument("--methods", nargs="+", choices=cells, default=["LfD", "FedAvg"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.7)
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    for method in arguments.methods:
        for seed in range(arguments.seeds):
            results.setdefault(method, []).append(lp(cells[method].words(seed), seed, arguments.target))
            print(method, results[method][-1], flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
