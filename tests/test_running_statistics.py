"""Tests of BatchNorm with averaged, local and frozen running statistics, against a slow reference loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from test_algorithms import small
from test_trajectories import library_order

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.batch_norm import whole
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.message import summed

pytestmark = pytest.mark.thorough

SIZES, FEATURES, HIDDEN, CLASSES = (3, 10, 7, 5, 1, 6), 5, 4, 3
LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.2}  # last batches: 3, 2, 3, 1, 1, 2 examples
COHORTS = [(1, 0, 4), (3, 1, 2), (1, 5, 3)]
MOMENTUM, EPSILON = 0.7, 1e-5


class Linen(nn.Module):
    """A network with BatchNorm. Its extractor is the part before BatchNorm, and its head the last layer."""

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
    """Returns the parameters of a model, with running statistics that are not the usual initial ones."""
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


def in_float64(model: fd.Model) -> fd.Model:
    return model._replace(init=lambda key: jax.tree.map(jnp.asarray, initial()))


def simulate(model, algorithm=None, clients=None, lanes=1, **options) -> fd.Simulation:
    clients = some_clients(np.float32) if clients is None else clients
    data = fd.FederatedData.from_clients(clients, test_clients=clients)
    mesh = fd.clients_mesh(jax.devices()[:1])
    options = {"local": fd.LocalTraining(**LOCAL), "cohort_size": 3} | options
    return fd.Simulation(model, data, algorithm or fd.algorithms.fedavg(), mesh=mesh, lanes=lanes, **options)


# --- the slow reference loop ------------------------------------------------------------------------------------------


def normalised(P, h, mean, var):
    return (h - mean[None]) / jnp.sqrt(var + EPSILON)[None] * P["norm"]["scale"][None] + P["norm"]["bias"][None]


def output(P, x, s=None):
    """Returns the logits and the statistics of the batch. BatchNorm uses s, or those of the batch if s is None."""
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
    """Runs FedAvg. Returns the model, its statistics and those of every client after each round."""
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
        sizes, thetas, statistics = zip(*results, strict=True)
        mean = partial(lambda sizes, *each: np.average(each, axis=0, weights=sizes), sizes)
        w = jax.tree.map(mean, *thetas)
        s = jax.tree.map(mean, *statistics) if kept == "average" else s
        models.append((w, s, list(own)))
    return models


@pytest.mark.parametrize(
    ("kind", "kept", "lanes"), [("linen", "average", 1), ("nnx", "average", 3), ("nnx", "local", 4)]
)
def test_fedavg_matches_the_slow_loop(kind, kept, lanes) -> None:
    with jax.enable_x64(True):
        sim = simulate(in_float64(MODULES[kind](kept)), clients=some_clients(), lanes=lanes)
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


def test_frozen_statistics_act_as_constants() -> None:
    start = initial(np.float32)
    constants = start["batch_stats"]
    plain = fd.Model(init=lambda key: start["params"], apply=lambda P, x: output(P, x, constants)[0])
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
    """A model that meets the requirements of all algorithms.

    LfD requires `cosine=True`. It also runs if the logits are not cosines, as here.
    """
    return MODULES["linen"](kept)._replace(cosine=True)


FOLLOWS_ACCURACY = ("fedgvr", "fedgvrgm")


@pytest.mark.parametrize("kept", ["average", "local", "frozen"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_handles_the_statistics_or_is_refused(name, kept) -> None:
    algorithm = small(ALGORITHMS[name], HIDDEN)
    if algorithm.requires.adapters:
        pytest.skip("a model with adapters has no running statistics that are not frozen")
    refused = (algorithm.requires.one_model and kept != "frozen") or (name in FOLLOWS_ACCURACY and kept == "local")
    if refused:
        with pytest.raises(ConfigurationError, match=f"{name} .*got statistics=.{kept}"):
            simulate(cosines(kept), algorithm)
        return
    sim = simulate(cosines(kept), algorithm)  # this traces the client update
    start = initial(np.float32)
    server = sim.setup.engine.algorithm.init_server(start)
    *surveys, message = [jax.eval_shape(summed, result.message) for result in sim.setup.client_results()]
    shapes = [leaf.shape for leaf in jax.tree.leaves(start["batch_stats"])]
    assert [leaf.shape for leaf in jax.tree.leaves(message.change)] == (shapes if kept == "average" else [])
    # Every server adds the mean change of the statistics to them, whatever it does with the other leaves.
    mean = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.25, leaf.dtype), message)
    surveyed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), surveys[0]) if surveys else None
    context = fd.types.Round(
        jnp.int32(0), jnp.float32(0.1), jnp.float32(0.5), len(SIZES), 5.0, surveyed, sim.setup.engine.model
    )
    new = sim.setup.engine.algorithm.server_update(server, mean, context)
    moved = jax.tree.map(lambda s: s + 0.25 * (kept == "average"), start["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, new.params["batch_stats"], moved)
    assert jax.tree.structure(new) == jax.tree.structure(server)


@pytest.mark.parametrize("name", ["moon", "fedntd", "fedlc", "lfd", "fedlesam"])
def test_padding_does_not_change_the_results(name) -> None:
    """Client 0 trains alone with a batch of 3 examples, which is padded to 4 if there is a larger client."""
    models = []
    with jax.enable_x64(True):
        model = in_float64(cosines("average"))
        for sizes in ((3, 2), (3, 9)):
            sim = simulate(model, small(ALGORITHMS[name]), some_clients(sizes=sizes), cohort_size=1)
            state = sim.init(jax.random.key(0))
            for _ in range(2):  # in the second round, MOON and LfD have a previous model
                state, _ = sim.round_fn(state, [0])
            models.append(state.params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), *models)


@pytest.mark.parametrize("name", ["mime", "fedadamw", "fedspeed", "fedsmoo"])
def test_a_gradient_of_the_algorithms_own_also_updates_the_statistics(name) -> None:
    """After one step of one client, they are those of its batch and the first model."""
    local = fd.LocalTraining(epochs=1, batch_size=50, lr=0.1)
    sim = simulate(MODULES["linen"]("average"), small(ALGORITHMS[name]), cohort_size=1, local=local)
    start, (x, y) = initial(np.float32), some_clients(np.float32)[1]
    state, _ = sim.round_fn(sim.init(jax.random.key(0), start), [1])
    _, batch = gradient(start["params"], x, y)
    want = jax.tree.map(lambda s, b: MOMENTUM * s + (1 - MOMENTUM) * b, start["batch_stats"], batch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), state.params["batch_stats"], want)


def test_the_statistics_need_no_additional_forward_pass() -> None:
    """In local training with the model's loss, the forward pass for the gradient also returns the statistics."""
    model = MODULES["linen"]("average")
    forward = model.statistics.forward

    def untracked(P, s, *inputs):
        return forward(P, s, *inputs)[0], s

    flops = []
    for pass_ in (forward, untracked):
        sim = simulate(model._replace(statistics=model.statistics._replace(forward=pass_)))
        state = sim.init(jax.random.key(0))
        lowered = sim.executor.programs.lower("round", (), state, sim.setup.arrays, None)
        flops.append(lowered.cost_analysis()["flops"])
    assert flops[1] < flops[0] < 1.05 * flops[1]


