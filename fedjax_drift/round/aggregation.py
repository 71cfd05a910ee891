"""How the messages of a round become the mean that the server sees: sums only, as secure aggregation has them.

With differential privacy, and how much of it:

    private = fd.aggregation.private(clip_norm=0.5, noise_multiplier=1.0)
    sim = fd.Simulation(model, data, algorithm, cohort_size=100, sampling="bernoulli", aggregation=private)
    fd.aggregation.epsilon(sim, rounds=500, delta=1e-5)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.errors import ConfigurationError, MissingPackageError
from fedjax_drift.types import PyTree


class Aggregation(NamedTuple):
    """Two pure functions around a sum over the clients that answered. Write your own for other rules."""

    contribute: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]]
    """``contribute(message, weight []) -> (message, weight)``, ONE client's, before ``weight * message`` is summed."""
    combine: Callable[[PyTree, jax.Array, jax.Array, int], PyTree]
    """``combine(total, weight, key, K) -> mean`` from the sum of weight * message, the sum of weights (0 where nobody
    answered), a key of this round's own, and the ``cohort_size``."""
    name: str = "aggregation"
    noise_multiplier: float | None = None
    """Of the Gaussian noise, relative to the most that one client adds to the sum. With it who answered must not show:
    the server is updated in every round, `Round.participation` is the expected K / N, and a Bernoulli cohort may be
    empty."""


def mean() -> Aggregation:
    """The weighted mean of the messages: what every algorithm's paper has, and the default."""
    return Aggregation(
        contribute=lambda message, weight: (message, weight),
        combine=lambda total, weight, key, K: jax.tree.map(lambda s: s / weight, total),
        name="mean",
    )


def clipped(norm: float) -> Aggregation:
    """The weighted mean of messages that are scaled down to a global norm of at most ``norm``, > 0.

    Bounds what one hostile or diverging client can do. A message is clipped as a whole: SCAFFOLD's D_i together with
    its variate's change. What the client keeps is not: the server's mean of states (SCAFFOLD's c, FedDyn's h) then
    differs from the states' mean. One that is not finite stays so: ``on_nonfinite="drop_client"`` leaves it out.
    Raises ValueError unless norm > 0.
    """
    norm = checks.positive("norm", norm)
    return mean()._replace(
        contribute=lambda message, weight: (clip(message, norm), weight), name=f"clipped(norm={norm})"
    )


def private(clip_norm: float, noise_multiplier: float) -> Aggregation:
    """DP-FedAvg with a fixed clip (McMahan et al. 2018, arXiv 1710.06963, algorithm 1 with the estimator f_f).

    mean = (sum of clipped messages + N(0, (noise_multiplier clip_norm)^2 I)) / K: every client weighs 1, K is the
    expected number of clients, and noise is added once, to the sum. Needs ``sampling="bernoulli"`` without
    over-selection, on which its accounting rests, and turns messages that are not finite into zeros. What `round_fn`
    reports in ``info`` of single clients is the simulator's knowledge and not private; the server's variables are.

    Args:
      clip_norm: S > 0, global norm of one client's message.
      noise_multiplier: z >= 0, the noise's standard deviation in units of S.

    Raises:
      ValueError: values out of range.
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    noise_multiplier = checks.nonnegative("noise_multiplier", noise_multiplier)

    def contribute(message: PyTree, weight: jax.Array) -> tuple[PyTree, jax.Array]:
        finite = tree.all_finite(message)
        message = jax.tree.map(lambda m: jnp.where(finite, m, 0), message)
        return clip(message, clip_norm), jnp.ones_like(weight)

    def combine(total: PyTree, weight: jax.Array, key: jax.Array, K: int) -> PyTree:
        leaves, structure = jax.tree.flatten(total)
        noise = [jax.random.normal(jax.random.fold_in(key, i), s.shape, s.dtype) for i, s in enumerate(leaves)]
        scale = noise_multiplier * clip_norm
        return jax.tree.unflatten(structure, [(s + scale * z) / K for s, z in zip(leaves, noise, strict=True)])

    name = f"private(clip_norm={clip_norm}, noise_multiplier={noise_multiplier})"
    return Aggregation(contribute, combine, name, noise_multiplier)


def clip(message: PyTree, norm: float) -> PyTree:
    """The message scaled down to a global norm of at most ``norm``."""
    size = jnp.sqrt(tree.dot(message, message))
    scale = jnp.where(size > norm, norm / jnp.where(size > norm, size, 1), 1)
    return jax.tree.map(lambda m: (scale * m).astype(m.dtype), message)


class Sampled(Protocol):
    """What `epsilon` needs of a `Simulation`."""

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def sampling_rate(self) -> float: ...


def epsilon(sim: Sampled, rounds: int, delta: float) -> float:
    """The epsilon of (epsilon, delta)-differential privacy that each client has after ``rounds`` rounds.

    The library dp-accounting composes Poisson-sampled Gaussian mechanisms (privacy loss distributions). Neighbouring
    federations differ in the presence of one client. The guarantee covers the server variables, and not what is chosen
    by looking at the clients' data, such as hyper-parameters. Needs ``pip install "fedjax-drift[privacy]"``.

    Args:
      sim: a `Simulation` with ``aggregation=fd.aggregation.private(...)``.
      rounds: in 1..10**6.
      delta: in (0, 1).

    Returns:
      epsilon; infinity without noise.

    Raises:
      ValueError: another aggregation, or arguments out of range.
    """
    if not (hasattr(sim, "aggregation") and hasattr(sim, "sampling_rate")):
        raise ConfigurationError(f"sim must be of type Simulation, got {checks.shown(sim)}")
    noise_multiplier = sim.aggregation.noise_multiplier
    if noise_multiplier is None:
        raise ConfigurationError(
            f"epsilon needs a simulation with aggregation=fd.aggregation.private(...), got {sim.aggregation.name}"
        )
    rounds = checks.integer("rounds", rounds, 1, 10**6, "more take more memory than there is")
    delta = checks.number("delta", delta, "in (0, 1)", lambda v: 0 < v < 1, "less than 1 / clients", False)
    if noise_multiplier == 0:
        return float("inf")
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise MissingPackageError('accounting needs dp-accounting: pip install "fedjax-drift[privacy]"') from error
    one_round = dp_accounting.PoissonSampledDpEvent(sim.sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return float(PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(one_round, rounds)).get_epsilon(delta))
