"""Turns the options of `fedjax-drift run` into simulations, for the command line and for Python (`fd.parse_run`)."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
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

from fedjax_drift import checks
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.cli.flags import (
    AUGMENTATIONS,
    DECAYS,
    DEFAULT_MODEL,
    FAILURES,
    FUNCTIONS,
    HIDDEN,
    LOCAL,
    OPTIMIZERS,
    PARTITIONS,
    SWITCH,
    Parser,
    Spec,
    add_run,
    parse_spec,
)
from fedjax_drift.data import augment, datasets, movielens, partition
from fedjax_drift.data.datasets import DATASETS, num_classes
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.mesh import use_cpu_devices
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures.drift import MEASURES
from fedjax_drift.model import Model
from fedjax_drift.models import MODELS, TRAINED, num_parameters
from fedjax_drift.models.pretrained import load_params
from fedjax_drift.round import aggregation
from fedjax_drift.run_folder import file_name
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.storage.checkpoint import versions
from fedjax_drift.types import Algorithm, Params


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
    numbers = _values(values, algorithm_specs(args))
    use_devices(args.devices)
    return assemble(args, data, numbers)


def _words(words: Any) -> list[str]:
    """Returns the list of words."""
    if isinstance(words, str):
        try:
            return shlex.split(words)
        except ValueError as error:
            raise ConfigurationError(f"words must be options of fedjax-drift run, got {words!r}: {error}") from error
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ConfigurationError(
            f"words must be a string or a list of strings, got {checks.shown(words)}: "
            'pass "--dataset mnist --algorithm fedavg", for example'
        )
    return list(words)


def _values(values: Any, algorithms: Sequence[Spec]) -> dict[str, Any]:
    """Checks that the names are options of local training, or hyper-parameters of every algorithm of the run."""
    if values is None:
        return {}
    checks.instance("values", values, Mapping, 'pass {"lr": 0.1}, for example')  # type: ignore[type-abstract]
    options = [set(inspect.signature(ALGORITHMS[each.name]).parameters) for each in algorithms]
    for name in values:
        checks.choice("a name in values", name, [*LOCAL, *sorted(set.intersection(*options).difference(LOCAL))])
    return dict(values)


def use_devices(number: int | None) -> None:
    """Makes JAX use this number of CPU devices.

    None means one device per core. If JAX has already started, as in a notebook, None keeps its devices.
    """
    try:
        use_cpu_devices(number)
    except RuntimeError as error:
        if number is not None:
            raise ConfigurationError(f"--devices must be set before JAX starts, got {number}: leave it out") from error


def algorithm_specs(args: argparse.Namespace) -> list[Spec]:
    """Returns the algorithms. Raises ConfigurationError if one is given twice."""
    specs = [parse_spec("algorithm", text, ALGORITHMS) for text in args.algorithm]
    names = [spec.text for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"--algorithm must have a different value each time, got {name!r} {names.count(name)} times"
            )
        same = [other for other in names if file_name(other).casefold() == file_name(name).casefold()]
        if len(same) > 1:
            raise ConfigurationError(
                f"--algorithm must have values with different folders, got {' and '.join(same)}, whose models would "
                f"both be in {file_name(name)}: write a number in another way, such as 0.1, or use two runs"
            )
    return specs


def assemble(
    args: argparse.Namespace,
    data: FederatedData | None = None,
    values: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> ParsedRun:
    """Checks the options, loads the data unless they are given, and creates the simulations. See `parse_run`.

    mesh: the devices. Default: all.
    """
    dataset, written = parse_spec("data set", args.dataset, DATASETS, hidden=HIDDEN), algorithm_specs(args)
    values = dict(values or {})
    trained = {name: values.pop(name, getattr(args, name)) for name in LOCAL}
    local = LocalTraining(
        **trained,
        optimizer=None if args.optimizer is None else optimizer(args.optimizer),
        augment=None if args.augment is None else augmentation(args.augment),
    )
    algorithms = {each.text: _algorithm(each._replace(options=each.options | values)) for each in written}
    measure_every = _measure_every(args)
    data = load_data(args) if data is None else data
    model_spec, model = _model(args, dataset, data)
    for name, algorithm in algorithms.items():
        if "cosine" in algorithm.requires and not model.cosine:
            raise ConfigurationError(
                f"{name} needs a model whose logits are cosines, got {model_spec.name} without: add --cosine"
            )

    computed = model.computing_in(jnp.bfloat16) if args.bfloat16 else model
    params = None if args.init is None else load_params(model, args.init)
    part = (
        None
        if args.train is None
        else parse_spec("train", args.train, TRAINED, hidden=("model", "base", "frozen_dtype"))
    )
    if part is not None:
        stored = jnp.bfloat16 if args.bfloat16 else None
        computed, params = TRAINED[part.name](computed, base=params, frozen_dtype=stored, **part.options), None
    options = {"cohort_size": args.cohort, "lanes": args.lanes, "sampling": args.sampling}
    options |= {"on_nonfinite": args.on_nonfinite, "measure": args.measure, "aggregation": _aggregation(args)}
    options |= {name: getattr(args, name) for name in (*FAILURES, "devices_per_client")}
    options["stream"] = SWITCH.get(args.stream, "auto")
    simulations = {
        name: Simulation(computed, data, algorithm, local=local, bank=_bank(args, name), mesh=mesh, **options)
        for name, algorithm in algorithms.items()
    }
    first = next(iter(simulations.values()))
    config = {
        "dataset": {"name": dataset.name, **dataset.options},
        "partition": partition_text(args),
        "source": datasets.locate(dataset.name, args.data_dir, **dataset.options),
        "data": summary(data),
        "model": {"name": model_spec.name, **model_spec.options, "parameters": num_parameters(model)},
        "train": None if part is None else _part(part, computed, planned=mesh is not None),
        "init": None if args.init is None else os.path.abspath(args.init),
        "algorithms": {each.text: _resolved(each) for each in written},
        "local": {f.name: getattr(local, f.name) for f in dataclasses.fields(local) if f.name not in FUNCTIONS}
        | {name: getattr(args, name) for name in FUNCTIONS},
        "rounds": args.rounds,
        "cohort_size": args.cohort,
        "sampling": args.sampling,
        "redeal": data.redeal,
        "validation": args.validation,
        "standardize": args.standardize,
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
        "devices": {
            "platform": jax.default_backend(), "count": jax.device_count(), "per_client": args.devices_per_client,
        },
        "processes": jax.process_count(),
        "versions": {
            **versions(), "numpy": np.__version__, "python": platform.python_version(),
            "platform": platform.platform(),
        },
    }  # fmt: skip
    return ParsedRun(simulations, data, params, config, args.rounds, args.eval_every, measure_every, args.seed)


def load_data(args: argparse.Namespace) -> FederatedData:
    """Returns the federation that the options describe."""
    dataset = parse_spec("data set", args.dataset, DATASETS, hidden=HIDDEN)
    recipe = _partitioner(args, dataset)
    standardize = SWITCH.get(args.standardize)
    data = datasets.load(
        dataset.name, recipe, args.data_dir, seed=data_seed(args), standardize=standardize, **dataset.options
    )
    if standardize and data.mean is None:
        raise ConfigurationError(
            f"--standardize yes needs images with a mean and a standard deviation, got {dataset.name}: leave it out"
        )
    if getattr(args, "validation", None) is not None:
        if dataset.name == "movielens":
            raise ConfigurationError(
                "--validation must be left out for movielens, whose test examples are ranked in groups, got "
                f"{args.validation}"
            )
        data = data.with_validation(args.validation, data_seed(args))
    if getattr(args, "per_client", False) and data.test_sizes is None:
        data = data.with_client_tests(data_seed(args))
    if getattr(args, "redeal", None) is None:
        return data
    return data.redealt(None if args.redeal == "evenly" else args.redeal)


def data_seed(args: argparse.Namespace) -> int:
    """Returns the seed of the data set and of its partition."""
    return args.seed if args.data_seed is None else args.data_seed


def partition_text(args: argparse.Namespace) -> str:
    """Returns the partition as text."""
    recipe = _partitioner(args, parse_spec("data set", args.dataset, DATASETS, hidden=HIDDEN))
    return repr(recipe) if recipe else "the data set's own clients"


def _partitioner(args: argparse.Namespace, dataset: Spec) -> partition.Partition | None:
    natural = dataset.name in ("glyphs", "femnist", "synthetic", "movielens", "dialogue")
    if args.partition is None and natural:
        for flag, value in (("--clients", args.clients), ("--size-sigma", args.size_sigma)):
            if value is not None:
                raise ConfigurationError(
                    f"{flag} needs --partition, got {value}: {dataset.name} has natural clients, so add --partition "
                    "iid, for example"
                )
        return None
    hidden = ("num_clients", "seed", "size_sigma")
    spec = parse_spec("partition", args.partition or "iid", PARTITIONS, hidden)
    factory = PARTITIONS[spec.name]
    given = {"num_clients": 100 if args.clients is None else args.clients, "seed": data_seed(args)}
    given["size_sigma"] = 0.0 if args.size_sigma is None else args.size_sigma
    takes = inspect.signature(factory).parameters
    for key, flag in (("num_clients", "clients"), ("size_sigma", "size-sigma")):
        value = args.clients if key == "num_clients" else args.size_sigma
        if value is not None and key not in takes:
            raise ConfigurationError(
                f"--{flag} has no effect on {spec.name}, got {value}: leave it out, or use --partition dirichlet:ALPHA"
            )
    return factory(**{k: v for k, v in given.items() if k in takes}, **spec.options)


def _model(args: argparse.Namespace, dataset: Spec, data: FederatedData) -> tuple[Spec, Model]:
    spec = parse_spec("model", args.model or DEFAULT_MODEL[dataset.name], MODELS, hidden=("input_shape", "sizes"))
    highest = max(int(y.max()) for y in (data.y, data.y_test) if y is not None)
    classes = max(num_classes(dataset.name, **dataset.options), highest + 1)
    options = {"num_classes": classes, "input_shape": data.x.shape[1:]}
    options |= dataset.options  # options that the model has too, such as the vocabulary of agnews
    options |= {"cosine": True} if args.cosine else {}
    takes = inspect.signature(MODELS[spec.name]).parameters
    options |= {"sizes": movielens.sizes(data)} if "sizes" in takes else {}
    spec = spec._replace(options={k: v for k, v in options.items() if k in takes} | spec.options)
    return spec, MODELS[spec.name](**spec.options)


def _part(part: Spec, model: Model, planned: bool) -> dict[str, Any]:
    """The settings of the part of the model that is trained, with the checksum of the other parameters.

    planned: whether the run is only planned, so that no parameters are needed.
    """
    base = None if planned else model.frozen[0].checksum
    return {"name": part.name, **part.options, "parameters": num_parameters(model), "base": base}


def _aggregation(args: argparse.Namespace) -> aggregation.Aggregation | None:
    norm, noise = args.clip_updates, args.noise_multiplier
    if noise is None:
        return None if norm is None else aggregation.clipped(norm)
    if norm is None:
        raise ConfigurationError(
            f"--noise-multiplier needs --clip-updates, got {noise} without it: add --clip-updates 1, for example"
        )
    return aggregation.private(norm, noise)


def _algorithm(spec: Spec) -> Algorithm:
    try:
        return ALGORITHMS[spec.name](**spec.options)
    except ValueError as error:
        raise ConfigurationError(f"algorithm {spec.text}: {error}") from error


def optimizer(text: str) -> optax.GradientTransformation:
    """Returns the client optimizer for NAME[:key=value,...]."""
    spec = parse_spec("optimizer", text, OPTIMIZERS, hidden=("mu_dtype",))
    for key, value in spec.options.items():
        if not isinstance(value, bool):
            check = checks.fraction if key in DECAYS else checks.nonnegative
            check(f"optimizer {spec.name}: {key}", value)
    return OPTIMIZERS[spec.name](**spec.options)


def augmentation(text: str) -> augment.Augment:
    """An augmentation of the training images, NAME[:key=value,...]."""
    spec = parse_spec("augmentation", text, AUGMENTATIONS)
    return AUGMENTATIONS[spec.name](**spec.options)


def _measure_every(args: argparse.Namespace) -> int:
    every = args.measure_every
    if every is not None and not args.measure:
        raise ConfigurationError(
            f"--measure-every needs --measure, got {every}: add --measure with one or more of {','.join(MEASURES)}"
        )
    if every is not None and every > args.rounds:
        raise ConfigurationError(
            f"--measure-every must be in 1..{args.rounds}, the number of rounds, got {every}: use a smaller number"
        )
    return every or 1


def _bank(args: argparse.Namespace, algorithm: str) -> str:
    """Returns where the client states of an algorithm are kept. A folder has one subfolder per algorithm."""
    where = args.bank
    if where in ("auto", "device", "sharded", "host"):
        return where
    folder = Path(where) / file_name(algorithm)
    if not args.resumed and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"--bank must be a new or empty folder, got {where}, which has {folder}: choose another folder"
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
