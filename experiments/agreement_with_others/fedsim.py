"""fedsim (github.com/varnio/fedsim), by the authors of AdaBest, with copies of other algorithms.

Its AdaBest runs unchanged. The data, the cohorts and the order of the examples are ours: their clients draw examples
with replacement. Its other algorithms are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import EQUAL, Federation, Network, Row, compared, main, without


def theirs(federation: Federation, **arguments: Any) -> list[np.ndarray]:
    """The global model after every round of AdaBest."""
    without("torchvision", "torchvision.datasets", "torchvision.transforms")
    from fedsim import scores
    from fedsim.distributed.centralized.training import adabest, fedavg

    models: list[np.ndarray] = []

    class TheirNetwork(Network):
        def __init__(self) -> None:
            super().__init__()
            self.load_state_dict(federation.network().state_dict())

    class AdaBest(adabest.AdaBest):
        def _sample_clients(self) -> list[int]:
            return list(federation.cohorts[len(models)])

        def _at_round_end(self, score_aggregator: Any) -> None:
            super()._at_round_end(score_aggregator)
            models.append(self.get_server_storage().read("cloud_params").detach().numpy().copy())

    fedavg.RandomSampler = lambda *_, **__: None
    fedavg.DataLoader = lambda examples, **_: federation.loader(len(models), examples[0])
    N = len(federation.sizes)
    data = SimpleNamespace(
        get_global_dataset=dict, get_oracle_dataset=dict, get_local_splits_names=lambda: ["train"],
        get_local_dataset=lambda i: {"train": [i] * federation.sizes[i]},
    )  # fmt: skip
    sgd = partial(torch.optim.SGD, lr=federation.lr, momentum=federation.momentum, weight_decay=federation.weight_decay)
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=federation.lr_decay)
    rounds = {"sample_scheme": "uniform", "sample_rate": len(federation.cohorts[0]) / N, "model_def": TheirNetwork}
    local = {"epochs": federation.epochs, "batch_size": federation.batch_size, "local_optimizer_def": sgd}
    local |= {"criterion_def": scores.CrossEntropyScore, "r2r_local_lr_scheduler_def": decay}
    AdaBest(data, None, N, **rounds, **local, **arguments).train(len(federation.cohorts) - 1)
    return models


def rows() -> Iterator[Row]:
    fed = Federation(sizes=EQUAL, lr=0.1, lr_decay=0.9, momentum=0.5, weight_decay=1e-3)
    path = "fedsim/distributed/centralized/training/adabest.py"
    lines = tuple(f"{path}#{line}" for line in ("mu_adaptive =", "new_h = 1 /", "h = beta *"))
    arguments = {"mu": 0.02, "beta": 0.85}
    setting = (
        "local momentum 0.5; a mu of 0.02 is 0.03 there: their code multiplies mu by E and divides it by n_i / B, the "
        "number of batches of an epoch for clients of this size"
    )
    yield compared(fed, "adabest", arguments, theirs(fed, mu=0.03, beta=0.85), lines, setting=setting)


if __name__ == "__main__":
    main(rows)
