"""The local training loop that most algorithms use: minibatch SGD, starting from the received model.

One step on a batch, with the local model theta and the global model w:

    g     = gradient of the mean loss over the examples of the batch
    g     = correct(g, theta)                       adds the term of the algorithm, e.g. g + mu (theta - w)
    u     = clip(g) + weight_decay * theta          momentum or the optimizer follows, if there is one
    theta = theta - eta_t u
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_drift import checks, reprs, schedules, spec, tree
from fedjax_drift.batch_norm import whole
from fedjax_drift.spec import Count, Fix, Fraction, NonNegative, Positive, checked
from fedjax_drift.types import Batch, Params, PyTree, Trained, Work, batch_mean

PARTS = 10  # the parts of a client's steps after which drift is measured, if the number of steps is given
OPTIMIZER = 2**32 - 1  # fold_in(key, OPTIMIZER) is the client's key for its optimizer; epochs have smaller numbers


Optimizer = Annotated[
    optax.GradientTransformation,
    spec.instance(optax.GradientTransformation, "an optax transformation such as optax.scale_by_adam()"),
]
Augment = Annotated[
    Callable[[jax.Array, jax.Array], jax.Array],
    spec.function("(key, example) -> example"),
    Fix("pass fd.augment.crop_and_flip(), for example"),
]


@dataclass(frozen=True)
@checked
class LocalTraining:
    """The local training of every client: K_i = epochs * ceil(n_i / batch_size) steps with learning rate eta_t, or
    ``steps`` for all clients.

    The examples are reshuffled in every epoch. The last batch of an epoch may have fewer than B examples. Its gradient
    is the mean over its examples. The optimizer state is initialised in every round.

    Attributes:
      epochs: E >= 1, passes over the client's examples per round.
      batch_size: B >= 1, examples per batch.
      lr: eta_0 > 0, the learning rate of round 0. Or a schedule: a function of the round t, such as
        ``optax.cosine_decay_schedule(0.1, decay_steps=500)`` for 500 rounds, whose values must be positive.
      lr_decay: Factor of the learning rate per round, > 0: eta_t = lr * lr_decay**t in round t.
      momentum: Heavy-ball momentum within a round, in [0, 1): v = momentum v + u; theta -= eta_t v.
      weight_decay: Factor of theta, >= 0. The term weight_decay * theta is added after clipping, before momentum or the
        optimizer. With ``optax.scale_by_adam()`` this is Adam with an L2 penalty, not AdamW. AdamW is
        ``optimizer=optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01))``.
      clip_norm: The corrected gradient is clipped to this global norm, > 0. None: no clipping.
      optimizer: An optax transformation that is used instead of momentum, for example ``optax.scale_by_adam()``. It may
        use the parameters, but not the loss. Its random numbers, as in ``optax.add_noise``, also depend on client and
        round.
      direction: What `optimizer` maps a gradient to. "ascent": theta -= eta_t u, as for ``optax.scale_by_adam()``.
        "descent": theta += eta_t u with lr = 1, as for ``optax.adam(lr)``, which has a learning rate of its own. None
        (default): ascent, and `Simulation` raises ValueError if the optimizer does not move along the gradient in its
        first steps.
      augment: ``augment(key, x)`` returns a random variant of one training example ``x`` (scaled, without a batch
        axis), with the same shape and dtype, such as ``fd.augment.crop_and_flip()``. Every example of every step has a
        key of its own, which depends on the client's key, the epoch and the step. None: no augmentation.
      steps: K_i >= 1, the number of steps of every client, instead of ``epochs``. A client goes through its examples
        epoch after epoch, and stops in the middle of one. What is otherwise measured after every local epoch is
        measured after every tenth of the steps. None: the number follows from ``epochs``.
    """

    epochs: Count = 1
    batch_size: Count = 20
    lr: Annotated[float | Callable[[jax.Array], jax.Array], schedules.POSITIVE] = 0.1
    lr_decay: Annotated[Positive, Fix("1 keeps the learning rate constant")] = 1.0
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    clip_norm: Annotated[Positive, Fix("None means no clipping")] | None = None
    optimizer: Optimizer | None = None
    direction: Literal["ascent", "descent"] | None = None
    augment: Augment | None = None
    steps: Annotated[Count, Fix("None means that epochs determine them")] | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs != 1:
            checks.refuse("epochs must be left out if steps are given", f"{self.epochs} epochs and {self.steps} steps")
        if self.optimizer is not None and checks.used(self.momentum):
            checks.refuse("momentum must be 0 when an optimizer is given", self.momentum, "leave one of them out")
        if self.direction is not None and self.optimizer is None:
            checks.refuse("direction must be None without an optimizer", repr(self.direction), "pass optimizer= too")
        if self.direction == "descent" and not isinstance(self.lr, jax.core.Tracer) and self.lr != 1:
            what = 'lr must be 1 with direction="descent", because the optimizer has a learning rate of its own'
            checks.refuse(what, self.lr, "pass lr=1 (lr_decay multiplies the optimizer's learning rate)")

    def ascent(self) -> optax.GradientTransformation:
        """Returns the map from gradient to direction: clipping, then weight decay, then momentum or the optimizer."""
        transformations = [optax.identity()]  # a chain must not be empty
        if self.clip_norm is not None:
            norm = self.clip_norm
            transformations.append(optax.stateless(lambda g, _: tree.clip(g, norm)))
        if checks.used(self.weight_decay):
            transformations.append(optax.add_decayed_weights(self.weight_decay))
        if checks.used(self.momentum):
            transformations.append(optax.trace(self.momentum))
        if self.optimizer is not None:
            transformations.append(self.optimizer)
        if self.direction == "descent":
            transformations.append(optax.scale(-1.0))
        return optax.chain(*transformations)

    def ascent_of(self, key: jax.Array) -> optax.GradientTransformation:
        """Returns `ascent` with random numbers that depend on ``key``, the key of a client in a round.

        Otherwise the noise of ``optax.add_noise`` would be the same for all clients and rounds, because the optimizer
        state, which has the key of the noise, is initialised in every round.
        """
        ascent = self.ascent()
        if self.optimizer is None:
            return ascent
        bits = jax.random.bits(jax.random.fold_in(key, OPTIMIZER), (), jnp.uint32)

        def init(params: Params) -> PyTree:
            return jax.tree.map(lambda a: jax.random.fold_in(a, bits) if _is_key(a) else a, ascent.init(params))

        return ascent._replace(init=init)

    def rate(self, t: jax.Array) -> jax.Array:
        """Returns eta_t, a scalar. It stays above 0 even if it would underflow, because SCAFFOLD divides by it."""
        lr = self.lr(t) if callable(self.lr) else self.lr
        eta = jnp.asarray(lr * self.lr_decay ** t.astype(float), float)
        return jnp.maximum(eta, jnp.finfo(eta.dtype).tiny)

    @property
    def initial_lr(self) -> Any:
        """eta_0, a number or an array."""
        return self.rate(jnp.zeros((), jnp.int32)) if callable(self.lr) else self.lr

    def batches(self, sizes: Any) -> Any:
        """Returns ceil(n_i / B), the batches of an epoch, for clients with ``sizes`` examples, a number or an array."""
        return -(-sizes // min(self.batch_size, 2**31 - 1))  # a larger B has the same effect, and sizes may be int32

    def num_steps(self, sizes: Any) -> Any:
        """Returns K_i for clients with ``sizes`` examples, a number or an array. Without examples it is 0."""
        return self.epochs * self.batches(sizes) if self.steps is None else self.steps * (sizes > 0)

    @property
    def parts(self) -> int:
        """The number of parts of the training after which drift is measured: the epochs, or tenths of the steps."""
        return self.epochs if self.steps is None else min(PARTS, self.steps)

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if callable(value) and field.name == "lr":
                shown.append(f"lr={reprs.function_name(value)}")
            elif field.name in ("epochs", "batch_size", "lr") or isinstance(value, jax.core.Tracer):
                shown.append(f"{field.name}={value}")
            elif value != field.default:
                function = value.update if field.name == "optimizer" else value
                text = reprs.function_name(function) if callable(function) else repr(value)
                shown.append(f"{field.name}={text}")
        return f"LocalTraining({', '.join(shown)})"


def _is_key(leaf: Any) -> bool:
    """Whether a leaf of an optimizer state is a key: a typed one, or a raw one as in older versions of optax."""
    typed = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return typed or (jnp.result_type(leaf), jnp.shape(leaf)) == (jnp.uint32, (2,))


def shuffle(key: jax.Array, size: jax.Array, longest: jax.Array, length: int) -> jax.Array:
    """Returns a random permutation of 0..size-1, padded to int32 [length]; size <= longest <= length.

    The permutation depends only on ``key`` and ``size``, not on the padding. With JAX's default generator (threefry),
    random number i depends only on the key and on i. Padded positions get the largest sort keys, so they come last.
    A group is the set of clients that train side by side on one device. ``longest`` is the number of examples of the
    largest client in the group. Only about ``longest`` numbers are sorted, so a very large client slows down only its
    own group.
    """

    def sort(count: int) -> Callable[[], jax.Array]:
        def order() -> jax.Array:
            bits = jax.random.bits(key, (count,), jnp.uint32)
            bits = jnp.where(jnp.arange(count) < size, bits, jnp.uint32(2**32 - 1))
            return jnp.pad(jnp.argsort(bits, stable=True).astype(jnp.int32), (0, length - count))

        return order

    counts = [n for n in (256 * 4**i for i in range(12)) if n < length] + [length]
    return lax.switch((longest > jnp.array(counts[:-1], jnp.int32)).sum(), [sort(n) for n in counts])


Gradient = Callable[[Params, Batch, jax.Array, PyTree], tuple[jax.Array, Params, PyTree]]


def train(
    work: Work,
    start: Params,
    *,
    correct: Callable[[Params, Params], Params] | None = None,
    at: Callable[[Params], Params] | None = None,
    after: Callable[[Params, jax.Array], Params] | None = None,
    loss: Callable[[Params, Batch, jax.Array], jax.Array] | None = None,
) -> tuple[Params, Trained]:
    """Trains ``work.num_steps`` steps, starting from ``start``.

    Args:
      work: the client's work in this round.
      start: the model before the first step, usually the global model w.
      correct: ``correct(g, theta)`` returns the gradient with the term of the algorithm added.
      at: ``at(theta)`` returns the point at which the gradient and the weight decay are evaluated. Default: theta.
      after: ``after(theta, k)`` returns the model that replaces theta after step k of an epoch.
      loss: ``loss(params, batch, key)`` returns the loss of a batch, a scalar. Default: ``work.loss``.

    Returns:
      The local model theta_i, and `Trained`, which the algorithm passes on in its `ClientResult`. It reads like the
      metrics ``{"loss": mean of the loss over the steps}``.
    """
    if loss in (None, work.loss) and work.statistics is not None:
        theta, _, trained = _train(work, start, _normalised_gradient(work), (), correct, at, after)
        return theta, trained
    value_and_grad = jax.value_and_grad(loss or work.loss)

    def gradient(point: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
        return *value_and_grad(point, batch, key), carry

    theta, _, trained = train_with(work, start, gradient, (), correct=correct, at=at, after=after)
    return theta, trained


def train_with(
    work: Work,
    start: Params,
    gradient: Gradient,
    carry: PyTree,
    *,
    correct: Callable[[Params, Params], Params] | None = None,
    at: Callable[[Params], Params] | None = None,
    after: Callable[[Params, jax.Array], Params] | None = None,
) -> tuple[Params, PyTree, Trained]:
    """Like `train`, with a gradient of the algorithm's own and values that it carries from step to step.

    Args:
      gradient: ``gradient(theta, batch, key, carry) -> (loss, g, carry)``. ``key`` is for the random numbers of the
        model, such as dropout. With ``at``, theta is the point that ``at`` returns.
      carry: the values before the first step, any arrays.
      work, start, correct, at, after: as in `train`.

    Returns:
      The local model theta_i, the carried values after the last step, and `Trained` as in `train`.

    For a model with running statistics, a step has one more forward pass.
    """

    def also_statistics(
        point: Params, batch: Batch, key: jax.Array, carry: PyTree, statistics: PyTree
    ) -> tuple[jax.Array, Params, PyTree, PyTree]:
        value, g, carry = gradient(point, batch, key, carry)
        if work.model.statistics is not None and work.statistics is not None:
            _, statistics = work.model.statistics.forward(point, statistics, batch.x, key, batch.mask, "apply")
        return value, g, carry, statistics

    return _train(work, start, also_statistics, carry, correct, at, after)


def _normalised_gradient(work: Work) -> Callable:
    """The gradient of `Work.loss`, with the running statistics after its forward pass."""
    running = work.model.statistics
    assert running is not None

    def loss(params: Params, batch: Batch, key: jax.Array, statistics: PyTree) -> tuple[jax.Array, PyTree]:
        logits, statistics = running.forward(params, statistics, batch.x, key, batch.mask, "apply")
        return batch_mean(work.model.with_mask(batch.mask).loss(logits, batch.y), batch.mask), statistics

    def gradient(
        point: Params, batch: Batch, key: jax.Array, carry: PyTree, statistics: PyTree
    ) -> tuple[jax.Array, Params, PyTree, PyTree]:
        (value, statistics), g = jax.value_and_grad(loss, has_aux=True)(point, batch, key, statistics)
        return value, g, carry, statistics

    return gradient


def _train(
    work: Work,
    start: Params,
    gradient: Callable[[Params, Batch, jax.Array, PyTree, PyTree], tuple[jax.Array, Params, PyTree, PyTree]],
    carry: PyTree,
    correct: Callable[[Params, Params], Params] | None,
    at: Callable[[Params], Params] | None,
    after: Callable[[Params, jax.Array], Params] | None,
) -> tuple[Params, PyTree, Trained]:
    """The loop of `train_with`. ``gradient`` also gets and returns the running statistics, () if there are none."""

    def as_params(tree: Params) -> Params:  # the learning rate or a hyper-parameter may have a wider dtype
        return jax.tree.map(lambda a, like: a.astype(like.dtype), tree, start)

    part, running = work.part, work.statistics

    def watched(theta: Params, statistics: PyTree) -> Params:
        return theta if running is None else whole(theta, statistics)

    def returned(theta: Params) -> Params:
        return part.handed_over(theta) if part else theta

    def only(mask: PyTree, new: Params, old: Params) -> Params:
        """The leaves of ``new`` where the mask is True, otherwise those of ``old``."""

        def leaf(chosen: Any, new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(chosen, new, old) if isinstance(chosen, jax.Array) else new if chosen else old

        return jax.tree.map(leaf, mask, new, old)

    part_of = parts_of(work)

    def train_part(state: tuple, e: jax.Array) -> tuple:
        steps, step_of = part_of(e)

        def step(i: jax.Array, state: tuple) -> tuple:
            theta, memory, total, carry, statistics = state
            point = at(theta) if at else theta
            batch, epoch_key, noise_key, k = step_of(i)
            examples, key = augmented(work, batch, epoch_key, k), jax.random.fold_in(noise_key, k)
            value, g, new_carry, new_statistics = gradient(point, examples, key, carry, statistics)
            statistics = tree.cast_like(new_statistics, statistics, "the running statistics after a step")
            carry = jax.tree.map(lambda new, old: new.astype(old.dtype), new_carry, carry)
            if correct:
                corrected = as_params(correct(g, theta))
                g = only(part.personal, g, corrected) if part else corrected
            if part:
                g = only(part.trained, g, tree.zeros_like(g))  # the others do not enter the norm of the clipping
            u, memory = work.optimizer.update(g, memory, point)
            new = as_params(jax.tree.map(lambda theta, u: theta - work.lr * u, theta, u))
            if after:
                new = as_params(after(new, k))
            if part:
                new = only(part.trained, new, theta)
            return new, memory, total + value.astype(total.dtype), carry, statistics

        def step_of_group(k: jax.Array, state: tuple) -> tuple:
            return tree.select(k < steps, step(k, state), state)

        if work.lanes is None:
            # a client ends after its own number of steps; a scan would run as many steps as the largest client has
            state = lax.fori_loop(0, steps, step, state)
        else:  # with one k for the whole group, its batches are slices of the shuffled order, and not gathers
            state = lax.fori_loop(0, lax.pmax(steps, work.lanes), step_of_group, state)
        if work.watch is None:
            return state, ()
        return state, work.watch(begin, watched(returned(state[0]), state[-1]))

    statistics = () if running is None else running
    begin = watched(start, statistics)
    state = (start, work.optimizer.init(start), jnp.zeros_like(work.lr), carry, statistics)
    measured: PyTree
    (theta, _, total, carry, statistics), measured = lax.scan(train_part, state, jnp.arange(work.epochs))
    loss, own, theta = total / jnp.maximum(work.num_steps, 1), part.own(theta) if part else (), returned(theta)
    return theta, carry, Trained({"loss": loss}, begin, watched(theta, statistics), statistics, own, measured)


class Step(NamedTuple):
    """A local step."""

    batch: Batch
    epoch_key: jax.Array  # the key of its epoch
    noise_key: jax.Array  # fold_in(noise_key, k) is the key of step k for the model, such as dropout
    k: jax.Array  # int32, its number in the epoch


def parts_of(work: Work) -> Callable[[jax.Array], tuple[jax.Array, Callable[[jax.Array], Step]]]:
    """Returns a function ``part(e)`` for part e of the training. It returns the number of steps of this part, and a
    function that returns `Step` i of them. A straggler stops before its last part ends.

    A part is an epoch. If the number of steps is given, it is a tenth of the steps, and the epochs of a client go over
    from one part to the next.
    """

    def key_of(e: jax.Array) -> jax.Array:
        return jax.random.fold_in(work.key, work.first_epoch + e)

    def epoch(e: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], Step]]:
        epoch_key = key_of(e)
        shuffle_key, noise_key = jax.random.split(epoch_key)
        batch = work.epoch(shuffle_key)
        steps = jnp.clip(work.num_steps - e * work.num_batches, 0, work.num_batches)
        return steps, lambda k: Step(batch(k), epoch_key, noise_key, k)

    if work.steps is None or work.stream is None:
        return epoch
    total, batch = work.steps, work.stream(lambda e: jax.random.split(key_of(e))[0])
    begins = jnp.asarray([total * e // work.epochs for e in range(work.epochs + 1)], jnp.int32)

    def tenth(e: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], Step]]:
        def step(i: jax.Array) -> Step:
            epoch, k = jnp.divmod(begins[e] + i, jnp.maximum(work.num_batches, 1))
            epoch_key = key_of(epoch)
            return Step(batch(begins[e] + i), epoch_key, jax.random.split(epoch_key)[1], k)

        return jnp.clip(work.num_steps - begins[e], 0, begins[e + 1] - begins[e]), step

    return tenth


def augmented(work: Work, batch: Batch, epoch_key: jax.Array, k: jax.Array) -> Batch:
    """Batch k of an epoch with a random variant of each example, or the batch itself without augmentation."""
    if work.augment is None:
        return batch
    *_, key = jax.random.split(epoch_key, 3)  # the first two are those for the shuffle and the model
    keys = jax.random.split(jax.random.fold_in(key, k), len(batch.x))
    return batch._replace(x=jax.vmap(work.augment)(keys, batch.x))


def over_examples(work: Work, function: Callable[[Batch], PyTree]) -> PyTree:
    """The sum of ``function(batch)`` over the batches of one pass over the client's examples, without augmentation.

    ``function`` returns arrays. It is 0 for a client without examples.
    """
    batch = work.epoch(jax.random.fold_in(work.key, work.epochs))
    shapes = jax.eval_shape(lambda: function(batch(jnp.int32(0))))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return lax.fori_loop(0, work.num_batches, lambda k, total: jax.tree.map(jnp.add, total, function(batch(k))), zeros)


def full_gradient(work: Work, params: Params) -> Params:
    """The gradient of F_i at ``params``. F_i is the mean loss over all examples of the client.

    The model is in evaluation mode (no dropout), and the examples are not augmented.
    """
    gradient = jax.grad(partial(_share_of_loss, work))
    return over_examples(work, lambda batch: gradient(params, batch))


def full_loss(work: Work, params: Params) -> jax.Array:
    """F_i at ``params``, a scalar. The model is in evaluation mode, and the examples are not augmented."""
    return over_examples(work, lambda batch: _share_of_loss(work, params, batch))


def _share_of_loss(work: Work, params: Params, batch: Batch) -> jax.Array:
    """The sum of the losses of a batch, divided by n_i. The sum over the batches of an epoch is F_i."""
    model = work.model.with_mask(batch.mask)
    losses = model.loss(model.apply(params, batch.x), batch.y)
    return jnp.where(batch.mask, losses, 0).sum() / jnp.maximum(work.size, 1)
