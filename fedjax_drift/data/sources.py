"""The sources of the data sets: file names, instructions for downloads, and errors for missing files.

`Samples` is the result of every loader in `datasets.DATASETS`.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift.data import bindingdb, files, movielens, text
from fedjax_drift.data.federated import Pair
from fedjax_drift.errors import ConfigurationError

DataDir = str | os.PathLike[str] | None

EMNIST = {"letters": 26, "byclass": 62, "balanced": 47, "digits": 10}  # split -> number of classes
FEMNIST = {
    "npz": ("femnist_writers.npz",),
    "leaf": ("leaf_femnist",),
    "fedjax": ("federated_emnist_train.sqlite",),
    "tff": ("emnist_all.sqlite", "emnist_all.sqlite.lzma", "fed_emnist_train.h5"),
}  # source -> the files or folders; one of them must exist
FILES = {
    "mnist": ("mnist.npz",),
    "fashion_mnist": ("fashion_mnist.npz",),
    "emnist": ("emnist_letters.npz", "emnist-letters-train-images-idx3-ubyte.gz"),
    "cifar10": ("cifar10.npz", "cifar-10-batches-py", "cifar10_png.npz", "cifar10_webp.npz", "cifar10_jpeg.npz"),
    "cifar100": ("cifar100.npz", "cifar-100-python"),
    "cinic10": ("CINIC-10",),
    "tiny_imagenet": ("tiny-imagenet-200",),
    "femnist": tuple(itertools.chain.from_iterable(FEMNIST.values())),
    "movielens": tuple(movielens.FILENAMES.values()),
    "agnews": (text.FILENAME,),
    "bindingdb": (bindingdb.FILENAME,),
}  # data set -> the files or folders; one of them must exist
PARTS = {
    "ratings.dat": ("users.dat",),
    "train.csv": ("test.csv",),
    "cifar-10-batches-py": tuple(
        f"cifar-10-batches-py/{part}_batch{i}" for part, i in (*(("data", f"_{i}") for i in range(1, 6)), ("test", ""))
    ),
    "cifar-100-python": ("cifar-100-python/train", "cifar-100-python/test"),
    "CINIC-10": ("CINIC-10/train", "CINIC-10/test"),
    "tiny-imagenet-200": tuple(
        f"tiny-imagenet-200/{part}" for part in ("wnids.txt", "train", "val/images", "val/val_annotations.txt")
    ),
    "leaf_femnist": ("leaf_femnist/train",),
    **{
        f"emnist-{split}-train-images-idx3-ubyte.gz": tuple(
            f"emnist-{split}-{part}-ubyte.gz" for part in ("train-labels-idx1", "test-images-idx3", "test-labels-idx1")
        )
        for split in EMNIST
    },
}  # name of a file or folder -> what must also exist, relative to the folder that has it
GET = {
    "emnist": "download the EMNIST data set in the binary format, gzip.zip, from its page at NIST, and put the four "
    "files emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte.gz there",
    "cifar10": "download the Python version of CIFAR-10 from Alex Krizhevsky's page (University of Toronto), and "
    "unpack it there",
    "cifar100": "download the Python version of CIFAR-100 from Alex Krizhevsky's page (University of Toronto), and "
    "unpack it there",
    "cinic10": "download CINIC-10.tar.gz from Edinburgh DataShare, and unpack it into a new folder CINIC-10 there",
    "tiny_imagenet": "download tiny-imagenet-200.zip from the page of Stanford's course CS231n, and unpack it there",
    "femnist": "run LEAF's data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and copy its folders data/train "
    "and data/test into leaf_femnist; or copy federated_emnist_{train,test}.sqlite, which fedjax.datasets.emnist "
    "downloads, or emnist_all.sqlite, which tff.simulation.datasets.emnist.load_data downloads into ~/.tff, or the "
    "packed emnist_all.sqlite.lzma, or fed_emnist_{train,test}.h5, which TFF downloaded before 2021; or write "
    "femnist_writers.npz with numpy.savez: x uint8 [M, 28, 28], 255 = background, y and writer [M]",
    "movielens": f"{movielens.HOW}; with size=latest-small, movielens_latest_small.npz is read instead",
    "agnews": text.HOW,
    "bindingdb": bindingdb.HOW,
}  # data set -> instructions for the download


class Samples(NamedTuple):
    """A data set that is not yet partitioned."""

    train: Pair
    test: Pair
    writer: np.ndarray | None = None
    """[M] the writer or user of each training example. If given, one client per writer is the default partition."""
    test_writer: np.ndarray | None = None
    """[M_test] the writer of each test example. Both `writer` and `test_writer` are then sorted."""
    mean: tuple[float, ...] | None = None
    """Mean per channel of the inputs, scaled to [0, 1]."""
    std: tuple[float, ...] | None = None
    """Standard deviation per channel of the inputs, scaled to [0, 1]."""


def of_classes(samples: Pair, used: np.ndarray, part: str, num_classes: int) -> Pair:
    """Returns the examples for which ``used`` is True. Raises ConfigurationError if there are none."""
    if not used.any():
        raise ConfigurationError(
            f"num_classes must leave at least 1 {part} example, got {num_classes}, which leaves none: use more classes"
        )
    return samples[0][used], samples[1][used]


def pair(x: np.ndarray, y: np.ndarray) -> Pair:
    """Returns the inputs, and the labels as int32."""
    return x, y.astype(np.int32)


def filenames(
    name: str, *, split: str = "letters", source: str = "auto", size: str = "1m", **_: Any
) -> tuple[str, ...]:
    """Returns the files or folders for these options of `datasets.load`. One of them must exist."""
    if name == "movielens":
        return (movielens.FILENAMES[size],)
    if name == "emnist":
        return tuple(file.replace("letters", split) for file in FILES[name])
    return FILES[name] if source == "auto" else FEMNIST[source]


def is_complete(path: Path) -> bool:
    """Whether all parts of a data set of several files exist. path: its first file, or its folder."""
    return all((path.parent / part).exists() for part in PARTS.get(path.name, ()))


def tfds_name(name: str, *, split: str = "letters", **_: Any) -> str:
    """Returns the name of the data set in tensorflow-datasets, such as emnist/letters."""
    return f"emnist/{split}" if name == "emnist" else name


def flat(name: str) -> str:
    """Converts a name of tensorflow-datasets to a part of a file name, such as emnist_letters."""
    return name.replace("/", "_")


def prepare(name: str) -> str:
    """Returns the command that downloads a data set with tensorflow-datasets."""
    name, _, split = name.partition("/")
    option = f", split='{split}'" if split else ""
    load = f"import fedjax_drift as fd; fd.datasets.load('{name}'{option})"
    return f'pip install tensorflow-datasets tensorflow && python -c "{load}"'


def folder(name: str, data_dir: DataDir) -> Path:
    """Returns the folder of a data set that is only read from a folder. Raises FileNotFoundError if it does not
    exist."""
    path = files.find(FILES[name], files.folders(data_dir))
    if path is None:
        raise absent(name, FILES[name], data_dir, GET[name])
    return path


def absent(name: str, wanted: tuple[str, ...], data_dir: DataDir, fix: str) -> FileNotFoundError:
    """Returns the error for a data set if none of the ``wanted`` files exists."""
    names, places = " or ".join(wanted), " or ".join(map(str, files.folders(data_dir)))
    advice = "put it there"
    if data_dir is None:
        advice = "set FEDJAX_DRIFT_DATA to the folder that has it, or pass data_dir"
    return FileNotFoundError(
        f"{name} is read from {names} in {places}, which does not exist: {advice}. To get it, {fix}"
    )


def incomplete(name: str, path: Path, error: FileNotFoundError) -> FileNotFoundError:
    """Returns the error for a data set of several files if one of them is missing."""
    return FileNotFoundError(
        f"{name} is read from {path}, but a part of it is missing ({error}): copy or unpack it again"
    )
