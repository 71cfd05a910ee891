"""FedGamma. Dai, Yang, Sun, Shen, Tian, Wang, Zhang, "FedGAMMA: Federated Learning With Global Sharpness-Aware
Minimization", IEEE TNNLS 2023.

Client i:  g <- g(theta + e) + c - c_i;  e = rho g(theta) / ||g(theta)||                             (1)
           c_i+ = c_i - c - D_i / (K_i eta_t)                                                        (2)
Server:    w <- w + server_lr mean_S D_i;  c <- c + (1/N) sum_S (c_i+ - c_i)                         (3)

with c_0 = c_i,0 = 0. This is SCAFFOLD, option II, with the gradient of FedSAM. The perturbation e is that of the plain
local gradient, without the correction.

Deviations:  an author's code uses E n_0 / B of client 0 in the place of every client's K_i, and adds 1e-7 to the norm.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import equally, weight
from fedjax_drift.algorithms.fedsam import perturbed
from fedjax_drift.algorithms.scaffold import Client, Server, refresh, scaffold
from fedjax_drift.local import train
from fedjax_drift.spec import NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Params, Work, algorithm


@algorithm
def fedgamma(rho: NonNegative = 0.1, server_lr: Positive = 1.0) -> Algorithm:
    """SCAFFOLD with sharpness-aware local steps. A step computes two gradients.

    The state of a client has the size of one model. All clients have weight 1 in the mean.

    Args:
      rho: the distance at which the second gradient is computed, >= 0. 0 gives SCAFFOLD. The authors use 0.01 to 0.1.
      server_lr: learning rate of the server, > 0.
    """

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, c, c_i = server.params, server.c, client.c
        offset = tree.subtract(c, c_i)

        def control(g: Params, theta: Params) -> Params:
            return jax.tree.map(jnp.add, g, offset)  # (1)

        theta, trained = train(work, start=w, correct=control, loss=perturbed(work, rho))
        D = tree.subtract(theta, w)
        c_new = refresh(c_i, c, D, work)  # (2)
        message = D, equally(tree.subtract(c_new, c_i), work, "uniform")
        return ClientResult(message, weight(work, "uniform"), Client(c_new), trained)

    return scaffold(server_lr)._replace(client_update=client_update, name="fedgamma")  # (3)
