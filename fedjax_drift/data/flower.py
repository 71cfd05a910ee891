"""Federations from the partitions of Flower Datasets (flwr-datasets)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, huggingface, tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import checked


@checked
def from_flwr(
    source: Any,
    x: str | Sequence[str],
    y: str,
    test: Any = None,
    *,
    split: str = "train",
    name: str = "data",
    **options: Unpack[huggingface.ConversionOptions],
) -> FederatedData:
    """Creates a federation from the partitions of Flower Datasets. Needs flwr-datasets.

    Partition i becomes client i, with its examples in the same order. So a simulation here and one in Flower can use
    the same partition. The partitions of a NaturalIdPartitioner become clients with names. Columns are read as in
    `from_huggingface`.

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
    files.require("flwr_datasets", "from_flwr")
    conversion = huggingface.Conversion(**options)
    partitioner, test = _partitioners(source, split, test)
    train, tests = _table(partitioner, x, y, conversion), None if test is None else _table(test, x, y, conversion)
    return tables.from_table(train, tests, None, f"x={x!r}, y={y!r}", name=name)


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
        what = "source must be a FederatedDataset, or a Partitioner whose dataset is set"
        checks.refuse(what, checks.shown(source))
    return source, test if test is None or _has_partitions(test) else huggingface.check_dataset("test", test)


def _split(source: Any, name: str) -> Any:
    """Returns a split of a FederatedDataset: its partitioner if it has one, otherwise a `datasets.Dataset`."""
    try:
        return source.partitioners.get(name) or source.load_split(name)
    except ValueError as error:
        checks.refuse("test must be a split of the data set", repr(name), str(error), error)


def _has_partitions(source: Any) -> bool:
    from flwr_datasets.partitioner import Partitioner

    return isinstance(source, Partitioner) and source.is_dataset_assigned()


def _table(source: Any, x: str | Sequence[str], y: str, conversion: huggingface.Conversion) -> tables.Table:
    """Returns the examples of a `datasets.Dataset`, or of the partitions of a Partitioner."""
    import datasets

    if not _has_partitions(source):
        return huggingface.table(source, x, y, None, conversion)
    parts = [source.load_partition(i) for i in range(source.num_partitions)]
    examples = datasets.concatenate_datasets([part for part in parts if len(part)] or parts[:1])
    natural = getattr(source, "partition_id_to_natural_id", None)
    names = None if natural is None else tuple(str(natural[i]) for i in range(len(parts)))
    table = huggingface.table(huggingface.check_dataset("the partition", examples), x, y, None, conversion)
    return table._replace(sizes=np.array([len(part) for part in parts]), client_names=names)
