"""Adversaries as a source of drift: a fixed set of clients, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, spec, tree
from fedjax_drift.adversaries.attack import Attack, Seen
from fedjax_drift.recipes import recorded
from fedjax_drift.round.sources import Messages, Moment, Outcome, Received, Source
from fedjax_drift.shift.rule import Example, Owner, Shift
from fedjax_drift.spec import Fix, Mix, Seed
from fedjax_drift.types import Metrics, PyTree

ONE = Annotated[Attack, spec.instance(Attack), Fix("pass fd.adversaries.sign_flip(), or fd.adversaries.Attack(send)")]
Ids = Annotated[
    Any, spec.array("client ids >= 0", lambda ids: spec.numbers(ids, 1, "iu") and ids.min() >= 0), Fix("pass [0, 3]")
]


@recorded
def share(share: Mix, attack: ONE, seed: Seed = 0) -> Source:
    """A share of the clients are adversaries: round(share N) of them, the same ones in all rounds.

        sim = fd.Simulation(..., sources=[fd.adversaries.share(0.2, fd.adversaries.alie())])

    Adversaries train as honest clients do, and keep their states, but send another message, or train on other examples.
    Their test examples are as stored. They know all messages of the round, and the server's rule. Messages are those
    after codecs and before the aggregation rule. With an attack on messages, all messages of a round are on every
    device at once (see `fd.aggregation.robust`), and one server is needed. ``info`` has

    - ``adversaries``: bool [K], which clients of the cohort are hostile;
    - ``robustness``: the distance of the aggregate from mu in units of sigma, the root of the mean of ||x_i - mu||^2
      over the honest messages. 0: the attack had no effect. Only with an attack on messages.

    Args:
      share: in 0..1.
      attack: such as ``fd.adversaries.sign_flip()``.
      seed: another one draws other clients.
    """

    def hostile(ids: jax.Array, N: int) -> jax.Array:
        places = np.random.default_rng(seed).permutation(N).astype(np.int32)
        return (ids < N) & (jnp.asarray(places)[jnp.minimum(ids, N - 1)] < jnp.round(share * N))

    return _acting(hostile, attack)


@recorded
def clients(ids: Ids, attack: ONE) -> Source:
    """The clients with these ids are adversaries. See `share`.

    Args:
      ids: integers >= 0.
      attack: such as ``fd.adversaries.sign_flip()``.
    """

    def hostile(of: jax.Array, N: int) -> jax.Array:
        if max(ids) >= N:
            checks.refuse(f"ids of adversaries must be in 0..{N - 1}", max(ids))
        return jnp.isin(of, jnp.asarray(ids, jnp.int32))

    return _acting(hostile, attack)


def _acting(hostile: Callable[[jax.Array, int], jax.Array], attack: Attack) -> Source:
    """The source. hostile: ``hostile(ids, N) -> bool``, for ids of any shape."""
    checks.fields(attack, "see fd.adversaries.Attack")

    def together(state: PyTree, messages: Messages, moment: Moment) -> tuple[Messages, PyTree]:
        assert attack.send is not None
        ids, reports = messages.clients.id, messages.weight > 0
        is_hostile = hostile(ids, moment.num_clients)
        seen = Seen(
            messages.each, reports & ~is_hostile, reports & is_hostile, ids, moment.key, judged(moment, messages)
        )
        lie, one = attack.send(seen), jax.tree.map(lambda a: a[0], messages.each)
        has_clients = [*map(jnp.shape, jax.tree.leaves(lie))] == [*map(jnp.shape, jax.tree.leaves(messages.each))]
        what = f"send of {attack.name} must return the shapes of a message"
        tree.check_layout(lie, messages.each if has_clients else one, what, dtypes=False)
        each, weight = seen.sent(lie), messages.weight
        if moment.engine.drop_nonfinite:
            weight = jnp.where(jax.vmap(tree.first_nonfinite)(each) < 0, weight, 0)
        sigma = seen.deviation
        spread = tree.dot(sigma, sigma)
        return messages._replace(each=each, weight=weight), (state, seen.mean, spread)

    def combine(seen: PyTree, received: Received, moment: Moment) -> tuple[Received, PyTree]:
        old, mean, spread = seen
        weight = jnp.where(received.weight > 0, received.weight, 1)
        moved = jax.tree.map(lambda s, m: s / weight.astype(s.dtype) - m, received.total, mean)
        distance = jnp.sqrt(tree.dot(moved, moved) / jnp.maximum(spread, jnp.finfo(spread.dtype).tiny))
        return received, distance.astype(old.dtype)

    def after(state: PyTree, outcome: Outcome, moment: Moment) -> tuple[PyTree, Metrics]:
        metrics = {"adversaries": hostile(outcome.clients.id, moment.num_clients)}
        return state, metrics if attack.send is None else {**metrics, "robustness": state}

    def poisoned(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        assert attack.examples is not None
        if not owner.training:
            return x, y
        changed = attack.examples.change(key, t, owner, x, y)
        return tree.select(hostile(owner.id, owner.num_clients), changed, (x, y))

    source = Source("adversaries", after=after)
    if attack.send is not None:
        source = source._replace(init=lambda moment: jnp.zeros(()), together=together, combine=combine)
    if attack.examples is not None:
        source = source._replace(example=Shift(poisoned, attack.name))
    return source


def judged(moment: Moment, messages: Messages) -> Callable[[PyTree], PyTree]:
    """What the server makes of other messages, leaves [M, ...] -> [...]."""
    rule, before = moment.engine.sources[-1], moment.before
    assert before is not None

    def judge(each: PyTree) -> PyTree:
        given = messages._replace(each=each)
        if rule.together is not None:
            given = rule.together(rule.state_of(before), given, moment)[0]
        weights = given.weight / jnp.maximum(given.weight.sum(), jnp.finfo(given.weight.dtype).tiny)
        return jax.tree.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, 1), given.each)

    return judge
