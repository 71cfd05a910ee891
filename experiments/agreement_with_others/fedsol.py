"""FedSOL (github.com/Lee-Gihun/FedSOL), by the authors of FedSOL, with copies of other algorithms.

Its servers and clients run unchanged. The data, the cohorts and the order of the examples are ours. `torch.float` is
float64, because their weights n_i / sum n are float32. The perturbation of a part of the network, and the algorithms
that FedNTD's code has, too, are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from federation import CLASSES, Federation, Row, compared, difference, main, vector, without

import fedjax_drift as fd

Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Options(dict):
    """Options, with attributes."""

    __getattr__ = dict.__getitem__


class Pairs(list):
    """The batches of a round, two for every step. Its length is the number of steps."""

    def __len__(self) -> int:
        return super().__len__() // 2


def pairs(federation: Federation, t: int, i: int) -> Pairs:
    """Those of Per-FedAvg: the batch at theta, and the batch after the step."""
    epochs = range(federation.epochs)
    steps = [pair for e in epochs for pair in zip(*(federation.epoch(t, i, e, j) for j in (1, 0)), strict=True)]
    return Pairs(batch for pair in steps for batch in pair)


def none_in_the_first_step(optimizer: Any) -> Callable[[Any], torch.Tensor]:
    """Their norm of the gradient, but infinite if it is 0 up to rounding errors."""
    norm = optimizer._grad_norm

    def changed(self: Any) -> torch.Tensor:
        value = norm(self)
        return value if value > 1e-12 else torch.tensor(torch.inf)

    return changed


def theirs(
    federation: Federation, name: str, loader: Callable[..., Any] = Federation.loader, **arguments: Any
) -> list[np.ndarray]:
    """The global model after every round of one of their algorithms."""
    without("wandb", "torchvision")
    import algorithms

    models: list[np.ndarray] = []
    clients: dict[int, Any] = {}

    class Server(getattr(algorithms, name).Server):
        def _client_sampling(self, round_idx: int) -> np.ndarray:
            clients.update({i: {"train": loader(federation, round_idx, i)} for i in federation.cohorts[round_idx]})
            return np.array(federation.cohorts[round_idx])

        def _aggregation(self, *results: Any) -> dict[str, torch.Tensor]:
            averaged = super()._aggregation(*results)
            models.append(vector(list(averaged.values())))
            return averaged

    test = federation.epoch(0, federation.cohorts[0][0], 0)
    data = {"local": clients, "local_sizes": federation.sizes, "global": {"test": test}, "num_classes": CLASSES}
    data["partition_map"] = dict.fromkeys(range(len(federation.sizes)))
    network = federation.network()
    local = {"lr": federation.lr, "momentum": federation.momentum, "weight_decay": federation.weight_decay}
    optimizer = torch.optim.SGD(network.parameters(), **local)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, gamma=federation.lr_decay, step_size=1)
    rounds = {"n_rounds": len(federation.cohorts), "sample_ratio": 0.5, "local_epochs": federation.epochs}
    options = Options(arguments)
    with patch.object(torch, "float", torch.float64):
        Server(options, network, data, optimizer, scheduler, **rounds, device="cpu").run()
    return models


def rows() -> Iterator[Row]:
    fed = Federation(lr=0.05, lr_decay=0.9, momentum=0.9, weight_decay=1e-3)
    whole = {"perturb_head": True, "perturb_body": True}
    cause = "Their code adds 1e-12 to the norm of the gradient."
    lines = "ClientTrainer.py#self.KLDiv(", "ClientTrainer.py#self.sam_optimizer.first_step"

    def row(kind: str, arguments: dict[str, Any], *more: str, **options: Any) -> Row:
        places = tuple(f"algorithms/fedsol_{kind}/{line}" for line in lines) + more
        models = theirs(fed, f"fedsol_{kind}", rho=arguments["rho"], **whole)
        return compared(fed, "fedsol", arguments, models, places, setting="local momentum 0.9", **options)

    yield row("adaptive", {"rho": 1.0}, "algorithms/fedsol_adaptive/ClientTrainer.py#e_w = F.normalize", cause=cause)

    fixed = {"rho": 1.0, "adaptive": False}
    with patch("algorithms.optimizer.SAM._grad_norm", none_in_the_first_step(sys.modules["algorithms.optimizer"].SAM)):
        apart = difference(fed.run(fd.algorithms.fedsol(**fixed)), theirs(fed, "fedsol_fixed", rho=1.0, **whole))
    first = (
        " In the first step of a round, r is 0 up to rounding errors, which their code scales to a length of up to rho "
        f"||r|| / 1e-12. With e = 0 there, as ours, the two agree to {apart:.0e}."
    )
    yield row("fixed", fixed, "algorithms/optimizer.py#e_w = (", cause=cause + first)

    steps = Federation(lr_decay=1.0, shuffles=2)
    arguments = {"alpha": 0.05, "variant": "first_order", "weighting": "examples"}
    models = theirs(replace(steps, lr=0.05), "perfedavg", pairs, beta=steps.lr)
    lines = "algorithms/perfedavg/ClientTrainer.py#num_iter =", "algorithms/perfedavg/ClientTrainer.py#self.beta#2"
    setting = "as many steps as ours; their lr is our alpha, and their beta our lr"
    default = {"alpha": 0.05, "variant": "first_order"}
    yield compared(steps, "perfedavg", arguments, models, lines, default=default, setting=setting)


if __name__ == "__main__":
    main(rows)
