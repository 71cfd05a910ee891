"""The flags of a simulation. Those that are one argument of the library are generated from it.

A generated flag has the type and the default value of the argument. Its help is the description in the docstring.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import optax
import optax.contrib

from fedjax_drift import adversaries, checks, clock, compression, participation, robust, shift, topology
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.cli.values import COUNT, COUNT_OR_ZERO, LOCAL_PATH, REDEAL, SEED, Choice, Chosen, reader, readers
from fedjax_drift.data import augment, partition
from fedjax_drift.data.catalogue import RECORDS
from fedjax_drift.data.datasets import DATASETS
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures.drift import MEASURES
from fedjax_drift.models import MODELS, TRAINED
from fedjax_drift.round import aggregation
from fedjax_drift.round.failures import Failures
from fedjax_drift.simulation.placement import Placement
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.spec import Count, Mix, NonNegative, Positive, checked, integer

SWITCH = {"auto": None, "yes": True, "no": False}  # of --standardize
DEFAULT_MODEL = {name: record.model for name, record in RECORDS.items()}


def distribution(num_clients: int, file: str, seed: int = 0, min_per_label: int = 0) -> partition.Partition:
    """Returns `partition.distribution` with the weights of a text file, one line of numbers per client."""
    weights = numbers_in(file, "one line per client, with one number per label")
    return partition.distribution(num_clients, weights, seed, min_per_label)


def importance(file: str) -> participation.Participation:
    """Returns `participation.importance` with the probabilities of a text file, one number per client."""
    return participation.importance(numbers_in(file, "one probability per client").reshape(-1))


def schedule(file: str) -> participation.Participation:
    """Returns `participation.schedule` with the cohorts of a text file, one line of client ids per round."""
    ids = numbers_in(file, "one line per round, with the ids of its clients")
    return participation.schedule(ids.astype(np.int32) if (ids == ids.astype(np.int32)).all() else ids)


def trace(file: str, base: participation.Participation | None = None) -> participation.Participation:
    """Returns `participation.trace` with the availability of a text file, one line of 0 and 1 per round."""
    available = numbers_in(file, "one line per round, with 0 or 1 for each client")
    if not np.isin(available, (0, 1)).all():
        checks.refuse(f"{file} must have 0 or 1 for each client", f"{available.min()} to {available.max()}")
    return participation.trace(available.astype(bool), base)


def permute_labels(pairs: str | tuple[str, ...], at: int = 0) -> shift.Shift:
    """Returns `shift.permute_labels`. pairs: such as 0-7+1-2. at: a round, or several: 50+100."""
    try:
        rounds = [int(t) for t in str(at).split("+")]
    except ValueError as error:
        checks.refuse("at must be rounds such as 50+100", at, cause=error)
    return shift.permute_labels(rounds, _pairs(pairs))


def noisy_labels(rate: Any, pairs: str | tuple[str, ...] | None = None) -> shift.Shift:
    """Returns `shift.noisy_labels`. rate: a number, or one for each client: 0.1+0.4. pairs: such as 0-7+1-2."""
    return shift.noisy_labels(rate, None if pairs is None else _pairs(pairs))


def _pairs(pairs: str | tuple[str, ...]) -> list[tuple[int, ...]]:
    """Reads pairs of labels such as 0-7+1-2."""
    try:
        return [tuple(map(int, str(pair).split("-"))) for pair in (pairs if isinstance(pairs, tuple) else [pairs])]
    except ValueError as error:
        checks.refuse("pairs must be pairs of labels such as 0-7+1-2", pairs, cause=error)


def numbers_in(file: str, content: str) -> np.ndarray:
    """Returns the numbers of a text file, [lines, numbers]. content: what it must contain."""
    path = checks.path("file", file)
    try:
        return np.loadtxt(path, ndmin=2)
    except (OSError, ValueError) as error:
        checks.refuse(f"{path} must have {content}", checks.first_line(error), "write it with numpy.savetxt", error)


PARTITIONS = (
    partition.iid, partition.dirichlet, partition.shards, partition.classes, distribution, partition.by_writer
)  # fmt: skip
RULES = (
    participation.uniform, participation.bernoulli, participation.by_size, importance, participation.power_of_choice,
    schedule, participation.cyclic, participation.diurnal, participation.markov, trace,
)  # fmt: skip


SHIFTS = (
    shift.gaussian_noise, shift.rotate, shift.brightness, shift.blur, noisy_labels, permute_labels,
    shift.rotate_over_time, shift.none, shift.sudden, shift.gradual, shift.recurring, shift.domains, shift.mixture,
)  # fmt: skip


def groups(N: int, number: int, every: int = 1) -> topology.Topology:
    """Returns `topology.groups`, in which client i belongs to edge server i mod ``number``."""
    return topology.groups(np.arange(N) % number, every)


TOPOLOGIES = (  # or the mixing matrix of a graph of N clients
    topology.star, groups, topology.torus, topology.erdos_renyi, topology.ring, topology.exponential,
    topology.one_peer, topology.complete,
)  # fmt: skip
ROBUST = (
    robust.median, robust.trimmed_mean, robust.meamed, robust.geometric_median, robust.krum, robust.multi_krum,
    robust.cge, robust.centered_clipping,
)  # fmt: skip
ATTACKS = (
    adversaries.sign_flip, adversaries.ipm, adversaries.alie, adversaries.mimic, adversaries.gaussian,
    adversaries.scaled, adversaries.nan, adversaries.label_flip, adversaries.backdoor,
)  # fmt: skip
CODECS = (
    compression.top_k, compression.random_k, compression.qsgd, compression.sign, compression.drive, compression.cast,
    compression.none,
)  # fmt: skip


def sgd(momentum: float = 0.0, nesterov: bool = False) -> optax.GradientTransformation:
    """Returns SGD, with momentum within a round."""
    return optax.trace(momentum, nesterov) if momentum else optax.identity()


def adamw(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-2
) -> optax.GradientTransformation:
    """Returns AdamW: the weight decay is added to the direction, not to the gradient."""
    return optax.chain(optax.scale_by_adam(b1, b2, eps), optax.add_decayed_weights(weight_decay))


def muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Returns Muon for matrices, and Adam for all other parameters."""
    return optax.chain(optax.contrib.muon(1.0, beta=beta), optax.scale(-1.0))  # it returns a direction of descent


