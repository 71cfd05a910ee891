"""FedAdamW. Liu et al., "FedAdamW: A Communication-Efficient Optimizer with Convergence and Generalization Guarantees
for Federated Large Models", 2025, arXiv 2510.27486.

Client i:  m = 0;  v = vbar;  then for k = 1..K_i:
           m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2                                         (1)
           mhat = m / (1 - b1^k);  vhat = v / (1 - b2^(T + k))                                       (2)
           theta <- theta - eta_t (mhat / (sqrt(vhat) + eps) + alpha Delta + weight_decay theta)     (3)
           D_i = theta_i - w
Server:    w <- w + mean_S D_i;  Delta <- -mean_S D_i / (eta_t mean_S K_i)                           (4)
           vbar <- mean_S of the block means of v_i;  T <- T + mean_S K_i                            (5)

with Delta_0 = 0, vbar_0 = 0 and T_0 = 0. The block mean replaces all entries of a block by their mean, so only one
number per block is sent.

Deviations:
- (3) is printed with - weight_decay theta, which is a slip.
- The blocks of the paper are attention heads, rows or neurons. Here a block is a leaf of the parameters, as in the
  authors' script for language models, or a single parameter (`blocks="none"`), as in their script for images.
- The authors' scripts divide m by 1 - b1^(T + k) instead of 1 - b1^k, although m starts at 0 in every round. With
  b1 = 0.9, the first steps of all rounds but the first are then up to ten times shorter. In their script for images, T
  grows by a nominal number of steps.
- `weight_decay` of LocalTraining is added to the gradient before (1). Use that of (3) instead.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import train_with
from fedjax_drift.spec import Fraction, NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    Delta: Params  # the mean direction of the last round
    v: Params  # vbar, the second moment; one number per leaf with blocks="leaf"
    steps: jax.Array  # T, [], mean number of local steps so far


@algorithm
def fedadamw(
    alpha: NonNegative = 0.5,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.01,
    blocks: Literal["leaf", "none"] = "leaf",
) -> Algorithm:
    """Local AdamW whose second moment is averaged by the server, with a correction towards the global direction.

    Clients keep no state. All clients have weight 1 in the mean. For FedAvg with plain local AdamW use `fedavg` with
    ``LocalTraining(optimizer=optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01)))``.

    Args:
      alpha: factor of the global direction, >= 0.
      b1, b2: decay rates of the moments, in [0, 1).
      eps: > 0, added to the square root of the second moment.
      weight_decay: decoupled weight decay, >= 0.
      blocks: a block is a leaf of the parameters ("leaf", default) or a single parameter ("none", which doubles the
        upload).

    Local training must be plain SGD, without momentum.
    """

    def block_means(v: Params) -> Params:
        if blocks == "none":
            return v
        return jax.tree.map(lambda v: v.mean() if v.size else jnp.zeros((), v.dtype), v)

    def init_server(params: Params) -> Server:
        zeros = tree.zeros_like(params)
        return Server(params, zeros, block_means(zeros), jnp.zeros((), float))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w, T = server.params, server.steps

        def gradient(theta: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
            m, v, k = carry
            value, g = jax.value_and_grad(work.loss)(theta, batch, key)
            g, _ = work.optimizer.update(g, work.optimizer.init(w), theta)  # clipping, which needs no memory
            m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, g)  # (1)
            v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, v, g)  # (1)

            def direction(m: jax.Array, v: jax.Array, Delta: jax.Array, theta: jax.Array) -> jax.Array:
                mhat, vhat = m / (1 - b1**k), v / (1 - b2 ** (T + k))  # (2)
                return mhat / (jnp.sqrt(vhat) + eps) + alpha * Delta + weight_decay * theta  # (3)

            return value, jax.tree.map(direction, m, v, server.Delta, theta), (m, v, k + 1)

        v = jax.tree.map(lambda v, w: jnp.broadcast_to(v, w.shape).astype(w.dtype), server.v, w)
        start = tree.zeros_like(w), v, jnp.ones((), float)
        plain = work._replace(optimizer=optax.identity())
        theta, (_, v, _), trained = train_with(plain, w, gradient, start)
        K = work.num_steps.astype(work.lr.dtype)
        return ClientResult((tree.subtract(theta, w), block_means(v), K), weight(work, "uniform"), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, v, K = mean
        w = jax.tree.map(lambda w, D: w + D, server.params, D)  # (4)
        Delta = jax.tree.map(lambda D: -D / (context.lr * jnp.where(K > 0, K, 1)), D)  # (4)
        v = jax.tree.map(lambda v: jnp.maximum(v, 0), v)  # with the noise of differential privacy it may be negative
        return Server(w, Delta, v, server.steps + K)  # (5)

    needs = Needs(optimizer="sgd", one_rate=True)  # (4) divides by the present rate
    return Algorithm(init_server, lambda params: (), client_update, server_update, requires=needs, name="fedadamw")
