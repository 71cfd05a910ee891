"""Simulations of several processes, which are started here, and data sets that are sharded over devices."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small import assert_close
from together import ASKED_AT, ROUNDS, SOURCES, adapted, outcome, rows, simulate

import fedjax_drift as fd
from fedjax_drift import cli
from fedjax_drift.devices import distributed
from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.round import exchange

pytestmark = pytest.mark.thorough

WORKER = Path(__file__).with_name("together.py")


def start_all(commands: list[list[str]], seconds: float = 600) -> list[subprocess.CompletedProcess]:
    """Runs Python processes in parallel. If one takes too long, all of them are killed."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    children = [subprocess.Popen([sys.executable, *command], **pipes) for command in commands]
    deadline, done = time.monotonic() + seconds, []
    try:
        for child in children:
            out, error = child.communicate(timeout=max(deadline - time.monotonic(), 1))
            done.append(subprocess.CompletedProcess(child.args, child.returncode, out, error))
    except subprocess.TimeoutExpired:
        for child in children:
            child.kill()
        said = "\n".join("".join(child.communicate()) for child in children)
        pytest.fail(f"no end after {seconds} s:\n{said}")
    finally:
        for child in children:
            child.kill()
            child.wait()
    return done


def free_address() -> str:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return f"localhost:{listening.getsockname()[1]}"


def test_two_processes_with_two_devices_agree_with_one_process(tmp_path) -> None:
    """Each process loads only its own examples. The client states are sharded over all four devices."""
    address = free_address()
    for ended in start_all([[str(WORKER), address, "2", str(i), str(tmp_path)] for i in range(2)]):
        assert ended.returncode == 0, ended.stdout + ended.stderr
    one, other = (json.loads((tmp_path / f"found{i}.json").read_text()) for i in range(2))
    assert (one.pop("first"), other.pop("first")) == (True, False)
    assert one == other

    sim = simulate(rows(), shard_data=False)
    state, history = sim.run(sim.init(jax.random.key(0)), ROUNDS, 2, progress=False)
    assert_close(one["run"], outcome(sim, state, history))
    for name, source in SOURCES.items():
        other = simulate(rows(), shard_data=False, **source)
        assert_close(one[name], outcome(other, *other.run(other.init(jax.random.key(0)), ROUNDS, 2, progress=False)))
    assert one["cohort"] == [4, 11, 2] and one["saved"] == [1, 3]
    team = adapted(rows())
    alone = outcome(team, *team.run(team.init(jax.random.key(0)), 2, 0, progress=False))
    assert_close(one["teams of 2"], alone)
    assert_close(one["teams of 4"], alone)
    rounds, recorded = one["interrupted"]  # the interrupt was sent to the second process only
    assert ASKED_AT <= rounds == recorded < 10_000
    state, history = sim.run(sim.init(jax.random.key(0)), 2, 0, progress=False)
    assert_close(one["alone"], outcome(sim, state, history))
    assert '"host"' in one["folder"] and "clients_mesh(jax.local_devices())" in one["sweep"]


def test_the_first_process_writes_and_errors_end_all_processes(tmp_path) -> None:
    address, folder = free_address(), tmp_path / "out"
    run = ["-m", "fedjax_drift.cli", "run", "--dataset=synthetic:num_clients=6,num_rows=20", "--cohort=3", "--rounds=2"]
    run += ["--algorithm=scaffold", "--bank=sharded", "--checkpoint-every=1", f"--output={folder}"]
    first, second = start_all([[*run, f"--distributed={address},2,{i}"] for i in range(2)])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "scaffold" in first.stdout and "scaffold" not in second.stdout + second.stderr
    config = json.loads((folder / "config.json").read_text())
    assert (config["processes"], config["devices"]["count"]) == (2, 2)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2 and (folder / "curves.png").is_file()

    # One process can resume a run of two processes. The result is that of a run of one process.
    def losses(folder: Path) -> list[float]:
        return [json.loads(line)["train_loss"] for line in (folder / "rounds.jsonl").read_text().splitlines()]

    alone = [word for word in run[2:] if not word.startswith(("--output", "--rounds"))]
    assert cli.main([*alone, "--rounds=4", f"--output={tmp_path / 'alone'}"]) == 0
    assert cli.main(["run", "--resume", str(folder), "--rounds=4"]) == 0
    np.testing.assert_allclose(losses(folder), losses(tmp_path / "alone"), rtol=1e-5)

    # A data file is missing for one process only. Both processes end.
    wrong = [*run[:2], "run", "--dataset=mnist", f"--data-dir={tmp_path}", "--algorithm=fedavg"]
    commands = [[*run, "--force", f"--distributed={address},2,0"], [*wrong, f"--distributed={address},2,1"]]
    first, second = start_all(commands)
    assert (first.returncode, second.returncode) == (2, 2), first.stderr + second.stderr
    assert "error: process 1: mnist is read from" in second.stderr and "error" not in first.stderr


