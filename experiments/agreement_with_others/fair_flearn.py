"""fair_flearn (github.com/litian96/fair_flearn), by the authors of q-FedAvg, with a copy of AFL.

Its servers and clients, which are in NumPy, run unchanged. Their models need TensorFlow 1: the model, its gradients and
its local steps are ours, in PyTorch. The data, the cohorts and the order of the examples are ours, too. q-FedSGD and
MAML are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from federation import CLASSES, FULL, Federation, Row, as_vector, compared, difference, main, without, written
from torch import nn

import fedjax_drift as fd

OURS = "the model and its steps are ours, because theirs need TensorFlow 1"


def theirs(federation: Federation, name: str, **changes: Any) -> list[list[np.ndarray]]:
    """The model after every round of one of their servers, and with AFL the average of all models."""
    without("tensorflow")
    module = importlib.import_module(f"flearn.trainers.{name}")
    rounds: list[list[np.ndarray]] = []

    class Learner:
        """Takes the place of their models. The inputs of a client are its number."""

        size = flops = 0

        def __init__(self, *_: Any) -> None:
            self.network = federation.network()

        def get_params(self) -> list[np.ndarray]:
            return [leaf.detach().numpy().copy() for leaf in self.network.parameters()]

        def set_params(self, params: list[np.ndarray]) -> None:
            for leaf, value in zip(self.network.parameters(), params, strict=True):
                leaf.data = torch.tensor(value)

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.network(x), y)

        def get_loss(self, data: dict[str, list[int]]) -> float:
            x, y = federation.clients[data["x"][0]]
            return self.loss(torch.from_numpy(x), torch.from_numpy(y)).item()

        def step(self, x: torch.Tensor, y: torch.Tensor) -> tuple[list[np.ndarray], float, list[np.ndarray]]:
            loss = self.loss(x, y)
            gradients = torch.autograd.grad(loss, list(self.network.parameters()))
            for leaf, gradient in zip(self.network.parameters(), gradients, strict=True):
                leaf.data -= federation.lr * gradient
            return [gradient.numpy() for gradient in gradients], loss.item(), self.get_params()

        def solve_sgd(self, batch: tuple[list[int], list[int]]) -> Any:
            (whole,) = federation.batches(len(rounds), batch[0][0])
            return self.step(*whole)

        def solve_inner(self, data: dict[str, list[int]], num_epochs: int, batch_size: int) -> Any:
            for batch in federation.batches(len(rounds), data["x"][0]):
                self.step(*batch)
            return self.get_params(), 0

        def test(self, data: Any) -> tuple[int, float]:
            return 0, 0.0

        def close(self) -> None: ...

    class Server(module.Server):
        def select_clients(self, **given: Any) -> tuple[Any, np.ndarray]:
            return None, np.array(self.clients)[list(federation.cohorts[given["round"]])]

    def counted(number: int, **_: Any) -> Iterator[int]:
        """Their loop over the rounds. It writes down the models after each."""
        for t in range(number):
            yield t
            models = [server.latest_model, *([server.resulting_model] if name == "afl" else [])]
            rounds.append([np.concatenate([leaf.ravel() for leaf in model]) for model in models])

    setattr(module, "trange" if name == "afl" else "range", counted)
    users = list(range(len(federation.sizes)))
    data = {i: {"x": [i] * n, "y": [0] * n} for i, n in enumerate(federation.sizes)}
    params = {"learning_rate": federation.lr, "num_epochs": federation.epochs, "batch_size": federation.batch_size}
    params |= {"num_rounds": len(federation.cohorts) - 1, "clients_per_round": 3, "eval_every": 99, "log_interval": 99}
    params |= {"q": 0.0, "seed": 0, "sampling": 1, "data_partition_seed": 0, "model_params": ()}
    server = Server(params | changes, Learner, (users, [], data, data))
    server.train()
    return rounds


def domains_of_clients(federation: Federation, arguments: dict[str, Any]) -> np.ndarray:
    """Our models [rounds, 2, P] if every client is a domain: w, and the average. The label also has the client."""
    model = federation.model
    model = model._replace(loss=lambda z, y: fd.Model(model.init, model.apply).loss(z, y % CLASSES))
    data = fd.FederatedData.from_clients([(x, y + CLASSES * i) for i, (x, y) in enumerate(federation.clients)])
    afl = fd.algorithms.agnostic(domain=lambda x, y: y // CLASSES, **arguments)
    _, states = federation.states(afl, model=model, data=data)
    return np.array([[as_vector(state.params), as_vector(state.server.average)] for state in states])


def rows() -> Iterator[Row]:
    fed = Federation()
    lines = "flearn/trainers/qffedavg.py#Deltas.append(", "flearn/trainers/qffedavg.py#hs.append("
    lines = (*lines, "flearn/trainers/fedbase.py#def aggregate2")
    for q in (1.0, 5.0):
        models = [w for (w,) in theirs(fed, "qffedavg", q=q)]
        yield compared(fed, "qfedavg", {"q": q}, models, lines, setting=OURS)

    whole = Federation(cohorts=FULL, batch_size=25, epochs=1)
    arguments = {"domains": 6, "domain_lr": 0.1, "update": "projection", "counts0": whole.sizes}
    models = np.array(theirs(whole, "afl", learning_rate_lambda=0.1))
    found = difference(domains_of_clients(whole, arguments), models)
    lines = tuple(
        f"flearn/trainers/afl.py#{line}" for line in ("v -= self", "= project(", "self.resulting_model[k] = (")
    )
    setting = (
        f"every client is a domain; all clients in every round, one step on all examples; w and the average; {OURS}"
    )
    yield Row(written("agnostic", arguments), found, lines, setting)


if __name__ == "__main__":
    main(rows)
