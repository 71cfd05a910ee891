"""What several files of tests share: the smallest problems, and the choice of cases for thorough tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def first_of_each(cases: Sequence[tuple], kind: Callable[[tuple], Any] = lambda case: case[0]) -> list:
    """Returns parameters of a test. All cases but the first of each kind are for thorough tests."""
    first = {kind(case): i for i, case in reversed([*enumerate(cases)])}
    return [case if first[kind(case)] == i else thorough(*case) for i, case in enumerate(cases)]


def thorough(*values: Any) -> Any:
    """Returns a parameter of a test that is for thorough tests."""
    return pytest.param(*values, marks=pytest.mark.thorough)
