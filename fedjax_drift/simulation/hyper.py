"""Continuous hyper-parameters, taken out of the closures that hold them.

An algorithm is made of closures that capture its hyper-parameters, as `fedprox(mu=0.1)` does. Compiled as it is, mu
would be a constant of the program, and another mu would need another program. `split` separates a value into its
numbers and its form, which is everything else and can be compared:

    form, numbers = split(fedprox(mu=0.1))        # numbers == (0.1, 1.0): mu and the server's learning rate
    join(form, numbers)                           # an algorithm that does what fedprox(mu=0.1) does

Programs are compiled for a form and take the numbers as arguments, so simulations of equal forms share them.

A number is a Python float other than 0: a 0 often switches something off (momentum, weight decay), which makes another
program. Functions are compared by their code, what they capture, and the values of the global variables they name.
Those of JAX and other libraries keep their numbers. Other objects are compared as they compare themselves, or by
identity.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "numpy", "scipy", "builtins", "functools", "math", "operator")
LARGE = 2**24  # bytes of an array whose contents are not looked at
LONG = 20_000  # entries of a key: a function that holds on to a program's worth of objects


@dataclasses.dataclass(frozen=True)
class Form:
    """A value without its numbers. Two forms are equal if their values differ in numbers alone."""

    key: tuple[Any, ...]
    value: Any = dataclasses.field(compare=False, repr=False)
    fixed: tuple[str, ...] = ()
    private: bool = False  # what is compiled for it must not be kept: it holds tracers, or more than can be compared


def split(value: Any, fixed: Sequence[str] = ()) -> tuple[Form, tuple[float, ...]]:
    """The form of a value, and its numbers in order.

    fixed: of a NamedTuple, the fields whose numbers stay in the form.
    """
    walk = _Walk()
    walk.fields(value, fixed)
    if walk.recursive:  # a function that calls itself is left as it is, and so is everything else
        walk = _Walk(frozen=1)
        walk.fields(value, fixed)
    form = Form(tuple(walk.key), value, tuple(fixed), walk.traced or len(walk.key) > LONG)
    return form, tuple(walk.numbers)


def join(form: Form, numbers: Sequence[Any]) -> Any:
    """The value of this form with these numbers, which may be tracers."""
    return _Walk(others=iter(numbers)).fields(form.value, form.fixed) if numbers else form.value


class _Same:
    """Compares by identity, and keeps what it compares alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Walk:
    """Goes through a value once. Notes its key; collects its numbers, or puts others in their places."""

    def __init__(self, others: Iterator[Any] | None = None, frozen: int = 0) -> None:
        self.others = others
        self.frozen = frozen  # > 0: numbers are a part of the key
        self.key: list[Any] = []  # hashable
        self.numbers: list[float] = []
        self.traced = self.recursive = False
        self.seen: dict[int, int] = {}  # id of an object met before -> how many were before it
        self.made: dict[int, Any] = {}  # id of a cell or a function -> its new contents, the new function

    def fields(self, value: Any, fixed: Sequence[str]) -> Any:
        """A NamedTuple, of which the ``fixed`` fields keep their numbers."""
        if not fixed:
            return self.of(value)
        self.key.append(type(value))
        parts = {name: self.of(getattr(value, name), name in fixed) for name in value._fields}
        return value._replace(**parts)

    def of(self, value: Any, frozen: bool = False) -> Any:
        """The value, with other numbers; frozen: with its own."""
        self.frozen += frozen
        try:
            return self._of(value)
        finally:
            self.frozen -= frozen

    def _of(self, value: Any) -> Any:
        if isinstance(value, float) and value and math.isfinite(value) and not self.frozen:
            self.key.append(float)
            self.numbers.append(float(value))
            return value if self.others is None else next(self.others)
        if isinstance(value, PLAIN):
            self.key.append((type(value), value))
        elif isinstance(value, tuple):
            if len(value) > 100 and all(type(part) is int for part in value):
                self.key.append(value)
                return value
            self.key.append((type(value), len(value)))
            parts = [self.of(part) for part in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        elif isinstance(value, functools.partial):
            self.key.append((functools.partial, len(value.args), *value.keywords))
            named = {name: self.of(argument) for name, argument in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **named)
        elif isinstance(value, MethodType):
            self.key.append(MethodType)
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        elif isinstance(value, FunctionType):
            return self.function(value, _of_a_library(value))
        elif _of_this_package(type(value)) and dataclasses.is_dataclass(value) and _comparable(value):
            self.key.append(type(value))
            named = {field.name: self.of(getattr(value, field.name)) for field in dataclasses.fields(value)}
            same = all(new is getattr(value, name) for name, new in named.items())
            return value if same else dataclasses.replace(value, **named)  # type: ignore[type-var]
        else:
            self.contents(value)
        return value

    def met(self, value: Any) -> bool:
        """Whether the walk has been at this object before."""
        if known := id(value) in self.seen:
            self.key.append(("again", self.seen[id(value)]))
        self.seen.setdefault(id(value), len(self.seen))
        return known

    def function(self, function: FunctionType, library: bool) -> FunctionType:
        """The function, with other numbers in its closure and in its defaults."""
        if self.met(function):
            in_itself = id(function) not in self.made
            self.recursive |= in_itself and not self.frozen and not library
            return self.made.get(id(function), function)
        self.key += [function.__code__, _Same(function.__globals__)]
        defaults = self.of(function.__defaults__, library)
        named = {name: self.of(value, library) for name, value in (function.__kwdefaults__ or {}).items()}
        cells = tuple(self.cell(cell, library) for cell in function.__closure__ or ())
        if not library and not _of_this_package(function):
            self.globals(function)
        old = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *(function.__closure__ or ()))
        new = (*(defaults or ()), *named.values(), *cells)
        made = function
        if any(a is not b for a, b in zip(old, new, strict=True)):
            made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
            made.__kwdefaults__ = named or None
            made.__dict__.update(function.__dict__)
            made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        self.made[id(function)] = made
        return made

    def cell(self, cell: CellType, frozen: bool) -> CellType:
        """The variable of a closure, or another if what it holds has other numbers. Closures may share it."""
        if self.met(cell):
            return self.made.get(id(cell), cell)
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            self.key.append("empty")
            return cell
        new = self.of(value, frozen)
        self.made[id(cell)] = cell if new is value else CellType(new)
        return self.made[id(cell)]

    def globals(self, function: FunctionType) -> None:
        """What a function of the user's looks up in its module, which may have changed since the last look."""
        names = sorted(_names(function.__code__))
        for name in names:
            if name in function.__globals__:
                value = function.__globals__[name]
                self.key.append(name)
                self.of(value, frozen=True)
                if isinstance(value, ModuleType) and not _of_a_library(value):
                    plain = {other: vars(value).get(other) for other in names}
                    self.key += [pair for pair in plain.items() if isinstance(pair[1], PLAIN)]

    def contents(self, value: Any) -> None:
        """Notes what tells an object from others that take its place."""
        self.traced |= isinstance(value, jax.core.Tracer)
        if len(self.key) > LONG:
            return
        if isinstance(value, np.ndarray) and value.nbytes <= LARGE:
            array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            self.key.append((value.dtype.str, value.shape, zlib.crc32(array.data)))
        elif isinstance(value, dict | list | set | frozenset):
            self.key.append((type(value), len(value)))
            self.parts(value, value if isinstance(value, dict) else dict(enumerate(value)))
        elif _comparable(value):
            self.key.append((type(value), value))
        else:
            self.key.append(_Same(value))
            if not isinstance(value, ModuleType) and not _of_a_library(type(value)):
                self.parts(value, getattr(value, "__dict__", {}))  # which may have changed since

    def parts(self, value: Any, parts: dict) -> None:
        """Notes what an object holds."""
        if not self.met(value):
            for name, part in parts.items():
                self.of(name, frozen=True)
                self.of(part, frozen=True)


def _comparable(value: Any) -> bool:
    """Whether the object says itself when it is equal to another."""
    if isinstance(value, jax.Array) or type(value).__eq__ is object.__eq__:
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _names(code: CodeType) -> set[str]:
    """The global variables, and attributes, that the code names."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _root(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return (name or "").partition(".")[0]


def _of_a_library(value: Any) -> bool:
    return _root(value) in LIBRARIES


def _of_this_package(value: Any) -> bool:
    return _root(value) == "fedjax_drift"
