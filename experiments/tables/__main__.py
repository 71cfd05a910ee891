"""The command line: `python -m experiments.tables list`, `run`, `queue`, `report`. Start it in the project's root."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

import fedjax_drift as fd
from experiments import pages
from experiments.tables import claims, crew, papers, report, runner
from experiments.tables.papers import Cell, Table

OUTPUT = Path("runs/experiments")
EPILOG = """\
examples:
  python -m experiments.tables list
  python -m experiments.tables run feddc/table1 --rows mnist --seeds 3
  python -m experiments.tables run fedadc/figure1 --methods SlowMo,FedAvg --tune
  python -m experiments.tables queue --list --output experiments/results
  python -m experiments.tables queue --hours 3 --output experiments/results
  python -m experiments.tables report feddc/table1
  python -m experiments.tables report --all --results experiments/results

run skips finished runs. The results are in OUTPUT/<paper>/<table>/<setting>/,
one file per method with one line per seed. The same command resumes a run that
was stopped. After Ctrl-C no rounds are lost. If the process is killed, half a
minute of work is lost, and at most one round more.

queue runs what is missing, one process a core, at low priority. It starts with
what decides most claims an hour.

report writes RESULTS/<paper>/<table>.md (our numbers, the numbers of the paper,
and how each cell was run) and <table>.png (the curves). With --all it also
writes README.md, which lists all tables, and orderings.md, which says which of
the papers' orderings of methods hold in our results. Without --results it also
fills in the numbers of docs/papers.md and of other pages.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    The exit code is 0, or 130 after Ctrl-C, or 143 if SIGTERM stopped the queue. It is 1 if no cell of a table could be
    run, if a table has no results, if a job of the queue failed, or if another process runs the queue.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        tables = papers.read_tables(args.tables, args.names or papers.table_names(args.tables))
        cells = [papers.select(table, args.rows, args.methods) for table in tables]
    except ValueError as error:
        parser.error(str(error))
    if args.command == "list":
        print(report.listing(tables, [args.output, args.tables / "results"]))
        return 0
    if args.command == "queue":
        return _queue(args, tables)
    if args.command == "run":
        if not args.names:
            parser.error("run needs names of tables, got none: `list` shows them, and `queue` runs all")
        return _run(args, list(zip(tables, cells, strict=True)))
    if args.all == bool(args.names):
        parser.error("report needs names of tables or --all, got " + ("both" if args.all else "neither"))
    return _report(args, tables)


def _run(args: argparse.Namespace, tables: Sequence[tuple[Table, list[Cell]]]) -> int:
    if args.devices is not None:
        fd.use_cpu_devices(args.devices)
        jax.devices()  # starts JAX; the number of devices cannot change after that
    seeds = None if args.seeds is None else range(args.seeds)
    progress, say = False if args.no_progress else None, functools.partial(print, flush=True)
    try:
        for table, cells in tables:
            say(f"{table.name}: {table.title}")
            options = {"rounds": args.rounds, "tune": args.tune, "progress": progress, "say": say}
            if not runner.run_cells(table, cells, seeds, args.output, **options):
                return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again to resume")
        return 130
    command = shlex.join(["report", *args.names, f"--results={args.output}"])
    print(f"the results are in {args.output}; to see them: {report.COMMAND} {command}")
    return 0


def _queue(args: argparse.Namespace, tables: Sequence[Table]) -> int:
    only, say = [table.name for table in tables], functools.partial(print, flush=True)
    everything = papers.read_tables(args.tables, papers.table_names(args.tables))
    claimed = claims.read(args.tables, everything)
    if args.list:
        print(crew.listed(everything, args.output, claimed, lambda text: print(text, file=sys.stderr), only))
        return 0
    try:
        return crew.run(everything, args.output, claimed, args.hours, say, only)
    except runner.BusyError as error:
        print(error, file=sys.stderr)
        return 1


