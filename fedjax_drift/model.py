"""`Model`: the network that clients train, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_drift import checks, masks, recipes, spec
from fedjax_drift.batch_norm import Kept, Statistics, whole
from fedjax_drift.recipes import Recipe, recorded
from fedjax_drift.spec import Fix, Flag, FloatingDtype, Shape, Text, checked
from fedjax_drift.tree import PyTree

Params = PyTree
FUNCTIONS = {"apply": 2, "train_apply": 3, "features": 2, "head": 2, "extractor": 2}
"""The functions of the parameters, and how many arguments they take, apart from a mask of the batch."""


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

    A short batch is padded to B examples, so the output of an example must not depend on the others of its batch.
    This is checked when a `Simulation` is created. Where it should depend on them, the functions and the loss take the
    mask of the batch, bool [B], as a last argument ``mask`` without a default: ``apply(params, x, mask)``,
    ``train_apply(params, x, key, mask)``, ``loss(logits, y, mask)``. It is False for padding, of which the outputs of
    the examples must be independent. The outputs of the padding are not used, and must be finite. See
    ``docs/models.md``.

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
      products: ``products(params) -> {path: [..., in, out]}``, what low-rank adapters add to each matrix. None for a
        model without adapters.
      vocabulary: The number of token ids, if the inputs are ids. They are then checked to be in 0..vocabulary - 1. (JAX
        reads NaN for a larger id, and the last row of the table for the id -1.) A tuple has one number per position of
        an example, and its last number holds for all further positions. None: the inputs are not checked.
      output_axes: The axes along which the parameters have their outputs, for algorithms that need them (FedSOL) and
        for `fd.models.lora`: a dict from the path of a parameter to an axis, or to a tuple of axes, such as
        ``{"dense/weight": 0}``; or one axis for all. A parameter that is not in the dict has its outputs on the last
        axis, as a kernel [..., in, out] does. Paths have no "params/" in front. None: all are on the last axis.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., jax.Array]
    loss: Callable[..., jax.Array] = cross_entropy
    train_apply: Callable[..., jax.Array] | None = None
    features: Callable[..., jax.Array] | None = None
    head: Callable[..., jax.Array] | None = None
    extractor: Callable[..., jax.Array] | None = None
    cosine: bool = False
    scores: Callable[[jax.Array, jax.Array], dict[str, jax.Array]] | None = None
    statistics: Statistics | None = None

    merged: Callable[[Params], Params] | None = None
    vocabulary: int | tuple[int, ...] | None = None
    output_axes: Mapping[str, int | tuple[int, ...]] | int | None = None
    products: Callable[[Params], dict[str, jax.Array]] | None = None
    recipe: Recipe | None = None  # how the model was made

    @property
    def frozen(self) -> tuple[recipes.Frozen, ...]:
        """The parameters that are not trained (`fd.models.lora`)."""
        return recipes.frozen(self)

    def __repr__(self) -> str:
        given = [name for name in self._fields[:-1] if getattr(self, name) not in (None, False)]
        return f"Model({', '.join(given)})"

    @recorded
    def computing_in(self, dtype: FloatingDtype) -> Model:
        """Returns the same model with a forward pass in ``dtype``, such as ``jnp.bfloat16``.

        Parameters and floating-point inputs are cast to ``dtype`` at the start of the forward pass. The logits are cast
        back to the dtype of the parameters before the loss. Gradients and updates have the dtype of the parameters.
        Running statistics keep their dtype.

        With bfloat16, an accelerator multiplies matrices faster. The precision is 8 bits with bfloat16, 11 bits with
        TF32 and 24 bits with float32.

        Raises ValueError if the model has frozen parameters. Call it on the whole model, before `fd.models.lora` or
        `fd.models.trainable`.
        """
        if self.merged is not None:
            checks.refuse(
                "computing_in must be called on the whole model",
                "one with frozen parameters",
                "fd.models.lora(model.computing_in(dtype), ...)",
            )

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
        given = {name: function for name in FUNCTIONS if (function := getattr(self, name)) is not None}
        changed: dict[str, Any] = {name: masks.like(function, change(function)) for name, function in given.items()}
        return self._replace(**changed)

    def with_mask(self, mask: jax.Array | None) -> Model:
        """Returns the model for a batch with this mask, bool [B]: no function of it has an argument ``mask``.

        >>> import fedjax_drift as fd
        >>> apply = lambda w, x, mask: x * w - jnp.mean(x * w, where=mask)
        >>> model = fd.Model(init=lambda key: jnp.ones(()), apply=apply)
        >>> model.with_mask(jnp.array([True, True, False])).apply(2.0, jnp.array([1.0, 2.0, 9.0])).tolist()
        [-1.0, 1.0, 15.0]

        A model without such functions is returned as it is.
        """
        taking = [name for name in (*FUNCTIONS, "loss") if masks.takes_mask(getattr(self, name))]
        taken: dict[str, Any] = {name: masks.bound(getattr(self, name), mask) for name in taking}
        return self._replace(**taken) if taken else self

    @classmethod
    @recorded
    def from_linen(cls, module: Any, input_shape: Shape, *, statistics: Kept | None = None, **options: Any) -> Model:
        """Creates a model from a ``flax.linen`` module.

        If ``__call__`` of the module has an argument ``train`` or ``deterministic``, the library passes the right value
        in training and in evaluation. In training it also passes a "dropout" key. An argument ``mask`` without a
        default gets the mask of the batch, bool [B], which is False for padding. If the module has the methods
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
    @recorded
    def from_nnx(
        cls, module: Any, input_shape: Shape | None = None, *, statistics: Kept | None = None, **options: Any
    ) -> Model:
        """Creates a model from a ``flax.nnx`` module, or from a function ``nnx.Rngs -> module``.

        A function is called with random numbers from the initialisation key, so every seed gives different initial
        parameters. A module already has parameters. They are the initial parameters for every seed. The same holds for
        the running statistics of BatchNorm.

        An argument ``mask``, ``statistics`` and ``options`` are as in `from_linen`. The ``vocabulary`` of a module with
        token ids is that of its ``nnx.Embed``, if it has exactly one. ``input_shape`` is optional. If it is given, the
        model is checked with an input of this shape.
        """
        from fedjax_drift import adapters

        return cls(**adapters.nnx_fields(module, input_shape, statistics, options))

    @classmethod
    @checked
    def from_torch(
        cls,
        module: Any,
        input_shape: Shape,
        *,
        statistics: Kept | None = None,
        head: Text | None = None,
        extractor: Text | None = None,
        channels_last: Flag = True,
        check: Flag = True,
        **options: Any,
    ) -> Model:
        """Creates a model from a ``torch.nn.Module``. PyTorch itself takes no part in a round.

        The module is translated to JAX operations by way of ``torch.export``: once in training mode, with dropout, and
        once in evaluation mode. It is not changed. Its only output must be the logits. Of a Hugging Face model, they
        are used if it returns more. The parameters have PyTorch's names and layouts, so that ``fd.models.to_torch``
        returns a state dict: ``params["conv1"]["weight"]`` is "conv1.weight".

        The translation is compared with the module once: its logits, its running statistics and the gradient of a
        random projection of the logits, in training and in evaluation, on random batches of 7, 1, 2 and 3 examples and
        with random numbers replaced by their means. So what ``torch.export`` does not see, such as hooks on gradients,
        counters and random numbers of NumPy, is an error and no other model.

        Args:
          module: an instance. Its values are the initial parameters for every seed, and only those with
            ``requires_grad=True`` are trained. Or a class or a function without arguments, such as ``lambda:
            Net(10)``: then PyTorch's own initialisers give other parameters for each key, and all are trained.
          input_shape: the shape of one example of the federation, without the batch axis.
          statistics: what happens to the running statistics of BatchNorm, as in `from_linen`.
          head: the path of the submodule that is the classifier, such as "fc". Its input [B, F] are the ``features`` of
            the model, which MOON, FedDecorr and LfD need. Default: the model has no features.
          extractor: the path of the submodule whose output is the ``extractor`` of the model. Default: none.
          channels_last: examples with three axes are images [H, W, C], which the module gets as [C, H, W]. False: the
            module gets them as they are. Default: True.
          check: compare the translation with the module. False saves about half of the time, and takes what
            differs. Default: True.
          options: fields of `Model` to replace, such as ``loss=``, and ``input_dtype``, as in `from_linen`.

        Raises:
          ImportError: PyTorch is not installed.
          ValueError: the module does not accept the input shape, returns several arrays, changes its buffers, or has
            conditions or shapes that depend on values or on the length of the batch; it has an operation that is not
            covered; the translation differs from the module; ``statistics`` is missing, or the opposite; ``head`` or
            ``extractor`` is no path of a submodule with one array.
        """
        from fedjax_drift.adapters import example_of
        from fedjax_drift.pytorch import network

        example = example_of(input_shape, options)
        torch_module = network.made_module(module)
        name = type(torch_module).__name__
        with network.shown(f"Model.from_torch: {name} is translated"):
            source = network.translated(module, torch_module, example, channels_last)
        made = _of_torch(source, statistics, head, extractor, channels_last, options)
        network.check(made._asdict(), source.network, example, head)
        if check:
            with network.shown(f"Model.from_torch: {name} is compared with its translation"):
                network.compare(source, torch_module, example, channels_last)
        return made


@recorded
def _of_torch(
    source: Any, statistics: Kept | None, head: str | None, extractor: str | None, channels_last: bool, options: dict
) -> Model:
    """The model of `Model.from_torch`. source: the translated module."""
    from fedjax_drift.pytorch import network

    return Model(**(network.fields(source, statistics, head, extractor, channels_last) | options))


GivenModel = Annotated[Model, spec.instance(Model), Fix("fd.models.lenet5(), for example")]


class Part(NamedTuple):
    """How `local.train` treats a part of the model that stays with the client (`fd.algorithms.partly_shared`), or that
    is not trained in this round (`fd.algorithms.rolora`)."""

    personal: PyTree  # a bool for every leaf of the parameters: it stays with the client, and `correct` skips it
    trained: PyTree  # likewise: it is trained. Or an array of bools that broadcasts to the leaf
    own: Callable[[Params], PyTree]  # ``own(theta)`` is what the client keeps of the local model
    handed_over: Callable[[Params], Params]  # ``handed_over(theta)`` is the model that `local.train` returns for theta
