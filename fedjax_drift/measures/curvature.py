"""The curvature of the test loss: the largest eigenvalues of its Hessian, and the trace of the Hessian.

The Hessian H [d, d] of a model is never stored. Products of H with a vector are enough. Such a product is the
derivative of the gradient in the direction of the vector, and takes as long as about eight evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from fedjax_drift.batch_norm import whole
from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.round.arrays import TestRows
from fedjax_drift.round.engine import Engine, on_each_device, sum_over_devices
from fedjax_drift.round.evaluate import inputs
from fedjax_drift.types import Params

Product = Callable[[jax.Array], jax.Array]  # v [d] -> H v [d]


def curvature(
    engine: Engine, params: Params, test: TestRows, key: jax.Array, largest: int, steps: int, probes: int
) -> dict[str, jax.Array]:
    """The curvature at a model. The devices share the batches of the test set.

    Returns ``sharpness`` [min(largest, d)], the largest eigenvalues of the Hessian in descending order, and
    ``hessian_trace`` [], an estimate of its trace.
    """
    theta, product = hessian(engine, params, test, on_all_devices=True)
    eigenvalues = lanczos(product, theta, key, steps)[::-1][:largest]
    return {"sharpness": eigenvalues, "hessian_trace": trace(product, theta, key, probes, first=steps)}


def hessian(engine: Engine, params: Params, test: TestRows, on_all_devices: bool) -> tuple[jax.Array, Product]:
    """The trained parameters as a vector [d], and the product with the Hessian of the test loss.

    The test loss is the mean over the test examples, with the model in evaluation mode. Running statistics are
    constants. A product takes the memory of one batch.

    on_all_devices: whether the caller is outside of `on_each_device`, and the batches are sharded.
    """
    statistics = None if engine.model.statistics is None else params["batch_stats"]
    leaves, as_leaves = ravel_pytree(params if statistics is None else params["params"])
    theta = leaves.astype(jnp.promote_types(leaves.dtype, jnp.float32))

    def share_of_loss(theta: jax.Array, rows: TestRows, t: jax.Array | None, size: jax.Array) -> jax.Array:
        model, (x, y) = as_leaves(theta.astype(leaves.dtype)), inputs(engine, rows, t)
        network = engine.model.with_mask(rows.mask)
        logits = network.apply(model if statistics is None else whole(model, statistics), x)
        return jnp.where(rows.mask, network.loss(logits, y), 0).sum() / size

    size = test.mask.sum()

    def one_device(theta: jax.Array, v: jax.Array, t: jax.Array | None, size: jax.Array, rows: TestRows) -> jax.Array:
        def add(total: jax.Array, batch: TestRows) -> tuple[jax.Array, None]:
            gradient = jax.grad(partial(share_of_loss, rows=batch, t=t, size=size))
            return total + jax.jvp(gradient, (theta,), (v,))[1], None

        return lax.scan(add, jnp.zeros_like(v), rows)[0]

    def summed(*arguments: Any) -> jax.Array:
        return sum_over_devices(engine, one_device(*arguments))

    def product(v: jax.Array) -> jax.Array:
        rows = test._replace(t=None)
        if not on_all_devices:
            return one_device(theta, v, test.t, size, rows)
        everywhere = P()
        specs = (everywhere, everywhere, everywhere, everywhere, P(AXIS))
        return on_each_device(engine, summed, specs, everywhere)(theta, v, test.t, size, rows)

    return theta, product


def lanczos(product: Product, like: jax.Array, key: jax.Array, steps: int = 20) -> jax.Array:
    """Eigenvalues [min(steps, d)] of a symmetric operator, ascending. All are exact if d <= steps.

    Otherwise the largest ones converge first. This is Lanczos' method with full reorthogonalisation, from a random
    vector (Golub and Van Loan, Matrix Computations, 4th edition, section 10.3). If the vectors span an invariant
    subspace, it continues with another random vector.

    like: a vector with the shape [d] and the dtype of the operator's arguments.
    """
    d, dtype = like.size, like.dtype
    steps = min(steps, d)

    def orthogonal(v: jax.Array, Q: jax.Array) -> jax.Array:
        for _ in range(2):  # the second pass removes what rounding has left
            # in full float32: with the factors of bfloat16 of an accelerator the vectors lose their orthogonality
            v = v - jnp.matmul(jnp.matmul(Q, v, precision="highest"), Q, precision="highest")
        return v

    def step(k: jax.Array, carry: tuple) -> tuple:
        Q, diagonal, beside, v, scale = carry  # v: the rest of H q_{k-1}. scale: the norm of H q_{k-1}
        rest = jnp.linalg.norm(v)
        ended = rest <= jnp.finfo(dtype).eps * scale  # also in step 0
        fresh = orthogonal(jax.random.normal(jax.random.fold_in(key, k), (d,), dtype), Q)
        q = jnp.where(ended, fresh / jnp.linalg.norm(fresh), v / rest)
        Q, image = Q.at[k].set(q), product(q)
        diagonal, beside = diagonal.at[k].set(dot(q, image)), beside.at[k].set(jnp.where(ended, 0, rest))
        return Q, diagonal, beside, orthogonal(image, Q), jnp.linalg.norm(image)

    zeros = jnp.zeros(steps, dtype)
    start = jnp.zeros((steps, d), dtype), zeros, zeros, jnp.zeros_like(like), jnp.zeros((), dtype)
    _, diagonal, beside, _, _ = lax.fori_loop(0, steps, step, start)
    return jnp.linalg.eigvalsh(jnp.diag(diagonal) + jnp.diag(beside[1:], 1) + jnp.diag(beside[1:], -1))


def trace(product: Product, like: jax.Array, key: jax.Array, probes: int = 10, first: int = 20) -> jax.Array:
    """An unbiased estimate of the trace, a scalar: the mean of v' H v over random vectors v of signs.

    Its variance is 2 / probes times the sum of the squares of the entries of H that are not on the diagonal (Hutchinson
    1990, Communications in Statistics 19(2)). first: random vector i has the key number first + i.
    """

    def probe(i: jax.Array) -> jax.Array:
        v = jax.random.rademacher(jax.random.fold_in(key, first + i), like.shape, like.dtype)
        return dot(v, product(v))

    # a probe at a time: each needs the activations of a pass over the data
    return lax.map(probe, jnp.arange(probes)).mean()


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The inner product of two vectors, without rounding of the factors."""
    return jnp.matmul(a, b, precision="highest")
