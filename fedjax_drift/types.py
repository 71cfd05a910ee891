"""The central types. Read this file first, then round/round.py, then one file of algorithms/.

Axis letters, in every shape comment of the library:

    N        clients in the federation
    K        clients in this round's cohort
    D        devices
    L        lanes, that is, clients that train side by side on one device (vmap)
    G        groups of L clients; a device trains its groups one after another
    M        examples of the data set, all clients together
    B        examples in a minibatch
    E        local epochs
    d        parameters of the model
    theta_i  the model of client i after its local training
    D_i      the update of client i: theta_i minus the model from which its local training started
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import optax

from fedjax_drift import checks, reprs, schedules
from fedjax_drift.batch_norm import whole as whole
from fedjax_drift.message import Row as Row
from fedjax_drift.model import Model, Params, Part, PyTree
from fedjax_drift.needs import Needs as Needs
from fedjax_drift.recipes import Recipe, recorded

P = ParamSpec("P")
Metrics = Mapping[str, Any]  # name -> scalar array
Record = dict[str, Any]  # one round in the history of `Simulation.run`, see `simulation.records.record`
THREEFRY = "threefry2x32"  # the random number generator of all keys


class Batch(NamedTuple):
    """One minibatch of one client. The last batch of an epoch may be short; it is padded to B examples."""

    x: jax.Array  # [B, ...], model inputs (uint8 images are already scaled)
    y: jax.Array  # [B, ...], labels
    mask: jax.Array  # bool [B], True for examples, False for padding; at least one is True


class Work(NamedTuple):
    """The inputs of one client's update in one round, apart from the server's variables and the client's state. An
    algorithm may pass a changed copy to `local.train`, such as ``work._replace(lr=work.lr / 2)``."""

    t: jax.Array  # int32 [], the round, from 0
    size: jax.Array  # int32 [], n_i, number of examples of this client
    q: jax.Array  # float [], q_i = N n_i / sum n; its mean over all clients is 1
    num_batches: jax.Array  # int32 [], ceil(n_i / B), batches per epoch
    num_steps: jax.Array  # int32 [], local steps of this round: K_i = E * ceil(n_i / B), or fewer for a straggler
    mean_steps: int  # static: Kbar = E * ceil(mean n_i / B), local steps of a client with the mean number of examples
    lr: jax.Array  # float [], eta_t
    initial_lr: float  # eta_0; a tracer in a compiled round
    key: jax.Array  # this client's key in this round; `local.train` uses fold_in(key, e) in epoch e, for e < E
    epochs: int  # static: E, or with ``steps`` the number of parts after which drift is measured
    most_batches: int  # static: ceil(max n_i / B), batches per epoch of the largest client
    optimizer: optax.GradientTransformation  # maps a gradient to a direction (clipping, weight decay, momentum)
    epoch: Callable[[jax.Array], Callable[[jax.Array], Batch]]
    """``epoch(key)`` shuffles the client's examples and returns a function ``batch``. ``batch(k)`` is the `Batch` of
    step k of the epoch, for k in 0..ceil(n_i / B) - 1."""
    model: Model
    label_counts: Callable[[int], jax.Array]
    """``label_counts(C)`` -> float [C], how many of the client's labels are of each class."""
    momentum: float = 0.0  # of the local steps; it is already a part of `optimizer`
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # (key, one example) -> a random variant of it
    watch: Callable[[Params, Params], PyTree] | None = None  # (start, theta) -> measurements after an epoch
    lanes: str | None = None  # the axis of the `jax.vmap` over clients that train side by side; None: it trains alone
    first_epoch: int = 0  # the number of the first epoch, which determines the keys of the epochs
    part: Part | None = None  # None: the whole model is shared
    steps: int | None = None  # static: the number of steps of all clients; None: they do E epochs
    stream: Callable[[Callable], Callable] | None = None  # with ``steps``: like ``epoch``, with a key for each epoch
    statistics: PyTree | None = None  # the running statistics with which the client starts; None: the model has none
    surveyed: PyTree = None  # the weighted mean of the messages of `Algorithm.survey`; None without it

    def logits(self, params: Params, x: jax.Array, key: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The logits [B, C] of the model in training mode. A model with running statistics, or with an
        argument ``mask``, needs ``batch.mask``."""
        if self.statistics is not None:
            return self._normalised("apply", params, x, key, mask)
        model = self.model.with_mask(mask)
        return model.train_apply(params, x, key) if model.train_apply else model.apply(params, x)

    def features(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """The representation [B, F] before the classifier, without dropout. With running statistics, the model is in
        training mode."""
        if self.statistics is not None:
            return self._normalised("features", params, batch.x, key, batch.mask)
        model = self.model.with_mask(batch.mask)
        assert model.features is not None
        return model.features(params, batch.x)

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """The mean loss over the examples of a batch, a scalar."""
        logits = self.logits(params, batch.x, key, batch.mask)
        return batch_mean(self.model.with_mask(batch.mask).loss(logits, batch.y), batch.mask)

    def _normalised(self, method: str, params: Params, x: jax.Array, key: jax.Array, mask: Any) -> jax.Array:
        """The output of a model with running statistics, in training mode."""
        assert self.model.statistics is not None
        if mask is None:
            checks.refuse(
                "work.logits needs the mask of the batch for a model with running statistics",
                "None",
                "call work.logits(params, batch.x, key, batch.mask)",
            )
        return self.model.statistics.forward(params, self.statistics, x, key, mask, method)[0]


def batch_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of ``values [B]`` over the examples where ``mask [B]`` is True."""
    return jnp.where(mask, values, 0).sum() / mask.sum()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trained:
    """What `local.train` returns besides the local model. An algorithm passes it on in its `ClientResult`.

    It reads like the dict of its metrics. ``trained | {"tau": tau}`` has one metric more.
    """

    metrics: dict[str, Any]  # {"loss": the mean of the loss over the steps}
    start: Params  # the model before the first step, with its running statistics
    theta: Params  # the local model after the last step, with its running statistics
    statistics: PyTree = ()  # the running statistics after the last step; () if the model has none
    own: PyTree = ()  # what the client keeps of the local model (`Part.own`); () if the whole model is shared
    measured: PyTree = ()  # what `Work.watch` returned after each epoch, leaves [E, ...]

    def keys(self) -> Any:
        return self.metrics.keys()

    def __getitem__(self, name: str) -> Any:
        return self.metrics[name]

    def __or__(self, metrics: Metrics) -> Trained:
        return replace(self, metrics={**self.metrics, **metrics})


class ClientResult(NamedTuple):
    """The result of one client's update."""

    message: PyTree  # any arrays, or `Row`s; they are uploaded, and the server gets their weighted mean over the cohort
    weight: jax.Array  # [], the client's weight in that mean: n_i or 1
    state: PyTree  # the new state of the client, kept until its next round; () for a stateless algorithm
    metrics: Trained | Metrics  # what `local.train` returned, or scalars alone. The scalars are reported in `info`

    def trained(self, name: str) -> Trained:
        """What `local.train` returned. Raises ConfigurationError if the algorithm ``name`` has not passed it on."""
        if isinstance(self.metrics, Trained):
            return self.metrics
        checks.refuse(
            f"client_update of {name} must pass on what local.train returned, for running statistics, personal "
            "parameters and drift measures",
            type(self.metrics).__name__,
            'return ClientResult(message, weight, state, trained), or trained | {"name": value} with metrics of your '
            "own",
        )


class Round(NamedTuple):
    """Information about the current round that is the same for all clients."""

    t: jax.Array  # int32 [], the round, from 0
    lr: jax.Array  # float [], eta_t
    participation: jax.Array
    """float [], |S| / N, where S is the set of the aggregated clients. With differential privacy it is K / N, and with
    importance sampling K / N times the share of the clients that are available."""
    num_clients: int  # N
    mean_size: float  # mean of n_i over all N clients
    surveyed: PyTree = None  # as in `Work`
    model: Any = None  # the `Model`, for servers that train (FedDF)


class Algorithm(NamedTuple):
    """A federated algorithm: a tuple of pure functions.

    A factory such as `fd.algorithms.fedprox` creates the tuple. Its functions capture the hyper-parameters. With the
    decorator `fd.algorithm`, the numbers among the factory's arguments are arguments of the compiled round.

    The server only gets the weighted mean of the messages, or a robust one, never the message of one client. Secure
    aggregation has the same restriction. The memory for messages does not grow with the cohort (but for a robust mean):
    a device keeps the messages of the L clients that train side by side, and one running sum.

    New variables must have the structure and the shapes of the old ones. They are cast to the same dtypes.

    Attributes:
      init_server: ``init_server(params) -> server``, the server's variables before round 0: a pytree, usually a
        NamedTuple, whose attribute ``params`` is the global model w. params: the initial global model.
      init_client: ``init_client(params) -> client``, the state of ONE client before its first round, a pytree of
        arrays. () for a stateless algorithm. All clients start with the same state.
      client_update: ``client_update(server, client, work) -> ClientResult`` trains ONE client for one round. The arrays
        have no client axis: the library vectorises over the clients. client: the state from its last round.
      server_update: ``server_update(server, mean, context) -> server``, the new variables. mean: the weighted mean of
        the aggregated clients' messages, with the structure, shapes and dtypes of one message. context: the `Round`.
        The result is discarded if no client reports, except with differential privacy.
      observe: ``observe(server, metrics) -> server`` uses the evaluation of the new model (FedGVR). It needs a test
        set, on which the model is evaluated in every round. metrics: "loss", "accuracy" for classifiers, and those of
        `Model.scores`.
      name: the name in logs and messages.
      finish: ``finish(server, client) -> client``, the state that ONE aggregated client keeps. server: the new
        variables. client: the state that client_update returned in this round. (VRL-SGD)
      report: ``report(server, mean, context) -> metrics``, scalars that are added to ``info``. The arguments are those
        of server_update.
      complete: ``complete(client, message) -> client`` adds to the state of `init_client` what is shaped like a
        message. message: zeros. `client_update` must also accept the state without it. (`fd.compression`)
      personal: ``personal(server, client, work) -> params``, the model that ONE client uses itself (Ditto, IFCA), which
        `Simulation.evaluate_clients` evaluates. work: gives access to its examples. None: it uses the global model.
      survey: ``survey(server, client, work) -> ClientResult``, a first phase of the round. Its message and its weight
        are those of ONE client. All clients of the round receive the mean, as `Work.surveyed`, before they train
        (Mime). The state and the metrics are not used.
      models: ``models(server) -> {name: params}``, models that the server keeps besides w. They are evaluated with w,
        and their scores have the name as prefix: ``client_mean_accuracy`` (FedDyn).
      adapt: ``adapt(server, client, work) -> (params, trained)``, the model of ONE client that has never taken part,
        after its ``work.num_steps`` local steps, and what `local.train` returned (Ditto, Per-FedAvg).
        `Simulation.evaluate_new` evaluates it. client: the state of `init_client`. The number of steps may be 0. None:
        plain local training of the model that `personal` returns.
      requires: What it needs, a `Needs`.
      recipe: How it was made: the factory and its arguments, recorded by `fd.algorithm`.
    """

    init_server: Callable[[Params], Any]
    init_client: Callable[[Params], PyTree]
    client_update: Callable[[Any, PyTree, Work], ClientResult]
    server_update: Callable[[Any, PyTree, Round], Any]
    observe: Callable[[Any, Metrics], Any] | None = None
    name: str = "algorithm"
    finish: Callable[[Any, PyTree], PyTree] | None = None
    report: Callable[[Any, PyTree, Round], Metrics] | None = None
    complete: Callable[[PyTree, PyTree], PyTree] | None = None
    personal: Callable[[Any, PyTree, Work], Params] | None = None
    survey: Callable[[Any, PyTree, Work], ClientResult] | None = None
    models: Callable[[Any], Mapping[str, Params]] | None = None
    adapt: Callable[[Any, PyTree, Work], tuple[Params, Trained]] | None = None
    requires: Needs = Needs()
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)


