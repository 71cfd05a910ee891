"""Examples of users' code. `mypy --strict tests/typed.py` checks that the public interface that they use is typed.

The code is never executed.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import fedjax_drift as fd


def client_update(server: Any, client: Any, work: fd.Work) -> fd.ClientResult:
    return fd.ClientResult(server.params, work.size, client, {})


def what_users_type() -> tuple[float, fd.Algorithm]:
    data = fd.FederatedData.from_clients([(np.zeros((3, 2), np.float32), np.array([0, 1, 0]))] * 4)
    local = fd.LocalTraining(epochs=2, lr=0.1)
    model: fd.Model = fd.models.linear((2,), 2)
    sim = fd.Simulation(model, data, fd.algorithms.feddc(alpha=0.1), local=local, cohort_size=2, measure="updates")
    state: fd.ServerState = sim.init(jax.random.key(0))
    state, info = sim.round_fn(state, cohort=[1, 2])
    history: list[dict[str, Any]]
    with fd.logs.Log("runs/typed") as log:
        state, history = sim.run(state, rounds=3, on_round=log, checkpoints=fd.Checkpoints("runs/typed"))
    runs = fd.sweep(lambda lr: sim, 3, settings=fd.grid(lr=[0.1]))
    parsed = fd.parse_run("--dataset glyphs --algorithm fedavg", data=data, values={"lr": 0.1})
    state, history = parsed.simulations["fedavg"].run(state, parsed.rounds, parsed.eval_every)
    for records in (history, runs):
        fd.plots.curves(records)
    fd.plots.curves({"a": history})
    fd.plots.curves({"a": [history, history]})
    fd.plots.curves({"a": "runs/typed"}, style=fd.plots.Style(smooth=None, band="range", figsize=(8, 3)))
    fd.plots.rounds_to_target("runs/typed", 0.5).savefig("target.png")
    fd.plots.drift_story({"a": history}, 0.5, data)
    scores: dict[str, np.ndarray] = sim.evaluate_clients(state, fine_tune=1)
    fd.plots.fairness(scores)
    fd.plots.federation(fd.datasets.load("glyphs", fd.partition.dirichlet(10, alpha=0.3)))
    worst: float = fd.personal.summary(scores["accuracy"])["worst_10"]
    algorithm: fd.Algorithm = fd.algorithms.fedavg()._replace(client_update=client_update, name="still")
    return worst, algorithm