def _report(args: argparse.Namespace, tables: Sequence[Table]) -> int:
    committed = args.tables / "results"
    for table in tables:
        folders = [args.results] if args.results else [committed] if args.all else [args.output, committed]
        folder = report.folder_with_results(table, folders)
        if report.has_results(table, folder):
            print(f"{table.name}: {', '.join(map(str, report.write_page(table, folder)))}", flush=True)
        elif not args.all:
            print(f"{table.name} has no results in {folder}: {report.COMMAND} run {table.name}", file=sys.stderr)
            return 1
    if args.all:
        print(
            ", ".join(map(str, report.write_index(tables, args.results or committed, claims.read(args.tables, tables))))
        )
        if args.results is None and args.tables == papers.EXPERIMENTS:
            pages.main()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=report.COMMAND,
        description="Reproduces tables of papers, and writes our numbers next to the published ones.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(names=[], rows=[], methods=[], output=OUTPUT)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--tables", metavar="DIR", type=Path, default=papers.EXPERIMENTS, help="folder of the tables (%(default)s)"
    )
    commands = parser.add_subparsers(dest="command", title="commands", required=True)
    listing = commands.add_parser(
        "list", parents=[shared], help="list the tables, with the number of cells that have been run"
    )
    run = commands.add_parser("run", parents=[shared], help="run tables, or parts of them")
    waiting = commands.add_parser(
        "queue", parents=[shared], help="run what is missing, the most valuable cells first, on all cores",
        description="Runs what has no result, or fewer seeds than the rule asks for. It starts with what decides most "
        "claims an hour. Each core has a process, at the lowest priority. They save every half minute. The queue may "
        "be stopped or killed at any time, and the same command continues.",
    )  # fmt: skip
    pages = commands.add_parser("report", parents=[shared], help="write the pages about tables from their results")
    for command in (listing, run, waiting):
        command.add_argument(
            "--output", metavar="DIR", type=Path, default=OUTPUT, help="folder of the results (%(default)s)"
        )

    run.add_argument("names", nargs="*", metavar="NAME", help="<paper>/<table>, as shown by list")
    waiting.add_argument("names", nargs="*", metavar="NAME", help="<paper>/<table> (default: all)")
    either = waiting.add_mutually_exclusive_group()
    either.add_argument("--hours", metavar="N", type=_hours, help="save and stop after N hours (default: no limit)")
    either.add_argument(
        "--list", action="store_true", help="run nothing; list the jobs that are left, their minutes, and the claims "
        "that wait for them",
    )  # fmt: skip
    for flag, text in (
        (
            "--rows",
            "run only the setting with this name; if there is none, those whose names start with TEXT; if there are "
            "none, those whose names contain TEXT",
        ),
        ("--methods", "run only these methods"),
    ):
        run.add_argument(flag, action="append", default=[], metavar="TEXT[,TEXT...]", help=text)
    run.add_argument(
        "--seeds", metavar="N", type=int, help="run seeds 0 to N - 1 of every cell (default: as in the table)"
    )
    run.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        help="run at most N rounds, for a quick look. Use another "
        "--output, so that these short runs do not mix with the full ones",
    )
    run.add_argument("--tune", action="store_true", help="first try the grid of the table, then run the best values")
    run.add_argument("--no-progress", action="store_true", help="show no progress bars")
    run.add_argument(
        "--devices", metavar="N", type=int, help="number of CPU devices (default: one per core). With --devices 1, "
        "several processes may run one table: each process runs cells that no other process is running",
    )  # fmt: skip

    pages.add_argument("names", nargs="*", metavar="NAME", help="<paper>/<table>")
    pages.add_argument(
        "--all",
        action="store_true",
        help="write the pages of all tables that have results, and README.md and orderings.md",
    )
    pages.add_argument(
        "--results", metavar="DIR", type=Path, help=f"folder of the results (default: {OUTPUT} if it has results "
        "of the table, otherwise experiments/results, which comes with the project)",
    )  # fmt: skip
    return parser


def _hours(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"--hours must be a number > 0, got {text!r}: pass 0.5 for half an hour, or leave it out for no limit"
    )


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # without a cache folder every program is compiled again
        fd.use_compilation_cache()
    sys.exit(main())
