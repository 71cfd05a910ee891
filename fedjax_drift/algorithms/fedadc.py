"""FedADC. Ozfatura, Ozfatura, Gunduz, "FedADC: Accelerated Federated Learning with Drift Control", ISIT 2021,
arXiv 2012.09102, algorithm 3. The numbers on the right are its line numbers.

Client i:  mbar = gamma beta m / K_i;  then K_i steps of
           theta <- theta - eta_t mbar;  theta <- theta - eta_t grad F_i(theta)     "nesterov", red  (7)-(9)
           theta <- theta - eta_t (grad F_i(theta) + mbar)                          "heavy_ball", blue  (10), (11)
           D_i = theta_i - w
Server:    Dbar = -mean_S D_i / eta_t  ( = mean of the clients' summed gradients + gamma beta m )    (16)
           m <- Dbar + (1 - gamma) beta m                                                            (17)
           w <- w - alpha eta_t m                                                                    (19)

Algorithm 3 of the paper has gamma = 1/beta: mbar = m / K_i and m <- Dbar - (1 - beta) m. For every gamma, the new m is
beta m plus the mean of the clients' summed gradients, as in SlowMo. gamma = 0 gives SlowMo. Other values only change
the points at which the gradients are evaluated.

Deviations:
- In the paper all clients do the same number of steps. Here mbar is divided by the client's own number of steps K_i.
  So mbar contributes the same amount to D_i for every client.
- If eta_t decays, (16) and (19) both use the current eta_t.
- Weight decay is part of the gradient. It is evaluated at the same point as the gradient.
- Clipping acts on the gradient plus mbar, as it does for the corrections of the other algorithms. If a gradient is
  clipped, the new m is not exactly beta m plus the mean of the summed gradients.
- FedADC+, from a later version of the paper, is not implemented.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import jax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import trained_from
from fedjax_drift.spec import Fix, Fraction, NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    m: Params  # momentum, a sum of gradients


@algorithm
def fedadc(
    beta: Fraction,
    alpha: Positive = 1.0,
    variant: Literal["nesterov", "heavy_ball"] = "nesterov",
    gamma: Annotated[NonNegative, Fix("None means 1 / beta")] | None = None,
) -> Algorithm:
    """Server momentum that the clients apply in their local steps. This reduces client drift.

    All clients have weight 1 in the mean. Local momentum and local optimizers raise ValueError (remark 1 of the paper),
    because they would amplify mbar, and therefore m, in every round.

    Args:
      beta: momentum, in [0, 1). The paper tunes it in 0.6 to 0.9.
      alpha: learning rate of the server, > 0.
      variant: "nesterov" (default; red in the paper) applies the momentum before the gradient is computed. "heavy_ball"
        (blue) adds it to the gradient.
      gamma: fraction of beta m that the clients apply, >= 0. The default None is 1 / beta, as in algorithm 3 of the
        paper. 0 gives SlowMo.

    Raises:
      ValueError: local training uses momentum or another optimizer. A `Simulation` refuses asynchronous rounds with
        clients of several versions.
    """
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

        return trained_from(w, work, "uniform", client, correct=control, at=shift if variant == "nesterov" else None)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        m = jax.tree.map(lambda m, D: -D / context.lr + (beta - gamma_beta) * m, server.m, D)  # (16), (17)
        w = jax.tree.map(lambda w, m: w - alpha * context.lr * m, server.params, m)  # (19)
        return Server(w, m)

    # (17) subtracts the gamma beta m that is in the message, which must be the present one.
    one_version = checks.used(gamma_beta)
    needs = Needs(optimizer="sgd", one_version=one_version, one_rate=not one_version)
    return Algorithm(init_server, lambda params: (), client_update, server_update, requires=needs, name="fedadc")
