"""simple-FL (github.com/tao-shen/simple-FL), by the authors of FedEve.

Its methods run unchanged. The data, the cohorts and the order of the examples are ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import Federation, Network, Row, compared, difference, main, vector, without

import fedjax_drift as fd


def theirs(
    federation: Federation, name: str, initial: dict[str, Any] | None = None, **changes: Any
) -> list[np.ndarray]:
    """The global model after every round of one of their methods. ``initial`` are arguments of its `server_init`."""
    os.environ["TQDM_DISABLE"] = "1"
    without("torchvision", "torchvision.models", "torchvision.models.mobilenet", "torchvision.datasets", "jsonargparse")
    without("h5py", "requests", "pymysql", "mamba_ssm", "dgl", "PIL")
    from simplefl import methods
    from simplefl.models.model_fn import Model_fn

    class TheirNetwork(Network, Model_fn):
        def __init__(self) -> None:
            Network.__init__(self)
            Model_fn.__init__(self, SimpleNamespace(device="cpu"), loss_fn=torch.nn.CrossEntropyLoss())
            self.load_state_dict(federation.network().state_dict())

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.head(self.features(batch["x"]))

    class Batches:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.loader = federation.loader(*next(turn))
            self.dataset = self.loader.dataset

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return iter([{"x": x, "label": y} for x, y in self.loader])

    turn = ((t, i) for t, cohort in enumerate(federation.cohorts) for i in cohort)
    method = methods.methods[name]
    for base in method.__mro__[:-2]:
        module = __import__(base.__module__, fromlist=["DataLoader"])
        module.DataLoader, module.Dataset = Batches, lambda data, _: data
    arguments = {
        **{"communication_rounds": len(federation.cohorts), "client_fraction": 0.5, "clients_per_round": None},
        **{"local_epochs": federation.epochs, "local_batch_size": federation.batch_size, "local_optimizer": "sgd"},
        **{"lr_l": federation.lr, "weight_decay": federation.weight_decay, "lr_g": 1.0, "avg": "w", "device": "cpu"},
        **{"FL_validate_clients": False, "validate_client_ratio": 0, "recorder": {}},
    } | changes
    clients = [SimpleNamespace(train_data=federation.loader(0, i).dataset) for i in range(len(federation.sizes))]
    made = method(SimpleNamespace(init_model=TheirNetwork), clients, SimpleNamespace(**arguments))
    made.server_init(**initial or {})
    made.clients_init()
    models = []
    for cohort in federation.cohorts:
        made.candidates = np.array(cohort)
        made.clients_update()
        made.server_update()
        models.append(vector(made.server.model))
    return models


def rows() -> Iterator[Row]:
    fed = Federation(weight_decay=1e-3)
    uniform = {"weighting": "uniform"}
    path = "simplefl/methods/"

    def row(method: str, arguments: dict, lines: tuple, changes: dict, name: str | None = None, **more: Any) -> Row:
        lines = tuple(path + line for line in lines)
        return compared(fed, name or method, arguments, theirs(fed, method, **changes), lines, **more)

    code = {"period_variance": "code", "centre": "uniform"}
    cause = "Their sQ2 does not subtract M, and their sR2 is around the unweighted mean."
    yield row(
        "fedeve", code, ("fedeve.py#def server_update", "fedeve.py#q = torch.mean((p2)"), {}, default={}, cause=cause
    )
    yield row("fedavg", {}, ("fedavg.py#def averaging",), {})
    yield row("fedavg", uniform, ("fedavg.py#def averaging",), {"avg": "u"}, setting="avg='u'")
    yield row("fedprox", {"mu": 0.1}, ("fedprox.py#prox_loss +=",), {"mu": 0.1})
    beta = {"beta": 0.9}
    lines = ("fedavgm.py#self.m[key] =",)
    yield row("fedavgm", beta | {"damped": True}, lines, {"beta1": 0.9}, default=beta)
    adam = {"server_lr": 0.1, "b1": 0.9, "b2": 0.99, "tau": 0.01}
    changes = {"lr_g": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
    cause = "Their v starts at 0; the paper's v starts at tau^2."
    yield row(
        "fedopt", adam | {"v_0": 0.0}, ("fedopt.py#if opt == 'FedAdam'",), changes, "fedadam", default=adam, cause=cause
    )

    fraction = {"server_lr": 1 / fed.epochs}
    apart = difference(fed.run(fd.algorithms.fedavg(**fraction)), theirs(fed, "fednova"))
    cause = (
        "They divide D_i by the number of epochs instead of steps, and do not multiply the mean by a number of steps. "
        f"This is fedavg(server_lr=1 / E), which agrees to {apart:.0e}."
    )
    yield row("fednova", {}, ("fednova.py#normalized_delta = delta / epochs",), {}, cause=cause)
    cause = (
        "`diff_model` works in place, so a client stores c - c_i instead of c_i. The new c is the mean of the cohort's "
        "c_i, not c plus |S| / N times their mean change. If B divides n_i, K_i is one too large per epoch. Without "
        "these three the two agree to 7e-16."
    )
    lines = "scaffold.py#delta_c = self.diff_model", "scaffold.py#c[key] =", "scaffold.py#k = self.E*"
    yield row("scaffold", {"weighting": "examples"}, lines, {}, cause=cause)
    cause = (
        "They add <theta, grad L_i>, which the paper subtracts, and update grad L_i after every epoch, not after every "
        "round. The update of h lacks the factor |S| / N. Without these three the two agree to 8e-16."
    )
    lines = (
        "feddyn.py#total_loss = loss +",
        "feddyn.py#self.update_local_gradient_approximation(",
        "feddyn.py#self.h[k] = v",
    )
    yield row("feddyn", {"alpha": 0.1}, lines, {"initial": {"alpha": 0.1}}, cause=cause)
    cause = (
        "Their perturbation has the direction of the gradient of the step before, and the first step has none. With "
        "the gradient at theta the two agree to 7e-14."
    )
    lines = ("fedsam.py#self.first_step(zero_grad=True)",)
    yield row("fedsam", {"rho": 0.1}, lines, {"sam_rho": 0.1, "beta1": 0.0}, setting="beta1=0", cause=cause)
    cause = (
        "Their term is -cos / T between the logits of theta and those of the global model after the client's last "
        "round. There is no term with w, and no logarithm. `train_num` is not set, so avg='w' has no effect."
    )
    lines = "moon.py#contrastive_loss = -cosine_sim.mean()", "moon.py#self.old_global_models[k] ="
    options = {"moon_mu": 1.0, "moon_temperature": 0.5}
    yield row("moon", uniform, lines, options, cause=cause)
    cause = (
        "Their ghat_i starts at 0 in every round and is updated after every epoch, and their server takes the mean of "
        "theta_i instead of theta_i - lambda ghat_i. Without these three the two agree to 4e-16."
    )
    lines = "fedspeed.py#client.grad_prox = ", "fedspeed.py#client.grad_prox[n] = ", "fedavg.py#w = self.averaging"
    arguments = {"rho": 0.001, "lam": 0.01, "alpha": 0.9, "normalise": False, "aggregation": "cohort"}
    yield row("fedspeed", arguments, lines, {}, cause=cause)


if __name__ == "__main__":
    main(rows)
