"""Data files: npz files and text files of users, and the cache.

Every array is checked against a `Column` before it is used.
"""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, NoReturn, TextIO, TypeVar

import numpy as np

from fedjax_drift import checks
from fedjax_drift.disk import replacing
from fedjax_drift.errors import ConfigurationError, MissingPackageError

Arrays = dict[str, np.ndarray]
Parsed = TypeVar("Parsed")


class Column(NamedTuple):
    """The requirements for one array."""

    dtype: Literal["uint8", "integer"] = "integer"
    """"uint8" for pixels; "integer" for any signed or unsigned integers, such as labels."""
    row: tuple[int, ...] = ()
    """Shape of one row. If the last axis has length 1 (grey images), it may be missing, and is then added."""
    table: str | None = "rows"
    """Arrays of the same table must have the same number of rows. None: the array is a single number."""
    classes: int | None = None
    """Values must be in 0..classes-1. None: no check."""


Spec = Mapping[str, Column]


def cache_dir() -> Path:
    """The folder for computed arrays: $FEDJAX_DRIFT_CACHE, or ~/.cache/fedjax_drift."""
    return checks.path("$FEDJAX_DRIFT_CACHE", os.environ.get("FEDJAX_DRIFT_CACHE") or "~/.cache/fedjax_drift")


