"""Ranking metrics: AUC, hit rate and NDCG. Pass ``scores=fd.ranking.scores()`` to `Model` to report them.

The metrics are computed from the logits of the whole test set, because they are not averages over examples. A larger
logit means that the example is more likely to be positive. All functions are pure and work under `jax.jit`. If a logit
is NaN, `auc` is NaN. If the logit of a positive example is NaN, the other metrics rank it last. If the logit of a
negative example is NaN, they rank the positive example after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_drift import checks, spec

__all__ = ["auc", "hit_rate", "ndcg", "ranks", "scores"]
__dir__ = __all__.copy


Group = Annotated[int, spec.integer(2)]


def auc(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Area under the ROC curve over all M examples, a scalar.

    The area is the fraction of all pairs of a positive and a negative example in which the positive example has the
    larger logit. Pairs with equal logits count 1/2. The pairs are counted exactly, in integers.

    Args:
      logits: float [M] or [M, 1].
      y: [M]. An example is positive if its label is > 0.

    Returns:
      A scalar in [0, 1]; NaN if there are no positive or no negative examples, or if a logit is NaN.

    >>> float(auc(jnp.array([3.0, 2.0, 2.0, 1.0]), jnp.array([1, 1, 0, 0])))
    0.875
    """
    logits, positive = _flat(logits), y.reshape(-1) > 0
    negatives = jnp.sort(jnp.where(positive, jnp.inf, logits))  # followed by one infinity per positive example
    N = (~positive).sum()
    below, upto = (jnp.searchsorted(negatives, logits, side=side) for side in ("left", "right"))
    won = (below + jnp.minimum(upto, N)) / (2 * N)  # the share of the negatives with a smaller logit; ties count 1/2
    mean = jnp.where(positive, won, 0).sum() / positive.sum()
    return jnp.where(jnp.isnan(logits).any(), jnp.nan, mean)


@spec.checked
def ranks(logits: jax.Array, group: Group = 100) -> jax.Array:
    """The rank of the positive example in each block of the test set.

    The first example of a block is positive and the others are negative. The best rank is 1. A negative example with
    the same logit as the positive example is ranked before it. So a model that gives all examples the same logit gets
    the worst rank.

    Args:
      logits: float [M] or [M, 1].
      group: number of examples per block, >= 2. Default: 100.

    Returns:
      int [M / group], in 1..group.

    Raises:
      ValueError: ``group`` does not divide M.
    """
    logits = _flat(logits)
    if len(logits) % group:
        checks.refuse(
            "group must divide the number of test examples",
            f"{group} for {len(logits)} examples",
            "in each block of group examples, the first is positive and the others are negative",
        )
    blocks = logits.reshape(-1, group)
    return group - (blocks[:, :1] > blocks[:, 1:]).sum(1)


def hit_rate(logits: jax.Array, k: int, group: int = 100) -> jax.Array:
    """HR@k, a scalar: the share of blocks whose positive example has a rank of at most k.

    k: in 1..group. logits, group: as in `ranks`.
    """
    return (ranks(logits, group) <= _checked_rank(k, group)).mean()


def ndcg(logits: jax.Array, k: int, group: int = 100) -> jax.Array:
    """NDCG@k, a scalar: the mean over the blocks of 1 / log2(rank + 1), or 0 for ranks above k.

    k: in 1..group. logits, group: as in `ranks`.
    """
    rank = ranks(logits, group)
    return jnp.where(rank <= _checked_rank(k, group), 1 / jnp.log2(rank + 1.0), 0).mean()


@spec.checked
def scores(group: Group = 100, ks: Sequence[int] = (5, 10)) -> Callable[[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Returns a function for ``Model(scores=...)`` that computes "auc", "hr@5", "hr@10", "ndcg@5" and "ndcg@10".

    The test set consists of blocks of ``group`` examples. The first example of a block is positive and the others are
    negative. FedEve's protocol, which the data set `movielens` follows, has 99 negative examples per block.

    Args:
      group: number of examples per block, >= 2. Default: 100.
      ks: the values of k for "hr@k" and "ndcg@k", in 1..group. Default: (5, 10).
    """
    if (several := checks.items(ks)) is None:
        checks.refuse("ks must be several integers", checks.shown(ks), "pass (5, 10), for example")
    ks = tuple(_checked_rank(k, group) for k in several)

    def all_scores(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        metrics = {"auc": auc(logits, y)}
        metrics |= {f"hr@{k}": hit_rate(logits, k, group) for k in ks}
        return metrics | {f"ndcg@{k}": ndcg(logits, k, group) for k in ks}

    return all_scores


def _flat(logits: jax.Array) -> jax.Array:
    """The logits [M] or [M, 1] as [M]. Raises ConfigurationError for other shapes."""
    if logits.size != len(logits):
        checks.refuse(
            "a ranking needs one logit per example", f"logits {[*logits.shape]}", "use a model with one output"
        )
    return logits.reshape(-1)


def _checked_rank(k: int, group: int) -> int:
    return checks.integer("k", k, 1, group, "a rank is in this range")
