"""MOON. Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, arXiv 2103.16257, algorithm 1.

Client i:  minimises CE + mu con, z, z_glob, z_prev the features of theta, w and client i's previous model:
           con = -log( exp(cos(z, z_glob) / T) / (exp(cos(z, z_glob) / T) + exp(cos(z, z_prev) / T)) )    (3)
Server:    as FedAvg.

Deviates:  a client that was never sampled before has no previous model and no contrastive term. In the authors' code
there is none in round 0; later such a client's previous model is its own random initial network
(`first="random_init"`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import Server, fedavg, weight
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, Batch, ClientResult, Params, Work, batch_mean


class Client(NamedTuple):
    model: Params  # theta_i after the client's last participation
    seen: jax.Array  # bool [], whether there was one

    @staticmethod
    def unseen(params: Params) -> Client:
        return Client(params, jnp.array(False))


def moon(mu: float = 1.0, temperature: float = 0.5, first: str = "none") -> Algorithm:
    """FedAvg whose clients keep their features near the global model's and away from their own previous ones.

    Keeps one model per client. Needs ``Model.features``, which must depend on the parameters to have an effect: in a
    linear model they are the inputs.

    Args:
      mu: >= 0, weight of the contrastive term; the authors tune it in 0.001 to 10. 0 is FedAvg.
      temperature: T > 0.
      first: a client's first participation: "none" (default): no contrastive term; "random_init": from round 1 on,
        its previous model is freshly initialised.

    Raises:
      ValueError: a value out of range; a model without features.
    """
    mu = checks.nonnegative("mu", mu)
    temperature = checks.positive("temperature", temperature)
    checks.choice("first", first, ("none", "random_init"))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, previous, active, model = server.params, client.model, client.seen, work.model
        features = model.features
        assert features is not None  # required below
        if first == "random_init":
            fresh = model.init(jax.random.fold_in(work.key, work.epochs))
            previous = jax.tree.map(lambda old, new: jnp.where(client.seen, old, new), previous, fresh)
            active = active | (work.t > 0)

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            z, z_glob, z_prev = (features(params, batch.x) for params in (theta, w, previous))
            con = jax.nn.softplus((cosine(z, z_prev) - cosine(z, z_glob)) / temperature)  # (3)
            if model.head and not model.train_apply:  # the features are there already
                CE = batch_mean(model.loss(model.head(theta, z), batch.y), batch.mask)
            else:
                CE = work.loss(theta, batch, key)
            return CE + mu * jnp.where(active, batch_mean(con, batch.mask), 0)

        theta, metrics = train(work, start=w, loss=loss)
        client = Client(theta, jnp.array(True))
        return ClientResult(tree.subtract(theta, w), weight(work, "examples"), client, metrics)

    return fedavg()._replace(
        init_client=Client.unseen, client_update=client_update, requires=("features",), name="moon"
    )


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """cos of the rows of a and b, [B]; 0, with a gradient of 0, where one vanishes."""

    def unit(z: jax.Array) -> jax.Array:
        return z / jnp.sqrt(jnp.maximum((z**2).sum(-1, keepdims=True), 1e-16))

    return (unit(a) * unit(b)).sum(-1)
