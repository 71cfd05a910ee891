"""Drift measures as values, and how a round computes them while its clients train.

`Measure` says what is computed. The measures of the library are in `drift.py`.

Most measures of a client are computed while it trains. A mean over the cohort is only known after that, so the updates
are kept until then, if they fit in `KEPT_BYTES`. If not, and for measures that compare models with the mean model, the
clients train a second time, with the same keys and therefore the same local models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks, recipes, tree
from fedjax_drift.devices.mesh import num_teams
from fedjax_drift.recipes import Recipe
from fedjax_drift.round.arrays import Arrays, Client, TestRows
from fedjax_drift.round.cohort import Assignment
from fedjax_drift.round.engine import CURVATURE, Engine, Shared, partitionable, round_keys
from fedjax_drift.round.evaluate import after, at_round, inputs, labels
from fedjax_drift.round.info import with_metrics
from fedjax_drift.round.observer import Observer, unobserved
from fedjax_drift.round.places import in_cohort_order
from fedjax_drift.round.round import observed_round, round_fn
from fedjax_drift.round.train import check_finite, client_work, over_clients, started, update
from fedjax_drift.types import ClientResult, Params, PyTree, ServerState, Work

KEPT_BYTES = 2**30  # the most memory on each device for the updates of the clients of a measured round
Values = dict[str, Any]  # by their names in ``info``


class Tested(NamedTuple):
    """The test set of a round."""

    rows: TestRows
    y: PyTree = ()  # [T * B], the labels, if a measure needs a classifier
    z: PyTree = ()  # [T * B, C], the logits of the global model, likewise

    @property
    def mask(self) -> jax.Array:
        """bool [T * B], False for padding."""
        return self.rows.mask.reshape(-1)


@dataclass(frozen=True, eq=False)
class Seen:
    """What a measure sees of one client after a local epoch, or after its training.

    Attributes:
      start: the model that the client has received.
      theta: its model now.
      work: its examples and its random key, see `fd.types.Work`.
      tested: the test set, if a measure needs it.
      round_key: the random key of the round, the same for all clients.
      engine: what the round is compiled from.
    """

    start: Params
    theta: Params
    work: Work
    tested: Any
    round_key: jax.Array
    engine: Engine

    @cached_property  # so that measures share it
    def update(self) -> Params:
        """theta - start, the leaves that are trained."""
        return trained(self.engine, tree.subtract(self.theta, self.start))

    @cached_property
    def logits(self) -> jax.Array:
        """[T * B, C], those of theta for the test examples and the padding."""
        return predictions(self.engine, self.theta, self.tested.rows)


class Mean(NamedTuple):
    """The means over the clients of a round, with their weights."""

    theta: Params  # of their models
    update: Params  # of their updates, the leaves that are trained


@dataclass(frozen=True, eq=False)
class Cohort:
    """What a measure sees of a round.

    Attributes:
      engine: what the round is compiled from.
      assigned: who takes part.
    """

    engine: Engine
    assigned: Assignment

    @property
    def params(self) -> Params:
        """w, the global model that the clients have received."""
        return self.assigned.shared.server.params

    def sum(self, function: Callable[[Work], PyTree]) -> PyTree:
        """The sum of ``function(work)`` over the clients of the round."""

        def one(shared: Shared, client: Client, state: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
            return function(client_work(self.engine, shared, client, longest)), (), ()

        shared = self.assigned.shared._replace(extra=())
        return over_clients(self.engine, one, shared, self.assigned.placed, ())[0]


class Global(NamedTuple):
    """What a measure sees of a global model."""

    engine: Engine  # what the round is compiled from
    params: Params
    test: TestRows | None  # the test set that `Simulation.evaluate` uses; None for ``combined``
    key: jax.Array  # a random key of the round


class Needs(NamedTuple):
    """What a measure needs. A simulation without it raises ConfigurationError."""

    test: int = 0  # the least number of test examples
    classifier: bool = False  # one with the default loss, and one integer label per example
    all_clients: bool = False  # the examples of all clients on the devices
    global_model: bool = True  # False: it also works if only the clients have running statistics
    adapters: bool = False  # low-rank adapters


class Measure(NamedTuple):
    """A measure of the clients' drift, for ``Simulation(measure=)``.

    Its functions return a dict of scalars or arrays, which stand in ``info`` by their names. Those of the clients are
    [K, ...] there. A function that is None measures nothing.

        def epoch(seen):
            return {"distance": optax.global_norm(seen.update)}

        sim = fd.Simulation(..., measure=[fd.measures.Measure("distance", epoch=epoch), "gradients"])

    With the decorator ``fd.measures.recorded`` on a factory of measures, equal arguments compile one program.

    Attributes:
      name: says which it is in messages.
      epoch: ``epoch(seen)`` is called after every local epoch of a client, in the program that trains it. The values
        are [K, E, ...]. See `Seen`.
      client: ``client(seen, measured)`` is called after the training of a client, and returns all that is measured of
        it. measured: what ``epoch`` has returned, [E, ...]. Default: ``measured``.
      update: ``update(D, mean)`` compares the update of a client after a local epoch with the mean update, [K, E, ...].
      again: ``again(work, mean)`` returns a function like ``epoch``. The clients train a second time, because the means
        of their models and updates are only known then. See `Mean`.
      share: ``share(seen)`` returns arrays after the training of a client, whose mean over the clients is needed.
      combined: ``combined(mean, new)`` is called once for a round, with this mean and the new global model, a `Global`.
      cohort: ``cohort(cohort)`` is called once for a round. See `Cohort`.
      model: ``model(model)`` measures the global model, in ``info`` and in records the one after the round. See
        `Global`.
      needs: what the simulation must have.
      recipe: how it was made.
    """

    name: str
    epoch: Callable[[Seen], Values] | None = None
    client: Callable[[Seen, Values], Values] | None = None
    update: Callable[[Params, Params], Values] | None = None
    again: Callable[[Work, Mean], Callable[[Seen], Values]] | None = None
    cohort: Callable[[Cohort], Values] | None = None
    model: Callable[[Global], Values] | None = None
    needs: Needs = Needs()
    recipe: Recipe | None = None
    share: Callable[[Seen], PyTree] | None = None
    combined: Callable[[PyTree, Global], Values] | None = None

    def __repr__(self) -> str:
        return f"Measure({self.name})"

    @property
    def of_clients(self) -> bool:
        """Whether it sees the models of the clients."""
        return any((self.epoch, self.client, self.update, self.again, self.share))

    @property
    def with_means(self) -> bool:
        """Whether it compares the clients with a mean over the cohort."""
        return self.update is not None or self.again is not None

    def values(self, name: str, *arguments: Any, function: Callable | None = None) -> Values:
        """What its function of this name returns. Raises ConfigurationError unless that is a dict.

        function: one that its function of this name has returned, which is called instead.
        """
        values = (function or getattr(self, name))(*arguments)
        if not isinstance(values, dict):
            checks.refuse(f"{name} of the measure {self.name!r} must return a dict of arrays", checks.shown(values))
        return values

    def check(self, engine: Engine, streamed: bool) -> None:
        """Raises ConfigurationError if it cannot be computed with the data or the model.

        streamed: whether the training examples are kept on the host.
        """
        checks.fields(self, "see fd.measures.Measure")
        name, needs = checks.text("name of a Measure", self.name), self.needs
        local = engine.model.statistics is not None and engine.model.statistics.kept == "local"
        if local and needs.global_model:
            got = 'a model with statistics="local", whose running statistics only the clients have'
            checks.refuse(f"measure={name!r} evaluates the global model", got, 'use "updates", or statistics="average"')
        if needs.test and not engine.federation.test_size:
            checks.refuse(f"measure={name!r} needs a test set", "none", "pass test=(x, y) with the data")
        if engine.federation.test_size < needs.test:
            what = f"measure={name!r} needs at least {needs.test} test examples"
            checks.refuse(what, engine.federation.test_size, "use a larger test set")
        if needs.classifier and engine.federation.num_classes is None:
            what = f"measure={name!r} needs a classifier with the default loss and one integer label per example"
            fix = 'use "updates" or "gradients", which work with every model'
            checks.refuse(what, "a different model or different labels", fix)
        if needs.adapters and engine.model.products is None:
            fix = "pass fd.models.lora(model, rank=8)"
            checks.refuse(f"measure={name!r} needs a model with low-rank adapters", "one without", fix)
        if (self.share is None) != (self.combined is None):
            checks.refuse(f"the measure {name!r} must have share and combined, or neither", "one of them")
        if streamed and needs.all_clients:
            what = f"measure={name!r} needs the examples of all clients on the devices"
            checks.refuse(what, "a streamed data set", "pass stream=False")


class Measures(tuple[Measure, ...]):
    """Measures that are compared by how they were made, so that they can be a constant of a program."""

    @cached_property
    def form(self) -> recipes.Form:
        return recipes.split(tuple(self), fixed=[str(i) for i in range(len(self))])[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measures) and self.form == other.form

    def __hash__(self) -> int:
        return hash(self.form)


def functions_of(measures: tuple[Measure, ...], name: str) -> list[Callable[..., Values]]:
    """The functions of this name that the measures have."""
    return [partial(measure.values, name) for measure in measures if getattr(measure, name) is not None]


def measure(
    engine: Engine, measures: tuple[Measure, ...], state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None
) -> dict[str, jax.Array]:
    """Measures the drift of the round that `round_fn` would run. See `Simulation.measure`."""
    measured = observed_round(engine, state, arrays, cohort, observer(engine, measures, cohort))[2]
    return joined([measured, of_model(engine, measures, state, arrays, state.round)])


def measured_round(
    engine: Engine, measures: tuple[Measure, ...], state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None
) -> tuple[ServerState, dict]:
    """`round_fn`, whose ``info`` also has the measures. Those of the global model are those of the new one, which is
    evaluated after the round."""
    new, info = round_fn(engine, state, arrays, cohort, observer(engine, measures, cohort))
    return new, with_metrics(engine, info, of_model(engine, measures, new, arrays, state.round))


@partitionable
def of_model(
    engine: Engine, measures: tuple[Measure, ...], state: ServerState, arrays: Arrays, t: jax.Array
) -> dict[str, jax.Array]:
    """The measures of the global model of a state, with the test set that `evaluate` uses. They are none of a round.

    t: the round with whose key the random vectors are drawn.
    """
    if not (functions := functions_of(measures, "model")):
        return {}
    test = None if arrays.test is None else after(engine, arrays.test, state.round)
    model = Global(engine, state.params, test, curvature_key(engine, round_keys(state.key, t)[1]))
    return joined([function(model) for function in functions])


def observer(engine: Engine, measures: tuple[Measure, ...], cohort: jax.Array | Client | None) -> Observer:
    """Computes the measures of a round while its clients train. cohort: as for `round_fn`."""
    if not measures:
        return unobserved(engine)
    K = engine.most_clients
    if cohort is not None and not engine.over_selects:
        K = len(cohort.id if isinstance(cohort, Client) else cohort)
    places = -(-K // (num_teams(engine.mesh) * engine.lanes)) * engine.lanes  # on each device
    return Observer(
        before=partial(tested, engine, measures),
        train=partial(update_and_measure, engine, measures, places),
        after=partial(of_round, engine, measures),
    )


def tested(engine: Engine, measures: tuple[Measure, ...], assigned: Assignment, arrays: Arrays) -> PyTree:
    """The test examples and their global predictions, if a measure of the clients needs them."""
    needs = [measure.needs for measure in measures if measure.of_clients and measure.needs.test]
    if not needs:
        return ()
    assert arrays.test is not None
    test = at_round(engine, arrays.test, assigned.shared.t)
    if not any(each.classifier for each in needs):
        return Tested(test)
    return Tested(test, labels(engine, test).reshape(-1), predictions(engine, assigned.shared.server.params, test))


def update_and_measure(
    engine: Engine, measures: tuple[Measure, ...], places: int, shared: Shared, client: Client, old: PyTree, work: Work
) -> tuple[ClientResult, PyTree, PyTree]:
    """Trains one client. Returns its result, its terms of the sums over the cohort, and its measures.

    places: the number of clients that its device trains in this round, with empty places.
    """
    if not any(measure.of_clients for measure in measures):
        return update(engine, shared, client, old, work), (), {}

    def after_epoch(start: Params, theta: Params) -> dict[str, Any]:
        seen = Seen(start, theta, work, shared.extra, shared.key, engine)
        measured: dict[str, Any] = {
            m.name: m.values("epoch", seen) if m.epoch else {} for m in measures if m.of_clients
        }
        keep = functions_of(measures, "update") and places * engine.local.parts * tree.nbytes(seen.update) <= KEPT_BYTES
        return {"of": measured, "update": seen.update if keep else ()}

    result = update(engine, shared, client, old, work._replace(watch=after_epoch))
    training = result.trained(engine.algorithm.name)
    aggregated, bad_leaf = check_finite(engine, client, result)
    seen = Seen(training.start, training.theta, work, shared.extra, shared.key, engine)
    of = training.measured["of"]
    values = [m.values("client", seen, of[m.name]) if m.client else of[m.name] for m in measures if m.of_clients]
    measured = {
        "values": joined(values),
        "update": training.measured["update"],
        "valid": (client.id < engine.num_clients) & (bad_leaf < 0),
    }
    shared_values = {m.name: m.share(seen) for m in measures if m.share is not None}
    models = (training.theta, seen.update) if any(measure.with_means for measure in measures) else ()
    if not models and not shared_values:
        return result, (), measured
    weight = jnp.where(aggregated, result.weight, 0)
    terms = jax.tree.map(lambda a: jnp.where(weight > 0, weight * a, 0), (models, shared_values))
    return result, (*terms, weight), measured


def of_round(
    engine: Engine,
    measures: tuple[Measure, ...],
    assigned: Assignment,
    states: PyTree,
    sums: PyTree,
    of_clients: dict[str, Any],
    new: Params,
) -> dict[str, jax.Array]:
    """The measures of a round, after its clients have trained.

    assigned: with the result of `tested` in `Shared.extra`. states: the client states before the round. sums,
    of_clients: what `update_and_measure` returned for all clients. new: the global model after the round.
    """
    measured = [function(Cohort(engine, assigned)) for function in functions_of(measures, "cohort")]
    if not of_clients:
        return joined(measured)
    values = [of_clients["values"]]
    if any(measure.with_means for measure in measures):
        models, _, weight = sums
        w = assigned.shared.server.params
        mean = Mean(*jax.tree.map(lambda s, like: (s / weight).astype(like.dtype), models, (w, trained(engine, w))))
        compared, again = functions_of(measures, "update"), [m for m in measures if m.again is not None]
        kept = bool(jax.tree.leaves(of_clients["update"]))
        for function in compared if kept else ():
            for _ in range(4):  # [D, G, L, E]
                function = jax.vmap(function, (0, None))
            values.append(function(of_clients["update"], mean.update))
        if (left := [] if kept else compared) or again:
            values.append(second_training(engine, left, again, assigned, states, mean))
    for m in measures:
        if m.combined is not None:
            mean = jax.tree.map(lambda s: s / sums[2], sums[1][m.name])
            measured.append(m.values("combined", mean, Global(engine, new, None, assigned.shared.key)))
    of_cohort = partial(in_cohort_order, len(assigned.cohort.id), assigned.order, assigned.empty)
    for name, each in joined(values).items():
        seen = of_clients["valid"].reshape(*of_clients["valid"].shape, *[1] * (each.ndim - 3))
        measured.append({name: of_cohort(jnp.where(seen, each, jnp.nan))})
    return joined(measured)


def second_training(
    engine: Engine,
    compared: Sequence[Callable],
    again: Sequence[Measure],
    assigned: Assignment,
    states: PyTree,
    mean: Mean,
) -> dict[str, jax.Array]:
    """The measures that compare a client after every epoch with a mean over the cohort, leaves [D, G, L, E, ...].

    The mean is only known after all clients have trained, so they train again. compared: functions `Measure.update`.
    again: measures with a function `again`.
    """

    def one(shared: Shared, client: Client, old: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        mean = shared.extra
        shared = started(engine, shared, client)
        work = client_work(engine, shared, client, longest)
        functions = [partial(m.values, "again", function=m.again(work, mean)) for m in again]  # type: ignore[misc]

        def after_epoch(start: Params, theta: Params) -> dict[str, jax.Array]:
            seen = Seen(start, theta, work, (), shared.key, engine)
            values = [function(seen.update, mean.update) for function in compared]
            return joined([*values, *(function(seen) for function in functions)])

        result = update(engine, shared, client, old, work._replace(watch=after_epoch))
        return (), result.trained(engine.algorithm.name).measured, ()

    return over_clients(engine, one, assigned.shared._replace(extra=mean), assigned.placed, states)[1]


def joined(values: Sequence[Values]) -> Values:
    """One dict. Raises ConfigurationError if two of them have the same name."""
    together: Values = {}
    for each in values:
        if twice := [name for name in each if name in together]:
            checks.refuse("the values of the measures must have different names", f"{twice[0]!r} twice", "rename one")
        together |= each
    return together


def trained(engine: Engine, params: Params) -> Params:
    """The leaves of the model that are trained: all but its running statistics."""
    return params if engine.model.statistics is None else params["params"]


def predictions(engine: Engine, params: Params, test: TestRows) -> jax.Array:
    """Logits [T * B, C] of the test examples, including the padding."""

    def batch(rows: TestRows) -> jax.Array:
        return engine.model.with_mask(rows.mask).apply(params, inputs(engine, rows, test.t)[0])

    logits = lax.map(batch, test._replace(t=None))
    return logits.reshape(-1, logits.shape[-1])


def curvature_key(engine: Engine, key: jax.Array) -> jax.Array:
    """The key for the random vectors of a round. It is the same for all models, so that they differ in nothing else.

    key: the clients' key of the round.
    """
    return jax.random.fold_in(key, engine.num_clients + CURVATURE)
