"""FedDyn. Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, arXiv 2111.04263, algorithm 1, in the variables of its authors' code.

Client i:  minimises F_i(theta) + alpha <theta, h_i> + (alpha/2) ||theta - w||^2:
           g <- grad F_i(theta) + alpha (theta - w + h_i)                                            (1)
           D_i = theta_i - w;  h_i <- h_i + D_i                                                      (2)
Server:    h <- h + (1/N) sum_S D_i,  so h = (1/N) sum_all h_i                                       (3)
           w <- mean_S theta_i + h                                                                   (4)

The paper's variables are grad L_i = -alpha h_i and its server's h = -alpha h.

Deviates:  clients minimise by E epochs of SGD. The authors put alpha theta of (1) into the optimizer's weight decay,
outside the clipping of the gradient; here (1) is clipped as a whole. Their alpha / q_i, q_i = N n_i / sum n, is
`scale_by_size=True`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work


class Server(NamedTuple):
    params: Params  # w, the model that is sent
    h: Params  # mean over all N clients of their h_i
    client_mean: Params  # mean of the last cohort's models, mean_S theta_i


class Client(NamedTuple):
    h: Params  # h_i, the sum of all its updates


def feddyn(alpha: float, scale_by_size: bool = False) -> Algorithm:
    """Dynamic regularisation: clients' stationary points become consistent with the federation's.

    Keeps one model per client. `evaluate` reports w and, as ``client_mean_...``, the mean of the cohort's models, which
    is what the authors plot. Clients count alike in the mean, whatever their size. With a local optimizer other than
    SGD the definitions stay as they are: h_i is a sum of updates, not of gradients.

    Args:
      alpha: > 0; the papers use 0.01 to 0.1. A client's h_i is its gradient at theta_i divided by -alpha, so a small
        alpha needs many local steps to take effect, and a large one slows every client.
      scale_by_size: alpha / q_i for client i.

    Raises:
      ValueError: alpha <= 0.
    """
    alpha = checks.positive("alpha", alpha)
    scale_by_size = checks.flag("scale_by_size", scale_by_size)

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), params)

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, h = server.params, client.h
        a = alpha / work.q if scale_by_size else alpha
        centre = jax.tree.map(lambda w, h: w - h, w, h)

        def dynamic(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, centre: g + a * (theta - centre), g, theta, centre)  # (1)

        theta, metrics = train(work, start=w, correct=dynamic)
        D = tree.subtract(theta, w)
        return ClientResult(D, weight(work, "uniform"), Client(jax.tree.map(lambda h, D: h + D, h, D)), metrics)  # (2)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        return Server(*aggregate(server.params, server.h, D, context))

    return Algorithm(init_server, init_client, client_update, server_update, name="feddyn")


def aggregate(w: Params, h: Params, D: Params, context: Round) -> tuple[Params, Params, Params]:
    """(3) and (4) from the cohort's mean update D: the new w, h, and the mean of the clients' models."""
    h = jax.tree.map(lambda h, D: h + context.participation * D, h, D)  # (3)
    client_mean = jax.tree.map(lambda w, D: w + D, w, D)
    return jax.tree.map(lambda mean, h: mean + h, client_mean, h), h, client_mean  # (4)
