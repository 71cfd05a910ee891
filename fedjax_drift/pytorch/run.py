"""Carries out the operations of a graph with JAX."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift.pytorch.functions import JOIN, PLACEHOLDER
from fedjax_drift.pytorch.graph import Graph, Node, is_length, is_ref, needed, used
from fedjax_drift.pytorch.operations import ARRAYS, ELEMENTWISE, IN_MODE, OF_IMAGES, OF_IMAGES_IN_MODE, images
from fedjax_drift.pytorch.operations.images import Images, broadcast, is_images, plain
from fedjax_drift.pytorch.operations.mode import Mode


def run(
    graph: Graph, variables: dict[str, jax.Array], given: tuple[str, Any], wanted: list[str], mode: Mode
) -> list[jax.Array]:
    """Returns the wanted values, in PyTorch's layout.

    variables: by the name in the state dict. given: a value of the graph and what it is, for instance the inputs.
    """
    values: dict[str, Any] = {name: variables[path] for name, path in graph.parameters.items()}
    values |= graph.constants
    values[given[0]] = given[1]
    nodes = needed(graph, wanted, given[0])
    keys = [None if mode.key is None else jax.random.fold_in(mode.key, i) for i in range(len(nodes))]
    modes = {node.name: mode._replace(key=key) for node, key in zip(nodes, keys, strict=True)}
    later: dict[str, Node] = {}  # what a backward of the module's own computes from the gradients that it gets
    with jax.numpy_rank_promotion("allow"):  # PyTorch's rules
        for node in nodes:
            if is_length(graph, node):
                values[node.name] = given[1].shape[0]
            elif node.operation == PLACEHOLDER or any(name in later for name in used(node) if node.operation != JOIN):
                later[node.name] = node
            elif node.operation == JOIN:
                values[node.name] = _joined(node, values, later, modes)
            else:
                values[node.name] = _call(node, values, modes[node.name])
    return [plain(values[name]) for name in wanted]


def _joined(node: Node, values: dict[str, Any], later: dict[str, Node], modes: dict[str, Mode]) -> list[Any]:
    """The outputs of a `torch.autograd.Function`, whose derivative is its own backward (`functions.py`)."""
    inputs, outputs, incoming, gradients = node.arguments
    given = [each.name for each in incoming]
    nodes = {name: each for name, each in later.items() if name not in given}
    backward = _needed_for([each.name for each in gradients if each is not None], nodes)
    names = {name for each in backward for name in used(each)} | {each.name for each in gradients if each is not None}
    saved = {name: values[name] for name in names if name in values}
    arrays = {name: plain(value) for name, value in saved.items() if hasattr(value, "dtype")}
    numbers = {name: value for name, value in saved.items() if name not in arrays}

    @jax.custom_vjp
    def function(x: list[Any], y: list[Any], arrays: dict[str, Any]) -> list[Any]:
        return y

    def forward(x: list[Any], y: list[Any], arrays: dict[str, Any]) -> tuple[list[Any], Any]:
        return y, (x, y, arrays)

    def pull(kept: Any, cotangents: list[Any]) -> tuple[Any, Any, Any]:
        x, y, arrays = kept
        found = {**numbers, **arrays, **dict(zip(given, cotangents, strict=True))}
        with jax.numpy_rank_promotion("allow"):
            for each in backward:
                found[each.name] = _call(each, found, modes[each.name])
        dx = [_zero_tangent(a) if g is None else plain(found[g.name]) for a, g in zip(x, gradients, strict=True)]
        return dx, jax.tree.map(_zero_tangent, y), jax.tree.map(_zero_tangent, arrays)

    function.defvjp(forward, pull)
    x, y = ([plain(values[each.name]) for each in part] for part in (inputs, outputs))
    return function(x, jax.lax.stop_gradient(y), jax.lax.stop_gradient(arrays))


def _needed_for(wanted: list[str], nodes: dict[str, Node]) -> list[Node]:
    """The nodes among ``nodes`` that compute the wanted values, in order."""
    open_, found = set(wanted), []
    for name in reversed(nodes):
        if name in open_:
            found.append(nodes[name])
            open_ |= set(used(nodes[name]))
    return found[::-1]


def _zero_tangent(value: jax.Array) -> Any:
    """A gradient of 0, whose dtype is float0 for integers."""
    return (
        jnp.zeros_like(value) if jnp.issubdtype(value.dtype, jnp.inexact) else np.zeros(value.shape, jax.dtypes.float0)
    )


def _call(node: Node, values: dict[str, Any], mode: Mode) -> Any:
    arguments, options = (_resolved(each, values) for each in (node.arguments, node.options))
    name = node.operation
    if name == "python":
        return node.function(*arguments, **options)
    if name == "size":
        return arguments[0].shape[arguments[1]]
    if name == "item":
        return arguments[0][arguments[1]]
    if name in OF_IMAGES:
        return OF_IMAGES[name](*arguments, **options)
    if name in OF_IMAGES_IN_MODE:
        return OF_IMAGES_IN_MODE[name](mode, *arguments, **options)
    among = any(map(is_images, _leaves(arguments)))
    if among and name in ELEMENTWISE and all(getattr(each, "ndim", 0) <= 4 for each in _leaves(arguments)):
        return Images(ELEMENTWISE[name](*map(broadcast, arguments), **options))
    if among and (result := _of_images(name, arguments, options)) is not None:
        return result
    arguments, options = _plain(arguments), _plain(options)
    if name in IN_MODE:
        return IN_MODE[name](mode, *arguments, **options)
    return (ELEMENTWISE if name in ELEMENTWISE else ARRAYS)[name](*arguments, **options)


def _of_images(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The operations on images that need no other layout. None: there is no such way."""
    x = arguments[0]
    if name == "cat" and all(each.ndim == 4 for each in x):
        return images.concatenate_images(*arguments, **options)
    if not isinstance(x, Images):
        return None
    if name in ("view", "_unsafe_view") and _is_flat(x, arguments[1]):
        return images.flatten_images(x)
    if name == "mean" and len(arguments) > 1 and sorted(d % 4 for d in arguments[1] or ()) == [2, 3] and not options:
        return images.mean_of_images(*arguments)
    return None


def _is_flat(x: Images, shape: tuple[int, ...]) -> bool:
    """Whether the shape is [B, C * H * W]."""
    size = math.prod(x.shape[1:])
    return len(shape) == 2 and (shape[0] == x.shape[0] or shape == (-1, size))


def _resolved(value: Any, values: dict[str, Any]) -> Any:
    return jax.tree.map(lambda each: values[each.name] if is_ref(each) else each, value, is_leaf=is_ref)


def _leaves(value: Any) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=is_images)


def _plain(value: Any) -> Any:
    return jax.tree.map(plain, value, is_leaf=is_images)
