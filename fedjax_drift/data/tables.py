"""Tables of examples become federations: what the readers of other libraries' data share.

A reader turns columns into arrays. It makes a `Table` of the training examples, one of the test examples, and calls
`from_table`, which numbers labels that are text and finds the examples of every client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.data import image_files, joining
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.data.partition import Partition, by_writer, classes, dirichlet, distribution, iid, long_tailed, shards
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Fix, Flag, Text, checked

FACTORIES = (iid, dirichlet, shards, classes, distribution, by_writer, long_tailed)
FILL = "fill the missing values, or leave out their rows"
NUMERIC = "an integer or a float dtype"
IGNORE_LABELS = ("iid", "by_writer")  # partitioners that work for any labels


def _partitioner(name: str, value: Any, fix: str) -> Any:
    if not callable(value) or value in FACTORIES:
        checks.refuse(f"{name} must be a partitioner such as fd.partition.iid(100, seed=0)", checks.shown(value), fix)
    return value


def _dtype(name: str, value: Any, fix: str) -> np.dtype:
    return checks.dtype(name, value, NUMERIC, lambda d: d.kind in "iuf", fix)


Partitioner = Annotated[Callable[..., list[np.ndarray]], spec.Spec(_partitioner, "partitioner", wrong=(3, iid))]
Dtype = Annotated[Any, spec.Spec(_dtype, "dtype", wrong=("O", 3), allowed=NUMERIC), Fix("or leave it out")]


class Table(NamedTuple):
    """M examples in the order of their source."""

    x: np.ndarray
    """[M, ...]"""
    y: np.ndarray
    """[M, ...] numbers, or [M] texts, dtype object."""
    client: np.ndarray | None = None
    """[M], the client of each example, integers or strings. None if the source does not say."""
    sizes: np.ndarray | None = None
    """[N], the number of examples of each client, if the examples are already grouped by client."""
    client_names: tuple[str, ...] | None = None
    """The names of the N clients. With ``client``, the names are its values."""


class Options(TypedDict, total=False):
    """The last arguments of `from_table`, which readers pass on."""

    client_tests: bool | None
    name: str


@checked
def from_table(
    train: Table,
    test: Table | None,
    partition: Partitioner | None,
    columns: str,
    client_tests: Flag | None = None,
    name: Text = "data",
) -> FederatedData:
    """Creates a federation whose clients are those of the table or those of a partition.

    The clients of a table are sorted, unless the table is already grouped by client.

    columns: the names of the columns, for messages.
    client_tests: whether the test set is split by client. None: if all clients of the test set are training clients.
    """
    if client_tests and test is None:
        checks.refuse("client_tests=True needs a test set", "none", "pass test=")
    with naming(columns):
        train, test = _numbered(train, test)
        (x, y, client, sizes, client_names), ids = train, None
        if partition is None and client is not None:
            ids = np.unique(client)
            client_names = tuple(map(str, ids))
        if sizes is None:
            parts = split(by_writer() if partition is None else partition, y, client)
            rows, sizes = joining.join_parts(parts, len(y), "parts")
            if not np.array_equal(rows, np.arange(len(y))):  # otherwise, x may stay in a memory map
                x, y = x[rows], y[rows]
        x_test = y_test = test_sizes = None
        if test is not None:
            x_test, y_test, _, test_sizes, _ = test
            order, test_sizes = (None, test_sizes) if test_sizes is not None else _test_order(test, ids, client_tests)
            x_test, y_test = (x_test, y_test) if order is None else (x_test[order], y_test[order])
        return FederatedData(x, y, sizes, x_test, y_test, test_sizes, name=name, client_names=client_names)


def _test_order(test: Table, ids: Any, client_tests: bool | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the order of the test examples and how many each client has; (None, None) for a pooled test set.

    ids: the training clients, sorted, or None for a partition.
    """
    client: Any = test.client
    if client is not None and ids is not None and {client.dtype.kind, ids.dtype.kind} == {"i", "u"}:
        client, ids = client.astype(object), ids.astype(object)  # NumPy would compare them as floats
    unknown = None if client is None or ids is None else client[~np.isin(client, ids)].tolist()
    if not (unknown == [] if client_tests is None else client_tests):
        return None, None
    if unknown is None or unknown:
        got = f"client {unknown[0]!r}" if unknown else "no clients"
        what = "client_tests=True needs a test set whose clients are all training clients"
        checks.refuse(what, got, "leave client_tests out for a pooled test set")
    owner = np.searchsorted(ids, client)
    return np.argsort(owner, kind="stable"), np.bincount(owner, minlength=len(ids))


