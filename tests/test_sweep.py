"""Tests that a run of a sweep gives the same results as a separate run, and that all runs share one trace."""

from __future__ import annotations

import re
import shutil
import signal
import warnings
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import mlp, of_sizes, thorough

import fedjax_drift as fd
from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.runs import Run, grid
from fedjax_drift.simulation.sweep import sweep
from fedjax_drift.simulation.tracks import Track
from fedjax_drift.simulation.turns import Planned, turns

MODULE = import_module("fedjax_drift.simulation.sweep")


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    return of_sizes((3, 10, 7, 25, 1, 16, 12, 30), test=41)


MLP = mlp()


def simulate(data, algorithm=None, devices=2, **options) -> fd.Simulation:
    options = {"local": fd.LocalTraining(epochs=2, batch_size=4, lr=0.2), "cohort_size": 3, "model": MLP} | options
    mesh = fd.clients_mesh(jax.devices()[:devices])
    return fd.Simulation(options.pop("model"), data, algorithm or fd.algorithms.fedavg(), mesh=mesh, **options)


@pytest.fixture(scope="module")
def sim(data) -> fd.Simulation:
    return simulate(data)


def quietly(build, *arguments, **options) -> list[Run]:
    return sweep(build, *arguments, progress=False, **options)


def assert_as_alone(build, runs, rounds, tolerance, params=None, **options) -> None:
    alone: dict[str, fd.Simulation] = {}
    for run in runs:
        sim = alone.setdefault(str(run.setting), build(**run.setting))
        state, history = sim.run(sim.init(jax.random.key(run.seed), params), rounds, progress=False, **options)
        for own, other in ((run.state._replace(key=0), state._replace(key=0)), (run.history, history)):
            jax.tree.map_with_path(close(tolerance), own, other)
        assert jax.random.key_data(run.state.key).tolist() == jax.random.key_data(state.key).tolist()


def close(tolerance):
    def compare(path, own, alone) -> None:
        if jax.tree_util.DictKey("seconds") not in path:
            np.testing.assert_allclose(own, alone, rtol=tolerance, atol=tolerance, err_msg=str(path))

    return compare


def local(**options) -> fd.LocalTraining:
    return fd.LocalTraining(**({"epochs": 2, "batch_size": 4, "lr": 0.2} | options))


def test_settings_and_seeds_match_separate_runs(data) -> None:
    """Two devices train two runs each, one after another. Then one device trains two runs side by side at a time."""

    def build(lr, mu, epochs, devices=2):
        return simulate(data, fd.algorithms.fedprox(mu=mu), devices, local=local(lr=lr, epochs=epochs))

    settings = [{"lr": np.float32(0.3), "mu": 0.5, "epochs": 2}, {"lr": jnp.array(0.2), "mu": 0, "epochs": 2}]
    runs = quietly(build, 5, seeds=[0, 7], settings=settings, eval_every=2)
    assert [(run.setting["mu"], run.seed) for run in runs] == [(0.5, 0), (0.5, 7), (0, 0), (0, 7)]
    assert ["loss" in record for record in runs[0].history] == [False, True, False, True, True]
    assert len({float(run.state.params["a"].sum()) for run in runs}) == 4
    assert re.fullmatch(
        r"Run\(fedprox, seed 0, \{'lr': .*\}: round 5, train_loss [\d.]+, loss [\d.]+, accuracy [\d.]+\)", repr(runs[0])
    )
    side_by_side = quietly(partial(build, devices=1), 5, seeds=[0, 7], settings=settings, eval_every=2, together=2)
    assert_as_alone(build, runs + side_by_side, 5, 1e-5, eval_every=2)


