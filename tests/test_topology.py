"""Topologies against loops in NumPy, their limits, and how fast models reach consensus."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
from small import models_of, quadratics, thorough
from test_algorithms import ALGORITHMS, small
from test_trajectories import CLASSES, FEATURES, LOCAL, SIZES, label_skewed_clients, library_order

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.testing import contract_simulation
from fedjax_drift.topology import spectral_gap

T, N = fd.topology, len(SIZES)
GROUPS = np.array([0, 1, 1, 0, 2, 1])
GRAPHS = {
    "ring": T.ring(N),
    "torus": T.torus(2, 3),
    "erdos_renyi": T.erdos_renyi(N, 0.5, seed=1),
    "exponential": T.exponential(N),
    "one_peer": T.one_peer(N),
}


def top(x: np.ndarray, fraction: float) -> np.ndarray:
    """The largest values of a leaf."""
    flat, sent = x.ravel(), np.zeros(x.size)
    kept = np.argsort(-np.abs(flat), kind="stable")[: int(np.ceil(fraction * x.size))]
    sent[kept] = flat[kept]
    return sent.reshape(x.shape)


def coded(D: slow.Vector, like: dict[str, np.ndarray], fraction: float | None) -> slow.Vector:
    return D if fraction is None else slow.pack({name: top(x, fraction) for name, x in slow.unpack(D, like).items()})


def hierarchical(fed: slow.Federation, w: dict[str, np.ndarray], scaffold: bool, every: int, fraction=None) -> Iterator:
    """Edge servers run FedAvg, or SCAFFOLD, and a cloud averages them after every ``every`` rounds."""
    R, start, zero = GROUPS.max() + 1, slow.pack(w), np.zeros_like(slow.pack(w))
    x, c, c_i = [start] * R, [zero] * R, [zero] * N
    for t, S in enumerate(fed.cohorts):
        for r in range(R):
            of_edge = [i for i in S if GROUPS[i] == r]
            D, dc = [], []
            for i in of_edge:
                if scaffold:
                    D_i = fed.train(t, i, x[r], slow.corrected(c[r] - c_i[i])) - x[r]
                    new = c_i[i] - c[r] - D_i / fed.path(t, i)
                    dc.append(new - c_i[i])
                    c_i[i] = new
                else:
                    D_i = coded(fed.train(t, i, x[r]) - x[r], w, fraction)
                D.append(D_i)
            if of_edge:
                x[r] = x[r] + fed.mean(of_edge, D, "uniform" if scaffold else "examples")
            if dc:
                c[r] = c[r] + np.sum(dc, axis=0) / (GROUPS == r).sum()
        sizes = np.ones(N) if scaffold else np.array(SIZES)
        weights = np.bincount(GROUPS, sizes) / sizes.sum()
        mean = [sum(p * v for p, v in zip(weights, each, strict=True)) for each in (x, c)]
        if (t + 1) % every == 0:
            x, c = [mean[0]] * R, [mean[1]] * R
        yield mean[0], np.array(x)


def gossip(fed: slow.Federation, w: dict[str, np.ndarray], W: np.ndarray, scaffold: bool) -> Iterator:
    """D-SGD: x_i <- sum_j W_ij theta_j. A client keeps the weight of an absent neighbour for its own model."""
    start = slow.pack(w)
    x, c, c_i = np.tile(start, (N, 1)), np.zeros((N, len(start))), np.zeros((N, len(start)))
    for t, S in enumerate(fed.cohorts):
        here = np.isin(np.arange(N), S)
        A = (W if W.ndim == 2 else W[t % len(W)]) * here
        theta, sent = x.copy(), c.copy()
        for i in S:
            theta[i] = fed.train(t, i, x[i], slow.corrected(c[i] - c_i[i]) if scaffold else slow.mean_gradient)
            if scaffold:
                new = c_i[i] - c[i] - (theta[i] - x[i]) / fed.path(t, i)
                sent[i] += new - c_i[i]
                c_i[i] = new
        own = 1 - A.sum(1, keepdims=True)
        x, c = A @ theta + own * x, A @ sent + own * c
        yield x.mean(0), x


def model() -> tuple[fd.Model, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(FEATURES, CLASSES)), "b": rng.normal(size=CLASSES)}
    apply = lambda p, x: x @ p["w"] + p["b"][None]  # noqa: E731
    return fd.Model(init=lambda key: jax.tree.map(jnp.asarray, params), apply=apply), params


def check(algorithm: fd.Algorithm, topology: T.Topology, reference: Any, **options: Any) -> None:
    """Six rounds in which clients drop out, in float64."""
    with jax.enable_x64(True):
        clients, (network, params) = label_skewed_clients(np.float64), model()
        sim = fd.Simulation(
            network,
            fd.FederatedData.from_clients(clients),
            algorithm,
            local=fd.LocalTraining(**LOCAL),
            topology=topology,
            mesh=fd.clients_mesh(jax.devices()[:1]),
            **{"dropout": 0.3, "cohort_size": N} | options,
        )
        state = sim.init(jax.random.key(0))
        key, cohorts, means, models, distances = state.key, [], [], [], []
        for _ in range(6):
            state, info = sim.round_fn(state)
            cohorts.append([int(i) for i in info["cohort"] if i >= 0])
            means.append(slow.pack(jax.device_get(state.params)))
            each = jax.device_get(state.sources["topology"].each.params)
            models.append([slow.pack({n: a[r] for n, a in each.items()}) for r in range(topology.receivers)])
            distances.append(float(info["consensus_distance"]))
        assert len({len(cohort) for cohort in cohorts}) > 1
        order = lambda *which: library_order(key, *which)  # noqa: E731
        federation = slow.Federation(clients, cohorts, order, slow.Local(**LOCAL))
        weight = np.asarray(state.sources["topology"].weight)
        for got, got_models, distance, (mean, x) in zip(
            means, models, distances, reference(federation, params), strict=True
        ):
            np.testing.assert_allclose(got, mean, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(got_models, x, rtol=1e-9, atol=1e-12)
            assert distance == pytest.approx(np.sqrt(weight @ ((x - mean) ** 2).sum(1)), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ["fedavg", thorough("scaffold"), thorough("coded")])
def test_a_hierarchy_is_that_of_the_numpy_loop(name) -> None:
    algorithm = fd.algorithms.scaffold() if name == "scaffold" else fd.algorithms.fedavg()
    if name == "coded":
        algorithm = fd.compression.compressed(algorithm, fd.compression.top_k(0.5), error_feedback=False)
    reference = lambda fed, w: hierarchical(fed, w, name == "scaffold", 2, 0.5 if name == "coded" else None)  # noqa: E731
    check(algorithm, T.groups(GROUPS, every=2), reference, cohort_size=4)


@pytest.mark.parametrize("algorithm", ["fedavg", thorough("scaffold")])
@pytest.mark.parametrize("name", ["ring", *(thorough(name) for name in GRAPHS if name != "ring")])
def test_a_graph_is_that_of_the_numpy_loop(name, algorithm) -> None:
    W, scaffold = GRAPHS[name], algorithm == "scaffold"
    check(getattr(fd.algorithms, algorithm)(), T.graph(W), lambda fed, w: gossip(fed, w, W, scaffold))


def models_after(topology: T.Topology | None, algorithm: fd.Algorithm, rounds: int = 4) -> list[float]:
    data, quadratic = quadratics([2.0, 8.0, -4.0, 6.0], [1, 3, 2, 2], [1.0, 0.5, 2.0, 1.0])
    local = fd.LocalTraining(epochs=2, batch_size=10, lr=0.2)
    sim = fd.Simulation(quadratic, data, algorithm, local=local, cohort_size=4, topology=topology)
    return models_of(sim, rounds)


@pytest.mark.parametrize("name", ["scaffold", *(thorough(name) for name in ("fedavg", "feddyn", "fedavgm", "mime"))])
def test_a_complete_graph_and_a_hierarchy_that_always_averages_are_a_star(name) -> None:
    """All clients take part, with equal weights."""
    factory = ALGORITHMS[name]
    algorithm = factory(weighting="uniform") if name in ("fedavg", "fedavgm", "mime") else small(factory)
    star = models_after(None, algorithm)
    assert models_after(T.star(), algorithm) == star
    assert models_after(T.graph(T.complete(4)), algorithm) == pytest.approx(star, rel=1e-4)
    assert models_after(T.groups([0, 0, 0, 0]), algorithm) == pytest.approx(star, rel=1e-4)
    if name == "fedavg":  # its clients need nothing of the server but w
        assert models_after(T.groups([0, 1, 1, 0]), algorithm) == pytest.approx(star, rel=1e-4)


@pytest.mark.parametrize("name", ["ring", "exponential"])
def test_the_consensus_distance_falls_as_the_spectral_gap_says(name) -> None:
    """Without training, each round multiplies it by at most 1 - gap, and in the end by about that."""
    size = 16
    W = getattr(T, name)(size)
    data, quadratic = quadratics([*np.random.default_rng(0).normal(size=size)])
    local = fd.LocalTraining(epochs=1, batch_size=10, lr=lambda t: jnp.where(t == 0, 1.0, 0.0))
    sim = fd.Simulation(quadratic, data, fd.algorithms.fedavg(), local=local, cohort_size=size, topology=T.graph(W))
    state, distances = sim.init(jax.random.key(0)), []
    for _ in range(12):
        state, info = sim.round_fn(state)
        distances.append(float(info["consensus_distance"]))
    ratios = np.array(distances[1:]) / distances[:-1]
    assert (ratios <= 1 - spectral_gap(W) + 1e-3).all()
    assert name != "ring" or ratios[-1] == pytest.approx(1 - spectral_gap(W), rel=0.05)
    assert spectral_gap(T.complete(8)) == pytest.approx(1) and spectral_gap(T.ring(8)) > spectral_gap(T.ring(16))


@pytest.mark.parametrize("N", [1, 2, 3, 5, 8])
def test_mixing_matrices_are_doubly_stochastic(N) -> None:
    matrices = [T.ring(N), T.complete(N), T.exponential(N), *T.one_peer(N), T.erdos_renyi(N, 0.4, 2), T.torus(2, N)]
    for W in matrices:
        assert (W >= 0).all()
        np.testing.assert_allclose([W.sum(0), W.sum(1)], 1)
        T.graph(W)
    if N == 8:  # log2 N rounds give the exact mean
        np.testing.assert_allclose(np.linalg.multi_dot(T.one_peer(N)), 1 / N)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["groups", "graph"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_with_every_topology_or_says_why_not(name, kind) -> None:
    topology = T.groups(GROUPS, every=2) if kind == "groups" else T.graph(T.ring(N))
    algorithm = small(ALGORITHMS[name])
    try:
        sim = contract_simulation(algorithm, topology=topology, **({} if kind == "groups" else {"cohort_size": N}))
    except ConfigurationError as error:
        assert "a topology with one server" in str(error) and "estimate of the whole federation" in str(error)
        return
    state, _ = sim.run(sim.init(jax.random.key(1)), 4, eval_every=0, progress=False)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server, state.sources, state.clients)))
    scores = sim.evaluate_clients(state)
    assert np.isfinite(next(iter(scores.values()))).any()


def test_bad_topologies() -> None:
    def message(make: Any, **options: Any) -> str:
        with pytest.raises(ConfigurationError) as error:
            topology = make()
            contract_simulation(fd.algorithms.fedavg(), **{"topology": topology} | options)
        return str(error.value)

    uneven = np.array([[0.5, 0.5], [0.2, 0.8]])
    assert "W must be doubly stochastic, each column with the sum 1" in message(lambda: T.graph(uneven))
    assert "W must be finite numbers >= 0" in message(lambda: T.graph(np.array([[2.0, -1.0], [-1.0, 2.0]])))
    assert "W must be numbers [N, N]" in message(lambda: T.graph(np.ones(3)))
    assert "of must be the numbers 0..R-1" in message(lambda: T.groups([0, 2, 2, 0, 0, 0]))
    assert "topology must have the 6 clients" in message(lambda: T.groups([0, 1, 0]))
    assert "cohort_size must be 6 with the topology graph(6)" in message(lambda: T.graph(T.ring(6)))
    groups = T.groups(GROUPS)
    assert "topology must be of type Topology" in message(lambda: GROUPS)
    private = fd.aggregation.private(1.0, 1.0)
    assert "is needed by private" in message(lambda: groups, aggregation=private, sampling="bernoulli")
    assert "rounds must be synchronous" in message(lambda: groups, clock=fd.clock.asynchronous(4))


def test_models_of_all_receivers_that_need_half_of_the_memory_warn(monkeypatch) -> None:
    """Three models of one float32 each."""
    data, model = quadratics([2.0, 8.0, 3.0])

    def make() -> None:
        fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=3, topology=T.graph(T.ring(3)))

    monkeypatch.setattr("fedjax_drift.simulation.topology.memory_of", lambda mesh: 2 * 3 * 4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make()
    monkeypatch.setattr("fedjax_drift.simulation.topology.memory_of", lambda mesh: 2 * 3 * 4.0 - 1)
    with pytest.warns(UserWarning, match="the topology keeps 3 models"):
        make()
