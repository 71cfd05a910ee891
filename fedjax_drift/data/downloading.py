"""Downloads: files with a size and a checksum, and what is made of them.

A file is downloaded to ``downloads/NAME/FILE.part`` in the data folder. A later download continues where this one broke
off. A file with the right checksum loses the ending ``.part``. When all files of a data set are there, they are
unpacked, and the result gets its final name at once. So no damaged or incomplete file has a final name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import image_files
from fedjax_drift.data.files import one_line
from fedjax_drift.disk import lock_folder
from fedjax_drift.errors import ConfigurationError, DamagedError

STEP = 2**16  # bytes that are written at once
TIMEOUT = (10.0, 60.0)  # seconds without a connection, and without a byte
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Errors of a disk. Other errors of the system are those of an archive, such as a file and a folder with one name."""


class File(NamedTuple):
    """A file on a server."""

    address: str
    size: int
    """In bytes."""
    checksum: str
    """"sha256:" or "md5:", and hexadecimal digits."""
    source: str
    """Who publishes the checksum."""

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


class Download(NamedTuple):
    """What is downloaded for a data set."""

    files: tuple[File, ...]
    gives: tuple[str, ...]
    """The files or folders that the readers need, relative to the data folder."""
    unpack: Callable[[Sequence[Path], Path], Path]
    """``unpack(paths, new)`` makes them of the files, inside the empty folder `new`. Returns the folder that has
    them."""

    @property
    def size(self) -> int:
        """The bytes to download."""
        return sum(file.size for file in self.files)

    @property
    def host(self) -> str:
        """The server."""
        return urlsplit(self.files[0].address).netloc


def as_it_is(paths: Sequence[Path], new: Path) -> Path:
    """The readers read the files themselves."""
    for path in paths:
        os.replace(path, new / path.name)
    return new


def extracted(paths: Sequence[Path], new: Path, into: str = "", inside: str = "") -> Path:
    """Unpacks archives. into: the folder of `new` for their content. inside: the folder of `new` to return.

    Their checksums are known, so they are not hostile.
    """
    for path in paths:
        with zipfile.ZipFile(path) if path.suffix == ".zip" else tarfile.open(path) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[union-attr]
            archive.extractall(new / into)
    return new / inside


def idx_as_npz(paths: Sequence[Path], new: Path, name: str) -> Path:
    """Writes the arrays of four idx files, training images first, to the file ``name``."""
    parts = zip(("x_train", "y_train", "x_test", "y_test"), paths, (3, 1, 3, 1), strict=True)
    arrays: dict[str, Any] = {key: image_files.read_idx(path, axes) for key, path, axes in parts}
    np.savez(new / name, **arrays)
    return new


def download(name: str, wanted: Download, folder: Path) -> None:
    """Downloads a data set into the data folder.

    Shows a progress bar on a terminal. Raises ConnectionError if a file cannot be downloaded, DamagedError for a wrong
    checksum or files that cannot be unpacked, and ConfigurationError if the folder cannot be written.
    """
    staging, paths = folder / "downloads" / name, list[Path]()
    with lock_folder(staging, "the folder of a download"):
        try:
            for file in wanted.files:
                paths.append(_fetched(file, staging))
            new = _made(name, wanted, paths, staging / "new")
            for top in dict.fromkeys(Path(given).parts[0] for given in wanted.gives):
                if (folder / top).is_dir():
                    what = f"{folder / top} must not exist while {name} is downloaded"
                    checks.refuse(what, "an incomplete folder", "rename or delete it, and download again")
                os.replace(new / top, folder / top)
        except ConnectionError as error:
            failed, *later = wanted.files[len(paths) :]
            missing = [failed, *(file for file in later if not (staging / file.name).exists())]
            raise ConnectionError(
                f"{name} cannot be downloaded ({error}): on a machine with a network, download "
                f"{' and '.join(file.address for file in missing)}, save {'them' if missing[1:] else 'it'} in "
                f"{staging}, and download {name} again here, which checks and unpacks"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"{folder} must have room for the files of {name}, which cannot be written ({error.strerror}): make "
                "room, or choose another folder, and download again, which continues"
            ) from error
        shutil.rmtree(staging)
    with contextlib.suppress(OSError):  # another download is unfinished
        staging.parent.rmdir()


def _made(name: str, wanted: Download, paths: Sequence[Path], new: Path) -> Path:
    """Returns the folder inside `new` that has the files or folders of a data set."""
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        folder = wanted.unpack(paths, new)
        if missing := [given for given in wanted.gives if not (folder / given).exists()]:
            checks.refuse(f"they must have {missing[0]}", checks.listed(os.listdir(folder)) or "nothing")
        return folder
    except Exception as error:  # a damaged archive can raise any exception
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        raise DamagedError(
            f"the files of {name} in {new.parent} have the published checksums, but cannot be unpacked "
            f"({one_line(error)}): get {', '.join(wanted.gives[:2])} from another source, and put it into "
            f"{new.parents[2]}"
        ) from error


def _fetched(file: File, folder: Path) -> Path:
    """Returns the path of the file in the folder, with the right checksum. It is downloaded if it is not there."""
    from tqdm import tqdm  # not tqdm.auto: what it is depends on the first import in the process

    path, part, reached, problem = folder / file.name, folder / f"{file.name}.part", -1, ""
    if path.exists() and _has_checksum(path, file):
        return path
    with tqdm(total=file.size, desc=file.name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        while (have := part.stat().st_size if part.exists() else 0) < file.size:
            if have <= reached:  # a further attempt, without a further byte
                raise ConnectionError(problem)
            reached, problem = have, _continued(file, part, have, bar)
    os.replace(part, path)
    if _has_checksum(path, file):
        return path
    path.unlink()
    raise DamagedError(
        f"{file.address} must have the checksum {file.checksum}, got a file with another one, which was deleted: "
        "download it again; if it happens again, the file on the server has changed"
    )


def _has_checksum(path: Path, file: File) -> bool:
    kind, _, digits = file.checksum.partition(":")
    with open(path, "rb") as content:
        return hashlib.file_digest(content, kind).hexdigest() == digits


def _continued(file: File, part: Path, have: int, bar: Any) -> str:
    """Requests the bytes after the first ``have`` and appends them to ``part``. Returns why it ended."""
    import requests
    import urllib3

    headers = {"Accept-Encoding": "identity", "User-Agent": "fedjax-drift"}  # the bytes as they are stored
    headers |= {"Range": f"bytes={have}-"} if have else {}
    try:
        with requests.get(file.address, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if not response.ok:
                return f"the server answers {response.status_code} {response.reason}"
            have = have if response.status_code == 206 else 0  # other servers send the whole file again
            length = response.headers.get("Content-Length", str(file.size - have))
            if length != str(file.size - have):
                return f"after {have} bytes, the server must send {file.size - have}, but has {length}"
            bar.n = have
            with open(part, "ab" if have else "wb") as output:
                for chunk in response.raw.stream(STEP, decode_content=False):
                    output.write(chunk)
                    bar.update(len(chunk))
                    have += len(chunk)
                    if have > file.size:
                        break
            return f"it ends after {have} of {file.size} bytes"
    except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:  # of the headers
        cause = getattr(error.args[0], "reason", error) if error.args else error
        why = one_line(str(cause).rpartition("): ")[2])  # without the text of urllib3's connection
        return f"the connection to {urlsplit(file.address).netloc} failed: {why}"
