"""Tests that a factory with a recipe makes hyper-parameters arguments of the compiled round.

Another value changes the result, without recompilation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import random_clients

import fedjax_drift as fd
from fedjax_drift.recipes import join, split
from fedjax_drift.run_folder import LoadedRun


@fd.algorithm
def scaled(factor: float = 1.0, base: fd.Algorithm | None = None, which: object = None) -> fd.Algorithm:
    """An algorithm of a user."""
    base = fd.algorithms.fedavg() if base is None else base

    def client_update(server, client, work):
        result = base.client_update(server, client, work)
        return result._replace(message=jax.tree.map(lambda d: factor * d, result.message))

    return base._replace(client_update=client_update, name="scaled")


def test_the_numbers_of_a_recipe_can_be_replaced() -> None:
    made = scaled(3, fd.algorithms.fedprox(np.float32(0.5), server_lr=0.25))
    form, numbers = split(made)
    assert numbers == (3.0, 0.5, 0.25)  # also the integer, because the parameter is a float
    assert split(scaled(7.0, fd.algorithms.fedprox(1.0, 1.0)))[0] == form
    again = join(form, (30.0, 5.0, 2.5))
    assert repr(again) == "Algorithm(scaled, factor=30.0, base=fedprox)"
    assert repr(again.recipe.arguments["base"]) == "Algorithm(fedprox, mu=5.0, server_lr=2.5, weighting='examples')"
    assert split(again) == (form, (30.0, 5.0, 2.5)) and join(form, numbers).recipe.arguments["factor"] == 3.0


def test_a_field_that_was_replaced_after_the_recipe_is_kept() -> None:
    def finish(server, client):
        return client

    changed = [scaled(factor)._replace(finish=finish) for factor in (2.0, 3.0)]
    form, numbers = split(changed[0])
    assert form == split(changed[1])[0] != split(scaled(2.0))[0]
    assert numbers == (2.0,)
    again = join(form, [10 * number for number in numbers])
    assert again.finish is finish and again.recipe.arguments["factor"] == 20.0 and again.name == "scaled"
    assert split(scaled(2.0)._replace(finish=lambda server, client: client))[0] != form


def test_only_finite_nonzero_floats_are_numbers() -> None:
    form = split(scaled(2.0))[0]
    for which in (0.0, 1, True, None, "a", float("nan"), (1, 2), np.ones(2), jnp.ones(2), {"a": [1.0]}, {1, 2}):
        one, other = (split(scaled(2.0, which=which)) for _ in range(2))
        assert one == other and one[1] == (2.0,) and (one[0] == form) == (which is None)
    assert split(scaled(0.0))[0] != form  # a 0 may switch something off
    different = [0.0, False, 0, "0", (0,), [0], np.zeros(1), {"a": 0}, {"b": 0}, {0}, len, scaled]
    assert len({split(scaled(2.0, which=which))[0] for which in different}) == len(different)
    assert split(fd.LocalTraining(lr=0.3))[1] == (0.3, 1.0)
    assert join(split(fd.LocalTraining(lr=0.3))[0], (0.7, 1.0)) == fd.LocalTraining(lr=0.7)
    one, same, other = (fd.LocalTraining(optimizer=optax.scale_by_adam(b1=b1)) for b1 in (0.9, 0.9, 0.8))
    assert split(one)[0] == split(same)[0] != split(other)[0]
    own = [fd.LocalTraining(optimizer=optax.stateless(lambda updates, params: updates)) for _ in range(2)]
    assert split(own[0])[0] == split(own[0])[0] != split(own[1])[0]  # functions are compared by identity


def test_models_are_equal_if_they_were_made_in_the_same_way() -> None:
    def models() -> list[fd.Model]:
        base = fd.models.mnist_2nn()
        return [
            base,
            fd.models.mnist_2nn(num_classes=3),
            fd.models.lenet5(),
            base.computing_in(jnp.bfloat16),
            fd.models.vit(10, (28, 28, 1), patch=7),
            fd.models.lora(base, 2),
            fd.models.lora(base, 3),
            fd.models.trainable(base, "classifier"),
        ]

    one, other = ([split(model)[0] for model in models()] for _ in range(2))
    assert one == other and len(set(one)) == len(one)
    plain = fd.Model(lambda key: jnp.zeros(3), lambda w, x: x @ w)
    assert split(plain)[0] == split(plain._replace(cosine=False))[0]


def test_a_factory_that_returns_no_algorithm_is_refused() -> None:
    @fd.algorithm
    def wrong():
        return 3

    with pytest.raises(ValueError, match="wrong must return an fd.Algorithm, or .*, got 3"):
        wrong()
    with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
        scaled(lr=0.1)


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    rows = random_clients([3, 10, 7, 25], 6, 4)
    return fd.FederatedData.from_clients(rows, test=rows[3])


def counting() -> fd.Model:
    """A linear model whose `apply` counts how often it is traced."""

    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        apply.traces += 1  # type: ignore[attr-defined]
        return x @ w

    apply.traces = 0  # type: ignore[attr-defined]
    return fd.Model(lambda key: jax.random.normal(key, (6, 4)), apply)


def after(sim: fd.Simulation, rounds: int = 2) -> np.ndarray:
    state, _ = sim.run(sim.init(jax.random.key(1)), rounds, eval_every=1, progress=False)
    return np.asarray(state.params)


def test_another_setting_changes_the_result_without_recompilation(data) -> None:
    """Changes learning rates, clipping, momentum, dropout, mu, and the clip norm of the aggregation.

    Each setting is used with `run`, `round_fn` and `sweep`.
    """
    model = counting()

    def simulate(lr, mu, *, server_lr=1.0, momentum=0.5, clip=1.0, dropout=0.2, norm=5.0) -> fd.Simulation:
        local = fd.LocalTraining(lr=lr, momentum=momentum, clip_norm=clip, batch_size=4)
        rule = fd.aggregation.clipped(norm)
        algorithm = fd.algorithms.fedprox(mu, server_lr)
        return fd.Simulation(
            model, data, algorithm, local=local, cohort_size=3, dropout=dropout, aggregation=rule
        )  # fmt: skip

    first = simulate(0.1, 0.3)
    seen = [after(first)]
    first.sweep(2, [0, 1], progress=False)
    first.round_fn(first.init(jax.random.key(0)))
    traces = model.apply.traces
    checked = 0  # the number of traces in constructors, which check shapes
    for options in (
        {"lr": 0.2, "mu": 0.3},
        {"lr": 0.1, "mu": 0.6, "server_lr": 0.5},
        {"lr": np.float32(0.1), "mu": 0.3, "momentum": 0.9, "clip": 0.2},
        {"lr": jnp.float32(0.1), "mu": 0.3, "dropout": 0.6},
        {"lr": 0.1, "mu": 0.3, "norm": 0.1},
    ):
        before = model.apply.traces
        sim = simulate(**options)
        checked += model.apply.traces - before
        seen.append(after(sim))
        sim.sweep(2, [0, 1], progress=False)
        sim.round_fn(sim.init(jax.random.key(0)))
        assert sim.executor.programs.compiled is first.executor.programs.compiled
    assert model.apply.traces == traces + checked
    assert len({tuple(params.ravel()) for params in seen}) == len(seen)


def test_a_number_that_python_code_reads_is_compiled_as_a_constant(data) -> None:
    """A user's algorithm may use a hyper-parameter in an `if` statement or as a shape."""

    @fd.algorithm
    def picky(mu: float) -> fd.Algorithm:
        base = fd.algorithms.fedprox(mu)

        def client_update(server, client, work):
            result = base.client_update(server, client, work)
            return result._replace(weight=result.weight * (2.0 if mu > 1 else 1.0) * jnp.ones(int(mu * 2)).sum())

        return base._replace(client_update=client_update, name="picky")

    found = {}
    for mu in (0.5, 2.0):
        sim = fd.Simulation(fd.models.linear((6,), 4), data, picky(mu), cohort_size=3)
        plain = fd.Simulation(fd.models.linear((6,), 4), data, fd.algorithms.fedprox(mu), cohort_size=3)
        state, info = sim.round_fn(sim.init(jax.random.key(0)))
        np.testing.assert_array_equal(info["weight"], info["size"] * (1 if mu < 1 else 8))
        np.testing.assert_allclose(
            jax.tree.leaves(state.params)[0],
            jax.tree.leaves(plain.round_fn(plain.init(jax.random.key(0)))[0].params)[0],
            rtol=1e-5, atol=1e-6,
        )  # fmt: skip
        found[mu] = sim.sweep(2, [0, 1], progress=False)[0].history[1]["train_loss"]
    assert found[0.5] != found[2.0]


