"""The command line: `python -m experiments.leaderboard run` and `report`. Start it in the project's root folder."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import fedjax_drift as fd
from experiments.leaderboard import entrants, report, runner

RESULTS = Path(__file__).parents[1] / "results" / "leaderboard"
EPILOG = """\
examples:
  python -m experiments.leaderboard run
  python -m experiments.leaderboard run --federations MNIST --entrants FedAvg,SCAFFOLD
  python -m experiments.leaderboard report

run skips what has been run. It works through one federation after another, at
low priority. Ctrl-C loses at most the runs of one algorithm on one partition,
and the same command continues.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 1 without the data, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m experiments.leaderboard", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("run", "tune and run the algorithms"), ("report", "write the page and the pictures")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--output", type=Path, default=RESULTS, help=f"folder of the results ({RESULTS})")
    run = commands.choices["run"]
    run.add_argument(
        "--federations", metavar="TEXT[;TEXT...]", help="only those whose names begin with one of the texts"
    )
    run.add_argument("--entrants", metavar="NAME[,NAME...]", help="only these algorithms")
    run.add_argument("--budget", type=float, metavar="MINUTES", help="start nothing new after this time")
    run.add_argument("--devices", type=int, metavar="N", help="number of CPU devices (default: one per core)")
    run.add_argument("--no-progress", action="store_true", help="show no progress bars")
    args = parser.parse_args(argv)
    if args.command == "report":
        report.write(args.output)
        return 0
    fd.use_cpu_devices(args.devices)
    os.nice(19)
    texts, names = (args.federations or "").split(";"), (args.entrants or "").split(",")
    if unknown := [name for name in names if name and name not in entrants.ENTRANTS]:
        parser.error(f"--entrants must be names of {', '.join(entrants.ENTRANTS)}, got {unknown[0]!r}")
    started = time.monotonic()
    try:
        for federation in [name for name in entrants.FEDERATIONS if name.startswith(tuple(texts))]:
            for name in [name for name in entrants.ENTRANTS if names == [""] or name in names]:
                if args.budget is not None and time.monotonic() - started > 60 * args.budget:
                    return 0
                result = runner.read(runner.file_of(args.output, federation, name))
                if not runner.is_complete(result):
                    runner.run(federation, name, args.output, False if args.no_progress else None, say)
    except FileNotFoundError as error:
        print(f"not run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    return 0


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