@pytest.mark.thorough
@pytest.mark.as_users
def test_runs_on_one_device_are_bitwise_identical_to_separate_runs(data) -> None:
    """The algorithm has client states and observes. The runs have measures, given parameters, and a weight decay
    that is 0 in one setting."""

    def build(decay, mu):
        algorithm = fd.algorithms.fedgvr(mu=mu)
        return simulate(data, algorithm, devices=1, local=local(weight_decay=decay), measure=("updates", "labels"))

    settings, params = [{"decay": 0.01, "mu": 0.1}, {"decay": 0, "mu": 0.2}], MLP.init(jax.random.key(3))
    runs = quietly(build, 3, settings=settings, params=params, measure_every=2)
    assert ["update_norm" in record for record in runs[0].history] == [False, True, False]
    assert all(0 < record["seconds"] < np.inf for run in runs for record in run.history)
    assert_as_alone(build, runs[1:], 3, 0, params=params, measure_every=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scaffold, bernoulli", thorough("optimizer, redealt")])
def test_a_last_turn_that_is_not_full(data, name) -> None:
    """Three runs are trained, two side by side. So the last turn trains the last run twice."""
    data = data.redealt(0.5) if "redealt" in name else data

    def build(lr):
        if "scaffold" in name:
            return simulate(data, fd.algorithms.scaffold(), 1, local=local(lr=lr), sampling="bernoulli")
        return simulate(data, devices=1, local=local(lr=lr, optimizer=optax.scale_by_adam()))

    runs = quietly(build, 2, settings=grid(lr=[0.1, 0.05, 0.2]), eval_every=0, together=2)
    assert [run.setting["lr"] for run in runs] == [0.1, 0.05, 0.2]
    assert_as_alone(build, runs[2:], 2, 2e-5, eval_every=0)


@pytest.mark.thorough
def test_fewer_runs_than_devices_use_all_devices(data) -> None:
    sim = simulate(data, fd.algorithms.scaffold())
    runs = quietly(lambda: sim, 3, seeds=[5])
    assert runs[0].state.params["a"].devices() == set(jax.devices()[:2])
    assert_as_alone(lambda: sim, runs, 3, 1e-6)


def test_a_sweep_over_two_devices_compiles_once(data, caplog) -> None:
    model, built = mlp(), []

    def build(lr):
        built.append(lr)
        return simulate(data, fd.algorithms.slowmo(0.4), local=local(lr=lr), model=model)

    sim = build(0.1)
    for sweeping in (lambda: quietly(build, 2, settings=grid(lr=[0.1, 0.3, 0.2])), lambda: sim.sweep(2, range(3))):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("WARNING"):
            runs = sweeping()
        for name in ("init", "rounds", "evaluate"):
            assert len([r for r in caplog.records if r.message.startswith(f"Compiling jit({name})")]) <= 1, name
        assert {run.state.params["a"].devices().pop() for run in runs} == set(jax.devices()[:2])
    assert built == [0.1, 0.1, 0.3, 0.2]  # once for each setting


def test_other_seeds_rounds_and_learning_rates_trace_nothing(data) -> None:
    model = mlp()
    first, second = (simulate(data, model=model, local=local(lr=lr)) for lr in (0.1, 0.3))
    runs = quietly(lambda: first, 2, seeds=range(3))
    traces = model.apply.traces
    again, others = quietly(lambda: first, 3, seeds=range(1, 4)), second.sweep(2, range(3), progress=False)
    assert model.apply.traces == traces
    assert runs[1].history[0]["train_loss"] == again[0].history[0]["train_loss"]
    assert runs[0].history[1]["train_loss"] != others[0].history[1]["train_loss"]
    assert_as_alone(lambda: second, others, 2, 1e-5)


def test_no_rounds_and_no_test_set() -> None:
    rows = [(np.eye(2, dtype="f4"), np.array([0, 1]))] * 3
    sim = simulate(fd.FederatedData.from_clients(rows), model=fd.models.linear((2,), 2))
    run = quietly(lambda: sim, 0, seeds=[4])[0]
    jax.tree.map(np.testing.assert_array_equal, run.state.params, sim.init(jax.random.key(4)).params)
    assert run.history == [] and run.seed == 4 and run.setting == {}
    assert "loss" not in quietly(lambda: sim, 1)[0].history[0]


def test_a_run_that_diverges_warns_and_does_not_change_the_others(data) -> None:
    def build(lr):
        return simulate(data, devices=1, local=local(lr=lr))

    with pytest.warns(RuntimeWarning, match=r"seed 0, lr=1e\+38, round \d: \d of 3 client updates are not finite"):
        bad, good = quietly(build, 4, settings=grid(lr=[1e38, 0.1]), eval_every=0)
    assert np.isnan(bad.history[-1]["train_loss"]) and len(bad.history) == 4
    assert_as_alone(build, [good], 4, 1e-5, eval_every=0)


def test_on_round_is_called_for_every_round_of_every_run(sim) -> None:
    told: list[tuple] = []
    runs = quietly(lambda: sim, 2, seeds=[1, 2], on_round=lambda *each: told.append(each))
    assert sorted((seed, record["round"]) for seed, _, record in told) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [record for seed, _, record in told if seed == 1] == runs[0].history


def test_an_interrupted_sweep_returns_the_completed_rounds(sim) -> None:
    told: list[tuple] = []

    def interrupt(*each) -> None:
        told.append(each)
        if len(told) == 5:
            signal.raise_signal(signal.SIGINT)

    runs = quietly(lambda: sim, 10_000, seeds=range(3), eval_every=3, on_round=interrupt)
    done = {len(run.history) for run in runs} | {int(run.state.round) for run in runs}
    assert len(done) == 1 and 2 <= done.pop() < 1000
    assert all("accuracy" in run.history[-1] for run in runs)


def test_an_error_in_on_round_keeps_the_completed_rounds(sim) -> None:
    def full(seed, setting, record) -> None:
        if record["round"] == 3:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as raised:
        quietly(lambda: sim, 20, seeds=range(2), on_round=full)
    assert all(len(run.history) == int(run.state.round) >= 3 for run in raised.value.runs)


@pytest.mark.parametrize("several", [False, True], ids=["run", "sweep"])
@pytest.mark.parametrize("saved", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["", "with checkpoints"])
def test_a_program_that_fails_keeps_its_error_and_the_completed_rounds(data, several, saved, tmp_path) -> None:
    """The failed program has overwritten its state. Checkpoints have earlier ones."""

    def fails_in_round_7(t) -> np.ndarray:
        if int(np.max(t)) == 7:
            raise OSError("the callback could not reach its server")
        return np.zeros(np.shape(t), np.float32)

    def server_update(server, mean, context) -> Any:
        zero = jax.pure_callback(
            fails_in_round_7, jax.ShapeDtypeStruct((), jnp.float32), context.t, vmap_method="expand_dims"
        )
        new = base.server_update(server, mean, context)
        return new._replace(params=jax.tree.map(lambda w: w + zero, new.params))

    base = fd.algorithms.scaffold()
    sim = simulate(data, base._replace(server_update=server_update), devices=1)
    options = {"eval_every": 5, "progress": False}
    options |= {"checkpoints": fd.Checkpoints(tmp_path, every=2)} if saved else {}
    with pytest.raises((RuntimeError, ValueError), match="CpuCallback error") as raised:
        if several:
            sim.sweep(20, range(2), **options)
        else:
            sim.run(sim.init(jax.random.key(0)), 20, **options)
    runs = raised.value.runs if several else [raised.value]
    assert len(runs) == 1 + several and runs[0].state is None
    for run in runs:  # with one run per program, the second program still has its state
        assert 5 <= len(run.history) <= 7 and (run.state is None or int(run.state.round) == len(run.history))
    assert "Continue from a checkpoint" in raised.value.__notes__[0]
    if saved:
        state, history = fd.Checkpoints(tmp_path / "seed-0" if several else tmp_path).restore(sim)
        assert int(state.round) == len(history) == 6


@pytest.mark.parametrize("several", [False, True], ids=["run", "sweep"])
def test_an_evaluation_that_fails_keeps_its_error_the_rounds_and_the_states(data, several, monkeypatch) -> None:
    """The results of a program that failed can't be fetched, like those of a deleted array."""

    def failed(*_) -> dict[str, jax.Array]:
        loss = jnp.zeros(2)
        loss.delete()
        return {"loss": loss}

    sim = simulate(data, devices=1)
    monkeypatch.setattr(Track, "score", failed)
    with pytest.raises(RuntimeError, match="Array has been deleted") as raised:
        if several:
            sim.sweep(20, range(2), eval_every=5, progress=False)
        else:
            sim.run(sim.init(jax.random.key(0)), 20, eval_every=5, progress=False)
    for run in raised.value.runs if several else [raised.value]:
        assert int(run.state.round) == len(run.history) >= 5


@pytest.mark.thorough
def test_fewer_runs_train_side_by_side_if_memory_is_too_small(data, monkeypatch) -> None:
    launch = Executor.launch

    def small(executor, *arguments):
        if executor.turn is not None and executor.turn.layout.size > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return launch(executor, *arguments)

    def build(lr):
        return simulate(data, devices=1, local=local(lr=lr))

    monkeypatch.setattr(Executor, "launch", small)
    with pytest.warns(UserWarning, match="5 runs side by side do not fit in a device's memory, continuing with 2"):
        runs = quietly(build, 1, settings=grid(lr=[0.1, 0.2, 0.3, 0.4, 0.5]), eval_every=0, together=5)
    assert_as_alone(build, runs[3:4], 1, 1e-5, eval_every=0)


def test_a_sweep_halves_the_lanes_if_one_run_does_not_fit(data, monkeypatch) -> None:
    launch = Executor.launch

    def small(executor, name, *arguments):
        if name == "rounds" and executor.setup.engine.lanes > 1:
            jax.tree.map(lambda leaf: leaf.delete(), arguments[1])  # as XLA does with donated states
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return launch(executor, name, *arguments)

    sim = simulate(data, devices=1, lanes=3)
    monkeypatch.setattr(Executor, "launch", small)
    with pytest.warns(UserWarning, match="3 lanes do not fit in a device's memory: the sweep continues with 1"):
        runs = sim.sweep(2, [0, 1], eval_every=0, progress=False)
    assert_as_alone(lambda: simulate(data, devices=1, lanes=1), runs, 2, 1e-5, eval_every=0)

    def never(*_) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(Executor, "launch", never)
    with pytest.raises(MemoryError, match="even with 1 lane"):
        sim.sweep(2, [0, 1], eval_every=0, progress=False)


BAD = {
    r"setting 1, .*: lr must be a finite number > 0, got -1": {"settings": grid(lr=[0.1, -1])},
    r"at most 16 programs, got 17: only numbers such as lr": {"settings": grid(epochs=range(1, 18))},
    r"same names, got \['lr'\] in setting 0 and \['epochs'\] in setting 1": {"settings": [{"lr": 1}, {"epochs": 1}]},
    r"names of the arguments of build, got \['mu'\]": {"settings": [{"mu": 1}]},
    r"settings must be a list of dicts, got \{'lr': 0.1\}": {"settings": {"lr": 0.1}},
    r"seeds must be at least one integer, all different, got \[1, 1\]": {"seeds": [1, 1]},
    r"params must be shaped like model.init's": {"params": {}},
    r'on_nonfinite must be "keep" or "drop_client" in a sweep, got "raise"': {
        "settings": [{"other": {"on_nonfinite": "raise"}}]
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(data, message) -> None:
    def build(lr=0.1, epochs=1, other=()):
        return simulate(data, local=local(lr=lr, epochs=epochs), **dict(other))

    with pytest.raises(ValueError, match=message), warnings.catch_warnings(action="error"):
        quietly(build, **({"rounds": 1} | BAD[message]))


def test_the_best_learning_rate_at_the_edge_of_a_search_warns() -> None:
    settings = [{"lr": lr, "mu": mu} for lr in (0.01, 0.1, 1.0) for mu in (0.0, 0.5)]
    for best, said in ((1.0, "the best lr, 1, is the largest of 3 values, 0.01 to 1"), (0.01, "0.01, is the smallest")):
        scores = [0.9 if of["lr"] == best else np.nan if of["mu"] else 0.1 for of in settings]
        with pytest.warns(UserWarning, match=said):
            assert fd.tuning.best(settings, scores) == {"lr": best, "mu": 0.0}
    inside = [-abs(np.log10(of["lr"]) + 1) for of in settings]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fd.tuning.best(settings, inside) == {"lr": 0.1, "mu": 0.0}
        assert fd.tuning.best([{"lr": 0.1, "mu": 0.0}], [0.5]) == {"lr": 0.1, "mu": 0.0}, "nothing was searched"
    with pytest.warns(UserWarning, match="the best mu, 0, is the smallest"):
        fd.tuning.best(settings, inside, names=["lr", "mu"])
    for wrong, message in (
        ((settings, [0.5]), "got 1 for 6 settings"),
        ((settings, [np.nan] * 6), "none that is finite"),
        ((0.1, [0.5]), "settings must be a list"),
        ((settings, inside, "lr"), "names must be"),
    ):
        with pytest.raises(ValueError, match=message):
            fd.tuning.best(*wrong)


def test_an_augmentation_may_be_created_in_every_call_of_build() -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3)).astype(np.uint8)
    data = fd.FederatedData.from_clients([(images, np.arange(8) % 4)] * 2)

    def build(lr: float, padding: int = 1, own: bool = False) -> fd.Simulation:
        augment = (lambda key, x: x) if own else fd.augment.crop_and_flip(padding)
        training = local(lr=lr, augment=augment)
        return simulate(data, local=training, model=fd.models.linear((4, 4, 3), 4), cohort_size=2)

    assert len(tracks_of(build, grid(lr=[0.1, 0.2]))) == 1
    assert len(tracks_of(build, grid(lr=[0.1, 0.2], padding=[1, 2]))) == 2
    assert len(tracks_of(build, grid(lr=[0.1, 0.2], own=[True]))) == 2  # functions are compared by identity


def tracks_of(build, settings) -> list:
    """Returns the tracks, each with a program of its own, of one seed of each setting."""
    planned = [Planned(0, setting, build(**setting).setup, specification=dict) for setting in settings]
    return turns(planned, most=len(planned), constant=False)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["local training", thorough("algorithm"), thorough("data")])
