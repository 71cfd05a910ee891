"""FedLC. Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022, arXiv 2209.00189.

Client i:  minimises the cross-entropy of the calibrated logits z_c - tau n_ic^(-1/4)                (1)
Server:    as FedAvg

n_ic is how many training examples of client i have the label c. The margin tau n_ic^(-1/4) is larger for rarer classes,
so local training does not lower their logits as much. `evaluate` uses the plain logits.

Deviations:
- In the paper, the sum in the denominator of the softmax leaves the label out (`denominator="others"`). The loss is
  then unbounded below, and users report that training collapses. The implementations that we read include the label
  (default).
- The margin of a class without examples is infinite. The class is left out of the softmax, as in FedACG's repository
  (`missing="mask"`), or n_ic is 1e-8, as in two other repositories (`missing="floor"`).
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_drift.algorithms.fedavg import Weighting, fedavg, trained_from
from fedjax_drift.model import cross_entropy
from fedjax_drift.spec import NonNegative
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Work, algorithm, batch_mean


@algorithm
def fedlc(
    tau: NonNegative = 1.0,
    denominator: Literal["all", "others"] = "all",
    missing: Literal["mask", "floor"] = "mask",
    weighting: Weighting = "examples",
) -> Algorithm:
    """FedAvg with logits that are calibrated by the client's label counts.

    Args:
      tau: strength of the calibration, >= 0. 0 gives FedAvg.
      denominator: the classes in the denominator of the softmax: "all" (default) or "others" (all but the label, as
        printed in the paper). With "others" and "mask", every client needs at least two classes.
      missing: classes that a client does not have: "mask" (left out of the softmax, default) or "floor" (a count of
        1e-8, so a margin of 100 tau). With "mask", a client with one class does not move the model.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).

    The model must have the default loss.
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w = server.params
        batch = jax.eval_shape(lambda: work.epoch(work.key)(jnp.int32(0)))
        logits = jax.eval_shape(lambda batch: work.model.with_mask(batch.mask).apply(w, batch.x), batch)
        counts = work.label_counts(logits.shape[-1])  # once, and not in every step

        def calibrated(logits: jax.Array) -> jax.Array:
            n = jnp.broadcast_to(counts.astype(logits.dtype), logits.shape)
            z = logits - tau * jnp.maximum(n, 1e-8) ** -0.25  # (1)
            return jnp.where((n > 0) | (tau == 0), z, -jnp.inf) if missing == "mask" else z

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            z = calibrated(work.logits(theta, batch.x, key, batch.mask))
            if denominator == "all":
                return batch_mean(cross_entropy(z, batch.y), batch.mask)
            y = jax.nn.one_hot(batch.y, z.shape[-1], dtype=bool)
            value = jax.nn.logsumexp(jnp.where(y, -jnp.inf, z), axis=-1) - jnp.where(y, z, 0).sum(-1)
            value = jnp.where(tau == 0, cross_entropy(z, batch.y), value.reshape(len(value), -1).mean(1))
            return batch_mean(value, batch.mask)

        return trained_from(w, work, weighting, client, loss=loss)

    return fedavg(weighting=weighting)._replace(
        client_update=client_update, requires=Needs(classifier=True), name="fedlc"
    )
