"""FedNova. Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020, arXiv 2007.07481.

Client i:  theta <- theta - eta_t (g + mu (theta - w));  D_i = theta_i - w                            (1)
           a_i: the sum of the coefficients of the gradients in -D_i / eta_t                         (2)
               = K_i                                                plain SGD
               = (K_i - r (1 - r^K_i) / (1 - r)) / (1 - r)          momentum r
               = (1 - (1 - eta_t mu)^K_i) / (eta_t mu)              proximal term mu
           A_i = a_i, but K_i with a proximal term                                                   (3)
Server:    w <- w + server_lr mean(A_i) mean(D_i / a_i)                                              (4)

The means are weighted by n_i. In FedAvg, a client with more steps moves the model further, which biases the result
towards clients with many steps. FedNova divides each update by its own number of steps.

Deviations:
- (3) with a proximal term is that of the authors' code. With equal K_i, an update is then K / a times that of FedProx.
- Weight decay is not part of a_i, as in the authors' code. With clipping, a_i is an approximation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import Server, fedavg, weight
from fedjax_drift.local import train
from fedjax_drift.spec import NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


@algorithm
def fednova(mu: NonNegative = 0.0, server_lr: Positive = 1.0) -> Algorithm:
    """Normalised averaging, for clients that do different numbers of local steps.

    Local training may have momentum, but no other optimizer, and no momentum together with a proximal term.

    Args:
      mu: strength of a proximal term, >= 0. Default 0, no proximal term.
      server_lr: factor of the update, > 0.

    Raises:
      ValueError: local training has an optimizer for which a_i is unknown.
    """
    proximal = checks.used(mu)

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w, K, r = server.params, work.num_steps.astype(work.lr.dtype), work.momentum

        def pull(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, w: g + mu * (theta - w), g, theta, w)  # (1)

        theta, trained = train(work, start=w, correct=pull if proximal else None)
        a = coefficients(work, 1 - work.lr * mu) if proximal else coefficients(work, r, summed=True)  # (2)
        A = K if proximal else a  # (3)
        normalised = jax.tree.map(lambda D: D / jnp.where(K > 0, a, 1), tree.subtract(theta, w))
        return ClientResult((normalised, A), weight(work, "examples"), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        normalised, A = mean
        return Server(jax.tree.map(lambda w, d: w + server_lr * A * d, server.params, normalised))  # (4)

    needs = Needs(optimizer="sgd" if proximal else "sgd or momentum")
    return fedavg()._replace(client_update=client_update, server_update=server_update, requires=needs, name="fednova")


def coefficients(work: Work, r: jax.Array | float, summed: bool = False) -> jax.Array:
    """1 + r + ... + r^(K_i - 1), or with ``summed`` the sum of these sums for 1..K_i steps.

    The steps are counted one by one, because the closed forms of (2) cancel if r is close to 1.
    """

    def step(_: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        direction = 1 + r * sums[0]
        return direction, sums[1] + direction

    zero = jnp.zeros_like(work.lr)
    return lax.fori_loop(0, work.num_steps, step, (zero, zero))[summed]
