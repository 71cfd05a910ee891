"""AdaBest. Varno, Saghayi, Rafiee Sevyeri, Gupta, Matwin, Havaei, "AdaBest: Minimizing Client Drift in Federated
Learning via Adaptive Bias Estimation", ECCV 2022, arXiv 2204.13170.

Client i:  g <- g - mu h_i                                                                           (1)
           h_i <- h_i / (t - t_i) + (w - theta_i);  t_i <- t                                         (2)
Server:    wbar+ = mean_S theta_i;  w <- wbar+ + beta (wbar+ - wbar);  wbar <- wbar+                 (3)

with h_i = 0 before the first participation, and wbar_0 = w_0. t_i is the round of the last participation of client i.

Deviations:  the paper keeps mu inside h_i, which is the same. The authors' code multiplies mu by E and divides it by
the number of batches of an epoch; here mu is that of the paper.

With all clients in every round, the fixed point is that of f(w) + (1 - beta) mu / 2 ||w - w_0||^2. So the first model
biases the last one, unless beta is near 1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train
from fedjax_drift.spec import Mix, NonNegative
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the model that is sent to the clients
    client_mean: Params  # wbar, the mean of the last cohort's models


class Client(NamedTuple):
    h: Params  # h_i, the estimate of the client's bias
    t: jax.Array  # int32 [], t_i, or -1


@algorithm
def adabest(mu: NonNegative = 0.02, beta: Mix = 0.98) -> Algorithm:
    """Local training that is corrected by an estimate of the client's bias, which fades while the client is away.

    The state of a client has the size of one model. All clients have weight 1 in the mean. `evaluate` reports the
    metrics of w, and those of wbar with the prefix ``client_mean_``.

    Args:
      mu: strength of the correction, >= 0. With beta = 0 as well, 0 gives FedAvg with uniform weights. The authors'
        code has 0.02, in its last release 0.1.
      beta: factor of the extrapolation of the cohorts' means, in [0, 1]. The authors tune it for each participation
        rate. Their code has 0.98, in its last release 0.85.
    """

    def init_server(params: Params) -> Server:
        return Server(params, params)

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params), jnp.int32(-1))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, h = server.params, client.h

        def unbiased(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, h: g - mu * h, g, h)  # (1)

        theta, trained = train(work, start=w, correct=unbiased)
        D = tree.subtract(theta, w)
        rounds_away = jnp.maximum(work.t - client.t, 1).astype(work.lr.dtype)
        h = jax.tree.map(lambda h, D: h / rounds_away - D, h, D)  # (2)
        return ClientResult(D, weight(work, "uniform"), Client(h, work.t), trained)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        wbar = jax.tree.map(lambda w, D: w + D, server.params, D)
        w = jax.tree.map(lambda new, old: new + beta * (new - old), wbar, server.client_mean)  # (3)
        return Server(w, wbar)

    made = Algorithm(init_server, init_client, client_update, server_update, name="adabest")
    return made._replace(models=lambda server: {"client_mean": server.client_mean})
