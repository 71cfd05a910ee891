"""FedSMOO. Sun, Shen, Chen, Ding, Tao, "Dynamic Regularized Sharpness Aware Minimization in Federated Learning:
Approaching Global Consistency and Smooth Landscape", ICML 2023, arXiv 2305.11584, in the variables of `feddyn`.

Client i, in each step:
           s_i = e(g(theta) - mu_i - s)                                                              (1)
           mu_i <- mu_i + s_i - s                                                                    (2)
           g <- g(theta + s_i) + alpha (theta - w + h_i)                                             (3)
       then  D_i = theta_i - w;  h_i <- h_i + D_i                                                    (4)
Server:    h <- h + (1/N) sum_S D_i;  w <- mean_S theta_i + h                                        (5)
           s <- e(mean_S (mu_i - s_i)), with s_i of the last step                                    (6)

with e(u) = rho u / ||u||. All of mu_i, h_i, s and h start at 0. mu_i is kept between participations. s is the common
perturbation of the clients.

Deviations:
- alpha is the authors' lamb, that is 1 / beta of the paper.
- (6) is that of the paper. The authors' code sends mu_i without s_i (`upload="mu"`), which hardly makes a difference.
  Their code before 26 October 2024 used wrong slices of mu_i and s, so printed numbers may contain this mistake.
- The whole gradient (3) is clipped.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.algorithms.feddyn import aggregate
from fedjax_drift.algorithms.fedsam import ascent
from fedjax_drift.local import train_with
from fedjax_drift.spec import NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the model that is sent to the clients
    h: Params  # mean of h_i over all N clients
    s: Params  # the common perturbation


class Client(NamedTuple):
    h: Params  # h_i, the sum of all updates of the client
    mu: Params  # mu_i, the dual variable of the perturbation


@algorithm
def fedsmoo(
    rho: NonNegative = 0.1, alpha: Positive = 0.1, upload: Literal["mu_minus_s", "mu"] = "mu_minus_s"
) -> Algorithm:
    """FedDyn with sharpness-aware local steps whose perturbations agree between clients. A step computes two gradients.

    The state of a client has the size of two models. Clients receive and send two models. All clients have weight 1 in
    the mean.

    Args:
      rho: size of the perturbation, >= 0. 0 gives FedDyn.
      alpha: strength of the regularisation, > 0.
      upload: the quantity in (6): "mu_minus_s" (default) or "mu".

    Local training must be plain SGD, without momentum.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params), tree.zeros_like(params))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, h, s = server.params, client.h, server.s

        def gradient(theta: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
            mu, _ = carry
            value, g = jax.value_and_grad(work.loss)(theta, batch, key)
            s_i = ascent(rho, jax.tree.map(lambda g, mu, s: g - mu - s, g, mu, s))  # (1)
            mu = jax.tree.map(lambda mu, s_i, s: mu + s_i - s, mu, s_i, s)  # (2)
            g = jax.grad(work.loss)(jax.tree.map(lambda theta, s_i: theta + s_i, theta, s_i), batch, key)  # (3)
            return value, g, (mu, s_i)

        def dynamic(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, w, h: g + alpha * (theta - w + h), g, theta, w, h)  # (3)

        carry = client.mu, tree.zeros_like(w)
        theta, (mu, s_i), trained = train_with(work, w, gradient, carry, correct=dynamic)
        D = tree.subtract(theta, w)
        h = jax.tree.map(lambda h, D: h + D, h, D)  # (4)
        common = tree.subtract(mu, s_i) if upload == "mu_minus_s" else mu
        return ClientResult((D, common), weight(work, "uniform"), Client(h, mu), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, common = mean
        w, h, _ = aggregate(server.params, server.h, D, context)  # (5)
        return Server(w, h, ascent(rho, common))  # (6)

    return Algorithm(
        init_server, init_client, client_update, server_update, requires=Needs(optimizer="sgd"), name="fedsmoo"
    )
