"""FedReg (github.com/Zoesgithub/FedReg), by the authors of the algorithm.

Their servers, clients and the methods of their model run unchanged. The network, the cohorts and the order of the
examples are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import torch
from federation import CLASSES, FEATURES, Federation, Row, compared, main, vector, without

import fedjax_drift as fd


class Host(torch.Tensor):
    """Examples that are copied before they are changed, as they are if the model is on another device."""

    def detach(self) -> torch.Tensor:
        return super().detach().clone().as_subclass(torch.Tensor)


def first_orders(federation: Federation) -> list[dict[int, np.ndarray]]:
    """For every round and client, the order of its examples in the first pass of FedReg, which makes the pseudo data.

    As `Federation.orders`, for a pass of its own.
    """
    longest = max(federation.sizes)

    def client_update(server: Any, client: Any, work: fd.Work) -> fd.ClientResult:
        batch = work.epoch(jax.random.fold_in(work.key, work.epochs))
        rows = [batch(jnp.int32(k)) for k in range(work.most_batches)]
        seen = jnp.concatenate([jnp.where(row.mask, row.x[:, 0].astype(int), -1) for row in rows])[:longest]
        none = jax.tree.map(jnp.zeros_like, server.params)
        return fd.ClientResult(none, jnp.ones(()), seen, {"loss": jnp.zeros(())})

    probe = fd.algorithms.fedavg()._replace(
        client_update=client_update, init_client=lambda params: jnp.zeros(longest, int), name="probe"
    )
    numbered = [(np.repeat(np.arange(len(y), dtype=float)[:, None], FEATURES, 1), y) for _, y in federation.clients]
    _, states = federation.states(probe, data=fd.FederatedData.from_clients(numbered))
    return [
        {i: np.asarray(state.clients)[i][: federation.sizes[i]] for i in cohort}
        for state, cohort in zip(states, federation.cohorts, strict=True)
    ]


class Passes:
    """The batches of a client in a round: with FedReg first those of the pseudo data, then those of the epochs."""

    def __init__(self, federation: Federation, t: int, i: int, order: np.ndarray | None) -> None:
        x, y = (torch.tensor(part) for part in federation.clients[i])
        B = federation.batch_size
        rows = [] if order is None else [torch.tensor(order[k : k + B]) for k in range(0, len(order), B)]
        first = [] if order is None else [[(x[row], y[row]) for row in rows]]
        self.passes = iter([*first, *(federation.epoch(t, i, e) for e in range(federation.epochs))])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((x.as_subclass(Host), y) for x, y in next(self.passes))


def theirs(federation: Federation, method: str, gamma: float = 0.4) -> list[np.ndarray]:
    """The global model after every round of one of their methods."""
    without("thop", "loguru")
    import importlib

    import FedUtils.fed.client
    import FedUtils.models.mnist.cnn

    module = importlib.import_module(f"FedUtils.fed.{method.lower()}")
    models: list[np.ndarray] = []
    first = first_orders(federation) if method == "FedReg" else None

    class Model(FedUtils.models.mnist.cnn.Model):
        def __init__(self, num_classes: int, optimizer: Any = None, **options: Any) -> None:
            super().__init__(num_classes, optimizer, **options)
            self.net = federation.network()
            if optimizer is not None:
                self.optimizer = optimizer(self.parameters())

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return self.net(data)

    class Server(getattr(module, method)):
        def select_clients(self, seed: int, num_clients: int = 20) -> tuple[Any, Any]:
            t, selected = len(models), []
            for i in federation.cohorts[t]:
                c = self.clients[i]
                client = FedUtils.fed.client.Client(*c[:4], self.cmodel, *c[5:])
                client.train_data = Passes(federation, t, i, first[t][i] if first else None)
                selected.append(client)
            return list(federation.cohorts[t]), selected

        def aggregate(self, wstate_dicts: Any) -> Any:
            result = super().aggregate(wstate_dicts)
            models.append(vector(self.model))
            return result

    users = list(range(len(federation.sizes)))
    data = {i: {"x": x, "y": y} for i, (x, y) in enumerate(federation.clients)}
    config = {"model_param": (CLASSES,), "clients_per_round": len(federation.cohorts[0]), "eval_every": 1}
    config |= {"num_rounds": len(federation.cohorts), "batch_size": federation.batch_size, "drop_percent": 0.0}
    config |= {"num_epochs": federation.epochs, "eval_train": False, "gamma": gamma}
    config["inner_opt"] = partial(module.Optim, lr=federation.lr) if method == "SCAFFOLD" else None
    model = partial(Model, learning_rate=federation.lr, p_iters=10, ps_eta=0.2, pt_eta=0.002)
    with patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
        Server(config, model, [users, [], data, [data]], None, None, None, None).train()
    return models


def rows() -> Iterator[Row]:
    federation = Federation(lr=0.1)
    uniform = {"weighting": "uniform"}
    loss = "FedUtils/models/mnist/cnn.py#torch.log(pred+1e-12)"
    cause = "Their cross-entropy adds 1e-12 to the probabilities."

    def row(method: str, name: str, arguments: dict[str, Any], *lines: str, **more: Any) -> Row:
        path = f"FedUtils/fed/{method.lower()}.py"
        lines = (*(f"{path}#{line}" for line in lines), loss)
        more = {"cause": cause} | more
        return compared(federation, name, arguments, theirs(federation, method, more.pop("gamma", 0.4)), lines, **more)

    device = (
        f"{cause} The model is treated as on another device than the examples. On the same one, the pseudo data, the "
        "perturbed data and the examples share their memory, and the two differ by 3e-2."
    )
    yield row("FedReg", "fedreg", {}, "def step_func", "csolns = [[w,", cause=device)
    yield row("FedAvg", "fedavg", uniform, "def step_func", "csolns = [[w,", default={})
    half = f"Their proximal term has no factor 1/2, so mu = 2 gamma. {cause}"
    prox = {"mu": 0.2} | uniform
    yield row("FedProx", "fedprox", prox, "sum()*gamma", "csolns = [[w,", gamma=0.1, setting="gamma = 0.1", cause=half)
    yield row("SCAFFOLD", "scaffold", {}, "class Optim", "newc =", "def update_c")


if __name__ == "__main__":
    main(rows)
