"""LfD. Kim, Shin, "Learning From Drift: Federated Learning on Non-IID Data via Drift Regularization", 2023,
arXiv 2309.07189, algorithm 1.

Client i:  logits are cosines of normalised features and class weights; p = softmax((cos - m at y) / tau)   (5)
           f_G: the model that was sent, f_P: client i's own after its last participation
           drift f_D = log softmax(f_P) - log softmax(f_G)                                           (6)
           yhat = softmax(-f_D) = softmax((cos_G - cos_P) / tau)                                     (7)
           minimises CE(y, p) + CE(yhat, p)                                                          (8)-(10)
Server:    as FedAvg.

The margin and the normalisers of (6) cancel in (7).

Deviates:  (9) prints a second minus in front of (8), a slip: (10) and algorithm 1 have it as above. "tau in all
softmax functions" would divide (7) by tau twice and make yhat nearly one-hot (`label_temperature=tau`), while the text
speaks of label smoothing. At a client's first participation there is no f_P, and no second term; the paper is silent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import Server, fedavg, weight
from fedjax_drift.algorithms.moon import Client
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, Batch, ClientResult, Params, Work, batch_mean


def lfd(
    temperature: float = 0.1, margin: float = 0.15, label_temperature: float = 1.0, first: str = "none"
) -> Algorithm:
    """FedAvg whose clients learn, beside their labels, not to drift as they did before.

    Keeps one model per client. Needs a model whose `apply` returns cosines (``cosine=True``) and the default loss.
    `evaluate`'s accuracy is that of the largest cosine, its loss the cross-entropy of the bare cosines.

    Args:
      temperature: tau > 0; the paper has 0.1 (CIFAR-10, CINIC-10), 0.05 (CIFAR-100).
      margin: m >= 0, taken off the true class's cosine in training.
      label_temperature: > 0, divides (7)'s exponent once more.
      first: a client's first participation: "none" (default): without CE(yhat, p); "uniform": f_P = f_G, so that yhat
        is uniform (label smoothing of weight 1).

    Raises:
      ValueError: a value out of range; a model without ``cosine=True``, or with a loss of its own.
    """
    temperature = checks.positive("temperature", temperature)
    margin = checks.nonnegative("margin", margin)
    label_temperature = checks.positive("label_temperature", label_temperature)
    checks.choice("first", first, ("none", "uniform"))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w, model = server.params, work.model
        previous = jax.tree.map(lambda P, G: jnp.where(client.seen, P, G), client.model, w)
        active = client.seen if first == "none" else True

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            cos = work.logits(theta, batch.x, key)
            cos_G, cos_P = model.apply(w, batch.x), model.apply(previous, batch.x)
            y = jax.nn.one_hot(batch.y, cos.shape[-1], dtype=cos.dtype)
            yhat = jax.nn.softmax((cos_G - cos_P) / (temperature * label_temperature))  # (7)
            log_p = jax.nn.log_softmax((cos - margin * y) / temperature)  # (5)
            rows = -(log_p * (y + jnp.where(active, yhat, 0))).sum(-1)  # (8)-(10)
            return batch_mean(rows.mean(axis=tuple(range(1, rows.ndim))), batch.mask)

        theta, metrics = train(work, start=w, loss=loss)
        client = Client(theta, jnp.array(True))
        return ClientResult(tree.subtract(theta, w), weight(work, "examples"), client, metrics)

    return fedavg()._replace(
        init_client=Client.unseen, client_update=client_update, requires=("cosine", "classifier"), name="lfd"
    )
