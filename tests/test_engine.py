"""Tests of the engine that hold for every algorithm."""

from __future__ import annotations

import dataclasses
import inspect
import re
import signal
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from small import CLASSES, FEATURES, assert_close, assert_equal, mlp, of_sizes, thorough

import fedjax_drift as fd
from fedjax_drift import tree
from fedjax_drift.local import shuffle, train
from fedjax_drift.round import info as info_module
from fedjax_drift.types import Algorithm, ClientResult

SIZES = [3, 10, 7, 25, 1, 16, 12, 30, 5, 8] * 3  # 30 clients of different sizes


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    return of_sizes(SIZES, test=101)


def keeping() -> Algorithm:
    """FedAvg whose clients keep their last local model, so that a test can check the result of a single client."""
    base = fd.algorithms.fedavg()

    def client_update(server, client, work) -> ClientResult:
        theta, metrics = train(work, start=server.params)
        return ClientResult(tree.subtract(theta, server.params), work.size.astype(float), theta, metrics)

    return base._replace(init_client=lambda params: params, client_update=client_update)


MLP, KEEPING = mlp(), keeping()  # simulations of the same model and algorithm share their programs


def simulate(data, algorithm=KEEPING, devices=1, **options) -> fd.Simulation:
    options = {"local": fd.LocalTraining(epochs=2, batch_size=4, lr=0.2), "cohort_size": 10} | options
    mesh = fd.clients_mesh(jax.devices()[:devices])
    return fd.Simulation(options.pop("model", MLP), data, algorithm, mesh=mesh, **options)


def client_model(state: fd.ServerState, i):
    return jax.tree.map(lambda a: np.asarray(a)[i], state.clients)


@pytest.mark.parametrize("lanes", [thorough(1), 3])
def test_a_clients_result_does_not_depend_on_the_rest_of_the_cohort_or_the_devices(data, lanes) -> None:
    results, losses = [], []
    for devices in (1, 2):
        sim = simulate(data, lanes=lanes, devices=devices)
        start = sim.init(jax.random.key(1))
        for cohort in ([3, 1, 4, 5, 9, 2], [29, 28, 27, 26, 25, 3], [3, 4, 14, 24, 8, 18]):
            state, info = sim.round_fn(start, cohort=cohort)
            results.append(client_model(state, 3))
            losses.append(float(info["loss"][list(cohort).index(3)]))
    assert not np.array_equal(results[0]["a"], client_model(start, 3)["a"])
    for result in results[1:]:
        assert_equal(result, results[0])
    assert len(set(losses)) == 1


@pytest.mark.thorough
def test_a_clients_result_does_not_depend_on_the_largest_client(data) -> None:
    """The examples of a client are padded to the size of the federation's largest client.

    The order of its examples must not depend on this padding.
    """
    small = fd.FederatedData.from_clients([data.client(i) for i in range(3)])
    large = fd.FederatedData.from_clients([data.client(i) for i in (0, 1, 2, 7)])
    a, b = (simulate(d, cohort_size=3) for d in (small, large))
    for i in range(3):
        one, two = (client_model(sim.round_fn(sim.init(jax.random.key(1)), cohort=[i])[0], i) for sim in (a, b))
        assert_equal(one, two)


def test_results_do_not_depend_on_the_numbers_of_lanes_and_devices(data) -> None:
    def after_three_rounds(lanes, devices):
        sim = simulate(data, lanes=lanes, devices=devices, cohort_size=27)
        state = sim.init(jax.random.key(0))
        for _ in range(3):
            state, info = sim.round_fn(state)
        return state._replace(key=0), info["loss"]

    reference = after_three_rounds(None, 1)
    for lanes, devices in [(1, 2), (5, 1), (25, 2)]:
        assert_close(after_three_rounds(lanes, devices), reference)


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [thorough(1), 3, thorough(6)])
def test_the_setting_threefry_partitionable_does_not_change_results(data, lanes) -> None:
    """The engine always uses True. With False, a client's shuffle would depend on the largest client in its group."""
    sim = simulate(data, lanes=lanes)
    state = sim.init(jax.random.key(1))
    expected, info = sim.round_fn(state, cohort=[3, 1, 4, 5, 9, 2])
    with jax.threefry_partitionable(False):
        other = simulate(data, lanes=lanes)
        assert_equal(other.init(jax.random.key(1)).params, state.params)
        found, loss = other.round_fn(state, cohort=[3, 1, 4, 5, 9, 2])
        scanned, _ = jax.lax.scan(lambda s, _: other.round_fn(s, cohort=jnp.array([3, 1, 4, 5, 9, 2])), state, None, 1)
    assert_equal(loss["loss"], info["loss"])
    assert_equal(found.clients, expected.clients)
    assert_close(scanned.clients, expected.clients)


