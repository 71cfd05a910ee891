"""How a network runs, and its random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks
from fedjax_drift.pytorch.operations.images import on_grid

Array = jax.Array


MEANS = {"uniform": 0.5, "normal": 0.0, "exponential": 1.0}  # of a function of `jax.random`


class Mode(NamedTuple):
    """How a network runs."""

    key: Array | None = None  # of the random numbers of this operation; None: there are none, as in evaluation
    mask: Array | None = None  # [B], the examples that are no padding; None: all
    frozen: bool = False  # BatchNorm normalises with its running statistics in training, too
    means: bool = False  # random numbers are their means, so that a network can be compared with its module

    def random(self, what: str) -> Array:
        if self.key is None:
            checks.refuse(
                "the network must draw no random numbers in evaluation",
                f"{what} there",
                "use dropout layers, or a test of self.training",
            )
        return self.key

    def part(self, i: int) -> Mode:
        """For the i-th random array of an operation that draws several."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, i))

    def drawn(self, kind: str, shape: Sequence[int], dtype: Any = None) -> Array:
        """Random numbers of a kind in `MEANS`."""
        shape, dtype = tuple(shape), dtype or jnp.float32
        draw = getattr(jax.random, kind)
        return jnp.full(shape, MEANS[kind], dtype) if self.means else draw(self.random(kind), shape, dtype)

    def bernoulli(self, p: Any, shape: Sequence[int], dtype: Any = None, what: str = "bernoulli") -> Array:
        """1 with probability p, otherwise 0."""
        if self.means:
            return jnp.broadcast_to(jnp.asarray(p, dtype or jnp.float32), tuple(shape))
        return jax.random.bernoulli(self.random(what), p, tuple(shape)).astype(dtype or jnp.float32)


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


# --- noise ------------------------------------------------------------------------------------------------------------


def uniform(mode: Mode, x: Array, low: float = 0.0, high: float = 1.0) -> Array:
    return low + (high - low) * mode.drawn("uniform", x.shape, x.dtype)


def normal(mode: Mode, mean: Any, deviation: Any = 1.0, shape: Sequence[int] | None = None, dtype: Any = None) -> Array:
    """torch.normal. Without a shape, mean or deviation is an array."""
    dtype = dtype or getattr(mean, "dtype", getattr(deviation, "dtype", None))
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(deviation)) if shape is None else shape
    return lax.stop_gradient(mean + deviation * mode.drawn("normal", shape, dtype))


def rrelu(mode: Mode, x: Array, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Array:
    slope = uniform(mode, x, lower, upper) if training else (lower + upper) / 2
    return jnp.where(x > 0, x, slope * x)


IN_MODE: dict[str, Callable[..., Any]] = {
    "bernoulli": lambda mode, x, p=None: mode.bernoulli(lax.stop_gradient(x if p is None else p), x.shape, x.dtype),
    "exponential": lambda mode, x, rate=1.0: mode.drawn("exponential", x.shape, x.dtype) / rate,
    "normal": normal,
    "normal_functional": lambda mode, x, mean=0.0, deviation=1.0: (
        mean + deviation * mode.drawn("normal", x.shape, x.dtype)
    ),
    "rand": lambda mode, shape, dtype=None: mode.drawn("uniform", shape, dtype),
    "rand_like": lambda mode, x, dtype=None: mode.drawn("uniform", x.shape, dtype or x.dtype),
    "randn": lambda mode, shape, dtype=None: mode.drawn("normal", shape, dtype),
    "randn_like": lambda mode, x, dtype=None: mode.drawn("normal", x.shape, dtype or x.dtype),
    "rrelu": rrelu,
    "uniform": uniform,
}

OF_IMAGES_IN_MODE: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "native_dropout": lambda mode, x, p, training=True: (dropout(mode, x, p, training is not False), None),
}
