"""Aggregation rules. A rule combines the messages of a round's clients, and the server only receives the result.

As in secure aggregation, a rule can only use sums over the clients, unless it is `robust`. A rule may have a state,
such as a clip that adapts. Example with differential privacy:

    private = fd.aggregation.private(clip_norm=0.5, noise_multiplier=1.0)
    sim = fd.Simulation(model, data, algorithm, cohort_size=100, sampling="bernoulli", aggregation=private)
    fd.aggregation.epsilon(sim, rounds=500, delta=1e-5)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, spec, tree
from fedjax_drift.devices.launch import traced
from fedjax_drift.errors import MissingPackageError
from fedjax_drift.recipes import Recipe, recorded
from fedjax_drift.recipes import recorded as rule
from fedjax_drift.robust import Before, Rule, Stack
from fedjax_drift.robust.rule import of_finite
from fedjax_drift.round.accounting import trees_of_a_client
from fedjax_drift.spec import Count, Fix, NonNegative, Positive, Probability, checked
from fedjax_drift.types import THREEFRY, Metrics, PyTree

__all__ = ["Aggregation", "clipped", "epsilon", "mean", "private", "private_ftrl", "robust", "rule"]
COUNT = 2**32 - 1  # fold_in(key, COUNT) is the key for the noise of a count, and fold_in(key, i) that for leaf i
__dir__ = __all__.copy
RobustRule = Annotated[Rule, spec.instance(Rule), Fix("pass fd.robust.median(), or fd.robust.Rule(combine)")]


def _preparations(name: str, value: Any, fix: str) -> tuple[Before, ...]:
    if isinstance(value, Before) or not isinstance(value, tuple | list):
        checks.refuse(f"{name} must be a list such as [fd.robust.nnm(f=2)]", checks.shown(value), fix)
    return tuple(checks.instance(f"{name}[{i}]", each, Before, fix) for i, each in enumerate(value))


def _names(name: str, value: Any, fix: str) -> tuple[str | int, ...]:
    if isinstance(value, str) or not isinstance(value, tuple | list) or not value:
        checks.refuse(f"{name} must be a list of names or indices, such as [0]", checks.shown(value), fix)
    return tuple(value)


Preparations = Annotated[Any, spec.Spec(_preparations, "list"), Fix("pass before=[fd.robust.nnm(f=2)]")]
Parts = Annotated[Any, spec.Spec(_names, "list"), Fix("None means all parts")]


class Joint(NamedTuple):
    """What a robust rule makes of all messages of a round at once."""

    init: Callable[[PyTree], PyTree]  # ``init(message) -> state``, before round 0. message: zeros
    combine: Callable[[PyTree, Stack, jax.Array], tuple[PyTree, jax.Array, PyTree]]
    """``combine(state, stack, key) -> (message, enough, state)``. enough: bool [], whether it has an aggregate."""


class Aggregation(NamedTuple):
    """An aggregation rule: pure functions, and a state.

    `contribute` is applied to the message of each client. The results of the reporting clients are summed, and
    `combine` is applied to the sum. To write your own rule, create an `Aggregation` with your own functions. With the
    decorator `fd.aggregation.rule` on its factory, its numbers are arguments of the compiled round.

    Attributes:
      contribute: ``contribute(state, message, weight) -> (part, weight)`` transforms the message and the weight [] of
        ONE client before ``weight * part`` is summed. part: any pytree of numbers.
      combine: ``combine(state, total, weight, key, K) -> (mean, state)`` computes the mean message, which has the
        structure of a message, and the state of the next round. total: the sum of weight * part. weight: the sum of the
        weights, 0 if no client reported. key: a PRNG key for this round. K: the ``cohort_size``.
      init: ``init() -> state``, before round 0: a pytree of arrays of numbers, kept on every device and saved in
        checkpoints. Default: no state.
      report: ``report(state) -> metrics``, scalars that are added to ``info``. state: after the round.
      check: ``check(K)`` raises ConfigurationError if the rule does not fit a cohort size.
      noise_multiplier: The standard deviation of the Gaussian noise, relative to the largest contribution of one client
        to the sum. None: the rule is not private.

        The result of a private rule must not reveal which clients took part. Therefore the server is updated even if no
        client reports, `Round.participation` is always the expected value K / N, and a Bernoulli cohort may be empty.
      restart_every: For a private rule whose noise is that of trees over the rounds, the number of rounds of a tree.
        None: the noise of each round is independent, and the accounting assumes Poisson sampling.
      joint: of a robust rule.
      name: the name in logs and messages.
      recipe: how it was made.
    """

    contribute: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, jax.Array]]
    combine: Callable[[PyTree, PyTree, jax.Array, jax.Array, int], tuple[PyTree, PyTree]]
    init: Callable[[], PyTree] = lambda: ()
    report: Callable[[PyTree], Metrics] | None = None
    check: Callable[[int], None] | None = None
    name: str = "aggregation"
    noise_multiplier: float | None = None
    restart_every: int | None = None
    joint: Joint | None = None
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return f"Aggregation({self.name})"

    @property
    def poisson(self) -> bool:
        """Whether the privacy accounting assumes that clients are sampled independently."""
        return self.noise_multiplier is not None and self.restart_every is None


@recorded
def mean() -> Aggregation:
    """The weighted mean of the messages. It is the default, and the rule that the papers of all algorithms use."""
    return Aggregation(
        contribute=lambda state, message, weight: (message, weight),
        combine=lambda state, total, weight, key, K: (jax.tree.map(lambda s: s / weight, total), state),
        name="mean",
    )


@recorded
def clipped(norm: Positive) -> Aggregation:
    """The weighted mean of messages that are scaled down to a global norm of at most ``norm``.

    Clipping bounds the influence of one hostile or diverging client. The norm is computed over the whole message. In
    SCAFFOLD, for example, this is the model update together with the change of the control variate. FedNova, FedCM,
    FedExP and FedAdamW also send a number (of steps, or a squared norm), which counts in the norm, too. So clipping
    changes them more than others, and the noise of `private` disturbs these numbers.

    Clipping changes the message, but not the state that the client keeps. Server variables that track the mean of the
    client states (SCAFFOLD's c, FedDyn's h, MIFA's ybar) can therefore differ from that mean. A message with values
    that are not finite stays non-finite. Use ``on_nonfinite="drop_client"`` to drop the client that sent it.

    Args:
      norm: largest norm of a message, > 0.
    """
    return mean()._replace(
        contribute=lambda state, message, weight: (tree.clip(message, norm), weight), name=f"clipped(norm={norm})"
    )


@recorded
def robust(rule: RobustRule, before: Preparations = (), parts: Parts | None = None) -> Aggregation:
    """A robust rule for clients of which some may be hostile. Rules are in `fedjax_drift.robust`.

        fd.aggregation.robust(fd.robust.trimmed_mean(f=2), before=[fd.robust.nnm(f=2)])

    It needs the messages of all clients of a round at once, so the memory is that of K messages on every device. A
    message is one vector of all its leaves. In SCAFFOLD, for example, this is the model update together with the change
    of the control variate. All clients have weight 1, as the definitions of the rules assume. With a rule, c of
    SCAFFOLD and FedDC is no longer the mean of the clients' c_i, on which they rely. `feddc(alpha, variate="none")` has
    no c.

    n is the number of clients that report. A message with values that are not finite counts as not reported. If a rule
    needs fewer adversaries than n / 2, and n is at most 2 f, the server is not updated in this round.

    Args:
      rule: such as ``fd.robust.median()``.
      before: what is done with the messages first, in this order.
      parts: the names, or the indices, of the parts of a message that norms and distances are of. Default: all.

    Raises:
      ValueError: f is half of ``cohort_size`` or more, when a simulation is created.
    """

    def check(K: int) -> None:
        n = K
        for step in (*before, rule):
            if 2 * step.f >= n:
                left = f"{n} messages" if n == K else f"the {n} messages that {before[0].name} and others leave"
                checks.refuse(f"f of {step.name} must be less than half of {left}", step.f, "pass a smaller f")
            n = n if step is rule else step.count(n)  # type: ignore[union-attr]

    def combine(state: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, jax.Array, PyTree]:
        stack = of_finite(stack._replace(parts=partial(_parts, parts)))
        enough = stack.n > 0
        for i, step in enumerate(before):
            enough &= stack.n > 2 * step.f
            stack = step.change(stack, jax.random.fold_in(key, i))
        enough &= stack.n > 2 * rule.f
        combined = rule.combine(state, stack, jax.random.fold_in(key, len(before)))
        if not isinstance(combined, tuple) or len(combined) != 2:
            checks.refuse(f"combine of {rule.name} must return (message, state)", checks.type_of(combined))
        message, state = combined
        one = jax.tree.map(lambda a: a[0], stack.each)
        tree.check_layout(message, one, f"combine of {rule.name} must return the shapes of a message", dtypes=False)
        return message, enough, state

    name = ", ".join([repr(rule), *map(repr, before)])
    return mean()._replace(
        contribute=lambda state, message, weight: (message, jnp.ones_like(weight)),
        joint=Joint(rule.init, combine),
        check=check,
        name=f"robust({name})",
    )


def _parts(names: tuple[str | int, ...] | None, message: PyTree) -> PyTree:
    """The parts of a message with these names or indices. None: all."""
    if names is None:
        return message
    have = getattr(message, "_fields", None) or (list(message) if isinstance(message, dict) else None)
    try:
        return [
            getattr(message, name) if isinstance(name, str) and not isinstance(message, dict) else message[name]
            for name in names
        ]
    except (AttributeError, KeyError, IndexError, TypeError):
        known = f"the parts {', '.join(map(str, have))}" if have else f"a {type(message).__name__}"
        checks.refuse("parts must be names or indices of parts of a message", list(names), f"this message has {known}")


class Clip(NamedTuple):
    """The state of `private` with an adaptive clip."""

    norm: jax.Array  # float [], C
    within: jax.Array  # float [], the noisy share of the messages of the last round that were not clipped


@recorded
def private(
    clip_norm: Positive,
    noise_multiplier: NonNegative,
    target_quantile: Probability | None = None,
    clip_lr: Positive = 0.2,
    count_stddev: Positive | None = None,
) -> Aggregation:
    """DP-FedAvg (McMahan et al. 2018, arXiv 1710.06963, algorithm 1 with the estimator f_f), with a fixed clip or an
    adaptive one (Andrew, Thakkar, McMahan, Ramaswamy 2021, arXiv 1905.03871, algorithm 1).

    mean = (sum of clipped messages + N(0, (noise_multiplier clip_norm)^2 I)) / K, where K is the expected number of
    clients. All clients have weight 1, and the noise is added once, to the sum. Messages that are not finite are
    replaced by zeros. The simulation must use ``sampling="bernoulli"`` without over-selection, because the privacy
    accounting assumes Poisson sampling.

    With ``target_quantile`` gamma, the clip C follows the gamma-quantile of the norms of the messages:

        b = 1/2 + (sum_i (b_i - 1/2) + N(0, count_stddev^2)) / K,    C <- C exp(-clip_lr (b - gamma))

    b_i is 1 if the norm of message i is at most C, and 0 otherwise. A message that is not finite counts as 1/2. The
    noise multiplier z covers both sums: that of the messages has (z^-2 - (2 count_stddev)^-2)^(-1/2) (theorem 1).
    ``info`` has ``clip_norm`` [], C for the next round, and ``within_clip`` [], b.

    The server variables are private, and so are these two. The values of single clients in the ``info`` of `round_fn`
    are not private: a real server would not see them.

    Args:
      clip_norm: largest global norm of one client's message, > 0. With ``target_quantile`` that of round 0.
      noise_multiplier: standard deviation z of the noise in units of the clip, >= 0. 0: no noise at all.
      target_quantile: gamma, in 0..1. None (default): a fixed clip. The paper uses 0.5.
      clip_lr: learning rate of the logarithm of the clip, > 0. Default: 0.2, as in the paper.
      count_stddev: > noise_multiplier / 2, the standard deviation of the noise of the sum of b_i - 1/2. None (default):
        K / 20, as in the paper.

    Raises:
      ValueError: ``count_stddev`` has no effect; when a simulation is created, also if z >= 2 count_stddev.
    """
    z, stddev = noise_multiplier, count_stddev
    name = f"private(clip_norm={clip_norm}, noise_multiplier={noise_multiplier})"
    if target_quantile is None:
        if count_stddev is not None:
            fix = "pass target_quantile=0.5, for example"
            checks.refuse("count_stddev has no effect on a fixed clip", count_stddev, fix)

        def fixed(state: PyTree, total: PyTree, weight: jax.Array, key: jax.Array, K: int) -> tuple[PyTree, PyTree]:
            return _over(K, _plus(total, z * clip_norm, noise(key, total))), state

        return Aggregation(
            lambda state, message, weight: (_clipped(message, clip_norm)[0], jnp.ones_like(weight)),
            fixed,
            name=name,
            noise_multiplier=z,
        )
    gamma = target_quantile

    def contribute(state: Clip, message: PyTree, weight: jax.Array) -> tuple[PyTree, jax.Array]:
        message, finite, norm = _clipped(message, state.norm)
        sign = jnp.where(finite, jnp.where(norm <= state.norm, 0.5, -0.5), 0)  # b_i - 1/2
        return (message, sign.astype(weight.dtype)), jnp.ones_like(weight)

    def combine(state: Clip, total: PyTree, weight: jax.Array, key: jax.Array, K: int) -> tuple[PyTree, Clip]:
        messages, signs = total
        of_count = K / 20 if stddev is None else stddev
        of_messages = (z**-2 - (2 * of_count) ** -2) ** -0.5 if checks.used(z) else 0.0
        if checks.used(z):
            signs += of_count * jax.random.normal(jax.random.fold_in(key, COUNT), signs.shape, signs.dtype)
        b = 0.5 + signs / K
        C = state.norm * jnp.exp(-clip_lr * (b - gamma))
        mean = _over(K, _plus(messages, of_messages * state.norm, noise(key, messages)))
        return mean, Clip(C.astype(state.norm.dtype), b.astype(state.within.dtype))

    def check(K: int) -> None:
        largest = K / 10 if stddev is None else 2 * stddev
        if not traced((z, largest)) and z >= largest:
            fix = "pass a larger count_stddev or a larger cohort"
            checks.refuse(f"noise_multiplier must be less than {largest:g}, twice count_stddev", z, fix)

    return Aggregation(
        contribute,
        combine,
        init=lambda: Clip(jnp.asarray(clip_norm, float), jnp.asarray(gamma, float)),
        report=lambda state: {"clip_norm": state.norm, "within_clip": state.within},
        check=check,
        name=f"{name[:-1]}, target_quantile={target_quantile})",
        noise_multiplier=z,
    )


class Tree(NamedTuple):
    """The state of `private_ftrl`. The noise of a node is computed again from the key when it is needed."""

    step: jax.Array  # int32 [], rounds since the tree began
    words: jax.Array  # uint32 [2], the key of the tree


@recorded
def private_ftrl(clip_norm: Positive, noise_multiplier: NonNegative, restart_every: Count) -> Aggregation:
    """DP-FTRL (Kairouz, McMahan, Song, Thakkar, Thakurta, Xu 2021, arXiv 2103.00039) by tree aggregation with restarts.

    The noise of the sum of the means of t rounds is that of a binary tree over the rounds:

        mean_t = (sum of clipped messages + n_t - n_(t-1)) / K,    n_t = the sum of the nodes of the bits of t

    A node has the noise N(0, (noise_multiplier clip_norm)^2 I), and that of bit b covers 2^b rounds. So n_t has at most
    log2(t) + 1 terms, while independent noise of t rounds would have t. A server that adds up the means, like FedAvg
    and FedAvgM, has the noise of FTRL. The variance is not reduced further (by Honaker's estimator).

    Sampling need not be random. The accounting of `epsilon` needs that a client takes part at most once in a tree:
    ``participation=fd.participation.cyclic(groups)`` with groups >= restart_every, or a `schedule` without repetitions.
    The last tree's noise stays in the sum. It is least if ``restart_every`` is a power of 2.
    All clients have weight 1. Messages that are not finite are replaced by zeros.

    Args:
      clip_norm: largest global norm of one client's message, > 0.
      noise_multiplier: standard deviation of the noise of a node in units of ``clip_norm``, >= 0.
      restart_every: the number of rounds of a tree, >= 1. The next round begins another tree.
    """
    z, R = noise_multiplier, restart_every

    def combine(state: Tree, total: PyTree, weight: jax.Array, key: jax.Array, K: int) -> tuple[PyTree, Tree]:
        words = jnp.where(state.step == 0, jax.random.key_data(key), state.words)
        tree_key, t = jax.random.wrap_key_data(words, impl=THREEFRY), state.step + 1

        def node(s: jax.Array) -> PyTree:
            """The noise of the node that is complete after round s."""
            return noise(jax.random.fold_in(tree_key, s), total)

        # Node t takes the place of the nodes t - 1, t - 2, t - 4, ..., one for each 0 at the end of the binary number
        # t. That is about one in a round.
        zeros = jax.lax.population_count((t & -t) - 1)
        step = jax.lax.fori_loop(0, zeros, lambda j, n: tree.subtract(n, node(t - (1 << j))), node(t))
        return _over(K, _plus(total, z * clip_norm, step)), Tree(t % R, words)

    return Aggregation(
        lambda state, message, weight: (_clipped(message, clip_norm)[0], jnp.ones_like(weight)),
        combine,
        init=lambda: Tree(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32)),
        name=f"private_ftrl(clip_norm={clip_norm}, noise_multiplier={noise_multiplier}, restart_every={R})",
        noise_multiplier=z,
        restart_every=R,
    )


def noise(key: jax.Array, like: PyTree) -> PyTree:
    """Standard normal numbers, shaped like a tree."""
    leaves, structure = jax.tree.flatten(like)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    return jax.tree.unflatten(
        structure, [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    )


def _plus(total: PyTree, scale: Any, noise: PyTree) -> PyTree:
    return jax.tree.map(lambda s, n: s + jnp.asarray(scale, s.dtype) * n, total, noise)


def _over(K: int, total: PyTree) -> PyTree:
    return jax.tree.map(lambda s: s / K, total)


def _clipped(message: PyTree, norm: Any) -> tuple[PyTree, jax.Array, jax.Array]:
    """The clipped message, zeros if it is not finite; whether it is finite; and the norm that it had."""
    finite = tree.first_nonfinite(message) < 0
    message = jax.tree.map(lambda m: jnp.where(finite, m, 0), message)
    return tree.clip(message, norm), finite, jnp.sqrt(tree.dot(message, message))


Rounds = Annotated[int, spec.integer(1, 10**6), Fix("more rounds need too much memory")]
Delta = Annotated[float, spec.INSIDE, Fix("choose less than 1 / number of clients")]


@checked
def epsilon(sim: Any, rounds: Rounds, delta: Delta) -> float:
    """Computes the epsilon of client-level (epsilon, delta)-differential privacy after ``rounds`` rounds.

    The package dp-accounting composes the mechanisms of the rounds: Poisson-sampled Gaussian mechanisms with privacy
    loss distributions (`private`), and trees with Renyi differential privacy (`private_ftrl`). Install it with
    ``pip install dp-accounting``.

    Two federations are neighbours if one of them has one client more; for trees, if the messages of one client are
    zeros. The guarantee covers the server variables. It does not cover choices that are made with the clients' data,
    such as hyper-parameters, and no cohorts that are passed to `Simulation.round_fn`.

    Args:
      sim: a `Simulation` with ``aggregation=fd.aggregation.private(...)`` or ``private_ftrl(...)``.
      rounds: number of rounds, in 1..10**6.
      delta: in (0, 1). It should be less than 1 / number of clients.

    Returns:
      epsilon, a float; infinity if ``noise_multiplier`` is 0.

    Raises:
      ValueError: the simulation uses another aggregation, or a client may take part more than once in a tree.
      ImportError: dp-accounting is not installed.
    """
    if not all(hasattr(sim, name) for name in ("aggregation", "participation", "sampling_rate", "data")):
        checks.refuse("sim must be of type Simulation", checks.shown(sim))
    z, R = sim.aggregation.noise_multiplier, sim.aggregation.restart_every
    if z is None:
        checks.refuse("epsilon needs a simulation with aggregation=fd.aggregation.private(...)", sim.aggregation.name)
    trees = 0 if R is None else trees_of_a_client(sim.participation, sim.data.num_clients, rounds, R)
    if z == 0:
        return float("inf")
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise MissingPackageError("epsilon needs the package dp-accounting: pip install dp-accounting") from error
    if R is None:
        one_round = dp_accounting.PoissonSampledDpEvent(sim.sampling_rate, dp_accounting.GaussianDpEvent(z))
        accountant = pld.PLDAccountant()
        return float(accountant.compose(dp_accounting.SelfComposedDpEvent(one_round, rounds)).get_epsilon(delta))
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(z, min(R, rounds)), trees)
    return float(accountant.get_epsilon(delta))
