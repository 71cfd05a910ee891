"""Tunes hyper-parameters with the same effort for every algorithm.

Takes the options of fedjax-drift run.

examples:
  fedjax-drift tune --dataset mnist --partition dirichlet:0.1 --rounds 25 \\
      --algorithm fedavg --algorithm fedprox:mu=0.1 --range fedprox:mu=1e-4:1
  fedjax-drift tune --dataset glyphs:num_writers=100 --settings 16 \\
      --algorithm fedavgm --range lr=0.01:0.3 --range fedavgm:beta=0.3:0.95:linear

Every algorithm tries the same number of settings. A range without an algorithm
is for all of them, and they get the same values. A value from a range replaces
that of --algorithm. Learning rates are drawn from 0.01:1 unless --range lr=...
is given. Draws are uniform in the logarithm, or with :linear in the value.

A setting is scored by the mean of the last fifth of its evaluations, at least
two, and then over the seeds. For algorithms with personal models, the score is
the accuracy of these models. The examples that give the score are held out from
the training examples (10 %, or --validation SHARE), so the test set chooses
nothing. The output folder contains tuning.jsonl, with the score of each setting.

To resume a tuning that was stopped or killed:

  fedjax-drift tune --resume OUTPUT

The options --devices, --devices-per-client, --lanes and --no-progress may be
changed when a tuning is resumed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.cli.flags import add, add_run
from fedjax_drift.cli.output import add_checkpoints, add_output, output_folder, resume_words, written
from fedjax_drift.cli.parsed_run import algorithm_specs, assemble, load_data, use_devices
from fedjax_drift.cli.render import wrap, wrapped_command
from fedjax_drift.cli.resume import absolute_paths
from fedjax_drift.cli.values import COUNT, LOCAL, Chosen, reader
from fedjax_drift.disk import lock_folder, replace_file
from fedjax_drift.run_folder import CONFIG, file_name
from fedjax_drift.simulation.sweep import check_sweepable
from fedjax_drift.spec import integer
from fedjax_drift.tuning import Range, at_edge

LR = Range(0.01, 1.0)  # the learning rates without --range lr=LOW:HIGH
VALIDATION = 0.1  # share of each client's training examples that gives the score
FILE, SETTINGS = "tuning.jsonl", "settings"  # the scores, and the folder of checkpoints
OWN = (  # flags that the command `run` of the best setting does not get
    "--algorithm", "--range", "--settings", "--seeds", "--validation", "--output", "--checkpoint-every",
    "--checkpoint-seconds", "--keep",
)  # fmt: skip
NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
RANGE = re.compile(rf"(?:(\w+):)?(\w+)={NUMBER}:{NUMBER}(:linear)?")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s --dataset NAME --algorithm NAME --range [NAME:]OPTION=LOW:HIGH [options]\n"
        "       %(prog)s --resume OUTPUT"
    )
    group = add_run(parser)
    add_output(group)
    text = (
        "a range of an option of local training, such as lr=0.01:1, or of a hyper-parameter of the algorithm NAME, "
        "such as fedprox:mu=1e-4:1. Give it several times for several options"
    )
    add(group, "--range", text, metavar="[NAME:]OPTION=LOW:HIGH[:linear]", action="append")
    add(group, "--settings", "number of settings of each algorithm", COUNT, 8)
    several = reader(Annotated[int, integer(2, 10_000)])
    add(group, "--seeds", "number of seeds of each setting, at least 2", several, len(fd.tuning.SEEDS))
    add_checkpoints(parser.add_argument_group("checkpoints"), "tuning", keep=1)


def start(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    """Checks the options and reads the data. Returns a function that tries the settings."""
    specs = algorithm_specs(args)
    shared, own = ranges(args.range or [], specs)
    output = args.resume or output_folder(args, "tune", *(spec.name for spec in specs))
    if not args.eval_every:
        checks.refuse("tune needs evaluations", "--eval-every 0", "leave --eval-every 0 out")
    if args.validation is None and args.dataset.name != "movielens":  # its test examples are ranked in groups
        args.validation = VALIDATION
    use_devices(args.devices)
    data = load_data(args)
    parsed = assemble(args, data)
    for sim in parsed.simulations.values():
        check_sweepable(sim.setup)
        if sim.setup.in_files:
            fix = "leave it out, because the client states of all settings would stay there"
            checks.refuse("--bank must be auto, device, sharded or host", args.bank, fix)
    tried = [fd.tuning.settings(shared, own[spec.text], args.settings, args.dataset.text, spec.text) for spec in specs]
    config = {"command": shlex.join(["fedjax-drift", *absolute_paths(argv)]), "versions": parsed.config["versions"]}
    again = resume_words(output, "tune")

    def work() -> int:
        with lock_folder(output / "checkpoints", "--output"):  # no other process writes to the folder meanwhile
            replace_file(output / CONFIG, json.dumps(config, indent=2) + "\n")
            if not args.resume:  # --force replaces the files of an earlier command
                (output / FILE).unlink(missing_ok=True)
                shutil.rmtree(output / "checkpoints" / SETTINGS, ignore_errors=True)
            scored, interrupted = _scored(output, specs), False
            for spec, settings in zip(specs, tried, strict=True):
                if spec.text in scored:
                    print(f"{spec.text} is tuned")
                    continue
                saved = output / "checkpoints" / SETTINGS / file_name(spec.text)
                effort = f"{args.settings} settings, {args.seeds} seeds, {args.rounds} rounds"
                print(f"tuning {spec.text}: {effort}", flush=True)
                try:
                    results = _scores(args, data, parsed.params, spec, settings, saved)
                except SystemExit as ending:  # SIGTERM
                    print(f"\nfedjax-drift: stopped {spec.text}; to resume: {shlex.join(again)}", file=sys.stderr)
                    return int(ending.code or 0)
                if results is None:
                    interrupted = True
                    break
                scored[spec.text] = results
                lines = [json.dumps({"algorithm": name, **result}) for name, of in scored.items() for result in of]
                with written(output / FILE, output, "tune") as new:
                    new.write_text("\n".join(lines) + "\n")
                shutil.rmtree(saved, ignore_errors=True)  # the scores are all that is needed of these runs
        if scored:
            print("\n" + table(scored))
            for text in at_edges(scored):
                print(*wrap(text, "", "  "), sep="\n")
            print("\nto run the best settings on all training examples:")
            print("\n".join(wrapped_command(words) for words in commands(argv, specs, scored)))
        files = f": {FILE}" if scored else ""
        print("", *wrap(f"{'interrupted: ' * interrupted}{output}{files}", "", "  "), sep="\n")
        if interrupted:
            print("to resume:", wrapped_command(again), sep="\n")
        return 130 if interrupted else 0

    return work


def _scored(output: Path, specs: Sequence[Chosen]) -> dict[str, list[dict[str, Any]]]:
    """Returns the settings and scores of the algorithms that an earlier process has tuned."""
    if not (output / FILE).exists():
        return {}
    known: dict[str, list[dict[str, Any]]] = {}
    for line in fd.logs.read(output / FILE):
        known.setdefault(line["algorithm"], []).append({"setting": line["setting"], "score": line["score"]})
    return {spec.text: known[spec.text] for spec in specs if spec.text in known}


def _scores(
    args: argparse.Namespace,
    data: fd.FederatedData,
    params: Any,
    spec: Chosen,
    settings: Sequence[dict[str, float]],
    saved: Path,
) -> list[dict[str, Any]] | None:
    """Returns each setting of an algorithm with its score, or None after Ctrl-C. saved: the folder of checkpoints."""
    alone = argparse.Namespace(**{**vars(args), "algorithm": [spec]})

    def simulation(**values: Any) -> fd.Simulation:
        return assemble(alone, data, values).simulations[spec.text]

    different = [setting for i, setting in enumerate(settings) if setting not in settings[:i]]
    options: dict[str, Any] = {"params": params, "progress": False if args.no_progress else None}
    if args.keep:
        saves = args.checkpoint_every, args.checkpoint_seconds, args.keep
        options["checkpoints"] = fd.Checkpoints(saved, *saves, best=None)
    seeds = range(fd.tuning.SEEDS[0], fd.tuning.SEEDS[0] + args.seeds)
    runs = fd.sweep(simulation, args.rounds, seeds, different, args.eval_every, **options)
    if any(int(jax.device_get(run.state.round)) < args.rounds for run in runs):
        return None
    scores = [fd.tuning.score(simulation(**of), [run for run in runs if run.setting == of]) for of in different]
    return [{"setting": setting, "score": scores[different.index(setting)]} for setting in settings]


def ranges(texts: Sequence[str], specs: Sequence[Chosen]) -> tuple[dict[str, Range], dict[str, dict[str, Range]]]:
    """Returns the ranges of the options of local training, and for each algorithm those of its hyper-parameters."""
    shared, own = {"lr": LR}, {spec.text: dict[str, Range]() for spec in specs}
    for text in texts:
        if not (match := RANGE.fullmatch(text)):
            checks.refuse(
                "--range must be [NAME:]OPTION=LOW:HIGH[:linear], such as lr=0.01:1 or fedprox:mu=1e-4:1", repr(text)
            )
        algorithm, option = match[1], match[2]
        interval = Range(float(match[3]), float(match[4]), match[5] is None)
        if algorithm is None:
            shared[checks.choice(f"the option of --range {text}", option, LOCAL)] = interval
            continue
        checks.choice(f"the algorithm of --range {text}", algorithm, [spec.name for spec in specs])
        for spec in specs:
            if spec.name == algorithm:
                own[spec.text][checks.choice(f"the option of --range {text}", option, spec.defaults)] = interval
    return shared, own


def table(scored: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns the best setting of each algorithm, one per line."""
    width = max(map(len, ["algorithm", *scored]))
    lines = [f"{'algorithm':{width}}   score  best setting"]
    for name, results in scored.items():
        best = _best(results)
        setting = ", ".join(f"{option} {value:g}" for option, value in best["setting"].items())
        lines.append(f"{name:{width}}  {100 * best['score']:4.1f} %  {setting}")
    return "\n".join(lines)


