"""FedDF and FedProto by hand, their limits, and their wrong uses. Their slow loops are in test_trajectories.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import assert_close, random_clients, thorough

import fedjax_drift as fd

A = fd.algorithms
ONE = np.ones((1, 1), np.float32)
X, ZERO, CLASS_1 = ONE[0], np.zeros(1, np.int32), np.ones(1, np.int32)
RNG = np.random.default_rng(0)


def logit(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.stack([w * x[:, 0], 0 * x[:, 0]], 1)


def scaled(a: jax.Array, x: jax.Array) -> jax.Array:
    return a * x


# Of two classes, the logit of the first is w x. The loss of the second model does not depend on its features a x.
LOGIT = fd.Model(lambda key: jnp.zeros(()), logit)
SCALE = fd.Model(lambda key: jnp.ones(()), lambda a, x: jnp.zeros((len(x), 2)), features=scaled)


def simulate(model: fd.Model, clients: list, algorithm: fd.Algorithm, **options: Any) -> fd.Simulation:
    data = fd.FederatedData.from_clients(clients, test_clients=clients)
    options = {"local": fd.LocalTraining(batch_size=10, lr=1.0), "cohort_size": len(clients)} | options
    return fd.Simulation(model, data, algorithm, mesh=fd.clients_mesh(jax.devices()[:1]), **options)


def test_a_round_of_feddf_by_hand() -> None:
    """Client 0 moves by 1/2 and client 1 by -1/2, so the logits of the ensemble are 0, and its prediction is 1/2.
    w_0 is -1/4, of which the prediction is lower. The first step of Adam has the length of its learning rate."""
    clients = [(ONE, ZERO), (ONE.repeat(3, 0), CLASS_1.repeat(3))]
    sim = simulate(LOGIT, clients, A.feddf(2 * ONE, steps=1, lr=0.1))
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    assert float(state.params) == pytest.approx(-0.25 + 0.1, abs=1e-6)
    # D_i, the 2 logits of 1 example, and the share with which they count equally
    assert info["uplink_bytes"].tolist() == [4 * (1 + 2 + 1)] * 2 and float(info["downlink_bytes"]) == 4
    equal = simulate(LOGIT, clients, A.feddf(2 * ONE, steps=1, lr=0.1, weighting="uniform"))
    assert float(equal.round_fn(equal.init(jax.random.key(0)))[0].params) == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("weighting, C_0", [("examples", 13 / 4), thorough("uniform", 5 / 2)])
def test_two_rounds_of_fedproto_by_hand(weighting, C_0) -> None:
    """a_i <- a_i - lr lam 2 (a_i x_i - C_0) x_i, from the second round on. Client 2, the only one with class 1, is in
    the first round only. Its prototype stays."""
    clients = [(ONE, ZERO), (4 * ONE.repeat(3, 0), ZERO.repeat(3)), (2 * ONE, CLASS_1)]
    local = fd.LocalTraining(batch_size=10, lr=0.01)
    sim = simulate(SCALE, clients, A.fedproto(2, 1, lam=0.5, weighting=weighting), local=local)
    start = sim.init(jax.random.key(0))
    state, _ = sim.round_fn(start, [0, 1, 2])
    assert state.clients.model.tolist() == [1, 1, 1] and start.server.known.tolist() == [False, False]
    assert state.server.prototypes.ravel().tolist() == [pytest.approx(C_0), 2]
    state, info = sim.round_fn(state, [0, 1])
    assert state.server.known.tolist() == [True, True] and float(state.server.prototypes[1, 0]) == 2
    a = np.array([1 - 0.01 * (1 - C_0), 1 - 0.01 * (4 - C_0) * 4])
    np.testing.assert_allclose(state.clients.model[:2], a, rtol=1e-6)
    weights = [1, 3] if weighting == "examples" else [1, 1]
    assert float(state.server.prototypes[0, 0]) == pytest.approx(np.average(a * [1, 4], weights=weights))
    assert info["uplink_bytes"].tolist() == [4 * 2 * (1 + 1)] * 2 and float(state.params) == 1
    assert float(info["downlink_bytes"]) == 2 * 4 + 2  # the prototypes, and which of them are known; and not the model


@pytest.mark.thorough
def test_fedproto_without_the_term_is_local_training() -> None:
    clients = random_clients([3, 10, 7, 1], 5, 3)
    model, local = fd.models.emnist_nn(3, (5,)), fd.LocalTraining(epochs=2, batch_size=4, lr=0.2)
    states = []
    features = model.features(model.init(jax.random.key(0)), clients[0][0]).shape[1]
    for algorithm in (A.fedproto(3, features, lam=0.0), A.ditto(lam=0.0)):
        sim = simulate(model, clients, algorithm, local=local, cohort_size=2)
        state, _ = sim.run(sim.init(jax.random.key(1)), 4, eval_every=0, progress=False)
        states.append(state.clients[0])
    assert_close(*states)
    new = []
    for algorithm in (A.fedproto(3, features, lam=0.0), A.fedavg()):
        sim = simulate(model, clients, algorithm, local=local)
        new.append(sim.evaluate_new(sim.init(jax.random.key(1)), sim.data, 5))
    assert_close(*new)


@pytest.mark.thorough
def test_enough_steps_of_feddf_reach_the_ensemble() -> None:
    """A network with more parameters than unlabelled examples can predict what the ensemble does."""
    clients, model = random_clients([8, 20, 12], 5, 3), fd.models.emnist_nn(3, (5,))
    unlabelled = RNG.normal(size=(6, 5)).astype(np.float32)
    local = fd.LocalTraining(epochs=20, batch_size=4, lr=0.3)
    mean, distilled = (
        simulate(model, clients, A.feddf(unlabelled, steps, lr=1e-2), local=local) for steps in (0, 2000)
    )
    start = mean.init(jax.random.key(0))
    w, theta = (sim.round_fn(start)[0].params for sim in (mean, distilled))
    alone = [simulate(model, clients, A.fedavg(), local=local, cohort_size=1).round_fn(start, [i])[0] for i in range(3)]
    ensemble = jax.nn.softmax(np.mean([model.apply(each.params, unlabelled) for each in alone], 0))
    error = [abs(jax.nn.softmax(model.apply(each, unlabelled)) - ensemble).max() for each in (w, theta)]
    assert error[1] < 1e-2 < error[0]


@pytest.mark.thorough
def test_the_unlabelled_examples_of_a_round() -> None:
    """Two batches of 2 of the 5 examples. All clients and the server see the same, and another round sees others."""
    seen: list[Any] = []

    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(tuple(x[:, 0].tolist())), x)
        return logit(w, x)

    unlabelled = np.arange(10, 15, dtype=np.float32)[:, None]
    clients = [(ONE, ZERO), (ONE, CLASS_1)]
    sim = simulate(LOGIT._replace(apply=apply), clients, A.feddf(unlabelled, steps=5, batch_size=2), lanes=1)
    state, batches = sim.init(jax.random.key(0)), []
    for _ in range(2):
        jax.block_until_ready(state), jax.effects_barrier(), seen.clear()
        state, _ = sim.round_fn(state)
        jax.block_until_ready(state), jax.effects_barrier()
        batches.append({batch for batch in seen if min(batch) >= 10})
    assert [len(each) for each in batches] == [2, 2] and batches[0] != batches[1]
    assert all(len({x for batch in each for x in batch}) == 4 for each in batches)


WRONG = [
    (
        lambda: A.feddf(np.zeros((2, 3), np.uint8)),
        r"unlabelled must be finite inputs .* got uint8\[2, 3\]: pass data.d",
    ),
    (lambda: A.feddf(np.zeros((0, 3))), r"with at least 1 example"),
    (lambda: A.feddf(np.full((2, 3), np.nan)), r"unlabelled must be finite inputs"),
    (lambda: A.feddf([1.0, 2.0]), r"unlabelled must be finite inputs of the model \[U, ...\]"),
    (
        lambda: first_round(A.fedproto(2, 3)),
        r"features of fedproto must be those of the model, \(1,\), got 3",
    ),
    (lambda: simulate(LOGIT, [(ONE, ZERO)], A.fedproto(2, 1)), r"fedproto needs a model with features"),
    (
        lambda: first_round(A.fedproto(3, 1)),
        r"classes of fedproto must be the logits of the model, \(2,\), g",
    ),
]


WRONG += [
    (lambda: A.feddf("nothing.npy"), r"unlabelled must be an array, or an .npy file that exists, got nothing.npy: ")
]
WRONG += [(lambda: first_round(A.feddf(np.ones((2, 3)))), r"unlabelled must have examples of shape \(1,\), as the cl")]


def first_round(algorithm: fd.Algorithm) -> None:
    sim = simulate(SCALE, [(ONE, ZERO)], algorithm)
    sim.round_fn(sim.init(jax.random.key(0)))


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_uses(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.thorough
def test_unlabelled_examples_are_read_from_a_file(tmp_path) -> None:
    np.save(tmp_path / "public.npy", RNG.normal(size=(4, 30)).astype(np.float32))
    words = "--dataset synthetic:num_clients=8,num_rows=160 --cohort 4 --rounds 1 --algorithm"
    parsed = fd.parse_run([*words.split(), f"feddf:unlabelled={tmp_path / 'public.npy'},steps=3,lr=0.01"])
    (sim,) = parsed.simulations.values()
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    assert sim.algorithm.name == "feddf" and int(state.round) == 1