def test_ten_rounds_compile_once(data) -> None:
    model = mlp()
    sim = simulate(data, model=model)
    state = sim.init(jax.random.key(0))
    state, first = sim.round_fn(state)
    traces = model.apply.traces
    cohorts = [np.asarray(first["cohort"])]
    for _ in range(9):
        state, info = sim.round_fn(state)
        cohorts.append(np.asarray(info["cohort"]))
    assert model.apply.traces == traces
    assert len({tuple(c) for c in cohorts}) == 10
    sim.round_fn(state, cohort=[1, 2])
    traces = model.apply.traces
    sim.round_fn(state, cohort=[7, 3])
    assert model.apply.traces == traces


@pytest.mark.parametrize("lanes", [thorough(1), 4])
def test_vmap_over_seeds_equals_loop(data, lanes) -> None:
    sim = simulate(data, lanes=lanes, devices=2)

    def two_rounds(key: jax.Array) -> fd.ServerState:
        state, _ = sim.round_fn(sim.init(key))
        return sim.round_fn(state)[0]

    keys = jax.random.split(jax.random.key(5), 3)
    together = jax.vmap(two_rounds)(keys)
    scores = jax.vmap(sim.evaluate)(together)
    for i, key in enumerate(keys):
        alone = two_rounds(key)
        assert_close(jax.tree.map(lambda a, i=i: a[i], together.params), alone.params)
        assert float(scores["loss"][i]) == pytest.approx(sim.evaluate(alone)["loss"], rel=1e-5)


@pytest.mark.thorough
def test_many_rounds_may_be_dispatched_without_reading_a_result() -> None:
    """With several CPU devices, XLA aborts the process if too many programs wait for each other.

    The library must prevent this.
    """
    rows = [(np.ones((2, 3), np.float32), np.zeros(2, np.int32))] * 4
    sim = simulate(fd.FederatedData.from_clients(rows), devices=2, model=fd.models.linear((3,), 2), cohort_size=2)
    state = sim.init(jax.random.key(0))
    for _ in range(1500):
        state, _ = sim.round_fn(state)
    assert int(state.round) == 1500


def test_donation_overwrites_the_state_but_not_the_callers_params(data) -> None:
    params = MLP.init(jax.random.key(3))
    sim = simulate(data, donate=True)
    plain = simulate(data)
    state = sim.init(jax.random.key(0), params=params)
    after, _ = sim.round_fn(state)
    assert_equal(after.params, plain.round_fn(plain.init(jax.random.key(0), params=params))[0].params)
    assert jax.tree.leaves(state.clients)[0].is_deleted()
    with pytest.raises(ValueError, match="donated to a round: use the state that this round returned"):
        sim.round_fn(state)
    assert jax.tree.leaves(params)[0] is not None and np.isfinite(params["a"]).all()


@pytest.mark.thorough
def test_states_may_come_from_other_devices_or_from_numpy(data) -> None:
    explicit = jax.make_mesh((2,), ("clients",))  # with explicit axes, JAX's default
    sim = fd.Simulation(MLP, data, KEEPING, cohort_size=10, mesh=explicit)
    other = simulate(data, devices=1)
    state = sim.init(jax.random.key(0))
    expected = sim.round_fn(state)[0].params
    elsewhere = jax.device_put(state.params, jax.devices()[1])
    saved = jax.tree.map(np.asarray, state._replace(key=0))._replace(key=state.key)
    for same in (other.init(jax.random.key(0)), sim.init(jax.random.key(0), params=elsewhere), saved):
        assert_equal(sim.round_fn(same)[0].params, expected)
        assert sim.evaluate(same) == sim.evaluate(state)


def test_the_data_set_is_an_argument_not_a_constant(data) -> None:
    sim = simulate(data)
    state = sim.init(jax.random.key(0))
    text = sim.executor.programs.lower("round", (), state, sim.setup.arrays, None).as_text()
    assert f"tensor<{sum(SIZES)}x{FEATURES}xf32>" in text  # the argument
    assert not [line for line in text.splitlines() if "constant" in line and len(line) > 2000]


def scratch(algorithm: fd.Algorithm, cohort_size: int, program: str = "round", **options) -> int:
    """Returns the temporary memory of a round in bytes, for 64 clients and a model of 4 * 5010 bytes."""
    rng = np.random.default_rng(0)
    many = fd.FederatedData.from_clients([(rng.normal(size=(4, 500)).astype("f4"), np.arange(4))] * 64)
    sim = simulate(many, algorithm, model=fd.models.linear((500,), 10), cohort_size=cohort_size, **options)
    state = sim.init(jax.random.key(0))
    compiled = sim.executor.programs.lower(program, (), state, sim.setup.arrays, None).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_cohort() -> None:
    one_message = 4 * 5010
    assert scratch(fd.algorithms.fedavg(), 64, lanes=2) - scratch(fd.algorithms.fedavg(), 4, lanes=2) < one_message


