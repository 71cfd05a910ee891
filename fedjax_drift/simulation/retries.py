"""Repeats what fails for one of two reasons, with programs that avoid it.

- A program does not fit in a device's memory. It then trains fewer clients, or fewer runs, side by side.
- An algorithm uses a hyper-parameter in a way that JAX cannot trace. The hyper-parameters are then constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jax import errors

from fedjax_drift.devices.memory import out_of_memory
from fedjax_drift.untraceable import explained

T = TypeVar("T")
UNTRACEABLE = (errors.JAXTypeError, errors.JAXIndexError)  # JAX raises these for a tracer instead of a constant


def fitting(call: Callable[[], T], smaller: Callable[[errors.JaxRuntimeError], None]) -> T:
    """Returns ``call()``. While it does not fit in a device's memory, ``smaller(error)`` is called before the next try.

    ``smaller`` raises an exception if nothing can be made smaller.
    """
    while True:
        try:
            return call()
        except errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            smaller(error)


def traceable(call: Callable[[], T], use_constants: Callable[[], bool]) -> T:
    """Returns ``call()``. If it needs constants, it is called again after ``use_constants()`` has returned True.

    ``use_constants`` returns False if the hyper-parameters are constants already.
    """
    with explained():
        try:
            return call()
        except UNTRACEABLE:
            if not use_constants():
                raise
        return call()
