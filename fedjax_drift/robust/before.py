"""What is done with n messages before a robust rule combines them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift.recipes import recorded
from fedjax_drift.robust.rule import Before, Stack, along, among_lowest
from fedjax_drift.spec import Count, CountOrZero


@recorded
def nnm(f: CountOrZero) -> Before:
    """Nearest neighbour mixing: each message becomes the mean of its n - f nearest ones, of which it is one itself
    (Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan 2023, arXiv 2302.01772, algorithm 2).

    Args:
      f: the number of adversaries, >= 0 and less than half of the clients of a round.
    """

    def change(stack: Stack, key: jax.Array) -> Stack:
        near = among_lowest(stack.squared_distances(), stack.n - f) & stack.present[None] & stack.present[:, None]
        return stack._replace(each=stack.mean_of(near))

    return Before(change, f=f, name="nnm")


@recorded
def bucketing(s: Count = 2) -> Before:
    """Means of s messages each, in a random order (Karimireddy, He, Jaggi 2022, arXiv 2006.09365, algorithm 1). The
    last bucket may have fewer.

    Args:
      s: >= 1. Default: 2, as in the paper's experiments.
    """

    def change(stack: Stack, key: jax.Array) -> Stack:
        M = len(stack.ids)
        drawn = jax.vmap(lambda id_: jax.random.uniform(jax.random.fold_in(key, id_)))(stack.ids)
        rank = jnp.argsort(jnp.argsort(jnp.where(stack.present, drawn, 2.0)))
        buckets = jnp.arange(-(-M // s))
        members = (rank[None] // s == buckets[:, None]) & stack.present[None]
        return stack._replace(each=stack.mean_of(members), present=members.any(1), ids=buckets.astype(stack.ids.dtype))

    return Before(change, count=lambda n: -(-n // s), name="bucketing")


@recorded
def arc(f: CountOrZero) -> Before:
    """Adaptive robust clipping: the k = floor(2 f (n - f) / n) longest messages are scaled down to the norm of the next
    one (Allouah, Guerraoui, Gupta, Jellouli, Rizk, Stephan 2024, arXiv 2405.14432, algorithm 2).

    Args:
      f: as in `nnm`.
    """

    def change(stack: Stack, key: jax.Array) -> Stack:
        n, norms = stack.n, jnp.sqrt(stack.squared_norms())
        k = 2 * f * (n - f) // jnp.maximum(n, 1)
        threshold = jnp.sort(norms)[n - k - 1]
        scales = jnp.where(norms > threshold, threshold / norms, 1.0)

        return stack._replace(each=jax.tree.map(lambda a: a * along(scales, a).astype(a.dtype), stack.each))

    return Before(change, f=f, name="arc")
