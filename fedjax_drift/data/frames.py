"""Federations from data frames of pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.spec import checked

CONVERT = "convert it with pandas.to_numeric (text), pandas.get_dummies (categories) or astype('int64') (dates)"


@checked
def from_pandas(
    frame: Any,
    x: str | Sequence[str],
    y: str,
    client: str | None = None,
    partition: tables.Partitioner | None = None,
    test: Any = None,
    *,
    dtype: tables.Dtype | None = None,
    **options: Unpack[tables.Options],
) -> FederatedData:
    """Creates a federation from a `pandas.DataFrame`. Needs pandas.

    The inputs are float32 [F], where F is the number of columns in ``x``. Integers and truth values are converted, too;
    pass ``dtype="int32"`` for ids and tokens. Integer labels stay integers. Labels that are text are numbered from 0 in
    sorted order. Other labels become float32. Fractions may be rounded; integers must be exact.

    Args:
      frame: one row per example.
      x: the column of the inputs, or a list of columns. They must be numeric.
      y, client, partition, client_tests, name: as in `from_huggingface`.
      test: a frame with the test set. Default: no test set.
      dtype: the dtype of the inputs. Default: float32.

    Raises:
      ValueError: as in `from_huggingface`.
      ImportError: pandas is not installed.
    """
    files.require("pandas", "from_pandas")
    tables.check_clients(client, partition)
    train, tests = _table(frame, x, y, client, dtype), None
    if test is not None:
        with tables.naming("test"):
            tests = _table(test, x, y, client if client in getattr(test, "columns", ()) else None, dtype)
    return tables.from_table(train, tests, partition, f"x={x!r}, y={y!r}", **options)


def _table(frame: Any, x: str | Sequence[str], y: str, client: str | None, dtype: Any) -> tables.Table:
    import pandas as pd

    if not isinstance(frame, pd.DataFrame) or not len(frame):
        got = "no rows" if isinstance(frame, pd.DataFrame) else checks.type_of(frame)
        checks.refuse("the frame must be a pandas.DataFrame with at least 1 row", got)
    names = tables.column_names(x, y, client, list(frame.columns))
    owner = None if client is None else tables.clients(_column(frame, client), f"column {client!r}")
    labels = tables.labels(_column(frame, y), f"column {y!r}", CONVERT)
    titles, columns = [f"column {name!r}" for name in names], [_column(frame, name) for name in names]
    return tables.Table(tables.inputs(columns, titles, dtype, CONVERT), labels, owner)


def _column(frame: Any, name: str) -> np.ndarray:
    """Returns a column [M]. Text is an array of objects. Categories are replaced by their values."""
    column = frame[name]
    if column.ndim != 1:
        checks.refuse(f"column {name!r} must be one column", f"{column.shape[1]} of this name", "rename them")
    if (missing := column.isna()).any():
        got = f"{missing.sum()}, the first in row {missing.argmax()}"
        checks.refuse(f"column {name!r} must have no missing values", got, f"{tables.FILL}, frame.dropna()")
    return column.to_numpy()
