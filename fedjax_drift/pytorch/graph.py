"""A network as a list of operations."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.pytorch.operations.convolutions import conv2d, sizes

NORMS = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")
MONOTONE = ("relu", "tanh", "sigmoid", "leaky_relu")  # the last with a slope of at least 0


class Ref(NamedTuple):
    """The value of another node, or of an input."""

    name: str


def is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


class Node(NamedTuple):
    """An operation with its arguments, in which other values are a `Ref`."""

    name: str
    operation: str  # a name of a table, or "size", "item" or "python"
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    layer: str  # the path of the submodule in which it is called; "" is the module itself
    function: Any = None  # of "python": a function of integers, such as operator.mul


class Graph(NamedTuple):
    """A module in training or in evaluation, for batches of any length."""

    input: str
    parameters: dict[str, str]  # parameters and running statistics: the name of the input -> that in the state dict
    constants: dict[str, np.ndarray]  # buffers and arrays of the code, by the name of the input
    nodes: tuple[Node, ...]
    output: str
    updates: dict[str, str]  # the name of a buffer -> that of its new value

    def text(self) -> str:
        """All operations. Two networks with equal texts, parameters and constants are equal."""
        lines = [f"{n.name} = {n.operation}{n.function or ''}{n.arguments}{n.options}" for n in self.nodes]
        return "\n".join([self.input, *map(repr, self.parameters.items()), *lines, self.output, repr(self.updates)])


# --- questions about a graph ------------------------------------------------------------------------------------------


def used(node: Node) -> list[str]:
    """The names of the values that the node refers to."""
    leaves = jax.tree.leaves((node.arguments, node.options), is_leaf=is_ref)
    return [each.name for each in leaves if is_ref(each)]


def reached(nodes: list[Node], name: str) -> set[str]:
    """The values that depend on a value."""
    found = {name}
    for node in nodes:
        if not found.isdisjoint(used(node)):
            found.add(node.name)
    return found


def _of_arrays(graph: Graph) -> set[str]:
    """The nodes whose values are arrays, and not numbers."""
    return {node.name for node in graph.nodes if node.operation not in ("size", "python")}


def _inside(node: Node, path: str) -> bool:
    return node.layer == path or node.layer.startswith(f"{path}.")


def input_of(graph: Graph, option: str, path: str) -> str:
    """The value that the submodule ``path`` gets."""
    inside = [node for node in graph.nodes if _inside(node, path)]
    _check_path(graph, option, path, inside)
    outside = (_of_arrays(graph) | {graph.input}) - {node.name for node in inside}
    given = list(dict.fromkeys(name for node in inside for name in used(node) if name in outside))
    if len(given) != 1:
        checks.refuse(f"{option} must name a submodule that is called once, with one array", f"{path!r}")
    return given[0]


def output_of(graph: Graph, option: str, path: str) -> str:
    """The value that the submodule ``path`` returns."""
    inside = {node.name: node for node in graph.nodes if _inside(node, path)}
    _check_path(graph, option, path, list(inside.values()))
    outside = [name for node in graph.nodes if node.name not in inside for name in used(node)]
    arrays = inside.keys() & _of_arrays(graph)
    returned = list(dict.fromkeys(name for name in [*outside, graph.output] if name in arrays))
    if len(returned) != 1:
        checks.refuse(f"{option} must name a submodule that is called once and returns one array", f"{path!r}")
    return returned[0]


def _check_path(graph: Graph, option: str, path: Any, inside: list[Node]) -> None:
    if not inside:
        known = dict.fromkeys(node.layer for node in graph.nodes if node.layer)
        checks.refuse(f"{option} must be the path of a submodule ({checks.listed(known)})", f"{path!r}")


def needed(graph: Graph, wanted: list[str], given: str) -> list[Node]:
    """The nodes that compute the wanted values from the value ``given``, in order."""
    found, open_ = [], set(wanted)
    for node in reversed(graph.nodes):
        if node.name in open_ and node.name != given:
            found.append(node)
            if not is_length(graph, node):
                open_ |= set(used(node))
    return found[::-1]


def is_length(graph: Graph, node: Node) -> bool:
    """Whether the node is the length of the batch, which every batched value knows."""
    return node.operation == "size" and node.arguments == (Ref(graph.input), 0)


def tables(graph: Graph) -> list[str]:
    """The parameters in which the inputs themselves, token ids, are looked up."""
    ids, found = {Ref(graph.input)}, []
    for node in graph.nodes:
        if node.operation in ("_to_copy", "clone", "view", "expand", "unsqueeze") and node.arguments[0] in ids:
            ids.add(Ref(node.name))
        if node.operation == "embedding" and node.arguments[1] in ids and node.arguments[0].name in graph.parameters:
            found.append(graph.parameters[node.arguments[0].name])
    return found


def pooled(graph: Graph, kept: set[str]) -> Graph:
    """The graph with max-pooling as a part of the convolution before it, which `convolution.conv` computes faster.

    The activation between them is applied after the pooling. kept: values that must not change.
    """
    nodes = {node.name: node for node in graph.nodes}
    users: dict[str, int] = {}
    for node in graph.nodes:
        for name in used(node):
            users[name] = users.get(name, 0) + 1
    for node in graph.nodes:
        window = _square_window(node)
        if not window:
            continue
        source = nodes.get(node.arguments[0].name)
        while source and _is_monotone(source) and users[source.name] == 1 and source.name not in kept:
            source = nodes.get(source.arguments[0].name)
        if source is None or source.operation != "conv2d" or users[source.name] > 1 or source.name in kept:
            continue
        if _plain_convolution(source):
            nodes[source.name] = source._replace(options={**source.options, "pool": window})
            nodes[node.name] = node._replace(operation="alias", arguments=node.arguments[:1], options={})
    return graph._replace(nodes=tuple(nodes[node.name] for node in graph.nodes))


def _is_monotone(node: Node) -> bool:
    """Whether the node is an activation that commutes with the maximum."""
    rising = node.operation != "leaky_relu" or len(node.arguments) < 2 or node.arguments[1] >= 0
    return node.operation in MONOTONE and rising


def _square_window(node: Node) -> int:
    """The window of a max-pooling with equal window and stride and nothing else, or 0."""
    if node.operation != "max_pool2d":
        return 0
    _, window, *rest = node.arguments
    stride = tuple(rest[0]) if rest and rest[0] else tuple(window)
    plain = len(rest) < 2 and not node.options
    return window[0] if plain and len({*window, *stride}) == 1 else 0


def _plain_convolution(node: Node) -> bool:
    bound = inspect.signature(conv2d).bind(*node.arguments, **node.options)
    bound.apply_defaults()
    options = bound.arguments
    return (
        options["groups"] == 1 and {*sizes(options["dilation"], 2)} == {1} and len({*sizes(options["stride"], 2)}) == 1
    )
