"""Measures the time of a round if the federation has very many clients, large client states or large data.

    python experiments/benchmarks/many_clients.py [--parts stateless states streaming]

The parts:

- stateless: compares 1,000,000 clients with 1,000 clients, with a linear model, 10 examples of 20 features per client,
  and 100 clients per round. The examples are on the device, or are streamed from a memory-mapped file.
- states: SCAFFOLD with LeNet-5, 20 images per client, and 100 clients per round. The client states are on the device,
  sharded over the devices, in host memory, or in a file. There are 100,000 clients. On devices, there are fewer clients
  if their states need more than a quarter of the memory.
- streaming: LeNet-5 with 100 images per client, and 50 of 2,000 clients per round. Compares examples in host memory and
  in a memory-mapped file with examples on the device.

The files are written to a temporary folder ($TMPDIR), and are still in the page cache when they are read. They take
1.8 GB in the part "stateless", and up to 2.6 GB in the part "states".
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np

import fedjax_drift as fd
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.storage.client_store import ClientStore

STATE = 66_126 * 4  # bytes of one client state


def mapped(folder: Path, name: str, clients: int, rows: int, shape: tuple[int, ...], classes: int) -> fd.FederatedData:
    """Returns a federation in memory-mapped files.

    The same random inputs are repeated in the files. This has no effect on the speed.
    """
    rng, M = np.random.default_rng(0), clients * rows
    dtype = np.uint8 if len(shape) > 1 else np.float32
    block = rng.integers(0, 256, (min(M, 10_000), *shape)).astype(dtype)
    x = np.lib.format.open_memmap(folder / f"{name}_x.npy", "w+", dtype, (M, *shape))
    y = np.lib.format.open_memmap(folder / f"{name}_y.npy", "w+", np.int32, (M,))
    for start in range(0, M, len(block)):
        part = x[start : start + len(block)]
        part[:] = block[: len(part)] if dtype == np.uint8 else block[: len(part)] / 255
        y[start : start + len(block)] = rng.integers(0, classes, len(part))
    x.flush(), y.flush()
    opened = (np.load(folder / f"{name}_{letter}.npy", mmap_mode="r") for letter in "xy")
    return fd.FederatedData(*opened, np.full(clients, rows), name=name)


def network(arguments: argparse.Namespace) -> fd.Model:
    return fd.models.linear((28, 28, 1), 62) if arguments.quick else fd.models.lenet5(62)


def runner(sim: fd.Simulation) -> Callable[[int], float]:
    """Returns a function ``f(n)`` that runs n more rounds and returns the seconds per round."""
    state = sim.init(jax.random.key(0))

    def go_on(rounds: int) -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = sim.run(state, rounds, 0, progress=False)
        return (time.perf_counter() - start) / rounds

    go_on(2)
    return go_on


def in_turn(runners: dict[str, Callable[[int], float]], rounds: int, turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values():
        run(rounds)  # lets `run` choose how many rounds it dispatches together
    for _ in range(turns):
        for name, run in runners.items():
            times[name].append(run(rounds))
    return times


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def stateless(arguments: argparse.Namespace, folder: Path) -> Iterator[measure.Row]:
    few, many, cohort = (10, 100, 5) if arguments.quick else (1_000, 1_000_000, 100)
    model, local = fd.models.linear((20,), 5), fd.LocalTraining(batch_size=10, lr=0.01)
    federations = {N: mapped(folder, f"linear{N}", N, 10, (20,), 5) for N in (few, many)}
    for where, stream in (("on the device", False), ("memory-mapped", True)):
        runners = {
            N: runner(
                fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=cohort, stream=stream)
            )
            for N, data in federations.items()
        }
        times = in_turn(runners, arguments.rounds * 10, arguments.turns)
        for N in runners:
            what = f"{N:,} stateless clients, {cohort} a round, rows {where}"
            yield measure.row(what, [1e3 * t for t in times[N]], "ms a round")
        what = f"{many:,} / {few:,} clients, rows {where}"
        yield measure.row(what, ratios(times[many], times[few]), at_most=1.2)


def states(arguments: argparse.Namespace, folder: Path) -> Iterator[measure.Row]:
    few, everyone = (4, 4) if arguments.quick else (1_000, 100_000)
    # The states take a quarter of the memory, because a round may need a second copy.
    on_one = int(memory_of(fd.clients_mesh()) / 4 / STATE)
    fitting = {"device": on_one, "sharded": on_one * len(jax.local_devices())}
    data = mapped(folder, "images", everyone, 20, (28, 28, 1), 62)
    models = {}
    for N, rounds in {few: 3, everyone: arguments.rounds}.items():
        for bank in ("device", "sharded", "host", "file"):
            own = first_clients(data, min(N, fitting.get(bank, N)))
            where = folder / f"bank{N}" if bank == "file" else bank
            state, times = scaffold(network(arguments), own, min(100, N // 2), where, rounds)
            if N == few:
                models[bank] = jax.device_get(jax.tree.leaves(state.params))
            if N == everyone:
                yield state_row(bank, own.num_clients, state, times, arguments.turns)
            if isinstance(state.clients, ClientStore):
                state.clients.close()
    apart = [np.abs(a - b).max() for model in models.values() for a, b in zip(model, models["device"], strict=True)]
    note = f"{', '.join(models)}; {few:,} clients, 3 rounds"
    yield measure.row("SCAFFOLD, largest difference between the models of the four", float(max(apart)), note=note)


def first_clients(data: fd.FederatedData, N: int) -> fd.FederatedData:
    return fd.FederatedData(data.x[: N * 20], data.y[: N * 20], data.sizes[:N])


def scaffold(
    model: fd.Model, data: fd.FederatedData, cohort: int, bank: str | Path, rounds: int
) -> tuple[fd.ServerState, list[float]]:
    """Returns the state after ``rounds`` rounds, and the seconds of each round except the first two."""
    sim = fd.Simulation(
        model,
        data,
        fd.algorithms.scaffold(),
        local=fd.LocalTraining(batch_size=20, lr=0.05),
        cohort_size=cohort,
        bank=bank,
        stream=False,
        donate=True,
    )
    state, times = sim.init(jax.random.key(0)), []
    for _ in range(rounds):
        start = time.perf_counter()
        state, _ = sim.round_fn(state)
        jax.block_until_ready(state.params)
        times.append(time.perf_counter() - start)
    return state, times[2:]


def state_row(bank: str, N: int, state: fd.ServerState, times: list[float], turns: int) -> measure.Row:
    ids = np.arange(100) if N >= 100 else np.arange(N // 2)
    gather, scatter = moving(state, ids, turns)
    note = f"gather {1e3 * gather:.2f} ms, scatter {1e3 * scatter:.2f} ms for {len(ids) * STATE / 1e6:.0f} MB"
    if isinstance(state.clients, ClientStore):
        note += f"; {state.clients.seen:,} clients seen take {state.clients.nbytes / 1e9:.2f} GB"
    return measure.row(f"SCAFFOLD, {N:,} clients, states: {bank}", times, "s a round", note=note)


def moving(state: fd.ServerState, ids: np.ndarray, turns: int) -> tuple[float, float]:
    """Returns the median times to gather the states of the clients, and to store them again, in seconds."""
    if isinstance(state.clients, ClientStore):
        bank = state.clients
        found = bank.gather(ids)
        scatters = measure.seconds(lambda: bank.commit(ids, found, bank.round + 1), turns)
        gathers = measure.seconds(lambda: bank.gather(ids), turns)  # all of these clients have a stored state now
        return statistics.median(gathers), statistics.median(scatters)
    gather = jax.jit(lambda clients, ids: jax.tree.map(lambda c: c[ids], clients))
    scatter = jax.jit(
        lambda clients, ids, new: jax.tree.map(lambda c, n: c.at[ids].set(n), clients, new), donate_argnums=0
    )
    clients, held = state.clients, jax.block_until_ready(gather(state.clients, ids))
    gathers = measure.seconds(lambda: gather(clients, ids), turns)

    def put() -> Any:
        nonlocal clients
        clients = scatter(clients, ids, held)
        return clients

    return statistics.median(gathers), statistics.median(measure.seconds(put, turns))


def streaming(arguments: argparse.Namespace, folder: Path) -> Iterator[measure.Row]:
    clients, rows, cohort = (4, 4, 2) if arguments.quick else (2000, 100, 50)
    data = mapped(folder, "streamed", clients, rows, (28, 28, 1), 62)
    held = fd.FederatedData(np.array(data.x), np.array(data.y), data.sizes)
    model, local = network(arguments), fd.LocalTraining(batch_size=20, lr=0.05)
    ways = {"on the device": (held, False), "in host memory": (held, True), "memory-mapped": (data, True)}
    runners = {
        name: runner(fd.Simulation(model, own, fd.algorithms.fedavg(), local=local, cohort_size=cohort, stream=stream))
        for name, (own, stream) in ways.items()
    }
    times = in_turn(runners, arguments.rounds, arguments.turns)
    for name in runners:
        yield measure.row(f"LeNet-5, {cohort} of {clients:,} clients, rows {name}", times[name], "s a round")
    for name in list(runners)[1:]:
        speed = [100 * r for r in ratios(times["on the device"], times[name])]
        yield measure.row(f"speed with rows {name}, of that on the device", speed, "%", at_least=80)


PARTS = {"stateless": stateless, "states": states, "streaming": streaming}


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            yield from PARTS[part](arguments, Path(folder))


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.turns = 3, 1
    fd.use_cpu_devices()
    measure.save("many_clients", rows(arguments), arguments)


if __name__ == "__main__":
    main()
