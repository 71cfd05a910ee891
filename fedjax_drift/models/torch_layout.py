"""Parameters in the layout of PyTorch."""

from __future__ import annotations

import jax
import numpy as np

from fedjax_drift.leaves import path_of
from fedjax_drift.types import Params

NAMES = {"kernel": "weight", "scale": "weight", "table": "weight"}  # PyTorch's names of parameters


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Converts the parameters of a model of `fd.models` to the names and layouts of a PyTorch state dict.

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
      params: such as ``state.params``.

    Returns:
      Name -> NumPy array with the dtype of the parameter. The arrays are copies.

    >>> import fedjax_drift as fd
    >>> params = fd.models.lenet5().init(jax.random.key(0))
    >>> {name: array.shape for name, array in fd.models.to_torch(params).items() if "0" in name}  # doctest: +ELLIPSIS
    {'convs_0.bias': (6,), 'convs_0.weight': (6, 1, 5, 5), ..., 'denses_0.weight': (120, 400)}
    """
    state: dict[str, np.ndarray] = {}
    for leaf_path, leaf in jax.tree.leaves_with_path(params):
        *layers, last = path_of(leaf_path).split("/")
        named = [(layers, np.asarray(leaf))]
        if layers[:1] == ["blocks"] and not "".join(layers[1:2]).isdigit():  # stacked, and not "blocks/0/..."
            named = [(["blocks", str(i), *layers[1:]], block) for i, block in enumerate(np.asarray(leaf))]
        for names, values in named:
            if last == "kernel":
                values = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values.T
            state[".".join([*names, NAMES.get(last, last)])] = np.array(values, order="C")
    return state
