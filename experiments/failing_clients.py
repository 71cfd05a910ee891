"""Compares the test accuracy with and without failing clients, and tests whether failed clients keep their state.

    python -m experiments.failing_clients [--rounds 1000] [--output DIR]
    python -m experiments.failing_clients --draw DIR      only draws the picture again

The data are MNIST with 100 clients. The label mix of each client is drawn from Dirichlet(0.3), and 15 clients are
selected per round. The model is 2NN. A client trains for one epoch with batch size 50, learning rate 0.1 * 0.998^t,
gradients clipped to norm 10, and weight decay 1e-3. The seed is 0.

In the runs with failing clients, 30 % of the selected clients drop out, and 30 % of the others are stragglers, which do
only a part of their local steps. After every round, the states of all clients that did not report are compared with
their states before the round, bit by bit.
"""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_drift as fd
from experiments import cells

ALGORITHMS = {
    "fedavg": fd.algorithms.fedavg(),
    "scaffold": fd.algorithms.scaffold(),
    "feddc": fd.algorithms.feddc(alpha=0.1),
    "fedeve": fd.algorithms.fedeve(),
}
KINDS: dict[str, dict[str, float]] = {"all answer": {}, "failing": {"dropout": 0.3, "stragglers": 0.3}}
MODEL = fd.models.mnist_2nn()
LOCAL = fd.LocalTraining(epochs=1, batch_size=50, lr=0.1, lr_decay=0.998, weight_decay=1e-3, clip_norm=10)


@jax.jit
def touched(old, new, cohort: jax.Array) -> jax.Array:
    """Returns the number of clients outside of the cohort whose state has changed."""
    changed = jnp.zeros((), bool)
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        changed |= (a != b).reshape(len(a), -1).any(1)
    return changed.at[cohort].set(False, mode="drop", wrap_negative_indices=False).sum()


def run(sim: fd.Simulation, rounds: int) -> tuple[list[dict], int]:
    """Returns the records of every tenth round and the last one, and how many states changed without a report."""
    state, history, wrong, answered = sim.init(jax.random.key(0)), [], 0, 0
    for t in range(1, rounds + 1):
        old, (state, info) = state, sim.round_fn(state)
        if jax.tree.leaves(state.clients):
            wrong += int(touched(old.clients, state.clients, info["cohort"]))
        answered += int((info["cohort"] >= 0).sum())
        if t % 10 == 0 or t == rounds:
            history.append({"round": t, "answered": answered} | sim.evaluate(state))
    return history, wrong


@cache
def federation() -> fd.FederatedData:
    return fd.datasets.load("mnist", partition=fd.partition.dirichlet(100, 0.3, seed=0))


def compute(rounds: int, name: str, kind: str) -> cells.Entry:
    sim = fd.Simulation(MODEL, federation(), ALGORITHMS[name], local=LOCAL, cohort_size=15, **KINDS[kind])
    history, wrong = run(sim, rounds)
    changed = str(wrong) if jax.tree.leaves(sim.algorithm.init_client(jnp.zeros(1))) else "stateless"
    return {"algorithm": name, "clients": kind, "states_changed": changed, "history": history}


def show(entry: cells.Entry) -> str:
    last, best = entry["history"][-1], max(record["accuracy"] for record in entry["history"])
    return (
        f"{100 * last['accuracy']:.2f} %, best {100 * best:.2f} %, {last['answered'] / last['round']:.2f} reports per "
        f"round, changed states without report: {entry['states_changed']}"
    )


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """A plot of the test accuracy with and without failing clients, with one panel per algorithm."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(8, 6), sharex=True, sharey=True, layout="constrained")
    for panel, name in zip(axes.flat, ALGORITHMS, strict=True):
        for kind, style in zip(KINDS, ({"color": "black"}, {"color": "C1", "linestyle": "--"}), strict=True):
            history = found[name, kind]["history"]
            accuracy = [100 * record["accuracy"] for record in history]
            panel.plot([record["round"] for record in history], accuracy, label=kind, linewidth=1.2, **style)
        panel.set_title(name)
        panel.grid(alpha=0.3)
    axes[0, 0].set_ylim(92, 99)
    axes[0, 0].legend()
    figure.supxlabel("Round")
    figure.supylabel("Test accuracy (%)")
    return {"failing_clients.png": figure}


EXPERIMENT = cells.Experiment(
    "failing_clients", [(name, kind) for name in ALGORITHMS for kind in KINDS], compute, show, report,
    itemgetter("algorithm", "clients"),
)  # fmt: skip

if __name__ == "__main__":
    fd.use_cpu_devices()
    cells.main(EXPERIMENT, __doc__, rounds=1000)
