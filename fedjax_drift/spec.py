"""What an argument may be: declared once, in its annotation.

    @algorithm
    def fedprox(mu: NonNegative, server_lr: Positive = 1.0, weighting: Weighting = "examples") -> Algorithm: ...

    @dataclass(frozen=True)
    @checked
    class LocalTraining:
        epochs: Count = 1
        lr_decay: Annotated[Positive, Fix("1 keeps the learning rate constant")] = 1.0
        direction: Literal["ascent", "descent"] | None = None

A type checker reads ``Positive`` as float. From the declaration follow the error for a wrong value, with the form
``NAME must be ALLOWED, got VALUE: FIX``, and which arguments are numbers of a compiled program (`recipes`). A parameter
whose annotation declares nothing is not checked.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import numpy as np

from fedjax_drift import checks

C = TypeVar("C", bound=Callable)
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Spec:
    """What a value may be.

    Attributes:
      check: ``check(name, value, fix) -> value``, as Python's own type. It raises ConfigurationError for a wrong value.
      kind: "number", "integer", "flag", "word" and so on. Only a "number" is a number of a compiled program.
      right, wrong: values at the edge of what is allowed, on both sides, for tests.
      allowed: what is allowed, for documentation. "" if the type says it.
    """

    check: Callable[[str, Any, str], Any]
    kind: str
    right: tuple[Any, ...] = ()
    wrong: tuple[Any, ...] = ()
    allowed: str = ""


@dataclass(frozen=True)
class Fix:
    """The hint at the end of the message: ``Annotated[Positive, Fix("None means no clipping")]``."""

    text: str


def number(
    allowed: str,
    ok: Callable[[Any], bool],
    right: tuple[Any, ...],
    wrong: tuple[Any, ...],
    off: int | None = None,
    computed: bool = True,
) -> Spec:
    """A finite number. Tracers pass.

    off: the number that switches something off. It is returned as an int, so that it is a constant of a program.
    computed: whether JAX computes with it, see `checks.number`.
    """

    def check(name: str, value: Any, fix: str) -> Any:
        result = checks.number(name, value, allowed, ok, fix, computed)
        return off if off is not None and not isinstance(result, jax.core.Tracer) and result == off else result

    underflows = (1e-50,) if computed and ok(1e-50) else ()
    return Spec(check, "number", right, (*wrong, *underflows), allowed)


def integer(low: int, high: float = checks.MOST) -> Spec:
    """An integer in low..high."""
    bounded = high < checks.MOST
    return Spec(
        lambda name, value, fix: checks.integer(name, value, low, high, fix),
        "integer",
        (low, 2**80) if high == math.inf else (low,),
        (low - 1, *((high + 1,) if bounded else ())),
        f"in {low}..{high}" if bounded else f">= {low}",
    )


def pair(allowed: str, each: Any) -> Spec:
    """Two numbers. each: their declaration, such as `Positive`."""
    (one,) = each.__metadata__

    def check(name: str, value: Any, fix: str) -> tuple[Any, ...]:
        if not isinstance(value, tuple | list) or len(value) != 2:
            checks.refuse(f"{name} must be {allowed}", checks.shown(value), fix)
        return tuple(one.check(f"{name}[{i}]", item, "") for i, item in enumerate(value))

    return Spec(check, "pair", allowed=allowed)


def instance(kind: type, what: str = "") -> Spec:
    """A value of this type. what: says this in the message."""
    return Spec(lambda name, value, fix: checks.instance(name, value, kind, fix, what), "instance", allowed=what)


def words(*allowed: str) -> Spec:
    """Several of these words, or one, or True for all, or False for none."""
    return Spec(lambda name, value, fix: checks.choices(name, value, allowed), "words", (*allowed, True, False, ()))


def array(allowed: str, ok: Callable[[np.ndarray], Any]) -> Spec:
    """A numeric array. ok: also called for arrays without elements."""

    def check(name: str, value: Any, fix: str) -> np.ndarray:
        result = checks.array(name, value)
        if not ok(result):
            real = result.size and result.dtype.kind in "fiu"
            values = f" with values from {result.min():g} to {result.max():g}" if real else ""
            checks.refuse(f"{name} must be {allowed}", f"{result.dtype}{[*result.shape]}{values}", fix)
        return result

    return Spec(check, "array", allowed=allowed)


def shape(length: int | None = None) -> Spec:
    """A tuple of integers >= 1. length: how many, or None for any number."""
    right, wrong = ((1,) * (length or 1),), (0, (0,))
    return Spec(lambda name, value, fix: checks.shape(name, value, length), "shape", right, wrong, "integers >= 1")


def numbers(array: np.ndarray, ndim: int, kinds: str = "fiu") -> bool:
    """Whether an array has real numbers, finite ones, at least one, and this number of axes."""
    return array.ndim == ndim and array.dtype.kind in kinds and bool(array.size) and bool(np.isfinite(array).all())


def function(form: str) -> Spec:
    """A function of this form, such as ``(x, y) -> domain``. Its arguments are positional."""
    takes = len(form[1 : form.index(")")].split(","))
    return Spec(lambda name, value, fix: checks.function(name, value, fix, takes, form), "function", allowed=form)


def _folder(name: str, value: Any, fix: str) -> Path:
    path = checks.path(name, value, fix).absolute()
    if path.exists() and not path.is_dir():
        checks.refuse(f"{name} must be a folder", f"the file {path}", "choose another name")
    return path


def _choice(allowed: tuple[str, ...]) -> Spec:
    return Spec(lambda name, value, fix: checks.choice(name, value, allowed), "word", allowed)


POSITIVE = number("a finite number > 0", lambda v: v > 0, (0.5,), (0, -1))
NONNEGATIVE = number("a finite number >= 0", lambda v: v >= 0, (0, 0.5), (-1,))
FRACTION = number("in [0, 1)", lambda v: 0 <= v < 1, (0, 0.5), (1, -0.1))
INSIDE = number("in (0, 1)", lambda v: 0 < v < 1, (0.5,), (0, 1), computed=False)
PROBABILITY = number("a probability in 0..1", lambda v: 0 <= v <= 1, (0, 1), (-0.1, 1.5))

Positive = Annotated[float, POSITIVE]
NonNegative = Annotated[float, NONNEGATIVE]
Finite = Annotated[float, number("finite", lambda v: True, (0, -1), ())]
Fraction = Annotated[float, FRACTION]
Share = Annotated[float, number("in (0, 1]", lambda v: 0 < v <= 1, (0.5, 1), (0, 1.5))]
Mix = Annotated[float, number("in 0..1", lambda v: 0 <= v <= 1, (0, 1), (-0.1, 1.5))]
Probability = Annotated[float, PROBABILITY]
Count = Annotated[int, integer(1)]
CountOrZero = Annotated[int, integer(0)]
Seed = Annotated[int, integer(0, math.inf)]  # of NumPy's random generators
Flag = Annotated[bool, Spec(checks.flag, "flag", (True, False))]
Text = Annotated[str, Spec(checks.text, "text")]
Shape = Annotated[tuple[int, ...], shape()]
FloatingDtype = Annotated[
    Any, Spec(lambda name, value, fix: checks.floating_dtype(name, value), "dtype", allowed="floating")
]
PATH = Spec(lambda name, value, fix: checks.path(name, value, fix).absolute(), "path")  # a pathlib.Path
FOLDER = Spec(_folder, "path")  # the same, and no file
GIVEN_PATH = Spec(checks.path, "path")  # not made absolute: for what is read or written at once
Amount = Annotated[float, number("a finite number > 0", lambda v: v > 0, (0.5,), (0, -1), computed=False)]
AmountOrZero = Annotated[float, number("a finite number >= 0", lambda v: v >= 0, (0, 0.5), (-1,), computed=False)]


class Argument(NamedTuple):
    """A parameter's declaration, read from its annotation."""

    spec: Spec | None = None  # None: any value
    fix: str = ""
    others: tuple[Any, ...] = ()  # None and the words that are allowed besides
    number: bool = False  # whether it is a number of a compiled program

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are allowed."""
        several = self.spec.right if self.spec and self.spec.kind == "word" else ()
        return tuple(word for word in (*several, *self.others) if isinstance(word, str))

    def check(self, name: str, value: Any) -> Any:
        """The value, as Python's own type. Raises ConfigurationError unless it is allowed."""
        simple = value is None or isinstance(value, str)  # an array has no single ==
        if self.spec is None or simple and value in self.others:
            return value
        return self.spec.check(name, value, self.fix)


