"""Failures of clients: which clients of a cohort report, and the number of local steps that they do.

Failures are sampled before local training starts (`failing`). So a client that drops out costs no computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_drift import checks, spec
from fedjax_drift.clock import Devices
from fedjax_drift.devices.launch import traced
from fedjax_drift.recipes import recorded
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.engine import NUMBERS, Engine, mean_steps, round_keys
from fedjax_drift.round.sources import Cohort, Moment, Outcome, Source, absent_like
from fedjax_drift.round.speed import DEVICE_SPEEDS, seconds
from fedjax_drift.spec import Fix, NonNegative, Positive, Probability, checked
from fedjax_drift.types import Metrics, PyTree, ServerState

SELECTS = "1.3 selects 30 % more clients than are aggregated"
AT_LEAST_1 = spec.number("a number >= 1", lambda v: 1 <= v < math.inf, (1, 1.5), (0.5,), off=1)


@dataclass(frozen=True)
@checked
class Failures:
    """Options for simulated client failures, for ``Simulation(failures=)``. By default every client reports.

    A client needs ``steps / mean_steps * exp(speed_spread * z_i)`` units of time for a round. z_i ~ N(0, 1) is sampled
    once for each client. One unit is the time of a client with the mean number of examples and median speed. With
    ``Simulation(devices=)``, times are in seconds, and ``speed_spread`` is an option of `fd.Devices`.

    Raises ValueError for a ``speed_spread`` that has no effect.

    Attributes:
      dropout: Probability, in 0..1, that a selected client drops out. It keeps its old state.
      stragglers: Probability, in 0..1, that a client stops early and sends its current model. It does 1 to K_i - 1 of
        its K_i local steps, and each number is equally likely. This is the systems heterogeneity of FedProx (arXiv
        1812.06127), in steps instead of epochs.
      over_selection: >= 1. A round selects ceil(over_selection * K) clients and aggregates the first K that report.
      deadline: > 0. A client that needs more units of time than this is dropped. None: the round waits for all clients.
      speed_spread: >= 0, the standard deviation of the logarithm of the clients' speeds. It only has an effect together
        with ``deadline`` or ``over_selection``.
    """

    dropout: Probability = 0.0
    stragglers: Probability = 0.0
    over_selection: Annotated[float, AT_LEAST_1, Fix(SELECTS)] = 1.0
    deadline: Annotated[Positive, Fix("1.5 is 1.5 times the time of a mean client, None means no deadline")] | None = (
        None
    )
    speed_spread: NonNegative = 0.0

    def __post_init__(self) -> None:
        spread, over_selection = self.speed_spread, self.over_selection
        useless = self.deadline is None and not traced((spread, over_selection)) and spread and over_selection == 1
        if useless:
            fix = "pass deadline=1.5, for example"
            checks.refuse("speed_spread has no effect without deadline or over_selection", spread, fix)

    def clients_selected(self, K: int, N: int) -> int:
        """The number of clients that a round selects in order to aggregate K of the N clients."""
        selected = math.ceil(round(self.over_selection * K, 9))  # 1.1 * 50 is 55, and a little more in floating point
        if selected > N:
            checks.refuse(f"over_selection must be in 1..{N / K:.9g} (all clients)", self.over_selection, SELECTS)
        return selected

    @property
    def any(self) -> bool:
        """Whether any client can fail."""
        maybe = checks.used(self.dropout) or checks.used(self.stragglers)
        return maybe or self.deadline is not None or checks.used(self.over_selection - 1)


@recorded
def failing(failures: Failures, devices: Devices | None) -> Source:
    """The source. devices: the speeds of the clients; None: those of `Failures.speed_spread`.

    Clients that do not report are absent, and stragglers do fewer steps. With over-selection, only the first K clients
    that report are left.
    """

    def select(state: PyTree, cohort: Cohort, moment: Moment) -> Cohort:
        engine, before, clients, N = moment.engine, moment.before, cohort.clients, moment.num_clients
        assert before is not None
        K = moment.cohort_size
        drops, steps = outcome(engine, failures, before.key, before.round, clients)
        clients = clients._replace(steps=steps)
        time = duration(engine, failures, devices, before, clients)
        answers = ~drops & (clients.id != N)
        if failures.deadline is not None:
            answers &= time <= failures.deadline
        clients = jax.tree.map(lambda a, none: jnp.where(answers, a, none), clients, absent_like(clients, N))
        if engine.over_selects and K < len(time):
            time = jnp.where(answers, time, jnp.inf)
            first = jnp.sort(jnp.argsort(time, stable=True)[:K])  # the first K that report, in the order of the cohort
            clients = jax.tree.map(lambda a: a[first], clients)
        return cohort._replace(clients=clients)

    def after(state: PyTree, outcome: Outcome, moment: Moment) -> tuple[PyTree, Metrics]:
        drawn = outcome.drawn
        return state, {"selected": jnp.where(drawn < moment.num_clients, drawn, -1)}

    return Source("failures", select=select, after=after)


def outcome(
    engine: Engine, failures: Failures, state_key: jax.Array, t: jax.Array, clients: Client
) -> tuple[jax.Array, jax.Array]:
    """Whether each client drops out, bool [C], and its local steps, int32 [C], which are fewer for a straggler.

    Both depend only on the key of the round in which the client started, its id and its number of steps. t: the round.
    """

    def one(client: Client) -> tuple[jax.Array, jax.Array]:
        _, clients_key = round_keys(state_key, t if client.version is None else client.version)
        key = jax.random.fold_in(clients_key, engine.num_clients + NUMBERS["failures"])
        drops, straggles, part = jax.random.uniform(jax.random.fold_in(key, client.id), (3,))
        K_i = client.steps
        most = jnp.maximum(K_i - 1, jnp.minimum(K_i, 1))  # a client with one step, or without steps, cannot stop early
        some = jnp.minimum(1 + (part * (K_i - 1)).astype(jnp.int32), most)  # 1..K_i - 1, each equally likely
        return drops < failures.dropout, jnp.where(straggles < failures.stragglers, some, K_i)

    return jax.vmap(one)(clients)


def duration(
    engine: Engine, failures: Failures, devices: Devices | None, state: ServerState, clients: Client
) -> jax.Array:
    """float [C]: how long each client needs for its steps, in seconds with ``devices``, else in mean clients."""
    if devices is not None:
        return seconds(engine, devices, state, clients)
    key = jax.random.fold_in(state.key, DEVICE_SPEEDS)

    def one(client: Client) -> jax.Array:
        slowness = jnp.exp(failures.speed_spread * jax.random.normal(jax.random.fold_in(key, client.id)))
        return client.steps / mean_steps(engine) * slowness

    return jax.vmap(one)(clients)
