"""Shifts of features: noise, rotation, brightness and blur.

``by`` says how strong the shift is for each client. Its strength s_i multiplies the number of the shift:

- "client" (default): s_i = i / N. Client 0 has the stored examples, and the last client nearly the whole shift.
- "all": s_i = 1 for all clients, and for the global test set.
- float [N]: one strength for each client. For four groups that are rotated by 0, 90, 180 and 270 degrees:
  ``fd.shift.rotate(360, by=np.arange(N) % 4 / 4)``.

The global test set belongs to no client. Its examples stay as they are, except with "all". Images are [H, W, C] and
decoded: uint8 images are in [0, 1], or standardised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from fedjax_drift import checks, spec
from fedjax_drift.recipes import recorded
from fedjax_drift.shift.rule import Example, Owner, Shift
from fedjax_drift.spec import Finite, Fix, NonNegative

STRENGTHS = spec.array(
    '"client", "all", or a finite strength for each client, [N]', lambda strengths: spec.numbers(strengths, 1)
)
By = Annotated[
    str | np.ndarray,
    spec.Spec(
        lambda name, by, fix: (
            checks.choice(name, by, ("client", "all")) if isinstance(by, str) else STRENGTHS.check(name, by, fix)
        ),
        "array",
        ("client", "all"),
    ),
    Fix("pass np.arange(N) % 4 / 4, for example"),
]


@recorded
def gaussian_noise(sigma: NonNegative, by: By = "client") -> Shift:
    """Adds Gaussian noise with the standard deviation s_i sigma. An example has the same noise in all rounds.

    It is the feature skew of NIID-Bench (Li et al. 2022, arXiv 2102.02079), whose code has the standard deviation
    sigma i / N. (The paper says variance.)

    Args:
      sigma: >= 0.
      by: see the module.
    """

    def noisy(key: jax.Array, strength: jax.Array, x: jax.Array) -> jax.Array:
        return x + strength * sigma * jax.random.normal(key, x.shape, x.dtype)

    return _of_features("gaussian_noise", by, noisy, images=False)


@recorded
def rotate(degrees: Finite, by: By = "client") -> Shift:
    """Rotates images about their centre, counter-clockwise by s_i degrees.

    Between pixels the values are interpolated linearly. Beyond the edge they are those of the nearest pixel.

    Args:
      degrees: finite.
      by: see the module.
    """
    return _of_features("rotate", by, lambda key, strength, x: rotated(x, strength * degrees))


@recorded
def brightness(amount: Finite, by: By = "client") -> Shift:
    """Adds s_i amount to all values. They are not clipped.

    Args:
      amount: finite; negative makes images darker.
      by: see the module.
    """
    return _of_features("brightness", by, lambda key, strength, x: x + strength * amount, images=False)


@recorded
def blur(sigma: NonNegative, by: By = "client") -> Shift:
    """Convolves images with a Gaussian whose standard deviation is s_i sigma pixels. At the edge its weights are
    scaled, so that they sum to 1.

    Args:
      sigma: >= 0.
      by: see the module.
    """

    def weights(n: int, width: jax.Array) -> jax.Array:
        distance = np.arange(n)[:, None] - np.arange(n)
        return jax.nn.softmax(-(distance**2) / (2 * jnp.maximum(width, 1e-3) ** 2), axis=1)

    def blurred(key: jax.Array, strength: jax.Array, x: jax.Array) -> jax.Array:
        rows, columns = (weights(n, strength * sigma).astype(x.dtype) for n in x.shape[:2])
        # in full float32, so that accelerators and CPUs give the same images
        return jnp.einsum("ih,hwc,jw->ijc", rows, x, columns, precision="highest")

    return _of_features("blur", by, blurred)


def check_inputs(name: str, x: jax.Array, images: bool) -> None:
    """Raises ConfigurationError unless an example has floating inputs, and is an image [H, W, C] if ``images``."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or images and x.ndim != 3:
        what = "images [height, width, channels]" if images else "floating inputs"
        checks.refuse(
            f"{name} needs {what}",
            f"examples of {x.dtype}{[*x.shape]}",
            "pass a function (key, t, client, x, y) -> (x, y) of your own",
        )


def rotated(image: jax.Array, degrees: jax.Array) -> jax.Array:
    """The image [H, W, C], rotated about its centre."""
    angle = jnp.deg2rad(degrees)
    middle = [(n - 1) / 2 for n in image.shape[:2]]
    down, right = (a - m for a, m in zip(np.mgrid[: image.shape[0], : image.shape[1]], middle, strict=True))
    source = (
        middle[0] + jnp.cos(angle) * down + jnp.sin(angle) * right,
        middle[1] - jnp.sin(angle) * down + jnp.cos(angle) * right,
    )

    def channel(values: jax.Array) -> jax.Array:
        return map_coordinates(values, source, order=1, mode="nearest")

    return jax.vmap(channel, 2, 2)(image).astype(image.dtype)


def _of_features(
    name: str, by: Any, shifted: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], images: bool = True
) -> Shift:
    """The shift ``shifted(key, strength, x) -> x``. images: whether it needs images [H, W, C]."""

    def strength_of(owner: Owner) -> jax.Array:
        N = owner.num_clients
        if isinstance(by, str):
            return jnp.ones(()) if by == "all" else jnp.where(owner.id < N, owner.id / N, 0)
        if len(by) != N:
            checks.refuse(f"by must have a strength for each of the {N} clients", len(by))
        return jnp.append(jnp.asarray(by, float), 0)[owner.id]

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        check_inputs(name, x, images)
        strength = strength_of(owner).astype(x.dtype)
        return jnp.where(strength == 0, x, shifted(key, strength, x).astype(x.dtype)), y

    return Shift(change, name)
