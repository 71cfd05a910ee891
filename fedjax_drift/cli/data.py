"""Lists the data sets, or plots the clients of a data set.

Without NAME: lists the data sets, shows which of them are on this machine,
and says how to get the others. With NAME: partitions this data set, prints
the sizes of the clients, and plots their sizes and label mixes to
federation.png.

examples:
  fedjax-drift data
  fedjax-drift data mnist --partition dirichlet:0.3 --clients 100
  fedjax-drift data synthetic:variant=fedprox --output runs/look
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import fedjax_drift as fd
from fedjax_drift.cli.flags import add_data
from fedjax_drift.cli.output import add_output, output_folder
from fedjax_drift.cli.parsed_run import load_data, partition_text, summary
from fedjax_drift.cli.render import aligned, listing


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [NAME[:key=value,...]] [options]"
    add_data(parser, required=False)
    add_output(parser, progress=False)


def start(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    """Reads the data. Returns a function that plots them, or that lists the data sets."""
    if args.dataset is None:
        text = listing(args.data_dir)
        return lambda: print(text) or 0
    output, data = output_folder(args, "data", args.dataset.name), load_data(args)
    return lambda: _draw(data, partition_text(args), output)


def _draw(data: fd.FederatedData, partition: str, output: Path) -> int:
    """Plots the clients, and prints their numbers."""
    output.mkdir(parents=True, exist_ok=True)
    fd.plots.federation(data, output / "federation.png")
    numbers = summary(data)
    sizes, labels = numbers["sizes"], numbers["labels_per_client"]
    print(aligned({
        "data": f"{data.name}: {numbers['row']} per example, {numbers['classes']} labels",
        "partition": partition,
        "clients": f"{data.num_clients:,}",
        "examples": f"{numbers['rows']:,} for training, {numbers['test_rows']:,} for testing",
        "examples per client": f"{sizes['min']:,} to {sizes['max']:,}, median {sizes['median']:,.0f}",
        "labels per client": f"{labels['min']} to {labels['max']}, mean {labels['mean']:.1f}",
        "plot": str(output / "federation.png"),
    }))  # fmt: skip
    return 0
