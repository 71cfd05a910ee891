"""Client failures (dropout, stragglers, deadlines), and clipped and private aggregation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import assert_close, rounds, thorough
from test_engine import CLASSES, FEATURES, SIZES, data  # noqa: F401

import fedjax_drift as fd
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.cohort import assign
from fedjax_drift.round.train import executed_steps
from fedjax_drift.simulation.sources import sources_of

LOCAL = fd.LocalTraining(epochs=2, batch_size=4, lr=0.2)


def simulate(data, algorithm=None, **options) -> fd.Simulation:  # noqa: F811
    model = fd.models.linear((FEATURES,), CLASSES)
    algorithm = fd.algorithms.scaffold() if algorithm is None else algorithm
    options = {"local": LOCAL, "cohort_size": 10, "mesh": fd.clients_mesh(jax.devices()[:1])} | options
    return fd.Simulation(model, data, algorithm, **options)


def steps_of(sizes) -> np.ndarray:
    return 2 * -(-np.asarray(sizes) // 4)


def test_a_round_with_dropout_equals_a_round_of_the_clients_that_report(data) -> None:  # noqa: F811
    start = simulate(data).init(jax.random.key(0))
    failed, info = simulate(data, dropout=0.5).round_fn(start)
    there = np.asarray(info["cohort"] >= 0)
    assert 0 < there.sum() < 10
    np.testing.assert_array_equal(info["selected"][there], info["cohort"][there])
    np.testing.assert_array_equal(info["selected"], simulate(data).round_fn(start)[1]["cohort"])
    np.testing.assert_array_equal(np.asarray(info["weight"] > 0), there)
    answered, _ = simulate(data).round_fn(start, cohort=info["cohort"][there])
    for got, want in zip(jax.tree.leaves(failed), jax.tree.leaves(answered), strict=True):
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    gone = np.setdiff1d(np.arange(30), info["cohort"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[gone], b[gone]), failed.clients, start.clients)


@pytest.mark.parametrize("placed", [{}, thorough({"stream": True, "lanes": 2})], ids=["here", "streamed"])
def test_metrics_of_clients_that_do_not_report_are_0(data, placed) -> None:  # noqa: F811
    base = fd.algorithms.scaffold()

    def update(server, client, work) -> fd.ClientResult:
        result = base.client_update(server, client, work)
        return result._replace(metrics=result.metrics | {"ratio": result.weight / 0, "one": 1})

    algorithm = fd.compression.compressed(base._replace(client_update=update), fd.compression.random_k(0.3))
    _, (info,) = rounds(simulate(data, algorithm, dropout=0.5, **placed), 1)
    there, of_clients = info["cohort"] >= 0, ("loss", "compression_error", "ratio", "one")
    assert 0 < there.sum() < 10
    for name in of_clients:
        assert (info[name][~there] == 0).all() and (info[name][there] != 0).all(), name


def test_a_round_without_reporting_clients_changes_nothing(data) -> None:  # noqa: F811
    # The server of FedGVR also stores test accuracies. A round without reporting clients must not add one.
    sim = simulate(data, fd.algorithms.fedgvr(), dropout=1.0)
    start = sim.init(jax.random.key(0))
    with pytest.warns(RuntimeWarning, match="round 0: no client reported"):
        state, history = sim.run(start, 2, progress=False)
    assert [record["clients"] for record in history] == [0, 0] and int(state.round) == 2
    jax.tree.map(np.testing.assert_array_equal, (state.server, state.clients), (start.server, start.clients))


def test_the_probabilities_of_dropout_and_stragglers(data) -> None:  # noqa: F811
    _, infos = rounds(simulate(data, fd.algorithms.fedavg(), dropout=0.3, stragglers=0.6, cohort_size=30), 40)
    answered = np.stack([info["cohort"] >= 0 for info in infos])
    assert abs(answered.mean() - 0.7) < 4 * (0.21 / answered.size) ** 0.5
    full, done = steps_of(SIZES), np.stack([info["client_steps"] for info in infos])
    assert ((done > 0) == answered).all() and (done <= full).all()
    part = answered & (done < full)
    assert abs(part[answered].mean() - 0.6) < 4 * (0.24 / answered.sum()) ** 0.5
    shares = (done / full)[part & (full[None] >= 12)]
    assert abs(shares.mean() - 0.5) < 0.05  # each of 1..K_i - 1 steps is equally likely
    assert all(info["steps"] == info["client_steps"].sum() for info in infos)


def test_stragglers_agree_with_a_computation_by_hand() -> None:
    """The loss is |w - 1|^2 / 2, and the learning rate is 1/2. Then D = 1 - 2^-s after s steps.

    This does not depend on the epochs. SCAFFOLD divides the control variate by s, not by the planned 6 steps.
    """
    model = fd.Model(lambda key: jnp.zeros(1), lambda w, x: w[None] - x, loss=lambda z, y: (z[:, 0] ** 2) / 2)
    federation = fd.FederatedData.from_clients([(np.ones((6, 1), "f4"), np.zeros(6, "i4"))] * 20)
    local = fd.LocalTraining(epochs=3, batch_size=3, lr=0.5)
    sim = fd.Simulation(model, federation, fd.algorithms.scaffold(), local=local, cohort_size=20, stragglers=1.0)
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    s = np.asarray(info["client_steps"])
    assert set(s) == {1, 2, 3, 4, 5}  # of 6 steps
    D = 1 - 0.5**s
    np.testing.assert_allclose(state.params[0], D.mean(), rtol=1e-6)
    np.testing.assert_allclose(np.ravel(state.clients.c), -D / (s * 0.5), rtol=1e-6)
    # The loss of a client is the mean of (w - 1)^2 / 2 over its s steps, before each step.
    np.testing.assert_allclose(info["loss"], [np.mean(0.5 * 0.25 ** np.arange(k)) for k in s], rtol=1e-6)


def test_deadlines_and_over_selection_keep_the_fastest_clients(data) -> None:  # noqa: F811
    slow = {"speed_spread": 1.0}
    # A client's time is its slowness times its steps. So the slowness follows from the first deadline that it meets.
    by = {"deadline": 1.0, "cohort_size": 30} | slow
    sim = simulate(data, fd.algorithms.fedavg(), **by)
    how, start, arrays = sim.setup.engine, sim.init(jax.random.key(0)), sim.setup.arrays

    @jax.jit
    def heard(deadline):
        options = sim.setup.options
        options = options._replace(failures=dataclasses.replace(options.failures, deadline=deadline))
        engine = how._replace(sources=sources_of(options, sim.setup.selection))
        return assign(engine, start, arrays, jnp.arange(30)).cohort.id < 30

    deadlines = np.geomspace(0.05, 10, 80)
    there = np.stack([heard(deadline) for deadline in deadlines])
    assert (np.diff(there.astype(int), axis=0) >= 0).all()  # a client that meets a deadline meets all later ones
    taken = np.where(there.any(0), deadlines[there.argmax(0)], np.inf)
    slowness = np.log(taken / steps_of(SIZES) * (2 * -(-np.mean(SIZES) // 4)))
    assert 0.7 < slowness[np.isfinite(slowness)].std() < 1.3
    _, (info,) = rounds(sim, 1)
    np.testing.assert_array_equal(np.sort(info["cohort"][info["cohort"] >= 0]), np.flatnonzero(heard(1.0)))
    for info in rounds(simulate(data, fd.algorithms.fedavg(), over_selection=1.5, **slow), 3)[1]:
        assert len(info["selected"]) == 15 and len(info["cohort"]) == 10 and (info["cohort"] >= 0).all()
        late = np.setdiff1d(info["selected"], info["cohort"])
        assert taken[info["cohort"]].max() <= 1.1 * taken[late].min()  # deadlines differ by a factor of 1.07
        assert np.isin(info["selected"], info["cohort"]).sum() == 10
        in_order = [i for i in info["selected"] if i in info["cohort"]]
        np.testing.assert_array_equal(in_order, info["cohort"])
    # Other selected clients replace those that drop out.
    _, infos = rounds(simulate(data, fd.algorithms.fedavg(), over_selection=2.0, dropout=0.3), 10)
    assert np.mean([(info["cohort"] >= 0).sum() for info in infos]) > 9


@pytest.mark.thorough
def test_drift_is_measured_for_the_clients_that_report(data) -> None:  # noqa: F811
    sim = simulate(data, dropout=0.4, stragglers=0.4, measure=("updates", "gradients"))
    start = sim.init(jax.random.key(0))
    _, info = sim.round_fn(start)
    there = np.asarray(info["cohort"] >= 0)
    assert np.isnan(np.asarray(info["update_norm"])[~there]).all()
    plain = simulate(data, measure="gradients")
    want = plain.measure(start, "gradients", cohort=info["cohort"][there])
    for name in ("period_drift", "dissimilarity", "gradient_variance", "gradient_norm"):
        np.testing.assert_allclose(info[name], want[name], rtol=1e-4)


def test_clipped_mean(data) -> None:  # noqa: F811
    start = simulate(data).init(jax.random.key(0))
    D = []  # each client's update, from a round of this client alone; SCAFFOLD starts with c = 0
    for i in range(4):
        state, _ = simulate(data).round_fn(start, cohort=[i])
        D.append(jax.tree.map(np.subtract, *jax.device_get((state.server, start.server))))
    scaled, norms = [], []
    for d in D:  # the server adds the client's message for c divided by N = 30
        squares = [(leaf**2).sum() for leaf in jax.tree.leaves((d.params, jax.tree.map(lambda c: 30 * c, d.c)))]
        norms.append(np.sqrt(sum(squares)))
        scaled.append(jax.tree.map(lambda leaf, norm=norms[-1]: leaf * min(1, 0.5 / norm), d))
    assert max(norms) > 0.5
    got, _ = simulate(data, aggregation=fd.aggregation.clipped(0.5)).round_fn(start, cohort=range(4))
    want = jax.tree.map(lambda *leaves: sum(leaves) / 4, *[d.params for d in scaled])
    assert_close(jax.tree.map(np.subtract, *jax.device_get((got.params, start.params))), want, 1e-4)
    same, _ = simulate(data, aggregation=fd.aggregation.clipped(1e6)).round_fn(start, cohort=range(4))
    jax.tree.map(np.testing.assert_array_equal, same.server, simulate(data).round_fn(start, cohort=range(4))[0].server)


def test_private_mean(data) -> None:  # noqa: F811
    def private(z: float, cohort: int = 10, **options) -> fd.Simulation:
        rule = fd.aggregation.private(clip_norm=0.1, noise_multiplier=z)
        how = {"aggregation": rule, "sampling": "bernoulli", "cohort_size": cohort} | options
        return simulate(data, fd.algorithms.fedavg(), **how)

    sim = private(3.0, dropout=1.0)
    start = sim.init(jax.random.key(0))
    _, info = private(0.0).round_fn(start)
    assert set(np.asarray(info["weight"])) == {0.0, 1.0}  # the weights do not depend on the sizes

    # Without reporting clients, the server gets only noise from N(0, (z S / K)^2), and uses it like an update.
    noise, state = [], start
    for _ in range(30):
        before, (state, _) = state, sim.round_fn(state)
        noise += [np.ravel(b - a) for a, b in zip(*map(jax.tree.leaves, (before.params, state.params)), strict=True)]
    values = np.concatenate(noise)
    assert abs(values.std() / (3.0 * 0.1 / 10) - 1) < 0.1 and abs(values.mean()) < 4 * values.std() / len(values) ** 0.5
    empty = [int((info["cohort"] >= 0).sum()) for info in rounds(private(1.0, cohort=1), 40)[1]]
    assert 0 in empty  # each client is selected independently, so a cohort may be empty


def test_privacy_accounting(data) -> None:  # noqa: F811
    pytest.importorskip("dp_accounting")

    def spent(z: float, n: int, **options) -> float:
        rule = fd.aggregation.private(clip_norm=1.0, noise_multiplier=z)
        how = {"aggregation": rule, "sampling": "bernoulli", "cohort_size": 3} | options
        return fd.aggregation.epsilon(simulate(data, fd.algorithms.fedavg(), **how), n, 1e-5)

    # 4 rounds of all 30 clients with z = 4 are equivalent to one Gaussian mechanism with z = 2. `delta` is its exact
    # formula (Balle, Wang 2018).
    from scipy.stats import norm

    def delta(epsilon: float, sigma: float) -> float:
        a, b = 1 / (2 * sigma), epsilon * sigma
        return norm.cdf(a - b) - np.exp(epsilon) * norm.cdf(-a - b)

    assert delta(spent(4.0, 4, cohort_size=30), 2.0) == pytest.approx(1e-5, rel=0.02)
    assert spent(1.0, 10) < spent(1.0, 100) < spent(0.7, 100) and spent(0.0, 1) == np.inf
    with pytest.raises(ValueError, match="epsilon needs a simulation with aggregation=fd.aggregation.private"):
        fd.aggregation.epsilon(simulate(data), 1, 1e-5)


PRIVATE = {"aggregation": fd.aggregation.private(1, 1), "sampling": "bernoulli"}
KEEPS = 'keeps the weights of the clients, got private.*: pass weighting="uniform"'
BAD = [
    ({"over_selection": 4}, r"over_selection must be in 1..3 \(all clients\), got 4"),
    ({"speed_spread": 1.0}, "speed_spread has no effect without deadline or over_selection"),
    (PRIVATE | {"sampling": "uniform"}, "must be \"bernoulli\" for the privacy accounting of .*, got 'uniform'"),
    (PRIVATE | {"over_selection": 1.5}, "clients that do not influence each other, got over_selection"),
    (PRIVATE | {"algorithm": fd.algorithms.scaffold(weighting="examples")}, KEEPS),
    (PRIVATE | {"algorithm": fd.algorithms.feddyn(0.1, weighting="examples")}, KEEPS),
]


def test_the_number_of_selected_clients() -> None:
    for K in range(1, 120):
        for percent in (100, 110, 130, 250):
            selected = fd.Failures(over_selection=percent / 100).clients_selected(K, 1000)
            assert selected == -(-percent * K // 100)
        for N in range(K, 2 * K):
            assert fd.Failures(over_selection=N / K).clients_selected(K, N) == N  # selects all clients


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_raises(data, options, message) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=message):
        simulate(data, **options)


def test_grouped_options_equal_flat_options(data) -> None:  # noqa: F811
    mesh = fd.clients_mesh(jax.devices()[:1])
    flat = simulate(data, mesh=mesh, dropout=0.3, deadline=2.0, lanes=2, eval_batch_size=7)
    failures, placement = fd.Failures(dropout=0.3, deadline=2.0), fd.Placement(mesh=mesh, lanes=2, eval_batch_size=7)
    assert fd.Placement("auto", mesh, True) == fd.Placement(lanes="auto", mesh=mesh, stream=True)  # the public order
    options = {"local": LOCAL, "cohort_size": 10, "failures": failures, "placement": placement}
    grouped = fd.Simulation(fd.models.linear((FEATURES,), CLASSES), data, fd.algorithms.scaffold(), **options)
    for name in ("failures", "placement"):
        assert getattr(flat.setup.options, name) == getattr(grouped.setup.options, name)
    with pytest.raises(
        ValueError, match=r"failures= has the option dropout, got both: pass it only in fd.Failures\(...\)"
    ):
        simulate(data, failures=failures, dropout=0.3)
    with pytest.raises(ValueError, match="placement must be of type Placement, got 3"):
        simulate(data, placement=3, mesh=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lane': did you mean 'lanes'"):
        simulate(data, lane=2)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'lr': pass local=fd.LocalTraining\(lr=...\)"):
        simulate(data, lr=0.1)


def test_a_group_executes_the_steps_of_its_longest_lane_in_every_epoch(data) -> None:  # noqa: F811
    engine = simulate(data, local=fd.LocalTraining(epochs=2, batch_size=1)).setup.engine._replace(lanes=2)
    straggler_and_other = Client(
        *[jnp.array(values).reshape(1, 1, 2) for values in ([0, 1], [10, 6], [0, 0], [10, 12], [0, 1])]
    )
    assert executed_steps(engine, straggler_and_other) == 2 * (10 + 6)
    whole = straggler_and_other._replace(steps=jnp.array([[[20, 12]]]))
    assert executed_steps(engine, whole) == 2 * 20


@pytest.mark.thorough
def test_an_algorithm_may_train_stragglers_for_all_steps(data) -> None:  # noqa: F811
    """An algorithm may increase ``work.num_steps``. The result must not depend on the number of lanes."""
    fedavg = fd.algorithms.fedavg()

    def all_steps(server, client, work: fd.Work) -> fd.ClientResult:
        return fedavg.client_update(server, client, work._replace(num_steps=2 * work.epochs * work.num_batches))

    def after_a_round(algorithm, **options):
        sim = simulate(data, algorithm, stragglers=1.0, **options)
        return sim.round_fn(sim.init(jax.random.key(1)))[0].params

    eager = fedavg._replace(client_update=all_steps)
    assert_close(after_a_round(eager, lanes=3), after_a_round(eager, lanes=1))
    with pytest.raises(AssertionError):
        assert_close(after_a_round(eager, lanes=3), after_a_round(fedavg, lanes=3))
