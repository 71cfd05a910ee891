"""Says what a run needs on TPUs or GPUs that are not here.

Compiles a round for TPU slices or GPUs that are not here, and prints the
memory that it needs on each device, the collective operations, and the bytes
that the devices exchange. Nothing is executed. Takes the options of
fedjax-drift run. Needs a compiler: pip install "jax[tpu]" for TPUs; for GPUs,
pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12, in the
version of jax.

examples:
  fedjax-drift plan --topology v5e:4x4 --dataset femnist --clients 3400 \\
      --rows-per-client 195 --cohort 3400 --algorithm scaffold --model lenet5
  fedjax-drift plan --topology v5e:2x2,v5e:4x4,h100:8 --dataset cifar10 \\
      --clients 100 --rows-per-client 500 --algorithm feddc --model resnet18
  fedjax-drift plan --topology v5e:4x4 --dataset dialogue:length=512 \\
      --clients 1000 --rows-per-client 64 --cohort 64 --algorithm scaffold \\
      --model decoder:vocabulary=32000,length=512,width=2048,depth=18,heads=16,remat=true \\
      --train lora:rank=8 --bfloat16 --batch-size 4 --devices-per-client 4
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.cli.flags import PARTITION, add, add_run
from fedjax_drift.cli.parsed_run import assemble, load_data
from fedjax_drift.cli.values import COUNT
from fedjax_drift.data.catalogue import RECORDS
from fedjax_drift.simulation.plan import TooLargeError

SHAPES = {name: record.shape for name, record in RECORDS.items() if record.shape}  # of images


# fmt: off
def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --topology DEVICES[,DEVICES...] --dataset NAME --algorithm NAME [options]"
    group = add_run(parser)
    add(group, "--topology", "TPU slices, such as v5e:4x4 (16 chips) or v6e:16x16, and GPUs: h100 is one, h100:8 a "
        "host with 8, h100:2x8 two such hosts; a100, a100-40gb, h200 and b200 likewise", metavar="DEVICES[,DEVICES...]")
    add(group, "--rows-per-client", "number of training examples of each client. The data set is then not read; only "
        "the shape of its images or texts is used", COUNT)
# fmt: on


def start(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    """Checks the options and describes the devices. Returns a function that prints the plans."""
    if args.topology is None:
        checks.refuse("fedjax-drift plan needs --topology", "none", "add --topology v5e:4x4, for example")
    jax.config.update("jax_platforms", "cpu")  # a TPU of this machine is not needed, and stays free
    jax.config.update("jax_enable_compilation_cache", False)  # JAX cannot load programs for devices that are not here
    meshes = {name: fd.described_mesh(name) for name in args.topology.split(",")}
    data = load_data(args) if args.rows_per_client is None else _shapes(args)
    simulations = {
        (name, topology): sim
        for topology, mesh in meshes.items()
        for name, sim in assemble(args, data, mesh=mesh).simulations.items()
    }
    return lambda: _print_plans(simulations)


def _shapes(args: argparse.Namespace) -> fd.FederatedData:
    """Returns data of the right shape. Its partition has no effect."""
    dataset, clients = args.dataset, args.clients or 100
    if dataset.name not in SHAPES and dataset.name != "dialogue":
        checks.refuse(
            f"--rows-per-client needs a data set of images or text ({', '.join(SHAPES)}, dialogue)",
            dataset.name,
            "leave it out, so that the data are read",
        )
    if args.validation is not None:
        checks.refuse("--validation has no effect with --rows-per-client", args.validation, "leave it out")
    args.partition = args.partition or PARTITION("iid")
    if dataset.name != "dialogue":
        return fd.FederatedData.of_shapes(clients, args.rows_per_client, SHAPES[dataset.name], test_rows=10_000)
    tokens = (dataset.options.get("length", dataset.defaults["length"]),)
    return fd.FederatedData.of_shapes(clients, args.rows_per_client, tokens, np.int32, 1000, label_shape=tokens)


def _print_plans(simulations: dict[tuple[str, str], fd.Simulation]) -> int:
    """Prints one plan after another, and at the end one line for each if there are several."""
    lines = []
    for (name, topology), sim in simulations.items():
        lanes, cycles, needed, memory, fits = "-", "-", "-", "-", "no"
        try:
            plan = sim.plan()
        except TooLargeError as error:  # other devices may have more memory
            text = textwrap.fill(str(error), 100)
        else:
            text, fits = str(plan), "yes" if plan.fits else "no"
            lanes, cycles = str(plan.lanes), f"{plan.cycles * plan.steps:.2e}" if plan.cycles else "-"
            needed, memory = f"{plan.total / 2**30:.2f}", f"{plan.memory / 2**30:.0f}"
        print(f"{name} on {topology}\n{textwrap.indent(text, '  ')}\n", flush=True)
        lines.append(f"{topology:12}{name:24}{lanes:>5}{cycles:>16}{needed:>12}{memory:>5}  {fits}")
    if len(lines) > 1:
        print(
            f"{'devices':12}{'algorithm':24}lanes{'cycles a round':>16}{'GiB needed':>12}   of  fits", *lines, sep="\n"
        )
    return 0
