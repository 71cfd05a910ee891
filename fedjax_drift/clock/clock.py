"""The contract of a clock: when the server is updated, and with which of the clients' updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import reprs, spec
from fedjax_drift.recipes import Recipe, recorded
from fedjax_drift.spec import Count, CountOrZero, Fix, NonNegative


class Clock(NamedTuple):
    """When the server is updated. `synchronous` and `asynchronous` make one.

    Attributes:
      concurrency: M, the number of clients that train at the same time. None: rounds are synchronous.
      discount: ``discount(staleness) -> factor``, by which an update is multiplied, a scalar. staleness: float [], the
        number of updates of the server since the client started.
      max_staleness: an update that is staler than this is dropped.
      mixes: "updates" or "models", see `asynchronous`.
      name: the name in logs and messages.
      starts: "report" or None, see `asynchronous`.
      recipe: how it was made.
    """

    concurrency: int | None = None
    discount: Callable[[jax.Array], jax.Array] = jnp.ones_like
    max_staleness: int = 0
    mixes: str = "updates"
    name: str = "synchronous"
    starts: str | None = None
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)


@recorded
def synchronous() -> Clock:
    """The server waits for the clients of a round, and all of them start with its present variables. The default."""
    return Clock()


Hinge = Annotated[tuple[float, float], spec.pair("two numbers (a, b)", NonNegative), Fix("pass (10, 4), for example")]


@recorded
def asynchronous(
    concurrency: Count,
    staleness: Literal["constant", "polynomial", "hinge"] = "constant",
    exponent: NonNegative = 0.5,
    hinge: Hinge = (10.0, 4.0),
    max_staleness: CountOrZero = 20,
    mixes: Literal["updates", "models"] = "updates",
    starts: Literal["report"] | None = None,
) -> Clock:
    """Clients report when they are ready, and the server is updated with every K reports.

    M clients train at the same time, and K is the ``cohort_size``. A round is one update of the server: the K clients
    that report next are averaged, and K others start with the new variables, selected by the participation rule from
    the clients that aren't training. A client has the server's variables, the learning rate and the random numbers of
    the round in which it started. Its staleness tau is the number of updates since then. The server receives

        mean = sum_i s(tau_i) weight_i message_i / sum_i weight_i

    so that s makes an update smaller, also if all are equally stale.

    With K > 1 and ``starts="report"`` it is FedBuff (Nguyen et al. 2022, arXiv 2106.06639, algorithm 1). With
    ``cohort_size=1``, ``mixes="models"`` and a ``server_lr`` alpha it is FedAsync (Xie, Koyejo, Gupta 2019, arXiv
    1903.03934).

    Args:
      concurrency: M, in K..N. With M = K the server waits for all, so that nothing is stale. With ``starts="report"``
        it is in 1..N - K + 1, and with M = 1 nothing is stale.
      staleness: s(tau). "constant": 1. "polynomial": (1 + tau)^-exponent. "hinge": 1 up to tau = b, and then
        1 / (a (tau - b) + 1).
      exponent: >= 0, of "polynomial". Default: 0.5, as in FedBuff.
      hinge: (a, b), each >= 0. Default: (10, 4), as in FedAsync.
      max_staleness: >= 0. An update with a higher staleness is dropped, and its client keeps its old state. The state
        has max_staleness + 1 copies of the server's variables. Default: 20.
      mixes: "updates" (default): the message of a client is the difference from the model with which it started.
        "models": it is the difference from the present model, so that the server mixes models as FedAsync does:
        w <- (1 - alpha s) w + alpha s theta_i. The message of the algorithm must be shaped like the model.
      starts: when other clients start. None (default): K clients start together, at the K-th report, with the new
        variables. "report": as in FedBuff, a client starts as soon as another one reports, so that M train at any time.
        The first K - 1 of a round start with the variables before its update, and may report in the same round. The
        clients that start in a round are selected from those that aren't training when it begins.
    """
    a, b = hinge
    discounts: dict[str, Callable[[Any], Any]] = {
        "constant": jnp.ones_like,
        "polynomial": lambda tau: (1 + tau) ** -exponent,
        "hinge": lambda tau: 1 / (a * jnp.maximum(tau - b, 0) + 1),
    }
    discount = discounts[staleness]
    return Clock(concurrency, discount, max_staleness, mixes, "asynchronous", starts)
