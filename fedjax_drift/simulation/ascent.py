"""Finds out whether an optax optimizer maps a gradient to a direction of ascent or of descent.

optax has both. ``optax.scale_by_adam()`` returns a direction of ascent, and the caller subtracts it, times a learning
rate. ``optax.adam(lr)`` returns a direction of descent, and the caller adds it. Training with the wrong sign increases
the loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.devices.launch import traced
from fedjax_drift.types import Params

GRADIENTS, STEPS = 3, 10  # random gradients, and steps with each
ROUNDING = 1e-3  # relative; two sums that differ by less are regarded as equal


def check_optimizer(optimizer: optax.GradientTransformation, direction: str | None, params: Params) -> None:
    """Checks that the optimizer needs only the gradient and the parameters, and that it returns a direction of ascent.

    Args:
      direction: as in `LocalTraining`. If it is not None, the direction is not checked.
      params: shapes and dtypes of the parameters.
    """

    def first_update(params: Params) -> Params:
        update, _ = optimizer.update(params, optimizer.init(params), params)
        return update

    what = "optimizer must need only the gradient and the parameters, as optax.scale_by_adam() does"
    fix = "use one without line search that does not need the loss"
    update = checks.shapes_of(what, first_update, params, fix=fix)
    tree.check_layout(update, params, "the updates of the optimizer must be shaped like the parameters", dtypes=False)
    if direction is not None:
        return
    signs = _signs(optimizer, params)
    if signs is None:
        return
    along, against = (signs > 0).any(), (signs < 0).any()
    if along and not against:
        return
    what = "optimizer must map a gradient to an ascent direction"
    if against and not along:
        fix = "pass optax.scale_by_adam(), not optax.adam(lr), because the learning rate is lr of LocalTraining; or "
        fix += 'pass direction="descent" and lr=1'
        checks.refuse(what, "one that maps it to a descent direction", fix)
    updates = "updates in both directions" if along else f"updates of 0 in the first {STEPS} steps"
    fix = 'pass direction="ascent" for an optimizer like optax.scale_by_adam(), or direction="descent" and lr=1 for '
    checks.refuse(what, updates, fix + "one like optax.adam(lr)")


def _signs(optimizer: optax.GradientTransformation, params: Params) -> np.ndarray | None:
    """For several random gradients, whether the optimizer moves each array of the parameters along its gradient (1),
    against it (-1), or neither (0): [gradients, arrays]. None: inside `jax.jit`, as in a sweep, it can't be found out.

    For each gradient g, several steps with g are compared with as many steps with -g. The terms that do not depend on
    the gradient, such as noise and weight decay, are equal in both. One step would not be enough, because its update is
    0 if a learning rate schedule begins at 0.
    """

    @jax.jit
    def summed(g: Params) -> list[jax.Array]:
        """<update, g>, summed over the steps, for each array."""
        ones = jax.tree.map(jnp.ones_like, g)

        def step(memory: Any, _: None) -> tuple[Any, list[jax.Array]]:
            update, memory = optimizer.update(g, memory, ones)
            return memory, [jnp.vdot(u, a) for u, a in zip(jax.tree.leaves(update), jax.tree.leaves(g), strict=True)]

        return [products.sum() for products in lax.scan(step, optimizer.init(ones), None, STEPS)[1]]

    rng, signs = np.random.default_rng(0), []
    for _ in range(GRADIENTS):
        g = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        forward, backward = summed(g), summed(jax.tree.map(jnp.negative, g))
        if traced(forward):
            return None
        pairs = zip(*jax.device_get((forward, backward)), strict=True)
        signs.append([np.sign(a + b) * (abs(a + b) > ROUNDING * (abs(a) + abs(b))) for a, b in pairs])
    return np.array(signs)
