"""The options of the command line: their flags, and the values that each of them accepts."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import optax

from fedjax_drift import checks
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.checks import nearest
from fedjax_drift.data import augment, partition
from fedjax_drift.data.datasets import DATASETS
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures.drift import MEASURES
from fedjax_drift.models import MODELS

HIDDEN = ("request",)  # parameters of a loader that are not options after NAME:


FUNCTIONS = ("optimizer", "augment")  # options of `LocalTraining` whose values are functions
LOCAL = ("epochs", "batch_size", "lr", "lr_decay", "momentum", "weight_decay", "clip_norm")


FAILURES = ("dropout", "stragglers", "over_selection", "deadline", "speed_spread")


DEFAULT_MODEL = {
    "synthetic": "linear",
    "glyphs": "lenet5",
    "dialogue": "decoder",
    "femnist": "lenet5",
    "mnist": "mnist_2nn",
    "fashion_mnist": "mnist_2nn",
    "emnist": "emnist_nn",
    "cifar10": "cifar_cnn",
    "cifar100": "cifar_cnn",
    "cinic10": "cifar_cnn",
    "tiny_imagenet": "resnet18",
    "movielens": "din",
    "agnews": "text_classifier",
    "bindingdb": "drug_target",
}


def distribution(num_clients: int, file: str, seed: int = 0, min_per_label: int = 0) -> partition.Partition:
    """Returns `partition.distribution` with the weights of a text file, one line of numbers per client."""
    path = checks.path("file", file)
    try:
        weights = np.loadtxt(path, ndmin=2)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} must have one line per client, with one number per label, got {checks.first_line(error)}: write "
            "it with numpy.savetxt"
        ) from error
    return partition.distribution(num_clients, weights, seed, min_per_label)


PARTITIONS: dict[str, Callable[..., partition.Partition]] = {
    "iid": partition.iid,
    "dirichlet": partition.dirichlet,
    "shards": partition.shards,
    "classes": partition.classes,
    "distribution": distribution,
    "by_writer": partition.by_writer,
}


OPTIMIZERS = {"adam": optax.scale_by_adam, "rmsprop": optax.scale_by_rms, "adagrad": optax.scale_by_rss}
AUGMENTATIONS = {"crop_and_flip": augment.crop_and_flip}


DECAYS = ("b1", "b2", "decay")  # options of optimizers whose values must be in [0, 1)


SWITCH = {"yes": True, "no": False}  # and auto, see `add_switch`


class Spec(NamedTuple):
    """An option value of the form NAME or NAME:key=value,key=value."""

    text: str
    name: str
    options: dict[str, Any]


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():
            if word.startswith("--") and word.endswith("=--"):  # argparse would make an empty list of it
                self.error(f"{word[:-3]} needs a value, got '--'")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message} (see {self.prog} --help)")

    def refuse(self, word: str, fix: str = "") -> NoReturn:
        """Raises ValueError for an unknown word. The message names the most similar option, or else ``fix``."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        self.error(f"unknown argument {word!r}{nearest(word.partition('=')[0], flags) or fix}")


def add(group: Any, flag: str, metavar: str, text: str, kind: Callable[[str], Any] = str, default: Any = None) -> None:
    text += "" if default is None else f" (default: {default})"
    group.add_argument(flag, metavar=metavar, type=kind, default=default, help=text.replace("%", "%%"))


def add_switch(group: Any, flag: str, text: str) -> None:
    """Adds a flag with the values auto (default), yes and no."""
    group.add_argument(flag, choices=("auto", *SWITCH), default="auto", help=text)


def count(text: str, lowest: int = 1, highest: int = 2**31 - 1) -> int:
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"must be an integer >= {lowest}, got {text!r}")
    if int(text) > highest:
        raise argparse.ArgumentTypeError(f"must be at most {highest}, got {text!r}")
    return int(text)


def count0(text: str) -> int:
    return count(text, 0)


def seed(text: str) -> int:
    return count(text, 0, 2**32 - 1)


def seeds(text: str) -> int:
    return count(text, 1, 10_000)


def _redeal(text: str) -> float | str:
    if text == "evenly":
        return text
    alpha = _value(text)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise argparse.ArgumentTypeError(f"must be evenly or a number > 0, got {text!r}")
    return float(alpha)


def _lanes(text: str) -> int | str:
    return text if text == "auto" else count(text)


