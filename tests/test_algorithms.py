"""The contract that every algorithm must fulfil, algorithms with two phases or a personal part, and wrong uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from small import federate, quadratics, thorough

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.algorithms.constrained import PARTS
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.testing import CHECKS, check_contract, contract_simulation
from fedjax_drift.types import Needs

alg = fd.algorithms


def small(factory, features=6, inputs=5):
    """Returns the algorithm with 0.1 for every hyper-parameter that has no default, for a model of three classes.

    Its weight decay is 0, because weight decay changes a model even if all gradients are 0. Likewise, unlabelled
    examples are 0: rounding errors of an ensemble of equal models would move a model.
    """
    parameters = inspect.signature(factory).parameters
    required = {p.name: 0.1 for p in parameters.values() if p.default is p.empty}
    of_shapes = {"unlabelled": np.zeros((4, inputs), np.float32), "classes": 3, "features": features}
    required |= {name: value for name, value in of_shapes.items() if name in required}
    return factory(**required, **({"weight_decay": 0.0} if "weight_decay" in parameters else {}))


# One algorithm of each kind. The core has all of them, and `partly_shared`, in test_trajectories.py.
CORE = ("fedavg", "scaffold", "vrl_sgd", "fedeve", "fedgvr", "mime", "ditto", "perfedavg", "ifca", "fedrep", "fedbabu")


@pytest.fixture(scope="module", params=[name if name in CORE else thorough(name) for name in ALGORITHMS])
def simulation(request) -> fd.Simulation:
    return contract_simulation(small(ALGORITHMS[request.param]))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(simulation, check) -> None:
    check(simulation)


TIMINGS = {"synchronous": {}, "asynchronous": {"clock": fd.clock.asynchronous(4, "polynomial", max_staleness=1)}}


@pytest.mark.thorough
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_devices_give_the_results_of_one(name, timing) -> None:
    """Sampled cohorts, client states sharded over the devices, and clients that drop out or stop early."""
    algorithm, states = small(ALGORITHMS[name]), []
    needs = Needs.of(algorithm.requires)
    if TIMINGS[timing] and (algorithm.survey is not None or needs.one_version or needs.equal_weights):
        pytest.skip("its rounds are synchronous, or have no discount")
    for devices, bank in ((1, "device"), (2, "sharded")):
        mesh = fd.clients_mesh(jax.devices()[:devices])
        sim = contract_simulation(algorithm, mesh=mesh, bank=bank, lanes=1, **TIMINGS[timing])
        state, _ = sim.run(sim.init(jax.random.key(5)), 4, eval_every=0, progress=False)
        states.append(jax.device_get((state.server, jax.tree.map(lambda a: a[:6], state.clients), state.clock)))
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-5 * np.abs(one).max(initial=1))


def test_the_contract_is_checked() -> None:
    """Each fault breaks another part of the contract."""
    fedavg = alg.fedavg()

    def restless(server, mean, context):
        return server._replace(params=jax.tree.map(lambda w, D: w + D + 0.01, server.params, mean))

    def ascending(server, mean, context):
        return server._replace(params=jax.tree.map(lambda w, D: w - 100 * D, server.params, mean))

    def per_batch(server, client, work):
        result = fedavg.client_update(server, client, work)
        return result._replace(metrics=result.metrics | {"size": jnp.ones(2)})

    faults = {
        "the loss must decrease": {"server_update": ascending},
        "the model must not move": {"server_update": restless},
        "size.* scalar": {"client_update": per_batch},
    }
    for message, fault in faults.items():
        with pytest.raises((AssertionError, ValueError), match=message):
            check_contract(fedavg._replace(**fault, name="faulty"))
    with pytest.raises(ValueError, match=r"call it, fedavg\(\.\.\.\)"):
        check_contract(alg.fedavg)


def test_the_name_of_the_algorithm_is_registered(simulation) -> None:
    assert simulation.algorithm.name in ALGORITHMS


# --- a small classifier, and clients of different sizes ---------------------------------------------------------------

COHORTS = [(5, 1, 4), (0, 3, 2), (3, 1, 0), (4, 2, 5)]  # given cohorts compile faster
RNG = np.random.default_rng(0)
ROWS = [(RNG.normal(size=(n, 5)).astype("f4"), RNG.integers(0, 3, n)) for n in (3, 10, 7, 25, 1, 16)]
DATA = fd.FederatedData.from_clients(ROWS, test=ROWS[3])


def tanh_features(params, x):
    return jnp.tanh(x @ params["hidden"])


def tiny_init(key):
    hidden, out = jax.random.split(key)
    return {"hidden": jax.random.normal(hidden, (5, 4)) / 2, "out": jax.random.normal(out, (4, 3)) / 2}


MODEL = fd.Model(tiny_init, lambda params, x: tanh_features(params, x) @ params["out"], features=tanh_features)


def run(algorithm, rounds=4, model=MODEL, **local) -> fd.ServerState:
    local = fd.LocalTraining(**{"epochs": 2, "batch_size": 4} | local)
    sim = fd.Simulation(model, DATA, algorithm, local=local, cohort_size=3, mesh=fd.clients_mesh(jax.devices()[:1]))
    state = sim.init(jax.random.key(0))
    for cohort in COHORTS[:rounds]:
        state, _ = sim.round_fn(state, cohort)
    return state


def assert_same(a, b, rtol=1e-5) -> None:
    a, b = ravel_pytree(a)[0], ravel_pytree(b)[0]
    assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


@pytest.mark.thorough
def test_personal_leaves_of_the_servers_variables_do_not_move() -> None:
    start = run(alg.fedavg(), rounds=0)
    everything = run(alg.partly_shared(alg.scaffold(), personal=lambda path: True))
    assert_same(everything.params, start.params)
    for base in (alg.vrl_sgd(), alg.fedeve(), alg.scaffold(option="I"), alg.fedsmoo(), alg.fedadamw(blocks="none")):
        server = run(alg.partly_shared(base, personal="out"), rounds=2).server
        assert_same(server.params["out"], start.params["out"], 0)
        assert np.any(server.params["hidden"] != start.params["hidden"])
        others = [leaf for path, leaf in jax.tree.leaves_with_path(server._replace(params=())) if "out" in str(path)]
        assert not any(leaf.any() for leaf in others)
    # The base does not change the steps of the personal leaves. FedCM would make them a tenth as long.
    alone, fedcm = (run(alg.partly_shared(base, personal=lambda path: True)) for base in (alg.fedavg(), alg.fedcm()))
    assert_same(fedcm.clients.personal, alone.clients.personal)
    frozen = run(alg.fedbabu(personal="out"))
    assert frozen.clients == alg.fedbabu(personal="out").init_client(start.params) and frozen.clients.personal == []


@pytest.mark.parametrize("params", [jnp.zeros((3, 2)), jnp.arange(6.0).reshape(3, 2)])
def test_the_first_models_of_ifca_differ(params) -> None:
    models = np.asarray(alg.ifca(3).init_server({"w": params}).models["w"])
    assert np.array_equal(models[0], params) and len({model.tobytes() for model in models}) == 3


@pytest.mark.thorough
def test_a_straggler_of_fedrep_does_a_step_on_the_shared_leaves() -> None:
    """SCAFFOLD divides by the number of these steps. Drift is that of the shared leaves."""
    base, local = alg.partly_shared(alg.scaffold(), "out", "alternate"), fd.LocalTraining(epochs=3, batch_size=4)
    sim = fd.Simulation(MODEL, DATA, base, local=local, cohort_size=6, stragglers=1.0)
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    assert np.isfinite(ravel_pytree((state.server, state.clients))[0]).all() and (np.asarray(info["loss"]) > 0).all()
    sim = fd.Simulation(MODEL, DATA, alg.partly_shared(personal="out"), local=local, cohort_size=1)
    found = sim.measure(sim.init(jax.random.key(0)), "updates", cohort=[3])
    assert float(found["update_cosine"][0, -1]) == pytest.approx(1)  # one client has no drift


@pytest.mark.thorough
def test_zero_in_a_sweep_is_zero_in_a_single_run() -> None:
    build = lambda tau: fd.Simulation(MODEL, DATA, alg.fedlc(tau), cohort_size=3)  # noqa: E731
    runs = fd.sweep(build, 1, settings=[{"tau": 0.0}, {"tau": 1.0}], progress=False)
    alone, _ = build(0.0).run(build(0.0).init(jax.random.key(0)), 1)
    assert_same(*jax.device_get((runs[0].state.params, alone.params)))


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

    start = run(alg.fedavg(), 0, model=model).params

    def moved(**options) -> dict[str, float]:
        params = run(alg.constrained(**options), 1, model=model).params
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
    cohort = jnp.array([0, 3, 2])
    half = MODEL._replace(init=lambda key: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_init(key)))

    def params(make, model, value, **options):
        local = fd.LocalTraining(batch_size=4, momentum=0.5)
        mesh = fd.clients_mesh(jax.devices()[:1])
        sim = fd.Simulation(model, DATA, make(value), local=local, cohort_size=3, mesh=mesh, **options)
        return sim.round_fn(sim.init(jax.random.key(0)), cohort)[0].params

    for make, models, options in (
        (lambda value: alg.feddc(value), (MODEL, half), {}),
        (lambda value: alg.fedgvr(value), (MODEL,), {"measure": "updates", "on_nonfinite": "raise"}),
    ):
        one = params(make, MODEL, 0.5, **options)
        for model, tolerance in zip(models, (1e-5, 3e-2), strict=False):
            many = jax.vmap(lambda value: params(make, model, value, **options))(jnp.array([0.1, 0.5]))  # noqa: B023
            assert many["out"].dtype == model.init(jax.random.key(0))["out"].dtype
            assert_same(jax.tree.map(lambda a: a[1].astype(float), many), one, tolerance)
    run(alg.fedavg(), 1)  # raises if a tracer is left in a cache


def test_an_error_in_a_round_carries_the_last_state_and_the_history() -> None:
    data, model = quadratics([1e15, 2e15])
    sim = federate(alg.fedgvr(), (data, model), lr=100.0)
    with pytest.raises(ValueError, match="start from an earlier state") as raised:
        sim.run(sim.init(jax.random.key(0)), 50, progress=False)
    state, history = raised.value.state, raised.value.history
    assert int(state.round) == len(history) > 0 and np.isfinite(state.params)


# --- two phases -------------------------------------------------------------------------------------------------------


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
        with pytest.raises(ConfigurationError, match="needs clients that start with the same variables of"):
            make(algorithm)
    for algorithm in ONE_RATE.values():
        make(algorithm), make(algorithm, concurrency=2, lr_decay=0.9)
        for varying in ({"lr_decay": 0.9}, {"lr": lambda t: 0.1 / (1 + t)}):
            with pytest.raises(ConfigurationError, match="needs a constant learning rate in asynchronous"):
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


@pytest.mark.thorough
def test_algorithms_around_one_with_two_phases() -> None:
    mime = run(alg.mime())
    sent = fd.compression.compressed(alg.mime(), fd.compression.top_k(1.0))
    assert_same(run(sent).server, mime.server)
    assert_same(run(alg.partly_shared(alg.mime(), personal=lambda path: False)).params, mime.params)
    shared = run(alg.partly_shared(alg.mime(), personal="out"))
    assert not shared.server.m["out"].any() and shared.server.m["hidden"].any()


# --- wrong uses -------------------------------------------------------------------------------------------------------


# What one declared argument may be is tested in test_abuse.py.
BAD: list[tuple[Callable, str]] = [
    (lambda: run(alg.moon(), model=MODEL._replace(features=None)), r"moon needs a model with features.*features="),
    (lambda: run(alg.lfd()), r"lfd needs a model whose logits are cosines.*cosine=True"),
    (lambda: run(alg.constrained(1.0, part="header")), r"with extractor.*fd.models.simple_cnn"),
    (lambda: run(alg.fedadc(0.9), momentum=0.9), r"fedadc needs plain local SGD.*momentum=0.9"),
    (lambda: run(alg.fednova(), optimizer=optax.scale_by_adam()), r"fednova needs local SGD, with or without momen"),
    (lambda: run(alg.fednova(mu=0.1), momentum=0.5), r"fednova needs plain local SGD"),
    (lambda: run(alg.fedsmoo(), momentum=0.5), r"fedsmoo needs plain local SGD"),
    (lambda: run(alg.mime(), momentum=0.5), r"mime needs plain local SGD"),
    (lambda: federate(alg.fedreg()), r"fedreg needs a classifier with the default loss"),
    (lambda: federate(alg.fedgvrgm(), without_test()), r"fedgvrgm evaluates the model in every round.*test="),
    (
        lambda: federate(alg.fedgvr(), (regression(), LINE)),
        r"fedgvr needs the test accuracy, got an evaluation without",
    ),
    (lambda: alg.fedgvrgm(variate_momentum=False, literal="variate_momentum"), r"leave out one"),
    (lambda: run(alg.fedgvrgm(), lr=1e30), r"round 0: the evaluation that fedgvrgm uses must be finite"),
    (lambda: run(alg.fedavg(), model=counting()), r"parameters must have a floating dtype, got int32 at \['n'\]"),
    (lambda: alg.partly_shared(alg.scaffold), r"base must be of type Algorithm, got .*: call it, scaffold\("),
    (lambda: alg.partly_shared(alg.ditto()), r"base must be an algorithm without personal models, got ditto"),
    (lambda: run(alg.partly_shared(alg.fedlesam(), "out")), r"base must keep the global model in a field params of"),
    (lambda: run(alg.fedper()), r"personal must select leaves of the parameters \(hidden, out\), got 'classifier'"),
    (lambda: run(alg.fedper(personal=[True])), r"personal must have a bool for every leaf of the parameters"),
    (lambda: run(alg.fedper(personal="hidden|out")), r"personal must leave a part of the model to share"),
    (lambda: alg.fedper(personal=3), r"personal must be a regular expression, a function of a path, or a pytree with"),
    (lambda: alg.fedper(personal="("), r"personal must be a regular expression, got '\('"),
    (lambda: run(alg.fedrep(personal="out"), epochs=1), r"fedrep needs at least 2 epochs, got 1: pass .*epochs=2"),
    (lambda: alg.agnostic(2, lambda0=[0.5, 0.4]), r"lambda0 must have the sum 1, got 0.9: divide it by its sum"),
    (lambda: alg.agnostic(2, counts0=[1]), r"counts0 must be 2 finite numbers >= 0, one per domain, got \[1\]"),
    (lambda: run(alg.agnostic(2)), r"domains must be at least the number of classes, 3, if the label is the domain"),
    (lambda: alg.ifca([]), r"the number of models must be an integer >= 1, got 0"),
    (lambda: run(alg.ifca([{"w": jnp.ones(3)}])), r"model 0 of ifca must have the structure and the shapes"),
]
LINE = fd.Model(lambda key: jnp.zeros(()), lambda w, x: x * w, loss=lambda z, y: (z - y) ** 2)


def regression() -> fd.FederatedData:
    rows = (np.ones(4, np.float32), np.ones(4, np.float32))
    return fd.FederatedData.from_clients([rows, rows], test=rows)


def counting() -> fd.Model:
    return MODEL._replace(init=lambda key: tiny_init(key) | {"n": jnp.int32(1)})


def without_test() -> tuple[fd.FederatedData, fd.Model]:
    data, model = quadratics([1.0, 2.0])
    return fd.FederatedData(data.x, data.y, data.sizes), model


@pytest.mark.parametrize(("call", "message"), BAD)
def test_wrong_uses(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
