"""The contract of a participation rule: which clients take part in a round, and with which weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from fedjax_drift import reprs
from fedjax_drift.recipes import Recipe
from fedjax_drift.tree import PyTree


class Clients(NamedTuple):
    """What a rule can ask of the clients."""

    sizes: jax.Array  # int32 [N], n_i
    losses: Callable[[jax.Array], jax.Array]
    """``losses(ids)``, ids int32 [C], returns float [C]: the mean loss of the present model over the training examples
    of each client. It takes a forward pass over these examples, and costs nothing if it isn't called. The examples must
    be on the devices (``stream=False``)."""
    available: jax.Array | None = None  # bool [N], the clients that can be selected; None: all


class Participation(NamedTuple):
    """A participation rule: pure functions that select the clients of every round, and a state.

    `fedjax_drift.participation` has the rules of the literature. A rule of your own may be a `Participation` that you
    create, or one of those with `_replace`. With the decorator `fd.participation.rule` on the factory, its numbers are
    arguments of the compiled round.

    A state is any pytree of arrays of numbers. It is saved in checkpoints and kept on every device.

    Attributes:
      select: ``select(state, key, t, K, clients) -> (ids, factor)``, the clients of round t. K: the number of clients
        to select, a Python integer. ids: int32 [K'], where the id N marks an unused entry. factor: float [K'], by which
        the weights of these clients are multiplied; None means 1.
      init: ``init(key, clients) -> state``, before round 0. Default: no state. It must not call ``clients.losses``.
      observe: ``observe(state, ids, losses) -> state`` is called after every round. ids: int32 [K'], as selected or as
        passed to `Simulation.round_fn`. losses: float [K'], the mean loss of each client over its local steps; NaN for
        a client that did not report, and for an unused entry.
      available: ``available(state, key, t, N) -> bool [N]``, the clients that can be selected in round t. It is passed
        to ``select`` and ``expected`` as ``clients.available``. key: not that of ``select``. None: all clients can be
        selected.
      most: ``most(N, K) -> K'``, the length of ids, a Python integer. It may raise a ValueError. Default: K.
      expected: ``expected(K, clients) -> float [N]``, the expected value of each client's factor in a round, given
        which clients are available. The factor is 0 if the client isn't selected, so the value for a client that isn't
        available is ignored. If given, the mean of the messages divides by the expected sum of the weights, instead of
        the sum of the weights of the clients that report. The mean of an empty cohort is then 0, and the server is
        updated with it, unless no client is available. The rule must select all cohorts itself.
      weights: "algorithm": the weight of a client is that of the algorithm, times its factor. "uniform": it is its
        factor.
      distinct: whether ``select`` never selects a client twice. Otherwise a repeated client trains once, with the sum
        of its factors.
      name: the name in logs and messages.
      recipe: how it was made, recorded by `fd.participation.rule`.
    """

    select: Callable[[PyTree, jax.Array, jax.Array, int, Clients], tuple[jax.Array, jax.Array | None]]
    init: Callable[[jax.Array, Clients], PyTree] = lambda key, clients: ()
    observe: Callable[[PyTree, jax.Array, jax.Array], PyTree] | None = None
    available: Callable[[PyTree, jax.Array, jax.Array, int], jax.Array] | None = None
    most: Callable[[int, int], int] = lambda N, K: K
    expected: Callable[[int, Clients], jax.Array] | None = None
    weights: str = "algorithm"
    distinct: bool = False
    name: str = "participation"
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)
