"""Tests of the evaluation of clients that have never taken part, before and after they train.

The truth is a linear model in NumPy, with full batches, so that the order of the examples does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small import assert_close, assert_equal, random_clients, thorough
from test_personal import Normed

import fedjax_drift as fd
from fedjax_drift.measures import personal

A = fd.algorithms
SIZES, TESTS, FEATURES, CLASSES = [3, 10, 7, 25, 1, 16, 12, 9], [4, 2, 0, 9, 2, 3, 5, 1], 6, 4
OLD, NEW, STEPS, RATE = range(5), range(5, 8), 4, 0.5 * 0.9  # eta_t of round 1
W = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    clients = random_clients([*SIZES, *TESTS], FEATURES, CLASSES)
    return fd.FederatedData.from_clients(clients[: len(SIZES)], test_clients=clients[len(SIZES) :])


def simulate(data: fd.FederatedData, algorithm: fd.Algorithm, model: fd.Model | None = None, **options: Any) -> Any:
    """A simulation, and a state of round 1. The batches of every client are full."""
    local = fd.LocalTraining(epochs=2, batch_size=50, lr=0.5, lr_decay=0.9)
    options = {"mesh": fd.clients_mesh(jax.devices()[:1]), "local": local, "eval_batch_size": 4} | options
    sim = fd.Simulation(model or fd.models.linear((FEATURES,), CLASSES), data, algorithm, cohort_size=3, **options)
    if model is not None:
        return sim, sim.round_fn(sim.init(jax.random.key(0)))[0]
    params = {"classifier": {"dense": {name: np.float32(w) for name, w in random_model(0).items()}}}
    return sim, sim.init(jax.random.key(0), params)._replace(round=np.int32(1))  # a round would take longer to compile


def random_model(seed: int) -> W:
    rng = np.random.default_rng(seed)
    return {"kernel": 0.5 * rng.normal(size=(FEATURES, CLASSES)), "bias": 0.5 * rng.normal(size=CLASSES)}


# --- NumPy ------------------------------------------------------------------------------------------------------------


def scored(w: W, x: np.ndarray, y: np.ndarray) -> tuple[float, float, W]:
    """The mean loss, the accuracy, and the gradient of the loss."""
    logits = x @ w["kernel"] + w["bias"]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    g = (p - np.eye(CLASSES)[y]) / len(y)
    right = logits.argmax(1) == y
    return -np.log(p[np.arange(len(y)), y]).mean(), right.mean(), {"kernel": x.T @ g, "bias": g.sum(0)}


def moved(a: W, factor: float, b: W) -> W:
    return {name: a[name] + factor * b[name] for name in a}


Gradient = Callable[[W], W]


def plain(w: W, g: Gradient) -> W:
    theta = w
    for _ in range(STEPS):
        theta = moved(theta, -RATE, g(theta))
    return theta


def inner(w: W, g: Gradient) -> W:
    theta = w
    for _ in range(STEPS):
        theta = moved(theta, -0.3, g(theta))
    return theta


def head(w: W, g: Gradient) -> W:
    theta = dict(w)
    for _ in range(STEPS):
        theta["bias"] = theta["bias"] - RATE * g(theta)["bias"]
    return theta


def near(w: W, g: Gradient) -> W:
    v = w
    for _ in range(STEPS):
        v = moved(v, -RATE, moved(g(v), 0.7, moved(v, -1, w)))
    return v


def envelope(w: W, g: Gradient) -> W:
    w_i = x = w
    for _ in range(STEPS):
        for _ in range(5):
            x = moved(x, -0.1, moved(g(x), 2.0, moved(x, -1, w_i)))
        w_i = moved(w_i, -RATE * 2.0, moved(w_i, -1, x))
    return x


def mixed(w: W, g: Gradient) -> W:
    v = theta = w
    for _ in range(STEPS):
        v, theta = moved(v, -RATE * 0.25, g(mix(v, theta))), moved(theta, -RATE, g(theta))
    return mix(v, w)


def mix(v: W, theta: W) -> W:
    return {name: 0.25 * v[name] + 0.75 * theta[name] for name in v}


TRUTHS: dict[str, tuple[Callable, Callable[[W, Gradient], W]]] = {
    "fedavg": (A.fedavg, plain),
    "scaffold": (A.scaffold, plain),
    "perfedavg": (lambda: A.perfedavg(alpha=0.3), inner),
    "fedrep": (lambda: A.fedrep(personal="bias"), head),
    "fedper": (lambda: A.fedper(personal="bias", new_clients="mean"), head),
    "fedbabu": (lambda: A.fedbabu(personal="bias"), plain),
    "ditto": (lambda: A.ditto(lam=0.7, personal_epochs=3), near),
    "pfedme": (lambda: A.pfedme(lam=2.0), envelope),
    "apfl": (lambda: A.apfl(alpha=0.25), mixed),
    "compressed": (lambda: fd.compression.compressed(A.perfedavg(alpha=0.3), fd.compression.none()), inner),
}
CORE = ("perfedavg", "fedrep", "ditto")


@pytest.mark.parametrize("name", [name if name in CORE else thorough(name) for name in TRUTHS])
def test_a_new_client_does_what_the_algorithm_says(data, name) -> None:
    factory, after = TRUTHS[name]
    sim, state = simulate(data.only(OLD), factory())
    found, before = sim.evaluate_new(state, data.only(NEW), STEPS), jax.tree.map(np.array, state.server)
    w = jax.tree.map(np.asarray, state.params["classifier"]["dense"])
    for c, i in enumerate(NEW):
        model = after(w, lambda theta, i=i: scored(theta, *data.client(i))[2])
        for prefix, each in (("", w), ("personal_", model)):
            loss, accuracy, _ = scored(each, *data.examples(i, test=True))
            np.testing.assert_allclose(found[f"{prefix}loss"][c], loss, rtol=2e-5)
            np.testing.assert_allclose(found[f"{prefix}accuracy"][c], accuracy, rtol=1e-6)
    assert_equal(before, state.server)
    assert fd.personal.summary(found["personal_accuracy"])["clients"] == len(NEW)


@pytest.mark.thorough
def test_a_new_client_of_ifca_trains_the_model_that_fits_it_best(data) -> None:
    models = [random_model(seed) for seed in range(3)]
    first = [{"classifier": {"dense": jax.tree.map(np.float32, model)}} for model in models]
    sim, state = simulate(data.only(OLD), A.ifca(first))
    found, chosen = sim.evaluate_new(state, data.only(NEW), STEPS), []
    for c, i in enumerate(NEW):
        x, y = data.client(i)
        chosen.append(int(np.argmin([scored(model, x, y)[0] for model in models])))
        best = models[chosen[-1]]
        model = plain(best, lambda theta, x=x, y=y: scored(theta, x, y)[2])
        for prefix, each in (("", best), ("personal_", model)):
            want = scored(each, *data.examples(i, test=True))[0]
            np.testing.assert_allclose(found[f"{prefix}loss"][c], want, rtol=2e-5)
    assert len(set(chosen)) > 1


# --- what else determines the scores ----------------------------------------------------------------------------------


def test_plain_training_of_new_clients_is_fine_tuning(data) -> None:
    """The same clients with the same keys. Another program may round differently."""
    local = fd.LocalTraining(epochs=3, batch_size=4, lr=0.2, momentum=0.5)
    sim, state = simulate(data, A.scaffold())
    assert_close(sim.evaluate_new(state, data, local), sim.evaluate_clients(state, local))
    first = sim.evaluate_new(state, data, 3)
    assert_equal(first, sim.evaluate_new(state, data, fd.LocalTraining(steps=3, batch_size=50, lr=0.5, lr_decay=0.9)))
    # No examples: the mean of nothing. With more steps: other scores.
    assert np.isnan(first["loss"]).tolist() == [n == 0 for n in TESTS]
    assert (first["personal_loss"] != sim.evaluate_new(state, data, 4)["personal_loss"]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("kept", ["average", "local", "frozen"])
def test_new_clients_with_running_statistics(data, kept) -> None:
    model, local = fd.Model.from_linen(Normed(), (FEATURES,), statistics=kept), fd.LocalTraining(batch_size=4, lr=0.2)
    sim, state = simulate(data, A.fedavg(), model)
    with_statistics = sim.evaluate_new(state, data, local)
    if kept != "local":  # there, a client that has taken part has its own statistics
        assert_close(with_statistics, sim.evaluate_clients(state, local))
    sim, state = simulate(data, A.fedbn(), model, local=local)
    scores = sim.evaluate_new(state, data.only(NEW), 5)
    assert np.isfinite(scores["personal_loss"]).all() and (scores["loss"] != scores["personal_loss"]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("where", [{"lanes": 3}, {"stream": True}, {"shard_data": True}, {"bank": "host"}])
def test_scores_do_not_depend_on_the_placement(data, monkeypatch, where) -> None:
    sim, state = simulate(data.only(OLD), A.ditto())
    expected = sim.evaluate_new(state._replace(round=np.int32("bank" not in where)), data, 5)
    monkeypatch.setattr(personal, "CHUNK", 3)  # the last of three chunks has one padding client
    mesh = fd.clients_mesh(jax.devices()[:2])
    sim, state = simulate(data.only(OLD), A.ditto(), mesh=mesh, **where)
    state = state._replace(round=np.int32(0)) if "bank" in where else state  # that of the client states
    found = sim.evaluate_new(state, data, 5)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.thorough
def test_all_clients_are_evaluated_in_one_program(data, monkeypatch, caplog) -> None:
    """Before and after their training, in three chunks, and for another state and another learning rate."""
    monkeypatch.setattr(personal, "CHUNK", 3)
    with jax.log_compiles():
        for lr in (0.5, 0.3):
            sim, state = simulate(data.only(OLD), A.ditto(lam=0.3), local=fd.LocalTraining(batch_size=7, lr=lr))
            sim.evaluate_new(state, data, 6)
            sim.evaluate_new(state._replace(round=np.int32(2)), data, 6)
    compiled = [r.message for r in caplog.records if "Finished XLA compilation of jit(new_scores)" in r.getMessage()]
    assert len(compiled) == 1


@pytest.mark.thorough
def test_pairs_are_split(data) -> None:
    sim, state = simulate(data.only(OLD), A.fedavg())
    pairs = [data.client(i) for i in NEW]
    split = fd.FederatedData.from_clients(pairs).with_validation(0.2)
    assert_equal(sim.evaluate_new(state, pairs, 2), sim.evaluate_new(state, split, 2))
    assert split.test_sizes.tolist() == [3, 2, 2]


def test_some_clients_of_a_federation(data) -> None:
    some = data.only([6, 1, 2])
    assert some.sizes.tolist() == [12, 10, 7] and some.test_sizes.tolist() == [5, 2, 0]
    for new, old in enumerate([6, 1, 2]):
        assert_equal(some.client(new), data.client(old))
        assert_equal(some.examples(new, test=True), data.examples(old, test=True))
    pair = data.client(0)
    named = fd.FederatedData.from_clients({name: pair for name in "abc"}, test=pair).only(["c", "a"])
    assert named.client_names == ("c", "a") and len(named.x_test) == 3 and named.test_sizes is None
    for wrong in ([], [1, 1]):
        with pytest.raises(ValueError, match="clients must be different ids or names, at least one"):
            data.only(wrong)
    with pytest.raises(ValueError, match=r"client must be in 0..7, got 8"):
        data.only([8])


def test_bad_input(data) -> None:
    sim, state = simulate(data.only(OLD), A.pfedme())
    images = fd.FederatedData.from_clients([(np.zeros((2, 6), np.uint8), np.array([0, 1]))], mean=0, std=1)
    for clients, steps, message in (
        (data, 0, "steps must be an integer >= 1, got 0: pass a number of local steps, or a fd.LocalTraining"),
        (fd.FederatedData(data.x, data.y, data.sizes), 1, "clients must have test examples of each client: build"),
        (images.only([0]).with_validation(0.5), 1, "clients must have the mean, the std and the dtype"),
        ([(data.x[:5, :3], data.y[:5])], 1, r"model"),
        (data, fd.LocalTraining(momentum=0.5), "pfedme needs plain local SGD"),
    ):
        with pytest.raises(ValueError, match=message):
            sim.evaluate_new(state, clients, steps)
