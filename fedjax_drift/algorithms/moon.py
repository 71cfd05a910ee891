"""MOON. Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, arXiv 2103.16257, algorithm 1.

Client i:  minimises CE + mu con; z, z_glob, z_prev are the features of theta, w and the previous model of client i:
           con = -log( exp(cos(z, z_glob) / T) / (exp(cos(z, z_glob) / T) + exp(cos(z, z_prev) / T)) )    (3)
Server:    as FedAvg.

Deviations:  a client that participates for the first time has no previous model, and its loss has no contrastive term.
In the authors' code this only holds in round 0. In later rounds, such a client uses its random initial network as the
previous model (`first="random_init"`). In the copies of PFLlib, FedNTD and NIID-Bench, it uses the initial global model
(`first="initial"`). The authors' code drops the last batch of an epoch if it is short; here it is used, as
with all algorithms.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Server, Weighting, fedavg, weight
from fedjax_drift.local import train
from fedjax_drift.spec import NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, Work, algorithm, batch_mean


class Client(NamedTuple):
    model: Params  # theta_i after the last participation of the client
    seen: jax.Array  # bool [], whether the client has participated before

    @staticmethod
    def unseen(params: Params) -> Client:
        return Client(params, jnp.array(False))


@algorithm
def moon(
    mu: NonNegative = 1.0,
    temperature: Positive = 0.5,
    first: Literal["none", "initial", "random_init"] = "none",
    weighting: Weighting = "examples",
) -> Algorithm:
    """FedAvg with a contrastive loss.

    The loss pulls the features of the local model towards the features of the global model. It pushes them away from
    the features of the client's previous local model.

    The state of a client has the size of one model. The algorithm needs ``Model.features``. The contrastive term has no
    effect if the features do not depend on the parameters. This is the case for a linear model, whose features are the
    inputs.

    Args:
      mu: weight of the contrastive term, >= 0. 0 gives FedAvg. The authors tune it in 0.001 to 10.
      temperature: T > 0.
      first: the loss at the first participation of a client. "none" (default) has no contrastive term. From round 1
        on, "initial" uses the initial global model as the previous model, and "random_init" a randomly initialised one.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).

    The model must have features.
    """

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, previous, active, model = server.params, client.model, client.seen, work.model
        if first == "random_init":
            fresh = model.init(jax.random.fold_in(work.key, work.epochs))
            previous = jax.tree.map(lambda old, new: jnp.where(client.seen, old, new), previous, fresh)
        if first != "none":
            active = active | (work.t > 0)

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            z, CE = features_and_loss(work, theta, batch, key)
            features = model.with_mask(batch.mask).features
            assert features is not None  # `requires` below guarantees it
            z_glob, z_prev = features(w, batch.x), features(previous, batch.x)
            con = jax.nn.softplus((cosine(z, z_prev) - cosine(z, z_glob)) / temperature)  # (3)
            return CE + mu * jnp.where(active, batch_mean(con, batch.mask), 0)

        theta, trained = train(work, start=w, loss=loss)
        client = Client(theta, jnp.array(True))
        return ClientResult(tree.subtract(theta, w), weight(work, weighting), client, trained)

    return fedavg(weighting=weighting)._replace(
        init_client=Client.unseen, client_update=client_update, requires=Needs(features=True), name="moon"
    )


def features_and_loss(work: Work, theta: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The features [B, F] of a batch, and its mean loss. One forward pass gives both, if the model allows it."""
    z, model = work.features(theta, batch, key), work.model.with_mask(batch.mask)
    if model.head is None or model.train_apply is not None or model.statistics is not None:
        return z, work.loss(theta, batch, key)
    return z, batch_mean(model.loss(model.head(theta, z), batch.y), batch.mask)


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """The cosine of each pair of rows of a and b [B, F]: [B]. A zero row gives 0, with a gradient of 0."""

    def unit(z: jax.Array) -> jax.Array:
        return z / jnp.sqrt(jnp.maximum((z**2).sum(-1, keepdims=True), 1e-16))

    return (unit(a) * unit(b)).sum(-1)
