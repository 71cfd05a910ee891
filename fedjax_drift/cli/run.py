"""Simulates algorithms on a data set, one after another, and compares them.

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

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.cli.flags import add, add_run, add_switch, flags_of_run, needs
from fedjax_drift.cli.output import add_checkpoints, add_output, output_folder, resume_words, write_results, written
from fedjax_drift.cli.parsed_run import BANKS, ParsedRun, algorithm_specs, assemble, use_devices, words_of
from fedjax_drift.cli.render import clients_table, heading, show_error, table, wrap, wrapped_command
from fedjax_drift.cli.resume import Restored, absolute_paths, restored
from fedjax_drift.cli.values import ACCURACY, COUNT, processes, reader
from fedjax_drift.devices.processes import first_does
from fedjax_drift.disk import lock_folder, replace_file
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.records import By
from fedjax_drift.run_folder import CONFIG, MODEL, file_name, model_file
from fedjax_drift.simulation.progress import watched
from fedjax_drift.simulation.sweep import check_sweepable
from fedjax_drift.simulation.until import Until, has_ended
from fedjax_drift.spec import integer
from fedjax_drift.track import IDS, TRACKERS, needs_tracker
from fedjax_drift.types import Record


# fmt: off
def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --dataset NAME --algorithm NAME [options]\n       %(prog)s --resume OUTPUT"
    group = add_run(parser)
    add(group, "--distributed", "run as one of several processes that are started with the same "
        "command, for example by srun or mpirun. Without such a launcher, pass the address of the first process, the "
        "number of processes P, and the index I (0..P-1) of this process", processes, metavar="HOST:PORT,P,I",
        nargs="?", const=(None,) * 3)
    add_output(group)
    add(group, "--seeds", "number of seeds; the seeds are SEED to SEED + N - 1. A seed changes the cohorts and "
        "the initial model, but not the partition. All seeds run in one program. Tables and plots show "
        "the mean over seeds and its 95 % confidence interval", reader(Annotated[int, integer(1, 10_000)]), 1)
    add(group, "--target", "target accuracy in 0..1: report and plot the first round that reaches this accuracy",
        ACCURACY, metavar="ACCURACY")
    add(group, "--by", "what --target, the tables and curves.png count: round, time (virtual seconds) or "
        "megabytes (sent and received by the clients)", reader(By), "round")
    add(group, "--until-time", "end a run at the first evaluation after so many virtual seconds", float)
    add(group, "--until-megabytes", "end a run at the first evaluation after the clients have exchanged so many "
        "megabytes", float)
    add_switch(group, "--stop-at-target", "end a run when it reaches the target accuracy")
    add(group, "--patience", "end a run after N evaluations without a better accuracy (without accuracies: loss). "
        "With --validation, they are evaluations on held-out training examples", COUNT)
    add(group, "--track", f"send every round to a tracker, one of {', '.join(TRACKERS)}. It writes to the "
        "output folder, unless WANDB_MODE or MLFLOW_TRACKING_URI is set. Each algorithm and seed is a tracked run. "
        "Give --track several times for several trackers", metavar="TRACKER", action="append",
        choices=[*TRACKERS])
    group.add_argument("--tensorboard", dest="track", action="append_const", const="tensorboard",
                       help="short for --track tensorboard")
    add_switch(group, "--per-client", "at the end, evaluate the global model and the client's own model on "
        "each client's own test data. The own model is that of the algorithm (ditto, fedper), otherwise the global "
        "model after one epoch on the client's training data. If the data have one common test set, it is split: each "
        "client gets test data with the label mix of its training data. With several seeds the mean is reported")
    add_checkpoints(parser.add_argument_group("checkpoints"), "run", keep=3)
# fmt: on


@dataclass(frozen=True)
class Job:
    """A run whose options are checked.

    Attributes:
      parsed: The simulations.
      seeds: The seeds of every algorithm.
      output: The folder of the results.
      checkpoints: Those of each algorithm. Empty with --keep 0.
      until: The rule that ends a run early.
      progress: As in `Simulation.run`.
      changed: The flags that do not have their defaults.
    """

    parsed: ParsedRun
    seeds: Sequence[int]
    output: Path
    checkpoints: Mapping[str, fd.Checkpoints]
    until: Until | None
    progress: bool | None
    changed: Mapping[str, Any]

    def rounds_done(self, history: Sequence[Record]) -> int:
        """The number of rounds that an algorithm has done with every seed."""
        return len(history) // len(self.seeds)

    def is_done(self, history: Sequence[Record]) -> bool:
        """Whether an algorithm has done all rounds with every seed, or the rule has ended its runs."""
        runs = [[record for record in history if record.get("seed", seed) == seed] for seed in self.seeds]
        rounds, until = self.parsed.rounds, self.until
        return all(len(run) == rounds or (until is not None and has_ended(until, run)) for run in runs)

    def train(
        self, name: str, state: fd.ServerState | None, history: list[Record], logs: Sequence[Callable[[Record], None]]
    ) -> dict[int, fd.ServerState]:
        """Runs an algorithm. Appends the records to the history and to the logs. Returns the last state of each seed.

        state: where the run resumes. With several seeds, the sweep restores the states itself.
        """
        parsed, sim, done = self.parsed, self.parsed.simulations[name], self.rounds_done(history)
        if self.progress is False or not watched():  # no bar names the algorithm
            left = f"rounds {done + 1} to {parsed.rounds}" if done else f"{parsed.rounds} rounds"
            print(f"running {name}: {left}", flush=True)

        def keep(record: Record) -> None:
            history.append(record)
            for log in logs:
                log({"algorithm": name, **record})

        options: dict[str, Any] = {"measure_every": parsed.measure_every, "checkpoints": self.checkpoints.get(name)}
        options |= {"until": self.until, "progress": self.progress}
        if len(self.seeds) == 1:
            state = sim.init(jax.random.key(parsed.seed), parsed.params) if state is None else state
            state, _ = sim.run(state, parsed.rounds - done, parsed.eval_every, on_round=keep, **options)
            return {parsed.seed: state}
        options["on_round"] = lambda seed, _, record: keep({"seed": seed, **record})
        runs = sim.sweep(parsed.rounds, self.seeds, parsed.eval_every, params=parsed.params, **options)
        return {run.seed: run.state for run in runs}

    def scores(self, name: str, states: Mapping[int, fd.ServerState]) -> dict[str, np.ndarray]:
        """Returns the scores of each client, as means over the seeds."""
        sim = self.parsed.simulations[name]
        fine_tune = 1 if sim.algorithm.personal is None else None
        scores = [sim.evaluate_clients(state, fine_tune) for state in states.values()]
        return {key: np.mean([each[key] for each in scores], axis=0) for key in scores[0]}

    def model_files(self, name: str) -> dict[int, Path]:
        """Returns the file of the parameters for each seed."""
        return {seed: model_file(self.output, name, seed if len(self.seeds) > 1 else None) for seed in self.seeds}


def start(args: argparse.Namespace, argv: Sequence[str], final_table: Callable[..., str] = table) -> Callable[[], int]:
    """Checks the options and reads the data. Returns a function that runs the algorithms.

    final_table: ``final_table(records, target, by)`` is printed at the end.
    """
    output = args.resume or output_folder(args, args.dataset.name, *(spec.name for spec in algorithm_specs(args)))
    earlier = json.loads((output / CONFIG).read_text()) if args.resume else {}
    if args.rounds < earlier.get("rounds", 1):
        checks.refuse(f"--rounds must be at least {earlier['rounds']}, as in the resumed run", args.rounds)
    _check(args)
    if not args.distributed:
        use_devices(args.devices)
    parsed = assemble(args)
    _check_simulations(args, parsed.simulations.values())
    saves = {"every": args.checkpoint_every, "seconds": args.checkpoint_seconds, "keep": args.keep}
    folders = {name: output / "checkpoints" / f"{i}-{file_name(name)}" for i, name in enumerate(parsed.simulations, 1)}
    checkpoints = {name: fd.Checkpoints(folder, **saves) for name, folder in folders.items() if args.keep}
    seeds, progress = range(args.seed, args.seed + args.seeds), False if args.no_progress else None
    changed = {name: words_of(v) for name, default in flags_of_run().items() if (v := getattr(args, name)) != default}
    job = Job(parsed, seeds, output, checkpoints, _until(args), progress, changed)
    config = {
        "command": shlex.join(["fedjax-drift", *absolute_paths(argv)]),
        **parsed.config,
        "seeds": [*seeds],
        "target": args.target,
        "by": args.by,
        "checkpoints": saves,
        "track": [*dict.fromkeys(args.track or ())],
        "per_client": args.per_client,
        "started": earlier.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(args.started)),
    }

    def work() -> int:
        mesh = next(iter(parsed.simulations.values())).mesh
        before: dict[str, Restored] = {}
        with contextlib.ExitStack() as locked:  # no other process writes to the folder meanwhile
            first_does(mesh, lambda: locked.enter_context(lock_folder(output / "checkpoints", "--output")))
            if args.resume:
                before = restored(parsed.simulations, checkpoints, seeds, args.rounds)
                if not before:
                    checks.warn(f"{output} has no checkpoint yet: the run starts again from round 0")
            else:
                first_does(mesh, lambda: _delete(output, folders))
            return simulate(config, job, before, final_table)

    return work


def _check(args: argparse.Namespace) -> None:
    """Checks the options that only this command has."""
    needs(args, "--stop-at-target", "--target", "add --target 0.98, for example")
    if args.seeds > 1 and args.distributed:
        checks.refuse("--seeds must be 1 with --distributed", args.seeds, "leave one of the two options out")
    for flag, value in (("--target", args.target), ("--patience", args.patience)):
        if value is not None and not args.eval_every:
            checks.refuse(f"{flag} needs evaluations", f"{value} with --eval-every 0", "leave --eval-every 0 out")
    if args.resume and not args.keep:
        got = f"{args.resume}, a run with --keep 0"
        checks.refuse("--resume needs checkpoints", got, "start it again from the beginning")
    for tracker in args.track or ():
        needs_tracker(tracker)


def _check_simulations(args: argparse.Namespace, simulations: Iterable[fd.Simulation]) -> None:
    """Checks that the simulations can run with several seeds, and that their folders of client states are new."""
    for sim in simulations:
        try:
            if args.seeds > 1:
                check_sweepable(sim.setup)
        except ValueError as error:
            raise ConfigurationError(f"--seeds {args.seeds}: {error}") from error
        bank = Path(sim.bank)
        if sim.bank not in BANKS and not args.resume and bank.exists() and (not bank.is_dir() or any(bank.iterdir())):
            got = f"{args.bank}, which has {bank}"
            checks.refuse("--bank must be a new or empty folder", got, "choose another folder")


def _until(args: argparse.Namespace) -> Until | None:
    """Returns the rule that ends a run early: those of --stop-at-target, --patience and --until-*."""
    rules = [fd.until.reaches(accuracy=args.target)] if args.stop_at_target else []
    if args.patience is not None:
        by_loss, by_accuracy = fd.until.stalls("loss", args.patience), fd.until.stalls("accuracy", args.patience)
        rules.append(lambda history: (by_accuracy if "accuracy" in history[-1] else by_loss)(history))
    rules += [] if args.until_time is None else [fd.until.time(args.until_time)]
    rules += [] if args.until_megabytes is None else [fd.until.megabytes(args.until_megabytes)]
    return (lambda history: any(rule(history) for rule in rules)) if rules else None


def _delete(output: Path, folders: Mapping[str, Path]) -> None:
    """Deletes the checkpoints and models of an earlier run, which --force replaces. Tracked runs don't continue."""
    (output / IDS).unlink(missing_ok=True)
    for name, folder in folders.items():
        shutil.rmtree(folder, ignore_errors=True)
        for file in (output / file_name(name)).glob(f"**/{MODEL}"):
            file.unlink()


