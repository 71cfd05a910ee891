"""VRL-SGD. Liang, Shen, Liu, Pan, Chen, Cheng, "Variance Reduced Local SGD with Lower Communication Complexity", 2019,
arXiv 1912.12844, algorithm 1.

Client i:  theta_i = w;  theta_i <- theta_i - eta_t (g - Delta_i)                                    (1)
Server:    w <- mean theta_i                                                                         (2)
Client i:  Delta_i <- Delta_i + (w - theta_i) / (K_i eta_t)                                          (3)

                    = Delta_i + (mean D - D_i) / (K_i eta_t),  D_i = theta_i - the old w

with Delta_i = 0 at first. Delta_i is client i's mean gradient less everyone's: SCAFFOLD's c_i - c without a server
variate. With equal K_i the Delta_i sum to 0.

Deviates:  the paper has all clients in every round. With sampling, (2) and (3) take the cohort, and absent clients keep
their Delta_i, so that the sum stays 0; but an absent client's Delta_i ages, which the server's variate of SCAFFOLD
mends. With local momentum or another optimizer Delta_i balances directions instead of gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.algorithms.scaffold import total_rate
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work


class Server(NamedTuple):
    params: Params  # w, the global model
    mean_D: Params  # the last mean update


class Client(NamedTuple):
    Delta: Params  # Delta_i; from a client's update to the server's, Delta_i - D_i / (K_i eta_t)
    rate: jax.Array  # [], 1 / (K_i eta_t)


def vrl_sgd() -> Algorithm:
    """Local SGD with variance reduction: every client subtracts how its gradients differ from everyone's.

    Keeps one model per client. Clients count alike in the mean, whatever their size.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params), jnp.zeros((), float))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, Delta, rate = server.params, client.Delta, 1 / total_rate(work)

        def reduce_variance(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, Delta: g - Delta, g, Delta)  # (1)

        theta, metrics = train(work, start=w, correct=reduce_variance)
        D = tree.subtract(theta, w)
        pending = jax.tree.map(lambda Delta, D: Delta - rate * D, Delta, D)
        return ClientResult(D, weight(work, "uniform"), Client(pending, rate), metrics)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        return Server(jax.tree.map(lambda w, D: w + D, server.params, D), D)  # (2)

    def finish(server: Server, client: Client) -> Client:
        rate = client.rate
        return Client(jax.tree.map(lambda pending, D: pending + rate * D, client.Delta, server.mean_D), rate)  # (3)

    return Algorithm(init_server, init_client, client_update, server_update, finish=finish, name="vrl_sgd")
