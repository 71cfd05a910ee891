"""Federations from data sets of Hugging Face (datasets), whose columns are Arrow arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.data import files, image_files, tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Count, Flag, checked

Padding = Annotated[int, spec.integer(-(2**31), checks.LARGE)]
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.IGNORECASE)
ROWS = 1024  # examples that are read at once if they are decoded or copied


@checked
def from_huggingface(
    dataset: Any,
    x: str | Sequence[str],
    y: str,
    client: str | None = None,
    partition: tables.Partitioner | None = None,
    test: Any = None,
    *,
    split: str = "train",
    length: Count | None = None,
    padding: Padding = 0,
    truncate: Flag = False,
    dtype: tables.Dtype | None = None,
    client_tests: Flag | None = None,
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
    files.require("datasets", "from_huggingface")
    tables.check_clients(client, partition)
    train, test = _splits(dataset, split, test)
    options, tests = Conversion(length, padding, truncate, dtype), None
    if test is not None:
        with tables.naming("test"):
            tests = table(test, x, y, client if client in test.column_names else None, options)
    return tables.from_table(
        table(train, x, y, client, options), tests, partition, client_tests, name, f"x={x!r}, y={y!r}"
    )


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
    return check_dataset("dataset", dataset), None if test is None else check_dataset("test", test)


class Conversion(NamedTuple):
    """The conversion of columns to arrays. See `from_huggingface`."""

    length: int | None
    padding: int
    truncate: bool
    dtype: np.dtype | None


def check_dataset(name: str, dataset: Any) -> Any:
    """Returns the data set. Raises ValueError unless it is a `datasets.Dataset` with examples."""
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        is_stream = isinstance(dataset, datasets.IterableDataset)
        fix = "load it without streaming=True" if is_stream else "make one, for example with Dataset.from_dict"
        checks.refuse(f"{name} must be a datasets.Dataset", checks.type_of(dataset), fix)
    if dataset.format["type"] == "custom":
        why = "have no transform (set_transform), because it would not be applied: use dataset.map"
        raise ConfigurationError(f"{name} must {why}")
    if len(dataset) == 0:
        checks.refuse(f"{name} must have at least 1 example", 0)
    return dataset


def table(dataset: Any, x: str | Sequence[str], y: str, client: str | None, options: Conversion) -> tables.Table:
    """Returns the columns of a data set of M examples as a table."""
    tables.column_names(x, y, client, dataset.column_names)
    return tables.Table(
        lambda rows: tables.gather(inputs(dataset, x, options, rows is None), len(dataset), rows, f"column {x!r}"),
        tables.gather(labels(dataset, y, options), len(dataset), None, f"column {y!r}"),
        None if client is None else clients(dataset, client),
    )


def inputs(dataset: Any, x: str | Sequence[str], options: Conversion, whole: bool = True) -> Iterator[np.ndarray]:
    """Yields the inputs of consecutive examples, [n, ...].

    whole: whether a contiguous piece of the table is one block, which then is a view if its dtype does not change.
    """
    names = [x] if isinstance(x, str) else list(x)
    titles = [f"column {name!r}" for name in names]
    fix = "convert it to numbers with dataset.map, for example by a tokenizer"
    for rows, columns in _batches(dataset, names, whole):
        arrays = [_array(columns[name], rows, dataset.features[name], name, options, fix) for name in names]
        yield tables.inputs(arrays, titles, options.dtype, rows)


def labels(dataset: Any, y: str, options: Conversion) -> Iterator[np.ndarray]:
    """Yields the labels of consecutive examples, [n] or [n, length]."""
    import datasets

    fix = f"number the classes with dataset.class_encode_column({y!r})"
    is_class = isinstance(dataset.features[y], datasets.ClassLabel)
    for rows, columns in _batches(dataset, [y]):
        array = _array(columns[y], rows, dataset.features[y], y, options, fix)
        array = tables.labels(array, f"column {y!r}", rows)
        if is_class and array.min() < 0:
            got = f"{array.min()}, which stands for an unknown label"
            fix = "leave these examples out with dataset.filter, or, if it is the test set, pass another one as test="
            checks.refuse(f"column {y!r} must have classes >= 0", got, fix)
        yield array


def clients(dataset: Any, name: str) -> np.ndarray:
    """Returns the client of each example [M], integers or strings."""
    import pyarrow as pa

    parts = []
    for _, columns in _batches(dataset, [name]):
        column = columns[name]
        _check_complete(column, name)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            encoded = column.dictionary_encode()
            parts.append(np.array(encoded.dictionary.to_pylist(), str)[encoded.indices.to_numpy()])
        elif pa.types.is_integer(column.type):
            parts.append(column.to_numpy())
        else:
            checks.refuse(f"column {name!r} must have integers or strings as clients", column.type)
    return np.concatenate(parts)


def _batches(dataset: Any, names: Sequence[str], whole: bool = True) -> Iterator[tuple[range, dict[str, Any]]]:
    """Yields the numbers of consecutive examples, and their columns as Arrow arrays.

    The arrays are views unless rows of the data set were selected.
    """
    import datasets

    view = dataset.select_columns(list(dict.fromkeys(names))).with_format("arrow")
    in_order = dataset._indices is None
    whole &= not any(isinstance(dataset.features[name], datasets.Image) for name in names)
    begin = 0
    for part in [view[:]] if in_order else view.iter(ROWS):
        for batch in part.to_batches(None if whole else ROWS):
            if batch.num_rows:
                rows = range(begin, begin := begin + batch.num_rows)
                yield rows, dict(zip(batch.schema.names, batch.columns, strict=True))


def _array(column: Any, rows: range, feature: Any, name: str, options: Conversion, fix: str) -> np.ndarray:
    import datasets

    if not isinstance(feature, datasets.Image):
        return _numbers(column, name, options, fix)
    _check_complete(column, name)
    convert, images = f"dataset.cast_column({name!r}, datasets.Image(mode='RGB'))", []
    for row, one in zip(rows, column.to_pylist(), strict=True):
        what = f"column {name!r}: the image in row {row}"
        try:
            image = datasets.Image().decode_example(one)
            deep = image_files.is_deep(image)  # changing its mode would clip the pixels
            image = image.convert(feature.mode) if feature.mode and not deep else image
        except Exception as error:  # Pillow raises various errors for damaged images
            raise ConfigurationError(f"{what} can't be read ({files.one_line(error)}): leave it out") from error
        images.append(tables.pixels(image, what, convert, "with dataset.map"))
        tables.check_alike(what, images[-1], images[0], convert)
    return np.stack(images)


def _numbers(column: Any, name: str, options: Conversion, fix: str, is_inner: bool = False) -> np.ndarray:
    """Returns numbers [n], or lists of numbers [n, ...]. The outer lists are padded if a length is given."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    kind, is_kind = column.type, pa.types
    _check_complete(column, name)
    if is_kind.is_integer(kind) or is_kind.is_floating(kind) or is_kind.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    if not (is_kind.is_list(kind) or is_kind.is_large_list(kind) or is_kind.is_fixed_size_list(kind)):
        checks.refuse(f"column {name!r} must have numbers, or lists of numbers", _advice(column, name, fix))
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    values = _numbers(column.flatten(), name, options, fix, is_inner=True)
    if options.length is not None and not is_inner:
        return _padded(values, lengths, name, options)
    if len(lengths) and lengths.min() < lengths.max():
        got, fix = f"{lengths.min()} to {lengths.max()}", "pass length=, to which shorter lists are padded"
        checks.refuse(f"column {name!r} must have lists of one length", got, fix)
    return values.reshape(len(lengths), *lengths[:1], *values.shape[1:])


