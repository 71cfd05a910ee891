"""BatchNorm: running statistics that are averaged, kept by the clients, or frozen, against a slow loop."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from test_drift import REQUIRED
from test_trajectories import library_order

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.types import whole

SIZES, FEATURES, HIDDEN, CLASSES = (3, 10, 7, 5, 1, 6), 5, 4, 3
LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.2}  # so the last batches have 3, 2, 3, 1, 1 and 2 rows
COHORTS = [(1, 0, 4), (3, 1, 2), (1, 5, 3)]
MOMENTUM, EPSILON = 0.7, 1e-5


class Linen(nn.Module):
    """The extractor and the features are the same here."""

    def setup(self) -> None:
        self.a, self.norm = nn.Dense(HIDDEN), nn.BatchNorm(momentum=MOMENTUM)
        self.drop, self.classifier = nn.Dropout(0.5), nn.Dense(CLASSES, use_bias=False)

    def features(self, x, train: bool = False):
        return nn.tanh(self.norm(self.a(x), use_running_average=not train))

    def extractor(self, x, train: bool = False):
        return self.a(x)

    def head(self, z):
        return self.classifier(z)

    def __call__(self, x, train: bool = False):
        return self.head(self.features(x, train))


class Dropped(Linen):
    def __call__(self, x, train: bool = False):
        return self.head(self.drop(self.features(x, train), deterministic=not train))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=MOMENTUM, rngs=rngs)
        self.classifier = nnx.Linear(HIDDEN, CLASSES, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.classifier(nnx.tanh(self.norm(self.a(x))))


MODULES = {
    "linen": lambda kept: fd.Model.from_linen(Linen(), (FEATURES,), statistics=kept),
    "nnx": lambda kept: fd.Model.from_nnx(Nnx, (FEATURES,), statistics=kept),
}


def some_clients(dtype: type = np.float64, sizes=SIZES) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.normal(i, 1 + i, (n, FEATURES)).astype(dtype), rng.integers(0, CLASSES, n)) for i, n in enumerate(sizes)
    ]


def initial(dtype: type = np.float64) -> dict[str, Any]:
    """A model, with statistics that are not those of an initialisation."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    return whole(
        {
            "a": {"kernel": draw(FEATURES, HIDDEN), "bias": draw(HIDDEN)},
            "norm": {"scale": 1 + draw(HIDDEN) / 9, "bias": draw(HIDDEN)},
            "classifier": {"kernel": draw(HIDDEN, CLASSES)},
        },
        {"norm": {"mean": draw(HIDDEN), "var": 1 + draw(HIDDEN) ** 2}},
    )


def simulate(model, algorithm=None, clients=None, lanes=1, **options) -> fd.Simulation:
    clients = some_clients(np.float32) if clients is None else clients
    data = fd.FederatedData.from_clients(clients, test_clients=clients)
    mesh = fd.clients_mesh(jax.devices()[:1])
    options = {"local": fd.LocalTraining(**LOCAL), "cohort_size": 3} | options
    return fd.Simulation(model, data, algorithm or fd.algorithms.fedavg(), mesh=mesh, lanes=lanes, **options)


# --- the slow loop ----------------------------------------------------------------------------------------------------


def normalised(P, h, mean, var):
    return (h - mean[None]) / jnp.sqrt(var + EPSILON)[None] * P["norm"]["scale"][None] + P["norm"]["bias"][None]


def output(P, x, s=None):
    """The logits, with the statistics of the batch or with s, and the statistics of the batch."""
    h = x @ P["a"]["kernel"] + P["a"]["bias"][None]
    mean, var = h.mean(0), ((h - h.mean(0)[None]) ** 2).mean(0)
    z = normalised(P, h, mean, var) if s is None else normalised(P, h, s["norm"]["mean"], s["norm"]["var"])
    return jnp.tanh(z) @ P["classifier"]["kernel"], {"norm": {"mean": mean, "var": var}}


@jax.jit
def gradient(P, x, y):
    def loss(P):
        logits, batch = output(P, x)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean(), batch

    return jax.grad(loss, has_aux=True)(P)


@cache
def slow(kept: str) -> list[tuple[Any, Any, list[Any]]]:
    """FedAvg. The model, its statistics and those of every client after each round."""
    clients, sim = some_clients(), simulate(MODULES["linen"](kept))
    key = sim.init(jax.random.key(0)).key
    w, s = (initial()[name] for name in ("params", "batch_stats"))
    own = [s] * len(clients)
    models = []
    for t, cohort in enumerate(COHORTS):
        results = []
        for i in cohort:
            x, y = clients[i]
            theta, s_i = w, own[i] if kept == "local" else s
            for epoch in range(LOCAL["epochs"]):
                order = library_order(key, t, i, epoch, SIZES)
                for first in range(0, len(x), LOCAL["batch_size"]):
                    rows = order[first : first + LOCAL["batch_size"]]
                    g, batch = gradient(theta, x[rows], y[rows])
                    theta = jax.tree.map(lambda theta, g: theta - LOCAL["lr"] * g, theta, g)
                    s_i = jax.tree.map(lambda s, b: MOMENTUM * s + (1 - MOMENTUM) * b, s_i, batch)
            own[i] = s_i
            results.append((len(x), theta, s_i))
        total = sum(n for n, *_ in results)
        w = jax.tree.map(
            lambda *thetas: sum(r[0] * a for r, a in zip(results, thetas)) / total, *[r[1] for r in results]
        )
        if kept == "average":
            s = jax.tree.map(
                lambda *each: sum(r[0] * a for r, a in zip(results, each)) / total, *[r[2] for r in results]
            )
        models.append((w, s, list(own)))
    return models


