"""Where data sets lie on disk: npz files that others made, the cache, and tensorflow-datasets.

Whatever is read is checked against a `Column` per array before anything is computed from it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import socket
import stat
import textwrap
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError

Arrays = dict[str, np.ndarray]
UNPACKED = 2**30  # bytes to which compressed ones may unpack: a few MiB can be made to fill any memory

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


class Wrong(ValueError):
    """What a reader has found wrong inside a file, and how to mend it; `plain_errors` puts the file's name before."""


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
    lowest: int | None = None
    """The least that a value may be; None: any."""


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
        folder = checks.path("data_dir", data_dir)
        if os.path.isfile(folder):
            raise ConfigurationError(f"data_dir must be a folder, got the file {folder}: pass the folder that it is in")
        return [folder]
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
            raise ConfigurationError(
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
    return check(arrays_of(path, spec), spec, path)


def arrays_of(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> Arrays:
    """The arrays of an npz file, all or those of these names. Raises as `read_npz` does."""
    with opened(path) as file:
        if file.read(4) != b"PK\x03\x04":
            raise Wrong("it is no npz file: write it with numpy.savez")
        with zipfile.ZipFile(file) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            wanted = list(members if names is None else names)
            if missing := [name for name in wanted if name not in members]:
                raise Wrong(
                    f"it must hold {', '.join(wanted)}, got {one_line(', '.join(members))}: add {', '.join(missing)}"
                )
            sizes = [(members[name].compress_type != zipfile.ZIP_STORED, members[name].file_size) for name in wanted]
            must_fit("its compressed arrays", sum(size for packed, size in sizes if packed), None)
            must_fit("its arrays", sum(size for packed, size in sizes if not packed), os.fstat(file.fileno()).st_size)
            return {name: _array(archive, members[name]) for name in wanted}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """No memory is asked for before its size is compared; it is all read, as only then zip compares the checksum."""
    with archive.open(member) as file:
        first = np.lib.format.read_magic(file) == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise Wrong(f"{member.filename} must be numbers, got objects, and allow_pickle is off: save it as numbers")
        size, held = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if size != held:
            raise Wrong(f"{member.filename} must be {size} bytes by its shape, got {held}: copy or make the file again")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)


def must_fit(what: str, size: int, held: int | None) -> None:
    """`Wrong` where arrays of `size` bytes can't be in the `held` bytes of a file; None: they are compressed there."""
    if held is None and size > UNPACKED:
        fix = "copy the file again, or write it uncompressed, with numpy.savez"
        raise Wrong(f"{what} must unpack to at most {UNPACKED} bytes, got {size}: {fix}")
    if held is not None and size > held:
        raise Wrong(f"{what} must be at most the {held} bytes that are there, got {size}: copy or make the file again")


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The file's bytes; what goes wrong while it is open is told as by `plain_errors`."""
    with plain_errors(path):
        must_not_wait(path)
        with open(path, "rb") as file:
            yield file


def must_not_wait(path: str | os.PathLike[str]) -> None:
    """`Wrong` for a pipe or a device, which may never give a byte, or never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Wrong(f"{os.path.basename(path)} must be a file, got a pipe or a device: put the file there")


@contextlib.contextmanager
def plain_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """What goes wrong with a file as one ValueError that names it, whatever other libraries raise for its bytes.

    A missing file stays a FileNotFoundError, a missing package an ImportError.
    """
    try:
        yield
    except (FileNotFoundError, ImportError):
        raise
    except Wrong as error:
        raise ConfigurationError(f"cannot use {path}: {error}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise ConfigurationError(
                f"cannot read {path}: {error.strerror}: check the file and its permissions"
            ) from error
        raise ConfigurationError(
            f"{path} is damaged, cut short, too large or of another kind ({one_line(error)}): copy or make it again"
        ) from error


def one_line(text: object) -> str:
    """In a message: what a file, or another library's error, has to say; an error without a word is named."""
    return textwrap.shorten(str(text), 200) or type(text).__name__


def check(arrays: Arrays, spec: Spec, source: object) -> Arrays:
    """The arrays as `spec` wants them, with a grey axis where it was missing; ValueError naming `source` otherwise."""
    checked: Arrays = {}
    rows: dict[str, tuple[str, int]] = {}
    for key, column in spec.items():
        array = np.asarray(arrays[key])
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ConfigurationError(f"{source}: {key} must be finite, got NaN or infinity: clean or drop those rows")
        if array.dtype != np.uint8 if column.dtype == "uint8" else array.dtype.kind not in "iu":
            fix = "save pixels as uint8, 0 to 255" if column.dtype == "uint8" else "convert it"
            raise ConfigurationError(f"{source}: {key} must be {column.dtype}, got {array.dtype}: {fix}")
        if column.row[-1:] == (1,) and array.ndim == len(column.row):
            array = array[..., None]
        leading = 0 if column.table is None else 1
        if array.ndim != leading + len(column.row) or array.shape[leading:] != column.row:
            wanted = ", ".join([*["rows"] * leading, *map(str, column.row)])
            raise ConfigurationError(
                f"{source}: {key} must have shape [{wanted}], got {list(arrays[key].shape)}: reshape it"
            )
        if column.table is not None:
            first, length = rows.setdefault(column.table, (key, len(array)))
            if len(array) != length:
                raise ConfigurationError(
                    f"{source}: {key} must have as many rows as {first}, {length}, got {len(array)}: "
                    "the two belong row by row"
                )
            if length == 0:
                raise ConfigurationError(f"{source}: {key} must have at least 1 row, got 0: fill or remake the file")
        if column.lowest is not None and array.min() < column.lowest:
            raise ConfigurationError(
                f"{source}: {key} must be an integer >= {column.lowest}, got {array.min()}: copy or make the file again"
            )
        if column.classes is not None and not (0 <= array.min() and array.max() < column.classes):
            raise ConfigurationError(
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
    with opened(path) as file, zipfile.ZipFile(file) as archive:
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
    with plain_errors(directory / name):
        for path in (directory / name).rglob("*"):
            must_not_wait(path)
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
        raise ConfigurationError(
            f"{builder.data_path} must be in array_record format, got {builder.info.file_format.value}, which only "
            "TensorFlow reads: move that folder away, or set TFDS_DATA_DIR to another one, and load again"
        )
    arrays: Arrays = {}
    with plain_errors(builder.data_path):
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
