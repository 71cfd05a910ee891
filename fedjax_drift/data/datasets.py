"""The data sets by name: `load("mnist", partition=...)` gives a `FederatedData`.

`synthetic` and `glyphs` are made on the spot. The others are read from files in `data_dir` (or $FEDJAX_DRIFT_DATA, or
the cache): npz files, or what their authors hand out. `mnist`, `fashion_mnist`, `emnist` (but letters), `cifar10` and
`cifar100` are otherwise read from tensorflow-datasets.

A data set is one function in `DATASETS`: (data_dir, seed, natural, *, its options) -> `Samples`. Federations in files
of your own: `from_leaf`, `from_fedjax`, `from_tff`.
"""

from __future__ import annotations

import inspect
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import bindingdb, federated_files, files, image_files, movielens, text
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.data.federated_files import from_fedjax as from_fedjax
from fedjax_drift.data.federated_files import from_leaf as from_leaf
from fedjax_drift.data.federated_files import from_tff as from_tff
from fedjax_drift.data.files import Column
from fedjax_drift.data.partition import by_writer, dirichlet, iid, shards

GLYPHS_VERSION = 1  # of the cached files: raise it when make_glyphs draws other images
EMNIST = {"letters": 26, "byclass": 62, "balanced": 47, "digits": 10}  # its splits and their classes
CLASSES = {
    "synthetic": 5,
    "glyphs": 62,
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
}
FEMNIST = {
    "npz": "femnist_writers.npz",
    "leaf": "leaf_femnist",
    "fedjax": "federated_emnist_train.sqlite",
    "tff": "fed_emnist_train.h5",
}  # its sources: the file or folder by which one is found
FILES = {
    "mnist": ("mnist.npz",),
    "fashion_mnist": ("fashion_mnist.npz",),
    "emnist": ("emnist_letters.npz", "emnist-letters-train-images-idx3-ubyte.gz"),
    "cifar10": ("cifar10.npz", "cifar-10-batches-py", "cifar10_jpeg.npz"),
    "cifar100": ("cifar100.npz", "cifar-100-python"),
    "cinic10": ("CINIC-10",),
    "tiny_imagenet": ("tiny-imagenet-200",),
    "femnist": tuple(FEMNIST.values()),
    "movielens": tuple(movielens.FILENAMES.values()),
    "agnews": (text.FILENAME,),
    "bindingdb": (bindingdb.FILENAME,),
}
GET = {
    "emnist": "download the EMNIST data set in its binary form, gzip.zip, from NIST's page of it, and put the four "
    "files emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte.gz there",
    "cifar10": "download the Python version of CIFAR-10 from Alex Krizhevsky's page (University of Toronto), and "
    "unpack it there",
    "cifar100": "download the Python version of CIFAR-100 from Alex Krizhevsky's page (University of Toronto), and "
    "unpack it there",
    "cinic10": "download CINIC-10.tar.gz from Edinburgh DataShare, and unpack it into a new folder CINIC-10 there",
    "tiny_imagenet": "download tiny-imagenet-200.zip from the page of Stanford's course CS231n, and unpack it there",
    "femnist": "run LEAF's data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and copy its folders data/train "
    "and data/test into leaf_femnist; or copy federated_emnist_{train,test}.sqlite, which fedjax.datasets.emnist "
    "downloads, or fed_emnist_{train,test}.h5, which tff.simulation.datasets.emnist downloads; or write "
    "femnist_writers.npz with numpy.savez: x uint8 [M, 28, 28], 255 = background, y and writer [M]",
    "movielens": movielens.HOW,
    "agnews": text.HOW,
    "bindingdb": bindingdb.HOW,
}  # what to download, from where, and where to put it
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
VARIANTS = {"feddyn": (30, 5, 20), "fedprox": (60, 10, 30)}  # dimension, classes, usual number of clients
# What the options may be: one of some names, or an integer of at least so much. Others are True, False or a spread.
CHOICES = {
    "variant": tuple(VARIANTS),
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
MNIST_ORDER = 3121080559  # crc32 of the 60,000 training labels in their official order, as bytes

DataDir = str | os.PathLike[str] | None
Partition = Callable[..., list[np.ndarray]]


class Samples(NamedTuple):
    """A data set before it is dealt to clients."""

    train: Pair
    test: Pair
    writer: np.ndarray | None = None
    """[M] who wrote each training row; where present, the natural partition is the default one."""
    test_writer: np.ndarray | None = None
    """[M_test] the same writers' test rows, non-decreasing as `writer` then is too."""
    mean: tuple[float, ...] | None = None
    """Per channel, of the inputs scaled to [0, 1]."""
    std: tuple[float, ...] | None = None


def load(
    name: str,
    partition: Partition | None = None,
    data_dir: DataDir = None,
    *,
    standardize: bool = True,
    seed: int = 0,
    **options: Any,
) -> FederatedData:
    """A data set, dealt to clients.

    Args:
      name: one of `NAMES`; classes, rows, options and source of each are in the docstring of ``DATASETS[name]``.
      partition: a recipe of `fedjax_drift.partition`, or any function of labels [M] and ``writer=`` (ids [M] or None)
        that returns N arrays of row numbers. Default: one client per writer for `glyphs` and `femnist`, per user for
        `movielens`, the generator's own clients for `synthetic`, ``iid(100, seed)`` for the others. The natural
        partition of `glyphs`, `femnist`, `movielens` and `synthetic` with variant="fedprox" also cuts the test set into
        clients; any other leaves it pooled.
      data_dir: the folder of the files. Default: `$FEDJAX_DRIFT_DATA` if set, then the cache (`$FEDJAX_DRIFT_CACHE` or
        ``~/.cache/fedjax_drift``), then tensorflow-datasets (`$TFDS_DATA_DIR` or ``~/tensorflow_datasets``). With
        `data_dir`, nothing else is looked at.
      standardize: let the model see images with the data set's mean and standard deviation taken out, where it has them
        (all real images but femnist's); otherwise it sees [0, 1].
      seed: >= 0, of whatever is drawn: the generated data, the default partition, femnist's and bindingdb's test
        rows, movielens' negative rows.
      options: of the data set, by name.

    Raises:
      ValueError: an unknown data set or option, an illegal value, a file that is damaged, foreign or unreadable.
      FileNotFoundError: the data are not on this machine; names the file and how to get it.
      ImportError: a source that needs a package which is not installed.
    """
    options = _checked(name, options)
    if partition is not None and (not callable(partition) or partition in (iid, dirichlet, shards, by_writer)):
        raise ValueError(
            f"partition must be a recipe such as fd.partition.iid(100, seed=0), got {checks.shown(partition)}"
        )
    files.folders(data_dir)
    checks.flag("standardize", standardize)
    seed = checks.integer("seed", seed, 0, math.inf)

    samples = DATASETS[name](data_dir, seed, partition == by_writer(), **options)
    natural = partition is None and samples.writer is not None
    recipe = partition or (by_writer() if natural else iid(100, seed))
    return _deal(name, samples, recipe, standardize)


def _checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the data set takes them. ValueError for an unknown name or option, or an illegal value."""
    checks.choice("name", name, NAMES)
    known, checked = OPTIONS[name], dict(options)
    for option, value in options.items():
        if option not in known:
            listed = f"the options of {name} are {', '.join(known)}" if known else f"{name} has no options"
            raise ValueError(f"unknown option {option!r}: {listed}{checks.nearest(option, known)}")
        if value is None and known[option] is None:
            continue
        if option in CHOICES:
            checks.choice(option, value, CHOICES[option])
        elif option in LOWEST:
            checked[option] = checks.integer(option, value, LOWEST[option])
        elif option in SPREADS:
            checked[option] = checks.nonnegative(option, value, "it is a standard deviation, 1.0 is usual")
        else:
            checks.flag(option, value)
    if checked.get("num_classes") is not None:
        highest = _all_classes(name, checked)
        checks.integer("num_classes", checked["num_classes"], 1, highest, f"there are {highest} classes")
    return checked


def _deal(name: str, samples: Samples, recipe: Partition, standardize: bool) -> FederatedData:
    (x, y), test, writer, test_writer, mean, std = samples
    if not standardize:
        mean = std = None
    if recipe != by_writer() or writer is None or (writer[1:] < writer[:-1]).any():
        try:
            parts = recipe(y, writer=writer)
        except TypeError as error:
            raise ValueError(
                f"partition must be a function of labels and writer=, got one that says {error}"
            ) from error
        return FederatedData.from_partition(x, y, parts, test, mean=mean, std=std, name=name)
    # The rows lie grouped by writer already: keep them in place, glyphs are half a gigabyte.
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
    """Linear classification with a knob for each kind of drift; `load("synthetic", ...)` with its own clients.

    Client k labels its rows y = argmax(x W_k + b_k), without noise. x ~ N(v_k, diag(j^-1.2)), j = 1..d, float32.

    - variant="feddyn": d = 30, 5 classes, N = 20, 200 rows a client, all of them for training; the test set is the
      union of the training data. `iid_sol` defaults to alpha == 0 and `iid_data` to beta == 0: inferred, their example
      sets both for Synthetic(0, 0). (Acar et al., ICLR 2021, and Gao et al., CVPR 2022: their authors' code.)
    - variant="fedprox": d = 60, 10 classes, N = 30, sizes 50 + floor(LogNormal(4, 2)), 90 % of a client's rows for
      training and the rest as its own test set. `iid_sol` and `iid_data` default to False, also for alpha = beta = 0;
      both True is their Synthetic IID. (Li et al., MLSys 2020, section 5.1 and appendix C.1; its authors' code, which
      takes alpha and beta as standard deviations where the paper writes N(0, alpha).)

    Args:
      alpha: standard deviation of u_k ~ N(0, alpha), the mean of the entries of W_k and b_k (variance 1).
      beta: standard deviation of B_k ~ N(0, beta), the mean of the entries of v_k (variance 1).
      num_clients: N >= 1.
      num_rows: rows of each client, training and test together, >= 2.
      variant: "feddyn" (default) or "fedprox".
      iid_sol: all clients share one W and b with standard normal entries.
      iid_data: v_k = 0 for all clients.
      seed: >= 0.

    Raises:
      ValueError: a negative or non-finite alpha or beta, too few clients or rows, an unknown variant.
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


def _synthetic(
    data_dir: DataDir,
    seed: int,
    natural: bool,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    num_clients: int | None = None,
    num_rows: int | None = None,
    variant: str = "feddyn",
    iid_sol: bool | None = None,
    iid_data: bool | None = None,
) -> Samples:
    """Linear classification with a knob for each kind of drift: see `synthetic`."""
    d, classes, usual_clients = VARIANTS[variant]
    n = usual_clients if num_clients is None else num_clients
    fedprox = variant == "fedprox"
    iid_sol = (not fedprox and alpha == 0) if iid_sol is None else iid_sol
    iid_data = (not fedprox and beta == 0) if iid_data is None else iid_data

    rng = np.random.default_rng(seed)
    if fedprox and num_rows is None:
        sizes = 50 + rng.lognormal(4, 2, n).astype(np.int64)
    else:
        sizes = np.full(n, 200 if num_rows is None else num_rows)
    u, big_b = rng.normal(0, alpha, n), rng.normal(0, beta, n)
    v = np.zeros((n, d)) if iid_data else rng.normal(big_b[:, None], 1, (n, d))
    centre = np.zeros(1) if iid_sol else u
    w = rng.normal(centre[:, None, None], 1, (len(centre), d + 1, classes))  # the last row is the bias
    w = np.broadcast_to(w, (n, d + 1, classes))

    writer = np.repeat(np.arange(n, dtype=np.int32), sizes)
    x = rng.standard_normal((len(writer), d)) * np.arange(1, d + 1) ** -0.6 + v[writer]
    x = x.astype(np.float32)
    y = np.empty(len(x), np.int32)
    for k, end in enumerate(np.cumsum(sizes)):
        rows = slice(end - sizes[k], end)
        y[rows] = (x[rows] @ w[k, :-1] + w[k, -1]).argmax(1)
    if not fedprox:
        return Samples((x, y), (x, y), writer)
    # Rows of a client are drawn independently: its last ones are as good a test set as random ones.
    test_size = np.maximum(1, sizes - (0.9 * sizes).astype(np.int64))
    is_test = np.arange(len(x)) >= (np.cumsum(sizes) - test_size)[writer]
    return Samples((x[~is_test], y[~is_test]), (x[is_test], y[is_test]), writer[~is_test], writer[is_test])


def _glyphs(
    data_dir: DataDir, seed: int, natural: bool, *, num_writers: int = 3400, num_classes: int | None = None
) -> Samples:
    """Drawn characters in thousands of hands, the built-in stand-in for FEMNIST.

    62 classes in LEAF's order, uint8 [28, 28, 1], 255 = ink, no mean and std; `num_writers` >= 1 clients of 19 to 460
    training rows, each with its own test rows. num_classes: only the first so many classes, in 1..62, the default; 10
    are the digits, 36 digits and capitals. Writers without a training row of these are left out. Drawn on the first use
    (a minute or two for 3,400 writers), kept in the cache. See `fedjax_drift.data.glyphs.make_glyphs`.
    """

    def draw() -> files.Arrays:
        from fedjax_drift.data.glyphs import make_glyphs  # needs matplotlib and Pillow

        return make_glyphs(num_writers, seed, progress=num_writers >= 500)._asdict()

    spec = federated_files.writers_spec(("", "_test"), num_writers)
    a = files.cached(f"glyphs_{num_writers}_{seed}_v{GLYPHS_VERSION}.npz", spec, draw)
    train, test = _pair(a["x"], a["y"]), _pair(a["x_test"], a["y_test"])
    writer, test_writer = a["writer"], a["writer_test"]
    if num_classes is None:
        return Samples(train, test, writer, test_writer)
    known = train[1] < num_classes
    tested = (test[1] < num_classes) & np.isin(test_writer, writer[known])
    train, test = _rows(train, known, "training", num_classes), _rows(test, tested, "test", num_classes)
    return Samples(train, test, writer[known], test_writer[tested])


def _mnist(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Handwritten digits: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1], 255 = ink; mean 0.1307, std 0.3081.

    `mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. With `by_writer()` also `mnist_writers.npz`
    beside it, `writer_train` [M]: 539 writers of 19 to 131 rows. The test images are other people's, so the test set is
    pooled. (LeCun, Cortes and Burges, "The MNIST database of handwritten digits"; the writers are of QMNIST: Yadav and
    Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019.)
    """
    samples = _images("mnist", (28, 28, 1), data_dir, (0.1307,), (0.3081,))
    if not natural:
        return samples
    y = samples.train[1]
    image_file = files.find(FILES["mnist"], files.folders(data_dir))
    if image_file is None:
        raise FileNotFoundError(
            "by_writer() needs mnist.npz in its official order, and mnist_writers.npz beside it: tensorflow-datasets "
            "shuffles the rows. Pass data_dir, the folder of both, or choose another partition"
        )
    writers = image_file.with_name("mnist_writers.npz")
    try:
        writer = files.read_npz(writers, {"writer_train": Column()})["writer_train"]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"by_writer() reads the writers of mnist from {writers}, which is not there: make it from QMNIST's "
            "extended labels (numpy.savez with writer_train, one id per training row), or choose another partition"
        ) from error
    if len(writer) != len(y):
        raise ValueError(
            f"{writers}: writer_train must have as many rows as {image_file}, {len(y)}, got {len(writer)}: "
            "the two belong row by row"
        )
    if len(y) == 60_000 and zlib.crc32(y.astype(np.uint8).tobytes()) != MNIST_ORDER:
        raise ValueError(
            f"{image_file}: by_writer() needs the rows in MNIST's official order, got another one: "
            "make the file from the original idx files"
        )
    return samples._replace(writer=writer)


def _fashion_mnist(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Zalando's articles: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1]; mean 0.2860, std 0.3530.

    `fashion_mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. (Xiao, Rasul and Vollgraf,
    arXiv 1708.07747.)
    """
    return _images("fashion_mnist", (28, 28, 1), data_dir, (0.2860,), (0.3530,))


def _emnist(
    data_dir: DataDir, seed: int, natural: bool, *, split: str = "letters", num_classes: int | None = None
) -> Samples:
    """Handwritten characters: uint8 [28, 28, 1], 255 = ink, upright; one mean and std, of the rows that are loaded.

    split: "letters" (26 classes, capital and small together, 124,800 + 20,800), "byclass" (62, 697,932 + 116,323),
    "balanced" (47, 112,800 + 18,800) or "digits" (10, 240,000 + 40,000). num_classes: only the first so many classes,
    in 1..all, the default; letters with 10 are FedDyn's and FedDC's EMNIST-L, 48,000 + 8,000.

    `emnist_SPLIT.npz`: x_train uint8 [M, 28, 28], upright, y_train [M], from 0, x_test, y_test; or NIST's own idx
    files, which are turned, and their letters counted from 0. Letters are not taken from tensorflow-datasets, which
    cuts them off after 88,800 training and 14,800 test rows. (Cohen et al., arXiv 1702.05373.)
    """
    wanted = num_classes or EMNIST[split]

    def ours(published: files.Arrays) -> files.Arrays:
        """Their images lie on their sides, and their letters count from 1."""
        turned = {key: np.ascontiguousarray(published[key].swapaxes(1, 2)) for key in ("x_train", "x_test")}
        first = 1 if split == "letters" else 0
        return turned | {key: published[key].astype(np.int32) - first for key in ("y_train", "y_test")}

    _, idx = _filenames("emnist", split=split)
    readers = {idx: lambda path: ours(image_files.read_idx_pairs(path))}
    train, test = _image_pairs(_published("emnist", split=split), EMNIST[split], (28, 28, 1), data_dir, readers, ours)
    train = _rows(train, train[1] < wanted, "training", wanted)
    test = _rows(test, test[1] < wanted, "test", wanted)
    mean, std = _mean_and_std(train[0])
    return Samples(train, test, mean=(mean,), std=(std,))


def _rows(pair: Pair, wanted: np.ndarray, part: str, num_classes: int) -> Pair:
    """The rows of the wanted classes. ValueError without any."""
    if not wanted.any():
        raise ValueError(f"num_classes must leave {part} rows, got {num_classes}, which leaves none: raise it")
    return pair[0][wanted], pair[1][wanted]


def _mean_and_std(x: np.ndarray) -> tuple[float, float]:
    """Of all pixels, scaled to [0, 1], by counting their 256 values, some thousand rows at a time."""
    counts = sum(np.bincount(x[i : i + 4096].ravel(), minlength=256) for i in range(0, len(x), 4096))
    weight, value = counts / np.sum(counts), np.arange(256) / 255
    mean = float(weight @ value)
    return mean, float(np.sqrt(weight @ (value - mean) ** 2))


def _cifar10(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Small photographs: 10 classes, 50,000 + 10,000 uint8 [32, 32, 3]; mean and std as in FedDC's authors' code.

    `cifar10.npz`: x_train uint8 [M, 32, 32, 3], y_train [M], x_test, y_test; or the authors' folder
    `cifar-10-batches-py`; or else `cifar10_jpeg.npz`, the same images as JPEG files (see
    `fedjax_drift.data.image_files.decode_jpegs`), decoded on the first use and kept in the cache. JPEG is lossy:
    accuracies come close to published ones, but are not comparable to the last percent. (Krizhevsky, "Learning Multiple
    Layers of Features from Tiny Images", 2009.)
    """

    def decoded(path: Path) -> files.Arrays:
        # Named by content, not cifar10.npz: lossy pixels must not pass for the original ones later.
        filename = f"{path.stem}_{files.fingerprint(path)}.npz"
        spec = _image_spec(10, (32, 32, 3))
        return files.cached(filename, spec, lambda: image_files.decode_jpegs(path, 10, 32))

    batches = [f"data_batch_{i}" for i in range(1, 6)]
    readers = {
        "cifar-10-batches-py": lambda path: image_files.read_cifar(path, batches, "test_batch", "labels"),
        "cifar10_jpeg.npz": decoded,
    }
    return _images("cifar10", (32, 32, 3), data_dir, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262), readers)


def _cifar100(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Small photographs: 100 (fine) classes, 50,000 + 10,000 uint8 [32, 32, 3]; mean and std as in FedDC's code.

    `cifar100.npz`: x_train uint8 [M, 32, 32, 3], y_train [M], x_test, y_test; or the authors' folder
    `cifar-100-python`. (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.)
    """
    readers = {"cifar-100-python": lambda path: image_files.read_cifar(path, ["train"], "test", "fine_labels")}
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    return _images("cifar100", (32, 32, 3), data_dir, mean, std, readers)


def _cinic10(data_dir: DataDir, seed: int, natural: bool, *, valid: bool = False) -> Samples:
    """CIFAR-10's classes from CIFAR-10 and ImageNet: 90,000 + 90,000 uint8 [32, 32, 3]; mean and std of its authors.

    valid: train on the 90,000 validation rows, too. Read from a folder `CINIC-10/{train,valid,test}/<class>/*.png`,
    decoded on the first use (half a minute) and kept in the cache. (Darlow et al., arXiv 1810.03505.)
    """
    folder = _folder("cinic10", data_dir)

    def part(name: str) -> Pair:
        listing = image_files.list_folders(folder / name, CIFAR10_CLASSES, "*.png")
        return _decoded(f"cinic10_{name}", listing, 32)

    train = part("train")
    if valid:
        x, y = (np.concatenate(columns) for columns in zip(train, part("valid"), strict=True))
        train = (x, y)
    mean, std = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
    return Samples(train, part("test"), mean=mean, std=std)


def _tiny_imagenet(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Photographs: 200 classes of ImageNet, 100,000 + 10,000 uint8 [64, 64, 3]; the usual mean and std.

    Read from the folder `tiny-imagenet-200` (train/<wnid>/images/*.JPEG; val/images with val/val_annotations.txt, the
    test set, as the test images have no labels; wnids.txt, whose sorted ids are the classes), decoded on the first use
    (half a minute) and kept in the cache. (Le and Yang, "Tiny ImageNet Visual Recognition Challenge", 2015.)
    """
    folder = _folder("tiny_imagenet", data_dir)
    try:
        train, valid = image_files.list_tiny_imagenet(folder)
        pairs = _decoded("tiny_imagenet_train", train, 64), _decoded("tiny_imagenet_val", valid, 64)
    except FileNotFoundError as error:
        raise _incomplete("tiny_imagenet", folder, error) from error
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return Samples(*pairs, mean=mean, std=std)


def _decoded(name: str, listing: image_files.Listing, side: int) -> Pair:
    """The listed images and their labels; the pixels are kept in the cache until a file changes."""
    paths, labels = listing
    spec = {"x": Column("uint8", (side, side, 3))}
    filename = f"{name}_{files.stamp(paths)}.npz"
    return _pair(files.cached(filename, spec, lambda: {"x": image_files.decode_files(paths, side)})["x"], labels)


def _femnist(data_dir: DataDir, seed: int, natural: bool, *, source: str = "auto") -> Samples:
    """Handwritten characters with their writers: 62 classes in LEAF's order, uint8 [28, 28, 1], no mean and std.

    source: "npz" (`femnist_writers.npz`: x uint8 [M, 28, 28], 255 = background as LEAF stores it, y [M], writer [M],
    integers), "leaf" (`leaf_femnist/{train,test}/*.json`), "fedjax" (`federated_emnist_{train,test}.sqlite`), "tff"
    (`fed_emnist_{train,test}.h5`), or "auto", the first of these that is there. All but npz are converted on the first
    use (a minute or two for LEAF's) and kept in the cache.

    The pixels are inverted, 255 = ink: zero padding in convolutions then means paper, as in mnist and glyphs. Where
    there is no test part, as with npz, about a fifth of each writer's rows, drawn with `seed`, at least one, are its
    test rows (a writer of a single row keeps it for training); where it has other writers (LEAF's -t user) it is
    pooled. (Caldas et al., LEAF, arXiv 1812.01097; images of NIST Special Database 19.)
    """
    names = _filenames("femnist", source=source)
    path = files.find(names, files.folders(data_dir))
    if path is None:
        raise _absent("femnist", names, data_dir, f"{GET['femnist']}. Or use glyphs, which needs no file")
    if path.name == FEMNIST["npz"]:
        spec = {"x": Column("uint8", (28, 28, 1)), "y": Column(classes=62), "writer": Column()}
        x, y, writer = files.read_npz(path, spec).values()
        return _hold_out(255 - x, y, writer, seed)
    try:
        a = federated_files.read_femnist(path)
    except FileNotFoundError as error:
        raise _incomplete("femnist", path, error) from error
    if "x_test" not in a:
        return _hold_out(a["x"], a["y"], a["writer"], seed)
    test_writer = a["writer_test"] if np.isin(a["writer_test"], a["writer"]).all() else None
    return Samples(_pair(a["x"], a["y"]), _pair(a["x_test"], a["y_test"]), a["writer"], test_writer)


def _hold_out(x: np.ndarray, y: np.ndarray, writer: np.ndarray, seed: int) -> Samples:
    """About a fifth of each writer's rows for testing, at least one but never its last."""
    shuffled = np.lexsort((np.random.default_rng(seed).random(len(y)), writer))
    _, start, sizes = np.unique(writer[shuffled], return_index=True, return_counts=True)
    test_size = np.minimum(np.maximum(1, np.rint(0.2 * sizes).astype(np.int64)), sizes - 1)
    is_test = np.arange(len(y)) < np.repeat(start + test_size, sizes)
    train, test = shuffled[~is_test], shuffled[is_test]
    return Samples(_pair(x[train], y[train]), _pair(x[test], y[test]), writer[train], writer[test])


def _movielens(
    data_dir: DataDir,
    seed: int,
    natural: bool,
    *,
    size: str = "1m",
    history: int = 30,
    negatives: int = 4,
    test_negatives: int = 99,
) -> Samples:
    """Click-through prediction: 2 classes, int16 [6 + history] ids of user, gender, age, occupation, zip code,
    candidate film and the `history` films that the user rated before it (0: none, or not known). One client per user.

    Every rating is a positive row (1), with `negatives` films the user never rated (0); each user's latest rating is in
    the test set, followed by `test_negatives` different ones, so that `fd.ranking` finds it first of its block. Films
    are drawn with `seed` from those that anybody rated. For `fd.models.din`.
    size: "1m", MovieLens 1M (`ml-1m/ratings.dat` and `users.dat` as GroupLens packs them; 6,040 users), or
        "latest-small" (`movielens_latest_small.npz`: user_id, movie_id, timestamp [R]; 610 users of whom nothing is
        known). (Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 2015; the protocol is
        FedEve's.)
    """
    ratings = movielens.read(files.folders(data_dir), size)
    return Samples(*movielens.leave_latest_out(ratings, history, negatives, test_negatives, seed))


def _agnews(data_dir: DataDir, seed: int, natural: bool, *, vocabulary: int = 20_000, length: int = 64) -> Samples:
    """News by topic: 4 classes, 120,000 + 7,600 texts (title and description), int32 [length] word numbers.

    0 is padding, 1 a word that is not among the `vocabulary` - 2 most frequent of the training texts; texts are cut at
    `length` words. `ag_news_csv/train.csv` and `test.csv`: lines "class 1 to 4","title","description". (Zhang, Zhao and
    LeCun, "Character-level Convolutional Networks for Text Classification", NeurIPS 2015.)
    """
    return Samples(*text.read(files.folders(data_dir), vocabulary, length))


def _bindingdb(data_dir: DataDir, seed: int, natural: bool, *, ligand: int = 100, protein: int = 1000) -> Samples:
    """Which ligand binds which protein: 2 classes (1: Kd < 30 nM, our reading), int8 [ligand + protein] characters.

    The first `ligand` characters of the SMILES and the first `protein` of the first chain's sequence, as 1..94 in
    ASCII's order, 0 being padding; one row a pair, 20 % of them, drawn with `seed`, for the test. Some minutes for all
    of `BindingDB_All.tsv`, of which lines without a Kd are passed over. (Liu et al., "BindingDB", Nucleic Acids
    Research 2007.)
    """
    return Samples(*bindingdb.read(files.folders(data_dir), ligand, protein, seed))


DATASETS: dict[str, Callable[..., Samples]] = {
    "synthetic": _synthetic,
    "glyphs": _glyphs,
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
    "emnist": _emnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "cinic10": _cinic10,
    "tiny_imagenet": _tiny_imagenet,
    "femnist": _femnist,
    "movielens": _movielens,
    "agnews": _agnews,
    "bindingdb": _bindingdb,
}
NAMES = tuple(DATASETS)
OPTIONS = {
    name: {key: p.default for key, p in inspect.signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for name, make in DATASETS.items()
}  # and their defaults


def num_classes(name: str, **options: Any) -> int:
    """How many classes a data set has with these options of `load`, which raises the same ValueErrors."""
    options = _checked(name, options)
    return options.get("num_classes") or _all_classes(name, options)


def _all_classes(name: str, options: Mapping[str, Any]) -> int:
    """How many classes a data set has before num_classes= leaves some out."""
    if name == "emnist":
        return EMNIST[options.get("split", "letters")]
    return VARIANTS[options.get("variant", "feddyn")][1] if name == "synthetic" else CLASSES[name]


def describe(data_dir: DataDir = None) -> list[dict[str, Any]]:
    """What can be loaded here, one dict per data set; opens no file.

    name; classes, with the default options; found: see `found`, likewise; available: bool; how: one line on how to get
    it. `data_dir` as in `load`. Raises ValueError for a `data_dir` that is no folder's path.
    """
    return [_describe(name, data_dir) for name in NAMES]


def found(name: str, data_dir: DataDir = None, **options: Any) -> str:
    """Where `load` with these arguments reads: a path, "made on the spot", "tensorflow-datasets" or "no" (nowhere).

    Opens no file. Raises ValueError as `load` does.
    """
    options, _ = _checked(name, options), files.folders(data_dir)
    if name not in FILES:
        return "made on the spot"
    path = files.find(_filenames(name, **options), files.folders(data_dir))
    if path is None and data_dir is None and (published := _published(name, **options)) in files.HOSTS:
        path = files.find((f"{_flat(published)}_tfds.npz",), [files.cache_dir()])
        if path is None and any((files.tfds_dir() / published).glob("*/dataset_info.json")):
            return "tensorflow-datasets"
    return "no" if path is None else str(path)


def _describe(name: str, data_dir: DataDir) -> dict[str, Any]:
    how = f'fd.datasets.load("{name}")'
    if name in FILES:
        how = f"put {' or '.join(FILES[name])} into data_dir"
        how += f": {GET[name]}" if name in GET else ""
        how += f", or, online: {_prepare(name)}" if data_dir is None and name in files.HOSTS else ""
    where = found(name, data_dir)
    return {"name": name, "classes": CLASSES[name], "found": where, "available": where != "no", "how": how}


def _filenames(
    name: str, *, split: str = "letters", source: str = "auto", size: str | None = None, **_: Any
) -> tuple[str, ...]:
    """The files or folders of which one must be there, with these options of `load`."""
    if size in movielens.FILENAMES:
        return (movielens.FILENAMES[size],)
    if name == "emnist":
        return tuple(file.replace("letters", split) for file in FILES[name])
    return FILES[name] if source == "auto" else (FEMNIST[source],)


def _published(name: str, *, split: str = "letters", **_: Any) -> str:
    """The data set's name at tensorflow-datasets."""
    return f"emnist/{split}" if name == "emnist" else name


Readers = Mapping[str, Callable[[Path], files.Arrays]]
"""What reads x_train, y_train, x_test, y_test from a file or folder of that name."""


def _images(
    name: str,
    row: tuple[int, ...],
    data_dir: DataDir,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    readers: Readers | None = None,
) -> Samples:
    train, test = _image_pairs(name, CLASSES[name], row, data_dir, readers or {})
    return Samples(train, test, mean=mean, std=std)


def _image_pairs(
    name: str,
    classes: int,
    row: tuple[int, ...],
    data_dir: DataDir,
    readers: Readers,
    of_tfds: Callable[[files.Arrays], files.Arrays] = lambda arrays: arrays,
) -> tuple[Pair, Pair]:
    """Training and test rows from NAME.npz, a file of `readers`, or tensorflow-datasets (`of_tfds` makes them ours)."""
    spec = _image_spec(classes, row)
    npz = f"{_flat(name)}.npz"
    path = files.find((npz, *readers), files.folders(data_dir))
    if path is None:
        a = _arrays_of_tfds(name, (npz, *readers), data_dir, spec, of_tfds)
    elif path.name == npz:
        a = files.read_npz(path, spec)
    else:
        try:
            a = files.check(readers[path.name](path), spec, path)
        except FileNotFoundError as error:
            raise _incomplete(name, path, error) from error
    return _pair(a["x_train"], a["y_train"]), _pair(a["x_test"], a["y_test"])


def _image_spec(classes: int, row: tuple[int, ...]) -> files.Spec:
    spec: dict[str, Column] = {}
    for split in ("train", "test"):
        spec[f"x_{split}"] = Column("uint8", row, split)
        spec[f"y_{split}"] = Column(table=split, classes=classes)
    return spec


def _arrays_of_tfds(
    name: str,
    filenames: tuple[str, ...],
    data_dir: DataDir,
    spec: files.Spec,
    ours: Callable[[files.Arrays], files.Arrays],
) -> files.Arrays:
    shape = ", ".join(str(length) for length in spec["x_train"].row if length > 1)
    by_hand = f'write it with numpy.savez("{filenames[0]}", x_train=..., y_train=..., x_test=..., y_test=...), uint8 '
    by_hand += f"[M, {shape}]"
    if (get := GET.get(name.partition("/")[0])) is not None:
        by_hand = f"{get}, or {by_hand}"
    if name not in files.HOSTS:
        raise _absent(name, filenames, data_dir, by_hand)
    if data_dir is not None:
        raise _absent(name, filenames, data_dir, f"{by_hand}, or leave data_dir out to use tensorflow-datasets")
    try:
        return files.cached(f"{_flat(name)}_tfds.npz", spec, lambda: ours(files.from_tfds(name)))
    except FileNotFoundError as error:
        online = f"on a machine with a network, {_prepare(name)}"
        fix = f"{by_hand}, or, {online} (tensorflow-datasets has none here: {error})"
        raise _absent(name, filenames, data_dir, fix) from error


def _flat(name: str) -> str:
    """emnist/letters, as tensorflow-datasets calls it, in a file's name."""
    return name.replace("/", "_")


def _prepare(name: str) -> str:
    name, _, split = name.partition("/")
    option = f", split='{split}'" if split else ""
    load = f"import fedjax_drift as fd; fd.datasets.load('{name}'{option})"
    return f'pip install "fedjax-drift[prepare]" && python -c "{load}"'


def _folder(name: str, data_dir: DataDir) -> Path:
    path = files.find(FILES[name], files.folders(data_dir))
    if path is None:
        raise _absent(name, FILES[name], data_dir, GET[name])
    return path


def _absent(name: str, filenames: tuple[str, ...], data_dir: DataDir, fix: str) -> FileNotFoundError:
    places = " or ".join(str(folder / file) for folder in files.folders(data_dir) for file in filenames)
    there = "put it there"
    if data_dir is None:
        there = "set FEDJAX_DRIFT_DATA to the folder that has it, or pass data_dir"
    return FileNotFoundError(f"{name} is read from {places}, which is not there: {there}. To get it, {fix}")


def _incomplete(name: str, path: Path, error: FileNotFoundError) -> FileNotFoundError:
    return FileNotFoundError(
        f"{name} is read from {path}, but a part of it is missing: {error}. Copy or unpack it again"
    )


def _pair(x: np.ndarray, y: np.ndarray) -> Pair:
    return x, y.astype(np.int32)
