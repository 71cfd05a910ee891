"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv 1812.06127, algorithm 2.

Client i:  minimises F_i(theta) + (mu/2) ||theta - w||^2:  g <- grad F_i(theta) + mu (theta - w)     (2)
Server:    as FedAvg.

Deviations:  clients run E epochs of minibatch SGD on (2) instead of computing a gamma-inexact minimum. Clients are
sampled uniformly and weighted by n_i, as in the authors' experiments.

The factor mu/2 is that of the paper. The FedDC paper uses FedProx as a baseline with mu = 1e-4. Its code adds
2e-4 (theta - w) to the gradient, which is mu = 2e-4 here.
"""

from __future__ import annotations

from typing import Any

import jax

from fedjax_drift.algorithms.fedavg import Weighting, fedavg, trained_from
from fedjax_drift.spec import NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Work, algorithm


@algorithm
def fedprox(mu: NonNegative, server_lr: Positive = 1.0, weighting: Weighting = "examples") -> Algorithm:
    """FedAvg with a proximal term.

    Args:
      mu: strength of the proximal term, >= 0. 0 gives FedAvg. The papers use 1e-4 (FedDC) to 1 (FedEve).
      server_lr, weighting: as in `fedavg`.
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w = server.params

        def proximal(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, w: g + mu * (theta - w), g, theta, w)  # (2)

        return trained_from(w, work, weighting, client, correct=proximal)

    return fedavg(server_lr, weighting)._replace(client_update=client_update, name="fedprox")
