"""FedAvg. McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, arXiv 1602.05629, algorithm 1.

Client i:  theta_i = w, then E epochs of minibatch SGD;  D_i = theta_i - w
Server:    w <- w + server_lr sum_S n_i D_i / sum_S n_i                                              (1)

Deviations:  none with server_lr = 1 (the default). Other values are the server learning rate of Reddi et al. 2021.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.local import train
from fedjax_drift.spec import Positive
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work, algorithm

Weighting = Literal["examples", "uniform"]


class Server(NamedTuple):
    params: Params  # w, the global model


@algorithm
def fedavg(server_lr: Positive = 1.0, weighting: Weighting = "examples") -> Algorithm:
    """Federated averaging.

    Args:
      server_lr: factor of the mean update, > 0. With the default 1, the new model is the mean of the local models.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        return trained_from(server.params, work, weighting, client)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        return Server(jax.tree.map(lambda w, D: w + server_lr * D, server.params, D))  # (1)

    return Algorithm(Server, lambda params: (), client_update, server_update, name="fedavg")


def trained_from(start: Params, work: Work, weighting: str, client: PyTree = (), **options: Any) -> ClientResult:
    """The result of a client that trains from ``start`` and sends its update D_i = theta_i - start.

    client: its new state. options: of `local.train`.
    """
    theta, trained = train(work, start, **options)
    return ClientResult(tree.subtract(theta, start), weight(work, weighting), client, trained)


def weight(work: Work, weighting: str) -> jax.Array:
    """The weight of a client in the mean: n_i for "examples", 1 for "uniform"."""
    size = work.size.astype(work.lr.dtype)
    return size if weighting == "examples" else jnp.ones_like(size)


def equally(value: PyTree, work: Work, weighting: str) -> tuple[PyTree, ...]:
    """A part of a message that counts equally for all clients, although the message has another weight."""
    if weighting == "uniform":
        return (value,)
    share = jnp.where(work.q > 0, 1 / work.q, 0)
    return jax.tree.map(lambda v: (share * v).astype(v.dtype), value), share


def mean_of_equals(part: tuple[PyTree, ...]) -> PyTree:
    """The mean of the values that were given to `equally`, from the weighted mean of what it returned."""
    value, *share = part
    return jax.tree.map(lambda v: v / share[0], value) if share else value