def at_edges(scored: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Returns a line for each algorithm whose best learning rate is at the edge of those that were tried."""
    texts = {n: at_edge([result["setting"] for result in of], _best(of)["setting"], ["lr"]) for n, of in scored.items()}
    return [f"{name}: {text}; tune with a wider --range lr=LOW:HIGH" for name, of in texts.items() for text in of]


def _best(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the setting with the highest score, and its score."""
    return max(results, key=lambda result: result["score"])


def commands(
    argv: Sequence[str], specs: Sequence[Chosen], scored: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[list[str]]:
    """Yields the command `run` with the best setting of each algorithm. argv: the words of the command `tune`."""
    tuned = {name for results in scored.values() for result in results for name in result["setting"] if name in LOCAL}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in (*OWN, *_flags(tuned)):
        parser.add_argument(flag, action="append")
    _, common = parser.parse_known_args([*argv[1:]])
    for spec in specs:
        if spec.text in scored:
            best = _best(scored[spec.text])["setting"]
            own = spec.options | {name: f"{value:.4g}" for name, value in best.items() if name not in LOCAL}
            words = {name: "+".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in own.items()}
            options = ",".join(f"{name}={word}" for name, word in words.items())
            local = [word for name in LOCAL if name in best for word in (*_flags([name]), f"{best[name]:.4g}")]
            yield ["fedjax-drift", "run", *common, "--algorithm", spec.name + f":{options}" * bool(options), *local]


def _flags(names: Iterable[str]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names]
