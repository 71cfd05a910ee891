"""The command line: `fedjax-drift quickstart`, `fedjax-drift run` and `fedjax-drift data`.

What is typed is checked, the data are read and every simulation is put together before anything compiles or the
output folder is made. Bad input is one line on stderr and exit code 2. An algorithm that can't go on is one line too,
the next one takes its turn, and the exit code is 1; Ctrl-C keeps what is done and exits with 130, SIGTERM with 143.
`run --resume` is the command of that run again, with its algorithms restored from their checkpoints.

With --distributed several processes run the same command; the first prints and writes, and all exit with the same code.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import inspect
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks, cli_quickstart, experiment, options, papers, report
from fedjax_drift.checkpoint import SavedRuns, lock_folder, replace_file, unused
from fedjax_drift.checks import nearest
from fedjax_drift.data.datasets import DATASETS
from fedjax_drift.options import HIDDEN, Parser, add, add_data, add_run, count, count0, load, spec
from fedjax_drift.progress import watched
from fedjax_drift.records import by_seed
from fedjax_drift.run_folder import CONFIG, MODEL, file_name, model_file
from fedjax_drift.sharding import agree, first_does, spans_processes
from fedjax_drift.sweep import check_sweepable

RESUMED = ("--rounds", "--devices", "--lanes", "--stream", "--bank", "--no-progress")  # may be changed by --resume
NAME_WIDTH = 22  # of an algorithm in the table, which then has 80 columns

RUN_EXAMPLES = """\
examples:
  fedjax-drift run --dataset mnist --partition dirichlet:0.3 --clients 100 \\
      --algorithm fedavg --algorithm fedprox:mu=0.01 --rounds 50
  fedjax-drift run --dataset synthetic:alpha=1,beta=1 --algorithm fedavg \\
      --cohort 20 --epochs 5 --batch-size 10 --output runs/synthetic
  fedjax-drift run --dataset glyphs:num_writers=500 --cohort 50 \\
      --algorithm fedadam:server_lr=0.01 --lr 0.3 --batch-size 10
  fedjax-drift run --dataset mnist --partition dirichlet:0.1 --rounds 20 \\
      --algorithm fedavg --algorithm fedeve --measure gradients,labels
  fedjax-drift run --dataset mnist --partition shards:2 --cosine \\
      --algorithm lfd:temperature=0.05 --measure forgetting --epochs 5
  fedjax-drift run --dataset mnist --partition dirichlet:0.3 --seeds 3 \\
      --target 0.9 --algorithm fedavg --algorithm feddc:alpha=0.1

An algorithm's options: numbers, true, false, none and words as they are;
several of one kind with a plus, as in fedgvr:literal=step+sign.

The output folder holds config.json (everything that was set, and the
command), rounds.jsonl and rounds.csv (a line for each round, algorithm and
seed, written as the round ends), curves.png, a picture of each thing that was
measured, checkpoints, and for each algorithm a folder with the model that it
trained, model.npz (fd.load_run reads all of it); with --target also
rounds_to_target.png and, with --measure gradients, drift_story.png (labels,
drift, accuracy and rounds in one); with --per-client also clients.csv, a line
for each client, and fairness.png. Ctrl-C and SIGTERM stop after the round in
progress. Whatever ended a run, it goes on with

  fedjax-drift run --resume OUTPUT

to which --rounds (more of them), --devices, --lanes, --stream, --bank and
--no-progress may be added.
"""
DATA_EXAMPLES = """\
examples:
  fedjax-drift data
  fedjax-drift data mnist --partition dirichlet:0.3 --clients 100
  fedjax-drift data synthetic:variant=fedprox --output runs/look
"""
EXPERIMENT_EXAMPLES = """\
examples:
  fedjax-drift experiment --list
  fedjax-drift experiment feddc/table1 --rows mnist --seeds 3
  fedjax-drift experiment fedadc/figure1 --methods FedADC,SlowMo --tune

What is done is skipped: the results lie in OUTPUT/<paper>/<table>/<setting>/,
a file for each method, a line for each seed. Ctrl-C loses nothing, a kill about
half a minute (five of tuning, or the rounds between two evaluations); the same
command goes on. Then:

  fedjax-drift report feddc/table1
"""
REPORT_EXAMPLES = """\
examples:
  fedjax-drift report feddc/table1
  fedjax-drift report --all --results experiments/results

