"""The aggregation rule as a source of drift: what a client adds to the sum, and what the server makes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.recipes import recorded
from fedjax_drift.robust import Stack
from fedjax_drift.round.aggregation import Aggregation
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.sources import Messages, Moment, Outcome, Received, Source
from fedjax_drift.round.traffic import summed_message
from fedjax_drift.types import Metrics, PyTree


@recorded
def averaging(rule: Aggregation) -> Source:
    """The source. It comes last, because it divides by the sum of the weights."""
    report, joint = rule.report, rule.joint

    def init(moment: Moment) -> PyTree:
        if joint is None:
            return rule.init()
        return joint.init(tree.zeros_like(summed_message(moment.engine, moment.server.params)))

    def send(
        state: PyTree, message: PyTree, weight: jax.Array, client: Client, moment: Moment
    ) -> tuple[PyTree, jax.Array]:
        return rule.contribute(state, message, weight)

    def together(state: PyTree, messages: Messages, moment: Moment) -> tuple[Messages, PyTree]:
        assert joint is not None
        present = messages.weight > 0
        message, enough, state = joint.combine(state, Stack(messages.each, present, messages.clients.id), moment.key)
        one = jax.tree.map(lambda a: a[:1], messages.clients)
        weight = enough.astype(messages.weight.dtype)[None]
        return Messages(jax.tree.map(lambda m: m[None], message), weight, one), state

    def combine(state: PyTree, received: Received, moment: Moment) -> tuple[Received, PyTree]:
        K, weight = moment.cohort_size, received.weight
        mean, state = rule.combine(state, received.total, weight, moment.key, K)
        received = received._replace(total=mean)
        if rule.noise_multiplier is None:
            return received, state
        # The result must not reveal which clients took part, nor that none did.
        participation = jnp.asarray(K / moment.num_clients, received.participation.dtype)
        return received._replace(weight=jnp.ones_like(weight), participation=participation), state

    def after(state: PyTree, outcome: Outcome, moment: Moment) -> tuple[PyTree, Metrics]:
        assert report is not None
        return state, report(state)

    return Source(
        "aggregation",
        init=init,
        send=send,
        together=None if joint is None else together,
        combine=combine,
        after=None if report is None else after,
        kind="aggregation rule",
        title=rule.name,
    )
