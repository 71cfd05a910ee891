"""Training a part of a model: some of its parameters (`trainable`), or low-rank adapters (`lora`).

The other parameters are frozen. The `params` of the returned model are only the trained ones. So messages, client
states, the server's variables and checkpoints have their size, and every algorithm works without a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from fedjax_drift import axes, checks, factors, leaves, spec
from fedjax_drift.leaves import by_path
from fedjax_drift.masks import like
from fedjax_drift.model import GivenModel, Model
from fedjax_drift.models import low_rank
from fedjax_drift.recipes import Frozen, recorded
from fedjax_drift.spec import Count, Fix, FloatingDtype, Positive, checked
from fedjax_drift.types import Params, PyTree

Named = dict[str, Any]  # path of a leaf -> its value
BASE = (
    "pass all parameters of this model, such as state.params, fd.models.load_params(model, file), or "
    "nnx.to_pure_dict(nnx.state(module, nnx.Param))"
)


@checked
def trainable(
    model: GivenModel, which: leaves.Selection, base: Params | None = None, *, frozen_dtype: FloatingDtype | None = None
) -> Model:
    """Returns a model that trains only some of the parameters.

    >>> import fedjax_drift as fd
    >>> head = fd.models.trainable(fd.models.lenet5(), "classifier")
    >>> jax.tree.map(jnp.shape, head.init(jax.random.key(0)))
    {'classifier/dense/bias': (62,), 'classifier/dense/kernel': (84, 62)}

    Args:
      model: the whole model.
      which: the parameters to train. A regular expression that is searched in the path of a leaf, such as
        "classifier/kernel"; or a function from this path to a bool; or a pytree with a bool for every leaf.
      base: the parameters of the whole model, such as pretrained ones. They are not copied. Training starts with the
        selected ones, and the others are frozen. Default: the frozen parameters are those of
        ``model.init(jax.random.key(0))`` for all seeds, and the trained ones are initialised with the key of the
        simulation.
      frozen_dtype: the dtype in which frozen parameters are stored. Default: their own. For a model that computes in
        bfloat16 (`Model.computing_in`), ``jnp.bfloat16`` takes half of the memory and does not change results.

    Returns:
      A model whose parameters are a dict from the path of a leaf to an array. `merge` returns those of the whole model.

    Raises:
      ValueError: ``which`` selects no leaf; or the model has running statistics that are not "frozen"; or ``base`` does
        not have the structure and shapes of the model's parameters.
    """
    model = _checked(model)
    shapes = _shapes(model)
    selected = _selected("which", which, shapes)
    if not selected:
        checks.refuse("which must select a leaf of the parameters", "a selection of none")
    _check_base(base, shapes)
    frozen = _frozen(model, base, lambda path: path not in selected, frozen_dtype)
    return _with_selected(frozen, _start(model, base, selected), model, shapes, selected)


@recorded
def _with_selected(frozen: Frozen, start: Frozen | None, model: Model, shapes: PyTree, selected: list[str]) -> Model:
    """The model of `trainable`. start: the first values of the selected parameters; None: those of ``model.init``."""

    def full(params: Params) -> Params:
        return _unnamed({**frozen.arrays(), **params}, shapes)

    adapted = _training(model, _initial(model, start, shapes, selected), full, selected)
    inner = model.products  # those of the adapters of which a part is trained
    return adapted._replace(products=None if inner is None else lambda params: inner(full(params)))


@checked
def lora(
    model: GivenModel,
    rank: Count = 8,
    where: leaves.Selection | None = None,
    alpha: Positive | None = None,
    *,
    whole: leaves.Selection | None = None,
    base: Params | None = None,
    frozen_dtype: FloatingDtype | None = None,
) -> Model:
    """Returns a model that trains low-rank adapters (LoRA, arXiv 2106.09685).

    A selected matrix W [in, out] is replaced by W + (alpha / rank) A B, with A [in, rank] and B [rank, out]. A weight
    [out, in], as in PyTorch, gets the transpose of A B (`Model.output_axes`). Only A and B are trained. W is frozen.
    A starts with uniform random numbers in +-1 / sqrt(in), as in the authors' code. B starts with zeros, so the first
    model is the base model. Products with W are computed as x W + (x A) B.

    >>> import fedjax_drift as fd
    >>> adapted = fd.models.lora(fd.models.mnist_2nn(), rank=4, where="layers_0/kernel")
    >>> fd.models.num_parameters(fd.models.mnist_2nn()), fd.models.num_parameters(adapted)
    (199210, 3936)

    Args:
      model: the whole model.
      rank: the rank of the adapters, >= 1. Default: 8.
      where: the matrices with an adapter, selected as in `trainable`. Leaves with fewer than two axes, and leaves with
        the name "bias" or "scale", are skipped. A leaf with more than two axes, such as [depth, in, out], is a stack of
        matrices, each with its own adapter. Default: all leaves with "kernel" in their path, except for matrices with a
        side shorter than ``rank``.
      alpha: the scale of the adapters, > 0. Default: ``rank``, so that the factor is 1.
      whole: parameters that are trained whole besides the adapters, such as "classifier". Default: none.
      base: the parameters of the whole model, such as pretrained ones. Default: ``model.init(jax.random.key(0))``.
      frozen_dtype: as in `trainable`.

    Returns:
      A model whose parameters are a dict from the path of a leaf to ``{"a": A, "b": B}``, or to an array for a
      parameter that is trained whole. `merge` returns the parameters of the whole model.

    Raises:
      ValueError: no matrix is selected; or ``rank`` is larger than a side of a selected matrix; or a leaf is selected
        by ``where`` and by ``whole``; or the model has running statistics that are not "frozen"; or ``base`` does not
        fit the model.
    """
    model = _checked(model)
    scale = 1.0 if alpha is None else alpha / rank
    shapes = _shapes(model)
    named_shapes = by_path(shapes)
    chosen = _selected("where", "kernel" if where is None else where, shapes)
    adapted = [path for path in chosen if _is_matrix(path, named_shapes[path])]
    places = _places(model, named_shapes, adapted)
    sides = {path: tuple(named_shapes[path].shape[axis] for axis in places[path]) for path in adapted}
    if where is None:
        adapted = [path for path in adapted if min(sides[path]) >= rank]
    trained = [] if whole is None else _selected("whole", whole, shapes)
    if not adapted:
        checks.refuse(
            f"where must select a matrix of the parameters ({checks.listed(named_shapes)})", checks.shown(where)
        )
    if both := [path for path in adapted if path in trained]:
        checks.refuse("where and whole must select different parameters", f"{both[0]} in both")
    for path in adapted:
        if rank > (side := min(sides[path])):
            checks.refuse(
                f"rank must be at most {side}, the smaller side of {path} {[*named_shapes[path].shape]}",
                rank,
                "use a smaller rank, or leave this matrix out of where=",
            )
    _check_base(base, shapes)
    frozen = _frozen(model, base, lambda path: path not in trained, frozen_dtype)
    return _with_adapters(frozen, _start(model, base, trained), model, shapes, trained, adapted, rank, scale)


@recorded
def _with_adapters(
    frozen: Frozen,
    start: Frozen | None,
    model: Model,
    shapes: PyTree,
    trained: list[str],
    adapted: list[str],
    rank: int,
    scale: float,
) -> Model:
    """The model of `lora`. trained: the parameters that are trained whole. start: their first values, as in
    `_with_selected`."""
    named_shapes, init_trained = by_path(shapes), _initial(model, start, shapes, trained)
    places = _places(model, named_shapes, adapted)

    def init(key: jax.Array) -> Params:
        keys = [jax.random.fold_in(key, i) for i in range(len(adapted))]
        adapters = {
            path: _adapter(k, named_shapes[path], rank, places[path]) for path, k in zip(adapted, keys, strict=True)
        }
        return {**init_trained(key), **adapters}

    def full(params: Params) -> Params:
        weights = {**frozen.arrays(), **{path: params[path] for path in trained}}
        for path in adapted:
            adapter, base = params[path], weights[path]
            if "w" in adapter:  # an algorithm has changed the matrix, which is not trained
                base = low_rank.plus(base, scale * lax.stop_gradient(adapter["w"]), places[path])
            weights[path] = low_rank.added(base, adapter["a"], scale * adapter["b"], places[path])
        return _unnamed(weights, shapes)

    def products(params: Params) -> factors.Matrices:
        w = factors.split(params)[1]
        return {path: scale * (w.get(path, 0) + product) for path, product in factors.products(params).items()}

    return _training(model, init, full, trained)._replace(products=products)


@checked
def merge(
    model: Annotated[Model, spec.instance(Model), Fix("pass the model that lora returned")], params: Params
) -> Params:
    """Returns the parameters of the whole model from those of a model of `trainable` or `lora`.

    Raises ValueError if the model is trained whole, or if the parameters are not those of this model.
    """
    if model.merged is None:
        checks.refuse("model must come from fd.models.trainable or fd.models.lora", "one trained whole")
    named, shapes = by_path(params), _shapes(model)
    for path, adapter in factors.adapters(shapes).items():
        if f"{path}/w" in named:  # an algorithm has changed this matrix
            shapes[path] = {**adapter, "w": jax.eval_shape(jnp.matmul, adapter["a"], adapter["b"])}
    _check_layout("params", params, shapes, "pass state.params of a simulation of this model")
    return model.merged(jax.tree.map(jnp.asarray, _unnamed(named, shapes)))


def _is_matrix(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf is a matrix or a stack of them. The stacked biases of several layers are not."""
    return leaf.ndim >= 2 and path.rpartition("/")[2] not in ("bias", "scale")


