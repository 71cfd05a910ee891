"""`fedjax-drift run`: simulates algorithms one after another, logs the rounds and compares the algorithms."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.cli.flags import Parser, add, add_run, count, count0, seeds
from fedjax_drift.cli.output import add_output, draw_runs, output_folder, write_clients, write_summary, written
from fedjax_drift.cli.parsed_run import algorithm_specs, assemble, use_devices
from fedjax_drift.cli.render import clients_table, heading, rounds_to_do, show_error, table, wrap, wrapped_command
from fedjax_drift.devices.processes import first_does, spans_processes
from fedjax_drift.disk import lock_folder, replace_file, unused
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.run_folder import CONFIG, MODEL, file_name, model_file
from fedjax_drift.simulation.progress import watched
from fedjax_drift.simulation.sweep import check_sweepable
from fedjax_drift.simulation.until import Until, has_ended
from fedjax_drift.storage.checkpoint import restore_together, split_by_run

# Options that may be changed with --resume.
RESUMED = (
    "--rounds", "--target", "--patience", "--devices", "--devices-per-client", "--lanes", "--stream", "--bank",
    "--no-progress",
)  # fmt: skip


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

Values of an algorithm's options are numbers, true, false, none or words. Join
several values of one option with a plus: fedgvr:literal=step+sign.

The output folder contains
  config.json                 all settings, and the command
  rounds.jsonl, rounds.csv    one line per round, algorithm and seed
  summary.csv                 accuracy of each algorithm with its interval, and
                              tests against the first one (see fd.table)
  curves.png                  loss and accuracy against rounds
  updates.png, drift.png, ..  one plot per drift measure, with --measure
  rounds_to_target.png        with --target
  drift_story.png             with --target and --measure gradients
  clients.csv, fairness.png   one line per client, with --per-client
  ALGORITHM/model.npz         the trained model
  checkpoints/                see --resume
fd.load_run(OUTPUT) reads them in Python.

Ctrl-C and SIGTERM stop the run after the round in progress. To resume a run
that was stopped or killed:

  fedjax-drift run --resume OUTPUT

The options --rounds (a larger number), --target, --patience, --devices,
--devices-per-client, --lanes, --stream, --bank and --no-progress may be
changed when a run is resumed. A larger --patience continues a run that
--patience has ended.
"""


class Ended(NamedTuple):
    """The results of an algorithm."""

    states: dict[int, fd.ServerState]  # the last state of each seed
    scores: dict[str, np.ndarray]  # the scores of each client, with --per-client


def fill_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --dataset NAME --algorithm NAME [options]\n       %(prog)s --resume OUTPUT"
    parser.description = "Simulates algorithms on a data set, one after another, and compares them."
    group = add_run(parser)
    group.add_argument(
        "--distributed",
        nargs="?",
        const=(None, None, None),
        type=_processes,
        metavar="HOST:PORT,P,I",
        help="run as one of several processes that are started with the same command, for example by srun or mpirun. "
        "Without such a launcher, pass the address of the first process, the number of processes P, and the index I "
        "(0..P-1) of this process",
    )
    add_output(group)
    add(
        group, "--seeds", "N", "number of seeds; the seeds are SEED to SEED + N - 1. A seed changes the cohorts and "
        "the initial model, but not the partition. All seeds run side by side in one program. Tables and plots show "
        "the mean over seeds and its 95 %% confidence interval", seeds, 1,
    )  # fmt: skip
    add(
        group,
        "--target",
        "ACCURACY",
        "target accuracy in 0..1: report and plot the first round that reaches this accuracy",
        _target,
    )
    group.add_argument("--stop-at-target", action="store_true", help="end a run when it reaches the target accuracy")
    add(
        group, "--patience", "N", "end a run after N evaluations without a better accuracy (without accuracies: loss). "
        "With --validation, they are evaluations on held-out training examples", count,
    )  # fmt: skip
    group.add_argument("--tensorboard", action="store_true", help="also write events for TensorBoard")
    group.add_argument(
        "--per-client", action="store_true", help="at the end, evaluate the global model and the client's own "
        "model on each client's own test data. The own model is that of the algorithm (ditto, fedper), otherwise the "
        "global model after one epoch on the client's training data. If the data have one common test set, it is "
        "split: each client gets test data with the label mix of its training data. With several seeds the mean is "
        "reported",
    )  # fmt: skip
    group = parser.add_argument_group("checkpoints")
    add(group, "--resume", "OUTPUT", "resume the run in this folder; see below")
    add(group, "--checkpoint-every", "N", "rounds between checkpoints (default: only --checkpoint-seconds)", count)
    add(group, "--checkpoint-seconds", "S", "seconds between checkpoints; the last round is always saved", float, 60.0)
    add(
        group,
        "--keep",
        "K",
        "number of newest checkpoints to keep, in addition to the best one; 0: write no checkpoints",
        count0,
        3,
    )
    parser.set_defaults(command=run)


