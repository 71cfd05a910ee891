"""Tests of curvature, of the plane through three models, and of distances between the clients' data."""

from __future__ import annotations

import itertools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.optimize import linprog
from scipy.spatial.distance import jensenshannon
from scipy.stats import wasserstein_distance

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

        return np.asarray(jax.jit(jax.hessian(loss))(theta))


def largest(H) -> np.ndarray:
    return np.linalg.eigvalsh(H)[::-1][:5]


@pytest.mark.parametrize(("x64", "devices"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.thorough)])
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
    error = np.sqrt(2 * ((H**2).sum() - (np.diag(H) ** 2).sum()) / 10)
    assert abs(measured["hessian_trace"] - np.trace(H)) < 4 * error


def test_eigenvalues_of_operators_without_a_gap():
    """A random start has a part in one direction of each eigenspace only, and then a new vector is needed."""

    def found(values):
        a = jnp.asarray(values, jnp.float32)
        return np.asarray(
            jax.jit(lambda a: curvature.lanczos(lambda v: a * v, jnp.zeros(len(a)), jax.random.key(0)))(a)
        )

    for values in ([0] * 6, [2] * 5, [0, 0, 0, 5, 5, 5], [-3, 1, 1, 4]):
        np.testing.assert_allclose(found(values), values, atol=2e-6)
    wide = np.sort(np.random.default_rng(0).exponential(size=300) ** 3)
    np.testing.assert_allclose(found(wide)[-3:], wide[-3:], rtol=1e-4)  # 20 of 300 eigenvalues, the largest converge


def test_the_trace_is_unbiased():
    A = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    A = A + A.T
    keys = jax.random.split(jax.random.key(0), 400)
    estimates = jax.jit(jax.vmap(lambda key: curvature.trace(lambda v: A @ v, jnp.zeros(8), key)))(keys)
    error = np.sqrt(2 * ((A**2).sum() - (np.diag(A) ** 2).sum()) / 10)
    assert abs(estimates.mean() - np.trace(A)) < 4 * error / 20
    np.testing.assert_allclose(estimates.std(), error, rtol=0.15)
    exact = curvature.trace(lambda v: jnp.arange(8.0) * v, jnp.zeros(8), keys[0])  # a diagonal has no other entries
    assert float(exact) == 28


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(C)(nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x)))


@pytest.mark.thorough
def test_running_statistics_are_constants_of_the_hessian(data):
    model = fd.Model.from_linen(Normalised(), (3,), statistics="average")
    sim = simulate(data, model=model)
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))  # statistics other than 0 and 1
    H = dense_hessian(sim, state.params["params"], state.params["batch_stats"])
    measured = sim.measure(state, "sharpness")
    np.testing.assert_allclose(measured["sharpness"], largest(H), rtol=1e-4, atol=1e-5 * largest(H)[0])


@pytest.mark.thorough
def test_sharpness_uses_the_test_set_of_an_evaluation(data):
    """From round 1 on, two labels are swapped."""
    sim = simulate(data.shifted(fd.shift.permute_labels(1, [(0, 2)])))
    first, _ = sim.round_fn(sim.init(jax.random.key(0)))
    found = sim.measure(first, ("forgetting", "sharpness"))["sharpness"]
    np.testing.assert_allclose(found, largest(dense_hessian(sim, first.params)), rtol=1e-4, atol=1e-5 * found[0])
    state, _ = sim.round_fn(first)
    swapped = simulate(fd.FederatedData(data.x, data.y, data.sizes, data.x_test, 2 - data.y_test))
    want = largest(dense_hessian(swapped, state.params))
    assert abs(want[0] / largest(dense_hessian(sim, state.params))[0] - 1) > 0.01
    found = sim.measure(state, ("forgetting", "sharpness"))["sharpness"]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * want[0])


