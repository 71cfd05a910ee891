"""What a round measures of its own training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedjax_drift.round.arrays import Arrays, Client
from fedjax_drift.round.cohort import Assignment
from fedjax_drift.round.engine import Engine, Shared
from fedjax_drift.round.train import update
from fedjax_drift.types import ClientResult, Metrics, PyTree, Work

Task = Callable[[Shared, Client, PyTree, Work], tuple[ClientResult, PyTree, PyTree]]


class Observer(NamedTuple):
    """What a round measures of its own training (`measures.drift`). This does not change the result of the round.

    before: ``before(assigned, arrays)`` returns values that are the same for all clients, for `Shared.extra`.
    update: ``update(shared, client, old, work) -> (result, terms, measured)`` trains one client, as `train.update`
      does.
    after: ``after(assigned, states, sums, measured)`` returns the measures. assigned: with the values of ``before`` in
      `Shared.extra`. states: `ServerState.clients` before the round. sums: of the terms over the clients. measured: the
      values of each client, leaves [D, G, L, ...].
    """

    before: Callable[[Assignment, Arrays], PyTree]
    update: Task
    after: Callable[[Assignment, PyTree, PyTree, PyTree], Metrics]


def unobserved(engine: Engine) -> Observer:
    """Measures nothing."""
    return Observer(
        before=lambda assigned, arrays: (),
        update=lambda shared, client, old, work: (update(engine, shared, client, old, work), (), ()),
        after=lambda assigned, states, added, kept: {},
    )