class Declared:
    """The declared arguments of a function or of a dataclass, which are read when they are first needed."""

    def __init__(self, of: Callable[..., Any]) -> None:
        self.of = of

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """With a parameter for each field of ``**flags: Unpack[...]``, which is False by default."""
        signature, (packed, kinds) = inspect.signature(self.of), self._packed
        if packed != "flags":
            return signature
        parameters = [parameter for name, parameter in signature.parameters.items() if name != packed]
        added = [inspect.Parameter(name, KEYWORD_ONLY, default=False, annotation=kind) for name, kind in kinds.items()]
        return signature.replace(parameters=[*parameters, *added])

    @functools.cached_property
    def _packed(self) -> tuple[str, dict[str, Any]]:
        """The name of a parameter ``**options: Unpack[...]``, and its fields with their annotations. "" without one."""
        *_, last = inspect.signature(self.of).parameters.values() or (None,)
        if last is None or last.kind is not inspect.Parameter.VAR_KEYWORD:
            return "", {}
        fields = get_args(_evaluated(last.annotation, _names(self.of)))
        return (last.name, get_type_hints(fields[0], include_extras=True)) if fields else ("", {})

    @functools.cached_property
    def arguments(self) -> dict[str, Argument]:
        """By name, without those that declare nothing."""
        names = _names(self.of)
        read = {name: argument(_evaluated(p.annotation, names)) for name, p in self.signature.parameters.items()}
        return {name: argument for name, argument in read.items() if argument.spec or argument.number}

    @functools.cached_property
    def numbers(self) -> frozenset[str]:
        """The names of the arguments that are numbers of a compiled program."""
        return frozenset(name for name, argument in self.arguments.items() if argument.number)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, with the defaults."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            if self.signature == inspect.signature(self.of):
                self.of(*args, **kwargs)  # raises Python's own error, which names the function
            raise TypeError(f"{self.of.__name__}() {error}") from None
        packed, fields = self._packed
        if unknown := [name for name in bound.arguments.get(packed, ()) if name not in fields]:
            fix = checks.nearest(unknown[0], [*self.signature.parameters, *fields])
            raise TypeError(f"{self.of.__name__}() got an unexpected keyword argument {unknown[0]!r}{fix}")
        bound.apply_defaults()
        return bound.arguments

    def call(self, given: Mapping[str, Any]) -> Any:
        """Checks all arguments, and calls the function with them."""
        declared = self.arguments
        values = {n: declared[n].check(n, value) if n in declared else value for n, value in given.items()}
        bound = inspect.BoundArguments(self.signature, values)  # type: ignore[arg-type]
        return self.of(*bound.args, **bound.kwargs)


