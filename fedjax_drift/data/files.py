"""Where data sets lie on disk: npz files that others made, the cache, and tensorflow-datasets.

Whatever is read is checked against a `Column` per array before anything is computed from it.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib.util
import os
import socket
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedjax_drift import checks

Arrays = dict[str, np.ndarray]
# What the readers of zip, gzip, csv and the like raise for bytes that aren't theirs.
DAMAGED = (
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    csv.Error,
    EOFError,
    zlib.error,
    KeyError,
    TypeError,
    NotImplementedError,
    RuntimeError,
)

# Where tensorflow-datasets downloads from: asked for a connection first, because its own attempts take minutes to fail.
HOSTS = {
    "mnist": ("storage.googleapis.com", 443),
    "fashion_mnist": ("fashion-mnist.s3-website.eu-central-1.amazonaws.com", 80),
    "emnist/byclass": ("biometrics.nist.gov", 443),
    "emnist/balanced": ("biometrics.nist.gov", 443),
    "emnist/digits": ("biometrics.nist.gov", 443),
    "cifar10": ("www.cs.toronto.edu", 443),
    "cifar100": ("www.cs.toronto.edu", 443),
}


class Column(NamedTuple):
    """What one array of a data set must look like."""

    dtype: Literal["uint8", "integer"] = "integer"
    """uint8 for pixels; any signed or unsigned integers for labels and the like."""
    row: tuple[int, ...] = ()
    """Shape of one row. A last axis of 1 (grey) may be missing and is added."""
    table: str | None = "rows"
    """Arrays of one table have as many rows; None: a single number."""
    classes: int | None = None
    """Values must be in 0..classes-1; None: any."""


Spec = Mapping[str, Column]


def cache_dir() -> Path:
    """The folder for arrays that took a while to make: $FEDJAX_DRIFT_CACHE, or ~/.cache/fedjax_drift."""
    return Path(os.environ.get("FEDJAX_DRIFT_CACHE") or "~/.cache/fedjax_drift").expanduser()


def tfds_dir() -> Path:
    """The folder of tensorflow-datasets: $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def folders(data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Where data files are looked for: `data_dir` alone, or else $FEDJAX_DRIFT_DATA (if set), then the cache."""
    if data_dir is not None:
        return [Path(data_dir).expanduser()]
    shared = os.environ.get("FEDJAX_DRIFT_DATA")
    return [*([Path(shared).expanduser()] if shared else []), cache_dir()]


def find(filenames: Iterable[str], places: Iterable[Path]) -> Path | None:
    """The first file of one of these names, the first folder first, or None.

    Raises ValueError for a folder that can't be searched.
    """
    for path in [folder / filename for folder in places for filename in filenames]:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ValueError(
                f"cannot look for {path}: {error.strerror}: allow this user to read the folder, "
                "or pass another data_dir"
            ) from error
        return path
    return None


def read_npz(path: Path, spec: Spec) -> Arrays:
    """The arrays of an npz file named in `spec`, checked; other arrays of the file are not read.

    Raises FileNotFoundError without the file, and ValueError for a file that is unreadable, truncated, no npz, lacks
    an array, or holds one of another dtype, shape, length or label range.
    """
    with plain_errors(path), open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise ValueError("it is no npz file: write it with numpy.savez")
        file.seek(0)
        with np.load(file, allow_pickle=False) as npz:
            missing = [key for key in spec if key not in npz.files]
            if missing:
                raise ValueError(
                    f"it must hold {', '.join(spec)}, got {', '.join(npz.files)}: add {', '.join(missing)}"
                )
            arrays = {key: npz[key] for key in spec}
    return check(arrays, spec, path)


@contextlib.contextmanager
def plain_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """What can go wrong inside a file, as a ValueError naming it; a missing file stays a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except DAMAGED as error:
        raise ValueError(f"{path} is damaged, cut short or of another kind ({error}): copy or make it again") from error
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot read {path}: {reason}: check the file and its permissions") from error
    except ValueError as error:
        raise ValueError(f"cannot use {path}: {error}") from error


def check(arrays: Arrays, spec: Spec, source: object) -> Arrays:
    """The arrays as `spec` wants them, with a grey axis where it was missing; ValueError naming `source` otherwise."""
    checked: Arrays = {}
    rows: dict[str, tuple[str, int]] = {}
    for key, column in spec.items():
        array = np.asarray(arrays[key])
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{source}: {key} must be finite, got NaN or infinity: clean or drop those rows")
        if array.dtype != np.uint8 if column.dtype == "uint8" else array.dtype.kind not in "iu":
            fix = "save pixels as uint8, 0 to 255" if column.dtype == "uint8" else "convert it"
            raise ValueError(f"{source}: {key} must be {column.dtype}, got {array.dtype}: {fix}")
        if column.row[-1:] == (1,) and array.ndim == len(column.row):
            array = array[..., None]
        leading = 0 if column.table is None else 1
        if array.ndim != leading + len(column.row) or array.shape[leading:] != column.row:
            wanted = ", ".join([*["rows"] * leading, *map(str, column.row)])
            raise ValueError(f"{source}: {key} must have shape [{wanted}], got {list(arrays[key].shape)}: reshape it")
        if column.table is not None:
            first, length = rows.setdefault(column.table, (key, len(array)))
            if len(array) != length:
                raise ValueError(
                    f"{source}: {key} must have as many rows as {first}, {length}, got {len(array)}: "
                    "the two belong row by row"
                )
            if length == 0:
                raise ValueError(f"{source}: {key} must have at least 1 row, got 0: fill or remake the file")
        if column.classes is not None and not (0 <= array.min() and array.max() < column.classes):
            raise ValueError(
                f"{source}: {key} must be in 0..{column.classes - 1}, got {array.min()}..{array.max()}: "
                "renumber the labels, or check that it is the right file"
            )
        checked[key] = array
    return checked


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an uncompressed npz; a reader sees the whole file or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def cached(filename: str, spec: Spec, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of a file in the cache, made with `make()` and kept when missing or damaged.

    A cache that can't be written costs a warning, not the data.
    """
    path = cache_dir() / filename
    try:
        return read_npz(path, spec)
    except FileNotFoundError:
        pass
    except ValueError as error:
        checks.warn(f"making the cached data again: {error}")
    arrays = check(make(), spec, filename)
    try:
        write_npz(path, arrays)
    except OSError as error:
        checks.warn(
            f"cannot keep {path} ({error.strerror or error}), it will be made again next time: "
            "set FEDJAX_DRIFT_CACHE to a folder that can be written"
        )
    return arrays


def fingerprint(path: Path) -> str:
    """Eight hex digits of a npz file's content, from the checksums it stores: nothing is decompressed."""
    with plain_errors(path), zipfile.ZipFile(path) as archive:
        sums = [f"{member.filename} {member.CRC}" for member in archive.infolist()]
    return f"{zlib.crc32(' '.join(sums).encode()):08x}"


def stamp(paths: Iterable[str | os.PathLike[str]]) -> str:
    """Eight hex digits of files' names, sizes and times of change: nothing is opened.

    Raises FileNotFoundError for a missing file, ValueError for one that can't be looked at.
    """
    total = 0
    for path in paths:
        with plain_errors(path):
            status = os.stat(path)
        name = os.fspath(path).split(os.sep)[-2:]
        total = zlib.crc32(f"{name} {status.st_size} {status.st_mtime_ns}".encode(), total)
    return f"{total:08x}"


def from_tfds(name: str, directory: Path | None = None) -> Arrays:
    """x_train uint8 [M, ...], y_train [M], x_test, y_test of an image data set of tensorflow-datasets.

    `directory` defaults to `tfds_dir()`. Prepared array_record data are read without TensorFlow; data that are not
    prepared are downloaded and prepared if TensorFlow is installed (tensorflow-datasets 4.9.10 encodes the images
    with it, once). Rows come in tensorflow-datasets' own shuffled order. Raises FileNotFoundError, without waiting for
    the network, where there is nothing to read or no way to prepare it; ValueError for data that only TensorFlow reads.
    """
    directory = directory or tfds_dir()
    try:
        import tensorflow_datasets as tfds  # type: ignore[import-untyped]
    except ImportError as error:
        raise FileNotFoundError(
            f"tensorflow-datasets can't be imported ({error}): pip install tensorflow-datasets importlib_resources"
        ) from error
    # try_gcs=False: no look at Google's bucket, which waits for the network.
    builder = tfds.builder(name, data_dir=directory, try_gcs=False)
    if not builder.is_prepared():
        if importlib.util.find_spec("tensorflow") is None:
            raise FileNotFoundError(
                f"{builder.data_path} is not prepared, and preparing it needs TensorFlow, once: "
                'pip install "fedjax-drift[prepare]"'
            )
        _require_connection(name)
        builder.download_and_prepare(file_format="array_record")
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise ValueError(
            f"{builder.data_path} must be in array_record format, got {builder.info.file_format.value}, which only "
            "TensorFlow reads: move that folder away, or set TFDS_DATA_DIR to another one, and load again"
        )
    arrays: Arrays = {}
    for split in ("train", "test"):
        rows = builder.as_data_source(split=split)
        x = np.empty((len(rows), *builder.info.features["image"].shape), np.uint8)
        y = np.empty(len(rows), np.int32)
        for i, row in enumerate(rows):
            x[i], y[i] = row["image"], row["label"]
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    return arrays


def _require_connection(name: str) -> None:
    if name not in HOSTS or urllib.request.getproxies():
        return
    try:
        socket.create_connection(HOSTS[name], timeout=5).close()
    except OSError as error:
        raise FileNotFoundError(f"it can't be downloaded: no connection to {HOSTS[name][0]} ({error})") from error
