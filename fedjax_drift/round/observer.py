"""What a round measures of its own training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedjax_drift.round.arrays import Arrays, Client
from fedjax_drift.round.cohort import Assignment
from fedjax_drift.round.engine import Engine, Shared
from fedjax_drift.round.train import update
from fedjax_drift.types import ClientResult, Metrics, Params, PyTree, Work

Task = Callable[[Shared, Client, PyTree, Work], tuple[ClientResult, PyTree, PyTree]]


class Observer(NamedTuple):
    """How a round trains its clients, and what it measures meanwhile (`measures.drift`). The measures do not change the
    result of the round. Without measures, `train` is `train.update`.

    before: ``before(assigned, arrays)`` returns values that are the same for all clients, for `Shared.extra`.
    train: ``train(shared, client, old, work) -> (result, terms, measured)`` trains one client, as `train.update` does.
    after: ``after(assigned, states, sums, measured, new)`` returns the measures. assigned: with the values of
      ``before`` in `Shared.extra`. states: `ServerState.clients` before the round. sums: of the terms over the clients.
      measured: the values of each client, leaves [D, G, L, ...]. new: the global model after the round.
    """

    before: Callable[[Assignment, Arrays], PyTree]
    train: Task
    after: Callable[[Assignment, PyTree, PyTree, PyTree, Params], Metrics]


def unobserved(engine: Engine) -> Observer:
    """Measures nothing."""
    return Observer(
        before=lambda assigned, arrays: (),
        train=lambda shared, client, old, work: (update(engine, shared, client, old, work), (), ()),
        after=lambda assigned, states, added, kept, new: {},
    )
