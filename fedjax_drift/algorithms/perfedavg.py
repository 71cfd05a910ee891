"""Per-FedAvg. Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, arXiv 2002.07948.

Client i:  u = g_1(theta);  v = g_2(theta - alpha u)                                                 (1)
           g <- v                                                                   "first_order"    (2)
           g <- v - alpha (g_3(theta + delta v) - g_3(theta - delta v)) / (2 delta)  "hessian_free"  (3)
Server:    w <- w + mean_S D_i                                                                       (4)

g_1, g_2 and g_3 are the gradients on three batches. (3) approximates (I - alpha H) v, the gradient of
F_i(theta - alpha grad F_i(theta)), where H is the Hessian at theta. The personal model of a client is
w - alpha grad F_i(w), one step over all its examples; w itself is not the goal. A new client does k such steps.

Deviations:  there is no code by the authors. Clients do one step for each batch of an epoch, as with all algorithms
here: g_2 is the gradient of this batch, g_1 and g_3 are those of batches of two further shuffles of the examples.
Copies by others consume two or three batches in each step. With `delta=None`, (3) uses the exact product H v. With
`batches="same"`, all three batches are the same, and the gradient of the objective is biased.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg, weight
from fedjax_drift.local import full_gradient, train_with
from fedjax_drift.spec import Fix, NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Params, PyTree, Trained, Work, algorithm


@algorithm
def perfedavg(
    alpha: NonNegative = 0.01,
    variant: Literal["hessian_free", "first_order"] = "hessian_free",
    delta: Annotated[Positive, Fix("None means the exact product")] | None = 1e-3,
    batches: Literal["independent", "same"] = "independent",
    weighting: Weighting = "uniform",
) -> Algorithm:
    """A global model from which one gradient step gives each client a good model of its own.

    Clients keep no state. A step computes four gradients, two with ``variant="first_order"``. `evaluate_clients`
    evaluates the models after the step.

    Args:
      alpha: learning rate of the step to the personal model, >= 0. It does not decay. 0 gives FedAvg with uniform
        weights.
      variant: "hessian_free" (default) or "first_order", which leaves out the second derivatives.
      delta: distance of the difference in (3), > 0. None: the exact product, which also costs two gradients.
      batches: "independent" (default) or "same".
      weighting: the weight of a client in the mean: "uniform" (1, default) or "examples" (n_i).
    """
    base, parts = fedavg(weighting=weighting), 3 if batches == "independent" else 1

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        def gradient(theta: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
            second, first, third = (part_of(batch, j, parts) for j in range(3))
            u = jax.grad(work.loss)(theta, first, key)
            value, v = jax.value_and_grad(work.loss)(along(theta, -alpha, u), second, key)  # (1)
            if variant == "first_order":
                return value, v, carry  # (2)

            def g_3(theta: Params) -> Params:
                return jax.grad(work.loss)(theta, third, key)

            if delta is None:
                Hv = jax.jvp(g_3, (theta,), (v,))[1]
            else:
                ends = g_3(along(theta, delta, v)), g_3(along(theta, -delta, v))
                Hv = jax.tree.map(lambda a, b: (a - b) / (2 * delta), *ends)
            return value, along(v, -alpha, Hv), carry  # (3)

        theta, _, trained = train_with(with_batches(work, parts), server.params, gradient, ())
        return ClientResult(tree.subtract(theta, server.params), weight(work, weighting), client, trained)

    def personal(server: Any, client: PyTree, work: Work) -> Params:
        return along(server.params, -alpha, full_gradient(work, server.params))

    def adapt(server: Any, client: PyTree, work: Work) -> tuple[Params, Trained]:
        def gradient(theta: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
            return work.loss(theta, batch, key), full_gradient(work, theta), carry

        inner = work._replace(lr=jnp.asarray(alpha, work.lr.dtype), optimizer=optax.identity())
        theta, _, trained = train_with(inner, server.params, gradient, ())
        return theta, trained

    return base._replace(client_update=client_update, personal=personal, adapt=adapt, name="perfedavg")


def along(theta: Params, step: float, direction: Params) -> Params:
    """theta + step * direction."""
    return jax.tree.map(lambda theta, u: theta + step * u, theta, direction)


def with_batches(work: Work, parts: int) -> Work:
    """The work whose batches have the examples of ``parts`` shuffles, one batch after the other, [parts * B]."""

    def key_of(key: jax.Array, j: int) -> jax.Array:
        return key if j == 0 else jax.random.fold_in(key, j)

    def joined(batches: list) -> Any:
        return lambda k: jax.tree.map(lambda *rows: jnp.concatenate(rows), *(batch(k) for batch in batches))

    def epoch(key: jax.Array) -> Any:
        return joined([work.epoch(key_of(key, j)) for j in range(parts)])

    def stream(key: Any) -> Any:
        assert work.stream is not None
        return joined([work.stream(lambda e, j=j: key_of(key(e), j)) for j in range(parts)])

    return work._replace(epoch=epoch, stream=None if work.stream is None else stream)


def part_of(batch: Batch, j: int, parts: int) -> Batch:
    """The examples of shuffle j in a batch of `with_batches`, [B]."""
    B = len(batch.mask) // parts
    begin = (j % parts) * B
    return jax.tree.map(lambda rows: rows[begin : begin + B], batch)
