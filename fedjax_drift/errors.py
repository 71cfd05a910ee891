"""The library's exceptions. Each is a subclass of ValueError or ImportError."""

from __future__ import annotations

__all__ = [
    "ConfigurationError", "DamagedError", "InUseError", "MissingPackageError", "NothingToRestoreError", "OtherRunError"
]  # fmt: skip
__dir__ = __all__.copy


class ConfigurationError(ValueError):
    """An argument, a data set, a model or a file cannot be used as it is.

    The message names the argument, the allowed values, the value received and a fix. The library raises this class or a
    subclass for every wrong argument. A ValueError of any other class from inside the library is a bug, in the library
    or in another package.
    """


class InUseError(ConfigurationError):
    """Another run is using the folder, in this process or in a different one."""


class OtherRunError(ConfigurationError):
    """A folder contains the state of a different run: the algorithm, model, data set, a setting or the seed differs."""


class NothingToRestoreError(ConfigurationError):
    """A folder has no checkpoint, not even a damaged one: no run has saved there yet."""


class DamagedError(ConfigurationError):
    """A file is damaged: its content is not what was written to it."""


class MissingPackageError(ImportError):
    """An optional package is not installed. The message says how to install it."""
