"""FedDecorr. Shi, Liang, Zhang, Tan, Bai, "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous
Federated Learning", ICLR 2023, arXiv 2210.00226.

Client i:  z = (h - mean h) / sqrt(1e-8 + var h)    h [b, d]: the features of the b examples of a batch  (1)
           minimises CE + beta R;  R = (1/b) mean over j != k of (z' z)_jk^2                             (2)
Server:    as FedAvg

The mean and the variance (with divisor b - 1) are those of each feature in the batch. Padding does not enter. R is 0
for a batch of one example. It does not change if a feature is scaled or shifted.

Deviations:  the paper prints (2) with the correlations C = z' z / (b - 1) in the place of z' z / sqrt(b). The authors'
code has (2), and the tables come from it. (2) grows with b: with b = 64, beta = 0.1 has the effect of 6.2 on the
correlations (`scale="correlation"`).
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_drift.algorithms.fedavg import Weighting, fedavg, trained_from
from fedjax_drift.algorithms.moon import features_and_loss
from fedjax_drift.spec import NonNegative
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Work, algorithm


@algorithm
def feddecorr(
    beta: NonNegative = 0.1, scale: Literal["code", "correlation"] = "code", weighting: Weighting = "examples"
) -> Algorithm:
    """FedAvg with a loss term that decorrelates the features, so that they do not collapse to few dimensions.

    Clients keep no state. The algorithm needs ``Model.features``. The term has no effect if the features do not depend
    on the parameters, as in a linear model.

    Args:
      beta: weight of the term, >= 0. 0 gives FedAvg. The authors use 0.1 for all data sets.
      scale: R of equation (2): "code" (default), or "correlation" (the mean of the squared correlations), with which
        beta must be about 60 times as large for batches of 64 examples.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).

    The model must have features.
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            h, CE = features_and_loss(work, theta, batch, key)
            return CE + beta * redundancy(h, batch.mask, scale)

        return trained_from(server.params, work, weighting, client, loss=loss)

    base = fedavg(weighting=weighting)
    return base._replace(client_update=client_update, requires=Needs(features=True), name="feddecorr")


def redundancy(h: jax.Array, mask: jax.Array, scale: str) -> jax.Array:
    """R of equation (2) for the features h [B, d] of the examples where the mask [B] is True, a scalar."""
    wide = jnp.promote_types(h.dtype, jnp.float32)
    h, real, b = h.astype(wide), mask[:, None], mask.sum().astype(wide)
    centred = jnp.where(real, h - jnp.where(real, h, 0).sum(0, keepdims=True) / b, 0)
    variance = (centred**2).sum(0, keepdims=True) / jnp.maximum(b - 1, 1)
    z = centred / jnp.sqrt(1e-8 + variance)  # (1)
    pairs = jnp.where(jnp.eye(h.shape[1], dtype=bool), 0, z.T @ z)
    mean = (pairs**2).sum() / max(h.shape[1] * (h.shape[1] - 1), 1)
    return mean / (b if scale == "code" else jnp.maximum(b - 1, 1) ** 2)  # (2)
