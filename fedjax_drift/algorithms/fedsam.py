"""FedSAM and MoFedSAM. Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization",
ICML 2022, arXiv 2206.02618.

Client i:  e = rho g(theta) / ||g(theta)||;  g <- g(theta + e)         FedSAM                        (1)
           g <- alpha g(theta + e) + (1 - alpha) Delta                 MoFedSAM                      (2)
Server:    w <- w + server_lr mean_S D_i                               FedSAM                        (3)
           as FedCM                                                    MoFedSAM

The norm is that of all parameters together, and e = 0 if the gradient is 0. Both gradients of a step use the same batch
and the same dropout key. e is computed from the raw gradient, without clipping and without weight decay.

Deviations:  the paper writes beta for alpha. The FedSAM of Caldarola et al. (ECCV 2022) is `weighting="examples"`.
Their ASAM and SWA are not implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg, trained_from
from fedjax_drift.algorithms.fedcm import with_client_momentum
from fedjax_drift.spec import NonNegative, Positive, Share
from fedjax_drift.types import Algorithm, Batch, ClientResult, Params, PyTree, Work, algorithm


@algorithm
def fedsam(rho: NonNegative = 0.1, server_lr: Positive = 1.0, weighting: Weighting = "uniform") -> Algorithm:
    """FedAvg with sharpness-aware local steps, which prefer flat minima. A step computes two gradients.

    Args:
      rho: the distance at which the second gradient is computed, >= 0. 0 gives FedAvg.
      server_lr: factor of the mean update, > 0.
      weighting: the weight of a client in the mean: "uniform" (1, default) or "examples" (n_i).
    """
    base = fedavg(server_lr, weighting)

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        return trained_from(server.params, work, weighting, client, loss=perturbed(work, rho))

    return base._replace(client_update=client_update, name="fedsam")


@algorithm
def mofedsam(
    rho: NonNegative = 0.1, alpha: Share = 0.1, server_lr: Positive = 1.0, steps: Literal["cohort", "own"] = "cohort"
) -> Algorithm:
    """FedCM with sharpness-aware local steps. A step computes two gradients.

    Args:
      rho: as in `fedsam`. 0 gives FedCM.
      alpha, server_lr, steps: as in `fedcm`. alpha = 1 gives FedSAM.

    Local training must be plain SGD, without momentum.
    """
    return with_client_momentum(alpha, server_lr, steps, lambda work: perturbed(work, rho))._replace(name="mofedsam")


def perturbed(work: Work, rho: float) -> Callable[[Params, Batch, jax.Array], jax.Array]:
    """A loss whose gradient at theta is g(theta + e), equation (1)."""

    def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
        e = ascent(rho, jax.grad(work.loss)(lax.stop_gradient(theta), batch, key))
        return work.loss(jax.tree.map(lambda theta, e: theta + e, theta, e), batch, key)

    return loss


def ascent(rho: float, u: Params) -> Params:
    """rho u / ||u|| over all leaves together, and 0 if u = 0."""
    norm = jnp.sqrt(tree.dot(u, u))
    scale = jnp.where(norm > 0, rho / jnp.where(norm > 0, norm, 1), 0)
    return jax.tree.map(lambda u: (scale * u).astype(u.dtype), u)