def checked(of: C) -> C:
    """Decorates a function, whose arguments are checked before it is called; or a class, below
    ``@dataclass(frozen=True)``, whose fields are checked before its ``__post_init__`` is called."""
    return _checked_class(of) if isinstance(of, type) else _checked_function(of)


def _checked_function(function: Any) -> Any:
    declared = Declared(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return declared.call(declared.bind(args, kwargs))

    call.declared = declared  # type: ignore[attr-defined]
    if "flags" in function.__annotations__:
        call.__signature__ = declared.signature  # type: ignore[attr-defined]
    return call


def _checked_class(cls: Any) -> Any:
    cls.declared = declared = Declared(cls)
    together = getattr(cls, "__post_init__", None)

    def post_init(self: Any) -> None:
        for name, argument in declared.arguments.items():
            # As Python's own types, because arrays are not hashable. The dataclass is frozen.
            object.__setattr__(self, name, argument.check(name, getattr(self, name)))
        if together is not None:
            together(self)

    cls.__post_init__ = post_init
    return cls


def argument(annotation: Any) -> Argument:
    """What an annotation declares."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    notes = [note for member in members for note in getattr(member, "__metadata__", ())]
    allowed = tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))
    spec = next((note for note in notes if isinstance(note, Spec)), None)
    others = (None,) if type(None) in members else ()
    if spec is None and allowed:
        spec, allowed = _choice(allowed), ()
    fix = next((note.text for note in notes if isinstance(note, Fix)), "")
    return Argument(spec, fix, (*others, *allowed), float in members or spec is not None and spec.kind == "number")


def _names(of: Callable[..., Any]) -> dict[str, Any]:
    """The names that the annotations of a function or a class may use."""
    inner = inspect.unwrap(of)
    if inspect.isfunction(inner):
        return dict(inner.__globals__) | dict(inspect.getclosurevars(inner).nonlocals)
    return dict(vars(sys.modules[inner.__module__]))


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """The annotation. None if it is a text with names that are not known when the program runs."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except Exception:  # a user's own annotation may be anything
        return None
