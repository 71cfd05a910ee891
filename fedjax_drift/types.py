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

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_drift import checks, reprs
from fedjax_drift.batch_norm import Statistics, whole
from fedjax_drift.errors import ConfigurationError

PyTree = Any
Params = PyTree
Metrics = Mapping[str, Any]  # name -> scalar array
Record = dict[str, Any]  # one round in the history of `Simulation.run`
THREEFRY = "threefry2x32"  # the random number generator of all keys


class Batch(NamedTuple):
    """One minibatch of one client. The last batch of an epoch may be short; it is padded to B examples."""

    x: jax.Array  # [B, ...], model inputs (uint8 images are already scaled)
    y: jax.Array  # [B, ...], labels
    mask: jax.Array  # bool [B], True for examples, False for padding; at least one is True


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Softmax cross-entropy with integer labels, [B]. The loss of a sequence is the mean over its positions."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return loss.mean(axis=tuple(range(1, loss.ndim)))


class Model(NamedTuple):
    """A model: the pure functions ``init`` and ``apply``. All other fields are optional.

    >>> import fedjax_drift as fd
    >>> model = fd.Model(init=lambda key: jnp.zeros(3), apply=lambda w, x: x @ w, loss=lambda z, y: (z - y) ** 2)
    >>> model.loss(model.apply(jnp.ones(3), jnp.ones((2, 3))), jnp.zeros(2)).tolist()
    [9.0, 9.0]

    Attributes:
      init: ``init(key) -> params``.
      apply: ``apply(params, x [B, ...]) -> logits [B, C]``, deterministic. Used in evaluation, and in training by
        default.
      loss: ``loss(logits, y) -> [B]``, the loss of each example. Default: softmax cross-entropy with integer labels.
      train_apply: ``train_apply(params, x, key) -> logits``, used in training instead of `apply`. Needed for dropout.
      features: ``features(params, x) -> [B, F]``, the representation before the classifier. Required by MOON.
      head: ``head(params, features) -> logits``, the classifier alone.
      extractor: ``extractor(params, x) -> [B, ...]``, the output of the encoder, which is the input of the projection
        head. Required by `fd.algorithms.constrained` with ``part="extractor"``, with ``part="header",
        kind="parameter"``, and with ``part="all", kind="feature"``.
      cosine: True if `apply` returns cosines in [-1, 1]. LfD requires True.
      scores: ``scores(logits [M, ...], y [M, ...]) -> {name: scalar or [M]}``, metrics in addition to loss and
        accuracy.

        - A scalar is a metric of the whole test set that is not a mean over examples, for instance a ranking metric
          (`fd.ranking.scores()`). The function receives the examples in the order of the test set.
        - An array [M] has one value per example. `Simulation.evaluate` reports its mean over the test set, and
          `Simulation.evaluate_clients` its mean over the examples of each client. The function must accept any number M
          of examples.

        Classifiers with two or more logits have a metric "accuracy" by default. A metric of this name in the returned
        dict replaces it. Example for one logit and labels 0 and 1: ``scores=lambda z, y: {"accuracy": (z > 0) == y}``.
        The default accuracy of an example with a label per position is the mean over all positions, padding included,
        and so is the default loss. To leave out padding, give both: ``docs/models.md`` shows how.
      statistics: The running statistics of BatchNorm. None: all parameters are trained.
      merged: ``merged(params)`` -> the parameters of the whole model, if only a part of it is trained
        (`fd.models.lora`).
      vocabulary: The number of token ids, if the inputs are ids. They are then checked to be in 0..vocabulary - 1. (JAX
        reads NaN for a larger id, and the last row of the table for the id -1.) A tuple has one number per position of
        an example, and its last number holds for all further positions. None: the inputs are not checked.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, jax.Array], jax.Array]
    loss: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy
    train_apply: Callable[[Params, jax.Array, jax.Array], jax.Array] | None = None
    features: Callable[[Params, jax.Array], jax.Array] | None = None
    head: Callable[[Params, jax.Array], jax.Array] | None = None
    extractor: Callable[[Params, jax.Array], jax.Array] | None = None
    cosine: bool = False
    scores: Callable[[jax.Array, jax.Array], dict[str, jax.Array]] | None = None
    statistics: Statistics | None = None

    merged: Callable[[Params], Params] | None = None
    vocabulary: int | tuple[int, ...] | None = None

    def __repr__(self) -> str:
        given = [name for name in self._fields if getattr(self, name) not in (None, False)]
        return f"Model({', '.join(given)})"

    def computing_in(self, dtype: Any) -> Model:
        """Returns the same model with a forward pass in ``dtype``, such as ``jnp.bfloat16``.

        Parameters and floating-point inputs are cast to ``dtype`` at the start of the forward pass. The logits are cast
        back to the dtype of the parameters before the loss. Gradients and updates have the dtype of the parameters.
        Running statistics keep their dtype.

        With bfloat16, an accelerator multiplies matrices faster. The precision is 8 bits with bfloat16, 11 bits with
        TF32 and 24 bits with float32.

        Raises ValueError unless ``dtype`` is a floating-point dtype, and if the model has frozen parameters. Call it on
        the whole model, before `fd.models.lora` or `fd.models.trainable`.
        """
        if self.merged is not None:
            raise ConfigurationError(
                "computing_in must be called on the whole model: fd.models.lora(model.computing_in(dtype), ...)"
            )
        checks.floating_dtype("dtype", dtype)

        def cast(to: Any, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda a: a.astype(to) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)

        statistics = self.statistics

        def in_dtype(function: Callable) -> Any:
            def forward(params: Params, *inputs: jax.Array) -> jax.Array:
                params_dtype = jnp.result_type(*jax.tree.leaves(params))
                lowered = cast(dtype, params)
                if statistics is not None:
                    lowered = whole(lowered["params"], params["batch_stats"])
                return cast(params_dtype, function(lowered, *cast(dtype, inputs)))

            return forward

        def training(params: Params, old: PyTree, x: jax.Array, *inputs: Any) -> tuple[jax.Array, PyTree]:
            assert statistics is not None
            output, new = statistics.forward(cast(dtype, params), old, cast(dtype, x), *inputs)
            return cast(jnp.result_type(*jax.tree.leaves(params)), output), new

        return self.with_functions(in_dtype)._replace(statistics=statistics and statistics._replace(forward=training))

    def with_functions(self, change: Callable[[Callable], Any]) -> Model:
        """Returns the model with ``change(function)`` in place of each function of the parameters that it has."""
        names = ("apply", "train_apply", "features", "head", "extractor")
        given = {name: function for name in names if (function := getattr(self, name)) is not None}
        return self._replace(**{name: change(function) for name, function in given.items()})

    @classmethod
    def from_linen(
        cls, module: Any, input_shape: tuple[int, ...], *, statistics: str | None = None, **options: Any
    ) -> Model:
        """Creates a model from a ``flax.linen`` module.

        If ``__call__`` of the module has an argument ``train`` or ``deterministic``, the library passes the right value
        in training and in evaluation. In training it also passes a "dropout" key. If the module has the methods
        ``features``, ``head`` or ``extractor``, they become the fields of the same name.

        Args:
          module: an instance. Its only variables may be parameters, and the running statistics of BatchNorm.
          input_shape: the shape of one example, without the batch axis.
          statistics: what happens to the running statistics. Required for a module with BatchNorm, whose parameters
            are then a dict ``{"params": ..., "batch_stats": ...}``. In training, BatchNorm normalises with the batch
            (without its padding), and `apply` with the running statistics.

            - "average": clients update the statistics while they train, and the server averages them.
            - "local": each client keeps its own, and never sends them. `Simulation.evaluate_clients` evaluates the
              clients with their own statistics. The global model keeps the initial ones.
            - "frozen": they keep their initial values. BatchNorm normalises with them in training, too.
          options: fields of `Model` to replace, such as ``loss=``. There is one more option: ``input_dtype``, the dtype
            of the inputs, by default float32. For token ids use ``input_dtype=jnp.int32``. Their ``vocabulary`` is
            that of the ``nn.Embed`` which gets the inputs themselves, if there is one.

        Raises:
          ValueError: the module does not accept the input shape; it has running statistics (BatchNorm) and
            ``statistics`` is missing, or the opposite; or it has other variables.
        """
        from fedjax_drift import adapters

        return cls(**adapters.linen_fields(module, input_shape, statistics, options))

    @classmethod
    def from_nnx(
        cls,
        module: Any,
        input_shape: tuple[int, ...] | None = None,
        *,
        statistics: str | None = None,
        **options: Any,
    ) -> Model:
        """Creates a model from a ``flax.nnx`` module, or from a function ``nnx.Rngs -> module``.

        A function is called with random numbers from the initialisation key, so every seed gives different initial
        parameters. A module already has parameters. They are the initial parameters for every seed. The same holds for
        the running statistics of BatchNorm.

        ``statistics`` and ``options`` are as in `from_linen`. The ``vocabulary`` of a module with token ids is that of
        its ``nnx.Embed``, if it has exactly one. ``input_shape`` is optional. If it is given, the model is
        checked with an input of this shape.
        """
        from fedjax_drift import adapters

        return cls(**adapters.nnx_fields(module, input_shape, statistics, options))


@dataclass(frozen=True, eq=False)
class Frozen:
    """Parameters of a model that are not trained. They are never sent to clients, and checkpoints do not contain them.

    The functions of a model that need them capture a `Frozen`. Compiled programs take its arrays as an argument, so
    that the arrays are no constants of the programs, and all programs share one copy on each device.
    """

    shapes: PyTree  # leaves `jax.ShapeDtypeStruct`
    arrays: Callable[[], PyTree]  # returns the arrays; called outside of programs at most once

    @classmethod
    def of(cls, make: Callable[[], PyTree]) -> Frozen:
        """The arrays that ``make()`` returns. It is called when they are first needed, and only once."""

        @cache
        def arrays() -> PyTree:
            with jax.ensure_compile_time_eval():  # inside of a program, too, they are arrays, not tracers
                return make()

        return cls(jax.eval_shape(make), arrays)

    @cached_property
    def checksum(self) -> str:
        """Names the values of the arrays in checkpoints."""
        crc = 0
        for leaf in jax.tree.leaves(self.arrays()):
            crc = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc)
        return f"{crc:08x}"

    def replaced(self, arrays: PyTree) -> Frozen:
        """The same with other arrays, or with shapes instead of arrays, for `jax.eval_shape`."""
        return Frozen(self.shapes, lambda: jax.tree.map(_zeros_if_shape, arrays))


def _zeros_if_shape(array: Any) -> Any:
    return jnp.zeros(array.shape, array.dtype) if isinstance(array, jax.ShapeDtypeStruct) else array


class Watcher(NamedTuple):
    """Two functions that observe one client's training. `measures.drift` sets `Work.watcher`, and `local.train` calls
    both functions.

    The measurements do not pass through the algorithm. So every algorithm that uses `local.train` can be measured.
    """

    after_epoch: Callable[[Params, Params], PyTree]
    """``after_epoch(start, theta)`` returns the measurements after a local epoch. ``start`` is the model before the
    first step, ``theta`` the current local model."""
    done: Callable[[Params, Params, PyTree], None]
    """``done(start, theta, measured)`` is called once, while the client's update is traced. ``theta`` is the local
    model theta_i after the last epoch. ``measured`` has the measurements after each epoch, leaves [E, ...]."""


class Part(NamedTuple):
    """How `local.train` treats a part of the model that stays with the client (`fd.algorithms.partly_shared`)."""

    personal: PyTree  # a bool for every leaf of the parameters: it stays with the client. No algorithm corrects it
    trained: PyTree  # a bool for every leaf: it is trained
    keep: Callable[[Params], None]  # ``keep(theta)`` is called once, with the local model after the last step
    handed_over: Callable[[Params], Params]  # ``handed_over(theta)`` is the model that `local.train` returns for theta


class Work(NamedTuple):
    """The inputs of one client's update in one round, apart from the server's variables and the client's state."""

    t: jax.Array  # int32 [], the round, from 0
    size: jax.Array  # int32 [], n_i, number of examples of this client
    q: jax.Array  # float [], q_i = N n_i / sum n; its mean over all clients is 1
    num_batches: jax.Array  # int32 [], ceil(n_i / B), batches per epoch
    num_steps: jax.Array  # int32 [], local steps of this round: K_i = E * ceil(n_i / B), or fewer for a straggler
    mean_steps: int  # Kbar = E * ceil(mean n_i / B), local steps of a client with the mean number of examples
    lr: jax.Array  # float [], eta_t
    initial_lr: float  # eta_0
    key: jax.Array  # this client's key in this round; `local.train` uses fold_in(key, e) in epoch e, for e < E
    epochs: int  # E
    most_batches: int  # ceil(max n_i / B), batches per epoch of the largest client
    optimizer: optax.GradientTransformation  # maps a gradient to a direction (clipping, weight decay, momentum)
    epoch: Callable[[jax.Array], Callable[[jax.Array], Batch]]
    """``epoch(key)`` shuffles the client's examples and returns a function ``batch``. ``batch(k)`` is the `Batch` of
    step k of the epoch, for k in 0..ceil(n_i / B) - 1."""
    model: Model
    label_counts: Callable[[int], jax.Array]
    """``label_counts(C)`` -> float [C], how many of the client's labels are of each class."""
    momentum: float = 0.0  # of the local steps; it is already a part of `optimizer`
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # (key, one example) -> a random variant of it
    watcher: Watcher | None = None  # observes `local.train` while drift is measured
    lanes: str | None = None  # the axis of the `jax.vmap` over clients that train side by side; None: it trains alone
    first_epoch: int = 0  # the number of the first epoch, which determines the keys of the epochs
    part: Part | None = None  # None: the whole model is shared
    statistics: list[PyTree] | None = None
    """The running statistics: those that the client starts with, then those after each call of `local.train`. None: the
    model has none."""

    def logits(self, params: Params, x: jax.Array, key: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The logits [B, C] of the model in training mode. A model with running statistics needs ``batch.mask``."""
        if self.statistics is not None:
            return self._normalised("apply", params, x, key, mask)
        return self.model.train_apply(params, x, key) if self.model.train_apply else self.model.apply(params, x)

    def features(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """The representation [B, F] before the classifier, without dropout. With running statistics, the model is in
        training mode."""
        if self.statistics is not None:
            return self._normalised("features", params, batch.x, key, batch.mask)
        assert self.model.features is not None
        return self.model.features(params, batch.x)

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """The mean loss over the examples of a batch, a scalar."""
        return batch_mean(self.model.loss(self.logits(params, batch.x, key, batch.mask), batch.y), batch.mask)

    def _normalised(
        self, method: str, params: Params, x: jax.Array, key: jax.Array, mask: jax.Array | None
    ) -> jax.Array:
        """The output of a model with running statistics, in training mode."""
        assert self.model.statistics is not None and self.statistics is not None
        if mask is None:
            raise ConfigurationError(
                "work.logits needs the mask of the batch for a model with running statistics, got None: call "
                "work.logits(params, batch.x, key, batch.mask)"
            )
        return self.model.statistics.forward(params, self.statistics[0], x, key, mask, method)[0]


def batch_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of ``values [B]`` over the examples where ``mask [B]`` is True."""
    return jnp.where(mask, values, 0).sum() / mask.sum()


class ClientResult(NamedTuple):
    """The result of one client's update."""

    message: PyTree  # any arrays; they are uploaded, and the server gets their weighted mean over the cohort
    weight: jax.Array  # [], the client's weight in that mean: n_i or 1
    state: PyTree  # the new state of the client, kept until its next round; () for a stateless algorithm
    metrics: Metrics  # scalars, reported in `info`


class Round(NamedTuple):
    """Information about the current round that is the same for all clients."""

    t: jax.Array  # int32 [], the round, from 0
    lr: jax.Array  # float [], eta_t
    participation: jax.Array
    """float [], |S| / N, where S is the set of the aggregated clients. With differential privacy it is K / N."""
    num_clients: int  # N
    mean_size: float  # mean of n_i over all N clients


class InitServer(Protocol):
    """Creates the server's variables before round 0.

    Args:
      params: the initial global model.

    Returns:
      A pytree, usually a NamedTuple, whose attribute ``params`` is the global model w.
    """

    def __call__(self, params: Params, /) -> Any: ...


class InitClient(Protocol):
    """Creates the state of ONE client before its first round. All clients start with the same state.

    Args:
      params: the initial global model.

    Returns:
      A pytree of arrays, () for a stateless algorithm.
    """

    def __call__(self, params: Params, /) -> PyTree: ...


class ClientUpdate(Protocol):
    """Trains ONE client for one round. The arrays have no client axis: the library vectorises over the clients.

    Args:
      server: the server's variables at the start of the round.
      client: the client's state from its last round, or from `InitClient`.
      work: the client's examples, number of steps, learning rate and key.

    Returns:
      The message, its weight, the new state and metrics. The new state must have the structure and the shapes of
      ``client``.
    """

    def __call__(self, server: Any, client: PyTree, work: Work, /) -> ClientResult: ...


class ServerUpdate(Protocol):
    """Computes the server's new variables from the cohort's messages.

    Args:
      server: the server's variables at the start of the round.
      mean: the weighted mean of the aggregated clients' messages. It has the structure, shapes and dtypes of one
        message.
      context: the round, its learning rate and the participation.

    Returns:
      The new variables, with the structure and the shapes of ``server``. They are discarded if no client reports,
      except with differential privacy.
    """

    def __call__(self, server: Any, mean: PyTree, context: Round, /) -> Any: ...


class Observe(Protocol):
    """Uses the evaluation of the new model.

    An algorithm with this function needs a test set, because the model is evaluated on it in every round.

    Args:
      server: the new variables, returned by `ServerUpdate`.
      metrics: scalars: "loss", "accuracy" for classifiers, and those of `Model.scores`.

    Returns:
      The variables for the next round, with the structure and the shapes of ``server``.
    """

    def __call__(self, server: Any, metrics: Metrics, /) -> Any: ...


class Finish(Protocol):
    """Updates the state of ONE aggregated client after the server's update.

    Args:
      server: the new variables.
      client: the state that `ClientUpdate` returned in this round.

    Returns:
      The state that the client keeps, with the structure and the shapes of ``client``.
    """

    def __call__(self, server: Any, client: PyTree, /) -> PyTree: ...


class Report(Protocol):
    """Computes metrics of the round. They are added to the ``info`` that `Simulation.round_fn` returns.

    The arguments are those of `ServerUpdate`.

    Returns:
      A dict from the name of a metric to a scalar.
    """

    def __call__(self, server: Any, mean: PyTree, context: Round, /) -> Metrics: ...


class Personal(Protocol):
    """The model that ONE client uses itself, for algorithms whose clients have models of their own.

    `Simulation.evaluate_clients` evaluates it on the client's own test examples.

    Args:
      server: the server's variables after some round.
      client: the client's state after its last round, or from `InitClient`.

    Returns:
      The parameters of the client's model, with the structure and the shapes of the global model.
    """

    def __call__(self, server: Any, client: PyTree, /) -> Params: ...


class Algorithm(NamedTuple):
    """A federated algorithm: a tuple of pure functions.

    A factory such as `fd.algorithms.fedprox` creates the tuple. Its functions capture the hyper-parameters.

    The server only gets the weighted mean of the messages, never the message of one client. Secure aggregation has
    the same restriction. The memory for messages does not grow with the cohort: a device keeps the messages of the L
    clients that train side by side, and one running sum.
    """

    init_server: InitServer  # creates the server's variables
    init_client: InitClient  # creates the state of one client
    client_update: ClientUpdate  # trains one client
    server_update: ServerUpdate  # computes the server's new variables from the weighted mean of the messages
    observe: Observe | None = None  # uses the evaluation of the new model (FedGVR)
    name: str = "algorithm"
    finish: Finish | None = None  # updates client states after the server's update (VRL-SGD)
    report: Report | None = None  # computes metrics for `info`
    personal: Personal | None = None  # the model of one client (Ditto, FedPer); None: clients use the global model
    requires: tuple[str, ...] = ()
    """Requirements, checked when a `Simulation` is created. "features", "head", "extractor", "cosine": the model has
    this field. "classifier": the model has the default loss. "sgd": local training without momentum and without another
    optimizer. "sgd or momentum": local training without another optimizer. "accuracy": the evaluation reports an
    accuracy. "weights": the aggregation keeps the weights of the clients. "one model": the model has no running
    statistics that clients update, because a client trains two models with one call of `local.train`. "2 epochs": at
    least two local epochs; other numbers likewise."""

    def __repr__(self) -> str:
        values = reprs.captured((self.client_update, self.server_update, self.init_server, self.init_client))
        return f"Algorithm({', '.join([self.name, *(f'{name}={value!r}' for name, value in values.items())])})"


class ServerState(NamedTuple):
    """The state of a simulation between two rounds. `Simulation.round_fn` maps one state to the next."""

    round: jax.Array  # int32 [], number of completed rounds
    key: jax.Array  # constant: round t uses fold_in(key, t)
    server: Any  # the server's variables
    clients: PyTree  # client states, every leaf [N, ...]

    @property
    def params(self) -> Params:
        """The global model w. It is evaluated, and it is sent to the clients. (FedEve sends w_hat instead.)"""
        return self.server.params

    def __repr__(self) -> str:
        parts = [f"{name}={reprs.brief(getattr(self, name))}" for name in ("round", "server", "clients")]
        return f"ServerState({', '.join(parts)})"
