"""Tests for every algorithm whether the result depends on the number of processes and devices.

    python -m experiments.agreement [--only fedavg scaffold]

Each algorithm runs for 20 rounds in four layouts (processes x devices per process): 1 x 1, 1 x 4, 2 x 2 and 4 x 1. The
devices are CPU devices, and the processes communicate through Gloo. With several devices, the examples
(``shard_data=True``) and the client states (``bank="sharded"``) are sharded over the devices. The clients have
different numbers of examples. The model is a linear classifier with cosine logits, because every algorithm can train
it.

The server variables and the client states after the last round are compared with those of the layout 1 x 1. The
difference of two arrays a and b is max(abs(a - b)) / max(abs(b)), where b is the array of 1 x 1. The largest difference
over all arrays is reported.

Each layout runs twice, each time in new processes. Both runs must give the same bits. The second run loads the programs
that the first run has compiled.

The script writes results/agreement.json and prints a table. Its exit code is 1 if a difference is 1e-5 or more, or if a
repeated run gives other bits.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS

LAYOUTS = ((1, 1), (1, 4), (2, 2), (4, 1))  # processes, devices per process
ROUNDS, WITHIN = 20, 1e-5
Ends = dict[str, dict[str, list[np.ndarray]]]  # algorithm -> "server", "clients" -> arrays


def simulate(name: str, devices: int) -> fd.Simulation:
    """Returns a simulation of the algorithm. Every hyper-parameter that has no default is 0.1."""
    rng = np.random.default_rng(0)
    sizes = [3, 10, 7, 25, 1, 16, 12, 30, 5, 8] * 2
    rows = [(rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 4, n)) for n in sizes]
    data = fd.FederatedData.from_clients(rows, test=rows[7])
    required = {p.name: 0.1 for p in inspect.signature(ALGORITHMS[name]).parameters.values() if p.default is p.empty}
    of_shapes = {"unlabelled": rows[0][0], "classes": 4, "features": 6}
    required |= {name: value for name, value in of_shapes.items() if name in required}
    return fd.Simulation(
        fd.models.linear((6,), 4, cosine=True),
        data,
        ALGORITHMS[name](**required),
        local=fd.LocalTraining(epochs=2, batch_size=5, lr=0.05),
        cohort_size=9,
        shard_data=devices > 1,
        bank="sharded" if devices > 1 else "device",
    )


def end(name: str, devices: int) -> dict[str, list[np.ndarray]]:
    """Returns the arrays of the server variables and of the client states after the last round."""
    sim = simulate(name, devices)
    state, _ = sim.run(sim.init(jax.random.key(0)), ROUNDS, 0, progress=False)
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(sim.mesh, PartitionSpec()))
    server, clients = ([np.asarray(a) for a in jax.tree.leaves(whole(tree))] for tree in (state.server, state.clients))
    return {"server": server, "clients": [a[: sim.data.num_clients] for a in clients]}


def one_process(names: list[str], address: str, P: int, i: int, D: int, file: Path) -> None:
    """Runs process i of P. The first process writes the results to the file."""
    if P > 1:
        fd.distributed.initialize(address, P, i, cpu_devices=D)
    else:
        fd.use_cpu_devices(D)
    ends = {name: end(name, P * D) for name in names}
    if fd.distributed.is_first():
        arrays = {f"{name}/{part}/{k}": a for name, e in ends.items() for part in e for k, a in enumerate(e[part])}
        np.savez(file, **arrays)


def run(names: list[str], P: int, D: int, programs: str) -> Ends:
    """Runs all algorithms in one layout, and returns their arrays after the last round.

    programs: the folder of the compilation cache.
    """
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        address = f"localhost:{listening.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ends.npz"
        command = [sys.executable, __file__, "--only", *names, "--process", address, str(P)]
        processes = [subprocess.Popen([*command, str(i), str(D), str(file), programs]) for i in range(P)]
        try:
            if any([process.wait(1800) for process in processes]):
                sys.exit(f"a process of the layout {P} x {D} failed")
        finally:
            for process in processes:
                process.kill()
        ends: Ends = {name: {"server": [], "clients": []} for name in names}
        with np.load(file) as arrays:
            for key in arrays:
                name, part, _ = key.split("/")
                ends[name][part].append(arrays[key])
    return ends


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Returns the largest value of max(abs(x - y)) / max(abs(y)) over all pairs of arrays (x, y)."""
    pairs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in zip(a, b, strict=True)]
    return max((float(np.abs(x - y).max() / (np.abs(y).max() or 1)) for x, y in pairs if y.size), default=0.0)


def same_bits(a: Ends, b: Ends, name: str) -> bool:
    """Whether two runs of the algorithm have the same bits."""
    parts = ((a[name][part], b[name][part]) for part in a[name])
    return all(x.tobytes() == y.tobytes() for one, other in parts for x, y in zip(one, other, strict=True))


def compare(names: list[str]) -> dict[str, dict[str, dict]]:
    """Runs every layout twice. Returns the results as a dict: algorithm -> layout -> result.

    A result has the differences from the first layout, and whether both runs have the same bits.
    """
    found: dict[str, dict[str, dict]] = {name: {} for name in names}
    first: Ends = {}
    for P, D in LAYOUTS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as programs:
            ends, again = run(names, P, D, programs), run(names, P, D, programs)
        first = first or ends
        for name in names:
            found[name][f"{P} x {D}"] = {
                part: difference(ends[name][part], first[name][part]) for part in ("server", "clients")
            } | {"rerun equal": same_bits(ends, again, name)}
        print(f"{P} x {D}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[str, dict]]) -> str:
    """Returns a Markdown table of the differences from the layout 1 x 1.

    A cell has the difference of the server variables or that of the client states, whichever is larger.
    Cells whose second run gave other bits are marked.
    """
    layouts = [f"{P} x {D}" for P, D in LAYOUTS]
    lines = [f"| algorithm | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
    for name, of in found.items():
        cells = [
            f"{max(of[at]['server'], of[at]['clients']):.1e}" + ("" if of[at]["rerun equal"] else " (rerun differs)")
            for at in layouts
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(ALGORITHMS)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, default=names, help="algorithms to test (default: all)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "agreement.json", help="path of the results"
    )
    parser.add_argument("--process", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        address, P, i, D, file, programs = arguments.process
        fd.use_compilation_cache(programs)
        one_process(arguments.only, address, int(P), int(i), int(D), Path(file))
        return
    found = compare(arguments.only)
    contents = {
        "command": "python -m experiments.agreement",
        "rounds": ROUNDS,
        "seed": 0,
        "versions": f"jax {jax.__version__}, Python {platform.python_version()}",
        "layouts": "processes x devices of each, CPU",
        "found": found,
    }
    arguments.output.write_text(json.dumps(contents, indent=1) + "\n")
    print(table(found))
    every = [of for layouts in found.values() for of in layouts.values()]
    if not all(of["rerun equal"] and max(of["server"], of["clients"]) < WITHIN for of in every):
        sys.exit(1)


if __name__ == "__main__":
    main()
