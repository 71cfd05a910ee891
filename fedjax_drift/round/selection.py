"""Participation as a source of drift: the participation rule selects the clients of a round, and weighs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.local import full_loss
from fedjax_drift.participation.rule import Clients, Participation
from fedjax_drift.recipes import recorded
from fedjax_drift.round.arrays import Arrays, Client
from fedjax_drift.round.engine import Engine, Shared, look_up, replicated, round_keys
from fedjax_drift.round.places import at_places, in_cohort_order
from fedjax_drift.round.rehearsal import weights
from fedjax_drift.round.sources import Cohort, Moment, Outcome, Received, Source
from fedjax_drift.round.train import client_work, over_clients
from fedjax_drift.types import Metrics, PyTree, ServerState

# fold_in(state.key, PARTICIPATION) is the key for the initial state of the participation rule. Round t uses
# fold_in(state.key, t), and no round has this number.
PARTICIPATION = 2**32 - 2
AVAILABILITY = 0  # fold_in(cohort_key, AVAILABILITY) decides which clients are available, cohort_key which are selected
NAME = "participation"


class Selection(NamedTuple):
    """A participation rule, and what a round needs to know of it."""

    rule: Participation
    selects: int  # the number of clients that a round selects: K, or more with over-selection
    capacity: int  # K', the largest number of clients that the rule selects for it
    factors: bool  # whether clients have a factor, by which their weight is multiplied
    asks_losses: bool  # whether the rule asks for the losses of clients at the present model

    @property
    def ahead(self) -> bool:
        """Whether a cohort can be selected before the rounds before it have ended."""
        return self.rule.observe is None and not self.asks_losses


@recorded
def participating(selection: Selection, draws: bool) -> Source:
    """The source. draws: whether it selects the clients of a round; if rounds are asynchronous, the clock does."""
    rule = selection.rule

    def init(moment: Moment) -> PyTree:
        assert moment.before is not None
        key = jax.random.fold_in(moment.before.key, PARTICIPATION)
        return rule.init(key, Clients(moment.sizes, no_losses(rule, "init")))

    def select(state: PyTree, cohort: Cohort, moment: Moment) -> Cohort:
        engine, before, arrays, clients = moment.engine, moment.before, moment.arrays, cohort.clients
        assert before is not None and arrays is not None
        factor = None
        if clients is None:
            ids, factor = draw(engine, selection, before, arrays, selection.selects)
            clients = look_up(engine, cohort.rows, ids)
        if selection.factors and clients.factor is None:
            clients = clients._replace(factor=jnp.ones(clients.id.shape, float) if factor is None else factor)
        return cohort._replace(clients=clients, selected=clients, drawn=clients.id)

    def weigh(weight: jax.Array, client: Client) -> jax.Array:
        weight = jnp.ones_like(weight) if rule.weights == "uniform" else weight
        return weight if client.factor is None else weight * client.factor.astype(weight.dtype)

    def combine(state: PyTree, received: Received, moment: Moment) -> tuple[Received, PyTree]:
        engine = moment.engine
        allowed, weight = available(engine, selection, moment.before), received.weight
        divisor = expected_weight(moment, selection, allowed).astype(weight.dtype)
        share = jnp.ones(()) if allowed is None else allowed.mean()
        participation = (engine.cohort_size / engine.num_clients * share).astype(received.participation.dtype)
        return received._replace(weight=divisor, participation=participation), state

    def after(state: PyTree, outcome: Outcome, moment: Moment) -> tuple[PyTree, Metrics]:
        allowed = available(moment.engine, selection, moment.before)
        info = {} if allowed is None else {"available": allowed.sum()}
        return observed(moment, rule, state, outcome), info

    return Source(
        NAME,
        init,
        select if draws else None,
        weigh=weigh,
        combine=combine if rule.expected is not None else None,
        after=after,
        kind="participation rule",
        title=rule.name,
    )


def draw(
    engine: Engine, selection: Selection, state: ServerState, arrays: Arrays, count: int, free: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """What the participation rule selects: ``count`` clients, or as many as it can. See `cohort.select`.

    ``arrays.rows`` and the server's variables are only used by a rule that asks for losses. free: bool [N], the clients
    that aren't in flight; None: all.
    """
    rule, N, t = selection.rule, engine.num_clients, state.round
    key, clients_key = round_keys(state.key, t)

    def losses(ids: jax.Array) -> jax.Array:
        assert arrays.rows is not None, "streamed data sets are refused when the simulation is created"
        shared = Shared(state.server, arrays.rows, clients_key, t, engine.local.rate(t))
        return client_losses(engine, shared, look_up(engine, arrays.rows, ids))

    allowed = available(engine, selection, state)
    if free is not None:
        allowed = free if allowed is None else free & allowed
    of_rule = state.sources.get(NAME, ())
    ids, factor = rule.select(of_rule, key, t, count, Clients(arrays.sizes, losses, allowed))
    if not selection.factors:
        return ids, None
    factor = jnp.ones(ids.shape, float) if factor is None else factor.astype(float)
    return (ids, factor) if rule.distinct else merged(ids, factor, N)


def available(engine: Engine, selection: Selection, state: Any) -> jax.Array | None:
    """bool [N]: the clients that can be selected in a round. None: the rule makes no difference."""
    rule = selection.rule
    if rule.available is None:
        return None
    key, _ = round_keys(state.key, state.round)
    key = jax.random.fold_in(key, AVAILABILITY)  # so that a rule may use its keys directly in both functions
    return rule.available(state.sources.get(NAME, ()), key, state.round, engine.num_clients)


def observed(moment: Moment, rule: Participation, state: PyTree, outcome: Outcome) -> PyTree:
    """The state of the participation rule after a round."""
    if rule.observe is None:
        return state
    N, ids = moment.num_clients, outcome.clients.id
    losses = jnp.full(N + 1, jnp.nan)
    if outcome.losses is not None:
        losses = losses.at[ids].set(jnp.where(outcome.answered, outcome.losses, jnp.nan)).at[N].set(jnp.nan)
    return rule.observe(state, outcome.drawn, losses[outcome.drawn])


def merged(ids: jax.Array, factor: jax.Array, N: int) -> tuple[jax.Array, jax.Array]:
    """The clients without repetitions. The first entry of a client gets the sum of its factors, the others are N."""
    entry = jnp.arange(len(ids))
    first = jnp.full(N + 1, len(ids)).at[ids].min(entry)
    sums = jnp.zeros(N + 1, factor.dtype).at[ids].add(factor)
    return jnp.where(first[ids] == entry, ids, N), sums[ids]


def client_losses(engine: Engine, shared: Shared, clients: Client) -> jax.Array:
    """float [C]: the mean loss of the global model over the training examples of each client."""

    def one(shared: Shared, client: Client, state: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        return (), full_loss(client_work(engine, shared, client, longest), shared.server.params), ()

    order, empty, placed = at_places(engine, clients, clients.steps)
    order, placed = replicated(engine, (order, placed))
    losses = over_clients(engine, one, shared, placed, ())[1]
    return in_cohort_order(len(clients.id), order, empty, replicated(engine, losses))


def no_losses(rule: Participation, function: str) -> Callable[[jax.Array], jax.Array]:
    """`Clients.losses` for a function of a participation rule that must not ask for losses."""

    def losses(ids: jax.Array) -> jax.Array:
        what = f"{function} of the participation rule {rule.name} must not ask for losses"
        checks.refuse(what, "a call of clients.losses", "call it in select")

    return losses


def expected_weight(moment: Moment, selection: Selection, available: jax.Array | None) -> jax.Array:
    """The expected sum of the weights of a round's clients, a scalar, for a participation rule with ``expected``.

    available: bool [N], the clients that can be selected; None: all. The weight of a client depends on its size only,
    so the compiler removes everything else from the updates of the N clients.
    """
    rule = selection.rule
    assert rule.expected is not None
    factor = rule.expected(selection.selects, Clients(moment.sizes, no_losses(rule, "expected"), available))
    if available is not None:
        factor = jnp.where(available, factor, 0)
    return factor @ weights(moment, moment.sizes)
