"""Agnostic federated averaging. Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019, arXiv 1902.00146 (AFL);
Ro, Chen, Mathews, Mohri, Suresh, "Communication-Efficient Agnostic Federated Averaging", 2021, arXiv 2104.02748.

The examples belong to domains d = 0..D-1; lambda [D] are the weights of the domains.

Server:    a_d = lambda_d / max(1, mean of the counts of domain d over the last rounds)              (1)
Client i:  beta_i = sum of a over its examples                                                       (2)
           l_id = sum of the losses at w of its examples of domain d;  n_id = their number           (3)
           g = gradient of sum over the batch of a_d loss / beta_i            scale="client"         (4)
           the same, divided by the sum over the batch of a                   scale="batch"          (4')
Server:    w <- w + sum_S beta_i D_i / sum_S beta_i                                                  (5)
           L_d = sum_S l_id / sum_S n_id,  0 without examples                                        (6)
           lambda_d <- lambda_d exp(domain_lr L_d), normalised                update="eg"            (7)
           lambda <- projection of lambda + domain_lr L on the simplex        update="projection"    (7')

(1) has the lambda and the counts from before the round. AFL is the case of all clients, one step on all examples of a
client per round, and (7'). Its result is the average of the models w_1, w_2, ..., which the server keeps.

Deviations:  FedJAX divides by 0 in (1) if a domain was absent from all the rounds that count. (4) divides the sum of a
batch by the total weight of a client, so that an epoch moves the model about as far as one step on all examples. FedJAX
does this, too. "batch" keeps the step size of FedAvg. By (6) and (7), the weight of an absent domain decreases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, spec, tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.local import over_examples, train
from fedjax_drift.spec import Count, Fix, NonNegative
from fedjax_drift.types import Algorithm, Batch, ClientResult, Metrics, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    average: Params  # the mean of w_1, w_2, ...
    weights: jax.Array  # lambda [D]
    counts: jax.Array  # [window, D], the examples of each domain in the last rounds
    updates: jax.Array  # int32 [], the number of models in the average


Domain = Annotated[
    Callable[[jax.Array, jax.Array], jax.Array],
    spec.function("(x, y) -> int [B]"),
    Fix("it maps x [B, ...] and y to int [B]"),
]


@algorithm
def agnostic(
    domains: Annotated[int, spec.integer(1, 2**16)] = 10,
    domain: Domain | None = None,
    domain_lr: NonNegative = 0.1,
    update: Literal["eg", "projection", "none"] = "eg",
    window: Count = 1,
    scale: Literal["client", "batch"] = "client",
    lambda0: Any = None,
    counts0: Any = None,
) -> Algorithm:
    """FedAvg that minimises the largest loss among the domains of the examples, instead of their mean.

    Clients keep no state. They compute their losses at w, which costs a forward pass over their examples.
    ``info["largest_domain_loss"]`` is the largest of these, so it belongs to the model before the round. `evaluate`
    reports the metrics of w. It also reports those of the average of all models, with the prefix ``average_``.

    Args:
      domains: D >= 1, the number of domains.
      domain: ``domain(x [B, ...], y [B, ...]) -> int [B]``, the domain of each example. Others than 0..D-1 do not
        count. None (default): the label, as for Fashion-MNIST in the AFL paper. A client does not know its number, so
        a domain of a client must be in its inputs or labels, for instance as ``y + C * domain``.
      domain_lr: learning rate of the weights, >= 0. 0 keeps them. Usual values are 0.01 to 0.1.
      update: "eg" (exponentiated gradient, default), "projection" (AFL), or "none".
      window: rounds over which counts are averaged, >= 1. With few clients per round, use at least 3.
      scale: "client" (default) or "batch". See (4).
      lambda0: the initial weights [D], >= 0 with a sum of 1. None: 1 / D.
      counts0: the counts [D] of the rounds before the first, >= 0. None: 1, with which the first round weighs examples,
        not domains.

    Raises:
      ValueError: there are more classes than domains. A `Simulation` refuses asynchronous rounds with clients of
        several versions.
    """
    D = domains
    first_weights = per_domain("lambda0", lambda0, D, 1 / D)
    if abs(sum(first_weights) - 1) > 1e-6:
        checks.refuse("lambda0 must have the sum 1", sum(first_weights), "divide it by its sum")
    first_counts = per_domain("counts0", counts0, D, 1.0)

    def init_server(params: Params) -> Server:
        counts = jnp.tile(jnp.asarray(first_counts, float), (window, 1))
        return Server(params, params, jnp.asarray(first_weights, float), counts, jnp.int32(0))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w = server.params
        a = server.weights / jnp.maximum(1, server.counts.mean(0))  # (1)

        def members(batch: Batch) -> jax.Array:
            """[B, D]: 1 for the domain of an example. Padding belongs to none."""
            which = batch.y if domain is None else domain(batch.x, batch.y)
            if which.shape != batch.mask.shape or not jnp.issubdtype(which.dtype, jnp.integer):
                checks.refuse(
                    f"domain must return an integer for each of the {len(batch.mask)} examples of a batch",
                    f"{which.dtype}{[*which.shape]}",
                    "pass a function (x [B, ...], y [B, ...]) -> int [B]",
                )
            return jax.nn.one_hot(which, D, dtype=a.dtype) * batch.mask[:, None]

        def survey(batch: Batch) -> tuple[jax.Array, jax.Array]:
            model = work.model.with_mask(batch.mask)
            logits = model.apply(w, batch.x)
            if domain is None and logits.shape[-1] > D:
                checks.refuse(
                    f"domains must be at least the number of classes, {logits.shape[-1]}, if the label is the domain",
                    D,
                    f"pass domains={logits.shape[-1]}, or domain=",
                )
            each = members(batch)
            return jnp.where(batch.mask, model.loss(logits, batch.y), 0) @ each, each.sum(0)

        losses, counts = over_examples(work, survey)  # (3)
        beta = a @ counts  # (2)

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            each = members(batch) @ a
            total = beta if scale == "client" else each.sum()
            logits = work.logits(theta, batch.x, key, batch.mask)
            values = jnp.where(batch.mask, work.model.with_mask(batch.mask).loss(logits, batch.y), 0)
            return (each * values).sum() / jnp.where(total > 0, total, 1)  # (4)

        theta, trained = train(work, start=w, loss=loss)
        message = jax.tree.map(lambda D: beta * D, tree.subtract(theta, w)), beta, losses, counts
        return ClientResult(message, weight(work, "uniform"), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D_i, beta, losses, counts = mean
        w = jax.tree.map(lambda w, D: w + D / jnp.where(beta > 0, beta, 1), server.params, D_i)  # (5)
        average = jax.tree.map(lambda mean, w: mean + (w - mean) / (server.updates + 1), server.average, w)
        L = losses / jnp.where(counts > 0, counts, 1)  # (6)
        clients = context.participation * context.num_clients
        recent = jnp.concatenate([server.counts[1:], clients * counts[None]])
        return Server(w, average, moved(server.weights, L), recent, server.updates + 1)

    def moved(weights: jax.Array, L: jax.Array) -> jax.Array:
        if update == "eg":
            grown = weights * jnp.exp(domain_lr * (L - L.max()))  # (7); the maximum cancels out
            return grown / grown.sum()
        return weights if update == "none" else on_simplex(weights + domain_lr * L)  # (7')

    def report(server: Server, mean: PyTree, context: Round) -> Metrics:
        _, _, losses, counts = mean
        return {"largest_domain_loss": jnp.where(counts > 0, losses / counts, -jnp.inf).max()}

    made = Algorithm(init_server, lambda params: (), client_update, server_update, name="agnostic")
    # All beta_i of (5) have the same counts in (1), whose scale cancels out.
    made = made._replace(report=report, requires=Needs(classifier=domain is None, one_version=True))
    return made._replace(models=lambda server: {"average": server.average})


def on_simplex(v: jax.Array) -> jax.Array:
    """The nearest point to v [D] with elements >= 0 and the sum 1."""
    falling = jnp.sort(v)[::-1]
    shifts = (jnp.cumsum(falling) - 1) / jnp.arange(1, len(v) + 1)
    return jnp.maximum(v - shifts[(falling > shifts).sum() - 1], 0)


def per_domain(name: str, values: Any, D: int, default: float) -> tuple[float, ...]:
    """The numbers [D] of an option. Raises ConfigurationError unless they are finite and not negative."""
    if values is None:
        return (default,) * D
    array = checks.array(name, values)
    if array.shape != (D,) or array.dtype.kind not in "fiu" or not (np.isfinite(array).all() and (array >= 0).all()):
        checks.refuse(f"{name} must be {D} finite numbers >= 0, one per domain", checks.shown(values))
    return tuple(array.astype(float).tolist())
