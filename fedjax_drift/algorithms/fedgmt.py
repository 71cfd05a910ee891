"""FedGMT. Li, Liu, Cui, Hu, Li, "One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via Global
Model Trajectory", ICML 2025.

Client i:  minimises CE + gamma T^2 mean over the batch of KL(softmax(z_e / T) || softmax(z_theta / T))  (1)
           g <- g + h_i / beta;  D_i = theta_i - w;  h_i <- h_i + D_i                                (2)
Server:    h <- h + (1/N) sum_S D_i;  w <- mean_S theta_i + h                                        (3)
           e <- alpha e + (1 - alpha) w                                                              (4)

with h_i = h = 0 and e = w_0 at first. z are the logits. Those of e, a moving average of the global models, are the
teacher's. These are the variables of `feddyn`, without its proximal term. In the paper, u_i = -h_i / beta.

Deviations:  (3) is that of the authors' code. In the paper, as an independent copy states it, w is the mean of
theta_i + h_i over the cohort (`aggregation="cohort"`), which is unstable if clients are sampled. The code weights
theta_i by n_i (`weighting="examples"`), but not h. Here the teacher is in evaluation mode; in the code it is in
training mode, which makes a difference with dropout and BatchNorm.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, equally, mean_of_equals, weight
from fedjax_drift.algorithms.feddyn import Client, aggregate
from fedjax_drift.local import train
from fedjax_drift.spec import Fraction, NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Round, Work, algorithm, batch_mean


class Server(NamedTuple):
    params: Params  # w, the global model
    h: Params  # mean of h_i over all N clients; stays 0 with aggregation="cohort"
    e: Params  # the moving average of the global models


@algorithm
def fedgmt(
    gamma: NonNegative = 1.0,
    temperature: Positive = 3.0,
    alpha: Fraction = 0.95,
    beta: Positive = 10.0,
    aggregation: Literal["all", "cohort"] = "all",
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Distillation from a moving average of the global models, with the duals of FedDyn.

    The average replaces the second gradient of sharpness-aware steps. The state of a client has the size of one model.
    The server sends two models. A step computes one gradient, and the logits of e.

    Args:
      gamma: weight of the distillation, >= 0.
      temperature: T > 0.
      alpha: weight of the past in e, in [0, 1). With 0, e = w.
      beta: the duals are divided by it, > 0. It is 1 / alpha of `feddyn`.
      aggregation: "all" (default) uses the h_i of all clients, "cohort" those of the cohort.
      weighting: the weight of theta_i in (3): "uniform" (1, default) or "examples" (n_i). Every h_i counts the same.

    The model must have the default loss.
    """
    of_all, once = aggregation == "all", weighting == "uniform"

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), params)

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, e, h = server.params, server.e, client.h

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            model, z = work.model.with_mask(batch.mask), work.logits(theta, batch.x, key, batch.mask)
            kl = divergence(model.apply(e, batch.x), z, temperature)
            return batch_mean(model.loss(z, batch.y) + gamma * temperature**2 * kl, batch.mask)  # (1)

        def dual(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, h: g + h / beta, g, h)  # (2)

        theta, trained = train(work, start=w, correct=dual, loss=loss)
        D = tree.subtract(theta, w)
        h = jax.tree.map(lambda h, D: h + D, h, D)  # (2)
        if once:
            message = D if of_all else jax.tree.map(lambda D, h: D + h, D, h)
        else:
            message = D, equally(D if of_all else h, work, weighting)
        return ClientResult(message, weight(work, weighting), Client(h), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        w, h = server.params, server.h
        D, other = (mean, mean) if once else (mean[0], mean_of_equals(mean[1]))
        if of_all:
            w, h, _ = aggregate(w, h, D, context, other)  # (3)
        else:
            w = jax.tree.map(lambda w, D: w + D, w, D)
            w = w if once else jax.tree.map(lambda w, h: w + h, w, other)
        return Server(w, h, jax.tree.map(lambda e, w: alpha * e + (1 - alpha) * w, server.e, w))  # (4)

    requires = Needs(classifier=True, weights=not once)
    return Algorithm(init_server, init_client, client_update, server_update, requires=requires, name="fedgmt")


def divergence(teacher: jax.Array, logits: jax.Array, temperature: float) -> jax.Array:
    """KL(softmax(teacher / T) || softmax(logits / T)) of each example, [B]. With several labels, their mean."""
    log_p, log_q = (jax.nn.log_softmax(z / temperature) for z in (teacher, logits))
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    return kl.reshape(len(kl), -1).mean(1)
