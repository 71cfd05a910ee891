"""LfD. Kim, Shin, "Learning From Drift: Federated Learning on Non-IID Data via Drift Regularization", 2023,
arXiv 2309.07189, algorithm 1.

Client i:  logits are cosines of normalised features and class weights
           p = softmax((cos - m onehot(y)) / tau), with margin m and temperature tau                 (7)
           f_G: the received global model;  f_P: the local model of client i after its last participation
           drift f_D = log softmax(f_P) - log softmax(f_G)                                           (3)
           yhat = softmax(-f_D) = softmax((cos_G - cos_P) / tau)                                     (8)
           minimises CE(y, p) + CE(yhat, p)                                                          (9), (10)
Server:    as FedAvg.

The normalisation constants of (3) cancel in (8).

Deviations:
- In the paper, (9) has a second minus sign in front of CE(yhat, p). This is a typo: (10) and algorithm 1 have the sign
  that is used above.
- The paper says that tau is used in all softmax functions. Read literally, the exponent in (8) is divided by tau twice,
  and yhat is nearly one-hot (`label_temperature=tau`). This contradicts the text of the paper, which describes label
  smoothing.
- The paper does not define f_P for the first participation of a client. In that round the loss has no term CE(yhat, p).
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Server, fedavg, weight
from fedjax_drift.algorithms.moon import Client
from fedjax_drift.local import train
from fedjax_drift.spec import Flag, NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, Work, algorithm, batch_mean


@algorithm
def lfd(
    temperature: Positive = 0.1,
    margin: NonNegative = 0.15,
    label_temperature: Positive = 1.0,
    first: Literal["none", "uniform"] = "none",
    regularizer: Flag = True,
) -> Algorithm:
    """FedAvg with a drift regularizer: each client also trains on soft labels that oppose its previous drift.

    The state of a client has the size of one model. Without the regularizer, clients keep no state. The model must
    return cosines (``cosine=True``) and use the default loss. `evaluate` predicts the class with the largest cosine.
    The loss that it reports is the cross-entropy of the cosines without margin and temperature.

    Args:
      temperature: tau > 0. The paper uses 0.1 (CIFAR-10, CINIC-10) and 0.05 (CIFAR-100).
      margin: m >= 0, subtracted from the cosine of the true class in training.
      label_temperature: an additional divisor of the exponent in (8), > 0. Default 1.
      first: the loss at the first participation of a client. "none" (default) has no term CE(yhat, p). "uniform" sets
        f_P = f_G, so yhat is uniform (label smoothing of weight 1).
      regularizer: if False, the loss is CE(y, p) alone, as in the paper's ablation: a cosine classifier with a margin.
        Then `label_temperature` and `first` have no effect. Default True.

    Raises:
      ValueError: the model does not return cosines or does not use the default loss.
    """

    def client_update(server: Server, client: Any, work: Work) -> ClientResult:
        w = server.params
        if regularizer:
            previous = jax.tree.map(lambda P, G: jnp.where(client.seen, P, G), client.model, w)
            active = client.seen if first == "none" else True

        def opposed(batch: Batch) -> jax.Array:
            model = work.model.with_mask(batch.mask)
            cos_G, cos_P = model.apply(w, batch.x), model.apply(previous, batch.x)
            return jnp.where(active, jax.nn.softmax((cos_G - cos_P) / (temperature * label_temperature)), 0)  # (8)

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            cos = work.logits(theta, batch.x, key, batch.mask)
            y = jax.nn.one_hot(batch.y, cos.shape[-1], dtype=cos.dtype)
            log_p = jax.nn.log_softmax((cos - margin * y) / temperature)  # (7)
            labels = y + opposed(batch) if regularizer else y
            rows = -(log_p * labels).sum(-1)  # (9), (10)
            return batch_mean(rows.mean(axis=tuple(range(1, rows.ndim))), batch.mask)

        theta, trained = train(work, start=w, loss=loss)
        kept = Client(theta, jnp.array(True)) if regularizer else client
        return ClientResult(tree.subtract(theta, w), weight(work, "examples"), kept, trained)

    base = fedavg()._replace(client_update=client_update, requires=Needs(cosine=True, classifier=True), name="lfd")
    return base._replace(init_client=Client.unseen) if regularizer else base
