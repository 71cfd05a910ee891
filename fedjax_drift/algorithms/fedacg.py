"""FedACG. Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024,
arXiv 2201.03172.

Client i:  start = w + lam m                                                                         (1)
           g <- g + beta (theta - start);  D_i = theta_i - start                                     (2)
Server:    m <- lam m + mean_S D_i                                                                   (3)
           w <- w + m  ( = mean_S theta_i)                                                           (4)

with m_0 = 0. Clients receive w + lam m, the point to which the momentum moves the model. `evaluate` evaluates w.

Deviations:  the penalty in the authors' code is beta ||theta - start||^2, without the factor 1/2. Its 1e-3 is
beta = 2e-3 here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import trained_from
from fedjax_drift.spec import Fraction, NonNegative
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    m: Params  # momentum


@algorithm
def fedacg(beta: NonNegative = 2e-3, lam: Fraction = 0.85) -> Algorithm:
    """Nesterov momentum on the server: clients start at the point to which the momentum moves the model.

    Clients keep no state. All clients have weight 1 in the mean.

    Args:
      beta: strength of the proximal term, >= 0.
      lam: momentum, in [0, 1). 0 gives FedProx with uniform weights.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        start = jax.tree.map(lambda w, m: (w + lam * m).astype(w.dtype), server.params, server.m)  # (1)

        def proximal(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, start: g + beta * (theta - start), g, theta, start)  # (2)

        return trained_from(start, work, "uniform", client, correct=proximal)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        m = jax.tree.map(lambda m, D: lam * m + D, server.m, D)  # (3)
        return Server(jax.tree.map(lambda w, m: w + m, server.params, m), m)  # (4)

    return Algorithm(init_server, lambda params: (), client_update, server_update, name="fedacg")
