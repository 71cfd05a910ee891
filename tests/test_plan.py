"""Tests of plans. A plan reports what a round needs on its devices, which need not exist."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import fedjax_drift as fd
from fedjax_drift import cli, tree
from fedjax_drift.convolution import conv
from fedjax_drift.devices import gpus, launch
from fedjax_drift.errors import ConfigurationError, MissingPackageError
from fedjax_drift.simulation import lanes, placement, program_text
from fedjax_drift.simulation.plan import compiled_round, plan_of
from fedjax_drift.simulation.simulation import Simulation

has_libtpu = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not has_libtpu, reason="libtpu is not installed: pip install 'jax[tpu]'")
has_cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
needs_cuda = pytest.mark.skipif(not has_cuda, reason="JAX's CUDA plugin is not installed: pip install 'jax[cuda13]'")
BOTH = [pytest.param("v5e:2x2", marks=needs_libtpu), pytest.param("h100:2", marks=needs_cuda)]


def simulate(mesh=None, **options) -> fd.Simulation:
    data = fd.FederatedData.of_shapes(12, 7, (8,), np.float32, test_rows=5)
    model = fd.models.linear((8,), 3)
    return fd.Simulation(model, data, fd.algorithms.scaffold(), cohort_size=6, mesh=mesh, **options)


def test_a_plan_matches_the_program_that_runs() -> None:
    """A plan reports the memory of the program that is compiled for a run, and the sizes of the arrays of the run."""
    sim = simulate(fd.clients_mesh(jax.devices()[:2]), bank="sharded")
    plan, state, arrays = sim.plan(), sim.init(jax.random.key(0)), sim.setup.arrays
    memory = sim.executor.programs.lower("donating_round", (), state, arrays, None).compile().memory_analysis()
    assert plan.arguments == memory.argument_size_in_bytes and plan.temporary == memory.temp_size_in_bytes
    assert plan.results == memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert plan.total == plan.arguments + plan.results + plan.temporary and plan.fits
    assert plan.examples == tree.nbytes(arrays.rows) and plan.client_states == tree.nbytes(state.clients) // 2
    assert plan.examples + plan.client_states < plan.arguments
    assert plan.devices == "2 x cpu" and plan.lanes == sim.lanes and plan.sent == sim.device_traffic()
    assert plan.collectives["all-reduce"] >= 1
    text = str(plan._replace(memory=plan.total - 1))
    assert "does not fit" in text and "2 x cpu" in text and "all-reduce" in text


def test_of_shapes_allocates_no_memory() -> None:
    data = fd.FederatedData.of_shapes(10**6, 1000, (32, 32, 3))
    assert data.x.shape == (10**9, 32, 32, 3) and data.x.strides == (0, 0, 0, 0) and data.x.dtype == np.uint8
    assert data.sizes.tolist() == [1000] * 10**6 and data.x_test is None
    with pytest.raises(ValueError, match="rows_per_client must be an integer >= 1, got 0"):
        fd.FederatedData.of_shapes(1, 0, (2,))


def test_a_simulation_that_needs_the_host_cannot_be_planned() -> None:
    with pytest.raises(ConfigurationError, match="a plan needs the training examples on the devices"):
        simulate(stream=True).plan()
    with pytest.raises(ConfigurationError, match="a plan needs the client states on the devices"):
        simulate(bank="host").plan()


@pytest.mark.parametrize("name", ["v5e", "4x4", "v5e:4x", "", "v5e:4x4 ", "v5e:0x4", "h1000", "h100:0", "h100:x8"])
def test_an_invalid_name_of_devices_is_an_error(name) -> None:
    with pytest.raises(ConfigurationError, match="topology must be a TPU slice or GPUs, such as v5e:4x4"):
        fd.described_mesh(name)


def test_a_gpu_description_that_cannot_be_read_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="the description .*no.txtpb' cannot be read"):
        fd.described_mesh(str(tmp_path / "no.txtpb"))


def test_described_mesh_passes_the_topology_to_the_compilers(monkeypatch, tmp_path) -> None:
    asked = []

    def get(**options):
        asked.append(options)
        return SimpleNamespace(devices=jax.devices()[:1])

    monkeypatch.setattr(topologies, "get_topology_desc", get)
    monkeypatch.setattr(gpus, "MEMORY", dict(gpus.MEMORY))
    own = tmp_path / "own.txtpb"
    own.write_text(str(gpus.GPUS["h100"]).replace("NVIDIA H100 80GB HBM3", "Own").replace("84978434048", "1234567890"))
    for name in ("v5e:4x4", "v4:2x2x1", "v6e:1x1", "h100", "a100-40gb:2x8", f"{own}:4"):
        fd.described_mesh(name)
    assert [options["topology_name"] for options in asked[:3]] == ["v5e:4x4", "v4:2x2x1", "v6e:1x1"]
    assert asked[1]["chip_config_name"] == "megacore" and asked[2]["chips_per_host_bounds"] == [1, 1, 1]
    assert [options["topology"] for options in asked[3:]] == ["1x1x1", "1x2x8", "1x1x4"]
    assert "NVIDIA A100-SXM4-40GB" in asked[4]["target_config"] and gpus.MEMORY["Own"] == 1234567890


def test_a_missing_compiler_and_a_refused_topology_are_errors(monkeypatch) -> None:
    def fails(message):
        def get(**options):
            raise RuntimeError(message)

        monkeypatch.setattr(topologies, "get_topology_desc", get)

    fails("JAX TPU support not installed; cannot generate TPU topology.")
    with pytest.raises(MissingPackageError, match=r'needs libtpu: pip install "jax\[tpu\]"'):
        fd.described_mesh("v5e:2x2")
    with pytest.raises(MissingPackageError, match="compiling for h100:8, which is not here, needs JAX's CUDA plugin"):
        fd.described_mesh("h100:8")
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
    headings = ["devices", "algorithm", "lanes", "cycles a round", "GiB needed", "of", "fits"]
    assert printed.splitlines()[-5].split() == " ".join(headings).split()
    assert [line.split()[:2] for line in printed.splitlines()[-4:]] == [
        ["1", "fedavg"], ["1", "scaffold"], ["2", "fedavg"], ["2", "scaffold"]
    ]  # fmt: skip


def test_devices_with_too_little_memory_do_not_stop_the_other_plans(monkeypatch, capsys) -> None:
    monkeypatch.setattr(fd, "described_mesh", lambda name: fd.clients_mesh(jax.devices()[: int(name)]))

    class Program:
        def lower(self, *arguments):
            return self

        def compile(self, options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 34.28G exceed 15.75G.")

    monkeypatch.setattr(Simulation, "plan", lambda sim: plan_of(sim.setup, Program(), {}))
    assert cli.main([*COMMAND, "--algorithm", "fedavg", "--topology", "1,2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "a round with lanes=1 does not fit in the memory of 2 x cpu (34.28G exceed 15.75G.): use more devices"
        in printed
    )
    assert "1 fedavg - - - - no 2 fedavg - - - - no" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*COMMAND, "--algorithm", "fedavg"], "needs --topology, got none"),
        ([*COMMAND, "--algorithm", "fedavg", "--topology", "v5e"], "topology must be a TPU slice or GPUs"),
        (["plan", "--dataset", "movielens", "--rows-per-client", "5", "--algorithm", "fedavg"], "data set of images"),
    ],
)
def test_bad_input_prints_one_line(arguments, said, monkeypatch, capsys) -> None:
    if "movielens" in arguments:
        monkeypatch.setattr(fd, "described_mesh", lambda name: fd.clients_mesh())
        arguments = [*arguments, "--topology", "v5e:2x2"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_describing_devices_leaves_the_environment_as_it_was(monkeypatch) -> None:
    """Otherwise, a simulation that starts later in the same process on a TPU VM would not find the other hosts."""
    seen = {}

    def describe(**options):
        seen.update(os.environ)
        raise NotImplementedError

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "worker-0,worker-1")
    before = dict(os.environ)
    with pytest.raises(MissingPackageError):
        fd.described_mesh("v5e:2x2")
    assert seen["TPU_SKIP_MDS_QUERY"] == "1" and seen["TPU_WORKER_HOSTNAMES"] == "worker-0,worker-1"
    assert dict(os.environ) == before


HLO = """\
%step (p: f32[]) -> f32[] {
  %a = f32[] add(%p, %p), metadata={op_name="while/transpose(jvp(CNN))"}, backend_config={"estimated_cycles":"70"}
  %w = f32[] while(%a), condition=%c, body=%inner
}

