"""Algorithms for low-rank adapters, and their aggregation drift."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import slow
import slow_lora
from cases import ADAM, BITES, CLASSES, COHORTS, FEATURES, LOCAL, MOMENTUM, SIZES
from small import thorough
from test_trajectories import label_skewed_clients, order

import fedjax_drift as fd
from fedjax_drift import factors
from fedjax_drift.errors import ConfigurationError

alg = fd.algorithms
RANK, ALPHA = 2, 3.0
EXACT = ("rolora", "fedex_lora", "flora")  # the new model is the mean of the clients' models
TIED: dict[str, Any] = {  # A does not move
    "optimizer": optax.masked(optax.set_to_zero(), {"w": {"a": True, "b": False}}),
    "direction": "ascent",
}

LINEAR = fd.models.linear((FEATURES,), CLASSES)


def logistic(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["c"][None]


def base_parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"w": rng.normal(size=(FEATURES, CLASSES)), "c": rng.normal(size=CLASSES)}


def adapted(rank: int = RANK) -> fd.Model:
    model = fd.Model(lambda key: jax.tree.map(jnp.asarray, base_parameters()), logistic)
    return fd.models.lora(model, rank, "w", ALPHA)


def simulate(algorithm: fd.Algorithm, model: fd.Model | None = None, cohorts: Any = COHORTS, **options: Any):
    """A simulation, and what follows from each round: the state and the info. In float64, if that is enabled."""
    options = LOCAL | options
    measure, aggregation = options.pop("measure", "low_rank"), options.pop("aggregation", fd.aggregation.mean())
    clients = label_skewed_clients(np.float64 if jax.config.jax_enable_x64 else np.float32)
    sim = fd.Simulation(
        model or adapted(), fd.FederatedData.from_clients(clients, test_clients=clients), algorithm, measure=measure,
        local=fd.LocalTraining(**options), cohort_size=len(cohorts[0]), mesh=fd.clients_mesh(jax.devices()[:1]),
        aggregation=aggregation,
    )  # fmt: skip
    state, rounds = sim.init(jax.random.key(0)), []
    for cohort in cohorts:
        state, info = sim.round_fn(state, cohort=cohort)
        rounds.append((state, info))
    return sim, rounds


def permuted(a: np.ndarray, t: int) -> np.ndarray:
    """FLoRA's A after round t."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), t), 0)
    return np.asarray(jax.random.permutation(key, jnp.asarray(a).ravel())).reshape(a.shape)


CASES = [
    ("fedex_lora", {}, BITES),
    ("rolora", {}, BITES),
    ("flexlora", {"ranks": (1, 2)}, BITES),
    *[thorough(name, {}, BITES) for name in ("fedavg", "fedsa_lora", "flora")],
    *[thorough(name, {}, changes) for name in ("rolora", "fedex_lora", "flora") for changes in (MOMENTUM, ADAM)],
    thorough("fedsa_lora", {}, ADAM),
    thorough("flexlora", {}, MOMENTUM | {"rank": 1}),
]


