"""The options of `fedjax-drift run`: their flags, and the simulations that they describe.

The command line and `parse_run` share them. Wrong options raise ValueError before anything compiles.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import math
import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_drift import checks
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.checks import nearest
from fedjax_drift.data import datasets, movielens, partition
from fedjax_drift.data.datasets import DATASETS, num_classes
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.mesh import use_cpu_devices
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures.drift import MEASURES
from fedjax_drift.models import MODELS, num_parameters
from fedjax_drift.models.pretrained import load_params
from fedjax_drift.round import aggregation
from fedjax_drift.run_folder import file_name
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.storage.checkpoint import versions
from fedjax_drift.types import Algorithm, Model, Params

PARTITIONS: dict[str, Callable[..., partition.Partition]] = {
    "iid": partition.iid,
    "dirichlet": partition.dirichlet,
    "shards": partition.shards,
    "by_writer": partition.by_writer,
}
DEFAULT_MODEL = {
    "synthetic": "linear",
    "glyphs": "lenet5",
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
OPTIMIZERS = {"adam": optax.scale_by_adam, "rmsprop": optax.scale_by_rms, "adagrad": optax.scale_by_rss}
DECAYS = ("b1", "b2", "decay")  # options of optimizers that are in [0, 1)
HIDDEN = ("data_dir", "seed", "natural")  # parameters of a data set that have flags of their own
LOCAL = ("epochs", "batch_size", "lr", "lr_decay", "momentum", "weight_decay", "clip_norm")
FAILURES = ("dropout", "stragglers", "over_selection", "deadline", "speed_spread")


class Spec(NamedTuple):
    """What was written as NAME or NAME:key=value,key=value."""

    text: str
    name: str
    options: dict[str, Any]


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():
            if word.startswith("--") and word.endswith("=--"):  # of which argparse makes an empty list
                self.error(f"{word[:-3]} needs a value, got '--'")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message} (see {self.prog} --help)")

    def refuse(self, word: str, fix: str = "") -> NoReturn:
        """Raises ValueError for a word that is no option's; names the nearest option, or else the fix."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        self.error(f"unknown argument {word!r}{nearest(word.partition('=')[0], flags) or fix}")


def add_data(group: Any, required: bool) -> None:
    text = f"one of {', '.join(DATASETS)}; options, for example, glyphs:num_writers=500 or synthetic:alpha=1,beta=1"
    if required:
        group.add_argument("--dataset", required=True, metavar="NAME[:key=value,...]", help=text)
    else:
        group.add_argument("dataset", nargs="?", metavar="NAME[:key=value,...]", help=text)
    add(
        group, "--partition", "RECIPE", "how rows are dealt to clients. iid; dirichlet:ALPHA (small ALPHA: few labels "
        "a client) or dirichlet:ALPHA:prior=class; shards:S (S blocks of the sorted labels each); by_writer "
        "(default: the clients that come with glyphs, femnist, synthetic and movielens, else iid)",
    )  # fmt: skip
    add(group, "--clients", "N", "clients to deal the rows to (default: 100)", count)
    add(group, "--size-sigma", "SIGMA", "log-normal spread of the sizes, iid and dirichlet (default: 0, equal)", float)
    add(group, "--data-dir", "DIR", "the data files (default: $FEDJAX_DRIFT_DATA, cache, then tensorflow-datasets)")
    add(group, "--seed", "N", "of all that is random: data, partition, cohorts, initial model", seed, 0)
    add(group, "--data-seed", "N", "of the data and the partition alone (default: --seed)", seed)


def add(group: Any, flag: str, metavar: str, text: str, kind: Callable[[str], Any] = str, default: Any = None) -> None:
    text += "" if default is None else f" (default: {default})"
    group.add_argument(flag, metavar=metavar, type=kind, default=default, help=text.replace("%", "%%"))


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


