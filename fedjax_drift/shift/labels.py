"""Label noise: training labels that are wrong, the same ones in every round and epoch."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.recipes import recorded
from fedjax_drift.shift.rule import Example, Owner, Shift
from fedjax_drift.spec import Fix

Pairs = Annotated[
    Any,
    spec.array(
        "pairs of labels >= 0, such as [(0, 1), (2, 3)]",
        lambda pairs: spec.numbers(pairs, 2, "iu") and pairs.shape[1] == 2 and pairs.min() >= 0,
    ),
]
RATES = spec.array(
    "a probability in 0..1, or one for each client, [N]",
    lambda rates: spec.numbers(rates, 1) and rates.min() >= 0 and rates.max() <= 1,
)
RATE = spec.Spec(
    lambda name, rate, fix: (spec.PROBABILITY if checks.items(rate) is None else RATES).check(name, rate, fix),
    "numbers",
    (*spec.PROBABILITY.right, (0, 0.5)),
    (*spec.PROBABILITY.wrong, (0, 1.5)),
)
Rate = float | Annotated[np.ndarray, RATE, Fix("0.2 makes a fifth of the labels wrong")]  # a float is of the program


@recorded
def noisy_labels(rate: Rate, pairs: Pairs | None = None) -> Shift:
    """Makes each training label of client i wrong with the probability r_i. Test and validation examples stay correct.

    The labels are drawn once (`FederatedData.shifted` has the seed). So an example has the same wrong label in every
    round and epoch. But in `redealt` data it depends on the place of the example in the round.

    - Symmetric noise, the default: a wrong label is one of the C - 1 other classes, each with the probability
      r_i / (C - 1). C is the number of classes of all clients, `FederatedData.num_classes`.
    - Asymmetric noise, with ``pairs``: the label a becomes b. Labels that are no ``a`` stay correct. Pair flipping is
      ``pairs=[(c, (c + 1) % C) for c in range(C)]``.

    Both are the transition matrices of Han et al. 2018 (arXiv 1804.06872). FedNoisy (Liang et al. 2023, arXiv
    2306.11650) uses them for clients, but makes exactly the share r_i of a client's labels wrong.

    Args:
      rate: in 0..1, r_i: a number, or one for each client, float [N].
      pairs: pairs (a, b) of different labels, in 0..C - 1. A label is the ``a`` of at most one pair.
    """
    becomes = None if pairs is None else _table(pairs)

    def change(key: jax.Array, t: jax.Array, owner: Owner, x: jax.Array, y: jax.Array) -> Example:
        if not owner.training:
            return x, y
        C = owner.num_classes
        if C is None or not jnp.issubdtype(y.dtype, jnp.integer):
            checks.refuse("noisy_labels needs integer labels", y.dtype)
        if C < 2:
            checks.refuse("noisy_labels needs at least 2 classes", C)
        if pairs is not None and pairs.max() >= C:
            checks.refuse(f"pairs must have labels in 0..{C - 1}", pairs.max())
        key, key_of_class = jax.random.split(key)
        wrong = (jax.random.uniform(key, y.shape) < _rate_of(owner)) & (y >= 0)  # negative labels mark padding
        if becomes is None:
            other = (y + jax.random.randint(key_of_class, y.shape, 1, C, y.dtype)) % C
        else:
            other = jnp.asarray(np.append(becomes, np.arange(len(becomes), C)), y.dtype)[y]
        return x, jnp.where(wrong, other, y)

    def _rate_of(owner: Owner) -> Any:
        if not isinstance(rate, np.ndarray):
            return rate
        if len(rate) != owner.num_clients:
            checks.refuse(f"rate must have a probability for each of the {owner.num_clients} clients", len(rate))
        return jnp.asarray(rate, float)[owner.id]

    return Shift(change, "noisy_labels")


def _table(pairs: np.ndarray) -> np.ndarray:
    """``table[a]`` is b for each pair, and every other label is itself."""
    a, b = pairs.T
    if len(np.unique(a)) != len(a) or (a == b).any():
        checks.refuse("pairs must map each label at most once, and to another label", pairs.tolist())
    table = np.arange(a.max() + 1)
    table[a] = b
    return table