def test_settings_may_need_different_programs(data, name, tmp_path) -> None:
    """Settings that differ in more than numbers are trained in one sweep, each as it would be alone."""
    few = fd.FederatedData.from_clients([(data.x[i : i + 5], data.y[i : i + 5]) for i in range(0, 20, 5)])
    of_data = {"all": data, "few": few, "redealt": data.redealt(0.5)}  # few has no test set

    kinds = {
        "local training": {"one": {}, "two": {"epochs": 2}, "adam": {"optimizer": optax.scale_by_adam()}},
        # `own` has no recipe, so its two settings do not share a program
        "algorithm": {"own": lambda: fd.algorithms.fedavg()._replace(recipe=None), "window": fd.algorithms.fedgvr},
        "data": of_data,
    }[name]

    def build(kind, lr):
        if name == "data":
            return simulate(of_data[kind], local=local(lr=lr))
        if name == "algorithm":
            return simulate(data, kinds[kind](), local=local(lr=lr))
        return simulate(data, local=local(lr=lr, **{"epochs": 1} | kinds[kind]))

    settings = grid(kind=list(kinds), lr=[0.1, 0.05])
    assert len(tracks_of(build, settings)) == 3
    runs = quietly(build, 3, settings=settings, seeds=[1], eval_every=2, checkpoints=tmp_path)
    assert_as_alone(build, runs, 3, 1e-5, eval_every=2)
    assert {folder.name for folder in tmp_path.iterdir()} == {f"kind={s['kind']}-lr={s['lr']}-seed-1" for s in settings}
    assert all(("loss" in run.history[-1]) == (run.setting["kind"] != "few") for run in runs)