def spec(kind: str, text: str, factories: Mapping[str, Callable[..., Any]], hidden: Sequence[str] = ()) -> Spec:
    """NAME[:value][:key=value,...] against the factory's signature; ``hidden`` parameters have flags of their own."""
    name, *items = [part for part in re.split("[:,]", text) if part] or [""]
    if name not in factories:
        raise ConfigurationError(
            f"{kind} must be one of {', '.join(factories)}, got {name!r}{nearest(name, factories)}"
        )
    signature = inspect.signature(factories[name]).parameters
    known = {key: p for key, p in signature.items() if key not in hidden}
    listed = f"the options of {name} are {', '.join(known)}" if known else f"{name} has no options"
    options: dict[str, Any] = {}
    for key, equals, value in (item.partition("=") for item in items):
        if not equals:  # dirichlet:0.3
            key, value = next((k for k in known if k not in options), ""), key
        if key not in known:
            wrong = f"option {key!r}" if key else f"value {value!r}"
            raise ConfigurationError(f"{kind} {name}: unknown {wrong}: {listed}{nearest(key, known)}")
        if key in options:
            raise ConfigurationError(f"{kind} {name}: option {key!r} must be given once, got it twice in {text!r}")
        options[key] = _option(value, known[key].default)
        if isinstance(known[key].default, bool) and not isinstance(options[key], bool):
            raise ConfigurationError(f"{kind} {name}: {key} must be true or false, got {value!r}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in options]
    if missing:
        wanted = ",".join(f"{key}=VALUE" for key in missing)
        raise ConfigurationError(f"{kind} {name} needs {' and '.join(missing)}, got {text!r}: write {name}:{wanted}")
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


def data_seed(args: argparse.Namespace) -> int:
    """Of the data and how they are dealt."""
    return args.seed if args.data_seed is None else args.data_seed


def load(args: argparse.Namespace) -> FederatedData:
    """The federation."""
    dataset = spec("data set", args.dataset, DATASETS, hidden=HIDDEN)
    recipe = _recipe(args, dataset)
    data = datasets.load(dataset.name, recipe, args.data_dir, seed=data_seed(args), **dataset.options)
    if getattr(args, "per_client", False) and data.test_sizes is None:
        data = data.with_client_tests(data_seed(args))
    if getattr(args, "redeal", None) is None:
        return data
    return data.redealt(None if args.redeal == "evenly" else args.redeal)


def dealt(args: argparse.Namespace) -> str:
    """How, in words."""
    recipe = _recipe(args, spec("data set", args.dataset, DATASETS, hidden=HIDDEN))
    return repr(recipe) if recipe else "the data set's own clients"


def _recipe(args: argparse.Namespace, dataset: Spec) -> partition.Partition | None:
    natural = dataset.name in ("glyphs", "femnist", "synthetic", "movielens")
    if args.partition is None and natural:
        for flag, value in (("--clients", args.clients), ("--size-sigma", args.size_sigma)):
            if value is not None:
                raise ConfigurationError(
                    f"{flag} needs --partition, got {value}: without one, {dataset.name} keeps its own clients; "
                    "add --partition iid, for example"
                )
        return None
    hidden = ("num_clients", "seed", "size_sigma")
    found = spec("partition", args.partition or "iid", PARTITIONS, hidden)
    factory = PARTITIONS[found.name]
    given = {"num_clients": 100 if args.clients is None else args.clients, "seed": data_seed(args)}
    given["size_sigma"] = 0.0 if args.size_sigma is None else args.size_sigma
    takes = inspect.signature(factory).parameters
    for key, flag in (("num_clients", "clients"), ("size_sigma", "size-sigma")):
        value = args.clients if key == "num_clients" else args.size_sigma
        if value is not None and key not in takes:
            raise ConfigurationError(
                f"--{flag} has no effect on {found.name}, got {value}: leave it out, or choose dirichlet"
            )
    return factory(**{k: v for k, v in given.items() if k in takes}, **found.options)


def _model(args: argparse.Namespace, dataset: Spec, data: FederatedData) -> tuple[Spec, Model]:
    found = spec("model", args.model or DEFAULT_MODEL[dataset.name], MODELS, hidden=("input_shape", "sizes"))
    highest = max(int(y.max()) for y in (data.y, data.y_test) if y is not None)
    classes = max(num_classes(dataset.name, **dataset.options), highest + 1)
    own = {"num_classes": classes, "input_shape": data.x.shape[1:]}
    own |= dataset.options  # those that a model takes too, such as agnews' vocabulary
    own |= {"cosine": True} if args.cosine else {}
    takes = inspect.signature(MODELS[found.name]).parameters
    own |= {"sizes": movielens.sizes(data)} if "sizes" in takes else {}
    found = found._replace(options={k: v for k, v in own.items() if k in takes} | found.options)
    return found, MODELS[found.name](**found.options)


def _aggregation(args: argparse.Namespace) -> aggregation.Aggregation | None:
    norm, noise = args.clip_updates, args.noise_multiplier
    if noise is None:
        return None if norm is None else aggregation.clipped(norm)
    if norm is None:
        raise ConfigurationError(
            f"--noise-multiplier is relative to --clip-updates, got {noise} alone: add --clip-updates 1"
        )
    return aggregation.private(norm, noise)


def _algorithm(spec: Spec) -> Algorithm:
    try:
        return ALGORITHMS[spec.name](**spec.options)
    except ValueError as error:
        raise ConfigurationError(f"algorithm {spec.text}: {error}") from error


def optimizer(text: str) -> optax.GradientTransformation:
    """A client's optimizer, NAME[:key=value,...]."""
    found = spec("optimizer", text, OPTIMIZERS, hidden=("mu_dtype",))
    for key, value in found.options.items():
        if not isinstance(value, bool):
            check = checks.fraction if key in DECAYS else checks.nonnegative
            check(f"optimizer {found.name}: {key}", value)
    return OPTIMIZERS[found.name](**found.options)


def _measure_every(args: argparse.Namespace) -> int:
    every = args.measure_every
    if every is not None and not args.measure:
        raise ConfigurationError(
            f"--measure-every needs --measure, got {every}: add --measure {','.join(MEASURES)}, or some"
        )
    if every is not None and every > args.rounds:
        raise ConfigurationError(
            f"--measure-every must be in 1..{args.rounds}, the rounds, got {every}: nothing is measured"
        )
    return every or 1


def _bank(args: argparse.Namespace, algorithm: str) -> str:
    """Where an algorithm's clients are kept: folders have one for each."""
    where = args.bank
    if where in ("auto", "device", "sharded", "host"):
        return where
    folder = Path(where) / file_name(algorithm)
    if not args.resumed and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"--bank must be a new or empty folder, got {where}, which holds {folder}: choose another"
        )
    return str(folder)