def resumed(argv: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """Returns (argv, None) without --resume.

    With `run --resume OUTPUT`, returns (words, OUTPUT). The words are those of the command that created OUTPUT,
    followed by the options of this command.

    Raises ValueError if the run cannot be resumed.
    """
    if argv[:1] != ["run"] or not any(word.partition("=")[0] == "--resume" for word in argv):
        return argv, None
    parser = Parser(prog="fedjax-drift run", add_help=False)
    parser.add_argument("--resume", type=Path, required=True)
    for flag in RESUMED:
        numbers = {"--rounds": count, "--patience": count, "--target": _target}
        parser.add_argument(
            flag, **({"action": "store_true"} if flag == "--no-progress" else {"type": numbers.get(flag)})
        )
    # --distributed is not taken from the first command, because ports and numbers may differ.
    parser.add_argument("--distributed", nargs="?", const=True)
    args, unknown = parser.parse_known_args(argv[1:])
    if unknown:
        raise ConfigurationError(
            f"with --resume only {', '.join(RESUMED)} and --distributed may be changed, got {unknown[0]!r}: leave it "
            "out"
        )
    try:
        config = json.loads((args.resume / CONFIG).read_text())
        alone = re.sub(r" --distributed(?:[ =]\S+:\d+,\d+,\d+)?(?= |$)", "", config["command"])
        command, rounds = shlex.split(alone)[1:], int(config["rounds"])
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--resume must be the output folder of a run, got {args.resume}, which has no config.json: give the "
            f"folder that the run printed. Paths are relative to {os.getcwd()}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ConfigurationError(
            f"--resume must be the output folder of a run, got {args.resume}, whose config.json can't be read: start "
            "this run again from the beginning"
        ) from error
    if args.rounds is not None and args.rounds < rounds:
        raise ConfigurationError(f"--rounds must be at least {rounds}, as in the resumed run, got {args.rounds}")
    changed = [(flag, getattr(args, flag[2:].replace("-", "_"))) for flag in (*RESUMED, "--distributed")]
    added = [flag if value is True else f"{flag}={value}" for flag, value in changed if value]
    return command + added, args.resume


def _with_absolute_paths(argv: Sequence[str]) -> list[str]:
    """The words of a command, so that it can be repeated in another folder."""
    words, options = list(argv), ("--init", "--data-dir")
    for i, word in enumerate(argv):
        option, _, path = word.partition("=")
        if path and option in options:
            words[i] = f"{option}={os.path.abspath(path)}"
        elif i > 0 and argv[i - 1] in options:
            words[i] = os.path.abspath(word)
    return words


