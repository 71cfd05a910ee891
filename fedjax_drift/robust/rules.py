"""Robust rules: what the server makes of n messages x_1, ..., x_n, of which f may be hostile."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_drift.recipes import recorded
from fedjax_drift.robust.rule import Rule, Stack, along, among_lowest
from fedjax_drift.spec import Count, CountOrZero, Flag, Positive
from fedjax_drift.tree import PyTree


@recorded
def median() -> Rule:
    """The median of each coordinate (Yin, Chen, Ramchandran, Bartlett 2018, arXiv 1803.01498, definition 1)."""
    return _of_coordinates("median", 0, lambda a, stack: _median(a, stack))


@recorded
def trimmed_mean(f: CountOrZero) -> Rule:
    """In each coordinate the mean of the n - 2f middle values (Yin et al. 2018, arXiv 1803.01498, definition 2).

    Args:
      f: the number of adversaries, >= 0 and less than half of the clients of a round.
    """
    return _of_coordinates("trimmed_mean", f, lambda a, stack: _between(_sorted(a, stack), f, stack.n - f))


@recorded
def meamed(f: CountOrZero) -> Rule:
    """In each coordinate the mean of the n - f values nearest to the median (Xie, Koyejo, Gupta 2018, arXiv
    1802.10116, "mean around median").

    Args:
      f: as in `trimmed_mean`.
    """

    def nearest(a: jax.Array, stack: Stack) -> jax.Array:
        distance = jnp.where(along(stack.present, a), jnp.abs(a - _median(a, stack)[None]), jnp.inf)
        return _between(jnp.take_along_axis(a, jnp.argsort(distance, 0, stable=True), 0), 0, stack.n - f)

    return _of_coordinates("meamed", f, nearest)


@recorded
def geometric_median(nu: Positive = 0.1, steps: Count = 3) -> Rule:
    """RFA: the smoothed algorithm of Weiszfeld (Pillutla, Kakade, Harchaoui 2022, arXiv 1912.13445, algorithm 2).

        z <- the mean,    then ``steps`` times:  beta_i = 1 / max(nu, ||z - x_i||),   z <- sum beta_i x_i / sum beta_i

    Args:
      nu: the smallest distance, > 0, in the units of a message.
      steps: >= 1. Default: 3, as in the paper.
    """

    def combine(state: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, PyTree]:
        def step(_: jax.Array, z: PyTree) -> PyTree:
            beta = 1 / jnp.maximum(nu, jnp.sqrt(stack.squared_distances_from(z)))  # 0 where nothing is present
            return stack.mixed(beta / jnp.maximum(beta.sum(), jnp.finfo(beta.dtype).tiny))

        return jax.lax.fori_loop(0, steps, step, stack.mean_of(stack.present)), state

    return Rule(combine, name="geometric_median")


@recorded
def krum(f: CountOrZero, as_in_paper: Flag = False) -> Rule:
    """The message whose nearest neighbours are nearest (Blanchard, El Mhamdi, Guerraoui, Stainer 2017, arXiv
    1703.02757, section 4). The score of x_i is the sum of its squared distances to its n - f nearest messages, of which
    it is one itself.

    Args:
      f: as in `trimmed_mean`.
      as_in_paper: whether the score is of the n - f - 2 nearest other messages, as the paper has it, instead of
        n - f - 1.
    """
    return _of_scores("krum", f, as_in_paper, lambda stack: jnp.ones((), jnp.int32))


@recorded
def multi_krum(f: CountOrZero, as_in_paper: Flag = False) -> Rule:
    """The mean of the n - f messages with the lowest scores of `krum` (Blanchard et al. 2017, section 5).

    Args:
      f: as in `trimmed_mean`.
      as_in_paper: as in `krum`.
    """
    return _of_scores("multi_krum", f, as_in_paper, lambda stack: stack.n - f)


@recorded
def cge(f: CountOrZero) -> Rule:
    """The mean of the n - f messages with the smallest norms (Gupta, Liu, Vaidya 2020, arXiv 2008.04699).

    Args:
      f: as in `trimmed_mean`.
    """

    def combine(state: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, PyTree]:
        return stack.mean_of(among_lowest(stack.squared_norms(), stack.n - f)), state

    return Rule(combine, f=f, name="cge")


@recorded
def centered_clipping(tau: Positive, steps: Count = 1) -> Rule:
    """Clips around the last aggregate (Karimireddy, He, Jaggi 2021, arXiv 2012.10333, equation 8).

        v <- v + mean_i (x_i - v) min(1, tau / ||x_i - v||),    ``steps`` times, from the v of the last round

    The first v is 0. It is a state of the server, of the size of a message.

    Args:
      tau: the largest distance from v, > 0.
      steps: >= 1.
    """

    def combine(v: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, PyTree]:
        def step(_: jax.Array, v: PyTree) -> PyTree:
            norms = jnp.sqrt(stack.squared_distances_from(v))
            shares = jnp.where(norms > tau, tau / norms, 1) * stack.present / jnp.maximum(stack.n, 1).astype(float)
            moved = stack.mixed(shares)
            return jax.tree.map(lambda v, m: (1 - shares.sum().astype(v.dtype)) * v + m, v, moved)

        v = jax.tree.map(lambda v, a: v.astype(a.dtype), v, stack.each)
        v = jax.lax.fori_loop(0, steps, step, v)
        return v, v

    return Rule(combine, init=lambda message: message, name="centered_clipping")


def _of_coordinates(name: str, f: int, of_leaf: Callable[[jax.Array, Stack], jax.Array]) -> Rule:
    """A rule for each coordinate. of_leaf: ``of_leaf(a, stack)`` with a [M, ...] returns [...]."""

    def combine(state: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda a: of_leaf(a, stack), stack.each), state

    return Rule(combine, f=f, name=name)


def _of_scores(name: str, f: int, as_in_paper: bool, count: Callable[[Stack], jax.Array]) -> Rule:
    """The mean of the ``count(stack)`` messages with the lowest scores of Krum."""

    def combine(state: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, PyTree]:
        distances = jnp.sort(stack.squared_distances(), 1)  # the first is that to itself, 0
        near = jnp.arange(len(distances)) < stack.n - f - as_in_paper
        scores = jnp.where(stack.present, jnp.where(near[None], distances, 0).sum(1), jnp.inf)
        return stack.mean_of(among_lowest(scores, count(stack))), state

    return Rule(combine, f=f, name=name)


def _sorted(a: jax.Array, stack: Stack) -> jax.Array:
    """The values of each coordinate in ascending order; those of clients that are not present come last."""
    return jnp.sort(jnp.where(along(stack.present, a), a, jnp.inf), 0)


def _between(a: jax.Array, first: jax.Array | int, last: jax.Array) -> jax.Array:
    """The mean of the rows first..last - 1."""
    row = jnp.arange(len(a))
    inside = along((row >= first) & (row < last), a)
    return jnp.where(inside, a, 0).sum(0) / jnp.maximum(last - first, 1).astype(a.dtype)


def _median(a: jax.Array, stack: Stack) -> jax.Array:
    return _between(_sorted(a, stack), (stack.n - 1) // 2, stack.n // 2 + 1)