Writes RESULTS/<paper>/<table>.md (ours, the paper's, the difference; how
each cell was run) and <table>.png (the curves), and with --all the page of
all tables, RESULTS/README.md, and what came of the papers' orderings,
RESULTS/orderings.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 (an algorithm can't go on), 2 (bad input: one line on stderr), 130 (Ctrl-C) or
    143 (SIGTERM)."""
    if argv is None:  # a process of its own
        with contextlib.suppress(OSError):  # without a folder for it everything is compiled, as the first time
            fd.use_compilation_cache()
    argv = sys.argv[1:] if argv is None else list(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            try:
                argv, resumed = _as_before(argv)
                args = _parse(argv)
                if resumed is not None:
                    args.resumed, args.output = True, resumed
                if getattr(args, "distributed", None):
                    return _together(args, argv)
                return args.command(args, argv)()
            except BrokenPipeError:
                raise
            except (ValueError, OSError, ImportError) as error:
                if not _is_ours(error):
                    raise
                _show_error(error)
                return 2
        except KeyboardInterrupt:
            print("fedjax-drift: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # whoever read the output has gone, as in `| head`: nothing more can be said
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141


def _together(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """One process of several: what the first finds wrong is said once, and what only another one finds by that one."""
    address, num_processes, process_id = args.distributed
    try:
        fd.distributed.initialize(address, num_processes, process_id, cpu_devices=args.devices)
    except RuntimeError as error:
        raise ValueError(f"--distributed: {error}") from error
    mesh, wrong = fd.clients_mesh(), None
    (args.now,), _ = agree(mesh, [int(time.time())])  # names the folder
    with contextlib.nullcontext() if fd.distributed.is_first() else contextlib.redirect_stdout(None):
        try:
            work = args.command(args, argv)
        except (ValueError, OSError, ImportError) as error:
            if not _is_ours(error):
                raise
            wrong = str(error)
        (first_wrong,), (any_wrong,) = agree(mesh, [wrong is not None], [wrong is not None])
        if wrong is not None and (fd.distributed.is_first() or not first_wrong):
            _show_error(f"process {jax.process_index()}: {wrong}")
        return 2 if any_wrong else work()


def _is_ours(error: BaseException) -> bool:
    """Said by the library, or about a file or folder; a ValueError from NumPy or JAX is a bug."""
    if isinstance(error, OSError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (frames[-1].f_globals.get("__package__") or "").split(".")[0] == "fedjax_drift"


def _show_error(error: object) -> None:
    print("fedjax-drift: error: " + " ".join(str(error).split()), file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if fd.distributed.is_first():
        print(f"\nfedjax-drift: warning: {message}", file=sys.stderr)


# What was typed.


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="fedjax-drift", description="Federated learning for the study of drift.")
    parser.add_argument("--version", action="version", version=f"fedjax-drift {fd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    subparsers = {}
    for name, summary, epilog, fill in (
        ("quickstart", "see client drift, and that it can be corrected, in under a minute", None, _fill_quickstart),
        ("run", "simulate algorithms on a data set", RUN_EXAMPLES, _fill_run),
        ("data", "list the data sets, or draw what the clients of one hold", DATA_EXAMPLES, _fill_data),
        ("experiment", "run a table of a paper", EXPERIMENT_EXAMPLES, _fill_experiment),
        ("report", "put our numbers beside the paper's, and draw the curves", REPORT_EXAMPLES, _fill_report),
    ):
        subparsers[name] = commands.add_parser(name, help=summary, epilog=epilog)
        fill(subparsers[name])
    if not argv:
        parser.print_help()
        parser.exit()
    if argv[0] not in (*subparsers, "-h", "--help", "--version"):
        near = nearest(argv[0], subparsers)
        raise ValueError(f"the command must be one of {', '.join(subparsers)}, got {argv[0]!r}{near}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for flag in subparsers[argv[0]]._option_string_actions if flag.startswith("--")]
        near = nearest(unknown[0].partition("=")[0], known)
        raise ValueError(f"unknown argument {unknown[0]!r}{near} (see fedjax-drift {argv[0]} --help)")
    return args


def _as_before(argv: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """What was typed, or with `run --resume OUTPUT` what was typed then, and OUTPUT; ValueError unless it can go on."""
    if argv[:1] != ["run"] or not any(word.partition("=")[0] == "--resume" for word in argv):
        return argv, None
    parser = Parser(prog="fedjax-drift run", add_help=False)
    parser.add_argument("--resume", type=Path, required=True)
    for flag in RESUMED:
        kind = {"action": "store_true"} if flag == "--no-progress" else {"type": count} if flag == "--rounds" else {}
        parser.add_argument(flag, **kind)
    parser.add_argument("--distributed", nargs="?", const=True)  # never as before: ports and numbers may differ
    args, unknown = parser.parse_known_args(argv[1:])
    if unknown:
        raise ValueError(
            f"--resume goes on as before: only {', '.join(RESUMED)} and --distributed may be added, got {unknown[0]!r}"
        )
    try:
        config = json.loads((args.resume / CONFIG).read_text())
        alone = re.sub(r" --distributed(?:[ =]\S+:\d+,\d+,\d+)?(?= |$)", "", config["command"])
        command, rounds = shlex.split(alone)[1:], int(config["rounds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # the last of brackets by the thousand
        raise ValueError(
            f"--resume must be the output folder of a run, got {args.resume}, whose config.json can't be read: start "
            "that run anew"
        ) from error
    if args.rounds is not None and args.rounds < rounds:
        raise ValueError(f"--rounds must be at least the {rounds} of the run that goes on, got {args.rounds}")
    changed = [(flag, getattr(args, flag[2:].replace("-", "_"))) for flag in (*RESUMED, "--distributed")]
    added = [flag if value is True else f"{flag}={value}" for flag, value in changed if value]
    return command + added, args.resume


def _fill_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --dataset NAME --algorithm NAME [options]\n       %(prog)s --resume OUTPUT"
    parser.description = "Simulates algorithms on a data set, one after another, and compares them."
    group = add_run(parser)
    _add_output(group)
    add(
        group, "--seeds", "N", "runs of each algorithm, with the seeds SEED to SEED + N - 1: other cohorts and another "
        "initial model on the same clients. Side by side in one program; tables and pictures show the mean and how far "
        "seeds are apart", options.seeds, 1,
    )  # fmt: skip
    add(group, "--target", "ACCURACY", "in 0..1: say, and draw, in which round it is first met", _target)
    group.add_argument("--tensorboard", action="store_true", help="also write events for TensorBoard")
    group.add_argument(
        "--per-client", action="store_true", help="at the end, score each client on test rows of its own (of data that "
        "were dealt: in its label mix), before and after it has trained the model for another epoch; of several seeds "
        "the mean",
    )  # fmt: skip
    group = parser.add_argument_group("runs that survive")
    add(group, "--resume", "OUTPUT", "go on with the run of that folder; see below")
    add(group, "--checkpoint-every", "N", "rounds between checkpoints (default: by the clock alone)", count)
    add(group, "--checkpoint-seconds", "S", "seconds between checkpoints; each algorithm's end has one", float, 60.0)
    add(group, "--keep", "K", "checkpoints that an algorithm keeps, beside its best; 0: none are made", count0, 3)
    parser.set_defaults(command=_run, resumed=False)


def _fill_quickstart(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = cli_quickstart.DESCRIPTION
    cli_quickstart.add_options(parser)
    _add_output(parser)
    parser.set_defaults(command=_quickstart)


def _fill_data(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [NAME[:key=value,...]] [options]"
    parser.description = textwrap.fill(
        "Without a name: lists the data sets, which of them are here and how to get the others. "
        "With a name: prints the sizes of its clients and writes federation.png, their label mixes and sizes.",
        78,
    )
    add_data(parser, required=False)
    _add_output(parser, progress=False)
    parser.set_defaults(command=_data)


def _fill_experiment(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s NAME [options]\n       %(prog)s --list"
    parser.description = textwrap.fill(
        "Runs a table of a paper, from its file in experiments/: all methods on the same data, cohorts and initial "
        "models.", 78,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="<paper>/<table>, as --list shows them")
    parser.add_argument(
        "--list", action="store_true", help="list the tables, and how much of each there are results of"
    )
    _add_choice(parser)
    add(parser, "--seeds", "N", "seeds 0 to N - 1 of every cell (default: as the table says)", options.seeds)
    add(
        parser, "--rounds", "N", "at most so many, to look at a table quickly; put these elsewhere with --output", count
    )
    parser.add_argument(
        "--tune", action="store_true", help="first try the table's grid for each method, then run with what was best"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    add(
        parser, "--devices", "N", "CPU devices (default: one per core). With 1, several processes may share a table: "
        "each takes cells that no other is at", count,
    )  # fmt: skip
    add(parser, "--output", "DIR", "folder of the results", Path, Path("runs/experiments"))
    parser.set_defaults(command=_experiment)


def _fill_report(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s NAME [options]\n       %(prog)s --all [options]"
    parser.description = "Puts the results of tables beside the papers' numbers."
    parser.add_argument("names", nargs="*", metavar="NAME", help="<paper>/<table>")
    parser.add_argument(
        "--all", action="store_true", help="every table of which there are results, and the page of all"
    )
    _add_choice(parser, rows=False)
    add(parser, "--results", "DIR", "folder of the results (default: runs/experiments if the table is there, else "
        "experiments/results, those that come with the project)", Path)  # fmt: skip
    parser.set_defaults(command=_report)


def _add_choice(parser: argparse.ArgumentParser, rows: bool = True) -> None:
    if rows:
        for flag, what in (
            ("--rows", "settings whose names start with this, or else have it in them"),
            ("--methods", "methods, by their names"),
        ):
            parser.add_argument(flag, action="append", default=[], metavar="TEXT[,TEXT...]", help=f"only {what}")
    add(parser, "--experiments", "DIR", "folder of the tables (default: experiments/ here, or of the sources)", Path)


def _add_output(group: Any, progress: bool = True) -> None:
    add(group, "--output", "DIR", "folder for the results, new or empty (default: runs/WHAT-TIME)", Path)
    group.add_argument("--force", action="store_true", help="write into DIR even if it holds files")
    if progress:
        group.add_argument("--no-progress", action="store_true", help="no progress bars")


# What is to be done with it.


def _output(args: argparse.Namespace, what: str) -> Path:
    """The folder to write to, not yet made; ValueError if that would overwrite something or can't work."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(getattr(args, "now", None)))
    path = args.output or Path("runs") / f"{what}-{stamp}"
    if getattr(args, "resumed", False) or not fd.distributed.is_first():
        return path
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output must be a folder, got the file {path}: choose another name")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output must be where files can be written, got {path} ({there} can't): choose another")
    if path.is_dir() and any(path.iterdir()) and not args.force:
        raise ValueError(
            f"--output must be a new or empty folder, got {path}, which holds files: choose another, or add --force "
            "to replace the files of an earlier run (to go on with that: run --resume)"
        )
    return path


