"""FedAdam, FedYogi, FedAdagrad. Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, arXiv 2003.00295, algorithm 2.

Client i:  as FedAvg;  D = sum_S n_i D_i / sum_S n_i
Server:    m <- b1 m + (1 - b1) D                                                                    (1)
           v <- v + D^2                                   FedAdagrad                                 (2)
           v <- v - (1 - b2) D^2 sign(v - D^2)            FedYogi                                    (3)
           v <- b2 v + (1 - b2) D^2                       FedAdam                                    (4)
           w <- w + server_lr m / (sqrt(v) + tau)                                                    (5)

with m_0 = 0, v_0 = tau^2, and no bias correction. In the paper, FedAdagrad has b1 = 0.

Deviations:  none from the paper. The authors' code uses Keras optimizers, which have a bias correction and v_0 = 0.
Learning rates that were tuned with that code must be tuned again. The option `v_0` sets v_0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg
from fedjax_drift.spec import Fraction, NonNegative, Positive
from fedjax_drift.types import Algorithm, Params, PyTree, Round, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    m: Params  # first moment of the mean update
    v: Params  # second moment


@algorithm
def fedadam(
    server_lr: Positive,
    b1: Fraction = 0.9,
    b2: Fraction = 0.99,
    tau: Positive = 1e-3,
    weighting: Weighting = "examples",
    v_0: NonNegative | None = None,
) -> Algorithm:
    """Adam on the server.

    Args:
      server_lr: learning rate of the server, > 0. A parameter changes by about server_lr per round as long as its
        updates have the same sign.
      b1, b2: decay rates of the moments, in [0, 1).
      tau: adaptivity, > 0. Updates much smaller than tau are not scaled up.
      weighting: as in `fedavg`.
      v_0: initial second moment, >= 0. The default None is tau^2. The library of FedEve's authors uses 0.
    """
    return _fedopt("fedadam", lambda v, D: b2 * v + (1 - b2) * D**2, server_lr, b1, tau, weighting, v_0)  # (4)


@algorithm
def fedyogi(
    server_lr: Positive,
    b1: Fraction = 0.9,
    b2: Fraction = 0.99,
    tau: Positive = 1e-3,
    weighting: Weighting = "examples",
    v_0: NonNegative | None = None,
) -> Algorithm:
    """Yogi on the server. v approaches D^2 in steps whose size does not depend on v. Arguments as in `fedadam`."""
    return _fedopt(
        "fedyogi", lambda v, D: v - (1 - b2) * D**2 * jnp.sign(v - D**2), server_lr, b1, tau, weighting, v_0
    )  # (3)


@algorithm
def fedadagrad(
    server_lr: Positive,
    b1: Fraction = 0.0,
    b2: Fraction = 0.99,
    tau: Positive = 1e-3,
    weighting: Weighting = "examples",
    v_0: NonNegative | None = None,
) -> Algorithm:
    """Adagrad on the server. v is v_0 plus the sum of D^2 over all rounds.

    b2 has no effect; it exists so that the three factories have the same arguments. The default b1 = 0 is that of the
    paper. The other arguments are as in `fedadam`.
    """
    return _fedopt("fedadagrad", lambda v, D: v + D**2, server_lr, b1, tau, weighting, v_0)  # (2)


def _fedopt(
    name: str,
    second_moment: Callable[[jax.Array, jax.Array], jax.Array],
    server_lr: float,
    b1: float,
    tau: float,
    weighting: Weighting,
    v_0: float | None,
) -> Algorithm:
    start = tau**2 if v_0 is None else v_0

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), jax.tree.map(lambda w: jnp.full_like(w, start), params))

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        m = jax.tree.map(lambda m, D: b1 * m + (1 - b1) * D, server.m, D)  # (1)
        v = jax.tree.map(second_moment, server.v, D)
        w = jax.tree.map(lambda w, m, v: w + server_lr * m / (jnp.sqrt(v) + tau), server.params, m, v)  # (5)
        return Server(w, m, v)

    return fedavg(weighting=weighting)._replace(init_server=init_server, server_update=server_update, name=name)
