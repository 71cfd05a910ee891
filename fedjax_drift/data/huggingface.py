"""Federations from data sets of Hugging Face (datasets)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedjax_drift import checks
from fedjax_drift.data import arrow, tables
from fedjax_drift.data.federated import FederatedData


def from_huggingface(
    dataset: Any,
    x: str | Sequence[str],
    y: str,
    client: str | None = None,
    partition: tables.Partition | None = None,
    test: Any = None,
    *,
    split: str = "train",
    length: int | None = None,
    padding: int = 0,
    truncate: bool = False,
    dtype: Any = None,
    client_tests: bool | None = None,
    name: str = "data",
) -> FederatedData:
    """Creates a federation from a `datasets.Dataset` or `datasets.DatasetDict`. Needs datasets.

    - Images become uint8 [H, W, 1] (grey) or [H, W, 3] (RGB). They must have one size.
    - Lists of numbers, also nested (Array2D), become arrays. Integers keep their dtype. Other numbers become float32.
      uint8 arrays [H, W] are grey images, and get a channel axis.
    - Columns of single numbers become features: float32 [F], where F is the number of columns in ``x``. Fractions may
      be rounded; integers must be exact.
    - Labels are integers, classes (ClassLabel), numbers, or lists of integers, such as the next tokens.

    The examples are copied once. They are not copied, and stay memory-mapped, if they are already in the order of the
    clients, their dtype does not change, and the column is one contiguous piece of an Arrow file (one record batch).

    Args:
      dataset: the data set. It must not be an iterable (streamed) data set.
      x: the column of the inputs, or a list of columns with single numbers.
      y: the column of the labels.
      client: the column of the clients, integers or strings. The clients are sorted, and their names are these values.
      partition: a partitioner of `fd.partition`, which gets the labels. Pass either ``client`` or ``partition``.
      test: the test set, a `datasets.Dataset` or the name of a split. Default: the split "test" of a DatasetDict, if
        it has one. To use a DatasetDict without its test set, pass ``dataset["train"]``.
      split: the name of the training split of a DatasetDict.
      length: lists are padded to this length. Default: all lists must have one length. It also applies to ``y``.
      padding: the number that shorter lists are filled with.
      truncate: if True, longer lists are cut to ``length``. If False, they raise ValueError.
      dtype: the dtype of the inputs, for example "int32" for columns of ids. It does not apply to images.
      client_tests: whether every client has its own test examples, which needs the column ``client`` in the test set.
        Default: True if all clients of the test set are training clients, otherwise the test set is pooled.
      name: the name of the data set in plots and logs.

    Raises:
      ValueError: a column is missing, or has text, missing values, damaged images, examples of several shapes or
        numbers that the dtype can't hold. The message names the column. Or an argument has a wrong value.
      ImportError: datasets is not installed.
    """
    tables.require("datasets", "from_huggingface")
    tables.check_clients(client, partition)
    train, tests = _splits(dataset, split, test)
    options = arrow.reading(length, padding, truncate, dtype)
    test_table = None
    if tests is not None:
        test_client = client if client in tests.column_names else None
        with tables.naming("test"):
            test_table = arrow.table(tests, x, y, test_client, options)
    train_table = arrow.table(train, x, y, client, options)
    return tables.federation(train_table, test_table, partition, client_tests, name, f"x={x!r}, y={y!r}")


def _splits(dataset: Any, split: str, test: Any) -> tuple[Any, Any]:
    """Returns the training set and the test set or None, both of type `datasets.Dataset`."""
    import datasets

    if isinstance(dataset, datasets.DatasetDict):
        checks.choice("split", split, dataset)
        if test is None and split != "test":
            test = dataset.get("test")
        elif isinstance(test, str):
            test = dataset[checks.choice("test", test, dataset)]
        dataset = dataset[split]
    return arrow.check_dataset("dataset", dataset), None if test is None else arrow.check_dataset("test", test)
