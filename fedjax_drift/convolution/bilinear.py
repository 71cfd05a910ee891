"""A convolution and its two gradients as primitives: `jax.vmap` makes loops of them, and they have all derivatives.

A convolution with its image gradient and its weight gradient are the partial derivatives of <g, x * kernel>. Each of
the three is bilinear, and its transposes are the other two. As primitives with these rules, they have forward-mode and
reverse-mode derivatives of any order. `jax.custom_vjp` has no forward mode. With `jax.custom_jvp`, JAX would transpose
the functions itself, and the weight gradient would be a hundred times slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Bilinear = Callable[..., jax.Array]  # a function of two arrays, with static keyword arguments


def primitive(convolution: Bilinear, image_gradient: Bilinear, weight_gradient: Bilinear) -> Primitive:
    """Returns the convolution as a primitive.

    The three functions get the same keyword arguments, which are static.

    Args:
      convolution: x, kernel -> the output.
      image_gradient: g, kernel -> the gradient of x. g is the gradient of the output.
      weight_gradient: x, g -> the gradient of the kernel.
    """
    forward, image, weight = map(_primitive, (convolution, image_gradient, weight_gradient))
    # The transposes: functions of the gradient of the result and of both inputs.
    ad.defbilinear(
        forward,
        lambda g, x, kernel, **static: image.bind(g, kernel, **static),
        lambda g, x, kernel, **static: weight.bind(x, g, **static),
    )
    ad.defbilinear(
        image,
        lambda x, g, kernel, **static: forward.bind(x, kernel, **static),
        lambda x, g, kernel, **static: weight.bind(x, g, **static),
    )
    ad.defbilinear(
        weight,
        lambda kernel, x, g, **static: image.bind(g, kernel, **static),
        lambda kernel, x, g, **static: forward.bind(x, kernel, **static),
    )
    return forward


def _primitive(function: Bilinear) -> Primitive:
    """The function as a primitive, of which `jax.vmap` makes a loop. (It would make `lax.conv` a grouped one.)"""
    primitive = Primitive(f"{function.__module__.rpartition('.')[2]}{function.__name__}")
    # Convolutions of the same shapes are then traced and lowered once.
    once = jax.jit(function, static_argnames=[*inspect.signature(function).parameters][2:])

    def batch(inputs: Sequence[jax.Array], axes: Sequence[int | None], **static: Any) -> tuple[jax.Array, int]:
        mapped = {i: jnp.moveaxis(inputs[i], axis, 0) for i, axis in enumerate(axes) if axis is not None}
        return lax.map(lambda one: primitive.bind(*(one.get(i, x) for i, x in enumerate(inputs)), **static), mapped), 0

    primitive.def_impl(once)
    primitive.def_abstract_eval(lambda *inputs, **static: jax.make_jaxpr(partial(once, **static))(*inputs).out_avals[0])
    mlir.register_lowering(primitive, mlir.lower_fun(once, multiple_results=False))
    batching.primitive_batchers[primitive] = batch
    return primitive
