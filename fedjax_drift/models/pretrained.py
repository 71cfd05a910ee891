"""Saves and loads the parameters of models. Also loads the parameters of PyTorch's ResNet-18."""

from __future__ import annotations

import os
import re

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.types import Model, Params

STEM = "conv/kernel"
TORCH_RESNET = re.compile(r"(?:layer(\d)\.(\d)\.)?(conv|bn|downsample\.)(\d)\.(weight|bias)")


def save_params(params: Params, path: str | os.PathLike[str]) -> None:
    """Saves parameters to an npz file for `load_params`.

    The file has one array per leaf. The name of the array is the path of the leaf, such as "classifier/dense/bias".

    Raises ValueError for parameters that are empty or not numeric, and OSError if the file can't be written.
    """
    target = checks.path("path", path)
    named = {_name(leaf_path): np.asarray(leaf) for leaf_path, leaf in jax.tree.leaves_with_path(params)}
    if not named:
        raise ConfigurationError(f"params must have at least one array, got {checks.shown(params)}: pass state.params")
    for name, leaf in named.items():
        checks.array(f"params, at {name or 'its root'},", leaf.reshape(-1))
    with open(target, "wb") as file:
        np.savez(file, **named)  # type: ignore[arg-type]


def load_params(model: Model, path: str | os.PathLike[str]) -> Params:
    """Loads the parameters of a model from an npz file of `save_params`.

    For `resnet18`, the file may also have the parameters of torchvision's ResNet-18. To export them in PyTorch, run
    ``numpy.savez(path, **{k: v.numpy() for k, v in resnet18(weights="DEFAULT").state_dict().items()})``.
    The scales and biases of group normalisation are then those of batch normalisation in the file. The running
    statistics are not used. The classifier is initialised randomly with key 0, because its classes differ. The stem is
    also initialised randomly, unless it is 7 x 7.

    Raises FileNotFoundError if the file does not exist, and ValueError if it is not an npz file or its arrays do not
    fit the model.
    """
    checks.instance("model", model, Model, "fd.models.lenet5(), for example")
    path = checks.path("path", path)
    try:
        arrays = files.arrays_of(path)
    except ValueError as error:
        what, fix = f"it is no npz ({files.one_line(error.__cause__)})", "write it with save_params"
        if os.path.isfile(path) and _is_safetensors(path):
            what = "it is a safetensors file, not an npz"
            fix = (
                'convert it with numpy.savez("params.npz", **safetensors.numpy.load_file(path)), with the names that '
                "save_params uses"
            )
        raise ConfigurationError(f"cannot read parameters from {path}: {what}: {fix}") from error
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"{path}: {name} must be real numbers, got {array.dtype}: write it with save_params"
            )
    expected = jax.eval_shape(model.init, jax.random.key(0))
    shapes = {_name(leaf_path): leaf.shape for leaf_path, leaf in jax.tree.leaves_with_path(expected)}
    initialised = set[str]()  # the parameters that are initialised randomly instead of loaded
    if "layer1.0.conv1.weight" in arrays:
        arrays = dict(filter(None, map(_of_torch, arrays, arrays.values())))
        other_stem = _shape(arrays, STEM) != shapes.get(STEM)
        initialised = {name for name in shapes if "classifier" in name or (name == STEM and other_stem)}
    wrong = [
        name for name in {**shapes, **arrays} if name not in initialised and _shape(arrays, name) != shapes.get(name)
    ]
    if wrong:
        held, wanted = (
            "nothing" if shape is None else f"shape {list(shape)}"
            for shape in (_shape(arrays, wrong[0]), shapes.get(wrong[0]))
        )
        raise ConfigurationError(
            f"{path} must have the model's parameters, got {held} for {wrong[0]}, which is {wanted} in the model "
            f"({len(wrong)} arrays don't fit): use the model whose parameters were saved"
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if _name(path) in initialised else np.asarray(arrays[_name(path)], leaf.dtype),
        model.init(jax.random.key(0)) if initialised else expected,
    )


def _is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts like a safetensors file: 8 bytes with the length of a header, then a JSON object."""
    with open(path, "rb") as file:
        length, brace = int.from_bytes(file.read(8), "little"), file.read(1)
    return brace == b"{" and length < os.path.getsize(path)


def _shape(arrays: dict[str, np.ndarray], name: str) -> tuple[int, ...] | None:
    return arrays[name].shape if name in arrays else None


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _of_torch(name: str, array: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Converts an array of torchvision's ResNet-18 to the name and layout of `resnet18`.

    Returns None for an array that is not used.
    """
    if not (match := TORCH_RESNET.fullmatch(name)):
        return None
    stage, block, kind, number, what = match.groups()
    conv = array.ndim == 4
    if conv:
        array = array.transpose(2, 3, 1, 0)
    leaf = "kernel" if conv else {"weight": "scale", "bias": "bias"}[what]
    if stage is None:
        return f"{'conv' if conv else 'norm'}/{leaf}", array
    if int(block) > 1:  # a deeper ResNet
        return name, array
    which = 2 if kind == "downsample." else int(number) - 1
    layer = f"{'Conv' if conv else 'GroupNorm'}_{which}"
    return f"blocks_{2 * (int(stage) - 1) + int(block)}/{layer}/{leaf}", array