def _numbered(train: Table, test: Table | None) -> tuple[Table, Table | None]:
    """Numbers labels that are text from 0, in the sorted order of those of the training examples."""
    if train.y.dtype != object:
        return train, test
    known = np.unique(train.y)
    if test is not None:
        unknown = test.y[~np.isin(test.y.astype(object), known)]
        if unknown.size:
            fix = "leave these examples out, or number the labels of both"
            checks.refuse("the test set must only have labels of the training set", checks.shown(unknown.item(0)), fix)
        test = test._replace(y=np.searchsorted(known, test.y))
    return train._replace(y=np.searchsorted(known, train.y)), test


def check_clients(client: Any, partition: Any, argument: str = "client") -> None:
    """Raises ValueError unless exactly one of the two is given."""
    if (client is None) == (partition is None):
        what = f"pass either {argument}= or partition= to say what the clients are"
        checks.refuse(what, "neither" if client is None else "both", "for example partition=fd.partition.iid(100)")


def split(partitioner: Partitioner, y: np.ndarray, writer: np.ndarray | None) -> list[np.ndarray]:
    """Returns the examples of each client. Labels that are not classes are for partitioners that ignore them."""
    if isinstance(partitioner, Partition) and (y.ndim != 1 or y.dtype.kind not in "iu"):
        if partitioner.name not in IGNORE_LABELS:
            what = "partition must be fd.partition.iid for labels that are not one integer per example"
            checks.refuse(what, f"{partitioner!r} and labels of {y.dtype}{list(y.shape[1:])}", "or pass the clients")
        y = np.zeros(len(y), np.int64)
    try:
        return partitioner(y, writer=writer)
    except TypeError as error:
        what = "partition must be a function of labels and writer="
        checks.refuse(what, "a function that raises", str(error), error)


def inputs(columns: Sequence[np.ndarray], names: Sequence[str], dtype: Any, fix: str) -> np.ndarray:
    """Returns the inputs [n, ...] of columns of numbers [n], or of one column of arrays [n, ...].

    Columns of numbers become float32 features [n, F]. Arrays of integers keep their dtype, and other arrays become
    float32. ``dtype`` replaces both. Grey images, uint8 [n, H, W], get a channel axis.

    names: what messages call the columns, such as "column 'age'". fix: how to make numbers of a column.
    """
    is_array = len(columns) == 1 and columns[0].ndim > 1
    converted = []
    for column, name in zip(columns, names, strict=True):
        kind = _numeric(column, name, fix)
        if not is_array and column.ndim != 1:
            what = f"{name} must have one number per example to be stacked with other columns"
            checks.refuse(what, f"{column.dtype}{list(column.shape[1:])}", "pass it alone")
        if not is_array and kind == "f" and not np.isfinite(column).all():
            checks.refuse(f"{name} must have finite numbers", "NaN or infinity", FILL)
        keeps = is_array and (kind in "iu" or column.dtype == np.float16)
        as_dtype = dtype or (column.dtype if keeps else np.float32)
        change = 'scale measurements, read ids as dtype="int32", or pass another dtype'
        converted.append(checks.converted(name, column, as_dtype, change))
    if not is_array:
        return np.stack(converted, axis=-1)
    (array,) = converted
    return array[..., None] if array.dtype == np.uint8 and array.ndim == 3 else array


def labels(array: np.ndarray, name: str, fix: str) -> np.ndarray:
    """Returns labels: integers and texts as they are, True and False as int32, and other numbers as float32."""
    if is_text(array):
        return array.astype(object)
    if _numeric(array, name, fix) == "b":
        return array.astype(np.int32)
    return checks.converted(name, array, np.float32, "scale the labels") if array.dtype.kind == "f" else array


