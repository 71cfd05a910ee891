"""FedADC. Ozfatura, Ozfatura, Gunduz, "FedADC: Accelerated Federated Learning with Drift Control", ISIT 2021,
arXiv 2012.09102, algorithm 3, whose line numbers these are.

Client i:  mbar = gamma beta m / K_i, K_i steps of
           theta <- theta - eta_t mbar;  theta <- theta - eta_t grad F_i(theta)     "nesterov", red  (7)-(9)
           theta <- theta - eta_t (grad F_i(theta) + mbar)                          "heavy_ball", blue  (10), (11)
           D_i = theta_i - w
Server:    Dbar = -mean_S D_i / eta_t  ( = the sum of gradients of a mean client + gamma beta m )    (16)
           m <- Dbar + (1 - gamma) beta m                                                            (17)
           w <- w - alpha eta_t m                                                                    (18)

Algorithm 3 prints gamma = 1/beta: mbar = m / K_i and m <- Dbar - (1 - beta) m. For every gamma m is beta m plus the
clients' gradients, as in SlowMo (gamma = 0); gamma moves the points where they are taken.

Deviates:  K_i is the client's own number of steps, so that mbar's part of D_i is the same for all; eta_t may decay, and
then the current one is used at both places. Weight decay is part of the gradient, at the point where that is taken.
Clipping acts on gradient plus mbar, as on every correction here; where it bites, m is no longer beta m plus gradients.
FedADC+, of a later version, is not here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work


class Server(NamedTuple):
    params: Params  # w, the global model
    m: Params  # momentum, a sum of gradients


def fedadc(beta: float, alpha: float = 1.0, variant: str = "nesterov", gamma: float | None = None) -> Algorithm:
    """The server's momentum spread over the clients' local steps, so that they drift less.

    Clients count alike in the mean, whatever their size. Local momentum and other optimizers are refused (remark 1):
    they would multiply mbar, and m with it, in every round.

    Args:
      beta: momentum in [0, 1); the paper tunes it in 0.6 to 0.9.
      alpha: the server's learning rate, > 0.
      variant: "nesterov" (red, default): momentum before the gradient is taken; "heavy_ball" (blue): with it.
      gamma: the share of beta m that clients apply, >= 0. Default None: 1 / beta, as algorithm 3 prints; 0: SlowMo.

    Raises:
      ValueError: a value out of range, local momentum, a local optimizer.
    """
    beta = checks.fraction("beta", beta)
    alpha = checks.positive("alpha", alpha)
    checks.choice("variant", variant, ("nesterov", "heavy_ball"))
    if gamma is not None:
        gamma = checks.nonnegative("gamma", gamma, "None means 1 / beta")
    gamma_beta = 1.0 if gamma is None else gamma * beta

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w = server.params
        mbar = jax.tree.map(lambda m: gamma_beta * m / work.num_steps.clip(1), server.m)

        def shift(theta: Params) -> Params:
            return jax.tree.map(lambda theta, mbar: theta - work.lr * mbar, theta, mbar)  # (7)

        def control(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, mbar: g + mbar, g, mbar)  # (8)-(11)

        theta, metrics = train(work, start=w, correct=control, at=shift if variant == "nesterov" else None)
        return ClientResult(tree.subtract(theta, w), weight(work, "uniform"), client, metrics)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        m = jax.tree.map(lambda m, D: -D / context.lr + (beta - gamma_beta) * m, server.m, D)  # (16), (17)
        w = jax.tree.map(lambda w, m: w - alpha * context.lr * m, server.params, m)  # (18)
        return Server(w, m)

    return Algorithm(init_server, lambda params: (), client_update, server_update, requires=("sgd",), name="fedadc")
