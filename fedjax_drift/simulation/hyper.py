"""Separates continuous hyper-parameters from the algorithm, so that a new value does not trigger recompilation.

An algorithm consists of closures that capture its hyper-parameters, for example mu in `fedprox(mu=0.1)`. Without this
module, mu would be a constant of the compiled program, and another mu would need another program. `split` separates a
value, such as an algorithm, into its numbers and its form. The form is the value without its numbers. Forms can be
compared:

    form, numbers = split(fedprox(mu=0.1))        # numbers == (0.1, 1.0): mu and the server's learning rate
    join(form, numbers)                           # an algorithm equivalent to fedprox(mu=0.1)

Programs are compiled for a form and take the numbers as arguments. Simulations with equal forms share their programs.

The frozen parameters of a model (`types.Frozen`) are arguments of the programs as well. `frozen` finds them, `bind` and
`join` replace them. Only their shapes are a part of the form.

- A number is a finite Python float other than 0. A 0 is a part of the form, because it often switches something off
  (momentum, weight decay), which needs a different program.
- Two functions are equal if they have the same code and capture equal values, and if the global variables that they
  use have equal values. The numbers inside functions of JAX and other libraries are a part of the form.
- Lists, sets and dicts are compared by their contents, and NumPy arrays up to 16 MiB by a checksum. Other hashable
  objects that define ``==`` are compared with it. All remaining objects are compared by identity.
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

from fedjax_drift.types import Frozen, PyTree

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "numpy", "scipy", "builtins", "functools", "math", "operator")
LARGE = 2**24  # bytes; the contents of larger arrays are not compared
LONG = 20_000  # entries of a key; the programs of a value with a longer key are not cached


@dataclasses.dataclass(frozen=True)
class Form:
    """A value without its numbers. Two forms are equal if their values differ only in their numbers."""

    key: tuple[Any, ...]
    value: Any = dataclasses.field(compare=False, repr=False)
    fixed: tuple[str, ...] = ()
    private: bool = False  # True: programs are not kept, because the value has tracers or too many objects to compare


def split(value: Any, fixed: Sequence[str] = ()) -> tuple[Form, tuple[float, ...]]:
    """Returns the form of a value, and its numbers in order.

    fixed: if the value is a NamedTuple, the fields whose numbers stay in the form.
    """
    walk = _Walk()
    walk.fields(value, fixed)
    if walk.recursive:  # if a function calls itself, all numbers stay in the form
        walk = _Walk(constant=1)
        walk.fields(value, fixed)
    form = Form(tuple(walk.key), value, tuple(fixed), walk.traced or len(walk.key) > LONG)
    return form, tuple(walk.numbers)


def join(form: Form, numbers: Sequence[Any], arrays: Sequence[PyTree] = ()) -> Any:
    """Returns the value that has this form, these numbers and these frozen arrays. They may be tracers."""
    if not numbers:
        return bind(form.value, arrays)
    return _Walk(new_numbers=iter(numbers), new_arrays=iter(arrays)).fields(form.value, form.fixed)


def frozen(value: Any) -> tuple[Frozen, ...]:
    """Returns the frozen parameters inside a value, in order."""
    walk = _Walk(constant=1)
    walk.visit(value)
    return tuple(walk.arrays)


def bind(value: Any, arrays: Sequence[PyTree]) -> Any:
    """Returns the value with other arrays in the place of its frozen parameters."""
    return _Walk(new_arrays=iter(arrays), constant=1).visit(value) if arrays else value


def without_arrays(value: Any) -> Any:
    """Returns the value with frozen parameters that have shapes, but no arrays.

    Programs can be traced for it, and it keeps no memory.
    """
    shapes = [each.shapes for each in frozen(value)]
    return _Walk(new_arrays=iter(shapes), constant=1).visit(value) if shapes else value


class _Same:
    """Wraps an object. Two wrappers are equal if they wrap the same object. The object is kept alive, so its id stays
    unique."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Walk:
    """Visits all parts of a value once. Collects the numbers, or replaces them with new ones.

    The key describes everything but the numbers. Forms are equal if their keys are equal.
    """

    def __init__(
        self, new_numbers: Iterator[Any] | None = None, new_arrays: Iterator[PyTree] | None = None, constant: int = 0
    ) -> None:
        self.new_numbers = new_numbers  # None: the numbers stay
        self.new_arrays = new_arrays  # None: the frozen parameters stay
        self.constant = constant  # > 0: numbers are a part of the key
        self.key: list[Any] = []  # hashable entries
        self.numbers: list[float] = []
        self.arrays: list[Frozen] = []
        self.traced = self.recursive = False
        self.seen: dict[int, int] = {}  # id of a visited object -> number of objects visited before it
        self.replaced: dict[int, Any] = {}  # id of a cell or a function -> the cell or function in its place

    def fields(self, value: Any, fixed: Sequence[str]) -> Any:
        """Visits a NamedTuple and returns it with the new numbers. The ``fixed`` fields keep their numbers."""
        if not fixed:
            return self.visit(value)
        self.key.append(type(value))
        parts = {name: self.visit(getattr(value, name), name in fixed) for name in value._fields}
        return value._replace(**parts)

    def visit(self, value: Any, constant: bool = False) -> Any:
        """Visits a value and returns it with the new numbers. constant: its numbers stay, as a part of the key."""
        self.constant += constant
        try:
            return self._visit(value)
        finally:
            self.constant -= constant

    def _visit(self, value: Any) -> Any:
        if isinstance(value, float) and value and math.isfinite(value) and not self.constant:
            self.key.append(float)
            self.numbers.append(float(value))
            return value if self.new_numbers is None else next(self.new_numbers)
        if isinstance(value, PLAIN):
            self.key.append((type(value), value))
        elif isinstance(value, tuple):
            if len(value) > 100 and all(type(part) is int for part in value):
                self.key.append(value)
                return value
            self.key.append((type(value), len(value)))
            parts = [self.visit(part) for part in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        elif isinstance(value, functools.partial):
            self.key.append((functools.partial, len(value.args), *value.keywords))
            named = {name: self.visit(argument) for name, argument in value.keywords.items()}
            return functools.partial(self.visit(value.func), *map(self.visit, value.args), **named)
        elif isinstance(value, Frozen):
            return self.frozen_parameters(value)
        elif isinstance(value, MethodType):
            self.key.append(MethodType)
            return MethodType(self.visit(value.__func__), self.visit(value.__self__))
        elif isinstance(value, FunctionType):
            return self.function(value, _of_a_library(value))
        elif _of_this_package(type(value)) and dataclasses.is_dataclass(value) and _comparable(value):
            self.key.append(type(value))
            named = {field.name: self.visit(getattr(value, field.name)) for field in dataclasses.fields(value)}
            same = all(new is getattr(value, name) for name, new in named.items())
            return value if same else dataclasses.replace(value, **named)  # type: ignore[type-var]
        else:
            self.contents(value)
        return value

    def frozen_parameters(self, value: Frozen) -> Frozen:
        """Visits frozen parameters and returns them with the new arrays. Several functions may share them."""
        if not self.visited(value):
            leaves, structure = jax.tree.flatten(value.shapes)
            self.key += [Frozen, structure, *((leaf.shape, leaf.dtype) for leaf in leaves)]
            self.arrays.append(value)
            self.replaced[id(value)] = value if self.new_arrays is None else value.replaced(next(self.new_arrays))
        return self.replaced[id(value)]

    def visited(self, value: Any) -> bool:
        """Whether this object has been visited before. Marks it as visited."""
        if visited := id(value) in self.seen:
            self.key.append(("again", self.seen[id(value)]))
        self.seen.setdefault(id(value), len(self.seen))
        return visited

    def function(self, function: FunctionType, library: bool) -> FunctionType:
        """Visits a function and returns it with the new numbers in its closure and its defaults."""
        if self.visited(function):
            in_itself = id(function) not in self.replaced
            self.recursive |= in_itself and not self.constant and not library
            return self.replaced.get(id(function), function)
        self.key += [function.__code__, _Same(function.__globals__)]
        defaults = self.visit(function.__defaults__, library)
        named = {name: self.visit(value, library) for name, value in (function.__kwdefaults__ or {}).items()}
        cells = tuple(self.cell(cell, library) for cell in function.__closure__ or ())
        if not library and not _of_this_package(function):
            self.global_variables(function)
        old = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *(function.__closure__ or ()))
        new = (*(defaults or ()), *named.values(), *cells)
        copy = function
        if any(a is not b for a, b in zip(old, new, strict=True)):
            copy = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
            copy.__kwdefaults__ = named or None
            copy.__dict__.update(function.__dict__)
            copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
        self.replaced[id(function)] = copy
        return copy

    def cell(self, cell: CellType, constant: bool) -> CellType:
        """Visits a variable of a closure. Returns a new cell if the value has new numbers. Closures may share cells."""
        if self.visited(cell):
            return self.replaced.get(id(cell), cell)
        try:
            value = cell.cell_contents
        except ValueError:  # the variable has no value yet
            self.key.append("empty")
            return cell
        new = self.visit(value, constant)
        self.replaced[id(cell)] = cell if new is value else CellType(new)
        return self.replaced[id(cell)]

    def global_variables(self, function: FunctionType) -> None:
        """Visits the global variables whose names occur in the code of a user's function.

        Their values may change between two calls.
        """
        names = sorted(_names(function.__code__))
        for name in names:
            if name in function.__globals__:
                value = function.__globals__[name]
                self.key.append(name)
                self.visit(value, constant=True)
                if isinstance(value, ModuleType) and not _of_a_library(value):
                    plain = {other: vars(value).get(other) for other in names}
                    self.key += [pair for pair in plain.items() if isinstance(pair[1], PLAIN)]

    def contents(self, value: Any) -> None:
        """Adds an object of a type that `_visit` does not handle to the key.

        Equal containers, NumPy arrays of up to `LARGE` bytes and hashable objects with ``==`` get equal keys. Any other
        object only has the same key as itself.
        """
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
                self.parts(value, getattr(value, "__dict__", {}))  # attributes may change between two calls

    def parts(self, value: Any, parts: dict) -> None:
        """Visits the parts of a container or the attributes of an object, unless it has been visited."""
        if not self.visited(value):
            for name, part in parts.items():
                self.visit(name, constant=True)
                self.visit(part, constant=True)


def _comparable(value: Any) -> bool:
    """Whether the object's type defines ``==`` and the object can be hashed."""
    if isinstance(value, jax.Array) or type(value).__eq__ is object.__eq__:
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _names(code: CodeType) -> set[str]:
    """The names of the global variables and attributes in the code."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _root(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return (name or "").partition(".")[0]


def _of_a_library(value: Any) -> bool:
    return _root(value) in LIBRARIES


def _of_this_package(value: Any) -> bool:
    return _root(value) == "fedjax_drift"
