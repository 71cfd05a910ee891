"""The fields of a `Model` from a PyTorch module. See `Model.from_torch`."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_drift import axes, batch_norm, checks
from fedjax_drift.batch_norm import Kept, Statistics, collections, whole
from fedjax_drift.checks import first_line
from fedjax_drift.errors import ConfigurationError, MissingPackageError
from fedjax_drift.pytorch import comparison, export, graph, reading
from fedjax_drift.pytorch.graph import Graph
from fedjax_drift.pytorch.operations.images import Images
from fedjax_drift.pytorch.operations.mode import Mode
from fedjax_drift.pytorch.run import run
from fedjax_drift.recipes import Frozen
from fedjax_drift.tree import PyTree

Named = dict[str, np.ndarray]  # by the name in PyTorch's state dict
Params = Any
nested = partial(unflatten_dict, sep=".")  # {"conv1.weight": w} -> {"conv1": {"weight": w}}
flat = partial(flatten_dict, sep=".")


class Network:
    """A module in training and in evaluation, as operations. Two networks with the same operations are equal.

    The values of the parameters are not a part of it.
    """

    def __init__(self, name: str, training: Graph, evaluation: Graph, shapes: dict[str, jax.ShapeDtypeStruct]) -> None:
        self.name, self.training, self.evaluation, self.shapes = name, training, evaluation, shapes
        digest = hashlib.sha256(repr(shapes).encode())
        for each in (training, evaluation):
            digest.update(each.text().encode())
            for values in each.constants.values():
                digest.update(f"{values.dtype}{values.shape}".encode() + np.ascontiguousarray(values).tobytes())
        self.digest = digest.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Network) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Network({self.name}, {self.digest})"

    @property
    def statistics(self) -> list[str]:
        """The names of the running statistics."""
        return [name for name in self.shapes if name in self.training.updates or name in _statistics(self.evaluation)]


class Translated(NamedTuple):
    """A module as the arguments of `model.of_network`, which a recipe can keep."""

    network: Network
    base: Frozen | None  # the values of the module, by name; None: those of a new one for each key
    trained: tuple[str, ...]  # the names of the parameters that are trained
    make: Callable[[], Any] | None  # makes a new module


def translated(module: Any, made: Any, example: jax.ShapeDtypeStruct, channels_last: bool) -> Translated:
    """Reads ``made``: the module itself, or that which ``module`` makes. It is not changed."""
    export.check_module(made)
    batch = _batch_of_two(example, channels_last)
    if any(getattr(part, "momentum", 0) is None for part in made.modules()):
        checks.refuse(
            "momentum of BatchNorm must be a number",
            f"None, a cumulative average, in {type(made).__name__}",
            "pass momentum=0.1, which is PyTorch's default",
        )
    names = _first_names(made)
    training = _renamed(reading.traced(made, batch, True), names)
    evaluation = _renamed(reading.traced(made, batch, False, training.updates), names)
    statistics = {*_statistics(evaluation), *training.updates}
    values = {name: reading.array(each) for name, each in made.named_parameters()}
    if not values:
        checks.refuse(f"{type(made).__name__} must have parameters", "a module without", "there is nothing to train")
    values |= {name: reading.array(each) for name, each in made.named_buffers() if name in statistics}
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in values.items()}
    trained = tuple(name for name, each in made.named_parameters() if each.requires_grad)
    if not trained:
        checks.refuse(
            f"{type(made).__name__} must have parameters with requires_grad=True", "none", "only those are trained"
        )
    network = Network(type(made).__name__, training, evaluation, shapes)
    if made is module:
        return Translated(network, Frozen.of(lambda: jax.tree.map(jnp.asarray, values)), trained, None)
    return Translated(network, None, tuple(name for name, _ in made.named_parameters()), module)


@contextmanager
def shown(text: str) -> Iterator[None]:
    """Shows a line in a terminal while something takes long."""
    terminal = sys.stderr.isatty() and not os.environ.get("CI")
    if terminal:
        print(f"{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _batch_of_two(example: jax.ShapeDtypeStruct, channels_last: bool) -> jax.ShapeDtypeStruct:
    """A batch as the module gets it."""
    shape = example.shape
    if channels_last and len(shape) == 4:
        shape = tuple(shape[i] for i in (0, 3, 1, 2))
    return jax.ShapeDtypeStruct((2, *shape[1:]), example.dtype)


def made_module(module: Any) -> Any:
    """The module, or a new one if ``module`` makes modules."""
    try:
        import torch
    except ImportError as error:
        raise MissingPackageError('Model.from_torch needs PyTorch: pip install "fedjax-drift[torch]"') from error
    what = "module must be a torch.nn.Module, or a class or a function without arguments that makes one"
    if isinstance(module, torch.nn.Module):
        return module
    if not callable(module):
        checks.refuse(what, checks.shown(module))
    try:
        with torch.random.fork_rng(devices=[]):
            made = module()
    except Exception as error:
        checks.refuse(what, "an error from it", f"{first_line(error)}; write lambda: Net(arguments)", error)
    if not isinstance(made, torch.nn.Module):
        checks.refuse(what, f"one that returns {checks.type_of(made)}")
    return made


def _first_names(module: Any) -> dict[str, str]:
    """The name of each parameter -> the first of its names, because tied layers share parameters."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in module.named_parameters(remove_duplicate=False)}


