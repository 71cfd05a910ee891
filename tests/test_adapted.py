"""Models of which only a part is trained: selected parameters, or low-rank adapters."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
from flax import nnx
from test_trajectories import CLASSES, COHORTS, FEATURES, LOCAL, label_skewed_clients, library_order, rounds_of

import fedjax_drift as fd
from fedjax_drift import tree
from fedjax_drift.cli import main
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.models import low_rank
from fedjax_drift.simulation.placement import frozen_parameters

pytestmark = pytest.mark.thorough

RANK, ALPHA = 1, 3.0


def logistic(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"][None]


def base_parameters(dtype: type = np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"w": rng.normal(size=(FEATURES, CLASSES)).astype(dtype), "b": rng.normal(size=CLASSES).astype(dtype)}


@pytest.mark.parametrize("name, options", [("fedavg", {}), ("scaffold", {}), ("feddc", {"alpha": 0.3}), ("fedeve", {})])
def test_training_of_adapters_follows_the_oracle(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_parameters()

    def mean_gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        a, b = np.split(theta, [FEATURES * RANK])
        a, b = a.reshape(FEATURES, RANK), b.reshape(RANK, CLASSES)
        scale = ALPHA / RANK
        logits = x @ (base["w"] + scale * a @ b) + base["b"]
        residual = np.exp(slow.log_softmax(logits)) - slow.one_hot(y, CLASSES)
        of_w = x.T @ residual / len(x)
        return np.concatenate([(scale * of_w @ b.T).ravel(), (scale * a.T @ of_w).ravel()])

    for function in (slow.Federation.train, slow.Federation.mean_update):
        defaults = tuple(mean_gradient if d is slow.mean_gradient else d for d in function.__defaults__ or ())
        monkeypatch.setattr(function, "__defaults__", defaults)
    monkeypatch.setattr(slow, "mean_gradient", mean_gradient)
    with jax.enable_x64(True):
        clients = label_skewed_clients(np.float64)
        model = fd.Model(init=lambda key: jax.tree.map(jnp.asarray, base), apply=logistic)
        sim = fd.Simulation(
            fd.models.lora(model, RANK, "w", ALPHA),
            fd.FederatedData.from_clients(clients),
            getattr(fd.algorithms, name)(**options),
            local=fd.LocalTraining(**LOCAL),
            cohort_size=3,
            mesh=fd.clients_mesh(jax.devices()[:1]),
        )
        key, models, _ = rounds_of(sim, COHORTS)
        initial = jax.device_get(sim.init(jax.random.key(0)).params["w"])
        federation = slow.Federation(clients, COHORTS, lambda *which: library_order(key, *which), slow.Local(**LOCAL))
        wanted = slow.simulate(getattr(slow, name), initial, federation, **options)
    for params, want in zip(models, wanted, strict=True):
        np.testing.assert_allclose(slow.pack(params["w"]), slow.pack(want), rtol=1e-9, atol=1e-12)


def transformer_like(p: Any, x: jax.Array) -> jax.Array:
    """Uses matrices in every way that `low_rank` knows, and in some that it does not know."""

    @jax.checkpoint
    def block(h: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jax.jit(jnp.matmul)(h, kernel)), None

    h, _ = jax.lax.scan(block, x @ p["in"], p["blocks"])
    h, _ = jax.lax.scan(lambda h, row: (h + row[None], None), h, p["in"])
    each = jnp.einsum("bi,kij->kbj", h, p["heads"]) + jnp.einsum("kij,bi->kbj", p["heads"], h)
    both = jnp.einsum("kbi,kij->kbj", each, p["heads"])
    tied = jax.nn.relu(both.sum(0) + h.astype(jnp.float32)) @ p["in"].T
    return tied * p["in"].sum() + jnp.sin(p["in"]).sum()


def test_products_with_low_rank_matrices_are_those_with_their_sums() -> None:
    with jax.enable_x64(True):
        keys = iter(jax.random.split(jax.random.key(0), 20))
        shapes = {"in": (6, 5), "blocks": (3, 5, 5), "heads": (2, 5, 5)}

        def adapted(shape: tuple[int, ...]) -> low_rank.LowRank:
            *leading, n, m = shape
            parts = (shape, (*leading, n, 2), (*leading, 2, m))
            return low_rank.LowRank(*[jax.random.normal(next(keys), part) / 3 for part in parts])

        params = {name: adapted(shape) for name, shape in shapes.items()}
        x = jax.random.normal(next(keys), (4, 6))

        def value(params: Any, whole: bool) -> jax.Array:
            if whole:
                return (transformer_like(low_rank.matrices(params), x) ** 2).sum()
            return (low_rank.applied(transformer_like, params, x) ** 2).sum()

        for got, want in zip(
            *(jax.tree.leaves(jax.value_and_grad(value)(params, w)) for w in (False, True)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_gradients_of_adapters_need_no_gradient_of_the_matrix() -> None:
    w, x = jnp.zeros((300, 200)), jnp.ones((7, 300))

    def loss(ab: tuple[jax.Array, jax.Array], merged: bool) -> jax.Array:
        params = {"w": low_rank.LowRank(w, *ab)}
        if merged:
            return (x @ low_rank.matrices(params)["w"]).sum()
        return low_rank.applied(lambda p, x: x @ p["w"], params, x).sum()

    ab = jnp.ones((300, 2)), jnp.ones((2, 200))
    computed = [str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(ab, merged)) for merged in (False, True)]
    assert [":f32[300,200] = " in text for text in computed] == [False, True]


def federation(sizes: tuple[int, ...] = (5, 30, 17, 12)) -> fd.FederatedData:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 28, 28, 1)).astype("f4"), rng.integers(0, 10, n)) for n in sizes]
    return fd.FederatedData.from_clients(clients, test=clients[1])


LOCAL_SGD = fd.LocalTraining(lr=0.1, batch_size=5)


def large_model(rank: int = 4) -> fd.Model:
    """2NN with 784 x 400 weights, 1.25 MB."""
    shapes = {"w": (784, 400), "v": (400, 10)}

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        return {name: 0.05 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    model = fd.Model(init, lambda p, x: jax.nn.relu(x.reshape(len(x), -1) @ p["w"]) @ p["v"])
    return fd.models.lora(model, rank, "w", whole="v")


def test_the_base_is_an_argument_and_messages_have_the_size_of_the_adapters() -> None:
    model, data = large_model(), federation()
    sim = fd.Simulation(model, data, fd.algorithms.scaffold(), local=LOCAL_SGD, cohort_size=3)
    other = fd.Simulation(model, data, fd.algorithms.fedavg(), local=LOCAL_SGD, cohort_size=3)
    state = sim.init(jax.random.key(0))
    trained = 4 * (784 * 4 + 4 * 400 + 400 * 10)
    assert tree.nbytes(state.params) == trained
    assert sim.device_traffic()["message sum"] == 2 * trained + 4  # the update, the control variate, and the weight
    assert tree.nbytes(state.clients) == data.num_clients * trained
    for name in ("round", "donating_round"):
        text = sim.executor.programs.lower(name, (), state, sim.setup.arrays, None).as_text()
        shapes = re.findall(r"stablehlo.constant dense.*: tensor<((?:\d+x)*)", text)
        assert max(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes) < 10_000
    (base,) = frozen_parameters(model, sim.mesh)
    assert frozen_parameters(model, other.mesh)[0]["w"] is base["w"]  # one copy for all simulations
    assert base["w"].sharding.is_fully_replicated and len(base["w"].addressable_shards) == sim.mesh.size


def test_a_team_of_devices_shares_the_base() -> None:
    data, model = federation().with_client_tests(0), large_model()

    def simulation(**options: Any) -> fd.Simulation:
        options |= {"local": LOCAL_SGD, "cohort_size": 3}
        return fd.Simulation(model, data, fd.algorithms.ditto(), **options)

    team, one = simulation(devices_per_client=2), simulation(mesh=fd.clients_mesh(jax.devices()[:1]))
    (base,) = frozen_parameters(model, team.mesh)
    assert [part.data.shape for part in base["w"].addressable_shards] == [(392, 400)] * 2
    assert team.plan().frozen == one.plan().frozen / 2
    first = team.init(jax.random.key(0))
    assert first.clients.v["w"]["a"].addressable_shards[0].data.shape == (data.num_clients, 392, 4)
    lowered = team.executor.programs.lower("round", (), first, team.setup.arrays, None)
    assert "f32[784,400]" not in lowered.compile().as_text()  # no device collects the matrix
    states = [sim.run(sim.init(jax.random.key(0)), 2, 1, progress=False)[0] for sim in (team, one)]
    scores = [sim.evaluate_clients(state) for sim, state in zip((team, one), states, strict=True)]
    swept = team.sweep(2, [0, 1], 1, progress=False)[0].state
    for got, want in [(states[0], states[1]), (swept, states[1])]:
        pairs = zip(*map(jax.tree.leaves, ((got.server, got.clients), (want.server, want.clients))), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), *scores)
    assert "on 1 team of 2 cpu devices" in repr(team) and "on 1 cpu device" in repr(one)


def test_two_bases_share_a_program_and_give_different_results() -> None:
    data, network = federation(), fd.models.mnist_2nn()
    bases = [network.init(jax.random.key(seed)) for seed in (1, 2)]
    sims = [
        fd.Simulation(
            fd.models.lora(network, 2, base=base), data, fd.algorithms.fedavg(), local=LOCAL_SGD, cohort_size=3
        )
        for base in bases
    ]
    assert sims[0].executor.programs.compiled is sims[1].executor.programs.compiled
    for sim, base in zip(sims, bases, strict=True):
        state = sim.init(jax.random.key(0))
        x, y = data.decode(data.x_test), data.y_test
        loss = float(network.loss(network.apply(base, x), jnp.asarray(y)).mean())
        assert sim.evaluate(state)["loss"] == pytest.approx(loss, rel=1e-5)  # B = 0: the first model is the base
        merged = fd.models.merge(sim.model, sim.round_fn(state)[0].params)
        assert jax.tree.structure(merged) == jax.tree.structure(base)
        np.testing.assert_array_equal(merged["layers_0"]["bias"], base["layers_0"]["bias"])
        assert not np.array_equal(merged["layers_0"]["kernel"], base["layers_0"]["kernel"])


def test_checkpoints_name_the_base(tmp_path: Path) -> None:
    data, network = federation(), fd.models.mnist_2nn()

    def simulation(seed: int) -> fd.Simulation:
        model = fd.models.lora(network, 2, base=network.init(jax.random.key(seed)))
        return fd.Simulation(model, data, fd.algorithms.fedavg(), local=LOCAL_SGD, cohort_size=3)

    first, folder = simulation(1), tmp_path / "run"
    whole, _ = first.run(first.init(jax.random.key(0)), 4, progress=False)
    first.run(first.init(jax.random.key(0)), 2, progress=False, checkpoints=fd.Checkpoints(folder))
    again = simulation(1)  # a new base with the same values
    state, _ = fd.Checkpoints(folder).restore(again)
    state, _ = again.run(state, 2, progress=False)
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params, whole.params))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size < 100_000 < tree.nbytes(network.init(jax.random.key(0)))
    with pytest.raises(ConfigurationError, match="frozen|base"):
        fd.Checkpoints(folder).restore(simulation(2))


def test_only_the_selected_parameters_are_trained() -> None:
    data, network = federation(), fd.models.mnist_2nn()
    base = network.init(jax.random.key(3))
    model = fd.models.trainable(network, "classifier", base=base)
    sim = fd.Simulation(model, data, fd.algorithms.feddyn(0.1), local=LOCAL_SGD, cohort_size=3)
    state, _ = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
    merged = fd.models.merge(model, state.params)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), merged, base)
    want = jax.tree_util.tree_map_with_path(lambda path, _: "classifier" in jax.tree_util.keystr(path), base)
    assert changed == want
    assert sorted(state.params) == ["classifier/dense/bias", "classifier/dense/kernel"]
    np.testing.assert_array_equal(
        sim.init(jax.random.key(5)).params["classifier/dense/kernel"], base["classifier"]["dense"]["kernel"]
    )
    everything = fd.models.trainable(network, lambda path: True)
    x = data.decode(data.x_test)
    key = jax.random.key(8)
    np.testing.assert_array_equal(everything.apply(everything.init(key), x), network.apply(network.init(key), x))


def test_sweeps_train_adapters_as_single_runs_do() -> None:
    data, model = federation(), fd.models.lora(fd.models.mnist_2nn(), 2)

    def build(lr: float) -> fd.Simulation:
        local = fd.LocalTraining(lr=lr, batch_size=5)
        return fd.Simulation(model, data, fd.algorithms.scaffold(), local=local, cohort_size=3)

    runs = fd.sweep(build, 2, seeds=[0, 1], settings=[{"lr": 0.1}, {"lr": 0.2}], progress=False)
    for run in [*runs, *build(0.2).sweep(2, [1], progress=False)]:
        sim = build(run.setting.get("lr", 0.2))
        state, _ = sim.run(sim.init(jax.random.key(run.seed)), 2, progress=False)
        for got, want in zip(jax.tree.leaves(run.state.params), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_the_command_line_trains_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = fd.models.mnist_2nn(5, (30,))
    base, init = network.init(jax.random.key(7)), tmp_path / "base.npz"
    fd.models.save_params(base, init)
    monkeypatch.chdir(tmp_path)
    words = "run --dataset synthetic:num_clients=8 --model mnist_2nn --algorithm fedavg --cohort 4 --rounds 2".split()
    for train in (
        "lora:rank=2,where=layers,whole=classifier",
        "trainable:classifier",
        "lora:rank=2 --bfloat16 --devices-per-client=2",
    ):
        output = tmp_path / train.replace(" ", "_")
        assert main([*words, *f"--train={train}".split(), "--init=base.npz", f"--output={output}"]) == 0
        run = fd.load_run(output)
        assert run.settings["train"]["parameters"] == tree.size(run.params) < run.settings["model"]["parameters"]
        merged = fd.models.merge(run.model, run.params)
        np.testing.assert_allclose(merged["layers_0"]["bias"], base["layers_0"]["bias"], rtol=1e-2)
        assert not np.allclose(
            merged["classifier"]["dense"]["kernel"], base["classifier"]["dense"]["kernel"], rtol=1e-2
        )
    monkeypatch.chdir("/")  # where base.npz does not exist
    assert main(["run", f"--resume={output}", "--rounds=3"]) == 0
    fd.models.save(init, jax.tree.map(lambda a: a + 1, base))
    with pytest.raises(ConfigurationError, match="must have the parameters with which the run in"):
        fd.load_run(output)
    init.unlink()
    with pytest.raises(FileNotFoundError, match="base.npz"):
        fd.load_run(output)


class Normalised(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden, self.norm = nnx.Linear(30, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.classifier = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.classifier(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def test_adapters_of_a_model_with_frozen_running_statistics() -> None:
    model = fd.Model.from_nnx(Normalised, (30,), statistics="frozen")
    base = model.init(jax.random.key(0))
    base["batch_stats"] = jax.tree.map(lambda a: a + 0.3, base["batch_stats"])
    data = fd.datasets.load("synthetic", num_clients=4)
    sim = fd.Simulation(
        fd.models.lora(model, 2, base=base), data, fd.algorithms.fedavg(), local=LOCAL_SGD, cohort_size=2
    )
    state, _ = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
    merged, x = fd.models.merge(sim.model, state.params), jnp.asarray(data.x_test)
    assert jax.tree.all(jax.tree.map(np.array_equal, merged["batch_stats"], base["batch_stats"]))
    np.testing.assert_allclose(sim.model.apply(state.params, x), model.apply(merged, x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match='must be "frozen"'):
        fd.models.lora(fd.Model.from_nnx(Normalised, (30,), statistics="average"), 2)


def test_a_base_in_bfloat16_gives_the_same_results() -> None:
    half, x = fd.models.mnist_2nn().computing_in(jnp.bfloat16), jnp.asarray(federation().x[:8])
    stored = fd.models.lora(half, 2, frozen_dtype=jnp.bfloat16)
    params = jax.tree.map(lambda a: a + 0.1, stored.init(jax.random.key(0)))
    logits = stored.apply(params, x)
    assert logits.dtype == jnp.float32 and fd.models.merge(stored, params)["layers_0"]["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(logits, fd.models.lora(half, 2).apply(params, x))


def test_regressions(tmp_path: Path) -> None:
    network = fd.models.mnist_2nn()
    base = network.init(jax.random.key(0))
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), base)
    head = fd.models.trainable(network, "classifier", base=half)  # training in bfloat16 would stop too early
    assert head.init(jax.random.key(0))["classifier/dense/kernel"].dtype == jnp.float32
    adapted = fd.models.lora(network, 2, base=base)
    params = jax.tree.map(lambda a: a + 0.1, adapted.init(jax.random.key(0)))
    fd.models.save(tmp_path / "adapters.npz", params)
    merged = fd.models.merge(adapted, params)
    again = fd.models.merge(adapted, fd.models.load(tmp_path / "adapters.npz"))  # nested dicts
    assert jax.tree.all(jax.tree.map(np.array_equal, merged, again))
    only_b = fd.models.trainable(adapted, "/b$", base=params)
    whole = fd.models.merge(only_b, only_b.init(jax.random.key(0)))
    assert jax.tree.all(jax.tree.map(np.array_equal, merged, whole))
    assert fd.models.lora(fd.models.lenet5(num_classes=10)).init(jax.random.key(0))  # [5, 5, 1, 6] is left out
    normalised = fd.Model.from_nnx(Normalised, (30,), statistics="frozen")
    assert not any("batch_stats" in path for path in fd.models.trainable(normalised, "").init(jax.random.key(0)))
    with pytest.raises(ConfigurationError, match="must have a floating dtype"):
        fd.models.lora(network, 2, base=jax.tree.map(lambda a: a.astype(int), base))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda m: fd.models.lora(m, 0), "rank must be an integer >= 1, got 0"),
        (
            lambda m: fd.models.lora(m, 11, "kernel"),
            "rank must be at most 10, the smaller side of classifier/dense/kernel",
        ),
        (lambda m: fd.models.lora(m, 2, "bias"), "where must select a matrix"),
        (lambda m: fd.models.lora(m, 2, "attention"), "where must select leaves of the parameters"),
        (lambda m: fd.models.lora(m, 2, alpha=0), "alpha must be a finite number > 0"),
        (lambda m: fd.models.lora(m, 2, whole="classifier"), "got classifier/dense/kernel in both"),
        (lambda m: fd.models.trainable(m, lambda path: False), "which must select a leaf"),
        (lambda m: fd.models.trainable(m, "classifier", base={"a": 1.0}), "base must have"),
        (lambda m: fd.models.merge(m, {}), "model must come from fd.models.trainable or fd.models.lora"),
        (lambda m: fd.models.merge(fd.models.lora(m, 2), m.init(jax.random.key(0))), "params must have"),
        (lambda m: fd.models.lora(m, 2).computing_in(jnp.bfloat16), "must be called on the whole model"),
        (lambda m: fd.models.lora(lambda p: p), "model must be"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make(fd.models.mnist_2nn())
