"""MOON (github.com/QinbinLi/MOON), by the authors of MOON.

Their script runs unchanged. The data, the cohorts and the order of the examples are ours. All networks start equal.
Their data loader drops the last batch of an epoch if it is short; here it is used.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from federation import Federation, Network, Row, compared, main, vector, without


class TheirNetwork(Network):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.features(x)
        return z, z, self.head(z)


def theirs(federation: Federation, algorithm: str, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of one of their algorithms."""
    without("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.datasets", "PIL", "resnetcifar")
    import model
    import utils

    models, everything = [], [None]
    split = {i: range(n) for i, n in enumerate(federation.sizes)}
    cohorts = iter(federation.cohorts)
    turn = ((t, i) for t, cohort in enumerate(federation.cohorts) for i in cohort)

    def network(*_: Any) -> TheirNetwork:
        made = TheirNetwork()
        made.load_state_dict(federation.network().state_dict())
        return made

    def loaders(*arguments: Any) -> tuple:
        train = federation.loader(*next(turn)) if len(arguments) == 5 else everything
        return train, [], everything, everything

    def accuracy(
        network: torch.nn.Module, loader: Any, get_confusion_matrix: bool = False, device: Any = None
    ) -> tuple:
        if loader is everything:
            models.append(vector(network))
        return (0.0, None, 0.0) if get_confusion_matrix else (0.0, 0.0)

    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self: self
    model.ModelFedCon = utils.ModelFedCon = network
    utils.get_dataloader, utils.compute_accuracy = loaders, accuracy
    utils.partition_data = lambda *_, **__: (None, np.zeros(1), None, None, split, None)
    options = {"alg": algorithm, "dataset": "cifar10", "batch-size": federation.batch_size, "lr": federation.lr}
    options |= {"epochs": federation.epochs, "n_parties": len(federation.sizes), "comm_round": len(federation.cohorts)}
    options |= {
        "reg": federation.weight_decay,
        "device": "cpu",
        "sample_fraction": 0.5,
        "logdir": "./",
        "modeldir": "./",
    }
    sys.argv[1:] = [word for name, value in (options | changes).items() for word in (f"--{name}", str(value))]
    sample, random.sample = random.sample, lambda *_: list(next(cohorts))
    try:
        runpy.run_path(str(Path(utils.__file__).parent / "main.py"), run_name="__main__")
    finally:
        random.sample = sample
    return models


def rows() -> Iterator[Row]:
    fed = Federation(lr=0.05, momentum=0.9, weight_decay=1e-3)
    local = "local momentum 0.9"

    def row(name: str, arguments: dict, lines: tuple, algorithm: str | None = None, **more: Any) -> Row:
        changes = more.pop("changes", {})
        return compared(fed, name, arguments, theirs(fed, algorithm or name, **changes), lines, setting=local, **more)

    lines = "main.py#loss2 = mu", "main.py#old_nets = copy.deepcopy(nets)"
    arguments = {"mu": 1.0, "temperature": 0.5}
    cause = "Before its first participation, the previous model of a client is its initial network."
    yield row("moon", arguments | {"first": "initial"}, lines, default=arguments, cause=cause)
    yield row("fedavg", {}, ("main.py#elif args.alg == 'fedavg':",))
    changes = {"server_momentum": 0.9}
    lines = ("main.py#moment_v[key] = args.server_momentum#2",)
    beta = {"beta": 0.9}
    yield row("fedavgm", beta | {"damped": True}, lines, "fedavg", default=beta, changes=changes)
    yield row("fedprox", {"mu": 0.1}, ("main.py#fed_prox_reg += ((mu",), changes={"mu": 0.1})


if __name__ == "__main__":
    main(rows)
