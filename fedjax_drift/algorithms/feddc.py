"""FedDC. Gao, Fu, Li, Chen, Xu, Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction", CVPR 2022, arXiv 2203.11751, equations (4)-(7), as in the authors' code.

Client i:  minimises F_i(theta) + (alpha/2) ||theta - (w - h_i)||^2 + <theta, c - c_i>:
           g <- grad F_i(theta) + alpha (theta - w + h_i) + c - c_i                                  (4), (5)
           D_i = theta_i - w;  h_i <- h_i + D_i                                                      (6)
           c_i+ = c_i - c - D_i / (K_i eta_t)                                                        (G)
Server:    w <- mean_S theta_i + (1/N) sum_all h_i                                                   (7)
           c <- c + (1/N) sum_S (c_i+ - c_i)                                                         (G)

h_i is the local drift variable, and c_i and c are control variates. The updates (6) and (7) are the same as in FedDyn.
(G) is option II of SCAFFOLD. The authors' code combines the two.

Deviations:  the paper and the authors' code differ in these points:
- (G): the paper adds <theta, g_i - g> / (eta K) to the loss, where g is the mean of g_i over all clients. The paper
  defines g_i in two ways. First, g_i is the difference of two consecutive local models. Training then diverges, so this
  definition is not implemented. Second, g_i is the local model minus the global model (`variate="last_update"`). This
  converges more slowly than (G), which the authors' code uses (default).
- (7): in the paper, w is the mean of theta_i + h_i with weights n_i. With partial participation, it can be the mean
  over the cohort (`aggregation="cohort"`) or over all N clients (`aggregation="paper"`). The table in
  docs/algorithms.md compares them. With full participation and equal sizes, all three are equal.
- (6): the text of the paper introduces h_i as w - theta_i. Training only works with the opposite sign, as in (6).

The authors' experiments use, with q_i = N n_i / sum n:
- alpha / q_i and c / q_i instead of alpha and c (`scale_by_size=True`);
- eta_0 instead of eta_t (`variate_lr="initial"`);
- Kbar = E ceil(mean n_i / B) instead of K_i (`variate_steps="mean"`);
- gradient clipping at norm 10, weight decay 1e-3, and Bernoulli sampling of clients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.algorithms.feddyn import aggregate
from fedjax_drift.algorithms.scaffold import Rate, Steps, refresh
from fedjax_drift.local import train
from fedjax_drift.spec import Flag, Positive
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the model that is sent to the clients
    h: Params  # mean of h_i over all N clients
    client_mean: Params  # mean of the last cohort's models, mean_S theta_i
    c: Params  # the server's control variate


class Client(NamedTuple):
    h: Params  # h_i, the local drift variable
    c: Params  # c_i, the client's control variate
    sent: PyTree  # the last theta_i + h_i with aggregation="paper", otherwise ()


@algorithm
def feddc(
    alpha: Positive,
    scale_by_size: Flag = False,
    variate_lr: Rate = "current",
    variate_steps: Steps = "own",
    variate: Literal["scaffold", "last_update", "none"] = "scaffold",
    aggregation: Literal["code", "cohort", "paper"] = "code",
) -> Algorithm:
    """Local drift decoupling and correction: FedDyn's regularisation with SCAFFOLD's control variates.

    The state of a client has the size of two models (three with `aggregation="paper"`). All clients have weight 1 in
    the mean. `evaluate` reports the metrics of w. It also reports the metrics of the mean of the cohort's models, with
    the prefix ``client_mean_``.

    With local momentum or another optimizer, D_i / (K_i eta_t) is the negative mean update direction, not the negative
    mean gradient. The control variates then correct update directions.

    Args:
      alpha: strength of the regularisation, > 0. The paper uses 0.1 for MNIST, 0.01 for CIFAR, 0.005 for synthetic
        data.
      scale_by_size: if True, client i uses alpha / q_i and c / q_i, and the update of c weights the clients by q_i.
      variate_lr: the learning rate in (G): "current" (eta_t, default) or "initial" (eta_0).
      variate_steps: the number of steps in (G): "own" (K_i, default) or "mean" (Kbar).
      variate: the update rule of the control variates. "scaffold" (default) is (G). "last_update" is
        c_i+ = -D_i / (K_i eta_t). "none" keeps c_i = c = 0, which gives FedDyn.
      aggregation: the mean in (7). "code" (default) is (7) above. "cohort" is sum_S n_i (theta_i + h_i) / sum_S n_i.
        "paper" is the same mean over all N clients, each with the theta_i + h_i of its last participation, or the
        initial model before its first.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params), tree.zeros_like(params), params if aggregation == "paper" else ())

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, (h, c_i, sent), q = server.params, client, work.q if scale_by_size else 1.0
        c, a = jax.tree.map(lambda c: c / q, server.c), alpha / q
        # Terms that do not depend on theta are added once, so a step reads one vector instead of four.
        fixed = jax.tree.map(lambda w, h, c, c_i: a * (h - w) + c - c_i, w, h, c, c_i)

        def decouple(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, fixed: g + a * theta + fixed, g, theta, fixed)  # (4), (5)

        theta, trained = train(work, start=w, correct=decouple)
        D = tree.subtract(theta, w)
        h = jax.tree.map(lambda h, D: h + D, h, D)  # (6)
        if variate == "none":
            c_new = c_i
        else:
            recursive = (c_i, c) if variate == "scaffold" else (tree.zeros_like(c_i), tree.zeros_like(c))
            c_new = refresh(*recursive, D, work, variate_lr, variate_steps)  # (G)
        dc = jax.tree.map(lambda new, old: q * (new - old), c_new, c_i)
        share: PyTree = ()  # of the client in the other two means of (7)
        if aggregation == "cohort":
            share = jax.tree.map(lambda D, h: work.q * (D + h), D, h), work.q
        elif aggregation == "paper":
            new = jax.tree.map(lambda theta, h: theta + h, theta, h)
            share, sent = jax.tree.map(lambda new, old: work.q * (new - old), new, sent), new
        return ClientResult((D, dc, share), weight(work, "uniform"), Client(h, c_new, sent), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, dc, share = mean
        w, h, client_mean = aggregate(server.params, server.h, D, context)  # (7)
        if aggregation == "cohort":
            w = jax.tree.map(lambda w, s: w + s / share[1], server.params, share[0])  # (7), over S
        elif aggregation == "paper":
            w = jax.tree.map(lambda w, s: w + context.participation * s, server.params, share)  # (7), over all N
        c = jax.tree.map(lambda c, dc: c + context.participation * dc, server.c, dc)  # (G)
        return Server(w, h, client_mean, c)

    made = Algorithm(init_server, init_client, client_update, server_update, name="feddc")
    return made._replace(models=lambda server: {"client_mean": server.client_mean})