def _renamed(each: Graph, names: dict[str, str]) -> Graph:
    return each._replace(parameters={key: names.get(name, name) for key, name in each.parameters.items()})


def _statistics(each: Graph) -> list[str]:
    norms = [node for node in each.nodes if node.operation in graph.NORMS]
    return list(
        dict.fromkeys(
            each.parameters[ref.name] for node in norms for ref in node.arguments[3:5] if ref.name in each.parameters
        )
    )


# --- values -----------------------------------------------------------------------------------------------------------


def _drawn(make: Callable[[], Any], shapes: dict[str, jax.ShapeDtypeStruct], key: jax.Array) -> dict[str, jax.Array]:
    """The values of a new module, from PyTorch's initialisers with a seed from the key.

    They are computed on the host, also if a program is compiled for another device.
    """

    def draw(seed: Any) -> Named:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            made = make()
        named = {**dict(made.named_parameters()), **dict(made.named_buffers())}
        return {name: reading.array(named[name]).astype(shape.dtype) for name, shape in shapes.items()}

    return jax.pure_callback(draw, shapes, jax.random.bits(key, dtype=jnp.uint32), vmap_method="sequential")


# --- the fields of a model --------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """The values of a graph that the fields of a model need."""

    features: str | None
    extractor: str | None

    @classmethod
    def of(cls, each: Graph, head: str | None, extractor: str | None) -> Places:
        features = None if head is None else graph.input_of(each, "head", head)
        outputs = None if extractor is None else graph.output_of(each, "extractor", extractor)
        return cls(features, outputs)


def fields(
    source: Translated, statistics: Kept | None, head: str | None, extractor: str | None, channels_last: bool
) -> dict[str, Any]:
    """Returns the fields of a `Model`."""
    network, base, trained, make = source
    kept = batch_norm.check(network.name, [] if network.statistics else None, statistics)
    frozen = [name for name in network.shapes if name not in (*trained, *network.statistics)]
    places = [Places.of(each, head, extractor) for each in (network.training, network.evaluation)]
    training, evaluation = (
        graph.pooled(each, {place for place in at if place})
        for each, at in zip((network.training, network.evaluation), places, strict=True)
    )

    def given(x: jax.Array) -> Any:
        return Images(x.transpose(3, 1, 2, 0)) if channels_last and x.ndim == 4 else x

    def variables(params: Params, statistics: PyTree = None) -> dict[str, Any]:
        parts = collections(params, kept, statistics)
        named = {**flat(parts["params"]), **flat(parts.get("batch_stats", {}))}
        if frozen:
            assert base is not None
            named |= {name: base.arrays()[name] for name in frozen}
        return named

    def init(key: jax.Array) -> Params:
        values = base.arrays() if base is not None else _drawn(make, network.shapes, key)  # type: ignore[arg-type]
        params = nested({name: values[name] for name in trained})
        return params if kept is None else whole(params, nested({name: values[name] for name in network.statistics}))

    def apply(params: Params, x: jax.Array) -> jax.Array:
        return run(evaluation, variables(params), (evaluation.input, given(x)), [evaluation.output], Mode())[0]

    def train_apply(params: Params, x: jax.Array, key: jax.Array) -> jax.Array:
        mode = Mode(key)
        return run(training, variables(params), (training.input, given(x)), [training.output], mode)[0]

    def forward(
        params: Params, statistics: PyTree, x: jax.Array, key: jax.Array, mask: jax.Array, name: str
    ) -> tuple[jax.Array, PyTree]:
        output = training.output if name == "apply" else places[0].features
        assert output is not None
        updates = {} if kept == "frozen" else training.updates
        new = {path: each for path, each in updates.items() if path in network.statistics}
        wanted = [output, *new.values()]
        mode = Mode(key, mask, kept == "frozen")
        results = run(training, variables(params, statistics), (training.input, given(x)), wanted, mode)
        return results[0], nested({**flat(statistics), **dict(zip(new, results[1:], strict=True))})

    def at(place: str | None) -> Any:
        if place is None:
            return None
        return lambda params, x: run(evaluation, variables(params), (evaluation.input, given(x)), [place], Mode())[0]

    def classifier(params: Params, features: jax.Array) -> jax.Array:
        return run(evaluation, variables(params), (places[1].features, features), [evaluation.output], Mode())[0]  # type: ignore[arg-type]

    made = {
        "init": init,
        "apply": apply,
        "train_apply": train_apply if kept is None and training.text() != evaluation.text() else None,
        "features": at(places[1].features),
        "head": None if head is None else classifier,
        "extractor": at(places[1].extractor),
        "statistics": None if kept is None else Statistics(kept, forward),
        "vocabulary": _vocabulary(network),
        "output_axes": axes.of_graph(network.training, {name: network.shapes[name] for name in trained}),
    }
    if frozen:
        made["merged"] = lambda params: nested(variables(params))
    return made


