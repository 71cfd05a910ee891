"""NIID-Bench (github.com/Xtra-Computing/NIID-Bench), by the authors of MOON.

Their experiments.py runs unchanged. Its networks, its data, its cohorts and the order of its examples are ours.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from federation import FULL, Federation, Network, Row, compared, main, vector, without


class WithFeatures(Network):
    """The network of the federation, with the three outputs that their MOON uses."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = self.features(x)
        return z, z, self.head(z)


def theirs(federation: Federation, method: str, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of one of their methods."""
    without("torchvision", "torchvision.transforms", "torchvision.datasets", "torchvision.datasets.vision")
    without("torchvision.datasets.utils", "torchvision.datasets.mnist", "torchvision.utils", "torchvision.models")
    N, rounds = len(federation.sizes), len(federation.cohorts)
    arguments = {
        **{"alg": method, "model": "mlp", "dataset": "covtype", "device": "cpu", "optimizer": "sgd", "n_parties": N},
        **{"batch-size": federation.batch_size, "epochs": federation.epochs, "lr": federation.lr},
        **{"comm_round": rounds, "sample": len(federation.cohorts[0]) / N, "reg": federation.weight_decay},
        **{"rho": federation.momentum, "logdir": "logs/", "modeldir": "models/"},
    } | changes
    models: list[np.ndarray] = []
    everything = range(1)  # stands for the data of all clients
    made = 0

    def network(*_: Any) -> Network:
        """The initial model for their clients and their global model, a random one for the rest."""
        nonlocal made
        made += 1
        if made > N + 1:
            return Network()
        network = WithFeatures() if method == "moon" else Network()
        network.load_state_dict(federation.network().state_dict())
        return network

    def shuffle(clients: np.ndarray) -> None:
        cohort = federation.cohorts[len(models)]
        clients[:] = [*cohort, *(i for i in range(N) if i not in cohort)]

    def get_dataloader(*arguments: Any) -> tuple[Any, Any, Any, Any]:
        ids = arguments[4] if len(arguments) > 4 else None
        return (
            (everything if ids is None else federation.loader(len(models), ids[0])),
            everything,
            everything,
            everything,
        )

    def compute_accuracy(model: Any, loader: Any, get_confusion_matrix: bool = False, **_: Any) -> Any:
        if loader is everything and not get_confusion_matrix:  # only for the global model, after a round
            models.append(vector(model))
        return (0.0, None) if get_confusion_matrix else 0.0

    def partition_data(*_: Any, **__: Any) -> tuple[Any, ...]:
        clients = {i: [i] * n for i, n in enumerate(federation.sizes)}
        return None, np.zeros(1), None, None, clients, clients

    for name in ("model", "utils"):
        module = importlib.import_module(name)
        module.FcNet = module.ModelFedCon_noheader = network
    for function in (get_dataloader, compute_accuracy, partition_data):
        setattr(module, function.__name__, function)
    argv = ["experiments.py", *(f"--{key}={value}" for key, value in arguments.items())]
    with patch("numpy.random.shuffle", shuffle), patch.object(sys, "argv", argv):
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(Path(module.__file__).parent / "experiments.py"), run_name="__main__")
    return models


def rows() -> Iterator[Row]:
    decayed, full = Federation(weight_decay=0.01), Federation(cohorts=FULL)
    momentum = Federation(momentum=0.9, lr=0.05)
    moon = Federation(sizes=(10, 24, 7, 6, 16, 14), momentum=0.9, lr=0.05)

    def row(federation: Federation, method: str, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        lines = tuple(f"experiments.py#{line}" for line in (f"def train_net{more.pop('of', '_' + method)}(", *lines))
        given = theirs(federation, method, **more.pop("options", {}))
        return compared(federation, name, arguments, given, lines, **more)

    yield row(decayed, "fedavg", "fedavg", {}, of="")
    yield row(decayed, "fedprox", "fedprox", {"mu": 0.1}, options={"mu": 0.1})

    by_size = {"weighting": "examples"}
    cause = "The weights n_i are those of FedAvg; the paper has 1."
    yield row(full, "scaffold", "scaffold", by_size, setting="all clients in every round", default={}, cause=cause)
    cause = (
        "c and c_i start with the parameters of a random network, and the paper's with 0. A client that has not taken "
        "part before then corrects with c - c_i, in which this network stays. With zeros the two agree to 7e-16."
    )
    yield row(decayed, "scaffold", "scaffold", by_size, "c_globals, _, _ = init_nets", cause=cause)

    yield row(decayed, "fednova", "fednova", {})
    yield row(momentum, "fednova", "fednova", {}, setting="local momentum 0.9")
    setting = "local momentum 0.9, which their code fixes; no batch of one example, which it skips"
    arguments, lines = {"mu": 0.1, "first": "initial"}, ("momentum=0.9", "if target.shape[0] == 1")
    cause = "From round 1 on, the previous model of a new client is the initial global model."
    more = {"setting": setting, "default": {"mu": 0.1}, "cause": cause, "options": {"mu": 0.1}}
    yield row(moon, "moon", "moon", arguments, *lines, "old_nets = copy.deepcopy(nets)", **more)


if __name__ == "__main__":
    main(rows)