def test_copies_of_the_data_set_warn(data) -> None:
    copies = [fd.FederatedData(data.x.copy(), data.y.copy(), data.sizes) for _ in range(2)]
    with pytest.warns(UserWarning, match="1 of 2 settings have a data set of their own, .* once, outside build"):
        quietly(lambda copy: simulate(copies[copy]), 0, settings=grid(copy=[0, 1]))


def test_bad_build(sim) -> None:
    with pytest.raises(ValueError, match="build must be a function that returns a Simulation, got Simulation"):
        quietly(sim, 1)
    with pytest.raises(ValueError, match="build must return a Simulation, got LocalTraining"):
        quietly(fd.LocalTraining, 1)


def test_client_states_of_all_runs_must_fit_in_memory(data, monkeypatch) -> None:
    sim = simulate(data, fd.algorithms.scaffold())
    monkeypatch.setattr(MODULE, "memory_of", lambda mesh: 4 * 8 * 80 * 3.0)  # the client states of three runs
    assert len(quietly(lambda: sim, 0, seeds=range(6))) == 6
    with pytest.raises(
        ValueError, match=r"client states of 7 runs must fit in the devices' memory, got 0.0 GB on each"
    ):
        quietly(lambda: sim, 0, seeds=range(7))


def saving(data, lr=0.1, **options) -> fd.Simulation:
    return simulate(data, fd.algorithms.scaffold(), local=local(lr=lr), **options)


