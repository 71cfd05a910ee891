"""How a network runs, and its random numbers."""

from __future__ import annotations

import math
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
    means: bool = False  # random numbers are their means, so that a network can be compared with its module

    def random(self, what: str) -> Array:
        if self.key is None:
            raise ConfigurationError(
                f"the network must draw no random numbers in evaluation, got {what} there: use dropout layers, or a "
                "test of self.training"
            )
        return self.key

    def part(self, i: int) -> Mode:
        """For the i-th random array of an operation that draws several."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, i))

    def uniform(self, shape: Sequence[int], dtype: Any = None, what: str = "rand") -> Array:
        """Between 0 and 1."""
        return self._drawn(jax.random.uniform, 0.5, shape, dtype, what)

    def normal(self, shape: Sequence[int], dtype: Any = None, what: str = "randn") -> Array:
        """With mean 0 and deviation 1."""
        return self._drawn(jax.random.normal, 0.0, shape, dtype, what)

    def exponential(self, shape: Sequence[int], dtype: Any = None, what: str = "exponential") -> Array:
        """With mean 1."""
        return self._drawn(jax.random.exponential, 1.0, shape, dtype, what)

    def bernoulli(self, p: Any, shape: Sequence[int], dtype: Any = None, what: str = "bernoulli") -> Array:
        """1 with probability p, otherwise 0."""
        if self.means:
            return jnp.broadcast_to(jnp.asarray(p, dtype or jnp.float32), tuple(shape))
        return jax.random.bernoulli(self.random(what), p, tuple(shape)).astype(dtype or jnp.float32)

    def _drawn(self, draw: Callable[..., Array], mean: float, shape: Sequence[int], dtype: Any, what: str) -> Array:
        dtype = dtype or jnp.float32
        return jnp.full(tuple(shape), mean, dtype) if self.means else draw(self.random(what), tuple(shape), dtype)


# --- dropout ----------------------------------------------------------------------------------------------------------


def kept(mode: Mode, x: Array, p: float, shape: tuple[int, ...] | None = None) -> Array:
    """Dropout. shape: of the mask."""
    if p == 0:
        return x
    if p == 1:
        return jnp.zeros_like(x)
    return x * (mode.bernoulli(1 - p, x.shape if shape is None else shape, x.dtype, "dropout") / (1 - p))


def dropout(mode: Mode, x: Any, p: float, training: bool) -> Any:
    return on_grid(lambda y: kept(mode, y, p), x) if training else x


def native_dropout(mode: Mode, x: Any, p: float, training: bool | None = True) -> tuple[Any, None]:
    return dropout(mode, x, p, training is not False), None


def feature_dropout(mode: Mode, x: Array, p: float, training: bool) -> Array:
    return kept(mode, x, p, _channels(x)) if training else x


def alpha_dropout(mode: Mode, x: Array, p: float, training: bool) -> Array:
    return _alpha(mode, x, p, x.shape) if training else x


def feature_alpha_dropout(mode: Mode, x: Array, p: float, training: bool) -> Array:
    return _alpha(mode, x, p, _channels(x)) if training else x


def _channels(x: Array) -> tuple[int, ...]:
    return (*x.shape[:2], *[1] * (x.ndim - 2))


def _alpha(mode: Mode, x: Array, p: float, shape: tuple[int, ...]) -> Array:
    """What is dropped becomes the lowest value of a SELU. Mean and variance stay 0 and 1."""
    if p in (0, 1):
        return x if p == 0 else jnp.zeros_like(x)
    lowest = 1.7580993408473766
    scale = 1 / math.sqrt((lowest**2 * p + 1) * (1 - p))
    keep = mode.bernoulli(1 - p, shape, x.dtype, "alpha_dropout")
    return x * (keep * scale) + ((keep - 1) * (lowest * scale) + lowest * scale * p)


# --- noise ------------------------------------------------------------------------------------------------------------


def bernoulli(mode: Mode, x: Array, p: Any = None) -> Array:
    return mode.bernoulli(x if p is None else p, x.shape, x.dtype)


def uniform(mode: Mode, shape: Sequence[int], dtype: Any = None) -> Array:
    return mode.uniform(shape, dtype)


def normal(mode: Mode, shape: Sequence[int], dtype: Any = None) -> Array:
    return mode.normal(shape, dtype)


IN_MODE: dict[str, Callable[..., Any]] = {
    "alpha_dropout": alpha_dropout,
    "bernoulli": bernoulli,
    "feature_alpha_dropout": feature_alpha_dropout,
    "feature_dropout": feature_dropout,
    "rand": uniform,
    "randn": normal,
}

OF_IMAGES_IN_MODE: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "native_dropout": native_dropout,
}