def test_algorithms_share_the_evaluation_program(data) -> None:
    model = counting()
    sims = [fd.Simulation(model, data, a, cohort_size=2) for a in (fd.algorithms.feddyn(0.1), fd.algorithms.fedavg())]
    scores = [sim.evaluate(sim.init(jax.random.key(0))) for sim in sims]
    assert scores[0]["loss"] == scores[1]["loss"] == scores[0]["client_mean_loss"]
    assert sims[0].executor.programs.compiled.evaluate is sims[1].executor.programs.compiled.evaluate


@pytest.mark.thorough
def test_programs_do_not_keep_tracers(data) -> None:
    """A simulation that is created inside vmap, with a traced learning rate, gives the same result as with a number."""

    def one(lr):
        sim = fd.Simulation(
            fd.models.linear((6,), 4), data, fd.algorithms.fedavg(), local=fd.LocalTraining(lr=lr), cohort_size=3
        )
        return sim.round_fn(sim.init(jax.random.key(0)))[0].params

    with jax.checking_leaks():
        many = jax.vmap(one)(jnp.array([0.1, 0.2]))
    for i, lr in enumerate((0.1, 0.2)):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6), many, one(lr))


LONG, RECORDS = np.linspace(0.1, 1, 3000), [{"round": t, "loss": 0.5} for t in range(3000)]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (fd.partition.distribution(3000, np.ones((3000, 10))), "weights=a tuple of 3,000"),
        (fd.partition.iid(3000, sizes=[5] * 3000), "of 3,000"),
        (fd.partition.long_tailed(fd.partition.distribution(3000, np.ones((3000, 10)))), "partition=distribution("),
        (fd.Devices(up=LONG), "up=float64[3000]"),
        (
            fd.measures.LossPlane(LONG, LONG, np.outer(LONG, LONG), None, np.eye(3, 2), ("a", "b", "c")),
            "x=float64[3000]",
        ),
        (fd.measures.Distances(LONG, LONG, LONG, None, None, {}), "hellinger=float64[3000]"),
        (fd.plots.Compared("t", {"a": [(range(3000), LONG)]}, {}), "title='t'"),
        (fd.Run(0, {"sizes": LONG}, None, RECORDS), "'sizes': float64[3000]"),
        (fd.participation.importance(LONG / LONG.sum()), "importance"),
        (fd.participation.trace(np.ones((5, 3000), bool)), "trace"),
        (LoadedRun("fedavg", 0, {"a": RECORDS}, RECORDS, fd.models.linear(), {"w": LONG}), "history=a list of 3,000"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_repr_of_a_value_with_large_arrays_is_short(value, shown) -> None:
    assert shown in repr(value) and len(repr(value)) < 400 and "\n" not in repr(value)


def test_messages_do_not_print_whole_lists() -> None:
    with pytest.raises(ValueError, match="all different, got a list of 3,000$"):
        fd.sweep(lambda: None, 1, seeds=[0] * 3000)
