"""Compiles rounds for TPU slices and GPUs that are not here, and lists what each device needs.

    pip install "jax[tpu]" jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python experiments/benchmarks/slices.py [--networks emnist_cnn resnet18] [--algorithms fedavg scaffold fedeve]
                                            [--topologies v5e:2x2 ... h100:8] [--shard-data]

A round trains 3,400 clients with 195 examples each, batch size 20. Client states are kept on the devices, sharded if
they need more than half of a device's memory. With --shard-data, the examples are sharded as well. Nothing is executed.
"inf" means that the round does not fit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import jax
import measure
from workloads import NETWORKS

import fedjax_drift as fd

TOPOLOGIES = ("v5e:2x2", "v5e:4x4", "v5e:8x8", "v5e:16x16", "v5p:4x4x4", "v6e:16x16", "h100:8")
GIB = 2**30


def rows(network: str, arguments: argparse.Namespace) -> Iterator[measure.Row]:
    clients, each = (40, 20) if arguments.quick else (3400, 195)
    model = measure.model(network)
    image = NETWORKS[network].image if network in NETWORKS else (32, 32, 3)
    data = fd.FederatedData.of_shapes(clients, each, image)
    for name in arguments.algorithms:
        algorithm = getattr(fd.algorithms, name)()
        for topology in arguments.topologies:
            options = {"cohort_size": clients, "shard_data": True if arguments.shard_data else "auto"}
            sharded = ", examples sharded" if arguments.shard_data else ""
            what, unit = f"{name}, {network}, {topology}{sharded}", "GiB a device"
            try:
                plan = fd.plan(topology, model, data, algorithm, **options)
            except fd.errors.ConfigurationError as error:
                yield measure.row(what, math.inf, unit, note=str(error))
                continue
            collectives = ", ".join(f"{n} {kind}" for kind, n in plan.collectives.items())
            cycles = f"; {plan.cycles:,} cycles a step" if plan.cycles else ""
            note = (
                f"{plan.lanes} lanes, about {plan.most_lanes} fit; arguments {plan.arguments / GIB:.2f}, temporary "
                f"{plan.temporary / GIB:.2f} GiB; {collectives}; {plan.steps:,} local steps{cycles}; compiled in "
                f"{plan.compile_seconds:.0f} s"
            )
            yield measure.row(what, plan.total / GIB, unit, at_most=round(plan.memory / GIB, 1), note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--networks", nargs="+", default=["emnist_cnn"], metavar="NETWORK")
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "scaffold", "fedeve"], metavar="ALGORITHM")
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), metavar="TOPOLOGY")
    parser.add_argument("--shard-data", action="store_true", help="shard the examples over the devices")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.networks, arguments.algorithms = ["mnist_2nn"], ["fedavg"]
        arguments.topologies = arguments.topologies[:1]
    jax.config.update("jax_platforms", "cpu")
    try:
        for topology in arguments.topologies:
            fd.described_mesh(topology)
    except (fd.errors.ConfigurationError, fd.errors.MissingPackageError) as error:
        sys.exit(str(error))
    name = "slices" + "_sharded" * arguments.shard_data
    where = "compilers", f"devices that are only described{measure.libtpu()}"
    for network in arguments.networks:
        measure.save(f"{name}_{network}", rows(network, arguments), arguments, where)


if __name__ == "__main__":
    main()
