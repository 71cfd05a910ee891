"""Recipes: a value that knows the factory and the arguments that made it.

    @recorded
    def fedprox(mu: float, server_lr: float = 1.0) -> Algorithm: ...

    fedprox(0.1).recipe         # the factory, and {"mu": 0.1, "server_lr": 1.0}

An algorithm consists of functions that capture its hyper-parameters. With the recipe nobody has to look into them:

- A compiled program takes the numbers as arguments, and calls the factory again with tracers in their place. So another
  mu needs no other program. `split` separates a value into its form and its numbers, `join` makes the value again.
- Two values have the same form if they were made by the same factory with the same arguments, apart from the numbers.
  Simulations with equal forms share their programs.
- Checkpoints describe an algorithm by its recipe (`simulation.description.identity`).

A value without a recipe works as well. Its functions are compared by identity, and its numbers are constants.

The frozen parameters of a model (`Frozen`) are arguments of the programs, too. Only their shapes are a part of the
form.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, spec, tree
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.tree import PyTree

P = ParamSpec("P")
R = TypeVar("R")
LARGE = 2**24  # bytes; the contents of larger arrays are not compared


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a value was made."""

    factory: Callable[..., Any]  # the decorated function
    signature: inspect.Signature
    arguments: dict[str, Any]  # all of them, with the defaults
    made: Any  # what the factory returned; `_replace` may have changed the value since

    def again(self, arguments: dict[str, Any]) -> Any:
        """What the factory makes of other arguments."""
        bound = inspect.BoundArguments(self.signature, arguments)  # type: ignore[arg-type]
        return self.factory(*bound.args, **bound.kwargs)

    def replaced(self, value: Any) -> dict[str, Any]:
        """The fields of ``value`` that are no longer those that the factory made."""
        names = [name for name in value._fields if name != "recipe"]
        return {name: getattr(value, name) for name in names if getattr(value, name) is not getattr(self.made, name)}


def recorded(
    factory: Callable[P, R], call: Callable[[spec.Declared, dict[str, Any]], Any] = spec.Declared.call
) -> Callable[P, R]:
    """Decorates a factory. Its arguments are checked as their annotations declare (`spec`), and the NamedTuple that it
    returns has its recipe in the field ``recipe``.

    The factory must depend on its arguments only, as a function for `jax.jit` must. Its functions may use global
    variables, but a program that was compiled does not notice a new value.

    An argument whose annotation is ``float``, or declares a number, is a number for the program, also if an integer is
    passed. A 0 is not: it often switches something off (momentum, weight decay), which needs a different program.

    Args:
      factory: the function.
      call: ``call(declared, arguments) -> value`` makes the value.
    """
    declared = spec.Declared(factory)

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        given = declared.bind(args, kwargs)
        made = call(declared, given)
        if not hasattr(made, "recipe"):
            raise ConfigurationError(
                f"{factory.__name__} must return an fd.Algorithm, or an fd.participation.Participation, got "
                f"{checks.shown(made)}"
            )
        arguments = dict(given)
        for name in declared.numbers:
            number = given[name] if isinstance(given[name], jax.core.Tracer) else checks.one_in(given[name])
            if isinstance(number, Real) and not isinstance(number, bool):
                arguments[name] = float(number)
        return made._replace(recipe=Recipe(make, declared.signature, arguments, made))

    make.declared = declared  # type: ignore[attr-defined]
    make.__signature__ = declared.signature  # type: ignore[attr-defined]  # of a factory passed without parentheses
    return make


# --- frozen parameters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Frozen:
    """Parameters of a model that are not trained. They are never sent to clients, and checkpoints do not contain them.

    Compiled programs take its arrays as an argument, so that the arrays are no constants of the programs, and all
    programs share one copy on each device.
    """

    shapes: PyTree  # leaves `jax.ShapeDtypeStruct`
    arrays: Callable[[], PyTree]  # returns the arrays; called outside of programs at most once

    @classmethod
    def of(cls, make: Callable[[], PyTree]) -> Frozen:
        """The arrays that ``make()`` returns. It is called when they are first needed, and only once."""

        @functools.cache
        def arrays() -> PyTree:
            with jax.ensure_compile_time_eval():  # inside of a program, too, they are arrays, not tracers
                return make()

        return cls(jax.eval_shape(make), arrays)

    @functools.cached_property
    def checksum(self) -> str:
        """Names the values of the arrays in checkpoints."""
        return f"{tree.crc32(self.arrays()):08x}"

    def replaced(self, arrays: PyTree) -> Frozen:
        """The same with other arrays, or with shapes instead of arrays, for `jax.eval_shape`."""

        def array(a: Any) -> Any:
            return jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a

        return Frozen(self.shapes, lambda: jax.tree.map(array, arrays))


# --- form and numbers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A value without its numbers. Two forms are equal if their values differ only in their numbers."""

    key: tuple[Any, ...]
    value: Any = dataclasses.field(compare=False, repr=False)
    fixed: tuple[str, ...] = ()
    private: bool = False  # True: programs are not kept, because the value has tracers


def split(value: Any, fixed: Sequence[str] = ()) -> tuple[Form, tuple[float, ...]]:
    """Returns the form of a value, and its numbers in order: its finite floats other than 0.

    fixed: if the value is a NamedTuple, the fields whose numbers stay in the form.
    """
    key: list[Any] = []
    numbers: list[float] = []
    private = False

    def leaf(part: Any, constant: bool) -> Any:
        nonlocal private
        if _is_number(part) and not constant:
            numbers.append(float(part))
            key.append(float)
        else:
            key.append(_compared(part))
            private |= any(isinstance(each, jax.core.Tracer) for each in jax.tree.leaves(part))
        return part

    _rebuilt(value, leaf, tuple(fixed), key.append)
    return Form(tuple(key), value, tuple(fixed), private), tuple(numbers)


