"""All that checkpoints use of orbax: writing in the background, unfinished folders, and which checkpoints to keep.

orbax is imported when it is first used. Two things are not left to orbax (0.12):

- Its handler of arrays closes its event loop while other writes are under way when one of them fails, as on a full
  disk, and each of those then prints a traceback. `Handler` writes plain files instead.
- Its deletion (`path.deleter`) removes the files of a checkpoint one by one, under the checkpoint's name, so that a
  process that is killed meanwhile leaves half a checkpoint; with ``todelete_subdir`` it moves the checkpoint to a
  folder that nothing empties. `Saver` renames a checkpoint before it deletes the files.
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
    """An orbax checkpointer that writes in the background: ``save(folder, args=save_arguments(...))``.

    It writes to a temporary folder, which it renames to ``folder`` once every process has written its part.
    """
    import orbax.checkpoint as ocp

    # Creates the folder before it calls the handler: only orbax's handlers can wait for its creation.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.AsyncCheckpointer(_handler_and_arguments()[0](), async_options=options)


def save_arguments(about: str, parts: list[array_files.Part]) -> Any:
    """What a checkpoint consists of: `contents.About` as a text, and this process's parts of the arrays."""
    return _handler_and_arguments()[1](about, parts)


@functools.cache
def _handler_and_arguments() -> tuple[Any, Any]:
    import orbax.checkpoint as ocp

    class Handler(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory: Path, args: Any) -> list[Any]:
            thread = ThreadPoolExecutor(1)
            written = thread.submit(_write, Path(directory), args.about, args.parts)
            thread.shutdown(wait=False)  # once that is done
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
    """Deletes what saves that failed, or were interrupted by a kill, have left in the folder."""
    import orbax.checkpoint as ocp

    for temporary in ocp.path.step.all_temporary_paths(folder):
        shutil.rmtree(temporary.get(), ignore_errors=True)


class Saved(NamedTuple):
    """A checkpoint as orbax's policies see it."""

    step: int
    metrics: dict[str, float] | None


def rounds_to_keep(scores: Mapping[int, float | None], keep: int) -> set[int]:
    """The last ``keep`` rounds and the best one, by the scores of all rounds saved (larger is better; None: unknown).

    Of several rounds that are equally good, the last is the best.
    """
    import orbax.checkpoint as ocp

    policies = ocp.checkpoint_managers
    best = policies.BestN(get_metric_fn=lambda metrics: metrics["score"], n=1, keep_checkpoints_without_metrics=False)
    policy = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
    saved = [Saved(t, None if (score := scores[t]) is None else {"score": score}) for t in sorted(scores)]
    kept = policy.should_preserve(saved, context=policies.PreservationContext())
    return {checkpoint.step for checkpoint, keeps in zip(saved, kept, strict=True) if keeps}
