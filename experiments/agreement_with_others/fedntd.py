"""FedNTD (github.com/Lee-Gihun/FedNTD), by the authors of FedNTD.

Its servers and clients run unchanged. The data, the cohorts and the order of the examples are ours. `torch.float` is
float64, because their weights n_i / sum n are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import CLASSES, Federation, Network, Row, compared, main, vector, without


class TheirNetwork(Network):
    def forward(self, x: torch.Tensor, get_features: bool = False) -> Any:
        z = self.features(x)
        return (self.head(z), z) if get_features else self.head(z)


def theirs(federation: Federation, name: str, **arguments: Any) -> list[np.ndarray]:
    """The global model after every round of one of their algorithms."""
    without("wandb", "torchvision")
    import algorithms

    models: list[np.ndarray] = []
    clients = {
        i: {"datasize": n, "train": [None] * -(-n // federation.batch_size)} for i, n in enumerate(federation.sizes)
    }

    class Server(getattr(algorithms, name).Server):
        def _client_sampling(self, round_idx: int) -> np.ndarray:
            for i in federation.cohorts[round_idx]:
                clients[i]["train"] = federation.loader(round_idx, i)
            return np.array(federation.cohorts[round_idx])

        def _update_and_evaluate(self, *results: Any) -> None:
            super()._update_and_evaluate(*results)
            models.append(vector(self.model))

    test = federation.epoch(0, federation.cohorts[0][0], 0)
    data = {"local": clients, "global": {"test": test}, "num_classes": CLASSES, "data_map": np.ones((6, CLASSES))}
    network = TheirNetwork()
    network.load_state_dict(federation.network().state_dict())
    local = {"lr": federation.lr, "momentum": federation.momentum, "weight_decay": federation.weight_decay}
    optimizer = torch.optim.SGD(network.parameters(), **local)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, gamma=federation.lr_decay, step_size=1)
    rounds = {"n_rounds": len(federation.cohorts), "sample_ratio": 0.5, "local_epochs": federation.epochs}
    parts = {"algo_params": SimpleNamespace(**arguments), "model": network, "data_distributed": data}
    parts |= {"optimizer": optimizer, "scheduler": scheduler}
    single, torch.float = torch.float, torch.float64
    try:
        Server(**parts, **rounds, device="cpu").run()
    finally:
        torch.float = single
    return models


def rows() -> Iterator[Row]:
    momentum = Federation(lr=0.1, lr_decay=0.9, momentum=0.5, weight_decay=1e-3)
    plain = Federation(lr_decay=0.9, weight_decay=1e-3)
    examples = {"weighting": "examples"}
    mean = "algorithms/BaseServer.py#def _aggregation"

    def row(federation: Federation, name: str, arguments: dict, lines: Any, options: dict, **more: Any) -> Row:
        if federation is momentum:
            more = {"setting": "local momentum"} | more
        return compared(federation, name, arguments, theirs(federation, name, **options), lines, **more)

    lines = "algorithms/fedntd/criterion.py#def _ntd_loss"
    yield row(momentum, "fedntd", {"beta": 1.0, "temperature": 2.0}, lines, {"beta": 1.0, "tau": 2.0})
    yield row(momentum, "fedavg", {}, mean, {})
    yield row(
        momentum, "fedprox", {"mu": 0.1}, ("algorithms/fedprox/ClientTrainer.py#def _proximal_term", mean), {"mu": 0.1}
    )
    yield row(momentum, "fedavgm", {"beta": 0.7}, "algorithms/fedavgm/utils.py#def update_momentum", {"avgm_beta": 0.7})
    lines = "algorithms/scaffold/ClientTrainer.py#c_i_plus = ", "algorithms/scaffold/Server.py#self.c +="
    yield row(plain, "scaffold", examples, lines, {"adaptive_divison": True}, default={})
    lines = *lines, "algorithms/scaffold/ClientTrainer.py#new_K ="
    same = {"setting": "local momentum, adaptive_divison=False"}
    yield row(momentum, "scaffold", examples, lines, {"adaptive_divison": False}, default={}, **same)
    cause = (
        "They divide by FedNova's a_i, the sum of the coefficients of the gradients, and not by K_i. With a_i the two "
        "agree to 3e-16."
    )
    same = {"setting": "local momentum, adaptive_divison=True"}
    yield row(momentum, "scaffold", examples, lines, {"adaptive_divison": True}, cause=cause, **same)
    lines = "algorithms/fednova/Server.py#def _nova_aggregation", "algorithms/fednova/Server.py#a_i[i] ="
    yield row(plain, "fednova", {}, lines, {"nova_ccvr": False})
    yield row(momentum, "fednova", {}, lines, {"nova_ccvr": False})
    lines = "algorithms/feddyn/ClientTrainer.py#lin_penalty +=", "algorithms/feddyn/Server.py#self.h_t[k] -="
    alpha = {"alpha": 0.1}
    yield row(momentum, "feddyn", alpha | examples, lines, {"dyn_alpha": 0.1}, default=alpha)
    lines = "algorithms/moon/criterion.py#moon_logits =", "algorithms/moon/Server.py#def _init_prev_locals"
    arguments = {"mu": 1.0, "temperature": 0.5}
    options = {"mu": 1.0, "tau": 0.5}
    yield row(momentum, "moon", arguments | {"first": "initial"}, lines, options, default=arguments)


if __name__ == "__main__":
    main(rows)
