"""Measures which share of the machine's limits the training of each network reaches.

    python experiments/benchmarks/roofline.py [--models lenet5 mnist_2nn ...] [--turns 3]

The necessary operations are the forward pass, the weight gradients, and the input gradients of all layers except the
first. The necessary bytes of a step are those of the parameters, the pixels, and the outputs of each layer (see
`workloads.step_bytes`).

On a CPU, the limit is the rate of XLA's 4000 x 4000 float32 matrix product on all cores. An accelerator has two limits:
the rate of a matrix product in JAX's default precision for float32, and the rate of one pass over memory. The share is
computed with the limit that allows the lower speed.

The rate of the matrix product and the rounds are measured interleaved. Each turn gives one share.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import jax
import measure
from workloads import RESNET, Workload, equal_sizes, operations, parameters, step_bytes, tiny

import fedjax_drift as fd

# With these numbers of clients, a round takes a few tenths of a second on two cores. The numbers of examples, the batch
# sizes and the numbers of epochs are those of the papers.
WORKLOADS = {
    "lenet5": Workload("lenet5", equal_sizes(50, 100), 50, 20),
    "mnist_2nn": Workload("mnist_2nn", equal_sizes(100, 600), 15, 50, 5),
    "cifar_cnn": Workload("cifar_cnn", equal_sizes(20, 500), 4, 50),
    "mnist_cnn": Workload("mnist_cnn", equal_sizes(20, 600), 4, 10),
    "emnist_cnn": Workload("emnist_cnn", equal_sizes(20, 200), 8, 20),
    RESNET: Workload(RESNET, equal_sizes(4, 50), 2, 50),
}
WANTED = {"lenet5": 40, "mnist_2nn": 90, "cifar_cnn": 55, "mnist_cnn": 55}  # targets, percent of the product rate


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    accelerator = jax.default_backend() != "cpu"
    n, size = (64, 2**16) if arguments.quick else (8192, 2**32) if accelerator else (4000, 2**28)
    yield measure.row("float32 product", [measure.matmul_rate(n) / 1e9 for _ in range(arguments.turns)], "GFLOP/s")
    if accelerator:
        full, half = measure.matmul_rate(n, precision="highest"), measure.matmul_rate(n, "bfloat16")
        yield measure.row('float32 product, precision "highest"', full / 1e9, "GFLOP/s")
        yield measure.row("bfloat16 product", half / 1e9, "GFLOP/s")
    bandwidth = max(measure.copy_rate(size) for _ in range(3))
    yield measure.row("one pass over memory, read and written", bandwidth / 1e9, "GB/s")
    for name in arguments.models:
        yield share(name, arguments, bandwidth if accelerator else None, n)


def share(name: str, arguments: argparse.Namespace, bandwidth: float | None, n: int) -> measure.Row:
    """Returns the speed of the rounds, in percent of the limit.

    bandwidth: bytes per second of one pass over memory. If it is None, the only limit is the matrix product.
    """
    workload = tiny(WORKLOADS[name]) if arguments.quick else WORKLOADS[name]
    network, batch, cohort = workload.network, workload.batch, workload.cohort
    images = cohort * int(workload.sizes[0]) * workload.epochs
    needed, moved = images * operations(network), images / batch * step_bytes(network, batch)
    sim = measure.simulation(workload)
    shares, times, rates = [], [], []
    for _ in range(arguments.turns):
        rate = measure.matmul_rate(n)
        took = statistics.median(measure.round_seconds(sim, 3, warm=1))
        rate = max(rate, measure.matmul_rate(n))  # the faster of two measurements, because one may be disturbed
        least = max(needed / rate, moved / bandwidth if bandwidth else 0)
        shares, times, rates = [*shares, 100 * least / took], [*times, took], [*rates, rate]
    took, rate = statistics.median(times), statistics.median(rates)
    binds = "memory" if bandwidth and moved / bandwidth > needed / rate else "arithmetic"
    note = (
        f"{binds} binds; {operations(network) / 1e6:.2f} MFLOP an image, {needed / took / 1e9:.1f} of {rate / 1e9:.0f} "
        f"GFLOP/s; {step_bytes(network, batch) / 1e6:.2f} MB a step, {moved / took / 1e9:.1f} GB/s; {took:.4f} s a "
        f"round of {cohort} clients, batch {batch}, {parameters(network):,} parameters"
    )
    wanted = None if bandwidth else WANTED.get(name)
    return measure.row(f"{name}, of the ceiling that binds", shares, "%", at_least=wanted, note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=[m for m in WORKLOADS if m != RESNET])
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.turns = ["lenet5"], 1
    fd.use_cpu_devices()
    measure.save("roofline", rows(arguments), arguments)


if __name__ == "__main__":
    main()
