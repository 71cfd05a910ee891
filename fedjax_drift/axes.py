"""Which axes of a parameter are its outputs (`Model.output_axes`).

Flax stores a kernel as [..., in, out], and PyTorch as [out, in, ...]. An algorithm that needs the outputs asks here. It
reads no axis itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fedjax_drift import checks
from fedjax_drift.leaves import by_path, path_of
from fedjax_drift.tree import PyTree

Axes = int | tuple[int, ...]
LAST = -1
FIX = 'pass output_axes={"dense/kernel": 0}, for example, or None for kernels [..., in, out]'


def outputs(given: Any, params: PyTree) -> PyTree:
    """A pytree with a tuple for every leaf: the axes of its outputs, from 0. () for a number.

    given: `Model.output_axes`.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _axes(given, path_of(path), leaf.ndim), params)


def of_path(given: Any, path: str) -> Any:
    """The axis, or the axes, of the parameter with this path."""
    if isinstance(given, Mapping):
        return given.get(path.removeprefix("params/"), LAST)
    return LAST if given is None else given


def of_matrices(given: Any, path: str, ndim: int) -> tuple[int, int]:
    """The axes of the inputs and of the outputs of the matrices that a parameter is a stack of.

    If the outputs are counted from the end, the matrices are on the last two axes. Otherwise the inputs are on the axis
    before, or for [out, in, ...] on the axis behind.
    """
    _axes(given, path, ndim)
    out = _several(of_path(given, path))[-1]
    if out in (-1, -2):
        return ndim - 3 - out, ndim + out
    return (out % ndim - 1 if out % ndim else 1), out % ndim


def check(given: Any, params: PyTree) -> None:
    """Raises ConfigurationError unless `Model.output_axes` fits the parameters."""
    shapes = by_path(params)
    unknown = [path for path in given if not {path, f"params/{path}"} & {*shapes}] if isinstance(given, Mapping) else []
    if unknown:
        checks.refuse(
            f"Model.output_axes must have paths of parameters ({checks.listed(shapes)})", checks.shown(unknown[0]), FIX
        )
    for path, leaf in shapes.items():
        _axes(given, path, leaf.ndim)


def _axes(given: Any, path: str, ndim: int) -> tuple[int, ...]:
    if ndim == 0:
        return ()
    axes = of_path(given, path)
    several = [checks.integer(f"Model.output_axes of {path}", axis, -ndim, ndim - 1, FIX) for axis in _several(axes)]
    if not several:
        checks.refuse(f"Model.output_axes of {path} must be an axis or several axes", "()", FIX)
    return tuple(sorted({axis % ndim for axis in several}))


def _several(axes: Any) -> tuple[Any, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


# --- from a network ---------------------------------------------------------------------------------------------------


def of_layer(layer: Any) -> dict[str, Axes]:
    """The axes of a flax layer's parameters that are not the last one, by name.

    A table of embeddings has an output for each entry, as in PyTorch. A layer may have the attribute ``output_axes``.
    """
    from flax import linen, nnx

    if isinstance(own := getattr(type(layer), "output_axes", None), Mapping):
        return dict(own)
    if isinstance(layer, linen.Embed | nnx.Embed):
        return {"embedding": -2}
    if isinstance(layer, linen.ConvTranspose | nnx.ConvTranspose) and layer.transpose_kernel:
        return {"kernel": -2}
    features = layer.features if isinstance(layer, linen.DenseGeneral) else getattr(layer, "out_features", 1)
    if not isinstance(features, tuple) or len(features) < 2:
        return {}
    return dict.fromkeys(("kernel", "bias"), tuple(range(-len(features), 0)))


def of_layers(layers: Mapping[tuple[Any, ...], Any], params: PyTree) -> dict[str, Axes] | None:
    """`Model.output_axes` of a network with these layers, by path. None if all outputs are on the last axis."""
    named = {
        "/".join(map(str, (*path, name))): a for path, layer in layers.items() for name, a in of_layer(layer).items()
    }
    known = {path.removeprefix("params/") for path in by_path(params)}
    return {path: axes for path, axes in named.items() if path in known} or None


def of_graph(graph: Any, shapes: Mapping[str, Any]) -> dict[str, Axes]:
    """`Model.output_axes` of a PyTorch module: axis 0, except for weights [in, out] that are used as such.

    graph: a `fedjax_drift.pytorch.graph.Graph`. shapes: the trained parameters, by names with dots.
    """
    axes = dict.fromkeys(shapes, 0)
    places = {"conv_transpose": 1, "matmul": 1, "mm": 1, "addmm": 2}  # where the weight is among the arguments
    for node in graph.nodes:
        place = places.get(node.operation.rstrip("123d"))
        if place is not None and len(node.arguments) > place:
            name = graph.parameters.get(getattr(node.arguments[place], "name", None))
            if name in axes:  # of a product, the last axis
                axes[name] = 1 if node.operation.startswith("conv") else max(len(shapes[name].shape) - 1, 0)
    return {name.replace(".", "/"): axis for name, axis in axes.items()}
