"""MIFA (github.com/hmgxr128/MIFA_code), by the authors of MIFA.

Its trainer that does not wait for the first participation of all clients runs unchanged. Its learning rate is
eta_0 / (t + 1). The data, the cohorts and the order of the examples are ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from federation import Federation, Row, difference, main

import fedjax_drift as fd


def theirs(federation: Federation) -> list[np.ndarray]:
    """The global model after every round."""
    module: Any = importlib.import_module("src.trainers.fdu_no_wait")
    module.choose_model = lambda options: federation.network()
    models: list[np.ndarray] = []
    N = len(federation.sizes)

    class Trainer(module.FDU_nowait_Trainer):
        def get_avail_clients(self, seed: int = 1) -> list[Any]:
            chosen = [self.clients[i] for i in federation.cohorts[seed]]
            for client in chosen:
                client.train_dataloader = federation.loader(seed, client.cid)
            return chosen

        def evaluate_train(self) -> tuple[float, float]:
            models.append(self.latest_model.numpy().copy())
            return 0.0, 0.0

        evaluate_test = lambda self: (0.0, 0.0)  # noqa: E731

    options = {
        "lr": federation.lr, "wd": federation.weight_decay, "batch_size": federation.batch_size, "gpu": False,
        "num_round": len(federation.cohorts), "clients_per_round": 0, "noprint": True, "local_step": federation.epochs,
    }  # fmt: skip
    examples = {i: list(zip(*federation.clients[i], strict=True)) for i in range(N)}
    Trainer(options, (range(N), [], examples, examples, dict.fromkeys(range(N), 1.0))).train()
    return models


def rows() -> Iterator[Row]:
    federation = Federation(weight_decay=1e-3)
    local = {"lr": lambda t: federation.lr / (t + 1)}
    apart = difference(federation.run(fd.algorithms.mifa(), local=local), theirs(federation))
    lines = "self.update_table[c.cid] =", "self.latest_model = self.latest_model"
    places = tuple(f"src/trainers/fdu_no_wait.py#{line}" for line in lines)
    yield Row("mifa()", apart, places, setting="the learning rate eta_0 / (t + 1)")


if __name__ == "__main__":
    main(rows)
