"""Pickles of NumPy arrays and of Python's containers, numbers and strings. They may be damaged or hostile."""

from __future__ import annotations

import pickle
import struct
from typing import IO, Any

import numpy as np

from fedjax_drift.data import files


def read(file: IO[bytes], encoding: str = "ASCII") -> Any:
    """Returns the content of a pickle. No code of the file is executed.

    encoding: of the strings of Python 2; "bytes" leaves them bytes. Raises `files.Wrong` if the pickle is damaged, or
    has anything but arrays, containers, numbers and strings.
    """
    try:
        return _PlainUnpickler(file, encoding=encoding).load()
    except Exception as error:  # a damaged pickle can raise any exception
        why = files.one_line(error)
        raise files.Wrong(f"it is damaged or not a pickle of plain arrays ({why}): copy or write it again") from error


def _empty_array(*_: object) -> np.ndarray:
    """An array; the unpickler then sets its shape and data."""
    return np.zeros(0, np.uint8)


def _from_buffer(content: bytes, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    return np.frombuffer(content, dtype).reshape(shape, order=order)


def _scalar(dtype: np.dtype, content: bytes) -> Any:
    return np.frombuffer(content, dtype)[0]


_ALLOWED = {("numpy", "ndarray"): None, ("numpy", "dtype"): np.dtype} | {
    (f"numpy.{core}.{module}", name): function  # NumPy 1 has numpy.core, NumPy 2 numpy._core
    for core in ("core", "_core")
    for module, name, function in (
        ("multiarray", "_reconstruct", _empty_array),
        ("multiarray", "scalar", _scalar),
        ("numeric", "_frombuffer", _from_buffer),
    )
}


_Unpickler: Any = pickle._Unpickler  # its methods have no types


class _PlainUnpickler(_Unpickler):
    """Any function but those above raises an error.

    It extends the unpickler that is written in Python. If a damaged header declares a huge size, the
    unpickler written in C allocates that much memory. This one does not.
    """

    dispatch = _Unpickler.dispatch.copy()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return _ALLOWED[module, name]

    def load_build(self) -> None:
        """Sets the state of an object. A dtype keeps its own: with the flags of another one, an array of objects would
        take bytes for addresses."""
        value, state = self.stack[-2:]
        if isinstance(value, np.dtype):
            own = value.__reduce__()[2]
            if state[:1] + state[2:] != own[:1] + own[2:]:  # state[1] is the byte order
                raise pickle.UnpicklingError(f"a dtype {value} with the state {state} is not allowed in it")
        elif not isinstance(value, np.ndarray):
            raise pickle.UnpicklingError(f"a state of {type(value).__name__} is not allowed in it")
        super().load_build()

    def load_bytearray8(self) -> None:
        """Reads the bytes before memory is allocated for them."""
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(size))

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
