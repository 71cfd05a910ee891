"""The data sets by name: `load("mnist", partition=...)` returns a `FederatedData`.

`synthetic`, `glyphs` and `dialogue` are generated. The others are read from files in `data_dir` (by default
$FEDJAX_DRIFT_DATA, then the cache). These are npz files or the files that the authors of the data set publish. If there
is no file, `mnist`, `fashion_mnist`, `emnist` (except the letters split), `cifar10` and `cifar100` are read from
tensorflow-datasets.

catalogue.py has the facts about every data set.

`from_leaf`, `from_fedjax`, `from_tff`, `from_pfllib`, `from_fl_bench` and `from_niid_bench` read federations from your
own files. `from_huggingface`, `from_flwr`, `from_pandas` and `from_torch` read the data sets of other libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_drift import checks, data, spec
from fedjax_drift.data import *  # noqa: F403 (the readers)
from fedjax_drift.data import dialogue, downloading, files, tables, tfds
from fedjax_drift.data.catalogue import RECORDS
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.data.partition import Partition, by_writer, iid
from fedjax_drift.data.sources import DataDir, Normalisation, Request, Samples
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Flag, Seed, checked

__all__ = ["NAMES", "describe", "dialogue_entropy", "download", "load", "locate", "num_classes", "synthetic"]
__all__ += data.__all__
__dir__ = __all__.copy

NAMES = tuple(RECORDS)
DATASETS = {name: record.read for name, record in RECORDS.items()}


@checked
def load(
    name: str,
    partition: tables.Partitioner | None = None,
    data_dir: DataDir = None,
    *,
    standardize: Flag | None = None,
    seed: Seed = 0,
    download: Flag = False,
    **options: Any,
) -> FederatedData:
    """Loads a data set and partitions it over the clients.

    Args:
      name: one of `NAMES`. The docstring of ``DATASETS[name]`` lists classes, examples, options and source.
      partition: a partitioner of `fedjax_drift.partition`, or any function of labels [M] and ``writer=`` (ids [M] or
        None) that returns N arrays of row numbers. Default: one client per writer for `glyphs` and `femnist`, one per
        role for `shakespeare`, one per user for `movielens`, the clients of the generator for `synthetic` and
        `dialogue`, and ``iid(100, seed)`` for the others. With the default partition of `glyphs`, `dialogue`,
        `femnist`, `shakespeare`, `movielens` and `synthetic` (variant="fedprox") every client has its own test
        examples, unless the test set comes from other writers than the training set. Any other partition leaves the
        test set pooled.
      data_dir: the folder of the files; no other place is searched. Default: `$FEDJAX_DRIFT_DATA` if set, then the
        cache (`$FEDJAX_DRIFT_CACHE` or ``~/.cache/fedjax_drift``), then tensorflow-datasets (`$TFDS_DATA_DIR` or
        ``~/tensorflow_datasets``).
      standardize: if True, images are standardised with the mean and standard deviation of the data set. If it is
        False, or the data set has no mean and standard deviation (glyphs), images are scaled to [0, 1]. Default (None):
        False for femnist, True for the others.
      seed: random seed, >= 0. It is used for generated data, for the default partition, for the test examples of
        femnist and bindingdb, and for the negative examples of movielens.
      download: if True, and the data are not on this machine, they are downloaded first, as by `download`.
      options: options of the data set, by name.

    Raises:
      ValueError: the data set or an option is unknown, a value is illegal, or a file is damaged, unreadable or of
        another kind. Or the data are not on this machine, and cannot be downloaded with these options.
      ConnectionError: the download failed. The message says how to get the files without a network.
      FileNotFoundError: the data are not on this machine. The message names the file and says how to get it.
      ImportError: the source needs a package that is not installed.
    """
    options, record = _checked(name, options), RECORDS[name]
    files.folders(data_dir)
    standardize = record.standardize if standardize is None else standardize
    if download and locate(name, data_dir, **options) == "no":
        _downloaded(name, data_dir, options)

    writers = isinstance(partition, Partition) and partition.base == by_writer()
    request = Request(record.variant(options), data_dir, seed, writers)
    try:
        samples = DATASETS[name](request, **options)
    except FileNotFoundError as error:
        if (path := request.dataset.find(data_dir)) is None:
            raise  # the message of `Request.absent`
        what = f"{request.dataset.name} is read from {path}, but a part of it is missing"
        raise FileNotFoundError(f"{what} ({error}): copy or unpack it again") from error
    partitioner = partition or (by_writer() if record.by_writer else iid(100, seed))
    normalisation = samples.normalisation or record.normalisation if standardize else None
    return _partitioned(name, samples, partitioner, normalisation)


def _checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as Python values. Raises ValueError for an unknown name or option and for an illegal
    value."""
    record = RECORDS[checks.choice("name", name, NAMES)]
    known, checked, declared = record.options, dict(options), spec.Declared(record.read).arguments
    for option, value in options.items():
        if option not in known:
            listed = f"the options of {name} are {checks.listed(known)}" if known else f"{name} has no options"
            raise ConfigurationError(f"unknown option {option!r}: {listed}{checks.nearest(option, known)}")
        checked[option] = declared[option].check(option, value)
    if checked.get("num_classes") is not None:
        variant = record.variant(checked)
        fix = f"these are the classes of {variant.name.rpartition('/')[2]}"
        checks.integer("num_classes", checked["num_classes"], 1, variant.classes, fix)
    return checked


