"""Robust rules: what the server makes of n messages x_1, ..., x_n, of which f may be hostile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.recipes import recorded
from fedjax_drift.robust.rule import Rule, Stack, among_lowest
from fedjax_drift.spec import Count, CountOrZero, Flag, Positive
from fedjax_drift.tree import PyTree

COLUMNS = 512  # how many coordinates are sorted at once


@recorded
def median() -> Rule:
    """The median of each coordinate (Yin, Chen, Ramchandran, Bartlett 2018, arXiv 1803.01498, definition 1)."""
    return _of_coordinates("median", 0, _median)


@recorded
def trimmed_mean(f: CountOrZero) -> Rule:
    """In each coordinate the mean of the n - 2f middle values (Yin et al. 2018, arXiv 1803.01498, definition 2).

    Args:
      f: the number of adversaries, >= 0 and less than half of the clients of a round.
    """
    return _of_coordinates("trimmed_mean", f, lambda rows, n: _between(rows, f, n - f))


@recorded
def meamed(f: CountOrZero) -> Rule:
    """In each coordinate the mean of the n - f values nearest to the median (Xie, Koyejo, Gupta 2018, arXiv
    1802.10116, "mean around median").

    Args:
      f: as in `trimmed_mean`.
    """

    def nearest(rows: jax.Array, n: jax.Array) -> jax.Array:
        # They are a window of the sorted values. It moves up while its lowest value is farther than the next one above.
        m, row, median = n - f, jnp.arange(len(rows))[:, None], _median(rows, n)[None]
        farther = median - rows > jnp.roll(rows, -m, 0) - median
        begin = (farther & (row + m < n)).sum(0)
        return _between(rows, begin, begin + m)

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

        return lax.fori_loop(0, steps, step, stack.mean_of(stack.present)), state

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
        v = lax.fori_loop(0, steps, step, v)
        return v, v

    return Rule(combine, init=lambda message: message, name="centered_clipping")


def _of_coordinates(name: str, f: int, of_columns: Callable[[jax.Array, jax.Array], jax.Array]) -> Rule:
    """A rule for each coordinate. of_columns: ``of_columns(rows, n)`` with the n values of each of c coordinates in
    ascending order, [M, c] with infinity in the rows from n, returns [c]."""

    def combine(state: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, PyTree]:
        present, n = stack.present, stack.n

        def of_leaf(a: jax.Array) -> jax.Array:
            columns = a.reshape(len(a), -1)
            c = min(COLUMNS, columns.shape[1])  # few at a time stay in a CPU's cache, and need no second stack

            def of_few(begin: jax.Array) -> jax.Array:
                few = lax.dynamic_slice_in_dim(columns, begin, c, 1)
                return of_columns(ascending(jnp.where(present[:, None], few, jnp.inf)), n)

            begins = jnp.arange(0, columns.shape[1], c)  # the last slice is clamped: it begins earlier, and fits
            parts, last = lax.map(of_few, begins[:-1]).reshape(-1), of_few(begins[-1])
            return jnp.concatenate([parts, last[len(parts) - columns.shape[1] :]]).reshape(a.shape[1:])

        return jax.tree.map(of_leaf, stack.each), state

    return Rule(combine, f=f, name=name)


def ascending(a: jax.Array) -> jax.Array:
    """The rows of a [M, ...] in ascending order of each column. A bitonic network of minima and maxima: on a CPU, it
    takes 0.1 of the time of `jnp.sort`, and its compilation grows with log(M)^2."""
    M, rest = len(a), a.shape[1:]
    rows = 1 << (M - 1).bit_length()
    a = jnp.concatenate([a, jnp.full((rows - M, *rest), jnp.inf, a.dtype)])

    def exchanged(a: jax.Array, half: int, mirrored: bool) -> jax.Array:
        """Compares each row with that ``half`` rows further, or with its mirror image in a block of 2 half rows."""
        pairs = a.reshape(-1, 2, half, *rest)
        low, high = pairs[:, 0], pairs[:, 1, ::-1] if mirrored else pairs[:, 1]
        low, high = jnp.minimum(low, high), jnp.maximum(low, high)
        return jnp.stack([low, high[:, ::-1] if mirrored else high], 1).reshape(rows, *rest)

    for level in range((M - 1).bit_length()):
        a = exchanged(a, 1 << level, mirrored=True)
        for below in reversed(range(level)):
            a = exchanged(a, 1 << below, mirrored=False)
    return a[:M]


def _of_scores(name: str, f: int, as_in_paper: bool, count: Callable[[Stack], jax.Array]) -> Rule:
    """The mean of the ``count(stack)`` messages with the lowest scores of Krum."""

    def combine(state: PyTree, stack: Stack, key: jax.Array) -> tuple[PyTree, PyTree]:
        distances = jnp.sort(stack.squared_distances(), 1)  # the first is that to itself, 0
        near = jnp.arange(len(distances)) < stack.n - f - as_in_paper
        scores = jnp.where(stack.present, jnp.where(near[None], distances, 0).sum(1), jnp.inf)
        return stack.mean_of(among_lowest(scores, count(stack))), state

    return Rule(combine, f=f, name=name)


def _between(rows: jax.Array, first: Any, last: Any) -> jax.Array:
    """The mean of the rows first..last - 1 of [M, c]. first, last: numbers, or [c]."""
    row = jnp.arange(len(rows))[:, None]
    first, last = (jnp.broadcast_to(each, rows.shape[1:])[None] for each in (first, last))
    count = jnp.maximum(last - first, 1)[0].astype(rows.dtype)
    return jnp.where((row >= first) & (row < last), rows, 0).sum(0) / count


def _median(rows: jax.Array, n: jax.Array) -> jax.Array:
    return _between(rows, (n - 1) // 2, n // 2 + 1)
