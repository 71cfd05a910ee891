"""q-FedAvg. Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv 1905.10497,
algorithm 2.

Client i:  D_i as in FedAvg;  d_i = -L D_i;  F = F_i(w) + 1e-10                                      (1)
           sends a d_i and a (q ||d_i||^2 / F + L), with a = (F / s)^q                               (2)
Server:    w <- w - mean_S (a d_i) / mean_S (a (q ||d_i||^2 / F + L))                                (3)
           s <- mean_S F                                                                             (4)

F_i(w) is the mean loss over all examples of the client, before its training. (3) does not depend on s, with which F^q
stays in the range of floating-point numbers. The objective is sum_i F_i^(q + 1) / (q + 1).

Deviations:  the authors sample clients with probability n_i / n. Here they are drawn uniformly, so all clients count
the same in the objective. L = 1 / eta_t by default. In the paper, it is 1 over the best learning rate of FedAvg.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import full_loss, train
from fedjax_drift.spec import Fix, NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    s: jax.Array  # [], the mean loss of the last cohort


@algorithm
def qfedavg(
    q: NonNegative = 1.0, lipschitz: Annotated[Positive, Fix("None means 1 / eta_t")] | None = None
) -> Algorithm:
    """FedAvg that gives clients with a larger loss a larger weight, so that the losses become more equal.

    Clients keep no state. They compute their loss at w, which costs a forward pass over their examples. All clients
    have weight 1 in the means.

    Args:
      q: how much larger losses count, >= 0. 0 gives FedAvg with uniform weights. The paper uses 0.1 to 15; with a large
        q, training is slow.
      lipschitz: L > 0, an estimate of the smoothness of the losses. None: 1 / eta_t.

    Asynchronous rounds must not have clients of several versions.
    """

    def init_server(params: Params) -> Server:
        return Server(params, jnp.ones(()))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w, L = server.params, 1 / work.lr if lipschitz is None else lipschitz
        F = full_loss(work, w) + 1e-10
        theta, trained = train(work, start=w)
        d = jax.tree.map(lambda D: -L * D, tree.subtract(theta, w))  # (1)
        a = (F / server.s.astype(F.dtype)) ** q
        message = jax.tree.map(lambda d: a * d, d), a * (q * tree.dot(d, d) / F + L), F  # (2)
        return ClientResult(message, weight(work, "uniform"), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        d, h, F = mean
        return Server(jax.tree.map(lambda w, d: w - d / h, server.params, d), F)  # (3), (4)

    made = Algorithm(init_server, lambda params: (), client_update, server_update, name="qfedavg")
    # All messages of (3) must have the same s, or it does not cancel out.
    return made._replace(requires=Needs(one_version=True))
