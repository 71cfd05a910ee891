"""Measures LeNet-5 on data with the shape of FEMNIST: seconds per round, and the share of the matrix-multiply rate.

There are 500 clients with 100 images each (28x28x1, 62 classes), and 50 clients are selected per round. A client trains
for one epoch with batch size 20 and SGD with learning rate 0.05. FedAvg weights the clients by their numbers of
examples. The model has 66,126 parameters.

    python experiments/benchmarks/lenet_femnist.py [--rounds 30] [--devices 2] [--peer "COMMAND"] [--peer ...]
    python experiments/benchmarks/lenet_femnist.py --network resnet18 --rounds 5 --peer "COMMAND --network resnet18"

The second command does the same with ResNet-18, 32x32x3 images, and 4 of 8 clients with 40 images each.

Other simulators can be compared on this workload. peer_pfl.py, peer_flower.py and peer_fedjax.py run it in
pfl-research, Flower and FedJAX. Their docstrings say how to install these packages. With --peer, all simulators run one
after another, in several turns. Each turn gives the ratio of our time to theirs, and the median of these ratios is
printed. COMMAND must print ``NAME ...: median=SECONDS``, with the seconds per round.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
from collections.abc import Iterator

import jax
import measure
from workloads import PEERS, operations, tiny

import fedjax_drift as fd

LR = 0.05
WANTED = {"pfl": 0.40, "FedJAX": 0.21, "Flower": 0.11}  # the targets for LeNet-5: our time over theirs, on two cores


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    network, workload = arguments.network, PEERS[arguments.network]
    workload = tiny(workload, network if network == "lenet5" else "mnist_2nn") if arguments.quick else workload
    sim = measure.simulation(workload, local=fd.LocalTraining(batch_size=workload.batch, lr=LR), donate=False)
    times, rate = measure.round_seconds(sim, arguments.rounds), measure.matmul_rate(64 if arguments.quick else 4000)
    median, images = statistics.median(times), workload.cohort * int(workload.sizes[0])
    achieved = images * operations(workload.network) / median
    print(
        f"fedjax_drift {fd.__version__}, jax {jax.__version__}, {len(jax.local_devices())} devices: "
        f"median={median:.4f}s a round (min {min(times):.4f}, max {max(times):.4f})"
    )
    note = (
        f"{images / median:,.0f} images/s, {achieved / 1e9:.1f} of {rate / 1e9:.0f} GFLOP/s = {achieved / rate:.1%} "
        "of the matrix-multiply rate"
    )
    what = f"{network}, {workload.cohort} of {len(workload.sizes)} clients x {workload.sizes[0]} images"
    yield measure.row(what, times, "s a round", note=note)


def compare(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    """Runs our simulator and the others interleaved. Yields their times, and the ratios of our time to theirs."""
    quick, devices = ["--quick"] * arguments.quick, ["--devices", str(arguments.devices)] * bool(arguments.devices)
    ours = [sys.executable, __file__, "--rounds", str(arguments.rounds), "--no-results", *quick, *devices]
    ours += ["--network", arguments.network]
    turns: list[list[float]] = []
    for _ in range(arguments.turns):
        lines = [timed_line(command) for command in [ours, *map(shlex.split, arguments.peer)]]
        print("\n".join(lines), flush=True)
        names = [line.split(": median=")[0] for line in lines]
        turns.append([float(re.findall(r"median=([\d.]+)", line)[-1]) for line in lines])
    columns = list(zip(*turns, strict=True))
    yield measure.row("ours", columns[0], "s a round")
    for name, times in zip(names[1:], columns[1:], strict=True):
        yield measure.row(name, times, "s a round")
        wanted = WANTED.get(name.split()[0]) if arguments.network == "lenet5" else None
        ratios = [own / theirs for own, theirs in zip(columns[0], times, strict=True)]
        yield measure.row(f"ours / {name.split()[0]}", ratios, at_most=wanted)


def timed_line(command: list[str]) -> str:
    return next(line for line in reversed(measure.run(command).splitlines()) if ": median=" in line)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--network", choices=list(PEERS), default="lenet5")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--devices", type=int, default=None, help="number of CPU devices (default: one per core)")
    parser.add_argument(
        "--peer", action="append", help="command of another simulator, which runs interleaved with ours"
    )
    parser.add_argument("--turns", type=int, default=3, help="with --peer: number of runs of each simulator")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.turns = 2, 1
    fd.use_cpu_devices(arguments.devices)
    name = "lenet_femnist" if arguments.network == "lenet5" else arguments.network
    measure.save(
        f"{name}_peers" if arguments.peer else name, (compare if arguments.peer else rows)(arguments), arguments
    )


if __name__ == "__main__":
    main()
