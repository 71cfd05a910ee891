"""Compares the test accuracy with and without failing clients, and tests whether failed clients keep their state.

    python experiments/failing_clients.py [--rounds 1000] [--output DIR]
    python experiments/failing_clients.py --draw DIR      only plots DIR/failing_clients.json again

The data are MNIST with 100 clients. The label mix of each client is drawn from Dirichlet(0.3), and 15 clients are
selected per round. The model is 2NN. A client trains for one epoch with batch size 50, learning rate 0.1 * 0.998^t,
gradients clipped to norm 10, and weight decay 1e-3. The seed is 0.

In the runs with failing clients, 30 % of the selected clients drop out, and 30 % of the others are stragglers, which do
only a part of their local steps. After every round, the states of all clients that did not report are compared with
their states before the round, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import fedjax_drift as fd

ALGORITHMS = {
    "fedavg": fd.algorithms.fedavg(),
    "scaffold": fd.algorithms.scaffold(),
    "feddc": fd.algorithms.feddc(alpha=0.1),
    "fedeve": fd.algorithms.fedeve(),
}


@jax.jit
def touched(old, new, cohort: jax.Array) -> jax.Array:
    """Returns the number of clients outside of the cohort whose state has changed."""
    changed = jnp.zeros((), bool)
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        changed |= (a != b).reshape(len(a), -1).any(1)
    return changed.at[cohort].set(False, mode="drop", wrap_negative_indices=False).sum()


def run(sim: fd.Simulation, rounds: int) -> tuple[list[dict], int]:
    """Returns the records of every tenth round, and how many states of clients that did not report have changed."""
    state, history, wrong, answered = sim.init(jax.random.key(0)), [], 0, 0
    for t in range(1, rounds + 1):
        old, (state, info) = state, sim.round_fn(state)
        if jax.tree.leaves(state.clients):
            wrong += int(touched(old.clients, state.clients, info["cohort"]))
        answered += int((info["cohort"] >= 0).sum())
        if t % 10 == 0:
            history.append({"round": t, "answered": answered} | sim.evaluate(state))
    return history, wrong


def draw(folder: Path) -> None:
    """Plots the test accuracy with and without failing clients, with one panel per algorithm."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(8, 6), sharex=True, sharey=True, layout="constrained")
    panels = dict(zip(ALGORITHMS, axes.flat, strict=True))
    for run in json.loads((folder / "failing_clients.json").read_text()):
        style = {"all answer": {"color": "black"}, "failing": {"color": "C1", "linestyle": "--"}}[run["clients"]]
        history, panel = run["history"], panels[run["algorithm"]]
        accuracy = [100 * record["accuracy"] for record in history]
        panel.plot([record["round"] for record in history], accuracy, label=run["clients"], linewidth=1.2, **style)
        panel.set_title(run["algorithm"])
        panel.grid(alpha=0.3)
    axes[0, 0].set_ylim(92, 99)
    axes[0, 0].legend()
    figure.supxlabel("Round")
    figure.supylabel("Test accuracy (%)")
    figure.savefig(folder / "failing_clients.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="folder for failing_clients.json and .png (default: no files)")
    parser.add_argument("--draw", type=Path, help="only plot the results in this folder again")
    arguments = parser.parse_args()
    if arguments.draw:
        return draw(arguments.draw)
    fd.use_cpu_devices()
    data = fd.datasets.load("mnist", partition=fd.partition.dirichlet(100, 0.3, seed=0))
    local = fd.LocalTraining(epochs=1, batch_size=50, lr=0.1, lr_decay=0.998, weight_decay=1e-3, clip_norm=10)
    found = []
    print("| algorithm | clients | reports per round | final accuracy | best | changed states without report | s |")
    print("|---|---|---|---|---|---|---|")
    for name, algorithm in ALGORITHMS.items():
        for kind, failing in {"all answer": {}, "failing": {"dropout": 0.3, "stragglers": 0.3}}.items():
            start = time.perf_counter()
            sim = fd.Simulation(fd.models.mnist_2nn(), data, algorithm, local=local, cohort_size=15, **failing)
            history, wrong = run(sim, arguments.rounds)
            last, best = history[-1]["accuracy"], max(record["accuracy"] for record in history)
            answers, seconds = history[-1]["answered"] / arguments.rounds, time.perf_counter() - start
            kept = str(wrong) if jax.tree.leaves(sim.algorithm.init_client(jnp.zeros(1))) else "stateless"
            scores = f"{100 * last:.2f} % | {100 * best:.2f} %"
            print(f"| {name} | {kind} | {answers:.2f} | {scores} | {kept} | {seconds:.0f} |", flush=True)
            found.append({"algorithm": name, "clients": kind, "states_changed": kept, "history": history})
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "failing_clients.json").write_text(json.dumps(found) + "\n")
        draw(arguments.output)


if __name__ == "__main__":
    main()
