"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, arXiv 1910.06378, algorithm 1.

Client i:  theta_i = w;  theta_i <- theta_i - eta_t (g - c_i + c)                                    (1)
           D_i = theta_i - w
           c_i+ = grad F_i(w)                           option I                                     (2)
           c_i+ = c_i - c - D_i / (K_i eta_t)           option II                                    (3)
Server:    w <- w + server_lr mean_S D_i                                                             (4)
           c <- c + (1/N) sum_S (c_i+ - c_i)                                                         (5)

with c_0 = c_i,0 = 0. With plain unclipped SGD, (3) is the mean of the gradients that client i saw in this round, weight
decay included.

Deviates:  with local momentum or another optimizer, D_i / (K_i eta_t) is minus the mean direction instead of the mean
gradient; the variates then cancel the difference of directions, which is still 0 in the mean.
FedDC's and FedDyn's repositories take eta_0 for eta_t and Kbar = E ceil(mean n_i / B) for K_i in (3), and c / q_i for
c, q_i = N n_i / sum n: `variate_lr="initial"`, `variate_steps="mean"`, `scale_by_size=True`. Then (5) weights the
differences by q_i, as FedDC's does. They also cut every client's training off at Kbar steps, which is not here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import full_gradient, train
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work

LRS, STEPS = ("current", "initial"), ("own", "mean")


class Server(NamedTuple):
    params: Params  # w, the global model
    c: Params  # the server's control variate


class Client(NamedTuple):
    c: Params  # c_i, the client's control variate


def scaffold(
    server_lr: float = 1.0,
    option: str = "II",
    scale_by_size: bool = False,
    variate_lr: str = "current",
    variate_steps: str = "own",
) -> Algorithm:
    """Control variates on both sides: every client steps along an estimate of the mean gradient.

    Keeps one model per client. Clients count alike in the mean, whatever their size.

    Args:
      server_lr: > 0.
      option: "II" (default): the variate is the mean gradient seen in the round; "I": the gradient over all of the
        client's rows at w, for one more pass over them.
      scale_by_size: c / q_i for c at client i, and weights q_i in (5).
      variate_lr: "current" (eta_t, default) or "initial" (eta_0) in (3); no effect with option I.
      variate_steps: "own" (K_i, default) or "mean" (Kbar) in (3); no effect with option I.

    Raises:
      ValueError: server_lr <= 0, an unknown option.
    """
    server_lr = checks.positive("server_lr", server_lr)
    checks.choice("option", option, ("I", "II"))
    scale_by_size = checks.flag("scale_by_size", scale_by_size)
    checks.choice("variate_lr", variate_lr, LRS)
    checks.choice("variate_steps", variate_steps, STEPS)

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, c_i, q = server.params, client.c, work.q if scale_by_size else 1.0
        c = jax.tree.map(lambda c: c / q, server.c)
        offset = tree.subtract(c, c_i)

        def control(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, offset: g + offset, g, offset)  # (1)

        theta, metrics = train(work, start=w, correct=control)
        D = tree.subtract(theta, w)
        c_new = full_gradient(work, w) if option == "I" else refresh(c_i, c, D, work, variate_lr, variate_steps)
        dc = jax.tree.map(lambda new, old: q * (new - old), c_new, c_i)
        return ClientResult((D, dc), weight(work, "uniform"), Client(c_new), metrics)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, dc = mean
        w = jax.tree.map(lambda w, D: w + server_lr * D, server.params, D)  # (4)
        c = jax.tree.map(lambda c, dc: c + context.participation * dc, server.c, dc)  # (5)
        return Server(w, c)

    return Algorithm(init_server, init_client, client_update, server_update, name="scaffold")


def refresh(c_i: Params, c: Params, D: Params, work: Work, variate_lr: str, variate_steps: str) -> Params:
    """(3): the client's new variate."""
    scale = 1 / total_rate(work, variate_lr, variate_steps)
    return jax.tree.map(lambda c_i, c, D: c_i - c - scale * D, c_i, c, D)


def total_rate(work: Work, variate_lr: str = "current", variate_steps: str = "own") -> jax.Array:
    """K_i eta_t, or what the options put in its place."""
    lr = work.lr if variate_lr == "current" else jnp.asarray(work.initial_lr, work.lr.dtype)
    return (work.num_steps if variate_steps == "own" else work.mean_steps) * lr
