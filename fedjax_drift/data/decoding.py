"""What reaches the model: decoded inputs, and labels of int32."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks


@dataclass(frozen=True)
class Decoding:
    """Converts stored inputs to model inputs. See `FederatedData.decode`. Two federations may have equal ones."""

    images: bool  # whether uint8 inputs are divided by 255
    mean: tuple[float, ...] | None  # one number, or one per channel
    std: tuple[float, ...] | None

    def __call__(self, x: jax.Array) -> jax.Array:
        if x.dtype == jnp.uint8:
            x = x.astype(jnp.float32) / 255 if self.images else x.astype(jnp.float32)
        if self.mean is not None and self.std is not None:
            mean, std = (np.array(value, np.float32, ndmin=x.ndim) for value in (self.mean, self.std))
            x = (x - mean) / std
        return x


def integers_as_int32(y: np.ndarray) -> np.ndarray:
    """Returns the labels with their dtype on the devices. Integers become int32."""
    if not np.issubdtype(y.dtype, np.integer):
        return y
    if y.size and not np.can_cast(y.dtype, np.int32) and max(y.max(), -int(y.min())) > 2**31 - 1:
        checks.refuse("labels must be smaller than 2**31", f"{y.min()} to {y.max()}", "number them from 0")
    return y.astype(np.int32)
