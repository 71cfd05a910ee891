"""Aggregation rules. A rule combines the messages of a round's clients, and the server only receives the result.

As in secure aggregation, a rule can only use sums over the clients. Example with differential privacy:

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
from fedjax_drift.recipes import Recipe, recorded
from fedjax_drift.types import PyTree

__all__ = ["Aggregation", "clipped", "epsilon", "mean", "private"]


def __dir__() -> list[str]:
    return __all__


class Aggregation(NamedTuple):
    """An aggregation rule: two pure functions.

    `contribute` is applied to the message of each client. The results of the reporting clients are summed, and
    `combine` is applied to the sum. To write your own rule, create an `Aggregation` with your own two functions.

    Attributes:
      contribute: ``contribute(message, weight) -> (message, weight)`` transforms the message and the weight [] of ONE
        client before ``weight * message`` is summed.
      combine: ``combine(total, weight, key, K) -> mean`` computes the mean message. total: the sum of weight * message.
        weight: the sum of the weights, 0 if no client reported. key: a PRNG key for this round. K: the ``cohort_size``.
      noise_multiplier: The standard deviation of the Gaussian noise, relative to the largest contribution of one client
        to the sum. None: the rule is not private.

        The result of a private rule must not reveal which clients took part. Therefore the server is updated even if no
        client reports, `Round.participation` is always the expected value K / N, and a Bernoulli cohort may be empty.
    """

    contribute: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]]
    combine: Callable[[PyTree, jax.Array, jax.Array, int], PyTree]
    name: str = "aggregation"
    noise_multiplier: float | None = None
    recipe: Recipe | None = None  # how it was made

    def __repr__(self) -> str:
        return f"Aggregation({self.name})"


@recorded
def mean() -> Aggregation:
    """The weighted mean of the messages. It is the default, and the rule that the papers of all algorithms use."""
    return Aggregation(
        contribute=lambda message, weight: (message, weight),
        combine=lambda total, weight, key, K: jax.tree.map(lambda s: s / weight, total),
        name="mean",
    )


@recorded
def clipped(norm: float) -> Aggregation:
    """The weighted mean of messages that are scaled down to a global norm of at most ``norm``.

    Clipping bounds the influence of one hostile or diverging client. The norm is computed over the whole message. In
    SCAFFOLD, for example, this is the model update together with the change of the control variate. FedNova, FedCM,
    FedExP and FedAdamW also send a number (of steps, or a squared norm), which counts in the norm, too. So clipping
    changes them more than others, and the noise of `private` disturbs these numbers.

    Clipping changes the message, but not the state that the client keeps. Server variables that track the mean of the
    client states (SCAFFOLD's c, FedDyn's h) can therefore differ from that mean. A message with values that are not
    finite stays non-finite. Use ``on_nonfinite="drop_client"`` to drop the client that sent it.

    Args:
      norm: largest norm of a message, > 0.

    Raises:
      ValueError: ``norm`` is not a finite number > 0.
    """
    norm = checks.positive("norm", norm)
    return mean()._replace(
        contribute=lambda message, weight: (tree.clip(message, norm), weight), name=f"clipped(norm={norm})"
    )


@recorded
def private(clip_norm: float, noise_multiplier: float) -> Aggregation:
    """DP-FedAvg with a fixed clip (McMahan et al. 2018, arXiv 1710.06963, algorithm 1 with the estimator f_f).

    mean = (sum of clipped messages + N(0, (noise_multiplier clip_norm)^2 I)) / K, where K is the expected number of
    clients. All clients have weight 1, and the noise is added once, to the sum. Messages that are not finite are
    replaced by zeros. The simulation must use ``sampling="bernoulli"`` without over-selection, because the privacy
    accounting assumes Poisson sampling.

    The server variables are private. The values of single clients in the ``info`` of `round_fn` are not private: a
    real server would not see them.

    Args:
      clip_norm: largest global norm S of one client's message, > 0.
      noise_multiplier: standard deviation z of the noise in units of S, >= 0.

    Raises:
      ValueError: an argument is out of range.
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    noise_multiplier = checks.nonnegative("noise_multiplier", noise_multiplier)

    def contribute(message: PyTree, weight: jax.Array) -> tuple[PyTree, jax.Array]:
        finite = tree.all_finite(message)
        message = jax.tree.map(lambda m: jnp.where(finite, m, 0), message)
        return tree.clip(message, clip_norm), jnp.ones_like(weight)

    def combine(total: PyTree, weight: jax.Array, key: jax.Array, K: int) -> PyTree:
        leaves, structure = jax.tree.flatten(total)
        noise = [jax.random.normal(jax.random.fold_in(key, i), s.shape, s.dtype) for i, s in enumerate(leaves)]
        scale = noise_multiplier * clip_norm
        return jax.tree.unflatten(structure, [(s + scale * z) / K for s, z in zip(leaves, noise, strict=True)])

    name = f"private(clip_norm={clip_norm}, noise_multiplier={noise_multiplier})"
    return Aggregation(contribute, combine, name, noise_multiplier)


class Sampled(Protocol):
    """The properties of a `Simulation` that `epsilon` uses."""

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def sampling_rate(self) -> float: ...


def epsilon(sim: Sampled, rounds: int, delta: float) -> float:
    """Computes the epsilon of client-level (epsilon, delta)-differential privacy after ``rounds`` rounds.

    The package dp-accounting composes Poisson-sampled Gaussian mechanisms, with privacy loss distributions. Install it
    with ``pip install dp-accounting``.

    Two federations are neighbours if one of them has one client more. The guarantee covers the server variables. It
    does not cover choices that are made with the clients' data, such as hyper-parameters.

    Args:
      sim: a `Simulation` with ``aggregation=fd.aggregation.private(...)``.
      rounds: number of rounds, in 1..10**6.
      delta: in (0, 1). It should be less than 1 / number of clients.

    Returns:
      epsilon, a float; infinity if ``noise_multiplier`` is 0.

    Raises:
      ValueError: the simulation uses another aggregation, or an argument is out of range.
      ImportError: dp-accounting is not installed.
    """
    if not (hasattr(sim, "aggregation") and hasattr(sim, "sampling_rate")):
        raise ConfigurationError(f"sim must be of type Simulation, got {checks.shown(sim)}")
    noise_multiplier = sim.aggregation.noise_multiplier
    if noise_multiplier is None:
        raise ConfigurationError(
            f"epsilon needs a simulation with aggregation=fd.aggregation.private(...), got {sim.aggregation.name}"
        )
    rounds = checks.integer("rounds", rounds, 1, 10**6, "more rounds need too much memory")
    fix = "choose less than 1 / number of clients"
    delta = checks.number("delta", delta, "in (0, 1)", lambda v: 0 < v < 1, fix, False)
    if noise_multiplier == 0:
        return float("inf")
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise MissingPackageError("epsilon needs the package dp-accounting: pip install dp-accounting") from error
    one_round = dp_accounting.PoissonSampledDpEvent(sim.sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return float(PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(one_round, rounds)).get_epsilon(delta))
