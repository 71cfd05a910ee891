"""How the values of flags are read: those that are declared, and names with options such as fedprox:mu=0.1.

A function that reads a value raises ArgumentTypeError. argparse puts the name of the flag before its message.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from fedjax_drift import checks
from fedjax_drift.checks import listed, nearest
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.spec import GIVEN_PATH, Argument, Declared, Positive, Spec, argument, integer

READ: dict[str, tuple[Callable[[str], Any], str]] = {  # how a word becomes a value of a kind, and its metavar
    "number": (float, "X"), "speeds": (float, "X"), "integer": (int, "N"), "word": (str, ""), "path": (str, "PATH"),
    "flag": ({"yes": True, "no": False}.__getitem__, "yes|no"),
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """Reads a value from a word, as it is declared: a number, for example, or a word that is allowed besides."""

    kind: str
    argument: Argument

    @property
    def words(self) -> tuple[str, ...]:
        return self.argument.words

    @property
    def metavar(self) -> str:
        return "|".join(filter(None, (*self.words, READ[self.kind][1])))

    def __call__(self, word: str) -> Any:
        if word in self.words:
            return word
        value: Any = word
        with contextlib.suppress(ValueError, KeyError):
            value = READ[self.kind][0](word)
        try:
            return self.argument.check("", value)
        except ConfigurationError as error:
            message = str(error).strip().replace("True or False", "yes or no")
            if not self.argument.fix and "must be one of" not in message:  # neither names the words
                message = message.replace("must be ", "must be " + "".join(f"{each} or " for each in self.words), 1)
            raise ArgumentTypeError(message) from None


def reader(declaration: Any) -> Reader:
    """How a value of this declaration, such as `spec.Count`, is read."""
    declared = argument(declaration)
    assert declared.spec is not None
    return Reader(declared.spec.kind, declared)


def readers(of: Callable[..., Any]) -> dict[str, Reader]:
    """How the arguments of a class or a function are read whose values can be written as words, so that they can be
    flags."""
    declared = Declared(of).arguments.items()
    return {name: Reader(each.spec.kind, each) for name, each in declared if each.spec and each.spec.kind in READ}


LOCAL = tuple(readers(LocalTraining))
COUNT = reader(Annotated[int, integer(1, 2**31 - 1)])
COUNT_OR_ZERO = reader(Annotated[int, integer(0, 2**31 - 1)])
SEED = reader(Annotated[int, integer(0, 2**32 - 1)])
REDEAL = reader(Positive | Literal["evenly"])
ACCURACY = reader(Annotated[float, Spec(lambda name, value, fix: checks.target(name, value, "accuracy"), "number")])
LOCAL_PATH = reader(Annotated[Path, GIVEN_PATH])


class Chosen(NamedTuple):
    """A value such as fedprox:mu=0.1, with the factory of this name."""

    text: str
    name: str
    factory: Callable[..., Any]
    options: dict[str, Any]

    @property
    def defaults(self) -> dict[str, Any]:
        """The parameters of the factory, with their default values."""
        return {name: parameter.default for name, parameter in inspect.signature(self.factory).parameters.items()}

    def using(self, **options: Any) -> Chosen:
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
    metavar = "NAME[:key=value,...]"

    def __str__(self) -> str:
        return ", ".join(self.factories)

    def known(self, name: str) -> dict[str, inspect.Parameter]:
        """Returns the options of a factory."""
        parameters = inspect.signature(self.factories[name]).parameters
        return {key: parameter for key, parameter in parameters.items() if key not in self.hidden}

    def __call__(self, text: str) -> Chosen:
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
        return Chosen(text, name, self.factories[name], options)


def _option(text: str, default: Any) -> Any:
    if isinstance(default, str):  # "none" is then a string, not None
        return text
    value = plain(text)
    open_kind = default is None or default is inspect.Parameter.empty
    several = isinstance(default, tuple) or open_kind and isinstance(value, str) and "+" in value
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


def processes(text: str) -> tuple[str, int, int]:
    """Reads the address of the first process, the number of processes, and the index of this process."""
    if not (match := re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", text)):
        raise ArgumentTypeError(f"must be HOST:PORT,P,I, such as node0:1234,4,0, got {text!r}")
    return match[1], int(match[2]), int(match[3])