OPTIMIZERS = {
    "sgd": sgd, "adam": optax.scale_by_adam, "adamw": adamw, "rmsprop": optax.scale_by_rms,
    "adagrad": optax.scale_by_rss, "muon": muon,
}  # fmt: skip


@checked
def cosine(init_value: float, decay_steps: Count, alpha: NonNegative = 0.0) -> optax.Schedule:
    """Returns a cosine decay to ``alpha`` times the learning rate, within ``decay_steps`` rounds."""
    return optax.cosine_decay_schedule(init_value, decay_steps, alpha)


@checked
def step(init_value: float, every: Count, factor: Positive = 0.1) -> optax.Schedule:
    """Returns a schedule that multiplies the learning rate by ``factor`` after every ``every`` rounds."""
    return optax.exponential_decay(init_value, every, factor, staircase=True)


@checked
def warmup_cosine(
    init_value: float, warmup_steps: int, decay_steps: Annotated[int, integer(2)], end_value: NonNegative = 0.0
) -> optax.Schedule:
    """Returns a linear warm-up from 0 to ``init_value``, and then a cosine decay. decay_steps: of both together."""
    warmup = checks.integer("warmup_steps", warmup_steps, 1, decay_steps - 1)
    return optax.warmup_cosine_decay_schedule(0.0, init_value, warmup, decay_steps, end_value)


@dataclass(frozen=True, eq=False)
class Hostile(Choice):
    """Reads SHARE:ATTACK, such as 0.2:alie or 0.1:ipm:tau=2."""

    metavar = "SHARE:NAME[:key=value,...]"

    def __call__(self, text: str) -> Chosen:
        number, _, attack = text.partition(":")
        share, chosen = reader(Mix)(number), super().__call__(attack)
        return chosen._replace(text=text, factory=lambda **options: adversaries.share(share, chosen.factory(**options)))


def choice(factories: Sequence[Callable[..., Any]], *hidden: str) -> Choice:
    """Reads the name of one of the factories, with options. hidden: parameters that are no options."""
    return Choice({factory.__name__: factory for factory in factories}, hidden)