# --- the rest of the library ------------------------------------------------------------------------------------------


def test_a_resumed_run_is_bitwise_equal(tmp_path) -> None:
    sim = simulate(MODULES["linen"]("local"), fd.algorithms.fedbn())
    with pytest.warns(UserWarning, match="only the initial running statistics.*evaluate_clients"):
        straight, _ = sim.run(sim.init(jax.random.key(0)), 4)
    sim.run(sim.init(jax.random.key(0)), 2, eval_every=0, checkpoints=tmp_path)
    state, _ = fd.Checkpoints(tmp_path).restore(sim)
    resumed, _ = sim.run(state, 2, eval_every=0)
    jax.tree.map(np.testing.assert_array_equal, resumed._replace(key=0), straight._replace(key=0))
    # FedBN keeps BatchNorm's parameters as personal state. The statistics are kept in addition.
    base = resumed.clients.base.personal
    assert [leaf.shape for leaf in base] == [(len(SIZES), HIDDEN)] * 2
    assert not np.array_equal(*jax.tree.leaves(resumed.clients.statistics)[0][:2])


def test_drift_metrics_leave_out_the_statistics() -> None:
    sim = simulate(MODULES["linen"]("average"), measure=("updates", "gradients"), cohort_size=1)
    state = sim.init(jax.random.key(0), initial(np.float32))
    new, info = sim.round_fn(state, [1])
    D = jax.tree.leaves(jax.tree.map(np.subtract, new.params["params"], state.params["params"]))
    assert float(info["update_norm"][0, -1]) == pytest.approx(np.sqrt(sum((d**2).sum() for d in D)), rel=1e-4)
    assert float(info["update_cosine"][0, -1]) == pytest.approx(1, rel=1e-4)
    model, x, y = sim.model, *some_clients(np.float32)[1]
    g = jax.grad(lambda params: model.loss(model.apply(params, x), y).mean())(state.params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(g["batch_stats"]))
    assert np.isfinite([info[name] for name in ("gradient_norm", "period_drift")]).all()
    with pytest.raises(ConfigurationError, match="measure='predictions' .*only the clients have"):
        simulate(MODULES["linen"]("local"), measure="predictions")