def told(runs: list[Run]) -> list:
    return [[{k: v for k, v in record.items() if k != "seconds"} for record in run.history] for run in runs]


@pytest.mark.as_users
@pytest.mark.parametrize("ends", ["ctrl-c", *map(thorough, ("killed", "sigterm", "error"))])
def test_a_stopped_sweep_resumes_with_bitwise_identical_results(data, ends, tmp_path) -> None:
    """Three runs train on two devices. After any stop, the same call resumes the sweep. A third call returns at
    once."""
    build, how = partial(saving, data), {"settings": grid(lr=[0.1, 0.2, 0.3]), "seeds": [5], "eval_every": 4}
    whole = quietly(build, 9, **how)
    saved = fd.Checkpoints(tmp_path, every=2, keep=2)

    class Killed(BaseException):
        pass

    def end(seed: int, setting: dict, record: dict) -> None:
        if record["round"] == 5 and setting["lr"] == 0.2:
            if ends == "killed":
                raise Killed
            if ends == "error":
                raise OSError("no network")
            signal.raise_signal(signal.SIGINT if ends == "ctrl-c" else signal.SIGTERM)

    outcome = {"killed": Killed, "error": OSError, "sigterm": SystemExit}.get(ends)
    with pytest.raises(outcome) if outcome else nullcontext():
        quietly(build, 9, checkpoints=saved, on_round=end, **how)
    assert {folder.name for folder in tmp_path.iterdir()} == {f"lr={lr}-seed-5" for lr in (0.1, 0.2, 0.3)}
    seen: list[tuple] = []
    runs = quietly(build, 9, checkpoints=saved, on_round=lambda *each: seen.append(each), **how)
    assert len(seen) < 3 * 9 and min(record["round"] for _, _, record in seen) > 2
    for found, expected in zip(runs, whole, strict=True):
        jax.tree.map(np.testing.assert_array_equal, found.state._replace(key=0), expected.state._replace(key=0))
    assert told(runs) == told(whole)
    again = quietly(build, 9, checkpoints=saved, on_round=lambda *each: pytest.fail("done already"), **how)
    assert told(again) == told(whole)
    # Each run has its own checkpoints.
    state, history = fd.Checkpoints(tmp_path / "lr=0.2-seed-5").restore(build(0.2))
    assert int(state.round) == 9 and told(whole)[1] == [{k: v for k, v in r.items() if k != "seconds"} for r in history]


