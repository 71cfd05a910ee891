"""Ranking metrics, which are not means over examples. `Model(scores=fd.ranking.scores())` reports them.

All are pure functions of the logits of the test set, and can be compiled. A larger logit means a higher probability of
label 1. If logits are NaN, `auc` is NaN and the other metrics have their lowest values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError


def auc(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Area under the ROC curve of all examples together.

    This is the fraction of the pairs of a positive and a negative example that are ordered correctly; a tie counts as
    one half. It is exact, because the pairs are counted in integers.

    Args:
      logits: [M] or [M, 1].
      y: [M], positive if > 0.

    Returns:
      A scalar. NaN unless there are positive and negative examples.

    >>> float(auc(jnp.array([3.0, 2.0, 2.0, 1.0]), jnp.array([1, 1, 0, 0])))
    0.875
    """
    logits, positive = _one_per_example(logits), y.reshape(-1) > 0
    negatives = jnp.sort(jnp.where(positive, jnp.inf, logits))  # the positives become infinities at the end
    N = (~positive).sum()
    below, upto = (jnp.searchsorted(negatives, logits, side=side) for side in ("left", "right"))
    won = (below + jnp.minimum(upto, N)) / (2 * N)  # fraction of the negatives below each example
    mean = jnp.where(positive, won, 0).sum() / positive.sum()
    return jnp.where(jnp.isnan(logits).any(), jnp.nan, mean)


def ranks(logits: jax.Array, group: int = 100) -> jax.Array:
    """int [M / group]: the rank, from 1, of the positive example in each block of ``group`` examples.

    The positive example is the first of its block. With ties it has the lower rank, so a model with equal scores ranks
    all positive examples last. Raises ValueError unless ``group`` >= 2 divides the number of examples M.
    """
    group, logits = checks.integer("group", group, 2), _one_per_example(logits)
    if len(logits) % group:
        raise ConfigurationError(
            f"group must divide the number of test rows, got {group} for {len(logits)} rows: every positive row is "
            "followed by its group - 1 negative ones"
        )
    blocks = logits.reshape(-1, group)
    return group - (blocks[:, :1] > blocks[:, 1:]).sum(1)


def hit_rate(logits: jax.Array, k: int, group: int = 100) -> jax.Array:
    """HR@k, a scalar: the fraction of blocks whose positive example has rank <= k. Arguments as in `ranks`."""
    return (ranks(logits, group) <= _among(k, group)).mean()


def ndcg(logits: jax.Array, k: int, group: int = 100) -> jax.Array:
    """NDCG@k, a scalar: the mean over blocks of 1 / log2(rank + 1), or 0 if rank > k. Arguments as in `ranks`."""
    rank = ranks(logits, group)
    return jnp.where(rank <= _among(k, group), 1 / jnp.log2(rank + 1.0), 0).mean()


def scores(group: int = 100, ks: Sequence[int] = (5, 10)) -> Callable[[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Returns a function for ``Model(scores=...)`` that computes "auc", "hr@5", "hr@10", "ndcg@5" and "ndcg@10".

    The test set consists of blocks of ``group`` examples. The first example of a block is positive, the others are
    negative (99 in FedEve's protocol and in the data set `movielens`). ``ks`` are the values of k. Raises ValueError if
    ``group`` < 2 or if a k is outside 1..group.
    """
    if not isinstance(ks, Iterable) or isinstance(ks, str | bytes):
        raise ConfigurationError(f"ks must be several integers, got {checks.shown(ks)}: (5, 10), for example")
    ks = tuple(_among(k, checks.integer("group", group, 2)) for k in ks)

    def all_scores(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        values = {"auc": auc(logits, y)}
        values |= {f"hr@{k}": hit_rate(logits, k, group) for k in ks}
        return values | {f"ndcg@{k}": ndcg(logits, k, group) for k in ks}

    return all_scores


def _one_per_example(logits: jax.Array) -> jax.Array:
    """Logits [M] or [M, 1] as [M]. ValueError for other shapes."""
    if logits.size != len(logits):
        raise ConfigurationError(
            f"a ranking needs one logit a row, got logits {[*logits.shape]}: use a model with one output"
        )
    return logits.reshape(-1)


def _among(k: int, group: int) -> int:
    return checks.integer("k", k, 1, group, "the positive row's rank is in that range")
