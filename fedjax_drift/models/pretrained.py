"""Saves and loads the parameters of models. Also loads parameters that were trained elsewhere."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, leaves, spec
from fedjax_drift.data import files
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError, MissingPackageError
from fedjax_drift.leaves import path_of
from fedjax_drift.model import GivenModel
from fedjax_drift.spec import Fix, checked
from fedjax_drift.types import Params

STEM = "conv/kernel"
INPUTS = ("inputs/divided_by", "inputs/mean", "inputs/std")  # arrays of a file that are not parameters
TORCH_RESNET = re.compile(r"(?:layer(\d)\.(\d)\.)?(conv|bn|downsample\.)(\d)\.(weight|bias)")
LAYER = "{layer}"
CONVERT = (
    "make one of arrays with numpy.savez; a PyTorch file becomes one by safetensors.torch.save_file(torch.load(path), "
    "new_path), and a safetensors file needs the ending .safetensors"
)

FilePath = Annotated[str | os.PathLike[str], spec.GIVEN_PATH]
Data = Annotated[FederatedData, spec.instance(FederatedData), Fix("the data on which the model was trained, or None")]
Names = Annotated[
    Mapping[str, Any],
    spec.instance(Mapping),  # type: ignore[type-abstract]
    Fix("fd.models.names.GPT2, for example"),
]
"""Paths of parameters and their names in a file. See `load_params`."""


class Source(NamedTuple):
    """Where a parameter is in a file."""

    patterns: list[str]  # regular expressions of the names in the file
    convert: Callable[..., np.ndarray]  # from their arrays to the parameter


@checked
def save_params(params: Params, path: FilePath, data: Data | None = None) -> None:
    """Saves parameters to a file for `load_params`, or for other programs.

    The file has one array per leaf. The name of the array is the path of the leaf, such as "classifier/dense/bias". If
    the name of the file ends with ".safetensors", it is a safetensors file, otherwise an npz file. Parameters in
    bfloat16 need a safetensors file.

    data: the training data. If given, the file also says which inputs the model expects, in three more float32 arrays:
    (x / divided_by - mean) / std, with x as stored in the data. They are "inputs/divided_by" [] (255 for uint8 images,
    otherwise 1), "inputs/mean" and "inputs/std" (0 and 1 without standardisation; [] or one value per channel).

    Raises ValueError for parameters that are empty or not numeric, ImportError if the package safetensors is needed and
    not installed, and OSError if the file can't be written.
    """
    target = Path(path)
    named = leaves.arrays(params)
    for leaf in named.values():
        if leaf.dtype.kind == "V" and not _is_safetensors(target.name):
            checks.refuse(
                f"params of the dtype {leaf.dtype} must be saved as safetensors",
                target.name,
                f"name it {target.stem}.safetensors",
            )
    if data is not None:
        standard = (0, 1) if data.mean is None else (data.mean, data.std)
        values = (255 if data.has_images else 1, *standard)
        named |= {name: np.asarray(value, np.float32) for name, value in zip(INPUTS, values, strict=True)}
    if _is_safetensors(target.name):  # which stores the bytes in the order of the memory
        content = _safetensors(target).save({name: np.asarray(leaf, order="C") for name, leaf in named.items()})
        target.write_bytes(content)
    else:
        if reserved := named.keys() & inspect.signature(np.savez).parameters:
            raise ConfigurationError(
                f"an npz file can't have an array with the name {min(reserved)}: name it {target.stem}.safetensors"
            )
        with open(target, "wb") as file:
            np.savez(file, **named)  # type: ignore[arg-type]


def save(path: FilePath, params: Params, data: Data | None = None) -> None:
    """Saves parameters to an npz or safetensors file. The same as ``save_params(params, path, data)``."""
    save_params(params, path, data)


@checked
def load(path: FilePath) -> dict[str, Any]:
    """Loads an npz or safetensors file as nested dicts of NumPy arrays, without a model.

    A name such as "classifier/dense/bias" becomes ``params["classifier"]["dense"]["bias"]``. For the parameters of a
    model, use `load_params`, which checks them.

    Raises the errors of `load_params` about the file.
    """
    arrays = _read(Path(path))
    params: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split("/")
        if any("/".join(folders[:n]) in arrays for n in range(1, len(folders) + 1)):
            checks.refuse(f"{path}: a name must not begin with the name of another array", name)
        inner = params
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = array
    return params


@checked
def load_params(
    model: GivenModel, path: FilePath, names: Names | None = None, fresh: leaves.Selection | None = None
) -> Params:
    """Loads the parameters of a model from an npz or safetensors file, such as those of `save_params`.

    To load parameters that another program has saved, pass ``names``, a dict from the paths of the model's parameters
    to the names in the file. The tables `fd.models.names.VIT`, `BERT` and `GPT2` are for files of Hugging Face's
    transformers. A value of the dict is either a name, or a tuple of one or more names and a function. The function
    gets the arrays of these names, and returns the parameter:

        {"dense/kernel": ("fc.weight", np.transpose), "dense/bias": "fc.bias"}

    - A name is a regular expression. It may have a prefix in the file, so "fc.bias" also finds "model.fc.bias".
    - A name with "{layer}" is for stacked parameters [depth, ...]. One array per layer is read, with 0, 1, ... in place
      of "{layer}".
    - Other arrays of the file are not used. Other paths of the dict are ignored.

    For `resnet18`, the file may also have the parameters of torchvision's ResNet-18. To export them in PyTorch, run
    ``numpy.savez(path, **{k: v.numpy() for k, v in resnet18(weights="DEFAULT").state_dict().items()})``.
    The scales and biases of group normalisation are then those of batch normalisation in the file. The running
    statistics are not used. The classifier is initialised randomly with key 0, because its classes differ. The stem is
    also initialised randomly, unless it is 7 x 7.

    Args:
      model: the model. Its parameters must all be in the file, or be selected by ``fresh``.
      path: the file.
      names: the names of the parameters in the file. Default: their paths.
      fresh: the parameters that are initialised randomly with key 0 instead of loaded: a regular expression that is
        searched in their paths such as "classifier", a function of the path, or a pytree of bools. Default: none.

    Returns:
      The parameters, with the dtypes of the model.

    Raises:
      FileNotFoundError: the file does not exist.
      ImportError: it is a safetensors file, and the package safetensors is not installed.
      ValueError: the file is neither an npz nor a safetensors file, is damaged, lacks parameters (the message lists
        them), or has arrays of other shapes.
    """
    path = Path(path)
    arrays = _read(path)
    expected = jax.eval_shape(model.init, jax.random.key(0))
    shapes = {path: leaf.shape for path, leaf in leaves.by_path(expected).items()}
    initialised = set[str]()  # the parameters that are initialised randomly instead of loaded
    if fresh is not None:
        selected = jax.tree.leaves(leaves.select("fresh", fresh, expected))
        initialised = {name for name, is_fresh in zip(shapes, selected, strict=True) if is_fresh}
    if names is not None:
        wanted = {name: shape for name, shape in shapes.items() if name not in initialised}
        arrays = _renamed(arrays, names, wanted, path)
    elif "layer1.0.conv1.weight" in arrays:
        arrays = dict(filter(None, map(_of_torch, arrays, arrays.values())))
        other_stem = _shape(arrays, STEM) != shapes.get(STEM)
        initialised |= {name for name in shapes if "classifier" in name or (name == STEM and other_stem)}
    wrong = [
        name for name in {**shapes, **arrays} if name not in initialised and _shape(arrays, name) != shapes.get(name)
    ]
    if wrong:
        held, wanted_shape = (
            "nothing" if shape is None else f"shape {list(shape)}"
            for shape in (_shape(arrays, wrong[0]), shapes.get(wrong[0]))
        )
        checks.refuse(
            f"{path} must have the model's parameters",
            f"{held} for {wrong[0]}, which is {wanted_shape} in the model ({len(wrong)} arrays don't fit: "
            f"{checks.listed(wrong)})",
            "use the model whose parameters were saved, or select parameters with fresh= to initialise them randomly",
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path_of(path) in initialised else np.asarray(arrays[path_of(path)], leaf.dtype),
        model.init(jax.random.key(0)) if initialised else expected,
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a file but those that describe the inputs. Those in bfloat16 become float32."""
    if _is_safetensors(path.name):
        with files.opened(path):
            arrays = _safetensors(path).load_file(path)
    else:
        try:
            arrays = files.arrays_of(path)
        except ValueError as error:
            got = f"{path}, which is no npz ({files.one_line(error.__cause__)})"
            checks.refuse("path must be an npz or safetensors file", got, CONVERT, error)
    if arrays.keys() >= set(INPUTS):
        arrays = {name: array for name, array in arrays.items() if name not in INPUTS}
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16":
            arrays[name] = array.astype(np.float32)
        elif array.dtype.kind not in "biuf":
            checks.refuse(f"{path}: {name} must be real numbers", array.dtype, "write it with save_params")
    return arrays


