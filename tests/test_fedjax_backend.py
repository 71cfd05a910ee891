"""Against FedJAX's own 'jit' backend, and FedJAX's FedAvg against ours."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd

fedjax = pytest.importorskip("fedjax")
from fedjax import algorithms  # noqa: E402

from fedjax_drift import fedjax_backend  # noqa: E402
from fedjax_drift.fedjax_backend import EngineBackend  # noqa: E402


@pytest.fixture(autouse=True)
def tree_map(monkeypatch) -> None:
    """What FedJAX 0.0.17 still calls."""
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)


def batches(seed: int, *rows: int) -> list[dict]:
    """Of so many rows each; padded ones have a mask, as FedJAX's."""
    rng = np.random.default_rng(seed)
    made = [{"x": rng.normal(size=(n, 3)), "y": rng.integers(9, size=n)} for n in rows]
    return [b | {fedjax.EXAMPLE_MASK_KEY: np.arange(len(b["y"])) < 3} if len(b["y"]) == 4 else b for b in made]


def clients() -> list[tuple]:
    """Nineteen, so that two devices read twice: ragged, with short batches between others, without any, "a" twice, and
    inputs of two kinds."""
    lists = [(5, 5, 2), (5,), (), (5, 2, 5, 5), (4,) * 9, (2,), (5,) * 3, (4, 4, 2), (), *[(5,) * n for n in range(10)]]
    start = [jnp.float32(i) if i % 5 else jnp.full(2, i, jnp.float32) for i in range(len(lists))]
    ids = ["a", "b", "a", *range(3, len(lists))]
    return [
        (id, batches(i, *rows), {"start": start[i], "key": jax.random.key(i), "scale": 0.5, "none": None})
        for i, (id, rows) in enumerate(zip(ids, lists, strict=True))
    ]


def client_init(shared, given):
    return given | {"w": shared[0] + given["start"].sum(), "n": jnp.int32(0), "i": given["start"]}


def client_step(state, batch):
    key, use = jax.random.split(state["key"])
    noise = jax.random.normal(use, batch["x"].shape)
    x = jnp.sin((batch["x"] + noise) * state["scale"] * state["w"][None])
    seen = batch.get(fedjax.EXAMPLE_MASK_KEY, jnp.ones(len(x), bool))
    w = state["w"] * 0.9 + jnp.where(seen[:, None], x, 0).sum(0) + batch["y"].sum()
    return state | {"key": key, "w": w, "n": state["n"] + 1}, {"rows": x, "n": (state["n"],), "key": use}


def client_final(shared, state):
    return state["i"], state["w"] - shared[0], {"n": state["n"], "key": state["key"]}


def run(backend, with_step_result: bool = True, step=client_step) -> list[tuple]:
    """By client, as NumPy arrays."""
    if not with_step_result:
        step = partial(lambda step, *arguments: step(*arguments)[0], step)
    with fedjax.for_each_client_backend(backend):
        each = fedjax.for_each_client(client_init, step, client_final, with_step_result)
    found = list(each((np.arange(3, dtype="float32"), None), clients()))

    def plain(leaf):
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    found = [(str(client[0]), *jax.tree.map(plain, client[1:])) for client in found]
    return sorted(found, key=lambda client: (client[0], float(client[1][0].sum())))


def assert_same(ours, theirs, atol: float = 1e-6) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(a, b, atol=atol, rtol=atol)


@pytest.fixture(scope="module")
def theirs() -> list[tuple]:
    return run("jit")


@pytest.mark.as_users
@pytest.mark.parametrize("lanes, room", [("auto", 2**26), (3, 300)])
def test_every_client_gets_what_the_jit_backend_gives_it(lanes, room, theirs, monkeypatch) -> None:
    monkeypatch.setattr(fedjax_backend, "ROOM", room)  # bytes
    assert_same(run(EngineBackend(lanes)), theirs)


def test_without_step_results(theirs) -> None:
    assert_same(run(EngineBackend(), with_step_result=False), [client[:2] for client in theirs])


def test_convolutions_which_a_cpu_runs_without_a_loop() -> None:
    def step(state, batch):
        state, result = client_step(state, batch)
        smooth = jax.lax.conv(state["w"][None, None], jnp.array([[[0.2, 0.6, 0.2]]]), (1,), "SAME")[0, 0]
        return state | {"w": smooth}, result

    assert_same(run(EngineBackend(2), step=step), run("jit", step=step))


