"""APFL. Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv 2003.13461, algorithm 1.

Client i, for each batch:
           vbar = alpha_i v_i + (1 - alpha_i) theta                                                  (1)
           v_i <- v_i - eta_t alpha_i g(vbar)                                                        (2)
           theta <- theta - eta_t g(theta)                                                           (3)
           alpha_i <- clip(alpha_i - eta_t <v_i - theta, g(vbar)>, 0, 1)           if adaptive       (4)
Server:    w <- w + mean_S D_i                                                                       (5)

The personal model is alpha_i v_i + (1 - alpha_i) w, with the current global model w. v_i starts at the initial global
model. v_i and alpha_i are kept between participations. The global model does not depend on them. (4) uses v_i and theta
before the step.

Deviations:
- The authors' code changes alpha_i only at the first batch of a round (`alpha_every="round"`), and adds 0.02 alpha_i to
  the derivative in (4) (`alpha_decay=0.02`). The derivative there has another factor,
  alpha_i^2 + (1 - alpha_i)^2, and (2) and (4) use theta after its step. So these options do not reproduce it.
- The authors' code mixes the outputs of the two models instead of their parameters. This is not implemented, because a
  personal model would then be two networks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg, weight
from fedjax_drift.local import train_with
from fedjax_drift.spec import Flag, Mix, NonNegative
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Work, algorithm


class Client(NamedTuple):
    v: Params  # v_i, the local part of the personal model
    alpha: jax.Array  # [], alpha_i, its share


@algorithm
def apfl(
    alpha: Mix = 0.5,
    adaptive: Flag = False,
    alpha_every: Literal["step", "round"] = "step",
    alpha_decay: NonNegative = 0.0,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """A personal model that mixes a local model with the global model.

    The state of a client has the size of one model and a scalar. A step computes two gradients.

    Args:
      alpha: share of the local model, in [0, 1]. 0: the personal model is the global model. 1: each client trains
        alone.
      adaptive: whether alpha_i is learned, starting from alpha.
      alpha_every: when alpha_i changes: "step" (default) or "round" (at the first batch).
      alpha_decay: >= 0, alpha_decay * alpha_i is added to the derivative in (4).
      weighting: the weight of a client in the mean: "uniform" (1, default) or "examples" (n_i).

    Local training must be plain SGD, without momentum.
    """

    def init_client(params: Params) -> Client:
        return Client(params, jnp.asarray(alpha, float))

    def mixed(alpha: jax.Array, v: Params, theta: Params) -> Params:
        return jax.tree.map(lambda v, theta: (alpha * v + (1 - alpha) * theta).astype(v.dtype), v, theta)  # (1)

    def client_update(server: Any, client: Client, work: Work) -> ClientResult:
        w = server.params

        def gradient(theta: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
            (v, a), steps = carry
            value, g = jax.value_and_grad(work.loss)(theta, batch, key)  # (3)
            g_vbar = jax.grad(work.loss)(mixed(a, v, theta), batch, key)
            scaled = jax.tree.map(lambda g: (a * g).astype(g.dtype), g_vbar)
            u, _ = work.optimizer.update(scaled, work.optimizer.init(v), v)  # clipping and weight decay
            new_v = jax.tree.map(lambda v, u: (v - work.lr * u).astype(v.dtype), v, u)  # (2)
            if adaptive:
                slope = tree.dot(tree.subtract(v, theta), g_vbar) + alpha_decay * a
                changes = (steps == 0) | (alpha_every == "step")
                a = jnp.where(changes, jnp.clip(a - work.lr * slope, 0, 1), a)  # (4)
            return value, g, (Client(new_v, a), steps + 1)

        theta, (client, _), trained = train_with(work, w, gradient, (client, jnp.int32(0)))
        trained = trained | {"alpha": client.alpha} if adaptive else trained
        return ClientResult(tree.subtract(theta, w), weight(work, weighting), client, trained)

    def personal(server: Any, client: Client, work: Work) -> Params:
        return mixed(client.alpha, client.v, server.params)

    def adapt(server: Any, client: Client, work: Work) -> tuple[Params, Any]:
        result = client_update(server, client, work)
        return personal(server, result.state, work), result.metrics

    return fedavg(weighting=weighting)._replace(  # (5)
        init_client=init_client,
        client_update=client_update,
        personal=personal,
        adapt=adapt,
        requires=Needs(optimizer="sgd", one_model=True),
        name="apfl",
    )
