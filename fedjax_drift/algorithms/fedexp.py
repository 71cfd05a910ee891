"""FedExP. Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023,
arXiv 2301.09604.

Client i:  as FedAvg;  D_i = theta_i - w
Server:    eta_g = max(1, mean_S ||D_i||^2 / (2 (||mean_S D_i||^2 + eps)))                           (1)
           w <- w + eta_g mean_S D_i                                                                 (2)

The more the updates of the clients differ, the larger is eta_g. `info["eta_g"]` is its value. The paper and the
authors' code evaluate the mean of the last two models, because w oscillates. `evaluate` reports w, and this mean with
the prefix ``last_two_mean_``.

eps has the scale of ||D||^2, and is not just a guard against division by zero: near the optimum the mean update
vanishes while the clients' updates do not. With a small eps, eta_g is then very large.

Deviations:  all clients have weight 1. The authors' code weights both means by n_i (`weighting="examples"`). It also
multiplies eps by |S|, and reduces it over the rounds by the square of the decay of the learning rate. Both are not
implemented: they hide the effect of eps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, weight
from fedjax_drift.local import train
from fedjax_drift.spec import Positive
from fedjax_drift.types import Algorithm, ClientResult, Metrics, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    last_two_mean: Params  # mean of the last two global models


@algorithm
def fedexp(eps: Positive = 1e-3, weighting: Weighting = "uniform") -> Algorithm:
    """FedAvg with a server learning rate that is computed from the clients' updates. Clients keep no state.

    Args:
      eps: > 0, in the units of ||D_i||^2. A large value gives FedAvg. The authors use 1e-3 for a local learning rate of
        0.01, and 0.1 for EMNIST with 0.1.
      weighting: the weight of a client in both means: "uniform" (1, default) or "examples" (n_i).
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        theta, trained = train(work, start=server.params)
        D = tree.subtract(theta, server.params)
        return ClientResult((D, tree.dot(D, D)), weight(work, weighting), client, trained)

    def extrapolation(mean: PyTree) -> jax.Array:
        D, square = mean
        return jnp.maximum(1, square / (2 * (tree.dot(D, D) + eps)))  # (1)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        eta_g = extrapolation(mean)
        w = jax.tree.map(lambda w, D: w + eta_g * D, server.params, mean[0])  # (2)
        return Server(w, jax.tree.map(lambda old, new: (old + new) / 2, server.params, w))

    def report(server: Any, mean: PyTree, context: Round) -> Metrics:
        return {"eta_g": extrapolation(mean)}

    def init_server(params: Params) -> Server:
        return Server(params, params)

    made = Algorithm(init_server, lambda params: (), client_update, server_update, report=report, name="fedexp")
    return made._replace(models=lambda server: {"last_two_mean": server.last_two_mean})
