"""Files that are replaced atomically, locks, and unused names."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from fedjax_drift import checks
from fedjax_drift.errors import InUseError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new, empty file, which replaces ``path`` atomically at the end of the block.

    If the process is killed, ``path`` has either the old content or the new one. If the block raises an exception,
    ``path`` is unchanged, and the new file is deleted. The new file is in the same folder and has the same suffix.
    """
    new = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        new.touch()
        yield new
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_all(file: FileIO, content: bytes) -> None:
    """Writes everything, also if the system takes it in pieces."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def replace_file(path: Path, content: str | bytes) -> None:
    """Replaces the file atomically by one with this content."""
    with replacing(path) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


def unused(path: Path) -> Path:
    """Returns ``path`` if it does not exist, otherwise the path with the first free number appended."""
    names = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, 1000))]
    return next(name for name in names if not os.path.lexists(name))


def lock(file: FileIO, refusal: str) -> None:
    """Locks the file until it is closed. Raises InUseError(refusal) if it is locked already."""
    import fcntl  # exists only on Unix, like os.pread and os.pwrite

    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError(refusal) from None


@contextlib.contextmanager
def explained(path: Path, what: str = "path") -> Iterator[None]:
    """Turns an OSError in the block into a ConfigurationError that names the argument ``what`` and the path."""
    try:
        yield
    except OSError as error:
        allowed = "a folder where files can be written and locked"
        checks.refuse(f"{what} must be {allowed}", f"{path} ({error.strerror})", "choose another folder", error)


@contextlib.contextmanager
def lock_folder(path: Path, what: str, create: bool = True) -> Iterator[None]:
    """Locks the folder for this process, through a file "lock" in it.

    Args:
      path: the folder.
      what: the name of the argument with this folder, for messages.
      create: whether to create the folder and the file. If False, nothing is written.

    Raises:
      InUseError: the folder is in use.
      ConfigurationError: the folder cannot be written or locked.
    """
    with contextlib.ExitStack() as stack:
        with explained(path, what):
            if create:
                path.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(FileIO(str(path / "lock"), "ab" if create else "rb"))
            lock(file, f"{what} must be used by one run at a time, got {path}, which is in use by another process or "
                 "by this one: wait until that run has ended, or choose another folder")  # fmt: skip
        yield
