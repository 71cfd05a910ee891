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
import dataclasses
import functools
import inspect
import json
import math
import os
import platform
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
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.checkpoint import lock_folder, unused
from fedjax_drift.checks import nearest
from fedjax_drift.data import movielens
from fedjax_drift.data.datasets import CLASSES, DATASETS
from fedjax_drift.drift import MEASURES
from fedjax_drift.models import MODELS, num_parameters
from fedjax_drift.sharding import agree, first_does, spans_processes

PARTITIONS: dict[str, Callable[..., fd.partition.Partition]] = {
    "iid": fd.partition.iid,
    "dirichlet": fd.partition.dirichlet,
    "shards": fd.partition.shards,
    "by_writer": fd.partition.by_writer,
}
DEFAULT_MODEL = {
    "synthetic": "linear",
    "glyphs": "lenet5",
    "femnist": "lenet5",
    "mnist": "mnist_2nn",
    "fashion_mnist": "mnist_2nn",
    "cifar10": "cifar_cnn",
    "movielens": "din",
    "agnews": "text_classifier",
    "bindingdb": "drug_target",
}
RESUMED = ("--rounds", "--devices", "--lanes", "--stream", "--bank", "--no-progress")  # may be changed by --resume
CONFIGURED = (
    "dataset",
    "partition",
    "model",
    "bfloat16",
    "seed",
    "eval_every",
    "measure",
)  # may not: see `Checkpoints`
NAME_WIDTH = 22  # of an algorithm in the table, which then has 80 columns
FAILURES = ("dropout", "stragglers", "over_selection", "deadline", "speed_spread")
QUICKSTART = ("fedavg", "fedprox:mu=0.1", "fedavgm:beta=0.7")

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

An algorithm's options: numbers, true, false, none and words as they are;
several of one kind with a plus, as in fedgvr:literal=step+sign.

The output folder holds config.json (everything that was set, and the
command), rounds.jsonl (a line for each round and algorithm, written as the
round ends), curves.png, a picture of each thing that was measured, and
checkpoints. Ctrl-C and SIGTERM stop after the round in progress. Whatever
ended a run, it goes on with

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


