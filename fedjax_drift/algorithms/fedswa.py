"""FedSWA and FedMoSWA. Liu, Liu, Shang, Liu, Liu, Feng, "Improving Generalization in Federated Learning with Highly
Heterogeneous Data via Momentum-Based Stochastic Controlled Weight Averaging", ICML 2025, arXiv 2507.20016.

Client i, step k = 0..K_i - 1:
           theta <- theta - eta_k u;  eta_k = eta_t (1 - (1 - rho) k / K_i)                          (1)
           g <- g + m - c_i                                         FedMoSWA only                    (2)
           c_i+ = c_i - m - D_i / sum_k eta_k                       FedMoSWA only                    (3)
           sum_k eta_k = eta_t (K_i (1 + rho) + 1 - rho) / 2                                         (4)
Server:    w <- w + alpha mean_S D_i                                                                 (5)
           m <- m + gamma (mean_S c_i+ - m)                         FedMoSWA only                    (6)

with m_0 = c_i,0 = 0. By (3), c_i+ is the mean of the gradients of client i in this round, weighted by eta_k.

Deviations:  these are the equations of the paper, as two independent copies state them. The authors' code computes
others: FedSWA with rho = 0, alpha = 1 and twice the learning rate; FedMoSWA with a constant rate in a round, alpha = 1,
gamma = 0.4 (1 in the first round) and (2) after clipping. There the c_i belong to worker processes, not to clients,
because they are written to one dict and read from another. With gamma = 0, m stays 0, and (2) removes the gradient with
the drift.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import fedavg, weight
from fedjax_drift.local import train
from fedjax_drift.spec import Mix, Positive, Share
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    m: Params  # the momentum, a moving mean of the clients' control variates


class Client(NamedTuple):
    c: Params  # c_i, the client's control variate


@algorithm
def fedswa(rho: Mix = 0.1, alpha: Positive = 1.5) -> Algorithm:
    """FedAvg with a learning rate that decreases within a round, and a server that extrapolates.

    Clients keep no state. All clients have weight 1 in the mean. The authors recommend twice the learning rate of
    FedAvg.

    Args:
      rho: the learning rate decreases from eta_t towards rho eta_t in a round, in [0, 1]. 1 keeps it constant.
      alpha: factor of the mean update, > 0. With rho = 1 as well, 1 gives FedAvg with uniform weights.

    Local training must be plain SGD, without momentum.
    """
    base = fedavg(alpha, "uniform")  # (5)

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        return base.client_update(server, client, decaying(work, rho))

    return base._replace(client_update=client_update, requires=Needs(optimizer="sgd"), name="fedswa")


@algorithm
def fedmoswa(rho: Mix = 0.1, alpha: Positive = 1.5, gamma: Share = 0.2) -> Algorithm:
    """FedSWA with control variates of the clients and a momentum of the server.

    The state of a client has the size of one model. All clients have weight 1 in the mean.

    Args:
      rho, alpha: as in `fedswa`.
      gamma: the weight of the cohort in the momentum, in (0, 1].

    Raises:
      ValueError: local training uses momentum or another optimizer. A `Simulation` refuses asynchronous rounds with
        clients of several versions.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, m, c_i = server.params, server.m, client.c

        def control(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, m, c: g + m - c, g, m, c_i)  # (2)

        theta, trained = train(decaying(work, rho), start=w, correct=control)
        D = tree.subtract(theta, w)
        total_rate = work.lr * (work.num_steps * (1 + rho) + 1 - rho) / 2  # (4)
        c_new = jax.tree.map(lambda c, m, D: c - m - D / total_rate, c_i, m, D)  # (3)
        return ClientResult((D, tree.subtract(c_new, m)), weight(work, "uniform"), Client(c_new), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, dm = mean
        w = jax.tree.map(lambda w, D: w + alpha * D, server.params, D)  # (5)
        return Server(w, jax.tree.map(lambda m, dm: m + gamma * dm, server.m, dm))  # (6)

    needs = Needs(optimizer="sgd", one_version=True)  # (6) moves m towards a mean, from the m that is in the message
    return Algorithm(init_server, init_client, client_update, server_update, requires=needs, name="fedmoswa")


def decaying(work: Work, rho: float) -> Work:
    """The work with the step sizes of equation (1)."""
    K = work.num_steps.clip(1).astype(work.lr.dtype)
    decay = optax.scale_by_schedule(lambda k: 1 - (1 - rho) * k / K)
    return work._replace(optimizer=optax.chain(work.optimizer, decay))