def folders(data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that are searched: `data_dir` if given; otherwise $FEDJAX_DRIFT_DATA (if set), then the cache."""
    if data_dir is not None:
        folder = checks.path("data_dir", data_dir)
        if os.path.isfile(folder):
            checks.refuse("data_dir must be a folder", f"the file {folder}", "pass the folder of this file")
        return [folder]
    shared = os.environ.get("FEDJAX_DRIFT_DATA")
    return [*([checks.path("$FEDJAX_DRIFT_DATA", shared)] if shared else []), cache_dir()]


def find(filenames: Iterable[str], places: Iterable[Path]) -> Path | None:
    """Returns the first file with one of these names, in the order of the folders, or None."""
    return next((path for folder in places for name in filenames if (path := folder / name).exists()), None)


def read_npz(path: Path, spec: Spec) -> Arrays:
    """Reads and checks the arrays of an npz file that are named in `spec`. Other arrays are not read.

    Raises FileNotFoundError if the file does not exist. Raises ValueError if the file is unreadable, truncated or not
    an npz, or if an array is missing or has another dtype, shape, length or label range.
    """
    return check(arrays_of(path, spec), spec, path)


def arrays_of(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> Arrays:
    """Reads the arrays of an npz file without checking them. Raises the errors of `read_npz`.

    names: the arrays to read. Default: all.
    """
    with opened(path) as file, zipfile.ZipFile(file) as archive:
        members = [name.removesuffix(".npy") for name in archive.namelist()]
        wanted = members if names is None else list(names)
        if missing := [name for name in wanted if name not in members]:
            checks.refuse(f"it must have {', '.join(wanted)}", checks.listed(members), f"add {', '.join(missing)}")
        return {name: _array(archive, f"{name}.npy") for name in wanted}


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):  # zip checks the CRC at the end of the file
            checks.refuse(f"{name} must end after its array of shape {list(array.shape)}", "more", "write it again")
        return array


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file for reading bytes. Errors inside the context are converted by `plain_errors`."""
    with plain_errors(path):
        with open(path, "rb") as file:
            yield file


@contextlib.contextmanager
def opened_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> Iterator[TextIO]:
    """Opens a text file. Errors inside the context are converted by `plain_errors`."""
    with opened(path) as file, io.TextIOWrapper(file, encoding, newline="") as text:
        yield text


def wrong_line(number: int, wanted: str, got: str) -> NoReturn:
    """Refuses line ``number``, counted from 1, of a file that is `opened`."""
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    checks.refuse(f"line {number} must be {wanted}", shown, "download it again, or correct it")


def parsed_lines(
    path: Path, parse: Callable[[str], Parsed | None], wanted: str, encoding: str = "utf-8"
) -> list[Parsed]:
    """Returns the results of ``parse(line)`` for the lines of a text file, which must not be empty.

    Raises ValueError, with the number of the line, if a result is None. wanted: what the message calls a legal line.
    """
    results = []
    with opened_text(path, encoding) as file:
        for number, line in enumerate(file, 1):
            result = parse(line.rstrip("\r\n"))
            if result is None:
                wrong_line(number, wanted, line)
            results.append(result)
        if not results:
            wrong_line(1, wanted, "an empty file")
    return results


@contextlib.contextmanager
def plain_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Converts all errors inside the context to a ValueError that names the file.

    FileNotFoundError and ImportError (a missing package) are not converted. A ConfigurationError gets the name of the
    file, unless it has it already.
    """
    try:
        yield
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:
        message = (
            f"{path} is damaged, truncated, too large or of another kind ({one_line(error)}): copy or write it again"
        )
        if isinstance(error, ConfigurationError):
            if os.fspath(path) in str(error):
                raise
            message = f"cannot use {path}: {error}"
        elif isinstance(error, OSError) and error.strerror:
            message = f"cannot read {path}: {error.strerror}: check the file and its permissions"
        raise ConfigurationError(message) from error


def require(package: str, purpose: str, install: str = "") -> None:
    """Raises ImportError, with the pip command, unless the package is installed."""
    try:
        __import__(package)
    except ImportError as error:
        name = package.replace("_", "-")
        raise MissingPackageError(f"{purpose} needs {name}: pip install {install or name}") from error


def one_line(text: object) -> str:
    """Returns a text or an error message, shortened to one line. An error without a message gives the name of its
    type."""
    return textwrap.shorten(str(text), 200) or type(text).__name__


def check(arrays: Arrays, spec: Spec, source: object) -> Arrays:
    """Checks the arrays and returns them, with a missing grey axis added. ValueErrors name the ``source``."""
    checked: Arrays = {}
    first: dict[str | None, str] = {}  # table -> its first array
    for key, column in spec.items():
        array, name = np.asarray(arrays[key]), f"{source}: {key}"
        _check(name, array, column)
        same = first.setdefault(column.table, key)
        if column.table is not None and len(array) != (rows := len(checked.get(same, array))):
            fix = "row i of both must belong to the same example"
            checks.refuse(f"{name} must have as many rows as {same}, {rows}", len(array), fix)
        checked[key] = array[..., None] if _lacks_axis(array, column) else array
    return checked


def _lacks_axis(array: np.ndarray, column: Column) -> bool:
    """Whether an array has grey images without their last axis."""
    return column.row[-1:] == (1,) and array.ndim == len(column.row)


def _check(name: str, array: np.ndarray, column: Column) -> None:
    rows = [] if column.table is None else ["rows"]
    shape = array.shape + (1,) * _lacks_axis(array, column)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        checks.refuse(f"{name} must be finite", "NaN or infinity", "correct these rows or leave them out")
    if array.dtype != np.uint8 if column.dtype == "uint8" else array.dtype.kind not in "iu":
        fix = "save pixels as uint8, 0 to 255" if column.dtype == "uint8" else "convert it"
        checks.refuse(f"{name} must be {column.dtype}", array.dtype, fix)
    if len(shape) != len(rows) + len(column.row) or shape[len(rows) :] != column.row:
        wanted = ", ".join([*rows, *map(str, column.row)])
        checks.refuse(f"{name} must have shape [{wanted}]", list(array.shape), "reshape it")
    if array.size == 0:
        checks.refuse(f"{name} must have at least 1 row", 0, "write the file again")
    if column.classes is not None and not 0 <= array.min() <= array.max() < column.classes:
        fix = "renumber the labels, or check that this is the right file"
        checks.refuse(f"{name} must be in 0..{column.classes - 1}", f"{array.min()}..{array.max()}", fix)


def cached(filename: str, spec: Spec, make: Callable[[], Arrays]) -> Arrays:
    """Returns the arrays of a file in the cache. If it is missing or damaged, `make()` computes them for the cache.

    If the cache can't be written, there is a warning, and the arrays are returned.
    """
    path = cache_dir() / filename
    try:
        return read_npz(path, spec)
    except FileNotFoundError:
        pass
    except ValueError as error:
        checks.warn(f"the cached data are computed again: {error}")
    arrays = check(make(), spec, filename)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new, open(new, "wb") as file:  # a reader sees the complete file or no file
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        checks.warn(
            f"{path} could not be written ({error.strerror or error}), so the data will be computed again next time: "
            "set FEDJAX_DRIFT_CACHE to a folder that can be written"
        )
    return arrays


def fingerprint(path: Path) -> str:
    """Returns eight hex digits that identify the content of an npz file, from its checksums."""
    with opened(path) as file, zipfile.ZipFile(file) as archive:
        sums = [f"{member.filename} {member.CRC}" for member in archive.infolist()]
    return f"{zlib.crc32(' '.join(sums).encode()):08x}"


def stamp(paths: Iterable[str | os.PathLike[str]]) -> str:
    """Returns eight hex digits that identify the names, sizes and modification times of files. No file is opened.

    Raises FileNotFoundError for a missing file, and ValueError for a file that may not be read.
    """
    total = 0
    for path in paths:
        with plain_errors(path):
            status = os.stat(path)
        name = os.fspath(path).split(os.sep)[-2:]
        total = zlib.crc32(f"{name} {status.st_size} {status.st_mtime_ns}".encode(), total)
    return f"{total:08x}"
