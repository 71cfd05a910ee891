"""FedNTD. Lee, Jeong, Shin, Bae, Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022, arXiv 2106.03097.

Client i:  minimises CE + beta T^2 mean over the batch of KL(q_w || q_theta)                         (1)
           q: the softmax of z_c / T over the classes c != y (the "not-true" classes)                (2)
Server:    as FedAvg

z are the logits. q_w is that of the global model, in evaluation mode. The gradient of (1) with respect to the logits is
that of CE, plus beta T (q_theta - q_w) for the classes c != y.

Deviations:  none. The copy of FedNTD in FedACG's repository minimises (1 - b) CE + b KL, without T^2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift.algorithms.fedavg import Weighting, fedavg, trained_from
from fedjax_drift.model import cross_entropy
from fedjax_drift.spec import NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Work, algorithm, batch_mean


@algorithm
def fedntd(beta: NonNegative = 1.0, temperature: Positive = 1.0, weighting: Weighting = "examples") -> Algorithm:
    """FedAvg with distillation from the global model, for the classes that are not the label of an example.

    Local training then keeps what the global model knows of classes that a client does not have. Clients keep no state.
    A step computes one gradient, and the logits of the global model.

    Args:
      beta: weight of the distillation, >= 0. 0 gives FedAvg.
      temperature: T > 0.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).

    The model must have the default loss.
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w = server.params

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            logits = work.logits(theta, batch.x, key, batch.mask)
            model = work.model.with_mask(batch.mask)
            others = ~jax.nn.one_hot(batch.y, logits.shape[-1], dtype=bool)
            log_q, log_q_w = (
                jnp.where(others, jax.nn.log_softmax(jnp.where(others, z / temperature, -jnp.inf)), 0)  # (2)
                for z in (logits, model.apply(w, batch.x))
            )
            kl = jnp.where(others, jnp.exp(log_q_w) * (log_q_w - log_q), 0).sum(-1)
            kl = kl.reshape(len(kl), -1).mean(1)  # an example may have several labels
            return batch_mean(cross_entropy(logits, batch.y) + beta * temperature**2 * kl, batch.mask)  # (1)

        return trained_from(w, work, weighting, client, loss=loss)

    return fedavg(weighting=weighting)._replace(
        client_update=client_update, requires=Needs(classifier=True), name="fedntd"
    )
