"""Separates the two kinds of drift of FedEve: every round pools and redistributes the examples of its cohort.

- Period drift: the examples of the cohort as a whole differ from those of the federation.
- Client drift: the clients of the cohort differ from each other.

Redistribution does not change the examples of the cohort, but it changes their distribution over the clients. An even
split of non-IID clients leaves only period drift. An uneven split of IID clients leaves only client drift. (The four
regimes of FedEve, Fig. 3b, and the authors' code.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks
from fedjax_drift.data import partition
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.spec import Amount, checked


class Described(TypedDict, total=False):
    """What `FederatedData.from_partition` can be told about the inputs."""

    mean: float | Sequence[float] | None
    std: float | Sequence[float] | None
    name: str


@checked
def drift_regimes(
    x: np.ndarray,
    y: np.ndarray,
    num_clients: int,
    alpha: Amount,
    seed: int = 0,
    test: Pair | None = None,
    **options: Unpack[Described],
) -> dict[str, FederatedData]:
    """Creates four federations from the same data set, one for each combination of drifts (FedEve, Fig. 3b).

    Period drift: the examples of a cohort as a whole differ from those of the federation. Client drift: the clients of
    a cohort differ from each other.

    | key            | partition                            | examples of the cohort in each round          |
    |----------------|--------------------------------------|-----------------------------------------------|
    | "iid"          | equal random parts                   | stay at their clients                         |
    | "period drift" | each class split by Dirichlet(alpha) | pooled and split evenly                       |
    | "client drift" | equal random parts                   | pooled, each class split by Dirichlet(alpha)  |
    | "both"         | each class split by Dirichlet(alpha) | stay at their clients                         |

    Args:
      x: [M, ...] inputs.
      y: int [M] labels >= 0.
      num_clients: N.
      alpha: > 0; a small alpha gives a strong drift.
      seed: random seed of the partitions, >= 0.
      test: as in `FederatedData.from_partition`.
      **options: ``mean``, ``std`` and ``name``, likewise.

    Raises:
      ValueError: the labels are not non-negative integers with one label per example, or there are fewer examples than
        clients.
    """
    x, y = checks.array("x", x), checks.array("y", y)
    partitioners = (
        partition.iid(num_clients, seed),
        partition.dirichlet(num_clients, alpha, seed, prior="class", min_size=1),
    )
    iid, uneven = (FederatedData.from_partition(x, y, part(y), test, **options) for part in partitioners)
    return {"iid": iid, "period drift": uneven.redealt(), "client drift": iid.redealt(alpha), "both": uneven}


def redeal(
    key: jax.Array,
    ids: jax.Array,
    sizes: jax.Array,
    offsets: jax.Array,
    labels: jax.Array | None,
    *,
    alpha: float | None,
    num_classes: int,
    most_rows: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pools the examples of a cohort and assigns each of them to exactly one of its present clients.

    Args:
      key: a random key.
      ids: int32 [K], the client ids.
      sizes: int32 [K], the number of examples of each client; 0 if the client does not take part.
      offsets: int32 [K], the index of the first example of each client.
      labels: int [M] in 0..num_classes-1, the labels of the data set; None if alpha is None.
      alpha: None splits evenly: the examples are shuffled, and the new sizes differ by at most one. A number > 0
        shuffles each class and splits it by Dirichlet(alpha 1) over the present clients. A client that gets no example
        does not take part in this round. alpha is clipped to 1e-30..1e30.
      num_classes: C.
      most_rows: an upper bound of ``sizes.sum()``. Memory is O(most_rows + K C).

    Returns:
      ``(rows int32 [most_rows], offsets int32 [K], sizes int32 [K])``. Client k now has the examples with the indices
      ``rows[offsets[k] : offsets[k] + sizes[k]]``, sorted by class. The rest of ``rows`` is 0.
    """
    cut_key, order_key = jax.random.split(key)
    present = sizes > 0
    pooled = jnp.arange(most_rows) < sizes.sum()
    rows = jnp.where(pooled, spans(offsets, sizes, most_rows), 0)
    # An even split is a split of a single class.
    C, label = (1, 0) if alpha is None or labels is None else (num_classes, labels[rows].astype(jnp.int32))
    order = jax.random.bits(order_key, (most_rows,), jnp.uint32)
    label, _, rows = lax.sort((jnp.where(pooled, label, C), order, rows), num_keys=2)
    starts = jnp.searchsorted(label, jnp.arange(C + 1)).astype(jnp.int32)
    ends = _even(present, starts[-1]) if alpha is None else _dirichlet(cut_key, ids, present, alpha, jnp.diff(starts))

    counts = jnp.diff(ends, axis=0, prepend=0)  # [K, C]
    first = starts[None, :-1] + ends - counts
    new_sizes = counts.sum(1, dtype=jnp.int32)
    return rows[spans(first.ravel(), counts.ravel(), most_rows)], jnp.cumsum(new_sizes) - new_sizes, new_sizes


def spans(starts: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
    """Returns the concatenation over i of the sizes[i] numbers ``starts[i], starts[i] + 1, ...``, int32 [length]."""
    shift = starts - (jnp.cumsum(sizes) - sizes)
    return jnp.arange(length, dtype=jnp.int32) + jnp.repeat(shift, sizes, total_repeat_length=length)


def _even(present: jax.Array, total: jax.Array) -> jax.Array:
    """Returns how many of the ``total`` examples the clients 0..k together get in an even split, int32 [K, 1]."""
    clients = jnp.cumsum(present, dtype=jnp.int32)
    size, remainder = jnp.divmod(total, jnp.maximum(clients[-1], 1))
    return (clients * size + jnp.minimum(clients, remainder))[:, None]


def _dirichlet(key: jax.Array, ids: jax.Array, present: jax.Array, alpha: Any, class_sizes: jax.Array) -> jax.Array:
    """Returns how many examples of each class the clients 0..k together get in a Dirichlet split, int32 [K, C].

    Rounding all split points down would give the last client up to one example too many per class. One random offset
    per class makes the expected counts exact.
    """
    share_key, offset_key = jax.random.split(key)
    alpha = jnp.clip(alpha, 1e-30, 1e30)  # float32 can represent alpha and 1 / alpha

    def draw(client_id: jax.Array) -> jax.Array:
        return jax.random.loggamma(jax.random.fold_in(share_key, client_id), alpha, class_sizes.shape)

    logs = jax.vmap(draw)(ids)
    logs = jnp.where(present[:, None], logs, jnp.finfo(logs.dtype).min)  # finite, because all clients may be absent
    # The shares are integers in units of 2^-30. Integer sums are exact. So a share of 0 gets no example, and the last
    # split point is n_c.
    upto = jnp.cumsum((2.0**30 * jax.nn.softmax(logs, axis=0)).astype(jnp.int32), axis=0)
    n, whole = class_sizes[None], upto[-1:]
    ends = jnp.floor(upto * (n / whole) + jax.random.uniform(offset_key, n.shape)).astype(jnp.int32)
    return jnp.where(upto == whole, n, jnp.minimum(ends, n))
