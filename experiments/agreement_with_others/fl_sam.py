"""FL-SAM (github.com/harrylee999/FL-SAM), by the authors of FedGMT.

Its FedGMT runs unchanged, without the random crops of images. The data, the cohorts and the order of the examples are
ours. Its other algorithms are left out: they come from PFLlib's and FL-Simulator's code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from federation import Federation, Row, compared, main, vector, without


def theirs(federation: Federation, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of FedGMT."""
    without("torchvision", "torchvision.transforms", "ujson", "calmsize")
    sys.path.insert(0, f"{sys.path[0]}/system")
    from flcore.clients import clientbase
    from flcore.servers import serverbase, servergmt

    models: list[np.ndarray] = []
    turn = ((t, i) for t, cohort in enumerate(federation.cohorts) for i in cohort)
    clientbase.read_client_data = serverbase.read_data = lambda *_, **__: [0]
    clientbase.DataLoader = lambda *_, **__: federation.loader(*next(turn))
    serverbase.read_client_json = lambda _, i: (federation.sizes[i],)

    class Server(servergmt.FedGMT):
        def select_clients(self) -> list[Any]:
            return [self.clients[i] for i in federation.cohorts[len(models)]]

        def evaluate(self) -> None:
            models.append(vector(self.global_model))
            self.test_acc.append(0.0)

    arguments = {
        **{"device": "cpu", "dataset": "agnews", "num_classes": 4, "global_rounds": len(federation.cohorts)},
        **{"local_epochs": federation.epochs, "batch_size": federation.batch_size, "momentum": federation.momentum},
        **{"local_learning_rate": federation.lr, "lr_decay": federation.lr_decay, "model": federation.network()},
        **{"num_clients": len(federation.sizes), "join_ratio": 0.5, "algorithm": "FedGMT", "save_gap": 99, "rho": 0.0},
    }
    Server(SimpleNamespace(**arguments | changes)).train()
    return models


def rows() -> Iterator[Row]:
    fed = Federation(lr_decay=0.9, weight_decay=1e-5, lr=0.1, momentum=0.5)
    arguments = {"gamma": 1.0, "temperature": 3.0, "alpha": 0.5, "beta": 10.0}
    lines = "clients/clientgmt.py#self.KLDiv(pred_probs", "clients/clientgmt.py#loss -= torch.dot"
    lines = (*lines, "servers/servergmt.py#global_para += (", "servers/servergmt.py#EMA_para = EMA_para*alpha")
    models = theirs(fed, gama=1.0, tau=3.0, alpha=0.5, beta=10.0)
    places = tuple(f"system/flcore/{line}" for line in lines)
    weighted = arguments | {"weighting": "examples"}
    yield compared(fed, "fedgmt", weighted, models, places, default=arguments, setting="local momentum 0.5")


if __name__ == "__main__":
    main(rows)