DOWNLOAD = "download"  # the word before the names of data sets to download
DATASET = Choice(DATASETS, ("request",))
PARTITION = choice(PARTITIONS, "num_clients", "seed", "size_sigma")
MODEL = Choice(MODELS, ("input_shape", "sizes"))
TRAIN = Choice(TRAINED, ("model", "base", "frozen_dtype"))
OPTIMIZER = Choice(OPTIMIZERS, ("mu_dtype",))
SCHEDULE = choice((cosine, step, warmup_cosine), "init_value")
PARTICIPATION = choice(RULES, "base", "phases")
SHIFT = choice(SHIFTS, "shift", "shifts", "of")
CODEC = choice(CODECS)
RULE, BEFORE = choice(ROBUST), choice((robust.nnm, robust.bucketing, robust.arc))
ADVERSARIES = Hostile({factory.__name__: factory for factory in ATTACKS}, ("best_of", "pairs"))
TOPOLOGY = choice(TOPOLOGIES, "N")
CLOCK = choice((clock.synchronous, clock.asynchronous))
AUGMENT = choice((augment.crop_and_flip,))
ALGORITHM = Choice(ALGORITHMS)


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigurationError instead of exiting."""

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
        """Raises ConfigurationError for an unknown word. The message names the most similar flag, or else ``fix``."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        self.error(f"unknown argument {word!r}{checks.nearest(word.partition('=')[0], flags) or fix}")


def add(group: Any, flag: str, text: str, read: Callable = str, default: Any = None, **options: Any) -> None:
    """Adds a flag with a value. ``read(word)`` returns the value. options: of argparse's add_argument."""
    options.setdefault("metavar", getattr(read, "metavar", "X" if read is float else None))
    text += "" if default is None else f" (default: {default})"
    group.add_argument(flag, type=read, default=default, help=text.replace("%", "%%"), **options)


def add_switch(group: Any, flag: str, text: str) -> None:
    """Adds a flag without a value."""
    group.add_argument(flag, action="store_true", help=text)


def add_parameters(group: Any, of: Callable, *names: str, optional: bool = False) -> None:
    """Adds flags for arguments of a class or a function of the library.

    What is allowed, the default and the description are those of the argument. So one that is added has a flag.

    names: the arguments, or FLAG=ARGUMENT. Default: all whose values can be written as words.
    optional: whether the value is None if the flag is not given.
    """
    described = re.findall(r"^  ([\w, ]+): (.+(?:\n    .+)*)", inspect.getdoc(of) or "", re.MULTILINE)
    texts = {name: " ".join(text.replace("`", "").split()) for names, text in described for name in names.split(", ")}
    known, parameters = readers(of), inspect.signature(of).parameters
    for flag, _, argument in (each.partition("=") for each in names or known):
        name = argument or flag
        default = parameters[name].default
        text = re.sub(r"None(?: \(default\))?:", "Default:", texts.get(name, ""))
        given = None if optional or default is inspect.Parameter.empty else default
        text = text.replace(f" Default: {given}.", "").rstrip(".")  # `add` says it
        add(group, f"--{flag.replace('_', '-')}", text, known[name], given)


def needs(args: argparse.Namespace, flag: str, other: str, example: str) -> None:
    """Raises ConfigurationError if a flag is given without another flag that it needs."""
    value, needed = (getattr(args, name[2:].replace("-", "_")) for name in (flag, other))
    if value is not None and value is not False and not needed:
        given = "none" if value is True else f"{value} without it"
        checks.refuse(f"{flag} needs {other}", given, example)