class Spec(NamedTuple):
    """What was written as NAME or NAME:key=value,key=value."""

    text: str
    name: str
    options: dict[str, Any]


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
            except (ValueError, OSError) as error:
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
        except (ValueError, OSError) as error:
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


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="fedjax-drift", description="Federated learning for the study of drift.")
    parser.add_argument("--version", action="version", version=f"fedjax-drift {fd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    subparsers = {}
    for name, summary, epilog, fill in (
        ("quickstart", "compare three algorithms on generated handwriting, in a minute or two", None, _fill_quickstart),
        ("run", "simulate algorithms on a data set", RUN_EXAMPLES, _fill_run),
        ("data", "list the data sets, or draw what the clients of one hold", DATA_EXAMPLES, _fill_data),
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
    parser = _Parser(prog="fedjax-drift run", add_help=False)
    parser.add_argument("--resume", type=Path, required=True)
    for flag in RESUMED:
        kind = {"action": "store_true"} if flag == "--no-progress" else {"type": _count} if flag == "--rounds" else {}
        parser.add_argument(flag, **kind)
    parser.add_argument("--distributed", nargs="?", const=True)  # never as before: ports and numbers may differ
    args, unknown = parser.parse_known_args(argv[1:])
    if unknown:
        raise ValueError(
            f"--resume goes on as before: only {', '.join(RESUMED)} and --distributed may be added, got {unknown[0]!r}"
        )
    try:
        config = json.loads((args.resume / "config.json").read_text())
        alone = re.sub(r" --distributed(?:[ =]\S+:\d+,\d+,\d+)?(?= |$)", "", config["command"])
        command, rounds = shlex.split(alone)[1:], config["rounds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
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
    local = fd.LocalTraining()
    _add_data(parser.add_argument_group("data"), required=True)
    group = parser.add_argument_group("what is simulated")
    group.add_argument(
        "--algorithm",
        action="append",
        metavar="NAME[:key=value,...]",
        required=True,
        help=f"one of {', '.join(ALGORITHMS)}; options are those of fd.algorithms.NAME, e.g. fedprox:mu=0.01. "
        "Give it several times to compare algorithms on the same data, cohorts and initial model",
    )
    _add(
        group, "--model", "NAME[:key=value]", f"one of {', '.join(MODELS)} (default: lenet5 for glyphs and femnist, "
        "mnist_2nn for mnist and fashion_mnist, cifar_cnn for cifar10, linear for synthetic, din for movielens, "
        "text_classifier for agnews, drug_target for bindingdb)",
    )  # fmt: skip
    group.add_argument("--cosine", action="store_true", help="the model's logits are cosines, which lfd needs")
    _add(group, "--rounds", "N", "rounds", _count, 50)
    _add(group, "--cohort", "K", "clients a round", _count, 10)
    _add(
        group, "--sampling", "KIND", "uniform: exactly K clients; bernoulli: each with probability K/N", str, "uniform"
    )
    _add(
        group, "--redeal", "evenly|ALPHA", "every round, pool the cohort's rows and deal them anew: evenly (period "
        "drift only), or each label by Dirichlet(ALPHA) (client drift only, with --partition iid)", _redeal,
    )  # fmt: skip
    group = parser.add_argument_group("local training, the same for every client")
    _add(group, "--epochs", "E", "passes over a client's rows in a round", int, local.epochs)
    _add(group, "--batch-size", "B", "rows a step", int, local.batch_size)
    _add(group, "--lr", "LR", "step size in round 0", float, local.lr)
    _add(group, "--lr-decay", "FACTOR", "round t uses LR * FACTOR^t", float, local.lr_decay)
    _add(group, "--momentum", "BETA", "in [0, 1); starts afresh every round", float, local.momentum)
    _add(group, "--weight-decay", "LAMBDA", "adds LAMBDA * parameters to the gradient", float, local.weight_decay)
    _add(group, "--clip-norm", "NORM", "clip gradients to this global norm (default: no clipping)", float)
    _add(
        group, "--on-nonfinite", "WHAT", "with a client whose update is NaN or infinite: keep (averaged like any "
        "other), drop_client or raise, which stops the algorithm", str, "keep",
    )  # fmt: skip
    group = parser.add_argument_group("clients that fail, or must not stand out")
    _add(group, "--dropout", "P", "probability that a client asked does not answer", float, 0.0)
    _add(group, "--stragglers", "P", "probability that a client does only part of its local steps", float, 0.0)
    _add(group, "--over-selection", "R", "ask R times as many clients; those that answer first count", float, 1.0)
    _add(
        group, "--deadline", "T", "who takes longer does not count; 1: a client of mean size on a median device "
        "(default: none)", float,
    )  # fmt: skip
    _add(group, "--speed-spread", "SIGMA", "log-normal spread of the devices' speeds", float, 0.0)
    _add(group, "--clip-updates", "NORM", "scale what a client sends down to this norm (default: no clipping)", float)
    _add(
        group, "--noise-multiplier", "Z", "differential privacy: clients weigh alike, and noise of Z * NORM is "
        "added to their sum; needs --clip-updates and --sampling bernoulli", float,
    )  # fmt: skip
    group = parser.add_argument_group("what is measured of drift, and drawn")
    group.add_argument(
        "--measure",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME[,NAME...]",
        help="; ".join(f"{name}: {what}" for name, what in MEASURES.items()) + ". Clients are trained again for it",
    )
    _add(group, "--measure-every", "N", "rounds between measurements (default: 1)", _count)
    group = parser.add_argument_group("execution")
    _add(group, "--eval-every", "N", "rounds between evaluations on the test set, 0: never", _count0, 1)
    _add(
        group, "--devices", "N", "CPU devices to share a round (default: one per core, with --distributed one; no "
        "effect on a GPU)", _count,
    )  # fmt: skip
    group.add_argument(
        "--distributed",
        nargs="?",
        const=(None, None, None),
        type=_processes,
        metavar="HOST:PORT,P,I",
        help="this is one of several processes started with the same command, as by srun or mpirun; where nobody tells "
        "them of each other: the address of the first, how many there are, and the number of this one, from 0",
    )
    _add(group, "--lanes", "L", "clients trained side by side on one device", _lanes, "auto")
    group.add_argument("--bfloat16", action="store_true", help="networks compute in bfloat16; parameters stay float32")
    group.add_argument(
        "--stream",
        choices=("auto", "yes", "no"),
        default="auto",
        help="leave the rows in host memory and send each round its cohort's (default: auto, where they fill a device)",
    )
    bank = "where client states are kept: auto, device, sharded, host, or a new folder for files of them"
    _add(group, "--bank", "WHERE", bank, str, "auto")
    _add_output(group)
    group = parser.add_argument_group("runs that survive")
    _add(group, "--resume", "OUTPUT", "go on with the run of that folder; see below")
    _add(group, "--checkpoint-every", "N", "rounds between checkpoints (default: by the clock alone)", _count)
    _add(group, "--checkpoint-seconds", "S", "seconds between checkpoints; each algorithm's end has one", float, 60.0)
    _add(group, "--keep", "K", "checkpoints that an algorithm keeps, beside its best; 0: none are made", _count0, 3)
    parser.set_defaults(command=_run, resumed=False)


def _fill_quickstart(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = textwrap.fill(
        "Simulates writers of 62 characters: in every round, some of them train a LeNet-5 on their own images. "
        f"Compares {', '.join(QUICKSTART)}. The first time the images are drawn, which takes another minute. "
        "Prints a table and writes config.json, rounds.jsonl and curves.png.",
        78,
    )
    _add(parser, "--writers", "N", "clients of the federation", _count, 3400)
    _add(parser, "--cohort", "K", "writers a round (default: 100, or all if there are fewer)", _count)
    _add(parser, "--rounds", "N", "rounds of each algorithm", _count, 15)
    _add(parser, "--seed", "N", "of the images, the cohorts and the initial model", _seed, 0)
    _add_output(parser)
    parser.set_defaults(command=_quickstart)


def _fill_data(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [NAME[:key=value,...]] [options]"
    parser.description = textwrap.fill(
        "Without a name: lists the data sets, which of them are here and how to get the others. "
        "With a name: prints the sizes of its clients and writes federation.png, their label mixes and sizes.",
        78,
    )
    _add_data(parser, required=False)
    _add_output(parser, progress=False)
    parser.set_defaults(command=_data)


def _add_data(group: Any, required: bool) -> None:
    text = f"one of {', '.join(DATASETS)}; options, for example, glyphs:num_writers=500 or synthetic:alpha=1,beta=1"
    if required:
        group.add_argument("--dataset", required=True, metavar="NAME[:key=value,...]", help=text)
    else:
        group.add_argument("dataset", nargs="?", metavar="NAME[:key=value,...]", help=text)
    _add(
        group, "--partition", "RECIPE", "how rows are dealt to clients. iid; dirichlet:ALPHA (small ALPHA: few labels "
        "a client) or dirichlet:ALPHA:prior=class; shards:S (S blocks of the sorted labels each); by_writer "
        "(default: the clients that come with glyphs, femnist, synthetic and movielens, else iid)",
    )  # fmt: skip
    _add(group, "--clients", "N", "clients to deal the rows to (default: 100)", _count)
    _add(group, "--size-sigma", "SIGMA", "log-normal spread of the sizes, iid and dirichlet (default: 0, equal)", float)
    _add(group, "--data-dir", "DIR", "the npz files (default: $FEDJAX_DRIFT_DATA, cache, then tensorflow-datasets)")
    _add(group, "--seed", "N", "of all that is random: data, partition, cohorts, initial model", _seed, 0)


def _add_output(group: Any, progress: bool = True) -> None:
    _add(group, "--output", "DIR", "folder for the results, new or empty (default: runs/WHAT-TIME)", Path)
    group.add_argument("--force", action="store_true", help="write into DIR even if it holds files")
    if progress:
        group.add_argument("--no-progress", action="store_true", help="no progress bars")


def _add(group: Any, flag: str, metavar: str, text: str, kind: Callable[[str], Any] = str, default: Any = None) -> None:
    text += "" if default is None else f" (default: {default})"
    group.add_argument(flag, metavar=metavar, type=kind, default=default, help=text.replace("%", "%%"))


def _count(text: str, lowest: int = 1) -> int:
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"must be an integer >= {lowest}, got {text!r}")
    return int(text)


def _count0(text: str) -> int:
    return _count(text, 0)


def _processes(text: str) -> tuple[str, int, int]:
    if not (match := re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", text)):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT,P,I, such as node0:1234,4,0, got {text!r}")
    return match[1], int(match[2]), int(match[3])


def _seed(text: str) -> int:
    if _count(text, 0) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be below 2^32, got {text!r}")
    return int(text)


def _redeal(text: str) -> float | str:
    if text == "evenly":
        return text
    alpha = _value(text)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise argparse.ArgumentTypeError(f"must be evenly or a number > 0, got {text!r}")
    return float(alpha)


def _lanes(text: str) -> int | str:
    return text if text == "auto" else _count(text)


def _spec(kind: str, text: str, factories: Mapping[str, Callable[..., Any]], hidden: Sequence[str] = ()) -> Spec:
    """NAME[:value][:key=value,...] against the factory's signature; ``hidden`` parameters have flags of their own."""
    name, *items = [part for part in re.split("[:,]", text) if part] or [""]
    if name not in factories:
        raise ValueError(f"{kind} must be one of {', '.join(factories)}, got {name!r}{nearest(name, factories)}")
    signature = inspect.signature(factories[name]).parameters
    known = {key: p for key, p in signature.items() if key not in hidden}
    listed = f"the options of {name} are {', '.join(known)}" if known else f"{name} has no options"
    options: dict[str, Any] = {}
    for key, equals, value in (item.partition("=") for item in items):
        if not equals:  # dirichlet:0.3
            key, value = next((k for k in known if k not in options), ""), key
        if key not in known:
            wrong = f"option {key!r}" if key else f"value {value!r}"
            raise ValueError(f"{kind} {name}: unknown {wrong}: {listed}{nearest(key, known)}")
        if key in options:
            raise ValueError(f"{kind} {name}: option {key!r} must be given once, got it twice in {text!r}")
        options[key] = _option(value, known[key].default)
        if isinstance(known[key].default, bool) and not isinstance(options[key], bool):
            raise ValueError(f"{kind} {name}: {key} must be true or false, got {value!r}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in options]
    if missing:
        wanted = ",".join(f"{key}=VALUE" for key in missing)
        raise ValueError(f"{kind} {name} needs {' and '.join(missing)}, got {text!r}: write {name}:{wanted}")
    return Spec(text, name, options)


def _option(text: str, default: Any) -> Any:
    if isinstance(default, str):  # "none" is a word here
        return text
    return tuple(_value(part) for part in text.split("+")) if isinstance(default, tuple) else _value(text)


def _value(text: str) -> bool | int | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# What is to be done with it.


def _load(args: argparse.Namespace, dataset: Spec) -> tuple[fd.FederatedData, str]:
    """The federation, and the partition in words."""
    recipe = _recipe(args, dataset)
    data = fd.datasets.load(dataset.name, recipe, args.data_dir, seed=args.seed, **dataset.options)
    return data, repr(recipe) if recipe else "the data set's own clients"


def _recipe(args: argparse.Namespace, dataset: Spec) -> fd.partition.Partition | None:
    natural = dataset.name in ("glyphs", "femnist", "synthetic", "movielens")
    if args.partition is None and natural:
        for flag, value in (("--clients", args.clients), ("--size-sigma", args.size_sigma)):
            if value is not None:
                raise ValueError(
                    f"{flag} needs --partition, got {value}: without one, {dataset.name} keeps its own clients; "
                    "add --partition iid, for example"
                )
        return None
    hidden = ("num_clients", "seed", "size_sigma")
    spec = _spec("partition", args.partition or "iid", PARTITIONS, hidden)
    factory = PARTITIONS[spec.name]
    given = {"num_clients": 100 if args.clients is None else args.clients, "seed": args.seed}
    given["size_sigma"] = 0.0 if args.size_sigma is None else args.size_sigma
    takes = inspect.signature(factory).parameters
    for key, flag in (("num_clients", "clients"), ("size_sigma", "size-sigma")):
        value = args.clients if key == "num_clients" else args.size_sigma
        if value is not None and key not in takes:
            raise ValueError(f"--{flag} has no effect on {spec.name}, got {value}: leave it out, or choose dirichlet")
    return factory(**{k: v for k, v in given.items() if k in takes}, **spec.options)


def _model(args: argparse.Namespace, dataset: Spec, data: fd.FederatedData) -> tuple[Spec, fd.Model]:
    spec = _spec("model", args.model or DEFAULT_MODEL[dataset.name], MODELS, hidden=("input_shape", "sizes"))
    highest = max(int(y.max()) for y in (data.y, data.y_test) if y is not None)
    own = {"num_classes": max(CLASSES[dataset.name], highest + 1), "input_shape": data.x.shape[1:]}
    own |= dataset.options  # those that a model takes too, such as agnews' vocabulary
    own |= {"cosine": True} if args.cosine else {}
    takes = inspect.signature(MODELS[spec.name]).parameters
    own |= {"sizes": movielens.sizes(data)} if "sizes" in takes else {}
    spec = spec._replace(options={k: v for k, v in own.items() if k in takes} | spec.options)
    return spec, MODELS[spec.name](**spec.options)


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


def _run(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    """Checks and reads everything; what it returns does the work."""
    dataset = _spec("data set", args.dataset, DATASETS, hidden=("data_dir", "seed", "natural"))
    specs = [_spec("algorithm", text, ALGORITHMS) for text in args.algorithm]
    names = [spec.text for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--algorithm must be different each time, got {name!r} {names.count(name)} times")
    local = fd.LocalTraining(
        args.epochs, args.batch_size, args.lr, args.lr_decay, args.momentum, args.weight_decay, args.clip_norm
    )
    algorithms = {spec.text: _algorithm(spec) for spec in specs}
    measure_every = _measure_every(args)
    output = _output(args, "-".join([dataset.name, *dict.fromkeys(spec.name for spec in specs)])[:80])
    try:
        if not args.distributed:
            fd.use_cpu_devices(args.devices)
    except RuntimeError as error:  # JAX has started, as in a notebook: its devices are kept
        if args.devices is not None:
            raise ValueError(f"--devices must be set before JAX starts, got {args.devices}: leave it out") from error
    data, dealt = _load(args, dataset)
    if args.redeal is not None:
        data = data.redealt(None if args.redeal == "evenly" else args.redeal)
    model_spec, model = _model(args, dataset, data)
    for name, algorithm in algorithms.items():
        if "cosine" in algorithm.requires and not model.cosine:
            raise ValueError(
                f"{name} needs a model whose logits are cosines, got {model_spec.name} without: add --cosine"
            )

    computed = model.computing_in(jnp.bfloat16) if args.bfloat16 else model
    options = {"cohort_size": args.cohort, "lanes": args.lanes, "sampling": args.sampling}
    options |= {"on_nonfinite": args.on_nonfinite, "measure": args.measure, "aggregation": _aggregation(args)}
    options |= {name: getattr(args, name) for name in FAILURES}
    options["stream"] = {"auto": "auto", "yes": True, "no": False}[args.stream]
    simulations = {
        name: fd.Simulation(computed, data, algorithm, local=local, bank=_bank(args, name), **options)
        for name, algorithm in algorithms.items()
    }
    config = {
        "command": shlex.join(["fedjax-drift", *argv]),
        "dataset": {"name": dataset.name, **dataset.options},
        "partition": dealt,
        "source": {entry["name"]: entry["found"] for entry in fd.datasets.describe(args.data_dir)}[dataset.name],
        "data": _summary(data),
        "model": {"name": model_spec.name, **model_spec.options, "parameters": num_parameters(model)},
        "algorithms": {spec.text: _resolved(spec) for spec in specs},
        "local": {f.name: getattr(local, f.name) for f in dataclasses.fields(local) if f.name != "optimizer"},
        "rounds": args.rounds,
        "cohort_size": args.cohort,
        "sampling": args.sampling,
        "redeal": data.redeal,
        "on_nonfinite": args.on_nonfinite,
        "failures": {name: getattr(args, name) for name in FAILURES},
        "aggregation": simulations[names[0]].aggregation.name,
        "measure": {"names": args.measure, "every": measure_every},
        "eval_every": args.eval_every,
        "seed": args.seed,
        "lanes": simulations[names[0]].lanes,
        "bfloat16": args.bfloat16,
        "stream": args.stream,
        "bank": {name: sim.bank for name, sim in simulations.items()},
        "checkpoints": {"every": args.checkpoint_every, "seconds": args.checkpoint_seconds, "keep": args.keep},
        "devices": {"platform": jax.default_backend(), "count": jax.device_count()},
        "processes": jax.process_count(),
        "versions": {
            "fedjax_drift": fd.__version__, "jax": jax.__version__, "numpy": np.__version__,
            "python": platform.python_version(), "platform": platform.platform(),
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip

    checkpoints = _checkpoints(args, config, output)
    progress = not args.no_progress and sys.stderr.isatty()

    def work() -> int:
        mesh = simulations[names[0]].mesh
        before: dict[str, tuple[fd.ServerState, list[dict[str, Any]]]] = {}
        with contextlib.ExitStack() as locked:  # nobody else writes there meanwhile
            first_does(mesh, lambda: locked.enter_context(lock_folder(output / "checkpoints", "--output")))
            if args.resumed:
                config["started"] = json.loads((output / "config.json").read_text())["started"]
                before = _restored(simulations, checkpoints)
                if not before:
                    warnings.warn(f"{output} has no checkpoint yet: the run starts again at round 0", stacklevel=2)
            else:
                first_does(mesh, lambda: _delete([kept.path for kept in checkpoints.values()]))  # what --force replaces

            def start(name: str, on_round: Callable[[dict[str, Any]], None]) -> None:
                sim = simulations[name]
                state, history = before.pop(name) if name in before else (sim.init(jax.random.key(args.seed)), [])
                sim.run(
                    state, args.rounds - len(history), args.eval_every, progress=progress, on_round=on_round,
                    measure_every=measure_every, checkpoints=checkpoints.get(name),
                )  # fmt: skip

            histories = {name: history for name, (_, history) in before.items()}
            return _simulate(config, names, histories, start, output, progress)

    return work


def _restored(
    simulations: Mapping[str, fd.Simulation], checkpoints: Mapping[str, fd.Checkpoints]
) -> dict[str, tuple[fd.ServerState, list[dict[str, Any]]]]:
    """Of each algorithm that has come to its first checkpoint the newest state, and the history."""
    restored = {name: kept.restore(simulations[name]) for name, kept in checkpoints.items() if kept.rounds}
    for name in simulations.keys() - restored.keys():
        bank = Path(simulations[name].bank)  # if it is a folder, it is for one process
        if bank.is_dir() and not spans_processes(simulations[name].mesh):
            bank.rename(unused(bank.with_name(bank.name + ".left")))
    return restored


def _aggregation(args: argparse.Namespace) -> fd.aggregation.Aggregation | None:
    norm, noise = args.clip_updates, args.noise_multiplier
    if noise is None:
        return None if norm is None else fd.aggregation.clipped(norm)
    if norm is None:
        raise ValueError(f"--noise-multiplier is relative to --clip-updates, got {noise} alone: add --clip-updates 1")
    return fd.aggregation.private(norm, noise)


def _delete(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(args: argparse.Namespace, config: Mapping[str, Any], output: Path) -> dict[str, fd.Checkpoints]:
    """Where each algorithm is saved; nowhere with --keep 0."""
    if args.resumed and not args.keep:
        raise ValueError(f"--resume needs checkpoints, got {output}, a run with --keep 0: start it anew")
    if not args.keep:
        return {}
    how = {**config["checkpoints"], "config": {name: config[name] for name in CONFIGURED}}
    folders = {name: f"{i}-{_file_name(name)}" for i, name in enumerate(config["algorithms"], 1)}
    return {name: fd.Checkpoints(output / "checkpoints" / folder, **how) for name, folder in folders.items()}


def _bank(args: argparse.Namespace, algorithm: str) -> str:
    """Where an algorithm's clients are kept: folders have one for each."""
    where = args.bank
    if where in ("auto", "device", "sharded", "host"):
        return where
    folder = Path(where) / _file_name(algorithm)
    if not args.resumed and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--bank must be a new or empty folder, got {where}, which holds {folder}: choose another")
    return str(folder)


def _file_name(algorithm: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in algorithm)


def _algorithm(spec: Spec) -> fd.Algorithm:
    try:
        return ALGORITHMS[spec.name](**spec.options)
    except ValueError as error:
        raise ValueError(f"algorithm {spec.text}: {error}") from error


def _measure_every(args: argparse.Namespace) -> int:
    every = args.measure_every
    if every is not None and not args.measure:
        raise ValueError(f"--measure-every needs --measure, got {every}: add --measure {','.join(MEASURES)}, or some")
    if every is not None and every > args.rounds:
        raise ValueError(f"--measure-every must be in 1..{args.rounds}, the rounds, got {every}: nothing is measured")
    return every or 1


def _simulate(
    config: Mapping[str, Any],
    names: Sequence[str],
    before: Mapping[str, Sequence[dict[str, Any]]],
    start: Callable[[str, Callable[[dict[str, Any]], None]], None],
    output: Path,
    progress: bool,
) -> int:
    """Runs one algorithm after another with ``start(name, on_round)``; after Ctrl-C, reports what is done.

    before: the histories of those that were restored. Of several processes the first alone writes files. Where the
    library itself raises ValueError or FloatingPointError (the model has diverged), the next takes its turn.
    """
    writes = fd.distributed.is_first()
    if writes:
        output.mkdir(parents=True, exist_ok=True)
        _replace(output / "config.json", json.dumps(config, indent=2) + "\n")
    print(_heading(config, output), flush=True)
    resume = f"to go on: {shlex.join(['fedjax-drift', 'run', '--resume', str(output)])}"
    records: dict[str, list[dict[str, Any]]] = {name: list(before.get(name, [])) for name in names}
    interrupted, stopped = False, []

    def lines() -> list[dict[str, Any]]:
        return [{"algorithm": name, **record} for name, history in records.items() for record in history]

    with _jsonl(output / "rounds.jsonl" if writes else None, lines()) as write:
        for name, history in records.items():

            def keep(record: dict[str, Any], name: str = name, history: list[dict[str, Any]] = history) -> None:
                history.append(record)
                write({"algorithm": name, **record})

            if len(history) == config["rounds"]:
                continue
            if not progress:
                print(f"running {name}: {_rounds_to_do(len(history), config['rounds'])}", flush=True)
            try:
                start(name, keep)
                interrupted = len(history) < config["rounds"]  # Simulation.run ends early on Ctrl-C
            except KeyboardInterrupt:
                interrupted = True
            except SystemExit as ending:  # SIGTERM: whoever sent it will not wait for pictures
                print(f"\nfedjax-drift: stopped {name} after {len(history)} rounds; {resume}", file=sys.stderr)
                return int(ending.code or 0)
            except (ValueError, FloatingPointError, OSError, MemoryError) as error:
                if not _is_ours(error):
                    raise
                stopped.append(f"{name} after {len(history)} of {config['rounds']} rounds")
                if writes:
                    _show_error(f"stopped {stopped[-1]}: {error}")
            if interrupted:
                break
    if before:  # more rounds of one algorithm may have been written after another's
        with _jsonl(output / "rounds.jsonl" if writes else None, lines()):
            pass
    records = {name: history for name, history in records.items() if history}
    written = ["config.json", "rounds.jsonl", *(_draw_runs(records, output) if writes else ())]
    if records:
        print("\n" + _table(records))
    ended = [f"stopped: {', '.join(stopped)}"] if stopped else []
    ended.append(f"{'interrupted: ' if interrupted else ''}{output}: {', '.join(written)}")
    ended += [resume] * (interrupted and config["checkpoints"]["keep"] > 0)
    print("", *[line for text in ended for line in _wrap(text, "", "  ")], sep="\n")
    return 130 if interrupted else 1 if stopped else 0


def _draw_runs(records: Mapping[str, Sequence[Mapping[str, Any]]], output: Path) -> list[str]:
    """Writes the pictures that the records have numbers for; returns their names."""
    from fedjax_drift import plots

    first = next(iter(records.values()), ())  # the cohorts, and so their labels, are the same for all
    compared = (plots.curves, plots.updates, plots.drift, plots.agreement, plots.forgetting, plots.gain)
    pictures = {draw.__name__: functools.partial(draw, records) for draw in compared}
    pictures["label_mix"] = functools.partial(plots.label_mix, first)
    written = []
    for name, draw in pictures.items():
        path = output / f"{name}.png"
        try:
            draw(path)
            written.append(path.name)
        except ValueError as error:  # nothing that can be drawn, so the picture of an earlier run is out of date
            if not _is_ours(error):
                raise
            path.unlink(missing_ok=True)
    return written


def _quickstart(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    cohort = min(100, args.writers) if args.cohort is None else args.cohort
    if cohort > args.writers:
        raise ValueError(f"--cohort must be in 1..{args.writers} (all writers), got {cohort}: raise --writers")
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
    print(textwrap.fill(intro, 80), _wrapped_command(["fedjax-drift", *run]), sep="\n\n", end="\n\n", flush=True)
    return _run(_parse(run), run)


def _data(args: argparse.Namespace, argv: Sequence[str]) -> Callable[[], int]:
    if args.dataset is None:
        listing = _listing(args.data_dir)
        return lambda: print(listing) or 0
    dataset = _spec("data set", args.dataset, DATASETS, hidden=("data_dir", "seed", "natural"))
    output = _output(args, f"data-{dataset.name}")
    data, dealt = _load(args, dataset)
    return lambda: _draw(data, dealt, output)


def _draw(data: fd.FederatedData, dealt: str, output: Path) -> int:
    from fedjax_drift import plots

    output.mkdir(parents=True, exist_ok=True)
    plots.federation(data, output / "federation.png")
    summary = _summary(data)
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


# What is shown and written.


def _summary(data: fd.FederatedData) -> dict[str, Any]:
    counts = data.label_counts()
    labels = (counts > 0).sum(axis=1)
    return {
        "clients": data.num_clients,
        "rows": len(data.x),
        "test_rows": 0 if data.x_test is None else len(data.x_test),
        "row": f"{data.x.dtype}{list(data.x.shape[1:])}",
        "classes": int((counts.sum(axis=0) > 0).sum()),
        "sizes": {"min": int(data.sizes.min()), "median": float(np.median(data.sizes)), "max": int(data.sizes.max())},
        "labels_per_client": {"min": int(labels.min()), "mean": float(labels.mean()), "max": int(labels.max())},
    }


def _resolved(spec: Spec) -> dict[str, Any]:
    defaults = {k: p.default for k, p in inspect.signature(ALGORITHMS[spec.name]).parameters.items()}
    return {"name": spec.name, **defaults, **spec.options}


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


def _table(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One line an algorithm; seconds a round: the median, which leaves out the compilation in the first.

    A second line where the algorithm also keeps the mean of its clients' models.
    """
    width = min(NAME_WIDTH, max(map(len, ["algorithm", *records])))
    lines = [f"{'algorithm':{width}}  rounds  accuracy     best  at round  train loss  s/round"]
    for name, history in records.items():
        if len(name) > width:  # on a line of its own: what tells two of them apart may be at the end
            lines.append(name)
        seconds = float(np.median([record["seconds"] for record in history]))
        row = f"{name if len(name) <= width else '':{width}}  {len(history):6}  {_accuracies(history, 'accuracy')}"
        lines.append(f"{row}  {history[-1]['train_loss']:#10.5g}  {seconds:7.3g}")
        if any("client_mean_accuracy" in record for record in history):
            lines.append("  cohort's mean".ljust(width + 8) + "  " + _accuracies(history, "client_mean_accuracy"))
    return "\n".join(lines)


def _accuracies(history: Sequence[Mapping[str, Any]], key: str) -> str:
    known = [(record[key], record["round"]) for record in history if key in record]
    if not known:
        return f"{'-':>8} {'-':>8}  {'-':>8}"
    best, at = max(known, key=lambda pair: pair[0])
    return f"{100 * known[-1][0]:6.1f} % {100 * best:6.1f} %  {at:8}"


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


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _jsonl(
    path: Path | None, before: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes one record a line, at once, after those of ``before``, which replace the file's; a number
    that is not finite becomes null, as JSON has none. Without a path, one that does nothing."""
    if path is None:
        yield lambda record: None
        return

    def line(record: Mapping[str, Any]) -> str:
        return json.dumps({key: _plain(value) for key, value in record.items()}) + "\n"

    _replace(path, "".join(map(line, before)))
    with path.open("a") as file:

        def write(record: Mapping[str, Any]) -> None:
            file.write(line(record))
            file.flush()

        yield write


def _replace(path: Path, text: str) -> None:
    """Writes the file as a whole: a process that is killed leaves the old one or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def _rounds_to_do(done: int, rounds: int) -> str:
    return f"rounds {done + 1} to {rounds}" if done else f"{rounds} rounds"


if __name__ == "__main__":
    sys.exit(main())