def _target(text: str) -> float:
    try:
        accuracy = float(text)
    except ValueError:
        accuracy = -1.0
    if not 0 < accuracy <= 1:
        hint = f": {accuracy / 100:g} for {accuracy:g} %" if 1 < accuracy <= 100 else ""
        raise argparse.ArgumentTypeError(f"must be an accuracy in 0..1, got {text!r}{hint}")
    return accuracy


class Ended(NamedTuple):
    """What an algorithm leaves."""

    states: dict[int, fd.ServerState]  # of each seed
    scores: dict[str, np.ndarray]  # of each client, with --per-client


def _run(args: argparse.Namespace, argv: Sequence[str], table: Callable[..., str] | None = None) -> Callable[[], int]:
    """Checks and reads everything; what it returns does the work. table: see `_simulate`."""
    specs = options.specs(args)
    output = _output(args, "-".join([args.dataset.partition(":")[0], *dict.fromkeys(s.name for s in specs)])[:80])
    seeds = [args.seed + i for i in range(args.seeds)]
    if args.seeds > 1 and args.distributed:
        raise ValueError(f"--seeds takes one process, got {args.seeds} with --distributed: leave one of them out")
    if args.target is not None and not args.eval_every:
        raise ValueError(f"--target needs evaluations, got {args.target} with --eval-every 0: leave that out")
    simulations, params, config = options.asked(args)
    if args.seeds > 1:
        for sim in simulations.values():
            try:
                check_sweepable(sim)
            except ValueError as error:
                raise ValueError(f"--seeds {args.seeds}: {error}") from error
    names = list(simulations)
    config = {
        "command": shlex.join(["fedjax-drift", *argv]),
        **config,
        "seeds": seeds,
        "target": args.target,
        "checkpoints": {"every": args.checkpoint_every, "seconds": args.checkpoint_seconds, "keep": args.keep},
        "tensorboard": args.tensorboard,
        "per_client": args.per_client,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if args.tensorboard:
        fd.logs.needs_tensorboard()
    checkpoints = _checkpoints(args, config, output)
    progress = not args.no_progress and watched()

    def work() -> int:
        mesh = simulations[names[0]].mesh
        before: dict[str, tuple[fd.ServerState | None, list[dict[str, Any]]]] = {}
        with contextlib.ExitStack() as locked:  # nobody else writes there meanwhile
            first_does(mesh, lambda: locked.enter_context(lock_folder(output / "checkpoints", "--output")))
            if args.resumed:
                config["started"] = json.loads((output / CONFIG).read_text())["started"]
                before = _restored(simulations, checkpoints, seeds, args.rounds)
                if not before:
                    checks.warn(f"{output} has no checkpoint yet: the run starts again at round 0")
            else:
                first_does(mesh, lambda: _delete([kept.path for kept in checkpoints.values()], output, names))

            def start(name: str, on_round: Callable[[dict[str, Any]], None]) -> Ended:
                sim, kept = simulations[name], checkpoints.get(name)
                if len(seeds) > 1:
                    runs = sim.sweep(
                        args.rounds, seeds, args.eval_every, params=params, progress=progress, checkpoints=kept,
                        on_round=lambda seed, _, record: on_round({"seed": seed, **record}),
                        measure_every=config["measure"]["every"],
                    )  # fmt: skip
                    states = {run.seed: run.state for run in runs}
                else:
                    state, history = before.pop(name, (None, []))
                    state = sim.init(jax.random.key(args.seed), params) if state is None else state
                    state, _ = sim.run(
                        state, args.rounds - len(history), args.eval_every, progress=progress, on_round=on_round,
                        measure_every=config["measure"]["every"], checkpoints=kept,
                    )  # fmt: skip
                    states = {args.seed: state}
                ended = [state for state in states.values() if int(state.round) == args.rounds]
                if not args.per_client or len(ended) < len(seeds):
                    return Ended(states, {})
                scores = [sim.evaluate_clients(state, fine_tune=1) for state in ended]
                return Ended(states, {key: np.mean([each[key] for each in scores], axis=0) for key in scores[0]})

            histories = {name: history for name, (_, history) in before.items()}
            data = simulations[names[0]].data
            return _simulate(config, names, histories, start, output, progress, data, table or _table)

    return work


def _restored(
    simulations: Mapping[str, fd.Simulation],
    checkpoints: Mapping[str, fd.Checkpoints],
    seeds: Sequence[int],
    rounds: int,
) -> dict[str, tuple[fd.ServerState | None, list[dict[str, Any]]]]:
    """Of each algorithm that has come to its first checkpoint the newest state, and the history. Several seeds have
    their states restored by the sweep."""
    if len(seeds) > 1:
        found = {}
        for name, kept in checkpoints.items():
            runs = SavedRuns(kept, [simulations[name]] * len(seeds), [f"seed-{seed}" for seed in seeds])
            _, histories = runs.restore(rounds)
            records = [{"seed": seed, **r} for seed, history in zip(seeds, histories, strict=True) for r in history]
            found[name] = (None, records)
        return {name: pair for name, pair in found.items() if pair[1]}
    restored = {name: kept.restore(simulations[name]) for name, kept in checkpoints.items() if kept.rounds}
    for name in simulations.keys() - restored.keys():
        bank = Path(simulations[name].bank)  # if it is a folder, it is for one process
        if bank.is_dir() and not spans_processes(simulations[name].mesh):
            bank.rename(unused(bank.with_name(bank.name + ".left")))
    return dict(restored)


def _delete(folders: Sequence[Path], output: Path, names: Sequence[str]) -> None:
    """What --force replaces: checkpoints and models."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        for file in (output / file_name(name)).glob(f"**/{MODEL}"):
            file.unlink()


def _checkpoints(args: argparse.Namespace, config: Mapping[str, Any], output: Path) -> dict[str, fd.Checkpoints]:
    """Where each algorithm is saved; nowhere with --keep 0."""
    if args.resumed and not args.keep:
        raise ValueError(f"--resume needs checkpoints, got {output}, a run with --keep 0: start it anew")
    if not args.keep:
        return {}
    folders = {name: f"{i}-{file_name(name)}" for i, name in enumerate(config["algorithms"], 1)}
    how = config["checkpoints"]
    return {name: fd.Checkpoints(output / "checkpoints" / folder, **how) for name, folder in folders.items()}


def _simulate(
    config: Mapping[str, Any],
    names: Sequence[str],
    before: Mapping[str, Sequence[dict[str, Any]]],
    start: Callable[[str, Callable[[dict[str, Any]], None]], Ended],
    output: Path,
    progress: bool,
    data: fd.FederatedData,
    table: Callable[..., str],
) -> int:
    """Runs one algorithm after another with ``start(name, on_round)``; after Ctrl-C, reports what is done.

    table: ``table(records, target)``, what is printed at the end.
    before: the histories of those that were restored. Of several processes the first alone writes files. Where the
    library itself raises ValueError or FloatingPointError (the model has diverged), the next takes its turn.
    """
    writes = fd.distributed.is_first()
    if writes:
        try:
            output.mkdir(parents=True, exist_ok=True)
            replace_file(output / CONFIG, json.dumps(config, indent=2) + "\n")
        except OSError as error:  # nothing has been done that could be lost
            raise ValueError(
                f"--output must be where files can be written, got {output} ({error.strerror}): choose another, or see "
                "to that"
            ) from error
    print(_heading(config, output), flush=True)
    resume = f"to go on: {shlex.join(['fedjax-drift', 'run', '--resume', str(output)])}"
    records: dict[str, list[dict[str, Any]]] = {name: list(before.get(name, [])) for name in names}
    interrupted, stopped, several = False, [], len(config["seeds"]) > 1
    per_client: dict[str, dict[str, np.ndarray]] = {}

    def lines() -> list[dict[str, Any]]:
        return [{"algorithm": name, **record} for name, history in records.items() for record in history]

    with fd.logs.Log(output, lines(), tensorboard=config["tensorboard"]) as log:
        for name, history in records.items():

            def keep(record: dict[str, Any], name: str = name, history: list[dict[str, Any]] = history) -> None:
                history.append(record)
                log({"algorithm": name, **record})

            files = [model_file(output, name, seed if several else None) for seed in config["seeds"]]
            complete = config["rounds"] * len(files)
            if len(history) == complete and all(file.exists() for file in files) and not config["per_client"]:
                continue
            if not progress:
                print(f"running {name}: {_rounds_to_do(len(history) // len(files), config['rounds'])}", flush=True)
            try:
                end = start(name, keep)
                per_client |= {name: end.scores} if end.scores else {}
                if writes:
                    for file, seed in zip(files, config["seeds"], strict=True):
                        with _written(file, output) as new:
                            fd.models.save_params(end.states[seed].params, new)
                interrupted = len(history) < complete  # Simulation.run ends early on Ctrl-C
            except KeyboardInterrupt:
                interrupted = True
            except SystemExit as ending:  # SIGTERM: whoever sent it will not wait for pictures
                done = len(history) // len(files)
                print(f"\nfedjax-drift: stopped {name} after {done} rounds; {resume}", file=sys.stderr)
                return int(ending.code or 0)
            except (ValueError, FloatingPointError, OSError, MemoryError) as error:
                if not _is_ours(error):
                    raise
                stopped.append(f"{name} after {len(history) // len(files)} of {config['rounds']} rounds")
                if writes:
                    _show_error(f"stopped {stopped[-1]}: {error}")
            if interrupted:
                break
    if before:  # more rounds of one algorithm may have been written after another's
        try:
            fd.logs.Log(output, lines(), tensorboard=config["tensorboard"]).close()
        except ValueError as error:  # no room to put them in order
            checks.warn(str(error))
    records = {name: history for name, history in records.items() if history}
    written = ["config.json", "rounds.jsonl", "rounds.csv"]
    if writes:
        written += [*_draw_runs(records, config["target"], data, output), *_write_clients(per_client, output)]
        folders = [file_name(name) for name in names if any((output / file_name(name)).glob(f"**/{MODEL}"))]
        written += [f"{folder}/{'seed-*/' * several}{MODEL}" for folder in folders]
    if records:
        print("\n" + table(records, config["target"]))
    if any("accuracy" in scores for scores in per_client.values()):
        print("\n" + _clients_table(per_client))
    ended = [f"stopped: {', '.join(stopped)}"] if stopped else []
    ended.append(f"{'interrupted: ' if interrupted else ''}{output}: {', '.join(written)}")
    ended += [resume] * (interrupted and config["checkpoints"]["keep"] > 0)
    print("", *[line for text in ended for line in _wrap(text, "", "  ")], sep="\n")
    return 130 if interrupted else 1 if stopped else 0


def _draw_runs(
    records: Mapping[str, Sequence[Mapping[str, Any]]], target: float | None, data: fd.FederatedData, output: Path
) -> list[str]:
    """Writes the pictures that the records have numbers for; returns their names."""
    from fedjax_drift import plots

    runs = {name: by_seed(history) for name, history in records.items()}
    first = next(iter(runs.values()), [()])[0]  # of a seed, the cohorts, and so their labels, are the same for all
    compared = (plots.curves, plots.updates, plots.drift, plots.agreement, plots.forgetting, plots.gain)
    pictures = {draw.__name__: functools.partial(draw, runs) for draw in compared}
    pictures["label_mix"] = functools.partial(plots.label_mix, first)
    if target is not None:
        pictures["rounds_to_target"] = functools.partial(plots.rounds_to_target, runs, target)
        pictures["drift_story"] = functools.partial(plots.drift_story, runs, target, data)
    written = []
    for name, draw in pictures.items():
        path = output / f"{name}.png"
        try:
            with _written(path, output) as new:
                draw(new)
            written += [path.name] * path.exists()
        except ValueError as error:  # nothing that can be drawn, so the picture of an earlier run is out of date
            if not _is_ours(error):
                raise
            path.unlink(missing_ok=True)
    return written


def _write_clients(per_client: Mapping[str, Mapping[str, np.ndarray]], output: Path) -> list[str]:
    """Writes the scores of every client, a line for each, and their picture; returns the files' names."""
    if not per_client:
        return []
    from fedjax_drift import plots

    names = [*next(iter(per_client.values()))]
    lines = [["algorithm", "client", *names]]
    for algorithm, scores in per_client.items():
        values = np.stack([scores[name] for name in names], axis=1)
        lines += [[algorithm, str(i), *map(str, row)] for i, row in enumerate(values) if np.isfinite(row).any()]
    with _written(output / "clients.csv", output) as new, new.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    with _written(output / "fairness.png", output) as new:
        plots.fairness(per_client, new)
    return [name for name in ("clients.csv", "fairness.png") if (output / name).exists()]


@contextlib.contextmanager
def _written(path: Path, output: Path) -> Iterator[Path]:
    """In it the file is written beside its place, which it takes as a whole; a full disk is a warning."""
    new = path.with_stem(path.stem + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield new
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        again = shlex.join(["fedjax-drift", "run", "--resume", str(output)])
        checks.warn(f"{path} could not be written ({error.strerror}): make room, then from the checkpoints: {again}")


def _clients_table(per_client: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Of each algorithm how accurate the global model is for clients, and after another epoch of their own."""
    width = max(map(len, ["own test rows", *per_client]))
    lines = [f"{'own test rows':{width}}  clients    mean  worst 10 %  after an epoch: mean  worst 10 %"]
    for algorithm, scores in per_client.items():
        known = [fd.personal.summary(scores[name]) for name in ("accuracy", "personal_accuracy")]
        (mean, worst), (own, own_worst) = [(100 * k["mean"], 100 * k["lowest_10"]) for k in known]
        lines.append(f"{algorithm:{width}}  {known[0]['clients']:7.0f}  {mean:4.1f} %  {worst:8.1f} %  "
                     f"{own:18.1f} %  {own_worst:8.1f} %")  # fmt: skip
    return "\n".join(lines)


def _quickstart(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    run = cli_quickstart.run_command(args)
    intro = textwrap.fill(cli_quickstart.introduction(args), 80)
    print(intro, _wrapped_command(["fedjax-drift", *run]), sep="\n\n", end="\n\n", flush=True)
    simulate = _run(_parse(run), run, cli_quickstart.table)

    def work() -> int:
        code = simulate()
        if code == 0:
            for text in (cli_quickstart.READING, cli_quickstart.NEXT):
                print("", *_wrap(text, "", ""), sep="\n")
        return code

    return work


def _data(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    if args.dataset is None:
        listing = _listing(args.data_dir)
        return lambda: print(listing) or 0
    dataset = spec("data set", args.dataset, DATASETS, hidden=HIDDEN)
    output = _output(args, f"data-{dataset.name}")
    data = load(args)
    return lambda: _draw(data, options.dealt(args), output)


def _draw(data: fd.FederatedData, dealt: str, output: Path) -> int:
    from fedjax_drift import plots

    output.mkdir(parents=True, exist_ok=True)
    plots.federation(data, output / "federation.png")
    summary = options.summary(data)
    sizes, labels = summary["sizes"], summary["labels_per_client"]
    print(_lines({
        "data": f"{data.name}: {data.x.dtype}{list(data.x.shape[1:])} a row, {summary['classes']} labels",
        "partition": dealt,
        "clients": f"{data.num_clients:,}",
        "rows": f"{summary['rows']:,} for training, {summary['test_rows']:,} for testing",
        "rows a client": f"{sizes['min']:,} to {sizes['max']:,}, median {sizes['median']:,.0f}",
        "labels a client": f"{labels['min']} to {labels['max']}, mean {labels['mean']:.1f}",
        "picture": str(output / "federation.png"),
    }))  # fmt: skip
    return 0


def _experiment(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    place = papers.folder(args.experiments)
    if args.list or not args.names:
        return lambda: print(report.listing(place, [args.output, place / "results"])) or 0
    tables = papers.read_all(place, args.names)
    cells = [papers.chosen(table, args.rows, args.methods) for table in tables]
    seeds = None if args.seeds is None else range(args.seeds)
    progress = not args.no_progress and watched()
    options.use_devices(args.devices)

    def work() -> int:
        for table, own in zip(tables, cells, strict=True):
            print(f"{table.name}: {table.title}", flush=True)
            say = functools.partial(print, flush=True)
            if not experiment.run(
                table, own, seeds, args.output, rounds=args.rounds, tune=args.tune, progress=progress, say=say
            ):
                return 130
        names = shlex.join(args.names)
        print(f"the results are in {args.output}; to see them: fedjax-drift report {names} --results {args.output}")
        return 0

    return work


def _report(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    place = papers.folder(args.experiments)
    if args.all == bool(args.names):
        raise ValueError("report takes names of tables, or --all, got " + ("both" if args.all else "neither"))
    tables = papers.read_all(place, args.names or papers.names(place))

    def work() -> int:
        ours = place / "results"
        for table in tables:
            own = args.results or (ours if args.all else report.where(table, [Path("runs/experiments"), ours]))
            if report.has_results(table, own):
                print(f"{table.name}: {', '.join(map(str, report.write(table, own)))}", flush=True)
            elif not args.all:
                raise ValueError(
                    f"{table.name} must have results in {own}, got none: fedjax-drift experiment {table.name}"
                )
        if args.all:
            print(", ".join(map(str, report.write_index(tables, args.results or ours))))
        return 0

    return work


# What is shown and written.


def _heading(config: Mapping[str, Any], output: Path) -> str:
    data, local, model = config["data"], config["local"], config["model"]
    defaults = fd.LocalTraining()
    changed = [f"{k} {v}" for k, v in local.items() if k not in ("epochs", "batch_size", "lr")
               and v != getattr(defaults, k)]  # fmt: skip
    epochs = f"{local['epochs']} epoch{'s' * (local['epochs'] > 1)}"
    redeal, measure = config["redeal"], config["measure"]
    failing = [f"{name.replace('_', ' ')} {value}" for name, value in config["failures"].items()
               if value not in (None, 0.0) and (name, value) != ("over_selection", 1.0)]  # fmt: skip
    failing += [config["aggregation"]] * (config["aggregation"] != "mean")
    how = "evenly" if redeal == "evenly" else f"by Dirichlet({redeal})"
    dealt = "" if redeal is None else f", rows dealt anew {how}"
    often = "every round" if measure["every"] == 1 else f"every {measure['every']} rounds"
    measured = {"measured": f"{', '.join(measure['names'])}, {often}"} if measure["names"] else {}
    return _lines({
        "data": f"{config['dataset']['name']}: {data['rows']:,} rows, {data['test_rows']:,} for testing",
        "clients": f"{data['clients']:,} of {data['sizes']['min']:,} to {data['sizes']['max']:,} rows, "
        f"{config['cohort_size']:,} a round ({config['sampling']}{dealt})",
        "model": f"{model['name']}, {model['parameters']:,} parameters",
        "local training": ", ".join([epochs, f"batches of {local['batch_size']}", f"lr {local['lr']}", *changed]),
        **({"who answers": ", ".join(failing)} if failing else {}),
        **measured,
        "devices": f"{config['devices']['count']} ({config['devices']['platform']}), lanes {config['lanes']}",
        "output": str(output),
    })  # fmt: skip


def _table(records: Mapping[str, Sequence[Mapping[str, Any]]], target: float | None = None) -> str:
    """One line an algorithm; seconds a round: the median, which leaves out the compilation in the first. Of several
    seeds means, and their standard deviation.

    A second line where the algorithm also keeps the mean of its clients' models.
    """
    width = min(NAME_WIDTH, max(map(len, ["algorithm", *records])))
    runs = {name: by_seed(history) for name, history in records.items()}
    met = {} if target is None else _met(runs, target)
    last = "s/round" if target is None else f"to {100 * target:g} %"
    lines = [f"{'algorithm':{width}}  rounds  accuracy     best  at round  train loss  {last:>8}"]
    for name, seeds in runs.items():
        if len(name) > width:  # on a line of its own: what tells two of them apart may be at the end
            lines.append(name)
        every = [record for history in seeds for record in history]
        rounds, loss = min(map(len, seeds)), float(np.mean([history[-1]["train_loss"] for history in seeds]))
        end = f"{np.median([record['seconds'] for record in every]):8.3g}" if target is None else f"{met[name]:>8}"
        row = f"{name if len(name) <= width else '':{width}}  {rounds:6}  {_accuracies(seeds, 'accuracy')}"
        lines.append(f"{row}  {loss:#10.5g}  {end}")
        if any("client_mean_accuracy" in record for record in every):
            lines.append("  cohort's mean".ljust(width + 8) + "  " + _accuracies(seeds, "client_mean_accuracy"))
        finals = [value for value, _ in _ends(seeds, "accuracy")]
        if len(seeds) > 1 and finals:
            spread = f"± {100 * np.std(finals, ddof=1):.1f} %"
            lines.append(f"  {len(seeds)} seeds".ljust(width + 8) + f"{spread:>10}")
    return "\n".join(lines)


def _met(runs: Mapping[str, Sequence[Any]], target: float) -> dict[str, str]:
    """Of each algorithm the mean round of its seeds in which the target is first met; > where one never meets it."""
    try:
        reached = fd.rounds_to_target(runs, target)
    except ValueError:  # nothing was evaluated
        return dict.fromkeys(runs, "-")
    said = dict.fromkeys(runs, "-")
    for name, seeds in reached.items():
        mean = np.mean([seed.after if seed.round is None else seed.round for seed in seeds])
        said[name] = ">" * any(seed.round is None for seed in seeds) + f"{mean:.4g}"
    return said


def _ends(seeds: Sequence[Sequence[Mapping[str, Any]]], key: str) -> list[tuple[float, tuple[float, int]]]:
    """Of each seed the last value, and the best with its round."""
    known = [[(record[key], record["round"]) for record in history if key in record] for history in seeds]
    return [(pairs[-1][0], max(pairs, key=lambda pair: pair[0])) for pairs in known if pairs]


def _accuracies(seeds: Sequence[Sequence[Mapping[str, Any]]], key: str) -> str:
    ends = _ends(seeds, key)
    if not ends:
        return f"{'-':>8} {'-':>8}  {'-':>8}"
    last, best, at = np.mean([(value, *pair) for value, pair in ends], axis=0)
    return f"{100 * last:6.1f} % {100 * best:6.1f} %  {at:8.4g}"


def _listing(data_dir: str | None) -> str:
    """The data sets, what is here, and how to get the rest."""
    found = fd.datasets.describe(data_dir)
    lines = ["data set       labels  where"]
    lines += [f"{entry['name']:13}  {entry['classes']:6}  {entry['found']}" for entry in found]
    lines += ["", "Options, written NAME:key=value,key=value, with their defaults:"]
    for name, make in DATASETS.items():
        own = [p for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
        if own:
            options = ", ".join(f"{p.name}={p.default}" for p in own)
            lines += _wrap(f"{name}: {options}", "  ", "      ")
    for entry in found:
        if not entry["available"]:
            lines += ["", f"To get {entry['name']}:"]
            lines += _wrap(entry["how"], "  ", "  ")
    lines += ["", "A picture of one: fedjax-drift data NAME --partition dirichlet:0.3 --clients 100"]
    return "\n".join(lines)


def _lines(entries: Mapping[str, str]) -> str:
    width = max(map(len, entries)) + 2
    return "\n".join("\n".join(_wrap(f"{key:{width}}{value}", "", " " * width)) for key, value in entries.items())


def _wrap(text: str, first: str, later: str, width: int = 80) -> list[str]:
    """Lines of 80 columns; words are kept whole, so that paths and options can be copied."""
    wrapper = textwrap.TextWrapper(width, first, later, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _wrapped_command(words: Sequence[str]) -> str:
    return " \\\n".join(_wrap(shlex.join(words), "  ", "      ", 76))


def _rounds_to_do(done: int, rounds: int) -> str:
    return f"rounds {done + 1} to {rounds}" if done else f"{rounds} rounds"


if __name__ == "__main__":
    sys.exit(main())
