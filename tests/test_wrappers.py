"""Algorithms around others: each passes on all functions of its base, and counts what the clients send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from small import thorough

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import full_gradient, train
from fedjax_drift.round.traffic import exchanged
from fedjax_drift.round.traffic import sent as sent_by

a, c = fd.algorithms, fd.compression
RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(n, 5)).astype("f4"), RNG.integers(0, 3, n)) for n in (3, 4, 2, 5)]
DATA = fd.FederatedData.from_clients(CLIENTS, test_clients=CLIENTS)
HOOKS = [name for name, kind in fd.Algorithm.__annotations__.items() if "Callable" in str(kind)]
D = 18  # parameters of `PLAIN`


class Network(nn.Module):
    """Two layers. The personal part of `partly_shared` is the second."""

    norm: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(3, name="hidden", use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x) if self.norm else x
        return nn.Dense(1, name="scale", use_bias=False)(x) + nn.Dense(3, name="classifier", use_bias=False)(x)


PLAIN = fd.models.linear((5,), 3)
TWO_LAYERS = fd.Model.from_linen(Network(), (5,))
BATCH_NORM = {kept: fd.Model.from_linen(Network(norm=True), (5,), statistics=kept) for kept in ("average", "local")}


def simulate(algorithm: fd.Algorithm, model: fd.Model = PLAIN, **options: Any) -> fd.Simulation:
    mesh = fd.clients_mesh(jax.devices()[:1])
    local = fd.LocalTraining(epochs=2, batch_size=3, lr=0.1)
    return fd.Simulation(model, DATA, algorithm, cohort_size=3, mesh=mesh, lanes=1, **{"local": local} | options)


class Server(NamedTuple):
    params: Any
    other: Any


class Client(NamedTuple):
    last: Any


def spied(calls: set[str]) -> fd.Algorithm:
    """FedAvg with all functions that an algorithm can have. Each notes its call, and checks its arguments."""

    def structure(tree: Any) -> Any:
        return jax.tree.structure(tree)

    def client_update(server, client, work):
        assert structure(work.surveyed) == structure(server.params)
        theta, trained = train(work, server.params)
        D = jax.tree.map(jnp.subtract, theta, server.params)
        return fd.ClientResult((D, D), jnp.ones(()), Client(client.last), trained)

    def survey(server, client, work):
        return fd.ClientResult(full_gradient(work, server.params), jnp.ones(()), client, {})

    def server_update(server, mean, context):
        assert structure(context.surveyed) == structure(server.params)
        return Server(jax.tree.map(jnp.add, server.params, mean[0]), server.params)

    def report(server, mean, context):
        return {"first": jax.tree.leaves(mean[1])[0].sum()}

    base = fd.Algorithm(
        init_server=lambda params: Server(params, params),
        init_client=lambda params: Client(params),
        client_update=client_update,
        server_update=server_update,
        observe=lambda server, metrics: server,
        finish=lambda server, client: Client(server.params),
        report=report,
        complete=lambda client, message: client,
        personal=lambda server, client, work: client.last,
        survey=survey,
        models=lambda server: {"other": server.other},
        adapt=lambda server, client, work: train(work, client.last),
        name="spied",
    )
    kinds = {"server": Server, "client": Client, "work": fd.Work, "context": fd.Round, "mean": tuple, "message": tuple}

    def spy(name: str, function: Callable) -> Callable:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]

        def call(*arguments):
            calls.add(name)
            for argument, value in zip(names, arguments, strict=True):
                assert isinstance(value, kinds.get(argument, object)), f"{argument} of {name}"
            return function(*arguments)

        return call

    return base._replace(**{name: spy(name, getattr(base, name)) for name in HOOKS})


def scheduled(base: fd.Algorithm) -> fd.Algorithm:
    @fd.algorithm
    def factory(alpha: float) -> fd.Algorithm:
        return base

    return factory(lambda t: 1.0 / (1 + t))


WRAPPERS: dict[str, Callable[[fd.Algorithm], fd.Algorithm]] = {
    "compressed": lambda base: c.compressed(base, c.top_k(0.5)),
    "compressed without feedback": lambda base: c.compressed(base, c.qsgd(4), error_feedback=False),
    "partly_shared": lambda base: a.partly_shared(base, "classifier"),
    "partly_shared, mean": lambda base: a.partly_shared(base, "scale", new_clients="mean"),
    "frozen": lambda base: a.partly_shared(base, "scale", schedule="frozen"),
    "scheduled": scheduled,
}
PERSONAL = ("partly_shared", "partly_shared, mean", "frozen")  # they refuse a base with personal models
OF_OWN_MODELS = {"personal", "adapt"}
LOW_RANK: dict[str, Callable[[fd.Algorithm], fd.Algorithm]] = {
    "rolora": a.rolora,
    "fedex_lora": a.fedex_lora,
    "flora": a.flora,
    "flexlora": lambda base: a.flexlora(base, ranks=(1,)),
}
ADAPTED = fd.models.lora(TWO_LAYERS, 1, "hidden", whole="classifier|scale")
MODELS = {"plain": TWO_LAYERS, **BATCH_NORM}


def check_calls(wrap: Callable[[fd.Algorithm], fd.Algorithm], model: fd.Model, without: set[str]) -> None:
    calls: set[str] = set()
    base = spied(calls)._replace(**dict.fromkeys(without))
    sim = simulate(wrap(base), model)
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    scores = sim.evaluate(state) if "models" not in without else {}
    sim.evaluate_clients(state)
    assert np.isfinite(sim.evaluate_new(state, DATA, 2)["personal_loss"]).all()
    assert calls == {*HOOKS} - without and "first" in info and np.isfinite(info["loss"]).all()
    assert {"loss", "other_loss"} <= scores.keys()


CORE = ("compressed", "partly_shared, mean", "scheduled")


@pytest.mark.parametrize("name", [name if name in CORE else thorough(name) for name in WRAPPERS])
def test_wrappers_call_all_functions_of_their_base(name) -> None:
    check_calls(WRAPPERS[name], TWO_LAYERS, OF_OWN_MODELS if name in PERSONAL else set())


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("around", ["itself", "compressed", "scheduled"])
def test_those_of_adapters_call_all_functions_of_their_base(name, around) -> None:
    wrap = LOW_RANK[name] if around == "itself" else lambda base: WRAPPERS[around](LOW_RANK[name](base))
    check_calls(wrap, ADAPTED, set() if name == "rolora" else OF_OWN_MODELS)


@pytest.mark.parametrize("kept", ["average", thorough("local")])
def test_running_statistics_call_all_functions_of_the_algorithm(kept) -> None:
    """With "local", the accuracy of the global model is refused."""
    check_calls(lambda base: base._replace(observe=None) if kept == "local" else base, BATCH_NORM[kept],
                {"observe"} if kept == "local" else set())  # fmt: skip


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", [thorough(name) for name in WRAPPERS])
def test_wrappers_of_wrappers_call_all_functions(outer, inner) -> None:

    def wrap(base):
        return WRAPPERS[outer](WRAPPERS[inner](base))

    if inner in PERSONAL and outer in PERSONAL:
        refused = "must not be inside another" if inner == "frozen" else "must be an algorithm without personal models"
        with pytest.raises(ConfigurationError, match=refused):
            check_calls(wrap, TWO_LAYERS, OF_OWN_MODELS)
        return
    check_calls(wrap, BATCH_NORM["average"], OF_OWN_MODELS if {outer, inner} & {*PERSONAL} else set())


# --- bytes ------------------------------------------------------------------------------------------------------------


def sent(algorithm: fd.Algorithm, model: fd.Model = PLAIN) -> float:
    """The bytes that each client sends in a round, without training it."""
    setup = simulate(algorithm, model).setup
    server = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), setup.state.server)
    state = fd.ServerState(0, jax.random.key(0), server, ())
    return float(jax.jit(lambda: sent_by(setup.engine, state, exchanged(setup.engine, state.server)))())


@pytest.mark.parametrize(
    "base",
    [a.fedavg(), a.mime(), a.ifca(3), a.hypcluster(3), a.scaffold(), a.fednova(), a.feddyn(0.1, weighting="examples")],
    ids=lambda algorithm: algorithm.name,
)
def test_a_codec_that_changes_nothing_sends_what_its_base_sends(base) -> None:
    assert sent(c.compressed(base, c.none())) == sent(base)


def test_both_phases_are_coded_and_counted() -> None:
    codec = c.top_k(0.1)
    once, sim = sent(c.compressed(a.fedavg(), codec)), simulate(c.compressed(a.mime(), codec))
    _, info = sim.round_fn(sim.init(jax.random.key(0)))
    assert info["uplink_bytes"].tolist() == [2 * once] * 3 and once < sent(a.fedavg()) / 2


def test_the_first_phase_goes_through_the_codec() -> None:
    """With the codec of zeros, c of Mime is 0, so the clients move by the difference of two gradients."""
    zeros = c.Codec(lambda key, x: (jnp.zeros_like(x), 1.0), "zeros")
    coded = c.compressed(a.mime(), zeros, error_feedback=False)
    total = lambda tree: sum(abs(leaf).sum() for leaf in jax.tree.leaves(tree))  # noqa: E731
    sim = simulate(coded._replace(report=lambda server, mean, context: {"c": total(context.surveyed)}))
    _, info = sim.round_fn(sim.init(jax.random.key(0)))
    assert float(info["c"]) == 0


def test_clusters_send_one_model_and_an_index() -> None:
    assert sent(a.ifca(3)) == 4 * D + 4
    assert sent(a.hypcluster(3)) == 4 * D + 4 + 4  # and the weight n_i of the model that it has chosen


def test_personal_leaves_are_neither_sent_nor_coded() -> None:
    shared = 4 * (5 * 3 + 3)  # hidden and scale, without the classifier
    partly = a.partly_shared(a.scaffold(), "classifier")
    assert sent(partly, TWO_LAYERS) == sent(c.compressed(partly, c.none()), TWO_LAYERS) == 2 * shared
    coded = c.compressed(partly, c.cast("bfloat16"), parts="params")
    assert sent(coded, TWO_LAYERS) == shared
    inside = a.partly_shared(c.compressed(a.scaffold(), c.cast("bfloat16")), "classifier")
    assert sent(inside, TWO_LAYERS) == shared


def test_what_a_wrapper_adds_to_a_coded_message_is_counted() -> None:
    coded, model = c.compressed(a.fedavg(), c.cast("bfloat16")), BATCH_NORM["average"]
    d = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))["params"]))
    assert sent(coded, model) == 2 * d + 4 * (3 + 3)  # the mean and the variance of three units
    mean = a.partly_shared(c.compressed(a.fedavg(), c.cast("bfloat16")), "classifier", new_clients="mean")
    assert sent(mean, TWO_LAYERS) == 2 * (5 * 3 + 3) + 4 * 9


def test_an_algorithm_cannot_report_the_bytes_itself() -> None:
    base = a.fedavg()

    def client_update(server, client, work):
        result = base.client_update(server, client, work)
        return result._replace(metrics=result.metrics | {"uplink_bytes": jnp.ones(())})

    sim = simulate(base._replace(client_update=client_update))
    with pytest.raises(ConfigurationError, match="must not be used already, got uplink_bytes"):
        sim.round_fn(sim.init(jax.random.key(0)))


def test_noise_does_not_move_personal_leaves() -> None:
    private = fd.aggregation.private(clip_norm=1.0, noise_multiplier=1.0)
    partly = a.partly_shared(personal="classifier")
    sim = simulate(partly, TWO_LAYERS, aggregation=private, sampling="bernoulli")
    state = sim.init(jax.random.key(0))
    new, _ = sim.round_fn(state)
    for name in ("classifier", "hidden"):
        same = np.array_equal(new.params[name]["kernel"], state.params[name]["kernel"])
        assert same == (name == "classifier")


# --- schedules --------------------------------------------------------------------------------------------------------


def test_personal_models_have_the_values_of_the_round() -> None:
    def schedule(t: jax.Array) -> jax.Array:
        return 0.5 / (1 + t)

    scheduled, fixed = (simulate(a.perfedavg(alpha=alpha)) for alpha in (schedule, 0.5 / 6))
    state = scheduled.init(jax.random.key(0))._replace(round=jnp.int32(5))
    got, expected = (sim.evaluate_clients(state)["personal_loss"] for sim in (scheduled, fixed))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    first = simulate(a.perfedavg(alpha=0.5)).evaluate_clients(state)["personal_loss"]
    assert not np.allclose(got, first, rtol=1e-3)


def test_first_phases_have_the_values_of_the_round() -> None:
    @fd.algorithm
    def scaled(alpha: float) -> fd.Algorithm:
        base = a.mime()

        def survey(server, client, work):
            return fd.ClientResult(jnp.ones(()) * alpha, jnp.ones(()), client, {})

        return a.fedavg()._replace(survey=survey, report=lambda s, m, r: {"alpha": r.surveyed}, name=base.name)

    sim = simulate(scaled(lambda t: 1.0 / (1 + t)))
    state = sim.init(jax.random.key(0))._replace(round=jnp.int32(3))
    assert float(sim.round_fn(state)[1]["alpha"]) == 0.25


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOOKS)
def test_a_function_of_an_algorithm_must_be_one(name) -> None:
    with pytest.raises(ConfigurationError, match=f"Algorithm.{name} must be a function, got 3"):
        simulate(a.fedavg()._replace(**{name: 3}))


@pytest.mark.parametrize("name", [name for name, kind in fd.Model.__annotations__.items() if "Callable" in str(kind)])
def test_a_function_of_a_model_must_be_one(name) -> None:
    with pytest.raises(ConfigurationError, match=f"Model.{name} must be a function, got 3"):
        simulate(a.fedavg(), PLAIN._replace(**{name: 3}))


def test_other_models_must_be_models() -> None:
    with pytest.raises(ConfigurationError, match="models must return a dict of models"):
        sim = simulate(a.fedavg()._replace(models=lambda server: [server.params]))
        sim.evaluate(sim.init(jax.random.key(0)))
    named = a.fedavg()._replace(models=lambda server: {"old": server.params}, report=lambda *_: {"old_loss": 0.0})
    with pytest.raises(ConfigurationError, match="the name of a metric must not be used already, got old_loss"):
        sim = simulate(named)
        sim.round_fn(sim.init(jax.random.key(0)))


def test_needs_are_joined_and_read_from_strings() -> None:
    Needs = fd.Needs
    both = Needs(features=True, epochs=2) | Needs(optimizer="sgd", epochs=1) | Needs(optimizer="sgd or momentum")
    assert both == Needs(features=True, epochs=2, optimizer="sgd")
    with pytest.warns(DeprecationWarning, match=r"requires=fd.Needs\(features=True, optimizer='sgd', epochs=2\)"):
        assert Needs.of(("features", "sgd", "2 epochs")) == both
