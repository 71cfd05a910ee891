"""FedDC, LfD, FedEve, FedADC and FedGVRGM: rounds that were computed by hand, and the equations as printed.

Some equations are wrong as printed in the papers. The tests also check their effects.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import federate, models_after, quadratics, states_after

import fedjax_drift as fd

pytestmark = pytest.mark.thorough  # the core has the slow loops of test_trajectories.py
alg = fd.algorithms


# Two steps of rate 1/2 towards a: D = 3 (a - w) / 4. The targets are 2 and 8, so D = 1.5 and 6 from w = 0. K eta = 1.
def test_feddyn_and_feddc_by_hand() -> None:
    # alpha = 1/2 and w = 0. The first step leads to a / 2, and the second to a / 2 + a / 4 - a / 8. The mean of the
    # clients' models is 5 * 5 / 8 = 3.125. h has the same value.
    first, second = states_after(federate(alg.feddyn(alpha=0.5)), 2)[1:]
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
    second = states_after(federate(alg.feddc(alpha=0.5)), 2)[-1]
    D = (two_steps(2, 1.25, -3.125 + 1.25) + two_steps(8, 5.0, -3.125 + 5.0)) / 2
    assert float(second.params) == pytest.approx(6.25 + D + 3.125 + D)


def test_slowmo_and_fedadc_by_hand() -> None:
    # SlowMo: m = -3.75 / 0.5 = -7.5 and w = 3.75 after round 0. Then m = -7.5 / 2 - 0.9375 / 0.5 = -5.625.
    assert models_after(alg.slowmo(beta=0.5)) == pytest.approx([3.75, 3.75 + 2.8125])
    # FedADC, "nesterov": mbar = -7.5 / 2. The clients start at 3.75, and their two steps are
    # theta <- (theta + 1.875 + a) / 2. So D = 0.09375 and 4.59375, and m = -4.6875 + 3.75.
    assert models_after(alg.fedadc(beta=0.5)) == pytest.approx([3.75, 3.75 + 0.46875])
    # FedADC, "heavy_ball": the two steps are theta <- (theta + a + 3.75) / 2. So D = 1.5 and 6, and m = -7.5 + 3.75.
    blue = alg.fedadc(beta=0.5, variant="heavy_ball")
    assert models_after(blue) == pytest.approx([3.75, 3.75 + 1.875])


def test_fedeve_by_hand() -> None:
    sim = federate(alg.fedeve())
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
    unweighted = federate(alg.fedeve(period_variance="code", centre="uniform"))
    _, info = unweighted.round_fn(unweighted.init(jax.random.key(0)))
    assert float(info["client_variance"]) == pytest.approx(2.25**2 * 2 / 4)


def test_the_gain_of_fedeve_at_its_limits() -> None:
    """It is 1 for a single client, whose updates have no variance, and 0 at rest, where all variances are 0."""
    alone = federate(alg.fedeve(), quadratics([2.0]))
    assert float(alone.round_fn(alone.init(jax.random.key(0)))[1]["gain"]) == 1.0
    at_rest = federate(alg.fedeve(), quadratics([2.0, 2.0]))
    state, info = at_rest.round_fn(at_rest.init(jax.random.key(0), params=jnp.asarray(2.0)))
    assert (float(info["gain"]), float(state.params)) == (0.0, 2.0)


@pytest.mark.parametrize(("clients", "lanes"), [(10, 1), (1000, 1), (1000, 100)])
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
    sim = fd.Simulation(model, data, alg.fedeve(), local=local, cohort_size=clients, lanes=lanes)
    _, info = sim.round_fn(sim.init(jax.random.key(0)))
    exact = updates.astype(float)
    centre = (sizes @ exact) / sizes.sum()
    assert float(info["client_variance"]) == pytest.approx(((exact - centre) ** 2).mean(1).sum() / clients**2, rel=1e-2)
    assert float(info["period_variance"]) == pytest.approx((centre**2).mean() / clients, rel=1e-3)


def test_lfd_by_hand() -> None:
    """One example x = (1, 0) with label 0. The margin is 1/2 and tau = 1.

    The weights of the classes are (1, 0) and (0, 1), so the cosines are 1 and 0.
    """
    model = fd.Model(lambda key: jnp.eye(2), lambda W, x: fd.models.cosine_logits(x, W), cosine=True)
    data = fd.FederatedData.from_clients([(np.float32([[1, 0]]), np.array([0]))])
    sim = federate(alg.lfd(temperature=1.0, margin=0.5), (data, model), epochs=1, lr=1.0)
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


def test_fedgvr_fedgm_and_fedgvrgm_by_hand() -> None:
    # mu = 1/2: in round 0, D = 5 a / 8 with mean 3.125, and c_i = -D_i. Round 1 starts at w = 3.125 with
    # c - c_i = -1.875 and 1.875, and eps = 1.
    def two_steps(w, a, drift=0.0):
        theta = w
        for _ in range(2):
            theta -= 0.5 * ((theta - a) + 0.5 * (theta - w) + drift)
        return theta - w

    D = (two_steps(3.125, 2, -1.875) + two_steps(3.125, 8, 1.875)) / 2
    assert models_after(alg.fedgvr(mu=0.5)) == pytest.approx([3.125, 3.125 + D])
    D = (two_steps(3.125, 2) + two_steps(3.125, 8)) / 2
    assert models_after(alg.fedgm(mu=0.5, beta=0.5)) == pytest.approx([3.125, 3.125 + 0.5 * 3.125 + D])
    damped = alg.fedgm(mu=0.5, beta=0.5, scale="one_minus_beta")
    assert models_after(damped, 1) == pytest.approx([3.125 / 2])
    # With beta = 1/2, the change of c is half of the mean of dc, so c = -3.125 / 2.
    D = (two_steps(3.125, 2, 1.25 - 1.5625) + two_steps(3.125, 8, 5 - 1.5625)) / 2
    both = alg.fedgvrgm(mu=0.5, beta=0.5)
    assert models_after(both) == pytest.approx([3.125, 3.125 + 0.5 * 3.125 + D])


# Tests of the equations of FedGVRGM as printed in the paper. The optima and curvatures of the clients differ. The
# window is longer than the runs, so eps stays 1.
UNEVEN = ([-4.0, 1.0, 6.0], None, [0.3, 2.0, 1.0])

OPTIMUM = (-4 * 0.3 + 1 * 2 + 6 * 1) / 3.3


def end_of(algorithm, rounds=60, **local) -> float:
    return models_after(algorithm, rounds, quadratics(*UNEVEN), **{"epochs": 5, "lr": 0.1} | local)[-1]


def test_equations_of_fedgvr_as_printed() -> None:
    gvr = lambda **options: alg.fedgvr(mu=0.1, window=1000, **options)  # noqa: E731
    assert end_of(gvr()) == pytest.approx(OPTIMUM, abs=1e-3)
    # "step": 20 epochs move the model about as far as 2 epochs.
    far = {epochs: end_of(gvr(literal="step"), 1, epochs=epochs) for epochs in (2, 20)}
    assert far[20] == pytest.approx(far[2], rel=0.15)
    assert end_of(gvr(), 1, epochs=20) > 3 * end_of(gvr(), 1, epochs=2)
    # "sign": the correction increases drift, and training diverges.
    assert not abs(end_of(gvr(literal="sign"), 40) - OPTIMUM) < 100
    # "scale": the correction has almost no effect, so the fixed point is close to that of FedProx.
    fedprox = end_of(alg.fedprox(mu=0.1))
    assert abs(fedprox - OPTIMUM) > 0.03
    rate = {"lr": 0.02, "epochs": 25}
    biased = end_of(alg.fedprox(mu=0.1), **rate)
    assert end_of(gvr(literal="scale"), **rate) == pytest.approx(biased, abs=0.1 * abs(biased - OPTIMUM))


def test_equations_of_fedgm_and_fedgvrgm_as_printed() -> None:
    gm = lambda **options: alg.fedgm(mu=0.1, beta=0.9, **options)  # noqa: E731
    fixed = end_of(gm(), 300)
    assert fixed == pytest.approx(end_of(alg.fedprox(mu=0.1)), abs=1e-2)
    assert abs(fixed) > 1
    # "momentum": the mean of the last 100 models is far from the correct fixed point.
    tail = models_after(gm(literal="momentum"), 400, quadratics(*UNEVEN), epochs=5, lr=0.1)[-100:]
    assert abs(np.mean(tail) - fixed) > 0.7 * abs(fixed)
    # The only fixed point has wtilde = 0, so w is -share / (1 - share) times the correct fixed point. Here share is the
    # fraction of the distance to the correct fixed point that one round covers.
    share = end_of(alg.fedprox(mu=0.1, weighting="uniform"), 1) / fixed
    assert np.mean(tail) == pytest.approx(-share / (1 - share) * fixed, rel=1e-2)
    gvrgm = lambda **options: alg.fedgvrgm(mu=0.1, beta=0.9, window=10_000, **options)  # noqa: E731
    damped = {"scale": "one_minus_beta"}  # all clients participate, so |S| / N = 1 would not damp the momentum
    assert end_of(gvrgm(**damped), 400, lr=0.02) == pytest.approx(OPTIMUM, abs=1e-2)
    assert not abs(end_of(gvrgm(**damped, literal="variate_momentum"), 400, lr=0.02) - OPTIMUM) < 10
    # With beta = 0.9 and larger local steps, training diverges even if the momentum of c is damped, because c changes
    # too slowly. It converges if c has no momentum, as in SCAFFOLD.
    assert not abs(end_of(gvrgm(**damped), 800) - OPTIMUM) < 10
    assert end_of(gvrgm(**damped, variate_momentum=False), 400) == pytest.approx(OPTIMUM, abs=1e-2)


def test_the_exact_recursion_overshoots_less_if_eps_jumps() -> None:
    """eps is 1 in every tenth round and 0 otherwise.

    With the printed recursion, c_k - c grows while eps is 0. The correction is then too strong, and w overshoots.
    """

    def worst(recursion: str) -> float:
        sim = federate(alg.fedgvr(0.1, 5, 1.0, recursion), quadratics(*UNEVEN), epochs=5, lr=0.1)
        state, errors = sim.init(jax.random.key(0)), []
        for t in range(60):
            best = jnp.zeros(6).at[-1].set(100.0 if t % 10 == 9 else 0.0)
            state = state._replace(server=state.server._replace(best=best, evaluated=jnp.int32(100)))
            state, _ = sim.round_fn(state)
            errors.append(abs(float(state.params) - OPTIMUM))
        return max(errors[30:])

    assert worst("printed") > 2 * worst("exact")


def test_literal_true_selects_all_equations() -> None:
    everything = ("step", "sign", "scale", "accuracy")

    def computed(algorithm: fd.Algorithm) -> str:
        return federate(algorithm, quadratics([1.0, 2.0])).specification.identity["computation"]

    for make, names in ((alg.fedgm, "momentum"), (alg.fedgvr, everything)):
        assert computed(make(literal=True)) == computed(make(literal=names)) != computed(make())
