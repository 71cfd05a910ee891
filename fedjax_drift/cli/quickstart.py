"""`fedjax-drift quickstart`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence

from fedjax_drift.cli.flags import Parser, add, count, seed
from fedjax_drift.cli.output import add_output
from fedjax_drift.cli.render import wrapped_command
from fedjax_drift.cli.run import fill_run
from fedjax_drift.cli.run import run as run_command
from fedjax_drift.errors import ConfigurationError

QUICKSTART = ("fedavg", "fedprox:mu=0.1", "fedavgm:beta=0.7")


def fill_quickstart(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = textwrap.fill(
        "Simulates writers of 62 characters: in every round, some of them train a LeNet-5 on their own images. "
        f"Compares {', '.join(QUICKSTART)}. The first time the images are drawn, which takes another minute. "
        "Prints a table and writes config.json, rounds.jsonl, rounds.csv and curves.png.",
        78,
    )
    add(parser, "--writers", "N", "clients of the federation", count, 3400)
    add(parser, "--cohort", "K", "writers a round (default: 100, or all if there are fewer)", count)
    add(parser, "--rounds", "N", "rounds of each algorithm", count, 15)
    add(parser, "--seed", "N", "of the images, the cohorts and the initial model", seed, 0)
    add_output(parser)
    parser.set_defaults(command=quickstart)


def quickstart(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    cohort = min(100, args.writers) if args.cohort is None else args.cohort
    if cohort > args.writers:
        raise ConfigurationError(f"--cohort must be in 1..{args.writers} (all writers), got {cohort}: raise --writers")
    # Local momentum takes LeNet-5 off its first plateau within a few rounds.
    run = [
        "run", f"--dataset=glyphs:num_writers={args.writers}", "--model=lenet5", f"--cohort={cohort}",
        f"--rounds={args.rounds}", "--batch-size=10", "--lr=0.05", "--momentum=0.9", "--eval-every=3",
        f"--seed={args.seed}", *[f"--algorithm={name}" for name in QUICKSTART],
    ]  # fmt: skip
    run += [f"--output={args.output}"] if args.output else []
    run += ["--force"] * args.force + ["--no-progress"] * args.no_progress
    intro = (
        f"Compares {len(QUICKSTART)} algorithms, {args.rounds} rounds of {cohort} of {args.writers:,} writers each. "
        "The default sizes take one to two minutes on two idle cores, and one more the first time, to draw the images. "
        "It is the same as this command:"
    )
    print(textwrap.fill(intro, 80), wrapped_command(["fedjax-drift", *run]), sep="\n\n", end="\n\n", flush=True)
    parser = Parser(prog="fedjax-drift run")
    fill_run(parser)
    return run_command(parser.parse_args(run[1:]), run)