@pytest.mark.parametrize("name, arguments, changes", CASES)
def test_the_slow_loop(name: str, arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        options = LOCAL | changes
        model = adapted(options.pop("rank", RANK))
        sim, rounds = simulate(getattr(alg, name)(**arguments), model, **options)
        start, base = jax.device_get(sim.init(jax.random.key(0))), base_parameters()
        local = slow.Local(**options | ({"optimizer": slow.adam} if "optimizer" in options else {}))
        clients = [sim.data.client(i) for i in range(6)]
        fed = slow.Federation(clients, COHORTS, partial(order, start.key, 1000, SIZES), local)
        theirs: dict[str, Any] = {}
        if name == "flora":
            theirs = {"anew": partial(permuted, start.params["w"]["a"])}
        if "ranks" in arguments:
            drawn = {int(i): int(r) for _, info in rounds for i, r in zip(info["cohort"], info["rank"], strict=True)}
            assert {*drawn.values()} == {1, 2}
            theirs = {"ranks": drawn}
        of = slow_lora.Problem(fed, base["c"], ALPHA / len(start.params["w"]["b"]))
        first = base["w"], start.params["w"]["a"], start.params["w"]["b"]
        wanted = [*getattr(slow_lora, name)(of, *first, **theirs)]
        for (state, info), want in zip(rounds, wanted, strict=True):
            found = fd.models.merge(sim.model, state.params)["w"]
            np.testing.assert_allclose(found, want.W, rtol=1e-8, atol=1e-10)
            if name != "flexlora":  # the signs of singular vectors are arbitrary
                np.testing.assert_allclose(state.params["w"]["a"], want.A, rtol=1e-8, atol=1e-10)
            if name != "fedsa_lora":  # it averages no products
                assert float(info["aggregation_drift"]) == pytest.approx(want.drift, rel=1e-5, abs=1e-8)
            for i, own in want.own.items():
                found = fd.models.merge(sim.model, sim.personal_params(state, i))["w"]
                np.testing.assert_allclose(found, own, rtol=1e-8, atol=1e-10)
        drifts = np.array([want.drift for want in wanted])
        # Three classes: the matrices of all clients and rounds have rank 2, so FlexLoRA with rank 2 is exact, too.
        exact = name in EXACT or (name == "flexlora" and "rank" not in changes)
        assert (drifts < 1e-7).all() if exact else (drifts > 1e-3).all()


def test_a_round_by_hand() -> None:
    """Two clients with one example and one step. x = 1 and y = w - 1 or w + 3, for the loss z^2 / 2 with z = w - y."""
    model = fd.Model(
        lambda key: {"w": jnp.zeros((1, 1))}, lambda p, x: x @ p["w"], loss=lambda z, y: (z[:, 0] - y) ** 2 / 2
    )
    sim = fd.Simulation(
        fd.models.lora(model, 1, "w"),
        fd.FederatedData.from_clients([(np.ones((1, 1), "f4"), np.float32([y])) for y in (-1, 3)]),
        alg.fedex_lora(), local=fd.LocalTraining(lr=0.5), cohort_size=2, measure="low_rank",
    )  # fmt: skip
    start = {"w": {"a": jnp.full((1, 1), 2.0), "b": jnp.full((1, 1), 1.0)}}  # A B = 2
    state, info = sim.round_fn(sim.init(jax.random.key(0), start), cohort=[0, 1])
    # residuals 2 + 1 = 3 and 2 - 3 = -1; A_i = 2 - 0.5 res 1 = 0.5, 2.5; B_i = 1 - 0.5 res 2 = -2, 2
    # products -1 and 5, mean 2; means of the factors 1.5 and 0, so W_0 <- 2 - 0
    assert [float(state.params["w"][name].item()) for name in "abw"] == pytest.approx([1.5, 0.0, 2.0])
    assert float(fd.models.merge(sim.model, state.params)["w"].item()) == pytest.approx(2.0)
    assert float(info["aggregation_drift"]) == pytest.approx(0, abs=1e-6)


def merged(sim: fd.Simulation, state: fd.ServerState) -> np.ndarray:
    return np.asarray(fd.models.merge(sim.model, state.params)["w"])


@pytest.mark.thorough
def test_with_equal_a_the_three_means_are_the_same() -> None:
    ends = [simulate(make(), cohorts=COHORTS[:1], **TIED) for make in (alg.fedavg, alg.fedex_lora, alg.flora)]
    for sim, rounds in ends:
        (state, info), (first, [(fedit, _)]) = rounds[0], ends[0]
        np.testing.assert_allclose(merged(sim, state), merged(first, fedit), rtol=1e-5, atol=1e-6)
        assert float(info["aggregation_drift"]) < 1e-5


CLIPPED = {"aggregation": fd.aggregation.clipped(9.0)}
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (getattr(alg, name), {}) for name in ("scaffold", "mime", "fedsam")},
    "feddyn": (partial(alg.feddyn, 0.1), {}),
    "fedprox": (partial(alg.fedprox, 0.1), {}),
    "clipped": (alg.fedavg, CLIPPED),
}


