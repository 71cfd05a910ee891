"""Locks, atomic replacement of files, and unused names."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from fedjax_drift.errors import ConfigurationError, InUseError


def replace_file(path: Path, content: str | bytes) -> None:
    """Replaces the file atomically. If the process is killed, the file has either the old content or the new one."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def unused(path: Path) -> Path:
    """Returns ``path`` if it does not exist, otherwise the path with the first free number appended."""
    names = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, 1000))]
    return next(name for name in names if not name.exists())


def lock(file: FileIO, refusal: str) -> None:
    """Locks the file until it is closed. Raises InUseError(refusal) if it is locked already."""
    import fcntl  # exists only on Unix, like os.pread and os.pwrite

    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError(refusal) from None


@contextlib.contextmanager
def lock_folder(path: Path, what: str, create: bool = True) -> Iterator[None]:
    """Locks the folder for this process, through a file "lock" in it.

    Args:
      path: the folder.
      what: the name of the argument with this folder, for messages.
      create: whether to create the folder and the file. If False, nothing is written.

    Raises:
      InUseError: the folder is in use.
      ConfigurationError: the folder cannot be written.
    """
    try:
        if create:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        file = FileIO(str(path / "lock"), "rb", opener=lambda name, _: os.open(name, flags, 0o666))
    except OSError as error:
        raise ConfigurationError(
            f"{what} must be a folder where files can be written, got {path} ({error.strerror}): choose another folder"
        ) from error
    with file:
        lock(file, f"{what} must be used by one run at a time, got {path}, which is in use by another process or by "
             "this one: wait until that run has ended, or choose another folder")  # fmt: skip
        yield
