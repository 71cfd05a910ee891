"""How the values of flags are read: counts, accuracies, and names with options such as fedprox:mu=0.1.

A function that reads a value raises ArgumentTypeError. argparse puts the name of the flag before its message.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_drift import checks
from fedjax_drift.checks import listed, nearest
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.spec import Declared

YES_NO = {"yes": True, "no": False}


def yes_no(word: str) -> bool:
    """Reads yes or no."""
    if word not in YES_NO:
        raise ValueError
    return YES_NO[word]


# How a word becomes a value of a kind, its metavar, and what it may be.
READ: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "number": (float, "X", "a number"), "speeds": (float, "X", "a number"), "integer": (int, "N", "an integer"),
    "flag": (yes_no, "yes|no", "yes or no"), "word": (str, "", ""), "path": (str, "PATH", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """Reads the value of a declared argument from a word. `Simulation` and its parts check its range."""

    kind: str
    others: tuple[str, ...]  # the words that are allowed besides, such as auto

    @property
    def metavar(self) -> str:
        return "|".join(filter(None, (*self.others, READ[self.kind][1])))

    def __call__(self, word: str) -> Any:
        read, _, allowed = READ[self.kind]
        try:
            return word if word in self.others else read(word)
        except ValueError:
            raise ArgumentTypeError(f"must be {' or '.join((*self.others, allowed))}, got {word!r}") from None


def readers(of: Callable[..., Any]) -> dict[str, Reader]:
    """How the arguments of a class or a function are read whose values can be written as words, so that they can be
    flags."""
    declared = Declared(of).arguments.items()
    return {name: Reader(each.spec.kind, each.words) for name, each in declared if each.spec and each.spec.kind in READ}


LOCAL = tuple(readers(LocalTraining))


class Spec(NamedTuple):
    """A value such as fedprox:mu=0.1, with the factory of this name."""

    text: str
    name: str
    factory: Callable[..., Any]
    options: dict[str, Any]

    @property
    def defaults(self) -> dict[str, Any]:
        """The parameters of the factory, with their default values."""
        return {name: parameter.default for name, parameter in inspect.signature(self.factory).parameters.items()}

    def using(self, **options: Any) -> Spec:
        """Adds those of the options that the factory has and the text does not."""
        known = self.defaults
        return self._replace(options={k: v for k, v in options.items() if k in known} | self.options)

    def make(self, *arguments: Any) -> Any:
        """Calls the factory with the options."""
        return self.factory(*arguments, **self.options)


@dataclass(frozen=True, eq=False)
class Choice:
    """Reads NAME[:value][:key=value,...]. The options are checked against the signature of the factory.

    Attributes:
      factories: The factories by name.
      hidden: Parameters of the factories that are not options of the command line.
    """

    factories: Mapping[str, Callable[..., Any]]
    hidden: tuple[str, ...] = ()

    def known(self, name: str) -> dict[str, inspect.Parameter]:
        """Returns the options of a factory."""
        parameters = inspect.signature(self.factories[name]).parameters
        return {key: parameter for key, parameter in parameters.items() if key not in self.hidden}

    def __call__(self, text: str) -> Spec:
        name, *items = [part for part in re.split("[:,]", text) if part] or [""]
        if name not in self.factories:
            similar = nearest(name, self.factories)
            raise ArgumentTypeError(f"must be one of {listed(self.factories)}, got {name!r}{similar}")
        known, options = self.known(name), dict[str, Any]()
        for key, equals, value in (item.partition("=") for item in items):
            if not equals:  # dirichlet:0.3
                key, value = next((k for k in known if k not in options), ""), key
            if key not in known:
                wrong = f"option {key!r}" if key else f"value {value!r}"
                has = f"the options of {name} are {listed(known)}" if known else f"{name} has no options"
                flag = f". {key} is an option of local training: --{key.replace('_', '-')}" if key in LOCAL else ""
                raise ArgumentTypeError(f"{name}: unknown {wrong}: {has}{flag or nearest(key, known)}")
            if key in options:
                raise ArgumentTypeError(f"{name}: option {key!r} must be given only once, got it twice in {text!r}")
            options[key] = _option(value, known[key].default)
            if isinstance(known[key].default, bool) and not isinstance(options[key], bool):
                raise ArgumentTypeError(f"{name}: {key} must be true or false, got {value!r}")
        if missing := [key for key, p in known.items() if p.default is p.empty and key not in options]:
            example = ",".join(f"{key}=VALUE" for key in missing)
            raise ArgumentTypeError(f"{name} needs {' and '.join(missing)}, got {text!r}: write {name}:{example}")
        return Spec(text, name, self.factories[name], options)


def _option(text: str, default: Any) -> Any:
    if isinstance(default, str):  # "none" is then a string, not None
        return text
    value = plain(text)
    several = isinstance(default, tuple) or default is None and isinstance(value, str) and "+" in value
    return tuple(plain(part) for part in text.split("+")) if several else value


def plain(text: str) -> bool | int | float | str | None:
    """Reads true, false, none or a number. Any other text is a word."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def count(text: str, lowest: int = 1, highest: int = 2**31 - 1) -> int:
    """Reads an integer in lowest..highest."""
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < lowest:
        raise ArgumentTypeError(f"must be an integer >= {lowest}, got {text!r}")
    if int(text) > highest:
        raise ArgumentTypeError(f"must be at most {highest}, got {text!r}")
    return int(text)


count0 = partial(count, lowest=0)
number_of_seeds = partial(count, highest=10_000)
seed = partial(count, lowest=0, highest=2**32 - 1)


def redeal(text: str) -> float | str:
    """Reads evenly, or alpha > 0."""
    if text != "evenly" and not 0 < _number(text) < math.inf:
        raise ArgumentTypeError(f"must be evenly or a number > 0, got {text!r}")
    return text if text == "evenly" else float(text)


def accuracy(text: str) -> float:
    """Reads an accuracy in 0..1."""
    value = _number(text)
    if not 0 < value <= 1:
        hint = f": {value / 100:g} for {value:g} %" if 1 < value <= 100 else ""
        raise ArgumentTypeError(f"must be an accuracy in 0..1, got {text!r}{hint}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def local_path(text: str) -> Path:
    """Reads the path of a file or a folder."""
    try:
        return checks.path("", text)
    except ConfigurationError as error:
        raise ArgumentTypeError(str(error).strip()) from error


def processes(text: str) -> tuple[str, int, int]:
    """Reads the address of the first process, the number of processes, and the index of this process."""
    if not (match := re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", text)):
        raise ArgumentTypeError(f"must be HOST:PORT,P,I, such as node0:1234,4,0, got {text!r}")
    return match[1], int(match[2]), int(match[3])
