"""FedCM. Xu, Wang, Wang, Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, arXiv 2106.10874.

Client i:  g <- alpha g + (1 - alpha) Delta                                                          (1)
           D_i = theta_i - w
Server:    w <- w + server_lr mean_S D_i                                                             (2)
           Delta <- -mean_S D_i / (eta_t mean_S K_i)          steps = "cohort"                       (3)
           Delta <- -mean_S (D_i / K_i) / eta_t               steps = "own"                          (3')

with Delta_0 = 0. alpha is the factor of the gradient. alpha = 1 gives FedAvg. In round 0, a step is alpha times a step
of FedAvg. With (3), Delta is alpha times the mean of all gradients of the round, plus (1 - alpha) times the old Delta.

Deviations:  in the paper all clients do K steps. (3) and (3') are two ways to generalise it. They are the same if all
K_i are equal.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train
from fedjax_drift.spec import Positive, Share
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    Delta: Params  # momentum, a mean gradient


@algorithm
def fedcm(alpha: Share = 0.1, server_lr: Positive = 1.0, steps: Literal["cohort", "own"] = "cohort") -> Algorithm:
    """Momentum of the server in every local step. Clients keep no state. All clients have weight 1 in the mean.

    Args:
      alpha: factor of the gradient, in (0, 1]. 1 - alpha is the factor of the momentum. Some repositories use the name
        alpha for 1 - alpha.
      server_lr: learning rate of the server, > 0.
      steps: the number of steps by which the momentum is divided: "cohort" (mean of K_i, default) or "own" (K_i of each
        client, which doubles the upload).

    Local training must be plain SGD, without momentum.
    """
    return with_client_momentum(alpha, server_lr, steps, lambda work: work.loss)._replace(name="fedcm")


def with_client_momentum(alpha: float, server_lr: float, steps: str, loss: Any) -> Algorithm:
    """Equations (1) to (3) for the loss ``loss(work)(params, batch, key)``."""

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w, Delta, K = server.params, server.Delta, work.num_steps.astype(work.lr.dtype)

        def with_momentum(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, Delta: alpha * g + (1 - alpha) * Delta, g, Delta)  # (1)

        theta, trained = train(work, start=w, correct=with_momentum, loss=loss(work))
        D = tree.subtract(theta, w)
        per_step = jax.tree.map(lambda D: D / jnp.maximum(K, 1), D) if steps == "own" else K
        return ClientResult((D, per_step), weight(work, "uniform"), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, per_step = mean
        if steps == "cohort":
            per_step = jax.tree.map(lambda D, K=per_step: D / jnp.where(K > 0, K, 1), D)
        w = jax.tree.map(lambda w, D: w + server_lr * D, server.params, D)  # (2)
        return Server(w, jax.tree.map(lambda d: -d / context.lr, per_step))  # (3)

    needs = Needs(optimizer="sgd", one_rate=True)  # (3) divides by the present rate
    return Algorithm(init_server, lambda params: (), client_update, server_update, requires=needs)
