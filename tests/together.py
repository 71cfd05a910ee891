"""A program that test_distributed.py starts in several processes, which run one simulation together.

    python tests/together.py HOST:PORT P I FOLDER

P is the number of processes and I the number of this process. The results are written to FOLDER. test_distributed.py
imports this module, too, to compare the results with those of a single process.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from small import forgetting

import fedjax_drift as fd
from fedjax_drift.round import exchange
from fedjax_drift.storage import array_files

SIZES = [3, 10, 7, 25, 1, 16, 12, 30, 5, 8] * 2  # 20 clients of different sizes
ROUNDS, ASKED_AT = 6, 3
EVERYONE = len(SIZES)


SOURCES: dict[str, dict[str, Any]] = {
    "asynchronous": {
        "clock": fd.clock.asynchronous(15, max_staleness=3),
        "devices": fd.Devices(speed_spread=0.7, up=1e3),
    },
    "groups": {"topology": fd.topology.groups([i % 3 for i in range(EVERYONE)], every=2), "dropout": 0.3},
    "graph": {"topology": fd.topology.graph(fd.topology.torus(4, 5)), "cohort_size": EVERYONE, "dropout": 0.3},
    "own": {"sources": [forgetting(2), fd.compression.downlink(fd.compression.top_k(0.5))]},
}


def rows() -> fd.FederatedData:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (sum(SIZES), 6), np.uint8), rng.integers(0, 4, sum(SIZES))
    return fd.FederatedData(x, y, np.array(SIZES), x[:30].copy(), y[:30].copy())


def simulate(data: fd.FederatedData, **options) -> fd.Simulation:
    options = {"local": fd.LocalTraining(epochs=2, batch_size=4, lr=0.2), "cohort_size": 9} | options
    model = options.pop("model", fd.models.linear((6,), 4))
    return fd.Simulation(model, data, fd.algorithms.scaffold(), **options)


def adapted(data: fd.FederatedData, **options) -> fd.Simulation:
    """A simulation that trains the adapters of a network. Its matrices [6, 100] and [100, 4] are frozen."""
    return simulate(data, model=fd.models.lora(fd.models.emnist_nn(4, (6,)), 2), **options)


def outcome(sim: fd.Simulation, state: fd.ServerState, history: list) -> dict:
    """Returns the final state and the losses of a run, in a form that can be written as JSON."""
    read = jax.jit(lambda tree: tree, out_shardings=NamedSharding(sim.mesh, PartitionSpec()))
    clients = [np.asarray(a)[: len(SIZES)].tolist() for a in jax.tree.leaves(read(state.clients))]
    server = [np.asarray(a).tolist() for a in jax.tree.leaves((state.server, state.sources.get("topology")))]
    losses = [[record["train_loss"], record.get("loss")] for record in history]
    return {"server": server, "clients": clients, "losses": losses}


def own_rows_only(data: fd.FederatedData, devices: int, folder: Path) -> fd.FederatedData:
    """Returns the data in memory-mapped files. The examples of other processes' clients are replaced with zeros."""
    dealt = exchange.parts(data.sizes, devices * jax.process_count()).clients
    own = np.concatenate(dealt[devices * jax.process_index() :][:devices])
    have = np.repeat(np.isin(np.arange(len(SIZES)), own), data.sizes)
    mapped = []
    for name, array in (("x", data.x), ("y", data.y)):
        file = folder / f"{name}{jax.process_index()}.npy"
        np.save(file, np.where(have.reshape(-1, *(1,) * (array.ndim - 1)), array, 0))
        mapped.append(np.load(file, mmap_mode="r"))
    return fd.FederatedData(*mapped, data.sizes, data.x_test, data.y_test)


def saved_rounds(sim: fd.Simulation, folder: Path, fails: bool) -> list[int]:
    """The checkpoints of three rounds. In one process, the disk is full when the second one is written."""
    write, number = array_files.write, itertools.count(1)

    def full(where: Path, parts: list) -> None:
        if next(number) == 2 and fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(where, parts)

    array_files.write = full
    checkpoints = fd.Checkpoints(folder / "saved", every=1, best=None)
    sim.run(sim.init(jax.random.key(0)), 3, 0, progress=False, checkpoints=checkpoints)
    array_files.write = write
    return checkpoints.rounds


def refused(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def main() -> None:
    address, P, i, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    fd.distributed.initialize(address, P, i, cpu_devices=2, timeout_seconds=60)
    data, key, found = rows(), jax.random.key(0), {}

    sim = simulate(own_rows_only(data, 2, folder), shard_data=True, bank="sharded")
    state, history = sim.run(sim.init(key), ROUNDS, 2, progress=False)
    found["run"] = outcome(sim, state, history)
    for name, source in SOURCES.items():
        other = simulate(own_rows_only(data, 2, folder), shard_data=True, bank="sharded", **source)
        found[name] = outcome(other, *other.run(other.init(key), ROUNDS, 2, progress=False))
    for size in (2, 4):  # a team per process, and one team of all devices
        team = adapted(data, devices_per_client=size)
        found[f"teams of {size}"] = outcome(team, *team.run(team.init(key), 2, 0, progress=False))
    state, info = sim.round_fn(sim.init(key), [4, 11, 2])
    found["cohort"] = np.asarray(info["cohort"]).tolist()

    def on_round(record: dict) -> None:
        if record["round"] == ASKED_AT and i == P - 1:
            os.kill(os.getpid(), signal.SIGINT)

    state, history = sim.run(sim.init(key), 10_000, 0, progress=False, on_round=on_round)
    found["interrupted"] = [int(state.round), len(history)]

    found["saved"] = saved_rounds(sim, folder, i == P - 1)
    alone = simulate(data, mesh=fd.clients_mesh(jax.local_devices()[:1]))
    found["alone"] = outcome(alone, *alone.run(alone.init(key), 2, 0, progress=False))
    found["folder"] = refused(lambda: simulate(data, bank=str(folder / "bank")))
    found["sweep"] = refused(lambda: sim.sweep(1, [0, 1]))
    found["first"] = fd.distributed.is_first()
    (folder / f"found{i}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
