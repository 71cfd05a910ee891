"""Tries the functions of a user with shapes, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError


def shapes_of(what: str, function: Callable, *arguments: Any, fix: str = "") -> Any:
    """The shapes that a function returns. Raises ConfigurationError if it fails: WHAT, got one that fails (WHY): FIX.

    A ConfigurationError of the library, which the function raises, says more, and is raised as it is.
    """
    try:
        return jax.eval_shape(function, *arguments)
    except ConfigurationError:
        raise
    except Exception as error:
        checks.refuse(what, f"one that fails ({checks.first_line(error)})", fix, error)
