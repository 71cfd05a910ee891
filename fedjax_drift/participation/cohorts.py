"""Rules that select a cohort, from all clients or from those that are available."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks, spec
from fedjax_drift.participation.rule import Clients, Participation
from fedjax_drift.recipes import recorded
from fedjax_drift.spec import Count, Flag
from fedjax_drift.tree import PyTree


@recorded
def uniform() -> Participation:
    """K different clients, each with the same probability. It is the default."""

    def select(state: PyTree, key: jax.Array, t: jax.Array, K: int, clients: Clients) -> tuple[jax.Array, None]:
        N = len(clients.sizes)
        if clients.available is not None:
            order = jnp.where(clients.available, jax.random.uniform(key, (N,)), -1)
            return _highest(order, K, order >= 0), None
        if K == N:
            return jnp.arange(N, dtype=jnp.int32), None
        if N <= 1024 or 2 * K > N:  # `choice` sorts N random numbers
            return jax.random.choice(key, N, (K,), replace=False).astype(jnp.int32), None
        return first_distinct(key, N, K), None

    return Participation(select, distinct=True, name="uniform")


@recorded
def bernoulli(nonempty: Flag = True) -> Participation:
    """Each client with probability K / N, independently of the others.

    Args:
      nonempty: whether an empty cohort is drawn again. `fd.aggregation.private` needs independent draws, so a
        `Simulation` sets it to False for this rule.
    """

    def select(state: PyTree, key: jax.Array, t: jax.Array, K: int, clients: Clients) -> tuple[jax.Array, None]:
        N = len(clients.sizes)

        def draw(carry: tuple) -> tuple:
            key, _ = carry
            key, use = jax.random.split(key)
            drawn = jax.random.bernoulli(use, K / N, (N,))
            return key, drawn if clients.available is None else drawn & clients.available

        drawn = draw((key, None))
        if nonempty:
            possible = True if clients.available is None else clients.available.any()
            drawn = lax.while_loop(lambda carry: ~carry[1].any() & possible, draw, drawn)
        return _where(drawn[1], most_of_bernoulli(N, K)), None

    return Participation(select, most=most_of_bernoulli, distinct=True, name="bernoulli")


@recorded
def by_size(replace: Flag = False) -> Participation:
    """K clients with probabilities proportional to their numbers of examples. Their mean has equal weights.

    The federation must have fewer than 2**31 examples.

    Args:
      replace: False (default): K different clients, drawn one after another. True: K draws with replacement, the scheme
        of FedProx (arXiv 1812.06127, algorithm 2). A client that is drawn twice then counts twice in the mean, and
        trains once.
    """

    def select(state: PyTree, key: jax.Array, t: jax.Array, K: int, clients: Clients) -> tuple[jax.Array, None]:
        if not replace:
            return _by_size(key, K, clients), None
        sizes = clients.sizes if clients.available is None else jnp.where(clients.available, clients.sizes, 0)
        ends = jnp.cumsum(sizes)
        row = jax.random.randint(key, (K,), 0, jnp.maximum(ends[-1], 1), jnp.int32)  # the client that has this example
        return jnp.searchsorted(ends, row, side="right").astype(jnp.int32), None  # N if no client is available

    return Participation(select, weights="uniform", distinct=not replace, name="by_size")


Chances = Annotated[
    np.ndarray,
    spec.array(
        "a probability in (0, 1] for each client, [N]", lambda p: spec.numbers(p, 1) and ((p > 0) & (p <= 1)).all()
    ),
]


@recorded
def importance(p: Chances) -> Participation:
    """Client i with probability p_i, independently of the others (Poisson sampling), and with the factor 1 / p_i.

    The mean of the messages divides by the sum of the weights of all clients that are available. So its expected value
    is exactly the mean over these clients. Without a rule of availability, these are all clients. An empty cohort gives
    a mean of 0. Without answers of selected clients (`fd.Failures`) the mean is too small.

    A simulation with this rule refuses ``over_selection``, which drops the slowest clients, and cohorts that the caller
    gives, because the divisor of the mean is that of the cohorts that this rule selects.

    Args:
      p: float [N], in (0, 1]. The sum is K, the cohort size.
    """

    def select(state: PyTree, key: jax.Array, t: jax.Array, K: int, clients: Clients) -> tuple[jax.Array, jax.Array]:
        chance = jnp.asarray(p, float)
        active = jax.random.uniform(key, chance.shape, chance.dtype) < chance
        ids = _where(active if clients.available is None else active & clients.available, most_of_bernoulli(len(p), K))
        return ids, 1 / chance.at[ids].get(mode="clip")

    def most(N: int, K: int) -> int:
        if len(p) != N:
            checks.refuse(f"p must have a probability for each of the {N} clients", len(p))
        if abs(p.sum(dtype=float) - K) > 1e-4 * K:
            checks.refuse(
                f"the sum of p must be the cohort size, {K}",
                f"{p.sum(dtype=float):.6g}",
                f"pass p * {K} / p.sum(), if no value then exceeds 1",
            )
        return most_of_bernoulli(N, K)  # Hoeffding 1956: no Poisson sampling with this mean has longer tails

    return Participation(
        select, most=most, expected=lambda K, clients: jnp.ones(len(p)), distinct=True, name="importance"
    )


@recorded
def power_of_choice(candidates: Count, exact: Flag = False) -> Participation:
    """The K clients with the highest losses among ``candidates`` clients (Cho, Wang, Joshi 2020, arXiv 2010.01243).

    The candidates are different clients, drawn with probabilities proportional to their numbers of examples. The mean
    has equal weights.

    Args:
      candidates: the number of candidates d, at least K.
      exact: whether the candidates evaluate the present model on their examples. It takes a forward pass over these.
        False (default): their last known loss is used, which is the mean over the steps of their last local training
        (``rpow-d`` in the paper). A client without a known loss comes first.
    """

    def init(key: jax.Array, clients: Clients) -> PyTree:
        return () if exact else jnp.full(len(clients.sizes), jnp.inf)

    def select(losses: PyTree, key: jax.Array, t: jax.Array, K: int, clients: Clients) -> tuple[jax.Array, None]:
        ids = _by_size(key, candidates, clients)
        known = clients.losses(ids) if exact else losses.at[ids].get(mode="clip")
        known = jnp.where((ids < len(clients.sizes)) & ~jnp.isnan(known), known, -jnp.inf)
        return ids[lax.top_k(known, K)[1]], None

    def observe(losses: PyTree, ids: jax.Array, new: jax.Array) -> PyTree:
        old = losses.at[ids].get(mode="clip")
        return losses.at[ids].set(jnp.where(jnp.isnan(new), old, new), mode="drop")

    def most(N: int, K: int) -> int:
        if not K <= candidates <= N:
            checks.refuse(f"candidates must be in {K}..{N}, from the cohort size to the number of clients", candidates)
        return K

    return Participation(
        select, init, None if exact else observe, most=most, weights="uniform", distinct=True, name="power_of_choice"
    )


Cohorts = Annotated[
    np.ndarray,
    spec.array("client ids [T, K], integers of at least 0", lambda ids: spec.numbers(ids, 2, "iu") and ids.min() >= 0),
]


@recorded
def schedule(ids: Cohorts) -> Participation:
    """The cohorts as given: row t of ``ids`` in round t, and after the last row again from the first.

    For cohorts that a Python function computes, use `Simulation.run` with ``cohort=``.

    Args:
      ids: int [T, K], client ids. A client that a row repeats trains once and counts as often as it is repeated. The id
        N marks an unused entry.
    """

    def select(state: PyTree, key: jax.Array, t: jax.Array, K: int, clients: Clients) -> tuple[jax.Array, None]:
        row = jnp.asarray(ids, jnp.int32)[t % len(ids)]
        return row if clients.available is None else _if_available(row, clients.available), None

    def most(N: int, K: int) -> int:
        if ids.shape[1] != K or ids.max() > N:
            checks.refuse(
                f"ids must be [T, {K}] with values in 0..{N}, for the cohort size {K} and {N} clients",
                f"{[*ids.shape]} with the largest {ids.max()}",
            )
        return K

    return Participation(select, most=most, name="schedule")


SHORT_NAMES = {"uniform": uniform, "bernoulli": bernoulli}  # for ``Simulation(sampling=)``


def short_name(rule: Participation) -> str | None:
    """The short name of a rule. None for any other rule."""
    if rule.recipe is None or rule.recipe.replaced(rule):
        return None
    return next((name for name, factory in SHORT_NAMES.items() if factory is rule.recipe.factory), None)


def most_of_bernoulli(N: int, K: int) -> int:
    """The number of clients that a Binomial(N, K / N) cohort exceeds with a probability of at most 1e-12."""
    from scipy.stats import binom

    return min(N, max(1, int(binom.isf(1e-12, N, K / N))))


def first_distinct(key: jax.Array, N: int, K: int) -> jax.Array:
    """int32 [K]: a random sample of K <= N / 2 of the numbers 0..N-1 without replacement, in O(K log K) time.

    Every ordered sample is equally likely. Numbers are sampled with replacement, and repeated numbers are dropped. If
    2 K + 64 numbers contain fewer than K different ones (probability below 1e-9), all numbers are sampled again.
    """

    def attempt(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.randint(key, (2 * K + 64,), 0, N, jnp.int32)
        order = jnp.argsort(drawn, stable=True)
        repeated = jnp.diff(drawn[order], prepend=-1) == 0
        new = jnp.ones(len(drawn), bool).at[order].set(~repeated)
        return drawn[jnp.nonzero(new, size=K, fill_value=0)[0]], new.sum() >= K

    def again(carry: tuple) -> tuple:
        key, _ = carry
        key, use = jax.random.split(key)
        return key, attempt(use)

    return lax.while_loop(lambda carry: ~carry[1][1], again, again((key, None)))[1][0]


def _by_size(key: jax.Array, C: int, clients: Clients) -> jax.Array:
    """int32 [C]: different clients, drawn one after another with probabilities proportional to their sizes."""
    scores = jnp.log(clients.sizes.astype(float)) + jax.random.gumbel(key, clients.sizes.shape)
    allowed = clients.sizes > 0 if clients.available is None else (clients.sizes > 0) & clients.available
    return _highest(scores, C, allowed)


def _highest(scores: jax.Array, C: int, allowed: jax.Array) -> jax.Array:
    """int32 [C]: the ids of the C allowed clients with the highest scores, in descending order, and then N."""
    ids = lax.top_k(jnp.where(allowed, scores, -jnp.inf), C)[1]
    return _if_available(ids, allowed)


def _if_available(ids: jax.Array, available: jax.Array) -> jax.Array:
    """The ids, with N in the place of a client that isn't available."""
    N = len(available)
    return jnp.where((ids < N) & available.at[ids].get(mode="clip"), ids, N).astype(jnp.int32)


def _where(active: jax.Array, size: int) -> jax.Array:
    """int32 [size]: the ids of the active clients, and then N."""
    return jnp.nonzero(active, size=size, fill_value=len(active))[0].astype(jnp.int32)
