"""Shifts over time, and combinations of shifts. t is the round, from 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_drift import checks, spec, tree
from fedjax_drift.recipes import recorded
from fedjax_drift.shift.features import check_inputs, rotated
from fedjax_drift.shift.labels import Pairs
from fedjax_drift.shift.rule import Example, Owner, Shift, rule, shift_of
from fedjax_drift.spec import Finite, NonNegative, Positive

# fold_in(key, CHOICE - c) decides which shift an example has, c shifts inside others that have decided before. The
# shifts of a `chain` have the keys fold_in(key, 0), fold_in(key, 1), ...
CHOICE = 2**32 - 1


ROUNDS = spec.array("one or more rounds >= 0", lambda at: spec.numbers(at, 1, "iu") and at.min() >= 0)
Rounds = Annotated[
    Any, spec.Spec(lambda name, at, fix: ROUNDS.check(name, [at] if isinstance(at, Integral) else at, fix), "array")
]


@rule
def permute_labels(at: Rounds, pairs: Pairs) -> Any:
    """Exchanges the two labels of every pair in the rounds ``at``: concept drift.

    With several rounds, the second exchange restores the labels, the third exchanges them again, and so on.

    Args:
      at: one or more rounds, >= 0.
      pairs: pairs of different labels. A label is in at most one pair.
    """
    rounds = at.astype(np.int32)  # not a JAX array, which would start the backend
    if len(np.unique(pairs)) != pairs.size:
        checks.refuse("pairs must have each label at most once", pairs.tolist())
    other = np.arange(pairs.max() + 1)
    other[pairs[:, 0]], other[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]

    def permuted(key: jax.Array, t: jax.Array, client: jax.Array, x: jax.Array, y: jax.Array) -> Example:
        if not jnp.issubdtype(y.dtype, jnp.integer):
            checks.refuse("permute_labels needs integer labels", y.dtype)
        exchanged = jnp.where(y < len(other), jnp.asarray(other, y.dtype)[jnp.clip(y, 0, len(other) - 1)], y)
        return x, jnp.where((t >= rounds).sum() % 2 == 1, exchanged, y)

    return permuted


@recorded
def rotate_over_time(degrees_per_round: Finite, most: Positive | None = None) -> Shift:
    """Rotates images by ``degrees_per_round`` t degrees, for all clients and for the test set.

    Args:
      degrees_per_round: finite.
      most: the largest angle in degrees, > 0. Default: without limit.
    """

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        check_inputs("rotate_over_time", x, images=True)
        angle = degrees_per_round * t
        return rotated(x, angle if most is None else jnp.clip(angle, -most, most)), y

    return Shift(change, "rotate_over_time")


@recorded
def sudden(at: NonNegative, shift: Shift) -> Shift:
    """The shift begins in round ``at``, for all examples at once.

    Args:
      at: the first round with the shift, >= 0.
      shift: a `Shift`, or a function.
    """
    return _in_share("sudden", lambda t: t >= at, shift)


@recorded
def gradual(begin: NonNegative, end: Positive, shift: Shift) -> Shift:
    """The share of the examples with the shift grows linearly, from 0 in round ``begin`` to 1 in round ``end``.

    An example that has the shift keeps it.

    Args:
      begin: >= 0.
      end: > begin.
      shift: a `Shift`, or a function.
    """
    if not isinstance(begin, jax.core.Tracer) and not isinstance(end, jax.core.Tracer) and end <= begin:
        checks.refuse(f"end must be larger than begin, {begin:g}", f"{end:g}", "use fd.shift.sudden")
    return _in_share("gradual", lambda t: (t - begin) / (end - begin), shift)


@recorded
def recurring(period: Positive, shift: Shift) -> Shift:
    """The shift is off for ``period`` rounds, then on for as many, and so on.

    Args:
      period: rounds, > 0.
      shift: a `Shift`, or a function.
    """
    return _in_share("recurring", lambda t: jnp.floor(t / period) % 2 == 1, shift)


@recorded
def mixture(weights: Callable[[jax.Array], jax.Array] | Sequence[float], *shifts: Shift) -> Shift:
    """Every example has one of several shifts, with the probabilities weights(t).

    A random number of the example decides, which is the same in all rounds. So an example only changes its shift if the
    weights change. A shift inside another one decides with a number of its own, independently of the one around it.

    Args:
      weights: J numbers >= 0, or a function of the round that returns them, [J]. They are divided by their sum.
      shifts: J shifts. `none` is one of them.
    """
    each, fixed = _several("mixture", shifts), None
    if callable(weights):
        checks.function("weights", weights, "it maps a round to the weights", takes=1)
    else:
        fixed = checks.array("weights", weights)
        if fixed.shape != (len(each),) or fixed.dtype.kind not in "fiu" or fixed.min() < 0 or not fixed.sum() > 0:
            checks.refuse(f"weights must be {len(each)} numbers >= 0, one for each shift", f"{weights!r}")

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        now = jnp.asarray(weights(t) if callable(weights) else fixed, float)
        if now.shape != (len(each),):
            checks.refuse(f"weights must return {len(each)} numbers, one for each shift", [*now.shape])
        ends, (number, inside) = jnp.cumsum(now), choice(key, owner)
        which = jnp.searchsorted(ends, number * ends[-1], side="right")
        return _select(jnp.minimum(which, len(each) - 1), each, key, t, inside, x, y)

    return Shift(change, "mixture")


Domains = Annotated[
    np.ndarray,
    spec.array("int [N], one domain for each client", lambda of: spec.numbers(of, 1, "iu") and of.min() >= 0),
]


@recorded
def domains(*shifts: Shift, of: Domains | None = None) -> Shift:
    """Every client has one of several shifts. The global test set has none of them.

    Args:
      shifts: J shifts, the domains, usually with ``by="all"``. `none` is one of them.
      of: int [N], the domain of each client, in 0..J-1. Default: i mod J.
    """
    each = _several("domains", shifts)
    if of is not None and of.max() >= len(each):
        checks.refuse(f"of must be int [N] in 0..{len(each) - 1}, one domain for each client", of.max())

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        N = owner.num_clients
        if of is not None and len(of) != N:
            checks.refuse(f"of must have a domain for each of the {N} clients", len(of))
        domain = owner.id % len(each) if of is None else jnp.asarray(of, jnp.int32)[jnp.minimum(owner.id, N - 1)]
        return tree.select(owner.id < N, _select(domain, each, key, t, owner, x, y), (x, y))

    return Shift(change, "domains")


@recorded
def chain(*shifts: Shift) -> Shift:
    """Several shifts, one after another. ``data.shifted(a).shifted(b)`` is short for ``data.shifted(chain(a, b))``."""
    each = tuple(map(shift_of, shifts))

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        for i, shift in enumerate(each):
            x, y = shift.change(jax.random.fold_in(key, i), t, owner, x, y)
        return x, y

    return Shift(change, ", ".join(shift.name for shift in each))


@recorded
def none() -> Shift:
    """Leaves the examples as they are, for `mixture` and `domains`."""
    return Shift(lambda key, t, owner, x, y: (x, y), "none")


def _several(name: str, shifts: Sequence[Any]) -> tuple[Shift, ...]:
    if not shifts:
        checks.refuse(f"{name} needs at least 1 shift", "none", "pass fd.shift.none(), for example")
    return tuple(map(shift_of, shifts))


def _in_share(name: str, share: Callable[[jax.Array], jax.Array], shift: Any) -> Shift:
    """The shift for the share ``share(t)`` of the examples. An example has the same random number in all rounds."""
    inner = shift_of(shift)

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        now = share(t)
        if now.dtype != bool:
            number, owner = choice(key, owner)
            now = number < now
        return tree.select(now, inner.change(key, t, owner, x, y), (x, y))

    return Shift(change, f"{name}, {inner.name}")


def choice(key: jax.Array, owner: Owner) -> tuple[jax.Array, Owner]:
    """A random number of the example in [0, 1), and the owner with which the shifts inside get other numbers.

    The key stays the same, so that the noise of a shift does not depend on the shifts around it.
    """
    number = jax.random.uniform(jax.random.fold_in(key, CHOICE - owner.choices))
    return number, owner._replace(choices=owner.choices + 1)


def _select(index: jax.Array, shifts: Sequence[Shift], key: Any, t: Any, owner: Owner, *example: jax.Array) -> Example:
    """The example after the shift with this index."""
    return lax.switch(index, [partial(shift.change, key, t, owner) for shift in shifts], *example)
