"""Plans: what a round needs on its devices, which need not be here."""

from __future__ import annotations

import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies

import fedjax_drift as fd
from fedjax_drift import cli, tree
from fedjax_drift.devices import launch
from fedjax_drift.errors import ConfigurationError, MissingPackageError

has_libtpu = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not has_libtpu, reason="libtpu is not installed: pip install 'jax[tpu]'")


def simulate(mesh=None, **options) -> fd.Simulation:
    data = fd.FederatedData.of_shapes(12, 7, (8,), np.float32, test_rows=5)
    model = fd.models.linear((8,), 3)
    return fd.Simulation(model, data, fd.algorithms.scaffold(), cohort_size=6, mesh=mesh, **options)


def test_a_plan_is_that_of_the_program_that_runs() -> None:
    """The same program, compiled for the arrays of a run, has the same memory; and the run has these arrays."""
    sim = simulate(fd.clients_mesh(jax.devices()[:2]), bank="sharded")
    plan, state, arrays = sim.plan(), sim.init(jax.random.key(0)), sim.setup.arrays
    memory = sim.executor.programs.lower("donating_round", state, arrays, None).compile().memory_analysis()
    assert plan.arguments == memory.argument_size_in_bytes and plan.temporary == memory.temp_size_in_bytes
    assert plan.results == memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert plan.total == plan.arguments + plan.results + plan.temporary and plan.fits
    assert plan.examples == tree.nbytes(arrays.rows) and plan.client_states == tree.nbytes(state.clients) // 2
    assert plan.examples + plan.client_states < plan.arguments
    assert plan.devices == "2 x cpu" and plan.lanes == sim.lanes and plan.sent == sim.communication()
    assert plan.collectives["all-reduce"] >= 1
    text = str(plan._replace(memory=plan.total - 1))
    assert "does not fit" in text and "2 x cpu" in text and "all-reduce" in text


def test_data_that_are_only_shapes_take_no_memory() -> None:
    data = fd.FederatedData.of_shapes(10**6, 1000, (32, 32, 3))
    assert data.x.shape == (10**9, 32, 32, 3) and data.x.strides == (0, 0, 0, 0) and data.x.dtype == np.uint8
    assert data.sizes.tolist() == [1000] * 10**6 and data.x_test is None
    with pytest.raises(ValueError, match="rows_per_client must be an integer >= 1, got 0"):
        fd.FederatedData.of_shapes(1, 0, (2,))


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ConfigurationError, match="a plan needs the training examples on the devices"):
        simulate(stream=True).plan()
    with pytest.raises(ConfigurationError, match="a plan needs the client states on the devices"):
        simulate(bank="host").plan()


@pytest.mark.parametrize("name", ["v5e", "4x4", "v5e:4x", "", "v5e:4x4 "])
def test_the_name_of_a_slice(name) -> None:
    with pytest.raises(ConfigurationError, match="topology must be the name of a TPU slice, such as v5e:4x4"):
        fd.described_mesh(name)


def test_a_compiler_that_is_missing_and_one_that_refuses(monkeypatch) -> None:
    def fails(message):
        def get(**options):
            raise RuntimeError(message)

        monkeypatch.setattr(topologies, "get_topology_desc", get)

    fails("JAX TPU support not installed; cannot generate TPU topology.")
    with pytest.raises(MissingPackageError, match=r'needs libtpu: pip install "jax\[tpu\]"'):
        fd.described_mesh("v5e:2x2")
    fails("INVALID_ARGUMENT: not divisible")
    with pytest.raises(ConfigurationError, match="got 'v5e:3x5': INVALID_ARGUMENT: not divisible"):
        fd.described_mesh("v5e:3x5")


def test_nothing_runs_on_devices_that_are_only_described(monkeypatch) -> None:
    sim = simulate()
    monkeypatch.setattr(launch, "is_described", lambda mesh: True)
    with pytest.raises(ConfigurationError, match="nothing can run on devices that are only described"):
        sim.init(jax.random.key(0))


COMMAND = ["plan", "--dataset", "mnist", "--clients", "10", "--rows-per-client", "5", "--model", "linear"]


def test_the_command_line_prints_a_plan_for_each_slice_and_algorithm(monkeypatch, capsys) -> None:
    monkeypatch.setattr(fd, "described_mesh", lambda name: fd.clients_mesh(jax.devices()[: int(name)]))
    algorithms = ["--algorithm", "fedavg", "--algorithm", "scaffold"]
    assert cli.main([*COMMAND, *algorithms, "--topology", "1,2"]) == 0
    printed = capsys.readouterr().out
    assert [f"{name} on {n}\n" in printed for name in ("fedavg", "scaffold") for n in (1, 2)] == [True] * 4
    assert printed.splitlines()[-5].split() == ["slice", "algorithm", "GiB", "needed", "of", "fits"]
    assert [line.split()[:2] for line in printed.splitlines()[-4:]] == [
        ["1", "fedavg"], ["1", "scaffold"], ["2", "fedavg"], ["2", "scaffold"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*COMMAND, "--algorithm", "fedavg"], "needs --topology, got none"),
        ([*COMMAND, "--algorithm", "fedavg", "--topology", "v5e"], "topology must be the name of a TPU slice"),
        (["plan", "--dataset", "movielens", "--rows-per-client", "5", "--algorithm", "fedavg"], "data set of images"),
    ],
)
def test_bad_input_is_one_line(arguments, said, monkeypatch, capsys) -> None:
    if "movielens" in arguments:
        monkeypatch.setattr(fd, "described_mesh", lambda name: fd.clients_mesh())
        arguments = [*arguments, "--topology", "v5e:2x2"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@needs_libtpu
def test_a_round_compiles_for_a_slice_that_is_not_here() -> None:
    sim = simulate(fd.described_mesh("v5e:4x4"))
    plan = sim.plan()
    assert plan.devices == "16 x TPU v5 lite on 4 hosts" and plan.fits and plan.memory == 2**34
    assert plan.collectives["all-reduce"] >= 1
    with pytest.raises(ConfigurationError, match="nothing can run on devices that are only described"):
        sim.init(jax.random.key(0))