def algorithm(factory: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Decorates a factory of algorithms, so that the result knows how it was made.

    >>> import fedjax_drift as fd
    >>> @fd.algorithm
    ... def doubled(server_lr: float = 1.0) -> fd.Algorithm:
    ...     return fd.algorithms.fedavg(2 * server_lr)._replace(name="doubled")
    >>> doubled(0.5)
    Algorithm(doubled, server_lr=0.5)

    The floats among the arguments, and integers for a parameter with the annotation ``float``, become arguments of the
    compiled round, so another value compiles nothing (but a 0 does: it often switches something off). A checkpoint
    compares the factory and its arguments by name. Like a function for `jax.jit`, the factory must depend on its
    arguments only. Without the decorator an algorithm works as well. Every call of its factory then compiles a round. A
    number may also be a schedule, a function of the round such as ``optax.cosine_decay_schedule(1.0, 500)``.
    """
    return recorded(factory, partial(schedules.made, of_a_round=OF_A_ROUND))


OF_A_ROUND = ("client_update", "survey", "personal", "adapt", "server_update", "report")
"""The functions of an `Algorithm` that know the round, from their third argument."""


class ServerState(NamedTuple):
    """The state of a simulation between two rounds. `Simulation.round_fn` maps one state to the next."""

    round: jax.Array  # int32 [], number of completed rounds
    key: jax.Array  # constant: round t uses fold_in(key, t)
    server: Any  # the server's variables
    clients: PyTree  # client states, leaves [N, ...]; padded if they are sharded, a `ClientStore` on the host
    sources: dict[str, PyTree] = {}  # the states of the sources of drift that have one, by name; never changed in place

    @property
    def participation(self) -> PyTree:
        """The state of the participation rule; () if it has none."""
        return self.sources.get("participation", ())

    @property
    def aggregation(self) -> PyTree:
        """The state of the aggregation rule; () if it has none."""
        return self.sources.get("aggregation", ())

    @property
    def clock(self) -> PyTree:
        """Virtual time, and the clients in flight; () if rounds have no virtual time."""
        return self.sources.get("clock", ())

    @property
    def params(self) -> Params:
        """The global model w. It is evaluated, and it is sent to the clients. (FedEve sends w_hat instead.)"""
        return self.server.params

    def with_source(self, name: str, state: PyTree) -> ServerState:
        """The state, in which the source of drift of this name has another state; () for none."""
        is_none = isinstance(state, tuple) and not len(state)
        others = {other: of_other for other, of_other in self.sources.items() if other != name}
        return self._replace(sources=others | ({} if is_none else {name: state}))

    def __repr__(self) -> str:
        parts = [f"{name}={reprs.brief(getattr(self, name))}" for name in ("round", "server", "clients")]
        return f"ServerState({', '.join(parts)})"
