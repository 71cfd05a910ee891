"""FedEve. Shen, Li, Zhu, Zhao, Wu, Wu, "FedEve: On Bridging the Client Drift and Period Drift for Cross-device
Federated Learning", 2025, arXiv 2508.14539, algorithm 1.

Server:    w_hat <- w - server_lr M                            predict                                (15a)
           shat2 <- s2 + sQ2                                                                         (15b)
Client i:  starts at w_hat;  Delta_i = w_hat - theta_i
Server:    Delta = sum_S n_i Delta_i / sum_S n_i
           sQ2 = ||M - Delta||^2 / (|S| d)                    period drift                           (16)
           sR2 = sum_S ||Delta_i - Delta||^2 / (|S|^2 d)      client drift                           (16)
           G = shat2 / (shat2 + sR2)                          Kalman gain, 0 for 0/0                 (15c)
           M <- M + G (Delta - M)                                                                    (15d)
           w <- w - server_lr M                               observe                                (15e)
           s2 <- (1 - G) shat2                                                                       (15f)

with M_0 = 0 and s2_0 = 0. Each variance is one scalar for all d parameters. In a steady state
sQ2 / sR2 = G^2 / (1 - G).

Period drift: the data of a cohort as a whole differ from the data of the federation. Client drift: the data of the
clients in one cohort differ from each other.

Deviations:
- Two other equations of the paper, (11) and (32), have typos. The mean in (11) must be divided by shat2 + sR2. (32)
  must add the variance s2, not the standard deviation. The algorithm above follows the corrected equations.
- The authors' code does not subtract M in sQ2 (`period_variance="code"`). This increases the gain if the updates have a
  common direction.
- The authors' code computes sR2 around the unweighted mean (`centre="uniform"`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train
from fedjax_drift.spec import Positive
from fedjax_drift.types import Algorithm, ClientResult, Metrics, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the observed model; the clients receive w - server_lr M
    M: Params  # momentum, in the units of the parameters
    s2: jax.Array  # [], variance of w


class Message(NamedTuple):
    """The terms whose means over the cohort give Delta and sR2. All are float32 or wider."""

    n_Delta: Params  # n_i Delta_i
    n: jax.Array  # [], n_i
    Delta: Params  # Delta_i = w_hat - theta_i
    square: jax.Array  # [], ||Delta_i||^2


@algorithm
def fedeve(
    server_lr: Positive = 1.0,
    period_variance: Literal["paper", "code"] = "paper",
    centre: Literal["weighted", "uniform"] = "weighted",
) -> Algorithm:
    """Server momentum with an adaptive gain. It is the Kalman gain for the variances of period drift and client drift.

    `info` has the scalars ``gain`` (G, in [0, 1]), ``period_variance`` (sQ2) and ``client_variance`` (sR2). With a
    single client, sR2 is 0 and the gain is 1. If no client reports in a round, the variances are NaN.

    Args:
      server_lr: eta_g of the paper, > 0.
      period_variance: sQ2 as in the "paper" (default), equation (16), or in the "code": ||Delta||^2 / (|S| d).
      centre: sR2 is the spread around the mean with weights n_i ("weighted", default) or around the unweighted mean
        ("uniform", as in the authors' code).
    """

    def predict(server: Server) -> Params:
        return jax.tree.map(lambda w, M: w - server_lr * M, server.params, server.M)  # (15a)

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), jnp.zeros((), float))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w_hat = predict(server)
        theta, trained = train(work, start=w_hat)
        n = weight(work, "examples")
        Delta = jax.tree.map(lambda w_hat, theta: w_hat.astype(n.dtype) - theta.astype(n.dtype), w_hat, theta)
        message = Message(jax.tree.map(lambda Delta: n * Delta, Delta), n, Delta, tree.dot(Delta, Delta))
        return ClientResult(message, weight(work, "uniform"), client, trained)

    def kalman(server: Server, mean: Message, context: Round) -> tuple[Params, jax.Array, jax.Array, jax.Array]:
        """Returns Delta, sQ2, sR2 and G."""
        n = jnp.where(mean.n == 0, 1, mean.n)  # an empty cohort of importance sampling has Delta = 0
        Delta = jax.tree.map(lambda n_Delta: n_Delta / n, mean.n_Delta)
        S, d = context.participation * context.num_clients, tree.size(Delta)
        gap = Delta if period_variance == "code" else tree.subtract(server.M, Delta)
        sQ2 = tree.dot(gap, gap) / (S * d)  # (16)
        # mean ||Delta_i - centre||^2 = mean ||Delta_i||^2 - ||mean Delta_i||^2 + ||mean Delta_i - centre||^2
        offset = tree.subtract(mean.Delta, Delta if centre == "weighted" else mean.Delta)
        spread = mean.square - tree.dot(mean.Delta, mean.Delta) + tree.dot(offset, offset)
        sR2 = jnp.maximum(spread, 0) / (S * d)  # (16)
        shat2 = server.s2 + sQ2  # (15b)
        G = jnp.where(shat2 + sR2 > 0, shat2 / (shat2 + sR2), 0)  # (15c)
        return Delta, sQ2, sR2, G

    def server_update(server: Server, mean: Message, context: Round) -> Server:
        Delta, sQ2, _, G = kalman(server, mean, context)
        M = jax.tree.map(lambda M, Delta: M + G * (Delta - M), server.M, Delta)  # (15d)
        w = jax.tree.map(lambda w, M: w - server_lr * M, server.params, M)  # (15e)
        return Server(w, M, (1 - G) * (server.s2 + sQ2))  # (15f)

    def report(server: Server, mean: Message, context: Round) -> Metrics:
        _, sQ2, sR2, G = kalman(server, mean, context)
        return {"gain": G, "period_variance": sQ2, "client_variance": sR2}

    # The variances are estimates of one server from cohorts of the whole federation.
    needs = Needs(one_server=True)
    return Algorithm(
        init_server, lambda params: (), client_update, server_update, report=report, name="fedeve", requires=needs
    )
