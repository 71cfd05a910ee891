"""Federations from map-style data sets of PyTorch: pairs of an input and a label."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.spec import Flag, checked

CONVERT = "convert it with a transform"
ClientOf = Sequence[int] | Sequence[str] | np.ndarray | Callable[[int], int | str]


@checked
def from_torch(
    dataset: Any,
    client_of: ClientOf | None = None,
    partition: tables.Partitioner | None = None,
    test: Any = None,
    *,
    test_client_of: ClientOf | None = None,
    channels_first: Flag = False,
    client_tests: Flag | None = None,
    name: str = "data",
) -> FederatedData:
    """Creates a federation from a map-style `torch.utils.data.Dataset` of pairs (input, label).

    Any object with ``len(dataset)`` and ``dataset[k] -> (input, label)`` works. Each example is read once, with its
    transforms, so random augmentation in a transform would be frozen: use `LocalTraining(augment=)` instead. A
    TensorDataset is read without a loop.

    Inputs and labels are tensors, arrays or numbers; inputs may also be grey or RGB images of Pillow. Arrays of
    integers keep their dtype. Other arrays become float32, and so do inputs that are single numbers, as features [1].
    uint8 arrays [H, W] are grey images, and get a channel axis. Labels that are text are numbered from 0 in sorted
    order.

    Args:
      dataset: M examples of one shape.
      client_of: the client of each example: M integers or strings, or a function of the number of the example. The
        clients are sorted, and their names are these values.
      partition, name: as in `from_huggingface`. Pass either ``client_of`` or ``partition``.
      test: the test set, such a data set. Default: no test set.
      test_client_of: the client of each test example, like ``client_of``. Default: the test set is pooled.
      channels_first: whether the inputs are arrays [C, H, W], as torchvision's ToTensor makes them. They become
        [H, W, C], which the models of this library need.
      client_tests: whether every client has its own test examples. Default: True if ``test_client_of`` is given and
        all clients of the test set are training clients, otherwise the test set is pooled.

    Raises:
      ValueError: the examples are not pairs of numbers of one shape, or a number does not fit in float32. Or an
        argument has a wrong value.
    """
    tables.check_clients(client_of, partition, "client_of")
    train = _table("dataset", dataset, client_of, channels_first)
    tests = None if test is None else _table("test", test, test_client_of, channels_first)
    return tables.from_table(train, tests, partition, "dataset", client_tests, name)


def _table(argument: str, dataset: Any, client_of: ClientOf | None, channels_first: bool) -> tables.Table:
    if not _is_map_style(dataset):
        what = f"{argument} must be a map-style data set with len(dataset) >= 1 and dataset[k]"
        checks.refuse(what, checks.shown(dataset), "read an iterable data set into a list")
    x, y = _columns(argument, dataset)
    if channels_first:
        if x.ndim != 4:
            got = f"inputs of shape {list(x.shape[1:])}"
            checks.refuse("channels_first=True needs images [C, H, W]", got, "leave it out")
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    x = tables.inputs([x], [f"{argument}: the inputs"], None, CONVERT)
    client = None if client_of is None else _clients(argument, client_of, len(dataset))
    return tables.Table(x, tables.labels(y, f"{argument}: the labels", CONVERT), client)


def _is_map_style(dataset: Any) -> bool:
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, Mapping):
        return False
    try:
        return len(dataset) > 0
    except TypeError:  # it has no length, or is an array without axes
        return False


def _columns(argument: str, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    torch = sys.modules.get("torch")  # without it, nothing is a TensorDataset
    if torch is not None and type(dataset) is torch.utils.data.TensorDataset and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        return _array(x, f"{argument}: the inputs"), _array(y, f"{argument}: the labels")
    first: list[np.ndarray] = []
    for k in range(len(dataset)):
        example = dataset[k]
        if not isinstance(example, tuple | list) or len(example) != 2:
            what = f"{argument}[{k}] must be a pair (input, label)"
            checks.refuse(what, checks.shown(example), "wrap the data set")
        pair = [_array(value, f"{argument}[{k}][{i}]") for i, value in enumerate(example)]
        if not first:
            first, columns = pair, [np.empty((len(dataset), *value.shape), value.dtype) for value in pair]
        for i, (column, value) in enumerate(zip(columns, pair, strict=True)):
            tables.check_alike(f"{argument}[{k}][{i}]", value, first[i], "a transform, image.convert('RGB')")
            column[k] = value[()]
    return columns[0], columns[1]


def _array(value: Any, name: str) -> np.ndarray:
    """Returns a tensor, an array, a number, an image or a text as an array. Text has the dtype object."""
    if isinstance(value, str):
        return np.array(value, object)
    if hasattr(value, "mode") and hasattr(value, "getbands"):
        return tables.pixels(value, name, "a transform, image.convert('RGB')", "with a transform")
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except Exception as error:  # a ragged list, or a tensor of a dtype that NumPy lacks
        got = f"{checks.type_of(value)} ({checks.first_line(error)})"
        checks.refuse(f"{name} must be a tensor, an array or a number", got, cause=error)


def _clients(argument: str, client_of: ClientOf, rows: int) -> np.ndarray:
    values: Any = client_of
    if callable(client_of):
        checks.function(argument, client_of, "it maps the number of an example to its client", takes=1)
        values = [client_of(k) for k in range(rows)]
    return checks.ids(f"the clients of {argument}", values, rows)
