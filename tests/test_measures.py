"""Tests of curvature, of the plane through three models, and of distances between the clients' data."""

from __future__ import annotations

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedjax_drift as fd
from fedjax_drift.devices.mesh import clients_mesh
from fedjax_drift.measures import curvature

C = 3


def rows(rng, n, scale=1.0):
    y = (np.arange(n) % C).astype(np.int32)
    return (scale * rng.normal(size=(n, 3)) + y[:, None]).astype(np.float32), y


def simulate(data, measure=(), devices=1, model=None, **options) -> fd.Simulation:
    options = {"cohort_size": 3, "eval_batch_size": 4, "local": fd.LocalTraining(epochs=2, lr=0.3)} | options
    mesh = clients_mesh(jax.devices()[:devices])
    return fd.Simulation(model or MODEL, data, fd.algorithms.fedavg(), measure=measure, mesh=mesh, **options)


def init(key):
    return {"hidden": jax.random.normal(key, (3, 2)), "head": 0.5 * jax.random.normal(jax.random.split(key)[0], (2, C))}


MODEL = fd.Model(init, lambda params, x: jnp.tanh(x @ params["hidden"]) @ params["head"])  # 12 parameters


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    rng = np.random.default_rng(0)
    return fd.FederatedData.from_clients([rows(rng, n) for n in (4, 9, 5, 7)], test=rows(rng, 11))


