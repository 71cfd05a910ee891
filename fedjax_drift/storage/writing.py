"""Writes a checkpoint in a thread: its files to a temporary folder, which is renamed when all of them are complete."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from jax.sharding import Mesh

from fedjax_drift.devices.processes import agree, first_does, spans_processes
from fedjax_drift.storage import array_files
from fedjax_drift.storage.contents import write_about

UNFINISHED = ".unfinished"  # suffix of the temporary folder
BY_ORBAX = ".orbax-checkpoint-tmp*"  # and that of versions up to 0.3


class Write:
    """A checkpoint that is being written. Every process of the mesh creates it, and calls `wait`.

    Args:
      mesh: the devices of the simulation.
      folder: the folder of the complete checkpoint.
      about: `contents.About` as text.
      parts: the array shards of this process.
    """

    def __init__(self, mesh: Mesh, folder: Path, about: str, parts: Sequence[array_files.Part]) -> None:
        self.mesh, self.folder, self._new = mesh, folder, folder.with_name(folder.name + UNFINISHED)
        first_does(mesh, lambda: self._new.mkdir(parents=True, exist_ok=True))
        thread = ThreadPoolExecutor(1)
        self._files = thread.submit(self._write, about, parts)
        thread.shutdown(wait=False)  # the thread ends after the write

    def _write(self, about: str, parts: Sequence[array_files.Part]) -> None:
        if jax.process_index() == 0:
            write_about(self._new, about)
        array_files.write(self._new, parts)
        if not spans_processes(self.mesh):
            self._new.rename(self.folder)

    def has_ended(self) -> bool:
        """Whether this process has written its files, or has failed."""
        return self._files.done()

    def wait(self) -> None:
        """Waits until the checkpoint is complete. Raises an exception in every process if it failed in one of them."""
        error = self._files.exception()
        _, (failed,) = agree(self.mesh, flags=[error is not None])
        if error is not None:
            raise error
        if failed:
            raise OSError(errno.EIO, "another process could not write its arrays")
        if spans_processes(self.mesh):
            first_does(self.mesh, lambda: self._new.rename(self.folder))


def delete_unfinished(folder: Path) -> None:
    """Deletes the files of failed and killed writes in the folder."""
    for suffix in (UNFINISHED, BY_ORBAX):
        for left in folder.glob("[0-9]*" + suffix):
            shutil.rmtree(left, ignore_errors=True)
