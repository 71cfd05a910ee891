"""Two transformers learn: ViT on CIFAR-10 and a decoder on generated dialogue. Loss curves, and the speed of a round.

    python -m experiments.transformers [--rounds 30] [--output DIR]

The curves are those of FedAvg with Adam on the clients. The share of a round is its rate in floating-point operations
per second, divided by the rate of a product of two 2048 x 2048 matrices. Both are timed in turn. Needs CIFAR-10 (see
`fedjax-drift data`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fedjax_drift as fd

SIDE, TURNS = 2048, 3


def experiments() -> dict[str, tuple[fd.Model, fd.FederatedData, int]]:
    """The models, the data, and the batch size. They are small enough for two CPU cores."""
    photos = fd.datasets.load("cifar10", fd.partition.dirichlet(100, 0.6, seed=0))
    speech = fd.datasets.load("dialogue", num_clients=100, num_rows=50)
    return {
        "ViT on CIFAR-10, 10 of 100 clients": (fd.models.vit(width=96, depth=4), photos, 50),
        "decoder on dialogue, 10 of 100 clients": (fd.models.decoder(width=96, depth=3), speech, 15),
    }


def flops(model: fd.Model, tokens: int, batch: int) -> float:
    """Floating-point operations of a step: 6 per token and entry of a matrix of a block (2 forward, 4 backward)."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    matrices = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]) if leaf.ndim == 3)
    depth, width = shapes["blocks"]["attention"]["query"]["kernel"].shape[:2]
    attention = 2 * depth * tokens * width  # per token: the scores, and the mean of the values
    return 6.0 * batch * tokens * (matrices + attention)


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def share(sim: fd.Simulation, state: fd.ServerState, batch: int) -> float:
    """The rate of a round divided by that of a large matrix product: the median over pairs of runs."""
    state, info = sim.round_fn(state)
    tokens = sim.data.x.shape[1] if sim.data.x.ndim == 2 else len(state.params["positions"])
    work = float(info["steps"]) * flops(sim.model, tokens, batch)
    square, product = jnp.ones((SIDE, SIDE)), jax.jit(jnp.matmul)
    jax.block_until_ready(product(square, square))
    pairs = [(seconds(lambda: sim.round_fn(state)[0]), seconds(lambda: product(square, square))) for _ in range(TURNS)]
    return float(np.median([work / one / (2 * SIDE**3 / two) for one, two in pairs]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    fd.use_cpu_devices()
    results = {}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for panel, (name, (model, data, batch)) in zip(panels, experiments().items(), strict=True):
        local = fd.LocalTraining(lr=1e-3, batch_size=batch, optimizer=optax.scale_by_adam())
        sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=10)
        state, history = sim.run(sim.init(jax.random.key(0)), args.rounds, eval_every=5, progress=False)
        tested = [record for record in history if "loss" in record]
        panel.plot([r["round"] for r in history], [r["train_loss"] for r in history], label="training loss")
        panel.plot([r["round"] for r in tested], [r["loss"] for r in tested], "o", label="test loss")
        panel.set(title=name, xlabel="round", ylabel="loss (nats)")
        results[name] = {
            "parameters": fd.models.num_parameters(model),
            "train_loss": [round(record["train_loss"], 4) for record in history],
            "test": {"round": history[-1]["round"], "loss": history[-1]["loss"], "accuracy": history[-1]["accuracy"]},
            "seconds_per_round": float(np.median([record["seconds"] for record in history])),
            "share_of_matrix_product": share(sim, state, batch),
        }
        print(name, json.dumps(results[name]), flush=True)
    bound = float(fd.datasets.dialogue_entropy(100).mean())
    panels[1].axhline(bound, color="grey", linestyle="--", label="entropy rate")
    for panel in panels:
        panel.set_ylim(bottom=0)
        panel.legend()
    args.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output / "transformers.png", dpi=150)
    (args.output / "transformers.json").write_text(json.dumps(results | {"entropy rate": bound}, indent=1) + "\n")


if __name__ == "__main__":
    main()
