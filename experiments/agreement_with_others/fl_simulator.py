"""FL-Simulator (github.com/woodenchild95/FL-Simulator), by the authors of FedSpeed and FedSMOO.

Its servers and clients run unchanged. Their cohorts and the order of their examples are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import EQUAL, Federation, Row, compared, main, vector, without


def theirs(federation: Federation, method: str, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of one of their methods."""
    without("torchvision", "torchvision.transforms", "torchvision.models")
    import client.client

    return trained(federation, method, client.client, **changes)


def trained(federation: Federation, method: str, loading: Any, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of a server of the checkout. ``loading`` is the module that loads examples."""
    import server

    N, rounds = len(federation.sizes), len(federation.cohorts)
    arguments = {
        **{"total_client": N, "comm_rounds": rounds, "local_epochs": federation.epochs},
        **{"batchsize": federation.batch_size, "local_learning_rate": federation.lr, "lr_decay": federation.lr_decay},
        **{"weight_decay": federation.weight_decay, "dataset": "CIFAR10", "use_RI": False, "method": method, "seed": 0},
        **{"global_learning_rate": 1.0, "alpha": 0.1, "beta1": 0.9, "beta2": 0.99, "lamb": 0.1, "rho": 0.1},
        **{"epsilon": 0.01, "beta": 0.1},
    } | changes
    order = ((t, i) for t, cohort in enumerate(federation.cohorts) for i in sorted(cohort))
    loading.data = SimpleNamespace(DataLoader=lambda *_, **__: federation.loader(*next(order)))
    loading.Dataset = lambda *_, **__: None
    models: list[np.ndarray] = []

    class Server(getattr(server, method)):
        def _activate_clients_(self, t: int) -> np.ndarray:
            return np.sort(np.array(federation.cohorts[t]))

        def _test_(self, t: int, selected_clients: Any) -> None:
            models.append(self.server_model_params_list.numpy().copy())

        def _save_results_(self) -> None: ...

        def _summary_(self) -> None: ...

    data = SimpleNamespace(client_x=[x for x, _ in federation.clients], client_y=[y for _, y in federation.clients])
    start = federation.network()
    options = {"model_func": federation.network, "init_model": start, "init_par_list": torch.tensor(vector(start))}
    made = Server(torch.device("cpu"), **options, datasets=data, method=method, args=SimpleNamespace(**arguments))
    made.train()
    return models


def rows() -> Iterator[Row]:
    ragged, decayed = Federation(), Federation(lr_decay=0.9, weight_decay=0.01)
    equal = Federation(sizes=EQUAL, lr_decay=0.9, weight_decay=0.01)
    same = "clients of equal size: their code takes the steps of client 0 for all"
    norm = "Their code adds 1e-7 to the norm of the gradient."
    uniform = {"weighting": "uniform"}

    def row(federation: Federation, method: str, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        update = (f"server/{method}.py#def global_update", f"client/{method.lower()}.py#class", *lines)
        return compared(federation, name, arguments, theirs(federation, method), update, **more)

    yield row(ragged, "FedAvg", "fedavg", uniform, default={})
    yield row(decayed, "FedProx", "fedprox", {"mu": 0.1} | uniform)
    adam = {"server_lr": 1.0, "b2": 0.99}
    published = adam | {"tau": 0.01, "v_0": 0.0} | uniform
    cause = "Their v starts at 0 and epsilon is 0.01; the paper's v starts at tau^2."
    start = "server/FedAdam.py#self.v = torch.zeros"
    yield row(decayed, "FedAdam", "fedadam", published, start, default=adam | uniform, cause=cause)
    steps = "server/SCAFFOLD.py#self.local_iteration ="
    yield row(equal, "SCAFFOLD", "scaffold", {}, steps, setting=same)
    yield row(decayed, "FedDyn", "feddyn", {"alpha": 0.1})
    yield row(equal, "FedCM", "fedcm", {"alpha": 0.1}, "server/FedCM.py#self.local_iteration =", setting=same)
    esam = "optimizer/ESAM.py#1e-7"
    yield row(decayed, "FedSAM", "fedsam", {"rho": 0.1}, esam, cause=norm)
    yield row(equal, "MoFedSAM", "mofedsam", {"rho": 0.1, "alpha": 0.1}, esam, setting=same, cause=norm)
    steps = "server/FedGamma.py#self.local_iteration ="
    yield row(equal, "FedGamma", "fedgamma", {"rho": 0.1}, steps, esam, setting=same, cause=norm)
    yield row(decayed, "FedSpeed", "fedspeed", {"rho": 0.1, "lam": 0.1}, esam, cause=norm)
    smoo = {"rho": 0.1, "alpha": 0.1}
    cause = f"The server's perturbation comes from mu_i alone, without s_i. {norm}"
    lines = "server/FedSMOO.py#1e-7", "optimizer/DRegSAM.py#1e-7"
    yield row(decayed, "FedSMOO", "fedsmoo", smoo | {"upload": "mu"}, *lines, default=smoo, cause=cause)


if __name__ == "__main__":
    main(rows)
