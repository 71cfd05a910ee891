"""FedSOL. Lee, Jeong, Kim, Oh, Yun, "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated
Learning", CVPR 2024.

Client i:  r = gradient by theta of mean over the batch of KL(softmax(z_w / T) || softmax(z_theta / T))  (1)
           e = rho r / ||r||                                                                         (2)
           e <- e |theta - w| / (norm of |theta - w| along the outputs)        adaptive only         (3)
           g <- g(theta + e)                                                                         (4)
Server:    as FedAvg

z are the logits; those of w are in evaluation mode. The norm of (2) is over all parameters together. (3) acts on each
leaf: a kernel [..., inputs, outputs] is divided by the norm of each row of outputs, and a bias by its own norm. The
outputs of a leaf are on the axes `Model.output_axes`, in any layout.

Deviations:  (3) of the authors' code is along PyTorch's first axis, which the outputs are, except for transposed
convolutions. Here e = 0 if theta = w, as in the first step of a round. There r is 0 up to rounding errors, which (2)
would scale to length rho. The authors' code scales them, although it adds 1e-12 to the norm; if it is adaptive, (3)
then gives e = 0. It can also perturb only the classifier or only the other layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import axes, tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg, trained_from
from fedjax_drift.algorithms.fedgmt import divergence
from fedjax_drift.algorithms.fedsam import ascent
from fedjax_drift.spec import Flag, NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Work, algorithm, batch_mean


@algorithm
def fedsol(
    rho: NonNegative = 1.0, temperature: Positive = 3.0, adaptive: Flag = True, weighting: Weighting = "examples"
) -> Algorithm:
    """Local steps with the gradient at a point where the predictions differ more from those of the global model.

    Such steps are nearly orthogonal to the gradient of a proximal loss, which they then do not increase. Clients keep
    no state. A step computes two gradients, and the logits of the global model.

    Args:
      rho: the distance at which the gradient is computed, >= 0; with ``adaptive`` an upper bound. 0 gives FedAvg.
      temperature: T > 0.
      adaptive: whether (3) scales the perturbation with the local change of each parameter.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).

    The model must have the default loss.
    """
    base = fedavg(weighting=weighting)

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w = server.params

        def perturbation(theta: Params, batch: Batch, key: jax.Array) -> Params:
            model = work.model.with_mask(batch.mask)

            def restriction(theta: Params) -> jax.Array:
                z = work.logits(theta, batch.x, key, batch.mask)
                return batch_mean(divergence(model.apply(w, batch.x), z, temperature), batch.mask)

            change = tree.subtract(theta, w)
            e = ascent(rho, jax.grad(restriction)(theta))  # (1), (2)
            if adaptive:
                e = jax.tree.map(relative, e, change, axes.outputs(work.model.output_axes, w))  # (3)
            moved = jnp.stack([(leaf != 0).any() for leaf in jax.tree.leaves(change)]).any()
            return jax.tree.map(lambda e: jnp.where(moved, e, 0), e)

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            e = perturbation(lax.stop_gradient(theta), batch, key)
            return work.loss(jax.tree.map(lambda theta, e: theta + e, theta, e), batch, key)  # (4)

        return trained_from(w, work, weighting, client, loss=loss)

    return base._replace(client_update=client_update, requires=Needs(classifier=True), name="fedsol")


def relative(e: jax.Array, change: jax.Array, outputs: tuple[int, ...]) -> jax.Array:
    """e |change| / (norm of the change along the axes of the outputs), for one leaf."""
    wide = change.astype(jnp.promote_types(change.dtype, jnp.float32))
    norm = jnp.sqrt((wide**2).sum(outputs, keepdims=True))
    return e * (jnp.abs(wide) / jnp.maximum(norm, 1e-12)).astype(e.dtype)
