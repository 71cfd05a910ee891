"""The interface to orbax: writing in the background, deleting unfinished folders, and choosing checkpoints to keep.

orbax is imported when it is first used. Two tasks are done without orbax (version 0.12):

- Writing arrays. If one write of orbax's array handler fails, as on a full disk, the handler closes its event loop, and
  each of the other writes in progress prints a traceback. `Handler` writes plain files instead.
- Deleting checkpoints. orbax's `path.deleter` deletes the files of a checkpoint one by one, so that a killed process
  leaves an incomplete checkpoint under a valid name. With ``todelete_subdir`` it moves the checkpoint to a folder that
  is never emptied. `Saver` renames a checkpoint before it deletes the files.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_drift.storage import array_files
from fedjax_drift.storage.contents import write_about


def checkpointer() -> Any:
    """Returns an orbax checkpointer that writes in the background: ``save(folder, args=save_arguments(...))``.

    The checkpointer writes to a temporary folder. When every process has written its file, this folder is renamed to
    ``folder``.
    """
    import orbax.checkpoint as ocp

    # The folder is created before the handler is called, because only orbax's own handlers can wait for its creation.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.AsyncCheckpointer(_handler_and_arguments()[0](), async_options=options)


def save_arguments(about: str, parts: list[array_files.Part]) -> Any:
    """Returns the contents of a checkpoint: `contents.About` as text, and the array shards of this process."""
    return _handler_and_arguments()[1](about, parts)


@functools.cache
def _handler_and_arguments() -> tuple[Any, Any]:
    import orbax.checkpoint as ocp

    class Handler(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory: Path, args: Any) -> list[Any]:
            thread = ThreadPoolExecutor(1)
            written = thread.submit(_write, Path(directory), args.about, args.parts)
            thread.shutdown(wait=False)  # the thread ends after the write
            return [written]

        def save(self, directory: Path, args: Any) -> None:
            _write(Path(directory), args.about, args.parts)

        def restore(self, directory: Path, args: Any = None) -> None:
            raise NotImplementedError("Checkpoints.restore reads the files itself")

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclass
    class Arguments(ocp.args.CheckpointArgs):
        about: str
        parts: list[array_files.Part]

    logging.getLogger("absl").addFilter(_not_of_orbax)  # orbax also raises the errors that it logs
    return Handler, Arguments


def _write(folder: Path, about: str, parts: list[array_files.Part]) -> None:
    if jax.process_index() == 0:
        write_about(folder, about)
    array_files.write(folder, parts)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def delete_unfinished(folder: Path) -> None:
    """Deletes the files of failed and killed saves in the folder."""
    import orbax.checkpoint as ocp

    for temporary in ocp.path.step.all_temporary_paths(folder):
        shutil.rmtree(temporary.get(), ignore_errors=True)


class Saved(NamedTuple):
    """A checkpoint with the attributes that orbax's policies use."""

    step: int
    metrics: dict[str, float] | None


def rounds_to_keep(scores: Mapping[int, float | None], keep: int) -> set[int]:
    """Returns the last ``keep`` rounds and the best round. If several rounds are equally good, the last one is kept.

    scores: the score of each saved round. Larger is better. None: unknown.
    """
    import orbax.checkpoint as ocp

    policies = ocp.checkpoint_managers
    best = policies.BestN(get_metric_fn=lambda metrics: metrics["score"], n=1, keep_checkpoints_without_metrics=False)
    policy = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
    saved = [Saved(t, None if (score := scores[t]) is None else {"score": score}) for t in sorted(scores)]
    kept = policy.should_preserve(saved, context=policies.PreservationContext())
    return {checkpoint.step for checkpoint, keeps in zip(saved, kept, strict=True) if keeps}
