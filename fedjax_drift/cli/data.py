"""Lists or downloads data sets, or plots the clients of a data set.

Without NAME: lists the data sets, shows which of them are on this machine,
and says how to get the others. With NAME: partitions this data set, prints
the sizes of the clients, and plots their sizes and label mixes to
federation.png. With download NAME: downloads data sets into --data-dir.

examples:
  fedjax-drift data
  fedjax-drift data download cifar10
  fedjax-drift data mnist --partition dirichlet:0.3 --clients 100
  fedjax-drift data synthetic:variant=fedprox --output runs/look
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import fedjax_drift as fd
from fedjax_drift.cli.flags import DOWNLOAD, add_data
from fedjax_drift.cli.output import add_output, output_folder
from fedjax_drift.cli.parsed_run import load_data, partition_text, summary
from fedjax_drift.cli.render import aligned, listing
from fedjax_drift.cli.values import Chosen
from fedjax_drift.errors import ConfigurationError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [[download] NAME[:key=value,...]] [options]"
    add_data(parser, required=False)
    add_output(parser, progress=False)


def start(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    """Reads the data. Returns a function that plots them, or that lists or downloads data sets."""
    word, *more = args.dataset or [None]
    if word is None:
        text = listing(args.data_dir)
        return lambda: print(text) or 0
    if word == DOWNLOAD and more and DOWNLOAD not in more:
        return lambda: _download(more, args.data_dir)
    if word == DOWNLOAD or more:
        got = " ".join(each if each == DOWNLOAD else each.text for each in (word, *more))
        raise ConfigurationError(
            f"the command data must have NAME, or download and one or more names, got {got!r}: fedjax-drift data --help"
        )
    args.dataset = word
    output, data = output_folder(args, "data", word.name), load_data(args)
    return lambda: _draw(data, partition_text(args), output)


def _download(names: Sequence[Chosen], data_dir: str | None) -> int:
    """Downloads data sets, and prints where they are."""
    for name, options in ((spec.name, spec.options) for spec in names):
        path = str(fd.datasets.download(name, data_dir, **options))
        first = fd.datasets.locate(name, data_dir, **options)
        print(f"{name}: {path}" + (f" ({first} is read in place of it)" if first != path else ""))
    return 0


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
