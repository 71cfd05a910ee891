"""Bad input: a ValueError, before anything compiles, that says what, allowed, got and fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_drift as fd

X, Y = np.ones((4, 3), np.float32), np.array([0, 1, 2, 1])


def federation(**options) -> fd.FederatedData:
    return fd.FederatedData.from_clients([(X, Y), (X, Y)], **({"test": (X, Y)} | options))


def simulation(**options) -> fd.Simulation:
    options = {"model": fd.models.linear((3,), 3), "data": federation(), "algorithm": fd.algorithms.fedavg(),
               "cohort_size": 2} | options  # fmt: skip
    return fd.Simulation(options.pop("model"), options.pop("data"), options.pop("algorithm"), **options)


def clients(*pairs) -> fd.FederatedData:
    return fd.FederatedData.from_clients(pairs)


def infinite() -> np.ndarray:
    x = X.copy()
    x[2, 1] = np.inf
    return x


DATA = [
    (lambda: clients(), "at least 1 client, got 0"),
    (lambda: clients((X, Y), (X[:0], Y[:0])), "client 1 is empty: leave it out"),
    (lambda: clients((X, Y), (X, Y[:3])), "client 1 must have as many inputs as labels, got 4 and 3"),
    (lambda: clients((X, Y), (X[:, :2], Y)), r"client 1 must look like client 0, float32\[3\] a row, got float32\[2\]"),
    (lambda: clients((X, Y), (X.astype(np.uint8), Y)), "got uint8"),
    (lambda: clients((X, Y), (infinite(), Y)), "inputs must be finite, but row 6 holds NaN or infinity"),
    (lambda: clients((np.array(["a"] * 4), Y)), "inputs must be a numeric array"),
    (lambda: federation(test=(X, Y[:2])), "test data must have as many inputs as labels, got 4 inputs and 2 labels"),
    (lambda: federation(test=(X[:, :1], Y)), "test inputs must look like the training inputs"),
    (lambda: federation(test_clients=[(X, Y)] * 2), "either test or test_clients"),
    (lambda: federation(test=None, test_clients=[(X, Y)]), "one pair for each of the 2 clients, got 1"),
    (lambda: federation(mean=0.5), "both mean and std"),
    (lambda: federation(mean=0.5, std=0.0), "std must be > 0"),
    (lambda: fd.FederatedData.from_partition(X, Y, [[0, 1], []]), "client 1 is empty"),
    (lambda: fd.FederatedData.from_partition(X, Y, [[0, 4]]), r"row numbers in 0..3, got 0..4"),
    (lambda: fd.FederatedData.from_partition(X, Y, [[0.5]]), r"one axis of row numbers, got float64\[1\]"),
    (lambda: fd.FederatedData(X, Y, np.array([1, 2])), "sum to the 4 rows of x, got 3"),
    (lambda: federation().client(2), r"in 0..1, got 2"),
    (lambda: fd.datasets.load("mnits"), "did you mean 'mnist'"),
]
LOCAL = [
    ({"epochs": 0}, "epochs must be an integer >= 1, got 0"),
    ({"epochs": 1.5}, "epochs must be an integer >= 1, got 1.5"),
    ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
    ({"batch_size": True}, "batch_size must be an integer >= 1, got True"),
    ({"lr": 0}, "lr must be a finite number > 0, got 0"),
    ({"lr": float("nan")}, "lr must be a finite number > 0, got nan"),
    ({"lr": "0.1"}, "lr must be a finite number > 0, got '0.1'"),
    ({"lr_decay": -1}, "lr_decay must be a finite number > 0, got -1: 1 keeps the rate constant"),
    ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
    ({"weight_decay": -0.1}, "weight_decay must be a finite number >= 0, got -0.1"),
    ({"clip_norm": 0}, "clip_norm must be a finite number > 0, got 0: None means no clipping"),
    ({"momentum": 0.9, "optimizer": optax.scale_by_adam()}, "momentum must be 0 when an optimizer is given, got 0.9"),
    ({"optimizer": optax.adam(0.1)}, "pass optax.scale_by_adam"),
]
SIMULATION = [
    ({"cohort_size": 0}, "cohort_size must be in 1..2, got 0: the federation has 2 clients"),
    ({"cohort_size": 3}, "cohort_size must be in 1..2, got 3: the federation has 2 clients"),
    ({"cohort_size": 1.0}, "got 1.0"),
    ({"lanes": 0}, 'lanes must be an integer >= 1, got 0: or pass "auto"'),
    ({"sampling": "poisson"}, "sampling must be one of 'uniform', 'bernoulli', got 'poisson'"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
    ({"eval_batch_size": 0}, "eval_batch_size must be an integer >= 1, got 0"),
    ({"algorithm": fd.algorithms.fedavg}, "algorithm must be of type Algorithm, got function"),
    ({"local": 0.1}, "local must be of type LocalTraining, got float"),
    ({"data": [(X, Y)]}, "data must be of type FederatedData, got list"),
    ({"model": fd.models.linear((3,), 2)}, r"labels must be in 0..1 \(the model has 2 outputs\), got 0..2"),
    ({"data": clients((X, Y - 1)), "cohort_size": 1}, "got -1..1"),
    (
        {"data": clients((X, Y.astype(np.float32))), "cohort_size": 1},
        r"integers for the default loss, got float32: pass Model\(loss=...\)",
    ),
    ({"model": fd.models.lenet5(3)}, r"does not accept the data's rows, float32\[3\]"),
    ({"donate": True, "on_nonfinite": "raise"}, "donate=True needs"),
    ({"mesh": jax.make_mesh((1,), ("x",))}, 'mesh must have the one axis "clients"'),
]
COHORTS = [
    ([], "at least 1 client id"),
    ([0, 2], r"client ids in 0..1, got 2"),
    ([-1], r"client ids in 0..1, got -1"),
    ([1, 1], "every client once, got client 1 2 times"),
    ([0.0], "at least 1 client id, got float64"),
    ([[0]], "one axis"),
]


@pytest.mark.parametrize(("make", "message"), DATA)
def test_data(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("options", "message"), LOCAL)
def test_local_training(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        fd.LocalTraining(**options)


@pytest.mark.parametrize(("options", "message"), SIMULATION)
def test_simulation(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        simulation(**options)


def test_rounds() -> None:
    sim = simulation()
    state = sim.init(jax.random.key(0))
    for cohort, message in COHORTS:
        with pytest.raises(ValueError, match=message):
            sim.round_fn(state, cohort=cohort)
    with pytest.raises(ValueError, match=r"params must be shaped like model.init's: .*float32\[2\] instead of"):
        sim.init(jax.random.key(0), params=jax.tree.map(lambda a: jnp.zeros(2), state.params))
    for rounds in (-1, 2.0):
        with pytest.raises(ValueError, match="rounds must be an integer >= 0"):
            sim.run(state, rounds)
    with pytest.raises(ValueError, match="evaluating needs a test set"):
        simulation(data=federation(test=None)).evaluate(state)
    assert sim._round._cache_size() == 0  # nothing was compiled


def test_cpu_devices_must_come_first() -> None:
    jax.devices()
    with pytest.raises(RuntimeError, match="before JAX starts its backend"):
        fd.use_cpu_devices(3)
    with pytest.raises(ValueError, match="n must be an integer >= 1"):
        fd.use_cpu_devices(0)
