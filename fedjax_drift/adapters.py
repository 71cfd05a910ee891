"""Builds the functions of a `Model` from a flax module. See `Model.from_linen` and `Model.from_nnx`."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_drift import checks
from fedjax_drift.checks import first_line
from fedjax_drift.errors import ConfigurationError

Params = Any


def linen_fields(module: Any, input_shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `Model`, with those in ``options`` replaced. See `Model.from_linen`."""
    _check_linen(module)
    example = _example(input_shape, options)
    # flax has two conventions for the argument that switches dropout on or off.
    arguments = inspect.signature(type(module).__call__).parameters
    training: dict[str, bool] = {}
    evaluating: dict[str, bool] = {}
    if "train" in arguments:
        training, evaluating = {"train": True}, {"train": False}
    elif "deterministic" in arguments:
        training, evaluating = {"deterministic": False}, {"deterministic": True}

    def init(key: jax.Array) -> Params:
        params_key, dropout_key = jax.random.split(key)
        zeros = jnp.zeros(example.shape, example.dtype)
        return module.init({"params": params_key, "dropout": dropout_key}, zeros, **evaluating)["params"]

    def variables_of(x: jax.Array) -> Any:
        key = jax.random.key(0)  # created while tracing, so that loading a model does not start JAX's backend
        return module.init({"params": key, "dropout": key}, x, **evaluating)

    try:
        variables = jax.eval_shape(variables_of, example)
    except Exception as error:
        raise ConfigurationError(
            f"{type(module).__name__} does not accept examples of shape {tuple(input_shape)}: use a model for this "
            "shape, or pass the input_shape that the model accepts, such as (28, 28, 1); for token ids also pass "
            f"input_dtype=jnp.int32 ({first_line(error)})"
        ) from error
    if extra := sorted(set(variables) - {"params"}):
        raise ConfigurationError(
            f"a model must have no variables except parameters, but {type(module).__name__} has {', '.join(extra)}: "
            "replace BatchNorm by GroupNorm (fd.models.layers.GroupNorm or flax.linen.GroupNorm)"
        )

    def method(name: str) -> Any:
        if not callable(getattr(type(module), name, None)):
            return None
        return lambda params, x: module.apply({"params": params}, x, method=name)

    def train_apply(params: Params, x: jax.Array, key: jax.Array) -> jax.Array:
        return module.apply({"params": params}, x, **training, rngs={"dropout": key})

    fields = {
        "init": init,
        "apply": lambda params, x: module.apply({"params": params}, x, **evaluating),
        "train_apply": train_apply if training else None,
        "features": method("features"),
        "head": method("head"),
        "extractor": method("extractor"),
        "cosine": bool(getattr(module, "cosine", False)),
    }
    return fields | options


def nnx_fields(module: Any, input_shape: tuple[int, ...] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `Model`, with those in ``options`` replaced. See `Model.from_nnx`."""
    from flax import nnx

    example_input = _example(() if input_shape is None else input_shape, options)
    if not isinstance(module, nnx.Module) and (not callable(module) or _instead(module, "nnx")):
        fix = _instead(module, "nnx") or "pass the module itself, before nnx.split, or lambda rngs: Net(rngs)"
        what = "an nnx.Module, or a function nnx.Rngs -> nnx.Module"
        raise ConfigurationError(f"module must be {what}, got {_kind(module)}: {fix}")

    def create(key: jax.Array) -> Any:
        try:
            instance = module if isinstance(module, nnx.Module) else module(nnx.Rngs(key))
        except Exception as error:
            raise ConfigurationError(
                f"module must be a function nnx.Rngs -> nnx.Module, got an error from it: {first_line(error)}"
            ) from error
        if not isinstance(instance, nnx.Module):
            raise ConfigurationError(
                f"module must be a function nnx.Rngs -> nnx.Module, but it returned {_kind(instance)}: return the "
                "module"
            )
        return instance

    def split(instance: Any) -> tuple[Any, Any, Any]:
        graph, params, rest = nnx.split(instance, nnx.Param, ...)  # type: ignore[misc]
        return graph, nnx.to_pure_dict(params), rest

    example = create(jax.random.key(0))
    graph, _, rest = split(example)
    if nnx.state(example, nnx.BatchStat):
        raise ConfigurationError(
            f"a model must have no variables except parameters, but {type(example).__name__} has running statistics: "
            "replace BatchNorm by GroupNorm"
        )
    streams = sorted({state.tag for _, state in nnx.iter_graph(example) if isinstance(state, nnx.RngKey)})

    def merge(params: Params, train: bool, key: jax.Array | None = None) -> Any:
        instance = nnx.merge(graph, nnx.State(params), rest, copy=True)
        (instance.train if train else instance.eval)()
        if key is not None:
            keys: dict[str, Any] = {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}
            nnx.reseed(instance, **keys)
        return instance

    def method(name: str) -> Any:
        if not callable(getattr(type(example), name, None)):
            return None
        return lambda params, x: getattr(merge(params, train=False), name)(x)

    if input_shape is not None:
        try:
            jax.eval_shape(lambda x: merge(split(example)[1], train=False)(x), example_input)
        except Exception as error:
            raise ConfigurationError(
                f"{type(example).__name__} does not accept examples of shape {example_input.shape[1:]}: pass the "
                "input_shape that the model accepts; for token ids also pass input_dtype=jnp.int32 "
                f"({first_line(error)})"
            ) from error

    fields = {
        "init": lambda key: split(create(key))[1],
        "apply": lambda params, x: merge(params, train=False)(x),
        "train_apply": (lambda params, x, key: merge(params, True, key)(x)) if streams else None,
        "features": method("features"),
        "head": method("head"),
        "extractor": method("extractor"),
    }
    return fields | options


def _example(input_shape: Any, options: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a batch of one example. Removes ``input_dtype`` from the options."""
    input_dtype = options.pop("input_dtype", jnp.float32)
    try:
        dtype = jnp.dtype(input_dtype)
    except TypeError as error:
        raise ConfigurationError(
            f"input_dtype must be a dtype such as jnp.int32, got {checks.shown(input_dtype)}"
        ) from error
    return jax.ShapeDtypeStruct((1, *checks.shape("input_shape", input_shape)), dtype)


def _check_linen(module: Any) -> None:
    from flax import linen

    if not isinstance(module, linen.Module):
        raise ConfigurationError(
            f"module must be an instance of a flax.linen.Module, got {_kind(module)}: {_instead(module, 'linen')}"
        )


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _instead(module: Any, wanted: str) -> str:
    """Returns the advice for a module of the wrong kind, or for a class instead of an instance. "" if there is none."""
    from flax import linen, nnx

    kinds = module.__mro__ if isinstance(module, type) else type(module).__mro__
    if any(kind.__module__.partition(".")[0] == "equinox" for kind in kinds):
        return (
            "for an Equinox module use fd.Model(init=lambda key: eqx.partition(Net(key), eqx.is_inexact_array)[0], "
            "apply=lambda params, x: jax.vmap(eqx.combine(params, static))(x))"
        )
    if wanted == "linen" and issubclass(kinds[0], nnx.Module):
        return "use Model.from_nnx"
    if wanted == "nnx" and issubclass(kinds[0], linen.Module):
        return "use Model.from_linen(module, input_shape)"
    if wanted == "linen":
        return "pass Net(), an instance" if isinstance(module, type) else "use fd.Model(init, apply)"
    return ""
