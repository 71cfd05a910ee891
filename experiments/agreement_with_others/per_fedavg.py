"""Per-FedAvg (github.com/KarhouTam/Per-FedAvg), by the author of FL-bench.

Its client runs unchanged. The data, the cohorts, the order of the examples and the number of steps are ours, and so is
the server: their mean of the models is in FedLab, another package. The evaluation of personal models is left out. It
takes its steps on batches, and ours one step on all examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from federation import Federation, Row, compared, main, vector, without


def theirs(federation: Federation, alpha: float, hessian_free: bool) -> list[np.ndarray]:
    """The global model after every round."""
    without("fedlab", "fedlab.utils", "fedlab.utils.serialization", "data", "data.utils")
    import perfedavg

    perfedavg.get_dataloader = lambda *_: ([], [])
    perfedavg.SerializationTool.serialize_model = vector
    network, models = federation.network(), []
    kinds = (1, 0, 2)[: 3 if hessian_free else 2]
    options = {"alpha": alpha, "beta": federation.lr, "criterion": torch.nn.CrossEntropyLoss(), "gpu": 0}
    options |= {"batch_size": federation.batch_size, "dataset": "", "valset_ratio": 0.0, "logger": MagicMock()}
    for t, cohort in enumerate(federation.cohorts):
        local = []
        for i in cohort:
            steps = len(federation.batches(t, i))
            client = perfedavg.PerFedAvgClient(i, global_model=network, local_epochs=steps, **options)
            client.iter_trainloader = batches(federation, t, i, kinds)
            local.append(client.train(network, hessian_free))
        models.append(np.mean(local, 0))
        torch.nn.utils.vector_to_parameters(torch.tensor(models[-1]), network.parameters())
    return models


def batches(federation: Federation, t: int, i: int, kinds: tuple[int, ...]) -> Iterator[Any]:
    """For every step of a client in a round, one batch of each of these shuffles."""
    for e in range(federation.epochs):
        for step in zip(*(federation.epoch(t, i, e, j) for j in kinds), strict=True):
            yield from step


def rows() -> Iterator[Row]:
    fed = Federation(shuffles=3)
    setting = "as many steps as ours; the mean of the models, which they take from FedLab, is ours"
    step = "perfedavg.py#grads_1st = self.compute_grad", "perfedavg.py#delta = 1e-3"
    yield compared(fed, "perfedavg", {"alpha": 0.05}, theirs(fed, 0.05, True), step, setting=setting)
    first = {"alpha": 0.05, "variant": "first_order"}
    step = "perfedavg.py#param.data.sub_(self.beta * grad)"
    yield compared(fed, "perfedavg", first, theirs(fed, 0.05, False), step, setting=setting)


if __name__ == "__main__":
    main(rows)
