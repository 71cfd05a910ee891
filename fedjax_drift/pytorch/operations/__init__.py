"""The operations of PyTorch as functions of JAX arrays, by their names in PyTorch.

The arguments of a function are those of PyTorch's operation, in its order. ``dim`` is an axis, and may be negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedjax_drift.pytorch.operations import (
    attention,
    convolutions,
    creation,
    elementwise,
    embedding,
    losses,
    mode,
    normalisation,
    parts,
    pooling,
    products,
    recurrent,
    reductions,
    resizing,
    shapes,
    spectral,
)
from fedjax_drift.pytorch.operations.decomposed import DECOMPOSED

Table = dict[str, Callable[..., Any]]

# Of each number by itself, so in any layout.
ELEMENTWISE: Table = elementwise.ELEMENTWISE
# Of arrays in PyTorch's layout.
ARRAYS: Table = {
    **creation.ARRAYS,
    **shapes.ARRAYS,
    **parts.ARRAYS,
    **reductions.ARRAYS,
    **products.ARRAYS,
    **spectral.ARRAYS,
    **convolutions.ARRAYS,
    **normalisation.ARRAYS,
    **embedding.ARRAYS,
    **losses.ARRAYS,
    **resizing.ARRAYS,
}
# These take images as `Images` and as arrays.
OF_IMAGES: Table = {**convolutions.OF_IMAGES, **pooling.OF_IMAGES, **resizing.OF_IMAGES, **normalisation.OF_IMAGES}
# The first argument of these is the `Mode`.
IN_MODE: Table = {**mode.IN_MODE, **attention.IN_MODE, **recurrent.IN_MODE}
# And these also take images as `Images`.
OF_IMAGES_IN_MODE: Table = {**normalisation.OF_IMAGES_IN_MODE, **mode.OF_IMAGES_IN_MODE}
TABLES = (ELEMENTWISE, ARRAYS, OF_IMAGES, IN_MODE, OF_IMAGES_IN_MODE)


def covered(operation: str) -> str:
    """The name of an operation in a table or in `DECOMPOSED`, or "". operation: its name with its overload."""
    names = (operation, operation.partition(".")[0])
    return next((name for name in names if name in DECOMPOSED or any(name in table for table in TABLES)), "")