@pytest.mark.thorough
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("wrap", [alg.rolora, alg.fedex_lora, alg.flora], ids=lambda wrap: wrap.__name__)
def test_the_aggregation_is_exact_around_other_algorithms(wrap, base) -> None:
    make, options = BASES[base]
    *_, (state, info) = simulate(wrap(make()), **options)[1]
    if base == "feddyn" and wrap is alg.rolora:  # its server moves w further than the mean
        assert float(info["aggregation_drift"]) > 1e-3
    else:
        assert float(info["aggregation_drift"]) < 1e-4
    assert np.isfinite(jax.tree.leaves(state.params)[0]).all()


@pytest.mark.thorough
def test_the_drift_of_each_matrix_and_of_ffa_lora() -> None:
    """Two layers, of which the second is a stack of two matrices."""

    def init(key: jax.Array) -> dict:
        return {"one": jax.random.normal(key, (FEATURES, 4)), "two": jax.random.normal(key, (2, 4, CLASSES))}

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return jnp.einsum("bi,kij->bj", jnp.tanh(x @ p["one"]), p["two"])

    model = fd.models.lora(fd.Model(init, apply), 1, "one|two", alpha=2.0)
    sim, [(state, info)] = simulate(alg.fedavg(), model, COHORTS[:1])
    old, sizes, mean = sim.init(jax.random.key(0)), np.array([SIZES[i] for i in COHORTS[0]]), {}
    for i, p in zip(COHORTS[0], sizes / sizes.sum(), strict=True):
        alone, _ = sim.round_fn(old, cohort=[i])  # the model of one client
        for path, adapter in alone.params.items():
            mean[path] = mean.get(path, 0) + 2 * p * np.asarray(adapter["a"] @ adapter["b"])
    new = {path: 2 * np.asarray(adapter["a"] @ adapter["b"]) for path, adapter in state.params.items()}
    gap, norm = ([m["one"], *m["two"]] for m in ({path: mean[path] - new[path] for path in new}, mean))
    want = [np.linalg.norm(g) / np.linalg.norm(m) for g, m in zip(gap, norm, strict=True)]
    np.testing.assert_allclose(info["matrix_drift"], want, rtol=1e-4)
    whole = np.sqrt(sum((g**2).sum() for g in gap) / sum((m**2).sum() for m in norm))
    assert float(info["aggregation_drift"]) == pytest.approx(whole, rel=1e-4) and whole > 1e-3
    ffa = simulate(alg.fedavg(), fd.models.trainable(model, "/b$"), COHORTS[:1])[1][0][1]
    assert ffa["matrix_drift"].shape == (3,) and float(ffa["aggregation_drift"]) < 1e-6


@pytest.mark.thorough
def test_bytes_are_those_of_the_factors() -> None:
    A, B, W = (4 * n for n in (FEATURES * RANK, RANK * CLASSES, FEATURES * CLASSES))
    made = [alg.rolora(), alg.fedsa_lora(), alg.fedex_lora(), alg.flexlora(ranks=(1,))]
    exchanged: dict[str, list] = {algorithm.name: [] for algorithm in made}
    for algorithm in made:
        for _, info in simulate(algorithm, cohorts=COHORTS[:2], measure=())[1]:
            exchanged[algorithm.name].append([float(info["uplink_bytes"][0]), float(info["downlink_bytes"])])
    assert exchanged["rolora"] == [[B, A + B], [A, A + B]]
    assert exchanged["fedsa_lora"] == [[A, A]] * 2
    assert exchanged["fedex_lora"] == [[A + B, A + B + W]] * 2
    assert [up for up, _ in exchanged["flexlora"]] == [(A + B) / RANK] * 2


