"""The contract of a source of drift: what it may change in a round.

The sources of a simulation are values with the same functions. A round calls them in this order:

    select    who takes part, and how many local steps: participation, clock, redealt data, failures, your own sources
    receive   what one client starts with: topology, clock, your own
    example   the examples of one client: shift, your own
    weigh     the weight of one client: participation, your own
    send      the message of one client: clock, your own, aggregation
    together  the messages of all clients at once: adversaries, your own, robust aggregation
    combine   the sum over the clients: your own in reverse order, topology, participation, aggregation
    after     the next state of the source, and its values in ``info``: all, in their order

`simulation.sources.sources_of` lists the library's sources, which are files in this folder. A codec of messages
is a part of the algorithm (`fd.compression.compressed`), because it changes what a client keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import reprs, tree
from fedjax_drift.recipes import Recipe, recorded
from fedjax_drift.round.arrays import Arrays, Client, Rows
from fedjax_drift.shift.rule import TRAINING, Owner, Shift, Shifting, shift_of
from fedjax_drift.types import Metrics, PyTree, ServerState

__all__ = ["Cohort", "Messages", "Moment", "Outcome", "Received", "Source", "Start", "rule"]
NOWHERE = 2**31 - 1  # the place of an absent client, beyond the states of all clients
__dir__ = __all__.copy


class Start(NamedTuple):
    """What one client starts with."""

    server: Any  # the variables of the server
    key: jax.Array  # the clients' key of the round in which it starts; client i uses fold_in(key, i)
    t: jax.Array  # int32 [], that round
    lr: jax.Array  # float [], its learning rate
    surveyed: Any = None  # the mean of the first phase of the round; None if there is none, or not yet


@dataclass(frozen=True)
class Moment:
    """What the functions of a source can use besides the state of the source."""

    t: jax.Array  # int32 [], the round
    make_key: Callable[[], jax.Array]  # makes `key`
    engine: Any  # the `Engine` of the round
    server: Any  # the variables of the server
    run_key: jax.Array  # that of the state; round t has `engine.round_keys(run_key, t)`
    arrays: Arrays | None = None  # the data set; None for the functions of one client
    before: ServerState | None = None  # the state before the round; None for the functions of one client
    start: Start | None = None  # what this client has started with, for `Source.send`

    @property
    def key(self) -> jax.Array:
        """A key of this source in this round. For the functions of one client, it is also that of the client."""
        return self.make_key()

    @property
    def num_clients(self) -> int:
        """N."""
        return self.engine.num_clients

    @property
    def cohort_size(self) -> int:
        """K."""
        return self.engine.cohort_size

    @property
    def sizes(self) -> jax.Array:
        """int32 [N], n_i. Not for the functions of one client, which get their client's."""
        assert self.arrays is not None, "a function of one client has client.size"
        return self.arrays.sizes


class Cohort(NamedTuple):
    """The clients of a round, while its sources select them."""

    clients: Any  # `Client` [K]; None before the participation rule, or the clock, has selected them
    rows: Rows  # the examples
    num_clients: int  # N
    drawn: Any = None  # int32 [K'], the ids that the participation rule, or the caller, has selected
    selected: Any = None  # `Client` [K'], with the examples that they have in this round, before any of them fails

    def without(self, absent: jax.Array) -> Cohort:
        """The cohort, in which the clients with True in ``absent``, bool [K], don't report. They keep their states."""
        none = absent_like(self.clients, self.num_clients)
        return self._replace(clients=tree.select(absent, none, self.clients))

    def with_steps(self, steps: jax.Array) -> Cohort:
        """The cohort, in which the clients do ``steps``, int32 [K], local steps, at most as many as before."""
        return self._replace(clients=self.clients._replace(steps=jnp.minimum(steps, self.clients.steps)))


class Received(NamedTuple):
    """What the server has received from the clients of a round."""

    total: PyTree  # the sum of weight * message; after the aggregation rule: the mean message
    weight: jax.Array  # float [], the sum of the weights. If it is not positive, the server isn't updated
    participation: jax.Array  # float [], |S| / N, see `Round.participation`
    surveyed: PyTree = None  # for `server_update`: the mean of the first phase
    clients: Any = None  # for `server_update`: the number of clients of this server


class Messages(NamedTuple):
    """The messages of a round, for `Source.together`."""

    each: PyTree  # leaves [M, ...]
    weight: jax.Array  # float [M], 0 for a client that does not report
    clients: Client  # [M], absent if a client does not report


class Outcome(NamedTuple):
    """The clients of a round, after they have trained."""

    clients: Client  # [K], absent if a client does not report
    answered: jax.Array  # bool [K], whether a client is aggregated
    losses: jax.Array | None  # float [K], the mean loss over the local steps; None if the algorithm doesn't report it
    drawn: jax.Array  # int32 [K'], as `Cohort.drawn`
    after: ServerState  # the state after the round, with the states of the sources before this one


class Receivers(NamedTuple):
    """The servers of a topology (`round.receivers`). There are R, and they have variables of their own."""

    number: int  # R
    of: Callable[[Client], jax.Array]  # int32 [], the receiver whose variables ONE client starts with
    route: Callable[[Client, jax.Array], tuple[jax.Array, jax.Array]]
    """``route(client, t)``: the receivers int32 [d] of the message of ONE client, and its weight there, float [d]."""
    mix: Callable[[PyTree, jax.Array, jax.Array], PyTree]
    """``mix(each, present, t)``: the variables [R, ...] before the update. present: bool [N], who has reported."""
    join: Callable[[Any, jax.Array], PyTree] | None  # ``join(servers, t)``: the variables [R, ...] after the update
    clients: jax.Array  # [R], the number of clients of a receiver; 1 if messages have weights with the sum 1


