"""The compilation cache."""

from __future__ import annotations

import os
import platform
import zlib

import jax

from fedjax_drift import checks
from fedjax_drift.data import files


def use_compilation_cache(path: str | os.PathLike | None = None) -> str:
    """Keeps compiled programs in a folder, so that later processes do not compile them again. Returns the folder.

    Call it before the first round.

    Args:
      path: the folder. Default: a subfolder of `$FEDJAX_DRIFT_CACHE`, or of ``~/.cache/fedjax_drift``, with a name
        that depends on the type of the processor.

    Raises:
      OSError: the folder cannot be created.
    """
    chosen = files.cache_dir() / f"xla-{_processor()}" if path is None else checks.path("path", path)
    folder = str(chosen.expanduser())
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder


def _processor() -> str:
    """A name for the type of the processor. Machines of different types may share a home folder, but not programs."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"