def _is_safetensors(filename: str) -> bool:
    return filename.lower().endswith(".safetensors")


def _safetensors(path: Path) -> Any:
    """The functions ``save`` and ``load_file`` of the package safetensors."""
    try:
        from safetensors import numpy
    except ImportError as error:
        raise MissingPackageError(f"{path.name} needs the package safetensors: pip install safetensors") from error
    return numpy


def _renamed(
    arrays: dict[str, np.ndarray], names: Names, shapes: dict[str, tuple[int, ...]], file: Path
) -> dict[str, np.ndarray]:
    """The parameters with these paths and shapes. Those that are not in the file are left out."""
    renamed = {}
    for path, source in _checked_names(names).items():
        if path not in shapes:
            continue
        stacked = any(LAYER in pattern for pattern in source.patterns)
        depth = shapes[path][0] if stacked and shapes[path] else 1
        *layers, next_layer = (_converted(path, source, layer, arrays, file) for layer in range(depth + 1))
        if any(layer is None for layer in layers):
            continue
        if stacked and next_layer is not None:
            checks.refuse(
                f"{file} must have as many layers as the model, {depth}", f"more for {path}", "use a model of its depth"
            )
        alike = len({layer.shape for layer in layers}) == 1
        renamed[path] = np.stack(layers) if stacked and alike else layers[0]
    return renamed


