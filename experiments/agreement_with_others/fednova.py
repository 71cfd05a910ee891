"""FedNova (github.com/JYWa/FedNova), by the authors of FedNova.

Their training loop and optimizers run unchanged, one thread for each of their processes. All clients take part in every
round. The sums over processes, the data and the constant learning rate are ours.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import EQUAL, FULL, Federation, Row, compared, main, vector, without


class Processes:
    """Threads that add their tensors, in the place of `torch.distributed`."""

    ReduceOp = SimpleNamespace(SUM=None)

    def __init__(self, size: int) -> None:
        self.meeting, self.sent = threading.Barrier(size), {}

    def barrier(self) -> None:
        self.meeting.wait()

    def all_reduce(self, tensor: torch.Tensor, op: None = None) -> None:
        self.sent[int(threading.current_thread().name)] = tensor.clone()
        self.barrier()
        tensor.copy_(sum(self.sent[rank] for rank in sorted(self.sent)))
        self.barrier()


def theirs(federation: Federation, optimizer: str, mu: float = 0.0, gmf: float = 0.0) -> list[np.ndarray]:
    """The global model after every round with one of their optimizers. gmf is the momentum of the server."""
    without("torchvision", "torchvision.models", "mpi4py", "models")
    import train_LocalSGD as script
    import util_v4 as util

    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, **_: self
    size, models = len(federation.sizes), []
    processes = Processes(size)
    for module in ("train_LocalSGD", "distoptim.FedNova", "distoptim.FedProx"):
        sys.modules[module].dist = processes
    # Their own calls set_ on p.data, which doesn't change p in PyTorch 2.
    sys.modules["distoptim.FedProx"].communicate = lambda tensors, reduce: [reduce(tensor) for tensor in tensors]

    class Passes:
        """Their loader: a pass over the client's examples for every epoch of every round."""

        def __init__(self, i: int) -> None:
            self.epochs = ((t, i, e) for t in range(len(federation.cohorts)) for e in range(federation.epochs))
            self.batches = len(federation.epoch(0, i, 0))

        def __len__(self) -> int:
            return self.batches

        def __iter__(self) -> Any:
            return iter(federation.epoch(*next(self.epochs)))

    def record(model: torch.nn.Module, _: Any) -> float:
        if threading.current_thread().name == "0":
            models.append(vector(model))
        return 0.0

    ratios = np.array(federation.sizes) / sum(federation.sizes)
    util.partition_dataset = lambda rank, size, args: (Passes(rank), None, ratios)
    util.select_model = lambda classes, args: federation.network()
    util.comp_accuracy = lambda output, target: torch.zeros(1)
    script.evaluate, script.update_learning_rate = record, lambda *_: None
    options = {
        "rounds": len(federation.cohorts),
        "localE": federation.epochs,
        "pattern": "constant",
        "savepath": "./",
        "name": "",
    }
    options |= {"optimizer": optimizer, "mu": mu, "gmf": gmf, "lr": federation.lr, "momentum": federation.momentum}
    vars(script.args).update(options, size=size)
    threads = [threading.Thread(target=script.run, args=(rank, size), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return models


def rows() -> Iterator[Row]:
    plain = Federation(cohorts=FULL, weight_decay=1e-4)
    momentum = Federation(cohorts=FULL, weight_decay=1e-4, momentum=0.5)
    equal = Federation(cohorts=FULL, weight_decay=1e-4, sizes=EQUAL)
    nova = "distoptim/FedNova.py#def average", "distoptim/FedNova.py#compute local normalizing vector"
    momenta = "distoptim/FedNova.py#def average", "distoptim/FedNova.py#if self.gmf != 0"
    prox = "distoptim/FedProx.py#def average", "distoptim/FedProx.py#apply proximal update"

    def row(federation: Federation, optimizer: str, name: str, arguments: dict, **more: Any) -> Row:
        server = {"gmf": arguments["beta"]} if "beta" in arguments else {}
        lines = momenta if server else nova if optimizer == "fednova" else prox
        local = {"mu": arguments["mu"]} if "mu" in arguments else {}
        return compared(federation, name, arguments, theirs(federation, optimizer, **local, **server), lines, **more)

    yield row(plain, "fednova", "fednova", {})
    yield row(momentum, "fednova", "fednova", {}, setting="local momentum")
    yield row(plain, "fednova", "fednova", {"mu": 0.1})
    yield row(plain, "fedavg", "fedavg", {})
    yield row(plain, "fedprox", "fedprox", {"mu": 0.1})
    yield row(momentum, "fedprox", "fedprox", {"mu": 0.1}, setting="local momentum")
    yield row(equal, "fednova", "slowmo", {"beta": 0.5}, setting="FedNova with gmf=0.5; clients of equal size")


if __name__ == "__main__":
    main(rows)
