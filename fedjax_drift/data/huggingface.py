"""Federations from data sets of Hugging Face (datasets), whose columns are Arrow arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.data import files, image_files, tables
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Count, Flag, checked

Padding = Annotated[int, spec.integer(-(2**31), checks.LARGE)]
ROWS = 1024  # examples that are read at once if they are images, or rows of the data set were selected
CONVERT = "convert it with dataset.map (a tokenizer), or with dataset.cast_column(name, datasets.Value('float32'))"


@dataclass(frozen=True)
@checked
class Conversion:
    """The conversion of columns to arrays. See `from_huggingface`."""

    length: Count | None = None
    padding: Padding = 0
    truncate: Flag = False
    dtype: tables.Dtype | None = None


class ConversionOptions(TypedDict, total=False):
    """The fields of `Conversion`, which are keyword arguments of the readers."""

    length: int | None
    padding: int
    truncate: bool
    dtype: Any


class Options(ConversionOptions, tables.Options):
    """The last arguments of `from_huggingface`."""


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
    **options: Unpack[Options],
) -> FederatedData:
    """Creates a federation from a `datasets.Dataset` or `datasets.DatasetDict`. Needs datasets.

    - Images become uint8 [H, W, 1] (grey) or [H, W, 3] (RGB). They must have one size.
    - Lists of numbers, also nested (Array2D), become arrays. Integers keep their dtype. Other numbers become float32.
      uint8 arrays [H, W] are grey images, and get a channel axis.
    - Columns of single numbers become features: float32 [F], where F is the number of columns in ``x``. Fractions may
      be rounded; integers must be exact.
    - Labels are integers, classes (ClassLabel), numbers, or lists of integers, such as the next tokens. Labels that are
      text are numbered from 0 in sorted order.

    The examples are copied. They are not copied, and stay memory-mapped, if they are already in the order of the
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
      padding: the number that shorter lists are filled with. Default: 0.
      truncate: if True, longer lists are cut to ``length``. If False (default), they raise ValueError.
      dtype: the dtype of the inputs, for example "int32" for columns of ids. It does not apply to images.
      client_tests: whether every client has its own test examples, which needs the column ``client`` in the test set.
        Default: True if all clients of the test set are training clients, otherwise the test set is pooled.
      name: the name of the data set in plots and logs. Default: "data".

    Raises:
      ValueError: a column is missing, or has missing values, damaged images, examples of several shapes or numbers that
        the dtype can't hold; an input is no number; or a label of the test set is not in the training set. The message
        names the column. Or an argument has a wrong value.
      ImportError: datasets is not installed.
    """
    files.require("datasets", "from_huggingface")
    tables.check_clients(client, partition)
    rest: dict[str, Any] = {**options}
    conversion = Conversion(**{name: rest.pop(name) for name in ConversionOptions.__annotations__ if name in rest})
    train, test = _splits(dataset, split, test)
    made, tests = table(train, x, y, client, conversion), None
    if test is not None:
        with tables.naming("test"):
            tests = table(test, x, y, client if client in test.column_names else None, conversion)
    return tables.from_table(made, tests, partition, f"x={x!r}, y={y!r}", **rest)


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


def table(dataset: Any, x: str | Sequence[str], y: str, client: str | None, conversion: Conversion) -> tables.Table:
    """Returns the columns of a data set of M examples as a table."""
    names = tables.column_names(x, y, client, dataset.column_names)
    titles = [f"column {name!r}" for name in names]

    clients = None if client is None else tables.clients(_column(dataset, client, conversion), f"column {client!r}")
    y_values = tables.labels(_column(dataset, y, conversion), f"column {y!r}", CONVERT)
    columns = [_column(dataset, name, conversion) for name in names]
    return tables.Table(tables.inputs(columns, titles, conversion.dtype, CONVERT), y_values, clients)


def _column(dataset: Any, name: str, conversion: Conversion) -> np.ndarray:
    """Returns a column as an array: a view of the Arrow file, if it is one contiguous piece of it."""
    import datasets

    view = dataset.select_columns([name]).with_format("arrow")
    size = ROWS if isinstance(dataset.features[name], datasets.Image) else None
    parts, begin = list[np.ndarray](), 0
    for piece in [view[:]] if dataset._indices is None else view.iter(ROWS):
        for batch in piece.to_batches(size):
            if batch.num_rows:
                rows = range(begin, begin := begin + batch.num_rows)
                parts.append(_array(batch[name], rows, dataset.features[name], name, conversion))
                if parts[0].dtype != object:
                    what = f"column {name!r}: row {rows[0]}"
                    tables.check_alike(what, parts[-1][0], parts[0][0], "dataset.cast_column")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _array(column: Any, rows: range, feature: Any, name: str, conversion: Conversion) -> np.ndarray:
    import datasets

    if not isinstance(feature, datasets.Image):
        return _values(column, name, conversion)
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


def _values(column: Any, name: str, conversion: Conversion, is_inner: bool = False) -> np.ndarray:
    """Returns numbers or texts [n], or lists of them [n, ...]. The outer lists are padded if a length is given."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    kind, is_kind = column.type, pa.types
    _check_complete(column, name)
    if is_kind.is_integer(kind) or is_kind.is_floating(kind) or is_kind.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    if is_kind.is_string(kind) or is_kind.is_large_string(kind):
        encoded = column.dictionary_encode()  # a text that occurs often is one object
        return np.array(encoded.dictionary.to_pylist(), object)[encoded.indices.to_numpy()]
    if not (is_kind.is_list(kind) or is_kind.is_large_list(kind) or is_kind.is_fixed_size_list(kind)):
        checks.refuse(f"column {name!r} must have numbers, texts, or lists of numbers", kind, CONVERT)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    values = _values(column.flatten(), name, conversion, is_inner=True)
    if conversion.length is not None and not is_inner:
        return _padded(values, lengths, name, conversion)
    if len(lengths) and lengths.min() < lengths.max():
        got, fix = f"{lengths.min()} to {lengths.max()}", "pass length=, to which shorter lists are padded"
        checks.refuse(f"column {name!r} must have lists of one length", got, fix)
    return values.reshape(len(lengths), *lengths[:1], *values.shape[1:])


def _padded(values: np.ndarray, lengths: np.ndarray, name: str, conversion: Conversion) -> np.ndarray:
    """Returns the lists, whose values are consecutive, padded or cut to conversion.length."""
    length = conversion.length or 0
    if lengths.max() > length and not conversion.truncate:
        what = f"column {name!r} must have lists of at most length={length} values"
        checks.refuse(what, lengths.max(), "use a larger length, or truncate=True")
    if (lengths == length).all():
        return values.reshape(len(lengths), length, *values.shape[1:])
    padding = checks.converted("padding", np.array([conversion.padding]), values.dtype, f"as column {name!r}")
    padded = np.full((len(lengths), length, *values.shape[1:]), padding[0])
    place = np.arange(length)
    is_value = place < lengths[:, None]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    padded[is_value] = values[(starts[:, None] + place)[is_value]]
    return padded


def _check_complete(column: Any, name: str) -> None:
    if column.null_count:
        fix = f"{tables.FILL} with dataset.filter"
        checks.refuse(f"column {name!r} must have no missing values", column.null_count, fix)
