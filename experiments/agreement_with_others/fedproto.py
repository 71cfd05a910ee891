"""FedProto (github.com/yuetan031/FedProto), by the authors of FedProto.

Its function for clients with different classes runs unchanged. The data, the network and the order of the examples are
ours. Its prototypes are means over the last local epoch, while the model changes. In the first row, a client computes
them with the trained model instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import CLASSES, FULL, HIDDEN, Federation, Network, Row, difference, main, vector, without, written

import fedjax_drift as fd

LAM = 0.7


class WithFeatures(Network):
    """Returns what their networks return: log-probabilities and features."""

    def forward(self, x: torch.Tensor) -> Any:
        z = self.base(x)
        return torch.log_softmax(self.head(z), 1), z


def theirs(federation: Federation, trained: bool) -> list[np.ndarray]:
    """Every client's model after the last round. trained: whether prototypes are those of the trained models."""
    without("tensorboardX", "torchvision", "sampling", "femnist", "resnet", "models")
    module: Any = importlib.import_module("exps.federated_main")
    original: Any = importlib.import_module("update").LocalUpdate
    models: list[np.ndarray] = []
    now = {"round": 0}

    class Update(original):
        def train_val_test(self, dataset: Any, idxs: range) -> Any:
            return federation.loader(now["round"], len(idxs))

        def update_weights_het(self, args: Any, idx: int, protos: Any, model: Any, global_round: int) -> Any:
            weights, loss, accuracy, found = super().update_weights_het(args, idx, protos, model, global_round)
            x, y = map(torch.from_numpy, federation.clients[idx])
            z = model(x)[1].detach()
            return weights, loss, accuracy, {j: list(z[y == j]) for j in found} if trained else found

    def rounds(count: int) -> Iterator[int]:
        for now["round"] in range(count):
            yield now["round"]

    def evaluated(args: Any, networks: list[Network], *_: Any) -> tuple[list, list, list]:
        models.extend(map(vector, networks))
        return [0.0], [0.0], [0.0]

    network = federation.network()
    network.__class__ = WithFeatures
    N = len(federation.sizes)
    module.LocalUpdate, module.tqdm, module.test_inference_new_het_lt = Update, lambda rounds: rounds, evaluated
    module.range = rounds
    args = SimpleNamespace(
        dataset="ours", ways=0, shots=0, stdev=0, num_users=N, rounds=len(federation.cohorts), optimizer="sgd",
        lr=federation.lr, train_ep=federation.epochs, local_bs=federation.batch_size, ld=LAM, device="cpu", verbose=0,
        num_classes=CLASSES,
    )  # fmt: skip
    module.FedProto_taskheter(args, [], [], [range(i) for i in range(N)], [], [network] * N, [])
    return models


def rows() -> Iterator[Row]:
    federation = Federation(cohorts=FULL, momentum=0.5)
    arguments = {"classes": CLASSES, "features": HIDDEN, "lam": LAM, "weighting": "uniform"}
    ours = federation.personal(fd.algorithms.fedproto(**arguments))
    lines = "lib/update.py#def update_weights_het", "lib/utils.py#def proto_aggregation"
    setting = "personal models; momentum 0.5"
    cause = (
        "Their prototypes are means over the last local epoch, in which the model changes. Ours use the trained model."
    )
    yield Row(
        written("fedproto", arguments), difference(ours, theirs(federation, True)), lines,
        f"{setting}; prototypes of the trained models",
    )  # fmt: skip
    last = "lib/update.py#agg_protos_label = {}"
    yield Row(
        written("fedproto", arguments),
        difference(ours, theirs(federation, False)),
        (*lines, last),
        setting,
        None,
        cause,
    )


if __name__ == "__main__":
    main(rows)
