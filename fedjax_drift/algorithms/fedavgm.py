"""FedAvgM, server momentum. Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", 2019, arXiv 1909.06335, section 4.3.

Client i:  as FedAvg;  Delta_i = w - theta_i
Server:    v <- beta v + Delta,                 Delta = sum_S n_i Delta_i / sum_S n_i                (1)
           v <- beta v + (1 - beta) Delta       if damped                                            (1')
           w <- w - server_lr v                                                                      (2)

Deviations:  none by default. MOON, LfD and FedEve use the damped equation (1') in their baseline.
FL-bench uses Nesterov's momentum, which is not implemented.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg
from fedjax_drift.spec import Flag, Fraction, Positive
from fedjax_drift.types import Algorithm, Params, PyTree, Round, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    v: Params  # the server's momentum


@algorithm
def fedavgm(
    beta: Fraction = 0.9, server_lr: Positive = 1.0, damped: Flag = False, weighting: Weighting = "examples"
) -> Algorithm:
    """FedAvg with momentum on the server.

    Args:
      beta: momentum, in [0, 1). 0 gives FedAvg.
      server_lr: learning rate of the server, > 0. Without damping, momentum multiplies a constant update by
        1 / (1 - beta): with beta = 0.9 and server_lr = 1 the model moves ten times as far as with FedAvg.
      damped: if True, (1') replaces (1): the mean update is multiplied by 1 - beta. Momentum then does not change the
        length of a constant update. Default False.
      weighting: as in `fedavg`.
    """
    gain = 1 - beta if damped else 1.0

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        v = jax.tree.map(lambda v, D: beta * v + gain * (-D), server.v, D)  # (1), (1')
        w = jax.tree.map(lambda w, v: w - server_lr * v, server.params, v)  # (2)
        return Server(w, v)

    return fedavg(weighting=weighting)._replace(init_server=init_server, server_update=server_update, name="fedavgm")
