"""Fuzz test of the public interface, and tests of unusual numbers: underflow, NaN and NumPy integers."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import abuse
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift import checks, cli
from fedjax_drift.cli.flags import Parser
from fedjax_drift.data import files, tfds

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3) / 24, np.array([0, 1, 2, 1, 0, 1, 2, 1])
DATA = fd.FederatedData.from_clients([(X[:3], Y[:3]), (X[3:4], Y[3:4]), (X[4:], Y[4:])], test=(X, Y))


@pytest.mark.parametrize("cases", [10, pytest.param(80, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", abuse.FAMILIES)
def test_awkward_arguments_have_no_wrong_outcome(family, cases) -> None:
    assert not [str(outcome) for outcome in abuse.abused(family, cases) if outcome.wrong]


def test_declared_arguments_are_refused_alone_and_in_pairs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not [*abuse.accepts(3, random.Random(0))]
    assert not any(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [fd.algorithms.scaffold(), fd.algorithms.feddc(0.1), fd.algorithms.slowmo(0.5)])
def test_a_learning_rate_below_the_float32_range_gives_finite_states(algorithm) -> None:
    local = fd.LocalTraining(lr=0.1, lr_decay=0.5)
    sim = fd.Simulation(fd.models.linear((3,), 3), DATA, algorithm, local=local, cohort_size=2)
    state, history = sim.run(sim.init(jax.random.key(0))._replace(round=jnp.int32(300)), 2, progress=False)
    leaves = jax.tree.leaves(state._replace(key=0))
    assert all(np.isfinite(leaf).all() for leaf in leaves) and 0 < history[-1]["lr"] < 1e-37


def test_a_model_with_nan_has_accuracy_0_and_causes_a_warning() -> None:
    sim = fd.Simulation(fd.models.linear((3,), 3), DATA, fd.algorithms.fedavg(), cohort_size=2)
    state = sim.init(jax.random.key(0))
    state = state._replace(server=state.server._replace(params=jax.tree.map(lambda p: p * jnp.nan, state.params)))
    with pytest.warns(RuntimeWarning, match="the test loss must be finite, got nan after 0 rounds"):
        assert sim.evaluate(state)["accuracy"] == 0


@pytest.mark.thorough
def test_measuring_works_with_debug_nans() -> None:
    """The measures of absent clients are NaN. This must not raise an error with ``jax_debug_nans``."""
    options = {"cohort_size": 2, "sampling": "bernoulli", "measure": "updates"}
    sim = fd.Simulation(fd.models.linear((3,), 3), DATA, fd.algorithms.scaffold(), **options)
    with jax.debug_nans(True):
        _, history = sim.run(sim.init(jax.random.key(0)), 3, progress=False)
        (run,) = sim.sweep(2, [0], progress=False)
    assert len(history) == 3 and len(run.history) == 2 and "update_norm" in run.history[0]


def test_numpy_integers_are_accepted() -> None:
    local = fd.LocalTraining(epochs=np.uint8(1), batch_size=np.uint64(2), lr=np.int64(1))
    sim = fd.Simulation(
        fd.models.linear((3,), 3), DATA, fd.algorithms.fedavg(np.int64(1)), local=local, cohort_size=np.uint8(2)
    )
    state = sim.init(jax.random.key(0))._replace(round=jnp.int32(100))
    state, history = sim.run(state, np.uint8(200), np.int64(0), progress=np.False_)
    assert len(history) == 200 and int(state.round) == 300


# --- addresses of object stores ---------------------------------------------------------------------------------------

ADDRESSES = ["gs://bucket/run", Path("s3://bucket/run"), "file:///tmp/run", "dbfs:/run", Path("hdfs://run").absolute()]
REFUSED = r"must be (?:\w+ or )*a path of the local file system, got .*: (mount the \w+ storage|leave out file://)"
LOCAL = ["run", "C:/run", r"C:\run", "runs/a:b/c", "gs:run", "~/run", Path("/tmp/run")]
ANNOTATIONS = ("PathLike", "FilePath", "DataDir", "Records")  # of the arguments that can be paths
RECORD = abuse.HISTORY[0] | {"sharpness": 1.0, "hessian_trace": 1.0}


def test_every_function_refuses_the_address_of_an_object_store(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sim = fd.Simulation(fd.models.linear((3,), 3), DATA, fd.algorithms.fedavg(), cohort_size=2)
    valid: dict[Any, dict[str, Any]] = {
        call.function: call.valid for family in ("plots", "datasets", "logs") for call in abuse.FAMILIES[family]()
    }
    model, images = fd.models.linear((3,), 3), np.zeros((2, 2, 2, 1), np.uint8)
    valid |= {
        fd.Simulation.run: {"self": sim, "state": sim.init(jax.random.key(0)), "rounds": 1},
        fd.Simulation.sweep: {"self": sim, "rounds": 1, "seeds": [0]},
        fd.sweep: {"build": lambda: sim, "rounds": 1},
        fd.data.from_fl_bench: {"x": X, "y": Y},
        fd.models.load_params: {"model": model},
        **dict.fromkeys((fd.models.save, fd.models.save_params), {"params": {"a": X}}),
        **dict.fromkeys((fd.plots.forgetting, fd.plots.sharpness), {"records": [RECORD]}),
        fd.plots.examples: {"data": fd.FederatedData(images, Y[:2], [2])},
        fd.datasets.download: {"name": "mnist"},
    }
    arguments = [
        (name, function, argument)
        for name, function in dict(abuse.public("fd", fd)).items()
        for argument, parameter in parameters(function).items()
        if any(word in str(parameter.annotation) for word in ANNOTATIONS)
    ]
    assert len(arguments) > 45
    for name, function, argument in arguments:
        given = ({"train": "nowhere"} if argument == "test" else {}) | valid.get(function, {})
        for address in ADDRESSES:
            with pytest.raises(ValueError, match=REFUSED):
                print(f"{name}({argument}={address!r})", function(**given | {argument: address}))
    assert not any(tmp_path.iterdir())


def parameters(function: Callable) -> Any:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some classes have none
        return {}


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("command", cli.commands.COMMANDS)
def test_every_flag_refuses_the_address_of_an_object_store(command, address, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    parser = Parser()
    cli.commands.COMMANDS[command].add_flags(parser)
    flags = [action.option_strings[-1] for action in parser._actions if getattr(action.type, "kind", "") == "path"]
    words = {"data": ["synthetic"], "quickstart": []}.get(command, ["--dataset=synthetic", "--algorithm=scaffold"])
    for flag in flags:
        assert cli.main([command, *words, f"{flag}={address}"]) == 2, flag
        assert re.search(REFUSED, capsys.readouterr().err), flag
    assert flags
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("address", ADDRESSES)
def test_environment_variables_are_paths_too(address, monkeypatch) -> None:
    folders = {
        "FEDJAX_DRIFT_DATA": files.folders,
        "FEDJAX_DRIFT_CACHE": files.cache_dir,
        "TFDS_DATA_DIR": tfds.default_dir,
    }
    for variable, function in folders.items():
        monkeypatch.setenv(variable, str(address))
        with pytest.raises(ValueError, match=rf"\${variable} {REFUSED}"):
            function()


@pytest.mark.parametrize("path", LOCAL)
def test_local_paths_with_colons_are_no_addresses(path) -> None:
    assert checks.path("path", path).name == Path(path).name
