"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv 1812.06127, algorithm 2.

Client i:  minimises F_i(theta) + (mu/2) ||theta - w||^2:  g <- grad F_i(theta) + mu (theta - w)     (2)
Server:    as FedAvg.

Deviates:  clients solve (2) by E epochs of minibatch SGD, not to a gamma-inexact minimum, and are sampled uniformly
and weighted by n_i, as in the authors' experiments. The mu/2 convention is the paper's. FedDC's paper states
mu = 1e-4 for this baseline; its repository's gradient is 2e-4 (theta - w), that is mu = 2e-4 here.
"""

from __future__ import annotations

from typing import Any

import jax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import fedavg, weight
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Work


def fedprox(mu: float, server_lr: float = 1.0, weighting: str = "examples") -> Algorithm:
    """FedAvg with a proximal term.

    Args:
      mu: strength of the pull towards the global model, >= 0 (0 is FedAvg). Papers use 1e-4 (FedDC) to 1 (FedEve).
      server_lr, weighting: as in `fedavg`.

    Raises:
      ValueError: mu < 0, and as `fedavg`.
    """
    mu = checks.nonnegative("mu", mu)

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w = server.params

        def proximal(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, w: g + mu * (theta - w), g, theta, w)  # (2)

        theta, metrics = train(work, start=w, correct=proximal)
        D = tree.subtract(theta, w)
        return ClientResult(D, weight(work, weighting), client, metrics)

    return fedavg(server_lr, weighting)._replace(client_update=client_update, name="fedprox")