# fmt: off
def add_data(group: Any, required: bool) -> None:
    """Adds the flags of the data set and its partition."""
    text = f"one of {DATASET}. With options, for example: glyphs:num_writers=500, synthetic:alpha=1,beta=1"
    if required:
        add(group, "--dataset", text, DATASET, required=True)
    else:
        add(group, "dataset", f"{text}. After the word {DOWNLOAD}, one or more of them",
            lambda word: word if word == DOWNLOAD else DATASET(word), metavar=DATASET.metavar, nargs="*")
    add(group, "--partition",
        "how the data are partitioned into clients: iid, dirichlet:ALPHA (smaller ALPHA is more heterogeneous), "
        "dirichlet:ALPHA:prior=class, shards:S (each client gets S blocks of the examples sorted by label), classes:K "
        "(each client has exactly K labels), distribution:FILE (the weights of the labels, one line per client) or "
        "by_writer. iid and dirichlet take the sizes of the clients, as in iid:sizes=linear (or square, exponential, "
        "or numbers as in 100+200+300). Default: the natural clients of glyphs, femnist, shakespeare, synthetic, "
        "movielens and dialogue, otherwise iid", PARTITION)
    add(group, "--clients", "number of clients of a partition (default: 100)", COUNT)
    add(group, "--size-sigma", "standard deviation of the logarithm of the client sizes, for iid and "
        "dirichlet (default: 0, equal sizes)", float, metavar="SIGMA")
    add(group, "--imbalance", "leave out training examples before the partition, such that the sizes of the "
        "classes decrease exponentially, and the last class has 1 / FACTOR of those of the first (default: none are "
        "left out; 100 is usual)", float, metavar="FACTOR")
    add(group, "--data-dir",
        "folder of the data files (default: $FEDJAX_DRIFT_DATA, the cache, tensorflow-datasets)", LOCAL_PATH)
    add(group, "--standardize", "whether images are standardized with the mean and standard deviation of the "
        "data set, or scaled to [0, 1]. auto means no for femnist and glyphs, and yes for other images",
        reader(Literal["auto", "yes", "no"]), "auto")
    add(group, "--validation", "hold out this share of each client's training examples. They replace the "
        "test set (default: none are held out)", float, metavar="SHARE")
    add(group, "--seed", "random seed of the data, the partition, the cohorts and the initial model", SEED, 0)
    add(group, "--data-seed", "random seed of the data and the partition (default: --seed)", SEED)


