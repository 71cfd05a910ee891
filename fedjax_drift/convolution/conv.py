"""The convolution. On each platform it uses the fastest implementation."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax

from fedjax_drift.convolution import cpu, tpu, windows
from fedjax_drift.convolution.windows import Padding

# Functions (x [C, H, W, B], kernel [h, w, C, F], stride, padding, pool) -> [F, H', W', B]. The keys are
# those of `lax.platform_dependent`.
FORMS = {"cpu": cpu.convolve, "tpu": tpu.convolve, "default": windows.convolve}


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: Padding = "VALID", pool: int = 1) -> jax.Array:
    """Two-dimensional convolution (cross-correlation, as in `lax.conv_general_dilated`), then `max_pool`.

    Args:
      x: [C, H, W, B].
      kernel: [h, w, C, F].
      stride: same in both directions.
      padding: "VALID", "SAME" (XLA's and TensorFlow's convention), or (p, p'): p rows
        and p columns are added before the image, p' rows and p' columns after it.
      pool: window and stride of the pooling. 1 means no pooling.

    Returns:
      [F, H', W', B]. The result can be differentiated on every platform, in reverse mode and in forward mode, to any
      order.

    Raises:
      ValueError: ``padding`` has another value, or the kernel is larger than the padded image.
    """
    window = kernel.shape[0], kernel.shape[1]
    windows.positions(x, window, stride, padding)  # raises if the window does not fit
    forms = {platform: partial(form, stride=stride, padding=padding, pool=pool) for platform, form in FORMS.items()}
    return lax.platform_dependent(x, kernel, **forms)