def test_another_cohort_compiles_nothing() -> None:
    traces = []

    def step(n, batch):
        traces.append(batch["x"].shape)
        return n + batch["x"].sum()

    with fedjax.for_each_client_backend(EngineBackend()):
        each = fedjax.for_each_client(lambda shared, given: given, step)
    for i, rows in enumerate([[(5,) * 7, (5, 2), (5,)], [(5,) * 4], [(2,), (5, 5)] * 6, [()]]):
        found = dict(each(None, [(j, batches(j, *some), 0.0) for j, some in enumerate(rows)]))
        assert len(found) == len(rows)
        if i == 0:
            first = list(traces)
    assert set(first) == {(5, 3), (2, 3)} and traces == first


def federation(sizes=(7, 30, 1, 12, 20)) -> dict[int, dict]:
    rng = np.random.default_rng(0)
    return {
        i: {"x": rng.normal(size=(n, 4)).astype("float32"), "y": rng.integers(3, size=n).astype("int32")}
        for i, n in enumerate(sizes)
    }


def losses(params, batch, key=None):
    return -jnp.take_along_axis(jax.nn.log_softmax(batch["x"] @ params), batch["y"][:, None], 1)[:, 0]


def gradient(params, batch, key):
    return jax.grad(lambda params: losses(params, batch).mean())(params)


SGD = fedjax.optimizers.sgd(0.1)
BATCHES = fedjax.ShuffleRepeatBatchHParams(batch_size=8, num_epochs=2, seed=0)
PADDED = fedjax.PaddedBatchHParams(batch_size=8, num_batch_size_buckets=2)
MAKE = {
    "fed_avg": lambda: algorithms.fed_avg.federated_averaging(gradient, SGD, SGD, BATCHES),
    "fed_prox": lambda: algorithms.fed_prox.fed_prox(losses, SGD, SGD, BATCHES, 0.1),
    "mime": lambda: algorithms.mime.mime(losses, SGD, BATCHES, PADDED, 1.0),
    "mime_lite": lambda: algorithms.mime_lite.mime_lite(losses, fedjax.optimizers.sgd(0.1, 0.9), BATCHES, PADDED, 1.0),
}


def rounds(algorithm, n: int, data: dict) -> tuple:
    state = algorithm.init(jnp.zeros((4, 3)))
    for t in range(n):
        keys = jax.random.split(jax.random.PRNGKey(t), len(data))
        cohort = [(i, fedjax.ClientDataset(rows), keys[i]) for i, rows in data.items()]
        state, diagnostics = algorithm.apply(state, cohort)
    return state.params, {i: diagnostics[i] for i in sorted(diagnostics)}


@pytest.mark.parametrize("name", MAKE)
def test_whole_rounds_of_fedjaxs_algorithms(name) -> None:
    theirs = rounds(MAKE[name](), 3, federation())
    with fedjax.for_each_client_backend(EngineBackend()):
        ours = rounds(MAKE[name](), 3, federation())
    assert_same(ours, theirs)
    assert np.abs(theirs[0]).max() > 0.01


def test_fedjaxs_fedavg_is_ours() -> None:
    data = federation((24, 12, 8, 3, 1))
    # FedJAX fills a short batch up with the client's rows over again: here each of them as often.
    whole = fedjax.ShuffleRepeatBatchHParams(batch_size=24, num_epochs=1, seed=0)
    algorithm = algorithms.fed_avg.federated_averaging(gradient, SGD, fedjax.optimizers.sgd(1.0), whole)
    theirs, _ = rounds(algorithm, 3, data)
    model = fd.Model(init=lambda key: jnp.zeros((4, 3)), apply=lambda w, x: x @ w)
    ours = fd.FederatedData.from_clients([(client["x"], client["y"]) for client in data.values()])
    local = fd.LocalTraining(batch_size=24, lr=0.1)
    sim = fd.Simulation(model, ours, fd.algorithms.fedavg(), local=local, cohort_size=len(data))
    state = sim.init(jax.random.key(0))
    for _ in range(3):
        state, _ = sim.round_fn(state)
    np.testing.assert_allclose(state.params, theirs, atol=1e-5)
    assert np.abs(theirs).max() > 0.01


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match='lanes must be an integer >= 1, got 0: or pass "auto"'):
        EngineBackend(lanes=0)
    with fedjax.for_each_client_backend(EngineBackend()):
        each = fedjax.for_each_client(lambda shared, given: jnp.int32(0), lambda n, batch: n + batch["x"].sum())
    with pytest.raises(ValueError, match=r"client_step must return .* float32\[\] instead of int32\[\]"):
        list(each(None, [("a", batches(0, 5), None)]))
