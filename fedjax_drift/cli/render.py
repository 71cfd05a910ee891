"""The printed output of the commands: headings, tables, listings, errors and warnings."""

from __future__ import annotations

import contextlib
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_drift as fd
from fedjax_drift.cli.flags import DATASET
from fedjax_drift.plots.lines import BANDS
from fedjax_drift.records import By, by_run


def show_error(error: object) -> None:
    print("fedjax-drift: error: " + " ".join(str(error).split()), file=sys.stderr)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if fd.distributed.is_first():
        print(f"\nfedjax-drift: warning: {message}", file=sys.stderr)


BRIEF = {"round": "", "time": "s ", "megabytes": "MB "}  # of `records.UNITS`
SHOWN = (  # flags that the heading shows in lines of their own
    "dataset", "algorithm", "model", "rounds", "cohort", "epochs", "steps", "batch_size", "lr", "devices", "lanes",
    "devices_per_client",
)  # fmt: skip
NAME_WIDTH = 22  # columns for the name of an algorithm in the table, which then has 80 columns


def heading(config: Mapping[str, Any], changed: Mapping[str, Any], output: Path) -> str:
    """Returns what is simulated. changed: the flags that do not have their defaults."""
    data, local, model, part, devices = (config[name] for name in ("data", "local", "model", "train", "devices"))
    given = "epochs" if local["steps"] is None else "steps"
    trained = f", {part['parameters']:,} trained ({part['name']})" if part else ""
    together = f"{devices['per_client']} for each client, " if devices["per_client"] > 1 else ""
    options = []
    for flag in [flag for flag in changed if flag not in SHOWN]:
        value = changed[flag]
        words = value if isinstance(value, list) else [] if value is True else ["no"] if value is False else [value]
        options.append(" ".join([flag.replace("_", "-"), *map(str, words)]))
    return aligned({
        "data": f"{config['dataset']['name']}: {data['rows']:,} examples for training, {data['test_rows']:,} for "
        + ("validation" if config["validation"] else "testing"),
        "clients": f"{data['clients']:,} with {data['sizes']['min']:,} to {data['sizes']['max']:,} examples, "
        f"{config['cohort_size']:,} per round",
        "model": f"{model['name']}, {model['parameters']:,} parameters{trained}",
        "local training": f"{local[given]} {given[:-1]}{'s' * (local[given] > 1)}, batches of {local['batch_size']}, "
        f"lr {local['lr']}",
        **({"options": ", ".join(options)} if options else {}),
        "devices": f"{devices['count']} ({devices['platform']}), {together}lanes {config['lanes']}",
        "output": str(output),
    })  # fmt: skip


def table(records: Mapping[str, Sequence[Mapping[str, Any]]], target: float | None = None, by: By = "round") -> str:
    """Returns one line per algorithm, and a second line if it also keeps the mean of its clients' models.

    The seconds per round are a median, so that the compilation in the first round has no effect. With several seeds,
    the table has means, and a line with half the width of the 95 % confidence interval of the mean accuracy, which is
    the band of the plots.
    """
    width = min(NAME_WIDTH, max(map(len, ["algorithm", *records])))
    runs = by_run(records)
    met = {} if target is None else reached(runs, target, by)
    last = "s/round" if target is None else f"{BRIEF[by]}to {100 * target:g} %"
    lines = [f"{'algorithm':{width}}  rounds  accuracy     best  at round  train loss  {last:>8}"]
    for name, seeds in runs.items():
        if len(name) > width:  # on a separate line, because two long names may differ only at the end
            lines.append(name)
        every = [record for history in seeds for record in history]
        rounds, loss = min(map(len, seeds)), float(np.mean([history[-1]["train_loss"] for history in seeds]))
        end = f"{np.median([record['seconds'] for record in every]):8.3g}" if target is None else f"{met[name]:>8}"
        row = f"{name if len(name) <= width else '':{width}}  {rounds:6}  {_accuracies(seeds, 'accuracy')}"
        lines.append(f"{row}  {loss:#10.5g}  {end}")
        if any("client_mean_accuracy" in record for record in every):
            lines.append("  cohort's mean".ljust(width + 8) + "  " + _accuracies(seeds, "client_mean_accuracy"))
        evaluated = [[record["accuracy"] for record in history if "accuracy" in record] for history in seeds]
        finals = [accuracies[-1] for accuracies in evaluated if accuracies]
        if len(finals) > 1:
            interval = f"± {100 * fd.statistics.mean(finals).half:.1f} %"
            lines.append(f"  {len(finals)} seeds".ljust(width + 8) + f"{interval:>10}  ({BANDS['interval'][0]})")
    return "\n".join(lines)