def _places(model: Model, shapes: Named, adapted: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The axes of the inputs and of the outputs of each matrix. The others are a stack of matrices."""
    return {path: axes.of_matrices(model.output_axes, path, shapes[path].ndim) for path in adapted}


def _adapter(key: jax.Array, leaf: jax.ShapeDtypeStruct, rank: int, places: tuple[int, int]) -> dict[str, jax.Array]:
    inputs, outputs = (leaf.shape[axis] for axis in places)
    leading = [n for axis, n in enumerate(leaf.shape) if axis not in places]
    limit = 1 / math.sqrt(inputs)
    a = jax.random.uniform(key, (*leading, inputs, rank), leaf.dtype, -limit, limit)
    return {"a": a, "b": jnp.zeros((*leading, rank, outputs), leaf.dtype)}


def _training(
    model: Model, init: Callable[[jax.Array], Params], full: Callable[[Params], PyTree], whole: Sequence[str]
) -> Model:
    """The model with other parameters. ``full(params)`` returns those of the whole model, which may be low-rank.

    whole: those that keep their layout. The matrices A and B are [..., in, out].
    """

    def with_full(function: Callable[..., Any]) -> Callable[..., Any]:
        def forward(params: Params, *inputs: jax.Array) -> Any:
            params = _replicated_in_team(params)
            outputs, dtypes = low_rank.applied(function, full(params), *inputs), jax.tree.leaves(params)
            return jax.tree.map(lambda a: a.astype(jnp.result_type(a, *dtypes)), outputs)  # the base may be bfloat16

        return forward

    inner = model.merged or (lambda params: params)  # adapters of an adapted model
    merged = lambda params: inner(low_rank.matrices(full(params)))  # noqa: E731
    kept = {path.removeprefix("params/"): axes.of_path(model.output_axes, path) for path in whole}
    return model.with_functions(with_full)._replace(init=init, merged=merged, output_axes=kept or None)


def _replicated_in_team(params: Params) -> Params:
    """The parameters, and their gradients, on all devices that train a client together (`devices.mesh`).

    Otherwise XLA shards them like the frozen matrices, and then gathers the states of all clients in every round.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Auto not in mesh.axis_types:
        return params
    return jax.lax.with_sharding_constraint(params, PartitionSpec())


def _checked(model: Model) -> Model:
    """The model. Frozen running statistics (BatchNorm) become parameters like others."""
    if model.statistics is None:
        return model
    kept, forward = model.statistics.kept, model.statistics.forward
    if kept != "frozen":
        checks.refuse(
            'statistics must be "frozen" for a model of which only a part is trained',
            f"{kept!r}",
            'create the model with statistics="frozen", or replace BatchNorm by GroupNorm',
        )

    def train_apply(params: Params, x: jax.Array, key: jax.Array, *mask: jax.Array) -> jax.Array:
        (all_or_given,) = mask or (jnp.ones(len(x), bool),)
        return forward(params["params"], params["batch_stats"], x, key, all_or_given, "apply")[0]

    return model._replace(statistics=None, train_apply=like(model.apply, train_apply))


def _shapes(model: Model) -> PyTree:
    return jax.eval_shape(model.init, jax.random.key(0))


def _selected(name: str, selection: leaves.Selection, shapes: PyTree) -> list[str]:
    """The paths of the selected leaves. Running statistics are never selected."""
    mask = jax.tree.leaves(leaves.select(name, selection, shapes))
    selected = [path for path, chosen in zip(by_path(shapes), mask, strict=True) if chosen]
    return [path for path in selected if not path.startswith("batch_stats/")]


def _frozen(model: Model, base: Params | None, wanted: Callable[[str], bool], dtype: Any = None) -> Frozen:
    """Parameters of the base, by path."""

    def stored(value: jax.Array) -> jax.Array:
        return value if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating) else value.astype(dtype)

    def parameters(key: jax.Array) -> Named:
        named = by_path(model.init(key) if base is None else base)
        return {path: stored(value) for path, value in named.items() if wanted(path)}

    return Frozen.of(lambda: (jax.jit(parameters) if base is None else parameters)(jax.random.key(0)))