def test_sharded_examples_give_the_same_bits() -> None:
    """This includes client states on the host, and drift measures that need the gradients of all clients."""

    def end(**options) -> tuple:
        sim = simulate(rows(), lanes=3, measure=("gradients", "labels"), **options)
        state, history = sim.run(sim.init(jax.random.key(0)), 2, 0, progress=False)
        return jax.tree.map(np.asarray, state.server), [record | {"seconds": 0} for record in history]

    jax.tree.map(np.testing.assert_array_equal, end(shard_data=True, bank="host"), end(shard_data=False))


@pytest.mark.parametrize("D", [1, 2])
def test_exchange_preserves_every_bit(D) -> None:
    """NaN and negative zero are preserved. Padding and empty places are correct."""
    mesh, sizes = fd.clients_mesh(jax.devices()[:D]), np.array([3, 1, 4, 2, 2], np.int32)
    odd = np.array([0x80000000, 0x7FC01234, 0xFF800000, 1, 0x3F800000], np.uint32)
    bits = np.resize(odd, (sizes.sum(), 2)) + np.arange(sizes.sum(), dtype=np.uint32)[:, None] % 2
    labels = np.arange(sizes.sum())
    data = fd.FederatedData(np.zeros_like(bits, np.float32), labels, sizes)
    object.__setattr__(data, "x", bits.view(np.float32))  # the constructor would raise an error
    x, y, offsets, _ = exchange.place_parts(data, mesh)

    ids = np.array([[4, 2, 5], [5, 0, 3]])[:D]  # 5 is an absent client
    asked, at = np.append(sizes, 0)[ids], np.append(offsets, 0)[ids].astype(np.int32)
    moved = jax.shard_map(
        lambda x, y: exchange.exchange((x, y), jnp.asarray(asked), jnp.asarray(at), 8),
        mesh=mesh, in_specs=P(AXIS), out_specs=(P(AXIS), P()), check_vma=False,
    )  # fmt: skip
    (got_x, got_y), begins = jax.tree.map(np.asarray, jax.jit(moved)(x, y))
    for d, c in np.ndindex(ids.shape):
        for k in range(asked[d, c]):
            row = data.offsets[ids[d, c]] + k
            place = 8 * d + begins[d, c] + k
            assert (got_x[place].view(np.uint32) == bits[row]).all() and got_y[place] == labels[row]


