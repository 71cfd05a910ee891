"""Measures weak scaling: with twice the devices and twice the clients, a round should take the same time.

    python experiments/benchmarks/weak_scaling.py [--turns 5] [--rounds 4]

Each device trains 25 clients with 100 images each (LeNet-5). Rounds on one device and on two devices are interleaved.
The two devices belong to one process, or to two processes that communicate through Gloo. On two devices, the examples
and the client states (of SCAFFOLD) are sharded. On a CPU, a device is a core, and both devices share the memory.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import jax
import measure
from workloads import Workload, equal_sizes, tiny

import fedjax_drift as fd


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    """Measures one process with two devices and, on a CPU, two processes with one device each."""
    K = clients(arguments)
    yield from compared(turns(arguments), K, "2 devices")
    if jax.default_backend() == "cpu":
        yield from compared(two_processes(arguments), K, "2 processes")


def compared(times: dict[str, list[float]], K: int, two: str) -> Iterator[measure.Row]:
    for name in ("fedavg", "scaffold"):
        one, both = times[f"{name} 1"], times[f"{name} 2"]
        yield measure.row(f"{name}, 1 device beside {two}, {K} clients", one, "s a round")
        yield measure.row(f"{name}, {two}, {2 * K} clients", both, "s a round")
        efficiency = [a / b for a, b in zip(one, both, strict=True)]
        yield measure.row(f"{name}, 1 device / {two}", efficiency, note=f"{times[f'{name} sent']}")


def clients(arguments: argparse.Namespace) -> int:
    """Returns the number of clients that one device trains per round."""
    return 2 if arguments.quick else 25


def turns(arguments: argparse.Namespace) -> dict:
    """Returns the seconds per round on the first device of this process and on all devices, interleaved.

    The result is a dict. "fedavg 2" has the times of FedAvg on two devices, one per turn. "fedavg sent" has the
    bytes that the devices exchange, as text.
    """
    K = clients(arguments)
    found: dict = {}
    for name in ("fedavg", "scaffold"):
        sims = {}
        for devices in (jax.local_devices()[:1], jax.devices()[:2]):
            D = len(devices)
            workload = Workload("lenet5", equal_sizes(4 * K * D, 100), K * D)
            workload = tiny(workload)._replace(cohort=D) if arguments.quick else workload
            cut = {"shard_data": D > 1, "bank": "sharded" if D > 1 else "device", "mesh": fd.clients_mesh(devices)}
            sims[D] = measure.simulation(workload, algorithm=fd.algorithms.ALGORITHMS[name](), lanes=1, **cut)
            found[f"{name} {D}"] = []
        sent = sims[2].device_traffic()
        found[f"{name} sent"] = ", ".join(f"{what} {n / 1e6:.2g} MB" for what, n in sent.items())
        for turn in range(arguments.turns):
            for D, sim in sims.items():
                if D == 2 or fd.distributed.is_first():
                    times = measure.round_seconds(sim, 1, warm=0 if turn else 1, each=arguments.rounds)
                    found[f"{name} {D}"] += times
    return found


def two_processes(arguments: argparse.Namespace) -> dict:
    """Returns the same as `turns`, for two processes with one device each.

    The second process waits while the first one runs on one device.
    """
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        address = f"localhost:{listening.getsockname()[1]}"
    options = [f"--turns={arguments.turns}", f"--rounds={arguments.rounds}", *["--quick"] * arguments.quick]
    command = [sys.executable, __file__, *options, "--process", address]
    processes = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
    try:
        said, _ = processes[0].communicate(timeout=900)
        if any([process.wait(60) for process in processes]):
            sys.exit(f"a process failed:\n{said}")
    finally:
        for process in processes:
            process.kill()
    return json.loads(said.splitlines()[-1])


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds per turn")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.rounds = 1, 1
    if arguments.process:
        address, i = arguments.process
        fd.distributed.initialize(address, 2, int(i), cpu_devices=1)
        found = turns(arguments)
        if fd.distributed.is_first():
            print("\n" + json.dumps(found), flush=True)
        return
    fd.use_cpu_devices(2)
    if len(jax.devices()) < 2:
        print("skipped: weak scaling needs two devices")
        return
    measure.save("weak_scaling", rows(arguments), arguments)


if __name__ == "__main__":
    main()