def compare(source: Translated, module: Any, example: jax.ShapeDtypeStruct, channels_last: bool) -> None:
    """Compares the translation with the module (`comparison.py`). module: that which was translated."""
    network = source.network
    trained = tuple(name for name, each in module.named_parameters() if each.requires_grad)
    batch, images = _batch_of_two(example, channels_last), channels_last and len(example.shape) == 4

    def pair(training: bool, each: Graph) -> comparison.Pair:
        return comparison.Pair(module, training, each, graph.pooled(each, set()), trained, values, images, batch)

    with comparison.without_zeros(module):
        values = {name: reading.array(each) for name, each in (*module.named_parameters(), *module.named_buffers())}
        values = {name: values[name] for name in network.shapes}
        comparison.check(pair(True, network.training), pair(False, network.evaluation), _vocabulary(network))


def _vocabulary(network: Network) -> int | None:
    return min((network.shapes[name].shape[0] for name in graph.tables(network.evaluation)), default=None)


def check(made: dict[str, Any], network: Network, example: jax.ShapeDtypeStruct, head: str | None) -> None:
    """Traces the functions of a model, so that their errors come early."""

    def all_of(x: jax.Array) -> Any:
        key, mask = jax.random.key(0), jnp.ones(x.shape[0], bool)
        params = made["init"](key)
        outputs = [made["apply"](params, x)]
        if made["train_apply"]:
            outputs.append(made["train_apply"](params, x, key))
        if made["statistics"]:
            outputs.append(
                made["statistics"].forward(params["params"], params["batch_stats"], x, key, mask, "apply")[0]
            )
        if made["features"]:
            features = made["features"](params, x)
            if features.ndim != 2:
                checks.refuse(
                    "head must be a submodule that gets features [B, F]",
                    f"{head!r}, which gets an array of shape [B, {', '.join(map(str, features.shape[1:]))}]",
                    "name the last layers only",
                )
            outputs.append(made["head"](params, features))
        return outputs

    try:
        outputs = jax.eval_shape(all_of, jax.ShapeDtypeStruct((2, *example.shape[1:]), example.dtype))
    except ConfigurationError:
        raise
    except KeyError as error:
        checks.refuse(
            "head must be the end of the network, which gets nothing but its features",
            f"{head!r}",
            "name the last layers only",
            error,
        )
    except Exception as error:
        checks.refuse(
            f"{network.name} must run on a batch of 2 examples", "an error in the translation", first_line(error), error
        )
    if outputs[0].ndim == 0 or outputs[0].shape[0] != 2:
        checks.refuse(f"{network.name} must return logits [B, ...]", f"{[*outputs[0].shape]} for 2 examples")
