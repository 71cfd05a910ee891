"""Parameters in the layout of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.leaves import arrays
from fedjax_drift.pytorch.network import flat
from fedjax_drift.types import Params

NAMES = {"kernel": "weight", "scale": "weight", "table": "weight"}  # PyTorch's names of parameters


def to_torch(params: Params, module: Any = None) -> dict[str, np.ndarray]:
    """Converts parameters to the names and layouts of a PyTorch state dict.

    The parameters of `Model.from_torch` have them already. Pass the module, and it gets their values, and those of the
    running statistics: ``fd.models.to_torch(state.params, module)``.

    The parameters of a model of `fd.models` are converted.
    ``module.load_state_dict({name: torch.from_numpy(array) for name, array in to_torch(params).items()})`` then loads
    them into a module of your own whose layers have the same names.

    - Names have dots: "convs_0/kernel" becomes "convs_0.weight". A kernel, a scale and a table are a weight.
    - Kernels of convolutions [h, w, in, out] become [out, in, h, w], and those of dense layers [in, out] become
      [out, in].
    - The stacked blocks of a transformer become "blocks.0.attention.query.weight", "blocks.1...." and so on.

    The networks with convolutions flatten images as PyTorch does, channels first. So the first dense layer after the
    convolutions needs no further change. A network without convolutions flattens its inputs [B, H, W, C] as they are.
    PyTorch must flatten them in the same order: ``x.permute(0, 2, 3, 1).flatten(1)`` for images [B, C, H, W] with
    several channels.

    Args:
      params: such as ``state.params``. Of a model that trains only a part (`lora`, `trainable`), those of the whole
        model, which `merge` returns.
      module: a ``torch.nn.Module`` with the layers of `Model.from_torch`, which is changed. Default: the parameters are
        those of a model of `fd.models`.

    Returns:
      Name -> NumPy array with the dtype of the parameter. The arrays are copies.

    Raises:
      ValueError: the parameters are no arrays of numbers; or the module is none of PyTorch's, has no parameter or
        buffer of a name, or one of another shape.
      ImportError: a module is given, and PyTorch is not installed.

    >>> import jax
    >>> import fedjax_drift as fd
    >>> params = fd.models.lenet5().init(jax.random.key(0))
    >>> {name: array.shape for name, array in fd.models.to_torch(params).items() if "0" in name}  # doctest: +ELLIPSIS
    {'convs_0.bias': (6,), 'convs_0.weight': (6, 1, 5, 5), ..., 'denses_0.weight': (120, 400)}
    """
    by_path = arrays(params)
    if module is not None:
        return _loaded(params, module)
    state: dict[str, np.ndarray] = {}
    for path, leaf in by_path.items():
        *layers, last = path.split("/")
        named = [(layers, leaf)]
        if layers[:1] == ["blocks"] and not "".join(layers[1:2]).isdigit():  # stacked, and not "blocks/0/..."
            named = [(["blocks", str(i), *layers[1:]], block) for i, block in enumerate(leaf)]
        for names, values in named:
            if last == "kernel":
                values = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values.T
            state[".".join([*names, NAMES.get(last, last)])] = np.array(values, order="C")
    return state


def _loaded(params: Params, module: Any) -> dict[str, np.ndarray]:
    """Copies parameters and running statistics into a module, and returns them by name."""
    files.require("torch", "to_torch with a module", '"fedjax-drift[torch]"')
    import torch

    checks.instance("module", module, torch.nn.Module, "a class must be called, Net()")
    checks.instance("params", params, dict, "pass state.params of a model of Model.from_torch")
    parts = [params["params"], params["batch_stats"]] if {*params} == {"params", "batch_stats"} else [params]
    values = {name: np.array(value) for part in parts for name, value in flat(part).items()}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in values.items():
        if name not in tensors or tuple(tensors[name].shape) != value.shape:
            has = f"one of shape {[*tensors[name].shape]}" if name in tensors else "none"
            checks.refuse(
                f"module must have a parameter {name} of shape {[*value.shape]}",
                has,
                "pass a module of the class that Model.from_torch got, and of a model that trains only a part the "
                "parameters of fd.models.merge",
            )
    with torch.no_grad():
        for name, value in values.items():
            has_dtype = value.dtype.kind != "V"  # NumPy's bfloat16 is none of PyTorch's dtypes
            tensors[name].copy_(torch.from_numpy(value if has_dtype else value.astype(np.float32)))
    return values
