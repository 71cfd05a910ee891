"""FedEve. Shen, Li, Zhu, Zhao, Wu, Wu, "FedEve: On Bridging the Client Drift and Period Drift for Cross-device
Federated Learning", 2025, arXiv 2508.14539, algorithm 1.

Server:    what <- w - server_lr M                            predict                                (15a)
           shat2 <- s2 + sQ2                                                                         (15b)
Client i:  starts at what;  Delta_i = what - theta_i
Server:    Delta = sum_S n_i Delta_i / sum_S n_i
           sQ2 = ||M - Delta||^2 / (|S| d)                    period drift                           (16)
           sR2 = sum_S ||Delta_i - Delta||^2 / (|S|^2 d)      client drift                           (16)
           G = shat2 / (shat2 + sR2)                          Kalman gain, 0 where 0/0               (15c)
           M <- M + G (Delta - M)                                                                    (15d)
           w <- w - server_lr M                               observe                                (15e)
           s2 <- (1 - G) shat2                                                                       (15f)

with M_0 = 0 and s2_0 = 0. Variances are scalars, over all d parameters. In a steady state sQ2 / sR2 = G^2 / (1 - G).

Deviates:  the printed (11) and (32) have typing errors (a denominator, a square), mended above. The authors' code does
not subtract M in sQ2 (`period_variance="code"`), which raises the gain where updates have a common direction, and
centres sR2 on the unweighted mean (`centre="uniform"`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Metrics, Params, PyTree, Round, Work


class Server(NamedTuple):
    params: Params  # w, the observed model; what is sent is w - server_lr M
    M: Params  # momentum, in units of parameters
    s2: jax.Array  # [], variance of w


class Message(NamedTuple):
    """Sums from which a mean and a spread follow in one pass, without a stack of updates."""

    n_Delta: Params  # n_i Delta_i, in float32 or wider, as all of these
    n: jax.Array  # [], n_i
    Delta: Params  # Delta_i = what - theta_i
    square: jax.Array  # [], ||Delta_i||^2


def fedeve(server_lr: float = 1.0, period_variance: str = "paper", centre: str = "weighted") -> Algorithm:
    """Server momentum whose step is a Kalman gain: period drift against client drift.

    `info` has ``gain`` (G, in [0, 1]), ``period_variance`` (sQ2) and ``client_variance`` (sR2), scalars. A single
    client has no spread: its gain is 1. (In a round in which nobody answered the variances are NaN.)

    Args:
      server_lr: eta_g > 0.
      period_variance: "paper" (16), default, or "code": ||Delta||^2 / (|S| d).
      centre: of the spread sR2, "weighted" by n_i (default) or "uniform" (the authors' code).

    Raises:
      ValueError: server_lr <= 0, an unknown option.
    """
    server_lr = checks.positive("server_lr", server_lr)
    checks.choice("period_variance", period_variance, ("paper", "code"))
    checks.choice("centre", centre, ("weighted", "uniform"))

    def predict(server: Server) -> Params:
        return jax.tree.map(lambda w, M: w - server_lr * M, server.params, server.M)  # (15a)

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), jnp.zeros((), float))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        what = predict(server)
        theta, metrics = train(work, start=what)
        n = weight(work, "examples")
        Delta = jax.tree.map(lambda what, theta: what.astype(n.dtype) - theta.astype(n.dtype), what, theta)
        message = Message(jax.tree.map(lambda Delta: n * Delta, Delta), n, Delta, tree.dot(Delta, Delta))
        return ClientResult(message, weight(work, "uniform"), client, metrics)

    def kalman(server: Server, mean: Message, context: Round) -> tuple[Params, jax.Array, jax.Array, jax.Array]:
        """Delta, sQ2, sR2, G."""
        Delta = jax.tree.map(lambda n_Delta: n_Delta / mean.n, mean.n_Delta)
        S, d = context.participation * context.num_clients, tree.size(Delta)
        gap = Delta if period_variance == "code" else tree.subtract(server.M, Delta)
        sQ2 = tree.dot(gap, gap) / (S * d)  # (16)
        # The mean of ||Delta_i - centre||^2: the spread about the uniform mean, and that mean's distance to the centre.
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

    return Algorithm(init_server, lambda params: (), client_update, server_update, report=report, name="fedeve")
