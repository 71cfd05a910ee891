"""Every algorithm against the NumPy reference of `slow` and the files that continue it, after every round.

The table of what is compared is in cases.py. At the end of the rounds, the algorithm's `INVARIANTS` hold. The clients
have different numbers of examples, and half of them are in a cohort.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
import slow_2026
import slow_absent
import slow_distilled
import slow_newer
from cases import CASES, CLASSES, COHORTS, FEATURES, FLOAT32, LIMITS, LOCAL, SIZES, case_id
from small import first_of_each

import fedjax_drift as fd
from fedjax_drift import tree
from fedjax_drift.local import shuffle

ORACLES = vars(slow) | vars(slow_newer) | vars(slow_2026) | vars(slow_absent) | vars(slow_distilled)


# --- invariants -------------------------------------------------------------------------------------------------------


class End(NamedTuple):
    """The end of a simulation."""

    server: Any
    clients: Any
    models: list[Any]  # w_0 .. w_T
    arguments: dict[str, Any]
    sizes: np.ndarray
    cohorts: list[Any]

    def mean(self, name: str, weights: Any = None) -> Any:
        """The mean of a variable over all clients."""
        return jax.tree.map(lambda a: np.average(a, axis=0, weights=weights), getattr(self.clients, name))


Pairs = list[tuple[Any, Any]]  # what was found and what holds


def variates(end: End) -> Pairs:
    return [(end.server.c, end.mean("c", end.sizes if end.arguments.get("scale_by_size") else None))]


def duals(end: End) -> Pairs:
    return [(end.server.h, end.mean("h"))] if "aggregation" not in end.arguments else []


def means_of_feddc(end: End) -> Pairs:
    """With "paper", w is the mean of theta_i + h_i over all clients, weighted by n_i."""
    paper = end.arguments.get("aggregation") == "paper"
    return variates(end) + duals(end) + [(end.server.params, end.mean("sent", end.sizes))] * paper


def perturbation(end: End) -> Pairs:
    length = np.linalg.norm(slow.pack(end.server.s))
    return [(length, end.arguments.get("rho", 0.1))] if length else []


def last_participation(end: End) -> Pairs:
    last = [max((t for t, cohort in enumerate(end.cohorts) if i in cohort), default=-1) for i in range(len(end.sizes))]
    return [(end.clients.t, np.array(last))]


def last_updates(end: End) -> Pairs:
    return [(end.server.y, end.mean("y"))]


def simplex(end: End) -> Pairs:
    weights = np.asarray(end.server.weights)
    return [(weights.sum(), 1.0), (weights, abs(weights))]


INVARIANTS: dict[str, Callable[[End], Pairs]] = {
    **dict.fromkeys(("scaffold", "fedgvr", "fedgamma"), variates),
    **dict.fromkeys(("feddyn", "fedspeed", "fedgmt"), duals),
    "fedsmoo": lambda end: duals(end) + perturbation(end),
    "feddc": means_of_feddc,
    "vrl_sgd": lambda end: [(end.mean("Delta"), tree.zeros_like(end.server.params))] * (len({*end.sizes}) == 1),
    "fedexp": lambda end: [(end.server.last_two_mean, jax.tree.map(lambda *w: sum(w) / 2, *end.models[-2:]))],
    **dict.fromkeys(("localghbm", "fedau"), last_participation),
    "agnostic": simplex,
    **dict.fromkeys(("fedvarp", "mifa"), last_updates),
}


# --- the comparison ---------------------------------------------------------------------------------------------------


def label_skewed_clients(dtype: type, sizes: Sequence[int] = SIZES) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    mix = rng.dirichlet(np.full(CLASSES, 0.5), len(sizes))
    centres = rng.normal(size=(CLASSES, FEATURES))
    labels = [rng.choice(CLASSES, size=n, p=p) for n, p in zip(sizes, mix, strict=True)]
    return [((centres[y] + rng.normal(size=(len(y), FEATURES))).astype(dtype), y) for y in labels]


def library_order(key: jax.Array, t: int, i: int, epoch: int, sizes: Sequence[int] = SIZES) -> np.ndarray:
    """The order in which client i reads its examples. The NumPy reference takes nothing else from the library."""
    return shuffled(jax.random.split(epoch_key(key, t, i, epoch))[0], i, sizes)


def epoch_key(key: jax.Array, t: int, i: int, epoch: int) -> jax.Array:
    _, round_key = jax.random.split(jax.random.fold_in(key, t))
    return jax.random.fold_in(jax.random.fold_in(round_key, i), epoch)


def shuffled(key: jax.Array, i: int, sizes: Sequence[int]) -> np.ndarray:
    return np.asarray(shuffle(key, jnp.int32(sizes[i]), jnp.int32(max(sizes)), max(sizes)))[: sizes[i]]


def order(key: jax.Array, epochs: int, sizes: Sequence[int], t: int, i: int, epoch: int) -> np.ndarray:
    """The order of `library_order`, or that of FedReg's first pass if ``epoch`` is ``epochs``.

    The key of the first pass is not split, because only the shuffle uses it. Orders 1000 + epoch and 2000 + epoch are
    the second and the third shuffle of an epoch, for Per-FedAvg.
    """
    if epoch < epochs:
        return library_order(key, t, i, epoch, sizes)
    shuffle_key = epoch_key(key, t, i, epoch % 1000)
    if epoch >= 1000:
        shuffle_key = jax.random.fold_in(jax.random.split(shuffle_key)[0], epoch // 1000)
    return shuffled(shuffle_key, i, sizes)


def drawn(t: int, n: int, seed: int) -> np.ndarray:
    """The order of n unlabelled examples in round t."""
    return np.asarray(jax.random.permutation(jax.random.fold_in(jax.random.key(seed), t), n))


def rounds_of(sim: fd.Simulation, cohorts: Sequence[Sequence[int]]) -> tuple[jax.Array, list[Any], list[Any]]:
    """Runs rounds with these cohorts. Returns the key, and the global models and the infos of all rounds."""
    state = sim.init(jax.random.key(0))
    key, models, infos = state.key, [], []
    for cohort in cohorts:
        state, info = sim.round_fn(state, cohort=cohort)
        models.append(jax.device_get(state.params))
        infos.append(info)
    return key, models, infos


def hidden(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w1"] + p["b1"][None])


def head(p: Any, z: jax.Array) -> jax.Array:
    return z @ p["w2"] + p["b2"][None]


def of_shapes(apply: Callable, **functions: Any) -> tuple[dict[str, tuple[int, ...]], fd.Model]:
    """The shapes of the parameters, and a model whose initial parameters have them."""
    shapes = functions.pop("shapes")

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    return shapes, fd.Model(init, apply, **functions)


# Simulations of the same model share programs.
LINEAR = of_shapes(
    lambda p, x: x @ p["w"] + p["b"][None],
    shapes={"w": (FEATURES, CLASSES), "b": (CLASSES,)},
    features=lambda p, x: x,
)
COSINES = of_shapes(
    lambda p, x: fd.models.cosine_logits(x, p["w"]),
    shapes={"w": (FEATURES, CLASSES)}, features=lambda p, x: x, cosine=True,
)  # fmt: skip
TWO_LAYERS = of_shapes(
    lambda p, x: head(p, hidden(p, x)),
    shapes={"w1": (FEATURES, slow.HIDDEN), "b1": (slow.HIDDEN,), "w2": (slow.HIDDEN, CLASSES), "b2": (CLASSES,)},
    features=hidden, head=head,
)  # fmt: skip
NETWORKS = {"lfd": COSINES, **dict.fromkeys(("moon", "feddecorr", "fedproto"), TWO_LAYERS)}  # by slow algorithm


@cache
def federation(dtype: type, sizes: Sequence[int]) -> fd.FederatedData:
    """The test set has 50 noisy copies of every example, so that the accuracy changes in small steps."""
    clients = label_skewed_clients(dtype, sizes)
    x, y = (np.concatenate(parts).repeat(50, axis=0) for parts in zip(*clients, strict=True))
    noisy = (x + np.random.default_rng(2).normal(size=x.shape)).astype(dtype)
    return fd.FederatedData.from_clients(clients, test=(noisy, y))


def of_both(algorithm: str, arguments: dict[str, Any], shapes: Any) -> tuple[fd.Algorithm, dict[str, Any]]:
    """The algorithm, and the arguments of the slow algorithm of the same name."""
    ours, theirs = dict(arguments), dict(arguments)
    if algorithm == "partly_shared":
        ours = {"personal": "b"} | ours | {"base": getattr(fd.algorithms, ours.get("base", "fedavg"))()}
        theirs["personal"] = slow.pack({name: np.full(shape, name == "b") for name, shape in shapes.items()}) > 0
    if "unlabelled" in ours:
        ours["unlabelled"] = theirs["unlabelled"] = np.random.default_rng(3).normal(size=(ours["unlabelled"], FEATURES))
        theirs["drawn"] = drawn
    if ours.get("models", 1) > 1:  # a single one is the initial model
        rng = np.random.default_rng(2)
        models = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(ours["models"])]
        ours["models"], theirs["models"] = models, list(map(slow.pack, models))
    return getattr(fd.algorithms, algorithm)(**ours), theirs


def reported(name: str, sim: fd.Simulation, state: fd.ServerState, info: dict[str, Any]) -> Any:
    """What the library has for an entry of the NumPy reference's info."""
    if name == "personal":
        own = sim.algorithm.personal is not None
        return [slow.pack(sim.personal_params(state, i) if own else state.params) for i in range(sim.data.num_clients)]
    if name == "models":
        (k,) = {len(leaf) for leaf in jax.tree.leaves(state.server.models)}
        return [slow.pack(jax.tree.map(lambda w, j=j: w[j], state.server.models)) for j in range(k)]
    if name == "counts":
        return [info[each] for each in sorted(info) if each.startswith("clients_of_model_")]
    places = {"alpha": "clients.alpha", "lambda": "server.weights", "average": "server.average"}
    places["prototypes"] = "server.prototypes"
    if name not in places:
        return info[name]
    found = operator.attrgetter(places[name])(state)
    return slow.pack(found) if name == "average" else found