def dense_hessian(sim, params, statistics=None) -> np.ndarray:
    """The Hessian of the mean loss over the test examples, all in one batch, in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (params, statistics))
        theta, unravel = ravel_pytree(wide[0])
        x, y = sim.data.x_test.astype(np.float64), sim.data.y_test

        def loss(theta):
            inner = unravel(theta)
            whole = inner if statistics is None else {"params": inner, "batch_stats": wide[1]}
            return sim.model.loss(sim.model.apply(whole, x), y).mean()

        return np.asarray(jax.hessian(loss)(theta))


def largest(H) -> np.ndarray:
    return np.linalg.eigvalsh(H)[::-1][: curvature.LARGEST]


@pytest.mark.parametrize(("x64", "devices"), [(True, 1), (False, 2)])
def test_sharpness_matches_a_dense_hessian(data, x64, devices):
    """11 test examples in batches of 4, or of 4 on each of two devices: the last ones are padding."""
    with jax.enable_x64(x64):
        sim, cohort = simulate(data, devices=devices), [2, 0, 3]
        state = sim.init(jax.random.key(1))
        measured = jax.device_get(sim.measure(state, ("sharpness", "local_sharpness"), cohort))
        local = [sim.round_fn(state, [i])[0].params for i in cohort]  # with one client, its model is the new global one
        H, tolerance = dense_hessian(sim, state.params), 1e-9 if x64 else 1e-5
        assert measured["sharpness"].dtype == measured["local_sharpness"].dtype == (jnp.float64 if x64 else jnp.float32)
    np.testing.assert_allclose(measured["sharpness"], largest(H), rtol=tolerance, atol=tolerance * largest(H)[0])
    want = [largest(dense_hessian(sim, theta))[0] for theta in local]
    np.testing.assert_allclose(measured["local_sharpness"], want, rtol=10 * tolerance)
    error = np.sqrt(2 * ((H**2).sum() - (np.diag(H) ** 2).sum()) / curvature.PROBES)
    assert abs(measured["hessian_trace"] - np.trace(H)) < 4 * error


def test_eigenvalues_of_operators_without_a_gap():
    """A random start has a part in one direction of each eigenspace only, and then a new vector is needed."""

    def found(values):
        A = np.diag(np.float32(values))
        return np.asarray(curvature.lanczos(lambda v: A @ v, jnp.zeros(len(A)), jax.random.key(0)))

    for values in ([0] * 6, [2] * 5, [0, 0, 0, 5, 5, 5], [-3, 1, 1, 4]):
        np.testing.assert_allclose(found(values), values, atol=2e-6)
    wide = np.sort(np.random.default_rng(0).exponential(size=300) ** 3)
    np.testing.assert_allclose(found(wide)[-3:], wide[-3:], rtol=1e-4)  # 20 of 300 eigenvalues, the largest converge


def test_the_trace_is_unbiased():
    A = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    A = A + A.T
    keys = jax.random.split(jax.random.key(0), 400)
    estimates = jax.vmap(lambda key: curvature.trace(lambda v: A @ v, jnp.zeros(8), key))(keys)
    error = np.sqrt(2 * ((A**2).sum() - (np.diag(A) ** 2).sum()) / curvature.PROBES)
    assert abs(estimates.mean() - np.trace(A)) < 4 * error / 20
    np.testing.assert_allclose(estimates.std(), error, rtol=0.15)
    exact = curvature.trace(lambda v: jnp.arange(8.0) * v, jnp.zeros(8), keys[0])  # a diagonal has no other entries
    assert float(exact) == 28


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(C)(nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x)))


def test_running_statistics_are_constants_of_the_hessian(data):
    model = fd.Model.from_linen(Normalised(), (3,), statistics="average")
    sim = simulate(data, model=model)
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))  # statistics other than 0 and 1
    H = dense_hessian(sim, state.params["params"], state.params["batch_stats"])
    measured = sim.measure(state, "sharpness")
    np.testing.assert_allclose(measured["sharpness"], largest(H), rtol=1e-4, atol=1e-5 * largest(H)[0])


def test_sharpness_uses_the_test_set_of_the_round(data):
    """From round 1 on, two labels are swapped. The measures of predictions have the labels of the round, too."""
    sim = simulate(data.shifted(fd.shift.permute_labels(1, [(0, 2)])))
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    swapped = simulate(fd.FederatedData(data.x, data.y, data.sizes, data.x_test, 2 - data.y_test))
    want = largest(dense_hessian(swapped, state.params))
    assert abs(want[0] / largest(dense_hessian(sim, state.params))[0] - 1) > 0.01
    found = sim.measure(state, ("forgetting", "sharpness"))["sharpness"]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * want[0])


def test_sharpness_in_measured_rounds_and_sweeps(data):
    names = ("updates", "predictions", "labels", "sharpness", "local_sharpness")
    sim = simulate(data, names, devices=2, lanes=2, cohort_size=2, sampling="bernoulli")
    start = sim.init(jax.random.key(5))
    state, history = sim.run(start, 3, eval_every=0, progress=False, measure_every=2)
    assert "sharpness" not in history[0] and "sharpness" not in history[2]
    record = json.loads(json.dumps(history))[1]
    before, _ = sim.round_fn(start)
    _, info = sim.round_fn(before)
    assert record["sharpness"] == pytest.approx(largest(dense_hessian(sim, before.params)).tolist(), rel=1e-4, abs=1e-5)
    here = np.asarray(info["cohort"]) >= 0
    assert np.isfinite(np.asarray(info["local_sharpness"])).tolist() == here.tolist() and 0 < here.sum() < len(here)
    assert record["local_sharpness"] == pytest.approx(float(np.asarray(info["local_sharpness"])[here].mean()), rel=1e-5)
    assert fd.logs.scalars(record)["sharpness"] == record["sharpness"][0]
    plain = simulate(data, names)
    (run,) = plain.sweep(2, seeds=[5], eval_every=0, progress=False)
    alone = plain.run(plain.init(jax.random.key(5)), 2, eval_every=0, progress=False)[1]
    for name in ("sharpness", "hessian_trace", "local_sharpness"):
        assert run.history[1][name] == pytest.approx(alone[1][name], rel=1e-4, abs=1e-5)


def test_sharpness_needs_a_test_set_but_no_classifier(data):
    for name in ("sharpness", "local_sharpness"):
        with pytest.raises(ValueError, match=f"measure='{name}' needs a test set, got none: pass test="):
            simulate(fd.FederatedData.from_clients([data.client(0)]), name, cohort_size=1)
    x, y = data.x, data.x[:, :1]
    regression = fd.FederatedData.from_clients([(x, y)], test=(x, y))
    model = fd.Model(lambda key: jnp.ones((3, 1)), lambda w, x: x @ w, loss=lambda z, y: ((z - y) ** 2).sum(1))
    sim = simulate(regression, model=model, cohort_size=1)
    found = sim.measure(sim.init(jax.random.key(0)), "sharpness")["sharpness"]
    np.testing.assert_allclose(found, np.linalg.eigvalsh(2 * x.T @ x / len(x))[::-1], rtol=1e-5)  # d = 3 eigenvalues