def run(args: argparse.Namespace, argv: Sequence[str], final_table: Callable[..., str] = table) -> Callable[[], int]:
    """Checks the options and reads the data. Returns a function that runs the algorithms.

    final_table: ``final_table(records, target)`` is printed at the end.
    """
    specs = algorithm_specs(args)
    output = output_folder(args, "-".join([args.dataset.partition(":")[0], *dict.fromkeys(s.name for s in specs)])[:80])
    seeds = [args.seed + i for i in range(args.seeds)]
    if args.seeds > 1 and args.distributed:
        raise ConfigurationError(
            f"--seeds must be 1 with --distributed, got {args.seeds}: leave one of the two options out"
        )
    for flag, value in (("--target", args.target), ("--patience", args.patience)):
        if value is not None and not args.eval_every:
            raise ConfigurationError(
                f"{flag} needs evaluations, got {value} with --eval-every 0: leave --eval-every 0 out"
            )
    if args.stop_at_target and args.target is None:
        raise ConfigurationError("--stop-at-target needs a target, got none: pass --target 0.98, for example")
    if not args.distributed:
        use_devices(args.devices)
    parsed = assemble(args)
    simulations, params, config = parsed.simulations, parsed.params, parsed.config
    if args.seeds > 1:
        for sim in simulations.values():
            try:
                check_sweepable(sim.setup)
            except ValueError as error:
                raise ConfigurationError(f"--seeds {args.seeds}: {error}") from error
    names = list(simulations)
    config = {
        "command": shlex.join(["fedjax-drift", *_with_absolute_paths(argv)]),
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
    progress = False if args.no_progress else None
    until = _until(args)

    def ended(history: list[dict[str, Any]]) -> bool:
        each = [[record for record in history if record.get("seed", seed) == seed] for seed in seeds]
        return all(len(one) == args.rounds or (until is not None and has_ended(until, one)) for one in each)

    def work() -> int:
        mesh = simulations[names[0]].mesh
        before: dict[str, tuple[fd.ServerState | None, list[dict[str, Any]]]] = {}
        with contextlib.ExitStack() as locked:  # no other process writes to the folder meanwhile
            first_does(mesh, lambda: locked.enter_context(lock_folder(output / "checkpoints", "--output")))
            if args.resumed:
                config["started"] = json.loads((output / CONFIG).read_text())["started"]
                before = _restored(simulations, checkpoints, seeds, args.rounds)
                if not before:
                    checks.warn(f"{output} has no checkpoint yet: the run starts again from round 0")
            else:
                first_does(mesh, lambda: _delete([kept.path for kept in checkpoints.values()], output, names))

            def start(name: str, history: list[dict[str, Any]], on_round: Callable[[dict[str, Any]], None]) -> Ended:
                sim, kept = simulations[name], checkpoints.get(name)
                if len(seeds) > 1:
                    runs = sim.sweep(
                        args.rounds, seeds, args.eval_every, params=params, progress=progress, checkpoints=kept,
                        on_round=lambda seed, _, record: on_round({"seed": seed, **record}),
                        measure_every=config["measure"]["every"], until=until,
                    )  # fmt: skip
                    states = {run.seed: run.state for run in runs}
                else:
                    state, _ = before.pop(name, (None, []))
                    state = sim.init(jax.random.key(args.seed), params) if state is None else state
                    state, _ = sim.run(
                        state, args.rounds - len(history), args.eval_every, progress=progress, on_round=on_round,
                        measure_every=config["measure"]["every"], checkpoints=kept, until=until,
                    )  # fmt: skip
                    states = {args.seed: state}
                if not args.per_client or not ended(history):
                    return Ended(states, {})
                fine_tune = 1 if sim.algorithm.personal is None else None
                scores = [sim.evaluate_clients(state, fine_tune) for state in states.values()]
                return Ended(states, {key: np.mean([each[key] for each in scores], axis=0) for key in scores[0]})

            histories = {name: history for name, (_, history) in before.items()}
            data = simulations[names[0]].data
            return simulate(config, names, histories, start, ended, output, progress, data, final_table)

    return work


def _until(args: argparse.Namespace) -> Until | None:
    """The rule of --stop-at-target and --patience that ends a run early, or None."""
    rules = []
    if args.stop_at_target:
        rules.append(fd.until.reaches(accuracy=args.target))
    if args.patience is not None:
        by_loss, by_accuracy = fd.until.stalls("loss", args.patience), fd.until.stalls("accuracy", args.patience)
        rules.append(lambda history: (by_accuracy if "accuracy" in history[-1] else by_loss)(history))
    return (lambda history: any(rule(history) for rule in rules)) if rules else None


def _restored(
    simulations: Mapping[str, fd.Simulation],
    checkpoints: Mapping[str, fd.Checkpoints],
    seeds: Sequence[int],
    rounds: int,
) -> dict[str, tuple[fd.ServerState | None, list[dict[str, Any]]]]:
    """Returns the newest state and the history of each algorithm that has a checkpoint.

    With several seeds, the sweep restores the states itself.
    """
    if len(seeds) > 1:
        restored_sweeps = {}
        for name, kept in checkpoints.items():
            each = split_by_run(kept, [f"seed-{seed}" for seed in seeds])
            _, histories = restore_together(each, [simulations[name].specification] * len(seeds), rounds)
            records = [{"seed": seed, **r} for seed, history in zip(seeds, histories, strict=True) for r in history]
            restored_sweeps[name] = (None, records)
        return {name: pair for name, pair in restored_sweeps.items() if pair[1]}
    restored = {name: kept.restore(simulations[name]) for name, kept in checkpoints.items() if kept.rounds}
    for name in simulations.keys() - restored.keys():
        bank = Path(simulations[name].bank)  # if it is a folder, it is for one process
        if bank.is_dir() and not spans_processes(simulations[name].mesh):
            bank.rename(unused(bank.with_name(bank.name + ".left")))
    return dict(restored)


def _delete(folders: Sequence[Path], output: Path, names: Sequence[str]) -> None:
    """Deletes the files that --force replaces: checkpoints and models."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        for file in (output / file_name(name)).glob(f"**/{MODEL}"):
            file.unlink()


def _checkpoints(args: argparse.Namespace, config: Mapping[str, Any], output: Path) -> dict[str, fd.Checkpoints]:
    """Returns the `Checkpoints` of each algorithm, or an empty dict with --keep 0."""
    if args.resumed and not args.keep:
        raise ConfigurationError(
            f"--resume needs checkpoints, got {output}, a run with --keep 0: start it again from the beginning"
        )
    if not args.keep:
        return {}
    folders = {name: f"{i}-{file_name(name)}" for i, name in enumerate(config["algorithms"], 1)}
    how = config["checkpoints"]
    return {name: fd.Checkpoints(output / "checkpoints" / folder, **how) for name, folder in folders.items()}


def simulate(
    config: Mapping[str, Any],
    names: Sequence[str],
    before: Mapping[str, Sequence[dict[str, Any]]],
    start: Callable[[str, list[dict[str, Any]], Callable[[dict[str, Any]], None]], Ended],
    ended: Callable[[list[dict[str, Any]]], bool],
    output: Path,
    progress: bool | None,
    data: fd.FederatedData,
    final_table: Callable[..., str],
) -> int:
    """Runs one algorithm after another. After Ctrl-C, it reports the completed rounds.

    With several processes, only the first writes files. If an algorithm fails, for example because its model has
    diverged, the next one runs.

    before: the histories of the algorithms that were restored. start: ``start(name, history, on_round)`` runs an
    algorithm. ended: ``ended(history)``, whether all rounds have been run, or the runs have ended early.
    """
    writes = fd.distributed.is_first()
    if writes:
        try:
            output.mkdir(parents=True, exist_ok=True)
            replace_file(output / CONFIG, json.dumps(config, indent=2) + "\n")
        except OSError as error:  # no rounds have been run that could be lost
            raise ConfigurationError(
                f"--output must be a folder where files can be written, got {output} ({error.strerror}): choose "
                "another folder"
            ) from error
    print(heading(config, output), flush=True)
    resume = ["fedjax-drift", "run", "--resume", str(output)]
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
            done = len(history) // len(files)
            if ended(history) and all(file.exists() for file in files) and not config["per_client"]:
                if done == config["rounds"]:
                    print(f"{name} has done its {done} rounds")
                else:
                    why = "by --patience or --stop-at-target: a larger --patience or --target continues it"
                    print(f"{name} was ended after {done} rounds {why}")
                continue
            if progress is False or not watched():  # no bar names the algorithm
                print(f"running {name}: {rounds_to_do(done, config['rounds'])}", flush=True)
            try:
                end = start(name, history, keep)
                per_client |= {name: end.scores} if end.scores else {}
                if writes:
                    for file, seed in zip(files, config["seeds"], strict=True):
                        with written(file, output) as new:
                            fd.models.save_params(end.states[seed].params, new, data)
                interrupted = not ended(history)  # Simulation.run returns normally after Ctrl-C
            except KeyboardInterrupt:
                interrupted = True
            except SystemExit as ending:  # SIGTERM: there is no time for plots
                done = len(history) // len(files)
                print(
                    f"\nfedjax-drift: stopped {name} after {done} rounds; to resume: {shlex.join(resume)}",
                    file=sys.stderr,
                )
                return int(ending.code or 0)
            except (ConfigurationError, FloatingPointError, OSError, MemoryError) as error:
                stopped.append(f"{name} after {len(history) // len(files)} of {config['rounds']} rounds")
                if writes:
                    show_error(f"stopped {stopped[-1]}: {error}")
            if interrupted:
                break
    if before:  # the rounds of the algorithms may be out of order in the log
        try:
            fd.logs.Log(output, lines(), tensorboard=config["tensorboard"]).close()
        except ValueError as error:  # the disk has no room for the sorted log
            checks.warn(str(error))
    records = {name: history for name, history in records.items() if history}
    names_written = ["config.json", "rounds.jsonl", "rounds.csv"]
    if writes:
        names_written += write_summary(records, config["target"], output)
        names_written += [*draw_runs(records, config["target"], data, output), *write_clients(per_client, output)]
        folders = [file_name(name) for name in names if any((output / file_name(name)).glob(f"**/{MODEL}"))]
        names_written += [f"{folder}/{'seed-*/' if several else ''}{MODEL}" for folder in folders]
    if records:
        print("\n" + final_table(records, config["target"]))
    if any("accuracy" in scores for scores in per_client.values()):
        print("\n" + clients_table(per_client))
    closing = [f"stopped: {', '.join(stopped)}"] if stopped else []
    closing.append(f"{'interrupted: ' if interrupted else ''}{output}: {', '.join(names_written)}")
    lines_below = [line for text in closing for line in wrap(text, "", "  ")]
    if interrupted and config["checkpoints"]["keep"] > 0:
        lines_below += ["to resume:", wrapped_command(resume)]
    print("", *lines_below, sep="\n")
    return 130 if interrupted else 1 if stopped else 0


def _processes(text: str) -> tuple[str, int, int]:
    if not (match := re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", text)):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT,P,I, such as node0:1234,4,0, got {text!r}")
    return match[1], int(match[2]), int(match[3])


def _target(text: str) -> float:
    try:
        accuracy = float(text)
    except ValueError:
        accuracy = -1.0
    if not 0 < accuracy <= 1:
        hint = f": {accuracy / 100:g} for {accuracy:g} %" if 1 < accuracy <= 100 else ""
        raise argparse.ArgumentTypeError(f"must be an accuracy in 0..1, got {text!r}{hint}")
    return accuracy
