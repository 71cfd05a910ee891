"""Pickles of NumPy arrays and of lists, tuples, dicts, numbers and strings. They may be damaged or hostile."""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections.abc import Callable
from typing import IO, Any, NoReturn

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.errors import ConfigurationError

ROOM = 2**25  # bytes that the values of any pickle may take
RATIO = 64  # bytes more per byte of the file: a small malicious file could otherwise fill the memory
OBJECT, REFERENCE = 64, 8  # bytes of an object and of a reference to it, roughly
COPIED = 1000  # NumPy copies the bytes of an array up to this length, and shares longer ones


def read(file: IO[bytes], stored: int, encoding: str = "ASCII") -> Any:
    """Returns the content of a pickle. No code of the file is executed.

    Args:
      file: the pickle.
      stored: the bytes that it takes on the disk. The values may take `ROOM` + `RATIO` * stored bytes beside those of
        the pickle. A value that occurs several times counts each time, as in an array that is made of the values.
      encoding: of the strings of Python 2; "bytes" leaves them bytes.

    Raises:
      ValueError: the pickle is damaged, takes more bytes, contains itself, or has anything but arrays, lists, tuples,
        dicts with text as keys, numbers and strings.
    """
    unpickler = _PlainUnpickler(file, ROOM + RATIO * stored, encoding)
    try:
        content = unpickler.load()
        unpickler.room = ROOM + RATIO * stored + file.tell()
        unpickler.spend(_size(content, {}))
        return content
    except Exception as error:  # a damaged pickle can raise any exception
        why = files.one_line(error)
        wrong = f"it is damaged or not a pickle of plain arrays ({why}): copy or write it again"
        raise ConfigurationError(wrong) from error


def _refuse(what: str) -> NoReturn:
    raise pickle.UnpicklingError(f"{what} is not allowed in it")


