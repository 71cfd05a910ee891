"""Builds the functions of a `Model` from a flax module. See `Model.from_linen` and `Model.from_nnx`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift import axes, batch_norm, checks, masks
from fedjax_drift.batch_norm import Kept, Statistics, collections, linen_call, whole
from fedjax_drift.checks import first_line
from fedjax_drift.errors import ConfigurationError

Params = Any
PyTree = Any
EQUINOX = """static = eqx.partition(Net(jax.random.key(0)), eqx.is_inexact_array)[1]
apply = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
model = fd.Model(lambda key: eqx.partition(Net(key), eqx.is_inexact_array)[0], apply)"""
HAIKU = """network = hk.without_apply_rng(hk.transform(forward))
init = lambda key: network.init(key, x)
model = fd.Model(init, network.apply)"""
METHODS = {"apply": "__call__", "features": "features"}  # what `Statistics.forward` calls


def linen_fields(
    module: Any, input_shape: tuple[int, ...], statistics: Kept | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of a `Model`, with those in ``options`` replaced. See `Model.from_linen`."""
    from flax import linen
    from flax.traverse_util import flatten_dict

    is_linen = isinstance(module, linen.Module)
    if not is_linen:
        checks.refuse("module must be an instance of a flax.linen.Module", _kind(module), _instead(module, "linen"))
    example = example_of(input_shape, options)
    training, evaluating = (_mode(module, "__call__", train) for train in (True, False))

    def init(key: jax.Array) -> Params:
        params_key, dropout_key = jax.random.split(key)
        zeros = jnp.zeros(example.shape, example.dtype)
        given = _mask(module, "__call__", jnp.ones(1, bool))
        variables = module.init({"params": params_key, "dropout": dropout_key}, zeros, **evaluating, **given)
        return variables["params"] if kept is None else whole(variables["params"], variables["batch_stats"])

    tables: list[int] = []  # the numbers of ids of the tables in which the module looks up its inputs themselves

    def variables_of(x: jax.Array) -> Any:
        key = jax.random.key(0)  # created while tracing, so that loading a model does not start JAX's backend
        with linen.intercept_methods(note_tables(x)):
            given = _mask(module, "__call__", jnp.ones(1, bool))
            return module.init({"params": key, "dropout": key}, x, **evaluating, **given)

    def note_tables(x: jax.Array) -> Any:
        def note(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if isinstance(context.module, linen.Embed) and any(value is x for value in (*args, *kwargs.values())):
                tables.append(context.module.num_embeddings)
            return next_call(*args, **kwargs)

        return note

    layers: dict[tuple[str, ...], Any] = {}
    with batch_norm.noting(layers):
        variables = _traced(module, variables_of, example)
    if extra := sorted(set(variables) - {"params", "batch_stats"}):
        what = f"{type(module).__name__} must have no variables except parameters and running statistics"
        checks.refuse(what, checks.listed(extra), "leave them out")
    statistics_of = flatten_dict(variables.get("batch_stats", {}))
    owners = [layers.get(path[:-1], layers[()]) for path in statistics_of] or None
    kept = batch_norm.check(type(module).__name__, owners, statistics)

    def method(name: str) -> Any:
        if not callable(getattr(type(module), name, None)):
            return None
        mode = _mode(module, name, False)

        def forward(params: Params, x: jax.Array, *mask: jax.Array) -> Any:
            return linen_call(module, collections(params, kept), x, kept, mode | masks.named(mask), name)

        return masks.like(getattr(type(module), name), forward)

    def train_apply(params: Params, x: jax.Array, key: jax.Array, *mask: jax.Array) -> jax.Array:
        return module.apply({"params": params}, x, **training, **masks.named(mask), rngs={"dropout": key})

    def forward(
        params: Params, statistics: PyTree, x: jax.Array, key: jax.Array, mask: jax.Array, name: str
    ) -> tuple[jax.Array, PyTree]:
        mode = _mode(module, METHODS[name], True)
        if kept != "frozen" and not mode:
            checks.refuse(
                f"{METHODS[name]} of {type(module).__name__} must have an argument train",
                "none",
                "write nn.BatchNorm(use_running_average=not train)",
            )
        options = {"mutable": ["batch_stats"], "rngs": {"dropout": key}, **mode, **_mask(module, METHODS[name], mask)}
        output, new = linen_call(module, collections(params, kept, statistics), x, kept, options, METHODS[name], mask)
        return output, new["batch_stats"]

    fields = {
        "init": init,
        "apply": method("__call__"),
        "train_apply": masks.like(type(module).__call__, train_apply) if training and kept is None else None,
        **{name: method(name) for name in ("features", "head", "extractor")},
        "cosine": bool(getattr(module, "cosine", False)),
        "vocabulary": min(tables, default=None),
        "output_axes": axes.of_layers(layers, variables["params"]),
    }
    if kept is not None:
        fields["statistics"] = Statistics(kept, forward)
        _try_training(fields, module, example)
    return fields | options


def _mode(module: Any, method: str, train: bool) -> dict[str, bool]:
    """The argument that switches a method of a linen module between training and evaluation; {} if it has none."""
    arguments = inspect.signature(getattr(type(module), method)).parameters
    if "train" in arguments:  # flax has two conventions for this argument
        return {"train": train}
    return {"deterministic": not train} if "deterministic" in arguments else {}


def _mask(module: Any, method: str, mask: jax.Array) -> dict[str, jax.Array]:
    """The argument with the mask of the batch for a method of a module; {} if it takes none."""
    return {"mask": mask} if masks.takes_mask(getattr(type(module), method)) else {}


def _traced(module: Any, function: Callable[..., Any], example: jax.ShapeDtypeStruct) -> Any:
    """What a function of examples returns. Raises ConfigurationError if the module does not accept them."""
    try:
        return jax.eval_shape(function, example)
    except Exception as error:
        checks.refuse(
            f"input_shape must be one that {type(module).__name__} accepts",
            example.shape[1:],
            "use a model for this shape, or pass the shape of its inputs, such as (28, 28, 1); for token ids also pass "
            f"input_dtype=jnp.int32 ({first_line(error)})",
            error,
        )


def _try_training(fields: dict[str, Any], module: Any, example: jax.ShapeDtypeStruct) -> None:
    """Traces a model with running statistics in training and in evaluation, so that its errors come early."""

    def both(x: jax.Array) -> Any:
        key = jax.random.key(0)
        model = fields["init"](key)
        mask = jnp.ones(x.shape[0], bool)
        training = fields["statistics"].forward(model["params"], model["batch_stats"], x, key, mask, "apply")
        return training, masks.bound(fields["apply"], mask)(model, x)

    try:
        jax.eval_shape(both, jax.ShapeDtypeStruct((2, *example.shape[1:]), example.dtype))
    except ConfigurationError:
        raise
    except Exception as error:
        checks.refuse(
            f"{type(module).__name__} must accept a batch of 2 in training and in evaluation",
            "an error",
            f"write BatchNorm(use_running_average=not train) ({first_line(error)})",
            error,
        )


def nnx_fields(
    module: Any, input_shape: tuple[int, ...] | None, statistics: Kept | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of a `Model`, with those in ``options`` replaced. See `Model.from_nnx`."""
    from flax import nnx

    example_input = example_of(() if input_shape is None else input_shape, options)
    if not isinstance(module, nnx.Module) and (not callable(module) or _instead(module, "nnx")):
        fix = _instead(module, "nnx") or "pass the module itself, before nnx.split, or lambda rngs: Net(rngs)"
        checks.refuse("module must be an nnx.Module, or a function nnx.Rngs -> nnx.Module", _kind(module), fix)

    def create(key: jax.Array) -> Any:
        what = "module must be a function nnx.Rngs -> nnx.Module"
        try:
            instance = module if isinstance(module, nnx.Module) else module(nnx.Rngs(key))
        except Exception as error:
            checks.refuse(what, "an error from it", first_line(error), error)
        if not isinstance(instance, nnx.Module):
            checks.refuse(what, f"one that returns {_kind(instance)}", "return the module")
        return instance

    def split(instance: Any) -> tuple[Any, Any, Any, Any]:
        graph, params, statistics, rest = nnx.split(instance, nnx.Param, nnx.BatchStat, ...)  # type: ignore[misc]
        return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(statistics), rest

    example = nnx.eval_shape(lambda: create(jax.random.key(0)))  # without arrays: a module may be large
    graph, _, _, rest = split(example)
    if jax.tree.leaves(rest):  # for example, the state of dropout's random numbers
        rest = jax.jit(lambda: split(create(jax.random.key(0)))[3])()
    kept = batch_norm.check(type(example).__name__, batch_norm.nnx_owners(example), statistics)
    streams = sorted({state.tag for _, state in nnx.iter_graph(example) if isinstance(state, nnx.RngKey)})

    def merge(variables: dict[str, PyTree], train: bool, key: jax.Array | None = None, mask: Any = None) -> Any:
        states = [nnx.State(state) for state in variables.values()]
        instance = nnx.merge(graph, *states, rest, copy=True)
        (instance.train if train else instance.eval)()
        if key is not None:
            keys: dict[str, Any] = {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}
            nnx.reseed(instance, **keys)
        batch_norm.prepare_nnx(instance, kept, mask)
        return instance

    def method(name: str) -> Any:
        if not callable(getattr(type(example), name, None)):
            return None

        def forward(params: Params, x: jax.Array, *mask: jax.Array) -> Any:
            return getattr(merge(collections(params, kept), train=False), name)(x, **masks.named(mask))

        return masks.like(getattr(type(example), name), forward)

    def train_apply(params: Params, x: jax.Array, key: jax.Array, *mask: jax.Array) -> jax.Array:
        return merge(collections(params, kept), True, key)(x, **masks.named(mask))

    def forward(
        params: Params, statistics: PyTree, x: jax.Array, key: jax.Array, mask: jax.Array, name: str
    ) -> tuple[jax.Array, PyTree]:
        instance = merge(collections(params, kept, statistics), True, key, mask)
        output = getattr(instance, METHODS[name])(x, **_mask(instance, METHODS[name], mask))
        return output, nnx.to_pure_dict(nnx.state(instance, nnx.BatchStat))

    def init(key: jax.Array) -> Params:
        _, params, running, _ = split(create(key))
        return params if kept is None else whole(params, running)

    parts = {path: part for path, part in nnx.iter_graph(example) if isinstance(part, nnx.Module)}
    fields: dict[str, Any] = {
        "init": init,
        "apply": method("__call__"),
        "train_apply": masks.like(type(example).__call__, train_apply) if streams and kept is None else None,
        **{name: method(name) for name in ("features", "head", "extractor")},
        "output_axes": axes.of_layers(parts, split(example)[1]),
    }
    tables = [part.num_embeddings for part in parts.values() if isinstance(part, nnx.Embed)]
    if len(tables) == 1 and jnp.issubdtype(example_input.dtype, jnp.integer):
        fields["vocabulary"] = tables[0]
    if input_shape is not None:
        apply = masks.bound(fields["apply"], jnp.ones(1, bool))
        _traced(example, lambda x: apply(fields["init"](jax.random.key(0)), x), example_input)
    if kept is not None:
        fields["statistics"] = Statistics(kept, forward)
        if input_shape is not None:
            _try_training(fields, example, example_input)
    return fields | options


def example_of(input_shape: tuple[int, ...], options: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a batch of one example. Removes ``input_dtype`` from the options."""
    input_dtype = options.pop("input_dtype", jnp.float32)
    is_number = lambda dtype: dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)  # noqa: E731
    dtype = checks.dtype("input_dtype", input_dtype, "a dtype of numbers such as jnp.int32", is_number)
    return jax.ShapeDtypeStruct((1, *input_shape), dtype)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else checks.type_of(value)


def _instead(module: Any, wanted: str) -> str:
    """Returns the advice for a module of the wrong kind, or for a class instead of an instance. "" if there is none."""
    from flax import linen, nnx

    kinds = module.__mro__ if isinstance(module, type) else type(module).__mro__
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    if "equinox" in packages:
        return f"for an Equinox module write\n{EQUINOX}"
    if "haiku" in packages:
        return f"for a Haiku transform write, with a batch x,\n{HAIKU}"
    if wanted == "linen" and issubclass(kinds[0], nnx.Module):
        return "use Model.from_nnx"
    if wanted == "nnx" and issubclass(kinds[0], linen.Module):
        return "use Model.from_linen(module, input_shape)"
    if wanted == "linen":
        return "pass Net(), an instance" if isinstance(module, type) else "use fd.Model(init, apply)"
    return ""
