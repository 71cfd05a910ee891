"""FedProto. Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022, arXiv 2105.00243, algorithm 1.

z(x) [F] are the features of an example, C_j [F] is the global prototype of class j, n_ij the number of examples of
class j at client i.

Client i:  theta_i minimises CE + lam R, starting from its last theta_i                              (1)
           R = mean over the batch of |z(x) - C_y|^2 / F, 0 for a class without a prototype          (2)
           C_ij = mean of z(x) over its examples of class j, after the training                      (3)
Server:    C_j <- sum_S n_ij C_ij / sum_S n_ij                              "examples"               (4)
           C_j <- mean of C_ij over the clients of S that have class j      "uniform"                (5)

Only prototypes are sent. The models are personal, and start at the initial model w, which never changes. A class that
no client of the cohort has keeps its prototype.

Deviations:
- (4) is the mean over all examples of a class. Equation (6) of the paper also divides it by the number of clients that
  have the class, so it would not be a mean. The authors' code computes (5).
- In the paper, R (its equation 8) is the sum over the classes of the distances between C_j and the mean of z(x) over
  the examples of class j. (2) is R of the authors' code.
- The authors' code takes the means of (3) over the last local epoch, while the model changes.
- In the paper and its code, all clients train in every round. The paper also lets clients have different networks. Here
  they have one. The code trains with a momentum of 0.5 (`LocalTraining`).
- The paper (equation 4) classifies by the nearest prototype, and its code reports both ways. Here a client uses its
  classifier.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.algorithms.fedavg import Weighting, weight
from fedjax_drift.algorithms.moon import features_and_loss
from fedjax_drift.local import over_examples, train
from fedjax_drift.spec import Count, NonNegative
from fedjax_drift.types import (
    Algorithm,
    Batch,
    ClientResult,
    Needs,
    Params,
    PyTree,
    Round,
    Trained,
    Work,
    algorithm,
    batch_mean,
)


class Server(NamedTuple):
    params: Params  # w, the initial model of all clients; it never changes
    prototypes: jax.Array  # C_j, [classes, F]
    known: jax.Array  # bool [classes], whether a client has sent a prototype of the class


class Client(NamedTuple):
    model: Params  # theta_i


@algorithm
def fedproto(classes: Count, features: Count, lam: NonNegative = 1.0, weighting: Weighting = "examples") -> Algorithm:
    """Personal models whose features of a class agree between clients, by way of the mean features of each class.

    The state of a client has the size of one model. A client sends ``classes * (features + 1)`` numbers. `evaluate`
    evaluates the initial model, so use `evaluate_clients`.

    Args:
      classes: the number of classes, which the logits of the model have.
      features: F, the length of the model's features.
      lam: weight of the distance to the prototypes, >= 0. 0: each client trains alone. The authors use 0.1 to 1.
      weighting: the weight of a client in the prototype of a class: "examples" (n_ij, default) or "uniform" (1).

    The model must have features and the default loss. A round raises ValueError if classes or features are not those of
    the model.
    """

    def init_server(params: Params) -> Server:
        return Server(params, jnp.zeros((classes, features)), jnp.zeros(classes, bool))

    def trained_with(server: Server, client: Client, work: Work) -> tuple[Params, Trained]:
        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            z, CE = features_and_loss(work, theta, batch, key)
            distance = ((z - server.prototypes[batch.y]) ** 2).mean(-1)
            return CE + lam * batch_mean(jnp.where(server.known[batch.y], distance, 0), batch.mask)  # (2)

        check(client.model, work)
        return train(work, client.model, loss=loss)  # (1)

    def check(theta: Params, work: Work) -> None:
        def shapes(theta: Params) -> tuple[jax.Array, jax.Array]:
            batch = work.epoch(work.key)(jnp.int32(0))
            return work.features(theta, batch, work.key), work.logits(theta, batch.x, work.key, batch.mask)

        z, scores = jax.eval_shape(shapes, theta)
        if z.shape[1:] != (features,):
            checks.refuse(f"features of fedproto must be those of the model, {z.shape[1:]}", features)
        if scores.shape[1:] != (classes,):
            checks.refuse(f"classes of fedproto must be the logits of the model, {scores.shape[1:]}", classes)

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        theta, trained = trained_with(server, client, work)

        def sums(batch: Batch) -> tuple[jax.Array, jax.Array]:
            model = work.model.with_mask(batch.mask)
            assert model.features is not None  # `requires` below guarantees it
            of_class = jnp.where(batch.mask[:, None], jax.nn.one_hot(batch.y, classes), 0)
            return of_class.T @ model.features(theta, batch.x), of_class.sum(0)

        total, n = over_examples(work, sums)
        p = jnp.ones_like(n) if weighting == "examples" else 1 / jnp.maximum(n, 1)
        message = p[:, None] * total, p * n  # C_ij times n_ij or 1 (3), and this factor
        return ClientResult(message, weight(work, "uniform"), Client(theta), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        total, n = mean
        is_new = n > 0
        means = total / jnp.where(is_new, n, 1)[:, None]  # (4), (5)
        return Server(server.params, jnp.where(is_new[:, None], means, server.prototypes), server.known | is_new)

    def personal(server: Server, client: Client, work: Work) -> Params:
        return client.model

    made = Algorithm(init_server, Client, client_update, server_update, name="fedproto")
    return made._replace(personal=personal, adapt=trained_with, requires=Needs(features=True, classifier=True))