def clients(array: np.ndarray, name: str) -> np.ndarray:
    """Returns the clients [M], integers or strings."""
    if array.ndim != 1 or not (array.dtype.kind in "iu" or is_text(array)):
        checks.refuse(f"{name} must have integers or strings as clients", _described(array))
    return array if array.dtype.kind in "iu" else array.astype(str)


def is_text(array: np.ndarray) -> bool:
    """Whether all values are strings."""
    return array.dtype.kind == "U" or array.dtype == object and all(isinstance(value, str) for value in array.flat)


def _numeric(array: np.ndarray, name: str, fix: str) -> str:
    """Returns the kind of the dtype. Raises ConfigurationError unless the values are numbers."""
    if array.dtype.kind not in "biuf":
        checks.refuse(f"{name} must be numeric", _described(array), fix)
    return array.dtype.kind


def _described(array: np.ndarray) -> str:
    odd = next((value for value in array.flat if not isinstance(value, Number)), None)
    return f"{array.dtype}{list(array.shape[1:]) or ''}" + (f" such as {checks.shown(odd)}" if odd is not None else "")


def pixels(image: Any, what: str, convert: str, scale: str) -> np.ndarray:
    """Returns a grey or RGB image of Pillow as uint8 [H, W, 1] or [H, W, 3].

    what, convert, scale: for messages: the image, how to change its mode, and how to apply a function to it.
    """
    mode = f"mode {image.mode!r}"
    if image_files.is_deep(image):
        checks.refuse(f"{what} must have 8 bits per channel", mode, f"scale the pixels to 0..255 {scale}")
    if image.mode not in ("L", "RGB"):
        checks.refuse(f"{what} must be grey or RGB (mode 'L' or 'RGB')", mode, f"convert it with {convert}")
    try:
        return np.asarray(image).reshape(image.height, image.width, -1)
    except Exception as error:  # Pillow may read the pixels of a file only now
        raise ConfigurationError(f"{what} can't be read ({checks.first_line(error)}): leave it out") from error


def check_alike(what: str, example: np.ndarray, first: np.ndarray, convert: str) -> None:
    """Raises ValueError unless an example has the shape and dtype of the first one. convert: see `pixels`."""
    if (example.shape, example.dtype) == (first.shape, first.dtype):
        return
    fix = "resize images, or pad lists to one length"
    if example.dtype != first.dtype:
        fix = "convert them to one dtype"
    elif example.ndim == 3 and example.shape[:2] == first.shape[:2]:
        fix = f"grey images and images in colour must be converted to one mode, with {convert}"
    wanted = f"{what} must be like the first example, {first.dtype}{list(first.shape)}"
    checks.refuse(wanted, f"{example.dtype}{list(example.shape)}", fix)


def column_names(x: Any, y: Any, client: Any, known: Sequence[str]) -> list[str]:
    """Returns ``x`` as a list of columns. Raises ValueError unless all columns are known."""
    listed = [x] if isinstance(x, str) else list(x) if isinstance(x, Sequence) else None
    if not listed:
        checks.refuse("x must be the name of a column, or a list of names", checks.shown(x))
    for name, column in [*(("x", one) for one in listed), ("y", y), ("client", client)]:
        if not (isinstance(column, str) and column in known or name == "client" and column is None):
            near, fix = "", "pass text; for a frame, rename its columns with frame.columns.map(str)"
            if isinstance(column, str):
                near, fix = checks.nearest(column, known), ""
            what = f"{name} must be one of the columns {checks.listed(known)}"
            checks.refuse(what, f"{checks.shown(column)}{near}", fix)
    if len(listed) > 1 and y in listed:
        checks.refuse("x must not have the column of the labels", repr(y), "leave it out of x")
    return listed


@contextlib.contextmanager
def naming(columns: str) -> Iterator[None]:
    """Adds the names of the columns to errors about the data."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{columns}: {error}") from error
