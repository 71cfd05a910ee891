"""Federations from data frames of pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_drift.data import tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError


def from_pandas(
    frame: Any,
    x: str | Sequence[str],
    y: str,
    client: str | None = None,
    partition: tables.Partition | None = None,
    test: Any = None,
    *,
    dtype: Any = None,
    client_tests: bool | None = None,
    name: str = "data",
) -> FederatedData:
    """Creates a federation from a `pandas.DataFrame`. Needs pandas.

    The inputs are float32 [F], where F is the number of columns in ``x``. Integers and truth values are converted, too;
    pass ``dtype="int32"`` for ids and tokens. Integer labels stay integers. Other labels become float32.

    Args:
      frame: one row per example.
      x: the column of the inputs, or a list of columns. They must be numeric.
      y: the column of the labels.
      client: the column of the clients, integers or strings. The clients are sorted, and their names are these values.
      partition: a partitioner of `fd.partition`, which gets the labels. Pass either ``client`` or ``partition``.
      test: a frame with the test set. Default: no test set.
      dtype: the dtype of the inputs. Default: float32.
      client_tests: whether every client has its own test examples, which needs the column ``client`` in ``test``.
        Default: True if all clients of the test set are training clients, otherwise the test set is pooled.
      name: the name of the data set in plots and logs.

    Raises:
      ValueError: a column is missing, or has text, categories or missing values. The message names the column. Or an
        argument has a wrong value.
      ImportError: pandas is not installed.
    """
    tables.require("pandas", "pandas", "from_pandas")
    tables.check_clients(client, partition)
    train = _table(frame, x, y, client, dtype)
    tests = None
    if test is not None:
        has_client = client is not None and client in getattr(test, "columns", ())
        with tables.naming("test"):
            tests = _table(test, x, y, client if has_client else None, dtype)
    return tables.federation(train, tests, partition, client_tests, name, f"x={x!r}, y={y!r}")


def _table(frame: Any, x: str | Sequence[str], y: str, client: str | None, dtype: Any) -> tables.Table:
    import pandas as pd

    if not isinstance(frame, pd.DataFrame) or not len(frame):
        got = "no rows" if isinstance(frame, pd.DataFrame) else f"a {type(frame).__name__}"
        raise ConfigurationError(f"the frame must be a pandas.DataFrame with at least 1 row, got {got}")
    names, dtype = tables.column_names(x, y, client, list(frame.columns)), tables.checked_dtype(dtype)
    columns = [_numbers(frame, name) for name in names]
    return tables.Table(
        lambda rows: tables.inputs([column if rows is None else column[rows] for column in columns], names, dtype),
        tables.labels(_numbers(frame, y)),
        None if client is None else _clients(frame, client),
    )


def _numbers(frame: Any, name: str) -> np.ndarray:
    import pandas as pd

    column = _complete(frame, name)
    if isinstance(column.dtype, pd.CategoricalDtype):
        raise ConfigurationError(
            f"column {name!r} must be numeric, got categories: use their numbers, frame[{name!r}].cat.codes, or one "
            "column per category, pandas.get_dummies(frame)"
        )
    if not pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_complex_dtype(column.dtype):
        raise ConfigurationError(
            f"column {name!r} must be numeric, got {column.dtype}: number its values with "
            f"pandas.factorize(frame[{name!r}])[0]"
        )
    if pd.api.types.is_bool_dtype(column.dtype):
        return column.to_numpy(bool)
    if pd.api.types.is_integer_dtype(column.dtype):
        return column.to_numpy(np.int64)
    return column.to_numpy(np.float64 if column.dtype.itemsize == 8 else np.float32)


def _clients(frame: Any, name: str) -> np.ndarray:
    import pandas as pd

    column = _complete(frame, name)
    if pd.api.types.is_integer_dtype(column.dtype):
        return column.to_numpy(np.int64)
    if (kind := pd.api.types.infer_dtype(column)) not in ("string", "categorical"):
        raise ConfigurationError(f"column {name!r} must have integers or strings as clients, got {kind}")
    return column.to_numpy(object).astype(str)


def _complete(frame: Any, name: str) -> Any:
    """Returns a column. Raises ValueError if it has missing values, or if several columns have this name."""
    column = frame[name]
    if column.ndim != 1:
        raise ConfigurationError(f"column {name!r} must be one column, got {column.shape[1]} of this name: rename them")
    if (missing := column.isna()).any():
        raise ConfigurationError(
            f"column {name!r} must have no missing values, got {missing.sum()}, the first in row {missing.argmax()}: "
            f"{tables.FILL}, frame.dropna()"
        )
    return column
