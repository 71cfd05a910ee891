"""FedAU (github.com/IBM/fedau), by the authors of FedAU, with copies of FedVARP and MIFA.

Its main program runs unchanged. All clients do the same number of steps there, so they have equal sizes here. The data,
the network, the order of the examples and who takes part are ours. Clients are away for up to six rounds.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from federation import EQUAL, Federation, Row, compared, main, without

AWAY = ((0, 1, 3), (0, 2), (1, 3, 4), (5,), (1, 3), (4, 3), (1,), (2, 4), (3, 5, 1), (4, 0))
STEPS = 6  # of a client in a round


def theirs(federation: Federation, weighting: str, cutoff: int) -> list[np.ndarray]:
    """The global model after every round of their program."""
    models: list[np.ndarray] = []
    now, N = {"round": -1}, len(federation.sizes)

    class Loader:
        """The examples of a client. A pass begins when its first batch is read."""

        def __init__(self, i: int | list, **_: Any) -> None:
            self.i, self.passes = i, 0

        def __iter__(self) -> Iterator:
            self.passes += 1
            yield from federation.epoch(now["round"], self.i, (self.passes - 1) % federation.epochs)

    class Sampler:
        made = 0

        def __init__(self, *_: Any) -> None:
            self.i = Sampler.made
            Sampler.made += 1

        def sample(self) -> bool:
            now["round"] += self.i == 0
            return self.i in federation.cohorts[now["round"]]

    def evaluated(seed: int, num_iter: int, model: Any, train: Any, test: Any, w: Any) -> None:
        models.append(w.numpy().copy())

    def module(name: str, **attributes: Any) -> None:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)

    without("torchvision", "torchvision.transforms")
    for name in ("dataset", "util", "statistic"):
        module(name, __path__=[])
    module("dataset.dataset", load_data=lambda *_: ([], []))
    shared = {"data_participation_each_node": lambda *_: (range(N), [1.0] * N), "WorkerSampler": Sampler}
    module("util.util", DatasetSplit=lambda data, i: i, **shared)
    module("statistic.collect_stat", CollectStatistics=lambda **_: SimpleNamespace(collect_stat_eval=evaluated))
    module("model.cnn_mnist", ModelCNNMnist=federation.network)
    options = {
        "data": "fashion", "weighting": weighting, "k-adaptive": cutoff, "lr": federation.lr, "gpu": 0,
        "minibatch": federation.batch_size, "iters-per-round": STEPS, "iters-per-eval": STEPS, "total-workers": N,
        "iters-total": STEPS * len(federation.cohorts), "save-checkpoint": 0, "save-final-model": 0,
    }  # fmt: skip
    sys.modules.pop("config", None)
    arguments = [word for name, value in options.items() for word in (f"-{name}", str(value))]
    with patch.object(sys, "argv", ["main.py", *arguments]), patch("torch.utils.data.DataLoader", Loader):
        runpy.run_path(f"{sys.path[0]}/main.py", run_name="__main__")
    return models


def rows() -> Iterator[Row]:
    federation = Federation(sizes=EQUAL, cohorts=AWAY)
    assert STEPS == federation.epochs * EQUAL[0] // federation.batch_size
    steps = "equal sizes: all clients do the same number of steps there"
    lines = "main.py#agg_weight = np.mean", "main.py#w_accumulate += w_tmp"
    for cutoff in (3, 50):
        made = theirs(federation, "adaptive", cutoff)
        yield compared(federation, "fedau", {"cutoff": cutoff}, made, lines, setting=steps)
    lines = "main.py#w_tmp -= update_per_node", "main.py#w_tmp_a += update_all_avg"
    yield compared(federation, "fedvarp", {}, theirs(federation, "fedvarp", 50), lines, setting=steps)
    lines = "main.py#update_per_node[n] = w_tmp.to", "main.py#w_tmp_a = torch.mean(update_per_node"
    yield compared(federation, "mifa", {}, theirs(federation, "mifa", 50), lines, setting=steps)


if __name__ == "__main__":
    main(rows)