def join(form: Form, numbers: Sequence[Any], arrays: Sequence[PyTree] = ()) -> Any:
    """Returns the value that has this form, these numbers and these frozen arrays. They may be tracers."""
    new_numbers, new_arrays = iter(numbers), iter(arrays)

    def leaf(part: Any, constant: bool) -> Any:
        if isinstance(part, Frozen) and arrays:
            return part.replaced(next(new_arrays))
        return next(new_numbers) if _is_number(part) and not constant and numbers else part

    return _rebuilt(form.value, leaf, form.fixed)


def frozen(value: Any) -> tuple[Frozen, ...]:
    """Returns the frozen parameters inside a value, in order."""
    found: list[Frozen] = []

    def leaf(part: Any, constant: bool) -> Any:
        found.extend([part] if isinstance(part, Frozen) else [])
        return part

    _rebuilt(value, leaf)
    return tuple(found)


def bind(value: Any, arrays: Sequence[PyTree]) -> Any:
    """Returns the value with other arrays in the place of its frozen parameters."""
    return join(Form((), value), (), arrays)


def without_arrays(value: Any) -> Any:
    """Returns the value with frozen parameters that have shapes, but no arrays.

    Programs can be traced for it, and it keeps no memory.
    """
    return bind(value, [each.shapes for each in frozen(value)])


def recipe_of(value: Any) -> Recipe | None:
    """The recipe of a value, if it has one."""
    recipe = getattr(value, "recipe", None)
    return recipe if isinstance(recipe, Recipe) else None


def parts_of(value: Any) -> dict[str, Any] | None:
    """The parts of a value, by name: the arguments of its recipe and the fields that were replaced since, or the fields
    of a NamedTuple or of a frozen dataclass such as `LocalTraining`, or the elements of a tuple or a list of values
    with recipes. None for everything else."""
    if recipe := recipe_of(value):
        return {**recipe.arguments, **{f"_replace.{name}": part for name, part in recipe.replaced(value).items()}}
    if type(value) in (tuple, list) and any(map(recipe_of, value)):
        return {str(i): part for i, part in enumerate(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._asdict()  # type: ignore[attr-defined]
    options = getattr(type(value), "__dataclass_params__", None)
    if options is not None and options.frozen and options.eq:
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _rebuilt(
    value: Any,
    leaf: Callable[[Any, bool], Any],
    fixed: tuple[str, ...] = (),
    enter: Callable[[Any], None] = lambda kind: None,
    constant: bool = False,
) -> Any:
    """Returns the value with ``leaf(part, constant)`` in place of each part that has no parts itself.

    Values none of whose parts have changed are not made again. enter: is called with what makes a value from its parts,
    before they are visited. constant: whether the numbers are constants; those of the fields ``fixed`` always are.
    """
    parts = parts_of(value)
    if parts is None:
        return leaf(value, constant)
    recipe = recipe_of(value)
    enter((recipe.factory if recipe else type(value), tuple(parts)))
    new = {n: _rebuilt(part, leaf, (), enter, constant or n in fixed) for n, part in parts.items()}
    if all(new[name] is part for name, part in parts.items()):
        return value
    if recipe:
        made = recipe.again({name: new[name] for name in recipe.arguments})
        return made._replace(**{name: new[f"_replace.{name}"] for name in recipe.replaced(value)})
    if type(value) in (tuple, list):
        return type(value)(new.values())
    if isinstance(value, tuple):
        return value._replace(**new)  # type: ignore[attr-defined]
    return dataclasses.replace(value, **new)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and value != 0 and math.isfinite(value)


class _Same:
    """Wraps an object. Two wrappers are equal if they wrap the same object. The object is kept alive, so its id stays
    unique."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _compared(value: Any) -> Any:
    """A hashable stand-in for a constant. Containers and NumPy arrays up to `LARGE` are compared by their contents,
    hashable objects with ``==`` by it, and all others, such as functions, by identity.

    Functions of optax are compared by their code and by what they capture, so that two ``optax.scale_by_adam()`` are
    equal. optax has no ``==``.
    """
    if isinstance(value, Frozen):
        leaves, structure = jax.tree.flatten(value.shapes)
        return (Frozen, structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
    if isinstance(value, dict):
        return (dict, tuple((_compared(name), _compared(part)) for name, part in value.items()))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(map(_compared, value)))
    if isinstance(value, list | tuple):
        plain = all(type(part) is int for part in value)  # may be long: one number for each client
        return (type(value), tuple(value) if plain else tuple(map(_compared, value)))
    if isinstance(value, np.ndarray) and value.nbytes <= LARGE and value.dtype != object:
        return (value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value).data).digest())
    if inspect.isfunction(value) and str(value.__module__).partition(".")[0] == "optax":
        captured = [_compared(cell.cell_contents) for cell in value.__closure__ or () if cell != types.CellType()]
        return (value.__code__, _compared(value.__defaults__), *captured)
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    has_equality = not isinstance(value, jax.Array) and type(value).__eq__ is not object.__eq__
    return (type(value), value) if has_equality else _Same(value)
