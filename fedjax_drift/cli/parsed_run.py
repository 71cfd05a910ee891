"""Turns the flags of `fedjax-drift run` into simulations, for the command line and for Python (`fd.parse_run`)."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedjax_drift import checks, compression, reprs, shift, topology
from fedjax_drift.cli.flags import DEFAULT_MODEL, MODEL, PARTITION, SWITCH, Parser, add_run, flags_of_run, needs
from fedjax_drift.cli.values import LOCAL, Chosen, readers
from fedjax_drift.clock import Devices
from fedjax_drift.data import datasets, movielens, partition
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.data.partition import Partition
from fedjax_drift.devices.mesh import use_cpu_devices
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures.drift import MEASURES
from fedjax_drift.models import num_parameters
from fedjax_drift.models.pretrained import load_params
from fedjax_drift.round import aggregation
from fedjax_drift.round.failures import Failures
from fedjax_drift.run_folder import file_name
from fedjax_drift.simulation.placement import Placement
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.spec import FRACTION, NONNEGATIVE
from fedjax_drift.storage.checkpoint import versions
from fedjax_drift.types import Needs, Params

BANKS = readers(Placement)["bank"].words  # values of --bank that are not folders
# Flags that the settings have under another name, or in a group. All others are entries of the settings.
GROUPED = (
    *LOCAL, *readers(Failures), "lr_schedule", "optimizer", "augment", "seconds_per_step", "up", "down", "algorithm",
    "cohort", "measure_every", "devices_per_client",
)  # fmt: skip


class ParsedRun(NamedTuple):
    """The simulations and settings that the options of a run describe, see `parse_run`. Nothing is compiled yet."""

    simulations: dict[str, Simulation]
    """One simulation per ``--algorithm``. The key is the value of the option, such as "fedprox:mu=0.1"."""
    data: FederatedData
    """The federation, which all simulations share."""
    params: Params | None
    """The initial parameters, from ``--init``. None: the model initialises them for each seed."""
    config: dict[str, Any]
    """All settings, including those with default values, as `fedjax-drift run` writes them to config.json."""
    rounds: int
    eval_every: int
    """Number of rounds between evaluations. 0: never."""
    measure_every: int
    seed: int

    def __repr__(self) -> str:
        return reprs.fields(self)


def parse_run(
    words: str | Sequence[str], *, data: FederatedData | None = None, values: Mapping[str, Any] | None = None
) -> ParsedRun:
    """Creates the simulations that the options of `fedjax-drift run` describe, for use in Python.

    As on the command line, JAX uses the number of CPU devices given by ``--devices`` (default: one per core). If JAX
    has already started and ``--devices`` is not given, JAX keeps the devices that it has.

    >>> import fedjax_drift as fd
    >>> words = "--dataset synthetic:num_clients=8 --algorithm fedprox:mu=0.1 --cohort 4 --rounds 3 --lr 0.5"
    >>> run = fd.parse_run(words)
    >>> sim = run.simulations["fedprox:mu=0.1"]
    >>> state, history = sim.run(sim.init(jax.random.key(run.seed), run.params), run.rounds, run.eval_every)
    >>> len(history), run.config["local"]["lr"], run.data.num_clients
    (3, 0.5, 8)

    Args:
      words: the options of ``fedjax-drift run``, as one string or as a list of words. Options of the command itself are
        not allowed (``--output``, ``--seeds``, ``--target``, ``--distributed``, checkpoints, ...).
      data: a `FederatedData` to use instead of loading the data set, normally the ``data`` of an earlier call.
      values: a dict of numbers. They replace options of local training (``lr``), or hyper-parameters that every
        ``--algorithm`` in ``words`` has (``mu``). They may be JAX tracers, so that `fd.sweep` can vary them:
        ``lambda **values: fd.parse_run(words, data=data, values=values).simulations["fedprox:mu=0.1"]``.

    Raises:
      ValueError: an option is unknown, a value is out of range, or options contradict each other or do not fit the
        data.
      FileNotFoundError: the data set is not on this machine. The message says how to get it.
    """
    parser = Parser(prog="fedjax-drift run", add_help=False)
    add_run(parser)
    args, unknown = parser.parse_known_args(_words(words))
    if unknown:
        parser.refuse(unknown[0], ": leave out the options of the command itself, such as --output and --seeds")
    if data is not None:
        checks.instance("data", data, FederatedData, "pass the data of an earlier parse_run, or leave it out")
    if values is not None:
        checks.instance("values", values, Mapping, 'pass {"lr": 0.1}, for example')  # type: ignore[type-abstract]
        shared = set.intersection(*(set(spec.defaults) for spec in algorithm_specs(args)))
        for name in values:
            checks.choice("a name in values", name, [*LOCAL, *sorted(shared.difference(LOCAL))])
    use_devices(args.devices)
    return assemble(args, data, values)


def words_of(value: Any) -> Any:
    """The value of a flag in the settings: of a name with options, the word on the command line."""
    if isinstance(value, list):
        return [words_of(each) for each in value]
    return value.text if isinstance(value, Chosen) else str(value) if isinstance(value, Path) else value


def _words(words: Any) -> list[str]:
    """Returns the list of words."""
    if isinstance(words, str):
        try:
            return shlex.split(words)
        except ValueError as error:
            checks.refuse("words must be options of fedjax-drift run", repr(words), str(error), error)
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        fix = 'pass "--dataset mnist --algorithm fedavg", for example'
        checks.refuse("words must be a string or a list of strings", checks.shown(words), fix)
    return list(words)


def use_devices(number: int | None) -> None:
    """Makes JAX use this number of CPU devices. None: one per core, or those of a JAX that has already started."""
    try:
        use_cpu_devices(number)
    except RuntimeError as error:
        if number is not None:
            checks.refuse("--devices must be set before JAX starts", number, "leave it out", error)


def algorithm_specs(args: argparse.Namespace) -> list[Chosen]:
    """Returns the algorithms. Raises ConfigurationError if two of them have the same text or folder."""
    names = [spec.text for spec in args.algorithm]
    for name in names:
        if names.count(name) > 1:
            checks.refuse("--algorithm must have a different value each time", f"{name!r} {names.count(name)} times")
        same = [other for other in names if file_name(other).casefold() == file_name(name).casefold()]
        if len(same) > 1:
            got = f"{' and '.join(same)}, whose models would both be in {file_name(name)}"
            fix = "write a number in another way, such as 0.1, or use two runs"
            checks.refuse("--algorithm must have values with different folders", got, fix)
    return args.algorithm


def assemble(
    args: argparse.Namespace,
    data: FederatedData | None = None,
    values: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> ParsedRun:
    """Checks the options, loads the data unless they are given, and creates the simulations. See `parse_run`.

    mesh: the devices. Default: all.
    """
    specs, values = algorithm_specs(args), dict(values or {})
    numbers = {name: values.pop(name, getattr(args, name)) for name in LOCAL}
    optimizer, augment = args.optimizer and _optimizer(args.optimizer), args.augment and args.augment.make()
    schedule = args.lr_schedule and {"lr": args.lr_schedule.using(init_value=numbers["lr"]).make()}
    local = LocalTraining(**numbers | (schedule or {}), optimizer=optimizer, augment=augment)
    algorithms = {}
    for spec in specs:
        try:
            algorithm = spec._replace(options=spec.options | values).make()
            if args.compress is not None:
                algorithm = compression.compressed(algorithm, args.compress.make(), args.error_feedback)
        except ValueError as error:
            raise ConfigurationError(f"algorithm {spec.text}: {error}") from error
        algorithms[spec.text] = algorithm
    measure_every = _measure_every(args)
    data = load_data(args) if data is None else data
    model_spec = _model_spec(args, data)
    model = model_spec.make()
    for name, algorithm in algorithms.items():
        if Needs.of(algorithm.requires).cosine and not model.cosine:
            what = f"{name} needs a model whose logits are cosines"
            checks.refuse(what, f"{model_spec.name} without", "add --cosine")
    params = None if args.init is None else load_params(model, args.init)
    trained, part = model.computing_in(jnp.bfloat16) if args.bfloat16 else model, None
    if args.train is not None:
        frozen_dtype = jnp.bfloat16 if args.bfloat16 else None
        trained, params = args.train.using(base=params, frozen_dtype=frozen_dtype).make(trained), None
        base = None if mesh is not None else trained.frozen[0].checksum  # a plan needs no parameters
        part = {"name": args.train.name, **args.train.options, "parameters": num_parameters(trained), "base": base}
    names = (*readers(Failures), "on_nonfinite", "measure", "lanes", "devices_per_client", "stream")
    options = {name: getattr(args, name) for name in names} | _participation(args) | _timing(args)
    devices = options.get("devices")
    options |= {"speed_spread": 0.0} if devices else {}  # it is one of `Devices` then
    options |= {"aggregation": _aggregation(args), "topology": _topology(args, data.num_clients)}
    options["sources"] = [] if args.downlink is None else [compression.downlink(args.downlink.make())]
    options["sources"] += [] if args.adversaries is None else [args.adversaries.make()]
    simulations = {}
    for name, algorithm in algorithms.items():
        bank = args.bank if args.bank in BANKS else os.path.join(args.bank, file_name(name))
        simulations[name] = Simulation(
            trained, data, algorithm, local=local, cohort_size=args.cohort, mesh=mesh, bank=bank, **options
        )
    first = next(iter(simulations.values()))
    texts = {flag: words_of(getattr(args, flag)) for flag in flags_of_run()}
    settings = {flag: text for flag, text in texts.items() if flag not in GROUPED} | {
        "dataset": {"name": args.dataset.name, **args.dataset.options},
        "partition": partition_text(args),
        "source": datasets.locate(args.dataset.name, args.data_dir, **args.dataset.options),
        "data": summary(data),
        "model": {"name": model_spec.name, **model_spec.options, "parameters": num_parameters(model)},
        "train": part,
        "init": None if args.init is None else os.path.abspath(args.init),
        "algorithms": {spec.text: {"name": spec.name, **spec.defaults, **spec.options} for spec in specs},
        "local": vars(local) | {"lr": numbers["lr"]} | {k: texts[k] for k in ("lr_schedule", "optimizer", "augment")},
        "cohort_size": args.cohort,
        "redeal": data.redeal,
        "failures": {name: options[name] for name in readers(Failures)},
        "speeds": devices and {name: value for name, value in vars(devices).items() if value < math.inf},
        "aggregation": first.aggregation.name,
        "measure": {"names": args.measure, "every": measure_every},
        "data_seed": data_seed(args),
        "lanes": first.lanes,
        "bank": {name: sim.bank for name, sim in simulations.items()},
        "devices": {"platform": jax.default_backend(), "count": jax.device_count()}
        | {"per_client": args.devices_per_client},
        "processes": jax.process_count(),
        "versions": versions()
        | {"numpy": np.__version__, "python": platform.python_version(), "platform": platform.platform()},
    }
    return ParsedRun(simulations, data, params, settings, args.rounds, args.eval_every, measure_every, args.seed)


def load_data(args: argparse.Namespace) -> FederatedData:
    """Returns the federation that the options describe."""
    dataset, seed, standardize = args.dataset, data_seed(args), SWITCH[args.standardize]
    data = datasets.load(
        dataset.name, _partition(args), args.data_dir, seed=seed, standardize=standardize, **dataset.options
    )
    if standardize and data.mean is None:
        what = "--standardize yes needs images with a mean and a standard deviation"
        checks.refuse(what, dataset.name, "leave it out")
    if args.validation is not None:
        if dataset.name == "movielens":
            what = "--validation must be left out for movielens, whose test examples are ranked in groups"
            checks.refuse(what, args.validation)
        data = data.with_validation(args.validation, seed)
    if getattr(args, "per_client", False) and data.test_sizes is None:  # only the command run has --per-client
        data = data.with_client_tests(seed)
    redeal = getattr(args, "redeal", None)  # the command data does not have --redeal
    data = data if redeal is None else data.redealt(None if redeal == "evenly" else redeal)
    shifts = getattr(args, "shift", None)
    return data.shifted(_shift(shifts), args.shift_test, seed) if shifts else data


def _shift(specs: Sequence[Chosen]) -> shift.Shift:
    """The shift that the flags describe. A shift over time applies to those after it."""
    spec, *rest = specs
    takes = spec.defaults.keys() & {"shift", "shifts"}
    if takes and not rest:
        checks.refuse(f"--shift {spec.text} needs a shift after it", "none", "add --shift rotate:degrees=45")
    if "shift" in takes:
        return spec._replace(options=spec.options | {"shift": _shift(rest)}).make()
    if "shifts" in takes:
        bound = inspect.signature(spec.factory).bind_partial(**spec.options)
        return spec.factory(*bound.args, *(_shift([each]) for each in rest))
    return shift.chain(spec.make(), _shift(rest)) if rest else spec.make()


def data_seed(args: argparse.Namespace) -> int:
    """Returns the seed of the data set and of its partition."""
    return args.seed if args.data_seed is None else args.data_seed


def partition_text(args: argparse.Namespace) -> str:
    """Returns the partition as text."""
    recipe = _partition(args)
    return repr(recipe) if recipe else "the data set's own clients"


def _partition(args: argparse.Namespace) -> Partition | None:
    """Returns the partition, or None for the natural clients of a data set."""
    if datasets.RECORDS[args.dataset.name].by_writer:
        why = f"{args.dataset.name} has natural clients, so add --partition iid, for example"
        for flag in ("--clients", "--size-sigma", "--imbalance"):
            needs(args, flag, "--partition", why)
        if args.partition is None:
            return None
    spec, clients, sigma = args.partition or PARTITION("iid"), args.clients, args.size_sigma
    for flag, option, value in (("--clients", "num_clients", clients), ("--size-sigma", "size_sigma", sigma)):
        if value is not None and option not in spec.defaults:
            fix = "leave it out, or use --partition dirichlet:ALPHA"
            checks.refuse(f"{flag} has no effect on {spec.name}", value, fix)
    recipe = spec.using(num_clients=clients or 100, seed=data_seed(args), size_sigma=sigma or 0.0).make()
    return recipe if args.imbalance is None else partition.long_tailed(recipe, args.imbalance, data_seed(args))


def _model_spec(args: argparse.Namespace, data: FederatedData) -> Chosen:
    """Returns the model with all its options: those of the data, of the data set and of --model."""
    highest = max(int(y.max()) for y in (data.y, data.y_test) if y is not None)
    classes = max(datasets.num_classes(args.dataset.name, **args.dataset.options), highest + 1)
    spec = args.model or MODEL(DEFAULT_MODEL[args.dataset.name])
    known = {"num_classes": classes, "input_shape": data.x.shape[1:]}
    if data.y.ndim > 1:  # the next token at each position
        known |= {"vocabulary": classes, "length": data.x.shape[1]}
    known |= args.dataset.options  # options that the model has too, such as the vocabulary of agnews
    known |= {"cosine": True} if args.cosine else {}
    known |= {"sizes": movielens.sizes(data)} if "sizes" in spec.defaults else {}
    return spec.using(**known)


def _topology(args: argparse.Namespace, N: int) -> topology.Topology | None:
    made = args.network and args.network.using(N=N).make()
    return topology.graph(made) if isinstance(made, np.ndarray) else made


def _optimizer(given: Chosen) -> optax.GradientTransformation:
    """Returns the optimizer. optax does not check its options."""
    for name, value in given.options.items():
        if not isinstance(value, bool):
            allowed = FRACTION if name in ("b1", "b2", "decay", "beta", "momentum") else NONNEGATIVE
            allowed.check(f"optimizer {given.name}: {name}", value, "")
    return given.make()


def _aggregation(args: argparse.Namespace) -> aggregation.Aggregation | None:
    needs(args, "--noise-multiplier", "--clip-updates", "add --clip-updates 1, for example")
    for flag in ("--target-quantile", "--restart-every"):
        needs(args, flag, "--noise-multiplier", "add --noise-multiplier 1, for example")
    if args.before and args.robust is None:
        checks.refuse("--before needs --robust", args.before[0].text, "add --robust median, for example")
    if args.robust is not None:
        if args.clip_updates is not None:
            checks.refuse("--clip-updates must be left out with --robust", args.clip_updates, "give one of them")
        return aggregation.robust(args.robust.make(), [each.make() for each in args.before])
    if args.noise_multiplier is None:
        return None if args.clip_updates is None else aggregation.clipped(args.clip_updates)
    if args.restart_every is not None:
        if args.target_quantile is not None:
            checks.refuse("--target-quantile must be left out with --restart-every", "both", "give one")
        return aggregation.private_ftrl(args.clip_updates, args.noise_multiplier, args.restart_every)
    return aggregation.private(args.clip_updates, args.noise_multiplier, args.target_quantile)


def _participation(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the option of `Simulation` that selects the clients. A rule selects from those of the rule before it."""
    if not args.participation:
        return {"sampling": args.sampling}
    if args.sampling != "uniform":
        checks.refuse("--sampling is short for --participation", f"both, with {args.sampling}", "give one")
    *outer, spec = args.participation
    rule = spec.make()
    for spec in reversed(outer):
        if "base" not in spec.defaults:
            what = f"--participation {spec.text} selects a cohort, so no other rule can follow it"
            fix = "give a rule of availability first, such as cyclic:groups=4"
            checks.refuse(what, args.participation[-1].text, fix)
        rule = spec._replace(options=spec.options | {"base": rule}).make()
    return {"participation": rule}


def _timing(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `Simulation` about virtual time. --speed-spread is one of them if any other is given."""
    clock = args.clock and args.clock.make()
    given = {name: getattr(args, name) for name in ("seconds_per_step", "up", "down")}
    given = {name: value for name, value in given.items() if value is not None}
    if not given and (clock is None or clock.concurrency is None):
        return {"clock": clock}
    return {"clock": clock, "devices": Devices(args.speed_spread, **given)}


def _measure_every(args: argparse.Namespace) -> int:
    needs(args, "--measure-every", "--measure", f"add --measure with one or more of {','.join(MEASURES)}")
    if (args.measure_every or 1) > args.rounds:
        what = f"--measure-every must be in 1..{args.rounds}, the number of rounds"
        checks.refuse(what, args.measure_every, "use a smaller number")
    return args.measure_every or 1


def summary(data: FederatedData) -> dict[str, Any]:
    """Returns the numbers of clients, examples and labels."""
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
