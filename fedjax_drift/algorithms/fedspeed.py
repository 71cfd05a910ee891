"""FedSpeed. Sun, Shen, Huang, Ding, Tao, "FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy", ICLR 2023, arXiv 2302.10429, in the variables of `feddyn`.

Client i:  g1 = g(theta);  g2 = g(theta + rho g1 / ||g1||)                                           (1)
           g <- (1 - alpha) g1 + alpha g2 + lam (theta - w + h_i)                                    (2)
           D_i = theta_i - w;  h_i <- h_i + D_i                                                      (3)
Server:    h <- h + (1/N) sum_S D_i;  w <- mean_S theta_i + h                                        (4)

In the variables of the paper, ghat_i = -lam h_i, and its lambda is 1 / lam.

Deviations:
- (4) is the server of FedDyn, as in the authors' code. In the paper, w is the mean of theta_i + h_i over the cohort
  (`aggregation="cohort"`). Both are the same if all clients take part in every round. With client sampling, the
  version of the paper does not converge.
- With `normalise=False`, (1) uses theta + rho g1, as printed in the paper's algorithm. Its experiments and the authors'
  code divide by the norm.
- The authors' code adds lam theta as weight decay, after clipping. Here the whole gradient (2) is clipped.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.algorithms.feddyn import Client, aggregate
from fedjax_drift.algorithms.fedsam import ascent
from fedjax_drift.local import train_with
from fedjax_drift.spec import Flag, Mix, NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the model that is sent to the clients
    h: Params  # mean of h_i over all N clients; stays 0 with aggregation="cohort"


@algorithm
def fedspeed(
    rho: NonNegative = 0.1,
    lam: Positive = 0.1,
    alpha: Mix = 1.0,
    normalise: Flag = True,
    aggregation: Literal["all", "cohort"] = "all",
) -> Algorithm:
    """FedDyn with sharpness-aware local steps. A step computes two gradients.

    The state of a client has the size of one model. All clients have weight 1 in the mean.

    Args:
      rho: the distance at which the second gradient is computed, >= 0. 0 gives FedDyn.
      lam: strength of the regularisation, > 0 (0.1 in the authors' code).
      alpha: factor of the second gradient, in [0, 1]. 0 gives FedDyn.
      normalise: whether the first gradient is divided by its norm.
      aggregation: "all" (default) uses the h_i of all clients, "cohort" those of the cohort.

    Local training must be plain SGD, without momentum.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, h = server.params, client.h

        def gradient(theta: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
            value, g1 = jax.value_and_grad(work.loss)(theta, batch, key)
            e = ascent(rho, g1) if normalise else jax.tree.map(lambda g: rho * g, g1)
            g2 = jax.grad(work.loss)(jax.tree.map(lambda theta, e: theta + e, theta, e), batch, key)  # (1)
            return value, jax.tree.map(lambda g1, g2: (1 - alpha) * g1 + alpha * g2, g1, g2), carry  # (2)

        def dynamic(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, w, h: g + lam * (theta - w + h), g, theta, w, h)  # (2)

        theta, _, trained = train_with(work, w, gradient, (), correct=dynamic)
        D = tree.subtract(theta, w)
        h = jax.tree.map(lambda h, D: h + D, h, D)  # (3)
        message = D if aggregation == "all" else jax.tree.map(lambda D, h: D + h, D, h)
        return ClientResult(message, weight(work, "uniform"), Client(h), trained)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        if aggregation == "cohort":
            return server._replace(params=jax.tree.map(lambda w, D: w + D, server.params, D))
        w, h, _ = aggregate(server.params, server.h, D, context)  # (4)
        return Server(w, h)

    return Algorithm(
        init_server, init_client, client_update, server_update, requires=Needs(optimizer="sgd"), name="fedspeed"
    )
