"""The clients of a federated file, one after the other: what all formats share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files

INSTALL = "msgpack h5py"  # the packages that read these files


class Rows(NamedTuple):
    """The data of one client in one file."""

    client: str
    x: np.ndarray
    """[n, ...], n >= 1."""
    y: np.ndarray
    """[n, ...]"""


def checked(client: str, x: Any, y: Any, rows: int) -> Iterator[Rows]:
    """Yields one `Rows`, or nothing for a client without examples. Labels like 5.0, which are whole, become int64.

    Raises `Wrong` unless x and y are numeric and have ``rows`` rows.
    """
    for kind, array in (("inputs", x), ("labels", y)):
        if not isinstance(array, np.ndarray) or array.size and array.dtype.kind not in "biuf":
            raise files.Wrong(
                f"the {kind} of client {client!r} must be numbers: encode text as integers, and write the file again"
            )
        if array.shape[:1] != (rows,):
            raise files.Wrong(
                f"the {kind} of client {client!r} must have {rows} rows, got {list(array.shape)}: copy or write the "
                "file again"
            )
    if rows:
        is_whole = y.dtype.kind == "f" and bool((np.abs(y) < 2**53).all() and (y == np.floor(y)).all())
        yield Rows(client, x, y.astype(np.int64) if is_whole else y)


def pick(columns: Any, x: str, y: str) -> tuple[Any, Any]:
    """Returns the columns of the inputs and the labels. Raises `Wrong` if there is none of this name."""
    for key in (x, y):
        if key not in columns:
            raise files.Wrong(
                f"it has no column {key!r}, only {checks.listed(columns) or 'none'}{checks.nearest(key, columns)}: "
                "pass the names of the columns as x= (inputs) and y= (labels)"
            )
    return columns[x], columns[y]
