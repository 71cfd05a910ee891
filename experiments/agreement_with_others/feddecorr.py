"""FedDecorr (github.com/bytedance/FedDecorr), by the authors of FedDecorr.

Its FedAvg with the loss of FedDecorr runs unchanged. The data, the cohorts and the order of the examples are ours. Its
other algorithms are not compared here: they come from MOON's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from federation import Federation, Network, Row, compared, main, vector


class TheirNetwork(Network):
    def forward(self, x: torch.Tensor, return_features: bool = False) -> Any:
        z = self.features(x)
        return (self.head(z), z) if return_features else self.head(z)


def theirs(federation: Federation, beta: float) -> list[np.ndarray]:
    """The global model after every round."""
    from approach import fedavg

    models: list[np.ndarray] = []

    def network() -> TheirNetwork:
        made = TheirNetwork()
        made.load_state_dict(federation.network().state_dict())
        return made

    class Approach(fedavg.FedAvg):
        def local_training(self, comm_round: int) -> Any:
            self.party2loaders = {i: federation.loader(comm_round, i) for i in range(len(federation.sizes))}
            return super().local_training(comm_round)

        def global_aggregation(self, nets_this_round: Any) -> None:
            super().global_aggregation(nets_this_round)
            models.append(vector(self.global_net))

    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self: self
    fedavg.compute_accuracy = lambda *_: (0.0, 0.0)
    args = SimpleNamespace(
        **{"n_comm_round": len(federation.cohorts), "print_interval": 99, "save_interval": 99, "lr": federation.lr},
        **{"rho": federation.momentum, "weight_decay": federation.weight_decay, "epochs": federation.epochs},
    )
    own = SimpleNamespace(feddecorr=True, feddecorr_coef=beta)
    networks = {i: network() for i in range(len(federation.sizes))}
    data: dict[str, Any] = {"party2loaders": {}, "global_train_dl": [], "test_dl": []}
    Approach(args, own, MagicMock(), federation.cohorts, networks, network(), **data).run_fed()
    return models


def rows() -> Iterator[Row]:
    fed = Federation(momentum=0.9, lr=0.05, weight_decay=1e-3)
    lines = "loss.py#def forward", "approach/fedavg.py#loss_feddecorr = "
    yield compared(fed, "feddecorr", {"beta": 0.1}, theirs(fed, 0.1), lines, setting="local momentum 0.9")


if __name__ == "__main__":
    main(rows)
