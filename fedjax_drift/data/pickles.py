"""Pickles of NumPy arrays and of lists, tuples, dicts, numbers and strings. No code in them is executed."""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

from fedjax_drift.data import files
from fedjax_drift.errors import ConfigurationError

_ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype"), ("collections", "OrderedDict")} | {
    (f"numpy._core.{module}", name)
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # its name in the pickles of NumPy 1
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return super().find_class(module, name)


def read(file: BinaryIO, encoding: str = "ASCII") -> Any:
    """Returns the content of a pickle.

    encoding: of the strings of Python 2; "bytes" leaves them bytes. Raises ValueError if the pickle is damaged, or has
    anything but arrays, lists, tuples, dicts, numbers and strings.
    """
    try:
        return _ArrayUnpickler(file, encoding=encoding).load()
    except Exception as error:  # a damaged pickle can raise any exception
        why = files.one_line(error)
        wrong = f"it is damaged or not a pickle of plain arrays ({why}): copy or write it again"
        raise ConfigurationError(wrong) from error
