"""VRL-SGD. Liang, Shen, Liu, Pan, Chen, Cheng, "Variance Reduced Local SGD with Lower Communication Complexity", 2019,
arXiv 1912.12844, algorithm 1.

Client i:  theta_i = w;  theta_i <- theta_i - eta_t (g - Delta_i)                                    (1)
Server:    w <- mean theta_i                                                                         (2)
Client i:  Delta_i <- Delta_i + (w - theta_i) / (K_i eta_t)                                          (3)
                    = Delta_i + (mean D - D_i) / (K_i eta_t),  D_i = theta_i - the old w

with Delta_i = 0 at first. Delta_i is the mean gradient of client i minus the mean gradient of all clients. It
corresponds to c_i - c of SCAFFOLD, but the server stores no control variate. With equal K_i the sum of all Delta_i
is 0.

Deviations:
- In the paper all clients take part in every round. With client sampling, (2) and (3) only use the cohort, and the
  other clients keep their Delta_i. The sum of all Delta_i stays 0, but the Delta_i outside the cohort become outdated.
  SCAFFOLD avoids this with the control variate of the server.
- With local momentum or another optimizer, Delta_i corrects update directions instead of gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.algorithms.scaffold import total_rate
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    mean_D: Params  # the last mean update


class Client(NamedTuple):
    Delta: Params  # Delta_i; between client_update and finish: Delta_i - D_i / (K_i eta_t)
    rate: jax.Array  # [], 1 / (K_i eta_t)


@algorithm
def vrl_sgd() -> Algorithm:
    """Local SGD with variance reduction.

    In every local step, a client subtracts Delta_i from its gradient. Delta_i estimates the difference between the
    client's mean gradient and the mean gradient of all clients. The state of a client has the size of one model and a
    scalar. All clients have weight 1 in the mean.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params), jnp.zeros((), float))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, Delta, rate = server.params, client.Delta, 1 / total_rate(work)

        def reduce_variance(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, Delta: g - Delta, g, Delta)  # (1)

        theta, trained = train(work, start=w, correct=reduce_variance)
        D = tree.subtract(theta, w)
        pending = jax.tree.map(lambda Delta, D: Delta - rate * D, Delta, D)
        return ClientResult(D, weight(work, "uniform"), Client(pending, rate), trained)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        return Server(jax.tree.map(lambda w, D: w + D, server.params, D), D)  # (2)

    def finish(server: Server, client: Client) -> Client:
        rate = client.rate
        return Client(jax.tree.map(lambda pending, D: pending + rate * D, client.Delta, server.mean_D), rate)  # (3)

    made = Algorithm(init_server, init_client, client_update, server_update, finish=finish, name="vrl_sgd")
    return made._replace(requires=Needs(one_rate=True))  # (3) divides the mean of the updates by the client's own rate
