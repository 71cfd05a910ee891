"""Scores of rankings, which are no means over rows: `Model(scores=fd.ranking.scores())` reports them.

All are pure functions of the test set's logits, larger for likelier rows, and compile. A model whose logits are not
finite gets NaN from `auc` and the lowest values of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError


def auc(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Area under the ROC curve of all rows together: how many of the pairs of a positive and a negative row are ordered
    rightly, ties counted half. Exact: pairs are counted in integers.

    logits [M] (or [M, 1]); y [M], positive where > 0. Returns a scalar, NaN unless there are rows of both kinds.

    >>> float(auc(jnp.array([3.0, 2.0, 2.0, 1.0]), jnp.array([1, 1, 0, 0])))
    0.875
    """
    logits, positive = _one_a_row(logits), y.reshape(-1) > 0
    negatives = jnp.sort(jnp.where(positive, jnp.inf, logits))  # in front of as many infinities as there are positives
    N = (~positive).sum()
    below, upto = (jnp.searchsorted(negatives, logits, side=side) for side in ("left", "right"))
    won = (below + jnp.minimum(upto, N)) / (2 * N)  # of each row's pairs with all negatives
    mean = jnp.where(positive, won, 0).sum() / positive.sum()
    return jnp.where(jnp.isnan(logits).any(), jnp.nan, mean)


def ranks(logits: jax.Array, group: int = 100) -> jax.Array:
    """int [M / group]: of each block of ``group`` rows the rank of its first, the positive one, from 1.

    Ties count against it, so that a model which scores all rows alike ranks nobody first. Raises ValueError unless
    ``group`` >= 2 divides the number of rows M.
    """
    group, logits = checks.integer("group", group, 2), _one_a_row(logits)
    if len(logits) % group:
        raise ConfigurationError(
            f"group must divide the number of test rows, got {group} for {len(logits)} rows: every positive row is "
            "followed by its group - 1 negative ones"
        )
    blocks = logits.reshape(-1, group)
    return group - (blocks[:, :1] > blocks[:, 1:]).sum(1)


def hit_rate(logits: jax.Array, k: int, group: int = 100) -> jax.Array:
    """HR@k, a scalar: the share of blocks whose positive row is among the first k. Arguments as in `ranks`."""
    return (ranks(logits, group) <= _among(k, group)).mean()


def ndcg(logits: jax.Array, k: int, group: int = 100) -> jax.Array:
    """NDCG@k, a scalar: the mean over blocks of 1 / log2(rank + 1), 0 for ranks above k. Arguments as in `ranks`."""
    rank = ranks(logits, group)
    return jnp.where(rank <= _among(k, group), 1 / jnp.log2(rank + 1.0), 0).mean()


def scores(group: int = 100, ks: Sequence[int] = (5, 10)) -> Callable[[jax.Array, jax.Array], dict[str, jax.Array]]:
    """For ``Model(scores=...)``: {"auc", "hr@5", "hr@10", "ndcg@5", "ndcg@10"} of test rows in blocks of ``group``.

    The first row of a block is its positive one, the others are negative (99 in FedEve's protocol, as the data set
    `movielens` has them). Raises ValueError for ``group`` < 2 and for a k outside 1..group.
    """
    if not isinstance(ks, Iterable) or isinstance(ks, str | bytes):
        raise ConfigurationError(f"ks must be several integers, got {checks.shown(ks)}: (5, 10), for example")
    ks = tuple(_among(k, checks.integer("group", group, 2)) for k in ks)

    def all_scores(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        found = {"auc": auc(logits, y)}
        found |= {f"hr@{k}": hit_rate(logits, k, group) for k in ks}
        return found | {f"ndcg@{k}": ndcg(logits, k, group) for k in ks}

    return all_scores


def _one_a_row(logits: jax.Array) -> jax.Array:
    """[M] of [M] or [M, 1]; ValueError for other shapes."""
    if logits.size != len(logits):
        raise ConfigurationError(
            f"a ranking needs one logit a row, got logits {[*logits.shape]}: use a model with one output"
        )
    return logits.reshape(-1)


def _among(k: int, group: int) -> int:
    return checks.integer("k", k, 1, group, "the positive row's rank is in that range")
