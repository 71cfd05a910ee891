"""Period drift without client drift, and the reverse: the rows of a cohort, dealt anew every round.

Which rows a round trains on and how they are spread over its clients are two things. Pooling the rows of a cohort and
dealing them again keeps the first and chooses the second (FedEve's four regimes of FedAvg, Fig. 3b and its authors'
code): even shares of non-iid clients leave period drift only, uneven shares of iid clients leave client drift only.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks
from fedjax_drift.data import partition
from fedjax_drift.data.federated import FederatedData, Pair


def drift_regimes(
    x: np.ndarray,
    y: np.ndarray,
    num_clients: int,
    alpha: float,
    seed: int = 0,
    test: Pair | None = None,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    name: str = "data",
) -> dict[str, FederatedData]:
    """The same rows ``x [M, ...], y [M]`` as four federations, by which drift they have (FedEve, Fig. 3b).

    | key            | clients                              | each round                                   |
    |----------------|--------------------------------------|----------------------------------------------|
    | "iid"          | equal random cuts                    | train on their own rows                      |
    | "period drift" | each class split by Dirichlet(alpha) | the cohort's rows are pooled, dealt evenly   |
    | "client drift" | equal random cuts                    | pooled, each class dealt by Dirichlet(alpha) |
    | "both"         | each class split by Dirichlet(alpha) | train on their own rows                      |

    ``mean`` and ``std`` as in `FederatedData`. Raises ValueError for alpha not positive and finite, labels that are not
    integers >= 0, one a row, and fewer rows than clients.
    """
    x, y = checks.array("x", x), checks.array("y", y)
    alpha = checks.positive("alpha", alpha, computed=False)
    recipes = (
        partition.iid(num_clients, seed),
        partition.dirichlet(num_clients, alpha, seed, prior="class", min_size=1),
    )
    iid, uneven = (
        FederatedData.from_partition(x, y, recipe(y), test, mean=mean, std=std, name=name) for recipe in recipes
    )
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
    """Pools the rows of a cohort of K places and deals each of them to exactly one client that is present.

    key: consumed here.
    ids, sizes, offsets: int32 [K], the clients, how many rows each holds (0: absent) and the first of them.
    labels: int [M] in 0..num_classes-1, of all rows of the data set; None where alpha is.
    alpha: None deals evenly: all rows in random order, sizes differ by at most one. A number > 0 splits each class,
        in random order, by Dirichlet(alpha 1) over the clients present; one that gets no row is absent this round.
        Cuts all rounded down would give the last place up to one row too many of every class; one random offset a
        class makes the expected counts n_c p_k. Values are limited to 1e-30..1e30.
    most_rows: a bound on ``sizes.sum()``. Memory is O(most_rows + K num_classes).

    Returns ``(rows int32 [most_rows], offsets int32 [K], sizes int32 [K])``: place k now holds the rows
    ``rows[offsets[k] : offsets[k] + sizes[k]]`` of the data set, sorted by class. The rest of ``rows`` is 0.
    """
    cut_key, order_key = jax.random.split(key)
    present = sizes > 0
    pooled = jnp.arange(most_rows) < sizes.sum()
    rows = jnp.where(pooled, spans(offsets, sizes, most_rows), 0)
    # Dealing evenly is dealing one class.
    C, label = (1, 0) if alpha is None or labels is None else (num_classes, labels[rows].astype(jnp.int32))
    order = jax.random.bits(order_key, (most_rows,), jnp.uint32)
    label, _, rows = lax.sort((jnp.where(pooled, label, C), order, rows), num_keys=2)
    starts = jnp.searchsorted(label, jnp.arange(C + 1)).astype(jnp.int32)
    upto = _even(present, starts[-1]) if alpha is None else _dirichlet(cut_key, ids, present, alpha, jnp.diff(starts))

    counts = jnp.diff(upto, axis=0, prepend=0)  # [K, C]
    first = starts[None, :-1] + upto - counts
    dealt = counts.sum(1, dtype=jnp.int32)
    return rows[spans(first.ravel(), counts.ravel(), most_rows)], jnp.cumsum(dealt) - dealt, dealt


def spans(starts: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
    """int32 [length]: ``starts[i], starts[i] + 1, ...``, sizes[i] numbers, for one i after the other."""
    shift = starts - (jnp.cumsum(sizes) - sizes)
    return jnp.arange(length, dtype=jnp.int32) + jnp.repeat(shift, sizes, total_repeat_length=length)


def _even(present: jax.Array, total: jax.Array) -> jax.Array:
    """int32 [K, 1]: how many of ``total`` rows go to place k and those before it."""
    clients = jnp.cumsum(present, dtype=jnp.int32)
    each, left = jnp.divmod(total, jnp.maximum(clients[-1], 1))
    return (clients * each + jnp.minimum(clients, left))[:, None]


def _dirichlet(key: jax.Array, ids: jax.Array, present: jax.Array, alpha: float, class_sizes: jax.Array) -> jax.Array:
    """int32 [K, C]: how many rows of each class go to place k and those before it."""
    share_key, offset_key = jax.random.split(key)
    alpha = min(max(alpha, 1e-30), 1e30)  # float32 holds it and 1 / alpha

    def draw(client_id: jax.Array) -> jax.Array:
        return jax.random.loggamma(jax.random.fold_in(share_key, client_id), alpha, class_sizes.shape)

    logs = jax.vmap(draw)(ids)
    logs = jnp.where(present[:, None], logs, jnp.finfo(logs.dtype).min)  # not -inf: there may be nobody
    # Shares in units of 2^-30: sums of integers are exact, so a share of 0 gets no row and the last cut is n_c.
    upto = jnp.cumsum((2.0**30 * jax.nn.softmax(logs, axis=0)).astype(jnp.int32), axis=0)
    n, whole = class_sizes[None], upto[-1:]
    cuts = jnp.floor(upto * (n / whole) + jax.random.uniform(offset_key, n.shape)).astype(jnp.int32)
    return jnp.where(upto == whole, n, jnp.minimum(cuts, n))
