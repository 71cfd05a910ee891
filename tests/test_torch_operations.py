"""The operations of `Model.from_torch` against PyTorch. More calls: python tests/torch_operations.py SECONDS."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

pytest.importorskip("torch", reason="needs PyTorch")
sys.path.append(str(Path(__file__).parent))

import torch_operations as operations

from fedjax_drift.pytorch.operations.decomposed import DECOMPOSED

pytestmark = pytest.mark.thorough


def test_every_operation_has_an_entry() -> None:
    assert {*operations.TABLE} | DECOMPOSED == {*operations.ENTRIES} | operations.INSIDE


@pytest.mark.parametrize("dtype", operations.TOLERANCE)
def test_operations_are_those_of_pytorch(dtype) -> None:
    seeds = {name: (0, 1) if name in operations.TABLE else (0,) for name in operations.ENTRIES}  # an export takes long
    found = [operations.check(name, seed, dtype)[0] for name, each in seeds.items() for seed in each]
    assert not [each for each in found if isinstance(each, operations.Difference)]


PLANTED = {
    "var": lambda x, dim=None, correction=1, keepdim=False: jnp.var(x, dim, keepdims=keepdim),  # dropped
    "cumsum": lambda x, dim, dtype=None: jnp.cumsum(x, 0),  # another axis
    "abs": lambda x: jnp.maximum(x, -x) + 0 * x**2,  # halves the gradient at 0
    "sub": lambda x, y, alpha=1: jnp.subtract(x, y),  # alpha is dropped
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name) -> None:
    table = {**operations.TABLE, name: PLANTED[name]}
    found = [operations.check(name, seed, "float32", table)[0] for seed in range(20)]
    assert any(isinstance(each, operations.Difference) for each in found)
