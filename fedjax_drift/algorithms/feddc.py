"""FedDC. Gao, Fu, Li, Chen, Xu, Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction", CVPR 2022, arXiv 2203.11751, equations (4)-(7), as its authors' code reads them.

Client i:  minimises F_i(theta) + (alpha/2) ||theta - (w - h_i)||^2 + <theta, c - c_i>:
           g <- grad F_i(theta) + alpha (theta - w + h_i) + c - c_i                                  (4), (5)
           D_i = theta_i - w;  h_i <- h_i + D_i                                                      (6)
           c_i+ = c_i - c - D_i / (K_i eta_t)                                                        (G)
Server:    w <- mean_S theta_i + (1/N) sum_all h_i                                                   (7)
           c <- c + (1/N) sum_S (c_i+ - c_i)                                                         (G)

(6) and (7) are FedDyn's, (G) is SCAFFOLD's option II: the code is the sum of the two.

Deviates:  the paper prints (G) as <theta, g_i - g> / (eta K) with g_i the difference of two consecutive local models,
or elsewhere of local and global, g its mean over all clients; the first diverges, the second (`variate="last_update"`)
converges more slowly than the code's recursion, the default. The paper's (7) is the mean of theta_i + h_i over all N,
weighted by n_i, with the last theta_i of absent clients (`aggregation="paper"`): the same as above when all take part
and have equal sizes, slower otherwise. The paper's h_i is introduced as w - theta_i; (6) has the sign that works. The
authors' runs have alpha / q_i and c / q_i (`scale_by_size=True`, q_i = N n_i / sum n), eta_0 for eta_t
(`variate_lr="initial"`) and Kbar = E ceil(mean n_i / B) for K_i (`variate_steps="mean"`), clipping at 10, weight decay
1e-3, Bernoulli cohorts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.algorithms.feddyn import aggregate
from fedjax_drift.algorithms.scaffold import LRS, STEPS, refresh
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work


class Server(NamedTuple):
    params: Params  # w, the model that is sent
    h: Params  # mean over all N clients of their drifts h_i
    client_mean: Params  # mean of the last cohort's models, mean_S theta_i
    c: Params  # the server's control variate


class Client(NamedTuple):
    h: Params  # h_i, the local drift
    c: Params  # c_i, the client's control variate
    sent: PyTree  # theta_i + h_i, for aggregation="paper"; else ()


def feddc(
    alpha: float,
    scale_by_size: bool = False,
    variate_lr: str = "current",
    variate_steps: str = "own",
    variate: str = "scaffold",
    aggregation: str = "code",
) -> Algorithm:
    """Local drift decoupling and correction.

    Keeps two models per client (three for `aggregation="paper"`). `evaluate` reports w and, as ``client_mean_...``, the
    mean of the cohort's models. Clients count alike in the mean, whatever their size. With local momentum or another
    optimizer, D_i / (K_i eta_t) is minus the mean direction instead of the mean gradient, and the variates balance
    directions.

    Args:
      alpha: > 0; the paper uses 0.1 for MNIST, 0.01 for CIFAR, 0.005 for synthetic data.
      scale_by_size: alpha / q_i and c / q_i at client i, weights q_i in c's update.
      variate_lr: "current" (eta_t, default) or "initial" (eta_0) in (G).
      variate_steps: "own" (K_i, default) or "mean" (Kbar) in (G).
      variate: "scaffold" (default); "last_update": c_i+ = -D_i / (K_i eta_t); "none": FedDyn.
      aggregation: (7) as the "code" has it (default), or as the "paper" prints it.

    Raises:
      ValueError: alpha <= 0, an unknown option.
    """
    alpha = checks.positive("alpha", alpha)
    scale_by_size = checks.flag("scale_by_size", scale_by_size)
    checks.choice("variate_lr", variate_lr, LRS)
    checks.choice("variate_steps", variate_steps, STEPS)
    checks.choice("variate", variate, ("scaffold", "last_update", "none"))
    checks.choice("aggregation", aggregation, ("code", "paper"))

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params), tree.zeros_like(params), params if aggregation == "paper" else ())

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, (h, c_i, sent), q = server.params, client, work.q if scale_by_size else 1.0
        c, a = jax.tree.map(lambda c: c / q, server.c), alpha / q
        # What does not depend on theta is summed once: a step reads one vector instead of four.
        fixed = jax.tree.map(lambda w, h, c, c_i: a * (h - w) + c - c_i, w, h, c, c_i)

        def decouple(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, theta, fixed: g + a * theta + fixed, g, theta, fixed)  # (4), (5)

        theta, metrics = train(work, start=w, correct=decouple)
        D = tree.subtract(theta, w)
        h = jax.tree.map(lambda h, D: h + D, h, D)  # (6)
        if variate == "none":
            c_new = c_i
        else:
            recursive = (c_i, c) if variate == "scaffold" else (tree.zeros_like(c_i), tree.zeros_like(c))
            c_new = refresh(*recursive, D, work, variate_lr, variate_steps)  # (G)
        dc = jax.tree.map(lambda new, old: q * (new - old), c_new, c_i)
        new = jax.tree.map(lambda theta, h: theta + h, theta, h) if aggregation == "paper" else ()
        ds = jax.tree.map(lambda new, old: work.q * (new - old), new, sent)
        return ClientResult((D, dc, ds), weight(work, "uniform"), Client(h, c_new, new), metrics)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, dc, ds = mean
        w, h, client_mean = aggregate(server.params, server.h, D, context)  # (7)
        if aggregation == "paper":
            w = jax.tree.map(lambda w, ds: w + context.participation * ds, server.params, ds)  # (7), over all N
        c = jax.tree.map(lambda c, dc: c + context.participation * dc, server.c, dc)  # (G)
        return Server(w, h, client_mean, c)

    return Algorithm(init_server, init_client, client_update, server_update, name="feddc")
