"""Random changes of training images: functions for ``LocalTraining(augment=...)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import CountOrZero, Probability, checked

__all__ = ["crop_and_flip"]
__dir__ = __all__.copy


Augment = Callable[[jax.Array, jax.Array], jax.Array]  # (key, one example) -> one example of the same shape and dtype


@checked
def crop_and_flip(padding: CountOrZero = 4, crop: Probability = 1.0, flip: Probability = 0.5) -> Augment:
    """Random crops and horizontal flips, the usual augmentation of CIFAR images.

    An image [H, W, C] is padded with zeros on all four sides, and a window [H, W, C] at a random position is cut out of
    it. The (2 padding + 1)^2 positions are equally likely. Then the image is mirrored from left to right, or not. The
    zeros are added after scaling or standardisation (`FederatedData.decode`): they are black in images scaled to
    [0, 1], and the mean colour in standardised images.

    FedDC's and FedDyn's official code has ``crop=0.5``: only half of the images are cropped.

    Args:
      padding: >= 0, pixels on each side.
      crop: in [0, 1], the probability that an image is cropped.
      flip: in [0, 1], the probability that an image is mirrored.

    Raises:
      ValueError: a value is out of range; or, when a `Simulation` is created, the examples are not images [H, W, C].
    """
    return CropAndFlip(padding, crop, flip)


@dataclass(frozen=True)
class CropAndFlip:
    """The function that `crop_and_flip` returns. Two of them are equal if their numbers are."""

    padding: int
    crop: float
    flip: float

    def __call__(self, key: jax.Array, image: jax.Array) -> jax.Array:
        if image.ndim != 3:
            raise ConfigurationError(
                f"crop_and_flip needs images [height, width, channels], got examples of shape {[*image.shape]}: "
                "pass a function of your own as augment="
            )
        offset_key, crop_key, flip_key = jax.random.split(key, 3)
        n = self.padding
        offset = jax.random.randint(offset_key, (2,), 0, 2 * n + 1)
        offset = jnp.where(jax.random.bernoulli(crop_key, self.crop), offset, n)
        image_with_border = jnp.pad(image, ((n, n), (n, n), (0, 0)))
        image = lax.dynamic_slice(image_with_border, (*offset, 0), image.shape)
        return jnp.where(jax.random.bernoulli(flip_key, self.flip), image[:, ::-1], image)
