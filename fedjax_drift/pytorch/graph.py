"""A PyTorch module as a list of operations."""

from __future__ import annotations

import inspect
import operator
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.operations import TABLES
from fedjax_drift.pytorch.operations.convolutions import conv2d, sizes

SKIPPED = ("_assert", "sym_constrain_range")  # they compute nothing
NORMS = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")
MONOTONE = ("relu", "tanh", "sigmoid", "leaky_relu")  # activations that commute with the maximum


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


def traced(module: Any, example: jax.ShapeDtypeStruct, training: bool) -> Graph:
    """The operations of a module on a batch.

    example: [2, ...]. The first axis is the batch, of any length.

    Raises ConfigurationError if the module does not accept the example, or does something that no list of operations
    can do; or if an operation is not covered.
    """
    import torch

    name = type(module).__name__
    modes = {part: part.training for part in module.modules()}
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    dtype = torch.int64 if example.dtype.kind in "iu" else getattr(torch, example.dtype.name)
    zeros = torch.zeros(example.shape, dtype=dtype, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.train(training)
            batch = torch.export.Dim.AUTO
            exported = torch.export.export(_logits(module), (zeros,), dynamic_shapes=({0: batch},), strict=False)
            exported = exported.run_decompositions({})
    except Exception as error:
        raise ConfigurationError(_why(name, example, error)) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    return _read(exported, name)


def _logits(module: Any) -> Any:
    """The module with one output: of a Hugging Face model, its logits."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Any) -> Any:
            output = self.module(x)
            return getattr(output, "logits", output)

    return Logits()


def _why(name: str, example: jax.ShapeDtypeStruct, error: Exception) -> str:
    """What is wrong with a module that `torch.export` refuses."""
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return _by_values(name, _line_of(error))
    return (
        f"{name} must accept examples of shape {[*example.shape[1:]]} and dtype {example.dtype}, got an error: "
        "pass the input_shape that the module accepts. Images are [H, W, C] here and are passed to the module as "
        "[C, H, W], unless channels_last=False. For token ids also pass input_dtype=jnp.int32 "
        f"({type(error).__name__}: {checks.first_line(error)}, in {_line_of(error)})"
    )


def _by_values(name: str, line: str) -> str:
    return (
        f"the operations of {name} must not depend on the values of its inputs, parameters or buffers, got {line}: use "
        "torch.where instead of if, and masks instead of selections"
    )


def _line_of(error: Exception) -> str:
    """The last line of the user's code before the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_others())]
    return frames[-1].line or frames[-1].name if frames else "a layer of PyTorch"


def _line_in(trace: str) -> str:
    """The last line of the user's code in the stack trace of a node, or ""."""
    lines = re.findall(r'File "([^"]+)", line \d+, in [^\n]+\n([^\n]+)', trace)
    return next((code.strip() for file, code in reversed(lines) if not file.startswith(_others())), "")


def _others() -> tuple[str, ...]:
    """The folders of code that is not the user's."""
    import sympy
    import torch

    return tuple(str(Path(file).parent) for file in (torch.__file__, sympy.__file__, __file__))


def _read(exported: Any, name: str) -> Graph:
    """The graph of an exported program, without anything of PyTorch in it."""
    kinds = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    parameters, input_name = {}, ""
    updates, results = {}, []
    for spec in exported.graph_signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION":
            updates[_own(spec.target)] = spec.arg.name
        elif spec.kind.name == "USER_OUTPUT":
            results.append(spec.arg.name)
    values = {**exported.constants, **exported.state_dict}
    buffers: dict[str, str] = {}
    nodes: list[Node] = []
    missing: dict[str, str] = {}  # operation -> line of code
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            if spec.kind.name == "PARAMETER":
                parameters[node.name] = _own(spec.target)
            elif spec.kind.name == "USER_INPUT":
                input_name = node.name
                if str(node.meta["val"].shape[0]).isdigit():
                    raise ConfigurationError(
                        f"{name} must accept batches of any length, got a module whose code fixes it: reshape with -1 "
                        "or x.shape[0], and not with a number or len(x)"
                    )
            else:
                buffers[node.name] = spec.target
        elif node.op == "call_function":
            read = _node(node)
            line = _line_in(node.meta.get("stack_trace") or "")
            if read is None:
                missing.setdefault(str(node.target).removeprefix("aten."), line)
            elif read.operation in ("index", "index_put") and _selects(node):
                raise ConfigurationError(_by_values(name, line or "a selection by a boolean array"))
            elif read.operation:
                nodes.append(read)
    if missing:
        where = "; ".join(f"{each} ({line})" if line else each for each, line in missing.items())
        raise ConfigurationError(
            f"the operations of {name} must be covered by Model.from_torch, got {where}: replace them by others, or "
            "write the network with flax"
        )
    if len(results) != 1:
        raise ConfigurationError(
            f"{name} must return one array, the logits, got {len(results)} arrays: return the logits only"
        )
    norms = [node for node in nodes if node.operation in NORMS]
    parameters |= {ref.name: _own(buffers.pop(ref.name)) for node in norms for ref in node.arguments[3:5]}
    layers = {path.rpartition(".")[0] for path in parameters.values()}
    changed = [path for path in updates if path not in parameters.values() and not _counts(path, layers)]
    if changed:
        raise ConfigurationError(
            f"{name} must not change its buffers, got a forward that changes {checks.listed(changed)}: only BatchNorm "
            "may, because a compiled round has no hidden state"
        )
    constants = {each: array(values[target]) for each, target in buffers.items()}
    return Graph(input_name, parameters, constants, tuple(nodes), results[0], updates)


def _counts(path: str, layers: set[str]) -> bool:
    """Whether a buffer is the number of batches of a BatchNorm. It has no influence, and is not kept."""
    layer, _, name = path.rpartition(".")
    return name == "num_batches_tracked" and layer in layers


def _node(node: Any) -> Node | None:
    """None if the operation is not covered."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    layer = _own(re.sub(r"@\d+", "", stack[-1][0])) if stack and isinstance(stack[-1][0], str) else ""
    arguments, options = plain_values(node.args), plain_values(dict(node.kwargs))
    target = node.target
    for name in ("device", "pin_memory", "layout", "memory_format", "non_blocking", "generator", "requires_grad"):
        options.pop(name, None)
    if target is operator.getitem:
        return Node(node.name, "item", arguments, {}, layer)
    if not hasattr(target, "_schema"):  # a function of sizes
        known = getattr(target, "__module__", "") in ("_operator", "builtins", "math", "torch")
        if not known:
            return None
        return Node(node.name, "python", arguments, options, layer, _of_sizes(target))
    namespace, base, overload = f"{target}".split(".")
    if base.startswith(SKIPPED):
        return Node(node.name, "", (), {}, layer)
    if base == "sym_size":
        return Node(node.name, "size", arguments, {}, layer)
    covered = [each for each in (f"{base}.{overload}", base) if any(each in table for table in TABLES)]
    if namespace != "aten" or not covered:
        return None
    return Node(node.name, covered[0], arguments, options, layer)


def _selects(node: Any) -> bool:
    """Whether a boolean array selects elements, so that a shape depends on its values."""
    return any(each is not None and str(each.meta["val"].dtype) == "torch.bool" for each in node.args[1])


def _of_sizes(target: Any) -> Callable[..., Any]:
    """A function of integers. torch.sym_max(1, 2) is max(1, 2)."""
    names: dict[str, Any] = {
        "sym_max": max,
        "sym_min": min,
        "sym_float": float,
        "sym_int": int,
        "sym_not": operator.not_,
    }
    return names.get(getattr(target, "__name__", ""), target)


def plain_values(value: Any) -> Any:
    """Arguments with a `Ref` for each node, and dtypes of NumPy."""
    import torch

    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, torch.dtype):
        return jax.dtypes.canonicalize_dtype(str(value).removeprefix("torch."))
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return None
    if isinstance(value, list | tuple):
        return tuple(map(plain_values, value))
    if isinstance(value, dict):
        return {name: plain_values(each) for name, each in value.items()}
    return value


def array(tensor: Any) -> np.ndarray:
    """A tensor as a NumPy array. NumPy has no bfloat16, so that becomes float32."""
    import torch

    tensor = tensor.detach().cpu()
    values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.array(values, dtype=jax.dtypes.canonicalize_dtype(values.dtype))


def _own(path: str) -> str:
    """A path in the user's module, which `_logits` has wrapped."""
    return path.removeprefix("module").removeprefix(".")


# --- questions about a graph ------------------------------------------------------------------------------------------


def _used(node: Node) -> list[str]:
    """The names of the values that the node refers to."""
    leaves = jax.tree.leaves((node.arguments, node.options), is_leaf=is_ref)
    return [each.name for each in leaves if is_ref(each)]


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
    given = list(dict.fromkeys(name for node in inside for name in _used(node) if name in outside))
    if len(given) != 1:
        raise ConfigurationError(f"{option} must name a submodule that is called once, with one array, got {path!r}")
    return given[0]


def output_of(graph: Graph, option: str, path: str) -> str:
    """The value that the submodule ``path`` returns."""
    inside = {node.name: node for node in graph.nodes if _inside(node, path)}
    _check_path(graph, option, path, list(inside.values()))
    outside = [name for node in graph.nodes if node.name not in inside for name in _used(node)]
    arrays = inside.keys() & _of_arrays(graph)
    returned = list(dict.fromkeys(name for name in [*outside, graph.output] if name in arrays))
    if len(returned) != 1:
        raise ConfigurationError(
            f"{option} must name a submodule that is called once and returns one array, got {path!r}"
        )
    return returned[0]


def _check_path(graph: Graph, option: str, path: Any, inside: list[Node]) -> None:
    if not inside:
        known = dict.fromkeys(node.layer for node in graph.nodes if node.layer)
        raise ConfigurationError(f"{option} must be the path of a submodule ({checks.listed(known)}), got {path!r}")


def needed(graph: Graph, wanted: list[str], given: str) -> list[Node]:
    """The nodes that compute the wanted values from the value ``given``, in order."""
    found, open_ = [], set(wanted)
    for node in reversed(graph.nodes):
        if node.name in open_ and node.name != given:
            found.append(node)
            if not is_length(graph, node):
                open_ |= set(_used(node))
    return found[::-1]


def is_length(graph: Graph, node: Node) -> bool:
    """Whether the node is the length of the batch, which every batched value knows."""
    return node.operation == "size" and node.arguments == (Ref(graph.input), 0)


def tables(graph: Graph) -> list[str]:
    """The parameters in which the inputs themselves, token ids, are looked up."""
    ids, found = {graph.input}, []
    for node in graph.nodes:
        if node.operation in ("to", "_to_copy", "clone", "view", "reshape") and node.arguments[0].name in ids:
            ids.add(node.name)
        if node.operation == "embedding" and node.arguments[1].name in ids:
            found.append(graph.parameters[node.arguments[0].name])
    return found


def pooled(graph: Graph, kept: set[str]) -> Graph:
    """The graph with max-pooling as a part of the convolution before it, which `convolution.conv` computes faster.

    The activation between them is applied after the pooling. kept: values that must not change.
    """
    nodes = {node.name: node for node in graph.nodes}
    users: dict[str, int] = {}
    for node in graph.nodes:
        for name in _used(node):
            users[name] = users.get(name, 0) + 1
    for node in graph.nodes:
        window = _square_window(node)
        if not window:
            continue
        source = nodes.get(node.arguments[0].name)
        while source and source.operation in MONOTONE and users[source.name] == 1 and source.name not in kept:
            source = nodes.get(source.arguments[0].name)
        if source is None or source.operation != "conv2d" or users[source.name] > 1 or source.name in kept:
            continue
        if _plain_convolution(source):
            nodes[source.name] = source._replace(options={**source.options, "pool": window})
            nodes[node.name] = node._replace(operation="alias", arguments=node.arguments[:1], options={})
    return graph._replace(nodes=tuple(nodes[node.name] for node in graph.nodes))


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
