"""MIFA. Gu, Huang, Zhang, Huang, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS
2021, arXiv 2106.04159, algorithm 1.

Client i:  theta_i = w, then local training;  d_i = (theta_i - w) / eta_t;  sends d_i - y_i          (1)
           y_i <- d_i                                                                                (2)
Server:    ybar <- ybar + (1/N) sum_S (d_i - y_i),  so ybar = (1/N) sum_all y_i                      (3)
           w <- w + server_lr eta_t ybar                                                             (4)

with y_i = 0 before the first participation. The paper's G^i is -y_i. The clients are those of FedVARP. In the step of
w, the change d_i - y_i has the weight 1 / |S| in FedVARP and 1 / N in MIFA.

Deviations:
- In the paper, all clients take part in the first round: ``round_fn(state, cohort=range(N))``. Without such a round,
  the first steps are short, because y_i is 0 for the clients that have not taken part. The authors' code has both.
- In the paper, w also moves in a round in which no client reports. Here such a round changes nothing.
"""

from __future__ import annotations

import jax

from fedjax_drift.algorithms.fedvarp import Server, fedvarp
from fedjax_drift.spec import Positive
from fedjax_drift.types import Algorithm, PyTree, Round, algorithm


@algorithm
def mifa(server_lr: Positive = 1.0) -> Algorithm:
    """Moves the model by the mean of the last updates of all clients, those of clients that are away included.

    No client counts more because it takes part more often. Availability may be arbitrary, as long as no client is away
    for too long. The state of a client has the size of one model. What is sent and what is refused is as in `fedvarp`.

    Args:
      server_lr: learning rate of the server, > 0. With 1 (default) and all clients in every round, it is FedAvg with
        uniform weights.
    """

    def server_update(server: Server, change: PyTree, context: Round) -> Server:
        y = jax.tree.map(lambda y, c: y + context.participation * c, server.y, change)  # (3)
        return Server(jax.tree.map(lambda w, y: w + server_lr * context.lr * y, server.params, y), y)  # (4)

    return fedvarp()._replace(server_update=server_update, name="mifa")  # (1), (2)
