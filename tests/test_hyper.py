"""Tests that hyper-parameters are arguments of the compiled round.

Another value changes the result, without recompilation.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_drift as fd
from fedjax_drift.simulation.hyper import join, split

SCALE = 2.0
SETTINGS = types.SimpleNamespace(power=2)


def nested(a: float, b: float = 0.5):
    """Returns two closures and a partial.

    ``outer`` captures ``inner``, which has a default argument. The partial contains ``inner``, too.
    """

    def inner(x, c=0.25):
        return a * x + c

    def outer(x):
        return inner(x) + b * x

    return outer, inner, functools.partial(inner, c=a)


def test_numbers_in_closures_can_be_extracted_and_replaced() -> None:
    form, numbers = split(nested(3.0))
    # The captured a occurs once, although inner is shared. The second 3.0 is the argument c of the partial.
    assert sorted(numbers) == [0.25, 0.5, 3.0, 3.0]
    assert split(nested(7.0, 9.0))[0] == form
    outer, inner, partial = join(form, [{3.0: 30.0, 0.5: 5.0, 0.25: 1.0}[number] for number in numbers])
    assert (outer(1.0), inner(1.0), partial(1.0)) == (36.0, 31.0, 60.0)
    one, two, _ = nested(3.0)
    assert (one(1.0), two(1.0)) == (3.75, 3.25)  # the original functions are unchanged
    whole = join(form, numbers)
    assert whole[0](1.0) == one(1.0) and split(whole) == (form, numbers)


def test_only_finite_nonzero_floats_are_extracted() -> None:
    def closed(value):
        return lambda x: x if value is None else x * value

    for value in (0.0, 1, True, None, np.ones(2), (1, 2), float("nan"), jnp.float32(3)):
        form, numbers = split(closed(value))
        assert numbers == () and join(form, ()) is form.value
    assert split(closed(0.0))[0] != split(closed(1.0))[0]  # a 0 may switch something off, so it is not extracted
    assert split(closed(1))[0] != split(closed(2))[0] != split(closed(True))[0]
    assert split(closed(np.ones(2)))[0] == split(closed(np.ones(2)))[0] != split(closed(np.zeros(2)))[0]
    assert split(closed({"a": [1.0]}))[0] == split(closed({"a": [1.0]}))[0] != split(closed({"a": [2.0]}))[0]
    adam = optax.scale_by_adam  # the numbers in functions of libraries stay in the form
    assert split(adam())[0] == split(adam())[0] != split(adam(b1=0.5))[0] and not split(adam())[1]
    fixed = split(fd.LocalTraining(lr=0.3), ())
    assert fixed[1] == (0.3, 1.0) and join(fixed[0], (0.7, 1.0)) == fd.LocalTraining(lr=0.7)

    def again(n, by=2.0):
        return by if n == 0 else again(n - 1)

    assert split(again)[1] == ()  # its recursive calls would use the old numbers


def test_functions_are_compared_by_their_code_and_global_variables() -> None:
    def closed(a):
        return lambda x: a * x

    def other(a):
        return lambda x: a + x

    assert split(closed(1.0))[0] == split(closed(2.0))[0] != split(other(1.0))[0]

    def global_one(x):
        return SCALE * x**SETTINGS.power

    form = split(global_one)[0]
    assert split(global_one)[0] == form
    for owner, name, value in ((globals(), "SCALE", 3.0), (vars(SETTINGS), "power", 3)):
        old = owner[name]
        owner[name] = value
        assert split(global_one)[0] != form  # as if a notebook had changed the variable
        owner[name] = old
    assert split(global_one)[0] == form


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 4, n)) for n in (3, 10, 7, 25)]
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


def test_a_changed_global_variable_is_noticed(data) -> None:
    """A loss uses the value that a global variable has when the simulation is created."""
    global SCALE
    model = fd.Model(lambda key: jnp.zeros(6), lambda w, x: x @ w, loss=lambda z, y: SCALE * (z - y) ** 2)
    runs = []
    for scale in (2.0, 3.0, 2.0):
        SCALE = scale
        runs.append(after(fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=4), 1))
    SCALE = 2.0
    assert not np.array_equal(runs[0], runs[1]) and np.array_equal(runs[0], runs[2])


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
