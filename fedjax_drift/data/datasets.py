"""The data sets by name: `load("mnist", partition=...)` returns a `FederatedData`.

`synthetic`, `glyphs` and `dialogue` are generated. The others are read from files in `data_dir` (by default
$FEDJAX_DRIFT_DATA, then the cache). These are npz files or the files that the authors of the data set publish. If there
is no file, `mnist`, `fashion_mnist`, `emnist` (except the letters split), `cifar10` and `cifar100` are read from
tensorflow-datasets.

`DATASETS` has one loader per data set: (data_dir, seed, natural, *, options of the data set) -> `Samples`. natural:
whether the caller asked for ``by_writer()``. `mnist` then also reads the writers of its examples.

`from_leaf`, `from_fedjax` and `from_tff` read federations from your own files. `from_huggingface`, `from_flwr`,
`from_pandas` and `from_torch` read the data sets of other libraries.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import dialogue, files, generated, images, movielens, tables, tasks, tfds
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.data.federated_files import from_fedjax as from_fedjax
from fedjax_drift.data.federated_files import from_leaf as from_leaf
from fedjax_drift.data.federated_files import from_tff as from_tff
from fedjax_drift.data.femnist import femnist
from fedjax_drift.data.flower import from_flwr as from_flwr
from fedjax_drift.data.frames import from_pandas as from_pandas
from fedjax_drift.data.huggingface import from_huggingface as from_huggingface
from fedjax_drift.data.pairs import from_torch as from_torch
from fedjax_drift.data.partition import by_writer, iid
from fedjax_drift.data.sources import (
    EMNIST,
    FEMNIST,
    FILES,
    GET,
    DataDir,
    Samples,
    filenames,
    flat,
    is_complete,
    prepare,
    tfds_name,
)
from fedjax_drift.errors import ConfigurationError

__all__ = [
    "NAMES",
    "describe",
    "dialogue_entropy",
    "from_fedjax",
    "from_flwr",
    "from_huggingface",
    "from_leaf",
    "from_pandas",
    "from_tff",
    "from_torch",
    "load",
    "locate",
    "num_classes",
    "synthetic",
]


def __dir__() -> list[str]:
    return __all__


DATASETS: dict[str, Callable[..., Samples]] = {
    "synthetic": generated.synthetic,
    "glyphs": generated.glyphs,
    "dialogue": generated.dialogue,
    "mnist": images.mnist,
    "fashion_mnist": images.fashion_mnist,
    "emnist": images.emnist,
    "cifar10": images.cifar10,
    "cifar100": images.cifar100,
    "cinic10": images.cinic10,
    "tiny_imagenet": images.tiny_imagenet,
    "femnist": femnist,
    "movielens": tasks.load_movielens,
    "agnews": tasks.load_agnews,
    "bindingdb": tasks.load_bindingdb,
}
NAMES = tuple(DATASETS)
OPTIONS = {
    name: {key: p.default for key, p in inspect.signature(loader).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for name, loader in DATASETS.items()
}  # data set -> option -> default
CLASSES = {
    "synthetic": 5,
    "glyphs": 62,
    "dialogue": 28,
    "mnist": 10,
    "fashion_mnist": 10,
    "emnist": EMNIST["letters"],
    "cifar10": 10,
    "cifar100": 100,
    "cinic10": 10,
    "tiny_imagenet": 200,
    "femnist": 62,
    "movielens": 2,
    "agnews": 4,
    "bindingdb": 2,
}  # data set -> number of classes with the default options
# Checks of the options: one of some names, an integer with a lower bound, or a standard deviation. The others are
# True or False.
CHOICES = {
    "variant": tuple(generated.VARIANTS),
    "split": tuple(EMNIST),
    "source": ("auto", *FEMNIST),
    "size": movielens.SIZES,
}
LOWEST = {
    "num_clients": 1,
    "num_rows": 2,
    "num_writers": 1,
    "num_classes": 1,
    "history": 1,
    "negatives": 1,
    "test_negatives": 1,
    "vocabulary": 3,
    "length": 1,
    "ligand": 1,
    "protein": 1,
}
SPREADS = ("alpha", "beta")


def load(
    name: str,
    partition: tables.Partition | None = None,
    data_dir: DataDir = None,
    *,
    standardize: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> FederatedData:
    """Loads a data set and partitions it over the clients.

    Args:
      name: one of `NAMES`. The docstring of ``DATASETS[name]`` lists classes, examples, options and source.
      partition: a partitioner of `fedjax_drift.partition`, or any function of labels [M] and ``writer=`` (ids [M] or
        None) that returns N arrays of row numbers. Default: one client per writer for `glyphs` and `femnist`, one per
        user for `movielens`, the clients of the generator for `synthetic` and `dialogue`, and ``iid(100, seed)`` for
        the others. With the default partition of `glyphs`, `dialogue`, `femnist`, `movielens` and `synthetic`
        (variant="fedprox") every client has its own test examples, unless the test set comes from other writers than
        the training set. Any other partition leaves the test set pooled.
      data_dir: the folder of the files; no other place is searched. Default: `$FEDJAX_DRIFT_DATA` if set, then the
        cache (`$FEDJAX_DRIFT_CACHE` or ``~/.cache/fedjax_drift``), then tensorflow-datasets (`$TFDS_DATA_DIR` or
        ``~/tensorflow_datasets``).
      standardize: if True, images are standardised with the mean and standard deviation of the data set. If it is
        False, or the data set has no mean and standard deviation (glyphs), images are scaled to [0, 1]. Default (None):
        False for femnist, True for the others.
      seed: random seed, >= 0. It is used for generated data, for the default partition, for the test examples of
        femnist and bindingdb, and for the negative examples of movielens.
      options: options of the data set, by name.

    Raises:
      ValueError: the data set or an option is unknown, a value is illegal, or a file is damaged, unreadable or of
        another kind.
      FileNotFoundError: the data are not on this machine. The message names the file and says how to get it.
      ImportError: the source needs a package that is not installed.
    """
    options = _checked(name, options)
    tables.check_partitioner(partition)
    files.folders(data_dir)
    standardize = name != "femnist" if standardize is None else checks.flag("standardize", standardize)
    seed = checks.integer("seed", seed, 0, math.inf)

    samples = DATASETS[name](data_dir, seed, partition == by_writer(), **options)
    natural = partition is None and samples.writer is not None
    partitioner = partition or (by_writer() if natural else iid(100, seed))
    return _partitioned(name, samples, partitioner, standardize)


def _checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as Python values. Raises ValueError for an unknown name or option and for an illegal
    value."""
    checks.choice("name", name, NAMES)
    known, checked = OPTIONS[name], dict(options)
    for option, value in options.items():
        if option not in known:
            listed = f"the options of {name} are {checks.listed(known)}" if known else f"{name} has no options"
            raise ConfigurationError(f"unknown option {option!r}: {listed}{checks.nearest(option, known)}")
        if value is None and known[option] is None:
            continue
        if option in CHOICES:
            checks.choice(option, value, CHOICES[option])
        elif option in LOWEST:
            checked[option] = checks.integer(option, value, LOWEST[option])
        elif option in SPREADS:
            checked[option] = checks.nonnegative(option, value, "it is a standard deviation, for example 1.0")
        else:
            checks.flag(option, value)
    if checked.get("num_classes") is not None:
        highest = _all_classes(name, checked)
        of = checked.get("split", "letters") if name == "emnist" else name
        checks.integer("num_classes", checked["num_classes"], 1, highest, f"these are the classes of {of}")
    return checked