def summary(data: FederatedData) -> dict[str, Any]:
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


def add_run(parser: argparse.ArgumentParser) -> Any:
    """The flags of a simulation and how it is executed; returns the last group."""
    local = LocalTraining()
    add_data(parser.add_argument_group("data"), required=True)
    group = parser.add_argument_group("what is simulated")
    group.add_argument(
        "--algorithm",
        action="append",
        metavar="NAME[:key=value,...]",
        required=True,
        help=f"one of {', '.join(ALGORITHMS)}; options are those of fd.algorithms.NAME, e.g. fedprox:mu=0.01. "
        "Give it several times to compare algorithms on the same data, cohorts and initial model",
    )
    add(
        group, "--model", "NAME[:key=value]", f"one of {', '.join(MODELS)} (default: lenet5 for glyphs and femnist, "
        "mnist_2nn for mnist and fashion_mnist, emnist_nn for emnist, resnet18 for tiny_imagenet, cifar_cnn for the "
        "other photographs, linear for synthetic, din for movielens, text_classifier for agnews, drug_target for "
        "bindingdb)",
    )  # fmt: skip
    group.add_argument("--cosine", action="store_true", help="the model's logits are cosines, which lfd needs")
    add(group, "--init", "FILE", "npz of parameters to start from (default: drawn from the seed)")
    add(group, "--rounds", "N", "rounds", count, 50)
    add(group, "--cohort", "K", "clients a round", count, 10)
    add(group, "--sampling", "KIND", "uniform: exactly K clients; bernoulli: each with probability K/N", str, "uniform")
    add(
        group, "--redeal", "evenly|ALPHA", "every round, pool the cohort's rows and deal them anew: evenly (period "
        "drift only), or each label by Dirichlet(ALPHA) (client drift only, with --partition iid)", _redeal,
    )  # fmt: skip
    group = parser.add_argument_group("local training, the same for every client")
    add(group, "--epochs", "E", "passes over a client's rows in a round", int, local.epochs)
    add(group, "--batch-size", "B", "rows a step", int, local.batch_size)
    add(group, "--lr", "LR", "step size in round 0", float, local.lr)
    add(group, "--lr-decay", "FACTOR", "round t uses LR * FACTOR^t", float, local.lr_decay)
    add(group, "--momentum", "BETA", "in [0, 1); starts afresh every round", float, local.momentum)
    add(group, "--weight-decay", "LAMBDA", "adds LAMBDA * parameters to the gradient", float, local.weight_decay)
    add(group, "--clip-norm", "NORM", "clip gradients to this global norm (default: no clipping)", float)
    add(
        group, "--optimizer", "NAME[:key=value,...]", f"of the clients, in place of SGD with momentum: one of "
        f"{', '.join(OPTIMIZERS)} of optax, afresh every round", str,
    )  # fmt: skip
    add(
        group, "--on-nonfinite", "WHAT", "with a client whose update is NaN or infinite: keep (averaged like any "
        "other), drop_client or raise, which stops the algorithm", str, "keep",
    )  # fmt: skip
    group = parser.add_argument_group("clients that fail, or must not stand out")
    add(group, "--dropout", "P", "probability that a client asked does not answer", float, 0.0)
    add(group, "--stragglers", "P", "probability that a client does only part of its local steps", float, 0.0)
    add(group, "--over-selection", "R", "ask R times as many clients; those that answer first count", float, 1.0)
    add(
        group, "--deadline", "T", "who takes longer does not count; 1: a client of mean size on a median device "
        "(default: none)", float,
    )  # fmt: skip
    add(group, "--speed-spread", "SIGMA", "log-normal spread of the devices' speeds", float, 0.0)
    add(group, "--clip-updates", "NORM", "scale what a client sends down to this norm (default: no clipping)", float)
    add(
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
    add(group, "--measure-every", "N", "rounds between measurements (default: 1)", count)
    group = parser.add_argument_group("execution")
    add(group, "--eval-every", "N", "rounds between evaluations on the test set, 0: never", count0, 1)
    add(
        group, "--devices", "N", "CPU devices to share a round (default: one per core, with --distributed one; no "
        "effect on a GPU)", count,
    )  # fmt: skip
    add(group, "--lanes", "L", "clients trained side by side on one device", _lanes, "auto")
    group.add_argument("--bfloat16", action="store_true", help="networks compute in bfloat16; parameters stay float32")
    group.add_argument(
        "--stream",
        choices=("auto", "yes", "no"),
        default="auto",
        help="leave the rows in host memory and send each round its cohort's (default: auto, where they fill a device)",
    )
    bank = "where client states are kept: auto, device, sharded, host, or a new folder for files of them"
    add(group, "--bank", "WHERE", bank, str, "auto")
    parser.set_defaults(resumed=False)
    return group


def use_devices(number: int | None) -> None:
    """So many CPU devices; None: one per core, unless JAX has started, as in a notebook: its devices are kept."""
    try:
        use_cpu_devices(number)
    except RuntimeError as error:
        if number is not None:
            raise ConfigurationError(f"--devices must be set before JAX starts, got {number}: leave it out") from error


def specs(args: argparse.Namespace) -> list[Spec]:
    """The algorithms, each once."""
    found = [spec("algorithm", text, ALGORITHMS) for text in args.algorithm]
    names = [each.text for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"--algorithm must be different each time, got {name!r} {names.count(name)} times")
    return found


class ParsedRun(NamedTuple):
    """A run as its options describe it, see `parse_run`. Nothing has been compiled."""

    simulations: dict[str, Simulation]
    """One for each ``--algorithm``, by the text that was given for it, such as "fedprox:mu=0.1"."""
    data: FederatedData
    """The federation that all of them share."""
    params: Params | None
    """The initial parameters, from ``--init``; None: each seed draws its own."""
    config: dict[str, Any]
    """Everything that was set, resolved, as `fedjax-drift run` writes it to config.json."""
    rounds: int
    eval_every: int
    """0: never."""
    measure_every: int
    seed: int


def parse_run(
    words: str | Sequence[str], *, data: FederatedData | None = None, values: Mapping[str, Any] | None = None
) -> ParsedRun:
    """The simulations that the options of `fedjax-drift run` describe, to go on with in Python.

    As on the command line, JAX gets ``--devices`` CPU devices, by default one per core, unless it has started.

    >>> import fedjax_drift as fd
    >>> words = "--dataset synthetic:num_clients=8 --algorithm fedprox:mu=0.1 --cohort 4 --rounds 3 --lr 0.5"
    >>> run = fd.parse_run(words)
    >>> sim = run.simulations["fedprox:mu=0.1"]
    >>> state, history = sim.run(sim.init(jax.random.key(run.seed), run.params), run.rounds, run.eval_every)
    >>> len(history), run.config["local"]["lr"], run.data.num_clients
    (3, 0.5, 8)

    Args:
      words: what one types after ``fedjax-drift run``, as one string or already split into words; without the options
        that belong to the command alone (``--output``, ``--seeds``, ``--target``, ``--distributed``, checkpoints, ...).
      data: the federation, in place of loading the one that the options name: the ``data`` of an earlier call.
      values: numbers, which may be traced, in place of options of local training (``lr``) and of every algorithm
        (``mu``), so that `fd.sweep` can try a grid of them:
        ``lambda **values: fd.parse_run(words, data=data, values=values).simulations["fedprox:mu=0.1"]``.

    Raises:
      ValueError: unknown options, values out of range, options that contradict each other or do not suit the data.
      FileNotFoundError: the data set is not on this machine; the message says how to get it.
    """
    parser = Parser(prog="fedjax-drift run", add_help=False)
    add_run(parser)
    args, unknown = parser.parse_known_args(_words(words))
    if unknown:
        parser.refuse(unknown[0], ": leave out what belongs to the command alone, such as --output and --seeds")
    if data is not None:
        checks.instance("data", data, FederatedData, "pass the data of an earlier parse_run, or leave it out")
    numbers = _values(values, specs(args))
    use_devices(args.devices)
    return assemble(args, data, numbers)


def _words(words: Any) -> list[str]:
    """The words one by one."""
    if isinstance(words, str):
        try:
            return shlex.split(words)
        except ValueError as error:
            raise ConfigurationError(f"words must be options of fedjax-drift run, got {words!r}: {error}") from error
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ConfigurationError(
            f"words must be a string or a list of strings, got {checks.shown(words)}: "
            '"--dataset mnist --algorithm fedavg", for example'
        )
    return list(words)


def _values(values: Any, algorithms: Sequence[Spec]) -> dict[str, Any]:
    """The values by their names, which are options of local training or of all the algorithms."""
    if values is None:
        return {}
    checks.instance("values", values, Mapping, 'pass {"lr": 0.1}, for example')  # type: ignore[type-abstract]
    options = [set(inspect.signature(ALGORITHMS[each.name]).parameters) for each in algorithms]
    for name in values:
        checks.choice("a name in values", name, [*LOCAL, *sorted(set.intersection(*options).difference(LOCAL))])
    return dict(values)


def assemble(
    args: argparse.Namespace, data: FederatedData | None = None, values: Mapping[str, Any] | None = None
) -> ParsedRun:
    """Checks the options, loads the data unless they are given, and makes the simulations; see `parse_run`."""
    dataset, written = spec("data set", args.dataset, DATASETS, hidden=HIDDEN), specs(args)
    values = dict(values or {})
    trained = {name: values.pop(name, getattr(args, name)) for name in LOCAL}
    local = LocalTraining(**trained, optimizer=None if args.optimizer is None else optimizer(args.optimizer))
    algorithms = {each.text: _algorithm(each._replace(options=each.options | values)) for each in written}
    measure_every = _measure_every(args)
    data = load(args) if data is None else data
    model_spec, model = _model(args, dataset, data)
    for name, algorithm in algorithms.items():
        if "cosine" in algorithm.requires and not model.cosine:
            raise ConfigurationError(
                f"{name} needs a model whose logits are cosines, got {model_spec.name} without: add --cosine"
            )

    computed = model.computing_in(jnp.bfloat16) if args.bfloat16 else model
    options = {"cohort_size": args.cohort, "lanes": args.lanes, "sampling": args.sampling}
    options |= {"on_nonfinite": args.on_nonfinite, "measure": args.measure, "aggregation": _aggregation(args)}
    options |= {name: getattr(args, name) for name in FAILURES}
    options["stream"] = {"auto": "auto", "yes": True, "no": False}[args.stream]
    simulations = {
        name: Simulation(computed, data, algorithm, local=local, bank=_bank(args, name), **options)
        for name, algorithm in algorithms.items()
    }
    first = next(iter(simulations.values()))
    config = {
        "dataset": {"name": dataset.name, **dataset.options},
        "partition": dealt(args),
        "source": datasets.found(dataset.name, args.data_dir, **dataset.options),
        "data": summary(data),
        "model": {"name": model_spec.name, **model_spec.options, "parameters": num_parameters(model)},
        "init": args.init,
        "algorithms": {each.text: _resolved(each) for each in written},
        "local": {f.name: getattr(local, f.name) for f in dataclasses.fields(local) if f.name != "optimizer"}
        | {"optimizer": args.optimizer},
        "rounds": args.rounds,
        "cohort_size": args.cohort,
        "sampling": args.sampling,
        "redeal": data.redeal,
        "on_nonfinite": args.on_nonfinite,
        "failures": {name: getattr(args, name) for name in FAILURES},
        "aggregation": first.aggregation.name,
        "measure": {"names": args.measure, "every": measure_every},
        "eval_every": args.eval_every,
        "seed": args.seed,
        "data_seed": data_seed(args),
        "lanes": first.lanes,
        "bfloat16": args.bfloat16,
        "stream": args.stream,
        "bank": {name: sim.bank for name, sim in simulations.items()},
        "devices": {"platform": jax.default_backend(), "count": jax.device_count()},
        "processes": jax.process_count(),
        "versions": {
            **versions(), "numpy": np.__version__, "python": platform.python_version(),
            "platform": platform.platform(),
        },
    }  # fmt: skip
    params = None if args.init is None else load_params(model, args.init)
    return ParsedRun(simulations, data, params, config, args.rounds, args.eval_every, measure_every, args.seed)
