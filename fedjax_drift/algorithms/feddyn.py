"""FedDyn. Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, arXiv 2111.04263, algorithm 1, with the variables of the authors' code.

Client i:  minimises F_i(theta) + alpha <theta, h_i> + (alpha/2) ||theta - w||^2:
           g <- grad F_i(theta) + alpha (theta - w + h_i)                                            (1)
           D_i = theta_i - w;  h_i <- h_i + D_i                                                      (2)
Server:    h <- h + (1/N) sum_S D_i,  so h = (1/N) sum_all h_i                                       (3)
           w <- mean_S theta_i + h                                                                   (4)

In the notation of the paper, grad L_i is -alpha h_i, and the server's h^t is -alpha times our h.

Deviations:
- The paper minimises the client's objective exactly. Here, as in the authors' code, clients run E epochs of SGD.
- The authors' code adds the term alpha theta of (1) as weight decay, after the gradient is clipped. Here the whole
  gradient (1) is clipped.
- The authors' code uses alpha / q_i with q_i = N n_i / sum n instead of alpha (`scale_by_size=True`).
- The authors plot the accuracy of the mean of all N clients' last models. This mean is not computed here. `evaluate`
  reports the accuracy of w, and that of the mean of the cohort's models as ``client_mean_accuracy``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, equally, mean_of_equals, weight
from fedjax_drift.local import train
from fedjax_drift.spec import Flag, Positive
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the model that is sent to the clients
    h: Params  # mean of h_i over all N clients
    client_mean: Params  # mean of the last cohort's models, mean_S theta_i


class Client(NamedTuple):
    h: Params  # h_i, the sum of all updates of the client


@algorithm
def feddyn(alpha: Positive, scale_by_size: Flag = False, weighting: Weighting = "uniform") -> Algorithm:
    """Dynamic regularisation, which makes the clients' stationary points consistent with that of the global loss.

    The state of a client has the size of one model. The equations are the same with local momentum or another
    optimizer, because h_i is a sum of updates, not of gradients.

    `evaluate` reports the metrics of w. It also reports the metrics of the mean of the cohort's models, with the prefix
    ``client_mean_``. (The authors plot the mean of all clients' last models instead.)

    Args:
      alpha: strength of the regularisation, > 0. The papers use 0.01 to 0.1. If local training converges, h_i
        is the gradient of F_i at theta_i divided by -alpha. With a small alpha this value is large, so many local steps
        are needed to reach it. A large alpha slows down the local training.
      scale_by_size: if True, client i uses alpha / q_i.
      weighting: the weight of a client in the mean of (4): "uniform" (1, default) or "examples" (n_i, which doubles the
        upload). In (3), every client counts the same. `fd.aggregation.private` needs "uniform".
    """

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

        theta, trained = train(work, start=w, correct=dynamic)
        D = tree.subtract(theta, w)
        h = jax.tree.map(lambda h, D: h + D, h, D)  # (2)
        message = D if weighting == "uniform" else (D, equally(D, work, weighting))
        return ClientResult(message, weight(work, weighting), Client(h), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, of_h = (mean, mean) if weighting == "uniform" else (mean[0], mean_of_equals(mean[1]))
        return Server(*aggregate(server.params, server.h, D, context, of_h))

    made = Algorithm(init_server, init_client, client_update, server_update, name="feddyn")
    requires = Needs(weights=weighting == "examples")
    return made._replace(models=lambda server: {"client_mean": server.client_mean}, requires=requires)


def aggregate(
    w: Params, h: Params, D: Params, context: Round, of_h: Params | None = None
) -> tuple[Params, Params, Params]:
    """Equations (3) and (4) for the mean update D. Returns the new w, the new h and the mean of the local models.

    of_h: the mean update of (3), if it is another one than D.
    """
    h = jax.tree.map(lambda h, D: h + context.participation * D, h, D if of_h is None else of_h)  # (3)
    client_mean = jax.tree.map(lambda w, D: w + D, w, D)
    return jax.tree.map(lambda mean, h: mean + h, client_mean, h), h, client_mean  # (4)