PLACES = {
    "streamed": {"stream": True},
    "host": {"bank": "host"},
    "files": {"stream": True},
    "sharded": {"bank": "sharded", "shard_data": True},
}


@pytest.mark.parametrize("place", [thorough("streamed"), thorough("host"), "files", thorough("sharded")])
def test_a_sweep_of_runs_whose_data_are_elsewhere_is_stopped_and_resumed(data, place, tmp_path) -> None:
    """The runs train one after another, and each has a folder of its own for client states in files."""

    def elsewhere(lr: float) -> fd.Simulation:
        options: dict = PLACES[place] | ({"bank": tmp_path / "states"} if place == "files" else {})
        return saving(data, lr, **options)

    options = {"seeds": [0, 1], "settings": grid(lr=[0.1, 0.2]), "eval_every": 2, "checkpoints": tmp_path / "runs"}
    quietly(elsewhere, 2, **options)
    runs = quietly(elsewhere, 5, **options)
    if place == "files":
        names = {f"lr={lr}-seed-{seed}" for lr in (0.1, 0.2) for seed in (0, 1)}
        assert {folder.name for folder in (tmp_path / "states").iterdir()} == names
    for run in runs:
        sim = saving(data, **run.setting)
        state, history = sim.run(sim.init(jax.random.key(run.seed)), 5, eval_every=2, progress=False)
        for got, wanted in ((run.state.server, state.server), (run.history, history)):
            jax.tree.map_with_path(close(1e-5), got, wanted)