def simulate(config: Mapping[str, Any], job: Job, before: dict[str, Restored], final_table: Callable[..., str]) -> int:
    """Runs one algorithm after another. After Ctrl-C, it reports the completed rounds.

    With several processes, only the first writes files. If an algorithm fails, for example because its model has
    diverged, the next one runs.

    before: the states and histories of the algorithms that were restored.
    """
    writes, is_resumed = fd.distributed.is_first(), bool(before)
    if writes:
        job.output.mkdir(parents=True, exist_ok=True)
        replace_file(job.output / CONFIG, json.dumps(config, indent=2) + "\n")
    print(heading(config, job.changed, job.output), flush=True)
    records = {name: list(before[name][1]) if name in before else [] for name in config["algorithms"]}
    per_client: dict[str, dict[str, np.ndarray]] = {}
    name, stopped, interrupted = "", list[str](), False
    try:
        with fd.logs.Log(job.output, _lines(records)) as log:
            for name, history in records.items():
                files, done = job.model_files(name), job.rounds_done(history)
                if job.is_done(history) and all(map(Path.exists, files.values())) and not config["per_client"]:
                    early = "by --patience or --stop-at-target: a larger --patience or --target continues it"
                    all_done, ended = f"has done its {done} rounds", f"was ended after {done} rounds {early}"
                    print(name, all_done if done == config["rounds"] else ended)
                    continue
                try:
                    with contextlib.ExitStack() as tracked:
                        tracks = [tracked.enter_context(track) for track in _tracks(config, job, name, history)]
                        states = job.train(name, before.pop(name, (None, []))[0], history, [log, *tracks])
                    if config["per_client"] and job.is_done(history):
                        per_client[name] = job.scores(name, states)
                    for seed, file in files.items() if writes else ():
                        with written(file, job.output) as new:
                            fd.models.save_params(states[seed].params, new, job.parsed.data)
                except (ConfigurationError, FloatingPointError, OSError, MemoryError) as error:
                    stopped.append(f"{name} after {job.rounds_done(history)} of {config['rounds']} rounds")
                    if writes:
                        show_error(f"stopped {stopped[-1]}: {error}")
                    continue
                if not job.is_done(history):  # Simulation.run returns normally after Ctrl-C
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    except SystemExit as ending:  # SIGTERM: there is no time for plots
        done, again = job.rounds_done(records[name]), shlex.join(resume_words(job.output))
        print(f"\nfedjax-drift: stopped {name} after {done} rounds; to resume: {again}", file=sys.stderr)
        return int(ending.code or 0)
    if is_resumed:  # the rounds of the algorithms may be out of order in the log
        try:
            fd.logs.Log(job.output, _lines(records)).close()
        except ValueError as error:  # the disk has no room for the sorted log
            checks.warn(str(error))
    _report(config, job, records, per_client, stopped, interrupted, final_table)
    return 130 if interrupted else 1 if stopped else 0


