"""FedDF. Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
arXiv 2006.07242, algorithm 1 (AVGLOGITS).

U are examples without labels, which the server has. Round t shuffles them, and divides them into batches.

Client i:  theta_i and D_i as in FedAvg;  z_i = the logits of theta_i on the batches                 (1)
Server:    w_0 = w + sum_S n_i D_i / sum_S n_i                                                       (2)
           zbar = mean_S z_i, the ensemble                                                           (3)
           w_j = w_(j-1) - Adam_j(gradient of the mean of KL(softmax(zbar) || softmax(z(w_(j-1)))))  (4)
           over one batch of U, for j = 1..steps;  w <- w_steps

The learning rate of (4) follows a cosine from lr to 0, and Adam starts anew in each round.

In a real system a client sends theta_i alone, and the server computes z_i itself. Here the server receives only means
of messages, so a client sends z_i, too, as a real client must with secure aggregation. ``info["uplink_bytes"]`` counts
both. The examples of U, which all clients must then have, are not counted.

Deviations:
- A batch of the paper is drawn anew in each step; its code shuffles U anew in each pass. Here the steps go through the
  batches of the round again and again, so that a client has no more than U logits to send. The examples that do not
  fill a batch wait for another round.
- The authors' code trains up to 10^4 steps, stops when the accuracy on a validation set has not risen for 10^3 steps,
  and returns the best of the models that it has validated. The cosine ends at 10^4 steps all the same. Here the number
  of steps is fixed, the cosine ends with them, and the last model is returned.
- Clients whose model is hardly better than chance can be left out in the code. Here all clients count.
- The code has equal weights in (2) (`weighting="uniform"`), clips the gradient of (4) at a norm of 5, and has batches
  of 64 in its commands.
- The models are one network. Groups of clients with different networks are not implemented.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fedjax_drift import checks, spec, tree
from fedjax_drift.algorithms.fedavg import Server, Weighting, equally, mean_of_equals, weight
from fedjax_drift.local import train
from fedjax_drift.model import Model
from fedjax_drift.spec import Count, CountOrZero, Fix, Positive
from fedjax_drift.types import (
    THREEFRY,
    Algorithm,
    ClientResult,
    Needs,
    Params,
    PyTree,
    Round,
    Work,
    algorithm,
)


def _inputs(name: str, value: Any, fix: str) -> np.ndarray:
    from_file = isinstance(value, str) and value.endswith(".npy")
    if from_file and not Path(value).is_file():
        checks.refuse(f"{name} must be an array, or an .npy file that exists", value, fix)
    array = np.load(value) if from_file else checks.array(name, value)
    finite = array.dtype.kind != "f" or np.isfinite(array).all()
    if array.ndim < 2 or not array.size or array.dtype == np.uint8 or array.dtype.kind not in "fiu" or not finite:
        what = f"{name} must be finite inputs of the model [U, ...], with at least 1 example, and no uint8"
        checks.refuse(what, f"{array.dtype}{[*array.shape]}", fix)
    return array


Inputs = Annotated[Any, spec.Spec(_inputs, "array"), Fix("pass data.decode(x), or the name of a .npy file")]


@algorithm
def feddf(
    unlabelled: Inputs,
    steps: CountOrZero = 100,
    lr: Positive = 1e-3,
    batch_size: Count = 128,
    weighting: Weighting = "examples",
    seed: Annotated[int, spec.integer(0, 2**31 - 1)] = 0,
) -> Algorithm:
    """FedAvg, and then distillation of the clients' ensemble into the mean model, on unlabelled examples of the server.

    Clients keep no state. They also compute the logits of the unlabelled examples of the round, and send them. The
    examples are constants of the compiled round, so a few thousand of them are best.

    Args:
      unlabelled: U >= 1 inputs of the model, [U, ...], as ``data.decode(x)`` returns them, or the name of a .npy file.
      steps: steps of the server in each round, >= 0. 0 gives FedAvg.
      lr: first learning rate of Adam on the server, > 0.
      batch_size: unlabelled examples per step, >= 1; all of them if there are fewer.
      weighting: the weight of a client in (2): "examples" (n_i, default) or "uniform" (1). In (3), all count equally.
      seed: random seed of the batches, in 0..2**31 - 1. They depend on it and on the round alone.

    The model must have the default loss.
    """
    b = min(batch_size, len(unlabelled))
    T = min(len(unlabelled) // b, steps)  # the batches that a round uses

    def batches(t: jax.Array) -> jax.Array:
        """The batches of round t, [T, b, ...], the same for all clients and for the server."""
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(seed, impl=THREEFRY), t), len(unlabelled))
        return jnp.asarray(unlabelled)[order[: T * b]].reshape(T, b, *unlabelled.shape[1:])

    def logits(model: Model, params: Params, x: jax.Array) -> jax.Array:
        return model.with_mask(jnp.ones(b, bool)).apply(params, x)

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        example = jax.eval_shape(lambda: work.epoch(work.key)(jnp.int32(0)).x).shape[1:]
        if example != unlabelled.shape[1:]:
            checks.refuse(f"unlabelled must have examples of shape {example}, as the clients", unlabelled.shape[1:])
        theta, trained = train(work, server.params)
        z = lax.map(lambda x: logits(work.model, theta, x), batches(work.t))  # (1)
        message = tree.subtract(theta, server.params), equally(z, work, weighting)
        return ClientResult(message, weight(work, weighting), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        w = jax.tree.map(jnp.add, server.params, mean[0])  # (2)
        x, ensemble = batches(context.t), jax.nn.softmax(mean_of_equals(mean[1]))  # (3)
        adam = optax.adam(optax.cosine_decay_schedule(lr, max(steps, 1)))

        def loss(w: Params, j: jax.Array) -> jax.Array:  # KL without a term that does not depend on w
            return optax.softmax_cross_entropy(logits(context.model, w, x[j]), ensemble[j]).mean()

        def step(j: jax.Array, state: tuple[Params, PyTree]) -> tuple[Params, PyTree]:
            w, memory = state
            u, memory = adam.update(jax.grad(loss)(w, j % T), memory)
            return jax.tree.map(lambda w, u: (w + u).astype(w.dtype), w, u), memory  # (4)

        return Server(lax.fori_loop(0, steps, step, (w, adam.init(w)))[0] if T else w)

    requires = Needs(classifier=True, one_version=True)
    return Algorithm(Server, lambda params: (), client_update, server_update, name="feddf", requires=requires)