def reached(runs: Mapping[str, Sequence[Any]], target: float, by: By = "round") -> dict[str, str]:
    """Returns when each algorithm first reaches the target, as a mean over seeds.

    ">" means that at least one seed does not reach it, and "-" that nothing was evaluated.
    """
    told = dict.fromkeys(runs, "-")
    with contextlib.suppress(ValueError):  # nothing was evaluated
        for name, seeds in fd.rounds_to_target(runs, target, by=by).items():
            mean = np.mean([seed.after if seed.round is None else seed.round for seed in seeds])
            told[name] = "> " * any(seed.round is None for seed in seeds) + f"{mean:.4g}"
    return told


def _accuracies(seeds: Sequence[Sequence[Mapping[str, Any]]], key: str) -> str:
    """Returns the last value, the best value and its round, as means over the seeds."""
    known = [[(record[key], record["round"]) for record in history if key in record] for history in seeds]
    ends = [(pairs[-1][0], *max(pairs, key=lambda pair: pair[0])) for pairs in known if pairs]
    if not ends:
        return f"{'-':>8} {'-':>8}  {'-':>8}"
    last, best, at = np.mean(ends, axis=0)
    return f"{100 * last:6.1f} % {100 * best:6.1f} %  {at:8.4g}"


def clients_table(per_client: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Returns for each algorithm the accuracies of the global model and of the clients' own models, on the clients' own
    test examples."""
    width = max(map(len, ["own test data", *per_client]))
    lines = [f"{'own test data':{width}}  clients    mean  worst 10 %  own model: mean  worst 10 %"]
    for algorithm, scores in per_client.items():
        known = [fd.personal.summary(scores[name]) for name in ("accuracy", "personal_accuracy")]
        (mean, worst), (personal, personal_worst) = [(100 * k["mean"], 100 * k["worst_10"]) for k in known]
        lines.append(f"{algorithm:{width}}  {known[0]['clients']:7.0f}  {mean:4.1f} %  {worst:8.1f} %  "
                     f"{personal:13.1f} %  {personal_worst:8.1f} %")  # fmt: skip
    return "\n".join(lines)


def listing(data_dir: str | None) -> str:
    """Returns the list of data sets: their sources on this machine, and how to get the missing ones."""
    described = fd.datasets.describe(data_dir)
    lines = ["data set       labels  where"]
    for entry in described:
        offer = f" (download: {entry['download'] / 1e6:,.1f} MB from {entry['server']})" if entry["download"] else ""
        lines.append(
            f"{entry['name']:13}  {entry['classes']:6}  {entry['location']}{'' if entry['available'] else offer}"
        )
    lines += ["", "Options, written NAME:key=value,key=value, with their defaults:"]
    for name in DATASET.factories:
        if options := DATASET.known(name):
            listed = ", ".join(f"{option}={parameter.default}" for option, parameter in options.items())
            lines += wrap(f"{name}: {listed}", "  ", "      ")
    for entry in described:
        if not entry["available"]:
            lines += ["", f"To get {entry['name']}:"]
            lines += wrap(entry["instructions"], "  ", "  ")
    lines += ["", "To plot the clients of one: fedjax-drift data NAME --partition dirichlet:0.3 --clients 100"]
    return "\n".join(lines)


def aligned(entries: Mapping[str, str]) -> str:
    width = max(map(len, entries)) + 2
    return "\n".join("\n".join(wrap(f"{key:{width}}{value}", "", " " * width)) for key, value in entries.items())


def wrap(text: str, first: str, later: str, width: int = 80) -> list[str]:
    """Wraps the text at 80 columns. Words are not broken, so that paths and options can be copied."""
    wrapper = textwrap.TextWrapper(width, first, later, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def wrapped_command(words: Sequence[str], width: int = 76) -> str:
    """Returns a command that can be copied into a shell. Lines break only between words, after a backslash."""
    lines: list[str] = []
    for word in map(shlex.quote, words):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{'      ' if lines else '  '}{word}")
    return " \\\n".join(lines)
