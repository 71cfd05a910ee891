"""How a network runs, and its random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.operations.images import on_grid

Array = jax.Array
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]
State = tuple[Array, ...]


class Mode(NamedTuple):
    """How a network runs."""

    key: Array | None = None  # of the random numbers of this operation; None: there are none, as in evaluation
    mask: Array | None = None  # [B], the examples that are no padding; None: all
    frozen: bool = False  # BatchNorm normalises with its running statistics in training, too

    def random(self, what: str) -> Array:
        if self.key is None:
            raise ConfigurationError(
                f"the network must draw no random numbers in evaluation, got {what} there: use dropout layers, or a "
                "test of self.training"
            )
        return self.key


def kept(mode: Mode, x: Array, p: float, shape: tuple[int, ...] | None = None) -> Array:
    if p == 0:
        return x
    keep = jax.random.bernoulli(mode.random("dropout"), 1 - p, shape or x.shape)
    return jnp.where(keep, x / (1 - p), 0) if p < 1 else jnp.zeros_like(x)


def dropout(mode: Mode, x: Any, p: float, training: bool) -> Any:
    return on_grid(lambda y: kept(mode, y, p), x) if training else x


def native_dropout(mode: Mode, x: Any, p: float, training: bool | None = True) -> tuple[Any, None]:
    return dropout(mode, x, p, training is not False), None


def feature_dropout(mode: Mode, x: Array, p: float, training: bool) -> Array:
    return kept(mode, x, p, (*x.shape[:2], *[1] * (x.ndim - 2))) if training else x


def bernoulli(mode: Mode, x: Array, p: Any = None, **_: Any) -> Array:
    return jax.random.bernoulli(mode.random("bernoulli"), x if p is None else p, x.shape).astype(x.dtype)


def uniform(mode: Mode, shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jax.random.uniform(mode.random("rand"), tuple(shape), dtype or jnp.float32)


def normal(mode: Mode, shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jax.random.normal(mode.random("randn"), tuple(shape), dtype or jnp.float32)


IN_MODE: dict[str, Callable[..., Any]] = {
    "bernoulli": bernoulli,
    "feature_dropout": feature_dropout,
    "rand": uniform,
    "randn": normal,
}

OF_IMAGES_IN_MODE: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "native_dropout": native_dropout,
}
