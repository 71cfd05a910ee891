"""FedACG (github.com/geehokim/FedACG), by the authors of FedACG.

Its trainer, clients and servers run unchanged, with queues in one process. They clip at norm 10. The data, the cohorts
and the order of the examples are ours.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo  # before `without`, because it looks for tabulate
from federation import CLASSES, Federation, Network, Row, compared, difference, main, vector, without, written

import fedjax_drift as fd


class TheirNetwork(Network):
    num_layers = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.features(x)
        return {"logit": self.head(z), "feature": z}


class Options(dict):
    """Nested options, with attributes as in OmegaConf."""

    def __getattr__(self, name: str) -> Any:
        value = self[name]
        return Options(value) if isinstance(value, dict) else value


class Images(list):
    classes = list(range(CLASSES))


def theirs(federation: Federation, client: dict, server: dict, global_lr: float = 1.0) -> list[np.ndarray]:
    """The global model after every round. ``client`` and ``server`` are those of their configuration files."""
    without("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.models", "torchvision.utils")
    without("wandb", "omegaconf", "tabulate", "torchmetrics", "datasets.tiny_imagenet", "torchinfo")
    import clients.base_client
    import servers.base
    import trainers.base_trainer as trainers

    examples = Images(example for i in range(len(federation.sizes)) for example in federation.loader(0, i).dataset)
    ends = np.cumsum(federation.sizes)
    split = {i: range(end - n, end) for i, (n, end) in enumerate(zip(federation.sizes, ends, strict=True))}
    cohorts = iter(federation.cohorts)
    turn = ((t, i) for t, cohort in enumerate(federation.cohorts) for i in cohort)

    def loader(dataset: Any, **_: Any) -> Any:
        made = federation.loader(*next(turn))
        made.dataset = dataset
        return made

    clients.base_client.DataLoader = loader
    trainers.mp = SimpleNamespace(Manager=lambda: SimpleNamespace(Queue=queue.Queue), Queue=queue.Queue)
    trainers.get_dataset = lambda *_, **__: split
    models: list[np.ndarray] = []

    class Trainer(trainers.Trainer):
        def wandb_log(self, *_: Any, **__: Any) -> None:
            models.append(vector(self.model))

        def save_model(self, *_: Any, **__: Any) -> None: ...

    local = {"local_lr": federation.lr, "local_lr_decay": federation.lr_decay, "local_epochs": federation.epochs}
    rounds = {"num_clients": len(federation.sizes), "participation_rate": 0.5, "global_rounds": len(federation.cohorts)}
    args = {
        **{"client": client, "server": server, "trainer": local | rounds | {"global_lr": global_lr}},
        **{"optimizer": {"momentum": federation.momentum, "wd": federation.weight_decay}, "use_amp": False},
        **{"dataset": {"name": "ours", "num_instances": 0}, "split": {"mode": "iid"}, "evaler": {"batch_size": 1}},
        **{"eval": {"freq": 0}, "save_freq": 0, "checkpoint_path": ".", "exp_name": "ours", "multiprocessing": False},
        **{"batch_size": federation.batch_size, "num_workers": 0, "pin_memory": False},
    }
    args = Options(args)
    network = TheirNetwork()
    network.load_state_dict(federation.network().state_dict())
    made = getattr(servers.base, server["type"])(args)
    choice, np.random.choice = np.random.choice, lambda *_, **__: np.array(next(cohorts))
    try:
        parts = {"client_type": clients.base_client.Client, "server": made, "evaler_type": lambda **_: None}
        Trainer(
            network, **parts, datasets={"train": examples, "test": [0]}, device=torch.device("cpu"), args=args
        ).train()
    finally:
        np.random.choice = choice
    return models


def rows() -> Iterator[Row]:
    plain = Federation(clip_norm=10.0, weight_decay=1e-3)
    decayed = replace(plain, lr_decay=0.9)
    base, uniform = {"ce_loss": {"weight": 1}}, {"weighting": "uniform"}
    average = {"type": "Server", "momentum": -1}
    mean = "servers/base.py#def aggregate"

    def row(client: dict, server: dict, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        return compared(plain, name, arguments, theirs(plain, base | client, server), lines, **more)

    prox = {"prox_loss": {"weight": 0.05}}
    half = "Their penalty has no factor 1/2, so a weight of 0.05 is 0.1 here."
    momentum = {"type": "ServerM", "momentum": 0.85}
    ahead = (
        "servers/base.py#def FedACG_lookahead",
        "servers/base.py#def aggregate#2",
        "clients/base_client.py#prox_loss +=",
    )
    yield row(prox, momentum | {"FedACG": True}, "fedacg", {"beta": 0.1, "lam": 0.85}, *ahead, cause=half)
    yield row({}, average, "fedavg", uniform, mean, default={})
    found = difference(decayed.run(fd.algorithms.fedavg(**uniform)), theirs(decayed, base, average))
    line = "clients/base_client.py#self.scheduler = "
    once = replace(decayed, epochs=1)
    apart = difference(once.run(fd.algorithms.fedavg(**uniform)), theirs(once, base, average))
    cause = (
        "Their learning rate decays from round to round, and with the same factor from epoch to epoch in a round. With "
        f"E = 1 the two agree to {apart:.0e}."
    )
    yield Row(written("fedavg", uniform), found, (line,), "lr_decay=0.9", cause=cause)
    lines = "clients/base_client.py#prox_loss +=", mean
    yield row(prox, average, "fedprox", {"mu": 0.1} | uniform, *lines, default={"mu": 0.1}, cause=half)
    lines = ("servers/base.py#if not self.args.server.get('FedACG')",)
    beta = {"beta": 0.4}
    yield row({}, {"type": "ServerM", "momentum": 0.4}, "fedavgm", beta | uniform, *lines, default=beta)
    adam = {"server_lr": 0.1, "b1": 0.9, "b2": 0.99, "tau": 0.01}
    server = {"type": "ServerAdam", "momentum": 0.9, "beta": 0.99, "tau": 0.01}
    arguments, lines = adam | uniform, ("servers/base.py#class ServerAdam",)
    yield compared(plain, "fedadam", arguments, theirs(plain, base, server, global_lr=0.1), lines, default=adam)
    dyn = {"prox_loss": {"weight": 0}, "Dyn": {"weight": 1, "alpha": 0.1}}
    lines = 'clients/base_client.py#losses["Dyn"]', "servers/base.py#class ServerDyn"
    yield row(dyn, {"type": "ServerDyn", "momentum": -1}, "feddyn", {"alpha": 0.1}, *lines)
    lc = {"ce_loss": {"weight": 0}, "LC": {"weight": 1, "tau": 1}}
    yield row(lc, average, "fedlc", {"tau": 1.0} | uniform, "utils/loss.py#def FedLC", default={"tau": 1.0})

    # b KL + (1 - b) CE is (1 - b) (CE + b / (1 - b) KL)
    b, T = 0.3, 2.0
    arguments = {"beta": round(b / (1 - b) / T**2, 4), "temperature": T} | uniform
    ntd = {"NTD": {"weight": b, "Temp": T}}
    local = {"lr": (1 - b) * plain.lr, "weight_decay": plain.weight_decay / (1 - b), "clip_norm": 10 / (1 - b)}
    ours = fd.algorithms.fedntd(**arguments | {"beta": b / (1 - b) / T**2})
    found = difference(plain.run(ours, local=local), theirs(plain, base | ntd, average))
    lines = (
        'clients/base_client.py#losses["NTD"]',
        "utils/loss.py#def KD",
        "clients/base_client.py#1-self.args.client.NTD",
    )
    cause = (
        "They minimise 0.7 CE + 0.3 KL, without T^2. So our beta is 0.3 / 0.7 / T^2, our lr is 0.7 times theirs, and "
        "our weight decay and clipping norm are theirs divided by 0.7."
    )
    yield Row(written("fedntd", arguments), found, lines, "T=2", cause=cause)


if __name__ == "__main__":
    main(rows)