def add_run(parser: argparse.ArgumentParser) -> Any:
    """Adds the flags of a simulation and of its execution. Returns the last group of flags."""
    add_data(parser.add_argument_group("data"), required=True)
    group = parser.add_argument_group("simulation")
    add(group, "--algorithm", f"one of {ALGORITHM}. The options are the arguments of "
        "fd.algorithms.NAME, for example fedprox:mu=0.01. Give --algorithm several times to compare algorithms on the "
        "same data, cohorts and initial model", ALGORITHM, action="append", required=True)
    defaults = ", ".join(f"{model} for {dataset}" for dataset, model in DEFAULT_MODEL.items())
    add(group, "--model", f"one of {MODEL} (default: {defaults})", MODEL)
    add_switch(group, "--cosine", "use a classifier whose logits are cosines, as lfd requires")
    add(group, "--train",
        "train a part of the model: lora:rank=8,where=kernel,whole=classifier trains adapters of rank 8 for the "
        "matrices whose path matches `where`, and the parameters that match `whole`; trainable:classifier trains the "
        "parameters that match. The other parameters are those of --init, or random (default: train the whole model)",
        TRAIN)
    add(group, "--init", "npz or safetensors file with the initial parameters (default: random)", LOCAL_PATH)
    add(group, "--rounds", "number of rounds", COUNT, 50)
    add(group, "--cohort", "clients per round", COUNT, 10)
    add(group, "--participation", f"the rule that selects the clients of a round, one of "
        f"{PARTICIPATION}, for example cyclic:groups=4. The options are the arguments of "
        "fd.participation.NAME; importance, schedule and trace take file=FILE, a text file with an array. Give a rule "
        "of availability and a second rule after it, such as --participation cyclic:groups=4 --participation by_size, "
        "to select from the available clients with the second (default: uniform)", PARTICIPATION, action="append")
    add(group, "--sampling", "uniform or bernoulli: short for --participation", str, "uniform")
    add(group, "--redeal",
        "in every round, pool the examples of the cohort and redistribute them. evenly: all clients of a cohort get "
        "about the same labels, so only period drift remains. ALPHA: the examples of each label are split by "
        "Dirichlet(ALPHA); with --partition iid only client drift remains", REDEAL, metavar="evenly|ALPHA")
    add(group, "--shift", f"change the features or the labels of the examples by client or round, one of "
        f"{SHIFT}, for example rotate:degrees=45. The options are the arguments of fd.shift.NAME; "
        "permute_labels and noisy_labels take pairs=0-7+1-2. Give --shift several times for several shifts, one after "
        "another. sudden, gradual and recurring apply to all shifts after them, and domains and mixture choose one of "
        "those after them, as in --shift sudden:at=50 --shift permute_labels:pairs=0-7", SHIFT, action="append")
    add(group, "--shift-test", "with --shift, evaluate on the test set of the present round, on that of the "
        "first, or on both", reader(Literal["present", "first", "both"]), "present")
    add(group, "--compress", f"send the clients' messages through a codec, one of {CODEC}, "
        "for example top_k:fraction=0.01. The options are the arguments of fd.compression.NAME (default: none)", CODEC)
    add_parameters(group, compression.compressed, "error_feedback")
    add(group, "--downlink", "send the model to the clients through a codec, one of those of --compress "
        "(default: none)", CODEC)
    add(group, "--network", f"who averages with whom, one of {TOPOLOGY}: one server; "
        "groups:number=8,every=5, edge servers that a cloud averages every 5 rounds; or a graph of all clients, with "
        "--cohort the number of clients (default: star)", TOPOLOGY)
    add(group, "--adversaries", f"a share of the clients lie, with an attack, one of {ADVERSARIES}: for example "
        "0.2:alie or 0.2:ipm:tau=2. The options are the arguments of fd.adversaries.NAME (default: none)", ADVERSARIES)
    add(group, "--robust", f"a robust aggregation rule instead of the mean, one of {RULE}, for example "
        "trimmed_mean:f=2. The options are the arguments of fd.robust.NAME (default: none)", RULE)
    add(group, "--before", f"with --robust, what is done with the messages first, one of {BEFORE}, for example "
        "nnm:f=2. Give it several times for several", BEFORE, action="append")
    group = parser.add_argument_group("local training of every client")
    add_parameters(group, LocalTraining)
    add(group, "--lr-schedule", "learning rate of round t, which begins at --lr: one of "
        f"{SCHEDULE}, for example cosine:decay_steps=500 or step:every=100 (default: --lr-decay)", SCHEDULE)
    add(group, "--optimizer", "optax optimizer of the clients, instead of SGD with momentum: one of "
        f"{OPTIMIZER}. Its state is reset in every round", OPTIMIZER)
    add(group, "--augment", "train on random variants of the images: one of "
        f"{AUGMENT}; options are those of fd.augment.NAME", AUGMENT)
    add_parameters(group, Simulation, "on_nonfinite")
    unit = "A deadline of 1 is the time of a client of mean size on a device of median speed."
    group = parser.add_argument_group("client failures", textwrap.fill(unit, 76))
    add_parameters(group, Failures)
    unit = "With a speed or asynchronous rounds, --speed-spread is that of the devices, and --deadline is in seconds."
    group = parser.add_argument_group("virtual time", textwrap.fill(unit, 76))
    add(group, "--clock", "synchronous, or asynchronous:concurrency=M, with which M clients train at the same "
        "time and the server is updated with every K reports. The options are the arguments of fd.clock.asynchronous "
        "(default: synchronous)", CLOCK)
    add_parameters(group, clock.Devices, "seconds_per_step", "up", "down", optional=True)
    privacy = "With --noise-multiplier all clients have weight 1. It needs --clip-updates, and --sampling bernoulli " \
        "or --restart-every, with which the noise is that of a tree over the rounds (DP-FTRL)."
    group = parser.add_argument_group("privacy", textwrap.fill(privacy, 76))
    add_parameters(group, aggregation.private, "clip_updates=clip_norm", "noise_multiplier", "target_quantile")
    add_parameters(group, aggregation.private_ftrl, "restart_every")
    group = parser.add_argument_group("drift measures")
    texts = {name: " ".join((make.__doc__ or "").partition("\n\n")[0].split()) for name, make in MEASURES.items()}
    measures = "; ".join(f"{name}: {text[:1].lower()}{text[1:].rstrip('.')}" for name, text in texts.items())
    group.add_argument("--measure", action="extend", type=lambda text: text.split(","), default=[],
                       metavar="NAME[,NAME...]", help=f"{measures}. They are computed while the clients train; for "
                       '"gradients" they train a second time')
    add(group, "--measure-every", "rounds between measurements (default: 1)", COUNT)
    group = parser.add_argument_group("execution")
    add(group, "--eval-every", "rounds between evaluations on the test set, 0: never", COUNT_OR_ZERO, 1)
    add(group, "--devices", "number of CPU devices of a process (default: one per core; with --distributed, 1). "
        "No effect on a GPU", COUNT)
    add_parameters(group, Placement, "devices_per_client", "lanes", "stream", "bank")
    add_switch(group, "--bfloat16", "compute the networks in bfloat16; parameters stay float32")
    parser.set_defaults(participation=[], shift=[], before=[])
    return group
# fmt: on


@functools.cache
def flags_of_run() -> dict[str, Any]:
    """The flags of a simulation and of its execution, with their defaults."""
    parser = Parser(add_help=False)
    add_run(parser)
    return {action.dest: action.default for action in parser._actions}
