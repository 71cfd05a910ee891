"""The exported program of a PyTorch module as a `Graph`."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.export import by_values, exported, line_in
from fedjax_drift.pytorch.graph import NORMS, Graph, Node, Ref, reached
from fedjax_drift.pytorch.operations import covered
from fedjax_drift.pytorch.operations.decomposed import DECOMPOSED

SKIPPED = ("_assert", "sym_constrain_range")  # they compute nothing

WIDE = ("torch.float64", "torch.complex128")


def traced(module: Any, example: jax.ShapeDtypeStruct, training: bool, state: Iterable[str] = ()) -> Graph:
    """The operations of a module on a batch.

    example: [2, ...]. The first axis is the batch, of any length. state: the buffers that change in training.

    Raises ConfigurationError as `export.exported`, or if an operation is not covered.
    """
    return read(exported(module, example, training), type(module).__name__, training, state)


def read(program: Any, name: str, training: bool, state: Iterable[str] = ()) -> Graph:
    """The graph of an exported program, without anything of PyTorch in it. training, state: as in `traced`."""
    given: dict[str, dict[str, str]] = {}  # kind -> the name of the input -> what it is
    for spec in program.graph_signature.input_specs:
        given.setdefault(spec.kind.name, {})[spec.arg.name] = spec.target
    returned: dict[str, dict[str, str]] = {}
    for spec in program.graph_signature.output_specs:
        returned.setdefault(spec.kind.name, {})[spec.arg.name] = spec.target
    results = list(returned.get("USER_OUTPUT", {}))
    if len(results) != 1:
        checks.refuse(f"{name} must return one array, the logits", f"{len(results)} arrays", "return the logits only")
    nodes, constants = _nodes(program, name)
    parameters = {each: _own(path) for each, path in given.pop("PARAMETER", {}).items()}
    (input_name,) = given.pop("USER_INPUT")
    buffers = {each: path for kind in given.values() for each, path in kind.items()}
    norms = [node for node in nodes if node.operation in NORMS]
    kept = [ref.name for node in norms for ref in node.arguments[3:5] if ref.name in buffers]
    parameters |= {each: _own(buffers.pop(each)) for each in dict.fromkeys(kept)}
    layers = {path.rpartition(".")[0] for path in parameters.values()}
    mutations = returned.pop("BUFFER_MUTATION", {}).items()
    updates = {_own(path): each for each, path in mutations if not _counts(_own(path), layers)}
    values = {**program.constants, **program.state_dict}
    of_batch = reached(nodes, input_name)
    changed = {_own(path): values[path] for path in buffers.values() if _own(path) in updates}
    wrong = [
        path
        for path, value in changed.items()
        if not training or updates[path] in of_batch or not value.is_floating_point()
    ]
    if wrong:
        checks.refuse(
            f"{name} must not keep what it has seen",
            f"a forward that changes {checks.listed(wrong)}",
            "only BatchNorm may, because a compiled round has no hidden state. In training, buffers of floats may "
            "change too if their new value depends on parameters and buffers alone, as in spectral_norm",
        )
    changing = [each for each, path in buffers.items() if _own(path) in {*updates, *state}]
    parameters |= {each: _own(buffers.pop(each)) for each in changing}
    written = [_own(path) for path in returned.get("PARAMETER_MUTATION", {}).values()]
    if written:
        checks.refuse(
            f"the forward of {name} must not change its parameters",
            f"one that changes {checks.listed(written)}",
            "use a changed copy in the forward",
        )
    constants |= {each: _constant(name, path, values[path]) for each, path in buffers.items()}
    return Graph(input_name, parameters, constants, tuple(nodes), results[0], updates)


def _nodes(program: Any, name: str) -> tuple[list[Node], dict[str, np.ndarray]]:
    """The operations, in order, and the arrays that are made of numbers. Raises ConfigurationError if an operation is
    not covered."""
    nodes: list[Node] = []
    constants: dict[str, np.ndarray] = {}
    missing: dict[str, str] = {}  # operation -> line of code
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        made = _node(node)
        line = line_in(node.meta.get("stack_trace") or "")
        if made is None and _is_of_numbers(node):
            _check_numbers(name, node, Node(node.name, str(node.target), (), {}, ""), line)
            constants[node.name] = _constant(name, line, node.target(*node.args, **node.kwargs))
        elif made is None:
            missing.setdefault(str(node.target).removeprefix("aten."), line)
        elif made.operation in ("index", "index_put") and _selects(node):
            raise ConfigurationError(by_values(name, line or "a selection by a boolean array"))
        elif made.operation:
            _check_numbers(name, node, made, line)
            nodes.append(made)
    if missing:
        where = "; ".join(f"{each} ({line})" if line else each for each, line in missing.items())
        checks.refuse(
            f"the operations of {name} must be covered by Model.from_torch",
            where,
            "replace them by others, or write the network with flax",
        )
    return nodes, constants


def _is_of_numbers(node: Any) -> bool:
    """Whether an operation makes an array of numbers of the code, as hann_window does, so that it is a constant."""
    import torch

    made = isinstance(node.meta.get("val"), torch.Tensor) and not node.all_input_nodes
    return made and torch.Tag.nondeterministic_seeded not in node.target.tags


def _check_numbers(name: str, node: Any, made: Node, line: str) -> None:
    """Refuses numbers that JAX would narrow in silence: float64, and integers beyond 32 bits."""
    if jax.config.read("jax_enable_x64"):
        return
    dtype = str(getattr(node.meta.get("val"), "dtype", ""))
    where = line or made.operation
    if dtype in WIDE:
        checks.refuse(
            f"{name} must compute in float32 or lower",
            f"{dtype.removeprefix('torch.')} in {where}",
            "remove .double() and dtype=torch.float64, or set jax_enable_x64",
        )
    numbers = [each for each in jax.tree.leaves((made.arguments, made.options)) if type(each) is int]
    if dtype == "torch.int64" and made.operation not in ("slice", "slice_scatter"):
        _check_integers(name, numbers, where)


def _check_integers(name: str, numbers: list[int], where: str) -> None:
    if any(not -(2**31) <= number < 2**31 for number in numbers):
        got, fix = f"{max(numbers, key=abs)} in {where}", "use smaller ones, or set jax_enable_x64"
        checks.refuse(f"the integers of {name} must fit in 32 bits", got, fix)


def _constant(name: str, path: str, tensor: Any) -> np.ndarray:
    """A buffer, or an array of the code."""
    values = tensor.detach().cpu()
    whole = not values.is_floating_point() and not values.is_complex()
    if whole and values.numel() and not jax.config.read("jax_enable_x64"):
        _check_integers(name, [int(values.min()), int(values.max())], _own(path))
    return array(tensor)


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
    if namespace == "fedjax_drift":
        return Node(node.name, f"{namespace}.{base}", arguments, {}, layer)
    if base.startswith(SKIPPED):
        return Node(node.name, "", (), {}, layer)
    if base == "sym_size":
        return Node(node.name, "size", arguments, {}, layer)
    name = covered(f"{base}.{overload}")
    if namespace != "aten" or not name or name in DECOMPOSED:
        return None
    return Node(node.name, name, arguments, options | of_version(base, (*arguments, *options.values())), layer)


def of_version(operation: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Options of an operation that means something else in different versions of PyTorch."""
    if operation != "clamp":
        return {}
    of_arrays = any(isinstance(each, Ref) or hasattr(each, "shape") for each in arguments[1:])
    return {"share": at_bounds(of_arrays)}


@functools.cache
def at_bounds(of_arrays: bool) -> float:
    """The part of the gradient that x has where `torch.clamp` finds it equal to a bound.

    1 in PyTorch 2.13. In 2.15, 0 if the bound is a number, and 0.5 if it is an array, which has the other half.
    """
    import torch

    with torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        x.clamp(min=torch.zeros(()) if of_arrays else 0.0).backward()
    assert x.grad is not None
    return float(x.grad)


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
