"""Random modules against their translations. More of them: python tests/torch_modules.py SECONDS."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("torch", reason="needs PyTorch")
sys.path.append(str(Path(__file__).parent))

import torch_modules as modules

from fedjax_drift.pytorch import operations

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("seed", range(16))
def test_a_random_module_means_the_same_here(seed) -> None:
    found, why, _ = modules.check(seed, "float64" if seed % 4 == 3 else "float32")
    assert found == "equal", why


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return jax.nn.softplus(beta * x) / beta  # threshold is dropped


def cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumsum(x, 0)  # along the batch


def leaky_relu(x: Any, slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, 0.01 * x)  # slope is dropped


PLANTED = {
    "softplus": (softplus, operations.ELEMENTWISE, "Softplus(beta=3, threshold=1"),
    "cumsum": (cumsum, operations.ARRAYS, "cumsum"),
    "leaky_relu": (leaky_relu, operations.ELEMENTWISE, "negative_slope=0.3"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, monkeypatch) -> None:
    wrong, table, text = PLANTED[name]
    assert name in table
    monkeypatch.setitem(table, name, wrong)
    drawn = (seed for seed in range(1000) if text in repr(modules.drawn(seed)[0]))
    assert "differs" in [modules.check(seed)[0] for seed in itertools.islice(drawn, 2)]