def _size(value: Any, sizes: dict[int, float]) -> float:
    """Returns the bytes of a value without sharing, or infinity if it contains itself.

    sizes: of the containers that were visited, by their ids. So each container is visited once.
    """
    if isinstance(value, str | bytes | bytearray):
        return OBJECT + len(value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return OBJECT + value.nbytes
    if not isinstance(value, list | tuple | dict | np.ndarray):
        _refuse(checks.type_of(value))
    if id(value) not in sizes:
        sizes[id(value)] = math.inf  # until its items are visited
        items = list(value.values()) if isinstance(value, dict) else value
        items = value.ravel().tolist() if isinstance(value, np.ndarray) else items
        large = [item for item in items if not isinstance(item, int | float | None)]
        sizes[id(value)] = OBJECT + REFERENCE * len(items) + sum(_size(item, sizes) for item in large)
    return sizes[id(value)]


# ---------------------------------------------------------------- arrays


def _empty_array(*_: object) -> np.ndarray:
    """An array; the unpickler then sets its shape and data."""
    return np.zeros(0, np.uint8)


def _dtype(name: str | bytes, *_: object) -> np.dtype:
    """Returns a new dtype without fields, subarrays and items of no bytes. The unpickler may set its byte order."""
    text = name.decode() if isinstance(name, bytes) else name
    if not re.fullmatch(r"[<>|=]?([?biufc]\d*|[SU][1-9]\d*|O8?)", text):
        _refuse(f"a dtype {text!r}")
    return np.dtype(np.dtype(text), copy=True)


def _from_buffer(content: bytes | bytearray, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    # Of an array, the bytes could be addresses of objects, and their memory is freed when its state is set again.
    if not isinstance(content, bytes | bytearray):
        _refuse(f"an array in the memory of {checks.type_of(content)}")
    return np.frombuffer(content, dtype).reshape(shape, order=order)


def _scalar(dtype: np.dtype, content: bytes) -> Any:
    if dtype.kind not in "biufc":
        _refuse(f"a scalar of {dtype}")
    return _from_buffer(content, dtype, (1,), "C")[0]


_ALLOWED: dict[tuple[str, str], Callable[..., Any] | None] = {("numpy", "ndarray"): None, ("numpy", "dtype"): _dtype}
_ALLOWED |= {
    (f"numpy.{core}.{module}", name): function  # NumPy 1 has numpy.core, NumPy 2 numpy._core
    for core in ("core", "_core")
    for module, name, function in (
        ("multiarray", "_reconstruct", _empty_array),
        ("multiarray", "scalar", _scalar),
        ("numeric", "_frombuffer", _from_buffer),
    )
}


# ---------------------------------------------------------------- opcodes


_Unpickler: Any = pickle._Unpickler  # its methods have no types
_REFERENCES = {  # these opcodes make no object
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT1, pickle.EMPTY_TUPLE, pickle.GET, pickle.BINGET,
    pickle.LONG_BINGET, pickle.DUP, pickle.POP, pickle.APPEND, pickle.APPENDS,
}  # fmt: skip


class _PlainUnpickler(_Unpickler):
    """Any function but those above raises an error.

    It extends the unpickler that is written in Python. If a damaged header declares a huge size, the
    unpickler written in C allocates that much memory. This one does not.
    """

    def __init__(self, file: IO[bytes], room: int, encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self.room: float = room

    def spend(self, size: float) -> None:
        self.room -= size
        if self.room < 0:
            raise pickle.UnpicklingError("its values take too much memory for a file of this size")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            _refuse(f"{module}.{name}")
        return _ALLOWED[module, name]

    def load_build(self) -> None:
        """Sets the state of a dtype or of an array."""
        value, state = self.stack[-2:]
        if isinstance(value, np.dtype):
            # With the flags of another dtype, an array of objects would take bytes for addresses.
            plain = value.__reduce__()[2]
            if state[:1] + state[2:] != plain[:1] + plain[2:] or state[1] not in (*"<>|=", *map(str.encode, "<>|=")):
                _refuse(f"a dtype {value} with the state of another one")
        elif isinstance(value, np.ndarray):
            _, shape, dtype, _, content = state
            # NumPy believes the shape, and reads past the end of a list that is shorter.
            kind, width = (list, 1) if dtype.hasobject else (bytes, dtype.itemsize)
            if len(shape) > 64 or not all(type(n) is int and n >= 0 for n in shape) or type(content) is not kind:
                _refuse("an array with such a shape or content")
            if len(content) != (size := math.prod(shape) * width):
                raise pickle.UnpicklingError(f"an array must have the {size} values of its shape, got {len(content)}")
            if dtype.hasobject or not dtype.isnative or size <= COPIED:
                self.spend(size * (REFERENCE if dtype.hasobject else 1))
        else:
            _refuse(f"a state of {type(value).__name__}")
        super().load_build()

    def load_bytearray8(self) -> None:
        """Reads the bytes before memory is allocated for them."""
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(size))

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def load_setitems(self) -> None:
        self._update(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._update(items)

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            _refuse(f"{checks.type_of(self.stack[-1])} with items")
        self.stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        """Sets items of a dict. The hash of other keys than text can take forever, or be that of all other keys."""
        if type(self.stack[-1]) is not dict or not all(isinstance(key, str | bytes) for key in items[::2]):
            _refuse("a dict with other keys than text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def load_other(self) -> None:
        _refuse("a set or an object of a class")

    load_persid = load_binpersid = load_inst = load_obj = load_newobj = load_newobj_ex = load_other
    load_ext1 = load_ext2 = load_ext4 = load_next_buffer = load_readonly_buffer = load_other
    load_empty_set = load_frozenset = load_additems = load_other


def _counted(step: Callable[[_PlainUnpickler], None], size: int) -> Callable[[_PlainUnpickler], None]:
    """Returns a function that takes ``size`` bytes off the room before it does what an opcode says."""

    def load(unpickler: _PlainUnpickler) -> None:
        unpickler.spend(size)
        step(unpickler)

    return load


_PlainUnpickler.dispatch = {
    code: _counted(getattr(_PlainUnpickler, step.__name__), REFERENCE if bytes([code]) in _REFERENCES else OBJECT)
    for code, step in _Unpickler.dispatch.items()
}
