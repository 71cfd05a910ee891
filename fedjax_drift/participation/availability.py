"""Rules of availability. Another rule selects the cohort from the clients that are available.

If fewer than K clients are available, the cohort is smaller. If none is available, the server isn't updated. With
`importance`, the expected value of the mean of the messages is the mean over the clients that are available in the
round. It isn't the mean over all clients: for this, the probability that a client is available would have to be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.participation.cohorts import uniform
from fedjax_drift.participation.rule import Clients, Participation
from fedjax_drift.recipes import recorded
from fedjax_drift.spec import Count, Fix, Flag, Positive, Probability, Share
from fedjax_drift.tree import PyTree
from fedjax_drift.types import THREEFRY

OWN, BASE = 0, 1  # `init` gives fold_in(key, OWN) to a rule of availability, and fold_in(key, BASE) to its base


class Restricted(NamedTuple):
    """The state of a rule of availability."""

    own: PyTree
    base: PyTree  # the state of the rule that selects


Base = Annotated[Participation, spec.instance(Participation), Fix("fd.participation.uniform()")]
Phases = Annotated[
    np.ndarray, spec.array("a finite number for each client, [N]", lambda phases: spec.numbers(phases, 1))
]
Availability = Annotated[
    np.ndarray, spec.array("bool [T, N]", lambda rows: rows.ndim == 2 and rows.size and rows.dtype == bool)
]


@recorded
def cyclic(groups: Count, shuffle: Flag = True, base: Base | None = None) -> Participation:
    """The clients form G groups, and group t mod G is available in round t.

    Eichner et al. 2019 (arXiv 1904.10120) and Cho et al. 2023 (arXiv 2302.03109) study it. The sizes of two groups
    differ by at most 1.

    Args:
      groups: G, in 1..N.
      shuffle: True (default): a client's group is drawn once, from the state's key. False: the clients of a group have
        consecutive ids.
      base: the rule that selects from the available clients. Default: `uniform`.
    """

    def init(key: jax.Array, clients: Clients) -> jax.Array:
        N = len(clients.sizes)
        group = jnp.asarray(np.arange(N) * groups // N, jnp.int32)
        return jax.random.permutation(key, group) if shuffle else group

    def check(N: int) -> None:
        if groups > N:
            checks.refuse(f"groups must be in 1..{N}, the number of clients", groups)

    return _restricted("cyclic", base, lambda group, key, t, N: group == t % groups, init, check)


@recorded
def diurnal(
    period: Positive, phases: Phases | None = None, floor: Probability = 0.0, base: Base | None = None
) -> Participation:
    """Client i is available with probability floor + (1 - floor) (1 + sin(2 pi (t / period + phase_i))) / 2.

    Args:
      period: the length of a day in rounds, > 0.
      phases: float [N], as fractions of the period. Default: i / N.
      floor: the smallest probability, in 0..1.
      base: the rule that selects from the available clients. Default: `uniform`.
    """

    def available(own: PyTree, key: jax.Array, t: jax.Array, N: int) -> jax.Array:
        phase = jnp.asarray(np.arange(N) / N if phases is None else phases, float)
        share = (1 + jnp.sin(2 * jnp.pi * (t / period + phase))) / 2
        return jax.random.uniform(key, (N,)) < floor + (1 - floor) * share

    def check(N: int) -> None:
        if phases is not None and len(phases) != N:
            checks.refuse(f"phases must have a number for each of the {N} clients", len(phases))

    return _restricted("diurnal", base, available, check=check)


class Switching(NamedTuple):
    """The state of `markov`."""

    key: jax.Array  # uint32 [2], the words of the key of the next round
    available: jax.Array  # bool [N]


@recorded
def markov(up: Share, down: Probability, base: Base | None = None) -> Participation:
    """Every client switches between away and available, independently of the others.

    It starts in the stationary distribution, in which it is available with probability up / (up + down).

    Args:
      up: the probability per round that a client that is away becomes available, in (0, 1].
      down: the probability per round that an available client goes away, in 0..1.
      base: the rule that selects from the available clients. Default: `uniform`.
    """

    def init(key: jax.Array, clients: Clients) -> Switching:
        key, use = jax.random.split(key)
        available = jax.random.uniform(use, clients.sizes.shape) < up / (up + down)
        return Switching(jax.random.key_data(key), available)

    def advance(own: Switching) -> Switching:
        key, use = jax.random.split(jax.random.wrap_key_data(own.key, impl=THREEFRY))
        switches = jax.random.uniform(use, own.available.shape) < jnp.where(own.available, down, up)
        return Switching(jax.random.key_data(key), own.available ^ switches)

    return _restricted("markov", base, lambda own, key, t, N: own.available, init, advance=advance)


@recorded
def trace(available: Availability, base: Base | None = None) -> Participation:
    """Availability as recorded, from a trace of devices: row t in round t, and after the last row again from the first.

    Args:
      available: bool [T, N].
      base: the rule that selects from the available clients. Default: `uniform`.
    """

    def check(N: int) -> None:
        if available.shape[1] != N:
            checks.refuse(f"available must be [T, {N}], for {N} clients", [*available.shape])

    return _restricted("trace", base, lambda own, key, t, N: jnp.asarray(available)[t % len(available)], check=check)


def _restricted(
    name: str,
    base: Participation | None,
    available: Callable[[Any, jax.Array, jax.Array, int], jax.Array],
    init: Callable[[jax.Array, Clients], Any] = lambda key, clients: (),
    check: Callable[[int], None] = lambda N: None,
    advance: Callable[[Any], Any] | None = None,
) -> Participation:
    """The rule ``base`` for the clients that ``available(own, key, t, N)`` returns.

    init: the state ``own`` before round 0. check: raises an error if the rule does not fit N clients. advance: the next
    state after a round.
    """
    inner = base or uniform()

    def initial(key: jax.Array, clients: Clients) -> Restricted:
        return Restricted(*(f(jax.random.fold_in(key, i), clients) for i, f in ((OWN, init), (BASE, inner.init))))

    def observe(state: Restricted, ids: jax.Array, losses: jax.Array) -> Restricted:
        own = state.own if advance is None else advance(state.own)
        return Restricted(own, state.base if inner.observe is None else inner.observe(state.base, ids, losses))

    def both(state: Restricted, key: jax.Array, t: jax.Array, N: int) -> jax.Array:
        own = available(state.own, key, t, N)
        if inner.available is None:
            return own
        return own & inner.available(state.base, jax.random.fold_in(key, BASE), t, N)

    def most(N: int, K: int) -> int:
        check(N)
        return inner.most(N, K)

    return inner._replace(
        select=lambda state, key, t, K, clients: inner.select(state.base, key, t, K, clients),
        init=initial,
        observe=None if advance is None and inner.observe is None else observe,
        available=both,
        most=most,
        name=f"{name}, {inner.name}" if inner.name != "uniform" else name,
    )
