"""FedReg. Xu, Hong, Huang, Jiang, "Acceleration of Federated Learning with Alleviated Forgetting in Local Training",
ICLR 2022, arXiv 2203.02645, as its authors' code.

Client i, once a round, for every batch (x, y) of a first pass over its rows:
           x_s = x after steps of sign-gradient ascent of CE(w; x, y), of size eta_s, label y_s = softmax(w(x_s)):
           pseudo data;  x_p = the same with size eta_p, label y: perturbed data
then at step k, with batch k of the epoch and of the first pass:
           theta <- theta - eta_t grad CE(gamma theta + (1 - gamma) w; x, y)                         (1)
           g2 = grad CE((theta + w) / 2; x_s, y_s);  a = max(0, <theta - w, g2> / ||g2||^2)          (2)
           g3 = grad CE((theta + w) / 2; x_p, y);  b = max(0, <theta - w - a g2, g3> / ||g3||^2)     (3)
           theta <- theta - a g2 - b g3                                                              (4)
Server:    w <- mean_S theta_i

Deviates:  nothing from the code, whose privacy variant (add_mask) is left out. Pseudo batches keep the first pass's
order while the epochs reshuffle, so that batch k of both holds different rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import fedavg, weight
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Work, batch_mean


def fedreg(
    gamma: float = 0.4, eta_s: float = 0.2, eta_p: float = 0.002, pseudo_steps: int = 10, beta: float = 0.5
) -> Algorithm:
    """Clients step without forgetting: what the global model knows, seen in pseudo data, is kept by projection.

    Costs three gradients a step and 2 `pseudo_steps` gradients with respect to the inputs per batch, once a round; a
    client holds its rows three times while it trains. Clients count alike in the mean, whatever their size. Clipping,
    weight decay, momentum and other optimizers act on (1) alone.

    Args:
      gamma: in (0, 1], where the loss's gradient is taken; the authors use 0.25 to 0.5.
      eta_s: > 0, step of the pseudo data, in units of the inputs that the model sees.
      eta_p: > 0, step of the perturbed data; the authors use eta_s / 100.
      pseudo_steps: >= 1.
      beta: in [0, 1), (1 - beta) theta + beta w in (2) and (3). Default 0.5.

    Raises:
      ValueError: a value out of range; a model with a loss of its own; inputs that are not numbers (tokens).
    """
    gamma = checks.number("gamma", gamma, "in (0, 1]", lambda v: 0 < v <= 1)
    eta_s = checks.positive("eta_s", eta_s)
    eta_p = checks.positive("eta_p", eta_p)
    pseudo_steps = checks.integer("pseudo_steps", pseudo_steps, 1)
    beta = checks.fraction("beta", beta)

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w, apply = server.params, work.model.apply
        first_pass = work.epoch(jax.random.fold_in(work.key, work.epochs))

        def soft_cross_entropy(params: Params, x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
            return batch_mean(optax.softmax_cross_entropy(apply(params, x), y), mask)

        def ascend(x: jax.Array, y: jax.Array, mask: jax.Array, eta: float) -> jax.Array:
            uphill = jax.grad(soft_cross_entropy, argnums=1)
            return lax.fori_loop(0, pseudo_steps, lambda _, x: x + eta * jnp.sign(uphill(w, x, y, mask)), x)

        def make(k: jax.Array) -> tuple:
            x, y, mask = first_pass(k)
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise ConfigurationError(
                    f"fedreg moves inputs along their gradient and needs floating inputs, got {x.dtype}"
                )
            C = jax.eval_shape(apply, w, x).shape[-1]
            y = jax.nn.one_hot(y, C, dtype=x.dtype)
            x_s = ascend(x, y, mask, eta_s)
            return x_s, jax.nn.softmax(apply(w, x_s)), ascend(x, y, mask, eta_p), y, mask

        # One slot for every batch that the largest client has; only this client's are filled.
        slots = jax.tree.map(
            lambda a: jnp.zeros((work.most_batches, *a.shape), a.dtype), jax.eval_shape(make, jnp.int32(0))
        )
        slots = lax.fori_loop(
            0, work.num_batches, lambda k, slots: jax.tree.map(lambda s, new: s.at[k].set(new), slots, make(k)), slots
        )

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

        theta, metrics = train(work, start=w, at=between, after=project)
        return ClientResult(tree.subtract(theta, w), weight(work, "uniform"), client, metrics)

    return fedavg()._replace(client_update=client_update, requires=("classifier",), name="fedreg")


def remove(drift: Params, g: Params) -> Params:
    """drift without what of it points along g, if it does."""
    square = tree.dot(g, g)
    a = jnp.where(square > 0, jnp.maximum(tree.dot(drift, g), 0) / square, 0)
    return jax.tree.map(lambda drift, g: drift - a * g, drift, g)