@pytest.mark.parametrize(
    ("kind", "kept", "lanes"), [("linen", "average", 1), ("nnx", "average", 3), ("nnx", "local", 1)]
)
def test_fedavg_follows_the_slow_loop(kind, kept, lanes) -> None:
    with jax.enable_x64(True):
        model = MODULES[kind](kept)._replace(init=lambda key: jax.tree.map(jnp.asarray, initial()))
        sim = simulate(model, clients=some_clients(), lanes=lanes)
        state = sim.init(jax.random.key(0))
        close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
        for cohort, (w, s, own) in zip(COHORTS, slow(kept), strict=True):
            state, _ = sim.round_fn(state, cohort)
            jax.tree.map(close, state.params, whole(w, s))
            if kept == "local":
                jax.tree.map(close, state.clients.statistics, jax.tree.map(lambda *each: jnp.stack(each), *own))
        scores = sim.evaluate_clients(state)
        assert ("personal_loss" in scores) == (kept == "local")
        for i, (x, y) in enumerate(some_clients()):
            logits, _ = output(w, x, own[i] if kept == "local" else s)
            loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()
            close(scores["personal_loss" if kept == "local" else "loss"][i], loss)


def test_frozen_statistics_are_constants() -> None:
    start = initial(np.float32)
    constants = start["batch_stats"]
    plain = fd.Model(
        init=lambda key: start["params"],
        apply=lambda P, x: output(P, x, constants)[0],
    )
    expected = simulate(plain)
    a = expected.init(jax.random.key(0), start["params"])
    for _ in range(2):
        a, _ = expected.round_fn(a)
    for kind in MODULES:
        sim = simulate(MODULES[kind]("frozen"))
        b = sim.init(jax.random.key(0), start)
        for _ in range(2):
            b, _ = sim.round_fn(b)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), b.params, whole(a.params, constants))
        jax.tree.map(np.testing.assert_array_equal, b.params["batch_stats"], constants)


# --- all algorithms ---------------------------------------------------------------------------------------------------


def cosines(kept: str) -> fd.Model:
    """A model that meets the requirements of all algorithms. LfD does not depend on whether its logits are cosines."""
    return MODULES["linen"](kept)._replace(cosine=True)


def algorithm_of(name: str) -> fd.Algorithm:
    return ALGORITHMS[name](**REQUIRED.get(name, {}))


TWO_MODELS, FOLLOWS_ACCURACY = ("ditto", "pfedme", "apfl"), ("fedgvr", "fedgvrgm")


@pytest.mark.parametrize("kept", ["average", "local", "frozen"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_works_or_is_refused(name, kept) -> None:
    algorithm = algorithm_of(name)
    refused = (name in TWO_MODELS and kept != "frozen") or (name in FOLLOWS_ACCURACY and kept == "local")
    if refused:
        with pytest.raises(ConfigurationError, match=f"{name} .*got statistics=.{kept}"):
            simulate(cosines(kept), algorithm)
        return
    sim = simulate(cosines(kept), algorithm)  # which traces the update of a client
    start = initial(np.float32)
    server = sim.setup.engine.algorithm.init_server(start)
    message = sim.setup.any_update().message
    shapes = [leaf.shape for leaf in jax.tree.leaves(start["batch_stats"])]
    assert [leaf.shape for leaf in jax.tree.leaves(message.change)] == (shapes if kept == "average" else [])
    # Whatever the server does with the other leaves, the statistics move by the mean of their changes.
    mean = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.25, leaf.dtype), message)
    context = fd.types.Round(jnp.int32(0), jnp.float32(0.1), jnp.float32(0.5), len(SIZES), 5.0)
    new = sim.setup.engine.algorithm.server_update(server, mean, context)
    moved = jax.tree.map(lambda s: s + 0.25 * (kept == "average"), start["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, new.params["batch_stats"], moved)
    assert jax.tree.structure(new) == jax.tree.structure(server)


@pytest.mark.parametrize("name", ["fedavg", "moon", "fedntd", "fedlc", "lfd", "fedlesam", "fedrep", "constrained"])
def test_padding_has_no_influence(name) -> None:
    """Client 0 trains alone in a round, with batches of 3 rows. With a larger client, they are padded to 4."""
    options = {"kind": "feature", "part": "header"} if name == "constrained" else {}
    algorithm = ALGORITHMS[name](**REQUIRED.get(name, {}) | options)
    models = []
    with jax.enable_x64(True):
        model = cosines("average")._replace(init=lambda key: jax.tree.map(jnp.asarray, initial()))
        for sizes in ((3, 2), (3, 9)):
            sim = simulate(model, algorithm, some_clients(sizes=sizes), cohort_size=1)
            state = sim.init(jax.random.key(0))
            for _ in range(2):  # MOON and LfD then have a previous model
                state, _ = sim.round_fn(state, [0])
            models.append(state.params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), *models)


def test_one_forward_pass_a_step() -> None:
    """The pass for the gradient also gives the statistics."""
    model = MODULES["linen"]("average")
    P, s = initial(np.float32).values()
    x, y, mask, key = jnp.ones((64, FEATURES)), jnp.zeros(64, int), jnp.ones(64, bool), jax.random.key(0)

    def step(P, s, tracked):
        def loss(P):
            return model.loss(model.statistics.forward(P, s, x, key, mask, "apply")[0], y).mean()

        new = model.statistics.forward(P, s, x, key, mask, "apply")[1] if tracked else s
        return jax.grad(loss)(P), new

    flops = [jax.jit(partial(step, tracked=t)).lower(P, s).compile().cost_analysis()["flops"] for t in (False, True)]
    assert flops[1] - flops[0] < 0.2 * flops[0], flops