def _start(model: Model, base: Params | None, paths: Sequence[str]) -> Frozen | None:
    """The first values of the parameters with these paths, if a base is given."""
    return _frozen(model, base, lambda path: path in paths) if paths and base is not None else None


def _initial(model: Model, start: Frozen | None, shapes: PyTree, paths: Sequence[str]) -> Callable[[jax.Array], Named]:
    """The function from a key to the first values of the parameters with these paths."""
    if not paths:
        return lambda key: {}
    if start is None:
        return lambda key: {path: value for path, value in by_path(model.init(key)).items() if path in paths}
    dtypes = by_path(shapes)
    return lambda key: {path: jnp.asarray(value, dtypes[path].dtype) for path, value in start.arrays().items()}


def _check_layout(name: str, params: Any, shapes: PyTree, fix: str) -> None:
    """Raises ConfigurationError unless the parameters have these shapes. They may have other dtypes."""
    got, wanted = ({path: jnp.shape(leaf) for path, leaf in by_path(each).items()} for each in (params, shapes))
    if wrong := [path for path in {**wanted, **got} if got.get(path) != wanted.get(path)]:
        shown = [list(each[wrong[0]]) if wrong[0] in each else "nothing" for each in (wanted, got)]
        checks.refuse(f"{name} must have {shown[0]} at {wrong[0]}", shown[1], fix)


def _check_base(base: Params | None, shapes: PyTree) -> None:
    """Raises ConfigurationError for a base of other shapes, or that is not floating-point where the model is."""
    if base is None:
        return
    _check_layout("base", base, shapes, BASE)
    for (path, value), wanted in zip(by_path(base).items(), by_path(shapes).values(), strict=True):
        kind = getattr(value, "dtype", np.asarray(value).dtype)
        if jnp.issubdtype(wanted.dtype, jnp.floating) and not jnp.issubdtype(kind, jnp.floating):
            checks.refuse(f"base must have a floating dtype at {path}", kind, BASE)


def _unnamed(named: Named, shapes: PyTree) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(shapes), [named[path] for path in by_path(shapes)])
