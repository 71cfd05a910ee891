"""Tests of the evaluation of each client on its own test examples, and of data with validation examples.

The evaluated models are the global model and the personal models, before and after fine-tuning.
"""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from flax import linen as nn
from small import random_clients

import fedjax_drift as fd
from fedjax_drift.measures import personal

pytestmark = pytest.mark.thorough

SIZES = [3, 10, 7, 25, 1, 16, 12, 30, 5, 8] * 2  # numbers of training examples of 20 clients
TESTS = [4, 0, 1, 9, 2, 3, 0, 17, 1, 1] * 2  # numbers of their test examples
CLASSES = 4


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    clients = random_clients([*SIZES, *TESTS], 6, CLASSES)
    return fd.FederatedData.from_clients(clients[: len(SIZES)], test_clients=clients[len(SIZES) :])


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(CLASSES)(nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x)))


def simulate(data, devices=2, algorithm=None, **options) -> fd.Simulation:
    mesh = fd.clients_mesh(jax.devices()[:devices])
    options = {"local": fd.LocalTraining(batch_size=50, lr=0.5, lr_decay=0.9), "eval_batch_size": 6} | options
    model = options.pop("model", fd.models.linear((6,), CLASSES))
    return fd.Simulation(model, data, algorithm or fd.algorithms.fedavg(), mesh=mesh, cohort_size=5, **options)


