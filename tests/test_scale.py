"""Data sets and client states that do not fit on a device, cohorts of huge federations, and many rounds at once."""

from __future__ import annotations

import os
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import assert_close, assert_equal, thorough

import fedjax_drift as fd
from fedjax_drift.devices import memory
from fedjax_drift.participation.cohorts import first_distinct
from fedjax_drift.storage.client_store import ClientStore

SIZES = [3, 10, 7, 25, 1, 16, 12, 30, 5, 8] * 3  # 30 ragged clients
ROUNDS = 5
SETTING = {"local": fd.LocalTraining(epochs=2, batch_size=4, lr=0.2), "cohort_size": 7, "sampling": "bernoulli"}


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    rng = np.random.default_rng(0)
    clients = [(rng.integers(0, 3, (n, 6), np.uint8), rng.integers(0, 4, n)) for n in SIZES]
    return fd.FederatedData.from_clients(clients, test=clients[1])


@pytest.fixture(scope="module")
def mapped(data, tmp_path_factory) -> fd.FederatedData:
    """The same examples in memory-mapped files."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("x", "y"):
        np.save(folder / f"{name}.npy", getattr(data, name))
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))
    return fd.FederatedData(x, y, data.sizes, data.x_test, data.y_test)


def simulate(data, algorithm=None, devices=2, **options) -> fd.Simulation:
    mesh = fd.clients_mesh(jax.devices()[:devices])
    algorithm = algorithm or fd.algorithms.scaffold()
    return fd.Simulation(fd.models.linear((6,), 4), data, algorithm, mesh=mesh, **(SETTING | options))


def client_states(state: fd.ServerState):
    """Returns the client states, leaves [N, ...], from the devices or from a client store."""
    ids = np.arange(len(SIZES))
    return jax.tree.map(lambda a: np.asarray(a)[: len(ids)], state.clients if not hasattr(state.clients, "gather")
                        else state.clients.gather(ids))  # fmt: skip


@pytest.fixture(scope="module")
def expected(data) -> tuple[fd.ServerState, list]:
    """The reference: examples and client states on the devices, and one call of `round_fn` per round."""
    sim = simulate(data, measure="updates")
    state, infos = sim.init(jax.random.key(0)), []
    for _ in range(ROUNDS):
        state, info = sim.round_fn(state)
        infos.append(info)
    return state, infos


@pytest.mark.parametrize(("where", "stream"), [("files", True), thorough("host", False), thorough("sharded", True)])
def test_results_do_not_depend_on_placement(data, mapped, expected, where, stream, tmp_path) -> None:
    bank = str(tmp_path / "bank") if where == "files" else where
    sim = simulate(mapped if stream else data, stream=stream, bank=bank, measure="updates")
    by_run, history = sim.run(sim.init(jax.random.key(0)), ROUNDS, eval_every=2, progress=False)
    state, infos = expected
    assert_close(by_run.server, state.server)
    assert_close(client_states(by_run), client_states(state))
    for record, info in zip(history, infos, strict=True):
        present = np.asarray(info["cohort"]) >= 0
        assert record["update_norm"] == pytest.approx(np.asarray(info["update_norm"])[present].mean(0).tolist(), 1e-5)
        assert record["executed_steps"] == info["executed_steps"] and record["steps"] == info["steps"]
    assert history[-1]["accuracy"] == sim.evaluate(by_run)["accuracy"]
    ids = np.arange(8)
    assert_close(sim.round_fn(by_run, cohort=ids)[0].server, simulate(data).round_fn(state, cohort=ids)[0].server)


def test_sharded_client_states_are_divided_among_the_devices(data) -> None:
    odd = fd.FederatedData.from_clients([data.client(i) for i in range(9)], test=(data.x_test, data.y_test))
    sim = simulate(odd, bank="sharded", cohort_size=4, sampling="uniform")
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    leaf = jax.tree.leaves(state.clients)[0]
    assert leaf.shape[0] == 10 and {shard.data.shape[0] for shard in leaf.addressable_shards} == {5}
    compiled = sim.executor.programs.lower("donating_round", (), state, sim.setup.arrays, None).compile()
    assert "all-gather" not in "".join(
        line for line in compiled.as_text().splitlines() if "f32[10," in line
    )  # no device ever has all client states


def test_wrong_uses_of_client_states_outside_the_devices_raise(data, tmp_path) -> None:
    sim = simulate(data, bank=tmp_path / "bank")
    start = sim.init(jax.random.key(0))
    state, _ = sim.run(start, 2, progress=False)
    with pytest.raises(ValueError, match="of round 0 whose client states were overwritten in round 2"):
        sim.round_fn(start)
    with pytest.raises(ValueError, match="must be a client store that is not in use"):
        simulate(data, bank=tmp_path / "bank").init(jax.random.key(0))
    with pytest.raises(ValueError, match="outside JAX"):
        jax.lax.scan(lambda s, _: sim.round_fn(s), state._replace(clients=()), None, length=2)
    with pytest.raises(ValueError, match="whose client states are on the devices"):
        sim.round_fn(simulate(data).init(jax.random.key(0)))


def test_a_client_store_is_reopened_only_by_its_own_run(data, tmp_path) -> None:
    build = lambda **options: simulate(data, bank=tmp_path / "bank", **options)  # noqa: E731
    sim = build()
    start = sim.init(jax.random.key(0))
    state, _ = sim.run(start, 2, progress=False)
    saved = jax.device_get(state._replace(clients=()))
    state.clients.close()
    again = build()
    assert_close(
        again.run(again.reopen(saved), 3, progress=False)[0].server,
        simulate(data).run(simulate(data).init(jax.random.key(0)), 5, progress=False)[0].server,
    )
    shuffled = fd.FederatedData(data.x, data.y, data.sizes[::-1], data.x_test, data.y_test)
    for others, algorithm, message in (
        (data, fd.algorithms.feddyn(0.1), "another algorithm, model or federation"),
        (shuffled, None, "sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(others, algorithm, bank=tmp_path / "bank").reopen(saved)
    with pytest.raises(ValueError, match="key"):
        build().reopen(saved._replace(key=jax.random.key(1)))
    for other, message in (
        (build(local=fd.LocalTraining(epochs=2, batch_size=4, lr=0.3)), "local.lr.: 0.2 in the client store, not 0.3"),
        (build(cohort_size=8), "cohort_size.: 7 in the client store, not 8"),
        (build(dropout=0.5), "failures.dropout"),
    ):  # client stores and checkpoints compare the same identity
        with pytest.raises(ValueError, match=f"belongs to another simulation: .*{message}"):
            other.reopen(saved)


RULES = {
    "participation": {"participation": fd.participation.markov(0.5, 0.3)},
    "aggregation": {"aggregation": fd.aggregation.private_ftrl(1.0, 0.5, restart_every=5)},
    "clock": {"clock": fd.clock.asynchronous(4), "devices": fd.Devices(speed_spread=0.5)},
}


@pytest.mark.parametrize("field", ["clock", thorough("participation"), thorough("aggregation")])
def test_a_state_that_was_saved_without_its_clients_goes_on_bit_for_bit(field, data, tmp_path) -> None:
    """Also with rules that have a state. If this state was not saved, the message names the field."""
    options = {"cohort_size": 2, "mesh": fd.clients_mesh(jax.devices()[:1]), **RULES[field]}
    model, algorithm = fd.models.linear((6,), 4), fd.algorithms.feddyn(0.1)
    sims = [fd.Simulation(model, data, algorithm, bank=tmp_path / name, **options) for name in ("whole", "cut")]
    whole, cut = (sim.round_fn(sim.init(jax.random.key(0)))[0] for sim in sims)
    saved = pickle.loads(pickle.dumps(jax.device_get(cut._replace(clients=()))))
    cut.clients.close()
    name = re.escape(getattr(sims[1].setup.options, field).name)
    with pytest.raises(
        ValueError, match=rf"{name} in its field {field}, got \(\): save all fields but the client states"
    ):
        sims[1].reopen(fd.ServerState(saved.round, saved.key, saved.server, clients=()))
    ends = [sim.round_fn(state)[0] for sim, state in zip(sims, (whole, sims[1].reopen(saved)), strict=True)]
    assert_equal(*(state._replace(key=(), clients=client_states(state)) for state in ends))


def test_a_round_that_is_not_finite_changes_no_state(data) -> None:
    """With ``on_nonfinite="raise"``, neither the server variables nor the client states on the host change."""
    x = data.x.astype(np.float32)
    bad = fd.FederatedData(x, data.y, data.sizes)
    model = fd.models.linear((6,), 4)
    exploding = model._replace(loss=lambda logits, y: jnp.where(logits[:, 0] == 0, 1.0, jnp.nan) * logits.sum(-1))
    sim = fd.Simulation(
        exploding, bad, fd.algorithms.scaffold(), bank="host", on_nonfinite="raise", **SETTING | {"sampling": "uniform"}
    )
    start = sim.init(jax.random.key(0))
    before = jax.tree.map(np.array, (start.server, client_states(start)))
    with pytest.raises(FloatingPointError) as error:
        sim.run(start, 3, progress=False)
    kept = error.value.state
    assert kept.clients.round == int(kept.round) == len(error.value.history) == 0
    assert_equal((kept.server, client_states(kept)), before)


def test_a_full_disk_ends_the_run_with_the_previous_round(data, tmp_path, monkeypatch) -> None:
    sim = simulate(data, bank=tmp_path / "bank")
    start = sim.init(jax.random.key(0))
    commit = ClientStore.commit

    def full(bank, ids, states, t, keep) -> None:
        if t == 3:
            with monkeypatch.context() as disk:
                disk.setattr("os.posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
                return commit(bank, ids, states, t, keep)
        return commit(bank, ids, states, t, keep)

    monkeypatch.setattr(ClientStore, "commit", full)
    with pytest.raises(OSError, match="No space left") as error:
        sim.run(start, 5, progress=False)
    state, history = error.value.state, error.value.history
    assert int(state.round) == state.clients.round == len(history) == 2
    monkeypatch.undo()  # there is space again, and the run resumes without loss
    state, _ = sim.run(state, 3, progress=False)
    assert_close(state.server, simulate(data).run(simulate(data).init(jax.random.key(0)), 5, progress=False)[0].server)


def test_a_truncated_file_is_detected(data, tmp_path) -> None:
    np.save(tmp_path / "x.npy", data.x)
    mapped = fd.FederatedData(np.load(tmp_path / "x.npy", mmap_mode="r")[:], data.y, data.sizes)
    sim = simulate(mapped, stream=True)
    start = sim.init(jax.random.key(0))

    def overwrite(record: dict) -> None:
        if record["round"] == 2:
            os.truncate(tmp_path / "x.npy", 200)

    with pytest.raises(OSError, match=r"x\.npy must not become shorter") as error:
        sim.run(start, 50, progress=False, on_round=overwrite)
    state, history = error.value.state, error.value.history  # no completed round is lost
    assert int(state.round) == len(history) >= 2
    assert_close(state.params, simulate(data).run(start, len(history), progress=False)[0].params)


def test_unsupported_uses_of_streaming_raise(mapped) -> None:
    sim = simulate(mapped, stream=True)
    state = sim.init(jax.random.key(0))
    with pytest.raises(ValueError, match="outside jax.jit"):
        jax.lax.scan(lambda s, _: sim.round_fn(s), state, None, length=2)
    with pytest.raises(ValueError, match="examples of all clients"):
        simulate(mapped, stream=True, measure="gradients")


def test_automatic_placement_depends_on_the_memory_of_a_device(data, monkeypatch) -> None:
    def with_memory(size: int) -> None:
        monkeypatch.setattr("fedjax_drift.simulation.placement.memory_of", lambda mesh: size)

    state, N, K = 4 * 28, 30, simulate(data).setup.engine.capacity
    with_memory(2 * (N + 2 * K) * state)  # the client states, and two copies of those of a cohort, just fit
    assert simulate(data, stream=False).bank == "device"
    with_memory(2 * N * state)
    assert simulate(data, devices=1, stream=False).bank == "device"
    for room, found in ((2 * (N + 2 * K) * state - 2, "sharded"), (N * state, "sharded"), (1000, "host")):
        with_memory(room)
        with pytest.warns(UserWarning, match=f"bank='{found}'"):
            assert simulate(data, stream=False).bank == found
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert simulate(data, fd.algorithms.fedavg()).setup.streamed
    with pytest.raises(ValueError, match="bank must be"):
        simulate(data, bank=3)
    with pytest.raises(ValueError, match="did you mean 'host'"):
        simulate(data, bank="hosts")


@pytest.mark.parametrize("method", ["run", thorough("round_fn")])
def test_out_of_memory_halves_the_lanes(data, monkeypatch, method) -> None:
    sim = simulate(data, lanes=4, devices=1, sampling="uniform")
    launch = sim.executor.launch

    def small(program, *arguments):
        if sim.lanes > 1 and program in ("round", "rounds"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
        return launch(program, *arguments)

    monkeypatch.setattr(sim.executor, "launch", small)
    start = sim.init(jax.random.key(0))
    with pytest.warns(UserWarning, match="lanes do not fit in a device's memory: the run continues with") as said:
        state = sim.round_fn(start)[0] if method == "round_fn" else sim.run(start, 1, progress=False)[0]
    said = [w for w in said if w.category is UserWarning]  # other warnings come from garbage collection
    lanes = [w.message.args[0].split()[0] for w in said]
    assert {w.filename for w in said} == {__file__}  # the warning shows the caller's line, not a line of the library
    assert lanes == ["4", "2"] and sim.lanes == 1
    assert_close(state.server, simulate(data, devices=1, sampling="uniform").round_fn(start)[0].server)
    monkeypatch.setattr(sim.executor, "launch", lambda *_: (_ for _ in ()).throw(
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")))  # fmt: skip
    with pytest.raises(MemoryError, match="even with 1 lane"):
        sim.round_fn(start)


def needing_memory() -> fd.Model:
    """A linear model that needs 2^50 bytes, more than any machine has, if several clients train side by side."""

    @jax.custom_batching.custom_vmap
    def taking(x: jax.Array) -> jax.Array:
        return x

    @taking.def_vmap
    def _(size, batched, x):
        large = jnp.ones((2**24, 2**24)) * x.sum()
        large = jax.lax.fori_loop(0, 2 + (x.sum() > 1e30).astype(int), lambda i, a: jnp.roll(a, 1) * 1.1, large)
        return x + 0 * large.sum(), True

    taken = jax.custom_vjp(taking)
    taken.defvjp(lambda x: (taking(x), None), lambda _, g: (g,))
    return fd.Model(
        lambda key: jnp.zeros((6, 4)), lambda w, x: x @ w, train_apply=lambda w, x, key: taken(x) @ w
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "devices"), [("round_fn", 1), thorough("run", 2)])
def test_a_failed_program_keeps_its_state_unless_the_state_was_donated(data, method, devices) -> None:
    """Here XLA runs out of memory itself, after the state has been passed to the program."""

    def simulation(**options) -> fd.Simulation:
        mesh = fd.clients_mesh(jax.devices()[:devices])
        return fd.Simulation(
            needing_memory(), data, fd.algorithms.scaffold(), cohort_size=4, mesh=mesh, **options
        )  # fmt: skip

    def one(sim: fd.Simulation, state: fd.ServerState) -> fd.ServerState:
        return sim.round_fn(state)[0] if method == "round_fn" else sim.run(state, 1, progress=False)[0]

    alone = simulation(lanes=1)
    state = alone.init(jax.random.key(0))
    expected = one(alone, state)
    sim = simulation(lanes=2)
    with pytest.warns(UserWarning, match="2 lanes do not fit in a device's memory: the run continues with 1"):
        found = one(sim, state)  # from the same state that the failed program received
    assert sim.lanes == 1
    assert_close(found.server, expected.server)
    donating = simulation(lanes=2, donate=True)
    own = donating.init(jax.random.key(0))
    with pytest.raises(MemoryError, match="the state was donated to the round that failed: .* with lanes=1"):
        one(donating, own)
    assert own.params.is_deleted()
    assert_close(one(alone, state).server, expected.server)  # later calls do not raise the error again


def test_without_a_cpu_backend_cohorts_are_drawn_on_the_accelerator(data, monkeypatch) -> None:
    """With JAX_PLATFORMS=cuda, JAX has no CPU backend."""
    sim = simulate(data, bank="host", stream=True)
    expected, _ = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
    local_devices = jax.local_devices

    def without(*arguments, backend=None, **options):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return local_devices(*arguments, backend=backend, **options)

    monkeypatch.setattr(jax, "local_devices", without)
    again = simulate(data, bank="host", stream=True)
    assert_equal(again.run(again.init(jax.random.key(0)), 2, progress=False)[0].server, expected.server)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "16000", "memory.max": "90000"}, 16000),
        ("0::/\n", {"memory.max": "max"}, np.inf),
        ("9:cpu:/x\n5:memory,hugetlb:/docker/a\n", {"memory/docker/a/memory.limit_in_bytes": "7000"}, 7000),
        ("0::/gone\n", {}, np.inf),
        (None, {}, np.inf),
    ],
)
def test_the_memory_limit_of_a_container_is_used(groups, limits, expected, tmp_path, monkeypatch) -> None:
    for name, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    assert memory.container_memory(tmp_path) == expected
    monkeypatch.setattr(memory, "container_memory", lambda: 1000.0)
    assert memory.memory_of(fd.clients_mesh(jax.devices()[:2])) == 500.0


@pytest.mark.thorough
def test_cohorts_of_huge_federations_are_uniform() -> None:
    N, K, draws = 3000, 6, 4000
    cohorts = np.asarray(jax.jit(jax.vmap(lambda key: first_distinct(key, N, K)))(
        jax.random.split(jax.random.key(0), draws)))  # fmt: skip
    assert all(len(set(cohort)) == K for cohort in cohorts) and cohorts.min() >= 0 and cohorts.max() < N
    # A chi-square test for each position in the cohort. With 30 bins, it has 29 degrees of freedom.
    for place in range(K):
        counts = np.bincount(cohorts[:, place] * 30 // N, minlength=30)
        assert ((counts - draws / 30) ** 2 / (draws / 30)).sum() < 58.3  # exceeded with probability 1/1,000
    half = np.asarray(first_distinct(jax.random.key(1), 2000, 1000))
    assert len(set(half)) == 1000


def test_many_rounds_are_compiled_as_one_program(data, caplog) -> None:
    sim = simulate(data, sampling="uniform")
    start = sim.init(jax.random.key(0))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        state, history = sim.run(start, 150, eval_every=70, progress=False)
    # Nothing is compiled if a simulation with the same shapes was run before.
    assert len([r for r in caplog.records if r.message.startswith("Compiling jit(rounds)")]) <= 1
    assert [r["round"] for r in history] == list(range(1, 151))
    assert [r["round"] for r in history if "loss" in r] == [70, 140, 150]
    by_hand = start
    for _ in range(4):
        by_hand, info = sim.round_fn(by_hand)
    assert history[3]["train_loss"] == pytest.approx(float(np.average(info["loss"], weights=info["size"])), rel=1e-5)


def test_computing_in_bfloat16_keeps_parameters_in_float32(data) -> None:
    model = fd.models.mnist_2nn(4, (6,))
    half = model.computing_in(jnp.bfloat16)
    params, x = jax.jit(model.init)(jax.random.key(0)), np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    logits, expected = (jax.jit(each.apply)(params, x) for each in (half, model))
    assert logits.dtype == jnp.float32 and "bf16" in str(jax.make_jaxpr(half.apply)(params, x))
    assert 1e-6 < np.abs(np.asarray(logits) - np.asarray(expected)).max() < 1e-2
    sim = fd.Simulation(half, data, fd.algorithms.scaffold(), **SETTING)
    state = jax.eval_shape(sim.round_fn, sim.init(jax.random.key(0)))[0]
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.clients))} == {jnp.dtype("float32")}
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype"):
        model.computing_in(jnp.int8)
