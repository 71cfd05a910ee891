"""Checks a participation rule for a federation, before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks
from fedjax_drift.participation import Clients, Participation, uniform
from fedjax_drift.participation.cohorts import SHORT_NAMES
from fedjax_drift.round.selection import Selection
from fedjax_drift.types import THREEFRY, Algorithm


def rule_of(participation: Any, options: dict[str, Any]) -> Participation:
    """The checked option of `Simulation`, or its default. Its short form ``sampling`` is removed from ``options``."""
    if "sampling" in options:
        if participation is not None:
            checks.refuse("participation= and sampling= are two names of one option", "both", "pass one")
        return SHORT_NAMES[checks.choice("sampling", options.pop("sampling"), SHORT_NAMES)]()
    fix = "fd.participation.cyclic(groups=4), for example"
    return uniform() if participation is None else checks.instance("participation", participation, Participation, fix)


def selection_of(rule: Participation, N: int, K: int) -> Selection:
    """Returns the rule for N clients, of which a round selects K. Raises ConfigurationError if it doesn't fit."""
    checks.fields(rule, "see fd.participation.Participation")
    checks.choice(f"weights of {rule.name}", rule.weights, ("algorithm", "uniform"))
    capacity = checks.integer(f"most of {rule.name}", rule.most(N, K), 1)

    def first(key: jax.Array, sizes: jax.Array, losses: jax.Array) -> Any:
        clients, t = Clients(sizes, lambda ids: losses[ids]), jnp.int32(0)
        state = rule.init(key, clients)
        if rule.available is not None:
            clients = clients._replace(available=rule.available(state, key, t, N))
        return rule.select(state, key, t, K, clients), clients.available, state

    sizes, losses = (jax.ShapeDtypeStruct((N,), jax.dtypes.canonicalize_dtype(dtype)) for dtype in (np.int32, float))
    key = jax.random.key(0, impl=THREEFRY)
    program, (result, available, state) = jax.make_jaxpr(first, return_shape=True)(key, sizes, losses)
    asks_losses = any(program.jaxpr.invars[-1] in equation.invars for equation in program.jaxpr.eqns)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
        fix = "keep jax.random.key_data(key) instead"
        checks.refuse(f"the state of {rule.name} must have arrays of numbers", "a key", fix)
    if not isinstance(result, tuple) or len(result) != 2:
        fix = "return (ids, None) for clients without a factor"
        checks.refuse(f"select of {rule.name} must return (ids, factor)", checks.shown(result), fix)
    ids, factor = result
    if getattr(ids, "shape", None) != (capacity,) or not jnp.issubdtype(ids.dtype, jnp.integer):
        what = f"ids of {rule.name} must be integers [{capacity}], as many as most(N, K) says"
        checks.refuse(what, checks.shown(ids))
    if factor is not None and getattr(factor, "shape", None) != (capacity,):
        what = f"factors of {rule.name} must be float [{capacity}], one for each id, or None"
        checks.refuse(what, checks.shown(factor))
    if available is not None and (available.shape != (N,) or available.dtype != bool):
        checks.refuse(f"available of {rule.name} must return bool [{N}], one for each client", checks.shown(available))
    return Selection(rule, K, capacity, factor is not None or not rule.distinct, asks_losses)


def check_weights(algorithm: Algorithm, selection: Selection) -> None:
    """Checks that a rule does not weigh clients, if the algorithm needs equal weights."""
    if algorithm.requires.equal_weights and (selection.factors or selection.rule.expected is not None):
        what = f"{algorithm.name} needs a participation rule that selects different clients with equal weights"
        fix = "pass fd.participation.trace(...) or uniform(), for example"
        checks.refuse(f"{what}, because it makes up for clients that are away itself", selection.rule.name, fix)