def test_the_examples_of_a_device_fit_in_its_buffer() -> None:
    """Tries every cohort of small federations. The bound is attained if all clients do the same number of steps."""
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(40):
        N, D, L, B = rng.integers(3, 8), rng.integers(1, 4), rng.integers(1, 4), rng.integers(1, 6)
        sizes, local = rng.integers(1, 12, N), fd.LocalTraining(batch_size=int(B))
        by_rank = exchange.rows_by_rank(sizes, local.batches(sizes))
        for K in range(1, N + 1):
            G = -(-K // (D * L))
            room, most = exchange.longest_share(by_rank, D, G, L), 0
            places = exchange.back_and_forth(D, G, L)
            for cohort in itertools.permutations(sizes, int(K)) if N < 6 else itertools.combinations(sizes, int(K)):
                found = np.array(cohort)
                found = np.append(found[np.argsort(-local.batches(found), kind="stable")], np.zeros(D * G * L - K, int))
                most = max(most, found[places].sum((1, 2)).max())
            assert most <= room
            reached += most == room
    assert reached > 20


def test_shards_contain_every_example_once() -> None:
    sizes = np.random.default_rng(0).geometric(0.1, 50).astype(np.int32)
    for D in (1, 3, 64):
        clients, offsets, R = exchange.parts(sizes, D)
        places = np.concatenate([o + np.arange(n) for o, n in zip(offsets, sizes, strict=True)])
        assert len(np.unique(places)) == sizes.sum() and places.max() < D * R
        assert all((offsets[ids] // R == d).all() for d, ids in enumerate(clients))
        held = [sizes[ids].sum() for ids in clients]
        assert max(held) - min(held) <= sizes.max()


def test_communication_matches_the_compiled_program() -> None:
    sim = simulate(rows(), shard_data=True, bank="sharded")
    sent = sim.device_traffic()
    assert sent["message sum"] == 2 * 4 * (6 * 4 + 4) + 4  # SCAFFOLD: two models, and the weight
    assert sent["client states"] == 2 * 5 * 4 * (
        6 * 4 + 4
    )  # five of nine clients are on a device; states are read and written
    S = exchange.longest_share(sim.setup.engine.rows_by_rank, 2, 5, 1)
    assert sent["rows"] == S * (6 + 4)
    program = (
        sim.executor.programs.lower("round", (), sim.init(jax.random.key(0)), sim.setup.arrays, None)
        .compile()
        .as_text()
    )
    assert program.count(" all-reduce(") == 1
    half = sent["client states"] // 2  # only the new states
    assert simulate(rows()).device_traffic() == sent | {"client states": half, "rows": 0}


def test_auto_shards_only_what_does_not_fit_on_one_device(monkeypatch) -> None:
    data = rows()
    need = data.x.nbytes + data.y.nbytes

    def rows_are(memory, data=data, **options) -> str:
        monkeypatch.setattr("fedjax_drift.simulation.placement.memory_of", lambda mesh: memory)
        sim = simulate(data, bank="device", **options)
        return "host" if sim.setup.streamed else "parts" if sim.setup.engine.rows_by_rank is not None else "devices"

    assert rows_are(2 * need) == "devices"
    assert rows_are(2 * need - 2) == rows_are(need) == rows_are(1, stream=False) == "parts"
    assert rows_are(need - 2) == rows_are(need, shard_data=False) == rows_are(need, data.redealt()) == "host"
    assert rows_are(1, shard_data=False, stream=False) == "devices"
    for options, message in [
        ({"shard_data": True, "stream": True}, "choose one"),
        ({"shard_data": "yes"}, "shard_data must be True or False"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate(data, **options)
    with pytest.raises(ValueError, match="redealt"):
        simulate(data.redealt(), shard_data=True)


def test_initialize_raises_clear_errors(monkeypatch) -> None:
    for name in ("SLURM_PROCID", "OMPI_MCA_orte_hnp_uri", *distributed.STARTED_BY_MPI, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="must be \"host:port\", got 'node0'"):
        fd.distributed.initialize("node0", 2, 0)
    with pytest.raises(ValueError, match=r"process_id must be in 0\.\.1, got 2"):
        fd.distributed.initialize("node0:1234", 2, 2)
    with pytest.raises(RuntimeError, match="before JAX starts its backend"):
        fd.distributed.initialize("localhost:1234", 2, 0)
    code = """
import fedjax_drift as fd
for arguments, expected in [((), "launcher"), (("localhost:9", 2, 1), "must connect within 1 s")]:
    try:
        fd.distributed.initialize(*arguments, timeout_seconds=1)
    except (ValueError, RuntimeError) as error:
        assert expected in str(error), error
"""
    (ended,) = start_all([["-c", code]])
    assert ended.returncode == 0, ended.stderr
    assert distributed._detected_by({"PMI_SIZE": "4"}) == "mpi4py"
    assert distributed._detected_by({"PMI_SIZE": "4", "SLURM_PROCID": "0"}) is None
