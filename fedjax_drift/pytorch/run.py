"""Carries out the operations of a graph with JAX."""

from __future__ import annotations

from typing import Any

import jax

from fedjax_drift.pytorch.graph import Graph, Node, is_length, is_ref, needed
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
    length = given[1].shape[0]
    with jax.numpy_rank_promotion("allow"):  # PyTorch's rules
        for i, node in enumerate(needed(graph, wanted, given[0])):
            if is_length(graph, node):
                values[node.name] = length
            else:
                key = None if mode.key is None else jax.random.fold_in(mode.key, i)
                values[node.name] = _call(node, values, mode._replace(key=key))
    return [plain(values[name]) for name in wanted]


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
    if name in ("view", "reshape", "_unsafe_view") and len(arguments[1]) == 2 and arguments[1][0] in (-1, x.shape[0]):
        return images.flatten_images(*arguments)
    if name == "flatten" and arguments[1:] in ((1,), (1, -1), (1, 3)):
        return images.flatten_images(x, ())
    if name == "mean" and len(arguments) > 1 and sorted(d % 4 for d in arguments[1] or ()) == [2, 3] and not options:
        return images.mean_of_images(*arguments)
    return None


def _resolved(value: Any, values: dict[str, Any]) -> Any:
    return jax.tree.map(lambda each: values[each.name] if is_ref(each) else each, value, is_leaf=is_ref)


def _leaves(value: Any) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=is_images)


def _plain(value: Any) -> Any:
    return jax.tree.map(plain, value, is_leaf=is_images)