def test_fine_tuning_also_updates_the_statistics() -> None:
    clients = some_clients(np.float32)
    for kept in ("average", "local"):
        sim = simulate(MODULES["linen"](kept), clients=clients, cohort_size=1)
        state = sim.init(jax.random.key(0), initial(np.float32))
        one_epoch = fd.LocalTraining(epochs=1, batch_size=50, lr=0.2)
        scores = sim.evaluate_clients(state, fine_tune=one_epoch)
        start, (x, y) = initial(np.float32), clients[1]
        g, batch = gradient(start["params"], x, y)
        theta = jax.tree.map(lambda theta, g: theta - 0.2 * g, start["params"], g)
        s = jax.tree.map(lambda s, b: MOMENTUM * s + (1 - MOMENTUM) * b, start["batch_stats"], batch)
        loss = -jnp.take_along_axis(jax.nn.log_softmax(output(theta, x, s)[0]), y[:, None], 1).mean()
        assert scores["personal_loss"][1] == pytest.approx(float(loss), rel=1e-4)


def test_dropout_and_bfloat16_work_with_batch_norm() -> None:
    x, mask = jnp.ones((6, FEATURES)) * jnp.arange(6.0)[:, None], jnp.arange(6) < 4
    for kept in ("average", "frozen"):
        model = fd.Model.from_linen(Dropped(), (FEATURES,), statistics=kept)
        P, s = initial(np.float32).values()
        outputs = [model.statistics.forward(P, s, x, jax.random.key(k), mask, "apply") for k in (0, 1)]
        assert not np.array_equal(outputs[0][0], outputs[1][0])
        jax.tree.map(np.testing.assert_array_equal, outputs[0][1], outputs[1][1])  # dropout comes after BatchNorm
    half = MODULES["linen"]("average").computing_in(jnp.bfloat16)
    logits, new = half.statistics.forward(P, s, x, jax.random.key(0), mask, "apply")
    assert logits.dtype == jnp.float32 and new["norm"]["var"].dtype == jnp.float32
    full, expected = MODULES["linen"]("average").statistics.forward(P, s, x, jax.random.key(0), mask, "apply")
    assert 1e-6 < np.abs(logits - full).max() < 0.1
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.05, atol=0.05), new, expected)
    sim = simulate(half)
    assert simulate(half, sim.algorithm).algorithm is sim.algorithm  # an algorithm can be used in a second simulation


# --- errors -----------------------------------------------------------------------------------------------------------


def module(name: str, call: Callable[..., jax.Array]) -> nn.Module:
    return type(name, (nn.Module,), {"__call__": nn.compact(call)})()


