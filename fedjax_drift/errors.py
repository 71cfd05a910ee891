"""The library's exceptions. Each is a subclass of the built-in one that Python programmers expect."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """An argument, a data set, a model or a file cannot be used as it is.

    The message names it, the allowed values, the value received and a fix. A plain ValueError raised from inside the
    library is therefore a bug of the library or of another package.
    """


class InUseError(ConfigurationError):
    """A folder is used by another run, in another process or in this one."""


class OtherRunError(ConfigurationError):
    """A folder holds the state of another run: another algorithm, model, data set, setting or seed."""


class DamagedError(ConfigurationError):
    """A file does not hold what was written to it."""


class MissingPackageError(ImportError):
    """An optional package is not installed. The message says how to install it."""
