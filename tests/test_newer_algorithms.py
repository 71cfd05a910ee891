"""Algorithms of 2020 to 2025: rounds computed by hand, limit cases that are other algorithms, and invariants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from small import federate, models_after, quadratics, states_after
from test_drift_algorithms import COHORTS, MODEL, assert_same, ragged, run

import fedjax_drift as fd

alg = fd.algorithms
CLIP = {"weight_decay": 0.1, "clip_norm": 0.4, "lr_decay": 0.9}
EVERYONE = {"cohorts": [range(6)] * 3, "rounds": 3}


# Two steps of rate 1/2 towards a, from w = 0: D = 3 a / 4, so 1.5 and 6 for the targets 2 and 8; K eta = 1.
def test_fednova_by_hand() -> None:
    # Batches of one example: K = 2 and 6, D = 2 (1 - 2^-2) and 8 (1 - 2^-6), weights 1 and 3.
    wanted = (2 + 3 * 6) / 4 * (1.5 / 2 + 3 * 7.875 / 6) / 4
    assert models_after(alg.fednova(), 1, batch_size=1) == pytest.approx([wanted])
    # mu = 1, K = 2: theta = a / 2, then a / 2 - (a / 2 - a + a / 2) / 2 = a / 2; a_i = 1 + (1 - 1/2), A = 2.
    assert models_after(alg.fednova(mu=1.0, server_lr=0.5), 1) == pytest.approx([0.5 * 2 * (1 + 3 * 4) / 4 / 1.5])


def test_fedcm_and_fedacg_by_hand() -> None:
    # alpha = 1/2: a step covers a quarter of the distance. D = 7 a / 16, mean 2.1875, and so is -Delta.
    def D(a, w=2.1875):
        theta = w
        for _ in range(2):
            theta -= 0.5 * (0.5 * (theta - a) - 0.5 * 2.1875)
        return theta - w

    assert models_after(alg.fedcm(alpha=0.5)) == pytest.approx([2.1875, 2.1875 + (D(2) + D(8)) / 2])
    # The clients start at 3.75 + 3.75 / 2, and D is -0.75 times 0.625.
    wanted = [3.75, 3.75 + 0.5 * 3.75 - 0.75 * 0.625]
    assert models_after(alg.fedacg(beta=0.0, lam=0.5)) == pytest.approx(wanted)


def test_sharpness_aware_steps_by_hand() -> None:
    # In one dimension, perturbing theta by e has the effect of a target that is rho farther away.
    assert models_after(alg.fedsam(rho=0.5), 1) == pytest.approx([0.75 * 5.5])
    # FedLESAM has no perturbation in round 0. Then e = -rho, because the model has moved up by 3.75.
    assert models_after(alg.fedlesam(rho=0.5)) == pytest.approx([3.75, 3.75 + 0.75 * (5.5 - 3.75)])

    def regularised(a, h, w, mu=0.0, s=0.0, smoo=False):
        """theta_i, mu_i and s_i after two steps with rho = lam = 1/2, and alpha = 1/2 of FedSpeed."""
        theta, s_i = w, 0.0
        for _ in range(2):
            g = theta - a
            if smoo:
                s_i = 0.5 * np.sign(g - mu - s)
                mu, g = mu + s_i - s, g + s_i
            else:
                g += 0.5 * 0.5 * np.sign(g)
            theta -= 0.5 * (g + 0.5 * (theta - w + h))
        return theta, mu, s_i

    for smoo, algorithm in ((False, alg.fedspeed(0.5, lam=0.5, alpha=0.5)), (True, alg.fedsmoo(0.5, alpha=0.5))):
        w, s, h, mu, models = 0.0, 0.0, [0.0, 0.0], [0.0, 0.0], []
        for _ in range(2):
            ends = [regularised(a, h[i], w, mu[i], s, smoo) for i, a in enumerate((2, 8))]
            h = [old + theta - w for old, (theta, *_) in zip(h, ends, strict=True)]
            mu = [end[1] for end in ends]
            w = np.mean([theta for theta, *_ in ends]) + np.mean(h)
            s = 0.5 * np.sign(np.mean([m - s_i for _, m, s_i in ends])) if smoo else 0.0
            models.append(w)
        assert models_after(algorithm) == pytest.approx(models)


def test_fedexp_by_hand() -> None:
    # D = -1.5 and 3: mean square 5.625, square of the mean 0.5625.
    state, info = (sim := federate(alg.fedexp(eps=0.4375), quadratics([-2.0, 4.0]))).round_fn(
        sim.init(jax.random.key(0))
    )
    assert float(info["eta_g"]) == pytest.approx(5.625 / 2)
    assert float(state.params) == pytest.approx(0.75 * 5.625 / 2) == 2 * float(state.server.last_two_mean)
    assert {"loss", "last_two_mean_loss"} <= sim.evaluate(state).keys()


def logits_are_parameters(labels, algorithm, epochs=1) -> np.ndarray:
    """The logits (1, 0, -1) after a round with rate 1 of one client, whose only batch has these labels."""
    model = fd.Model(lambda key: jnp.arange(1.0, -2.0, -1.0), lambda w, x: jnp.tile(w[None], (len(x), 1)))
    data = fd.FederatedData.from_clients([(np.zeros((len(labels), 1), np.float32), np.array(labels))])
    sim = federate(algorithm, (data, model), epochs=epochs, batch_size=len(labels), lr=1.0)
    return np.asarray(sim.round_fn(sim.init(jax.random.key(0)))[0].params)


def softmax(z) -> np.ndarray:
    return np.exp(z) / np.exp(z).sum()


def test_fedntd_and_fedlc_by_hand() -> None:
    z = np.array([1.0, 0.0, -1.0])
    first = z - (softmax(z) - [1, 0, 0])  # for one example with label 0; in the first step, q_theta = q_w
    q = [np.append(0, softmax(v[1:] / 2)) for v in (first, z)]
    wanted = first - (softmax(first) - [1, 0, 0] + 0.5 * 2 * (q[0] - q[1]))
    np.testing.assert_allclose(logits_are_parameters([0], alg.fedntd(0.5, 2.0), epochs=2), wanted, rtol=1e-5)
    # One example of class 0 and 16 of class 1 have margins 2 and 1. Class 2 is absent: it is left out or has 200.
    labels, mean_label = [0] + [1] * 16, np.array([1, 16, 0]) / 17
    masked = z - (softmax(z - [2, 1, np.inf]) - mean_label)
    np.testing.assert_allclose(logits_are_parameters(labels, alg.fedlc(tau=2.0)), masked, rtol=1e-5)
    others = np.array([0, 1, 0]) / 17 + np.array([1, 0, 0]) * 16 / 17  # with one other class, its probability is 1
    unbounded = alg.fedlc(tau=2.0, denominator="others")
    np.testing.assert_allclose(logits_are_parameters(labels, unbounded), z - (others - mean_label), rtol=1e-5)


def test_fedadamw_by_hand() -> None:
    def local(a, w, Delta, v, T):
        theta, m = w, 0.0
        for k in (1, 2):
            m, v = 0.9 * m + 0.1 * (theta - a), 0.9 * v + 0.1 * (theta - a) ** 2
            mhat, vhat = m / (1 - 0.9**k), v / (1 - 0.9 ** (T + k))
            theta -= 0.5 * (mhat / (vhat**0.5 + 1e-8) + 0.3 * Delta + 0.1 * theta)
        return theta - w, v

    w = Delta = v = 0.0
    models = []
    for t in range(2):
        D, vs = np.transpose([local(a, w, Delta, v, 2 * t) for a in (2, 8)])
        w, Delta, v = w + D.mean(), -D.mean() / (0.5 * 2), vs.mean()
        models.append(w)
    assert models_after(alg.fedadamw(alpha=0.3, b2=0.9, weight_decay=0.1)) == pytest.approx(models, rel=1e-5)


def test_personal_models_by_hand() -> None:
    # Ditto with lam = 1/2 from v = w = 0 gives 5 a / 8, as FedProx. The global model is that of FedAvg.
    sim = federate(alg.ditto(lam=0.5))
    state = states_after(sim, 1)[-1]
    np.testing.assert_allclose(state.clients.v, [1.25, 5.0])
    assert float(state.params) == pytest.approx((1.5 + 3 * 6) / 4)
    # APFL, alpha = 1/2: v steps by a quarter of a - (v + theta) / 2, theta by a half of a - theta.
    state = states_after(federate(alg.apfl(alpha=0.5)), 1)[-1]
    v = np.array([2, 8]) * (0.25 + 0.25 * (1 - (0.25 + 0.5) / 2))
    np.testing.assert_allclose(state.clients.v, v, rtol=1e-6)
    assert float(state.params) == pytest.approx(3.75)
    # Adaptive: before the first step v = theta, so alpha does not change. Then <v - theta, g> = -a / 4 (5 a / 8 - ...).
    state = states_after(federate(alg.apfl(alpha=0.5, adaptive=True), quadratics([2.0])), 1)[-1]
    slope = (0.5 - 1.0) * ((0.5 * 0.5 + 0.5 * 1.0) - 2)
    assert float(state.clients.alpha[0]) == pytest.approx(0.5 - 0.5 * slope)
    # pFedMe, lam = 1, two inner steps of rate 1/2 from x = w_i = 0: x = a / 2, then a / 2; w_i = a / 4.
    state = states_after(federate(alg.pfedme(lam=1.0, inner_steps=2, inner_lr=0.5), epochs=1), 1)[-1]
    np.testing.assert_allclose(state.clients.v, [1, 4])
    assert float(state.params) == pytest.approx(5 / 4)


@pytest.mark.thorough
def test_regressions() -> None:
    # The closed forms of FedNova's coefficients cancel: mu -> 0 is FedAvg, momentum near 1 gives a sum.
    equal = {"equal": True, "rounds": 2}
    assert_same(parameters(alg.fednova(mu=1e-9), **equal), parameters(alg.fedavg(), **equal))
    # A straggler of FedRep does at least one step on the shared leaves. SCAFFOLD divides by the number of these steps.
    base = alg.partly_shared(alg.scaffold(), "out", "alternate")
    data, local = ragged(), fd.LocalTraining(epochs=3, batch_size=4)
    sim = fd.Simulation(MODEL, data, base, local=local, cohort_size=6, stragglers=1.0)
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    assert np.isfinite(ravel_pytree((state.server, state.clients))[0]).all() and (np.asarray(info["loss"]) > 0).all()
    # Drift is that of the shared leaves. With one client in the cohort, it is 0.
    sim = fd.Simulation(MODEL, data, alg.partly_shared(personal="out"), local=local, cohort_size=1)
    found = sim.measure(sim.init(jax.random.key(0)), "updates", cohort=[3])
    assert float(found["update_cosine"][0, -1]) == pytest.approx(1)
    # In a sweep with other values, tau = 0 is FedAvg, as in a single run.
    build = lambda tau: fd.Simulation(MODEL, data, alg.fedlc(tau), cohort_size=3)  # noqa: E731
    runs = fd.sweep(build, 1, settings=[{"tau": 0.0}, {"tau": 1.0}], progress=False)
    alone, _ = build(0.0).run(build(0.0).init(jax.random.key(0)), 1)
    assert_same(*jax.device_get((runs[0].state.params, alone.params)))


def parameters(algorithm, **options) -> jax.Array:
    return ravel_pytree(run(algorithm, **options).params)[0]


@pytest.mark.thorough
def test_limits() -> None:
    fedavg, uniform = parameters(alg.fedavg(), **CLIP), parameters(alg.fedavg(weighting="uniform"), **CLIP)
    for same in (alg.fedntd(beta=0.0), alg.fedlc(tau=0.0), alg.partly_shared(personal=lambda path: False)):
        assert_same(parameters(same, **CLIP), fedavg)
    for same in (alg.fedcm(alpha=1.0), alg.fedsam(rho=0.0), alg.fedexp(eps=1e9), alg.fedlesam(rho=0.0)):
        assert_same(parameters(same, **CLIP), uniform)
    assert_same(parameters(alg.fednova(), equal=True, momentum=0.5), parameters(alg.fedavg(), equal=True, momentum=0.5))
    assert_same(parameters(alg.mofedsam(rho=0.0), **CLIP), parameters(alg.fedcm(), **CLIP))
    assert_same(parameters(alg.mofedsam(alpha=1.0), **CLIP), parameters(alg.fedsam(), **CLIP))
    prox = parameters(alg.fedprox(0.3, weighting="uniform"), **CLIP)
    assert_same(parameters(alg.fedacg(0.3, 0.0), **CLIP), prox)
    feddyn = parameters(alg.feddyn(0.3), **CLIP)
    for same in (alg.fedspeed(alpha=0.0, lam=0.3), alg.fedsmoo(rho=0.0, alpha=0.3)):
        assert_same(parameters(same, **CLIP), feddyn)
    with pytest.raises(AssertionError):
        assert_same(parameters(alg.fedspeed(rho=0.5, lam=0.3), **CLIP), feddyn, 1e-2)
    adamw = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01))
    local = {"lr": 0.01, "rounds": 1}
    wanted = parameters(alg.fedavg(weighting="uniform"), optimizer=adamw, **local)
    # In round 0, the global direction and the second moment are 0.
    assert_same(parameters(alg.fedadamw(), **local), wanted)


@pytest.mark.thorough
def test_limits_of_one_step_and_of_equal_clients() -> None:
    one_step = {"epochs": 1, "batch_size": 25}
    assert_same(parameters(alg.fedntd(beta=3.0), **one_step), parameters(alg.fedavg(), **one_step))
    assert_same(parameters(alg.fedacg(3.0, 0.5), **one_step), parameters(alg.fedacg(0.0, 0.5), **one_step))
    first = one_step | {"rounds": 1}
    assert_same(parameters(alg.fedsmoo(alpha=0.3), **first), parameters(alg.fedspeed(lam=0.3), **first))
    assert_same(parameters(alg.fedcm(steps="own"), equal=True), parameters(alg.fedcm(), equal=True))
    assert_same(parameters(alg.fedlesam(rho=2.0), rounds=1), parameters(alg.fedavg(weighting="uniform"), rounds=1))
    speed, lesam = ({"aggregation": "cohort"}, alg.fedspeed), ({"old": "server"}, alg.fedlesam)
    for options, factory in (speed, lesam):
        assert_same(parameters(factory(**options), **EVERYONE), parameters(factory(), **EVERYONE))
    state = run(alg.fedspeed())
    assert_same(state.server.h, jax.tree.map(lambda h: h.mean(0), state.clients.h))
    norm = np.linalg.norm(ravel_pytree(run(alg.fedsmoo(rho=0.3)).server.s)[0])
    assert norm == pytest.approx(0.3, rel=1e-5)
    alike = fd.FederatedData.from_clients([(np.ones((4, 5), np.float32), np.arange(4) % 3)] * 3)
    _, info = (sim := federate(alg.fedexp(), (alike, MODEL))).round_fn(sim.init(jax.random.key(0)))
    assert float(info["eta_g"]) == 1


@pytest.mark.thorough
def test_limits_of_personal_models() -> None:
    fedavg = parameters(alg.fedavg())
    trained = run(alg.ditto(lam=0.0, personal_epochs=1))
    assert_same(trained.params, fedavg)
    start = run(alg.ditto(), rounds=0)
    absent = [i for i in range(6) if i not in {*COHORTS[0], *COHORTS[1]}]
    assert not absent
    after_one = run(alg.ditto(), rounds=1)
    for i in set(range(6)) - set(COHORTS[0]):
        assert_same(*(jax.tree.map(lambda v, i=i: v[i], state.clients) for state in (after_one, start)), 1e-7)
    strong = run(alg.ditto(lam=1 / 0.1), rounds=1, epochs=1, batch_size=25)  # K = 1, lam = 1 / eta: v = w - eta g(v)
    alone = run(alg.ditto(lam=0.0), rounds=1, epochs=1, batch_size=25)
    assert_same(strong.clients.v, alone.clients.v)
    uniform = parameters(alg.fedavg(weighting="uniform"))
    mixed = run(alg.apfl(alpha=0.0))
    assert_same(mixed.params, uniform)
    assert_same(
        alg.apfl(alpha=0.0).personal(mixed.server, jax.tree.map(lambda a: a[3], mixed.clients), None), mixed.params
    )
    assert_same(run(alg.apfl(alpha=1.0)).clients.v, run(alg.ditto(lam=0.0)).clients.v)
    assert_same(run(alg.pfedme(lam=0.0)).params, start.params)
    one = alg.pfedme(lam=2.0, inner_steps=1, inner_start="local")
    assert_same(run(one, lr=0.5).params, run(alg.fedavg(weighting="uniform"), lr=0.5 * 2 * 0.1).params)
    everything = run(alg.partly_shared(alg.scaffold(), personal=lambda path: True))
    assert_same(everything.params, start.params)
    body = alg.partly_shared(alg.scaffold(), personal="out")
    shared = run(body)
    assert_same(shared.params["out"], start.params["out"], 0)
    assert not jax.tree.leaves(shared.server.c)[1].any() and jax.tree.leaves(shared.server.c)[0].any()
    for base in (alg.vrl_sgd(), alg.fedeve(), alg.scaffold(option="I"), alg.fedsmoo(), alg.fedadamw(blocks="none")):
        server = run(alg.partly_shared(base, personal="out"), rounds=2).server
        assert_same(server.params["out"], start.params["out"], 0)
        others = [leaf for path, leaf in jax.tree.leaves_with_path(server._replace(params=())) if "out" in str(path)]
        assert not any(leaf.any() for leaf in others)
    # The base does not change the steps of the personal leaves. FedCM would make them a tenth as long.
    alone, fedcm = (run(alg.partly_shared(base, personal=lambda path: True)) for base in (alg.fedavg(), alg.fedcm()))
    assert_same(fedcm.clients.personal, alone.clients.personal)
    frozen = run(alg.fedbabu(personal="out"))
    assert frozen.clients == alg.fedbabu(personal="out").init_client(start.params) and frozen.clients.personal == []


BAD = [
    (lambda: alg.fedcm(alpha=0), r"alpha must be in \(0, 1\], got 0"),
    (lambda: alg.fedcm(steps="mean"), r"steps must be one of 'cohort', 'own', got 'mean'"),
    (
        lambda: alg.partly_shared(alg.scaffold),
        r"base must be of type Algorithm, got .*: pass fd.algorithms.scaffold\(\)",
    ),
    (lambda: alg.partly_shared(alg.ditto()), r"base must be an algorithm without personal models, got ditto"),
    (lambda: run(alg.fedper(), 1), r"personal must select leaves of the parameters \(hidden, out\), got 'classifier'"),
    (lambda: run(alg.fedper(personal=[True]), 1), r"personal must have a bool for every leaf of the parameters"),
    (
        lambda: run(alg.fedper(personal="hidden|out"), 1),
        r"personal must leave a part of the model to share",
    ),
    (lambda: alg.fedper(personal=3), r"personal must be a regular expression, a function of a path, or a pytree with"),
    (lambda: alg.fedper(personal="("), r"personal must be a regular expression, got '\('"),
    (
        lambda: run(alg.fedrep(personal="out"), 1, epochs=1),
        r"fedrep needs at least 2 epochs, got 1: pass LocalTraining\(epochs=2\), or --epochs 2",
    ),
    (lambda: run(alg.partly_shared(alg.fedlesam(), "out"), 1), r"base must keep the global model in a field params of"),
    (lambda: run(alg.fednova(mu=0.1), 1, momentum=0.5), r"fednova needs plain local SGD"),
    (lambda: run(alg.fednova(), 1, optimizer=optax.scale_by_adam()), r"fednova needs local SGD, with or without momen"),
    (lambda: run(alg.fedsmoo(), 1, momentum=0.5), r"fedsmoo needs plain local SGD"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
