"""Tests of every drift measure against NumPy. They also test that measuring does not change the rounds."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import thorough
from test_algorithms import small

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.devices.mesh import clients_mesh
from fedjax_drift.measures import drift
from fedjax_drift.testing import contract_simulation
from fedjax_drift.types import ClientResult

FEATURES, C, EPOCHS, LR = 5, 4, 3, 0.5
CLASSES = [[0], [1, 2], [0, 1, 2, 3], [2, 3], [1], [0, 3], [0, 1, 2]]  # the classes of each client
SIZES = [3, 10, 16, 7, 1, 12, 5]
ALL = drift.QUICK


def rows(rng, n, classes=range(C)):
    y = np.resize(list(classes), n).astype(np.int32)
    return (rng.normal(size=(n, FEATURES)) + y[:, None] * np.linspace(-1, 1, FEATURES)).astype(np.float32), y


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    rng = np.random.default_rng(0)
    clients = [rows(rng, n, classes) for n, classes in zip(SIZES, CLASSES, strict=True)]
    return fd.FederatedData.from_clients(clients, test=rows(rng, 23))


def softmax_regression() -> fd.Model:
    return fd.Model(lambda key: jax.random.normal(key, (FEATURES, C)), lambda w, x: x @ w)


MODEL = softmax_regression()  # simulations of the same model share their programs


def simulate(data, measure=(), algorithm=None, devices=1, **options) -> fd.Simulation:
    options = {"cohort_size": 4, "eval_batch_size": 5} | options
    options.setdefault("local", fd.LocalTraining(epochs=EPOCHS, batch_size=100, lr=LR))  # one step per epoch
    mesh = clients_mesh(jax.devices()[:devices])
    algorithm = algorithm or fd.algorithms.fedavg()
    return fd.Simulation(MODEL, data, algorithm, measure=measure, mesh=mesh, **options)


def log_softmax(z):
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def gradient(w, x, y):
    return x.T @ (np.exp(log_softmax(x @ w)) - np.eye(C)[y]) / len(x)


def square(a):
    return (a**2).sum()


def hsic_cka(X, Y):
    H = np.eye(len(X)) - 1 / len(X)
    K, L = H @ X @ X.T @ H, H @ Y @ Y.T @ H
    return (K * L).sum() / np.sqrt((K * K).sum() * (L * L).sum())


def class_accuracies(w, x, y):
    right = (x @ w).argmax(1) == y
    return np.array([right[y == c].mean() for c in range(C)])


def by_hand(data, w, cohort) -> dict[str, np.ndarray]:
    """Returns every measure of a FedAvg round with one step per epoch, computed in float64."""
    cuts = np.cumsum(data.sizes)[:-1]
    clients = list(zip(np.split(data.x.astype(float), cuts), np.split(data.y, cuts), strict=True))
    x_test, y_test = data.x_test.astype(float), data.y_test
    w = np.asarray(w, float)
    path = {}  # client -> its local models after every epoch
    for i in cohort:
        path[i] = [w]
        for _ in range(EPOCHS):
            path[i].append(path[i][-1] - LR * gradient(path[i][-1], *clients[i]))
        path[i] = path[i][1:]
    w_S = np.average([path[i][-1] for i in cohort], 0, weights=[data.sizes[i] for i in cohort])
    mean_update = w_S - w

    g = np.array([gradient(w, *rows) for rows in clients])
    p = data.sizes / data.sizes.sum()
    grad_f = gradient(w, data.x.astype(float), data.y)
    want = {
        "period_drift": square(np.average(g[cohort], 0, weights=data.sizes[cohort]) - grad_f),
        "period_drift_uniform": square(g[cohort].mean(0) - grad_f),
        "dissimilarity": np.sqrt(sum(p_i * square(g_i) for p_i, g_i in zip(p, g, strict=True)) / square(grad_f)),
        "gradient_variance": sum(p_i * square(g_i - grad_f) for p_i, g_i in zip(p, g, strict=True)),
        "gradient_norm": np.sqrt(square(grad_f)),
        "label_mix": np.bincount(np.concatenate([clients[i][1] for i in cohort]), minlength=C),
    }
    want["label_mix"] = want["label_mix"] / want["label_mix"].sum()

    def epochs(value):
        return np.array([[value(theta, i) for theta in path[i]] for i in cohort])

    def kl(theta):
        log_p, log_q = log_softmax(x_test @ w), log_softmax(x_test @ theta)
        return (np.exp(log_p) * (log_p - log_q)).sum(1).mean()

    def cosine(D):
        return (D * mean_update).sum() / np.sqrt(square(D) * square(mean_update))

    want["update_norm"] = epochs(lambda theta, i: np.sqrt(square(theta - w)))
    want["update_cosine"] = epochs(lambda theta, i: cosine(theta - w))
    want["client_drift"] = epochs(lambda theta, i: square(gradient(theta, *clients[i]) - gradient(w_S, *clients[i])))
    want["cka"] = epochs(lambda theta, i: hsic_cka(x_test @ theta, x_test @ w))
    want["kl"] = epochs(lambda theta, i: kl(theta))
    want["confidence"] = epochs(lambda theta, i: np.exp(log_softmax(x_test @ theta)).max(1).mean())
    for name, here in (("lp_present", True), ("lp_absent", False)):
        ratios = []
        for i in cohort:
            local, whole = (class_accuracies(v, x_test, y_test) for v in (path[i][-1], w))
            counted = [c for c in range(C) if (c in clients[i][1]) == here and whole[c] > 0]
            ratios.append(np.mean([local[c] / whole[c] for c in counted]) if counted else np.nan)
        want[name] = np.array(ratios)
    for name, here in (("accuracy_present", True), ("accuracy_absent", False)):
        classes = {i: [c for c in set(y_test) if (c in clients[i][1]) == here] for i in cohort}
        want[name] = epochs(
            lambda theta, i, classes=classes: (
                np.mean([class_accuracies(theta, x_test, y_test)[c] for c in classes[i]]) if classes[i] else np.nan
            )
        )
    return want


def check(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(np.asarray(found[name]), value, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def measured(data) -> fd.Simulation:
    return simulate(data, measure=ALL)


def test_every_measure_matches_numpy(data, measured):
    sim = measured
    state = sim.init(jax.random.key(1))
    cohort = [4, 2, 0, 5]
    want = by_hand(data, state.params, cohort)
    check(sim.measure(state, cohort=cohort), want)
    # The special cases occur: a client that has all classes, and a class that the global model never predicts
    # correctly.
    assert np.isnan(want["lp_absent"]).tolist() == [False, True, False, False]
    assert 0 in class_accuracies(np.asarray(state.params), data.x_test, data.y_test)
    assert 0 < np.nanmin(want["lp_absent"]) < 1


def test_measures_of_absent_clients_are_nan_and_the_others_do_not_change(data):
    sim = simulate(data, measure=ALL, sampling="bernoulli", lanes=3, devices=2)
    seen = set()
    for seed in range(3):
        state = sim.init(jax.random.key(seed))
        _, info = sim.round_fn(state)
        here = np.asarray(info["cohort"]) >= 0
        want = by_hand(data, state.params, np.asarray(info["cohort"])[here].tolist())
        found = {name: np.asarray(info[name]) for name in want}
        per_client = [name for name, value in found.items() if value.ndim and name != "label_mix"]
        assert all(np.isnan(found[name][~here]).all() for name in per_client)
        check(found | {name: found[name][here] for name in per_client}, want)
        seen.add(int(here.sum()))
    assert len(seen) > 1


def test_measured_clients_train_as_in_the_round(data):
    # With minibatches, momentum and shuffling there is no closed form. But with a single client, the new global model
    # of FedAvg is the local model of this client.
    sim = simulate(data, local=fd.LocalTraining(epochs=2, batch_size=3, lr=0.1, momentum=0.5), cohort_size=3)
    state = sim.init(jax.random.key(0))
    cohort = [1, 5, 2]
    D = np.array([sim.round_fn(state, [i])[0].params - state.params for i in cohort]).reshape(3, -1)
    mean = np.average(D, 0, weights=data.sizes[cohort])
    found = sim.measure(state, "updates", cohort)
    np.testing.assert_allclose(found["update_norm"][:, -1], np.linalg.norm(D, axis=1), rtol=1e-4)
    cosine = D @ mean / np.linalg.norm(D, axis=1) / np.linalg.norm(mean)
    np.testing.assert_allclose(found["update_cosine"][:, -1], cosine, rtol=1e-4)


def test_updates_are_measured_from_the_model_that_was_sent(data):
    # FedEve sends w - M. With a single client the gain is 1, so the next M is start - theta_i.
    sim = simulate(data, algorithm=fd.algorithms.fedeve())
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    assert float(jnp.linalg.norm(state.server.M)) > 0.1
    (found,) = sim.measure(state, "updates", [5])["update_norm"]
    after, _ = sim.round_fn(state, [5])
    assert float(found[-1]) == pytest.approx(float(jnp.linalg.norm(after.server.M)), rel=1e-4)


@pytest.mark.thorough
def test_period_drift_is_zero_if_all_clients_take_part(data):
    # With equal weights for unequal clients, as printed in the paper, it is not.
    equal = fd.FederatedData.from_clients([rows(np.random.default_rng(0), 9, [i % C]) for i in range(7)])
    for clients, dtype in ((equal, np.float32), (data, np.float32), (data, np.float64)):
        with jax.enable_x64(dtype == np.float64):
            sim = simulate(clients, cohort_size=7, lanes=2, devices=2)
            found = sim.measure(sim.init(jax.random.key(0)), "gradients")
        assert found["period_drift"].dtype == dtype
        assert float(found["period_drift"]) == 0 and float(found["gradient_variance"]) > 0.01
        assert (float(found["period_drift_uniform"]) == 0) == (clients is equal)


@pytest.mark.thorough
def test_measures_use_the_redistributed_examples_of_the_round(data):
    # The cohort has 15 examples, so each client gets 5. So the mean of the clients' gradients is the gradient of the
    # pooled examples.
    cohort = [0, 3, 6]
    cuts = np.cumsum(data.sizes)[:-1]
    x, y = (np.concatenate([np.split(a, cuts)[i] for i in cohort]) for a in (data.x, data.y))
    sim = simulate(data.redealt(), cohort_size=3)
    state = sim.init(jax.random.key(0))
    found = sim.measure(state, ("gradients", "labels"), cohort)
    w = np.asarray(state.params, float)
    np.testing.assert_allclose(found["label_mix"], np.bincount(y, minlength=C) / 15, rtol=1e-5)
    pooled = square(gradient(w, x, y) - gradient(w, data.x, data.y))
    assert float(found["period_drift"]) == pytest.approx(pooled, rel=1e-4)
    assert float(found["period_drift_uniform"]) == pytest.approx(pooled, rel=1e-4)
    own = by_hand(data, w, cohort)["period_drift_uniform"]
    assert abs(own / pooled - 1) > 0.02  # the mean gradient of their own examples is another one


@pytest.mark.thorough
def test_measures_of_clients_without_redistributed_examples_are_nan(data):
    # Each of the 4 classes goes to a single client. So at least 3 of the 7 clients get no example.
    sim = simulate(data.redealt(1e-3), cohort_size=7)
    norms = np.asarray(sim.measure(sim.init(jax.random.key(0)), "updates")["update_norm"])
    absent = np.isnan(norms)
    assert (absent.all(1) == absent.any(1)).all() and 3 <= absent.all(1).sum() < 7
    assert (norms[~absent.any(1)] > 0).all()


# one of each kind: with client states, with an evaluation in the round, with personal models
MEASURED = ("fedavg", "scaffold", "fedgvr", "ditto", "fedrep")


@pytest.mark.parametrize("name", [name if name in MEASURED else thorough(name) for name in ALGORITHMS])
def test_every_algorithm_can_be_measured(name):
    sim = contract_simulation(small(ALGORITHMS[name]))
    found = jax.eval_shape(lambda: sim.measure(sim.init(jax.random.key(0)), "updates"))  # compiling would take long
    assert found["update_norm"].shape == found["update_cosine"].shape
    assert found["update_norm"].shape[0] == 3 and found["update_norm"].shape[1] in (1, 2)  # FedRep measures one epoch


def test_measuring_does_not_change_the_rounds(data, measured):
    plain = simulate(data)
    state = plain.init(jax.random.key(0))
    text = [
        sim.executor.programs.lower("round", (), state, sim.setup.arrays, None).as_text() for sim in (plain, measured)
    ]
    assert text[0] == text[1]
    a, b = state, measured.init(jax.random.key(0))
    for _ in range(2):
        (a, info), (b, more) = plain.round_fn(a), measured.round_fn(b)
    jax.tree.map(np.testing.assert_array_equal, (a.server, a.clients), (b.server, b.clients))
    jax.tree.map(np.testing.assert_array_equal, info, {name: more[name] for name in info})
    assert len(more) > len(info)


def test_the_history_contains_the_measures(data, measured):
    sim = measured
    state, history = sim.run(sim.init(jax.random.key(0)), 4, eval_every=0, progress=False, measure_every=2)
    keys = set(by_hand(data, state.params, [0]))
    assert [keys & record.keys() for record in history] == [set(), keys, set(), keys]
    record = json.loads(json.dumps(history))[1]
    assert len(record["kl"]) == len(record["client_drift"]) == EPOCHS and len(record["label_mix"]) == C
    assert isinstance(record["period_drift"], float) and isinstance(record["lp_present"], float)
    # The cohort of the second round is measured again, from the state before this round.
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    found = sim.measure(state)
    assert record["update_norm"] == pytest.approx(np.asarray(found["update_norm"]).mean(0), rel=1e-5)
    assert record["lp_absent"] == pytest.approx(np.nanmean(found["lp_absent"]), rel=1e-5)
    assert record["label_mix"] == pytest.approx(np.asarray(found["label_mix"]), rel=1e-6)


@pytest.mark.thorough
def test_measures_of_a_client_that_diverges_are_nan():
    rng = np.random.default_rng(0)
    x, y = rows(rng, 6)
    clients = [rows(rng, 8), (x * np.float32(1e30), y), rows(rng, 4, [1, 2])]
    data = fd.FederatedData.from_clients(clients, test=rows(rng, 9))
    local = fd.LocalTraining(epochs=3, lr=1e10)  # the updates of the other clients are large, but finite
    sim = simulate(data, cohort_size=3, local=local, on_nonfinite="drop_client")
    state = sim.init(jax.random.key(0))
    found = sim.measure(state)
    for name in ("update_norm", "update_cosine", "client_drift", "cka", "kl", "lp_present"):
        assert np.isfinite(found[name]).reshape(3, -1).all(1).tolist() == [True, False, True], name
        assert np.isnan(found[name][1]).all(), name
    alone = sim.measure(state, "updates", [0, 2])  # a dropped client does not change the mean update
    np.testing.assert_allclose(found["update_cosine"][::2], alone["update_cosine"], rtol=1e-5)

    kept = simulate(data, cohort_size=3, local=local).measure(state, "updates")
    assert np.isnan(kept["update_cosine"]).all()  # the mean update is not finite
    np.testing.assert_allclose(kept["update_norm"], found["update_norm"], rtol=1e-5)


def test_linear_cka_is_invariant_to_rotation_and_scale():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 4)).astype(np.float32)
    Q, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    assert float(drift.linear_cka(X, 3 * X @ Q + 1)) == pytest.approx(1, abs=1e-5)
    assert float(drift.linear_cka(X, np.ones((50, 2)))) == 0
    mask = np.arange(50) < 30
    garbage = np.where(mask[:, None], X, 1e6)
    assert float(drift.linear_cka(garbage, X**3, mask)) == pytest.approx(hsic_cka(X[:30], X[:30] ** 3), rel=1e-4)


def test_unknown_names_and_missing_data_are_errors(data):
    for bad, message in [("update", "did you mean 'updates'"), (None, "got None"), (("kl",), "one of")]:
        with pytest.raises(ValueError, match=message):
            simulate(data, measure=bad)
    sim = simulate(data)
    with pytest.raises(ValueError, match="did you mean 'gradients'"):
        sim.measure(sim.init(jax.random.key(0)), "gradient")

    bare = fd.FederatedData.from_clients([rows(np.random.default_rng(0), 5)])
    tokens = np.zeros((4, 6), np.int32)
    sequences = fd.FederatedData.from_clients([(tokens, tokens)], test=(tokens, tokens))
    per_token = fd.Model(lambda key: jnp.zeros((3, 3)), lambda w, x: w[x])
    for name in ("predictions", "forgetting"):
        with pytest.raises(ValueError, match="pass test="):
            simulate(bare, name, cohort_size=1)
    for name in ("predictions", "forgetting", "labels"):
        with pytest.raises(ValueError, match="one integer label per example"):
            fd.Simulation(per_token, sequences, fd.algorithms.fedavg(), cohort_size=1, measure=name)
    sim = fd.Simulation(per_token, sequences, fd.algorithms.fedavg(), cohort_size=1)
    assert sim.measure(sim.init(jax.random.key(0)), ("updates", "gradients")).keys() >= {"update_norm", "period_drift"}


def test_updates_cannot_be_measured_if_the_algorithm_does_not_call_local_train(data):
    def client_update(server, client, work):
        return ClientResult(jnp.zeros_like(server.params), jnp.ones(()), client, {})

    sim = simulate(data, algorithm=fd.algorithms.fedavg()._replace(client_update=client_update, name="lazy"))
    state = sim.init(jax.random.key(0))
    with pytest.raises(ValueError, match="client_update of lazy must pass on what local.train returned"):
        sim.measure(state, "updates")
    assert sim.measure(state, "labels")["label_mix"].shape == (C,)  # "labels" only counts examples


@pytest.mark.thorough
def test_an_algorithm_may_return_its_own_metrics(data):
    """The measures do not depend on the metrics that an algorithm returns."""
    plain = fd.algorithms.fedavg()

    def client_update(server, client, work):
        result = plain.client_update(server, client, work)
        return result._replace(metrics=dataclasses.replace(result.metrics, metrics={"steps_done": work.num_steps}))

    quiet = plain._replace(client_update=client_update)
    sims = [simulate(data, algorithm=algorithm) for algorithm in (plain, quiet)]
    states = [sim.init(jax.random.key(0)) for sim in sims]
    one, other = (sim.measure(state, ("updates", "gradients")) for sim, state in zip(sims, states, strict=True))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    _, info = simulate(data, "updates", quiet).round_fn(states[1])
    assert {"steps_done", "update_norm"} <= set(info) and "loss" not in info


@fd.measures.recorded
def moved(scale: float = 1.0) -> fd.measures.Measure:
    """A user's own measure, which uses every function of a measure."""

    def again(work, mean):
        n = work.size

        return lambda seen: {"to_mean": scale * n * jnp.linalg.norm(seen.theta - mean.theta)}

    return fd.measures.Measure(
        "moved",
        epoch=lambda seen: {"moved": scale * jnp.linalg.norm(seen.update), "hidden": seen.work.size},
        client=lambda seen, measured: {"moved": measured["moved"][-1], "start": jnp.linalg.norm(seen.start)},
        update=lambda D, mean: {"to_mean_update": scale * jnp.linalg.norm(D - mean)},
        again=again,
        cohort=lambda cohort: {"examples": cohort.sum(lambda work: work.size), "w": jnp.linalg.norm(cohort.params)},
        model=lambda model: {"after": jnp.linalg.norm(model.params)},
    )