def scaled(kind: str) -> Callable[..., jax.Array]:
    return lambda self, x: x * self.variable(kind, "scale", jnp.ones, x.shape[-1:]).value[None]


OWN, CACHED = module("Own", scaled("batch_stats")), module("Cached", scaled("cache"))
NO_FLAG = module("NoFlag", lambda self, x: nn.BatchNorm(use_running_average=True)(x))
ALWAYS_TRAINING = module("AlwaysTraining", lambda self, x, train: nn.BatchNorm(use_running_average=False)(x))
OVER_DEVICES = module(
    "OverDevices", lambda self, x, train: nn.BatchNorm(use_running_average=not train, axis_name="batch")(x)
)
RESHAPED = module(
    "Reshaped", lambda self, x, train: nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 1)).reshape(x.shape)
)


def linen(module: nn.Module, kept: Any = "average") -> fd.Model:
    return fd.Model.from_linen(module, (FEATURES,), statistics=kept)


PRIVATE = {"aggregation": fd.aggregation.private(1.0, 1.0), "sampling": "bernoulli"}
OPTIONS = '(?s)got None: pass .*"average" .*"local" .*"frozen" .*GroupNorm'


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linen(Linen(), None), OPTIONS),
        (lambda: fd.Model.from_nnx(Nnx), OPTIONS),
        (lambda: linen(Linen(), "mean"), "statistics must be one of 'average', 'local', 'frozen', got 'mean'"),
        (lambda: linen(nn.Dense(3)), "statistics must be left out for Dense, which has no running statistics"),
        (
            lambda: fd.Model.from_nnx(lambda rngs: nnx.Linear(2, 2, rngs=rngs), statistics="local"),
            "left out for Linear, which has no running",
        ),
        (lambda: linen(OWN), "must be those of flax's BatchNorm, got those of Own in Own"),
        (lambda: linen(CACHED), "Cached must have no variables except parameters and running statistics, got cache"),
        (lambda: linen(NO_FLAG), "__call__ of NoFlag must have an argument train, got none"),
        (lambda: linen(ALWAYS_TRAINING), re.escape("write BatchNorm(use_running_average=not train)")),
        (lambda: linen(RESHAPED), r"first axis of BatchNorm's input must be the batch, of length 2, got \[10, 1\]"),
        (lambda: linen(OVER_DEVICES), "axis_name of BatchNorm must be None, got 'batch' in OverDevices"),
        (lambda: simulate(MODULES["linen"]("average"), **PRIVATE), "noise of private.* can make a running variance"),
        (
            lambda: simulate(fd.models.linear((FEATURES,), CLASSES)._replace(statistics="average")),
            "Model.statistics must be of type Statistics, got 'average'",
        ),
    ],
)
def test_wrong_uses_raise_configuration_errors(make, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_custom_algorithms_must_pass_the_mask_and_call_local_train() -> None:
    def without_mask(server, client, work):
        batch = work.epoch(work.key)(0)
        work.logits(server.params, batch.x, work.key)
        return fd.ClientResult(server.params, 1.0, client, {})

    fedavg = fd.algorithms.fedavg()
    with pytest.raises(ConfigurationError, match="work.logits needs the mask of the batch"):
        simulate(MODULES["linen"]("average"), fedavg._replace(client_update=without_mask)).setup.client_results()
    no_call = fedavg._replace(
        client_update=lambda server, client, work: fd.ClientResult(server.params, 1.0, client, {})
    )
    with pytest.raises(ConfigurationError, match="client_update of fedavg must pass on what local.train returned"):
        simulate(MODULES["linen"]("average"), no_call).setup.client_results()


def test_a_large_module_is_wrapped_without_allocating_it() -> None:
    """The module has a billion parameters, 4 GB in float32."""

    def large(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(
            nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 10**9 // 8, rngs=rngs)
        )

    before = {id(array) for array in jax.live_arrays()}
    model = fd.Model.from_nnx(large, (8,))
    assert sum(array.size for array in jax.live_arrays() if id(array) not in before) < 100
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 10**9
