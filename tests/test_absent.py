"""FedVARP, MIFA and FedAU, which make up for clients that are away: rounds by hand, the mean over all cohorts, clients
that fail or are late, and what is refused. Their slow loops are in test_trajectories.py."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_absent
from small import federate, quadratics, thorough

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError

alg = fd.algorithms
MEMORY = {"fedvarp": alg.fedvarp(), "mifa": alg.mifa()}
ALL = MEMORY | {"fedau": alg.fedau()}
TARGETS = quadratics([2.0, 8.0, -4.0, 6.0])


def after(algorithm: fd.Algorithm, cohorts: list, **local) -> fd.ServerState:
    """The state after these cohorts, from w = 0. Two steps of rate 1/2 towards a: D = 3 (a - w) / 4."""
    sim = federate(algorithm, TARGETS, **local)
    state = sim.init(jax.random.key(0), params=jnp.zeros(()))
    for cohort in cohorts:
        state, _ = sim.round_fn(state, cohort)
    return state


def test_rounds_by_hand() -> None:
    # Round 0: D = 3/2 and 6, d = D / eta = 3 and 12. Round 1: client 1 has taken part, and client 2 has not.
    def second(w: float) -> tuple[float, float]:
        return 1.5 * (8 - w), 1.5 * (-4 - w)

    varp, w = after(alg.fedvarp(), [[0, 1], [1, 2]]), 3.75
    d1, d2 = second(w)
    assert float(varp.params) == pytest.approx(w + (((d1 - 12) + d2) / 2 + 15 / 4) / 2)
    np.testing.assert_allclose(varp.clients.y, [3, d1, d2, 0], rtol=1e-6)
    assert float(varp.server.y) == pytest.approx((3 + d1 + d2) / 4)
    mifa, w = after(alg.mifa(server_lr=0.5), [[0, 1], [1, 2]]), 15 / 16
    assert float(mifa.params) == pytest.approx(w + (3 + sum(second(w))) / 16)
    # The intervals of client 0 have the lengths 1, 1, 3 and 2, those of client 1 have 3 and 3. The weight of a round
    # is the mean of those that ended before it, and 1 if there are none.
    w = 0.0
    for i, omega in ((0, 1), (0, 1), (1, 1), (2, 1), (0, 1), (1, 3), (0, 5 / 3)):
        w += omega * 0.75 * ([2, 8, -4][i] - w) / 4
    assert float(after(alg.fedau(), [[0], [0], [1], [2], [0], [1], [0]]).params) == pytest.approx(w)


@pytest.mark.thorough
def test_the_learning_rate_of_a_remembered_update_is_taken_out() -> None:
    """With a rate that halves, an update of the round before counts half as much."""
    one_step = {"epochs": 1, "lr_decay": 0.5}
    w1 = after(alg.mifa(), [[0]], **one_step).params  # eta d / 4 with eta = 1/2, d = 2
    assert float(w1) == pytest.approx(1 / 4)
    assert float(after(alg.mifa(), [[0], [1]], **one_step).params) == pytest.approx(1 / 4 + (2 + 8 - 1 / 4) / 4 / 4)


@pytest.mark.parametrize("size", [2, thorough(1), thorough(3)])
def test_the_mean_of_fedvarp_over_all_cohorts_is_fedavg_with_all_clients(size) -> None:
    """For any y_i whose mean the server has."""
    start = after(alg.fedvarp(), [[0, 2], [1, 2]])
    sim, moves = federate(alg.fedvarp(), TARGETS), []
    for cohort in itertools.combinations(range(4), size):
        moves.append(float(sim.round_fn(start, cohort)[0].params - start.params))
    everyone = 0.75 * (3.0 - float(start.params))
    assert np.std(moves) > 0.1 and np.mean(moves) == pytest.approx(everyone, rel=1e-5)


@pytest.mark.thorough
def test_the_updates_of_fedvarp_have_no_variance_if_they_do_not_change() -> None:
    state = after(alg.fedvarp(), [range(4)])
    sim = federate(alg.fedvarp(), TARGETS)
    everyone = float(sim.round_fn(state, range(4))[0].params)
    same = state._replace(clients=alg.fedvarp().init_client(0.0)._replace(y=1.5 * (jnp.array([2.0, 8, -4, 6]) - 2.25)))
    same = same._replace(server=state.server._replace(y=same.clients.y.mean()))
    for cohort in ([0], [1, 3], [2]):
        assert float(sim.round_fn(same, cohort)[0].params) == pytest.approx(everyone, rel=1e-5)


def simulate(algorithm: fd.Algorithm, data_model: tuple = TARGETS, cohort_size: int = 2, lr: float = 0.5, **options):
    data, model = data_model
    mesh = fd.clients_mesh(jax.devices()[:1])
    return fd.Simulation(
        model, data, algorithm, local=fd.LocalTraining(lr=lr), cohort_size=cohort_size, mesh=mesh, **options
    )


@pytest.mark.parametrize("cutoff", [7, *map(thorough, (None, 1, 2, 50))])
def test_the_weights_of_fedau_are_those_of_a_trace(cutoff) -> None:
    """Clients that take part with probabilities from 0.04 to 1, and not at all for long."""
    N = 12
    available = np.random.default_rng(0).random((60, N)) < np.geomspace(0.04, 1, N)
    data, trace = quadratics([*range(N)]), fd.participation.trace(available)
    sim = simulate(alg.fedau(cutoff), data, N, participation=trace)
    state = sim.init(jax.random.key(0))
    for omega in slow_absent.weights(N, map(np.flatnonzero, available), cutoff or np.inf):
        state, info = sim.round_fn(state)
        reported = info["cohort"] >= 0
        np.testing.assert_allclose(info["omega"][reported], omega[info["cohort"][reported]], rtol=1e-6)
    assert cutoff is not None or omega.max() > 10


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedavg", *ALL])
def test_availability_does_not_move_the_optimum(name) -> None:
    """FedVARP and MIFA converge to the optimum, FedAU varies around it, and FedAvg prefers clients that are there."""
    available = np.random.default_rng(0).random((300, 4)) < [0.9, 0.1, 0.5, 0.2]
    algorithm = ALL[name] if name in ALL else alg.fedavg()
    sim = simulate(algorithm, cohort_size=4, participation=fd.participation.trace(available), lr=0.1)
    state, late = sim.init(jax.random.key(0)), []
    for t in range(600):
        state, _ = sim.round_fn(state)
        late += [float(state.params)] * (t >= 300)
    optimum = 3.0
    assert abs(np.mean(late) - optimum) > 0.5 if name == "fedavg" else abs(np.mean(late) - optimum) < 0.2
    assert name not in MEMORY or np.abs(np.array(late) - optimum).max() < 1e-4


def check_memory(state: fd.ServerState) -> None:
    """The server knows the mean of what the clients keep."""
    y = np.asarray(state.clients.y)
    assert len(np.unique(y)) > 1 and float(state.server.y) == pytest.approx(y.mean(), rel=1e-4)


SOURCES = {
    "failing": {"dropout": 0.4, "stragglers": 0.5, "over_selection": 1.5},
    "asynchronous": {"clock": fd.clock.asynchronous(3, max_staleness=1)},
    "starts": {"clock": fd.clock.asynchronous(2, starts="report")},
    "markov": {"participation": fd.participation.markov(0.3, 0.4)},
    "groups": {"topology": fd.topology.groups([0, 0, 1, 0], every=3)},
    "graph": {"topology": fd.topology.graph(fd.topology.ring(4)), "cohort_size": 4},
}


@pytest.mark.parametrize("source", [name if name == "asynchronous" else thorough(name) for name in SOURCES])
@pytest.mark.parametrize("name", ["fedvarp", thorough("mifa")])
def test_the_servers_mean_is_that_of_the_clients(name, source) -> None:
    """With clients that fail or are late, and the mean of several servers."""
    sim = simulate(MEMORY[name], **SOURCES[source])
    state, _ = sim.run(sim.init(jax.random.key(1)), 7, eval_every=0, progress=False)
    check_memory(state)


@pytest.mark.parametrize("name", ["fedvarp", *map(thorough, ("mifa", "fedau"))])
def test_a_client_whose_update_is_not_finite_is_away(name) -> None:
    """The others continue as if it had not been selected, and it keeps its state."""
    (data, model), ill = TARGETS, quadratics([2.0, 8.0, -4.0, 6.0], None, [1.0, 1.0, 1e40, 1.0])[0]
    states = []
    for clients, cohorts in ((data, ([0, 1], [3, 0], [1, 3])), (ill, ([0, 1, 2], [3, 0], [2, 1, 3]))):
        sim = simulate(ALL[name], (clients, model), 2, on_nonfinite="drop_client")
        state = sim.init(jax.random.key(0))
        for cohort in cohorts:
            state, _ = sim.round_fn(state, cohort)
        states.append(jax.device_get((state.server, state.clients)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *states)


def test_what_changes_the_weights_of_the_clients_is_refused() -> None:
    twice, importance = fd.participation.by_size(replace=True), fd.participation.importance([0.2, 0.8, 0.4, 0.6])
    discounted = fd.clock.asynchronous(3, staleness="polynomial")
    models = fd.clock.asynchronous(3, mixes="models")
    for algorithm in (alg.fedau(), fd.compression.compressed(alg.mifa(), fd.compression.top_k(0.5))):
        for rule in (twice, importance, fd.participation.schedule([[0, 1], [1, 1]])):
            with pytest.raises(ConfigurationError, match="needs a participation rule that selects different clients"):
                simulate(algorithm, participation=rule)
        for clock, given in ((discounted, "a discount"), (models, 'mixes="models"')):
            with pytest.raises(ConfigurationError, match=f"needs updates with equal weights, .*, got {given}"):
                simulate(algorithm, clock=clock)
        simulate(algorithm, clock=discounted._replace(concurrency=2))  # nothing is stale
