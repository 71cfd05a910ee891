"""The contract of a shift: how the examples of a client, or of a round, differ from those that are stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import jax

from fedjax_drift import checks, reprs, tree
from fedjax_drift.recipes import Recipe, recorded
from fedjax_drift.types import THREEFRY

P = ParamSpec("P")
Example = tuple[jax.Array, jax.Array]  # (x, y)
Function = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], Example]

TRAINING, TESTING = 0, 1  # fold_in(key of the shift, TRAINING) is the key of the training examples


class Owner(NamedTuple):
    """The client that an example belongs to."""

    id: jax.Array  # int32 []; N for an example of the global test set, which belongs to no client
    num_clients: int  # N
    choices: int = 0  # how many shifts around this one have drawn a random number of the example, see `time.choice`
    num_classes: int | None = None  # C, see `FederatedData.num_classes`
    training: bool = True  # False for examples of the global test set and for a client's own test examples


class Shift(NamedTuple):
    """A shift: a pure function that changes one example. `fedjax_drift.shift` has those of the literature.

    A shift of your own is a function ``shift(key, t, client, x, y) -> (x, y)``. With the decorator `fd.shift.rule` on
    the factory that returns it, its numbers are arguments of the compiled round.

    Attributes:
      change: ``change(key, t, owner, x, y) -> (x, y)`` for one decoded example. key: belongs to the example, and is the
        same in all rounds. t: int32 [], the round. owner: an `Owner`. A shift around another one passes key and owner
        on to it.
      name: the name in logs and messages.
      recipe: how it was made: the factory and its arguments.
    """

    change: Callable[[jax.Array, jax.Array, Owner, jax.Array, jax.Array], Example]
    name: str = "shift"
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        return reprs.made(self)


def shift_of(value: Any, name: str = "shift") -> Shift:
    """The shift that ``value`` is: a `Shift`, or a function ``(key, t, client, x, y) -> (x, y)``.

    A function that uses ``client``, the id, leaves the examples of the global test set as they are.
    """
    if isinstance(value, Shift):
        checks.fields(value)
        return value
    function: Function = checks.function(name, value, "pass fd.shift.rotate(45), for example", takes=5)

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        of_client, shifted = _uses_client(function, key, t, owner.id, x, y), function(key, t, owner.id, x, y)
        return tree.select(owner.id < owner.num_clients, shifted, (x, y)) if of_client else shifted

    return Shift(change, getattr(value, "__name__", name))


def _uses_client(function: Function, *arguments: jax.Array) -> bool:
    """Whether the function computes anything from its third argument, the client's id."""
    traced = jax.make_jaxpr(function)(*arguments).jaxpr
    used = [v for equation in traced.eqns for v in equation.invars] + list(traced.outvars)
    return any(v is traced.invars[2] for v in used)


def rule(factory: Callable[P, Any]) -> Callable[P, Shift]:
    """Decorates a factory of shifts, so that the numbers among its arguments are arguments of the compiled round.

    >>> import fedjax_drift as fd
    >>> @fd.shift.rule
    ... def darker(amount: float):
    ...     return lambda key, t, client, x, y: (x - amount, y)
    >>> darker(0.2)
    Shift(darker, amount=0.2)
    """

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Shift:
        return shift_of(factory(*args, **kwargs), factory.__name__)._replace(name=factory.__name__)

    return recorded(make)


class Shifting(NamedTuple):
    """The shift of a federation. `FederatedData.shifted` creates it."""

    shift: Shift
    test: str = "present"  # the test set: that of the "present" round, of the "first" round, or "both"
    seed: int = 0

    def examples(
        self, t: jax.Array, owner: Owner, index: jax.Array, x: jax.Array, y: jax.Array, part: int = TRAINING
    ) -> Example:
        """The examples ``x [B, ...], y [B, ...]`` in round t.

        owner: of all examples, or of each, [B]. index: int32 [B], the numbers of the examples among those of their
        owner. part: `TRAINING` or `TESTING`.
        """
        key = jax.random.fold_in(jax.random.key(self.seed, impl=THREEFRY), part)
        each = 0 if owner.id.ndim else None

        def one(id_: jax.Array, index: jax.Array, x: jax.Array, y: jax.Array) -> Example:
            of_example = jax.random.fold_in(jax.random.fold_in(key, id_), index)
            return self.shift.change(of_example, t, owner._replace(id=id_, training=part == TRAINING), x, y)

        return jax.vmap(one, (each, 0, 0, 0))(owner.id, index, x, y)
