"""The central types. Read this first, then engine.py, then one file of algorithms/.

Axis letters, in every shape comment of the library:

    N  clients in the federation        M  rows of the flat data set
    K  clients in this round's cohort   B  rows of a minibatch
    L  lanes trained side by side       E  local epochs
    d  parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_drift.errors import ConfigurationError

PyTree = Any
Params = PyTree
Metrics = Mapping[str, Any]  # scalar arrays
Record = dict[str, Any]  # what `Simulation.run` keeps of a round
THREEFRY = "threefry2x32"  # the generator of all keys


class Batch(NamedTuple):
    """One minibatch of one client. The last batch of an epoch may be short: its other rows are masked out."""

    x: jax.Array  # [B, ...] as the model sees it (uint8 images already scaled)
    y: jax.Array  # [B, ...]
    mask: jax.Array  # bool [B], True for real rows; at least one is


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Softmax cross-entropy with integer labels, [B]; a sequence's loss is the mean over its positions."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return loss.mean(axis=tuple(range(1, loss.ndim)))


class Model(NamedTuple):
    """A model is two pure functions; everything else is optional.

    >>> import fedjax_drift as fd
    >>> model = fd.Model(init=lambda key: jnp.zeros(3), apply=lambda w, x: x @ w, loss=lambda z, y: (z - y) ** 2)
    >>> model.loss(model.apply(jnp.ones(3), jnp.ones((2, 3))), jnp.zeros(2)).tolist()
    [9.0, 9.0]
    """

    init: Callable[[jax.Array], Params]
    """``init(key) -> params``."""
    apply: Callable[[Params, jax.Array], jax.Array]
    """``apply(params, x [B, ...]) -> logits [B, C]``, deterministic: what evaluation uses."""
    loss: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy
    """``loss(logits, y) -> [B]``, one loss a row. Default: softmax cross-entropy with integer labels."""
    train_apply: Callable[[Params, jax.Array, jax.Array], jax.Array] | None = None
    """``train_apply(params, x, key) -> logits`` for models that draw random numbers in training (dropout)."""
    features: Callable[[Params, jax.Array], jax.Array] | None = None
    """``features(params, x) -> [B, F]``, the representation before the classifier (MOON needs it)."""
    head: Callable[[Params, jax.Array], jax.Array] | None = None
    """``head(params, features) -> logits``, the classifier alone."""
    extractor: Callable[[Params, jax.Array], jax.Array] | None = None
    """``extractor(params, x) -> [B, ...]``, what a projection head makes the features from (LfD's constraint study)."""
    cosine: bool = False
    """A promise that `apply` returns cosines in [-1, 1] (LfD needs it)."""
    scores: Callable[[jax.Array, jax.Array], dict[str, jax.Array]] | None = None
    """``scores(logits [M, ...], y [M, ...]) -> {name: number, or one a row [M]}``, reported beside loss and accuracy.

    One number is a score of all test rows together, in their order: for what is no mean over rows
    (`fd.ranking.scores()`). One a row is averaged over the test rows and, in `Simulation.evaluate_clients`, over each
    client's; it is asked for any number of rows. An entry "accuracy" replaces the default's, which classifiers with
    several logits have: ``scores=lambda z, y: {"accuracy": (z > 0) == y}`` for one logit and labels 0 and 1."""

    def computing_in(self, dtype: Any) -> Model:
        """The same model, computing in ``dtype`` (``jnp.bfloat16``); parameters, logits and updates stay as they are.

        Parameters and floating inputs are cast where the network is applied, so gradients come back in the parameters'
        dtype; losses are taken of logits cast back. In bfloat16 an accelerator multiplies matrices faster, with 8 bits
        of precision instead of TF32's 11 or float32's 24. Raises ValueError unless ``dtype`` is floating.
        """
        try:
            floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        except TypeError:  # no dtype at all
            floating = False
        if not floating:
            raise ConfigurationError(f"dtype must be floating, got {dtype}: jnp.bfloat16, for example")

        def cast(to: Any, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda a: a.astype(to) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)

        def inside(function: Callable | None) -> Any:
            def computed(params: Params, *inputs: jax.Array) -> jax.Array:
                outputs_in = jnp.result_type(*jax.tree.leaves(params))
                return cast(outputs_in, function(*cast(dtype, (params, *inputs))))  # type: ignore[misc]

            return computed if function is not None else None

        names = ("apply", "train_apply", "features", "head", "extractor")
        return self._replace(**{name: inside(getattr(self, name)) for name in names})

    @classmethod
    def from_linen(cls, module: Any, input_shape: tuple[int, ...], **options: Any) -> Model:
        """A model from any ``flax.linen`` module. ``input_shape`` is one row's shape, without the batch axis.

        A module whose ``__call__`` takes ``train`` (or ``deterministic``) is told when it trains, and gets a "dropout"
        key then; its methods ``features``, ``head`` and ``extractor``, if any, become the model's. ``options`` replace
        fields of `Model` (``loss=``, ...); ``input_dtype=jnp.int32`` is for rows of tokens (default float32).
        Raises ValueError for modules with running statistics (BatchNorm): use GroupNorm.
        """
        from fedjax_drift import adapters

        return cls(**adapters.linen_fields(module, input_shape, options))

    @classmethod
    def from_nnx(cls, module: Any, input_shape: tuple[int, ...] | None = None, **options: Any) -> Model:
        """A model from ``flax.nnx``: a function ``nnx.Rngs -> module`` or a module.

        A function is called with the initialisation key, so every seed has its own parameters; a module's own
        parameters are used whatever the key. ``options`` as in `from_linen`.
        """
        from fedjax_drift import adapters

        return cls(**adapters.nnx_fields(module, input_shape, options))


class Watcher(NamedTuple):
    """Observes one client's training. `measures.drift` passes it to `local.train`, which calls both functions.

    Its results don't pass through the algorithm, so an algorithm may return whatever metrics it likes.
    """

    after_epoch: Callable[[Params, Params], PyTree]
    """``after_epoch(start, theta)`` is measured after every local epoch."""
    done: Callable[[Params, Params, PyTree], None]
    """``done(start, theta, measured)`` is called once, while the client's update is traced: ``theta`` is the local
    model theta_i after the last epoch, and every leaf of ``measured`` has an axis of E epochs in front."""


class Work(NamedTuple):
    """One client's work in one round, all that its update may look at."""

    t: jax.Array  # int32 [], the round, from 0
    size: jax.Array  # int32 [], n_i, rows of this client
    q: jax.Array  # float [], q_i = N n_i / sum n, 1 in the mean
    num_batches: jax.Array  # int32 [], ceil(n_i / B), of an epoch
    num_steps: jax.Array  # int32 [], K_i = E * ceil(n_i / B), or fewer for a straggler, which stops there
    mean_steps: int  # Kbar = E * ceil(mean n_i / B), of a client of mean size
    lr: jax.Array  # float [], eta_t
    initial_lr: float  # eta_0
    key: jax.Array  # this client's key of this round; `local.train` uses fold_in(key, e) for the epochs e < E
    epochs: int  # E
    most_batches: int  # in an epoch of the largest client, ceil(max n_i / B)
    optimizer: optax.GradientTransformation  # gradient -> direction: clip, weight decay, momentum
    epoch: Callable[[jax.Array], Callable[[jax.Array], Batch]]
    """``epoch(key)`` shuffles the client's rows; the result maps a step k in 0..ceil(n_i / B)-1 to its batch."""
    model: Model
    watcher: Watcher | None = None  # observes `local.train` while drift is measured

    def logits(self, params: Params, x: jax.Array, key: jax.Array) -> jax.Array:
        """[B, C], as the model computes them in training."""
        return self.model.train_apply(params, x, key) if self.model.train_apply else self.model.apply(params, x)

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """Mean loss over the batch's real rows, a scalar."""
        return batch_mean(self.model.loss(self.logits(params, batch.x, key), batch.y), batch.mask)


def batch_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of ``values [B]`` over the rows where ``mask [B]`` is True."""
    return jnp.where(mask, values, 0).sum() / mask.sum()


class ClientResult(NamedTuple):
    """What one client's update returns."""

    message: PyTree  # uploaded; the server sees only the cohort's weighted mean of it
    weight: jax.Array  # [] its weight in that mean: n_i or 1
    state: PyTree  # what the client keeps until its next round; () when stateless
    metrics: Metrics  # scalars for a person to look at


class Round(NamedTuple):
    """What everyone knows about a round."""

    t: jax.Array  # int32 [], from 0
    lr: jax.Array  # float [], eta_t
    participation: jax.Array  # float [], |S| / N, S the clients that answered
    num_clients: int  # N
    mean_size: float  # mean of n_i over the federation


class Algorithm(NamedTuple):
    """A federated algorithm is a value made of pure functions; its factory captures the hyper-parameters.

    The server sees only a weighted mean of messages, never one client's message: that is what secure aggregation
    allows in the field, and it is what lets the engine stream a cohort of any size through L lanes and one sum.
    """

    init_server: Callable[[Params], Any]
    """``init_server(params) -> server``, a pytree with an attribute ``params``, the global model w."""
    init_client: Callable[[Params], PyTree]
    """``init_client(params) -> client``, what ONE client keeps between its rounds; () when stateless."""
    client_update: Callable[[Any, PyTree, Work], ClientResult]
    """ONE client's round, no client axis."""
    server_update: Callable[[Any, PyTree, Round], Any]
    """``server_update(server, mean, round) -> server``; mean: the weighted mean message of the clients that answered,
    in its dtypes. Not used in a round in which nobody answered."""
    observe: Callable[[Any, Metrics], Any] | None = None
    """``observe(server, metrics) -> server``: when given, every round evaluates the new model and shows it."""
    name: str = "algorithm"
    finish: Callable[[Any, PyTree], PyTree] | None = None
    """``finish(server, client) -> client``: what ONE client of the cohort makes of the new server's variables; for
    states that depend on the round's outcome (VRL-SGD)."""
    report: Callable[[Any, PyTree, Round], Metrics] | None = None
    """``report(server, mean, round) -> scalars`` for `info`, from what `server_update` is given."""
    requires: tuple[str, ...] = ()
    """What it cannot do without: fields of `Model` ("features", "head", "extractor", "cosine"), "classifier" (the
    default loss), "sgd" (neither momentum nor another local optimizer), "accuracy" (one that is evaluated)."""


class ServerState(NamedTuple):
    """All that the next round needs. Immutable; `Simulation.round_fn` maps one to the next."""

    round: jax.Array  # int32 [], rounds done
    key: jax.Array  # never changes: round t draws from fold_in(key, t)
    server: Any  # the algorithm's server variables
    clients: PyTree  # client states, every leaf [N, ...]

    @property
    def params(self) -> Params:
        """The global model w, which `evaluate` scores (and clients are sent; FedEve sends its prediction from it)."""
        return self.server.params
