"""The local training loop that nearly every algorithm shares: E epochs of minibatch steps from the model it was sent.

One step on a batch, theta the local model and w the global one:

    g     = grad of the mean loss over the batch's real rows
    g     = correct(g, theta)                       the algorithm's term, e.g. g + mu (theta - w)
    u     = clip(g) + weight_decay * theta          then momentum, or the optimizer
    theta = theta - eta_t u
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.types import Batch, Metrics, Params, PyTree, Work


@dataclass(frozen=True)
class LocalTraining:
    """How every client trains: ``K_i = epochs * ceil(n_i / batch_size)`` steps with rate ``lr * lr_decay**t``.

    Rows are reshuffled every epoch; the last batch of an epoch may be short, and its gradient is the mean over its
    real rows. Optimizer state starts fresh every round. Raises ValueError for values out of range.
    """

    epochs: int = 1
    """E >= 1, passes over the client's rows in a round."""
    batch_size: int = 20
    """B >= 1."""
    lr: float = 0.1
    """eta_0 > 0."""
    lr_decay: float = 1.0
    """eta_t = lr * lr_decay**t, t the round; > 0."""
    momentum: float = 0.0
    """Heavy ball inside the round, in [0, 1): v = momentum v + u; theta -= eta_t v."""
    weight_decay: float = 0.0
    """>= 0, added as weight_decay * theta after clipping."""
    clip_norm: float | None = None
    """Global norm that the corrected gradient is clipped to, > 0; None: no clipping."""
    optimizer: optax.GradientTransformation | None = None
    """Replaces momentum, e.g. ``optax.scale_by_adam()``: maps a gradient to a direction that points uphill.
    `Simulation` raises ValueError for one that steps downhill itself, such as ``optax.adam(lr)``."""

    def __post_init__(self) -> None:
        checked = {
            "epochs": checks.integer("epochs", self.epochs, 1),
            "batch_size": checks.integer("batch_size", self.batch_size, 1),
            "lr": checks.positive("lr", self.lr),
            "lr_decay": checks.positive("lr_decay", self.lr_decay, "1 keeps the rate constant"),
            "momentum": checks.fraction("momentum", self.momentum),
            "weight_decay": checks.nonnegative("weight_decay", self.weight_decay),
        }
        if self.clip_norm is not None:
            checked["clip_norm"] = checks.positive("clip_norm", self.clip_norm, "None means no clipping")
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # Python's numbers: arrays of one number can't be hashed
        if self.optimizer is not None:
            if not isinstance(self.optimizer, optax.GradientTransformation):
                raise ConfigurationError(
                    "optimizer must be an optax transformation such as optax.scale_by_adam(), got "
                    f"{checks.shown(self.optimizer)}"
                )
            if checks.used(self.momentum):
                raise ConfigurationError(
                    f"momentum must be 0 when an optimizer is given, got {self.momentum}: the optimizer replaces it"
                )

    def direction(self) -> optax.GradientTransformation:
        """Gradient -> direction: clip, then weight decay, then momentum or the optimizer."""
        return optax.chain(
            optax.identity(),  # a chain needs at least one link
            *[optax.clip_by_global_norm(self.clip_norm)] * (self.clip_norm is not None),
            *[optax.add_decayed_weights(self.weight_decay)] * checks.used(self.weight_decay),
            *[optax.trace(self.momentum)] * checks.used(self.momentum),
            *([self.optimizer] if self.optimizer is not None else []),
        )

    @property
    def has_memory(self) -> bool:
        """Whether a step depends on earlier ones: momentum, or an optimizer."""
        return self.optimizer is not None or checks.used(self.momentum)

    def rate(self, t: jax.Array) -> jax.Array:
        """eta_t of round t, a scalar; never 0, which small numbers become in float32, as SCAFFOLD divides by it."""
        eta = jnp.asarray(self.lr * self.lr_decay ** t.astype(float), float)
        return jnp.maximum(eta, jnp.finfo(eta.dtype).tiny)

    def steps(self, sizes: Any) -> Any:
        """K_i for a client, or clients, of ``sizes`` rows."""
        return self.epochs * -(-sizes // min(self.batch_size, 2**31 - 1))  # a whole client, however large it is

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        changed = [f"{name}={v}" for name, v, default in values if isinstance(v, jax.core.Tracer) or v != default]
        return f"LocalTraining({', '.join(changed)})"


def shuffle(key: jax.Array, size: jax.Array, longest: jax.Array, length: int) -> jax.Array:
    """int32 [length]: a random order of 0..size-1, followed by padding; size <= longest <= length.

    The order depends on key and size only, never on what it is padded to: word i of JAX's counter-based generator is a
    function of key and i (threefry, JAX's default), and padding sorts last. So only about ``longest`` words are sorted,
    and one huge client in a federation does not slow the others.
    """

    def sort(words: int) -> Callable[[], jax.Array]:
        def order() -> jax.Array:
            bits = jax.random.bits(key, (words,), jnp.uint32)
            bits = jnp.where(jnp.arange(words) < size, bits, jnp.uint32(2**32 - 1))
            return jnp.pad(jnp.argsort(bits, stable=True).astype(jnp.int32), (0, length - words))

        return order

    words = [n for n in (256 * 4**i for i in range(12)) if n < length] + [length]
    return lax.switch((longest > jnp.array(words[:-1], jnp.int32)).sum(), [sort(n) for n in words])


def train(
    work: Work,
    start: Params,
    *,
    correct: Callable[[Params, Params], Params] | None = None,
    at: Callable[[Params], Params] | None = None,
    after: Callable[[Params, jax.Array], Params] | None = None,
    loss: Callable[[Params, Batch, jax.Array], jax.Array] | None = None,
) -> tuple[Params, Metrics]:
    """Trains from ``start`` for ``work.num_steps`` steps; returns the local model theta_i and ``{"loss": their mean}``.

    ``correct(g, theta)`` adds the algorithm's term to the gradient; ``at(theta)`` is the point where the gradient,
    weight decay included, is taken (default theta itself); ``after(theta, k)`` changes the model after step k of an
    epoch; ``loss(params, batch, key)`` replaces the model's mean loss on a batch.
    """
    value_and_grad = jax.value_and_grad(loss or work.loss)

    def as_params(tree: Params) -> Params:  # a rate or a hyper-parameter may be wider than the parameters
        return jax.tree.map(lambda a, like: a.astype(like.dtype), tree, start)

    def epoch(carry: tuple, e: jax.Array) -> tuple:
        shuffle_key, noise_key = jax.random.split(jax.random.fold_in(work.key, e))
        batch = work.epoch(shuffle_key)

        def step(k: jax.Array, carry: tuple) -> tuple:
            theta, memory, total = carry
            point = at(theta) if at else theta
            value, g = value_and_grad(point, batch(k), jax.random.fold_in(noise_key, k))
            if correct:
                g = as_params(correct(g, theta))
            u, memory = work.optimizer.update(g, memory, point)
            theta = as_params(jax.tree.map(lambda theta, u: theta - work.lr * u, theta, u))
            if after:
                theta = as_params(after(theta, k))
            return theta, memory, total + value.astype(total.dtype)

        left = work.num_steps - e * work.num_batches  # a straggler has none left before its last epoch ends
        carry = lax.fori_loop(0, jnp.clip(left, 0, work.num_batches), step, carry)
        return carry, work.watcher.after_epoch(start, carry[0]) if work.watcher else ()

    carry = (start, work.optimizer.init(start), jnp.zeros_like(work.lr))
    measured: PyTree
    (theta, _, total), measured = lax.scan(epoch, carry, jnp.arange(work.epochs))
    if work.watcher:
        work.watcher.done(start, theta, measured)
    return theta, {"loss": total / jnp.maximum(work.num_steps, 1)}


def full_gradient(work: Work, params: Params) -> Params:
    """grad F_i(params): of the mean loss over all rows of the client, the model as evaluation uses it."""
    batch = work.epoch(jax.random.fold_in(work.key, work.epochs))

    def total(params: Params, batch: Batch) -> jax.Array:
        losses = work.model.loss(work.model.apply(params, batch.x), batch.y)
        return jnp.where(batch.mask, losses, 0).sum() / jnp.maximum(work.size, 1)

    def add(k: jax.Array, g: Params) -> Params:
        return jax.tree.map(jnp.add, g, jax.grad(total)(params, batch(k)))

    return lax.fori_loop(0, work.num_batches, add, tree.zeros_like(params))
