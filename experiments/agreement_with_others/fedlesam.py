"""FedLESAM (github.com/MediaBrain-SJTU/FedLESAM), by the authors of the algorithm.

Their servers and clients run unchanged. Their cohorts and the order of their examples are ours. The other methods of
their code are those of FL-Simulator, on which it builds.
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
    without("torchvision", "torchvision.transforms", "torchvision.models", "torchvision.datasets")
    without("server.FedSpeed", "server.FedGAMMA")  # which the repository does not have
    import server
    import server.server as base

    N, rounds = len(federation.sizes), len(federation.cohorts)
    arguments = {
        **{"total_client": N, "comm_rounds": rounds, "local_epochs": federation.epochs, "mode": "normal", "seed": 0},
        **{"batchsize": federation.batch_size, "local_learning_rate": federation.lr, "lr_decay": federation.lr_decay},
        **{"weight_decay": federation.weight_decay, "dataset": "CIFAR10", "use_RI": False, "method": method},
        **{"global_learning_rate": 1.0, "lamb": 0.1, "rho": 0.1, "beta": 0.1},
    } | changes
    order = ((t, i) for t, cohort in enumerate(federation.cohorts) for i in sorted(cohort))
    base.data = SimpleNamespace(DataLoader=lambda *_, **__: federation.loader(*next(order)))
    base.Dataset = lambda *_, **__: None
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
    ragged = Federation(lr_decay=0.9, weight_decay=0.01)
    equal = Federation(sizes=EQUAL, lr_decay=0.9, weight_decay=0.01)
    server = {"rho": 0.1, "old": "server"}
    cause = (
        "Their optimizer takes the entries 0, 1, ... of the flat vector of the global update for its tensors, so each "
        "tensor of the perturbation is a single number, and it divides by the sum of the norms, plus 1e-7. With the "
        "tensors and the norm of all of them together, the two agree to {}, and without the 1e-7 to rounding."
    )

    def row(
        federation: Federation, method: str, optimizer: str, arguments: dict[str, Any], agree: str, **more: Any
    ) -> Row:
        lines = f"optimizer/{optimizer}.py#g_update[idx].norm", f"optimizer/{optimizer}.py#e_w=-g_update[idx]"
        lines = (*lines, f"server/{method}.py#self.comm_vecs['global_update']=", *more.pop("lines", ()))
        models = theirs(federation, method, **more.pop("changes", {}))
        away = cause.format(agree) + more.pop("cause", "")
        return compared(federation, "fedlesam", arguments, models, lines, cause=away, **more)

    yield row(ragged, "FedLESAM", "LESAM", server, "4e-9", default={"rho": 0.1})
    arguments = server | {"correction": "feddyn", "feddyn_alpha": 0.1}
    yield row(ragged, "FedLESAM_D", "LESAM_D", arguments, "3e-9", default={"rho": 0.1, "correction": "feddyn"})
    same = "lamb = 1; clients of equal size: their code takes the steps of client 0 for all"
    factor = " Their lamb, whose default is 0.1, multiplies the control variates."
    more = {"changes": {"lamb": 1.0}, "setting": same, "cause": factor, "lines": ("client/fedlesam_s.py#*lamb",)}
    arguments = server | {"correction": "scaffold"}
    yield row(equal, "FedLESAM_S", "LESAM_S", arguments, "6e-9", default={"rho": 0.1, "correction": "scaffold"}, **more)


if __name__ == "__main__":
    main(rows)
