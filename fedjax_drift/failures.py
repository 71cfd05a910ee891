"""Clients that fail: who of those asked answers in a round, and how much of its work a client does.

All of it is decided from keys before anybody trains, so that a client which won't answer costs nothing. Of a client it
depends on the round's key, its id and its own steps only; of over-selection on who finishes first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.sharding import traced

if TYPE_CHECKING:
    from fedjax_drift.engine import Client

DEVICES = 2**32 - 1  # fold_in(state.key, DEVICES) decides how fast a client's device is; round t has fold_in(key, t)


class Failures(NamedTuple):
    """What goes wrong. A client takes ``steps / mean_steps * exp(speed_spread * z_i)``, z_i ~ N(0, 1) for good: 1 for
    a mean client on a median device."""

    dropout: float  # probability that a client asked never answers
    stragglers: float  # probability that a client does only a part of its steps
    deadline: float | None  # who takes longer does not count
    speed_spread: float  # standard deviation of the logarithm of a device's speed
    most: int | None  # so many answers count, those that come first; None: all

    @property
    def any(self) -> bool:
        """Whether anything can go wrong at all."""
        maybe = checks.used(self.dropout) or checks.used(self.stragglers)
        return maybe or self.deadline is not None or self.most is not None


NONE = Failures(0.0, 0.0, None, 0.0, None)


def check(
    dropout: Any, stragglers: Any, deadline: Any, speed_spread: Any, over_selection: Any, K: int, N: int
) -> tuple[Failures, int]:
    """The options of `Simulation` checked, and how many clients a round asks."""
    dropout, stragglers = (
        checks.number(name, value, "a probability in 0..1", lambda v: 0 <= v <= 1)
        for name, value in (("dropout", dropout), ("stragglers", stragglers))
    )
    if deadline is not None:
        deadline = checks.positive("deadline", deadline, "in units of what a mean client takes; None: no deadline")
    speed_spread = checks.nonnegative("speed_spread", speed_spread)
    over_selection = checks.number(
        "over_selection",
        over_selection,
        f"in 1..{N / K:.9g} (all clients)",
        lambda v: v >= 1 and _asked(v, K) <= N,
        "1.3 asks 30 % more clients than are needed",
    )
    asked = _asked(over_selection, K)
    if not traced(speed_spread) and speed_spread and deadline is None and asked == K:
        raise ValueError(
            f"speed_spread needs a deadline or over_selection, which it acts through, got {speed_spread} alone: "
            "pass deadline=1.5, for example"
        )
    return Failures(dropout, stragglers, deadline, speed_spread, K if asked > K else None), asked


def fail(how: Failures, devices: jax.Array, key: jax.Array, cohort: Client, absent: Client, mean_steps: int) -> Client:
    """Who answers of a cohort [K], and with how many steps; the others are ``absent``. [min(K, how.most)].

    devices, key: of the federation's devices and of this round; mean_steps: of a client of mean size.
    """

    def one(client: Client) -> tuple[Client, jax.Array]:
        drops, straggles, part = jax.random.uniform(jax.random.fold_in(key, client.id), (3,))
        K_i = client.steps
        most = jnp.maximum(K_i - 1, jnp.minimum(K_i, 1))  # of one step, or none, there is no part
        some = jnp.minimum(1 + (part * (K_i - 1)).astype(jnp.int32), most)  # 1..K_i - 1, each as likely
        steps = jnp.where(straggles < how.stragglers, some, K_i)
        slowness = jnp.exp(how.speed_spread * jax.random.normal(jax.random.fold_in(devices, client.id)))
        time = steps / mean_steps * slowness
        answers = (drops >= how.dropout) & (client.id != absent.id)
        if how.deadline is not None:
            answers &= time <= how.deadline
        client = jax.tree.map(lambda own, none: jnp.where(answers, own, none), client._replace(steps=steps), absent)
        return client, jnp.where(answers, time, jnp.inf)

    cohort, time = jax.vmap(one)(cohort)
    if how.most is not None and how.most < len(time):
        first = jnp.sort(jnp.argsort(time, stable=True)[: how.most])  # the first to answer, in the cohort's order
        cohort = jax.tree.map(lambda a: a[first], cohort)
    return cohort


def _asked(over_selection: Any, K: int) -> int:
    return math.ceil(round(over_selection * K, 9))  # 1.1 * 50 is 55, and a little more in floating point