@pytest.mark.parametrize("lanes", [thorough(1), 2])
@pytest.mark.parametrize(("devices", "bank"), [thorough(1, "device"), (2, "sharded")])
# FedVARP's new states do not depend on the old ones, so XLA might store one before it reads the other.
@pytest.mark.parametrize("make", [thorough(fd.algorithms.scaffold), fd.algorithms.vrl_sgd, fd.algorithms.fedvarp])
def test_client_states_are_overwritten_in_place(make, devices, bank, lanes) -> None:
    one_state, options = 4 * 5010, {"program": "donating_round", "devices": devices, "bank": bank, "lanes": lanes}
    all_of_them = scratch(make(), 64, **options)
    assert all_of_them - scratch(make(), 16, **options) < one_state and all_of_them < 16 * lanes * one_state


def test_algorithms_with_finish_communicate_client_states_twice(data) -> None:
    algorithm = fd.algorithms.vrl_sgd()
    for bank in ("device", "sharded"):
        finished, unfinished = (
            simulate(data, a, devices=2, bank=bank).device_traffic()["client states"]
            for a in (algorithm, algorithm._replace(finish=None))
        )
        assert finished == 2 * unfinished > 0


def test_a_round_has_one_all_reduce_and_gathers_only_client_states(data) -> None:
    # FedDC has two trees of parameters in its message, and two in the state of a client.
    sim = simulate(data, fd.algorithms.feddc(0.1), devices=2)
    state = sim.init(jax.random.key(0))
    program = sim.executor.programs.lower("round", (), state, sim.setup.arrays, None).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) == 1
    gathered = re.findall(r" = (\S+) all-gather(?:-start)?\(", program)
    # Arrays [2, 5, 1] have one value per client of the cohort. The others must be client states, not indices.
    whole = [shape for shape in gathered if not re.match(r"\w+\[2,5,1\]", shape)]
    assert len(whole) == len(jax.tree.leaves(state.clients))


def test_shuffle_is_a_uniform_permutation_that_ignores_padding() -> None:
    key, jitted = jax.random.key(0), jax.jit(shuffle, static_argnums=3)
    for size in (1, 5, 8):
        order = jitted(key, jnp.array(size), jnp.array(8), 8)
        assert sorted(order[:size].tolist()) == list(range(size))
        assert order[:size].tolist() == jitted(key, jnp.array(size), jnp.array(9), 200)[:size].tolist()
        for longest in (8, 256, 257, 5000):
            assert order[:size].tolist() == jitted(key, jnp.array(size), jnp.array(longest), 5000)[:size].tolist()
    long = jitted(key, jnp.array(3000), jnp.array(3000), 5000)
    assert sorted(long[:3000].tolist()) == list(range(3000))
    orders = jax.vmap(lambda k: shuffle(k, jnp.array(3), jnp.array(3), 5))(jax.random.split(key, 6000))
    _, counts = np.unique(np.asarray(orders[:, :3]), axis=0, return_counts=True)
    assert len(counts) == 6 and abs(counts - 1000).max() < 150  # 5 standard deviations


@pytest.mark.thorough
def test_an_optimizer_with_a_learning_rate_of_its_own_descends(data) -> None:
    def after(local: fd.LocalTraining) -> fd.ServerState:
        sim = simulate(data, local=local)
        return sim.run(sim.init(jax.random.key(0)), 2, eval_every=0, progress=False)[0]

    warm = optax.linear_schedule(0.0, 0.2, 4)  # the first step is 0
    sgd = fd.LocalTraining(epochs=3, batch_size=5, optimizer=optax.scale_by_schedule(warm), lr=1)
    same = dataclasses.replace(sgd, optimizer=optax.sgd(warm), direction="descent")
    assert_equal(after(same).params, after(sgd).params)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "noise", [thorough(optax.identity()), optax.add_noise(1e-4, 0.0, key=3)], ids=["without", "with"]
)
def test_the_noise_of_an_optimizer_differs_between_clients_and_rounds(noise) -> None:
    rows = (np.ones((2, 3), np.float32), np.array([0, 1]))
    sim = simulate(
        fd.FederatedData.from_clients([rows] * 2), model=fd.models.linear((3,), 2),
        local=fd.LocalTraining(optimizer=noise), cohort_size=1,
    )  # fmt: skip
    state = sim.init(jax.random.key(0))
    later = state._replace(round=state.round + 1)
    kernels = [
        np.asarray(sim.round_fn(before, [client])[0].params["classifier"]["dense"]["kernel"])
        for before, client in ((state, 0), (state, 1), (later, 0), (state, 0))
    ]
    differ = not isinstance(noise.init({}), optax.EmptyState)
    assert [bool((kernels[0] != other).any()) for other in kernels[1:]] == [differ, differ, False]


def test_uniform_cohorts(data) -> None:
    sim = simulate(data, fd.algorithms.fedavg(), cohort_size=10)
    _, infos = jax.lax.scan(lambda s, _: sim.round_fn(s), sim.init(jax.random.key(0)), None, length=300)
    cohorts = np.asarray(infos["cohort"])
    assert all(len(set(c)) == 10 for c in cohorts)
    counts = np.bincount(cohorts.ravel(), minlength=30)
    assert counts.min() > 60 and counts.max() < 140  # 100 expected, standard deviation 8
    sim = simulate(data, cohort_size=30)
    assert sorted(sim.round_fn(sim.init(jax.random.key(0)))[1]["cohort"].tolist()) == list(range(30))


