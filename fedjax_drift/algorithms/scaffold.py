"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, arXiv 1910.06378, algorithm 1.

Client i:  theta_i = w;  theta_i <- theta_i - eta_t (g - c_i + c)                                    (1)
           D_i = theta_i - w
           c_i+ = grad F_i(w)                           option I                                     (2)
           c_i+ = c_i - c - D_i / (K_i eta_t)           option II                                    (3)
Server:    w <- w + server_lr mean_S D_i                                                             (4)
           c <- c + (1/N) sum_S (c_i+ - c_i)                                                         (5)

with c_0 = c_i,0 = 0. With plain SGD without clipping, (3) is the mean of the gradients of client i in this round,
including weight decay.

Deviations:  with local momentum or another optimizer, D_i / (K_i eta_t) is the negative mean update direction, not the
negative mean gradient. The control variates then correct directions. The corrections still sum to 0 over the clients,
but the optimizer gets them as a part of the gradient, and momentum amplifies them again: with a momentum of 0.9, the
control variates may diverge. NIID-Bench's code corrects the model after the optimizer's step (`corrects="model"`):

           theta_i <- theta_i - eta_t u(g) - eta_t (c - c_i),  u(g) is the direction of the optimizer      (1')

so c_i+ is the mean of u(g). For plain SGD without clipping, (1') is (1).

The repositories of FedDC and FedDyn use other quantities in (1) and (3):
- eta_0 instead of eta_t (`variate_lr="initial"`);
- Kbar = E ceil(mean n_i / B) instead of K_i (`variate_steps="mean"`);
- c / q_i with q_i = N n_i / sum n instead of c (`scale_by_size=True`). (5) then weights the differences by q_i. The
  repositories use c / q_i in (1), but c in (3). Here (3) uses it, too, so that c_i+ is a mean gradient.
Both repositories also train every client for exactly Kbar steps. This is not implemented here. Others weight (4) by n_i
(`weighting="examples"`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, equally, mean_of_equals, weight
from fedjax_drift.local import full_gradient, train
from fedjax_drift.spec import Flag, Positive
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm

Rate = Literal["current", "initial"]
Steps = Literal["own", "mean"]
Corrected = Literal["gradient", "model"]


class Server(NamedTuple):
    params: Params  # w, the global model
    c: Params  # the server's control variate


class Client(NamedTuple):
    c: Params  # c_i, the client's control variate


@algorithm
def scaffold(
    server_lr: Positive = 1.0,
    option: Literal["I", "II"] = "II",
    scale_by_size: Flag = False,
    variate_lr: Rate = "current",
    variate_steps: Steps = "own",
    weighting: Weighting = "uniform",
    corrects: Corrected = "gradient",
) -> Algorithm:
    """Local training that is corrected by control variates of the server and of the clients.

    With the correction, every local step follows an estimate of the mean gradient of all clients. The state of a client
    has the size of one model.

    Args:
      server_lr: learning rate of the server, > 0.
      option: the control variate of a client. "II" (default) is the mean of its gradients in the round. "I" is the
        gradient at w over all its examples, which costs one more pass over them.
      scale_by_size: if True, client i uses c / q_i instead of c, and (5) weights the clients by q_i.
      variate_lr: the learning rate in (3): "current" (eta_t, default) or "initial" (eta_0). No effect with option I.
      variate_steps: the number of steps in (3): "own" (K_i, default) or "mean" (Kbar). No effect with option I.
      weighting: the weight of a client in (4): "uniform" (1, default) or "examples" (n_i). In (5), every client counts
        the same, so c stays the mean of c_i. `fd.aggregation.private` needs "uniform".
      corrects: what a local step corrects: the "gradient" (1, default), or the "model" after the optimizer's step (1').
        Use "model" with local momentum. With plain SGD without clipping, both are the same.
    """

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

        def move(theta: Params, k: jax.Array) -> Params:
            return jax.tree.map(lambda theta, offset: theta - work.lr * offset, theta, offset)  # (1')

        how = {"correct": control} if corrects == "gradient" else {"after": move}
        theta, trained = train(work, start=w, **how)
        D = tree.subtract(theta, w)
        c_new = full_gradient(work, w) if option == "I" else refresh(c_i, c, D, work, variate_lr, variate_steps)
        dc = jax.tree.map(lambda new, old: q * (new - old), c_new, c_i)
        return ClientResult((D, equally(dc, work, weighting)), weight(work, weighting), Client(c_new), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, dc = mean[0], mean_of_equals(mean[1])  # (|S| / N) mean_S dc = (1 / N) sum_S dc
        w = jax.tree.map(lambda w, D: w + server_lr * D, server.params, D)  # (4)
        c = jax.tree.map(lambda c, dc: c + context.participation * dc, server.c, dc)  # (5)
        return Server(w, c)

    requires = Needs(weights=weighting == "examples")
    return Algorithm(init_server, init_client, client_update, server_update, name="scaffold", requires=requires)


def refresh(
    c_i: Params, c: Params, D: Params, work: Work, variate_lr: str = "current", variate_steps: str = "own"
) -> Params:
    """Equation (3): the new control variate of the client, option II."""
    scale = 1 / total_rate(work, variate_lr, variate_steps)
    return jax.tree.map(lambda c_i, c, D: c_i - c - scale * D, c_i, c, D)


def total_rate(work: Work, variate_lr: str = "current", variate_steps: str = "own") -> jax.Array:
    """K_i eta_t. The options can replace K_i by Kbar and eta_t by eta_0."""
    lr = work.lr if variate_lr == "current" else jnp.asarray(work.initial_lr, work.lr.dtype)
    return (work.num_steps if variate_steps == "own" else work.mean_steps) * lr
