"""FedBABU (github.com/jhoon-oh/FedBABU), by the authors of the algorithm.

Their main_fed.py and main_fedrep.py run unchanged. The model, the cohorts and the order of the examples are ours. Of
the 1000 rounds of a run, it stops after ours, before their learning rate decays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from federation import Federation, Network, Row, compared, difference, main, vector, without, written
from lg_fedavg import run_script

import fedjax_drift as fd


class Named(Network):
    """The same network with their name for the classifier, by which they know it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.base(x))


def theirs(federation: Federation, script: str, *options: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The model of client 0 after every round, and those of all clients after the last round."""
    without("torchvision", "models.test")
    N, E = len(federation.sizes), federation.epochs - (script == "main_fedrep.py")  # theirs adds an epoch for the body
    results: list[np.ndarray] = []

    def model(_: Any) -> Named:
        made = federation.network()
        made.__class__ = Named
        made.linear = made.head
        del made.head
        return made

    def evaluate(nets: list[Network], *_: Any, **__: Any) -> tuple[float, float]:
        results.append(np.array([vector(net) for net in nets]))
        return 0.0, 0.0

    sys.modules["models.test"].test_img_local_all = evaluate
    own = {"num_users": N, "epochs": 1000, "lr": federation.lr, "local_ep": E, "local_bs": federation.batch_size}
    own |= {"momentum": federation.momentum, "wd": federation.weight_decay, "gpu": -1}
    own |= {"frac": len(federation.cohorts[0]) / N, "results_save": "ours"}
    words = [script, *(f"--{name}={value}" for name, value in own.items()), *options]
    run_script(federation, words, model)
    return [models[0] for models in results], results[-1]


def rows() -> Iterator[Row]:
    federation = Federation(momentum=0.9, weight_decay=0.01)
    uniform = {"weighting": "uniform"}
    train, mean = "models/Update.py#def train", "main_fed.py#w_glob[k] = torch.div"

    def run(part: str, aggregated: str) -> list[np.ndarray]:
        return theirs(federation, "main_fed.py", f"--local_upt_part={part}", f"--aggr_part={aggregated}")[0]

    yield compared(federation, "fedbabu", {}, run("body", "body"), (train, mean))
    yield compared(federation, "fedavg", uniform, run("full", "full"), (train, mean), default={})
    cause = (
        "With local_upt_part full and aggr_part body, as for FedPer, a client trains a copy of its model, and the "
        "trained classifier is not stored. So a client starts every round with the initial one. With "
        "`net_local_list[idx] = net_local` after the training, the two agree to 5e-16."
    )
    copied = "main_fed.py#net_local = copy.deepcopy(net_local_list[idx])"
    yield compared(federation, "fedper", uniform, run("full", "body"), (train, copied), default={}, cause=cause)

    cause = (
        "Their optimizer has learning rate 0 for the other layers while the classifier trains, so their momentum "
        "starts with the gradients of these epochs. Ours starts at 0. With a new optimizer state the two agree to "
        "3e-16."
    )
    for momentum in (0.0, 0.9):
        fed = Federation(epochs=3, momentum=momentum, weight_decay=0.01)
        _, models = theirs(fed, "main_fedrep.py")
        lines = "models/Update.py#'lr': 0.0, 'name': \"body\"", "main_fedrep.py#w_glob = FedAvg(w_locals)"
        setting = f"personal models; momentum {momentum}"
        away = cause if momentum else ""
        ours = fed.personal(fd.algorithms.fedrep())
        yield Row(written("fedrep", {}), difference(ours, models), lines, setting, cause=away)


if __name__ == "__main__":
    main(rows)