def test_bernoulli_cohorts(data) -> None:
    sim = simulate(data, cohort_size=5, sampling="bernoulli", lanes=2, devices=2)
    state = sim.init(jax.random.key(0))
    sizes = []
    for _ in range(60):
        old, (state, info) = state, sim.round_fn(state)
        ids = np.asarray(info["cohort"])
        ids = ids[ids >= 0]
        sizes.append(len(ids))
        absent = np.setdiff1d(np.arange(30), ids)
        assert_equal(client_model(old, absent), client_model(state, absent))
        assert np.isfinite(state.params["a"]).all() and info["finite"].all()
        assert float(info["weight"].sum()) == sum(SIZES[i] for i in ids)
    assert min(sizes) >= 1 and abs(np.mean(sizes) - 5) < 1.1 and np.std(sizes) > 1  # std 2.04, 0.26 for the mean
    with jax.debug_nans(True):  # absent clients must not produce NaNs either
        sim.round_fn(state)
    # The mean is over the sampled clients only. So a round with the argument cohort=ids gives the same model.
    given, _ = simulate(data).round_fn(old, cohort=ids)
    assert_close(given.params, state.params)


@pytest.mark.parametrize(
    "options", [{}, thorough({"bank": "host", "stream": True}), thorough({"devices": 2, "measure": "updates"})]
)
def test_a_run_with_given_cohorts_is_a_loop_of_round_fn(data, options, tmp_path) -> None:
    sim = simulate(data, fd.algorithms.scaffold(), **options)
    cohorts = np.array([[3, 1, 4], [1, 5, 9], [2, 6, 8], [9, 7, 0], [3, 2, 1]])

    def looped() -> fd.ServerState:
        state = sim.init(jax.random.key(0))
        for ids in cohorts:
            state, _ = sim.round_fn(state, ids)
        return state

    expected = jax.device_get(looped().params)
    begun, first = sim.run(sim.init(jax.random.key(0)), 2, cohort=cohorts, progress=False, checkpoints=tmp_path / "a")
    assert [record["clients"] for record in first] == [3, 3]
    for given in (cohorts.tolist(), lambda t: cohorts[t]):  # round t has row t, in a run that goes on, too
        ended, history = sim.run(sim.init(jax.random.key(0)), 5, cohort=given, progress=False)
        assert_equal(jax.device_get(ended.params), expected)
        assert len(history) == 5 and all("update_norm" in record for record in history) == ("measure" in options)
    begun = fd.Checkpoints(tmp_path / "a").restore(sim)[0]
    ended, _ = sim.run(begun, 3, cohort=cohorts, progress=False)
    assert_equal(jax.device_get(ended.params), expected)


def test_given_cohorts_are_checked_before_anything_is_compiled(data) -> None:
    sim = simulate(data, model=mlp())
    state, before = sim.init(jax.random.key(0)), sim.model.apply.traces
    for given, message in {
        "uniform": "cohort must be an array .* or a function of the round, got 'uniform'",
        3: "cohort must be an array .* or a function of the round, got 3",
        ((0, 1),): "cohort must have a row for each of the rounds 0 to 1, got 1 rows: add rows, or pass rounds=1",
        ((0, 1), (2, 30)): r"cohort, in round 1, must contain client ids in 0..29, got 30",
        ((0, 1), 2): "cohort, in round 1, must be a one-dimensional list",
    }.items():
        with pytest.raises(ValueError, match=message):
            sim.run(state, 2, cohort=given, progress=False)
    for wrong in (None, [1, 1]):
        with pytest.raises(ValueError, match="cohort, in round 0, must"):
            sim.run(state, 2, cohort=lambda t, wrong=wrong: wrong, progress=False)
    assert sim.model.apply.traces == before


