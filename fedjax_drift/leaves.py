"""Selects leaves of a model's parameters: by a regular expression, by a function of their path, or one by one.

The path of a leaf is the names on the way to it, such as "classifier/dense/kernel".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.tree import PyTree

Params = Any


def check(name: str, selection: Any, fix: str = "") -> Any:
    """Returns the selection. Raises ConfigurationError unless it is of one of the three kinds of `Selection`."""
    if isinstance(selection, str):
        try:
            re.compile(selection)
        except re.error as error:
            checks.refuse(f"{name} must be a regular expression", f"{selection!r} ({error})", cause=error)
    elif not callable(selection):
        bools = jax.tree.leaves(selection)
        if not bools or selection is bools[0] or not all(isinstance(each, bool | np.bool) for each in bools):
            checks.refuse(
                f"{name} must be a regular expression, a function of a path, or a pytree with a bool for every leaf "
                "of the parameters",
                checks.shown(selection),
                fix,
            )
    return selection


Selection = Annotated[str | Callable[[str], bool] | PyTree, spec.Spec(check, "selection")]
"""A regular expression that is searched in the path of a leaf; or a function from this path to a bool; or a pytree with
a bool for every leaf."""


def select(name: str, selection: Selection, params: Params) -> PyTree:
    """A pytree with a bool for every leaf of the parameters, whether it is selected.

    Raises ConfigurationError if a regular expression selects no leaf, or if a pytree has another structure.
    """
    paths = jax.tree_util.tree_map_with_path(lambda path, _: path_of(path), params)
    known = checks.listed(jax.tree.leaves(paths))
    if isinstance(selection, str):
        mask = jax.tree.map(lambda path: re.search(selection, path) is not None, paths)
        if not any(jax.tree.leaves(mask)):
            checks.refuse(
                f"{name} must select leaves of the parameters ({known})", f"{selection!r}, which selects none"
            )
        return mask
    if callable(selection):
        return jax.tree.map(lambda path: _chosen(name, selection, path), paths)
    structures: list[Any] = [jax.tree.structure(values) for values in (selection, params)]
    if structures[0] != structures[1]:
        checks.refuse(f"{name} must have a bool for every leaf of the parameters ({known})", checks.shown(selection))
    return selection


def _chosen(name: str, selection: Callable[[str], bool], path: str) -> bool:
    """The answer of a function for one path. Raises ConfigurationError unless it is a bool."""
    try:
        chosen = selection(path)
    except Exception as error:
        checks.refuse(
            f"{name} must be a function of a path such as {path!r}", "one that fails", checks.first_line(error), error
        )
    if not isinstance(chosen, bool | np.bool):
        checks.refuse(
            f"{name} must be a function from a path to True or False",
            f"one that returns {checks.shown(chosen)} for {path!r}",
        )
    return bool(chosen)


def by_path(params: Params) -> dict[str, Any]:
    """The leaves of parameters, by path. Raises ConfigurationError if two leaves have the same path."""
    pairs = [(path_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(params)]
    named = dict(pairs)
    if len(named) < len(pairs):
        paths = [path for path, _ in pairs]
        twice = next(path for path in paths if paths.count(path) > 1)
        checks.refuse("parameters must have different paths", f"{twice} twice", "rename one of them")
    return named


def arrays(params: Params) -> dict[str, np.ndarray]:
    """The leaves of parameters as NumPy arrays, by path. Raises ConfigurationError unless they are one or more arrays
    of numbers."""
    result: dict[str, np.ndarray] = {}
    for path, leaf in by_path(params).items():
        where = f"params, at {path or 'its root'},"
        try:
            result[path] = np.asarray(leaf)
        except Exception as error:  # a key, or a donated array
            checks.refuse(f"{where} must be an array", f"{checks.type_of(leaf)} ({error})", cause=error)
        checks.array(where, result[path].reshape(-1))
    if not result:
        checks.refuse("params must have at least one array", checks.shown(params), "pass state.params")
    return result


def path_of(path: Any) -> str:
    """The path of a leaf as text, from the path that `jax.tree_util.tree_leaves_with_path` gives."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
