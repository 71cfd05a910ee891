"""SlowMo. Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
ICLR 2020, arXiv 1910.00643, algorithm 1.

Client i:  as FedAvg;  D_i = theta_i - w
Server:    m <- beta m - mean_S D_i / eta_t                                                          (1)
           w <- w - alpha eta_t m                                                                    (2)

Deviations:  clients are sampled, as in algorithm 2 of FedADC. In the paper all workers take part in every round.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.spec import Fraction, Positive
from fedjax_drift.types import Algorithm, Needs, Params, PyTree, Round, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    m: Params  # slow momentum, a sum of gradients


@algorithm
def slowmo(beta: Fraction, alpha: Positive = 1.0) -> Algorithm:
    """FedAvg with momentum on the server.

    The momentum m has the units of a gradient, so it remains valid if the learning rate changes. All clients have
    weight 1 in the mean. With local momentum or another optimizer, m is a sum of update directions
    instead of gradients.

    Args:
      beta: momentum, in [0, 1). 0 gives FedAvg with uniform weights, if alpha = 1. The FedADC paper tunes it in 0.6 to
        0.9.
      alpha: the slow learning rate, > 0. A constant update is multiplied by alpha / (1 - beta).
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        m = jax.tree.map(lambda m, D: beta * m - D / context.lr, server.m, D)  # (1)
        w = jax.tree.map(lambda w, m: w - alpha * context.lr * m, server.params, m)  # (2)
        return Server(w, m)

    base = fedavg(weighting="uniform")._replace(requires=Needs(one_rate=True))  # (1) divides by the present rate
    return base._replace(init_server=init_server, server_update=server_update, name="slowmo")