class Source(NamedTuple):
    """A source of drift: pure functions that a round calls, and a state. Those that are None do nothing.

    A source of your own is passed to ``Simulation(sources=[...])``. With the decorator `fd.sources.rule` on its
    factory, its numbers are arguments of the compiled round. The functions of ONE client must not depend on others.

    Attributes:
      name: unique among the sources of a simulation. It is the key of its state in `ServerState.sources`.
      init: ``init(moment) -> state``, before round 0: a pytree of arrays of numbers, kept on every device and saved in
        checkpoints. Default: no state, which is ().
      select: ``select(state, cohort, moment) -> cohort`` decides which clients of the cohort report, and how many local
        steps they do: `Cohort.without` and `Cohort.with_steps`.
      receive: ``receive(state, start, client, moment) -> start``, what ONE client starts with, a `Start`: for example,
        variables of the server that were rounded on the way.
      example: ``example(key, t, client, x, y) -> (x, y)`` changes one example, as a function for `fd.shift` does. The
        examples of the global test set are changed, too, unless it uses ``client``. It has no state.
      weigh: ``weigh(weight, client) -> weight``, float [], the weight of ONE client.
      send: ``send(state, message, weight, client, moment) -> (message, weight)``, what ONE client adds to the sum,
        which is that of weight * message. The message keeps its structure and its shapes.
      together: ``together(state, messages, moment) -> (messages, state)`` sees the `Messages` of all clients at once,
        after `send` of the sources but the aggregation rule. Without it, a device keeps one running sum; with it, all
        messages of a round, on every device. It needs one server.
      combine: ``combine(state, received, moment) -> (received, state)``, what the server has received, a `Received`,
        before the aggregation rule divides by the sum of the weights. The state does not change if the server is not
        updated.
      after: ``after(state, outcome, moment) -> (state, metrics)`` at the end of a round. outcome: an `Outcome`.
        metrics: scalars or arrays [K] that are added to ``info``.
      down: ``down(state) -> bits``, float [], the bits with which the global model is sent to ONE client. Default:
        those of its arrays.
      one_server: whether it needs one server and synchronous rounds.
      receivers: of a topology.
      seed: another number gives ``example`` other keys.
      kind: what messages call it: "the source NAME".
      title: the name in messages. Default: its name.
      recipe: how it was made.
    """

    name: str
    init: Callable[[Moment], PyTree] | None = None
    select: Callable[[PyTree, Cohort, Moment], Cohort] | None = None
    receive: Callable[[PyTree, Start, Client, Moment], Start] | None = None
    example: Shift | Callable[..., tuple[jax.Array, jax.Array]] | None = None
    weigh: Callable[[jax.Array, Client], jax.Array] | None = None
    send: Callable[[PyTree, PyTree, jax.Array, Client, Moment], tuple[PyTree, jax.Array]] | None = None
    together: Callable[[PyTree, Messages, Moment], tuple[Messages, PyTree]] | None = None
    combine: Callable[[PyTree, Received, Moment], tuple[Received, PyTree]] | None = None
    after: Callable[[PyTree, Outcome, Moment], tuple[PyTree, Metrics]] | None = None
    down: Callable[[PyTree], jax.Array] | None = None
    one_server: bool = False
    receivers: Receivers | None = None
    seed: int = 0
    kind: str = "source"
    title: str | None = None
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)

    @property
    def described(self) -> str:
        """What messages call it."""
        return f"the {self.kind} {self.title or self.name}"

    def state_of(self, state: ServerState) -> PyTree:
        """Its state in that of a simulation."""
        return state.sources.get(self.name, ())

    def kept(self, new: PyTree, old: PyTree) -> PyTree:
        """Its new state, with the dtypes of the old one. Raises ConfigurationError if the shapes differ."""
        return tree.cast_like(new, old, f"the state of {self.described}")


rule = recorded
"""Decorates a factory of sources, so that the numbers among its arguments are arguments of the compiled round."""


def absent_like(clients: Client, num_clients: int) -> Client:
    """The absent client, which fills an empty place, with the fields that ``clients`` have. It has no client axis."""
    id_, zero, nowhere = map(jnp.int32, (num_clients, 0, NOWHERE))
    factor = None if clients.factor is None else jnp.zeros((), float)
    version = None if clients.version is None else zero
    discount = None if clients.discount is None else jnp.ones((), float)
    return Client(id_, zero, zero, zero, nowhere, factor, version, discount)


def examples(
    sources: tuple[Source, ...],
    t: Any,
    owner: Owner,
    index: jax.Array,
    x: jax.Array,
    y: jax.Array,
    part: int = TRAINING,
) -> tuple[jax.Array, jax.Array]:
    """The examples ``x [B, ...], y [B, ...]`` in round t, changed by the sources. See `Shifting.examples`."""
    for each, example in functions_of(sources, "example"):
        x, y = Shifting(shift_of(example), seed=each.seed).examples(t, owner, index, x, y, part)
    return x, y


def functions_of(sources: tuple[Source, ...], name: str) -> list[tuple[Source, Callable]]:
    """The sources that have a function of this name, and that function."""
    return [(each, getattr(each, name)) for each in sources if getattr(each, name) is not None]