def _tracks(config: Mapping[str, Any], job: Job, name: str, history: Sequence[Record]) -> Iterator[fd.logs.Track]:
    """Yields the trackers of an algorithm. They continue the tracked runs of the folder, or create them."""
    own = {"algorithm": config["algorithms"][name], "bank": config["bank"][name]}
    settings = {key: value for key, value in config.items() if key != "algorithms"} | own
    for tracker in config["track"]:
        track = fd.logs.Track(tracker, job.output, settings, history, name=name)
        for seed in job.seeds:
            track.start(seed if len(job.seeds) > 1 else None)
        yield track


def _lines(records: Mapping[str, Sequence[Record]]) -> list[Record]:
    """Returns the records of all algorithms, as they are logged."""
    return [{"algorithm": name, **record} for name, history in records.items() for record in history]


def _report(
    config: Mapping[str, Any],
    job: Job,
    records: Mapping[str, list[Record]],
    per_client: Mapping[str, dict[str, np.ndarray]],
    stopped: Sequence[str],
    interrupted: bool,
    final_table: Callable[..., str],
) -> None:
    """Writes the tables and plots, and prints the results."""
    records = {name: history for name, history in records.items() if history}
    files = ["config.json", "rounds.jsonl", "rounds.csv"]
    if fd.distributed.is_first():
        files += write_results(job.output, records, per_client, (config["target"], config["by"]), job.parsed.data)
        models = "seed-*/" * (len(job.seeds) > 1) + MODEL
        folders = [file_name(name) for name in config["algorithms"]]
        files += [f"{folder}/{models}" for folder in folders if any(job.output.glob(f"{folder}/{models}"))]
    if records:
        print("\n" + final_table(records, config["target"], config["by"]))
    if any("accuracy" in scores for scores in per_client.values()):
        print("\n" + clients_table(per_client))
    closing = [f"stopped: {', '.join(stopped)}"] if stopped else []
    closing.append(f"{'interrupted: ' * interrupted}{job.output}: {', '.join(files)}")
    print("", *(line for text in closing for line in wrap(text, "", "  ")), sep="\n")
    if interrupted and job.checkpoints:
        print("to resume:", wrapped_command(resume_words(job.output)), sep="\n")
