"""Tests of the contract that every algorithm must fulfil.

There are also tests of the FedAvg family: rounds that were computed by hand, limit cases and bad input.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.simulation import hyper, programs
from fedjax_drift.types import ClientResult


def quadratics(targets, sizes) -> tuple[fd.FederatedData, fd.Model]:
    """Client i minimises |w - targets[i]|^2 / 2.

    All examples of a client are equal to its target, so every batch has the same gradient.
    """
    rows = [(np.full((n, 1), a, np.float32), np.zeros(n, np.int32)) for a, n in zip(targets, sizes, strict=True)]
    model = fd.Model(lambda key: jnp.zeros(1), lambda w, x: w[None] - x, loss=lambda z, y: (z[:, 0] ** 2) / 2)
    return fd.FederatedData.from_clients(rows, test=rows[0]), model


def simulate(algorithm, lr=0.5, **options) -> fd.Simulation:
    data, model = quadratics([2.0, 8.0], [1, 3])
    local = fd.LocalTraining(epochs=2, batch_size=10, lr=lr, **options)  # two steps for each client
    one_device = fd.clients_mesh(jax.devices()[:1])  # one device compiles faster
    return fd.Simulation(model, data, algorithm, local=local, cohort_size=2, mesh=one_device)


def models_after(algorithm, rounds=2, start=0.0, **options) -> list[float]:
    sim = simulate(algorithm, **options)
    state, models = sim.init(jax.random.key(0), params=jnp.full(1, start)), []
    for _ in range(rounds):
        state, _ = sim.round_fn(state)
        models.append(float(state.params[0]))
    return models


# After two steps with learning rate 1/2 towards a, a quarter of the distance is left: theta = w / 4 + 3 a / 4, and
# D = 3 (a - w) / 4. The mean of the targets, weighted by examples, is (2 + 3 * 8) / 4 = 6.5, so D = 4.875 in round 0.
def test_fedavg_by_hand() -> None:
    assert models_after(fd.algorithms.fedavg()) == pytest.approx([4.875, 4.875 / 4 + 4.875])
    assert models_after(fd.algorithms.fedavg(server_lr=0.5), 1) == pytest.approx([4.875 / 2])
    assert models_after(fd.algorithms.fedavg(weighting="uniform"), 1) == pytest.approx([3 * 5 / 4])


def test_fedprox_by_hand() -> None:
    # mu = 1/2 and w = 0. The first step leads to a / 2. The second step leads to
    # theta - ((theta - a) + theta / 2) / 2 = a / 2 + a / 4 - a / 8.
    assert models_after(fd.algorithms.fedprox(mu=0.5), 1) == pytest.approx([6.5 * 5 / 8])


def test_fedavgm_by_hand() -> None:
    first, second = 4.875, 0.75 * (6.5 - 4.875)
    assert models_after(fd.algorithms.fedavgm(beta=0.5)) == pytest.approx([first, first + 0.5 * first + second])
    half = first / 2
    second = 0.75 * (6.5 - half)
    damped = models_after(fd.algorithms.fedavgm(beta=0.5, damped=True))
    assert damped == pytest.approx([half, half + 0.5 * half + 0.5 * second])


def test_fedopt_by_hand() -> None:
    D, tau, lr = 4.875, 0.5, 0.1
    m, v = 0.1 * D, 0.99 * tau**2 + 0.01 * D**2
    assert models_after(fd.algorithms.fedadam(lr, tau=tau), 1) == pytest.approx([lr * m / (v**0.5 + tau)])
    v = tau**2 + 0.01 * D**2  # sign(tau^2 - D^2) = -1
    assert models_after(fd.algorithms.fedyogi(lr, tau=tau), 1) == pytest.approx([lr * m / (v**0.5 + tau)])
    v = tau**2 + D**2
    assert models_after(fd.algorithms.fedadagrad(lr, tau=tau), 1) == pytest.approx([lr * D / (v**0.5 + tau)])
    from_zero = fd.algorithms.fedadam(lr, tau=tau, v_0=0)  # as in the library of FedEve's authors
    assert models_after(from_zero, 1) == pytest.approx([lr * m / (0.1 * D + tau)])


def test_limit_cases() -> None:
    fedavg = models_after(fd.algorithms.fedavg(), 4)
    assert models_after(fd.algorithms.fedprox(mu=0), 4) == fedavg
    assert models_after(fd.algorithms.fedavgm(beta=0), 4) == pytest.approx(fedavg, rel=1e-6)
    # With a large tau = sqrt(v_0), adaptive methods equal FedAvg with server learning rate server_lr / (2 tau).
    half = models_after(fd.algorithms.fedavg(server_lr=0.5), 3)
    for name in ("fedadam", "fedyogi", "fedadagrad"):
        assert models_after(ALGORITHMS[name](1e3, b1=0.0, b2=0.9999, tau=1e3), 3) == pytest.approx(half, rel=1e-3)
    # If |D| is much larger than tau, the first update of FedAdagrad is server_lr, independent of the scale of D.
    assert models_after(fd.algorithms.fedadagrad(0.1, tau=1e-6), 1) == pytest.approx([0.1], rel=1e-5)


def test_local_options_by_hand() -> None:
    one_client = {"algorithm": fd.algorithms.fedavg(weighting="uniform"), "rounds": 1, "lr": 0.5}
    # Momentum 1/2: first v = -a and theta = a / 2, then v = -a/2 - a/2 = -a and theta = a. The mean target is 5.
    assert models_after(**one_client, momentum=0.5) == pytest.approx([5.0])
    # With gradients clipped to norm 1, both steps have length 1/2.
    assert models_after(**one_client, clip_norm=1.0) == pytest.approx([1.0])
    # From w = 4 with weight decay 1/4, clipped to norm 1: the steps of client 0 are (1 + 1) / 2 and (1 + 3/4) / 2, so
    # it ends at 2.125. The direction of client 1 is -1 + 1 = 0, so it stays at 4.
    assert models_after(**one_client, start=4.0, clip_norm=1.0, weight_decay=0.25) == pytest.approx([(2.125 + 4) / 2])
    # eta_t = 1/2 and 1/4: in round 0 a quarter of the distance is left, and in round 1 (3/4)^2 of it.
    decayed = models_after(fd.algorithms.fedavg(), lr=0.5, lr_decay=0.5)
    assert decayed == pytest.approx([4.875, 6.5 - (6.5 - 4.875) * 9 / 16])


def small(factory):
    """Returns the algorithm with 0.1 for every hyper-parameter that has no default.

    Its weight decay is 0, because weight decay changes a model even if all gradients are 0.
    """
    parameters = inspect.signature(factory).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty]
    return factory(**dict.fromkeys(required, 0.1), **({"weight_decay": 0.0} if "weight_decay" in parameters else {}))


def contract_simulation(algorithm: fd.Algorithm) -> fd.Simulation:
    """A simulation with six clients of different sizes, with dropout and stragglers.

    The model has features, a head, cosine logits and layers with the usual names, because some algorithms need them. It
    also has a parameter without elements, a scalar and one with five axes.
    """
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(n, 5)).astype("f4"), rng.integers(0, 3, n)) for n in (3, 10, 7, 25, 1, 16)]
    data = fd.FederatedData.from_clients(rows, test_clients=rows)
    local = fd.LocalTraining(epochs=2, batch_size=4)

    def init(key):
        keys = jax.random.split(key)
        hidden, classifier = jax.random.normal(keys[0], (5, 6)), jax.random.normal(keys[1], (6, 3))
        unusual = {"empty": jnp.zeros((0, 3)), "scalar": jnp.ones(()), "five axes": jnp.ones((1, 1, 3, 1, 1))}
        return {"norm": jnp.ones(6), "hidden": hidden, "classifier": classifier, **unusual}

    def features(params, x):
        return jnp.tanh((x @ params["hidden"]) * params["norm"][None])

    def head(params, z):
        scale = params["scalar"] * params["five axes"].reshape(1, 3)
        return fd.models.cosine_logits(z, params["classifier"]) * scale

    model = fd.Model(init, lambda p, x: head(p, features(p, x)), features=features, head=head, cosine=True)
    return fd.Simulation(model, data, algorithm, local=local, cohort_size=3, lanes=2, dropout=0.4, stragglers=0.4)


def loss_of(simulation: fd.Simulation, state: fd.ServerState) -> float:
    """Returns the loss of the model that the clients use: the global model, or the mean over the personal models."""
    if simulation.algorithm.personal is None:
        return simulation.evaluate(state)["loss"]
    return simulation.evaluate_clients(state)["personal_loss"].mean()


SEED = 9  # with it, 1, 0, 3, 2 and 3 clients report in the five rounds


def check_rounds(simulation: fd.Simulation) -> None:
    """Checks five rounds with failing clients.

    - The structure, shapes and dtypes of the state do not change, and its values are finite.
    - Rounds are pure, and the loss decreases.
    - The states of clients that do not report stay bitwise identical. So do the server variables if no client reports.
    """
    start = simulation.init(jax.random.key(SEED))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), start)
    before = jax.tree.map(np.array, (start.params, start.clients))
    state, losses = start, [loss_of(simulation, start)]
    answered = []
    for t in range(5):
        assert int(state.round) == t
        old, (state, info) = state, simulation.round_fn(state)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == shapes
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server, state.clients)))
        assert info["cohort"].shape == info["loss"].shape == (3,)
        absent = np.setdiff1d(np.arange(6), info["cohort"])
        for a, b in zip(jax.tree.leaves(old.clients), jax.tree.leaves(state.clients), strict=True):
            np.testing.assert_array_equal(a[absent], b[absent])
        answered.append(int((info["cohort"] >= 0).sum()))
        if not answered[-1]:
            jax.tree.map(np.testing.assert_array_equal, old.server, state.server)
        losses.append(loss_of(simulation, state))
    assert {0, 3} < set(answered)  # rounds with no clients, with some and with all
    assert min(losses[1:]) < losses[0]
    jax.tree.map(np.testing.assert_array_equal, before, (start.params, start.clients))
    again, _ = simulation.round_fn(old)
    jax.tree.map(np.testing.assert_array_equal, again.server, state.server)


def check_zero_gradient(simulation: fd.Simulation) -> None:
    """If the gradients of all clients are zero, the model does not change."""
    flat = lambda w, x: jnp.ones((len(x), 3))  # noqa: E731
    ones = {name: jnp.ones(3) for name in ("norm", "hidden", "classifier")} | {"empty": jnp.ones((0, 3))}
    model = fd.Model(lambda key: ones, flat, features=flat, cosine=True)
    one_device = fd.clients_mesh(jax.devices()[:1])
    parts = (model, simulation.data, simulation.algorithm)
    still = fd.Simulation(*parts, local=simulation.local, cohort_size=3, mesh=one_device)
    state = still.init(jax.random.key(0))
    for cohort in ([0, 1, 2], [3, 4, 5], [1, 3, 5]):
        state, _ = still.round_fn(state, cohort)
    for leaf in jax.tree.leaves(state.params):
        np.testing.assert_allclose(leaf, 1.0, atol=1e-7)


def check_client_update(simulation: fd.Simulation) -> None:
    """The metrics and the weight that `client_update` returns are scalars."""
    seen: list[ClientResult] = []

    def spy(server, client, work):
        seen.append(simulation.algorithm.client_update(server, client, work))
        return seen[-1]

    algorithm = simulation.algorithm._replace(client_update=spy)
    parts = (simulation.model, simulation.data, algorithm)
    sim = fd.Simulation(*parts, local=simulation.local, cohort_size=3, lanes=1)
    jax.eval_shape(sim.round_fn, sim.init(jax.random.key(0)))
    assert seen
    for result in seen:
        assert result.weight.shape == () and all(value.shape == () for value in result.metrics.values())


def check_hyper_parameters(simulation: fd.Simulation) -> None:
    """Hyper-parameters are arguments of the compiled round. Other values change the result, without recompilation."""
    form, numbers = programs.split(simulation.setup.engine)
    engine = hyper.join(form, [0.9 * number for number in numbers])
    failing = {"dropout": engine.failures.dropout, "stragglers": engine.failures.stragglers}
    parts = (simulation.model, simulation.data, engine.algorithm)
    other = fd.Simulation(*parts, local=engine.local, cohort_size=3, lanes=2, **failing)
    mine, others = simulation.executor.programs, other.executor.programs
    assert others.compiled is mine.compiled and not mine.constant
    assert [float(number) for number in others.numbers] == pytest.approx([0.9 * number for number in numbers])
    state = simulation.init(jax.random.key(SEED))
    ours, theirs = (jax.tree.leaves(sim.round_fn(state)[0].params) for sim in (simulation, other))
    assert not all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


CONTRACT = (check_rounds, check_zero_gradient, check_client_update, check_hyper_parameters)


def check_contract(algorithm: fd.Algorithm) -> None:
    """Raises AssertionError unless the algorithm fulfils the contract of the library's algorithms.

    Users may call it for their own algorithms.
    """
    simulation = contract_simulation(algorithm)
    for check in CONTRACT:
        check(simulation)


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def simulation(request) -> fd.Simulation:
    return contract_simulation(small(ALGORITHMS[request.param]))


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(simulation, check) -> None:
    check(simulation)


def test_the_name_of_the_algorithm_is_registered(simulation) -> None:
    assert simulation.algorithm.name in ALGORITHMS


BAD = [
    (lambda: fd.algorithms.fedavg(server_lr=0), r"server_lr must be a finite number > 0, got 0"),
    (lambda: fd.algorithms.fedavg(weighting="rows"), r"weighting must be one of 'examples', 'uniform', got 'rows'"),
    (lambda: fd.algorithms.fedprox(mu=-1), r"mu must be a finite number >= 0, got -1"),
    (lambda: fd.algorithms.fedprox(mu="0.1"), r"mu must be a finite number >= 0, got '0.1'"),
    (lambda: fd.algorithms.fedprox(mu=float("nan")), r"mu must be a finite number >= 0, got nan"),
    (lambda: fd.algorithms.fedavgm(beta=1.0), r"beta must be in \[0, 1\), got 1.0"),
    (lambda: fd.algorithms.fedadam(0.1, tau=0), r"tau must be a finite number > 0, got 0"),
    (lambda: fd.algorithms.fedadam(0.1, v_0=-1), r"v_0 must be a finite number >= 0, got -1"),
    (lambda: fd.algorithms.fedyogi(0.1, b2=1), r"b2 must be in \[0, 1\), got 1"),
    (lambda: fd.algorithms.fedadagrad(-0.1), r"server_lr must be a finite number > 0, got -0.1"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_hyper_parameters(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
