"""GHBM (github.com/RickZack/GHBM), by the authors of GHBM, with copies of other algorithms.

Its clients, servers and training steps run unchanged, without clipping, as in its configuration. The data, the cohorts
and the order of the examples are ours. FedCM, whose server fails, and the algorithms of other pages are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from federation import CLASSES, EQUAL, Federation, Row, compared, difference, main, vector, without
from fedsol import Options
from torch import nn

import fedjax_drift as fd


class Examples(list):
    def batchwise_transform(self, batch: Any) -> Any:
        return batch


def theirs(
    federation: Federation, client: str, server: str, sent: dict[str, Any], kept: dict[str, Any], momentum: float = 0.0
) -> list[np.ndarray]:
    """The global model after every round. ``sent`` are the arguments of their clients, ``kept`` those of the server."""
    without("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.datasets")
    without("torchvision.datasets.utils", "omegaconf", "wandb", "tensorboardX")
    from src import algo
    from src.algo import center_server, fed_clients
    from src.algo.fed_clients.types import IterationNum, IterationType
    from src.models import Model

    class TheirModel(Model):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self._model, self._model_info, self._num_classes = federation.network(), None, CLASSES

    def sgd(lr: float) -> Options:
        return Options(classname="FedSGD", args=Options(lr=lr, momentum=momentum))

    def loader(t: int, i: int) -> Any:
        made = federation.loader(t, i)
        made.dataset = Examples(made.dataset)
        made.e = -1 if mime else 0  # one pass more, for the full gradient
        return made

    mime, constant = client == "MimeClient", Options(classname="NopScheduler", args={})
    options = {"lr_scheduler": constant, "analyzer": lambda *_, **__: None}
    local = {"device": "cpu", "temp_store_device": "cpu", "clipping_norm": 0, "optim": sgd(federation.lr)}
    clients = [
        getattr(fed_clients, client)(i, loader(0, 0), CLASSES, **options, **local, **sent)
        for i in range(len(federation.sizes))
    ]
    made = getattr(center_server, server)(TheirModel(), None, "cpu", optim=sgd(1.0), **options, **kept)

    class Training(algo.Mime if mime else algo.FedAvg):
        def __init__(self) -> None:
            self._clients, self._center_server, self._device = clients, made, ["cpu"]
            self._loss_fn, self._aggregation_policy = nn.CrossEntropyLoss(), "uniform"
            self._local_iterations = IterationNum(IterationType.epoch, federation.epochs)
            self._FedAvg__dropping = self._Mime__dropping = None
            self._Mime__mime_lite = sent.get("mime_lite")

        def _select_clients(self, *_: Any) -> None:
            self._selected_clients = [clients[i] for i in federation.cohorts[self._iteration - 1]]

    training, models = Training(), []
    for t, cohort in enumerate(federation.cohorts):
        for i in cohort:
            clients[i]._Client__dataloader = loader(t, i)
        training._iteration = t + 1
        training.train_step()
        training._aggregate()
        training._cleanup_clients()
        models.append(vector(made.model))
    return models


def adabest(federation: Federation) -> Row:
    """The row of AdaBest, and what they agree to if a client remembers the round of its last participation."""
    arguments, parts = {"mu": 0.1, "beta": 0.85}, ("AdaBestClient", "AdaBestCenterServer", {"mu": 0.1}, {"beta": 0.85})
    models = theirs(federation, *parts)
    kind = sys.modules["src.algo.fed_clients"].AdaBestClient
    update = kind._post_client_update

    def remembered(self: Any, model: Any, state: Any) -> None:
        update(self, model, state)
        self._state.last_round = state.s_round

    with patch.object(kind, "_post_client_update", remembered):
        apart = difference(federation.run(fd.algorithms.adabest(**arguments)), theirs(federation, *parts))
    cause = (
        "Their last_round stays 0, so they divide h_i by the number of the round and not by the number of rounds since "
        f"the last participation. With the latter, as in the paper, the two agree to {apart:.0e}."
    )
    lines = "fed_clients/adabest_client.py#c_state.last_round =", "center_server/adabest_center_server.py#h = [self"
    places = tuple(f"src/algo/{line}" for line in lines)
    return compared(federation, "adabest", arguments, models, places, cause=cause)


def rows() -> Iterator[Row]:
    fed, equal = Federation(), Federation(sizes=EQUAL)
    uniform, average = {"weighting": "uniform"}, ("FedAvgCenterServer", {})

    def row(
        name: str, arguments: dict[str, Any], client: str, server: tuple, sent: dict[str, Any], *lines: str, **more: Any
    ) -> Row:
        places = tuple(f"src/algo/{line}" for line in lines)
        models = theirs(fed, client, server[0], sent, server[1])
        return compared(fed, name, arguments | uniform, models, places, default=arguments, **more)

    client, past = "fed_clients/ghbm_client.py", "center_server/ghbm_center_server.py#momentum = [(old"
    for more in ({}, {"nesterov": True}):
        sent = {"beta": 0.9, "nesterov": False} | more
        line = f"{client}#p.add_(c, alpha={'-' if more else ''}factor)"
        arguments = {"tau": 3, "beta": 0.9} | more
        yield row("ghbm", arguments, "GHBMClient", ("GHBMCenterServer", {"tau": 3}), sent, line, past)
    setting = "C = 0.5, which is 1 / tau"
    sent = {"beta": 0.9, "nesterov": False, "C": 0.5}
    lines = f"{client}#(a-c)", f"{client}#c_state.anchor_model = list"
    yield row("localghbm", {"tau": 2.0, "beta": 0.9}, "LocalGHBMClient", average, sent, *lines, setting=setting)
    lines = f"{client}#(a-c)#2", f"{client}#c_state.anchor_model = list#2"
    yield row("fedhbm", {"tau": 2.0, "beta": 0.9}, "FedHBMClient", average, sent, *lines, setting=setting)

    yield adabest(fed)
    lines = "fed_clients/mime_client.py#p.grad.add_(c - ci)", "center_server/mime_center_server.py#self._opt.step"
    places = tuple(f"src/algo/{line}" for line in lines)
    setting = "clients of equal size: their full gradient is the mean of those of the batches"
    for name, lite in (("mime", False), ("mimelite", True)):
        models = theirs(equal, "MimeClient", "MimeCenterServer", {"mime_lite": lite}, {}, momentum=0.9)
        yield compared(equal, name, {"beta": 0.9}, models, places[lite:], setting=setting)


if __name__ == "__main__":
    main(rows)
