"""Federations from the partitions of Flower Datasets (flwr-datasets)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import arrow, tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError


def from_flwr(
    source: Any,
    x: str | Sequence[str],
    y: str,
    test: Any = None,
    *,
    split: str = "train",
    length: int | None = None,
    padding: int = 0,
    truncate: bool = False,
    dtype: Any = None,
    name: str = "data",
) -> FederatedData:
    """Creates a federation from the partitions of Flower Datasets. Needs flwr-datasets.

    Partition i becomes client i, with its examples in the same order. So a simulation here and one in Flower can use
    the same partition. The partitions of a NaturalIdPartitioner become clients with names. Columns are read as in
    `from_huggingface`. The examples are copied once.

    Args:
      source: a `flwr_datasets.FederatedDataset`, or a `flwr_datasets.partitioner.Partitioner` whose ``dataset`` is set.
      x, y, length, padding, truncate, dtype, name: as in `from_huggingface`.
      test: the test set, a `datasets.Dataset`; or a Partitioner with the test examples of every client; or the name of
        a split of a FederatedDataset, which is partitioned if it has a partitioner, otherwise pooled. Default: the
        split "test" of a FederatedDataset, if it has one.
      split: the split of a FederatedDataset whose partitions are the clients.

    Raises:
      ValueError: as in `from_huggingface`; or a partition is empty.
      ImportError: flwr-datasets is not installed.
    """
    tables.require("flwr_datasets", "from_flwr")
    options = arrow.reading(length, padding, truncate, dtype)
    partitioner, tests = _partitioners(source, split, test)
    inputs, labels, sizes = _read(partitioner, x, y, options)
    x_test = y_test = test_sizes = None
    if tests is not None:
        x_test, y_test, test_sizes = _read(tests, x, y, options)
        test_sizes = test_sizes if _has_partitions(tests) else None
    natural = getattr(partitioner, "partition_id_to_natural_id", None)
    names = None if natural is None else tuple(str(natural[i]) for i in range(len(sizes)))
    with tables.naming(f"x={x!r}, y={y!r}"):
        return FederatedData(inputs, labels, sizes, x_test, y_test, test_sizes, name=name, client_names=names)


def _partitioners(source: Any, split: str, test: Any) -> tuple[Any, Any]:
    """Returns the partitioner of the clients, and the test set: a partitioner, a `datasets.Dataset` or None."""
    from flwr_datasets import FederatedDataset

    if isinstance(source, FederatedDataset):
        partitioners = source.partitioners  # this loads the data set
        checks.choice("split", split, partitioners)
        if test is None and split != "test":
            with contextlib.suppress(ConfigurationError):
                test = _split(source, "test")
        elif isinstance(test, str):
            test = _split(source, test)
        source = partitioners[split]
    if not _has_partitions(source):
        raise ConfigurationError(
            f"source must be a FederatedDataset, or a Partitioner whose dataset is set, got {checks.shown(source)}"
        )
    return source, test if test is None or _has_partitions(test) else arrow.check_dataset("test", test)


def _split(source: Any, name: str) -> Any:
    """Returns a split of a FederatedDataset: its partitioner if it has one, otherwise a `datasets.Dataset`."""
    try:
        return source.partitioners.get(name) or source.load_split(name)
    except ValueError as error:
        raise ConfigurationError(f"test must be a split of the data set, got {name!r}: {error}") from error


def _has_partitions(source: Any) -> bool:
    from flwr_datasets.partitioner import Partitioner

    return isinstance(source, Partitioner) and source.is_dataset_assigned()


def _read(
    source: Any, x: str | Sequence[str], y: str, options: arrow.Reading
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the inputs, the labels, and the sizes of the partitions. A `datasets.Dataset` is one partition."""
    parts = [source.load_partition(i) for i in range(source.num_partitions)] if _has_partitions(source) else [source]
    sizes = np.array([len(part) for part in parts])
    tables.column_names(x, y, None, parts[0].column_names)
    parts = [arrow.check_dataset("the partition", part) for part in parts if len(part)]
    inputs = itertools.chain.from_iterable(arrow.inputs(part, x, options) for part in parts)
    labels = itertools.chain.from_iterable(arrow.labels(part, y, options) for part in parts)
    rows = int(sizes.sum())
    return tables.gather(inputs, rows, None, f"column {x!r}"), tables.gather(labels, rows, None, f"column {y!r}"), sizes
