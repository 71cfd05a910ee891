"""Short texts and tables for notebooks, which show the value of a cell's last line."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


def brief(value: Any) -> str:
    """The fields of named tuples, and of everything else the number of its numbers. A single number is shown.

    >>> brief(np.zeros((2, 3)))
    '6 numbers'
    """
    if hasattr(value, "_fields"):
        fields = [f"{name}={brief(getattr(value, name))}" for name in value._fields]
        return f"{type(value).__name__}({', '.join(fields)})"
    leaves = jax.tree.leaves(value)
    if any(not hasattr(leaf, "shape") for leaf in leaves):
        return type(value).__name__
    if len(leaves) == 1 and not leaves[0].shape and not isinstance(leaves[0], jax.core.Tracer):
        return "deleted" if getattr(leaves[0], "is_deleted", bool)() else str(leaves[0])
    return f"{sum(leaf.size for leaf in leaves):,} numbers" if leaves else "()"


def short(value: Any) -> str:
    """The repr of a value, with dtype and shape of a larger array, and the length of a longer container.

    >>> short((1, 2)), short(np.zeros(3000)), short([0] * 3000)
    ('(1, 2)', 'float64[3000]', 'a list of 3,000')
    """
    if hasattr(value, "dtype") and (value.size > 8 or value.ndim > 1):
        return f"{value.dtype}{[*value.shape]}"
    text = repr(value)
    if len(text) <= 100 or not isinstance(value, str | list | tuple | dict | set | range):
        return text
    return f"a {type(value).__name__} of {len(value):,}"


def fields(value: Any) -> str:
    """The repr of a named tuple or of a dataclass whose fields may be arrays or long containers."""
    names = getattr(value, "_fields", None) or value.__dataclass_fields__
    return f"{type(value).__name__}({', '.join(f'{name}={short(getattr(value, name))}' for name in names)})"


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are numbers or strings: the hyper-parameters of a factory."""
    return {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}


def made(value: Any) -> str:
    """The repr of a value with a name and a recipe, such as ``Clock(asynchronous, concurrency=3)``.

    An argument that has a name itself, such as the attack of adversaries, is shown by it.
    """
    arguments = value.recipe.arguments if value.recipe else {}
    parts = {name: getattr(part, "name", "") for name, part in arguments.items() if getattr(part, "recipe", None)}
    named = [f"{name}={part}" for name, part in parts.items() if part and part not in value.name]
    shown = [value.name, *(f"{name}={argument!r}" for name, argument in plain(arguments).items()), *named]
    return f"{type(value).__name__}({', '.join(shown)})"


def function_name(value: Any) -> str:
    """The name of a function, or of the factory that made it, as in ``scale_by_adam(...)``."""
    name = getattr(value, "__qualname__", type(value).__name__)
    return f"{name.partition('.<locals>')[0]}(...)" if ".<locals>" in name else name


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table for notebooks. Numbers are aligned to the right."""
    cells = [[number(cell) for cell in row] for row in rows]
    lines = ["".join(f'<td style="text-align: right">{html.escape(cell)}</td>' for cell in row) for row in cells]
    head = "".join(f'<th style="text-align: right">{html.escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    caption = f'<caption style="text-align: left">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(value: Any) -> str:
    """A number with four digits, and everything else as it is."""
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def scores(record: Mapping[str, Any]) -> str:
    """The round of a record, with its loss and accuracy, such as "round 3, loss 2.24, accuracy 0.235"."""
    values = [f"{name} {record[name]:.3g}" for name in ("train_loss", "loss", "accuracy") if name in record]
    return ", ".join([f"round {record.get('round', 0)}", *values])