def _advice(column: Any, name: str, fix: str) -> str:
    """Returns what a column has that is not numeric, and how to make it numeric. fix: the fix for text."""
    import pyarrow as pa

    kind, is_kind = column.type, pa.types
    types = {is_kind.is_decimal: "float64", is_kind.is_date32: "int32", is_kind.is_temporal: "int64"}
    if is_kind.is_string(kind) or is_kind.is_large_string(kind):
        texts = column[:1000].to_pylist()
        others = [text for text in texts if not NUMBER.fullmatch(text)]
        if 0 < len(others) < len(texts) / 2:
            number = f"None if row[{name!r}] == {others[0]!r} else float(row[{name!r}])"
            return (
                f"text that is numbers and {checks.shown(others[0])}: correct the text, or make it missing with "
                f"dataset.map(lambda row: {{{name!r}: {number}}}), and {tables.FILL} with dataset.filter"
            )
        if not others:
            types = {is_kind.is_string: "float32" if any("." in text for text in texts) else "int64"}
    dtype = next((dtype for test, dtype in types.items() if test(kind)), None)
    return f"{kind}: {fix if dtype is None else f'dataset.cast_column({name!r}, datasets.Value({dtype!r}))'}"


def _padded(values: np.ndarray, lengths: np.ndarray, name: str, options: Conversion) -> np.ndarray:
    """Returns the lists, whose values are consecutive, padded or cut to options.length."""
    length = options.length or 0
    if lengths.max() > length and not options.truncate:
        what = f"column {name!r} must have lists of at most length={length} values"
        checks.refuse(what, lengths.max(), "use a larger length, or truncate=True")
    if (lengths == length).all():
        return values.reshape(len(lengths), length, *values.shape[1:])
    with np.errstate(all="ignore"):
        padding = np.array(options.padding).astype(values.dtype)
    if padding.item() != options.padding:
        what = f"padding must be in the range of {values.dtype}, the dtype of column {name!r}"
        checks.refuse(what, options.padding)
    padded = np.full((len(lengths), length, *values.shape[1:]), padding)
    place = np.arange(length)
    is_value = place < lengths[:, None]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    padded[is_value] = values[(starts[:, None] + place)[is_value]]
    return padded


def _check_complete(column: Any, name: str) -> None:
    if column.null_count:
        fix = f"{tables.FILL} with dataset.filter"
        checks.refuse(f"column {name!r} must have no missing values", column.null_count, fix)