def _partitioned(name: str, samples: Samples, partitioner: tables.Partition, standardize: bool) -> FederatedData:
    (x, y), test, writer, test_writer, mean, std = samples
    if not standardize:
        mean = std = None
    if partitioner != by_writer() or writer is None or (writer[1:] < writer[:-1]).any():
        parts = tables.split(partitioner, y, writer)
        return FederatedData.from_partition(x, y, parts, test, mean=mean, std=std, name=name)
    # The examples are already grouped by writer. They are not copied, because glyphs has half a gigabyte.
    ids, sizes = np.unique(writer, return_counts=True)
    test_sizes = None
    if test_writer is not None:
        test_sizes = np.bincount(np.searchsorted(ids, test_writer), minlength=len(ids))
    return FederatedData(x, y, sizes, test[0], test[1], test_sizes, mean, std, name)


def synthetic(
    alpha: float = 0.0,
    beta: float = 0.0,
    num_clients: int | None = None,
    num_rows: int | None = None,
    variant: str = "feddyn",
    iid_sol: bool | None = None,
    iid_data: bool | None = None,
    seed: int = 0,
) -> FederatedData:
    """Synthetic linear classification, the same as `load("synthetic", ...)`. ``alpha`` and ``beta`` make clients
    differ.

    The labels of client k are y = argmax(x W_k + b_k), without noise. The inputs are x ~ N(v_k, diag(j^-1.2)),
    j = 1..d, float32.

    - variant="feddyn": d = 30, 5 classes, N = 20, 200 examples per client, all for training. The test set is the union
      of the training data. By default all clients share one W and b (`iid_sol`) if alpha = 0, and v_k = 0 for
      all clients (`iid_data`) if beta = 0. In the authors' example for Synthetic(0, 0), both options are
      True. For other values of alpha and beta, these defaults are our interpretation. (Code of the authors of
      Acar et al., ICLR 2021, and Gao et al., CVPR 2022.)
    - variant="fedprox": d = 60, 10 classes, N = 30, sizes 50 + floor(LogNormal(4, 2)). 90 % of a client's examples are
      for training, and 10 % are the client's test examples. `iid_sol` and `iid_data` are False by default, also for
      alpha = beta = 0. If both are True, it is the authors' Synthetic IID. (Li et al., MLSys 2020, section 5.1 and
      appendix C.1. alpha and beta are standard deviations, as in the authors' code; the paper writes N(0, alpha).)

    Args:
      alpha: standard deviation of u_k, which is normal with mean 0 for each client. The entries of W_k and b_k are
        normal with mean u_k and variance 1.
      beta: standard deviation of B_k, which is normal with mean 0 for each client. The entries of v_k are normal with
        mean B_k and variance 1.
      num_clients: N >= 1.
      num_rows: number of examples of each client, training and test together, >= 2.
      variant: "feddyn" (default) or "fedprox".
      iid_sol: if True, all clients share one W and b with standard normal entries.
      iid_data: if True, v_k = 0 for all clients.
      seed: random seed, >= 0.

    Raises:
      ValueError: alpha or beta is negative or not finite, there are too few clients or examples, or the variant is
        unknown.
    """
    return load(
        "synthetic",
        alpha=alpha,
        beta=beta,
        num_clients=num_clients,
        num_rows=num_rows,
        variant=variant,
        iid_sol=iid_sol,
        iid_data=iid_data,
        seed=seed,
    )