STACKS = """
import fedjax_drift as fd, jax, numpy as np
fd.use_cpu_devices(2)
model = fd.models.decoder(vocabulary=16, length=4, width=64, depth=3)
adapted = fd.models.lora(model, 4, "attention|mlp", base=model.init(jax.random.key(0)))
tokens = np.zeros((4, 4), "i4")
data = fd.FederatedData.from_clients([(tokens, tokens)] * 2)
sim = fd.Simulation(adapted, data, fd.algorithms.flexlora(), local=fd.LocalTraining(lr=0.1), cohort_size=2)
state = sim.init(jax.random.key(0))
for _ in range(3):
    state, info = sim.round_fn(state)
print(info["finite"].all())
"""


@pytest.mark.thorough
def test_stacks_are_decomposed_on_two_devices() -> None:
    """LAPACK's kernel for a stack waits for threads that wait, too. Without the loop over the matrices, this hangs."""
    done = subprocess.run([sys.executable, "-c", STACKS], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.endswith("True\n")


@pytest.mark.thorough
def test_the_first_parameters_and_fine_tuning_with_w() -> None:
    """A run goes on from its own parameters, and from those of the model. Weight decay does not move w."""
    sim, rounds = simulate(alg.fedex_lora(), cohorts=COHORTS[:2], weight_decay=0.3, measure=())
    state = rounds[-1][0]
    again = sim.init(jax.random.key(0), state.params)
    np.testing.assert_array_equal(again.params["w"]["w"], state.params["w"]["w"])
    fresh = sim.init(jax.random.key(0), sim.model.init(jax.random.key(3)))
    assert not np.any(fresh.params["w"]["w"]) and np.any(state.params["w"]["w"])
    other, _ = simulate(alg.fedavg(), cohorts=COHORTS[:1], measure=())
    with pytest.raises(ConfigurationError, match="params must be shaped like model.init's"):
        other.init(jax.random.key(0), state.params)
    # With A = B = 0 nothing but w is left, and the gradients are 0. So fine-tuning changes nothing.
    zeros = jax.tree.map(jnp.zeros_like, state.params["w"])
    still = sim.init(jax.random.key(0), {"w": {**zeros, "w": state.params["w"]["w"]}})
    before, after = (sim.evaluate_clients(still, fine_tune=fine_tune) for fine_tune in (None, 2))
    np.testing.assert_allclose(after["personal_loss"], before["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: simulate(alg.rolora(), LINEAR), "rolora needs a model that trains low-rank adapters"),
        (lambda: simulate(alg.flora(), fd.models.trainable(adapted(), "/b$")), "flora needs a model that trains"),
        (lambda: simulate(alg.fedavg(), LINEAR), "measure='low_rank' needs a model"),
        (lambda: simulate(alg.flexlora(ranks=(1, 3))), "ranks must be at most 2, the rank of the adapter of w, got 3"),
        (lambda: alg.flexlora(ranks=(0,)), "ranks must be a tuple of integers >= 1"),
        (lambda: alg.fedex_lora(alg.ditto(0.1)), "base of fedex_lora must be an algorithm without personal models"),
        (lambda: simulate(alg.partly_shared(alg.rolora(), "w/b")), "rolora must not be inside another algorithm"),
        (lambda: simulate(alg.rolora(alg.fedex_lora())), "fedex_lora must not be inside another algorithm"),
        (lambda: simulate(alg.rolora(alg.partly_shared(personal="w/b"))), "partly_shared must not be inside another"),
    ],
)  # fmt: skip
def test_wrong_uses_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.thorough
def test_frozen_matrices_that_change_in_the_other_layout() -> None:
    """The weight is [out, in]. The array w is [in, out] for all layouts."""
    results, W = [], base_parameters()["w"].astype("f4")
    for model in (
        fd.Model(lambda key: {"w": W}, lambda p, x: x @ p["w"]),
        fd.Model(lambda key: {"w": W.T}, lambda p, x: x @ p["w"].T, output_axes={"w": 0}),
    ):
        sim, rounds = simulate(alg.fedex_lora(), fd.models.lora(model, RANK, "w"), COHORTS[:2])
        assert factors.split(rounds[-1][0].params)[1]["w"].shape == (FEATURES, CLASSES)
        results.append(merged(sim, rounds[-1][0]))
    np.testing.assert_allclose(results[1].T, results[0], rtol=1e-5, atol=1e-6)