def scored(params, x, y) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the loss and the correctness of each example, and the factor p - onehot(y) of its gradient."""
    logits = x @ params["kernel"] + params["bias"]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return -np.log(p[np.arange(len(y)), y]), logits.argmax(1) == y, p - np.eye(CLASSES)[y]


def test_one_step_of_fine_tuning_matches_numpy(data, monkeypatch) -> None:
    monkeypatch.setattr(personal, "CHUNK", 8)  # three chunks; the last one has 4 padding clients
    sim = simulate(data)
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    w = jax.tree.map(np.asarray, state.params["classifier"]["dense"])
    expected: dict[str, list[float]] = {"loss": [], "accuracy": [], "personal_loss": [], "personal_accuracy": []}
    ends = np.cumsum(TESTS)
    for i, (end, n) in enumerate(zip(ends, TESTS, strict=True)):
        x, y = data.client(i)
        g = scored(w, x, y)[2]
        theta = {"kernel": w["kernel"] - 0.45 * x.T @ g / len(x), "bias": w["bias"] - 0.45 * g.mean(0)}
        own = slice(end - n, end)
        for prefix, params in (("", w), ("personal_", theta)):
            loss, right, _ = scored(params, data.x_test[own], data.y_test[own])
            expected[f"{prefix}loss"].append(loss.mean() if n else np.nan)
            expected[f"{prefix}accuracy"].append(right.mean() if n else np.nan)
    found = sim.evaluate_clients(state, fine_tune=1)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("where", [{"devices": 1, "lanes": 3}, {"stream": True}, {"shard_data": True}])
def test_scores_do_not_depend_on_the_placement(data, monkeypatch, where) -> None:
    own = fd.LocalTraining(epochs=3, batch_size=4, lr=0.2, momentum=0.5)
    sim = simulate(data, devices=1)
    state = sim.init(jax.random.key(1))
    plain = sim.evaluate_clients(state, own)
    assert np.nanmean(plain["personal_loss"]) != pytest.approx(np.nanmean(plain["loss"]), abs=1e-3)
    monkeypatch.setattr(personal, "CHUNK", 8)
    elsewhere = simulate(data, **where).evaluate_clients(state, own)
    for name in plain:
        np.testing.assert_allclose(elsewhere[name], plain[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("where", [{"devices": 1}, {"bank": "host"}, {"bank": "sharded"}, {"stream": True}])
def test_personal_models_of_ditto_match_numpy(data, monkeypatch, where) -> None:
    """The models are evaluated after two rounds, and after fine-tuning, for each placement of the client states."""
    monkeypatch.setattr(personal, "CHUNK", 8)
    sim = simulate(data, **where, algorithm=fd.algorithms.ditto(lam=0.1))
    state = sim.init(jax.random.key(0))
    for _ in range(2):
        state, _ = sim.round_fn(state)
    clients = state.clients.gather(np.arange(20)) if where.get("bank") == "host" else state.clients
    found, ends = sim.evaluate_clients(state), np.cumsum(TESTS)
    tuned = sim.evaluate_clients(state, fine_tune=1)
    np.testing.assert_array_equal(found["loss"], tuned["loss"])
    for i, (end, n) in enumerate(zip(ends, TESTS, strict=True)):
        v = jax.tree.map(lambda a, i=i: np.asarray(a[i]), clients.v["classifier"]["dense"])
        x, y = data.client(i)
        g = scored(v, x, y)[2]
        rate = 0.5 * 0.9**2
        stepped = {"kernel": v["kernel"] - rate * x.T @ g / len(x), "bias": v["bias"] - rate * g.mean(0)}
        own = slice(end - n, end)
        for params, result in ((v, found), (stepped, tuned)):
            loss = scored(params, data.x_test[own], data.y_test[own])[0]
            wanted = loss.mean() if n else np.nan
            np.testing.assert_allclose(result["personal_loss"][i], wanted, rtol=2e-5)


@pytest.mark.parametrize("where", [{"devices": 1}, {"bank": "host"}, {"bank": "sharded"}, {"bank": "folder"}])
def test_the_parameters_of_a_client_are_those_that_are_evaluated(data, where, tmp_path) -> None:
    def check(sim: fd.Simulation) -> None:
        state, _ = sim.round_fn(sim.init(jax.random.key(0)))
        scores, tests = sim.evaluate_clients(state)["personal_loss"], np.cumsum(TESTS) - TESTS
        for i in (0, 7, 19):
            rows = slice(tests[i], tests[i] + TESTS[i])
            logits = sim.model.apply(sim.personal_params(state, i), data.x_test[rows])
            loss = sim.model.loss(logits, data.y_test[rows]).mean()
            np.testing.assert_allclose(loss, scores[i], rtol=1e-5)

    normed = fd.Model.from_linen(Normed(), (6,), statistics="local")
    for algorithm, model in (
        (fd.algorithms.ditto(lam=0.1), fd.models.linear((6,), CLASSES)),
        (fd.algorithms.apfl(), fd.models.linear((6,), CLASSES)),
        (fd.algorithms.fedper(), fd.models.emnist_nn(CLASSES, (6,))),
        (fd.algorithms.scaffold(), normed),
    ):
        if where.get("bank") not in (None, "host", "sharded"):
            where = {"bank": str(tmp_path / algorithm.name)}
        check(simulate(data, algorithm=algorithm, model=model, **where))
    sim = simulate(data)
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, sim.personal_params(state, 3), state.params)  # the global model
    for wrong, message in ((20, "client must be in 0..19, got 20"), ("ann", "no client has the name 'ann'")):
        with pytest.raises(ValueError, match=message):
            sim.personal_params(state, wrong)


def test_a_note_to_an_if_in_personal(data) -> None:
    algorithm = fd.algorithms.fedavg()
    algorithm = algorithm._replace(personal=lambda server, client, work: server.params if work.size > 5 else None)
    sim = simulate(data, algorithm=algorithm)
    state = sim.init(jax.random.key(0))
    for call in (lambda: sim.evaluate_clients(state), lambda: sim.personal_params(state, 0)):
        with pytest.raises(jax.errors.TracerBoolConversionError) as error:
            call()
        assert any("use jnp.where" in note for note in error.value.__notes__)


def test_a_number_that_decides_an_if_in_personal(data) -> None:
    """Such a number cannot be an argument of the program. In a round, too, it becomes a constant."""

    @fd.algorithm
    def halved(least: float) -> fd.Algorithm:
        def personal(server, client, work):
            return jax.tree.map(lambda w: w / 2 if least > 0.5 else w, server.params)

        return fd.algorithms.fedavg()._replace(personal=personal)

    sim = simulate(data, algorithm=halved(0.7))
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    sim.evaluate_clients(state)
    sim.evaluate_new(state, data.only(range(3)), steps=2)
    jax.tree.map(lambda v, w: np.testing.assert_array_equal(v, w / 2), sim.personal_params(state, 0), state.params)


def test_numbers_of_any_type_become_python_numbers(data) -> None:
    """Arrays of one number cannot be hashed. They give the same training and fine-tuning as the number itself."""
    given = {
        "lr": jax.numpy.float32(0.5),
        "lr_decay": np.array(0.5),
        "momentum": np.float64(0.25),
        "epochs": np.int8(2),
    }
    local = fd.LocalTraining(**given, batch_size=np.int64(50), weight_decay=1, clip_norm=jax.numpy.asarray(2))
    plain = fd.LocalTraining(
        lr=0.5, lr_decay=0.5, momentum=0.25, epochs=2, batch_size=50, weight_decay=1.0, clip_norm=2.0
    )
    assert local == plain and hash(local) == hash(plain)
    assert {type(getattr(local, name)) for name in ("lr", "lr_decay", "momentum", "weight_decay", "clip_norm")} == {
        float
    }
    sims = [simulate(data, devices=1, local=one) for one in (local, plain)]
    found, expected = (sim.evaluate_clients(sim.init(jax.random.key(0)), fine_tune=1) for sim in sims)
    np.testing.assert_array_equal(found["personal_loss"], expected["personal_loss"])
    with pytest.raises(ValueError, match="lr must be a finite number > 0, got .*0.1"):
        fd.LocalTraining(lr=jax.numpy.array([0.1]))


def test_summary() -> None:
    found = fd.personal.summary([np.nan, *np.arange(21) / 20])
    assert found == pytest.approx(
        {"clients": 21, "mean": 0.5, "std": np.std(np.arange(21) / 20), "q05": 0.05, "q25": 0.25, "median": 0.5}
        | {"q75": 0.75, "q95": 0.95, "lowest_10": 0.05, "highest_10": 0.95}  # means of three of the 21 values
        | {"worst_10": 0.05, "best_10": 0.95, "variance": np.var(np.arange(21) / 20)}
        | {"jain": 10.5**2 / (21 * 7.175), "gini": 20 * 21 * 22 / 3 / 20 / (2 * 21**2 * 0.5)}
    )
    named = re.findall(r"``(\w+)``", fd.personal.summary.__doc__.partition("- ``clients``")[2])
    assert set(found) <= {"clients", *named}, "every key is documented"
    losses = fd.personal.summary([0.1, 0.2, 3.0], higher_is_better=False)
    assert (losses["worst_10"], losses["best_10"]) == (3.0, 0.1)
    one = fd.personal.summary([0.0, 0.0, 1e-200, 0.0])  # one client has everything
    assert one["jain"] == pytest.approx(1 / 4) and one["gini"] == pytest.approx(3 / 4)
    for value in (0.0, 0.7):
        equal = fd.personal.summary([value] * 5)
        assert (equal["jain"], equal["gini"]) == pytest.approx((1, 0), abs=1e-12)
    assert np.isnan([fd.personal.summary([-1.0, 2.0])[name] for name in ("jain", "gini")]).all()
    with pytest.raises(ValueError, match="at least 1 client, got none"):
        fd.personal.summary([np.nan])


def test_with_client_tests_follows_the_label_mix_of_each_client() -> None:
    y, tests = np.repeat([0, 1, 2], [40, 20, 20]), np.repeat([0, 1, 2], [20, 10, 30])
    parts = [np.arange(0, 10), np.arange(10, 80)]  # 10 examples of class 0; the other 30 of it and all other classes
    x_test = np.arange(60, dtype=np.float32)[:, None]
    data = fd.FederatedData.from_partition(np.zeros((80, 1), np.float32), y, parts, test=(x_test, tests))
    cut = data.with_client_tests(seed=1)
    assert cut.test_sizes.tolist() == [5, 55] and set(cut.y_test[:5]) == {0}
    assert sorted(cut.x_test[:, 0]) == list(range(60)) and (tests[cut.x_test[:, 0].astype(int)] == cut.y_test).all()
    assert (cut.x_test == data.with_client_tests(seed=1).x_test).all()
    assert (cut.x_test != data.with_client_tests(seed=2).x_test).any()
    other = fd.FederatedData(data.x, data.y, data.sizes, x_test, tests + 1)
    with pytest.raises(
        ValueError, match="the test set must only have classes that clients have, got class 3: leave its examples out"
    ):
        other.with_client_tests()


def test_validation_examples_come_from_every_client() -> None:
    sizes = np.array([1, 4, 10, 25])
    rows, y = np.arange(40, dtype=np.float32)[:, None], np.arange(40) % 3
    data = fd.FederatedData(rows, y, sizes, rows[:3], y[:3])
    cut = data.with_validation(0.3, seed=1)
    assert cut.test_sizes.tolist() == [0, 1, 3, 8] and (cut.sizes + cut.test_sizes == sizes).all()
    for i, (start, n) in enumerate(zip(data.offsets, sizes, strict=True)):
        held = cut.x_test[cut.test_sizes[:i].sum() :][: cut.test_sizes[i], 0]
        assert sorted([*cut.client(i)[0][:, 0], *held]) == list(range(start, start + n))
    assert (cut.y == y[cut.x[:, 0].astype(int)]).all() and (cut.y_test == y[cut.x_test[:, 0].astype(int)]).all()
    assert (cut.x == data.with_validation(0.3, seed=1).x).all() and (cut.x != data.with_validation(0.3, 2).x).any()
    assert data.with_validation(0.99).sizes.tolist() == [1, 1, 1, 1]


def test_validation_clients_never_train() -> None:
    sizes = np.array([1, 4, 10, 25, 3])
    x, y = np.arange(43, dtype=np.float32)[:, None], np.arange(43) % 3
    data = fd.FederatedData(x, y, sizes, x[:3], y[:3], client_names=list("abcde"))
    cut = data.with_validation_clients(0.4, seed=1)
    assert cut.num_clients == 3 and cut.test_sizes is None
    kept = [data.id_of(name) for name in cut.client_names]
    assert kept == sorted(kept) and (cut.sizes == sizes[kept]).all()
    for new, old in enumerate(kept):
        np.testing.assert_array_equal(cut.client(new)[0], data.client(old)[0])
    held = [data.client(i) for i in range(5) if i not in kept]
    np.testing.assert_array_equal(cut.x_test, np.concatenate([x for x, _ in held]))
    np.testing.assert_array_equal(cut.y_test, np.concatenate([y for _, y in held]))
    assert data.with_validation_clients(0.99).num_clients == 1 and data.with_validation_clients(0.01).num_clients == 4
    with pytest.raises(ValueError, match="needs at least 2 clients, got 1"):
        data.with_validation_clients(0.99).with_validation_clients()


def test_bad_input(data) -> None:
    sim = simulate(data)
    state = sim.init(jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"fine_tune must be an integer >= 1, got 0: pass a number of epochs, or a fd.LocalTraining"
    ):
        sim.evaluate_clients(state, 0)
    pooled = fd.FederatedData(data.x, data.y, data.sizes, data.x_test, data.y_test)
    with pytest.raises(ValueError, match="not split by client"):
        simulate(pooled).evaluate_clients(state, 1)