def _partitioned(
    name: str, samples: Samples, partitioner: tables.Partitioner, normalisation: Normalisation | None
) -> FederatedData:
    (x, y), test, writer, test_writer, _ = samples
    mean, std = normalisation or (None, None)
    if partitioner != by_writer() or writer is None or (writer[1:] < writer[:-1]).any():
        parts = tables.split(partitioner, y, writer)
        return FederatedData.from_partition(x, y, parts, test, mean=mean, std=std, name=name)
    # The examples are already grouped by writer. They are not copied, because glyphs has half a gigabyte.
    ids, sizes = np.unique(writer, return_counts=True)
    test_sizes = None
    if test_writer is not None:
        test_sizes = np.bincount(np.searchsorted(ids, test_writer), minlength=len(ids))
    return FederatedData(x, y, sizes, test[0], test[1], test_sizes, mean, std, name)


def download(name: str, data_dir: DataDir = None, **options: Any) -> Path:
    """Downloads the files of a data set, unless they are on this machine. It needs no account and no TensorFlow.

    Every file has a known size and checksum. A download that broke off continues at the next call. The archives are
    deleted after they are unpacked. ``fedjax-drift data`` lists the sizes and the servers.

    Args:
      name: mnist, fashion_mnist, emnist (all splits of `load`), cifar10, cifar100, cinic10, tiny_imagenet, femnist (the
        3,400 writers of TensorFlow Federated), movielens (size="1m") and shakespeare.
      data_dir: the folder for the files. Default: `$FEDJAX_DRIFT_DATA` if set, otherwise the cache
        (`$FEDJAX_DRIFT_CACHE` or ``~/.cache/fedjax_drift``).
      options: options of the data set that select files, such as source="tff" of femnist.

    Returns:
      The path of the file or folder. `load` may prefer another one that is also there, as `locate` says.

    Raises:
      ValueError: the data set cannot be downloaded, an option is unknown, a file has a wrong checksum (it is deleted),
        or the folder cannot be written.
      ConnectionError: there is no connection, or the server does not have the file. The message has the addresses, and
        the folder for files that were downloaded on another machine.
    """
    return _downloaded(name, data_dir, _checked(name, options))


def _downloaded(name: str, data_dir: DataDir, options: Mapping[str, Any]) -> Path:
    record, folders = RECORDS[name].variant(options), files.folders(data_dir)
    if record.online is None:
        possible = checks.listed([known for known, other in RECORDS.items() if other.downloads])
        wanted, how = f"one of {possible}", record.by_hand or "load makes it"
        if record.downloads:
            wanted = f"of one of the files {checks.listed(record.downloads.gives)}"
        checks.refuse(f"the download must be {wanted}", record.name, how)
    names = [filename for filename in record.files if filename in record.online.gives]
    path = files.find(names, folders)
    if path is None or not record.is_complete(path):
        downloading.download(name, record.online, folders[0])
        path = folders[0] / names[0]
    return path


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


@checked
def dialogue_entropy(num_clients: int = 100, alpha: float = 1.0, seed: Seed = 0) -> np.ndarray:
    """The entropy rate of each client's text in `load("dialogue", ...)` with these options, [N], in nats per character.

    It is the smallest possible loss of a model that knows the speaker and all earlier text. With the defaults, the mean
    over the clients is 0.562. On passages of 64 characters, whose first characters have little context, the smallest
    mean loss is 0.60, and 0.68 for a model that only knows the average speaker. Equal probabilities for all 27
    characters give 3.296.

    Raises ValueError if an argument is out of the range of `load`.
    """
    options = _checked("dialogue", {"num_clients": num_clients, "alpha": alpha})
    chains = dialogue.speakers(options["num_clients"], options["alpha"], seed)
    return np.array([dialogue.entropy_rate(chain) for chain in chains])


def num_classes(name: str, **options: Any) -> int:
    """Returns the number of classes of a data set with these options of `load`. Raises the ValueErrors of `load`."""
    options = _checked(name, options)
    return options.get("num_classes") or RECORDS[name].variant(options).classes


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
      - ``download``: the number of bytes that `download` gets, or None if it cannot.
      - ``server``: the server that has them, or None.

    Raises:
      ValueError: `data_dir` is not the path of a folder.
    """
    described = []
    for record in (record.variant({}) for record in RECORDS.values()):
        name, online = record.base, record.online
        location, instructions = locate(name, data_dir), f'fd.datasets.load("{name}")'
        if record.files:
            instructions = f"put {' or '.join(record.files)} into data_dir: {record.by_hand}"
            instructions = f"fedjax-drift data download {name}, or {instructions}" if online else instructions
        known = {"name": name, "classes": record.classes, "location": location, "available": location != "no"}
        source = {"download": online and online.size, "server": online and online.host}
        described.append(known | {"instructions": instructions} | source)
    return described


def locate(name: str, data_dir: DataDir = None, **options: Any) -> str:
    """Returns where `load` would read the data set with these arguments. No file is opened.

    This is a path, "made on the spot" (the data are generated), "tensorflow-datasets", or "no" if there are no data or
    if a file of them is missing. Raises the ValueErrors of `load`.
    """
    options, _ = _checked(name, options), files.folders(data_dir)
    record = RECORDS[name].variant(options)
    if not record.files:
        return "made on the spot"
    path = record.find(data_dir)
    if path is None and data_dir is None and record.tfds:
        path = files.find((f"{record.filename}_tfds.npz",), [files.cache_dir()])
        if path is None and tfds.is_prepared(record.name):
            return "tensorflow-datasets"
    return str(path) if path is not None and record.is_complete(path) else "no"