def parse_spec(kind: str, text: str, factories: Mapping[str, Callable[..., Any]], hidden: Sequence[str] = ()) -> Spec:
    """Parses NAME[:value][:key=value,...] and checks it against the signature of the factory.

    hidden: parameters of the factory that are not accepted here.
    """
    name, *items = [part for part in re.split("[:,]", text) if part] or [""]
    if name not in factories:
        raise ConfigurationError(
            f"{kind} must be one of {checks.listed(factories)}, got {name!r}{nearest(name, factories)}"
        )
    signature = inspect.signature(factories[name]).parameters
    known = {key: p for key, p in signature.items() if key not in hidden}
    listed = f"the options of {name} are {checks.listed(known)}" if known else f"{name} has no options"
    options: dict[str, Any] = {}
    for key, equals, value in (item.partition("=") for item in items):
        if not equals:  # dirichlet:0.3
            key, value = next((k for k in known if k not in options), ""), key
        if key not in known:
            wrong = f"option {key!r}" if key else f"value {value!r}"
            local = f". {key} is an option of local training: --{key.replace('_', '-')}" if key in LOCAL else ""
            raise ConfigurationError(f"{kind} {name}: unknown {wrong}: {listed}{local or nearest(key, known)}")
        if key in options:
            raise ConfigurationError(f"{kind} {name}: option {key!r} must be given only once, got it twice in {text!r}")
        options[key] = _option(value, known[key].default)
        if isinstance(known[key].default, bool) and not isinstance(options[key], bool):
            raise ConfigurationError(f"{kind} {name}: {key} must be true or false, got {value!r}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in options]
    if missing:
        wanted = ",".join(f"{key}=VALUE" for key in missing)
        raise ConfigurationError(f"{kind} {name} needs {' and '.join(missing)}, got {text!r}: write {name}:{wanted}")
    return Spec(text, name, options)


def _option(text: str, default: Any) -> Any:
    if isinstance(default, str):  # "none" is then a string, not None
        return text
    value = _value(text)
    several = isinstance(default, tuple) or default is None and isinstance(value, str) and "+" in value
    return tuple(_value(part) for part in text.split("+")) if several else value


def _value(text: str) -> bool | int | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def add_data(group: Any, required: bool) -> None:
    text = f"one of {', '.join(DATASETS)}. With options, for example: glyphs:num_writers=500, synthetic:alpha=1,beta=1"
    if required:
        group.add_argument("--dataset", required=True, metavar="NAME[:key=value,...]", help=text)
    else:
        group.add_argument("dataset", nargs="?", metavar="NAME[:key=value,...]", help=text)
    add(
        group, "--partition", "PARTITIONER", "how the data are partitioned into clients: iid, dirichlet:ALPHA (smaller "
        "ALPHA is more heterogeneous), dirichlet:ALPHA:prior=class, shards:S (each client gets S blocks of the "
        "examples sorted by label), classes:K (each client has exactly K labels), distribution:FILE (the weights of "
        "the labels, one line per client) or by_writer. iid and dirichlet take the sizes of the clients, as in "
        "iid:sizes=linear (or square, exponential, or numbers as in 100+200+300). Default: the natural clients of "
        "glyphs, femnist, synthetic, movielens and dialogue, otherwise iid",
    )  # fmt: skip
    add(group, "--clients", "N", "number of clients of a partition (default: 100)", count)
    add(
        group,
        "--size-sigma",
        "SIGMA",
        "standard deviation of the logarithm of the client sizes, for iid and dirichlet (default: 0, equal sizes)",
        float,
    )
    add(
        group,
        "--data-dir",
        "DIR",
        "folder of the data files (default: $FEDJAX_DRIFT_DATA, the cache, tensorflow-datasets)",
    )
    add_switch(
        group,
        "--standardize",
        "whether images are standardized with the mean and standard deviation of the data set, or scaled to "
        "[0, 1]. Default: auto, which means no for femnist and glyphs, and yes for other images",
    )
    add(
        group, "--validation", "SHARE", "hold out this share of each client's training examples. They replace the "
        "test set (default: none are held out)", float,
    )  # fmt: skip
    add(group, "--seed", "N", "random seed of the data, the partition, the cohorts and the initial model", seed, 0)
    add(group, "--data-seed", "N", "random seed of the data and the partition (default: --seed)", seed)


def add_run(parser: argparse.ArgumentParser) -> Any:
    """Adds the flags of a simulation and of its execution. Returns the last group of flags."""
    local = LocalTraining()
    add_data(parser.add_argument_group("data"), required=True)
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--algorithm",
        action="append",
        metavar="NAME[:key=value,...]",
        required=True,
        help=f"one of {', '.join(ALGORITHMS)}. The options are the arguments of fd.algorithms.NAME, for example "
        "fedprox:mu=0.01. Give --algorithm several times to compare algorithms on the same data, cohorts and initial "
        "model",
    )
    add(
        group, "--model", "NAME[:key=value]", f"one of {', '.join(MODELS)} (default: lenet5 for glyphs and femnist, "
        "mnist_2nn for mnist and fashion_mnist, emnist_nn for emnist, resnet18 for tiny_imagenet, cifar_cnn for the "
        "other photographs, linear for synthetic, din for movielens, text_classifier for agnews, drug_target for "
        "bindingdb, decoder for dialogue)",
    )  # fmt: skip
    group.add_argument(
        "--cosine", action="store_true", help="use a classifier whose logits are cosines, as lfd requires"
    )
    add(
        group, "--train", "NAME[:key=value]", "train a part of the model: lora:rank=8,where=kernel,whole=classifier "
        "trains adapters of rank 8 for the matrices whose path matches `where`, and the parameters that match `whole`; "
        "trainable:classifier trains the parameters that match. The other parameters are those of --init, or random "
        "(default: train the whole model)",
    )  # fmt: skip
    add(group, "--init", "FILE", "npz or safetensors file with the initial parameters (default: random)")
    add(group, "--rounds", "N", "number of rounds", count, 50)
    add(group, "--cohort", "K", "clients per round", count, 10)
    add(
        group,
        "--sampling",
        "KIND",
        "uniform: select exactly K clients; bernoulli: select each client with probability K/N",
        str,
        "uniform",
    )
    add(
        group, "--redeal", "evenly|ALPHA", "in every round, pool the examples of the cohort and redistribute them. "
        "evenly: all clients of a cohort get about the same labels, so only period drift remains. ALPHA: the examples "
        "of each label are split by Dirichlet(ALPHA); with --partition iid only client drift remains", _redeal,
    )  # fmt: skip
    group = parser.add_argument_group("local training of every client")
    add(group, "--epochs", "E", "passes over a client's data per round", int, local.epochs)
    add(group, "--batch-size", "B", "examples per step", int, local.batch_size)
    add(group, "--lr", "LR", "learning rate in round 0", float, local.lr)
    add(group, "--lr-decay", "FACTOR", "round t uses LR * FACTOR^t", float, local.lr_decay)
    add(group, "--momentum", "BETA", "local momentum, in [0, 1); it is reset in every round", float, local.momentum)
    add(group, "--weight-decay", "LAMBDA", "add LAMBDA * parameters to the gradient", float, local.weight_decay)
    add(group, "--clip-norm", "NORM", "clip gradients to this global norm (default: no clipping)", float)
    add(
        group, "--optimizer", "NAME[:key=value,...]", f"optax optimizer of the clients, instead of SGD with momentum: "
        f"one of {', '.join(OPTIMIZERS)}. Its state is reset in every round", str,
    )  # fmt: skip
    add(
        group, "--augment", "NAME[:key=value,...]", "train on random variants of the images: one of "
        f"{', '.join(AUGMENTATIONS)}; options are those of fd.augment.NAME", str,
    )  # fmt: skip
    add(
        group, "--on-nonfinite", "WHAT", "what to do with an update that is NaN or infinite: keep (average it "
        "like any other), drop_client (leave the client out of the round), or raise (stop the algorithm)", str, "keep",
    )  # fmt: skip
    group = parser.add_argument_group("client failures and privacy")
    add(group, "--dropout", "P", "probability that a selected client drops out", float, 0.0)
    add(group, "--stragglers", "P", "probability that a client stops before its last local step", float, 0.0)
    add(
        group,
        "--over-selection",
        "R",
        "select R times as many clients, and aggregate the first K that report",
        float,
        1.0,
    )
    add(
        group, "--deadline", "T", "drop clients that need more time than T; 1 is the time of a client of mean size "
        "on a device of median speed (default: no deadline)", float,
    )  # fmt: skip
    add(group, "--speed-spread", "SIGMA", "standard deviation of the logarithm of the devices' speeds", float, 0.0)
    add(group, "--clip-updates", "NORM", "clip each client's message to this norm (default: no clipping)", float)
    add(
        group, "--noise-multiplier", "Z", "differential privacy: all clients have weight 1, and Gaussian noise with "
        "standard deviation Z * NORM is added to the sum of their messages. It needs --clip-updates and --sampling "
        "bernoulli", float,
    )  # fmt: skip
    group = parser.add_argument_group("drift measures")
    group.add_argument(
        "--measure",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME[,NAME...]",
        help="; ".join(f"{name}: {what}" for name, what in MEASURES.items())
        + '. They are computed while the clients train; for "gradients" they train a second time',
    )
    add(group, "--measure-every", "N", "rounds between measurements (default: 1)", count)
    group = parser.add_argument_group("execution")
    add(group, "--eval-every", "N", "rounds between evaluations on the test set, 0: never", count0, 1)
    add(
        group, "--devices", "N", "number of CPU devices of a process (default: one per core; with --distributed, 1). "
        "No effect on a GPU", count,
    )  # fmt: skip
    add(
        group, "--devices-per-client", "N", "number of devices that train a client together, for a model of which a "
        "part is trained (--train) and that is too large for one device", count, 1,
    )  # fmt: skip
    add(group, "--lanes", "L", "number of clients that train side by side (vmap) on one device", _lanes, "auto")
    group.add_argument(
        "--bfloat16", action="store_true", help="compute the networks in bfloat16; parameters stay float32"
    )
    add_switch(
        group,
        "--stream",
        "keep the data in host memory and send only the cohort's data in each round (default: auto, which "
        "means yes only if the data need more than half of the devices' memory)",
    )
    bank = "where client states are kept: auto, device, sharded, host, or a new folder"
    add(group, "--bank", "WHERE", bank, str, "auto")
    parser.set_defaults(resumed=False)
    return group