def test_a_measure_of_ones_own(data) -> None:
    sim = simulate(data, [moved(2.0), "updates"])
    state = sim.init(jax.random.key(0))
    after, info = sim.round_fn(state)
    plain, _ = simulate(data).round_fn(state)
    np.testing.assert_array_equal(after.params, plain.params)
    last = np.asarray(info["update_norm"])[:, -1]
    np.testing.assert_allclose(info["moved"], 2 * last, rtol=1e-6)
    assert int(info["examples"]) == int(info["size"].sum())
    np.testing.assert_allclose([info["w"], *info["start"]], [np.linalg.norm(state.params)] * 5, rtol=1e-6)
    np.testing.assert_allclose(info["after"], np.linalg.norm(after.params), rtol=1e-6)
    cosine, mean = np.asarray(info["update_cosine"])[:, -1], np.linalg.norm(after.params - state.params)
    np.testing.assert_allclose(
        np.asarray(info["to_mean_update"])[:, -1] ** 2 / 4, last**2 + mean**2 - 2 * last * mean * cosine, rtol=1e-4
    )
    to_mean = np.asarray(info["to_mean"])[:, -1] / np.asarray(info["size"])
    np.testing.assert_allclose(to_mean, np.asarray(info["to_mean_update"])[:, -1], rtol=1e-5)
    _, history = sim.run(state, 1, progress=False)
    assert history[0]["moved"] == pytest.approx(float(info["moved"].mean()), rel=1e-6)