def _converted(path: str, source: Source, layer: int, arrays: dict[str, np.ndarray], file: Path) -> Any:
    """A parameter, or one layer of it, or None if the file lacks it."""
    names = [_find(arrays, pattern.replace(LAYER, str(layer)), file) for pattern in source.patterns]
    if not all(names):
        return None
    inputs = [arrays[name] for name in names]
    try:
        return np.asarray(source.convert(*inputs))
    except Exception as error:
        checks.refuse(
            f"names must have functions that accept the arrays of {file}",
            f"an error for {path} from the shapes {[[*array.shape] for array in inputs]}",
            checks.first_line(error),
            error,
        )


def _checked_names(names: Names) -> dict[str, Source]:
    checked = {}
    for path, source in names.items():
        *patterns, convert = source if isinstance(source, tuple) and source else (source, lambda array: array)
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns) or not callable(convert):
            checks.refuse(
                "each value of names must be a name or a tuple of names and a function",
                f"{checks.shown(source)} for {checks.shown(path)}",
            )
        for pattern in patterns:
            leaves.check(f"names[{path!r}]", pattern)
        checked[path] = Source(patterns, convert)
    return checked


def _find(names: Iterable[str], pattern: str, file: Path) -> str:
    """The name that matches, with any prefix that ends with a dot, or "". Raises ConfigurationError for several."""
    compiled = re.compile(rf"(?:.*\.)?(?:{pattern})")
    matches = [name for name in names if compiled.fullmatch(name)]
    if len(matches) > 1:
        checks.refuse(
            f"names must find one array each in {file}",
            f"{checks.listed(matches)} for {pattern!r}",
            "write more of the name",
        )
    return matches[0] if matches else ""


def _shape(arrays: dict[str, np.ndarray], name: str) -> tuple[int, ...] | None:
    return arrays[name].shape if name in arrays else None


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
