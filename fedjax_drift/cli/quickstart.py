"""Shows client drift and its correction, in under a minute.

Each client has images of about two of the ten digits. The clients train
logistic regression with fedavg, scaffold and feddc:alpha=0.1. The digits are
generated, nothing is downloaded. The command prints a table. It writes the
files of fedjax-drift run and drift_story.png, a plot of the results.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.cli import run
from fedjax_drift.cli.flags import Parser, add
from fedjax_drift.cli.output import add_output
from fedjax_drift.cli.render import reached, wrap, wrapped_command
from fedjax_drift.cli.values import COUNT, SEED

# The model is logistic regression, as in the experiments of SCAFFOLD (section 7). The result is the same with all
# learning rates that were tried.
ALGORITHMS = ("fedavg", "scaffold", "feddc:alpha=0.1")
TARGET = 0.75
LAST = 10  # the table shows means over this number of rounds, because FedAvg's accuracy varies with the cohort
INTRODUCTION = """\
{clients:,} clients have images of generated digits, about two of the ten digits each. In each of {rounds:,} rounds,
{cohort:,} clients train a copy of the global model (logistic regression) on their own digits, and the server averages
the copies. Local training pulls each copy towards the digits of its client. This is client drift. FedAvg only averages.
SCAFFOLD and FedDC also correct the drift. This takes less than a minute on two idle cores. The same command in full:
"""
READING = """\
How to read drift_story.png: the clients have different labels (top left), so their models drift apart in local training
(top right). With a correction of this drift, the global model is more accurate (bottom left) and needs fewer rounds
(bottom right)."""
NEXT = """\
Next steps: change the command above, for example with --partition iid (similar clients), --algorithm fedeve,
--model mnist_2nn or --seeds 3. All options: fedjax-drift run --help"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    add(parser, "--clients", "number of clients", COUNT, 50)
    add(parser, "--cohort", "clients per round (default: 10, or all if there are fewer)", COUNT)
    add(parser, "--rounds", "number of rounds of each algorithm", COUNT, 60)
    add(parser, "--seed", "random seed of the digits, the partition, the cohorts and the initial model", SEED, 0)
    add_output(parser)


def start(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    """Prints the introduction, and checks the options. Returns a function that runs the algorithms."""
    cohort = min(10, args.clients) if args.cohort is None else args.cohort
    if cohort > args.clients:
        checks.refuse(f"--cohort must be in 1..{args.clients} (all clients)", cohort, "use a larger --clients")
    # 0.03 is FedAvg's best learning rate among 0.01, 0.03, 0.1 and 0.3. alpha is that of the FedDC paper for digits.
    words = [
        "run", f"--dataset=glyphs:num_writers={4 * args.clients},num_classes=10", "--partition=shards:2",
        f"--clients={args.clients}", "--model=linear", f"--cohort={cohort}", f"--rounds={args.rounds}",
        "--epochs=5", "--batch-size=20", "--lr=0.03", f"--seed={args.seed}", f"--target={TARGET}",
        "--measure=gradients", f"--measure-every={min(4, args.rounds)}",
        *[f"--algorithm={name}" for name in ALGORITHMS],
    ]  # fmt: skip
    words += [f"--output={args.output}"] if args.output else []
    words += ["--force"] * args.force + ["--no-progress"] * args.no_progress
    introduction = INTRODUCTION.format(clients=args.clients, rounds=args.rounds, cohort=cohort)
    for text in (textwrap.fill(introduction, 80), wrapped_command(["fedjax-drift", *words])):
        print(text, end="\n\n", flush=True)
    parser = Parser(prog="fedjax-drift run")
    run.add_flags(parser)
    simulate = run.start(parser.parse_args(words[1:]), words, lambda records, target, by: table(records, target))

    def work() -> int:
        code = simulate()
        if code == 0:
            for text in (READING, NEXT):
                print("", *wrap(text, "", ""), sep="\n")
        return code

    return work


def table(records: Mapping[str, Sequence[Mapping[str, Any]]], target: float) -> str:
    """Returns one line per algorithm: the round in which it first reaches the target, and means over the last
    rounds."""
    width = max(map(len, ["algorithm", *records]))
    lines = [f"{'algorithm':{width}}  rounds to {100 * target:g} %  accuracy  client drift"]
    met = reached(records, target)
    for name, history in records.items():
        accuracy, drift = (_mean(history, key) for key in ("accuracy", "client_drift"))
        lines.append(f"{name:{width}}  {met[name]:>14}  {100 * accuracy:6.1f} %  {drift:12.2g}")
    shown = min(LAST, max(map(len, records.values())))
    return "\n".join([*lines, f"Accuracy and client drift (FedEve, equation 4) are means of the last {shown} rounds."])


def _mean(history: Sequence[Mapping[str, Any]], key: str) -> float:
    """Returns the mean of ``key`` over the last rounds that have it, or NaN if there are none.

    If a value is a list, its last entry is used, which belongs to the last local epoch.
    """
    values = [np.ravel(record[key])[-1] for record in history[-LAST:] if key in record]
    return float(np.mean(values)) if values else float("nan")
