"""PFLlib (github.com/TsingZ0/PFLlib), a library of personalized federated learning.

Its servers and clients run unchanged. Their cohorts and their data loaders are ours. Their own data loader drops the
last batch of an epoch if it is short; ours does not.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import CLASSES, EQUAL, Federation, Row, compared, difference, main, vector, written
from torch import nn

import fedjax_drift as fd


class Named(nn.Module):
    """The network of the federation, with a classifier that is called "bn"."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.base, self.bn = network.base, network.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.base(x))


def theirs(federation: Federation, file: str, method: str, **changes: Any) -> tuple[list[np.ndarray], Any]:
    """The global model after every round of one of their methods, and their server after the last one."""
    if Path(sys.path[0]).name != "system":
        sys.path.insert(0, str(Path(sys.path[0]) / "system"))
    base = importlib.import_module("flcore.clients.clientbase")
    servers = importlib.import_module("flcore.servers.serverbase")
    N, rounds, t = len(federation.sizes), len(federation.cohorts), [0]

    def loader(i: int, *_: Any, **__: Any) -> Any:
        x, y = federation.clients[i]
        everything = [(torch.from_numpy(x), torch.from_numpy(y))]  # only to evaluate or to count labels
        return federation.loader(t[0], i) if i in federation.cohorts[t[0]] else everything

    base.read_client_data = lambda _, i, **__: i
    servers.read_client_data = lambda _, i, **__: federation.clients[i][1]
    base.DataLoader = loader
    arguments = {
        **{"model": federation.network(), "algorithm": method, "dataset": "", "device": "cpu", "save_folder_name": ""},
        **{"num_classes": CLASSES, "batch_size": federation.batch_size, "local_learning_rate": federation.lr},
        **{"local_epochs": federation.epochs, "plocal_epochs": federation.epochs, "few_shot": 0, "num_clients": N},
        **{"global_rounds": rounds - 1, "join_ratio": len(federation.cohorts[0]) / N, "random_join_ratio": False},
        **{"learning_rate_decay": False, "learning_rate_decay_gamma": 0.99, "time_select": False, "goal": "test"},
        **{"time_threthold": 10000, "top_cnt": 100, "auto_break": False, "eval_gap": 1, "client_drop_rate": 0.0},
        **{"train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100, "num_new_clients": 0},
        **{"batch_num_per_client": 2, "fine_tuning_epoch_new": 0, "fine_tuning_epochs": 0, "server_learning_rate": 1.0},
        # Their defaults differ; these are those of the rows below.
        **{"mu": 0.1, "tau": 0.5, "alpha": 0.1, "beta": 0.9, "lamda": 2.0, "K": 3, "p_learning_rate": 0.1},
    } | changes
    models: list[np.ndarray] = []

    class Server(getattr(importlib.import_module(f"flcore.servers.server{file}"), method)):
        def select_clients(self) -> list[Any]:
            t[0] = len(models)
            models.append(vector(self.global_model))
            self.current_num_join_clients = self.num_join_clients
            return [self.clients[i] for i in federation.cohorts[t[0]]]

        def evaluate(self, *_: Any, **__: Any) -> None:
            self.rs_test_acc.append(0.0)

        def save_results(self) -> None: ...

        def save_global_model(self) -> None: ...

    with contextlib.redirect_stdout(io.StringIO()):
        made = Server(SimpleNamespace(**arguments), 0)
        if method == "Ditto":
            made.evaluate_personalized = made.evaluate
        made.train()
    return [*models[1:], vector(made.global_model)], made


def rows() -> Iterator[Row]:
    ragged, equal, decayed = Federation(), Federation(sizes=EQUAL), Federation(weight_decay=0.001)
    uniform, examples = {"weighting": "uniform"}, {"weighting": "examples"}

    def row(file: str, method: str, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        federation, options = more.pop("federation", ragged), more.pop("options", {})
        lines = tuple(f"system/flcore/{line}" for line in (f"clients/client{file}.py#def train", *lines))
        return compared(federation, name, arguments, theirs(federation, file, method, **options)[0], lines, **more)

    def own(file: str, method: str, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        """The same for the clients' own models. ``of`` is the attribute of their clients that has them."""
        federation, options, of = more.pop("federation", ragged), more.pop("options", {}), more.pop("of", "model")
        made = theirs(federation, file, method, **options)[1]
        made.send_models()
        models = [vector(getattr(client, of)) for client in made.clients]

        def to(arguments: dict) -> float:
            return difference(federation.personal(getattr(fd.algorithms, name)(**arguments)), models)

        default = more.pop("default", None)
        default = None if default is None else to(default)
        setting = "; ".join(filter(None, ["the clients' own models", more.pop("setting", "")]))
        lines = tuple(f"system/flcore/{line}" for line in (f"clients/client{file}.py#def train", *lines))
        return Row(written(name, arguments), to(arguments), lines, setting, default, **more)

    yield row("avg", "FedAvg", "fedavg", {})
    yield row("prox", "FedProx", "fedprox", {"mu": 0.1})
    yield row("scaffold", "SCAFFOLD", "scaffold", {})
    cause = "The previous model of a new client is the initial global model."
    moon = {"mu": 0.1, "first": "initial"}
    yield row("moon", "MOON", "moon", moon, default={"mu": 0.1}, cause=cause)
    cause = (
        "Their proximal term is alpha/2 times the norm, and the paper's alpha/2 times the squared norm. With the "
        "square the two agree to 3e-16."
    )
    yield row("dyn", "FedDyn", "feddyn", {"alpha": 0.1}, "clients/clientdyn.py#torch.norm(v1", cause=cause)
    ntd = {"beta": 0.9, "temperature": 0.5}
    yield row("ntd", "FedNTD", "fedntd", ntd | uniform, "servers/serverntd.py#def add_parameters", default=ntd)
    cause = (
        "Their label counts are those of all clients together, and the paper's those of the client. With the latter "
        "the two agree to 3e-16."
    )
    setting = "clients of equal size: the calibration has the shape of a full batch"
    line = "servers/serverlc.py#sample_per_class[y] +="
    yield row("lc", "FedLC", "fedlc", {"tau": 0.5}, line, federation=equal, setting=setting, cause=cause)

    yield row("ditto", "Ditto", "ditto", {"lam": 0.1})
    yield own("ditto", "Ditto", "ditto", {"lam": 0.1}, "clients/clientditto.py#def ptrain", of="model_per")
    pfedme = {"lam": 2.0, "inner_steps": 3, "beta": 0.9} | examples
    setting = "weight decay 0.001, which is mu in their optimizer"
    more = {"federation": decayed, "setting": f"{setting}; evaluation only before round 0"}
    line = "optimizers/fedoptimizer.py#class pFedMeOptimizer"
    default = pfedme | uniform
    yield row("pFedMe", "pFedMe", "pfedme", pfedme, line, options={"eval_gap": 100}, default=default, **more)
    cause = (
        "The evaluation before a round copies the personal model of each client into the model that it then trains. "
        "For a new client that is the initial model, so its inner steps do not start at the global model. If all "
        "clients take part in every round, the two agree to 2e-16."
    )
    more = {"federation": decayed, "setting": f"{setting}; evaluation before every round, their default"}
    line = "clients/clientpFedMe.py#self.update_parameters(self.model, self.personalized_params)"
    yield row("pFedMe", "pFedMe", "pfedme", pfedme, line, cause=cause, **more)
    cause = (
        "Their personal model is not a copy: it is the list of the parameters that the next global model is written "
        "to. So it is the global model. With a copy the two agree to 3e-16."
    )
    more = {
        "federation": decayed,
        "setting": f"{setting}; evaluation only before round 0",
        "options": {"eval_gap": 100},
    }
    line = "optimizers/fedoptimizer.py#return group['params']"
    yield own("pFedMe", "pFedMe", "pfedme", pfedme, line, of="personalized_params", cause=cause, **more)
    apfl = {"alpha": 0.5, "adaptive": True, "alpha_decay": 0.02}
    options = {"alpha": 0.5}
    yield row("apfl", "APFL", "apfl", apfl | examples, options=options, default=apfl)
    cause = (
        "Their v_i takes plain SGD steps on its own loss, and after a round alpha v_i + (1 - alpha) theta_i replaces "
        "it. In the paper, the loss is that of the mixed model, and v_i stays. With a fixed alpha and without the "
        "replacement, their v_i is our apfl(alpha=1), to 2e-16."
    )
    lines = "clients/clientapfl.py#output_per = self.model_per(x)", "clients/clientapfl.py#lp.data ="
    yield own("apfl", "APFL", "apfl", apfl | examples, *lines, of="model_per", options=options, cause=cause)

    yield own("per", "FedPer", "fedper", {})
    half = {"local_epochs": 1, "plocal_epochs": 1}
    setting = "one epoch of the classifier, one of the other layers"
    yield own("rep", "FedRep", "fedrep", examples, options=half, setting=setting, default={})
    yield own("babu", "FedBABU", "fedbabu", examples, setting="before fine-tuning", default={})
    yield own("lg", "LG_FedAvg", "lg_fedavg", examples, default={})
    setting = "the classifier is called bn"
    named = {"options": {"model": Named(ragged.network())}, "setting": setting}
    bn = {"personal": "classifier"} | examples
    yield own("bn", "FedBN", "fedbn", bn, "clients/clientbn.py#if 'bn' not in nn", **named)


if __name__ == "__main__":
    main(rows)