%inner (p: f32[]) -> f32[] {
  %a = f32[] add(%p, %p), backend_config={"estimated_cycles":"5"}
}

%group (p: f32[]) -> f32[] {
  %a = f32[] add(%p, %p), backend_config={"estimated_cycles":"10"}
  %w = f32[] while(%a), condition=%c, body=%step
}

%sort (p: f32[]) -> f32[] {
  %a = f32[] add(%p, %p), backend_config={"estimated_cycles":"2000"}
}

ENTRY %main (p: f32[]) -> f32[] {
  %a = f32[] add(%p, %p), backend_config={"estimated_cycles":"900"}
  %s = f32[] while(%a), condition=%c, body=%sort
  %w = f32[] while(%a), condition=%c, body=%group
  %r = f32[] all-reduce(%w), to_apply=%sum
  %g = (f32[], f32[]) all-gather-start(%r), dimensions={0}
  %d = f32[] all-gather-done(%g)
}
"""


def test_cycles_and_collectives_are_read_from_the_text_of_a_program() -> None:
    assert program_text.estimated_cycles('{"estimated_cycles":"7"} {"estimated_cycles":"9223372036854775807"}') == [7]
    assert [program_text.cycles_of_loop(HLO, depth) for depth in range(3)] == [85, 75, 75]
    assert program_text.cycles_of_loop(HLO.replace("while", "call"), 0) == 0
    assert program_text.collectives(HLO) == {"all-reduce": 1, "all-gather": 1}


@pytest.mark.thorough
def test_the_steps_of_a_plan_match_a_round() -> None:
    """There are five groups of two clients. One device trains all groups. The busier of two devices trains the
    first, the fourth and the fifth group."""
    data = fd.FederatedData(np.zeros((55, 8)), np.zeros(55, int), np.arange(1, 11))
    local = fd.LocalTraining(epochs=2, batch_size=2)
    for devices in (1, 2):
        mesh = fd.clients_mesh(jax.devices()[:devices])
        model, fedavg = fd.models.linear((8,), 3), fd.algorithms.fedavg()
        sim = fd.Simulation(model, data, fedavg, local=local, cohort_size=10, lanes=2, mesh=mesh)
        plan, (_, info) = sim.plan(), sim.round_fn(sim.init(jax.random.key(0)))
        steps = [10, 8, 6, 4, 2]  # of each group: 2 epochs of 5, 4, 3, 2 and 1 batches
        assert int(info["executed_steps"]) == 2 * sum(steps)
        assert plan.steps == (sum(steps) if devices == 1 else steps[0] + steps[3] + steps[4]) and plan.cycles == 0


@pytest.mark.parametrize("network", ["lenet5", "mnist_2nn"])
def test_the_estimated_memory_of_a_lane_matches_the_compiled_step(network, monkeypatch) -> None:
    """The estimate is right within a factor of 2, for the implementation of the convolution that GPUs use.

    The difference between the memory of 6 lanes and that of 2 lanes gives the memory of one lane.
    """
    monkeypatch.setattr(conv, "FORMS", {"default": conv.FORMS["default"]})
    model, B = getattr(fd.models, network)(), 20

    def step(params, x, y):
        gradient = jax.grad(lambda p: model.loss(model.apply(p, x), y).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    def needed(L: int) -> int:
        params = jax.eval_shape(jax.vmap(model.init), jax.random.split(jax.random.key(0), L))
        batch = jax.ShapeDtypeStruct((L, B, 28, 28, 1), jnp.float32), jax.ShapeDtypeStruct((L, B), jnp.int32)
        memory = jax.jit(jax.vmap(step)).lower(params, *batch).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    each = (needed(6) - needed(2)) / 4
    lane = lane_of(model, np.zeros((1, 28, 28, 1)), B, "gpu")
    assert lane.parameters == tree.nbytes(jax.eval_shape(model.init, jax.random.key(0)))
    assert each / 2 < lane.total < 2 * each


def lane_of(model: fd.Model, x: np.ndarray, B: int = 20, platform: str = "tpu") -> lanes.Lane:
    return lanes.lane_of(model, lambda x: x, x, np.zeros(1, int), B, platform)


def test_a_lane_in_bfloat16_has_half_of_the_activations() -> None:
    """The forward pass casts the parameters. They do not count as activations, in neither dtype."""
    model, x = fd.models.lenet5(), np.zeros((1, 28, 28, 1))
    single, half = lane_of(model, x), lane_of(model.computing_in(jnp.bfloat16), x)
    assert half.parameters == single.parameters
    assert (half.activations, half.convolved) == (single.activations // 2, single.convolved // 2)
    assert 0 < single.convolved < single.activations


@pytest.mark.thorough
@pytest.mark.parametrize("low_rank", [False, True])
def test_the_table_of_an_embedding_does_not_change_the_activations_of_a_lane(low_rank) -> None:
    def lane(vocabulary: int) -> lanes.Lane:
        model = fd.models.encoder(vocabulary=vocabulary, length=8, width=16)
        return lane_of(fd.models.lora(model, rank=2) if low_rank else model, np.zeros((1, 8), int))

    small, large = lane(10), lane(1000)
    assert small.activations == large.activations > 0 == small.convolved


def test_a_lane_of_a_model_with_a_branch_without_inputs() -> None:
    def apply(w, x):
        return x @ w * lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0)

    model = fd.Model(lambda key: jnp.zeros((3, 2)), apply)
    assert lane_of(model, np.zeros((1, 3))).activations == 4 * 20 * (3 + 2)


def test_the_automatic_number_of_lanes() -> None:
    def fastest(most, memory=2.0**34, platform="gpu", parameters=2**20, convolved=2**20) -> int:
        return lanes.fastest(most, memory, lanes.Lane(platform, parameters, convolved, convolved))

    assert [fastest(most) for most in (1, 10, 100, 200, 425, 3400)] == [1, 10, 25, 50, 107, 128]
    assert fastest(3400, parameters=2**26) == 31  # half of 16 GiB, with 257 MiB per lane
    assert fastest(3400, memory=2.0**20) == 1 and fastest(3400, memory=float("inf")) == 128
    assert [fastest(3400, platform="tpu", convolved=n) for n in (0, 2**10, 2**20, 3 * 2**20, 2**26)] == [
        128, 128, 16, 4, 1
    ]  # fmt: skip
    assert fastest(3, platform="tpu") == 3
    # No group has many idle lanes: 5 clients in groups of 3 and 2, not 4 and 1; 20 in two groups of 10, not 16 and 4.
    assert fastest(5, platform="tpu", convolved=3 * 2**20) == 3 and fastest(20) == 10


def test_the_number_of_lanes_on_an_accelerator_depends_on_the_model(monkeypatch) -> None:
    monkeypatch.setattr(placement, "memory_of", lambda mesh: 2.0**30)
    mesh = SimpleNamespace(shape={"clients": 1}, devices=np.array([SimpleNamespace(platform="tpu")]))
    lane = lanes.Lane("tpu", 10, 2**22, 2**22)
    assert placement.Placement().lanes_for(100, mesh, lambda platform: lane) == 4
    assert placement.Placement(lanes=64).lanes_for(100, mesh, None) == 64


# --- compilers for devices that need not exist ------------------------------------------------------------------------


@needs_libtpu
def test_a_plan_for_a_described_tpu_slice() -> None:
    sim = simulate(fd.described_mesh("v5e:4x4"))
    plan = sim.plan()
    assert plan.devices == "16 x TPU v5 lite on 4 hosts" and plan.fits and plan.memory == 2**34
    assert plan.cycles > 0 and f"{plan.cycles:,} a step" in str(plan)
    with pytest.raises(ConfigurationError, match="nothing can run on devices that are only described"):
        sim.init(jax.random.key(0))


@needs_cuda
def test_a_plan_for_described_gpus() -> None:
    plan = simulate(fd.described_mesh("h100:2")).plan()
    assert plan.devices == "2 x NVIDIA H100 80GB HBM3" and plan.fits and plan.memory < 84978434048
    assert plan.cycles == 0 and "cycles" not in str(plan)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize("devices", BOTH)
def test_the_compiled_round_of_an_accelerator(devices, algorithm) -> None:
    """The model is LeNet-5. The client states of SCAFFOLD are sharded over the devices."""
    data = fd.FederatedData.of_shapes(64, 50, (28, 28, 1))
    options = {"cohort_size": 32, "mesh": fd.described_mesh(devices), "bank": "sharded"}
    sim = fd.Simulation(fd.models.lenet5(), data, getattr(fd.algorithms, algorithm)(), **options)
    compiled, setup = compiled_round(sim.setup, sim.executor.programs), sim.setup
    memory, text = compiled.memory_analysis(), compiled.as_text()
    found = program_text.collectives(text)
    if algorithm == "fedavg":
        assert found["all-reduce"] == 1  # it sums the messages and the metrics
        assert set(found) <= {"all-reduce", "all-gather"}
    else:
        assert found["collective-permute"] >= 1 and set(found) <= {"all-reduce", "all-gather", "collective-permute"}
    assert "callback" not in text and "f64[" not in text
    states = tree.nbytes(setup.state.clients) // setup.mesh.size
    assert memory.alias_size_in_bytes >= states + tree.nbytes(setup.state.server)  # the new state overwrites the old


@pytest.mark.parametrize("devices", BOTH)
def test_sharded_examples_can_be_planned(devices) -> None:
    data = fd.FederatedData.of_shapes(64, 50, (8,), np.float32)
    model, options = fd.models.linear((8,), 3), {"cohort_size": 32, "shard_data": True}
    plan = fd.plan(devices, model, data, fd.algorithms.fedavg(), **options)
    assert plan.fits and plan.collectives["collective-permute"] >= 1
    assert plan.examples < fd.plan(devices, model, data, fd.algorithms.fedavg(), cohort_size=32).examples


@pytest.mark.parametrize(
    "devices", [pytest.param("v5e:2x2", marks=needs_libtpu), pytest.param("h100:4", marks=needs_cuda)]
)
def test_frozen_matrices_are_sharded_over_a_team_of_devices(devices) -> None:
    data = fd.FederatedData.of_shapes(64, 50, (512,), np.float32)
    network = fd.Model(
        lambda key: {"w": jnp.zeros((512, 2048)), "v": jnp.zeros((2048, 512))},
        lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"],
    )
    model, options = fd.models.lora(network, 4, "w|v"), {"cohort_size": 32, "bank": "sharded", "lanes": 1}
    sim = fd.Simulation(
        model, data, fd.algorithms.scaffold(), mesh=fd.described_mesh(devices), devices_per_client=2, **options
    )
    plan = sim.plan()
    assert plan.devices.endswith("2 for each client") and plan.frozen == 4 * 512 * 2048
    text = compiled_round(sim.setup, sim.executor.programs).as_text()
    assert not re.search(r"f32\[(512,2048|2048,512)\]", text)  # no device has a whole matrix
    # Only gradients are gathered, not the states of all clients.
    collected = [re.findall(r"\[([\d,]*)\]", line)[0] for line in re.findall(r"= (.*) all-gather(?:-start)?\(", text)]
    assert collected and all(math.prod(map(int, shape.split(","))) <= 4 * 2048 for shape in collected)


@needs_libtpu
@pytest.mark.parametrize("image", [(32, 32, 3), (28, 28, 1)])
def test_a_round_on_a_tpu_makes_no_copy_of_the_examples(image) -> None:
    data = fd.FederatedData.of_shapes(500, 200, image)
    plan = fd.plan("v5e:1x1", fd.models.linear(image, 10), data, fd.algorithms.fedavg(), cohort_size=20)
    assert plan.temporary < plan.examples / 4 and plan.arguments < 1.2 * 500 * 200 * math.prod(image)


@needs_libtpu
@pytest.mark.parametrize(("network", "lanes"), [("lenet5", 16), ("mnist_2nn", 16), ("emnist_cnn", 4)])
def test_our_networks_need_no_more_tpu_cycles_than_plain_modules(network, lanes, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "experiments" / "benchmarks"))
    from compiled import PLAIN, estimate, plain_model

    chip = SingleDeviceSharding(fd.described_mesh("v5e:1x1").devices.flat[0])
    ours, plain, shape = getattr(fd.models, network)(), plain_model(network), PLAIN[network][1]
    assert estimate(ours, shape, lanes, 20, chip).cycles <= 1.01 * estimate(plain, shape, lanes, 20, chip).cycles
