"""FedVARP. Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: Tackling the Variance Due to Partial Client Participation
in Federated Learning", UAI 2022, arXiv 2207.14130, algorithm 2.

Client i:  theta_i = w, then local training;  d_i = (theta_i - w) / eta_t;  sends d_i - y_i          (1)
           y_i <- d_i                                                                                (2)
Server:    v = ybar + mean_S (d_i - y_i)                                                             (3)
           w <- w + server_lr eta_t v                                                                (4)
           ybar <- ybar + (1/N) sum_S (d_i - y_i),  so ybar = (1/N) sum_all y_i                      (5)

with y_i = 0 before the first participation. If the cohort is sampled uniformly, the expected value of v is the mean of
d_i over all N clients. Its variance is that of d_i - y_i, the change since the last participation.

Deviations:
- The server of the paper keeps all y_i. Here client i keeps y_i, and the server gets the mean of d_i - y_i. The numbers
  and the bytes sent are the same.
- The paper divides by eta tau, with tau steps of every client. Here d_i is not divided by K_i, so with all clients in
  every round it is FedAvg with uniform weights, whatever the K_i are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train
from fedjax_drift.spec import Positive
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    y: Params  # ybar, the mean of y_i over all N clients


class Client(NamedTuple):
    y: Params  # y_i, the client's last update divided by its learning rate


@algorithm
def fedvarp(server_lr: Positive = 1.0) -> Algorithm:
    """FedAvg in which the last updates of all clients reduce the variance of partial participation.

    The mean over the cohort corrects the mean of the last updates of all clients. Local training and what is sent are
    as in FedAvg. The state of a client has the size of one model. All clients have weight 1 in the mean, so rules that
    change the weights are refused: `fd.participation.importance`, cohorts that contain a client twice, and the
    discounts of `fd.clock.asynchronous`.

    Args:
      server_lr: learning rate of the server, > 0. With 1 (default) and all clients in every round, it is FedAvg with
        uniform weights.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        theta, trained = train(work, start=server.params)
        d = jax.tree.map(lambda theta, w: (theta - w) / work.lr, theta, server.params)
        change = tree.subtract(d, client.y)  # (1)
        return ClientResult(change, weight(work, "uniform"), Client(d), trained)  # (2)

    def server_update(server: Server, change: PyTree, context: Round) -> Server:
        v = jax.tree.map(lambda y, c: y + c, server.y, change)  # (3)
        w = jax.tree.map(lambda w, v: w + server_lr * context.lr * v, server.params, v)  # (4)
        return Server(w, jax.tree.map(lambda y, c: y + context.participation * c, server.y, change))  # (5)

    requires = Needs(equal_weights=True)
    return Algorithm(init_server, init_client, client_update, server_update, name="fedvarp", requires=requires)
