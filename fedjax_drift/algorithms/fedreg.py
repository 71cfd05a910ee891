"""FedReg. Xu, Hong, Huang, Jiang, "Acceleration of Federated Learning with Alleviated Forgetting in Local Training",
ICLR 2022, arXiv 2203.02645, as in the authors' code.

Client i, once per round, for every batch (x, y) of a first pass over its examples:
           pseudo data (x_s, y_s): x_s is x after `pseudo_steps` steps of sign-gradient ascent on CE(w; x, y) with step
           size eta_s;  y_s = softmax(w(x_s))
           perturbed data (x_p, y): x_p is computed like x_s, with step size eta_p
then in step k, with batch k of the epoch and the pseudo and perturbed data of batch k of the first pass:
           theta <- theta - eta_t grad CE(gamma theta + (1 - gamma) w; x, y)                         (1)
           g2 = grad CE((theta + w) / 2; x_s, y_s);  a = max(0, <theta - w, g2> / ||g2||^2)          (2)
           g3 = grad CE((theta + w) / 2; x_p, y);  b = max(0, <theta - w - a g2, g3> / ||g3||^2)     (3)
           theta <- theta - a g2 - b g3                                                              (4)
Server:    w <- mean_S theta_i

Deviations:  none from the authors' code of July 2022, but its privacy variant (add_mask) is not implemented. Their
first code, of February 2022, descends: x_s and x_p are x after steps of -sign(gradient). Each step is clipped to the
range that the inputs of the batch have before it. This is `pseudo_data="descent"`.

Each epoch reshuffles the examples, but the pseudo data keep the order of the first pass. So batch k of the epoch and
batch k of the pseudo data contain different examples.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import fedavg, trained_from
from fedjax_drift.spec import Count, Fraction, Positive, Share
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Work, algorithm, batch_mean


@algorithm
def fedreg(
    gamma: Share = 0.4,
    eta_s: Positive = 0.2,
    eta_p: Positive = 0.002,
    pseudo_steps: Count = 10,
    beta: Fraction = 0.5,
    pseudo_data: Literal["ascent", "descent"] = "ascent",
) -> Algorithm:
    """Local training that forgets less. It removes the components of an update that increase the loss on pseudo data.

    The pseudo data represent the knowledge of the global model. All clients have weight 1 in the mean. Clipping,
    weight decay, momentum and local optimizers only act on (1).

    Cost: each local step computes three gradients. In addition, every batch needs 2 * `pseudo_steps` gradients with
    respect to the inputs, once per round. During training a client stores three copies of its examples.

    Args:
      gamma: in (0, 1]. The gradient in (1) is evaluated at gamma theta + (1 - gamma) w. The authors use 0.25 to 0.5.
      eta_s: step size of the pseudo data, > 0, in the units of the model inputs.
      eta_p: step size of the perturbed data, > 0. The authors use eta_s / 100.
      pseudo_steps: number of sign-gradient steps, >= 1.
      beta: in [0, 1). The gradients in (2) and (3) are evaluated at (1 - beta) theta + beta w. Default 0.5.
      pseudo_data: "ascent" (default), or "descent" as in the authors' first code.

    Raises:
      ValueError: the model does not use the default loss, or the inputs are not floating-point numbers (tokens).
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w = server.params
        first_pass = work.epoch(jax.random.fold_in(work.key, work.epochs))

        def soft_cross_entropy(params: Params, x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
            return batch_mean(optax.softmax_cross_entropy(work.model.with_mask(mask).apply(params, x), y), mask)

        def move(x: jax.Array, y: jax.Array, mask: jax.Array, eta: float) -> jax.Array:
            examples = mask.reshape(-1, *[1] * (x.ndim - 1))  # without the padding, whose values must not set the range

            def step(_: int, x: jax.Array) -> jax.Array:
                uphill = jnp.sign(jax.grad(soft_cross_entropy, argnums=1)(w, x, y, mask))
                if pseudo_data == "ascent":
                    return x + eta * uphill
                low = jnp.min(x, where=examples, initial=jnp.inf)
                high = jnp.max(x, where=examples, initial=-jnp.inf)
                return jnp.clip(x - eta * uphill, low, high)

            return lax.fori_loop(0, pseudo_steps, step, x)

        def pseudo_batch(k: jax.Array) -> tuple:
            x, y, mask = first_pass(k)
            if not jnp.issubdtype(x.dtype, jnp.floating):
                checks.refuse(
                    "the inputs must be floating-point for fedreg",
                    x.dtype,
                    "use a different algorithm, because fedreg computes gradients with respect to the inputs",
                )
            apply = work.model.with_mask(mask).apply
            C = jax.eval_shape(apply, w, x).shape[-1]
            y = jax.nn.one_hot(y, C, dtype=x.dtype)
            x_s = move(x, y, mask, eta_s)
            return x_s, jax.nn.softmax(apply(w, x_s)), move(x, y, mask, eta_p), y, mask

        # One slot per batch of the largest client, so that all clients have the same shapes. Unused slots stay zero.
        slots = jax.tree.map(
            lambda a: jnp.zeros((work.most_batches, *a.shape), a.dtype), jax.eval_shape(pseudo_batch, jnp.int32(0))
        )

        def fill(k: jax.Array, slots: tuple) -> tuple:
            return jax.tree.map(lambda s, new: s.at[k].set(new), slots, pseudo_batch(k))

        slots = lax.fori_loop(0, work.num_batches, fill, slots)

        def between(theta: Params) -> Params:
            return jax.tree.map(lambda theta, w: gamma * theta + (1 - gamma) * w, theta, w)  # (1)

        def project(theta: Params, k: jax.Array) -> Params:
            x_s, y_s, x_p, y, mask = jax.tree.map(lambda s: s[k], slots)
            middle = jax.tree.map(lambda theta, w: (1 - beta) * theta + beta * w, theta, w)
            drift = tree.subtract(theta, w)
            g2 = jax.grad(soft_cross_entropy)(middle, x_s, y_s, mask)
            drift = remove(drift, g2)  # (2)
            g3 = jax.grad(soft_cross_entropy)(middle, x_p, y, mask)
            drift = remove(drift, g3)  # (3)
            return jax.tree.map(lambda w, drift: w + drift, w, drift)  # (4)

        return trained_from(w, work, "uniform", client, at=between, after=project)

    return fedavg()._replace(client_update=client_update, requires=Needs(classifier=True), name="fedreg")


def remove(drift: Params, g: Params) -> Params:
    """Equations (2) and (3): subtracts from ``drift`` its component along g, if that component is positive."""
    square = tree.dot(g, g)
    a = jnp.where(square > 0, jnp.maximum(tree.dot(drift, g), 0) / square, 0)
    return jax.tree.map(lambda drift, g: drift - a * g, drift, g)
