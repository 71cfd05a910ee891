"""Federations from data frames of pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.spec import Flag, checked


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
    client_tests: Flag | None = None,
    name: str = "data",
) -> FederatedData:
    """Creates a federation from a `pandas.DataFrame`. Needs pandas.

    The inputs are float32 [F], where F is the number of columns in ``x``. Integers and truth values are converted, too;
    pass ``dtype="int32"`` for ids and tokens. Integer labels stay integers. Other labels become float32. Fractions may
    be rounded; integers must be exact.

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
      ValueError: a column is missing, or has text, categories, missing values or numbers that the dtype can't hold. The
        message names the column. Or an argument has a wrong value.
      ImportError: pandas is not installed.
    """
    files.require("pandas", "from_pandas")
    tables.check_clients(client, partition)
    train = _table(frame, x, y, client, dtype)
    tests = None
    if test is not None:
        has_client = client is not None and client in getattr(test, "columns", ())
        with tables.naming("test"):
            tests = _table(test, x, y, client if has_client else None, dtype)
    return tables.from_table(train, tests, partition, client_tests, name, f"x={x!r}, y={y!r}")


def _table(frame: Any, x: str | Sequence[str], y: str, client: str | None, dtype: Any) -> tables.Table:
    import pandas as pd

    if not isinstance(frame, pd.DataFrame) or not len(frame):
        got = "no rows" if isinstance(frame, pd.DataFrame) else checks.type_of(frame)
        checks.refuse("the frame must be a pandas.DataFrame with at least 1 row", got)
    names = tables.column_names(x, y, client, list(frame.columns))
    columns, titles = [_numbers(frame, name) for name in names], [f"column {name!r}" for name in names]
    return tables.Table(
        lambda rows: tables.inputs(columns if rows is None else (c[rows] for c in columns), titles, dtype, rows),
        tables.labels(_numbers(frame, y), f"column {y!r}"),
        None if client is None else _clients(frame, client),
    )


def _numbers(frame: Any, name: str) -> np.ndarray:
    from pandas.api import types

    column = _complete(frame, name)
    is_category = column.dtype.name == "category"
    if types.is_bool_dtype(column.dtype) and not is_category:
        return column.to_numpy(bool)
    if types.is_integer_dtype(column.dtype):
        return _integers(column)
    if not types.is_numeric_dtype(column.dtype) or types.is_complex_dtype(column.dtype) or is_category:
        checks.refuse(f"column {name!r} must be numeric", _advice(column, f"frame[{name!r}]"))
    return column.to_numpy(np.float32 if column.dtype.itemsize <= 4 else np.float64)


def _integers(column: Any) -> np.ndarray:
    """Returns a column of integers as int64, or as uint64 if that is too small."""
    import pandas as pd

    if not pd.api.types.is_unsigned_integer_dtype(column.dtype):
        return column.to_numpy(np.int64)
    numbers = column.to_numpy(np.uint64)
    return numbers if numbers.max() >= 2**63 else numbers.astype(np.int64)


def _advice(column: Any, name: str) -> str:
    """Returns what a column has that is not numeric, and how to make it numeric."""
    import pandas as pd

    types = pd.api.types
    if column.dtype.name == "category":
        return f"categories: use their numbers, {name}.cat.codes, or one column per category, pandas.get_dummies(frame)"
    if types.is_datetime64_any_dtype(column.dtype):
        return f"dates: use the time since the first, ({name} - {name}.min()).dt.total_seconds()"
    if isinstance(column.dtype, pd.PeriodDtype):
        return f"periods: use their start, {name}.dt.start_time, and of it the time since the first"
    if types.is_timedelta64_dtype(column.dtype):
        return f"durations: use {name}.dt.total_seconds()"
    if types.is_complex_dtype(column.dtype):
        return f"complex numbers: use one column for numpy.real({name}) and one for numpy.imag({name})"
    if isinstance(column.iloc[0], list | tuple | np.ndarray):
        return f"arrays: pass them to fd.FederatedData.from_partition, as numpy.stack({name})"
    is_text = pd.to_numeric(column, errors="coerce").isna()
    if not is_text.any():
        return f"numbers as {column.dtype}: use {name}.astype(float)"
    if is_text.mean() < 0.5:
        row = int(is_text.argmax())
        return (
            f"numbers and {checks.shown(column.iloc[row])} in row {row}: correct the text, or make it missing with "
            f'pandas.to_numeric({name}, errors="coerce"), and {tables.FILL}, frame.dropna()'
        )
    return (
        f"{column.dtype}: number its values with pandas.factorize({name})[0], before you split off a test set; for "
        "inputs, one column per value, pandas.get_dummies(frame), has no order"
    )


def _clients(frame: Any, name: str) -> np.ndarray:
    import pandas as pd

    column = _complete(frame, name)
    if pd.api.types.is_integer_dtype(column.dtype):
        return _integers(column)
    if (kind := pd.api.types.infer_dtype(column)) not in ("string", "categorical"):
        checks.refuse(f"column {name!r} must have integers or strings as clients", kind)
    return column.to_numpy(object).astype(str)


def _complete(frame: Any, name: str) -> Any:
    """Returns a column. Raises ValueError if it has missing values, or if several columns have this name.

    A sparse column becomes a dense one, because few functions of pandas accept the other.
    """
    import pandas as pd

    column = frame[name]
    if column.ndim != 1:
        checks.refuse(f"column {name!r} must be one column", f"{column.shape[1]} of this name", "rename them")
    if (missing := column.isna()).any():
        got = f"{missing.sum()}, the first in row {missing.argmax()}"
        checks.refuse(f"column {name!r} must have no missing values", got, f"{tables.FILL}, frame.dropna()")
    return column.sparse.to_dense() if isinstance(column.dtype, pd.SparseDtype) else column