@pytest.mark.thorough
def test_few_steps_are_wasted_with_the_sizes_of_femnist() -> None:
    """Executed steps exceed the needed steps by at most 12 %.

    The sizes have mean 197 and standard deviation 85, and the batch size is 20. In every round, 100 of 3,400 clients
    train in groups of 10 lanes.
    """
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.gamma((197 / 85) ** 2, 85**2 / 197, 3400), 19, 470).astype(np.int32)
    rows = np.zeros((sizes.sum(), 1), np.float32)
    femnist = fd.FederatedData(rows, np.zeros(len(rows), np.int32), sizes)
    local, model = fd.LocalTraining(batch_size=20), fd.models.linear((1,), 2)
    sim = simulate(femnist, fd.algorithms.fedavg(), model=model, local=local, cohort_size=100, lanes=10)
    state, ratios = sim.init(jax.random.key(0)), []
    for _ in range(10):
        state, info = sim.round_fn(state)
        needed = sum(-(-sizes[i] // 20) for i in np.asarray(info["cohort"]))
        assert int(info["steps"]) == needed
        ratios.append(int(info["executed_steps"]) / needed)
    assert np.mean(ratios) <= 1.12


def test_nonfinite_updates(data) -> None:
    x, y = data.client(4)
    pairs = [data.client(i) for i in range(6)]
    pairs[4] = (x * 1e30, y)  # its loss overflows

    model = fd.Model(MLP.init, lambda p, x: jnp.square(x @ p["a"] @ p["b"]) ** 2)
    broken = fd.FederatedData.from_clients(pairs, test=data.client(0))

    def poisoned(**options) -> fd.Simulation:
        return simulate(broken, model=model, cohort_size=3, local=fd.LocalTraining(lr=1e-4), **options)

    start = poisoned().init(jax.random.key(0))
    kept, info = poisoned().round_fn(start, cohort=[1, 4, 2])
    assert not np.isfinite(kept.params["a"]).all() and info["finite"].tolist() == [True, False, True]
    dropped, _ = poisoned(on_nonfinite="drop_client").round_fn(start, cohort=[1, 4, 2])
    assert_close(dropped.params, poisoned().round_fn(start, cohort=[1, 2])[0].params)
    assert_equal(client_model(dropped, 4), client_model(start, 4))
    nobody, _ = poisoned(on_nonfinite="drop_client").round_fn(start, cohort=[4])
    assert_equal(nobody.params, start.params)
    with pytest.raises(FloatingPointError, match=r"round 0: 1 of 3 .* \(client 4 in message\['a'\]\)"):
        poisoned(on_nonfinite="raise").round_fn(start, cohort=[1, 4, 2])
    with pytest.warns(RuntimeWarning, match="not finite"):
        poisoned().run(start, 6, progress=False)


@pytest.mark.thorough
def test_a_loss_that_is_nan_is_reported_although_the_updates_are_finite(data) -> None:
    """The loss is NaN for the last label, which only client 4 has, and its gradient is 0."""
    pairs = [(x, np.minimum(y, CLASSES - 2)) for x, y in (data.client(i) for i in range(6))]
    pairs[4] = (pairs[4][0], np.full_like(pairs[4][1], CLASSES - 1))
    wrong = fd.FederatedData.from_clients(pairs, test_clients=pairs)

    def unchecked(z: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(y == CLASSES - 1, jnp.nan, optax.softmax_cross_entropy_with_integer_labels(z, y))

    model = MLP._replace(loss=unchecked)

    def sim(**options) -> fd.Simulation:
        return simulate(wrong, fd.algorithms.fedavg(), model=model, cohort_size=6, **options)

    start = sim().init(jax.random.key(0))
    state, info = sim().round_fn(start)
    assert np.isfinite(state.params["a"]).all()
    assert np.array_equal(np.asarray(info["finite"]), np.asarray(info["cohort"]) != 4)
    in_loss = r"round 0: 1 of 6 .* \(client 4 in metrics\['loss'\]\): the updates are finite, so check that Model.loss"
    with pytest.raises(FloatingPointError, match=in_loss):
        sim(on_nonfinite="raise").round_fn(start)
    with pytest.warns(RuntimeWarning, match=in_loss):
        sim().run(start, 1, eval_every=0, progress=False)
    with pytest.warns(RuntimeWarning, match="seed 0, " + in_loss):
        sim().sweep(1, [0], eval_every=0, progress=False)
    dropped, _ = sim(on_nonfinite="drop_client").round_fn(start)
    assert_close(dropped.params, sim().round_fn(start, cohort=[0, 1, 2, 3, 5])[0].params)
    in_test = fd.FederatedData.from_clients(pairs[:4], test=pairs[4])
    with pytest.warns(RuntimeWarning, match="round 0: the test loss must be finite, got nan"):
        simulate(in_test, fd.algorithms.fedavg(), model=model, cohort_size=4).run(start, 1, progress=False)
    with pytest.warns(RuntimeWarning, match="got a loss of nan for client 4, one of 1 such clients"):
        sim().evaluate_clients(state)


def test_the_documentation_of_a_round_lists_the_entries_of_its_info(data) -> None:
    listed = re.findall(r"^- ((?:``\w+``(?:, )?)+):", inspect.getsource(info_module), re.MULTILINE)
    names = {name for line in listed for name in re.findall(r"\w+", line)}
    options = {"dropout": 0.1, "participation": fd.participation.cyclic(2), "clock": fd.clock.asynchronous(20)}
    sim = simulate(data, fd.algorithms.fedavg(), **options)
    _, info = sim.round_fn(sim.init(jax.random.key(0)))
    assert names == info.keys()


def test_evaluate_is_the_mean_over_the_test_examples(data) -> None:
    sim = simulate(data, devices=2, eval_batch_size=16)  # the last batch of the 101 examples is padded
    state = sim.init(jax.random.key(0))
    logits = np.tanh(data.x_test @ np.asarray(state.params["a"])) @ np.asarray(state.params["b"])
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(101), data.y_test]
    right = logits.argmax(1) == data.y_test
    scores = sim.evaluate(state)
    assert scores["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    sizes = [1] * 28 + [0, 73]
    clients = dataclasses.replace(data, test_sizes=np.array(sizes))
    per_client = simulate(clients, devices=2, eval_batch_size=16).evaluate_clients(state)
    assert per_client["accuracy"][:28].tolist() == right[:28].tolist() and np.isnan(per_client["accuracy"][28])
    assert per_client["loss"][29] == pytest.approx(losses[28:].mean(), rel=1e-5)
    with pytest.raises(ValueError, match="test_clients="):
        sim.evaluate_clients(state)


def test_clients_have_names_and_decode_returns_the_inputs_of_the_model() -> None:
    rng = np.random.default_rng(0)
    rows = {
        name: (rng.integers(0, 256, (n, 2, 3), np.uint8), rng.integers(0, 2, n)) for n, name in ((3, "b"), (5, "a"))
    }
    tests = {"a": (rows["a"][0][:2], rows["a"][1][:2])}
    data = fd.FederatedData.from_clients(rows, test_clients=tests, mean=[0.1, 0.2, 0.3], std=0.5)
    assert data.client_names == ("b", "a") and data.test_sizes.tolist() == [0, 2] and data.id_of("a") == 1
    for name, (x, y) in rows.items():
        assert_equal(data.client(name), (x, y))
    seen = (data.x_test / np.float32(255) - np.array([0.1, 0.2, 0.3], "f4")) / np.float32(0.5)
    np.testing.assert_allclose(data.decode(data.x_test), seen, rtol=1e-6)
    model = fd.models.linear((2, 3), 2)
    sim = simulate(data, fd.algorithms.fedavg(), model=model, cohort_size=1)
    assert sim.setup.arrays.rows.x.dtype == jnp.uint8
    state = sim.init(jax.random.key(0))
    right = np.argmax(model.apply(state.params, data.decode(data.x_test)), 1) == data.y_test
    assert sim.evaluate(state)["accuracy"] == pytest.approx(right.mean())
    by_name, by_id = (sim.round_fn(state, cohort=cohort)[0].params for cohort in (["a", "b"], [1, 0]))
    assert_equal(by_name, by_id)
    assert data.redealt().client_names == ("b", "a")
    plain = fd.FederatedData.from_clients(list(rows.values()))
    np.testing.assert_allclose(plain.decode(plain.x), plain.x / np.float32(255), rtol=1e-6)
    assert plain.decode(np.arange(3)).dtype == jnp.int32 and plain.client_names is None


@pytest.mark.thorough
def test_only_uint8_images_are_divided_by_255(data) -> None:
    """Other uint8 inputs are features, float32 with the same values, unless mean and std are given."""
    rng = np.random.default_rng(0)
    bits = [(rng.integers(0, 2, (n, FEATURES)), rng.integers(0, CLASSES, n)) for n in SIZES]

    def federation(dtype: str, **options) -> fd.FederatedData:
        pairs = [(x.astype(dtype), y) for x, y in bits]
        return fd.FederatedData.from_clients(pairs, test=pairs[3], **options)

    model = fd.Model(MLP.init, lambda params, x: MLP.apply(params, 2 * x - 1))  # would wrap around in uint8

    def trained(data: fd.FederatedData, **options) -> tuple:
        sim = simulate(data, fd.algorithms.fedavg(), model=model, cohort_size=5, **options)
        state, _ = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
        return jax.device_get(state.params), sim.evaluate(state)

    for options in ({}, {"stream": True}):
        for got, wanted in zip(*(trained(federation(dtype), **options) for dtype in ("u1", "f4")), strict=True):
            assert_equal(got, wanted)
    features, images = federation("u1"), federation("u1", mean=0, std=1)
    assert features.decode(features.x).dtype == np.float32 and not features.has_images and images.has_images
    np.testing.assert_array_equal(features.decode(features.x), features.x)
    np.testing.assert_allclose(images.decode(images.x), images.x / 255, rtol=1e-6)
    grey = fd.FederatedData.from_clients([(np.full((2, 4, 4), 51, np.uint8), np.arange(2))])
    np.testing.assert_allclose(grey.decode(grey.x), 0.2, rtol=1e-6)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(3)(x))


def test_dropout_layers_are_random_in_training_and_off_in_evaluation() -> None:
    rows = (np.ones((8, 5), np.float32), np.zeros(8, int))
    model = fd.Model.from_linen(Dropped(), (5,))
    sim = simulate(fd.FederatedData.from_clients([rows], test=rows), model=model, cohort_size=1)
    state = sim.init(jax.random.key(0))
    losses = {float(sim.round_fn(sim.init(jax.random.key(k), params=state.params))[1]["loss"][0]) for k in range(3)}
    assert len(losses) == 3 and sim.evaluate(state) == sim.evaluate(state)


def test_run_records_every_round_and_resumes(data, capsys) -> None:
    sim = simulate(data)
    start = sim.init(jax.random.key(0))
    seen: list = []
    state, history = sim.run(start, 7, eval_every=3, progress=False, on_round=seen.append)
    assert seen == history and [r["round"] for r in history] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["round"] for r in history if "accuracy" in r] == [3, 6, 7]
    assert history[-1]["accuracy"] == sim.evaluate(state)["accuracy"]
    half, _ = sim.run(start, 4, progress=False)
    rest, more = sim.run(half, 3, progress=False)
    assert_equal(rest.params, state.params)
    assert [r["train_loss"] for r in more] == [r["train_loss"] for r in history[4:]]
    sim.run(start, 2, eval_every=1, progress=True)
    bar = capsys.readouterr().err
    assert all(shown in bar for shown in ("fedavg: 100%", "2/2", "loss=", "acc="))
    by_hand = sim.round_fn(start)[1]
    expected = np.average(by_hand["loss"], weights=[SIZES[i] for i in by_hand["cohort"]])
    assert history[0]["train_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", ["signal", thorough("exception")])
def test_ctrl_c_returns_the_completed_rounds(data, how, capsys) -> None:
    sim, before = simulate(data), signal.getsignal(signal.SIGINT)
    start = sim.init(jax.random.key(0))

    def interrupt(record: dict) -> None:
        if record["round"] == 3:
            if how == "exception":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    state, history = sim.run(start, 50, eval_every=7, progress=False, on_round=interrupt)
    assert history[-1]["accuracy"] == sim.evaluate(state)["accuracy"]
    assert [record["round"] for record in history] == [*range(1, len(history) + 1)]
    # A program ends no later than the next evaluation. So the program with round 3 ends at round 7 or before. The next
    # program may have been dispatched already. It ends at round 14 or before.
    assert 3 <= len(history) <= 14 and int(state.round) == len(history)
    assert_equal(state.params, sim.run(start, len(history), eval_every=0, progress=False)[0].params)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_skips_the_last_evaluation(data, monkeypatch) -> None:
    sim = simulate(data)
    start = sim.init(jax.random.key(0))
    sim.round_fn(start)
    evaluate = sim.executor.scores

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return evaluate(*arguments)

    monkeypatch.setattr(sim.executor, "scores", interrupted)
    state, history = sim.run(start, 3, eval_every=100, progress=False)
    assert int(state.round) == 3 == len(history) and "accuracy" not in history[-1]


def test_an_error_in_on_round_carries_the_state_and_the_history(data) -> None:
    sim, seen = simulate(data), []

    def fails(record: dict) -> None:
        seen.append(record)
        if record["round"] == 3:
            raise RuntimeError("the network is down")

    with pytest.raises(RuntimeError, match="the network is down") as raised:
        sim.run(sim.init(jax.random.key(0)), 50, progress=False, on_round=fails)
    state, history = raised.value.state, raised.value.history
    assert int(state.round) == len(history) >= 3 == len(seen)
    for wrong, kind in ((state.params, "dict"), ((state, history), "tuple")):
        with pytest.raises(ValueError, match=f"state must be a ServerState, got {kind}: sim.init"):
            sim.evaluate(wrong)


def test_two_ctrl_c_between_rounds_wait_for_the_next_state(data, monkeypatch) -> None:
    """`run` donates each state to the next round.

    After an interrupt between the donation and the end of the round, neither state would be valid.
    """
    sim = simulate(data)
    start = sim.init(jax.random.key(0))
    advance = sim.executor.rounds

    def interrupted(state, *arguments):
        if int(state.round) == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return advance(state, *arguments)

    monkeypatch.setattr(sim.executor, "rounds", interrupted)
    state, history = sim.run(start, 50, eval_every=1, progress=False)
    assert int(state.round) == 3 == len(history) and np.isfinite(state.params["a"]).all()
    assert np.isfinite(start.params["a"]).all()  # the caller's state stays valid


def probing(state=None, server=None, observe=None, **result) -> Algorithm:
    """FedAvg with a client state, and with a Python number as a server variable.

    The arguments replace a part of it, so that a test can introduce a mistake.
    """
    base = fd.algorithms.fedavg(weighting="uniform")

    def client_update(own, client, work) -> ClientResult:
        plain = base.client_update(own, (), work)
        kept = {"visits": client["visits"] + 1} if state is None else state(client)
        return plain._replace(state=kept, **{"weight": 1, **result})

    def server_update(own, D, context):
        updated = own._replace(params=tree.subtract(own.params, jax.tree.map(jnp.negative, D)))
        return server(updated) if server else updated

    class Server(NamedTuple):
        params: dict
        gain: float

    return Algorithm(
        lambda params: Server(params, 0.0), lambda params: {"visits": jnp.zeros((), jnp.int32)},
        client_update, server_update, observe, "probe",
    )  # fmt: skip


def test_algorithms_of_users_are_checked(data) -> None:
    def one_round(algorithm, **options) -> tuple[fd.ServerState, dict]:
        sim = simulate(data, algorithm, **options)
        state, _ = sim.round_fn(sim.init(jax.random.key(0)), cohort=[1, 2, 5])
        return sim.round_fn(state, cohort=[2, 5, 7])

    def seen(server, metrics):
        return server._replace(gain=metrics["loss"] * np.float64(1))

    for lanes in (1, 2):
        state, info = one_round(probing(metrics={"score": 1.5}, observe=seen), lanes=lanes, devices=2)
        assert np.asarray(state.clients["visits"])[[0, 1, 2, 5, 7]].tolist() == [0, 1, 2, 2, 1]
        assert info["score"].tolist() == [1.5] * 3 and float(state.server.gain) > 0
    for algorithm, message in (
        (probing(state=lambda c: {"visits": jnp.zeros(3)}), r"probe: a client's new state .*visits.*\[3\] instead of"),
        (probing(state=lambda c: ()), "probe: a client's new state must have the structure"),
        (probing(server=lambda s: s._replace(gain=jnp.ones(2))), r"probe: the updated server .*gain"),
        (probing(metrics={"weight": jnp.ones(())}), "probe: the name of a metric must not be used already, got weight"),
        (
            probing(metrics={"accuracy": 0.5}),
            "got accuracy: rename it, for example to accuracy_of_clients",
        ),  # the records have an accuracy already
        (probing(metrics={"seen": jnp.ones(3)}), r"probe: seen must be a scalar, got float32\[3\]: take its mean"),
        (
            probing(state=lambda c: {"visits": c["visits"] + 0.5}),
            r"got float32 instead of int32 in \['visits'\]: initialise",
        ),
        (probing()._replace(client_update=lambda *_: (1, 2)), "client_update must return a ClientResult, got tuple"),
        (probing()._replace(init_server=lambda params: {}), "an attribute params, got dict: return a NamedTuple"),
        (probing()._replace(report=lambda *_: {"gain": jnp.ones(2)}), r"probe: gain must be a scalar, got float32\[2"),
        (probing(metrics=jnp.ones(())), r'probe: metrics must be a dict of scalars such as {"gain": 0.5}, got Array'),
        (probing(metrics={3: 0.5}), r"probe: metrics must be a dict of scalars .*, got \{3: 0.5\}"),
        (probing()._replace(report=lambda *_: 0.5), "the result of report must be a dict of scalars .*, got 0.5"),
        (probing()._replace(requires=("sgdd",)), "Algorithm.requires must be one of .*: did you mean 'sgd'"),
    ):
        with pytest.raises(ValueError, match=message):
            one_round(algorithm)


def test_sums_are_not_rounded_to_the_messages_precision() -> None:
    many = fd.FederatedData.from_clients([(np.ones((1, 1), np.float32), np.zeros(1, int))] * 600)
    model = fd.Model(lambda key: jnp.zeros(1, jnp.bfloat16), lambda w, x: x @ w, loss=lambda z, y: -z)
    algorithm = fd.algorithms.fedavg(weighting="uniform")
    sim = simulate(many, algorithm, model=model, local=fd.LocalTraining(lr=1.0), cohort_size=600)
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    assert state.params.dtype == jnp.bfloat16 and float(state.params[0]) == 1.0  # a sum in bfloat16 would stop at 256


def test_data_on_the_devices_are_shared_and_never_traced() -> None:
    rows = (np.full((4, 2), 1 + 1e-12), np.zeros(4, int))
    own = fd.FederatedData.from_clients([rows], test=rows)

    def build(**options) -> fd.Simulation:
        return simulate(own, fd.algorithms.fedavg(), model=fd.models.linear((2,), 2), cohort_size=1, **options)

    jax.jit(lambda key: build().init(key))(jax.random.key(0))  # data placed inside jax.jit must not be tracers
    one, two = build(), build(eval_batch_size=3)
    assert one.setup.arrays.rows.x is two.setup.arrays.rows.x and one.setup.arrays.rows.x.dtype == jnp.float32
    with jax.enable_x64(True):
        assert build().setup.arrays.rows.x.dtype == jnp.float64


def test_a_simulation_refuses_another_precision_than_it_was_created_with(data) -> None:
    sim = simulate(data.with_client_tests())
    state = sim.init(jax.random.key(0))
    calls: list[Callable] = [
        lambda: sim.init(jax.random.key(0)),
        lambda: sim.round_fn(state),
        lambda: sim.run(state, 1),
        lambda: sim.sweep(1, [0]),
        lambda: sim.measure(state, "updates"),
        lambda: sim.evaluate(state),
        lambda: sim.evaluate_clients(state),
    ]
    with jax.enable_x64(True):
        for call in calls:
            with pytest.raises(ValueError, match="jax_enable_x64 must be False, as when the simulation was created"):
                call()
    sim.round_fn(state)


def test_init_accepts_legacy_keys_and_rejects_unsuitable_ones(data) -> None:
    sim = simulate(data)
    assert_equal(sim.init(jax.random.PRNGKey(3)).params, sim.init(jax.random.key(3)).params)
    with pytest.raises(ValueError, match=r"jax.vmap\(sim.init\)\(keys\) makes many states"):
        sim.init(jax.random.split(jax.random.key(0)))
    with pytest.raises(ValueError, match="threefry2x32"):
        sim.init(jax.random.key(0, impl="rbg"))
