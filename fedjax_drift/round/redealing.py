"""Redealt data as a source of drift: every round pools and redistributes the examples of its cohort."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_drift.data.redeal import redeal
from fedjax_drift.recipes import recorded
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.sources import Cohort, Moment, Source
from fedjax_drift.types import PyTree


class Redeal(NamedTuple):
    """Options for pooling and redistributing the examples of a cohort (`FederatedData.redealt`)."""

    alpha: float | None  # of the Dirichlet distribution; None: the examples are split evenly
    num_classes: int
    most_rows: tuple[int, ...]  # most_rows[K - 1] is the largest number of examples of a cohort of K clients


@recorded
def redealing(options: Redeal) -> Source:
    """The source. A client that gets no example is absent."""

    def select(state: PyTree, cohort: Cohort, moment: Moment) -> Cohort:
        engine, rows, clients = moment.engine, cohort.rows, cohort.clients
        M = len(rows.x)
        places, offset, size = redeal(
            moment.key,
            clients.id,
            clients.size,
            clients.offset,
            None if options.alpha is None else rows.y,
            alpha=options.alpha,
            num_classes=options.num_classes,
            most_rows=options.most_rows[len(clients.id) - 1],
        )
        of_absentee = jnp.array([[engine.num_clients], [engine.state_rows]])
        id_, place = jnp.where(size > 0, jnp.stack([clients.id, clients.place]), of_absentee)
        clients = Client(id_, size, M + offset, engine.local.num_steps(size), place, clients.factor)
        rows = rows._replace(places=jnp.concatenate([jnp.arange(M, dtype=jnp.int32), places]))
        return cohort._replace(rows=rows, clients=clients, selected=clients)

    return Source("redeal", select=select)