def test_a_sweep_resumes_if_a_run_lacks_the_newest_checkpoint(data, tmp_path) -> None:
    """The sweep was killed between the saves of two runs. It resumes from the newest round that all runs have, and
    continues past the end of the first sweep."""
    sim = saving(data)
    whole = quietly(lambda: sim, 8, seeds=range(3), eval_every=3)
    saved = fd.Checkpoints(tmp_path, every=2)
    quietly(lambda: sim, 6, seeds=range(3), eval_every=3, checkpoints=saved)
    shutil.rmtree(tmp_path / "seed-1" / "00000006")
    runs = quietly(lambda: sim, 8, seeds=range(3), eval_every=3, checkpoints=saved)
    for found, expected in zip(runs, whole, strict=True):
        jax.tree.map_with_path(close(1e-6), found.state._replace(key=0), expected.state._replace(key=0))
        assert [r["round"] for r in found.history] == list(range(1, 9))
    with pytest.raises(ValueError, match="rounds must be at least 8, the number of completed rounds in .*, got 4"):
        quietly(lambda: sim, 4, seeds=range(3), checkpoints=saved)
    with pytest.raises(ValueError, match="another simulation: local.lr: 0.1 in the checkpoint, not 0.5"):
        quietly(lambda: saving(data, 0.5), 9, seeds=range(3), checkpoints=saved)
    with pytest.raises(ValueError, match="leave start out"):
        quietly(lambda: sim, 9, seeds=range(3), checkpoints=saved, start=runs)
    with pytest.raises(ValueError, match="a different folder for each run, got lr=0.1-seed-0 twice"):
        quietly(partial(saving, data), 1, settings=grid(lr=[0.1, 0.1, 0.2]), checkpoints=tmp_path / "twice")


@pytest.mark.parametrize("together", [thorough(1), 2])
def test_a_sweep_continues_the_runs_of_an_earlier_sweep(data, together) -> None:
    def build(lr: float) -> fd.Simulation:
        return simulate(data, fd.algorithms.scaffold(), local=local(lr=lr))

    how = {"seeds": range(2), "settings": grid(lr=[0.1, 0.2]), "eval_every": 3, "together": together}
    whole, first = quietly(build, 5, **how), quietly(build, 3, **how)
    rest = quietly(build, 2, start=first, **how)
    for a, b, c in zip(whole, first, rest, strict=True):
        assert [record["round"] for record in c.history] == [4, 5]
        for one, other in zip(a.history, b.history + c.history, strict=True):
            assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)
        jax.tree_util.tree_map_with_path(close(1e-6), a.state.clients, c.state.clients)
    with pytest.raises(ValueError, match="one run of every seed"):
        quietly(build, 1, start=first, **how | {"seeds": [0, 7]})
    with pytest.raises(ValueError, match="at the same round"):
        quietly(build, 1, start=[*first[:3], rest[3]], **how)