@pytest.mark.thorough
def test_a_record_has_the_sharpness_of_the_model_whose_loss_it_has(data):
    """Also with a shift, whose test set is that of the last round, and after a round of a streamed data set."""
    for each, stream in ((data, True), (data.shifted(fd.shift.permute_labels(1, [(0, 2)])), False)):
        sim = simulate(each, ("sharpness",), stream=stream)
        state, history = sim.run(sim.init(jax.random.key(2)), 2, eval_every=1, progress=False)
        scores, measured = sim.evaluate(state), sim.measure(state, "sharpness")
        assert history[-1]["loss"] == pytest.approx(scores["loss"], rel=1e-6)
        assert history[-1]["sharpness"] == pytest.approx(measured["sharpness"].tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.thorough
def test_sharpness_in_measured_rounds_and_sweeps(data):
    names = ("updates", "predictions", "labels", "sharpness", "local_sharpness")
    sim = simulate(data, names, devices=2, lanes=2, cohort_size=2, sampling="bernoulli")
    start = sim.init(jax.random.key(5))
    state, history = sim.run(start, 3, eval_every=0, progress=False, measure_every=2)
    assert "sharpness" not in history[0] and "sharpness" not in history[2]
    record = json.loads(json.dumps(history))[1]
    before, _ = sim.round_fn(start)
    after, info = sim.round_fn(before)
    assert record["sharpness"] == pytest.approx(largest(dense_hessian(sim, after.params)).tolist(), rel=1e-4, abs=1e-5)
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


# --- the plane through three models -----------------------------------------------------------------------------------


def some_models(number):
    return [init(jax.random.key(seed)) for seed in range(number)]


def test_the_plane_has_the_losses_and_distances_of_its_models(data):
    sim, models = simulate(data, devices=2), some_models(3)
    plane = fd.measures.loss_plane(sim, dict(zip("abc", models, strict=True)), points=3, margin=0)
    flat = np.stack([ravel_pytree(model)[0] for model in models]).astype(float)
    for i in range(3):
        for j in range(3):
            apart = np.linalg.norm(plane.models[i] - plane.models[j])
            np.testing.assert_allclose(apart, np.linalg.norm(flat[i] - flat[j]), rtol=1e-5)
    assert plane.names == ("a", "b", "c") and plane.models[0].tolist() == [0, 0] and plane.models[1, 1] == 0
    # The middle of the grid is w_1 + x e_1 + y e_2, with e_1 and e_2 by Gram-Schmidt.
    e_1 = (flat[1] - flat[0]) / np.linalg.norm(flat[1] - flat[0])
    e_2 = (flat[2] - flat[0]) - (flat[2] - flat[0]) @ e_1 * e_1
    e_2 /= np.linalg.norm(e_2)
    unravel = ravel_pytree(models[0])[1]
    for row, column in ((1, 1), (2, 0), (0, 2)):
        place = flat[0] + plane.x[column] * e_1 + plane.y[row] * e_2
        want = sim.evaluate(sim.init(jax.random.key(0), unravel(jnp.asarray(place, jnp.float32))))
        assert plane.loss[row, column] == pytest.approx(want["loss"], rel=1e-5)
        assert plane.accuracy[row, column] == pytest.approx(want["accuracy"])


def test_the_plane_of_other_examples(data):
    sim, models = simulate(data), some_models(3)
    plane = fd.measures.loss_plane(sim, models, points=2, margin=0, examples=data.client(1))
    own = simulate(fd.FederatedData(data.x, data.y, data.sizes, *data.client(1)))
    assert plane.loss[0, 0] == pytest.approx(own.evaluate(own.init(jax.random.key(0), models[0]))["loss"], rel=1e-5)


def test_three_models_that_make_no_plane(data):
    sim, (a, b, c) = simulate(data), some_models(3)
    middle = jax.tree.map(lambda a, b: 0.25 * a + 0.75 * b, a, b)
    for states, message in (
        ([a, b], "states must be three models"),
        (sim.init(jax.random.key(0)), "states must be three models"),
        ([a, b, middle], "not lie on a line"),
        ([a, a, b], "not lie on a line"),
        ([a, b, {"hidden": c["hidden"]}], r"states\['model 3'\] must be shaped like the model's parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            fd.measures.loss_plane(sim, states)
    with pytest.raises(ValueError, match="points must be an integer >= 2"):
        fd.measures.loss_plane(sim, [a, b, c], points=1)
    with pytest.raises(ValueError, match="sim must be a Simulation"):
        fd.measures.loss_plane(data, [a, b, c])
    shifted = simulate(data.shifted(fd.shift.permute_labels(0, [(0, 2)])))
    with pytest.raises(ValueError, match="examples must be left out if the data are shifted"):
        fd.measures.loss_plane(shifted, [a, b, c], examples=data.client(0))


def test_the_plot_of_a_plane_marks_the_models(tmp_path):
    loss = np.linspace(0.5, 4, 12).reshape(3, 4)
    loss[0, 0] = np.nan
    corners = np.array([[0, 0], [2, 0], [1, 1]])
    plane = fd.measures.LossPlane(np.arange(4.0), np.arange(3.0), loss, None, corners, ("a", "b", "c"))
    axes = fd.plots.loss_plane(plane, tmp_path / "plane.png").axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[corner] for corner in corners.tolist()]
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c"] and "from a towards b" in axes.get_xlabel()
    assert axes.collections[0].get_array().min() == pytest.approx(0.5 + 3.5 / 11, rel=0.1)
    with pytest.raises(ValueError, match="at least 1 finite accuracy"):
        fd.plots.loss_plane(plane, key="accuracy")


def test_the_plot_of_sharpness_shows_the_largest_eigenvalue():
    history = [{"round": t, "sharpness": [3.0 * t, 1.0], "hessian_trace": 4.0, "local_sharpness": 2.0} for t in (1, 2)]
    whole, local, trace = fd.plots.sharpness(history).axes
    assert whole.lines[0].get_xydata().tolist() == [[1, 3], [2, 6]]
    assert local.lines[0].get_ydata().tolist() == [2, 2] and trace.lines[0].get_ydata().tolist() == [4, 4]


# --- distances between the clients' data ------------------------------------------------------------------------------

LABELS = [[0, 0, 1], [2, 2, 2, 1], [0, 1, 2, 3], [3]]
GROUND = np.array([[0, 2, 3, 4], [2, 0, 2, 3], [3, 2, 0, 1], [4, 3, 1, 0]])  # the labels do not lie on a line


def labelled() -> fd.FederatedData:
    rng = np.random.default_rng(0)
    return fd.FederatedData.from_clients([(rng.normal(size=(len(y), 2)), np.array(y)) for y in LABELS])


def mixes() -> tuple[np.ndarray, np.ndarray]:
    counts = np.array([np.bincount(y, minlength=4) for y in LABELS])
    return counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()


def moved(p, q, ground) -> float:
    """The earth mover's distance by the linear program of the textbook, with all C * C amounts."""
    C = len(p)
    sums = np.concatenate([np.kron(np.eye(C), np.ones(C)), np.kron(np.ones(C), np.eye(C))])
    return linprog(np.ravel(ground), A_eq=sums, b_eq=np.concatenate([p, q])).fun


def test_distances_of_labels_match_their_definitions():
    p, q = mixes()
    found = fd.measures.distances(labelled(), GROUND)
    definitions = {
        "hellinger": lambda p, q: np.linalg.norm(np.sqrt(p) - np.sqrt(q)) / np.sqrt(2),
        "jensen_shannon": lambda p, q: jensenshannon(p, q, base=2),
        "total_variation": lambda p, q: max(p[list(s)].sum() - q[list(s)].sum() for s in subsets(range(4))),
        "earth_mover": lambda p, q: moved(p, q, GROUND),
    }
    for name, distance in definitions.items():
        np.testing.assert_allclose(getattr(found, name), [distance(p_i, q) for p_i in p], rtol=1e-7, err_msg=name)
        of_pairs = [distance(a, b) for a, b in itertools.combinations(p, 2)]
        assert found.between[name] == pytest.approx(np.mean(of_pairs), rel=1e-7), name
    assert found.sliced_wasserstein is None and fd.measures.distances(labelled()).earth_mover is None


def subsets(values):
    return itertools.chain.from_iterable(itertools.combinations(values, n) for n in range(len(values) + 1))


def test_the_closed_forms_of_the_earth_movers_distance(monkeypatch):
    monkeypatch.setattr("fedjax_drift.measures.data_distance.transport", None)  # no linear program
    p, q = mixes()
    places = np.array([0.0, 5, -1, 2])
    for ground in (np.abs(np.subtract.outer(places, places)), 3 * (1 - np.eye(4))):
        found = fd.measures.distances(labelled(), ground).earth_mover
        np.testing.assert_allclose(found, [moved(p_i, q, ground) for p_i in p], rtol=1e-7)


def test_sliced_wasserstein_averages_exact_distances_of_projections():
    data = labelled()
    found = fd.measures.distances(data, embedding=data.x[:, :1]).sliced_wasserstein  # one direction, up to its sign
    parts = np.split(data.x[:, 0], np.cumsum(data.sizes)[:-1])
    np.testing.assert_allclose(found, [wasserstein_distance(part, data.x[:, 0]) for part in parts], rtol=1e-6)
    plane = fd.measures.distances(data, embedding=lambda x: 2 * x).sliced_wasserstein
    np.testing.assert_allclose(plane, 2 * fd.measures.distances(data, embedding=data.x).sliced_wasserstein, rtol=1e-6)
    shifted = data.x + np.where(np.repeat(np.arange(4), data.sizes) == 3, 100, 0)[:, None]  # by 100 sqrt(2)
    far = fd.measures.distances(data, embedding=shifted).sliced_wasserstein[3]
    share = 1 - data.sizes[3] / data.sizes.sum()
    assert far == pytest.approx(share * 100 * 2**0.5 * 2 / np.pi, rel=0.1)  # the mean of |cos| is 2 / pi


def test_means_over_many_pairs_use_some_of_them():
    y = np.arange(200) % 3
    data = fd.FederatedData(np.zeros((200, 1), np.float32), y, np.ones(200, int))
    apart = np.mean([a != b for a, b in itertools.combinations(y, 2)])
    assert fd.measures.distances(data, pairs=19_900).between["total_variation"] == pytest.approx(apart)
    assert fd.measures.distances(data, pairs=5000).between["total_variation"] == pytest.approx(apart, abs=0.03)
    different = fd.FederatedData(np.zeros((20, 1), np.float32), np.arange(20), np.ones(20, int))
    assert fd.measures.distances(different, pairs=150).between["total_variation"] == 1  # none is a client with itself
    alone = fd.FederatedData(data.x, y, [200])
    assert fd.measures.distances(alone).between == {} and fd.measures.distances(alone).hellinger.tolist() == [0]


def test_a_ground_distance_must_be_a_metric():
    data, wrong = labelled(), GROUND.copy()
    wrong[0, 3] = wrong[3, 0] = 9
    for ground, message in (
        (np.ones((3, 3)), r"shape \[4, 4\]"),
        (np.triu(GROUND), "symmetric"),
        (np.zeros((4, 4)), "positive numbers beside it"),
        (wrong, "detour over label"),
    ):
        with pytest.raises(ValueError, match=message):
            fd.measures.distances(data, ground)
    for embedding, message in ((data.x[:3], "one row for each of the 12"), (data.x * np.nan, "must be finite")):
        with pytest.raises(ValueError, match=message):
            fd.measures.distances(data, embedding=embedding)
    with pytest.raises(ValueError, match="label counts need"):
        fd.measures.distances(fd.FederatedData(data.x, data.x[:, 0], data.sizes))


def test_the_plot_of_a_federation_shows_label_distances():
    _, _, far, _ = fd.plots.federation(labelled()).axes
    found = fd.measures.distances(labelled())
    assert sum(bar.get_height() for bar in far.patches) == 4
    assert far.lines[0].get_xdata()[0] == np.median(found.jensen_shannon)
    assert f"Hellinger {found.hellinger.mean():.2f}" in far.get_xlabel().replace("\n", " ")
