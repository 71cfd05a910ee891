"""Tests of the algorithms that correct drift: rounds that were computed by hand, limit cases, invariants and bad input.

Some equations are wrong as printed in the papers. The tests also check their effects.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from small import federate, models_after, quadratics, states_after, thorough

import fedjax_drift as fd
from fedjax_drift.algorithms.constrained import PARTS
from fedjax_drift.algorithms.fedreg import remove
from fedjax_drift.types import ServerState


# Two steps with learning rate 1/2 towards a give D = 3 (a - w) / 4. From w = 0, D = 1.5 and 6, and their uniform mean
# is 3.75. K eta = 1.
def test_scaffold_by_hand() -> None:
    # After round 0, c_i = -D_i and c = -3.75. In round 1 the clients move towards 2 - 1.5 + 3.75 = 4.25 and
    # 8 - 6 + 3.75 = 5.75, whose mean is 5.
    first, second = states_after(federate(fd.algorithms.scaffold()), 2)[1:]
    assert (float(first.params), float(second.params)) == pytest.approx((3.75, 3.75 + 0.75 * (5 - 3.75)))
    np.testing.assert_allclose(first.clients.c, [-1.5, -6])
    assert float(first.server.c) == pytest.approx(-3.75)
    # Option I: c_i = -a_i at w = 0, and c = -5. In round 1 both clients move towards 5.
    state = states_after(federate(fd.algorithms.scaffold(option="I")), 2)[-1]
    assert float(state.params) == pytest.approx(3.75 + 0.75 * 1.25)
    np.testing.assert_allclose(state.clients.c, [3.75 - 2, 3.75 - 8])
    assert models_after(fd.algorithms.scaffold(server_lr=0.5), 1) == pytest.approx([1.875])


def test_vrl_sgd_by_hand() -> None:
    # Delta_i = mean D - D_i = 2.25 and -2.25. As with SCAFFOLD, the clients move towards 4.25 and 5.75 in round 1.
    first, second = states_after(federate(fd.algorithms.vrl_sgd()), 2)[1:]
    np.testing.assert_allclose(first.clients.Delta, [2.25, -2.25])
    assert float(second.params) == pytest.approx(3.75 + 0.75 * 1.25)


def test_feddyn_and_feddc_by_hand() -> None:
    # alpha = 1/2 and w = 0. The first step leads to a / 2, and the second to a / 2 + a / 4 - a / 8. The mean of the
    # clients' models is 5 * 5 / 8 = 3.125. h has the same value.
    first, second = states_after(federate(fd.algorithms.feddyn(alpha=0.5)), 2)[1:]
    assert (float(first.server.client_mean), float(first.params)) == pytest.approx((3.125, 6.25))
    np.testing.assert_allclose(first.clients.h, [1.25, 5.0])

    def two_steps(a, h, c=0.0, w=6.25):
        theta = w
        for _ in range(2):
            theta -= 0.5 * ((theta - a) + 0.5 * (theta - w + h) + c)
        return theta - w

    D = (two_steps(2, 1.25) + two_steps(8, 5.0)) / 2
    assert float(second.server.client_mean) == pytest.approx(6.25 + D)
    assert float(second.params) == pytest.approx(6.25 + D + 3.125 + D)
    # FedDC also has c_i = -D_i = -1.25 and -5, and c = -3.125.
    second = states_after(federate(fd.algorithms.feddc(alpha=0.5)), 2)[-1]
    D = (two_steps(2, 1.25, -3.125 + 1.25) + two_steps(8, 5.0, -3.125 + 5.0)) / 2
    assert float(second.params) == pytest.approx(6.25 + D + 3.125 + D)


def test_the_control_variates_of_feddcs_code_by_hand() -> None:
    """q = 1/2 and 3/2. With one example per batch, K = 2 and 6, and Kbar = 4. eta_0 = 1/2 and eta_1 = 1/4."""
    form = {"scale_by_size": True, "variate_lr": "initial", "variate_steps": "mean"}
    for algorithm in (fd.algorithms.scaffold(**form), fd.algorithms.feddc(alpha=1e-30, **form)):
        state = states_after(federate(algorithm, batch_size=1, lr_decay=0.5), 1)[-1]
        D = np.array([2 * (1 - 2.0**-2), 8 * (1 - 2.0**-6)])
        c_i = -D / (4 * 0.5)
        np.testing.assert_allclose(state.clients.c, c_i, rtol=1e-6)
        c = (0.5 * c_i[0] + 1.5 * c_i[1]) / 2
        np.testing.assert_allclose(state.server.c, c, rtol=1e-6)
        again = states_after(federate(algorithm, batch_size=1, lr_decay=0.5), 2)[-1]
        w, q = float(state.params), np.array([0.5, 1.5])
        target = np.array([2, 8]) + c_i - c / q
        left = np.array([0.75**2, 0.75**6])
        D = (target - w) * (1 - left)
        np.testing.assert_allclose(again.clients.c, c_i - c / q - D / (4 * 0.5), rtol=1e-5)


def test_slowmo_and_fedadc_by_hand() -> None:
    # SlowMo: m = -3.75 / 0.5 = -7.5 and w = 3.75 after round 0. Then m = -7.5 / 2 - 0.9375 / 0.5 = -5.625.
    assert models_after(fd.algorithms.slowmo(beta=0.5)) == pytest.approx([3.75, 3.75 + 2.8125])
    # FedADC, "nesterov": mbar = -7.5 / 2. The clients start at 3.75, and their two steps are
    # theta <- (theta + 1.875 + a) / 2. So D = 0.09375 and 4.59375, and m = -4.6875 + 3.75.
    assert models_after(fd.algorithms.fedadc(beta=0.5)) == pytest.approx([3.75, 3.75 + 0.46875])
    # FedADC, "heavy_ball": the two steps are theta <- (theta + a + 3.75) / 2. So D = 1.5 and 6, and m = -7.5 + 3.75.
    blue = fd.algorithms.fedadc(beta=0.5, variant="heavy_ball")
    assert models_after(blue) == pytest.approx([3.75, 3.75 + 1.875])


def test_fedeve_by_hand() -> None:
    sim = federate(fd.algorithms.fedeve())
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    period, spread = 4.875**2 / 2, (3.375**2 + 1.125**2) / 4  # weighted mean 4.875, |S| = 2, d = 1
    G = period / (period + spread)
    assert (float(info["period_variance"]), float(info["client_variance"])) == pytest.approx((period, spread))
    assert (float(info["gain"]), float(state.params)) == pytest.approx((G, G * 4.875))
    assert float(state.server.s2) == pytest.approx((1 - G) * period)
    what = 2 * G * 4.875  # the clients start at w - M
    s2, M = (1 - G) * period, -G * 4.875
    state, info = sim.round_fn(state)
    Delta = -0.75 * (6.5 - what)
    period = s2 + (M - Delta) ** 2 / 2
    G = period / (period + float(info["client_variance"]))
    assert float(state.params) == pytest.approx(4.875 * -M / 4.875 - (M + G * (Delta - M)), rel=1e-5)
    unweighted = federate(fd.algorithms.fedeve(period_variance="code", centre="uniform"))
    _, info = unweighted.round_fn(unweighted.init(jax.random.key(0)))
    assert float(info["client_variance"]) == pytest.approx(2.25**2 * 2 / 4)


def test_fedgvr_fedgm_and_fedgvrgm_by_hand() -> None:
    # mu = 1/2: in round 0, D = 5 a / 8 with mean 3.125, and c_i = -D_i. Round 1 starts at w = 3.125 with
    # c - c_i = -1.875 and 1.875, and eps = 1.
    def two_steps(w, a, drift=0.0):
        theta = w
        for _ in range(2):
            theta -= 0.5 * ((theta - a) + 0.5 * (theta - w) + drift)
        return theta - w

    D = (two_steps(3.125, 2, -1.875) + two_steps(3.125, 8, 1.875)) / 2
    assert models_after(fd.algorithms.fedgvr(mu=0.5)) == pytest.approx([3.125, 3.125 + D])
    D = (two_steps(3.125, 2) + two_steps(3.125, 8)) / 2
    assert models_after(fd.algorithms.fedgm(mu=0.5, beta=0.5)) == pytest.approx([3.125, 3.125 + 0.5 * 3.125 + D])
    damped = fd.algorithms.fedgm(mu=0.5, beta=0.5, scale="one_minus_beta")
    assert models_after(damped, 1) == pytest.approx([3.125 / 2])
    # With beta = 1/2, the change of c is half of the mean of dc, so c = -3.125 / 2.
    D = (two_steps(3.125, 2, 1.25 - 1.5625) + two_steps(3.125, 8, 5 - 1.5625)) / 2
    both = fd.algorithms.fedgvrgm(mu=0.5, beta=0.5)
    assert models_after(both) == pytest.approx([3.125, 3.125 + 0.5 * 3.125 + D])


def test_lfd_by_hand() -> None:
    """One example x = (1, 0) with label 0. The margin is 1/2 and tau = 1.

    The weights of the classes are (1, 0) and (0, 1), so the cosines are 1 and 0.
    """
    model = fd.Model(lambda key: jnp.eye(2), lambda W, x: fd.models.cosine_logits(x, W), cosine=True)
    data = fd.FederatedData.from_clients([(np.float32([[1, 0]]), np.array([0]))])
    sim = federate(fd.algorithms.lfd(temperature=1.0, margin=0.5), (data, model), epochs=1, lr=1.0)
    first, _ = sim.round_fn(sim.init(jax.random.key(0)))
    # d cos_1 / d W_1 = x, and p_1 = 1 / (1 + e^(1/2)). W_0 is parallel to x, so its gradient is 0.
    p1 = 1 / (1 + np.exp(0.5))
    np.testing.assert_allclose(first.params, [[1, -p1], [0, 1]], rtol=1e-6)
    # In round 1, f_P = f_G, so yhat = (1/2, 1/2). The derivative by cos_1 is q1 for the label and q1 - 1/2 for yhat.
    second, _ = sim.round_fn(first)
    length = np.hypot(p1, 1)
    cos1 = -p1 / length
    q1 = 1 / (1 + np.exp(0.5 - cos1))
    along = (np.array([1, 0]) - cos1 * np.array([-p1, 1]) / length) / length
    np.testing.assert_allclose(second.params[:, 1], [-p1, 1] - (q1 + q1 - 0.5) * along, rtol=1e-5)


def test_moon_by_hand() -> None:
    """The features are the parameters: z = z_glob = w = (1, 1) and z_prev = (0, 1). T = 1.

    The gradient of the cross-entropy is 0.
    """
    features = lambda w, x: jnp.ones((len(x), 1)) * w[None]  # noqa: E731
    model = fd.Model(lambda key: jnp.ones(2), lambda w, x: jnp.zeros((len(x), 2)), features=features)
    data = fd.FederatedData.from_clients([(np.ones((1, 1), np.float32), np.array([0]))])
    sim = federate(fd.algorithms.moon(temperature=1.0), (data, model), epochs=1, lr=1.0)
    state = sim.init(jax.random.key(0))
    previous = state.clients._replace(model=jnp.array([[0.0, 1.0]]), seen=jnp.array([True]))
    state, _ = sim.round_fn(state._replace(clients=previous))
    cos = 2**-0.5
    gradient = (np.array([0, cos]) - cos * np.array([0.5, 0.5])) / (1 + np.exp(1 - cos))
    np.testing.assert_allclose(state.params, 1 - gradient, rtol=1e-6)


def test_fedregs_projection_by_hand() -> None:
    drift = jnp.array([3.0, 4.0])
    for g, left in (([2.0, 0.0], [0.0, 4.0]), ([-2.0, 0.0], [3.0, 4.0]), ([0.0, 0.0], [3.0, 4.0])):
        np.testing.assert_allclose(remove(drift, jnp.array(g)), left)


def test_eps_of_fedgvr_follows_the_accuracy() -> None:
    """With window = 2, eps is 1 for t = 0, 1, 2.

    After that it is half of the rise of the best accuracy over two rounds, in percent, clipped to [0, 1].
    """
    algorithm = fd.algorithms.fedgvr(window=2)
    server, mean = algorithm.init_server(jnp.zeros(())), (jnp.zeros(()), jnp.zeros(()))
    context = fd.Round(jnp.int32(0), jnp.float32(0.1), jnp.float32(1), 2, 2.0)
    seen = []
    for accuracy in (0.5, 0.9, 0.8, 0.901, 0.91, 0.5, 0.5):
        seen.append(float(algorithm.report(server, mean, context)["eps"]))
        server = algorithm.observe(server, {"loss": jnp.zeros(()), "accuracy": jnp.float32(accuracy)})
    assert seen == pytest.approx([1, 1, 1, 1, 0.05, 0.5, 0.45], abs=1e-4)
    fractions = fd.algorithms.fedgvr(window=2, literal="accuracy")
    assert float(fractions.report(server._replace(best=jnp.float32([0, 0, 1])), mean, context)["eps"]) == 0.5


# A small classifier and clients of different sizes, for comparing two algorithms over the same rounds.
SIZES = (3, 10, 7, 25, 1, 16)


def ragged(equal: bool = False) -> fd.FederatedData:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(n, 5)).astype("f4"), rng.integers(0, 3, n)) for n in ([8] * 6 if equal else SIZES)]
    return fd.FederatedData.from_clients(rows, test=rows[3])


COHORTS = [(5, 1, 4), (0, 3, 2), (3, 1, 0), (4, 2, 5)]  # given cohorts compile faster


def tanh_features(params, x):
    return jnp.tanh(x @ params["hidden"])


def tiny_init(key):
    hidden, out = jax.random.split(key)
    return {"hidden": jax.random.normal(hidden, (5, 4)) / 2, "out": jax.random.normal(out, (4, 3)) / 2}


MODEL = fd.Model(tiny_init, lambda params, x: tanh_features(params, x) @ params["out"], features=tanh_features)


def run(algorithm, rounds=4, equal=False, model=MODEL, change=None, cohorts=COHORTS, **local) -> ServerState:
    options = {"epochs": 2, "batch_size": 4} | local
    one_device = fd.clients_mesh(jax.devices()[:1])
    sim = fd.Simulation(
        model, ragged(equal), algorithm, local=fd.LocalTraining(**options), cohort_size=3, mesh=one_device
    )
    state = sim.init(jax.random.key(0))
    for cohort in cohorts[:rounds]:
        state, _ = sim.round_fn(state if change is None else change(state), cohort)
    return state


def assert_same(a, b, rtol=1e-5) -> None:
    a, b = ravel_pytree(a)[0], ravel_pytree(b)[0]
    assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


@pytest.mark.thorough
def test_limit_cases() -> None:
    alg = fd.algorithms
    fedavg = run(alg.fedavg(weighting="uniform")).params
    assert_same(run(alg.slowmo(beta=0.0)).params, fedavg)
    slowmo = run(alg.slowmo(beta=0.7)).params
    for variant in ("nesterov", "heavy_ball"):
        assert_same(run(alg.fedadc(beta=0.7, variant=variant, gamma=0)).params, slowmo)
    scaffold = run(alg.scaffold())
    assert_same(run(alg.fedgvr(mu=0.0, window=10)).params, scaffold.params)
    assert_same(run(alg.feddc(alpha=0.2, variate="none")).params, run(alg.feddyn(alpha=0.2)).params)
    assert_same(run(alg.moon(mu=0.0)).params, run(alg.fedavg()).params)
    assert_same(run(alg.constrained(mu=0.3)).params, run(alg.fedprox(mu=0.3)).params)

    def forget_h(state):
        server = state.server
        return state._replace(
            server=server._replace(params=server.client_mean, h=jax.tree.map(jnp.zeros_like, server.h))
        )

    feddc = run(alg.feddc(alpha=1e-30), change=forget_h)
    assert_same(feddc.server.client_mean, scaffold.params)
    assert_same(feddc.server.c, scaffold.server.c)

    def flat_accuracy(state):
        server = state.server
        return state._replace(server=server._replace(evaluated=jnp.int32(100), best=jnp.full_like(server.best, 100.0)))

    gvrgm = run(alg.fedgvrgm(mu=0.3, beta=0.0, scale="one"), change=flat_accuracy)
    assert_same(gvrgm.params, run(alg.fedprox(mu=0.3, weighting="uniform")).params)


@pytest.mark.thorough
def test_the_aggregations_of_feddc() -> None:
    """All are equal if all clients participate and have equal sizes. "cohort" and "paper" do not need equal sizes.

    With "paper", w is always the mean of theta_i + h_i, weighted by n_i.
    """
    everyone = {"equal": True, "cohorts": [range(6)] * 3, "rounds": 3}
    code, cohort, paper = (
        run(fd.algorithms.feddc(0.1, aggregation=name), **everyone) for name in ("code", "cohort", "paper")
    )
    assert_same(paper.params, code.params)
    assert_same(cohort.params, code.params)
    cohort, paper = (
        run(fd.algorithms.feddc(0.1, aggregation=name), **everyone | {"equal": False}) for name in ("cohort", "paper")
    )
    assert_same(cohort.params, paper.params)
    state = run(fd.algorithms.feddc(0.1, aggregation="paper"))
    p = jnp.float32(SIZES) / sum(SIZES)
    assert_same(state.params, jax.tree.map(lambda s: jnp.tensordot(p, s, 1), state.clients.sent))


def test_the_first_participation_of_a_client_in_moon_and_lfd() -> None:
    """Without a previous model, the losses of MOON and LfD have no second term.

    This also holds for MOON with first="random_init" in round 0. With first="uniform", LfD has a second term, whose
    soft label is uniform because f_P = f_G.
    """
    alg = fd.algorithms
    assert_same(run(alg.moon(mu=5.0), 1).params, run(alg.fedavg(), 1).params, 1e-6)
    assert_same(run(alg.moon(mu=5.0, first="random_init"), 1).params, run(alg.fedavg(), 1).params, 1e-6)
    later = run(alg.moon(mu=5.0), 4).params
    with pytest.raises(AssertionError):
        assert_same(later, run(alg.fedavg(), 4).params, 1e-2)
    cosine = fd.models.linear((5,), 3, cosine=True)
    smoothed, plain = (run(alg.lfd(first=first), 1, model=cosine) for first in ("uniform", "none"))
    with pytest.raises(AssertionError):
        assert_same(smoothed.params, plain.params, 1e-2)
    assert int(plain.clients.seen.sum()) == 3


def test_server_variables_equal_the_means_over_all_clients() -> None:
    """With client sampling and different sizes, c is the mean of all c_i, and h the mean of all h_i.

    The sum of all Delta_i of VRL-SGD is 0 if all clients make the same number of steps.
    """
    mean = lambda tree: jax.tree.map(lambda a: a.mean(0), tree)  # noqa: E731
    for algorithm in (fd.algorithms.scaffold(), fd.algorithms.scaffold(option="I"), fd.algorithms.fedgvr()):
        state = run(algorithm)
        assert_same(state.server.c, mean(state.clients.c))
    for algorithm in (fd.algorithms.feddc(alpha=0.1), fd.algorithms.feddc(alpha=0.1, variate="last_update")):
        state = run(algorithm)
        assert_same(state.server.c, mean(state.clients.c))
        assert_same(state.server.h, mean(state.clients.h))
    state = run(fd.algorithms.feddyn(alpha=0.1))
    assert_same(state.server.h, mean(state.clients.h))
    state = run(fd.algorithms.vrl_sgd(), equal=True)
    total, size = (ravel_pytree(tree)[0] for tree in (mean(state.clients.Delta), state.clients.Delta))
    assert np.linalg.norm(total) < 1e-5 * np.linalg.norm(size)


@pytest.mark.parametrize("gamma", [None, 0.5, 1.0])
@pytest.mark.parametrize("variant", ["nesterov", "heavy_ball"])
def test_fedadc_has_the_momentum_of_slowmo_for_every_gamma(variant, gamma) -> None:
    """The new m is beta m plus the sum of the gradients, for every gamma.

    With one client and one step, this is heavy-ball SGD. With "nesterov", the gradient is evaluated at a shifted point.
    """
    data_model, lr, beta = quadratics([2.0]), 0.5, 0.6
    sim = federate(fd.algorithms.fedadc(beta, variant=variant, gamma=gamma), data_model, epochs=1, lr=lr)
    share = 1.0 if gamma is None else gamma * beta
    w, m = 0.0, 0.0
    for state in states_after(sim, 4)[1:]:
        point = w - lr * share * m if variant == "nesterov" else w
        m = beta * m + (point - 2.0)
        w = w - lr * m
        assert float(state.params) == pytest.approx(w, abs=1e-5)
        assert float(state.server.m) == pytest.approx(m, abs=1e-5)


def test_the_gain_of_fedeve() -> None:
    """Checks the gain G in several cases.

    - Round 0 equals a round of damped FedAvgM with beta = 1 - G.
    - After every round s2 = G sR2.
    - In the steady state sQ2 / sR2 = G^2 / (1 - G).
    - G is 1 for a single client, and 0 if all updates are 0.
    """
    sim = federate(fd.algorithms.fedeve(), (ragged(), MODEL), 3, batch_size=4, lr=0.1)
    start = sim.init(jax.random.key(0))
    state, info = sim.round_fn(start)
    gain = float(info["gain"])
    assert 0 < gain < 1
    damped = federate(fd.algorithms.fedavgm(1 - gain, damped=True), (ragged(), MODEL), 3, batch_size=4, lr=0.1)
    assert_same(state.params, damped.round_fn(damped.init(jax.random.key(0)))[0].params)
    for _ in range(5):
        state, info = sim.round_fn(state)
        G, sR2 = float(info["gain"]), float(info["client_variance"])
        assert 0 < G < 1 and float(state.server.s2) == pytest.approx(G * sR2, rel=1e-4)
    sQ2, sR2, s2 = 0.3, 1.0, 0.0
    for _ in range(200):
        G = (s2 + sQ2) / (s2 + sQ2 + sR2)
        s2 = (1 - G) * (s2 + sQ2)
    assert G**2 / (1 - G) == pytest.approx(sQ2 / sR2)
    alone = federate(fd.algorithms.fedeve(), quadratics([2.0]))
    _, info = alone.round_fn(alone.init(jax.random.key(0)))
    assert float(info["gain"]) == 1.0
    at_rest = federate(fd.algorithms.fedeve(), quadratics([2.0, 2.0]))
    state, info = at_rest.round_fn(at_rest.init(jax.random.key(0), params=jnp.asarray(2.0)))
    assert (float(info["gain"]), float(state.params)) == (0.0, 2.0)


@pytest.mark.parametrize(("clients", "lanes"), [(10, 1), thorough(1000, 1), thorough(1000, 100)])
def test_a_small_client_variance_of_fedeve_is_accurate(clients, lanes) -> None:
    """The relative error is below 1 % in float32.

    The spread of the updates is 0.03 of the mean update, and the model has 2,000 parameters.
    """
    rng = np.random.default_rng(0)
    direction = rng.normal(size=2_000)
    updates = (direction + 0.03 * rng.normal(size=(clients, 2_000))).astype("f4")
    sizes = rng.integers(1, 20, clients)
    rows = [(np.full((n, 1), i, np.int32), np.zeros(n, np.int32)) for i, n in enumerate(sizes)]
    table = jnp.asarray(updates)
    # The gradient of client i is -updates[i] everywhere, so one step with learning rate 1 gives D_i = updates[i].
    model = fd.Model(lambda key: jnp.zeros(2_000), lambda w, x: -(table[x[:, 0]] @ w), loss=lambda z, y: z)
    data = fd.FederatedData.from_clients(rows)
    local = fd.LocalTraining(batch_size=20, lr=1.0)
    sim = fd.Simulation(model, data, fd.algorithms.fedeve(), local=local, cohort_size=clients, lanes=lanes)
    _, info = sim.round_fn(sim.init(jax.random.key(0)))
    exact = updates.astype(float)
    centre = (sizes @ exact) / sizes.sum()
    assert float(info["client_variance"]) == pytest.approx(((exact - centre) ** 2).mean(1).sum() / clients**2, rel=1e-2)
    assert float(info["period_variance"]) == pytest.approx((centre**2).mean() / clients, rel=1e-3)


# Tests of the equations of FedGVRGM as printed in the paper. The optima and curvatures of the clients differ. The
# window is longer than the runs, so eps stays 1.
UNEVEN = ([-4.0, 1.0, 6.0], None, [0.3, 2.0, 1.0])
OPTIMUM = (-4 * 0.3 + 1 * 2 + 6 * 1) / 3.3


def end_of(algorithm, rounds=60, **local) -> float:
    return models_after(algorithm, rounds, quadratics(*UNEVEN), **{"epochs": 5, "lr": 0.1} | local)[-1]


@pytest.mark.thorough
def test_equations_of_fedgvr_as_printed() -> None:
    gvr = lambda **options: fd.algorithms.fedgvr(mu=0.1, window=1000, **options)  # noqa: E731
    assert end_of(gvr()) == pytest.approx(OPTIMUM, abs=1e-3)
    # "step": 20 epochs move the model about as far as 2 epochs.
    far = {epochs: end_of(gvr(literal="step"), 1, epochs=epochs) for epochs in (2, 20)}
    assert far[20] == pytest.approx(far[2], rel=0.15)
    assert end_of(gvr(), 1, epochs=20) > 3 * end_of(gvr(), 1, epochs=2)
    # "sign": the correction increases drift, and training diverges.
    assert not abs(end_of(gvr(literal="sign"), 40) - OPTIMUM) < 100
    # "scale": the correction has almost no effect, so the fixed point is close to that of FedProx.
    fedprox = end_of(fd.algorithms.fedprox(mu=0.1))
    assert abs(fedprox - OPTIMUM) > 0.03
    rate = {"lr": 0.02, "epochs": 25}
    biased = end_of(fd.algorithms.fedprox(mu=0.1), **rate)
    assert end_of(gvr(literal="scale"), **rate) == pytest.approx(biased, abs=0.1 * abs(biased - OPTIMUM))


@pytest.mark.thorough
def test_equations_of_fedgm_and_fedgvrgm_as_printed() -> None:
    gm = lambda **options: fd.algorithms.fedgm(mu=0.1, beta=0.9, **options)  # noqa: E731
    fixed = end_of(gm(), 300)
    assert fixed == pytest.approx(end_of(fd.algorithms.fedprox(mu=0.1)), abs=1e-2)
    assert abs(fixed) > 1
    # "momentum": the mean of the last 100 models is far from the correct fixed point.
    tail = models_after(gm(literal="momentum"), 400, quadratics(*UNEVEN), epochs=5, lr=0.1)[-100:]
    assert abs(np.mean(tail) - fixed) > 0.7 * abs(fixed)
    # The only fixed point has wtilde = 0, so w is -share / (1 - share) times the correct fixed point. Here share is the
    # fraction of the distance to the correct fixed point that one round covers.
    share = end_of(fd.algorithms.fedprox(mu=0.1, weighting="uniform"), 1) / fixed
    assert np.mean(tail) == pytest.approx(-share / (1 - share) * fixed, rel=1e-2)
    gvrgm = lambda **options: fd.algorithms.fedgvrgm(mu=0.1, beta=0.9, window=10_000, **options)  # noqa: E731
    damped = {"scale": "one_minus_beta"}  # all clients participate, so |S| / N = 1 would not damp the momentum
    assert end_of(gvrgm(**damped), 400, lr=0.02) == pytest.approx(OPTIMUM, abs=1e-2)
    assert not abs(end_of(gvrgm(**damped, literal="variate_momentum"), 400, lr=0.02) - OPTIMUM) < 10
    # With beta = 0.9 and larger local steps, training diverges even if the momentum of c is damped, because c changes
    # too slowly. It converges if c has no momentum, as in SCAFFOLD.
    assert not abs(end_of(gvrgm(**damped), 800) - OPTIMUM) < 10
    assert end_of(gvrgm(**damped, variate_momentum=False), 400) == pytest.approx(OPTIMUM, abs=1e-2)


@pytest.mark.thorough
def test_the_exact_recursion_overshoots_less_if_eps_jumps() -> None:
    """eps is 1 in every tenth round and 0 otherwise.

    With the printed recursion, c_k - c grows while eps is 0. The correction is then too strong, and w overshoots.
    """

    def worst(recursion: str) -> float:
        sim = federate(fd.algorithms.fedgvr(0.1, 5, 1.0, recursion), quadratics(*UNEVEN), epochs=5, lr=0.1)
        state, errors = sim.init(jax.random.key(0)), []
        for t in range(60):
            best = jnp.zeros(6).at[-1].set(100.0 if t % 10 == 9 else 0.0)
            state = state._replace(server=state.server._replace(best=best, evaluated=jnp.int32(100)))
            state, _ = sim.round_fn(state)
            errors.append(abs(float(state.params) - OPTIMUM))
        return max(errors[30:])

    assert worst("printed") > 2 * worst("exact")


@pytest.mark.thorough
def test_a_constraint_restricts_its_part() -> None:
    """A strong penalty on a part keeps its weights close to those of the global model. The other parts still move."""

    def extractor(params, x):
        return jnp.tanh(x @ params["extractor"])

    @jax.jit  # the parameters of a part must also be found inside jit
    def features(params, x):
        return jnp.tanh(extractor(params, x) @ params["header"])

    def init(key):
        keys = jax.random.split(key, 3)
        return {name: jax.random.normal(key, (5, 5)) for name, key in zip(PARTS, keys, strict=True)}

    model = fd.Model(init, lambda p, x: features(p, x) @ p["classifier"], features=features, extractor=extractor)

    start = run(fd.algorithms.fedavg(), 0, model=model).params

    def moved(**options) -> dict[str, float]:
        params = run(fd.algorithms.constrained(**options), 1, model=model).params
        return {part: float(jnp.abs(params[part] - start[part]).max()) for part in PARTS}

    free = moved(mu=0.0)
    for part in PARTS:
        held = moved(mu=19.0, part=part)
        assert held[part] < 0.5 * free[part]
        assert all(held[other] > 0.5 * free[other] for other in free if other != part)
    for part, mu in (("extractor", 3.0), ("header", 3.0), ("classifier", 0.3), ("all", 0.3)):
        outputs = moved(mu=mu, kind="feature", part=part)
        assert outputs[part if part in PARTS else "classifier"] < 0.95 * free[part if part in PARTS else "classifier"]


@pytest.mark.thorough
def test_hyper_parameters_may_be_traced_and_of_a_wider_dtype_than_the_parameters() -> None:
    """vmap over a float32 hyper-parameter works for parameters in float32 and in bfloat16, whose dtype does not change.

    It also works with measures, with an evaluation in every round, and with local momentum.
    """
    data, cohort = ragged(), jnp.array([0, 3, 2])
    half = MODEL._replace(init=lambda key: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_init(key)))

    def params(make, model, value, **options):
        local = fd.LocalTraining(batch_size=4, momentum=0.5)
        mesh = fd.clients_mesh(jax.devices()[:1])
        sim = fd.Simulation(model, data, make(value), local=local, cohort_size=3, mesh=mesh, **options)
        return sim.round_fn(sim.init(jax.random.key(0)), cohort)[0].params

    for make, models, options in (
        (lambda value: fd.algorithms.feddc(value), (MODEL, half), {}),
        (lambda value: fd.algorithms.fedgvr(value), (MODEL,), {"measure": "updates", "on_nonfinite": "raise"}),
    ):
        one = params(make, MODEL, 0.5, **options)
        for model, tolerance in zip(models, (1e-5, 3e-2), strict=False):
            many = jax.vmap(lambda value: params(make, model, value, **options))(jnp.array([0.1, 0.5]))  # noqa: B023
            assert many["out"].dtype == model.init(jax.random.key(0))["out"].dtype
            assert_same(jax.tree.map(lambda a: a[1].astype(float), many), one, tolerance)
    run(fd.algorithms.fedavg(), 1)  # raises if a tracer is left in a cache


def test_an_error_in_a_round_carries_the_last_state_and_the_history() -> None:
    data, model = quadratics([1e15, 2e15])
    sim = federate(fd.algorithms.fedgvr(), (data, model), lr=100.0)
    with pytest.raises(ValueError, match="start from an earlier state") as raised:
        sim.run(sim.init(jax.random.key(0)), 50, progress=False)
    state, history = raised.value.state, raised.value.history
    assert int(state.round) == len(history) > 0 and np.isfinite(state.params)


def test_literal_true_selects_all_equations() -> None:
    everything = ("step", "sign", "scale", "accuracy")

    def computed(algorithm: fd.Algorithm) -> str:
        return federate(algorithm, quadratics([1.0, 2.0])).specification.identity["computation"]

    for make, names in ((fd.algorithms.fedgm, "momentum"), (fd.algorithms.fedgvr, everything)):
        assert computed(make(literal=True)) == computed(make(literal=names)) != computed(make())


BAD = [
    (lambda: fd.algorithms.feddc(0.1, variate_lr="mean"), r"variate_lr must be one of 'current', 'initial'"),
    (lambda: fd.algorithms.fedgvr(literal="signs"), r"did you mean 'sign'"),
    (lambda: fd.algorithms.fedreg(gamma=0), r"gamma must be in \(0, 1\], got 0"),
    (lambda: run(fd.algorithms.moon(), model=no_features()), r"moon needs a model with features.*Model\(features="),
    (lambda: run(fd.algorithms.lfd()), r"lfd needs a model whose logits are cosines.*cosine=True"),
    (lambda: run(fd.algorithms.constrained(1.0, part="header")), r"with extractor.*fd.models.simple_cnn"),
    (lambda: run(fd.algorithms.fedadc(0.9), momentum=0.9), r"fedadc needs plain local SGD.*momentum=0.9"),
    (lambda: federate(fd.algorithms.fedreg()), r"fedreg needs a classifier with the default loss"),
    (lambda: federate(fd.algorithms.fedgvrgm(), without_test()), r"fedgvrgm evaluates the model in every round.*test="),
    (lambda: fd.algorithms.fedgvrgm(variate_momentum=False, literal="variate_momentum"), r"leave out one"),
    (
        lambda: federate(fd.algorithms.fedgvr(), (regression(), LINE)),
        r"fedgvr needs the test accuracy, got an evaluation without it: use a classifier",
    ),
    (
        lambda: run(fd.algorithms.fedavg(), model=counting()),
        r"parameters must have a floating dtype, got int32 at \['n'\]",
    ),
    (lambda: run(fd.algorithms.fedgvrgm(), lr=1e30), r"round 0: the evaluation that fedgvrgm uses must be finite"),
]


LINE = fd.Model(lambda key: jnp.zeros(()), lambda w, x: x * w, loss=lambda z, y: (z - y) ** 2)


def regression() -> fd.FederatedData:
    rows = (np.ones(4, np.float32), np.ones(4, np.float32))
    return fd.FederatedData.from_clients([rows, rows], test=rows)


def counting() -> fd.Model:
    return MODEL._replace(init=lambda key: tiny_init(key) | {"n": jnp.int32(1)})


def no_features() -> fd.Model:
    return MODEL._replace(features=None)


def without_test() -> tuple[fd.FederatedData, fd.Model]:
    data, model = quadratics([1.0, 2.0])
    return fd.FederatedData(data.x, data.y, data.sizes), model


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_input(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
