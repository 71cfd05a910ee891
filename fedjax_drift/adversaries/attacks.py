"""Attacks. mu and sigma are mean and standard deviation of each coordinate of the honest messages of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.stats import norm

from fedjax_drift import checks, spec, tree
from fedjax_drift.adversaries.attack import Attack, Seen
from fedjax_drift.recipes import recorded
from fedjax_drift.shift.rule import Example, Owner, Shift
from fedjax_drift.shift.time import Pairs
from fedjax_drift.spec import Count, CountOrZero, Finite, Fix, NonNegative, Positive, Probability
from fedjax_drift.tree import PyTree


def _numbers(name: str, value: Any, fix: str) -> tuple[float, ...]:
    if not isinstance(value, tuple | list) or not value:
        checks.refuse(f"{name} must be a list of numbers, such as [0.5, 1, 2]", checks.shown(value), fix)
    return tuple(checks.number(f"{name}[{i}]", each, "finite", lambda v: True, fix) for i, each in enumerate(value))


Candidates = Annotated[Any, spec.Spec(_numbers, "list"), Fix("None means a fixed one")]


@recorded
def sign_flip(of: Literal["own", "mean"] = "own") -> Attack:
    """Minus the client's own message, or minus mu.

    Args:
      of: "own" or "mean". ByzFL uses the mean.
    """
    return Attack(lambda seen: _scaled(-1.0, seen.each if of == "own" else seen.mean), name="sign_flip")


@recorded
def ipm(tau: Positive = 1.5, best_of: Candidates | None = None) -> Attack:
    """Inner product manipulation: - tau mu (Xie, Koyejo, Gupta 2020, arXiv 1903.03936).

    Args:
      tau: > 0.
      best_of: values of tau. The adversaries try each of them against the server's rule, and send that which moves the
        aggregate farthest from mu. None (default): ``tau``.
    """
    return Attack(_best(lambda seen, tau: _scaled(-tau, seen.mean), tau, best_of), name="ipm")


@recorded
def alie(z: Finite | None = None, best_of: Candidates | None = None) -> Attack:
    """A little is enough: mu + z sigma (Baruch, Baruch, Goldberg 2019, arXiv 1902.06156, algorithm 3).

    Args:
      z: finite. None (default): minus the paper's z_max, Phi(z_max) = (n - f - s) / (n - f) with s = floor(n / 2 + 1) -
        f, for the n clients and the f adversaries that report.
      best_of: values of z, as in `ipm`.
    """

    def moved(seen: Seen, z: Any) -> PyTree:
        if z is None:
            f, honest = seen.hostile.sum(), seen.honest.sum()
            s = (honest + f) // 2 + 1 - f
            share = (honest - s) / jnp.maximum(honest, 1)
            z = -norm.ppf(jnp.clip(share, 0.5, 1 - 1e-6))
        return jax.tree.map(lambda mu, sigma: mu + jnp.asarray(z, mu.dtype) * sigma, seen.mean, seen.deviation)

    return Attack(_best(moved, z, best_of), name="alie")


@recorded
def mimic(client: CountOrZero = 0) -> Attack:
    """The message of one honest client, which so counts several times (Karimireddy, He, Jaggi 2022, arXiv 2006.09365,
    section 3).

    Args:
      client: its id. If it does not report, or is hostile itself, the next higher id that does takes its place, and
        after the highest id the lowest.
    """

    def send(seen: Seen) -> PyTree:
        ids = jnp.where(seen.honest, seen.ids, jnp.iinfo(seen.ids.dtype).max)
        after = jnp.where(ids >= client, ids, jnp.iinfo(ids.dtype).max)
        chosen = jnp.where(after.min() < jnp.iinfo(ids.dtype).max, jnp.argmin(after), jnp.argmin(ids))
        return jax.tree.map(lambda a: a[chosen], seen.each)

    return Attack(send, name="mimic")


@recorded
def gaussian(sigma: NonNegative = 1.0) -> Attack:
    """Random numbers N(0, sigma^2), different ones for each adversary.

    Args:
      sigma: >= 0.
    """

    def send(seen: Seen) -> PyTree:
        def one(id_: jax.Array, message: PyTree) -> PyTree:
            leaves, structure = jax.tree.flatten(message)
            keys = jax.random.split(jax.random.fold_in(seen.key, id_), len(leaves))
            drawn = [jax.random.normal(k, a.shape, a.dtype) * sigma for k, a in zip(keys, leaves, strict=True)]
            return jax.tree.unflatten(structure, drawn)

        return jax.vmap(one)(seen.ids, seen.each)

    return Attack(send, name="gaussian")


@recorded
def scaled(factor: Finite) -> Attack:
    """The client's own message times ``factor``.

    Args:
      factor: finite. With a `backdoor`, n / f replaces the global model by that of the adversaries (Bagdasaryan et al.
        2020, arXiv 1807.00459): ``fd.adversaries.backdoor(target=0, factor=10)``.
    """
    return Attack(lambda seen: _scaled(factor, seen.each), name="scaled")


@recorded
def nan() -> Attack:
    """NaN in all places. ``on_nonfinite="drop_client"`` and robust rules drop such a message."""
    return Attack(lambda seen: jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), seen.each), name="nan")


@recorded
def label_flip(pairs: Pairs | None = None, classes: Count | None = None) -> Attack:
    """Trains honestly on flipped labels.

    Args:
      pairs: ``[(a, b), ...]``: label a becomes b. None: label c becomes C - 1 - c, with C = ``classes``.
      classes: C. Needed without ``pairs``.
    """
    if (pairs is None) == (classes is None):
        checks.refuse("label_flip needs pairs or classes", (pairs, classes), "pass classes=10, for example")
    C = classes or 0
    changes = [(c, C - 1 - c) for c in range(C)] if pairs is None else pairs.tolist()

    def flipped(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        new = y
        for a, b in changes:
            new = jnp.where(y == a, jnp.asarray(b, y.dtype), new)
        return x, new

    return Attack(examples=Shift(flipped, "label_flip"), name="label_flip")


@recorded
def backdoor(
    target: CountOrZero,
    size: Count = 3,
    value: Finite = 1.0,
    poisoned: Probability = 0.5,
    factor: Finite | None = None,
) -> Attack:
    """A pattern in the lower right corner of an image, and a label: BadNets (Gu, Dolan-Gavitt, Garg 2017, arXiv
    1708.06733) in a federation (Bagdasaryan et al. 2020, arXiv 1807.00459). `attack_success` measures it.

    Args:
      target: the label of images with the pattern.
      size: the side of the square, in pixels.
      value: of its pixels, in the units of decoded images.
      poisoned: the share of the adversaries' examples that get pattern and label, the same ones in all rounds.
      factor: by which the adversaries multiply their messages. None: 1.
    """

    def trigger(x: jax.Array) -> jax.Array:
        if x.ndim != 3:
            checks.refuse("a backdoor needs images [H, W, C]", f"inputs of shape {list(x.shape)}")
        return x.at[-size:, -size:].set(jnp.asarray(value, x.dtype))

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        new = trigger(x), jnp.full_like(y, target)
        return tree.select(jax.random.uniform(key) < poisoned, new, (x, y))

    own = None if factor is None else lambda seen: _scaled(factor, seen.each)
    return Attack(own, Shift(change, "backdoor"), target, trigger, name="backdoor")


def attack_success(sim: Any, state: Any, attack: Attack) -> float:
    """The share of the test images of other classes that the global model puts into the class of a backdoor, once they
    have its pattern.

    Args:
      sim: a `Simulation` of a classifier, with a test set.
      state: of any round.
      attack: a `backdoor`.

    Raises:
      ValueError: the attack is not a backdoor, or there are no test images of other classes.
    """
    if attack.trigger is None:
        checks.refuse("attack_success needs a backdoor", repr(attack), "pass fd.adversaries.backdoor(target=0)")
    data, trigger = sim.data, attack.trigger
    others = [] if data.y_test is None else (data.y_test != attack.target).nonzero()[0]
    if len(others) == 0:
        fix = "pass test=(x, y)"
        checks.refuse("attack_success needs test images of other classes than the target", "none", fix)

    def hit(params: PyTree, x: jax.Array) -> jax.Array:
        images = jax.vmap(trigger)(data.decoding(x))
        return sim.model.apply(params, images).argmax(-1) == attack.target

    def share(params: PyTree, x: jax.Array) -> jax.Array:
        return lax.map(lambda one: hit(params, one[None])[0], x, batch_size=min(256, len(x))).mean()

    return float(jax.jit(share)(state.params, data.x_test[others]))


def _scaled(factor: Any, message: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jnp.asarray(factor, a.dtype) * a, message)


def _best(
    attack: Callable[[Seen, Any], PyTree], strength: Any, best_of: tuple[float, ...] | None
) -> Callable[[Seen], PyTree]:
    """The attack of this strength, or of that one of several which moves the aggregate farthest from mu."""
    if best_of is None:
        return lambda seen: attack(seen, strength)

    def send(seen: Seen) -> PyTree:
        mu = seen.mean

        def distance(strength: jax.Array) -> jax.Array:
            moved = tree.subtract(seen.judge(seen.sent(attack(seen, strength))), mu)
            return tree.dot(moved, moved)

        candidates = jnp.asarray(best_of)
        return attack(seen, candidates[jnp.argmax(lax.map(distance, candidates))])

    return send
