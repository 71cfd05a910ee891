"""Baselines of 2019 to 2026: rounds computed by hand, limit cases that are other algorithms, and invariants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from small import federate, models_after, quadratics, states_after
from test_drift_algorithms import COHORTS, assert_same, run

import fedjax_drift as fd
from fedjax_drift.algorithms.feddecorr import redundancy
from fedjax_drift.algorithms.fedswa import decaying

alg = fd.algorithms
CLIP = {"weight_decay": 0.1, "clip_norm": 0.4, "lr_decay": 0.9}
EVERYONE = {"cohorts": [range(6)] * 3, "rounds": 3}
ONE_STEP = {"epochs": 1, "batch_size": 25}


def parameters(algorithm, **options) -> jax.Array:
    return ravel_pytree(run(algorithm, **options).params)[0]


# Two steps of rate 1/2 towards a: theta = w / 4 + 3 a / 4. From w = 0, D = 1.5 and 6 for the targets 2 and 8, of one
# and three examples. K = 2 and K eta = 1.
def test_control_variates_and_biases_by_hand() -> None:
    # SAM moves the target 1/2 away. Round 0: D = 3 (a + 1/2) / 4, c_i = -D. Then g = theta - (a + s / 2) + c - c_i.
    D = np.array([0.75 * 2.5, 0.75 * 8.5])
    w, c_i = D.mean(), -D
    moved = []
    for a, offset in zip((2, 8), c_i.mean() - c_i, strict=True):
        theta = w
        for _ in range(2):
            theta -= 0.5 * (theta + 0.5 * np.sign(theta - a) - a + offset)
        moved.append(theta - w)
    assert models_after(alg.fedgamma(rho=0.5)) == pytest.approx([w, w + np.mean(moved)])
    # AdaBest: h = -D after round 0, wbar = 3.75 and w = 3.75 + beta 3.75. Round 1 has the targets a + mu h.
    w, wbar = 1.5 * 3.75, 3.75
    new = w + 0.75 * np.mean([a + 0.1 * h - w for a, h in zip((2, 8), (-1.5, -6), strict=True)])
    states = states_after(federate(alg.adabest(mu=0.1, beta=0.5)), 2)
    assert [float(s.params) for s in states[1:]] == pytest.approx([w, new + 0.5 * (new - wbar)])
    theta = w + 0.75 * np.array([2 - 0.15 - w, 8 - 0.6 - w])
    np.testing.assert_allclose(states[2].clients.h, [-1.5 + w - theta[0], -6 + w - theta[1]], rtol=1e-5)
    assert states[2].clients.t.tolist() == [1, 1]


def test_stochastic_weight_averaging_by_hand() -> None:
    # rho = 1/2, K = 2: the rates are 1/2 and 3/8, so 1/2 * 5/8 of the distance is left. The sum of the rates is 7/8.
    D = np.array([2, 8]) * (1 - 0.5 * 0.625)
    assert models_after(alg.fedswa(rho=0.5, alpha=1.5), 1) == pytest.approx([1.5 * D.mean()])
    w, c_i = 1.5 * D.mean(), -D / 0.875
    m = 0.2 * c_i.mean()
    second = np.mean([(a - m + c - w) * (1 - 0.5 * 0.625) for a, c in zip((2, 8), c_i, strict=True)])
    states = states_after(federate(alg.fedmoswa(rho=0.5, alpha=1.5, gamma=0.2)), 2)
    assert [float(s.params) for s in states[1:]] == pytest.approx([w, w + 1.5 * second])
    np.testing.assert_allclose(states[1].clients.c, c_i, rtol=1e-5)
    assert float(states[1].server.m) == pytest.approx(m)


def test_momentum_by_hand() -> None:
    # Mime, beta = 1/2: c = w - 5. All clients take the step -(theta - a) + (w - a) + c = theta - 5 and end at 3.75.
    # m = -5. In round 1, the direction is theta - 5 - 2.5.
    assert models_after(alg.mime(beta=0.5)) == pytest.approx([3.75, 3.75 / 4 + 0.75 * 7.5])
    # MimeLite: g = theta - a, so the means are those of FedAvg, and the same.
    assert models_after(alg.mimelite(beta=0.5)) == pytest.approx([3.75, 3.75 / 4 + 0.75 * 7.5])
    # Damped, kappa = 1/2: a step covers a quarter of the distance, m = -2.5, and 7 / 16 of the distance to 5 + 2.5.
    first = 5 * 7 / 16
    damped = [first, first + (7.5 - first) * 7 / 16]
    assert models_after(alg.mimelite(beta=0.5, damped=True)) == pytest.approx(damped)
    # GHBM, tau = 1: in round 1, m = w_0 - w_1 = -4.875, added to the gradient as beta m / (eta K) = beta m.
    w = 4.875
    assert models_after(alg.ghbm(tau=1, beta=0.5)) == pytest.approx([w, w / 4 + 0.75 * (6.5 + 0.5 * w)])
    assert models_after(alg.localghbm(beta=0.5)) == models_after(alg.ghbm(tau=1, beta=0.5))
    # Nesterov: theta moves by 0.25 * 4.875 before each of the two gradients.
    shift, theta = 0.25 * w, w
    for _ in range(2):
        theta = (theta + shift) / 2 + 6.5 / 2
    assert models_after(alg.ghbm(tau=1, beta=0.5, nesterov=True))[1] == pytest.approx(theta)
    # FedHBM, tau = 2: g + beta (theta_i - theta) / (tau eta K), with theta_i = 1.5 and 6.
    ends = []
    for a, old in ((2, 1.5), (8, 6.0)):
        theta = w
        for _ in range(2):
            theta -= 0.5 * (theta - a + 0.5 * (old - theta) / 2)
        ends.append(theta)
    assert models_after(alg.fedhbm(tau=2.0, beta=0.5))[1] == pytest.approx((ends[0] + 3 * ends[1]) / 4)


def test_the_buffer_of_ghbm() -> None:
    """In round t >= tau, m is that of the model tau rounds ago, before it 0. A round without clients does not count."""
    data_model = quadratics([2.0, 8.0])
    for tau in (2, 3):
        wanted = [0.0]
        for t in range(7):
            m = (wanted[t - tau] - wanted[t]) / tau if t >= tau else 0
            wanted.append(wanted[-1] / 2 + 5 / 2 - 0.5 * m)
        found = models_after(alg.ghbm(tau=tau, beta=0.5), 7, data_model, epochs=1)
        assert found == pytest.approx(wanted[1:], rel=1e-5)


def test_fairness_by_hand() -> None:
    # q-FedAvg, q = 1, L = 1 / eta = 2: F = a^2 / 2, d = -2 D = -3 and -12.
    F, d = np.array([2.0, 32.0]), np.array([-3.0, -12.0])
    wanted = -(F * d).sum() / (d**2 + 2 * F).sum()
    states = states_after(federate(alg.qfedavg(q=1.0)), 1)
    assert float(states[1].params) == pytest.approx(wanted)
    assert float(states[1].server.s) == pytest.approx(17)
    # The next round does not depend on s.
    sim, state = federate(alg.qfedavg(q=1.0)), states[1]
    other = state._replace(server=state.server._replace(s=jnp.float32(3.0)))
    assert_same(sim.round_fn(state)[0].params, sim.round_fn(other)[0].params)
    # With lipschitz=1, d = -D.
    wanted = (F * -d / 2).sum() / (d**2 / 4 + F).sum()
    assert models_after(alg.qfedavg(q=1.0, lipschitz=1.0), 1) == pytest.approx([wanted])


@pytest.mark.thorough
def test_agnostic_by_hand() -> None:
    # The domains are the targets. a = (1/2) / (1, 3), beta = (1/2, 1/2), so both clients count the same: 3.75.
    where = lambda x, y: (x[:, 0] > 5).astype(jnp.int32)  # noqa: E731
    options = {"domains": 2, "domain": where, "counts0": [1, 3], "domain_lr": 0.1}
    states = states_after(federate(alg.agnostic(**options)), 2)
    grown = np.exp(0.1 * np.array([2.0, 32.0]))
    weights = grown / grown.sum()
    np.testing.assert_allclose(states[1].server.weights, weights, rtol=1e-5)
    assert states[1].server.counts.tolist() == [[1, 3]]
    first = 3.75
    second = first + 0.75 * (weights @ [2, 8] - first)
    assert [float(s.params) for s in states[1:]] == pytest.approx([first, second])
    assert float(states[2].server.average) == pytest.approx((first + second) / 2)
    # AFL: lambda + 0.05 L = (0.6, 2.1) is projected to (0, 1).
    projected = states_after(federate(alg.agnostic(update="projection", **options | {"domain_lr": 0.05})), 1)
    np.testing.assert_allclose(projected[1].server.weights, [0, 1], atol=1e-6)
    # "client" divides the sums of the batches by the weight of the client: with two batches, a step is half as long.
    halves = quadratics([2.0, 8.0], [2, 2])
    options |= {"counts0": [2, 2]}
    one, two = (models_after(alg.agnostic(scale=s, **options), 1, halves, batch_size=1) for s in ("batch", "client"))
    assert one == pytest.approx([5 * (1 - 0.5**4)]) and two == pytest.approx([5 * (1 - 0.75**4)])
    info = (sim := federate(alg.agnostic(**options))).round_fn(sim.init(jax.random.key(0)))[1]
    assert float(info["largest_domain_loss"]) == 32 and "average_loss" in sim.evaluate(states[1])


def test_clusters_by_hand() -> None:
    # Models 1 and 7: each client takes the nearer one. A third model, which nobody chooses, does not move.
    models = [jnp.float32(1.0), jnp.float32(7.0), jnp.float32(-90.0)]
    data_model = quadratics([2.0, 8.0, 0.0], [1, 3, 3])
    ends = np.array([0.25 + 1.5, 7 / 4 + 6, 0.25])
    for algorithm, first in ((alg.ifca(models), (1.75 + 0.25) / 2), (alg.hypcluster(models), (1.75 + 3 * 0.25) / 4)):
        sim = federate(algorithm, data_model)
        state, info = sim.round_fn(sim.init(jax.random.key(0)))
        np.testing.assert_allclose(state.server.models, [first, ends[1], -90], rtol=1e-6)
        assert [float(info[f"clients_of_model_{j}"]) for j in range(3)] == [2, 1, 0]
        assert float(state.params) == pytest.approx(first)
        assert [float(sim.personal_params(state, i)) for i in range(3)] == pytest.approx([first, 7.75, first])
        assert (np.asarray(info["uplink_bytes"]) == 8 + 4 * (algorithm.name == "hypcluster")).all()  # and its weight


def test_meta_learning_by_hand() -> None:
    # The Hessian is 1: g = (1 - alpha) (theta - alpha (theta - a) - a) = (1 - alpha)^2 (theta - a), or without the
    # second factor. The personal model of w is w - alpha (w - a).
    for options, factor in (
        ({}, 0.9**2), ({"delta": None}, 0.9**2), ({"variant": "first_order"}, 0.9), ({"batches": "same"}, 0.9**2)
    ):  # fmt: skip
        sim = federate(alg.perfedavg(alpha=0.1, **options))
        state = states_after(sim, 1)[1]
        assert float(state.params) == pytest.approx(5 * (1 - (1 - factor / 2) ** 2), rel=1e-3)
        assert float(sim.personal_params(state, 1)) == pytest.approx(0.9 * float(state.params) + 0.8)


def logits_are_parameters(algorithm, rounds, **local):
    """The states of one client whose logits are the parameters, (1, 0, -1) at first, and whose label is 0."""
    model = fd.Model(lambda key: jnp.arange(1.0, -2.0, -1.0), lambda w, x: jnp.tile(w[None], (len(x), 1)))
    data = fd.FederatedData.from_clients([(np.zeros((1, 1), np.float32), np.array([0]))])
    sim = federate(algorithm, (data, model), **{"epochs": 2, "batch_size": 1, "lr": 1.0} | local)
    state, states = sim.init(jax.random.key(0)), []
    for _ in range(rounds):
        state = sim.round_fn(state)[0]
        states.append(state)
    return states


def softmax(z) -> np.ndarray:
    return np.exp(z) / np.exp(z).sum()


def test_distillation_by_hand() -> None:
    z = np.array([1.0, 0.0, -1.0])
    one_hot, T, rho = np.array([1, 0, 0]), 2.0, 0.5
    first = z - (softmax(z) - one_hot)  # theta = w = e: neither algorithm changes the first step

    def step(theta, at, extra=0.0):
        return theta - (softmax(at) - one_hot + extra)

    # FedGMT: the gradient of gamma T^2 KL(p_e || p_theta) is gamma T (p_theta - p_e), the softmaxes at temperature T.
    teacher = softmax(z / T)
    end = step(first, first, 0.3 * T * (softmax(first / T) - teacher))
    states = logits_are_parameters(alg.fedgmt(gamma=0.3, temperature=T, alpha=0.8, beta=10.0), 2)
    h = end - z
    np.testing.assert_allclose(states[0].params, end + h, rtol=1e-5)
    e = 0.8 * z + 0.2 * (end + h)
    np.testing.assert_allclose(states[0].server.e, e, rtol=1e-5)
    theta, teacher = end + h, softmax(e / T)
    for _ in range(2):
        theta = step(theta, theta, 0.3 * T * (softmax(theta / T) - teacher) + h / 10)
    h = h + theta - (end + h)
    np.testing.assert_allclose(states[1].params, theta + h, rtol=1e-5)

    # FedSOL: the direction of the perturbation is p_theta - p_w, and each entry has its share of |theta - w|.
    r = softmax(first / T) - softmax(z / T)
    e = rho * r / np.linalg.norm(r)
    share = np.abs(first - z) / np.linalg.norm(first - z)
    for adaptive, perturbation in ((False, e), (True, e * share)):
        state = logits_are_parameters(alg.fedsol(rho, T, adaptive), 1)[0]
        np.testing.assert_allclose(state.params, step(first, first + perturbation), rtol=1e-5)


def test_feddecorr_by_hand() -> None:
    h = np.array([[1.0, 2.0, 0.0], [3.0, -1.0, 1.0], [0.0, 4.0, 1.0], [9.0, 9.0, 9.0]], np.float32)
    mask = np.array([True, True, True, False])
    C = np.corrcoef(h[:3].T)
    off = C[~np.eye(3, dtype=bool)]
    assert float(redundancy(h, mask, "correlation")) == pytest.approx((off**2).mean(), rel=1e-5)
    assert float(redundancy(h, mask, "code")) == pytest.approx(4 / 3 * (off**2).mean(), rel=1e-5)  # (b - 1)^2 / b
    scaled = h * np.float32([3, -2, 0.5]) + np.float32([1, 2, 3])
    assert float(redundancy(scaled, mask, "code")) == pytest.approx(float(redundancy(h, mask, "code")), rel=1e-4)
    assert float(redundancy(h, np.array([True, False, False, False]), "code")) == 0
    gradient = jax.grad(lambda h: redundancy(h, mask, "code"))(jnp.asarray(h))
    assert np.isfinite(gradient).all() and not gradient[3].any() and gradient[:3].any()
    one = jax.grad(lambda h: redundancy(h, jnp.array([True, False, False, False]), "code"))(jnp.asarray(h))
    assert not one.any()


@pytest.mark.thorough
def test_limits() -> None:
    fedavg, uniform = parameters(alg.fedavg(), **CLIP), parameters(alg.fedavg(weighting="uniform"), **CLIP)
    weighted = (
        alg.feddecorr(beta=0.0), alg.fedsol(rho=0.0), alg.ghbm(beta=0.0), alg.localghbm(beta=0.0), alg.fedhbm(beta=0.0),
        alg.hypcluster(models=1), alg.ghbm(tau=10), alg.agnostic(1, lambda x, y: 0 * y, scale="batch"),
    )  # fmt: skip
    for same in weighted:
        assert_same(parameters(same, **CLIP), fedavg)
    equal = (
        alg.mimelite(beta=0.0), alg.adabest(mu=0.0, beta=0.0), alg.fedswa(rho=1.0, alpha=1.0), alg.ifca(models=1),
        alg.perfedavg(alpha=0.0), alg.qfedavg(q=0.0), alg.qfedavg(q=0.0, lipschitz=3.0),
    )  # fmt: skip
    for same in equal:
        assert_same(parameters(same, **CLIP), uniform)
    assert_same(parameters(alg.fedgamma(rho=0.0), **CLIP), parameters(alg.scaffold(), **CLIP))
    faster = parameters(alg.fedavg(1.5, "uniform"), **CLIP)
    assert_same(parameters(alg.fedswa(rho=1.0, alpha=1.5), **CLIP), faster)
    first = {"rounds": 1}
    assert_same(parameters(alg.fedmoswa(), **first), parameters(alg.fedswa(), **first))
    assert_same(parameters(alg.fedgamma(), **first), parameters(alg.fedsam(), **first))
    everyone = parameters(alg.fedmoswa(1.0, 1.0, 1.0), **EVERYONE)
    assert_same(everyone, parameters(alg.scaffold(), **EVERYONE))
    with pytest.raises(AssertionError):
        assert_same(parameters(alg.fedmoswa(1.0, 1.0, 0.5), **EVERYONE), everyone, 1e-2)
    assert_same(parameters(alg.localghbm(beta=0.5), **EVERYONE), parameters(alg.ghbm(tau=1, beta=0.5), **EVERYONE))
    assert_same(parameters(alg.fedgmt(aggregation="cohort"), **EVERYONE), parameters(alg.fedgmt(), **EVERYONE))
    examples = parameters(alg.fedgmt(weighting="examples"), equal=True)
    assert_same(examples, parameters(alg.fedgmt(), equal=True))
    assert_same(parameters(alg.mime(weighting="examples"), equal=True), parameters(alg.mime(), equal=True))


@pytest.mark.thorough
def test_limits_of_one_step() -> None:
    fedavg = parameters(alg.fedavg(), **ONE_STEP)
    assert_same(parameters(alg.fedsol(rho=3.0), **ONE_STEP), fedavg)
    assert_same(parameters(alg.fedsol(rho=3.0, adaptive=False), **ONE_STEP), fedavg)
    swa = [parameters(alg.fedmoswa(rho=rho), **ONE_STEP) for rho in (0.1, 1.0)]
    assert_same(*swa)
    dual = parameters(alg.feddyn(0.1), **ONE_STEP)
    assert_same(parameters(alg.fedgmt(gamma=0.0), **ONE_STEP), dual)
    assert_same(parameters(alg.fedgmt(gamma=2.0, alpha=0.0), **ONE_STEP), dual)
    # One full-batch step of all clients is a step of the centralised heavy ball: m <- m / 2 + c, w <- w - eta m.
    local = EVERYONE | ONE_STEP
    heavy_ball = parameters(alg.fedavgm(0.5, weighting="uniform"), **local)
    assert_same(parameters(alg.mime(beta=0.5), **local), heavy_ball)
    assert_same(parameters(alg.mimelite(beta=0.5), **local), heavy_ball)
    # FedCM(1 - beta) at rate eta / (1 - beta)
    ghbm = parameters(alg.ghbm(tau=1, beta=0.5, weighting="uniform"), lr=0.05, equal=True)
    assert_same(ghbm, parameters(alg.fedcm(alpha=0.5), lr=0.1, equal=True))
    # Damped at rate eta is undamped at (1 - beta) eta, also with a decaying rate.
    for factory in (alg.mime, alg.mimelite):
        damped = parameters(factory(beta=0.5, damped=True), lr=0.1, lr_decay=0.9)
        assert_same(damped, parameters(factory(beta=0.5), lr=0.05, lr_decay=0.9))
    # One client with one batch: c is the gradient of the batch at w.
    alone = ONE_STEP | {"epochs": 3, "cohorts": [[3], [5], [2]], "rounds": 3}
    assert_same(parameters(alg.mime(), **alone), parameters(alg.mimelite(), **alone))


def test_invariants() -> None:
    state = run(alg.fedgamma(), **EVERYONE)
    assert_same(state.server.c, jax.tree.map(lambda c: c.mean(0), state.clients.c))
    for factory in (alg.fedgmt,):
        state = run(factory())
        assert_same(state.server.h, jax.tree.map(lambda h: h.mean(0), state.clients.h))
    sim, states = run(alg.localghbm()), run(alg.localghbm(), rounds=1)
    t = np.asarray(sim.clients.t)
    last = [max(r for r, cohort in enumerate(COHORTS) if i in cohort) for i in range(6)]
    assert t.tolist() == last and set(np.asarray(states.clients.t)) == {-1, 0}
    weights = run(alg.agnostic(3, domain_lr=1.0)).server.weights
    assert (np.asarray(weights) >= 0).all() and float(weights.sum()) == pytest.approx(1) and np.ptp(weights) > 0
    constant = run(alg.agnostic(3, domain_lr=0.0)).server.weights
    np.testing.assert_allclose(constant, 1 / 3, rtol=1e-6)
    steps = np.arange(7)
    rates = 1 - (1 - 0.3) * steps / 7
    work = type("Work", (), {"num_steps": jnp.int32(7), "lr": jnp.float32(1), "optimizer": optax.identity()})()
    work._replace = lambda optimizer: optimizer
    decay, found = decaying(work, 0.3), []
    memory = decay.init(jnp.ones(()))
    for _ in steps:
        u, memory = decay.update(jnp.ones(()), memory, jnp.ones(()))
        found.append(float(u))
    np.testing.assert_allclose(found, rates, rtol=1e-6)
    assert sum(rates) == pytest.approx((7 * (1 + 0.3) + 1 - 0.3) / 2)


BAD = [
    (lambda: alg.fedmoswa(gamma=0), r"gamma must be in \(0, 1\], got 0"),
    (lambda: alg.localghbm(tau=0), r"tau must be a finite number > 0, got 0: None means the rounds since the last"),
    (lambda: alg.fedgmt(aggregation="mean"), r"aggregation must be one of 'all', 'cohort', got 'mean'"),
    (lambda: alg.perfedavg(delta=0), r"delta must be a finite number > 0, got 0: None means the exact product"),
    (lambda: alg.agnostic(2, lambda0=[0.5, 0.4]), r"lambda0 must have the sum 1, got 0.9: divide it by its sum"),
    (lambda: alg.agnostic(2, counts0=[1]), r"counts0 must be 2 finite numbers >= 0, one per domain, got \[1\]"),
    (lambda: run(alg.agnostic(2), 1), r"domains must be at least the number of classes, 3, if the label is the domain"),
    (lambda: alg.ifca(0), r"models must be an integer >= 1, got 0: pass their number, or a list of parameters"),
    (lambda: alg.ifca([]), r"the number of models must be an integer >= 1, got 0"),
    (
        lambda: run(alg.ifca([{"w": jnp.ones(3)}]), 1),
        r"model 0 of ifca must have the structure and the shapes",
    ),
    (lambda: run(alg.mime(), 1, momentum=0.5), r"mime needs plain local SGD"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_two_phases_need_a_synchronous_round() -> None:
    data, model = quadratics([2.0, 8.0, 3.0])
    make = lambda **options: fd.Simulation(model, data, alg.mime(), cohort_size=2, **options)  # noqa: E731
    with pytest.raises(ValueError, match=r"mime needs synchronous rounds, because it asks all clients of a round"):
        make(clock=fd.clock.asynchronous(3))
    private = fd.aggregation.private(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"is that of one message per client and round, got mime, whose clients send"):
        make(aggregation=private, sampling="bernoulli")


ONE_VERSION = {
    "qfedavg": alg.qfedavg(5.0), "agnostic": alg.agnostic(2, lambda x, y: (y > 3).astype(int)),
    "fedmoswa": alg.fedmoswa(), "fedadc": alg.fedadc(0.6), "fedadc, gamma": alg.fedadc(0.6, gamma=0.1),
    "compressed": fd.compression.compressed(alg.qfedavg(5.0), fd.compression.top_k(0.5)),
}  # fmt: skip
ONE_RATE = {
    "slowmo": alg.slowmo(0.6), "fedcm": alg.fedcm(), "mofedsam": alg.mofedsam(), "fedadamw": alg.fedadamw(),
    "vrl_sgd": alg.vrl_sgd(), "fedadc": alg.fedadc(0.6, gamma=0.0),
}  # fmt: skip


def test_means_of_messages_on_the_scale_of_a_variable_of_the_server_need_one_version() -> None:
    data, model = quadratics([2.0, 8.0, 3.0])

    def make(algorithm: fd.Algorithm, concurrency: int = 3, **local) -> fd.Simulation:
        clock = fd.clock.asynchronous(concurrency)
        return fd.Simulation(model, data, algorithm, local=fd.LocalTraining(**local), cohort_size=2, clock=clock)

    for algorithm in ONE_VERSION.values():
        make(algorithm, concurrency=2)  # all clients start together
        with pytest.raises(fd.errors.ConfigurationError, match="needs clients that start with the same variables of"):
            make(algorithm)
    for algorithm in ONE_RATE.values():
        make(algorithm), make(algorithm, concurrency=2, lr_decay=0.9)
        for varying in ({"lr_decay": 0.9}, {"lr": lambda t: 0.1 / (1 + t)}):
            with pytest.raises(fd.errors.ConfigurationError, match="needs a constant learning rate in asynchronous"):
                make(algorithm, **varying)


def test_the_first_phase_of_a_round_has_the_clients_and_the_weights_of_the_second() -> None:
    targets, sizes = [2.0, 8.0, -1.0, 5.0, 4.0], [1, 3, 2, 4, 1]
    data, model = quadratics(targets, sizes)
    local = fd.LocalTraining(epochs=2, batch_size=10, lr=0.5)
    failing, plain = (
        fd.Simulation(model, data, alg.mime(weighting="examples"), local=local, cohort_size=4, **options)
        for options in ({"dropout": 0.4}, {})
    )
    state = failing.init(jax.random.key(4))
    for _ in range(3):
        after, info = failing.round_fn(state)
        reporting = [i for i in np.asarray(info["cohort"]).tolist() if i >= 0]
        assert 0 < len(reporting) <= 4
        assert_same(after.server, plain.round_fn(state, reporting)[0].server)
        state = after
    assert float(info["downlink_bytes"]) == 3 * 4 and np.asarray(info["uplink_bytes"]).max() == 2 * 4
    # Importance sampling: client i counts 1 / p_i times, and the divisors of both means are fixed.
    p = np.array([0.25, 0.75, 1.0, 1.0, 1.0])
    rule = fd.participation.importance(p)
    sim = fd.Simulation(model, data, alg.mime(beta=0.5), local=local, cohort_size=4, participation=rule)
    state, info = sim.round_fn(sim.init(jax.random.key(1)))
    reporting = [i for i in np.asarray(info["cohort"]).tolist() if i >= 0]
    assert 3 <= len(reporting) < 5
    c = sum(-targets[i] / p[i] for i in reporting) / 5
    assert float(state.server.m) == pytest.approx(c)
    assert float(state.params) == pytest.approx(-0.75 * c * sum(1 / p[i] for i in reporting) / 5)
    # The aggregation rule also acts on the first phase: gradients of the length 1.
    clipped = federate(alg.mime(beta=0.0), (data, model))
    sim = fd.Simulation(
        model, data, alg.mime(beta=0.5), local=local, cohort_size=5, aggregation=fd.aggregation.clipped(1.0)
    )
    assert float(sim.round_fn(sim.init(jax.random.key(0)))[0].server.m) == pytest.approx(-3 / 5)
    assert float(clipped.round_fn(clipped.init(jax.random.key(0)))[0].params) == pytest.approx(0.75 * 3.6)


def test_algorithms_around_one_with_two_phases() -> None:
    mime = run(alg.mime())
    sent = fd.compression.compressed(alg.mime(), fd.compression.top_k(1.0))
    assert_same(run(sent).server, mime.server)
    assert_same(run(alg.partly_shared(alg.mime(), personal=lambda path: False)).params, mime.params)
    shared = run(alg.partly_shared(alg.mime(), personal="out"))
    assert not shared.server.m["out"].any() and shared.server.m["hidden"].any()