def test_equal_measures_share_a_program(data) -> None:
    model, sizes = softmax_regression(), []
    options = {"cohort_size": 4, "mesh": clients_mesh(jax.devices()[:1])}
    for scale in (3.0, 3.0, 4.0):
        sim = fd.Simulation(model, data, fd.algorithms.fedavg(), measure=moved(scale), **options)
        sim.round_fn(sim.init(jax.random.key(0)))
        sizes.append(sim.executor.programs.compiled.round._cache_size())
    assert sizes == [1, 1, 2]


def test_bad_measures_are_refused(data) -> None:
    def clashing(seen):
        return {"update_norm": 0}

    for measure_, message in (
        ([moved(), moved(2.0)], "measures must have different names, got 'moved' twice"),
        (moved, "measure must be one of 'updates'"),
        (fd.measures.Measure("mine", epoch=3), "Measure.epoch must be a function"),
        (fd.measures.Measure("mine", needs=fd.measures.Needs(test=24)), "needs at least 24 test examples, got 23"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(data, measure_)
    for measure_, message in (
        (["updates", fd.measures.Measure("mine", epoch=clashing)], "different names, got 'update_norm' twice"),
        (
            fd.measures.Measure("mine", epoch=lambda seen: 3),
            "epoch of the measure 'mine' must return a dict of arrays, got 3",
        ),
        (
            fd.measures.Measure("mine", again=lambda work, mean: lambda seen: 3),
            "again of the measure 'mine' must return",
        ),
        (fd.measures.Measure("mine", cohort=lambda cohort: {"loss": 1.0}), "loss"),
    ):
        sim = simulate(data, measure_)
        with pytest.raises(ValueError, match=message):
            sim.round_fn(sim.init(jax.random.key(0)))