def compare(
    algorithm: str,
    arguments: dict[str, Any],
    changes: dict[str, Any],
    equals: tuple[str, dict[str, Any]] | None = None,
    dtype: type = np.float64,
) -> None:
    """Compares an algorithm with a slow one after every round. equals: the slow algorithm and its arguments, if it is
    another one."""
    options, tolerance = LOCAL | changes, 1e-9 if dtype == np.float64 else 1e-5
    cohorts, sizes = options.pop("cohorts", COHORTS), (8,) * 6 if options.pop("equal", False) else SIZES
    name, other = equals or (algorithm, None)
    shapes, network = NETWORKS.get(name, LINEAR)
    rng = np.random.default_rng(1)
    params = {leaf: rng.normal(size=shape).astype(dtype) for leaf, shape in shapes.items()}
    with jax.enable_x64(dtype == np.float64):
        made, theirs = of_both(algorithm, arguments, shapes)
        data = federation(dtype, sizes)
        one_device = fd.clients_mesh(jax.devices()[:1])
        sim = fd.Simulation(
            network, data, made, local=fd.LocalTraining(**options), cohort_size=len(cohorts[0]), mesh=one_device
        )
        state = sim.init(jax.random.key(0), jax.tree.map(jnp.asarray, params))
        local = slow.Local(**options | ({"optimizer": slow.adam} if "optimizer" in options else {}))
        clients, test = [data.client(i) for i in range(data.num_clients)], (data.x_test, data.y_test)
        last = local.epochs if name == "fedreg" else 1000  # Ditto may have more epochs
        fed = slow.Federation(clients, cohorts, partial(order, state.key, last, sizes), local, test)
        theirs = of_both(name, other, shapes)[1] if other is not None else theirs
        wanted = slow.simulate(ORACLES[name], params, fed, **theirs)
        models = [params]
        for t, (cohort, want) in enumerate(zip(cohorts, wanted, strict=True)):
            state, info = sim.round_fn(state, cohort)
            models.append(jax.device_get(state.params))
            assert {leaf.dtype for leaf in models[-1].values()} == {np.dtype(dtype)}
            error = np.linalg.norm(slow.pack(models[-1]) - slow.pack(want)) / np.linalg.norm(slow.pack(want))
            assert error < tolerance, f"after round {t}, cohort {cohort}: relative error {error:.1e}"
            for entry, value in fed.info[t].items() if fed.info and equals is None else ():
                found = np.asarray(reported(entry, sim, state, info), float)
                np.testing.assert_allclose(found, value, 10 * tolerance, tolerance, err_msg=f"{entry} after round {t}")
        end = End(state.server, state.clients, models, arguments, np.array(sizes), cohorts)
        for found, holds in INVARIANTS.get(algorithm, lambda end: [])(end):
            jax.tree.map(partial(np.testing.assert_allclose, rtol=10 * tolerance, atol=tolerance), found, holds)


@pytest.mark.parametrize("algorithm, arguments, changes", first_of_each(CASES), ids=[case_id(*case) for case in CASES])
def test_the_slow_loop(algorithm: str, arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    compare(algorithm, arguments, changes)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm, arguments, changes", FLOAT32, ids=[case[0] for case in FLOAT32])
def test_the_slow_loop_in_float32(algorithm: str, arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    compare(algorithm, arguments, changes, dtype=np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm, arguments, changes, other, of_other", LIMITS, ids=[case_id(*limit[:3]) for limit in LIMITS]
)
def test_limits(
    algorithm: str, arguments: dict[str, Any], changes: dict[str, Any], other: str, of_other: dict[str, Any]
) -> None:
    compare(algorithm, arguments, changes, (other, of_other))