def dialogue_entropy(num_clients: int = 100, alpha: float = 1.0, seed: int = 0) -> np.ndarray:
    """The entropy rate of each client's text in `load("dialogue", ...)` with these options, [N], in nats per character.

    It is the smallest possible loss of a model that knows the speaker and all earlier text. With the defaults, the mean
    over the clients is 0.562. On passages of 64 characters, whose first characters have little context, the smallest
    mean loss is 0.60, and 0.68 for a model that only knows the average speaker. Equal probabilities for all 27
    characters give 3.296.

    Raises ValueError if an argument is out of the range of `load`.
    """
    options = _checked("dialogue", {"num_clients": num_clients, "alpha": alpha})
    seed = checks.integer("seed", seed, 0, math.inf)
    chains = dialogue.speakers(options["num_clients"], options["alpha"], seed)
    return np.array([dialogue.entropy_rate(chain) for chain in chains])


def num_classes(name: str, **options: Any) -> int:
    """Returns the number of classes of a data set with these options of `load`. Raises the ValueErrors of `load`."""
    options = _checked(name, options)
    return options.get("num_classes") or _all_classes(name, options)


def _all_classes(name: str, options: Mapping[str, Any]) -> int:
    """Returns the number of classes of a data set before ``num_classes=`` reduces it."""
    if name == "emnist":
        return EMNIST[options.get("split", "letters")]
    return generated.VARIANTS[options.get("variant", "feddyn")][1] if name == "synthetic" else CLASSES[name]


def describe(data_dir: DataDir = None) -> list[dict[str, Any]]:
    """Lists the data sets, one dict per data set, without opening a file.

    Args:
      data_dir: as in `load`.

    Returns:
      Dicts with the keys:

      - ``name``: the name of the data set.
      - ``classes``: the number of classes with the default options.
      - ``location``: where `load` would read the data set with its default options, as `locate` returns it.
      - ``available``: whether the data can be loaded, a bool.
      - ``instructions``: how to get the data, in one line.

    Raises:
      ValueError: `data_dir` is not the path of a folder.
    """
    return [_describe(name, data_dir) for name in NAMES]


def locate(name: str, data_dir: DataDir = None, **options: Any) -> str:
    """Returns where `load` would read the data set with these arguments. No file is opened.

    This is a path, "made on the spot" (the data are generated), "tensorflow-datasets", or "no" if there are no data or
    if a file of them is missing. Raises the ValueErrors of `load`.
    """
    options, _ = _checked(name, options), files.folders(data_dir)
    if name not in FILES:
        return "made on the spot"
    path = files.find(filenames(name, **options), files.folders(data_dir))
    if path is None and data_dir is None and (published := tfds_name(name, **options)) in tfds.HOSTS:
        path = files.find((f"{flat(published)}_tfds.npz",), [files.cache_dir()])
        if path is None and any((tfds.default_dir() / published).glob("*/dataset_info.json")):
            return "tensorflow-datasets"
    return "no" if path is None or not is_complete(path) else str(path)


def _describe(name: str, data_dir: DataDir) -> dict[str, Any]:
    instructions = f'fd.datasets.load("{name}")'
    if name in FILES:
        instructions = f"put {' or '.join(filenames(name))} into data_dir"
        instructions += f": {GET[name]}" if name in GET else ""
        instructions += f", or, online: {prepare(name)}" if data_dir is None and name in tfds.HOSTS else ""
    location = locate(name, data_dir)
    return {
        "name": name,
        "classes": CLASSES[name],
        "location": location,
        "available": location != "no",
        "instructions": instructions,
    }
